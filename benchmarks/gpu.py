"""What no test on a CPU can check: ``make gpu`` runs it, and prints one block to paste into an issue.

    python benchmarks/gpu.py [--backbone smollm2] [--pairs 400] [--device cuda]

Each route trains two members on a town hall, in a process of its own: on the device, and on the CPU in float32 with the
same options. Its line has

- difference: mean |difference of the predicted shares| from the CPU's ensemble; above ``TOLERANCES`` the route fails;
- votes changed: share of the members' votes that differ when the trained model scores in bfloat16 instead of float32;
- memory: at its peak, beside the weights of the model in float32;
- of peak: 6 × parameters × tokens per second of training, over the speed of a large matrix product in bfloat16.

Routes with two processes run where there are two GPUs. ``--device cpu`` tests this script itself. vLLM is not run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROUTES: dict[str, dict[str, Any]] = {
    "AdamW, float32": {"optimizer": "adamw", "precision": "float32"},
    "SOAP, float32": {"optimizer": "soap", "precision": "float32"},
    "SOAP, bfloat16": {"optimizer": "soap-one-sided", "precision": "bfloat16"},
    "LoRA": {"optimizer": "adamw", "precision": "float32", "lora": True, "learning_rate": 2e-4},
}
LAUNCHES = {
    "AdamW, float32, DDP": ("AdamW, float32", "accelerate_ddp"),
    "AdamW, float32, FSDP": ("AdamW, float32", "accelerate_fsdp"),
}
TOLERANCES = {"float32": 0.03, "bfloat16": 0.06}
"""By the precision of training. On GPUs products are in bfloat16 in both."""
SETTINGS: dict[str, Any] = {"k": 2, "max_length": 256, "batch_size": 32, "epochs": 1, "compare_frozen": False}
CONFIGS = Path(__file__).parents[1] / "configs"
PRODUCT = 4096


def main() -> None:
    """Run every route and print the block; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--routes", nargs="+", choices=[*ROUTES, *LAUNCHES], help="default: all that fit the machine")
    parser.add_argument("--route", help=argparse.SUPPRESS)  # in a child: the route, and the folder of its results
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.route:
        run(arguments)
        return
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu tests the script itself.")
    several = arguments.device == "cuda" and torch.cuda.device_count() > 1
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"device: {name} · torch {torch.__version__} · {arguments.backbone} · {arguments.pairs} pairs")
    failed = False
    for route in arguments.routes or [*ROUTES, *(LAUNCHES if several else ())]:
        own, config = LAUNCHES.get(route, (route, ""))
        with tempfile.TemporaryDirectory() as folder:
            here = child(arguments, own, Path(folder) / "here", config)
            reference = child(arguments, own, Path(folder) / "cpu", "", cpu=True)
        difference = float(np.abs(np.subtract(here["shares"], reference["shares"])).mean())
        passed = difference <= TOLERANCES[ROUTES[own]["precision"]]
        failed |= not passed
        print(
            f"{'pass' if passed else 'FAIL'} · {route}: difference {difference:.4f} · votes changed "
            f"{here['changed']:.1%} · memory {here['memory'] / 1e9:.1f} GB (weights {4 * here['parameters'] / 1e9:.1f})"
            f" · {here['tokens'] / here['seconds']:,.0f} tokens/s · {here['of_peak']:.1%} of peak",
            flush=True,
        )
    if arguments.device == "cuda" and not several:
        print("not run: DDP and FSDP, which need two GPUs")
    sys.exit(failed)


def child(arguments: argparse.Namespace, route: str, folder: Path, config: str, *, cpu: bool = False) -> dict[str, Any]:
    """Train a route in a process of its own, or in two with an accelerate configuration; return its results."""
    folder.mkdir()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu or arguments.device == "cpu" else {}
    start = [sys.executable]
    if config:
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
        start += [*launch, "--num_processes", "2"]
    own = ["--backbone", arguments.backbone, "--pairs", str(arguments.pairs), "--route", route, "--folder", str(folder)]
    device = ["--device", "cpu" if hidden else "cuda"]
    subprocess.run([*start, __file__, *own, *device], check=True, env=os.environ | hidden, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def run(arguments: argparse.Namespace) -> None:
    """Train one route and write its results. On a CPU without a GPU this is the reference, in float32."""
    import torch

    import pluralign
    from pluralign.core.processes import this_process
    from pluralign.learning.backbone.base import load_base
    from pluralign.learning.options import FinetuneOptions
    from pluralign.votes.preferences import texts_of

    votes, cuda = pluralign.town_hall(arguments.pairs).preferences, arguments.device == "cuda"
    precision = {} if cuda else {"precision": "float32"}
    folder = arguments.folder / "ensemble"
    ensemble = pluralign.fit(
        votes, folder=folder, backbone=arguments.backbone, **SETTINGS, **ROUTES[arguments.route] | precision
    )
    if not this_process().first:
        return
    texts = texts_of(votes)
    base = load_base(arguments.backbone, SETTINGS["max_length"], texts)
    model = base.reward_model(1, FinetuneOptions(), np.random.SeedSequence(0))
    parameters, tokens = model.num_parameters(), sum(len(text["input_ids"]) for text in base.tokens(texts)[0])
    seconds = sum(ensemble.record.seconds_members or [])
    found = {
        "shares": ensemble.prob_hat(votes, "policy").tolist(),
        "changed": changed_votes(ensemble, votes) if cuda else 0.0,
        "memory": torch.cuda.max_memory_allocated() if cuda else 0,
        "parameters": parameters,
        "tokens": tokens,
        "seconds": seconds,
        "of_peak": 6 * parameters * tokens / seconds / speed(torch.device(arguments.device)),
    }
    (arguments.folder / "found.json").write_text(json.dumps(found))


def changed_votes(ensemble: Any, votes: Any) -> float:
    """Return the share of votes that differ between scoring in bfloat16 and in float32."""
    from dataclasses import replace

    by_precision = []
    for precision in ("bfloat16", "float32"):
        features = replace(ensemble.features, precision=precision)
        by_precision.append(replace(ensemble, features=features).votes(votes))
    return float((by_precision[0] != by_precision[1]).mean())


def speed(device: Any) -> float:
    """Return floating-point operations per second of a large matrix product in bfloat16 (float32 on CPUs)."""
    import torch

    cuda = device.type == "cuda"
    a = torch.ones(PRODUCT if cuda else 512, PRODUCT if cuda else 512, device=device)
    a, times = a.bfloat16() if cuda else a, []
    for _ in range(5):
        started = time.perf_counter()
        (a @ a).sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
    return 2 * len(a) ** 3 / min(times)


if __name__ == "__main__":
    main()
