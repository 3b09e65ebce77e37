"""``fit``: what it returns, what it may look at, and that a killed fit ends as an unbroken one would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pluralign import FitOptions, RewardEnsemble, evaluate, fit, load_preferences
from pluralign.core.errors import DataError, UsageError
from pluralign.ensemble.ensemble import texts_of
from pluralign.ensemble.record import HistoryRow
from pluralign.features import encoder as encoders
from pluralign.training import joint
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Item
from pluralign.votes.town_hall import town_hall

# DESIGN.md, the row of `pluralign fit`; `weights` is beside the facts.
FIT_KEYS = {"method", "k", "seconds", "history", "test", "baselines", "members"}
HISTORY_KEYS = {"k", "train_brier", "test_brier", "test_brier_corrected"}
TEST_KEYS = {"brier", "brier_corrected", "noise", "log_loss", "interval"}
BASELINES = {"floor", "constant_half", "soft_bt", "hard_bt", "bootstrap"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joint fit of a few steps and hashes of 32 numbers: enough for everything but quality."""
    monkeypatch.setattr(joint, "STEPS", 20)
    monkeypatch.setattr(joint, "BATCH", 256)
    monkeypatch.setattr(encoders, "HASH_DIMENSION", 32)


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(480).preferences


def fit_quickly(votes: PreferenceSet, **changes: Any) -> RewardEnsemble:
    return fit(votes, **{"encoder": "none", "k": 2, **changes})


def same_fit(one: RewardEnsemble, other: RewardEnsemble) -> bool:
    return (
        one.members.theta.tobytes() == other.members.theta.tobytes()
        and one.weights.tobytes() == other.weights.tobytes()
        and one.temperature == other.temperature
    )


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k": 1},
        {"target": "votes"},
        {"encoder": "hashing"},
        {"encoder": "hashing", "surface": False, "test_fraction": 0.3},
        {"level": "policy"},
        {"members": "mlp"},
        {"members": "mlp", "level": "policy"},
        {"max_disagreement": 1.0},
        {"k": "auto"},
        {"method": "stagewise", "variant": "printed", "loss": "mse"},
        {"method": "stagewise", "variant": "printed", "loss": "bce"},
        {"method": "stagewise", "variant": "symmetric", "loss": "bce"},
        {"method": "stagewise", "variant": "weighted"},
        {"method": "stagewise", "max_disagreement": 1.0},
        {"method": "stagewise", "members": "mlp"},
        {"method": "stagewise", "k": "auto"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()) or "default",
)
def test_every_way_to_fit_gives_members_weights_and_the_promised_facts(
    quick: None, votes: PreferenceSet, changes: dict[str, Any]
) -> None:
    ensemble = fit_quickly(votes, **changes)
    facts = ensemble.facts
    if changes.get("k") != "auto":
        assert ensemble.k == changes.get("k", 2)
    assert ensemble.k == ensemble.members.n_members == facts["k"] == len(facts["members"]) <= 16
    assert (ensemble.weights >= 0).all()
    assert ensemble.weights.sum() == pytest.approx(1.0, abs=1e-6)
    assert ensemble.temperature > 0

    json.dumps(facts, allow_nan=False)  # raises where a NaN is left
    assert set(facts) >= FIT_KEYS
    assert all(set(record) >= HISTORY_KEYS for record in facts["history"])
    assert set(facts["test"]) >= TEST_KEYS
    assert set(facts["baselines"]) >= BASELINES
    assert all({"brier", "brier_corrected"} <= set(baseline) for baseline in facts["baselines"].values())
    assert all({"weight", "disagreement", "regret"} <= set(member) for member in facts["members"])
    assert [member["weight"] for member in facts["members"]] == pytest.approx(ensemble.weights.tolist())
    assert facts["method"] == changes.get("method", "joint")
    assert facts["options"] == vars(replace(FitOptions(), **{"encoder": "none", "k": 2, **changes}))

    last = facts["history"][-1]
    assert last["k"] == ensemble.k
    assert last["weights"] == pytest.approx(ensemble.weights.tolist())
    assert last["test_brier"] == pytest.approx(facts["test"]["brier"], abs=1e-6)
    assert last["test_brier_corrected"] == pytest.approx(facts["test"]["brier_corrected"], abs=1e-6)


