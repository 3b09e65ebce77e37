"""``fit``: its results, the data it may read, and resuming after an interruption."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pluralign import FitOptions, RewardEnsemble, UsageError, evaluate, fit, town_hall
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, DataSummary, Evaluation, FitRecord, HistoryRow
from pluralign.learning import frozen, joint
from pluralign.learning.options import APPLIES, FinetuneOptions, check_applies
from pluralign.learning.pairs import Members
from pluralign.learning.task import Fitted, FitWatcher
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item

# Keys that scripts rely on. The command line adds `weights`.
FIT_KEYS = {"method", "k", "seconds", "history", "test", "baselines", "members"}
HISTORY_KEYS = {"k", "train_brier", "test_brier", "test_brier_corrected"}
TEST_KEYS = {"brier", "brier_corrected", "noise", "log_loss", "interval"}
BASELINES = {"floor", "constant_half", "soft_bt", "hard_bt", "bootstrap"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few training steps and hashes of 32 numbers: enough for everything but quality."""
    monkeypatch.setattr(joint, "STEPS", 20)
    monkeypatch.setattr(joint, "BATCH", 256)
    monkeypatch.setattr("pluralign.text.encoders.HASH_DIMENSION", 32)


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(480).preferences


def fit_quickly(votes: PreferenceSet, **changes: Any) -> RewardEnsemble:
    return fit(votes, **{"encoder": "none", "k": 2, **changes})


class Interrupt(Exception):
    """Stands for a kill at a known moment."""


class Watching(FitWatcher):
    """Collects the events of a fit, and interrupts it after the ensemble of ``until`` members."""

    def __init__(self, until: int = 1_000_000) -> None:
        self.until = until
        self.texts: list[int] = []
        self.baselines: list[str] = []
        self.rows: list[HistoryRow] = []

    def encoding(self, n_texts: int) -> None:
        self.texts.append(n_texts)

    def fitting_baseline(self, name: str) -> None:
        self.baselines.append(name)

    def record(self, row: HistoryRow) -> None:
        self.rows.append(row)
        if row.k >= self.until:
            raise Interrupt


def evaluation_of(ensemble: RewardEnsemble) -> Evaluation:
    assert ensemble.record.evaluation is not None
    return ensemble.record.evaluation


def data_of(ensemble: RewardEnsemble) -> DataSummary:
    assert ensemble.record.data is not None
    return ensemble.record.data


def same_fit(one: RewardEnsemble, other: RewardEnsemble) -> bool:
    return (
        one.members.theta.tobytes() == other.members.theta.tobytes()
        and one.weights.tobytes() == other.weights.tobytes()
        and one.temperature == other.temperature
    )


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k": 1},
        {"target": "votes"},
        {"encoder": "hashing", "surface": False, "test_fraction": 0.3},
        {"level": "policy"},
        {"max_disagreement": 1.0},
        {"k": "auto"},
        {"method": "stagewise", "variant": "printed"},
        {"method": "stagewise", "max_disagreement": 1.0},
        {"method": "stagewise", "k": "auto"},
    ],
    ids=str,
)
def test_every_fit_has_a_complete_record(quick: None, votes: PreferenceSet, changes: dict[str, Any]) -> None:
    ensemble = fit_quickly(votes, **changes)
    facts = ensemble.record.to_json()
    if changes.get("k") != "auto":
        assert ensemble.k == changes.get("k", 2)
    assert ensemble.k == ensemble.members.n_members == facts["k"] == len(facts["members"]) <= 16
    assert (ensemble.weights >= 0).all()
    assert ensemble.weights.sum() == pytest.approx(1.0, abs=1e-6)
    assert ensemble.temperature > 0

    written = json.dumps(facts, allow_nan=False)  # raises where a NaN is left
    assert json.dumps(FitRecord.from_json(json.loads(written)).to_json(), allow_nan=False) == written
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


