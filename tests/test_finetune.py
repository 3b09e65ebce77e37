"""Fine-tuning: quality on votes of two known groups, invariance of a step, resuming, full disks and little memory."""

import errno
import importlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, launch, run, run_process
from safetensors.numpy import load_file
from tiny import camp_votes, two_camps, write_backbone, write_sentence_encoder

from pluralign.core.checkpoints import Checkpoints
from pluralign.core.errors import DataError, UsageError
from pluralign.core.processes import ALONE, Processes
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.learning.backbone import train
from pluralign.learning.backbone.base import base_states, load_base
from pluralign.learning.backbone.losses import RunningFigures, VoteLoss
from pluralign.learning.backbone.recipe import TextPairs, batch_and_steps, training_plan
from pluralign.learning.backbone.train import COMPLETE_FILE, PairTrainer, StepCallback, prepare_run
from pluralign.learning.fit import fit
from pluralign.learning.options import FinetuneOptions
from pluralign.measuring.evaluate import evaluate
from pluralign.publishing.export import export
from pluralign.text.classifier import classifier_rewards, model_rewards
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.loading import random_states_restored
from pluralign.votes.load import load_preferences

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


@pytest.fixture
def checkpoint_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLURALIGN_CHECKPOINT_SECONDS", "0")


# --- quality and losses -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fresh_head", [False, True])
def test_joint_members_learn_both_groups(tmp_path: Path, llama: Path, fresh_head: bool) -> None:
    ensemble = fit(
        camp_votes(tmp_path, 600), folder=tmp_path / "town", backbone=str(llama), **QUICK | {"fresh_head": fresh_head}
    )
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
def test_second_stage_learns_the_second_group(tmp_path: Path, llama: Path) -> None:
    ensemble = fit(camp_votes(tmp_path, 600), folder=tmp_path / "town", backbone=str(llama), **STAGES)
    record: Any = ensemble.record
    history = [row.test_brier for row in record.history]
    assert history[1] < 0.5 * history[0]
    assert max(member.disagreement for member in record.evaluation.members) < 0.5
    assert len(record.seconds_members or []) == 2


@pytest.mark.slow
def test_the_papers_combination_learns_both_camps(tmp_path: Path, llama: Path) -> None:
    """Stagewise, printed loss, fresh head, SOAP and no bound (§4, App. Training Pipeline).

    Only the numbers differ from the paper's: a tiny model needs a higher learning rate, smaller batches and more than
    one epoch.
    """
    votes = camp_votes(tmp_path, 400)
    ensemble = fit(
        votes, folder=tmp_path / "town", backbone=str(llama),
        method="stagewise", variant="printed", fresh_head=True, optimizer="soap", max_disagreement=1.0, k=3,
        learning_rate=5e-3, batch_size=32, epochs=4,
    )  # fmt: skip
    evaluation: Any = ensemble.record.evaluation
    one_member = ensemble.record.history[0].test_brier
    assert evaluation.test.brier < 0.4 * evaluation.baselines["constant_half"].brier
    assert evaluation.test.brier < 0.4 * one_member

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
    trained = [
        weights for path in (tmp_path / "town" / "backbone").glob("*.safetensors") for weights in load_file(path)
    ]
    assert any("encoder.layer.1" in name for name in trained), "its layers are trained, not only a head"
    export(tmp_path / "town", tmp_path / "out")
    np.testing.assert_allclose(model_rewards(tmp_path / "out", TEXTS), rewards, atol=1e-3)
    transformers = importlib.import_module("transformers")
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (type(classifier).__name__, classifier.config.num_labels) == ("BertForSequenceClassification", 2)


def test_vote_loss_is_the_expected_error_of_drawn_votes() -> None:
    torch = importlib.import_module("torch")
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


def test_running_figures_do_not_depend_on_micro_batches() -> None:
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(1)
    whole, parts = RunningFigures(), RunningFigures()
    for _ in range(3):
        difference, prob_a = torch.tensor(rng.standard_normal((8, 2))), torch.tensor(rng.random(8))
        whole.add(difference, prob_a)
        for rows in (slice(0, 2), slice(2, 8)):
            parts.add(difference[rows], prob_a[rows])
        for running in (whole, parts):
            running.end_step(lambda sums: sums)
    np.testing.assert_allclose(parts.square, whole.square)
    np.testing.assert_allclose(parts.disagreement, whole.disagreement)
    assert 0 < min(whole.disagreement) < max(whole.disagreement) < 1


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "batch", "steps"), [(100_000, 512, 195), (16_384, 512, 32), (1_500, 32, 47), (40, 8, 5), (3, 8, 1)]
)
def test_batch_size_leaves_enough_steps(pairs: int, batch: int, steps: int) -> None:
    assert batch_and_steps(pairs) == (batch, steps)


