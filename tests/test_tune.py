"""Tuned policies: training, figures, resuming, and errors."""

import importlib
import io
import json
import random
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import facts_of, json_lines, run
from hypothesis import given, strategies as st
from rich.console import Console
from test_remote import Reply, Request, Serve, fails, says, serve  # noqa: F401 - a fixture
from tiny import WORDS, write_backbone

from pluralign import DataError, RemoteOptions, RewardEnsemble, SamplingOptions, TuneOptions, UsageError, answer
from pluralign.answering import tune as tune_module
from pluralign.answering.adapters import Policy, save_adapter
from pluralign.answering.generate import sample_distinct
from pluralign.answering.policies import (
    AdapterPolicy,
    BaseRecord,
    ExampleAnswer,
    Manifest,
    TunedPolicy,
    load_policies,
    run_settings,
)
from pluralign.answering.tune import Tuning, split_prompts, tune
from pluralign.cli.render.answers import tuning_page
from pluralign.core.json_values import from_json, to_json
from pluralign.ensemble.members import LinearMembers, identity_map
from pluralign.text.causal import LocalModel
from pluralign.text.encoders import TextFeatures
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


def rows_of(tuned: Tuning, name: str) -> list[dict[str, Any]]:
    """The samples in one file of a folder of policies."""
    return json_lines(Path(tuned.folder) / name)


# --- training ---------------------------------------------------------------------------------------------------------


def test_each_policy_gets_more_reward_from_its_own_member_on_held_out_prompts(tuned: Tuning) -> None:
    base: Any = tuned.base
    assert [policy.member for policy in tuned.members] == [0, 1]
    for i, policy in enumerate(tuned.members):
        assert policy.improved, policy
        assert policy.reward_after > policy.reward_before + 0.2
        assert policy.interval[0] < policy.reward_after - policy.reward_before < policy.interval[1]
        assert policy.rewards[i] == pytest.approx(policy.reward_after)
        assert base.base_rewards[i] == pytest.approx(policy.reward_before)
        assert policy.rewards[i] > tuned.members[1 - i].rewards[i], "more than the other policy gets from this member"
        assert policy.kl > 2 * policy.kl_standard_error > 0
    assert (base.prompts, base.held_out) == (18, 6)


def test_figures_match_the_stored_samples(tuned: Tuning) -> None:
    base = rows_of(tuned, "base.jsonl")
    trained, held_out = ([row for row in base if row["held_out"] is side] for side in (False, True))
    assert not {row["prompt"] for row in trained} & {row["prompt"] for row in held_out}

    def rewards(rows: list[dict[str, Any]]) -> Any:
        return np.array([TOWN.rewards([(row["prompt"], text) for text in row["responses"]])[:, 0] for row in rows])

    on_train = rewards(trained)
    mean, spread = on_train.mean(), np.sqrt(np.mean([row.var(ddof=1) for row in on_train]))
    policy, after = tuned.members[0], rows_of(tuned, "samples/member-0.jsonl")
    assert [row["prompt"] for row in after] == [row["prompt"] for row in held_out]
    assert policy.reward_before == pytest.approx((rewards(held_out).mean() - mean) / spread)
    assert policy.reward_after == pytest.approx((rewards(after).mean() - mean) / spread)
    assert policy.kl == pytest.approx(np.mean([np.subtract(row["log_prob"], row["base_log_prob"]) for row in after]))
    assert policy.samples[0].after == after[0]["responses"][0]


def test_the_saved_adapter_reproduces_the_log_probabilities_of_the_samples(tuned: Tuning, llama: Path) -> None:
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    transformers = importlib.import_module("transformers")
    folder = Path(tuned.folder) / "member-1"
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama)
    assert isinstance(config["target_modules"], list), "vLLM needs module names"
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    policy = Policy(str(llama))
    for row in rows_of(tuned, "samples/member-1.jsonl")[:3]:
        context = policy.context(row["prompt"], 10)
        for ids, expected in zip(row["tokens"], row["log_prob"], strict=True):
            with torch.no_grad():
                logits = torch.log_softmax(model(torch.tensor([context + ids])).logits[0].double(), dim=-1)
            own = sum(float(logits[len(context) + t - 1, token]) for t, token in enumerate(ids))
            assert own == pytest.approx(expected, abs=1e-4)


