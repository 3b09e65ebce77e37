"""The posterior over members given a person's choices, against Bayes' rule written out."""

import math

import numpy as np
import pytest

from pluralign.theory.posterior import choice_log_likelihood, choice_probability, member_posterior


def test_the_posterior_is_bayes_rule_over_all_choices() -> None:
    random = np.random.default_rng(0)
    difference, weights, chose_a = random.normal(size=(6, 3)), np.array([0.5, 0.3, 0.2]), [1, 0, 0.5, 1, 0, 1]
    chance = choice_probability(difference, 0.7, 0.3)
    expected = []
    for j, weight in enumerate(weights):
        likelihood = weight
        for i, y in enumerate(chose_a):
            q = 0.15 + 0.7 / (1 + math.exp(-difference[i, j] / 0.7))
            likelihood *= q**y * (1 - q) ** (1 - y)
        expected.append(likelihood)
    found = member_posterior(choice_log_likelihood(chance, chose_a, 1 - np.array(chose_a)), weights)
    assert found == pytest.approx(np.array(expected) / sum(expected))


def test_without_choices_the_posterior_is_the_weights() -> None:
    weights = np.array([0.6, 0.4, 0.0])
    assert member_posterior(np.empty((0, 3)), weights) == pytest.approx(weights)


def test_some_choices_are_always_random() -> None:
    certain = np.array([1e6])
    assert choice_probability(certain, 1.0, undecided=0.0) == pytest.approx(0.95)
    assert choice_probability(certain, 1.0, undecided=0.4) == pytest.approx(0.8)
