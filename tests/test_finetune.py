"""Fine-tuning: quality on votes of two known groups, resuming, full disks, little memory, and what the Trainer gets."""

import errno
import functools
import importlib
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, kill_a_worker, launch, run, run_process
from safetensors.numpy import load_file
from tiny import camp_votes, two_camps, write_backbone, write_sentence_encoder

from pluralign import (
    DataError,
    FinetuneOptions,
    FitOptions,
    RewardEnsemble,
    UsageError,
    evaluate,
    export,
    fit,
    load_preferences,
)
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.processes import ALONE, Processes
from pluralign.learning.backbone import recipe, train
from pluralign.learning.backbone.base import base_states, load_base
from pluralign.learning.backbone.losses import PairLessons, RunningFigures, StageLoss, VoteLoss
from pluralign.learning.backbone.recipe import TextPairs
from pluralign.learning.backbone.train import (
    COMPLETE_FILE,
    FinetuneRun,
    PairTrainer,
    StepCallback,
    Training,
    prepare_run,
)
from pluralign.learning.task import FitWatcher, decisive_options
from pluralign.text import loading
from pluralign.text.classifier import classifier_rewards, model_rewards
from pluralign.text.finetuned import FinetunedFeatures, load_finetuned
from pluralign.votes.preferences import PreferenceSet, texts_of

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {
    "k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 64, "epochs": 4, "compare_frozen": False,
}  # fmt: skip
STAGES = {**QUICK, "method": "stagewise", "compare_frozen": True}
TEXTS = [("so ?", "tea yes"), ("so ?", "no rum well")]
ONE_PAIR = TextPairs(
    [("so ?", "yes"), ("so ?", "no")],
    np.zeros(1, np.int32), np.ones(1, np.int32), np.array([0.5]), np.zeros(1, np.int32),
)  # fmt: skip


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    return camp_votes(tmp_path_factory.mktemp("votes"), 100)


@pytest.fixture
def checkpoint_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", "0")


# --- quality and losses -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fresh_head", [False, True])
def test_joint_members_learn_both_groups(tmp_path: Path, llama: Path, fresh_head: bool) -> None:
    votes, options = camp_votes(tmp_path, 600), QUICK | {"fresh_head": fresh_head}
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(llama), **options)
    record: Any = ensemble.record
    baselines = {name: row.brier for name, row in record.evaluation.baselines.items()}
    assert {"soft_bt", "hard_bt", "bootstrap", "mixture", "pair"} < set(baselines), "as on frozen features"
    assert baselines["soft_bt"] < 0.02
    assert record.evaluation.test.brier < 0.5 * baselines["constant_half"]
    assert record.evaluation.test.brier < baselines["pair"], "the members are not one reward and its opposite"
    validation_pairs = record.tuning["validation_pairs"]
    assert validation_pairs == record.data.train_prompts // 10
    assert record.tuning["steps"] == round(4 * (record.data.train_pairs - validation_pairs) / 64)
    assert len(record.seconds_members or []) == 1
    assert ensemble.features.to_json()["outputs"] == 9
    assert record.target is not None, "the target was chosen on validation prompts"
    assert record.encoders.validation_frozen is None