def test_history_has_a_row_per_size(quick: None, votes: PreferenceSet) -> None:
    rows: list[tuple[int, str, list[int]]] = [
        (8, "joint", [1, 2, 4, 8]), (5, "joint", [1, 2, 4, 5]), (1, "joint", [1]), (5, "stagewise", [1, 2, 3, 4, 5])
    ]  # fmt: skip
    for k, method, sizes in rows:
        watcher = Watching()
        history = fit_quickly(votes, watcher=watcher, k=k, method=method).record.history
        assert watcher.rows == history
        assert [row.k for row in history] == [len(row.weights) for row in history] == sizes


def test_the_record_matches_an_evaluation_on_the_held_out_prompts(quick: None, votes: PreferenceSet) -> None:
    ensemble = fit_quickly(votes, k=4, test_fraction=0.5, seed=5)
    train, test = votes.split(0.5, seed=5)
    again, recorded = evaluate(ensemble, test), evaluation_of(ensemble)
    assert recorded.test.brier == pytest.approx(again.test.brier, abs=1e-12)
    assert recorded.test.interval.high == pytest.approx(again.test.interval.high, abs=1e-12)
    for name, baseline in again.baselines.items():
        assert recorded.baselines[name].brier == pytest.approx(baseline.brier, abs=1e-9), name
    data = data_of(ensemble)
    assert (data.train_pairs, data.test_pairs) == (len(train), len(test))
    assert (data.train_prompts, data.test_prompts) == (len(train.prompts), len(test.prompts))
    assert data.fingerprint == votes.fingerprint
    errors = (ensemble.prob_hat(train) - train.prob_a) ** 2
    assert ensemble.record.history[-1].train_brier == pytest.approx(errors.mean(), abs=1e-6)


def test_first_returns_the_ensemble_after_each_stage(votes: PreferenceSet) -> None:
    ensemble = fit_quickly(votes, k=4, method="stagewise")
    _, test = votes.split()
    for row in ensemble.record.history:
        errors = (ensemble.first(row.k).prob_hat(test) - test.prob_a) ** 2
        assert errors.mean() == pytest.approx(row.test_brier, abs=1e-6)


@pytest.mark.slow
def test_members_without_weight_are_left_out_and_predict_nothing(
    votes: PreferenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"k": 12, "method": "stagewise", "encoder": "none", "max_disagreement": 1.0}
    ensemble = fit(votes, **options)
    monkeypatch.setattr(frozen, "_without_idle", lambda fitted, method: (fitted, []))
    whole = fit(votes, **options)
    record, evaluation = ensemble.record, ensemble.record.evaluation
    assert evaluation is not None
    assert ensemble.k == record.k == len(evaluation.members) == (whole.weights > NEGLIGIBLE_WEIGHT).sum() < 12
    np.testing.assert_allclose(ensemble.prob_hat(votes), whole.prob_hat(votes), atol=1e-5)
    assert record.kept == record.history[-1]
    assert f"{12 - ensemble.k} of 12 members got no weight" in (record.notes or [""])[-1]
    assert ensemble.first(1).k == 1
    np.testing.assert_allclose(ensemble.first(ensemble.k).weights, ensemble.weights)


def test_the_history_of_a_joint_fit_counts_members_with_weight() -> None:
    rows = [HistoryRow(len(weights), 0.1, 0.2, 0.1, weights) for weights in ([1.0], [0.5, 0.5], [0.5, 0.0, 0.3, 0.2])]
    members = Members(np.arange(8.0).reshape(2, 4), np.array([0.5, 0.0, 0.3, 0.2]))
    fitted, notes = frozen._without_idle(Fitted(members, 1.0, {}, None, rows), "joint")
    assert fitted.members.theta.tolist() == [[0, 2, 3], [4, 6, 7]]
    assert [(row.k, row.weights) for row in fitted.history] == [(1, [1.0]), (2, [0.5, 0.5]), (3, [0.5, 0.3, 0.2])]
    assert notes == ["1 of 4 members got no weight, so 3 are left"]


