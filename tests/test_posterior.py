"""The posterior over people given some of their choices, against Bayes' rule written out."""

import itertools
import math
from collections.abc import Iterable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

from pluralign.theory import posterior

WEIGHTS = np.array([0.5, 0.3, 0.2])


def test_the_posterior_is_bayes_rule_over_all_choices() -> None:
    random = np.random.default_rng(0)
    difference, average, chose_a = random.normal(size=(6, 3)), random.normal(size=6), [1, 0, 0.5, 1, 0, 1]
    model = posterior.ChoiceModel(people=0.7, slip=0.1, spread=0.5)
    chance = posterior.person_chances(difference, average, WEIGHTS, 0.7, 0.3, model)
    expected = np.zeros((4, len(posterior.FACTORS)))
    for h in range(4):
        for t, factor in enumerate(posterior.FACTORS):
            likelihood = (0.7 * WEIGHTS[h] if h < 3 else 0.3) * model.factor_prior[t]
            for i, y in enumerate(chose_a):
                z, s = (difference[i, h] / 0.7, 1 - 0.9 * 0.7) if h < 3 else (average[i], 0.1)
                q = s / 2 + (1 - s) / (1 + math.exp(-z / factor))
                likelihood *= q**y * (1 - q) ** (1 - y)
            expected[h, t] = likelihood
    ll = posterior.choice_log_likelihood(chance, chose_a, 1 - np.array(chose_a))
    found = posterior.person_posterior(ll, model.prior(WEIGHTS))
    assert found == pytest.approx(expected / expected.sum())
    assert posterior.predicted_choice(chance, found) == pytest.approx([np.sum(one * found) for one in chance])


# --- rankings ---------------------------------------------------------------------------------------------------------


def places(groups: Iterable[Iterable[int]]) -> list[int]:
    """Return the place of each response; ``groups`` are indices of responses, best first, and those in a group tie."""
    return [place for _, place in sorted((i, place) for place, group in enumerate(groups) for i in group)]


def weak_orders(items: tuple[int, ...]) -> Iterable[tuple[tuple[int, ...], ...]]:
    """Yield every ranking of items, also those with ties."""
    if not items:
        yield ()
    for size in range(1, len(items) + 1):
        for first in itertools.combinations(items, size):
            for rest in weak_orders(tuple(i for i in items if i not in first)):
                yield (first, *rest)


def by_stages(scores: Any, order: tuple[int, ...]) -> Any:
    """Return the Plackett–Luce probability of an order, choice by choice."""
    rates = np.exp(scores)
    return math.prod(rates[i] / rates[list(order[stage:])].sum() for stage, i in enumerate(order))


@pytest.mark.parametrize("known", [True, False], ids=["average reward", "no average reward"])
@pytest.mark.parametrize("m", [2, 3, 4])
def test_the_probability_of_a_ranking_is_the_sum_over_its_orders(m: int, known: bool) -> None:
    random = np.random.default_rng(m)
    rewards, average = 2 * random.normal(size=(m, 3)), random.normal(size=m) if known else None
    model, beta, undecided = posterior.ChoiceModel(slip=0.1), 0.7, 0.3
    arguments = WEIGHTS, beta, undecided, model

    def probability(ranking: Iterable[Iterable[int]]) -> Any:
        return np.exp(posterior.ranking_log_likelihood(rewards, average, places(ranking), *arguments))

    expected = {}
    shares = np.exp(rewards / beta) / np.exp(rewards / beta).sum(axis=0)
    everyone = np.log(undecided / m + (1 - undecided) * shares @ WEIGHTS) if average is None else average
    for order in itertools.permutations(range(m)):
        expected[order] = np.zeros((4, len(posterior.FACTORS)))
        for h, (t, factor) in itertools.product(range(4), enumerate(posterior.FACTORS)):
            scores, s = (rewards[:, h] / beta, 1 - 0.9 * 0.7) if h < 3 else (everyone, 0.1)
            expected[order][h, t] = s / math.factorial(m) + (1 - s) * by_stages(scores / factor, order)
    total = sum(probability((i,) for i in order) for order in expected)
    assert total == pytest.approx(np.ones((4, len(posterior.FACTORS))), abs=1e-12)
    for ranking in weak_orders(tuple(range(m))):
        orders = itertools.product(*map(itertools.permutations, ranking))
        assert probability(ranking) == pytest.approx(sum(expected[sum(order, ())] for order in orders), rel=1e-11)
    if m == 2:
        difference = None if average is None else average[:1] - average[1:]
        chance = posterior.person_chances(rewards[:1] - rewards[1:], difference, *arguments)
        for ranking, votes in ((((0,), (1,)), (1, 0)), (((1,), (0,)), (0, 1))):
            log_likelihood = posterior.choice_log_likelihood(chance, *([count] for count in votes))[0]
            assert np.log(probability(ranking)) == pytest.approx(log_likelihood, abs=1e-12)


