"""Precision of encoders: bfloat16 halves the memory traffic where the machine supports it.

Decided here: what ``auto`` means, and that bfloat16 never ends this process. A CPU may report bfloat16 support and
still raise SIGILL (docs/explanation/performance.md), so a child process tries bfloat16 first:
``python -m pluralign.text.precision``.
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
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.arrays import Vectors
from pluralign.core.errors import UsageError
from pluralign.text.encoders import Encoder
from pluralign.text.options import Pooling, Precision
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.prompts import Item

MIN_SPEEDUP = 1.2
MIN_AGREEMENT = 0.999
"""At .999 a text has moved by a twentieth of its distance from the others; bfloat16 moves MiniLM's by a fiftieth."""
TRIAL_SECONDS = 300
TOKENS = 1024
"""Tokens per batch of one core: see ``cores.CORE_CHARACTERS``."""
ROUNDS = 7

logger = logging.getLogger("pluralign")


@dataclass(frozen=True)
class Trial:
    """Results of a trial of bfloat16, as far as the child process got."""

    works: bool = False
    """Whether a bfloat16 product succeeded."""
    speedup: float = 0.0
    """Seconds of a layer in float32 over those in bfloat16."""
    agreement: float = 0.0
    """Agreement of the vectors of a few texts: see ``agreement``."""
    failure: str = ""
    """Why the child process ended early; empty if it finished."""

    @property
    def reason_against(self) -> str:
        """Why ``auto`` does not choose bfloat16; empty if it does.

        Example:
            >>> Trial(works=True, speedup=0.6).reason_against
            'a layer of this shape is 0.60 × as fast in bfloat16 as in float32, below 1.2 ×'
        """
        if not self.works:
            return f"bfloat16 does not work on this machine ({self.failure})"
        if self.failure:
            return f"the trial of bfloat16 ended early ({self.failure})"
        if not self.speedup >= MIN_SPEEDUP:
            return (
                f"a layer of this shape is {self.speedup:.2f} × as fast in bfloat16 as in float32, "
                f"below {MIN_SPEEDUP} ×"
            )
        if not self.agreement >= MIN_AGREEMENT:  # also for NaN
            return f"the agreement of bfloat16 vectors is {self.agreement:.4f}, below {MIN_AGREEMENT}"
        return ""


def in_precision(encoder: Encoder | None, requested: Precision) -> Encoder | None:
    """Return an encoder in the requested precision. Encoders without a model are always in float32."""
    if not isinstance(encoder, ModelEncoder) or choose_precision(encoder, requested) == "float32":
        return encoder
    identity = f"{encoder.identity}/bfloat16"
    return Bfloat16Encoder(encoder.folder, identity, encoder.layers, encoder.pooling, encoder.sha256, half=True)


def choose_precision(encoder: ModelEncoder, requested: Precision) -> Precision:
    """Return the requested precision. ``auto`` becomes bfloat16 if it is clearly faster here and the vectors agree."""
    if requested != "auto":
        return requested
    reason = try_bfloat16(encoder).reason_against
    if reason:
        logger.warning("texts are encoded in float32: %s.", reason)
    return "float32" if reason else "bfloat16"


class Bfloat16Encoder(ModelEncoder):
    """An encoder in bfloat16. It raises UsageError on a CPU where bfloat16 would end the process."""

    def load_model(self) -> Any:
        """Load the model, after a child process has tried a bfloat16 product."""
        model = super().load_model()
        if model.device.type == "cpu":
            _refuse_failure(try_bfloat16(self, product_only=True))
        return model


def check_cpu_bfloat16(shape: tuple[int, int]) -> None:
    """Raise UsageError if bfloat16 would end the process on this CPU.

    Args:
        shape: hidden size and intermediate size of a layer.
    """
    _refuse_failure(_try_product(shape))


@cache
def _try_product(shape: tuple[int, int]) -> Trial:
    return _in_child(TrialTask("", (), "mean", shape, product_only=True))


def _refuse_failure(trial: Trial) -> None:
    if not trial.works:
        raise UsageError(
            f"this CPU cannot multiply in bfloat16 ({trial.failure}): use --precision float32 or auto; an ensemble "
            "that was fitted in bfloat16 needs another machine."
        )