def test_history_shows_each_size_on_the_way(quick: None, votes: PreferenceSet) -> None:
    def sizes(**changes: Any) -> list[int]:
        seen: list[HistoryRow] = []
        watch = lambda what, value: seen.append(value) if what == "record" else None  # noqa: E731
        ensemble = fit_quickly(votes, watch=watch, **changes)
        history = ensemble.facts["history"]
        assert [record.k for record in seen] == [record["k"] for record in history]
        assert all(len(record["weights"]) == record["k"] for record in history)
        return [record["k"] for record in history]

    assert sizes(k=8) == [1, 2, 4, 8]
    assert sizes(k=5) == [1, 2, 4, 5]
    assert sizes(k=1) == [1]
    assert sizes(k=5, method="stagewise") == [1, 2, 3, 4, 5]


def test_the_facts_are_those_of_evaluating_the_held_out_prompts(quick: None, votes: PreferenceSet) -> None:
    ensemble = fit_quickly(votes, k=4, test_fraction=0.2, seed=5)
    train, test = votes.split(0.2, seed=5)
    found = evaluate(ensemble, test)
    assert ensemble.facts["test"]["brier"] == pytest.approx(found.test.brier, abs=1e-12)
    assert ensemble.facts["test"]["interval"]["high"] == pytest.approx(found.test.interval.high, abs=1e-12)
    for name, baseline in found.baselines.items():
        assert ensemble.facts["baselines"][name]["brier"] == pytest.approx(baseline.brier, abs=1e-9), name
    data = ensemble.facts["data"]
    assert (data["train_pairs"], data["test_pairs"]) == (len(train), len(test))
    assert (data["train_prompts"], data["test_prompts"]) == (len(train.prompts), len(test.prompts))
    assert data["fingerprint"] == votes.fingerprint
    errors = (ensemble.prob_hat(train) - train.prob_a) ** 2
    assert ensemble.facts["history"][-1]["train_brier"] == pytest.approx(errors.mean(), abs=1e-6)


def test_the_stages_of_a_stagewise_fit_can_be_taken_apart(votes: PreferenceSet) -> None:
    ensemble = fit_quickly(votes, k=4, method="stagewise")
    _, test = votes.split()
    for record in ensemble.facts["history"]:
        errors = (ensemble.first(record["k"]).prob_hat(test) - test.prob_a) ** 2
        assert errors.mean() == pytest.approx(record["test_brier"], abs=1e-6)


@pytest.mark.slow
def test_an_ensemble_of_four_beats_one_reward_and_a_coin_on_the_town_hall() -> None:
    """At full length, on surface features alone: no exact score, but the order that makes the method worth having."""
    facts = fit(town_hall(1200).preferences, k=4, encoder="none", target="teacher", max_disagreement=1).facts
    assert facts["test"]["brier"] < facts["baselines"]["constant_half"]["brier"]
    assert facts["test"]["brier"] < facts["history"][0]["test_brier"], "one member cannot show disagreement"
    assert facts["levels"]["policy"]["brier"] < facts["baselines"]["constant_half"]["brier"]


def test_a_bound_keeps_members_near_people_and_says_what_it_cost(quick: None, votes: PreferenceSet) -> None:
    train, _ = votes.split()
    free = fit_quickly(votes, k=3, method="stagewise", max_disagreement=1.0)
    near = fit_quickly(votes, k=3, method="stagewise", max_disagreement=0.5)

    def worst(ensemble: RewardEnsemble) -> float:
        p = train.prob_a[:, None]
        own = ensemble.votes(train)
        return float((own * (1 - p) + (1 - own) * p).mean(axis=0).max())

    assert worst(free) > 0.5 > worst(near)
    assert worst(fit_quickly(votes, k=3, max_disagreement=0.5)) < 0.5, "joint members too"
    assert free.facts["bound"] is None
    bound = near.facts["bound"]
    assert bound["max_disagreement"] == 0.5
    assert bound["brier"] == near.facts["test"]["brier"]
    assert bound["worst_without"] > bound["worst"]


def test_rewards_of_a_vote_level_fit_have_unit_spread_over_training_pairs(quick: None, votes: PreferenceSet) -> None:
    train, _ = votes.split()
    reward_a, reward_b = fit_quickly(votes, k=4).pair_rewards(train)
    np.testing.assert_allclose((reward_a - reward_b).std(axis=0), 1.0, atol=1e-3)


