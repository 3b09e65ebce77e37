"""The Trainer of fine-tuned members: devices, optimisers, precision, arguments, checkpoints and trackers."""

import functools
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import run, run_process
from tiny import camp_votes

from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import UsageError
from pluralign.core.processes import ALONE, Processes
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning.backbone import recipe
from pluralign.learning.backbone import train as trainer
from pluralign.learning.backbone.losses import RunningFigures, StageLoss
from pluralign.learning.backbone.recipe import TextPairs
from pluralign.learning.backbone.train import COMPLETE_FILE, PairTrainer, StepCallback, Training, prepare_run
from pluralign.learning.fit import fit
from pluralign.learning.options import FinetuneOptions
from pluralign.learning.tuned import decisive_tuning
from pluralign.text import loading
from pluralign.text.finetuned import FinetunedFeatures, load_finetuned
from pluralign.votes.preferences import PreferenceSet

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {
    "k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 8, "epochs": 1, "compare_frozen": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    return camp_votes(tmp_path_factory.mktemp("votes"), 100)


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
    record: Any = fit(votes, folder=tmp_path / "town", backbone=str(llama), **QUICK).record
    pairs = record.data.train_pairs - record.data.train_prompts // 10
    assert taken == [(1, step) for step in range(1, round(pairs / 8) + 1)]
    assert record.tuning["steps"] == len(taken)
    assert "3 more are not used; start it with accelerate launch --num_processes 4" in record.notes[-1]


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_trains_scores_and_resumes_with_a_float32_head(tmp_path: Path, llama: Path) -> None:
    camp_votes(tmp_path, 200)
    data = tmp_path / "camps.jsonl"
    script = Path(__file__).with_name("half_precision.py")
    environment = {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PLURALIGN_CACHE": str(tmp_path / "cache"), "PLURALIGN_CHECKPOINT_SECONDS": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), str(data), str(llama), str(tmp_path)],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for held in ("weights", "saved"):
        dtypes = seen[held]
        assert dtypes.pop("score.weight") == "torch.float32", "the head"
        assert set(dtypes.values()) == {"torch.bfloat16"}, "the body"
    assert seen["gradients"] == seen["states"] == ["torch.bfloat16", "torch.float32"]
    assert not seen["autocast"]
    assert seen["same"], "a resumed training gives the same weights"
    assert seen["scored"] == seen["recorded"] == "bfloat16"
    assert seen["outputs_differ"], "the vector cache keeps the precisions apart"
    assert seen["changed_votes"] <= 0.05
    assert seen["brier"] < 0.5 * seen["constant_half"]
    assert seen["regression"] < 0.1, "moments in bfloat16 do not blow up the steps of SOAP"


FEATURES = FinetunedFeatures("base", "joint", lora=False, outputs=3, max_length=64, identity=("0a1b",))


def test_the_vector_cache_has_a_key_per_precision() -> None:
    half = replace(FEATURES, precision="bfloat16")
    assert FinetunedFeatures.from_json(half.to_json(), Path()) == half
    keys = [part.identity for features in (FEATURES, half) for part in features.parts()]
    assert [key.split()[:2] for key in keys] == [["0a1b", "float32"], ["0a1b", "bfloat16"]]


def test_a_gpu_scores_in_bfloat16_and_trains_in_it_only_if_asked(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = FinetuneOptions(backbone=str(llama), optimizer="adamw")
    for gpu, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(recipe, "gpu_has_bfloat16", lambda gpu=gpu: gpu)
        made = recipe.training_plan(100, tuning, 0, 1)
        assert (made.scoring, made.autocast, made.bf16_body) == (expected, gpu, False)
        assert made.arguments(tmp_path, 4, "run").bf16 == gpu
        assert recipe.choose_precision("auto") == expected
        assert recipe.choose_precision("float32") == "float32"
        half = recipe.training_plan(100, tuning, 0, 1, "bfloat16")
        assert (half.scoring, half.autocast, half.bf16_body) == ("bfloat16", False, True)
        adapters = recipe.training_plan(100, replace(tuning, lora=True), 0, 1)
        assert adapters.bf16_body == gpu, "weights that are not trained"


def test_bfloat16_on_a_cpu_that_raises_sigill_is_a_usage_error(
    llama: Path, tmp_path: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PRODUCT", "import os; os.kill(os.getpid(), 4)")
    loading.check_cpu_bfloat16.cache_clear()
    sentence = r"this CPU cannot multiply in bfloat16 .*: use --precision float32"
    with pytest.raises(UsageError, match=sentence):
        fit(votes, folder=tmp_path, backbone=str(llama), precision="bfloat16")
    with pytest.raises(UsageError, match=sentence):
        load_finetuned(llama, FEATURES, "bfloat16")


def test_fsdp_with_bfloat16_weights_or_soap_is_a_usage_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    tuning = FinetuneOptions(backbone=str(llama), optimizer="adamw")
    with pytest.raises(UsageError, match=r"FSDP needs weights of one precision.*use --precision float32"):
        recipe.training_plan(100, tuning, 0, 2, "bfloat16")
    monkeypatch.setattr(recipe, "gpu_has_bfloat16", lambda: True)
    assert recipe.choose_precision("auto") == "float32"
    for optimizer in ("soap", "soap-one-sided"):
        with pytest.raises(UsageError, match=r"SOAP needs whole matrices.*use --optimizer adamw"):
            recipe.training_plan(100, replace(tuning, optimizer=optimizer), 0, 2)


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fsdp_gives_the_same_ensemble_as_one_process_even_after_an_interruption(
    tmp_path: Path, llama: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    camp_votes(tmp_path, 100)
    data = tmp_path / "camps.jsonl"
    options: dict[str, Any] = {
        "k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 16,
    }  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags.append("--no-compare-frozen")
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", "0")
    script = str(Path(__file__).with_name("fsdp_on_cpu.py"))
    sharded = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "3",
         "fit", str(data), "-o", str(tmp_path / "two"), "--backbone", str(llama), "--json", *flags],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert sharded.returncode == 0, sharded.stderr
    assert json.loads(sharded.stdout)["processes"] == 2
    one = fit(votes, folder=tmp_path / "one", backbone=str(llama), compare_frozen=False, **options)
    two = RewardEnsemble.load(tmp_path / "two")
    texts = [("so ?", "tea yes"), ("so ?", "no rum well")]
    np.testing.assert_allclose(two.features(texts), one.features(texts), atol=2e-3)  # rounding grows over the steps
    np.testing.assert_allclose(two.prob_hat(votes, "policy"), one.prob_hat(votes, "policy"), atol=1e-2)


# --- what the Trainer gets --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, llama: Path, votes: PreferenceSet) -> dict[str, Any]:
    """What the Trainer got and did for a stagewise member with the paper's recipe."""
    seen: dict[str, Any] = {"rates": [], "saves": 0}
    end = StepCallback.on_step_end

    def look(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        names = {weights: name for name, weights in rest["model"].named_parameters()}
        optimizer = rest["optimizer"].optimizer
        seen["arguments"], seen["dtypes"] = args, {str(weights.dtype) for weights in names}
        seen["rates"].append(rest["lr_scheduler"].get_last_lr())
        seen["groups"] = [
            {**group, "params": [names[weights] for weights in group["params"]]} for group in optimizer.param_groups
        ]
        if state.global_step == 2:
            seen["bases"] = {names[weights]: one["Q"] for weights, one in optimizer.state.items()}
        end(self, args, state, control, **rest)
        seen["saves"] += control.should_save

    options: dict[str, Any] = {"k": 1, "method": "stagewise", "variant": "printed", "batch_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCallback, "on_step_end", look)
        fit(
            votes, folder=tmp_path_factory.mktemp("watched") / "town", backbone=str(llama), fresh_head=True,
            gradient_checkpointing=True, **options,
        )  # fmt: skip
    return seen


@pytest.mark.slow
def test_rates_rise_over_three_percent_of_the_steps_and_fall_as_a_cosine(watched: dict[str, Any]) -> None:
    steps = len(watched["rates"])
    body = min(group["initial_lr"] for group in watched["groups"])
    assert body == 2e-5
    warm_up = math.ceil(0.03 * steps)
    assert warm_up > 1
    done = np.arange(1, steps + 1)
    cosine = 0.5 * (1 + np.cos(np.pi * (done - warm_up) / (steps - warm_up)))
    expected = np.where(done <= warm_up, done / warm_up, cosine)
    for position, group in enumerate(watched["groups"]):
        rates = [rates[position] for rates in watched["rates"]]
        np.testing.assert_allclose(rates, expected * group["initial_lr"], atol=1e-12)


@pytest.mark.slow
def test_the_head_learns_ten_times_as_fast_and_norms_have_no_weight_decay(watched: dict[str, Any]) -> None:
    groups = {
        (round(group["initial_lr"] / 2e-5), group["weight_decay"]): group["params"] for group in watched["groups"]
    }
    assert set(groups) == {(1, 0.1), (1, 0.0), (10, 0.1)}
    assert groups[10, 0.1] == ["score.weight"]
    assert all(name.endswith("norm.weight") for name in groups[1, 0.0])
    assert len(groups[1, 0.0]) == 5
    assert not any("norm" in name for name in groups[1, 0.1])


@pytest.mark.slow
def test_arguments_of_the_trainer(watched: dict[str, Any]) -> None:
    arguments = watched["arguments"]
    expected = {
        "max_grad_norm": 1.0, "gradient_checkpointing": True, "bf16": False, "fp16": False, "save_strategy": "no",
        "num_train_epochs": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert watched["dtypes"] == {"torch.float32"}
    assert watched["saves"] == 0, "a training of seconds has no checkpoint"


@pytest.mark.slow
def test_soap_takes_its_bases_from_gradients_and_not_from_zeros(watched: dict[str, Any]) -> None:
    bases = {name: basis for name, basis in watched["bases"].items() if name.endswith("_proj.weight")}
    assert len(bases) == 14
    torch = importlib.import_module("torch")
    for name, sides in bases.items():
        for basis in sides:
            assert not torch.allclose(basis.abs(), torch.eye(len(basis)), atol=0.1), name


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Clocked:
    """A training of 100 steps whose clock is set by the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes = ALONE) -> None:
        self.now, self.step, self.folder = 0.0, 0, folder
        monkeypatch.setattr(trainer, "monotonic", lambda: self.now)
        self.callback = StepCallback(RunningFigures(), None, processes)
        self.control, self.args = SimpleNamespace(should_save=False), SimpleNamespace(output_dir=str(folder))
        monkeypatch.setattr(self.callback.running, "end_step", lambda _: None)
        self.callback.on_train_begin(None, None, None)

    def steps_at(self, second: float, save_takes: float = 0.0) -> bool:
        """End a step at this time, save if a checkpoint is due, and return whether it was."""
        self.now, self.step, self.control.should_save = second, self.step + 1, False
        state = SimpleNamespace(global_step=self.step, max_steps=100)
        self.callback.on_step_end(self.args, state, self.control)
        if self.control.should_save:
            (self.folder / f"checkpoint-{self.step}").mkdir()
            self.now += save_takes
            self.callback.on_save(self.args, state, self.control)
        return bool(self.control.should_save)


def test_checkpoints_are_saved_by_time_and_slow_ones_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Clocked(tmp_path, monkeypatch)
    assert not training.steps_at(599)
    assert training.steps_at(600, save_takes=60)
    assert not training.steps_at(660 + 1199)
    assert training.steps_at(660 + 1200, save_takes=1)
    assert not training.steps_at(1861 + 599)
    assert training.steps_at(1861 + 600)
    training.step = 99
    assert not training.steps_at(10_000), "after the last step the model itself is saved"


def test_only_the_newest_complete_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", "0")
    training, complete = Clocked(tmp_path, monkeypatch), []
    remove = shutil.rmtree

    def removes(path: Path, **options: Any) -> None:
        complete.append((tmp_path / f"checkpoint-{training.step}" / COMPLETE_FILE).is_file())
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", removes)
    for second in (0, 2000, 4000):
        assert training.steps_at(second, save_takes=1000)
        assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{training.step}"]
    assert complete == [True, True], "an old checkpoint is removed when the new one is complete"


def test_the_first_of_several_processes_decides_on_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "agreed", lambda *_: True)  # as broadcast by the first
    monkeypatch.setattr(Processes, "wait", lambda _: None)
    training = Clocked(tmp_path, monkeypatch, Processes(2, rank=1))
    assert training.steps_at(1)
    assert not (tmp_path / "checkpoint-1" / COMPLETE_FILE).exists()


@pytest.mark.parametrize("value", ["often", "-1", "nan", ""])
def test_an_invalid_checkpoint_interval_is_a_usage_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", value)
    with pytest.raises(UsageError, match=r"PLURALIGN_CHECKPOINT_SECONDS must be a number of seconds, 0 or more, not"):
        trainer.checkpoint_seconds()


# --- experiment trackers ------


ONE_PAIR = TextPairs(
    [("so ?", "yes"), ("so ?", "no")],
    np.zeros(1, np.int32), np.ones(1, np.int32), np.array([0.5]), np.zeros(1, np.int32),
)  # fmt: skip


def make_trainer(folder: Path, llama: Path, **changes: Any) -> PairTrainer:
    tuning = FinetuneOptions(backbone=str(llama), batch_size=8, optimizer="adamw", **changes)
    run = prepare_run(ONE_PAIR, recipe.training_plan(1, tuning, 0, 1), Checkpoints(folder / "town", {}))
    labels = {"prob_a": ONE_PAIR.prob_a, "target": ONE_PAIR.prob_a, "weight": np.ones(1)}
    training = Training("member-0", 1, StageLoss(1.0), labels, lambda: np.zeros((1, 32)))
    return run.trainer(training, folder / "training-member-0", None)


def test_no_tracker_gets_anything_by_default(tmp_path: Path, llama: Path) -> None:
    arguments = make_trainer(tmp_path, llama).args
    assert arguments.report_to == []
    assert arguments.logging_strategy == "no"


def test_trackers_and_the_name_of_the_run_are_passed_to_the_trainer(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package called wandb stands for the real one, so that the Trainer adds its callback."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text("run = None\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    utils = importlib.import_module("transformers.integrations.integration_utils")
    monkeypatch.setattr(utils, "is_wandb_available", lambda: True)
    recipe.check_trackers(FinetuneOptions(backbone="x", report_to="wandb"))
    made = make_trainer(tmp_path, llama, report_to="wandb")
    assert (made.args.report_to, made.args.run_name) == (["wandb"], "town-member-0")
    assert (made.args.logging_strategy, made.args.logging_steps) == ("steps", 1)
    kinds = [type(callback).__name__ for callback in made.callback_handler.callbacks]
    assert "WandbCallback" in kinds
    assert "PrinterCallback" not in kinds
    sys.modules.pop("wandb")


def test_an_uninstalled_tracker_is_one_sentence_before_training(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    camp_votes(tmp_path, 40)
    votes = tmp_path / "camps.jsonl"
    done = run("fit", votes, "-o", tmp_path / "out", "--backbone", llama, "--report-to", "trackio")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pluralign: --report-to trackio needs the package trackio: run  pip install trackio.\n"
    assert not (tmp_path / "out").exists()


def test_stdout_is_for_results_with_trackers_too(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: transformers prints when it is imported, and a tracker may print at any time."""
    (tmp_path / "trackio.py").write_text("print('hello from the tracker')\nraise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    camp_votes(tmp_path, 40)
    votes = tmp_path / "camps.jsonl"
    done = run_process("fit", votes, "-o", tmp_path / "out", "--backbone", llama, "--report-to", "trackio")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hello from the tracker" in done.stderr


def test_trackers_do_not_decide_a_fit() -> None:
    """A killed run resumes with other trackers."""
    plain, tracked = FinetuneOptions(backbone="x"), FinetuneOptions(backbone="x", report_to="wandb")
    assert decisive_tuning(plain) == decisive_tuning(tracked)