@pytest.mark.slow
def test_the_papers_combination_learns_both_camps(tmp_path: Path, llama: Path) -> None:
    """Stagewise, printed loss, fresh head, SOAP and no bound (§4, App. Training Pipeline).

    Only the numbers differ from the paper's: a tiny model needs a higher learning rate, smaller batches and more than
    one epoch.
    """
    votes = camp_votes(tmp_path, 400)
    paper: dict[str, Any] = {
        "method": "stagewise", "variant": "printed", "fresh_head": True, "optimizer": "soap", "max_disagreement": 1.0,
    }  # fmt: skip
    tiny: dict[str, Any] = {"k": 3, "learning_rate": 5e-3, "batch_size": 32, "epochs": 4}
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(llama), **paper, **tiny)
    evaluation: Any = ensemble.record.evaluation
    rivals = evaluation.baselines["constant_half"].brier, ensemble.record.history[0].test_brier
    assert evaluation.test.brier < 0.4 * min(rivals)
    held_out = votes[votes.test_mask()]
    for word, most in (("tea", 0.6), ("rum", 0.4)):
        choice = np.array([word in held_out.responses[a].split() for a in held_out.a_index], dtype=float)
        agreement = (ensemble.votes(held_out) == choice[:, None]).mean(axis=0)
        assert agreement.max() > 0.8, f"no member agrees with the camp that prefers {word}"
        assert ensemble.weights[int(agreement.argmax())] == pytest.approx(most, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_sentence_encoder_is_fine_tuned_as_a_classifier(tmp_path: Path, lora: bool) -> None:
    """``--backbone`` fine-tunes what it names, here a small model of MiniLM's kind: fit, evaluate, load and export."""
    encoder, votes = write_sentence_encoder(tmp_path / "encoder"), camp_votes(tmp_path, 200)
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(encoder), lora=lora, **QUICK)
    assert isinstance(ensemble.features, FinetunedFeatures)
    loaded = RewardEnsemble.load(tmp_path / "town")
    rewards = loaded.rewards(TEXTS)
    np.testing.assert_allclose(rewards, ensemble.rewards(TEXTS), atol=1e-5)
    evaluation: Any = ensemble.record.evaluation
    assert evaluate(loaded, votes).test.brier == pytest.approx(evaluation.test.brier, abs=1e-6)
    trained = [name for path in (tmp_path / "town" / "backbone").glob("*.safetensors") for name in load_file(path)]
    assert any("encoder.layer.1" in name for name in trained), "its layers are trained, not only a head"
    export(tmp_path / "town", tmp_path / "out")
    np.testing.assert_allclose(model_rewards(tmp_path / "out", TEXTS), rewards, atol=1e-3)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (type(classifier).__name__, classifier.config.num_labels) == ("BertForSequenceClassification", 2)


def test_vote_loss_is_the_expected_error_of_drawn_votes() -> None:
    rng = np.random.default_rng(0)
    difference, prob_a = rng.standard_normal((5, 4)), rng.random(5)
    running = RunningFigures(square=[1.0, 4.0, 0.25, 1.0], disagreement=[0.1, 0.6, 0.2, 0.9])
    labels = {"prob_a": torch.tensor(prob_a)}
    loss = float(VoteLoss(3)(torch.tensor(difference), labels, running, done=0.0))
    q = 1 / (1 + np.exp(-difference[:, :3] / (0.3 * np.array([1.0, 2.0, 0.5]))))
    drawn = rng.random((200_000, 5, 3)) < q
    error = np.mean((drawn.mean(axis=2) - prob_a) ** 2)
    p_bt = 1 / (1 + np.exp(-difference[:, 3]))
    entropy = -np.mean(prob_a * np.log(p_bt) + (1 - prob_a) * np.log(1 - p_bt))
    assert loss == pytest.approx(error + entropy, abs=1e-3)