def test_single_votes_fit_and_leave_corrected_figures_empty(quick: None, votes: PreferenceSet, tmp_path: Path) -> None:
    path = tmp_path / "chosen.jsonl"
    with path.open("w") as stream:
        for prompt, a, b, share in zip(votes.prompt_index, votes.a_index, votes.b_index, votes.prob_a, strict=True):
            chosen, rejected = (a, b) if share > 0.5 else (b, a)
            record = {"chosen": votes.responses[chosen], "rejected": votes.responses[rejected]}
            stream.write(json.dumps({"prompt": votes.prompts[prompt], **record}) + "\n")
    single = load_preferences(path)
    assert (single.n_votes == 1).all()
    for changes in ({}, {"method": "stagewise"}):
        facts = fit_quickly(single, **changes).facts
        assert facts["test"]["brier_corrected"] is None
        assert facts["test"]["noise"] is None
        assert facts["history"][-1]["test_brier_corrected"] is None
        assert 0 < facts["test"]["brier"] < 0.5
        assert facts["test"]["interval"]["low"] < facts["test"]["brier"] < facts["test"]["interval"]["high"]


# --- what it may look at --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 4},
        {"level": "policy"},
        {"method": "stagewise"},
        {"members": "mlp"},
        {"k": "auto", "encoder": "hashing"},
    ],
    ids=str,
)
def test_votes_on_test_prompts_never_reach_the_fit(quick: None, votes: PreferenceSet, changes: dict[str, Any]) -> None:
    test = votes.test_mask()
    turned = replace(
        votes,
        votes_a=np.where(test, votes.votes_b, votes.votes_a),
        votes_b=np.where(test, votes.votes_a, votes.votes_b),
    )
    one, other = fit_quickly(votes, **changes), fit_quickly(turned, **changes)
    assert same_fit(one, other)
    assert one.facts["test"]["brier"] != other.facts["test"]["brier"]
    for name, arrays in one.baselines.items():
        for part, array in arrays.items():
            assert array.tobytes() == other.baselines[name][part].tobytes(), f"{name}/{part}"


def with_other_test_texts(votes: PreferenceSet) -> PreferenceSet:
    test = votes.test_mask()
    used = set(votes.a_index[test]) | set(votes.b_index[test])
    responses = [f"{text} Full stop. Never!" * 2 if i in used else text for i, text in enumerate(votes.responses)]
    return PreferenceSet.from_indices(
        votes.prompts, responses, votes.prompt_index, votes.a_index, votes.b_index, votes.votes_a, votes.votes_b
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 4},
        {"method": "stagewise"},
        pytest.param(
            {"members": "mlp"},
        ),
    ],
    ids=str,
)
def test_texts_of_test_prompts_never_reach_the_fit(quick: None, votes: PreferenceSet, changes: dict[str, Any]) -> None:
    assert same_fit(fit_quickly(votes, **changes), fit_quickly(with_other_test_texts(votes), **changes))


def test_an_official_split_is_what_judges(quick: None, votes: PreferenceSet) -> None:
    official = np.where(votes.prompt_index % 4 == 0, "test", "train").astype(object)
    columns = {"split": official}
    split = replace(votes, columns=columns)
    data = fit_quickly(split, method="stagewise").facts["data"]
    assert data["test_pairs"] == int((official == "test").sum())


def test_a_training_side_that_is_fitted_alone_holds_out_a_part_of_itself(quick: None, votes: PreferenceSet) -> None:
    train, test = votes.split()
    ensemble = fit_quickly(train, method="stagewise")
    data = ensemble.facts["data"]
    assert data["train_pairs"] + data["test_pairs"] == len(train)
    assert 0 < data["test_prompts"] < len(train.prompts) / 2
    assert evaluate(ensemble, test).pairs == len(test)


# --- the same again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["joint", "stagewise"])
def test_the_same_seed_gives_the_same_bytes_and_another_another_fit(
    quick: None, votes: PreferenceSet, tmp_path: Path, method: str
) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        fit_quickly(votes, method=method, seed=seed, folder=tmp_path / name)
    files = {name: next((tmp_path / name).glob("*.safetensors")) for name in ("one", "two", "three")}
    assert files["one"].name == files["two"].name
    assert files["one"].read_bytes() == files["two"].read_bytes()
    assert files["one"].read_bytes() != files["three"].read_bytes()
    loaded = [RewardEnsemble.load(tmp_path / name) for name in ("one", "two")]
    assert same_fit(*loaded)
    assert same_fit(loaded[0], fit_quickly(votes, method=method, seed=3)), "with a folder or without"


class Interrupt(Exception):
    """Stands for a kill at a known moment."""


@dataclass
class Watching:
    """Notes the baselines that are fitted, and interrupts once an ensemble of ``until`` members is there."""

    until: int = 1_000_000

    def __post_init__(self) -> None:
        self.baselines: list[str] = []

    def __call__(self, what: str, value: Any) -> None:
        if what == "baseline":
            self.baselines.append(value)
        if what == "record" and value.k >= self.until:
            raise Interrupt


