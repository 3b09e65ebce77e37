"""Tuned policies: training, figures, resuming, and errors."""

import importlib
import io
import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_process
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny import WORDS, write_backbone

from pluralign.answering import tune as tune_module
from pluralign.answering.adapters import Policy
from pluralign.answering.answer import answer
from pluralign.answering.generate import sample_distinct
from pluralign.answering.options import TuneOptions
from pluralign.answering.policies import ExampleAnswer, Manifest, load_policies
from pluralign.answering.tune import Tuning, split_prompts, tune
from pluralign.cli.render.answers import tuning_page
from pluralign.core.errors import DataError, UsageError
from pluralign.core.json_values import from_json, to_json
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.members import LinearMembers, identity_map
from pluralign.text.features import TextFeatures
from pluralign.text.options import SamplingOptions
from pluralign.text.surface import NAMES
from pluralign.votes.prompts import Message

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPTS = [f"{one} {two} ?" for one, two in product(WORDS[:6], WORDS[2:6])]
QUICK: dict[str, Any] = {
    "steps": 16, "samples": 8, "max_new_tokens": 10, "learning_rate": 1e-2, "lora_rank": 8, "micro_batch": 64,
}  # fmt: skip

QUICKEST = QUICK | {"steps": 1, "samples": 4, "max_new_tokens": 4}


def ensemble_of(*features: str, weights: tuple[float, ...] = (0.75, 0.25)) -> RewardEnsemble:
    """Members that each reward one surface feature, so that nothing is fitted and tuning is easy."""
    theta = np.zeros((len(NAMES), len(features)))
    for j, name in enumerate(features):
        theta[NAMES.index(name), j] = 1.0
    members = LinearMembers(identity_map(len(NAMES)), theta)
    return RewardEnsemble(members, np.array(weights), TextFeatures(encoder="none"))


TOWN = ensemble_of("question marks", "full stops")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("llama"), eos_token_id=2, initializer_range=0.2)