@pytest.mark.slow
def test_micro_batch_does_not_change_the_result_and_is_halved_when_memory_runs_out(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = importlib.import_module("torch")
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
    assert 32 < max(calls[:3]) <= 64
    assert max(calls[3:]) <= 32
    assert "memory ran out with a micro-batch of 32, so it continues with 16." in caplog.text
    np.testing.assert_allclose(halved.features(TEXTS), whole.features(TEXTS), atol=1e-4)
    np.testing.assert_allclose(halved.prob_hat(votes, "policy"), whole.prob_hat(votes, "policy"), atol=1e-3)
    monkeypatch.setattr(PairTrainer, "compute_loss", lambda *_, **__: _out_of_memory(torch))
    with pytest.raises(DataError, match=r"memory ran out with a micro-batch of 1; use --lora"):
        fit(votes, folder=tmp_path / "never", backbone=str(llama), **quick)


def test_several_processes_resume_with_the_smaller_micro_batch(tmp_path: Path, llama: Path) -> None:
    """A process cannot go on alone, so the launch ends; the next one reads half as much at once."""
    plan = training_plan(1, FinetuneOptions(backbone=str(llama), batch_size=2, optimizer="adamw"), 0, 2)
    run = prepare_run(ONE_PAIR, plan, Checkpoints(tmp_path, {}, Processes(2, rank=1)))
    run.folder.mkdir(parents=True)
    with pytest.raises(DataError, match=r"run the same command; it resumes from the last checkpoint with 4"):
        run._halve_micro_batch()
    assert run._micro_batch() == 4


def _out_of_memory(torch: Any) -> None:
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
    assert sorted(path.name for path in (tmp_path / "interrupted").iterdir() if path.name.startswith(".")) == []


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
    deadline = time.monotonic() + 120
    while not list((tmp_path / "two").glob(".unfinished-*/training-joint/checkpoint-*/complete.json")):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[-1]), signal.SIGKILL)
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be above 0, not 0"),
        ({"optimizer": "soup"}, r"optimizer cannot be 'soup'; did you mean 'soap'\?"),
        ({"report_to": "wanbd"}, r"no tracker 'wanbd'; did you mean 'wandb'\?"),
        ({"report_to": "wandb,none"}, "no tracker 'none'; known are: trackio, wandb, tensorboard"),
    ],
)
def test_invalid_finetune_options_raise_a_usage_error(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        FinetuneOptions(**changes)


@pytest.mark.slow
def test_backbone_that_cannot_be_loaded_raises_a_data_error(tmp_path: Path, write_jsonl: WriteLines) -> None:
    data = write_jsonl(two_camps(40))
    (tmp_path / "empty").mkdir()
    done = run("fit", data, "-o", tmp_path / "town", "--backbone", tmp_path / "empty")
    assert done.returncode == 2
    assert "transformers cannot load it" in done.stderr
    assert "Traceback" not in done.stderr
    endless = write_backbone(tmp_path / "endless", eos=False, template=False)
    with pytest.raises(DataError, match=r"it has neither a padding nor an end token; give its tokenizer a pad_token"):
        fit(load_preferences(str(data)), folder=tmp_path / "town", backbone=str(endless))


@pytest.mark.slow
def test_notes_report_truncated_texts_and_what_the_tokenizer_lacks(tmp_path: Path) -> None:
    plain = write_backbone(tmp_path / "plain", template=False)
    rows = two_camps(40)
    messages = [{"role": "user", "content": "so ?"}]
    for row in rows[:20]:
        row["prompt"] = [*messages, {"role": "assistant", "content": "no"}, {"role": "user", "content": row["prompt"]}]
    rows[30]["response_a"] += " yes" * 70
    path = tmp_path / "votes.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    votes = load_preferences(str(path))
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
    done = run_process(
        "fit", write_jsonl(two_camps(60)), "-o", tmp_path / "town", "--backbone", llama, *FIT, "--json", "--lora"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tuning"]["lora"] is True
    assert done.stderr == f"note: {llama} has no padding token, so its end token is used.\n"


def test_training_leaves_random_states_as_they_were() -> None:
    torch = importlib.import_module("torch")

    def state() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = state()
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])
    with random_states_restored():
        state()
        importlib.import_module("transformers").set_seed(0)
    assert state() == expected


def test_fresh_model_has_no_dropout_and_a_random_head(llama: Path) -> None:
    torch = importlib.import_module("torch")
    base, tuning = load_base(str(llama), 1024, ONE_PAIR.items), FinetuneOptions(backbone=str(llama))
    models = [base.reward_model(3, tuning, np.random.SeedSequence(seed)).train() for seed in (0, 0, 1)]
    assert models[0].config.attention_dropout == 0.0
    assert models[0].config.pad_token_id == 2
    heads = [model.score.weight for model in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (3, 32)
    assert not heads[0][2].any(), "the Bradley–Terry reward starts from 0"
    assert base.max_length == 64


def test_fitted_head_is_linear_in_the_features_of_the_base(tmp_path: Path, llama: Path) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    votes = camp_votes(tmp_path, 20)
    items = votes.items()
    texts = [
        (votes.prompts[p], votes.responses[r]) for p, r in zip(items.prompt_index, items.response_index, strict=True)
    ]
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