def test_an_interrupted_fit_goes_on_where_it_was(quick: None, votes: PreferenceSet, tmp_path: Path) -> None:
    unbroken = fit_quickly(votes, k=4)
    with pytest.raises(Interrupt):
        fit_quickly(votes, k=4, folder=tmp_path, watch=Watching(until=2))
    assert [path.name.startswith(".unfinished-") for path in tmp_path.iterdir()] == [True]
    resumed = Watching()
    assert same_fit(fit_quickly(votes, k=4, folder=tmp_path, watch=resumed), unbroken)
    assert resumed.baselines == [], "baselines were kept"
    assert not list(tmp_path.glob(".unfinished-*")), "nothing unfinished stays"
    assert (tmp_path / "ensemble.json").is_file()


@pytest.mark.parametrize(
    "changes", [{"k": 3}, {"seed": 1}, {"test_fraction": 0.2}, {"max_disagreement": 0.6}, {"surface": False}], ids=str
)
def test_another_option_does_not_resume_from_the_old_work(
    quick: None, votes: PreferenceSet, tmp_path: Path, changes: dict[str, Any]
) -> None:
    first: dict[str, Any] = {"k": 4, "encoder": "hashing", "method": "stagewise"}
    with pytest.raises(Interrupt):
        fit(votes, **first, folder=tmp_path, watch=Watching(until=2))
    watching = Watching()
    found = fit(votes, **first | changes, folder=tmp_path, watch=watching)
    assert set(watching.baselines) >= {"soft_bt", "hard_bt", "bootstrap"}
    assert same_fit(found, fit(votes, **first | changes))


def test_other_data_do_not_resume_from_the_old_work(quick: None, votes: PreferenceSet, tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        fit_quickly(votes, k=4, folder=tmp_path, watch=Watching(until=2))
    other = replace(votes, votes_a=votes.votes_a + (np.arange(len(votes)) == 7))
    watching = Watching()
    found = fit_quickly(other, k=4, folder=tmp_path, watch=watching)
    assert watching.baselines
    assert same_fit(found, fit_quickly(other, k=4))
    assert not list(tmp_path.glob(".unfinished-*")), "abandoned work is removed in the end"


@dataclass(frozen=True)
class Lengths:
    """An encoder whose vectors change with its identity, as a model folder's do when its weights are replaced."""

    identity: str

    def encode(self, items: Sequence[Item]) -> npt.NDArray[np.float32]:
        factor = float(self.identity)
        return np.array([[len(text), np.cos(factor * len(text))] for _, text in items], dtype=np.float32)


def test_another_model_under_the_same_name_does_not_resume_from_the_old_work(
    quick: None, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pluralign.ensemble.load_encoder", lambda *_, **__: Lengths("1"))
    with pytest.raises(Interrupt):
        fit_quickly(votes, k=4, encoder="model", folder=tmp_path, watch=Watching(until=2))
    monkeypatch.setattr("pluralign.ensemble.load_encoder", lambda *_, **__: Lengths("2"))
    found = fit_quickly(votes, k=4, encoder="model", folder=tmp_path)
    assert same_fit(found, fit_quickly(votes, k=4, encoder="model"))


# --- a real kill ----------------------------------------------------------------------------------------------------


def arrays_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".parquet")}


