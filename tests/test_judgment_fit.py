"""Mixtures of rewards from whole judgments: by enumeration, plain loops and known rewards; whole fits."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import facts_of
from simulated import concatenate, numeric_gradient

from pluralign import RewardEnsemble, evaluate, fit, load_preferences
from pluralign.ensemble.ensemble import VOICES
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.record import HistoryRow, JudgmentFigures
from pluralign.learning import voices
from pluralign.learning.task import FitWatcher
from pluralign.learning.voices import (
    FACTORS,
    SINGLE,
    Nuisances,
    Penalties,
    RankedTexts,
    Voices,
    best_nuisances,
    fit_voices,
    judgment_figures,
    mean_of,
)
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import PreferenceSet

Ranking = list[list[int]]
"""Texts, place by place."""


def orders(places: Ranking) -> list[tuple[int, ...]]:
    """Return all strict orders that agree with a ranking with ties."""
    return [sum(order, ()) for order in itertools.product(*map(itertools.permutations, places))]


def probability(places: Ranking, reward: np.ndarray) -> float:
    """Return the Plackett–Luce probability of a ranking, as the sum over its orders."""
    rate = np.exp(reward)
    return float(
        sum(
            math.prod(rate[one] / rate[list(order[i:])].sum() for i, one in enumerate(order))
            for order in orders(places)
        )
    )


def random_judgments(seed: int, *, linked: bool, n: int = 14) -> Judgments:
    """Return rankings of two to five of ten texts on three prompts, with ties, some by the same person."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 3, n)
    person = rng.integers(0, 6, n) + (0 if linked else 6 * prompt)
    sizes = rng.integers(2, 6, n)
    response = np.concatenate([rng.permutation(10)[:size] for size in sizes])
    return Judgments.from_scores(person, prompt, sizes, response, rng.integers(0, 4, sizes.sum()), linked=linked)


INPUTS = np.random.default_rng(1).standard_normal((30, 4))


def items_of(judgments: Judgments) -> np.ndarray:
    """Return the text of each entry of ``random_judgments``."""
    return (10 * np.repeat(judgments.prompt, judgments.sizes) + judgments.response).astype(np.int32)


def ranked(judgments: Judgments) -> RankedTexts:
    return RankedTexts.of(judgments, items_of(judgments), INPUTS)


def rankings(judgments: Judgments, items: np.ndarray) -> list[Ranking]:
    """Return the texts of each ranking, place by place."""
    found = []
    for first, end in itertools.pairwise(judgments.start):
        places = judgments.place[first:end]
        found.append([items[first:end][places == place].tolist() for place in range(places.max() + 1)])
    return found


def random_mixture(seed: int, d: int, k: int) -> Voices:
    rng = np.random.default_rng(seed)
    return Voices(rng.standard_normal((d, k)), rng.dirichlet(np.ones(k)), rng.dirichlet(np.ones(len(FACTORS))))


def looped(
    mixture: Voices, judgments: Judgments, items: np.ndarray, inputs: np.ndarray, deviation: np.ndarray | None = None
) -> dict[int, float]:
    """Return log P of each group by the definition, with loops over people, members, T and rankings."""
    own = inputs @ mixture.theta + (0 if deviation is None else deviation[:, None])
    people: dict[int, dict[int, list[Ranking]]] = {}
    for i, ranking in enumerate(rankings(judgments, items)):
        group = judgments.person[i] if judgments.linked else judgments.group[i]
        people.setdefault(int(group), {}).setdefault(int(judgments.person[i]), []).append(ranking)
    found = dict.fromkeys(people, 0.0)
    for group, members in people.items():
        for of_person in members.values():
            chance = sum(
                pi * kappa * math.prod(probability(one, own[:, j] / T) for one in of_person)
                for j, pi in enumerate(mixture.shares)
                for T, kappa in zip(mixture.factors, mixture.factor_shares, strict=True)
            )
            found[group] += math.log(chance)
    return found


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_the_likelihood_is_the_definition(k: int, linked: bool) -> None:
    judgments, mixture = random_judgments(k + 10, linked=linked), random_mixture(k, 4, k)
    expected = looped(mixture, judgments, items_of(judgments), INPUTS)
    found = mixture.by_group(ranked(judgments))
    assert len(expected) > 2
    np.testing.assert_allclose(found, [expected[group] for group in range(len(found))], rtol=1e-6)