def test_the_bound_caps_disagreement_and_its_cost_is_recorded(quick: None, votes: PreferenceSet) -> None:
    train, _ = votes.split()
    free = fit_quickly(votes, k=3, method="stagewise", max_disagreement=1.0)
    near = fit_quickly(votes, k=3, method="stagewise", max_disagreement=0.5)

    def worst(ensemble: RewardEnsemble) -> float:
        p = train.prob_a[:, None]
        own = ensemble.votes(train)
        return float((own * (1 - p) + (1 - own) * p).mean(axis=0).max())

    assert worst(free) > 0.5 > worst(near)
    assert worst(fit_quickly(votes, k=3, max_disagreement=0.5)) < 0.5, "joint members too"
    assert free.record.bound is None
    cost = near.record.bound
    assert cost is not None
    assert cost.max_disagreement == 0.5
    assert cost.brier == evaluation_of(near).test.brier
    assert cost.worst_without > cost.worst


def test_rewards_of_a_vote_level_fit_have_unit_spread_over_training_pairs(quick: None, votes: PreferenceSet) -> None:
    train, _ = votes.split()
    reward_a, reward_b = fit_quickly(votes, k=4).pair_rewards(train)
    np.testing.assert_allclose((reward_a - reward_b).std(axis=0), 1.0, atol=1e-3)


# --- no leaks from test prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"k": 4}, {"level": "policy"}, {"method": "stagewise"}, {"k": "auto", "encoder": "hashing"}], ids=str
)
def test_votes_on_test_prompts_never_reach_the_fit(quick: None, votes: PreferenceSet, changes: dict[str, Any]) -> None:
    test, a, b = votes.test_mask(), votes.votes_a, votes.votes_b
    turned = replace(votes, votes_a=np.where(test, b, a), votes_b=np.where(test, a, b))
    one, other = fit_quickly(votes, **changes), fit_quickly(turned, **changes)
    assert same_fit(one, other)
    assert evaluation_of(one).test.brier != evaluation_of(other).test.brier
    for name, arrays in one.baselines.items():
        for part, array in arrays.items():
            assert array.tobytes() == other.baselines[name][part].tobytes(), f"{name}/{part}"


@pytest.mark.parametrize("changes", [{"k": 4}, {"method": "stagewise"}], ids=str)
def test_texts_of_test_prompts_never_reach_the_fit(quick: None, votes: PreferenceSet, changes: dict[str, Any]) -> None:
    test = votes.test_mask()
    used = {*votes.a_index[test], *votes.b_index[test]}
    responses = [f"{text} Full stop. Never!" * 2 if i in used else text for i, text in enumerate(votes.responses)]
    other = replace(votes, responses=np.array(responses, dtype=object))
    assert same_fit(fit_quickly(votes, **changes), fit_quickly(other, **changes))


def test_an_official_split_defines_the_test_pairs(quick: None, votes: PreferenceSet) -> None:
    official = np.where(votes.prompt_index % 4 == 0, "test", "train").astype(object)
    data = data_of(fit_quickly(replace(votes, columns={"split": official}), method="stagewise"))
    assert data.test_pairs == int((official == "test").sum())


# --- determinism and resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["joint", "stagewise"])
def test_the_seed_decides_the_bytes(quick: None, votes: PreferenceSet, tmp_path: Path, method: str) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        fit_quickly(votes, method=method, seed=seed, folder=tmp_path / name)
    files = {name: next((tmp_path / name).glob("*.safetensors")) for name in ("one", "two", "three")}
    assert files["one"].name == files["two"].name
    assert files["one"].read_bytes() == files["two"].read_bytes()
    assert files["one"].read_bytes() != files["three"].read_bytes()
    loaded = [RewardEnsemble.load(tmp_path / name) for name in ("one", "two")]
    assert same_fit(*loaded)
    assert same_fit(loaded[0], fit_quickly(votes, method=method, seed=3)), "with a folder or without"


