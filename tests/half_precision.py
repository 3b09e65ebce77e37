"""Fine-tuning in bfloat16, for a child process without AMX: some CPUs report it and raise SIGILL.

``python tests/half_precision.py VOTES BACKBONE FOLDER`` prints one JSON object.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from pluralign import fit, load_preferences
from pluralign.learning.backbone.optimizer import Soap
from pluralign.learning.backbone.train import StepCallback
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.votes.preferences import texts_of

QUICK: dict[str, Any] = {
    "k": 2, "optimizer": "soap-one-sided", "learning_rate": 1e-2, "batch_size": 32, "epochs": 2,
    "precision": "bfloat16",
    "compare_frozen": False,
}  # fmt: skip
start, end = StepCallback.on_pre_optimizer_step, StepCallback.on_step_end
seen: dict[str, Any] = {}


def regression_loss() -> float:
    """Return the loss of a regression after 150 steps of SOAP, without noise in the gradients."""
    torch.manual_seed(0)
    weights, truth = torch.nn.Parameter(torch.zeros(6, 20, dtype=torch.bfloat16)), torch.randn(6, 20)
    inputs, method = torch.randn(200, 20) * torch.linspace(0.1, 3, 20), Soap([weights], lr=0.05)
    for _ in range(150):
        method.zero_grad()
        loss: Any = ((inputs @ (weights.float() - truth).T) ** 2).mean()
        loss.backward()
        method.step()
    return float(loss.item())


def look_at_gradients(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
    """Note the data types of the gradients."""
    seen["gradients"] = sorted({str(one.grad.dtype) for one in rest["model"].parameters()})
    start(self, args, state, control, **rest)


def look(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
    """Note the data types in memory, and interrupt the training before its last step if that is due."""
    held = [value for one in rest["optimizer"].state.values() for value in one.values()]
    tensors = [tensor for value in held for tensor in (value if isinstance(value, list) else [value])]
    seen["weights"] = {name: str(weights.dtype) for name, weights in rest["model"].named_parameters()}
    seen["states"] = sorted({str(one.dtype) for one in tensors if isinstance(one, torch.Tensor)})
    seen["autocast"] = args.bf16
    if state.global_step == seen["interrupt"]:
        raise KeyboardInterrupt
    end(self, args, state, control, **rest)


def main(data: str, backbone: str, folder: Path) -> dict[str, Any]:
    """Fit once without interruption and once with it, and score in both precisions."""
    votes = load_preferences(data)
    StepCallback.on_pre_optimizer_step = look_at_gradients  # type: ignore[method-assign]
    StepCallback.on_step_end = look  # type: ignore[method-assign]
    seen["interrupt"] = None
    ensemble = fit(votes, folder=folder / "whole", backbone=backbone, **QUICK)
    assert ensemble.record.tuning is not None
    seen["interrupt"] = ensemble.record.tuning["steps"]
    try:
        fit(votes, folder=folder / "parts", backbone=backbone, **QUICK)
    except KeyboardInterrupt:
        seen["interrupt"] = None
    fit(votes, folder=folder / "parts", backbone=backbone, **QUICK)
    whole, parts = (load_file(next((folder / name / "backbone").glob("*.safetensors"))) for name in ("whole", "parts"))
    features, texts = ensemble.features, texts_of(votes)
    assert isinstance(features, FinetunedFeatures)
    items, score = votes.items(), ensemble.members.rewards
    signs = [
        np.sign((rewards := score(replace(features, precision=precision)(texts)))[items.a] - rewards[items.b])
        for precision in ("bfloat16", "float32")
    ]
    assert ensemble.record.evaluation is not None
    return seen | {
        "regression": regression_loss(),
        "saved": {name: str(weights.dtype) for name, weights in whole.items()},
        "same": all(torch.equal(weights, parts[name]) for name, weights in whole.items()),
        "scored": features.precision,
        "recorded": ensemble.record.tuning["scoring_precision"],
        "outputs_differ": bool((features(texts) != replace(features, precision="float32")(texts)).any()),
        "changed_votes": float(np.mean(signs[0] != signs[1])),
        "brier": ensemble.record.evaluation.test.brier,
        "constant_half": ensemble.record.evaluation.baselines["constant_half"].brier,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