@pytest.mark.parametrize("tau", [0.3, 1.5])
def test_deviations_are_integrated(tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By quadrature over the deviations of the three responses of one prompt, which all five people share."""
    monkeypatch.setattr(voices, "DRAWS", 8192)
    rng, m, people = np.random.default_rng(0), 3, 5
    inputs, who = rng.standard_normal((m, 4)), np.arange(people)
    orders = np.array([rng.permutation(m) for _ in who])
    judgments = Judgments.from_scores(who, 0 * who, [m] * people, np.tile(np.arange(m), people), orders.ravel())
    mixture = random_mixture(3, 4, 2).with_nuisances(Nuisances(1.2, 0.6, tau))
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    expected = 0.0
    for index in itertools.product(range(len(nodes)), repeat=m):
        chance = math.prod(weights[list(index)] / weights.sum())
        expected += chance * math.exp(
            looped(mixture, judgments, judgments.response, inputs, tau * nodes[list(index)])[0]
        )
    found = mixture.by_group(ranked_texts(judgments, inputs))
    assert found[0] == pytest.approx(math.log(expected), abs=0.02)
    assert abs(found[0] - replace(mixture, deviation=0.0).by_group(ranked_texts(judgments, inputs))[0]) > 0.005


def test_nuisances_scale_rewards_and_make_decisiveness_normal() -> None:
    mixture, sigma = random_mixture(3, 4, 2), 0.6
    found = mixture.with_nuisances(Nuisances(1.2, sigma, 0.3))
    moments = [found.factor_shares @ np.log(found.factors) ** n for n in range(5)]
    np.testing.assert_allclose(moments, [1, 0, sigma**2, 0, 3 * sigma**4], atol=1e-12)
    np.testing.assert_allclose(found.theta, 1.2 * mixture.theta)
    assert found.deviation == 0.3


def ranked_texts(judgments: Judgments, inputs: np.ndarray) -> RankedTexts:
    return RankedTexts.of(judgments, judgments.response, inputs)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_rankings_of_any_ties_have_probabilities_that_sum_to_one(m: int) -> None:
    """All strict orders are all there is. A ranking with ties is the union of its orders."""
    mixture, inputs = random_mixture(0, 3, 2), np.random.default_rng(2).standard_normal((m, 3))
    scores = np.array([one for one in itertools.product(range(m), repeat=m) if set(one) == set(range(max(one) + 1))])
    of_person = np.arange(len(scores))
    entries = np.tile(np.arange(m), len(scores))
    judgments = Judgments.from_scores(of_person, of_person, [m] * len(scores), entries, scores.ravel())
    items = judgments.response
    texts = RankedTexts.of(judgments, items, inputs)  # every ranking has a prompt of its own
    log_p = dict(zip(map(repr, rankings(judgments, items)), mixture.by_group(texts), strict=True))
    strict = {order: math.exp(log_p[repr([[one] for one in order])]) for order in itertools.permutations(range(m))}
    assert sum(strict.values()) == pytest.approx(1, abs=1e-6)
    for ranking in rankings(judgments, items):
        union = sum(strict[order] for order in orders(ranking))
        assert math.exp(log_p[repr(ranking)]) == pytest.approx(union, rel=1e-6)
    by_chance = sum(math.log(len(orders(one)) / math.factorial(m)) for one in rankings(judgments, items))
    assert sum(shape.uniform() for shape in texts.shapes) == pytest.approx(by_chance)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_the_gradient_of_the_loss_is_that_of_finite_differences(
    k: int, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By weights of every reward and the logits of all shares, at a point where no share is even."""
    texts = ranked(random_judgments(3, linked=linked))
    at, reached = list[np.ndarray](), list[float]()

    def compare(loss: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray, **_: object) -> Any:
        at.append(start + np.random.default_rng(0).standard_normal(len(start)))
        np.testing.assert_allclose(loss(at[0])[1], numeric_gradient(lambda x: loss(x)[0], at[0]), atol=2e-6)
        reached.append(loss(at[0])[0])
        return SimpleNamespace(x=at[0])

    monkeypatch.setattr(voices, "minimize", compare)
    mixture = fit_voices(texts, k, Penalties(0.2, 0.3), np.ones(4))
    weights = at[0][: 4 * (1 + k * (k > 1))].reshape(4, -1)
    penalty = (0.3 if k > 1 else 0.15) * (weights[:, 0] ** 2).sum() + 0.1 * (weights[:, 1:] ** 2).sum()
    assert reached[0] == pytest.approx(penalty - mixture.by_group(texts).sum() / texts.n_choices)


# --- recovery ---------------------------------------------------------------------------------------------------------


def crowd(
    seed: int, tastes: np.ndarray, *, prompts: int, people: int, factors: tuple[float, ...] = (1,), hidden: float = 0
) -> tuple[Judgments, np.ndarray, np.ndarray]:
    """Return rankings of five responses per prompt by people of random tastes (columns), and inputs of the texts.

    Args:
        seed: of all draws.
        tastes: rewards of the kinds of people, ``(d, n_kinds)``.
        prompts: number of prompts.
        people: number of people per prompt.
        factors: values of T, equally frequent.
        hidden: spread of the part of a response's quality that everyone sees and the inputs miss.
    """
    rng, m = np.random.default_rng(seed), 5
    inputs = rng.standard_normal((prompts * m, len(tastes)))
    missed = hidden * rng.standard_normal(len(inputs))
    prompt = np.repeat(np.arange(prompts), people)
    texts = m * prompt[:, None] + np.arange(m)
    own = tastes[:, rng.integers(tastes.shape[1], size=len(prompt))]
    rewards = np.einsum("nmd,dn->nm", inputs[texts], own) + missed[texts]
    scores = rewards / rng.choice(factors, len(prompt))[:, None] + rng.gumbel(size=rewards.shape)
    who = np.arange(len(prompt))
    judgments = Judgments.from_scores(who, prompt, [m] * len(who), texts.ravel(), scores.ravel())
    return judgments, judgments.response, inputs.astype(np.float32)


def test_members_are_the_rewards_of_the_people() -> None:
    tastes = 2 * np.linalg.qr(np.random.default_rng(0).standard_normal((6, 3)))[0]
    texts = RankedTexts.of(*crowd(0, tastes, prompts=60, people=5))
    found = fit_voices(texts, 3, Penalties(0.003, 0.01), np.zeros(6))
    likeness = np.corrcoef(tastes.T, found.theta.T)[:3, 3:]
    assert sorted(likeness.argmax(axis=1)) == [0, 1, 2], "one member each"
    assert likeness.max(axis=1).min() > 0.95
    assert found.shares == pytest.approx(1 / 3, abs=0.1)
    assert found.factor_shares[0] > 0.9, "everyone had T = 1"


def test_the_mean_of_fits_matches_their_members() -> None:
    """Noisy copies in any order: the mean is closer to the rewards than each copy, and as decisive as the copies."""
    rng = np.random.default_rng(0)
    inputs, mixture = rng.standard_normal((200, 4)), random_mixture(0, 4, 3)
    mixture = replace(mixture, theta=2 * np.eye(4)[:, :3])
    copies = []
    for _ in range(8):
        order, noise = rng.permutation(3), 0.4 * rng.standard_normal((4, 3))
        copies.append(replace(mixture, theta=(mixture.theta + noise)[:, order], shares=mixture.shares[order]))
    found = mean_of(copies, inputs)
    order = np.corrcoef(found.theta.T, mixture.theta.T)[:3, 3:].argmax(axis=1)
    assert found.shares == pytest.approx(mixture.shares[order])
    likeness = [np.corrcoef((inputs @ one.theta).T, (inputs @ mixture.theta).T)[:3, 3:] for one in (found, *copies)]
    assert likeness[0].max(axis=1).min() > max(one.max(axis=1).mean() for one in likeness[1:])
    spreads = [np.sort(np.std(inputs @ one.theta, axis=0)) for one in copies]
    assert np.std(inputs @ found.theta, axis=0).mean() == pytest.approx(np.mean(spreads), rel=1e-6)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(0).standard_normal(6)
    without_one = [np.delete(values, i).mean() for i in range(6)]
    assert voices.jackknife(np.array(without_one)) == pytest.approx(np.std(values, ddof=1) / np.sqrt(6))


@pytest.mark.parametrize("camps", [False, True])
def test_only_different_preferences_are_distinct_voices(camps: bool) -> None:
    """One taste with different decisiveness and a hidden common part is not; two opposite camps are."""
    tastes = np.column_stack([np.ones(6), -np.ones(6)][: 1 + camps])
    setting: dict[str, Any] = {"people": 5, "factors": FACTORS, "hidden": 1.5}
    learn = RankedTexts.of(*crowd(0, tastes, prompts=60, **setting))
    check = RankedTexts.of(*crowd(2, tastes, prompts=20, **setting))
    fits = {name: fit_voices(learn, k, Penalties(0.005, 0.01)) for name, k in {VOICES: 2, SINGLE: 1}.items()}
    models = {name: asdict(one.with_nuisances(best_nuisances([(one, check)]))) for name, one in fits.items()}
    figures = judgment_figures(models, *crowd(1, tastes, prompts=40, **setting))
    assert (figures.n, figures.prompts) == (200, 40)
    assert figures.uniform == pytest.approx(-math.log(120))
    assert figures.log_likelihood - figures.best_single == pytest.approx(figures.gain.mean)
    assert (figures.gain.low > 0) == camps
    assert figures.people == 5
    one_each = judgment_figures(models, *crowd(1, tastes, prompts=40, **{**setting, "people": 1}))
    assert one_each.evidence is None, "nothing tells people from prompts"


# --- whole fits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Try few strengths, on one validation fold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(voices, "STRENGTHS", (0.06, 0.01))
        patch.setattr(voices, "MANY_PROMPTS", 1)
        yield


@pytest.fixture(scope="module")
def town() -> PreferenceSet:
    return load_preferences("demo-rankings:300")


@pytest.fixture(scope="module")
def folder(town: PreferenceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judged")
    fit(town, k=3, encoder="none", folder=path, test_fraction=0.5, folds=2)
    return path


def figures_of(ensemble: RewardEnsemble) -> JudgmentFigures | None:
    assert ensemble.record.evaluation is not None
    return ensemble.record.evaluation.judgments


def test_an_ensemble_keeps_its_figures_of_judgments(folder: Path, town: PreferenceSet) -> None:
    loaded = RewardEnsemble.load(folder)
    record, stored = loaded.record, figures_of(loaded)
    assert (record.target, [row.k for row in record.history]) == ("judgments", [1, 2, 3])
    assert stored is not None
    assert record.seed_spread is not None
    assert 0 < record.seed_spread < 0.02
    held_out = load_held_out(folder, loaded).preferences
    assert (judged := held_out.judgments) is not None
    assert (stored.n, stored.prompts) == (judged.n, judged.n_prompts)
    assert stored.uniform == pytest.approx(-math.log(math.factorial(5)))
    again: Any = evaluate(loaded, held_out).judgments
    assert astuple(again)[:5] == pytest.approx(astuple(stored)[:5], rel=1e-6)
    assert astuple(again.gain) == pytest.approx(astuple(stored.gain), rel=1e-4, nan_ok=True)
    assert record.cross_validation is not None
    assert record.cross_validation.judgments == stored, "no second set of figures for the folds"


def test_weights_and_undecided_share_are_the_best_for_the_vote_counts(folder: Path, town: PreferenceSet) -> None:
    """No other weights on the simplex have a lower error on the counts of training pairs."""
    loaded = RewardEnsemble.load(folder)
    train = town[~town.test_mask(0.5)]
    votes, chosen = loaded.votes(train), np.append((1 - loaded.undecided) * loaded.weights, loaded.undecided)
    others = 0.5 * chosen + 0.5 * np.random.default_rng(0).dirichlet(np.ones(len(chosen)), 500)
    others = np.vstack([others, 0.98 * chosen + 0.02 * np.eye(len(chosen))])
    columns = np.column_stack([votes, np.full(len(votes), 0.5)])
    best, *rest = ((columns @ np.vstack([chosen, others]).T - train.prob_a[:, None]) ** 2).mean(axis=0)
    assert best < min(rest) + 1e-7


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"k": 1}, "judgments"),
        ({"k": "auto", "level": "policy"}, "judgments"),
        ({"k": 2, "max_disagreement": 1.0}, "judgments"),
        ({"k": 2, "target": "votes"}, "votes"),
        ({"k": 2, "method": "stagewise"}, None),
    ],
    ids=str,
)
def test_options_decide_whether_judgments_are_used(
    town: PreferenceSet, options: dict[str, Any], target: str | None
) -> None:
    found = fit(town, encoder="none", **options)
    several = target == "judgments" and found.k > 1
    assert (found.record.target, figures_of(found) is not None) == (target, several)
    if options.get("level") == "policy":
        assert found.temperature == 1


