"""Mixtures of rewards from whole judgments: by enumeration, plain loops and known rewards; whole fits."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated import numeric_gradient

from pluralign.learning import voices
from pluralign.learning.voices import FACTORS, Penalties, RankedTexts, Voices, fit_voices
from pluralign.votes.judgments import Judgments

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
