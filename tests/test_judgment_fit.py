"""Mixtures of rewards from whole judgments: by enumeration, plain loops and known rewards; whole fits."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import run
from simulated import numeric_gradient

from pluralign import RewardEnsemble, evaluate, fit, load_preferences
from pluralign.core.errors import UsageError
from pluralign.learning import voices
from pluralign.learning.options import FinetuneOptions, FitOptions, check_applies
from pluralign.learning.task import FitWatcher
from pluralign.learning.voices import FACTORS, MODELS, Penalties, RankedTexts, Voices, fit_voices, judgment_figures
from pluralign.votes.judgments import Judgments
from pluralign.votes.preferences import PreferenceSet, concatenate

Ranking = list[list[int]]
"""Texts, place by place."""


def orders(places: Ranking) -> list[tuple[int, ...]]:
    """Return all strict orders that agree with a ranking with ties."""
    return [sum(order, ()) for order in itertools.product(*map(itertools.permutations, places))]


def probability(places: Ranking, reward: np.ndarray) -> float:
    """Return the Plackett–Luce probability of a ranking, as the sum over its orders."""
    rate = np.exp(reward)
    return sum(
        math.prod(rate[one] / rate[list(order[i:])].sum() for i, one in enumerate(order)) for order in orders(places)
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


def random_mixture(seed: int, d: int, k: int, n_common: int) -> Voices:
    rng = np.random.default_rng(seed)
    theta, common = rng.standard_normal((d, k)), 0.7 * rng.standard_normal((d, n_common))
    shares, common_shares, factors = (rng.dirichlet(np.ones(n)) for n in (k, max(n_common, 1), len(FACTORS)))
    return Voices(theta, shares, common, common_shares, factors)


def looped(mixture: Voices, judgments: Judgments, items: np.ndarray, inputs: np.ndarray) -> Counter[int]:
    """Return log P of each group by the definition, with loops over h, people, members, T and rankings."""
    own, common = inputs @ mixture.theta, inputs @ mixture.common
    common = common if common.shape[1] else np.zeros((len(inputs), 1))
    said = rankings(judgments, items)
    people: dict[int, dict[int, list[Ranking]]] = {}
    for i, ranking in enumerate(said):
        group = judgments.person[i] if judgments.linked else judgments.group[i]
        people.setdefault(int(group), {}).setdefault(int(judgments.person[i]), []).append(ranking)
    found: Counter[int] = Counter()
    for group, members in people.items():
        total = 0.0
        for h, rho in enumerate(mixture.common_shares):
            product = rho
            for of_person in members.values():
                product *= sum(
                    pi * kappa * math.prod(probability(one, (own[:, j] + common[:, h]) / T) for one in of_person)
                    for j, pi in enumerate(mixture.shares)
                    for T, kappa in zip(FACTORS, mixture.factor_shares, strict=True)
                )
            total += product
        found[group] = math.log(total)
    return found


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(("k", "n_common"), [(1, 0), (1, 2), (3, 0), (2, 3)])
def test_the_likelihood_is_the_definition(k: int, n_common: int, linked: bool) -> None:
    judgments, mixture = random_judgments(k + 10 * n_common, linked=linked), random_mixture(k, 4, k, n_common)
    expected = looped(mixture, judgments, items_of(judgments), INPUTS)
    found = mixture.by_group(ranked(judgments))
    assert len(expected) > 2
    np.testing.assert_allclose(found, [expected[group] for group in range(len(found))], rtol=1e-6)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_rankings_of_any_ties_have_probabilities_that_sum_to_one(m: int) -> None:
    """All strict orders are all there is. A ranking with ties is the union of its orders."""
    mixture, inputs = random_mixture(0, 3, 2, 2), np.random.default_rng(2).standard_normal((m, 3))
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
@pytest.mark.parametrize(("k", "n_common"), [(1, 0), (1, 2), (2, 0), (3, 2)])
def test_the_gradient_of_the_loss_is_that_of_finite_differences(
    k: int, n_common: int, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By weights of every reward and the logits of all shares, at a point where no share is even."""
    texts = ranked(random_judgments(3, linked=linked))
    at: list[np.ndarray] = []

    def compare(loss: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray, **_: object) -> Any:
        at.append(start + np.random.default_rng(0).standard_normal(len(start)))
        np.testing.assert_allclose(loss(at[0])[1], numeric_gradient(lambda x: loss(x)[0], at[0]), atol=2e-6)
        return SimpleNamespace(x=at[0], fun=loss(at[0])[0])

    monkeypatch.setattr(voices, "minimize", compare)
    mixture, value = fit_voices(texts, k, n_common, Penalties(0.3, 0.2, 9.0), np.ones(4))
    weights = at[0][: 4 * (1 + k * (k > 1) + n_common)].reshape(4, -1)
    penalty = 0.15 * (weights[:, 0] ** 2).sum() + 0.1 * (weights[:, 1:] ** 2).sum()
    assert value == pytest.approx(penalty - mixture.by_group(texts).sum() / texts.n_choices)


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
    found, _ = fit_voices(texts, 3, 0, Penalties(0.01, 0.003, 0.01), np.zeros(6))
    likeness = np.corrcoef(tastes.T, found.theta.T)[:3, 3:]
    assert sorted(likeness.argmax(axis=1)) == [0, 1, 2], "one member each"
    assert likeness.max(axis=1).min() > 0.95
    assert found.shares == pytest.approx(1 / 3, abs=0.1)
    assert found.factor_shares[0] > 0.9, "everyone had T = 1"