@pytest.mark.parametrize("variant", ["printed", "symmetric"])
def test_a_member_learns_the_residual_of_the_members_before_it_from_a_head_of_its_own(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, variant: Any
) -> None:
    """Member j's target is p − p̂ of hard votes with weights solved anew (plus ½ if symmetric); the first one's is p."""
    rng = np.random.default_rng(0)
    rewards, prob_a, k = rng.standard_normal((2, 3, 40)), rng.random(40), 3
    a, b = np.arange(40, dtype=np.int32), np.arange(40, 80, dtype=np.int32)
    outputs = np.concatenate(rewards, axis=1).T.astype(np.float32)  # of each text, by member
    pairs = TextPairs([(f"so {i} ?", "yes") for i in range(80)], a, b, prob_a, a)
    tuning = FinetuneOptions(backbone=str(llama), optimizer="adamw", fresh_head=True)
    run = prepare_run(pairs, recipe.training_plan(a, tuning, 0, 1), Checkpoints(tmp_path, {}))
    targets, heads = [], []

    def look(run: Any, training: Training, target: Path) -> float:
        trainer = run.trainer(training, target, None)
        heads.append(trainer.model.score.weight.detach().numpy().copy())
        targets.append(training.lessons.labels["target"])  # type: ignore[union-attr]
        return 0.0

    monkeypatch.setattr(FinetuneRun, "train", look)
    monkeypatch.setattr(FinetuneRun, "read", lambda _, features: outputs[:, : features.outputs])
    monkeypatch.setattr(train, "model_identity", lambda *_: "")
    train._stagewise(run, FitOptions(method="stagewise", variant=variant, k=k), None, FitWatcher())
    votes = (rewards[0] > rewards[1]).T.astype(float)
    half = 0.0 if variant == "printed" else 0.5
    for j in range(k):
        grid = simplex_grid(j)
        prob_hat = min((votes[:, :j] @ weights for weights in grid), key=lambda p: ((p - prob_a) ** 2).sum(), default=0)
        expected = prob_a if j == 0 else half + prob_a - prob_hat
        np.testing.assert_allclose(targets[j], expected, atol=2e-3)
    for one, other in itertools.combinations(heads, 2):
        assert np.abs(one - other).max() > 0.01


def simplex_grid(j: int) -> list[np.ndarray]:
    """Return weights of up to two members in steps of .001."""
    if j < 2:
        return [np.ones(1)] * j
    return [np.array([first, 1 - first]) for first in np.linspace(0, 1, 1001)]


@pytest.mark.slow
@pytest.mark.gpu
def test_the_script_for_gpus_compares_a_route_with_the_cpu(llama: Path) -> None:
    script, device_name = Path(__file__).parents[1] / "benchmarks" / "gpu.py", loading.device_name()
    given = ["--device", device_name, "--backbone", str(llama), "--pairs", "60", "--routes", "LoRA"]
    done = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    device, route = done.stdout.splitlines()
    assert device.startswith("device: ")
    on_cpu = "difference 0.0000 · votes changed 0.0%" if device_name == "cpu" else ""
    assert route.startswith(f"pass · LoRA: {on_cpu}")


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "prompts", "batch", "steps"),
    [(100_000, 100_000, 512, 195), (16_384, 16_384, 512, 32), (1_500, 1_500, 32, 47), (40, 40, 8, 5), (3, 3, 8, 1),
     (1_500, 150, 128, 12), (280, 10, 256, 1)],
)  # fmt: skip
def test_a_step_holds_eight_prompts_and_leaves_enough_steps(pairs: int, prompts: int, batch: int, steps: int) -> None:
    assert recipe.batch_and_steps(pairs, prompts) == (batch, steps)