def test_the_tuned_policies_write_the_members_own_answers(tuned: Tuning) -> None:
    samplers, sampling = load_policies(tuned.folder, TOWN).samplers, SamplingOptions(max_new_tokens=10, temperature=1.0)
    found = answer(TOWN, "tea rum ?", policies=samplers, sampling=sampling, n=4)
    assert found.written == (0, 1)
    assert sorted(j for entry in found.answers for j in entry.members) == [0, 1]
    drafts = [sample_distinct(samplers[j], "tea rum ?", 8, sampling).responses for j in (0, 1)]
    rewards = np.array([TOWN.rewards([("tea rum ?", text) for text in texts]).mean(axis=0) for texts in drafts])
    assert rewards[0, 0] > rewards[1, 0]
    assert rewards[1, 1] > rewards[0, 1]


def test_the_manifest_holds_the_vllm_command_weights_and_paths(tuned: Tuning, llama: Path) -> None:
    manifest = json.loads((Path(tuned.folder) / "manifest.json").read_text())
    command = f"vllm serve {llama} --enable-lora --max-loras 2 --max-lora-rank 8 --lora-modules "
    assert manifest["serving"]["command"] == command + "member-0=member-0 member-1=member-1"
    assert manifest["serving"]["weights"] == {"member-0": 0.75, "member-1": 0.25}
    facts = [(row["name"], row["weight"], row["path"]) for row in manifest["members"]]
    assert facts == [("member 0", 0.75, "member-0"), ("member 1", 0.25, "member-1")]
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