@dataclass(frozen=True)
class TrialTask:
    """Input of the child process."""

    folder: str
    layers: tuple[int, ...]
    pooling: Pooling
    shape: tuple[int, int]
    """Hidden size and intermediate size of a layer."""
    product_only: bool = False
    """Whether to try a single product and nothing else."""


@cache
def try_bfloat16(encoder: ModelEncoder, *, product_only: bool = False) -> Trial:
    """Try bfloat16 on this machine in a child process: a product, then its speed, then the encoder's vectors.

    The trial stops at the first result that rules bfloat16 out, so a model is loaded only if it is needed.
    """
    folder = str(encoder.folder.absolute())
    return _in_child(TrialTask(folder, encoder.layers, encoder.pooling, encoder.layer_shape, product_only))


def _in_child(task: TrialTask) -> Trial:
    """Run a trial in a child process, which may end early."""
    command = [sys.executable, "-P", "-m", "pluralign.text.precision", json.dumps(asdict(task))]
    failure = ""
    try:
        child = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TRIAL_SECONDS)  # noqa: S603
        output = child.stdout
        if child.returncode < 0:
            failure = f"signal {signal.Signals(-child.returncode).name}"
        elif child.returncode:
            failure = (child.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired as timeout:
        output, failure = timeout.stdout or b"", f"more than {TRIAL_SECONDS} seconds"
    except OSError as error:
        output, failure = b"", str(error)
    results: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(b"{"):  # libraries may print as well
            results |= json.loads(line)
    return Trial(**results | {"failure": failure})


def agreement(exact: Vectors, half: Vectors) -> float:
    """Return the smallest cosine between the two vectors of a text, both centred on the mean of all texts.

    Members compare texts. Vectors of a decoder share most of their length, so plain cosines would see only that.

    Example:
        >>> same = np.array([[9, 1], [9, -1]], dtype=np.float32)
        >>> agreement(same, 2 * same - same.mean(axis=0)), agreement(same, same[::-1])
        (1.0, -1.0)
    """
    mean = exact.mean(axis=0)
    one, other = exact - mean, half - mean
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.min(np.sum(one * other, axis=1) / np.maximum(lengths, 1e-12)))


# --- in the child process ---------------------------------------------------------------------------------------------


def run_trial(task: TrialTask) -> Iterator[Trial]:
    """Yield the trial after each step, because the next step may end the process."""
    import torch

    if torch.cuda.is_available():
        speedup = math.inf if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    else:
        width, inner = task.shape
        layers = [torch.nn.Linear(width, inner, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        _seconds(layers[1])
        yield Trial(works=True)
        if task.product_only:
            return
        speedup = statistics.median(_seconds(layers[0]) / _seconds(layers[1]) for _ in range(ROUNDS))
    yield Trial(works=True, speedup=speedup)
    if speedup >= MIN_SPEEDUP:
        exact, half = (
            ModelEncoder(Path(task.folder), "", tuple(task.layers), task.pooling, half=half).encode(_texts())
            for half in (False, True)
        )
        yield Trial(works=True, speedup=speedup, agreement=agreement(exact, half))


def _seconds(layer: Any) -> float:
    """Return the time that one batch takes in a layer."""
    import torch

    device = "mps" if torch.backends.mps.is_available() else "cpu"
    inputs = torch.ones(TOKENS, layer.in_features, dtype=layer.weight.dtype, device=device)
    with torch.inference_mode():
        layer.to(device)(inputs)
        started = time.perf_counter()
        float(layer(inputs)[0, 0])  # waits for the device
        return time.perf_counter() - started


def _texts() -> Sequence[Item]:
    """Return a few texts of different lengths."""
    from pluralign.votes.preferences import texts_of
    from pluralign.votes.town_hall.town_hall import town_hall

    return texts_of(town_hall(24).preferences)


def _main() -> None:
    import torch

    torch.set_num_threads(1)  # each core encodes by itself; this process does nothing else
    for trial in run_trial(TrialTask(**json.loads(sys.argv[1]))):
        print(json.dumps(asdict(trial)), flush=True)


if __name__ == "__main__":
    _main()
