"""The Trainer of fine-tuned members: devices, first heads, optimisers, precision, arguments and checkpoints."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import two_camps, write_backbone

from pluralign.fitting.fit import fit
from pluralign.training.finetune.base import load_base
from pluralign.training.finetune.trainer import StepCallback
from pluralign.training.options import FinetuneOptions
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {
    "k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 8, "micro_batch": 4, "epochs": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    path = tmp_path_factory.mktemp("votes") / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(100))))
    return load_preferences(str(path))


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_trains_on_one_of_several_gpus_and_records_the_steps_it_took(
    tmp_path: Path, llama: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    arguments = transformers.TrainingArguments
    set_up, end, taken = arguments._setup_devices.func, StepCallback.on_step_end, []

    def with_four(self: Any) -> Any:
        device = set_up(self)
        self._n_gpu = 4
        return device

    def counts(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        taken.append((args.n_gpu, state.global_step))
        end(self, args, state, control, **rest)

    patched: Any = functools.cached_property(with_four)
    patched.__set_name__(arguments, "_setup_devices")
    monkeypatch.setattr(arguments, "_setup_devices", patched)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(StepCallback, "on_step_end", counts)
    record = fit(votes, folder=tmp_path / "town", backbone=str(llama), **QUICK).record
    assert record.tuning is not None
    assert record.data is not None
    pairs = record.data.train_pairs - record.data.train_prompts // 10
    assert taken == [(1, step) for step in range(1, round(pairs / 8) + 1)]
    assert record.tuning["steps"] == len(taken)
    assert record.notes is not None
    assert record.notes[-1] == (
        "training uses one GPU, and 3 more are not used; start it with accelerate launch --num_processes 4 "
        "-m pluralign fit … to use all of them"
    )


# --- first heads ------------------------------------------------------------------------------------------------------


def test_the_head_of_a_stagewise_member_starts_random_and_differs_between_members(llama: Path) -> None:
    base, tuning = load_base(str(llama), 1024, []), FinetuneOptions(backbone=str(llama))
    heads = [
        base.reward_model(1, tuning, np.random.SeedSequence(seed)).score.weight.detach().numpy() for seed in (0, 1)
    ]
    assert heads[0].shape == (1, 32)
    assert 0.01 < heads[0].std() < 0.04
    assert abs(np.corrcoef(heads[0][0], heads[1][0])[0, 1]) < 0.5