def steps_in(folder: Path) -> dict[str, int]:
    """Names of finished steps with the time each was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(".unfinished-*/*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "moments"),
    [
        (["--method", "stagewise", "--k", "8"], (0, 1, 5, 20)),
        (["--k", "2", "--target", "teacher", "--max-disagreement", "1"], (4,)),
    ],
    ids=["stagewise", "joint"],
)
def test_a_fit_that_is_killed_again_and_again_ends_as_an_unbroken_one(
    votes: PreferenceSet, tmp_path: Path, options: list[str], moments: tuple[int, ...]
) -> None:
    votes.save(tmp_path / "votes.parquet")
    command = [sys.executable, "-m", "pluralign", "fit", str(tmp_path / "votes.parquet"), "--json"]
    command += ["--encoder", "none", *options, "-o"]
    folder = tmp_path / "killed"
    before: dict[str, int] = {}
    for moment in moments:
        process = subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if moment == 0:
            time.sleep(0.7)  # somewhere in reading or encoding
        while moment and len(steps_in(folder)) < max(moment, len(before) + 1):
            assert process.poll() is None, "it should not have finished"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (folder / "ensemble.json").exists()
        after = steps_in(folder)
        assert before.items() <= after.items(), "what was finished was not done again"
        before = after
    assert len(before) >= moments[-1]
    facts = {}
    for name in ("killed", "unbroken"):
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, check=True)
        facts[name] = json.loads(done.stdout)
    assert facts["killed"]["weights"] == facts["unbroken"]["weights"]
    assert facts["killed"]["test"] == facts["unbroken"]["test"]
    assert arrays_of(folder) == arrays_of(tmp_path / "unbroken")
    assert not list(folder.glob(".unfinished-*"))


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k must be a whole number from 1 to 256, or auto, not 0"),
        ({"k": 257}, "not 257"),
        ({"k": "many"}, "or auto, not 'many'"),
        ({"k": 2.5}, r"not 2\.5"),
        ({"method": "stage-wise"}, "method cannot be 'stage-wise'; did you mean 'stagewise'"),
        ({"variant": "printd"}, "did you mean 'printed'"),
        ({"loss": "rmse"}, "did you mean 'mse'"),
        ({"level": "votes"}, "did you mean 'vote'"),
        ({"target": "xyz"}, "known are: auto, teacher, votes"),
        ({"members": "liner"}, "did you mean 'linear'"),
        ({"pooling": "lst"}, "did you mean 'last'"),
        ({"max_disagreement": 0.0}, "max_disagreement must be above 0"),
        ({"max_disagreement": 1.1}, r"at most 1, not 1\.1"),
        ({"test_fraction": 0.0}, "test_fraction must be between 0 and 1"),
        ({"max_disagrement": 0.4}, "no option 'max_disagrement'; did you mean 'max_disagreement'"),
        ({"encoder": "none", "surface": False}, "nothing to encode with"),
    ],
    ids=str,
)
def test_a_bad_option_is_answered_with_what_is_meant(
    votes: PreferenceSet, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fit_quickly(votes, **changes)


def test_a_number_as_text_is_a_number() -> None:
    assert FitOptions(k="4").k == 4
    assert FitOptions(k="auto").k == "auto"


def test_a_negative_seed_is_refused_as_an_option(quick: None, votes: PreferenceSet) -> None:
    with pytest.raises(UsageError, match="seed"):
        fit_quickly(votes, seed=-1)


def few_prompts(votes: PreferenceSet, n: int) -> PreferenceSet:
    return votes[votes.prompt_index < n]


def test_one_prompt_cannot_be_split(votes: PreferenceSet) -> None:
    with pytest.raises(DataError, match=r"left one side empty \(1 prompts.*use more prompts"):
        fit_quickly(few_prompts(votes, 1))


def test_two_prompts_are_too_few_to_learn_and_validate(quick: None, votes: PreferenceSet) -> None:
    two = few_prompts(votes, 2)
    official = replace(two, columns={"split": np.where(two.prompt_index == 0, "train", "test").astype(object)})
    with pytest.raises(DataError, match="prompts"):
        fit_quickly(official)


@pytest.mark.parametrize("method", ["joint", "stagewise"])
def test_an_automatic_size_is_found_with_few_prompts_too(quick: None, votes: PreferenceSet, method: str) -> None:
    few = few_prompts(votes, 5)
    official = replace(few, columns={"split": np.where(few.prompt_index == 0, "test", "train").astype(object)})
    assert 1 <= fit_quickly(official, k="auto", method=method).k <= 16


def test_a_handful_of_prompts_is_enough_for_a_fit(quick: None, votes: PreferenceSet) -> None:
    few = few_prompts(votes, 4)
    official = replace(few, columns={"split": np.where(few.prompt_index == 0, "test", "train").astype(object)})
    facts = fit_quickly(official).facts
    assert facts["data"]["test_prompts"] == 1
    assert facts["test"]["interval"]["low"] is None, "one prompt says nothing of the spread"


def test_progress_and_watch_are_told_what_is_done(quick: None, votes: PreferenceSet) -> None:
    told: list[tuple[str, Any]] = []
    encoded: list[tuple[int, int]] = []
    fresh = town_hall(240, seed=9).preferences
    fit(
        fresh, encoder="hashing", k=2,
        watch=lambda *what: told.append(what), progress=lambda *done: encoded.append(done),
    )  # fmt: skip
    n = len(texts_of(fresh))
    assert told[0] == ("encode", n)
    assert encoded[-1] == (n, n)
    assert {value for what, value in told if what == "baseline"} >= {"soft_bt", "hard_bt", "bootstrap"}
    assert [value.k for what, value in told if what == "record"] == [1, 2]


def test_stagewise_members_are_not_fitted_for_the_policy_level() -> None:
    with pytest.raises(UsageError, match="use --method joint for --level policy"):
        FitOptions(method="stagewise", level="policy")