def test_counts_alone_are_learned_as_before(town: PreferenceSet) -> None:
    options: dict[str, Any] = {"k": 2, "encoder": "none"}
    counts = replace(town, judgments=None)
    without, off = fit(counts, **options), fit(town, judgments=False, **options)
    assert figures_of(without) is None
    assert without.record.target == off.record.target != "judgments"
    np.testing.assert_array_equal(without.members.theta, off.members.theta)


def test_an_interrupted_fit_repeats_no_finished_step(
    town: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(FitWatcher):
        def record(self, row: HistoryRow) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(voices, "AUTO_SIZES", (2,))
    options: dict[str, Any] = {"k": "auto", "encoder": "none"}
    unbroken = fit(town, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(town, watcher=Killed(), folder=tmp_path, **options)
    steps = {path.stem.removeprefix("judgments-") for path in tmp_path.glob(".unfinished-*/judgments-*")}
    assert steps == {"penalties", "size", "validated", "1", *(f"2-{start}" for start in range(voices.STARTS))}
    for name in ("fit_voices", "choose_temperature"):
        monkeypatch.delattr(voices, name)
    resumed = fit(town, folder=tmp_path, **options)
    assert (resumed.record.target, resumed.temperature) == ("judgments", unbroken.temperature)
    np.testing.assert_array_equal(resumed.members.theta, unbroken.members.theta)
    assert repr(figures_of(resumed)) == repr(figures_of(unbroken))


def test_the_command_line_reports_judgments(tmp_path: Path) -> None:
    found = facts_of("fit", "demo-rankings:300", "-o", tmp_path / "x", "--encoder", "none", "--k", "2")
    assert found["target"] == "judgments"
    assert {*found["judgments"]} == {"n", "prompts", "log_likelihood", "uniform", "best_single", "gain", "people"}
    assert {*found["judgments"]["gain"]} >= {"mean", "low", "high"}
    assert [one["t"] for one in found["first_choices"]] == [2, 3, 4]


def judged(prompts: int, *orders: list[Any], first: int = 0) -> PreferenceSet:
    """Return votes on prompts whose three responses people put in these orders."""
    named = {"responses": ["A b", "B", "C!"], "rankings": orders}
    rows = [{"prompt": f"x{i}", **named} for i in range(first, first + prompts)]
    return load_preferences(rows, min_votes=1, ties="half")


def counted(prompts: int) -> PreferenceSet:
    row = {"response_a": "A a", "response_b": "B", "votes_a": 3, "votes_b": 2}
    return load_preferences([{"prompt": f"y{i}", **row} for i in range(prompts)], ties="half")


def pair_votes_of_one_person() -> PreferenceSet:
    row = {"response_a": "A", "vote": "a", "annotator": "u"}
    rows = [{"prompt": f"x{i}", "response_b": b, **row} for i in range(5) for b in ("B!", "C c")]
    return load_preferences(rows, min_votes=1)


UP, DOWN, ALL_TIE = [0, 1, 2], [2, 1, 0], [[0, 1, 2]]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(lambda: judged(6, ALL_TIE, ALL_TIE), {}, id="all tie"),
        pytest.param(lambda: judged(2, UP), {"k": 8}, id="fewer judgments than members"),
        pytest.param(lambda: judged(5, UP, DOWN), {"k": 3, "level": "policy"}, id="five prompts"),
        pytest.param(pair_votes_of_one_person, {}, id="one person's pairs"),
        pytest.param(lambda: concatenate([judged(1, UP), counted(4)]), {}, id="none in training"),
        pytest.param(lambda: concatenate([judged(1, UP), counted(4)]), {"seed": 1}, id="none held out"),
        pytest.param(lambda: concatenate([judged(1, UP), counted(4)]), {"seed": 2}, id="only to validate"),
        pytest.param(lambda: concatenate([judged(3, UP, DOWN), counted(20)]), {"seed": 1}, id="none to validate"),
    ],
)
def test_few_judgments_do_not_fail(make: Callable[[], PreferenceSet], options: dict[str, Any]) -> None:
    votes: Any = make()
    given: dict[str, Any] = {"k": 2, "encoder": "none", **options}
    found = fit(votes, **given)
    judged_prompts = np.unique(votes.whole_judgments.prompt)
    train = ~votes.test_mask(None, seed=options.get("seed", 0))
    in_training = np.isin(votes.prompt_index[train], judged_prompts).any()
    in_test = np.isin(votes.prompt_index[~train], judged_prompts).any()
    assert (found.record.target == "judgments") == in_training
    assert (figures_of(found) is not None) == (in_training and in_test)
    assert np.isfinite(found.members.theta).all()