@pytest.mark.parametrize("gap", [-300.0, -30.0, 0.0, 30.0, 300.0])
def test_many_ties_and_distant_rewards_keep_their_probability(gap: float) -> None:
    """n equal rewards tie above one: P = Π_i (n − i)ρ / ((n − i)ρ + 1) with ρ = e^gap."""
    n = 20
    expected = -sum(np.logaddexp(0.0, -gap - math.log(n - i)) for i in range(n))
    found = posterior.plackett_luce(np.append(np.full(n, gap), 0.0)[:, None], [0] * n + [1])
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert posterior.plackett_luce(np.zeros((n, 1)), [5] * n) == [0.0], "one tie of all states nothing"


@pytest.mark.parametrize("n", [2, posterior.FEW_TIED, 10])
@pytest.mark.parametrize(("low", "high"), [(-12, -12), (-12, 12), (12, 12)])
def test_a_tie_and_its_gradient_are_exact_sums(low: float, high: float, n: int) -> None:
    """P = Σ_S (−1)^|S| / (1 + ρ(S)) over all subsets S of the tied responses, in numbers of 200 digits."""
    log_ratio = np.random.default_rng(0).uniform(low, high, n)
    with localcontext(prec=200):
        rates = [Decimal(value).exp() for value in log_ratio.tolist()]
        subsets = [one for size in range(n + 1) for one in itertools.combinations(range(n), size)]
        terms = {one: (-1) ** len(one) / (1 + sum((rates[b] for b in one), Decimal())) for one in subsets}
        total = sum(terms.values())
        squares = {one: (-1) ** len(one) * term**2 for one, term in terms.items()}
        slopes = [-rates[b] * sum(squares[one] for one in subsets if b in one) / total for b in range(n)]
        expected, gradient = float(total.ln()), [float(slope) for slope in slopes]
    found, slope = posterior.tied_first(log_ratio[:, None])
    assert found == pytest.approx(expected, abs=1e-9)
    np.testing.assert_allclose(slope[:, 0], gradient, atol=1e-9)


def test_without_choices_the_posterior_is_the_prior() -> None:
    prior = posterior.ChoiceModel(people=0.4).prior(WEIGHTS)
    assert prior.sum() == pytest.approx(1)
    assert prior[:3].sum(axis=1) == pytest.approx(0.4 * WEIGHTS)
    assert posterior.person_posterior(np.empty((0, 4, len(posterior.FACTORS))), prior) == pytest.approx(prior)


@pytest.mark.parametrize("seed", range(5))
def test_choices_cost_at_most_the_prior_of_the_average(seed: int) -> None:
    """Predicting each choice from the earlier ones: the total log loss is at most log 1/(1 − λ) above the average's."""
    random = np.random.default_rng(seed)
    difference, average = 3 * random.normal(size=(40, 3)), random.normal(size=40)
    model = posterior.ChoiceModel(people=0.3, spread=0.0)
    chance, prior = posterior.person_chances(difference, average, WEIGHTS, 1.0, 0.0, model), model.prior(WEIGHTS)
    y = (random.random(40) < posterior.choice_probability(average)).astype(float)
    ll, ours, alone = posterior.choice_log_likelihood(chance, y, 1 - y), 0.0, 0.0
    for i in range(40):
        p = posterior.predicted_choice(chance[[i]], posterior.person_posterior(ll[:i], prior))[0]
        ours -= math.log(p if y[i] else 1 - p)
        alone -= ll[i, -1, list(posterior.FACTORS).index(1.0)]
    assert ours <= alone + math.log(1 / 0.7) + 1e-9


def test_without_an_average_reward_the_average_predicts_the_shares_of_the_ensemble() -> None:
    difference = np.random.default_rng(1).normal(size=(5, 3))
    model = posterior.ChoiceModel(slip=1e-12)
    chance = posterior.person_chances(difference, None, WEIGHTS, 0.5, 0.2, model)
    middle = list(posterior.FACTORS).index(1.0)
    assert chance[:, -1, middle] == pytest.approx(posterior.choice_probability(difference, 0.5, 0.2) @ WEIGHTS)


def test_the_most_informative_pair_is_the_one_on_which_likely_members_differ() -> None:
    chance = np.array([[0.9, 0.1, 0.5], [0.9, 0.9, 0.1], [0.5, 0.5, 0.5]])[:, :, None]
    first = posterior.information_gain(chance, np.array([[0.49], [0.49], [0.02]]))
    assert first.argmax() == 0
    assert first[2] == 0
    assert posterior.information_gain(chance, np.array([[0.5], [0.02], [0.48]])).argmax() == 1


def test_impossible_values_are_named() -> None:
    assert posterior.ChoiceModel().problem() is None
    assert "slip" in str(posterior.ChoiceModel(slip=0.0).problem())
    assert "people" in str(posterior.ChoiceModel(people=1.5).problem())
