"""Fine-tuning: what is learned, what a step depends on, and what survives a kill, a full disk and little memory."""

import errno
import importlib
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, launch, run
from tiny import two_camps, write_backbone

from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.fitting.finetuned import validation_rows
from pluralign.fitting.fit import fit
from pluralign.models.classifier import classifier_rewards
from pluralign.training.finetune import run as finetune
from pluralign.training.finetune import trainer as pairtrainer
from pluralign.training.finetune.losses import JointLoss
from pluralign.training.finetune.recipe import batch_and_steps
from pluralign.training.finetune.run import Watch, stage_targets
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {
    "k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 64, "micro_batch": 64, "epochs": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("llama"))


def votes_of(folder: Path, prompts: int = 600) -> PreferenceSet:
    path = folder / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(prompts))))
    return load_preferences(str(path))


# --- what is learned ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_joint_members_learn_the_two_camps(tmp_path: Path, llama: Path) -> None:
    ensemble = fit(votes_of(tmp_path), folder=tmp_path / "town", backbone=str(llama), **QUICK)
    baselines = {name: row["brier"] for name, row in ensemble.facts["baselines"].items()}
    assert set(baselines) == {"floor", "constant_half", "soft_bt", "soft_bt_temperature", "pair"}
    assert baselines["soft_bt"] < 0.02
    assert ensemble.facts["test"]["brier"] < 0.5 * baselines["constant_half"]
    assert ensemble.facts["test"]["brier"] < baselines["pair"], "its members are not one reward and its opposite"
    data, tuning = ensemble.facts["data"], ensemble.facts["tuning"]
    assert tuning["validation_pairs"] == data["train_prompts"] // 10
    assert tuning["steps"] == round(4 * (data["train_pairs"] - tuning["validation_pairs"]) / 64)
    assert len(ensemble.facts["seconds_members"]) == 1
    assert ensemble.features.described()["outputs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["symmetric", "weighted"])
def test_a_second_stage_finds_the_second_camp(tmp_path: Path, llama: Path, variant: str) -> None:
    changes = QUICK | {"method": "stagewise", "variant": variant}
    ensemble = fit(votes_of(tmp_path), folder=tmp_path / "town", backbone=str(llama), **changes)
    history = [record["test_brier"] for record in ensemble.facts["history"]]
    assert history[1] < 0.5 * history[0]
    assert max(member["disagreement"] for member in ensemble.facts["members"]) < 0.5
    assert len(ensemble.facts["seconds_members"]) == 2


def test_the_targets_of_a_stage_are_those_of_its_variant() -> None:
    p, p_hat = np.array([0.9, 0.2]), np.array([0.5, 0.8])
    np.testing.assert_allclose(stage_targets(p, p_hat, "printed")["target"], [0.4, -0.6])
    np.testing.assert_allclose(stage_targets(p, p_hat, "symmetric")["target"], [0.9, -0.1])
    np.testing.assert_allclose(stage_targets(p, p_hat, "symmetric", "bce")["target"], [0.9, 0.0])
    weighted = stage_targets(p, p_hat, "weighted")
    np.testing.assert_allclose(weighted["target"], [1, 0])
    np.testing.assert_allclose(weighted["weight"], [0.8, 1.2])


def test_the_joint_loss_is_the_error_that_drawn_votes_are_expected_to_have() -> None:
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(0)
    difference, prob_a = rng.standard_normal((5, 4)), rng.random(5)
    running = pairtrainer.Running(square=[1.0, 4.0, 0.25, 1.0], disagreement=[0.1, 0.6, 0.2, 0.9])
    of_pairs = {"prob_a": torch.tensor(prob_a)}
    found = float(JointLoss(3, 0.5)(torch.tensor(difference), of_pairs, running, done=0.0))
    q = 1 / (1 + np.exp(-difference[:, :3] / (0.3 * np.array([1.0, 2.0, 0.5]))))
    drawn = rng.random((200_000, 5, 3)) < q
    error = np.mean((drawn.mean(axis=2) - prob_a) ** 2)
    p_bt = 1 / (1 + np.exp(-difference[:, 3]))
    entropy = -np.mean(prob_a * np.log(p_bt) + (1 - prob_a) * np.log(1 - p_bt))
    price = 0.3 / 3 * np.mean((1 - 2 * prob_a) * q[:, 1])  # only the second member is too far
    assert found == pytest.approx(error + entropy + price, abs=1e-3)


def test_running_figures_are_those_of_whole_steps_however_they_are_dealt_out() -> None:
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(1)
    whole, parts = pairtrainer.Running(), pairtrainer.Running()
    for _ in range(3):
        difference, prob_a = torch.tensor(rng.standard_normal((8, 2))), torch.tensor(rng.random(8))
        whole.add(difference, prob_a)
        for rows in (slice(0, 2), slice(2, 8)):
            parts.add(difference[rows], prob_a[rows])
        for running in (whole, parts):
            running.update(lambda sums: sums)
    np.testing.assert_allclose(parts.square, whole.square)
    np.testing.assert_allclose(parts.disagreement, whole.disagreement)
    assert 0 < min(whole.disagreement) < max(whole.disagreement) < 1


# --- what a step depends on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "batch", "steps"), [(100_000, 512, 195), (16_384, 512, 32), (1_500, 32, 47), (40, 8, 5), (3, 8, 1)]
)
def test_the_batch_leaves_enough_steps(pairs: int, batch: int, steps: int) -> None:
    assert batch_and_steps(pairs, FinetuneOptions(backbone="x")) == (batch, steps)


