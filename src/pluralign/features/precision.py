"""Half the bits where that is faster and says the same: which encoders multiply in bfloat16.

Decided here: what ``auto`` means, and that bfloat16 never ends a process of ours. A CPU may claim bfloat16 and die of
it (docs/performance.md), so it is tried in a child process first: ``python -m pluralign.features.precision``.
"""

import json
import logging
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.errors import UsageError
from pluralign.features.encoder import Encoder, ModelEncoder
from pluralign.features.options import Precision
from pluralign.votes.prompts import Item

MIN_SPEEDUP = 1.2
MIN_AGREEMENT = 0.999
"""At .999 a text has moved by a twentieth of its distance from the others; bfloat16 moves MiniLM's by a fiftieth."""
TRIAL_SECONDS = 300
TOKENS = 1024
"""What a core reads at once: see ``encoders.CORE_CHARACTERS``."""
ROUNDS = 7

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class Trial:
    """What was seen of bfloat16 before the child process ended."""

    works: bool = False
    speedup: float = 0.0
    """Seconds of a layer in float32 over those in bfloat16."""
    agreement: float = 0.0
    """Of the vectors of a few texts: see ``agreement``."""
    ended: str = ""
    """How the child process ended, unless it came to its end."""

    @property
    def objection(self) -> str:
        """Why ``auto`` is not bfloat16; empty where it is.

        Example:
            >>> Trial(works=True, speedup=0.6).objection
            'a layer of its shape is 0.60 × as fast in bfloat16, and 1.2 × is wanted'
        """
        if not self.works:
            return f"a bfloat16 product does not work here ({self.ended})"
        if self.ended:
            return f"the trial of bfloat16 ended early ({self.ended})"
        if not self.speedup >= MIN_SPEEDUP:
            return f"a layer of its shape is {self.speedup:.2f} × as fast in bfloat16, and {MIN_SPEEDUP} × is wanted"
        if not self.agreement >= MIN_AGREEMENT:  # not a number is no agreement
            return f"vectors in bfloat16 agree to {self.agreement:.4f}, and {MIN_AGREEMENT} is wanted"
        return ""


def in_precision(encoder: Encoder | None, asked: Precision) -> Encoder | None:
    """Return an encoder in the precision that is asked for; one without a model has no choice."""
    if not isinstance(encoder, ModelEncoder) or choose_precision(encoder, asked) == "float32":
        return encoder
    identity = f"{encoder.identity}/bfloat16"
    return TriedEncoder(encoder.folder, identity, encoder.layer, encoder.pooling, encoder.sha256, half=True)


def choose_precision(encoder: ModelEncoder, asked: Precision) -> Precision:
    """Return ``asked``, or for ``auto`` bfloat16 where it is clearly faster on this machine and the vectors agree."""
    if asked != "auto":
        return asked
    objection = try_bfloat16(encoder).objection
    if objection:
        logger.warning("texts are read in float32: %s.", objection)
    return "float32" if objection else "bfloat16"


class TriedEncoder(ModelEncoder):
    """An encoder in bfloat16 that refuses to read where this would end the process."""

    def load_model(self) -> Any:
        """Return its model, which multiplies nothing before a child process has."""
        model = super().load_model()
        if model.device.type == "cpu" and not (trial := try_bfloat16(self, only_a_product=True)).works:
            raise UsageError(
                f"this CPU cannot multiply in bfloat16 ({trial.ended}): use --precision float32 or auto; an ensemble "
                "that was fitted in bfloat16 needs another machine."
            )
        return model


@cache
def try_bfloat16(encoder: ModelEncoder, *, only_a_product: bool = False) -> Trial:
    """Return what a child process finds of bfloat16 on this machine: a product, its speed, then the encoder's vectors.

    Where an earlier part speaks against bfloat16 the later ones are left out, and no model is loaded.
    """
    dials = {"folder": str(encoder.folder.absolute()), "layer": encoder.layer, "pooling": encoder.pooling}
    task = {**dials, "shape": encoder.layer_shape, "only_a_product": only_a_product}
    command = [sys.executable, "-P", "-m", "pluralign.features.precision", json.dumps(task)]
    ended = ""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TRIAL_SECONDS)  # noqa: S603
        output = done.stdout
        if done.returncode < 0:
            ended = f"signal {signal.Signals(-done.returncode).name}"
        elif done.returncode:
            ended = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired as late:
        output, ended = late.stdout or b"", f"more than {TRIAL_SECONDS} seconds"
    except OSError as error:
        output, ended = b"", str(error)
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(b"{"):  # libraries may print, too
            found |= json.loads(line)
    return Trial(**found, ended=ended)


def agreement(exact: Vectors, half: Vectors) -> float:
    """Return the least cosine between the two vectors of a text, both taken from the mean of all texts.

    Members compare texts, and a decoder's vectors have most of their length in common: plain cosines see only that.

    Example:
        >>> same = np.array([[9, 1], [9, -1]], dtype=np.float32)
        >>> agreement(same, 2 * same - same.mean(axis=0)), agreement(same, same[::-1])
        (1.0, -1.0)
    """
    mean = exact.mean(axis=0)
    one, other = exact - mean, half - mean
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.min(np.sum(one * other, axis=1) / np.maximum(lengths, 1e-12)))


# --- in the child process -------------------------------------------------------------------------------------------


def findings(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield fields of a ``Trial``, each as soon as it is known: the next step may end the process."""
    import torch

    if torch.cuda.is_available():
        speedup = math.inf if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    else:
        width, inner = task["shape"]
        layers = [torch.nn.Linear(width, inner, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        _seconds(layers[1])
        yield {"works": True}
        if task["only_a_product"]:
            return
        speedup = statistics.median(_seconds(layers[0]) / _seconds(layers[1]) for _ in range(ROUNDS))
    yield {"works": True, "speedup": speedup}
    if speedup >= MIN_SPEEDUP:
        exact, half = (
            ModelEncoder(Path(task["folder"]), "", task["layer"], task["pooling"], half=half).encode(_texts())
            for half in (False, True)
        )
        yield {"agreement": agreement(exact, half)}


def _seconds(layer: Any) -> float:
    """Return how long one core takes to put a batch through a layer."""
    import torch

    torch.set_num_threads(1)
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    inputs = torch.ones(TOKENS, layer.in_features, dtype=layer.weight.dtype, device=device)
    with torch.inference_mode():
        layer.to(device)(inputs)
        started = time.perf_counter()
        float(layer(inputs)[0, 0])  # waits for the device
        return time.perf_counter() - started


def _texts() -> Sequence[Item]:
    """Return a few texts of different lengths."""
    from pluralign.votes.town_hall import town_hall

    votes = town_hall(24).preferences
    items = votes.items()
    return [
        (votes.prompts[p], votes.responses[r]) for p, r in zip(items.prompt_index, items.response_index, strict=True)
    ]


if __name__ == "__main__":
    for finding in findings(json.loads(sys.argv[1])):
        print(json.dumps(finding), flush=True)
