"""The ensemble as a value: its two readings, and its form on disk."""

import ast
import functools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import pluralign
from pluralign import DataError, RewardEnsemble, UsageError, town_hall
from pluralign.core.types import Level
from pluralign.ensemble.folder import sealed
from pluralign.ensemble.members import LinearMembers, fit_feature_map
from pluralign.ensemble.record import FitRecord, HistoryRow
from pluralign.text.encoders import TextFeatures
from pluralign.text.surface import NAMES, surface_features
from pluralign.votes.preferences import PreferenceSet, texts_of

LEVELS: tuple[Level, ...] = ("vote", "policy")
HISTORY = [HistoryRow(len(weights), 0.05, 0.06, 0.02, weights) for weights in ([1.0], [0.75, 0.25], [0.5, 0.25, 0.25])]


@pytest.fixture(scope="module")
def votes() -> PreferenceSet:
    return town_hall(160).preferences


@functools.cache
def some_features(encoder: str) -> npt.NDArray[np.float32]:
    return TextFeatures(encoder)(texts_of(town_hall(40).preferences))


def some_ensemble(seed: int = 0, k: int = 3, method: str = "stagewise", encoder: str = "none") -> RewardEnsemble:
    """Rewards that nobody fitted, on real surface features (and hashed words)."""
    random = np.random.default_rng(seed)
    raw = some_features(encoder)
    weights = random.dirichlet(np.ones(k))
    return RewardEnsemble(
        LinearMembers(fit_feature_map(raw, len(NAMES)), random.standard_normal((raw.shape[1], k))),
        weights,
        TextFeatures(encoder),
        temperature=0.7,
        record=FitRecord(method=method, history=HISTORY, notes=["Größe ½"]),
        baselines={"soft_bt": {"theta": random.standard_normal((raw.shape[1],)), "temperature": np.array(1.0)}},
    )


# --- readings ---------------------------------------------------------------------------------------------------------


def test_rewards_are_theta_times_the_scaled_features() -> None:
    ensemble = some_ensemble()
    items = [("Tea?", "Yes."), ("Tea?", "I might, perhaps.")]
    raw = surface_features(response for _, response in items)
    inputs = ensemble.members.inputs
    scaled = np.clip((raw - inputs.mean) / inputs.spread, -6, 6) * inputs.gain
    np.testing.assert_allclose(ensemble.rewards(items), scaled @ ensemble.members.theta, atol=1e-5)
    assert ensemble.rewards([]).shape == (0, 3)
    assert ensemble.k == ensemble.members.n_members == 3
    assert repr(ensemble).startswith("RewardEnsemble(stagewise k=3, weights 0.")


@pytest.mark.parametrize("level", LEVELS)
def test_swapping_a_and_b_gives_one_minus_prob_hat(votes: PreferenceSet, level: Level) -> None:
    for seed in range(5):
        ensemble = some_ensemble(seed)
        swapped = ensemble.prob_hat(votes.swapped(), level)
        np.testing.assert_allclose(swapped, 1 - ensemble.prob_hat(votes, level), atol=1e-12)


def test_equal_rewards_split_the_vote() -> None:
    same_counts = PreferenceSet.from_columns(["Tea?"], ["ab cd."], ["cd ab."], [3], [2])
    ensemble = some_ensemble()
    assert ensemble.votes(same_counts).tolist() == [[0.5, 0.5, 0.5]]
    for level in LEVELS:
        assert ensemble.prob_hat(same_counts, level).tolist() == pytest.approx([0.5])


# --- parts of an ensemble ---------------------------------------------------------------------------------------------


def test_taking_members_in_another_order_permutes_votes_and_leaves_prob_hat(votes: PreferenceSet) -> None:
    ensemble = some_ensemble()
    order = [2, 0, 1]
    turned = ensemble.take(order, ensemble.weights[order])
    np.testing.assert_array_equal(turned.votes(votes), ensemble.votes(votes)[:, order])
    np.testing.assert_allclose(turned.prob_hat(votes), ensemble.prob_hat(votes), atol=1e-12)
    doubled = ensemble.take([0, 1, 2, 2], [*ensemble.weights[:2], *[ensemble.weights[2] / 2] * 2])
    assert doubled.k == 4
    np.testing.assert_allclose(doubled.prob_hat(votes, "policy"), ensemble.prob_hat(votes, "policy"), atol=1e-12)


def test_first_k_has_the_weights_of_stage_k(votes: PreferenceSet) -> None:
    ensemble = some_ensemble()
    first = ensemble.first(2)
    assert first.weights.tolist() == [0.75, 0.25]
    np.testing.assert_array_equal(first.members.theta, ensemble.members.theta[:, :2])
    np.testing.assert_allclose(first.prob_hat(votes), ensemble.votes(votes)[:, :2] @ [0.75, 0.25])
    for k in (0, 4, -1):
        with pytest.raises(UsageError, match=f"k must be one of 1, 2, 3, not {k}"):
            ensemble.first(k)


def test_first_k_is_refused_for_joint_ensembles() -> None:
    with pytest.raises(UsageError, match="needs a stagewise ensemble"):
        some_ensemble(method="joint").first(1)


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["none", "hashing"])
def test_saving_and_loading_round_trips(votes: PreferenceSet, tmp_path: Path, encoder: str) -> None:
    ensemble = some_ensemble(encoder=encoder)
    ensemble.save(tmp_path / "deep" / "folder")
    loaded = RewardEnsemble.load(str(tmp_path / "deep" / "folder"))
    for mine, its in zip(ensemble.pair_rewards(votes), loaded.pair_rewards(votes), strict=True):
        np.testing.assert_array_equal(mine, its)
    np.testing.assert_array_equal(loaded.votes(votes), ensemble.votes(votes))
    for level in LEVELS:
        np.testing.assert_array_equal(loaded.prob_hat(votes, level), ensemble.prob_hat(votes, level))
    assert loaded.features == ensemble.features
    assert loaded.record.to_json() == ensemble.record.to_json()
    assert loaded.first(2).weights.tolist() == [0.75, 0.25]
    np.testing.assert_array_equal(loaded.baselines["soft_bt"]["theta"], ensemble.baselines["soft_bt"]["theta"])


def test_nothing_in_the_package_reads_pickles() -> None:
    for path in Path(pluralign.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not {"pickle", "joblib", "dill", "cloudpickle", "shelve"} & {module, *names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                owner = node.func.value
                assert not (isinstance(owner, ast.Name) and owner.id in ("torch", "np")), f"{path}:{node.lineno}"


def test_the_same_ensemble_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        some_ensemble().save(tmp_path / name)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert first == second


def test_a_folder_without_an_ensemble_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no ensemble\.json; give a folder written by pluralign fit"):
        RewardEnsemble.load(tmp_path)
    with pytest.raises(DataError, match="check the path"):
        RewardEnsemble.load(tmp_path / "nowhere")


def test_arrays_are_read_only_from_the_same_folder(tmp_path: Path) -> None:
    some_ensemble().save(tmp_path / "one")
    description = json.loads((tmp_path / "one" / "ensemble.json").read_text())
    (arrays,) = (tmp_path / "one").glob("*.safetensors")
    arrays.rename(tmp_path / arrays.name)
    description["arrays"]["file"] = f"../{arrays.name}"
    del description["sha256"]
    (tmp_path / "one" / "ensemble.json").write_text(json.dumps(sealed(description)))
    with pytest.raises(DataError, match="is missing"):
        RewardEnsemble.load(tmp_path / "one")