def test_no_prompt_is_both_tuned_on_and_chosen_by() -> None:
    prompt = np.repeat(np.arange(50), 3).astype(np.int32)
    test_rows = prompt >= 40
    rows = validation_rows(prompt, test_rows, seed=0)
    assert len(np.unique(prompt[rows])) == 4
    assert not (rows & test_rows).any()
    assert not np.isin(prompt[~rows], prompt[rows]).any()


@pytest.mark.slow
def test_the_micro_batch_changes_nothing_and_memory_that_runs_out_halves_it(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = importlib.import_module("torch")
    votes, quick = votes_of(tmp_path, 200), QUICK | {"epochs": 1, "micro_batch": 32}
    whole = fit(votes, folder=tmp_path / "whole", backbone=str(llama), **quick)
    compute, calls = pairtrainer.PairTrainer.compute_loss, []

    def fails_once(self: Any, model: Any, inputs: Any, **rest: Any) -> Any:
        calls.append(len(inputs["prob_a"]))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(self, model, inputs, **rest)

    monkeypatch.setattr(pairtrainer.PairTrainer, "compute_loss", fails_once)
    halved = fit(votes, folder=tmp_path / "halved", backbone=str(llama), **quick)
    assert calls[:3] == [32] * 3
    assert set(calls[3:]) == {16}
    assert "memory ran out with 32 pairs at once: going on with 16." in caplog.text
    np.testing.assert_allclose(halved.weights, whole.weights, atol=1e-3)
    np.testing.assert_allclose(halved.prob_hat(votes, "policy"), whole.prob_hat(votes, "policy"), atol=1e-3)
    monkeypatch.setattr(pairtrainer.PairTrainer, "compute_loss", lambda *_, **__: _out_of_memory(torch))
    with pytest.raises(DataError, match=r"memory ran out with 1 pairs at once; use --lora"):
        fit(votes, folder=tmp_path / "never", backbone=str(llama), **quick)


def _out_of_memory(torch: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


# --- what survives --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["joint", "stagewise"])
def test_a_fit_that_broke_off_goes_on_and_ends_as_an_unbroken_one(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    votes, quick = votes_of(tmp_path, 200), QUICK | {"method": method, "optimizer": "soap"}
    unbroken = fit(votes, folder=tmp_path / "unbroken", backbone=str(llama), **quick)
    steps = unbroken.facts["tuning"]["steps"]
    end, trained = Watch.on_step_end, []

    def counts(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        trained.append((Path(args.output_dir).name, state.global_step))
        if len(trained) == breaks_at:
            raise KeyboardInterrupt
        end(self, args, state, control, **rest)

    monkeypatch.setattr(Watch, "on_step_end", counts)
    breaks_at = steps - 1 if method == "joint" else 2 * steps - 1
    with pytest.raises(KeyboardInterrupt):
        fit(votes, folder=tmp_path / "broken", backbone=str(llama), **quick)
    assert not (tmp_path / "broken" / "ensemble.json").exists()
    trained.clear()
    breaks_at = 0
    resumed = fit(votes, folder=tmp_path / "broken", backbone=str(llama), **quick)
    last = "training-joint" if method == "joint" else "training-member-1"
    assert {name for name, _ in trained} == {last}, "a finished member is not trained again"
    assert 1 < trained[0][1] <= steps, "and an unfinished one goes on from its last checkpoint"
    np.testing.assert_allclose(resumed.weights, unbroken.weights, atol=1e-4)
    np.testing.assert_allclose(resumed.prob_hat(votes, "policy"), unbroken.prob_hat(votes, "policy"), atol=1e-4)
    assert sorted(path.name for path in (tmp_path / "broken").iterdir() if path.name.startswith(".")) == []


@pytest.mark.slow
def test_a_disk_that_fills_is_one_sentence_and_the_last_good_checkpoint_stays(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes, quick = votes_of(tmp_path, 200), QUICK | {"epochs": 2, "batch_size": 16}
    save, saved = pairtrainer.PairTrainer._save_optimizer_and_scheduler, []

    def fills(self: Any, output_dir: str) -> None:
        saved.append(Path(output_dir))
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(pairtrainer.PairTrainer, "_save_optimizer_and_scheduler", fills)
        with pytest.raises(DataError, match=r"the disk is full; make room and run the same command"):
            fit(votes, folder=tmp_path / "town", backbone=str(llama), **quick)
    assert (saved[0] / pairtrainer.COMPLETE_FILE).is_file()
    assert not (saved[1] / pairtrainer.COMPLETE_FILE).exists()
    first: list[int] = []
    end = Watch.on_step_end

    def notes(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        first.append(state.global_step)
        end(self, args, state, control, **rest)

    monkeypatch.setattr(Watch, "on_step_end", notes)
    fit(votes, folder=tmp_path / "town", backbone=str(llama), **quick)
    assert first[0] == int(saved[0].name.rpartition("-")[2]) + 1


FIT = ("--k", "2", "--optimizer", "adamw", "--learning-rate", "5e-3", "--batch-size", "32", "--micro-batch", "16")


@pytest.mark.slow
def test_two_processes_give_the_ensemble_of_one_also_after_a_killed_worker(tmp_path: Path, llama: Path) -> None:
    votes_of(tmp_path, 300)
    data, fit_it = tmp_path / "camps.jsonl", ("fit", tmp_path / "camps.jsonl", "--backbone", llama, *FIT, "--json")
    alone = run(*fit_it, "-o", tmp_path / "one")
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
    out, told = second.communicate(timeout=240)
    assert second.returncode == 0, told
    assert len(out.splitlines()) == 1, "one process prints"
    facts, expected = json.loads(out), json.loads(alone.stdout)
    assert (facts["processes"], expected["processes"]) == (2, 1)
    np.testing.assert_allclose(facts["weights"], expected["weights"], atol=1e-3)
    one, two = (RewardEnsemble.load(tmp_path / name) for name in ("one", "two"))
    votes = load_preferences(str(data))
    np.testing.assert_allclose(two.prob_hat(votes, "policy"), one.prob_hat(votes, "policy"), atol=2e-3)


# --- what makes no sense --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"encoder": "smollm2"}, "encoder is about frozen features and has no use beside --backbone"),
        ({"surface": False}, "surface is about frozen features"),
        ({"members": "mlp"}, "members is about frozen features"),
        ({"level": "policy"}, "fine-tuned members are trained for votes; leave --level out"),
        ({"target": "votes"}, "target has no use beside --backbone"),
        ({"k": "auto"}, "k cannot be auto beside --backbone"),
        ({"folder": None}, "a fine-tuned ensemble needs a folder"),
    ],
)
def test_options_that_make_no_sense_with_a_backbone_are_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        fit(votes_of(tmp_path, 20), **{"folder": tmp_path, "backbone": "x", **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora": True}, "lora is about fine-tuning: name a model to tune with --backbone"),
        ({"backbone": "x", "learning_rate": 0.0}, "learning_rate must be above 0, not 0"),
        ({"backbone": "x", "optimizer": "soup"}, r"optimizer cannot be 'soup'; did you mean 'soap'\?"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        FinetuneOptions(**changes)


def test_soap_is_refused_where_fsdp_deals_out_its_matrices(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    pairs = pairtrainer.TextPairs(
        [("so ?", "yes"), ("so ?", "no")], np.array([0]), np.array([1]), np.array([0.5]), np.array([0])
    )
    with pytest.raises(UsageError, match=r"SOAP needs whole matrices.*use --optimizer adamw"):
        finetune.fine_tune(pairs, 2, FitOptions(), FinetuneOptions(backbone=str(llama)), llama)


@pytest.mark.slow
def test_a_backbone_that_cannot_be_loaded_is_one_sentence(tmp_path: Path, write_jsonl: WriteLines) -> None:
    data = write_jsonl(two_camps(40))
    (tmp_path / "empty").mkdir()
    found = run("fit", data, "-o", tmp_path / "town", "--backbone", tmp_path / "empty")
    assert found.returncode == 2
    assert "transformers cannot load it" in found.stderr
    assert "Traceback" not in found.stderr
    endless = write_backbone(tmp_path / "endless", eos=False, template=False)
    with pytest.raises(DataError, match=r"it has neither a padding nor an end token; give its tokenizer a pad_token"):
        fit(load_preferences(str(data)), folder=tmp_path / "town", backbone=str(endless))


@pytest.mark.slow
def test_notes_say_what_is_cut_and_what_the_tokenizer_lacks(tmp_path: Path) -> None:
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
    assert ensemble.facts["notes"] == [
        f"{plain} has no padding token, and its end token is used",
        f"{plain} has no chat template, and messages are joined as plain text",
        "1 of 80 texts are longer than 64 tokens and lose the beginning of the prompt",
    ]


@pytest.mark.slow
def test_nothing_of_the_trainer_reaches_stdout_or_a_file_that_is_no_terminal(
    tmp_path: Path, write_jsonl: WriteLines, llama: Path
) -> None:
    found = run(
        "fit", write_jsonl(two_camps(60)), "-o", tmp_path / "town", "--backbone", llama, *FIT, "--json", "--lora"
    )
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert facts["tuning"]["lora"] is True
    assert found.stderr == f"note: {llama} has no padding token, and its end token is used.\n"


def test_dropout_is_off_and_the_head_is_fresh(llama: Path) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    pairs = pairtrainer.TextPairs(
        [("so ?", "yes"), ("so ?", "no")], np.array([0]), np.array([1]), np.array([0.5]), np.array([0])
    )
    work = finetune._Work(pairs, FitOptions(), FinetuneOptions(backbone=str(llama)), llama, 1.0, None)
    arguments = transformers.TrainingArguments(output_dir=str(llama / "none"), report_to="none")
    models = [work._fresh_model(3, np.random.SeedSequence(seed), arguments).train() for seed in (0, 0, 1)]
    assert models[0].config.attention_dropout == 0.0
    assert models[0].config.pad_token_id == 2
    heads = [model.score.weight for model in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (3, 32)
    assert not heads[0][2].any(), "the reward beside the members begins with no opinion"
    assert replace(work.features(3)).max_length == 64


def test_a_fitted_head_is_linear_in_what_the_base_makes_of_a_text(tmp_path: Path, llama: Path) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    votes = votes_of(tmp_path, 20)
    items = votes.items()
    texts = [
        (votes.prompts[p], votes.responses[r]) for p, r in zip(items.prompt_index, items.response_index, strict=True)
    ]
    pairs = pairtrainer.TextPairs(texts, items.a, items.b, votes.prob_a, votes.prompt_index)
    work = finetune._Work(pairs, FitOptions(), FinetuneOptions(backbone=str(llama)), llama, 1.0, None)
    arguments = transformers.TrainingArguments(output_dir=str(llama / "none"), report_to="none")
    model = work._fresh_model(
        3, np.random.SeedSequence(0), arguments, lambda base, _: np.eye(base.inputs.shape[1])[:, [4, 9, 30]]
    )
    outputs = classifier_rewards(model, work.tokenizer, texts, 64)
    base = transformers.AutoModel.from_pretrained(llama).eval()
    hidden = []
    for prompt, response in texts:  # the end token pads, so the last that counts is the one before it
        ids = work.tokenizer(f"<s>user {prompt} </s>assistant {response} </s>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            hidden.append(base(torch.tensor([ids])).last_hidden_state[0, -2].numpy())
    scaled = (np.stack(hidden) / np.std(hidden, axis=0))[:, [4, 9, 30]]
    np.testing.assert_allclose(outputs - outputs[0], scaled - scaled[0], atol=1e-3)