def test_an_interrupted_tuning_is_resumed(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, folder = QUICKEST | {"steps": 2}, tmp_path / "policies"
    train, draw = tune_module._tune_member, Policy.draw
    trained: list[int] = []
    drawn: list[str] = []
    steps: list[tuple[int, int]] = []

    def interrupted(member: int, *rest: Any) -> Any:
        trained.append(member)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(member, *rest)

    def recorded(self: Any, prompt: str, *rest: Any) -> Any:
        drawn.append(prompt)
        return draw(self, prompt, *rest)

    monkeypatch.setattr(tune_module, "_tune_member", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(TOWN, PROMPTS, str(llama), folder, **quick)
    base = (folder / "base.jsonl").read_bytes()
    (folder / "base.jsonl").write_bytes(base[:-100])  # as a kill leaves it
    monkeypatch.setattr(Policy, "draw", recorded)
    resumed = tune(TOWN, PROMPTS, str(llama), folder, progress=lambda *at: steps.append(at), **quick)
    assert trained == [0, 1, 1], "a finished member is not trained again"
    assert (folder / "base.jsonl").read_bytes() == base
    assert resumed.base
    assert len(drawn) == 1 + resumed.base.held_out, "the base is sampled only for the lost line"
    assert steps[-1] == (24 + 2 + 6, 24 + 2 + 6)
    assert resumed.resumed == 1
    again = tune(TOWN, PROMPTS, str(llama), folder, **quick)
    assert (again.members, again.resumed) == (resumed.members, 2)
    assert len(trained) == 3
    monkeypatch.undo()
    unbroken = tune(TOWN, PROMPTS, str(llama), tmp_path / "unbroken", **quick)
    assert [policy.rewards for policy in unbroken.members] == [policy.rewards for policy in resumed.members]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_members_can_be_added_later_and_those_without_weight_are_skipped(tmp_path: Path, llama: Path) -> None:
    town = ensemble_of("question marks", "full stops", "digits", weights=(0.5, 0.5, 0.0))

    def tuning(**members: Any) -> Tuning:
        quick = QUICKEST | {"max_new_tokens": 10} | members
        return tune(town, PROMPTS[:6], str(llama), tmp_path / "policies", **quick)

    first = tuning(members=[1])
    assert [policy.member for policy in first.members] == [1]
    assert first.serving
    assert first.serving.weights == {"member-1": 1.0}
    both = tuning()
    assert [policy.member for policy in both.members] == [0, 1]
    assert (both.resumed, both.members[1]) == (1, first.members[0])
    with pytest.raises(DataError, match="member 2 gives all sampled responses to a prompt the same reward"):
        tuning(members=[2])


def test_training_is_silent_and_seeded_apart(tmp_path: Path, llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    rows: list[Any] = [{"prompt": prompt} for prompt in PROMPTS[:5]]
    rows += [{"prompt": "tea " * 60}, {"text": "no prompt"}, {"prompt": [{"role": "user", "content": "rum ?"}]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ("tune", tmp_path / "town", tmp_path / "prompts.jsonl", "--model", llama, "--member", "1", "--json")
    quick = ("--steps", "1", "--samples", "4", "--max-new-tokens", "8")
    done = run(*command, *quick, "-o", tmp_path / "policies")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert [policy["member"] for policy in facts["members"]] == [1]
    assert {"reward_before", "reward_after", "interval", "kl", "improved"} < set(facts["members"][0])
    base = facts["base"]
    assert (base["prompts"] + base["held_out"], base["too_long"], facts["bad_rows"]) == (6, 1, 1)
    assert facts["seconds"] > 0


def shown(tuning: Tuning) -> str:
    stream = io.StringIO()
    Console(file=stream, width=150, highlight=False).print(*tuning_page(tuning), markup=False)
    return stream.getvalue()


def test_the_page_reports_a_reward_that_did_not_improve(tuned: Tuning) -> None:
    assert "did not improve" not in shown(tuned)
    flat = replace(tuned.members[1], interval=(-0.1, 0.3), improved=False, samples=[])
    page = shown(replace(tuned, members=[tuned.members[0], flat]))
    assert "The reward of member 1 did not improve significantly" in page
    assert "The reward of member 0" not in page


def test_texts_on_the_page_cannot_move_the_cursor(tuned: Tuning) -> None:
    sample = ExampleAnswer("tea\x1b[2J", "[red]no[/red]", "a\r\nb" + "x" * 2000, 0.0, 0.0)
    page = shown(replace(tuned, members=[replace(tuned.members[0], samples=[sample])]))
    assert "\x1b" not in page
    assert "[red]no[/red]" in page
    assert "x" * 500 not in page.replace("\n", "").replace("│", "").replace(" ", "")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_unusable_prompts_members_and_models_are_refused(tmp_path: Path, llama: Path) -> None:
    endless, few = str(write_backbone(tmp_path / "endless", eos=False, pad=True)), ["tea", "rum", "no"]
    for model, prompts, members, words in (
        (str(llama), [*few, "tea"], [], "there are 3 distinct prompts, but at least 4 are needed"),
        (str(llama), [*few, "so " * 70], [], r"3 distinct prompts that fit the model's context \(1 do not\)"),
        (str(llama), PROMPTS, [0, 2], "members are numbered from 0 to 1; there is no member 2"),
        (endless, PROMPTS, [], "the model has no end token; give its tokenizer an eos_token"),
    ):
        with pytest.raises((DataError, UsageError), match=words):
            tune(TOWN, prompts, model, tmp_path / "policies", members=members, max_new_tokens=8)
        assert not (tmp_path / "policies").exists()


def test_a_folder_with_other_settings_or_files_is_refused(tuned: Tuning, tmp_path: Path, llama: Path) -> None:
    same: dict[str, Any] = {"method": tuned.settings["method"], **QUICK}
    with pytest.raises(DataError, match=r"its policies were tuned with beta 0\.1, samples 8; name another folder"):
        tune(TOWN, PROMPTS, str(llama), tuned.folder, **same | {"beta": 0.2, "samples": 4})
    with pytest.raises(DataError, match="its policies were tuned with another ensemble, other prompts"):
        tune(ensemble_of("commas", "digits"), PROMPTS[1:], str(llama), tuned.folder, **same)
    assert tune(TOWN, PROMPTS, str(llama), tuned.folder, **same | {"micro_batch": 2}).resumed == 2
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="holds other files; name another folder, or remove this one"):
        tune(TOWN, PROMPTS, str(llama), tmp_path)
    with pytest.raises(UsageError, match="is a file; name a folder"):
        tune(TOWN, PROMPTS, str(llama), tmp_path / "thesis.tex")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="pluralign tune did not write this file"):
        tune(TOWN, PROMPTS, str(llama), tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "ppo"}, "method cannot be 'ppo'; did you mean 'dpo'"),
        ({"beta": 0.0}, "beta must be above 0, not 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, not nan"),
        ({"lora_rank": 513}, "lora_rank must be at most 512"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"temperature": 11.0}, "temperature must be above 0 and at most 10"),
        ({"held_out": 1.0}, "held_out must be between 0 and 1"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TuneOptions(**changes)


def test_chat_prompts_can_be_tuned_on(tmp_path: Path, llama: Path) -> None:
    rest = (Message("assistant", "no"), Message("user", "so ?"))
    chats: list[Any] = [(Message("user", prompt), *rest) for prompt in PROMPTS[:6]]
    found = tune(TOWN, chats, str(llama), tmp_path / "policies", members=[0], **QUICKEST | {"method": "grpo"})
    assert found.members[0].samples[0].prompt[0]["role"] == "user"
    assert sorted(load_policies(tmp_path / "policies", TOWN).samplers) == [0]


# --- policy writing ---------------------------------------------------------------------------------------------------


SHORT = SamplingOptions(max_new_tokens=8, temperature=1.0)
BRIEF = ("--max-new-tokens", "8")


def write_policies(folder: Path, model: Path, ensemble: RewardEnsemble) -> Path:
    """Write the folder of ``tune`` with random adapters; test_tune checks that those of ``tune`` can write too."""
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    record = BaseRecord(str(model), 4, 2, 0, [0.0], 4.0)
    manifest = Manifest(run_settings(ensemble, ["tea ?"], str(model), TuneOptions()), base=record)
    for j in range(ensemble.k):
        path = f"member-{j}"
        with torch.random.fork_rng():
            torch.manual_seed(j)
            config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            adapted = peft.get_peft_model(LocalModel(str(model)).model, config)
        save_adapter(adapted, str(model), folder / path)
        figures: Any = (0.0, 1.0, (0.5, 1.5), True, 1.0, 0.1, [0.0] * ensemble.k, 4.0, 1.0, [])
        manifest = manifest.with_member(TunedPolicy(j, path, float(ensemble.weights[j]), path, *figures), 8)
    manifest.save(folder)
    return folder


@pytest.fixture(scope="module")
def policies(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policies(tmp_path_factory.mktemp("tuned") / "policies", llama, TOWN)


@pytest.fixture(scope="module")
def ensemble_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("town")
    TOWN.save(folder)
    return folder


# --- in this process --------------------------------------------------------------------------------------------------


def test_each_policy_writes_what_its_adapter_alone_would_write(policies: Path, llama: Path) -> None:
    peft = importlib.import_module("peft")
    tuned = load_policies(policies, TOWN)
    texts: dict[int, list[str]] = {}
    for member in (0, 1, 0):
        written = sample_distinct(tuned.samplers[member], "tea ?", 4, SHORT).responses
        alone = LocalModel(str(llama))
        alone.model = peft.PeftModel.from_pretrained(alone.model, policies / f"member-{member}").eval()
        assert written == sample_distinct(alone, "tea ?", 4, SHORT).responses
        assert texts.setdefault(member, written) == written, "the same again after another policy wrote"
    assert texts[0] != texts[1]


def test_the_base_without_adapters_writes_as_before_after_policies_wrote(policies: Path, llama: Path) -> None:
    tuned = load_policies(policies, TOWN)
    plain = sample_distinct(LocalModel(str(llama)), "tea ?", 4, SHORT).responses
    for model, is_base in ((tuned.base, True), (tuned.samplers[1], False), (tuned.base, True)):
        assert (sample_distinct(model, "tea ?", 4, SHORT).responses == plain) == is_base


def test_all_policies_share_one_base_in_memory(policies: Path) -> None:
    tuned = load_policies(policies, TOWN)
    for sampler in tuned.samplers.values():
        sampler.prepare()
    models: list[Any] = [tuned.samplers[0], tuned.samplers[1], tuned.base]
    assert {type(one) for one in models} == {AdapterPolicy}
    assert len({id(one.model) for one in models}) == 1
    assert sorted(models[0].model.peft_config) == ["member-0", "member-1"]


def test_the_default_temperature_is_that_of_the_tuning_and_lower_for_small_models(policies: Path) -> None:
    local: Any = load_policies(policies, TOWN).samplers[0]
    served: Any = load_policies(policies, TOWN, RemoteOptions(base_url="http://127.0.0.1:9/v1")).samplers[0]
    for model, default in ((local, 0.7), (served, 1.0)):
        assert model.with_defaults(SamplingOptions()).temperature == default
        assert model.with_defaults(SamplingOptions(temperature=1.3)).temperature == 1.3


def test_answers_are_reproducible_by_seed(policies: Path) -> None:
    def texts(seed: int) -> list[str]:
        own, sampling = load_policies(policies, TOWN).samplers, SamplingOptions(max_new_tokens=8)
        found = answer(TOWN, "tea ?", policies=own, sampling=sampling, seed=seed)
        return [entry.text for entry in found.answers]

    assert texts(3) == texts(3)
    assert len({tuple(texts(seed)) for seed in range(6)}) > 1


# --- manifests that do not fit ----------------------------------------------------------------------------------------


def test_policies_of_another_ensemble_are_rejected(policies: Path) -> None:
    with pytest.raises(DataError, match="its policies were tuned to another ensemble; name the folder"):
        load_policies(policies, ensemble_of("full stops", "question marks"))
    with pytest.raises(DataError, match="tuned to an ensemble of 2 members, but this one has 1"):
        load_policies(policies, ensemble_of("full stops", weights=(1.0,)))


def test_folders_without_finished_policies_are_rejected(policies: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no manifest\.json; name a folder that pluralign tune wrote"):
        load_policies(tmp_path, TOWN)
    manifest = json.loads((policies / "manifest.json").read_text())
    elsewhere = [manifest | {"members": [manifest["members"][0] | {"path": path}]} for path in ("..", "", "member-9")]
    for content, words in (
        ({}, "pluralign tune did not write this file"),
        (manifest | {"members": []}, "no policy is finished; run pluralign tune again"),
        (manifest, "its adapters are missing"),
        *((other, "pluralign tune did not write this file") for other in elsewhere),
        (manifest | {"base": None}, "pluralign tune did not write this file"),
        (manifest | {"settings": manifest["settings"] | {"temperature": "x"}}, "pluralign tune did not write"),
        (manifest | {"settings": {}}, "pluralign tune did not write this file"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=words):
            load_policies(tmp_path / "manifest.json", TOWN)


def test_a_missing_adapter_is_left_to_the_base_and_a_damaged_one_is_named(policies: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(policies, tmp_path / "copy")
    shutil.rmtree(copy / "member-1")
    tuned = load_policies(copy, TOWN)
    assert sorted(tuned.samplers) == [0]
    (copy / "member-0" / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"member-0.adapter_model\.safetensors: it is damaged .*; copy or download"):
        load_policies(copy, TOWN).samplers[0].prepare()


# --- on a server ------------------------------------------------------------------------------------------------------


def adapters(*names: str) -> Reply:
    return Reply({"data": [{"id": name} for name in names]})


def by_name(request: Request) -> Reply:
    marks = {"member-0": "?", "member-1": "."}.get(request["model"])
    if marks is None:
        return fails(404, "no such model")
    return says(*(f"{request['model']} {marks * (i + 1)}" for i in range(request.get("n", 1))))


def test_a_server_is_asked_for_the_adapter_of_each_member(policies: Path, serve: Serve) -> None:  # noqa: F811
    server = serve(by_name, adapters("base", "member-0", "member-1"))
    tuned = load_policies(policies, TOWN, RemoteOptions(base_url=server.url))
    for sampler in tuned.samplers.values():
        sampler.prepare()
    found = answer(TOWN, "tea ?", policies=tuned.samplers, n=3)
    assert {(entry.text, entry.member) for entry in found.answers} == {("member-0 ???", 0), ("member-1 ...", 1)}
    assert sorted(request["model"] for request in server.requests) == ["member-0", "member-1"]
    assert {request["temperature"] for request in server.requests} == {1.0}


def test_a_server_without_the_adapters_is_an_error(policies: Path, serve: Serve) -> None:  # noqa: F811
    server = serve(by_name, adapters("base"))
    with pytest.raises(UsageError, match=r"has no model 'member-0'; serve the adapters with the command in .*json"):
        load_policies(policies, TOWN, RemoteOptions(base_url=server.url)).samplers[0].prepare()


# --- on the command line ----------------------------------------------------------------------------------------------


def answering(folder: Path, policies: Path, *more: str) -> Any:
    """What ``pluralign answer`` prints as JSON."""
    return facts_of("answer", folder, "tea ?", "--policies", policies, *more)


def test_the_command_answers_with_policies_in_this_process(policies: Path, ensemble_folder: Path) -> None:
    found = answering(ensemble_folder, policies, *BRIEF)
    assert found["written"] == [0, 1]
    assert found == answering(ensemble_folder, policies, *BRIEF)
    steered = answering(ensemble_folder, policies, *BRIEF, "--mode", "steerable", "--member", "1", "-n", "3")
    assert (steered["written"], steered["candidates"]) == ([1], 3)
    assert "written by its policy" in run("answer", ensemble_folder, "tea ?", "--policies", policies, *BRIEF).stdout


def test_the_command_asks_the_server_for_adapters(policies: Path, ensemble_folder: Path, serve: Serve) -> None:  # noqa: F811
    server = serve(by_name, adapters("member-0", "member-1"))
    (one,) = answering(ensemble_folder, policies, "--base-url", server.url, "--mode", "distributional")["answers"]
    assert one["text"].startswith(f"member-{one['member']}")
    assert len(server.requests) == 1