@pytest.mark.parametrize("camps", [False, True])
def test_only_different_preferences_are_distinct_voices(camps: bool) -> None:
    """One taste with different decisiveness and a hidden common part is not; two opposite camps are."""
    tastes = np.column_stack([np.ones(6), -np.ones(6)][: 1 + camps])
    setting: dict[str, Any] = {"people": 6, "factors": FACTORS, "hidden": 1.5}
    learn = RankedTexts.of(*crowd(0, tastes, prompts=60, **setting))
    sizes = dict(zip(MODELS, [(2, 4), (1, 0), (1, 4)], strict=True))
    fits = {name: asdict(fit_voices(learn, *size, Penalties(0.01, 0.005, 0.01))[0]) for name, size in sizes.items()}
    figures = judgment_figures(fits, *crowd(1, tastes, prompts=40, **setting))
    assert (figures.n, figures.prompts) == (240, 40)
    assert figures.uniform == pytest.approx(-math.log(120))
    assert figures.log_likelihood - figures.best_single == pytest.approx(figures.gain.mean)
    assert (figures.gain.low > 0) == camps


# --- whole fits -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few strengths."""
    monkeypatch.setattr(voices, "STRENGTHS", (0.06, 0.01))


@pytest.fixture(scope="module")
def town() -> PreferenceSet:
    return load_preferences("demo-rankings:300")


@pytest.fixture(scope="module")
def folder(town: PreferenceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judged")
    fit(town, k=3, encoder="none", folder=path, test_fraction=0.5)
    return path


def test_an_ensemble_keeps_its_figures_of_judgments(folder: Path, town: PreferenceSet) -> None:
    loaded = RewardEnsemble.load(folder)
    record = loaded.record
    assert record.target == "judgments"
    assert [row.k for row in record.history] == [1, 2, 3]
    stored = record.evaluation
    assert stored is not None
    assert stored.judgments is not None
    held_out = town[town.test_mask(0.5)].judgments
    assert held_out is not None
    assert (stored.judgments.n, stored.judgments.prompts) == (held_out.n, held_out.n_prompts)
    again = evaluate(loaded, folder).judgments
    assert again is not None
    for name in ("log_likelihood", "uniform", "best_single"):
        assert getattr(again, name) == pytest.approx(getattr(stored.judgments, name), rel=1e-6)
    assert again.gain.low == pytest.approx(stored.judgments.gain.low, abs=1e-6)