def test_an_interrupted_fit_resumes(quick: None, votes: PreferenceSet, tmp_path: Path) -> None:
    unbroken = fit_quickly(votes, k=4)
    with pytest.raises(Interrupt):
        fit_quickly(votes, k=4, folder=tmp_path, watcher=Watching(until=2))
    assert [path.name.startswith(".unfinished-") for path in tmp_path.iterdir()] == [True]
    resumed = Watching()
    assert same_fit(fit_quickly(votes, k=4, folder=tmp_path, watcher=resumed), unbroken)
    assert resumed.baselines == [], "baselines were kept"
    assert not list(tmp_path.glob(".unfinished-*")), "nothing unfinished stays"
    assert (tmp_path / "ensemble.json").is_file()


@dataclass(frozen=True)
class Lengths:
    """An encoder whose vectors change with its identity, as a model folder's do when its weights are replaced."""

    identity: str

    def encode(self, items: Sequence[Item]) -> npt.NDArray[np.float32]:
        factor = float(self.identity)
        return np.array([[len(text), np.cos(factor * len(text))] for _, text in items], dtype=np.float32)


@pytest.mark.parametrize(
    "other",
    [{"k": 3}, {"seed": 1}, {"max_disagreement": 0.6}, "data", "model"],
    ids=str,
)
def test_other_options_data_or_models_do_not_resume_from_the_old_work(
    quick: None, votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    options: dict[str, Any] = {"k": 4, "encoder": "model", "method": "joint" if isinstance(other, str) else "stagewise"}
    monkeypatch.setattr("pluralign.text.encoders.load_encoder", lambda *_, **__: Lengths("1"))
    with pytest.raises(Interrupt):
        fit(votes, **options, folder=tmp_path, watcher=Watching(until=2))
    if other == "data":
        votes = replace(votes, votes_a=votes.votes_a + (np.arange(len(votes)) == 7))
    elif other == "model":
        monkeypatch.setattr("pluralign.text.encoders.load_encoder", lambda *_, **__: Lengths("2"))
    else:
        options |= other
    watching = Watching()
    found = fit(votes, **options, folder=tmp_path, watcher=watching)
    assert set(watching.baselines) >= {"soft_bt", "hard_bt", "bootstrap"}
    assert same_fit(found, fit(votes, **options))
    assert not list(tmp_path.glob(".unfinished-*")), "abandoned work is removed in the end"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k must be a whole number from 1 to 256, or auto, not 0"),
        ({"k": "many"}, "or auto, not 'many'"),
        ({"method": "stage-wise"}, "method cannot be 'stage-wise'; did you mean 'stagewise'"),
        ({"target": "xyz"}, "known are: auto, teacher, mixture, votes"),
        ({"max_disagreement": 0.0}, "max_disagreement must be above 0"),
        ({"max_disagreement": 1.1}, r"at most 1, not 1\.1"),
        ({"test_fraction": 0.0}, "test_fraction must be between 0 and 1"),
        ({"max_disagrement": 0.4}, "no option 'max_disagrement'; did you mean 'max_disagreement'"),
        ({"encoder": "none", "surface": False}, "nothing to encode with"),
        ({"seed": -1}, "seed"),
        ({"backbone": "x", "learning_rate": 0.0}, "learning_rate must be above 0, not 0"),
        ({"backbone": "x", "optimizer": "soup"}, r"optimizer cannot be 'soup'; did you mean 'soap'\?"),
        ({"backbone": "x", "report_to": "wanbd"}, r"no tracker 'wanbd'; did you mean 'wandb'\?"),
    ],
    ids=str,
)
def test_a_bad_option_raises_usage_error_with_a_suggestion(
    votes: PreferenceSet, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fit_quickly(votes, **changes)


def test_a_number_as_text_is_a_number() -> None:
    assert (FitOptions(k="4").k, FitOptions(k="auto").k) == (4, "auto")


@pytest.mark.parametrize("method", ["joint", "stagewise"])
def test_k_auto_works_with_few_prompts(quick: None, votes: PreferenceSet, method: str) -> None:
    few = votes[votes.prompt_index < 5]
    official = replace(few, columns={"split": np.where(few.prompt_index == 0, "test", "train").astype(object)})
    ensemble = fit_quickly(official, k="auto", method=method)
    assert 1 <= ensemble.k <= 16
    assert data_of(ensemble).test_prompts == 1
    assert math.isnan(evaluation_of(ensemble).test.interval.low), "one prompt gives no interval"


def test_progress_and_watcher_are_called(quick: None, votes: PreferenceSet) -> None:
    encoded: list[tuple[int, int]] = []
    fresh, watcher = town_hall(240, seed=9).preferences, Watching()
    fit(fresh, encoder="hashing", k=2, watcher=watcher, progress=lambda *done: encoded.append(done))
    n = len(texts_of(fresh))
    assert watcher.texts == [n]
    assert encoded[-1] == (n, n)
    assert set(watcher.baselines) >= {"soft_bt", "hard_bt", "bootstrap"}
    assert [row.k for row in watcher.rows] == [1, 2]


# --- which option applies when ----------------------------------------------------------------------------------------


FITS: dict[str, Any] = {one.name: one.default for one in fields(FitOptions)}
TUNING: dict[str, Any] = {one.name: one.default for one in fields(FinetuneOptions)}
SETTINGS: list[dict[str, Any]] = [
    {}, {"method": "stagewise"}, {"level": "policy"}, {"raters": True}, {"pooling": "attention"}, {"backbone": "x"},
    {"backbone": "x", "method": "stagewise"},
]  # fmt: skip


def check(changes: dict[str, Any]) -> None:
    options = {name: value for name, value in changes.items() if name in FITS}
    tuning = {name: value for name, value in changes.items() if name in TUNING}
    check_applies(FitOptions(**options), FinetuneOptions(**tuning), raters=bool(changes.get("raters")))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_default_is_never_an_error(setting: dict[str, Any]) -> None:
    check({**FITS, **TUNING, **setting})
    assert {*APPLIES} <= {*FITS, *TUNING, "raters", "pooling attention"}, "the table lists only options"


def test_a_stated_default_gives_the_fit_without_it(quick: None, votes: PreferenceSet) -> None:
    plain, stated = fit_quickly(votes), fit_quickly(votes, **{**FITS, **TUNING, "k": 2, "encoder": "none"})
    assert stated.rewards([("Why?", "tea")]).tolist() == plain.rewards([("Why?", "tea")]).tolist()
    assert stated.record.options == plain.record.options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"orient": "given"}, "orient has no effect with method joint"),
        ({"method": "stagewise", "level": "policy"}, "level .* method stagewise"),
        ({"method": "stagewise", "pooling": "attention"}, "pooling attention .* method stagewise"),
        ({"level": "policy", "target": "votes"}, "target .* level policy"),
        ({"raters": True, "target": "votes"}, "target .* raters"),
        ({"raters": True, "method": "stagewise"}, "raters .* method stagewise"),
        ({"backbone": "x", "layers": "2"}, "layers .* backbone; .*encoder with pooling attention"),
        ({"backbone": "x", "pooling": "attention"}, "pooling .* backbone"),
        ({"backbone": "x", "folds": 3}, "folds .* backbone; leave it out"),
        ({"pooling": "attention", "features": "stored"}, "features .* pooling attention"),
        ({"pooling": "attention", "epochs": 2.0}, "epochs .* pooling attention, .*backbone fine-tunes"),
        ({"lora_rank": 4}, "lora_rank .* without backbone"),
        ({"report_to": "wandb"}, "report_to .* without backbone"),
        ({"judgments": False, "raters": True}, "judgments=False .* raters"),
        ({"judgments": False, "method": "stagewise"}, "judgments=False .* method stagewise"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(changes)