@pytest.mark.slow
def test_a_micro_batch_is_halved_when_memory_runs_out_without_changing_the_result(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    votes, quick = camp_votes(tmp_path, 200), QUICK | {"epochs": 1}
    monkeypatch.setattr(train, "MICRO_BATCH", 32)
    whole = fit(votes, folder=tmp_path / "whole", backbone=str(llama), **quick)
    compute, calls = PairTrainer.compute_loss, []

    def fails_once(self: Any, model: Any, inputs: Any, **rest: Any) -> Any:
        calls.append(len(inputs["input_ids"]))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(self, model, inputs, **rest)

    monkeypatch.setattr(PairTrainer, "compute_loss", fails_once)
    halved = fit(votes, folder=tmp_path / "halved", backbone=str(llama), **quick)
    assert max(calls[3:]) <= 32 < max(calls[:3]) <= 64
    assert "memory ran out with a micro-batch of 32, so it continues with 16." in caplog.text
    np.testing.assert_allclose(halved.features(TEXTS), whole.features(TEXTS), atol=1e-4)
    np.testing.assert_allclose(halved.prob_hat(votes, "policy"), whole.prob_hat(votes, "policy"), atol=1e-3)
    monkeypatch.setattr(PairTrainer, "compute_loss", _out_of_memory)
    with pytest.raises(DataError, match=r"memory ran out with a micro-batch of 1; use lora=True"):
        fit(votes, folder=tmp_path / "never", backbone=str(llama), **quick)


def test_several_processes_resume_with_the_smaller_micro_batch(tmp_path: Path, llama: Path) -> None:
    """A process cannot go on alone, so the launch ends; the next one reads half as much at once."""
    tuning = FinetuneOptions(backbone=str(llama), batch_size=2, optimizer="adamw")
    plan = recipe.training_plan(ONE_PAIR.prompt, tuning, 0, 2)
    run = prepare_run(ONE_PAIR, plan, Checkpoints(tmp_path, {}, Processes(2, rank=1)))
    run.folder.mkdir(parents=True)
    with pytest.raises(DataError, match=r"run the same command; it resumes from the last checkpoint with 4"):
        run._halve_micro_batch()
    assert run._micro_batch() == 4


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


# --- resuming ---------------------------------------------------------------------------------------------------------


def model_bytes(folder: Path) -> list[bytes]:
    files = [path.read_bytes() for path in sorted((folder / "backbone").rglob("*.safetensors"))]
    assert files
    return files


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_after_every_step")
@pytest.mark.parametrize("method", ["joint", "stagewise"])
def test_resumed_fit_equals_an_uninterrupted_one(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    votes, quick = camp_votes(tmp_path, 200), (QUICK if method == "joint" else STAGES) | {"optimizer": "soap"}
    uninterrupted = fit(votes, folder=tmp_path / "uninterrupted", backbone=str(llama), **quick)
    record: Any = uninterrupted.record
    steps = record.tuning["steps"]
    end, trained = StepCallback.on_step_end, []

    def counts(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        trained.append((Path(args.output_dir).name, state.global_step))
        if len(trained) == breaks_at:
            raise KeyboardInterrupt
        end(self, args, state, control, **rest)

    monkeypatch.setattr(StepCallback, "on_step_end", counts)
    breaks_at = steps - 1 if method == "joint" else 2 * steps - 1
    with pytest.raises(KeyboardInterrupt):
        fit(votes, folder=tmp_path / "interrupted", backbone=str(llama), **quick)
    assert not (tmp_path / "interrupted" / "ensemble.json").exists()
    trained.clear()
    breaks_at = 0
    resumed = fit(votes, folder=tmp_path / "interrupted", backbone=str(llama), **quick)
    last = "training-joint" if method == "joint" else "training-member-1"
    assert {name for name, _ in trained} == {last}, "a finished member is not trained again"
    assert 1 < trained[0][1] <= steps, "and an unfinished one resumes from its last checkpoint"
    np.testing.assert_array_equal(resumed.weights, uninterrupted.weights)
    np.testing.assert_array_equal(resumed.prob_hat(votes, "policy"), uninterrupted.prob_hat(votes, "policy"))
    assert model_bytes(tmp_path / "interrupted") == model_bytes(tmp_path / "uninterrupted")
    assert not list((tmp_path / "interrupted").glob(".*"))


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_after_every_step")
def test_full_disk_raises_a_data_error_and_keeps_the_last_complete_checkpoint(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes, quick = camp_votes(tmp_path, 200), QUICK | {"epochs": 2, "batch_size": 16}
    save, saved = PairTrainer._save_optimizer_and_scheduler, []

    def fills(self: Any, output_dir: str) -> None:
        saved.append(Path(output_dir))
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(PairTrainer, "_save_optimizer_and_scheduler", fills)
        with pytest.raises(DataError, match=r"the disk is full; free some space and run the same command"):
            fit(votes, folder=tmp_path / "town", backbone=str(llama), **quick)
    assert (saved[0] / COMPLETE_FILE).is_file()
    assert not (saved[1] / COMPLETE_FILE).exists()
    first: list[int] = []
    end = StepCallback.on_step_end

    def notes(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        first.append(state.global_step)
        end(self, args, state, control, **rest)

    monkeypatch.setattr(StepCallback, "on_step_end", notes)
    fit(votes, folder=tmp_path / "town", backbone=str(llama), **quick)
    assert first[0] == int(saved[0].name.rpartition("-")[2]) + 1


FIT = ("--k", "2", "--optimizer", "adamw", "--learning-rate", "5e-3", "--batch-size", "32", "--no-compare-frozen")


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_after_every_step")
def test_two_processes_give_the_same_ensemble_as_one_even_after_a_killed_worker(tmp_path: Path, llama: Path) -> None:
    camp_votes(tmp_path, 300)
    data, fit_it = tmp_path / "camps.jsonl", ("fit", tmp_path / "camps.jsonl", "--backbone", llama, *FIT, "--json")
    alone = run_process(*fit_it, "-o", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    first = launch(*fit_it, "-o", tmp_path / "two")
    kill_a_worker(first, tmp_path / "two", ".unfinished-*/training-joint/checkpoint-*/complete.json")
    out, _ = first.communicate(timeout=120)
    if first.returncode == 0:  # it was done before the kill
        pytest.fail("the worker was not killed in time: make the fit longer")
    assert out == ""
    assert not (tmp_path / "two" / "ensemble.json").exists()
    second = launch(*fit_it, "-o", tmp_path / "two")
    out, errors = second.communicate(timeout=240)
    assert second.returncode == 0, errors
    assert len(out.splitlines()) == 1, "one process prints"
    printed, expected = json.loads(out), json.loads(alone.stdout)
    assert (printed["processes"], expected["processes"]) == (2, 1)
    one, two = (RewardEnsemble.load(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_allclose(two.features(TEXTS), one.features(TEXTS), atol=2e-3)  # rounding grows over the steps
    votes = load_preferences(str(data))
    np.testing.assert_allclose(two.prob_hat(votes, "policy"), one.prob_hat(votes, "policy"), atol=2e-3)


# --- errors and notes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_backbone_that_cannot_be_loaded_raises_a_data_error(tmp_path: Path, write_jsonl: WriteLines) -> None:
    data = write_jsonl(two_camps(40))
    (tmp_path / "empty").mkdir()
    done = run("fit", data, "-o", tmp_path / "town", "--backbone", tmp_path / "empty")
    assert done.returncode == 2
    assert "transformers cannot load it" in done.stderr
    endless = write_backbone(tmp_path / "endless", eos=False, template=False)
    with pytest.raises(DataError, match=r"it has neither a padding nor an end token; give its tokenizer a pad_token"):
        fit(load_preferences(str(data)), folder=tmp_path / "town", backbone=str(endless))


@pytest.mark.slow
def test_notes_report_truncated_texts_and_what_the_tokenizer_lacks(tmp_path: Path, write_jsonl: WriteLines) -> None:
    plain, rows = write_backbone(tmp_path / "plain", template=False), two_camps(40)
    messages = [{"role": "user", "content": "so ?"}, {"role": "assistant", "content": "no"}]
    for row in rows[:20]:
        row["prompt"] = [*messages, {"role": "user", "content": row["prompt"]}]
    rows[30]["response_a"] += " yes" * 70
    votes = load_preferences(write_jsonl(rows))
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(plain), **QUICK | {"epochs": 1, "batch_size": 8})
    assert ensemble.record.notes == [
        f"{plain} has no padding token, so its end token is used",
        f"{plain} has no chat template, so messages are joined as plain text",
        "1 of 80 texts are longer than 64 tokens and lose the beginning of the prompt",
    ]


@pytest.mark.slow
def test_trainer_prints_nothing_to_stdout_or_to_a_redirected_stderr(
    tmp_path: Path, write_jsonl: WriteLines, llama: Path
) -> None:
    data = write_jsonl(two_camps(60))
    done = run_process("fit", data, "-o", tmp_path / "town", "--backbone", llama, *FIT, "--json", "--lora")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tuning"]["lora"] is True
    adapter = json.loads((tmp_path / "town" / "backbone" / "adapter_config.json").read_text())
    assert adapter["target_modules"] == sorted(adapter["target_modules"]), "the same files in every run"
    assert done.stderr == f"note: {llama} has no padding token, so its end token is used.\n"


def test_training_leaves_random_states_as_they_were() -> None:

    def state() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = state()
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])
    with loading.random_states_restored():
        state()
        transformers.set_seed(0)
    assert state() == expected


def test_fresh_model_has_no_dropout_and_a_random_head(llama: Path) -> None:
    base, tuning = load_base(str(llama), 1024, ONE_PAIR.items), FinetuneOptions(backbone=str(llama))
    models = [base.reward_model(3, tuning, np.random.SeedSequence(seed)).train() for seed in (0, 0, 1)]
    assert models[0].config.attention_dropout == 0.0
    assert models[0].config.pad_token_id == 2
    first, same, other = (model.score.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.shape == (3, 32)
    assert not first[2].any(), "the Bradley–Terry reward starts from 0"
    assert base.max_length == 64


def test_fitted_head_is_linear_in_the_features_of_the_base(tmp_path: Path, llama: Path) -> None:
    votes = camp_votes(tmp_path, 20)
    items, texts = votes.items(), texts_of(votes)
    pairs = TextPairs(texts, items.a, items.b, votes.prob_a, votes.prompt_index)
    base = load_base(str(llama), 1024, texts)
    tuning, seed = FinetuneOptions(backbone=str(llama)), np.random.SeedSequence(0)
    states = base_states(base, base.reward_model(1, tuning, seed), pairs, 0, ALONE)
    weights = states.head(np.eye(states.pairs.inputs.shape[1])[:, [4, 9, 30]])
    model = base.reward_model(3, tuning, seed, weights=weights)
    outputs = classifier_rewards(model, base.tokenizer, texts, 64)
    body = transformers.AutoModel.from_pretrained(llama).eval()
    hidden = []
    for prompt, response in texts:  # the end token is the padding, so the model reads the token before it
        ids = base.tokenizer(f"<s>user {prompt} </s>assistant {response} </s>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            hidden.append(body(torch.tensor([ids])).last_hidden_state[0, -2].numpy())
    scaled = (np.stack(hidden) / np.std(hidden, axis=0))[:, [4, 9, 30]]
    np.testing.assert_allclose(outputs - outputs[0], scaled - scaled[0], atol=1e-3)


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_trains_on_one_of_several_gpus_and_records_the_steps_it_took(
    tmp_path: Path, llama: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    record: Any = fit(
        votes, folder=tmp_path / "town", backbone=str(llama), **QUICK | {"batch_size": 8, "epochs": 1}
    ).record
    pairs = record.data.train_pairs - record.data.train_prompts // 10
    assert taken == [(1, step) for step in range(1, round(pairs / 8) + 1)]
    assert record.tuning["steps"] == len(taken)
    assert "3 more are not used; start it with accelerate launch --num_processes 4" in record.notes[-1]


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_trains_scores_and_resumes_with_a_float32_head(tmp_path: Path, llama: Path) -> None:
    camp_votes(tmp_path, 200)
    data, script = tmp_path / "camps.jsonl", Path(__file__).with_name("half_precision.py")
    environment = os.environ | {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PLURALIGN_CACHE": str(tmp_path / "cache"), "PLURALIGN_CHECKPOINT_SECONDS": "0",
    }  # fmt: skip
    command = [sys.executable, str(script), str(data), str(llama), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
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
        made = recipe.training_plan(np.arange(100, dtype=np.int32), tuning, 0, 1)
        assert (made.scoring, made.autocast, made.bf16_body) == (expected, gpu, False)
        assert made.arguments(tmp_path, 4, "run").bf16 == gpu
        assert recipe.choose_precision("auto") == expected
        assert recipe.choose_precision("float32") == "float32"
        half = recipe.training_plan(np.arange(100, dtype=np.int32), tuning, 0, 1, "bfloat16")
        assert (half.scoring, half.autocast, half.bf16_body) == ("bfloat16", False, True)
        adapters = recipe.training_plan(np.arange(100, dtype=np.int32), replace(tuning, lora=True), 0, 1)
        assert adapters.bf16_body == gpu, "weights that are not trained"


def test_bfloat16_on_a_cpu_that_raises_sigill_is_a_usage_error(
    llama: Path, tmp_path: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PRODUCT", "import os; os.kill(os.getpid(), 4)")
    loading.check_cpu_bfloat16.cache_clear()
    sentence = r"this CPU cannot multiply in bfloat16 .*: use precision float32"
    with pytest.raises(UsageError, match=sentence):
        fit(votes, folder=tmp_path, backbone=str(llama), precision="bfloat16")
    with pytest.raises(UsageError, match=sentence):
        load_finetuned(llama, FEATURES, "bfloat16")


def test_fsdp_with_bfloat16_weights_or_soap_is_a_usage_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    tuning = FinetuneOptions(backbone=str(llama), optimizer="adamw")
    with pytest.raises(UsageError, match=r"FSDP needs weights of one precision.*use precision float32"):
        recipe.training_plan(np.arange(100, dtype=np.int32), tuning, 0, 2, "bfloat16")
    monkeypatch.setattr(recipe, "gpu_has_bfloat16", lambda: True)
    assert recipe.choose_precision("auto") == "float32"
    for optimizer in ("soap", "soap-one-sided"):
        with pytest.raises(UsageError, match=r"SOAP needs whole matrices.*use optimizer adamw"):
            recipe.training_plan(np.arange(100, dtype=np.int32), replace(tuning, optimizer=optimizer), 0, 2)


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fsdp_gives_the_same_ensemble_as_one_process_even_after_an_interruption(
    tmp_path: Path, llama: Path, votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    camp_votes(tmp_path, 100)
    data = tmp_path / "camps.jsonl"
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = str(Path(__file__).with_name("fsdp_on_cpu.py"))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "3",
        "fit", str(data), "-o", str(tmp_path / "two"), "--backbone", str(llama), "--json", *FIT, "--batch-size", "16",
    ]  # fmt: skip
    sharded = subprocess.run(command, capture_output=True, text=True, check=False)
    assert sharded.returncode == 0, sharded.stderr
    assert json.loads(sharded.stdout)["processes"] == 2
    one = fit(votes, folder=tmp_path / "one", backbone=str(llama), **QUICK | {"batch_size": 16, "epochs": 1})
    two = RewardEnsemble.load(tmp_path / "two")
    np.testing.assert_allclose(two.features(TEXTS), one.features(TEXTS), atol=2e-3)  # rounding grows over the steps
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
    options |= {"fresh_head": True, "gradient_checkpointing": True, "folder": tmp_path_factory.mktemp("town") / "town"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCallback, "on_step_end", look)
        fit(votes, backbone=str(llama), **options)
    return seen


@pytest.mark.slow
def test_rates_rise_over_three_percent_of_the_steps_and_fall_as_a_cosine(watched: dict[str, Any]) -> None:
    steps = len(watched["rates"])
    assert min(group["initial_lr"] for group in watched["groups"]) == 2e-5
    done, warm_up = np.arange(1, steps + 1), math.ceil(0.03 * steps)
    assert warm_up > 1
    cosine = 0.5 * (1 + np.cos(np.pi * (done - warm_up) / (steps - warm_up)))
    expected = np.where(done <= warm_up, done / warm_up, cosine)
    for position, group in enumerate(watched["groups"]):
        rates = [rates[position] for rates in watched["rates"]]
        np.testing.assert_allclose(rates, expected * group["initial_lr"], atol=1e-12)


@pytest.mark.slow
def test_the_trainer_gets_the_papers_recipe(watched: dict[str, Any]) -> None:
    """The head learns ten times as fast, and norms have no weight decay."""
    groups = {(round(one["initial_lr"] / 2e-5), one["weight_decay"]): one["params"] for one in watched["groups"]}
    assert set(groups) == {(1, 0.1), (1, 0.0), (10, 0.1)}
    assert groups[10, 0.1] == ["score.weight"]
    assert [name.endswith("norm.weight") for name in groups[1, 0.0]] == [True] * 5
    assert not any("norm" in name for name in groups[1, 0.1])

    arguments = watched["arguments"]
    expected = {
        "max_grad_norm": 1.0, "gradient_checkpointing": True, "bf16": False, "fp16": False, "save_strategy": "no",
        "num_train_epochs": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert watched["dtypes"] == {"torch.float32"}
    assert watched["saves"] == 0, "a training of seconds has no checkpoint"
    bases = {name: basis for name, basis in watched["bases"].items() if name.endswith("_proj.weight")}
    assert len(bases) == 14
    for basis in (basis for sides in bases.values() for basis in sides):
        assert not torch.allclose(basis.abs(), torch.eye(len(basis)), atol=0.1), "taken from gradients, not from zeros"


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Clocked:
    """A training of 100 steps whose clock is set by the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes = ALONE) -> None:
        self.now, self.step, self.folder = 0.0, 0, folder
        monkeypatch.setattr(train, "monotonic", lambda: self.now)
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


def test_checkpoints_are_saved_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Clocked(tmp_path, monkeypatch)
    assert not training.steps_at(599)
    assert training.steps_at(600, save_takes=60)
    assert not training.steps_at(660 + 599)
    assert training.steps_at(660 + 600)
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
        train.checkpoint_seconds()


# --- experiment trackers ------


def make_trainer(folder: Path, llama: Path, **changes: Any) -> PairTrainer:
    tuning = FinetuneOptions(backbone=str(llama), batch_size=8, optimizer="adamw", **changes)
    run = prepare_run(ONE_PAIR, recipe.training_plan(ONE_PAIR.prompt, tuning, 0, 1), Checkpoints(folder / "town", {}))
    lessons = PairLessons(ONE_PAIR, StageLoss(1.0), {"prob_a": ONE_PAIR.prob_a, "target": ONE_PAIR.prob_a})
    training = Training("member-0", 1, lessons, lambda: np.zeros((1, 32)))
    return run.trainer(training, folder / "training-member-0", None)


def test_trackers_and_the_name_of_the_run_are_passed_to_the_trainer(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package called wandb stands for the real one, so that the Trainer adds its callback."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text("run = None\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    utils = importlib.import_module("transformers.integrations.integration_utils")
    monkeypatch.setattr(utils, "is_wandb_available", lambda: True)
    silent = make_trainer(tmp_path, llama).args
    assert (silent.report_to, silent.logging_strategy) == ([], "no")
    recipe.check_trackers(FinetuneOptions(backbone="x", report_to="wandb"))
    made = make_trainer(tmp_path, llama, report_to="wandb")
    assert (made.args.report_to, made.args.run_name) == (["wandb"], "town-member-0")
    assert (made.args.logging_strategy, made.args.logging_steps) == ("steps", 1)
    kinds = [type(callback).__name__ for callback in made.callback_handler.callbacks]
    assert "WandbCallback" in kinds
    assert "PrinterCallback" not in kinds
    sys.modules.pop("wandb")
    plain, tracked = FinetuneOptions(backbone="x"), FinetuneOptions(backbone="x", report_to="wandb")
    assert decisive_options(plain) == decisive_options(tracked), "a killed run resumes with other trackers"


def test_an_uninstalled_tracker_is_one_sentence_before_training_and_stdout_is_for_results(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: transformers prints when it is imported, and a tracker may print at any time."""
    (tmp_path / "trackio.py").write_text("print('hello from the tracker')\nraise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    camp_votes(tmp_path, 40)
    votes, out = tmp_path / "camps.jsonl", tmp_path / "out"
    done = run_process("fit", votes, "-o", out, "--backbone", llama, "--report-to", "trackio")
    assert (done.returncode, done.stdout, out.exists()) == (2, "", False)
    assert "hello from the tracker" in done.stderr
    sentence = "pluralign: --report-to trackio needs the package trackio: run  pip install trackio.\n"
    assert done.stderr.endswith(sentence)