@pytest.fixture(scope="module", params=["dpo", "grpo"])
def tuned(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    folder = tmp_path_factory.mktemp(request.param) / "policies"
    return tune(TOWN, PROMPTS, str(llama), folder, method=request.param, **QUICK)


# --- training ---------------------------------------------------------------------------------------------------------


def test_each_policy_gets_more_reward_from_its_own_member_on_held_out_prompts(tuned: Tuning) -> None:
    assert [policy.member for policy in tuned.members] == [0, 1]
    for i, policy in enumerate(tuned.members):
        assert policy.improved, policy
        assert policy.reward_after > policy.reward_before + 0.2
        assert policy.interval[0] < policy.reward_after - policy.reward_before < policy.interval[1]
        assert tuned.matrix[i][i] == pytest.approx(policy.reward_after)
        assert tuned.base[i] == pytest.approx(policy.reward_before)
        assert tuned.matrix[i][i] > tuned.matrix[1 - i][i], "more than the other policy gets from this member"
        assert policy.kl > 2 * policy.kl_standard_error > 0
    assert (tuned.prompts, tuned.held_out) == (18, 6)


def test_figures_match_the_stored_samples(tuned: Tuning) -> None:
    folder = Path(tuned.folder)
    base = [json.loads(line) for line in (folder / "base.jsonl").read_text().splitlines()]
    trained, held_out = ([row for row in base if row["held_out"] is side] for side in (False, True))
    assert not {row["prompt"] for row in trained} & {row["prompt"] for row in held_out}

    def rewards(rows: list[dict[str, Any]]) -> Any:
        values = [TOWN.rewards([(row["prompt"], text) for text in row["responses"]])[:, 0] for row in rows]
        return np.array(values)

    on_train = rewards(trained)
    mean, spread = on_train.mean(), np.sqrt(np.mean([row.var(ddof=1) for row in on_train]))
    policy = tuned.members[0]
    after = [json.loads(line) for line in (folder / "samples" / "member-0.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in after] == [row["prompt"] for row in held_out]
    assert policy.reward_before == pytest.approx((rewards(held_out).mean() - mean) / spread)
    assert policy.reward_after == pytest.approx((rewards(after).mean() - mean) / spread)
    assert policy.kl == pytest.approx(np.mean([np.subtract(row["log_prob"], row["base_log_prob"]) for row in after]))
    assert policy.samples[0].after == after[0]["responses"][0]


def test_the_saved_adapter_reproduces_the_log_probabilities_of_the_samples(tuned: Tuning, llama: Path) -> None:
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    transformers = importlib.import_module("transformers")
    folder = Path(tuned.folder)
    assert sorted(path.name for path in (folder / "member-1").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((folder / "member-1" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama)
    assert isinstance(config["target_modules"], list), "vLLM needs module names"
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model = peft.PeftModel.from_pretrained(base, folder / "member-1").eval()
    policy = Policy(str(llama))
    for line in (folder / "samples" / "member-1.jsonl").read_text().splitlines()[:3]:
        row = json.loads(line)
        context = policy.context(row["prompt"], 10)
        for ids, expected in zip(row["tokens"], row["log_prob"], strict=True):
            with torch.no_grad():
                logits = torch.log_softmax(model(torch.tensor([context + ids])).logits[0].double(), dim=-1)
            own = sum(float(logits[len(context) + t - 1, token]) for t, token in enumerate(ids))
            assert own == pytest.approx(expected, abs=1e-4)


def test_the_tuned_policies_write_the_members_own_answers(tuned: Tuning) -> None:
    policies = load_policies(tuned.folder, TOWN)
    sampling = SamplingOptions(max_new_tokens=10, temperature=1.0)
    found = answer(TOWN, "tea rum ?", policies=policies.samplers, sampling=sampling, n=4)
    assert found.written == (0, 1)
    assert sorted(j for entry in found.answers for j in entry.members) == [0, 1]
    drafts = [sample_distinct(policies.samplers[j], "tea rum ?", 8, sampling).responses for j in (0, 1)]
    rewards = np.array([TOWN.rewards([("tea rum ?", text) for text in texts]).mean(axis=0) for texts in drafts])
    assert rewards[0, 0] > rewards[1, 0]
    assert rewards[1, 1] > rewards[0, 1]


def test_the_manifest_holds_the_vllm_command_weights_and_paths(tuned: Tuning, llama: Path) -> None:
    manifest = json.loads((Path(tuned.folder) / "manifest.json").read_text())
    assert manifest["serving"] == {
        "command": f"vllm serve {llama} --enable-lora --max-loras 2 --max-lora-rank 8 "
        "--lora-modules member-0=member-0 member-1=member-1",
        "weights": {"member-0": 0.75, "member-1": 0.25},
    }
    assert [(row["name"], row["weight"], row["path"]) for row in manifest["members"]] == [
        ("member 0", 0.75, "member-0"),
        ("member 1", 0.25, "member-1"),
    ]
    assert manifest["base"]["name"] == str(llama)
    read = from_json(Manifest, manifest)
    assert (read.members, read.serving, to_json(read)) == (tuned.members, tuned.serving, manifest)


# --- prompts ----------------------------------------------------------------------------------------------------------


@given(st.integers(4, 40), st.floats(0.01, 0.99), st.integers(0, 5), st.randoms())
def test_the_split_does_not_depend_on_the_order_of_prompts(n: int, share: float, seed: int, rng: random.Random) -> None:
    prompts = [f"prompt {i}" for i in range(n)]
    train, held_out = split_prompts(prompts, share, seed)
    assert sorted([*train, *held_out]) == sorted(prompts)
    assert min(len(train), len(held_out)) >= 2
    assert abs(len(held_out) - share * n) <= 2
    shuffled = rng.sample(prompts, n)
    assert set(split_prompts(shuffled, share, seed)[1]) == set(held_out)


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes_with_the_next_member(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = QUICKEST | {"steps": 2}
    train, trained = tune_module._tune_member, []

    def interrupted(member: int, *rest: Any) -> Any:
        trained.append(member)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(member, *rest)

    monkeypatch.setattr(tune_module, "_tune_member", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(TOWN, PROMPTS, str(llama), tmp_path / "policies", **quick)
    base = (tmp_path / "policies" / "base.jsonl").read_bytes()
    (tmp_path / "policies" / "base.jsonl").write_bytes(base[:-100])  # as a kill leaves it
    drawn: list[str] = []
    draw = Policy.draw

    def recorded(self: Any, prompt: str, *rest: Any) -> Any:
        drawn.append(prompt)
        return draw(self, prompt, *rest)

    monkeypatch.setattr(Policy, "draw", recorded)
    steps: list[tuple[int, int]] = []
    resumed = tune(TOWN, PROMPTS, str(llama), tmp_path / "policies", progress=lambda *at: steps.append(at), **quick)
    assert trained == [0, 1, 1], "a finished member is not trained again"
    assert (tmp_path / "policies" / "base.jsonl").read_bytes() == base
    assert len(drawn) == 1 + resumed.held_out, "the base is sampled only for the lost line"
    assert steps[-1] == (24 + 2 + 6, 24 + 2 + 6)
    assert resumed.resumed == 1
    again = tune(TOWN, PROMPTS, str(llama), tmp_path / "policies", **quick)
    assert (again.members, again.matrix, again.resumed) == (resumed.members, resumed.matrix, 2)
    assert len(trained) == 3
    monkeypatch.undo()
    unbroken = tune(TOWN, PROMPTS, str(llama), tmp_path / "unbroken", **quick)
    assert [policy.rewards for policy in unbroken.members] == [policy.rewards for policy in resumed.members]
    assert not [path for path in (tmp_path / "policies").iterdir() if path.name.startswith(".")]


def test_members_can_be_added_later_and_those_without_weight_are_skipped(tmp_path: Path, llama: Path) -> None:
    town, quick = (
        ensemble_of("question marks", "full stops", "digits", weights=(0.5, 0.5, 0.0)),
        QUICKEST | {"max_new_tokens": 10},
    )
    first = tune(town, PROMPTS[:6], str(llama), tmp_path / "policies", members=[1], **quick)
    assert [policy.member for policy in first.members] == [1]
    assert first.serving.weights == {"member-1": 1.0}
    both = tune(town, PROMPTS[:6], str(llama), tmp_path / "policies", **quick)
    assert [policy.member for policy in both.members] == [0, 1]
    assert (both.resumed, both.members[1]) == (1, first.members[0])
    with pytest.raises(DataError, match="member 2 gives all sampled responses to a prompt the same reward"):
        tune(town, PROMPTS[:6], str(llama), tmp_path / "policies", members=[2], **quick)


def test_training_prints_nothing_and_keeps_the_callers_random_state(
    tmp_path: Path, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch = importlib.import_module("torch")

    def states() -> list[Any]:
        arrays: Any = np.random.get_state()  # noqa: NPY002 - trainers seed this one
        return [random.getstate(), arrays[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    capfd.readouterr()
    tune(TOWN, PROMPTS[:6], str(llama), tmp_path / "policies", members=[0], **QUICKEST | {"method": "grpo"})
    assert states() == before
    assert capfd.readouterr() == ("", "")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_one_json_object(tmp_path: Path, llama: Path) -> None:
    TOWN.save(tmp_path / "town")
    rows = [{"prompt": prompt} for prompt in PROMPTS[:5]]
    rows += [{"prompt": "tea " * 60}, {"text": "no prompt"}, {"prompt": [{"role": "user", "content": "rum ?"}]}]  # type: ignore[dict-item]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ("tune", tmp_path / "town", tmp_path / "prompts.jsonl", "--model", llama, "--member", "1", "--json")
    quick = ("--steps", "1", "--samples", "4", "--max-new-tokens", "8")
    done = run_process(*command, *quick, "-o", tmp_path / "policies")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert [policy["member"] for policy in facts["members"]] == [1]
    assert {"reward_before", "reward_after", "interval", "kl", "improved"} < set(facts["members"][0])
    assert len(facts["matrix"]) == len(facts["matrix"][0]) == 1
    assert (facts["prompts"] + facts["held_out"], facts["too_long"], facts["bad_rows"]) == (6, 1, 1)
    assert facts["seconds"] > 0


def shown(tuning: Tuning) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=150, highlight=False)
    for part in tuning_page(tuning):
        console.print(part, markup=False)
    return stream.getvalue()


def test_the_page_reports_a_reward_that_did_not_improve(tuned: Tuning) -> None:
    assert "did not improve" not in shown(tuned)
    flat = replace(tuned.members[1], interval=(-0.1, 0.3), improved=False, samples=[])
    page = shown(replace(tuned, members=[tuned.members[0], flat]))
    assert "The reward of member 1 did not improve significantly" in page
    assert "The reward of member 0" not in page


def test_texts_on_the_page_cannot_move_the_cursor(tuned: Tuning) -> None:
    sample = ExampleAnswer("tea\x1b[2J", "[red]no[/red]", "a\r\nb" + "x" * 2000, 0.0, 0.0)
    page = shown(replace(tuned, members=[replace(tuned.members[0], samples=[sample])], matrix=[[0.0]]))
    assert "\x1b" not in page
    assert "[red]no[/red]" in page
    assert "x" * 500 not in page.replace("\n", "").replace("│", "").replace(" ", "")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_too_few_prompts_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(DataError, match=r"there are 3 distinct prompts, but at least 4 are needed"):
        tune(TOWN, ["tea", "rum", "no", "tea"], str(llama), tmp_path / "policies")
    with pytest.raises(DataError, match=r"there are 3 distinct prompts that fit the model's context \(1 do not\)"):
        tune(TOWN, ["tea", "rum", "no", "so " * 70], str(llama), tmp_path / "policies", max_new_tokens=8)
    assert not (tmp_path / "policies").exists()


def test_unknown_members_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(UsageError, match="members are numbered from 0 to 1; there is no member 2"):
        tune(TOWN, PROMPTS, str(llama), tmp_path / "policies", members=[0, 2])


def test_a_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    endless = write_backbone(tmp_path / "endless", eos=False, pad=True)
    with pytest.raises(DataError, match="the model has no end token; give its tokenizer an eos_token"):
        tune(TOWN, PROMPTS, str(endless), tmp_path / "policies", max_new_tokens=8)
    assert not (tmp_path / "policies").exists()


def test_a_folder_with_other_settings_or_files_is_refused(tuned: Tuning, tmp_path: Path, llama: Path) -> None:
    same: dict[str, Any] = {"method": tuned.method, **QUICK}
    with pytest.raises(DataError, match=r"its policies were tuned with beta 0\.1, samples 8; name another folder"):
        tune(TOWN, PROMPTS, str(llama), tuned.folder, **same | {"beta": 0.2, "samples": 4})
    with pytest.raises(DataError, match="its policies were tuned with another ensemble, other prompts"):
        tune(ensemble_of("commas", "digits"), PROMPTS[1:], str(llama), tuned.folder, **same)
    assert tune(TOWN, PROMPTS, str(llama), tuned.folder, **same | {"micro_batch": 2}).resumed == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(DataError, match="the folder holds other files; name a new folder"):
        tune(TOWN, PROMPTS, str(llama), tmp_path / "full")
    with pytest.raises(UsageError, match="is a file; name a folder"):
        tune(TOWN, PROMPTS, str(llama), tmp_path / "full" / "thesis.tex")
    (tmp_path / "full" / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="pluralign tune did not write this file"):
        tune(TOWN, PROMPTS, str(llama), tmp_path / "full")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "ppo"}, "method cannot be 'ppo'; did you mean 'dpo'"),
        ({"beta": 0.0}, "beta must be above 0, not 0"),
        ({"steps": 0}, "steps must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, not nan"),
        ({"lora_rank": 513}, "lora_rank must be at most 512"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"temperature": 11.0}, "temperature must be above 0 and at most 10"),
        ({"held_out": 1.0}, "held_out must be between 0 and 1"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TuneOptions(**changes)


def test_chat_prompts_can_be_tuned_on(tmp_path: Path, llama: Path) -> None:
    chats: list[Any] = [
        (Message("user", prompt), Message("assistant", "no"), Message("user", "so ?")) for prompt in PROMPTS[:6]
    ]
    found = tune(TOWN, chats, str(llama), tmp_path / "policies", members=[0], **QUICKEST | {"method": "grpo"})
    assert found.members[0].samples[0].prompt[0]["role"] == "user"
    assert load_policies(tmp_path / "policies", TOWN).missing == (1,)
