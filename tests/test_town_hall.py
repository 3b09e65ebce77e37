"""The built-in town hall: reproducible texts, exact shares, and votes that follow them."""

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pluralign.votes.town_hall.town_hall import TASTES, TownHall, town_hall
from pluralign.votes.town_hall.writing import Attributes, load_issues


@pytest.fixture(scope="module")
def hall() -> TownHall:
    return town_hall(8000, seed=5)


def test_the_same_arguments_give_the_same_hall() -> None:
    first, again = town_hall(300, seed=2, votes_per_pair=(3, 9)), town_hall(300, seed=2, votes_per_pair=(3, 9))
    assert first.preferences.fingerprint == again.preferences.fingerprint
    for name in ("true_prob", "features", "tastes"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    other = town_hall(300, seed=1)
    assert np.array_equal(first.tastes, other.tastes), "another seed is another sample of the same people"
    assert set(first.preferences.responses).isdisjoint(other.preferences.responses)
    more = town_hall(300, seed=2, n_annotators=10, votes_per_pair=50).preferences
    assert list(more.responses) == list(first.preferences.responses), "people and votes do not change the texts"


def test_features_follow_the_order_of_responses_and_of_items(hall: TownHall) -> None:
    items = hall.preferences.items()
    assert np.array_equal(items.response_index, np.arange(len(hall.features)))
    assert np.array_equal(items.a, hall.preferences.a_index)
    assert tuple(TASTES) == hall.feature_names


def test_the_position_of_an_answer_is_stance_times_loadings(hall: TownHall) -> None:
    issue = next(issue for issue in load_issues() if "wind turbines" in issue.rest)
    assert tuple(issue.loadings) == (0.0, 0.5, 1.0, 0.0)
    for stance, sign in ((0, 1), (1, -1)):
        about = [bool(re.search("wind turbines on|two turbines on", text)) for text in hall.preferences.responses]
        positions = hall.features[np.array(about) & (hall.attributes[:, 0] == stance), :4]
        assert len(positions) > 5
        assert np.allclose(positions, positions[:, [2]] * issue.loadings)
        assert (np.sign(positions[:, 2]) == sign).all()


def test_the_true_share_matches_a_loop_in_exact_arithmetic() -> None:
    hall = town_hall(40, seed=3, n_annotators=25)
    a_index, b_index = hall.preferences.a_index, hall.preferences.b_index
    for pair in range(40):
        preferring_a = 0
        for taste in hall.tastes:
            a, b = (
                sum(Fraction(t) * Fraction(f) for t, f in zip(taste.tolist(), features.tolist(), strict=True))
                for features in (hall.features[a_index[pair]], hall.features[b_index[pair]])
            )
            assert a != b
            preferring_a += a > b
        assert hall.true_prob[pair] == preferring_a / 25
    np.testing.assert_allclose(hall.annotator_votes(np.arange(25)).mean(axis=1), hall.true_prob, rtol=1e-15)


def test_annotator_votes_follow_their_rewards_in_the_requested_order() -> None:
    hall = town_hall(100, n_annotators=20)
    rewards = hall.annotator_rewards([7, 3, 7])
    votes = hall.annotator_votes([7, 3, 7])
    assert votes.shape == (100, 3)
    assert np.array_equal(votes[:, 0], votes[:, 2])
    assert np.array_equal(votes, rewards[hall.preferences.a_index] > rewards[hall.preferences.b_index])
    assert hall.annotator_votes(4).shape == (100, 1)


def test_random_annotators_have_the_error_of_theorem_2(hall: TownHall) -> None:
    random, k = np.random.default_rng(0), 8
    votes = hall.annotator_votes(np.arange(1000))
    errors = [((votes[:, random.integers(0, 1000, k)].mean(axis=1) - hall.true_prob) ** 2).mean() for _ in range(200)]
    expected = (hall.true_prob * (1 - hall.true_prob)).mean() / k
    assert abs(np.mean(errors) - expected) < 4 * np.std(errors) / np.sqrt(200)


@pytest.mark.parametrize("votes_per_pair", [1, 5, (2, 12)])
def test_votes_are_binomial_around_the_true_share(votes_per_pair: int | tuple[int, int]) -> None:
    hall = town_hall(20_000, seed=11, votes_per_pair=votes_per_pair, n_annotators=200)
    n, p, x = hall.preferences.n_votes, hall.true_prob, hall.preferences.votes_a
    low, high = votes_per_pair if isinstance(votes_per_pair, tuple) else (votes_per_pair, votes_per_pair)
    assert set(np.unique(n)) == set(range(low, high + 1))
    unanimous = (p == 0) | (p == 1)
    assert np.array_equal(x[unanimous], (n * p)[unanimous].astype(int))
    n, p, x = n[~unanimous], p[~unanimous], x[~unanimous]
    variance = n * p * (1 - p)
    # Both are sums of many independent terms and nearly standard normal; the fourth moment is that of the binomial.
    mean_z = (x - n * p).sum() / np.sqrt(variance.sum())
    fourth = 3 * variance**2 + variance * (1 - 6 * p * (1 - p))
    spread_z = ((x - n * p) ** 2 - variance).sum() / np.sqrt((fourth - variance**2).sum())
    assert abs(mean_z) < 4
    assert abs(spread_z) < 4


def test_disagreement_is_similar_to_that_of_real_votes(hall: TownHall) -> None:
    majority = np.maximum(hall.true_prob, 1 - hall.true_prob)
    assert 0.70 < majority.mean() < 0.75
    kinds = np.histogram(majority, bins=np.linspace(0.5, 1, 6))[0] / len(majority)
    assert kinds.min() > 0.08, "every kind of pair occurs, from evenly split to nearly unanimous"
    assert abs(hall.true_prob.mean() - 0.5) < 0.01, "pairs are oriented at random"


def test_all_prompts_and_all_responses_are_distinct(hall: TownHall) -> None:
    texts = list(hall.preferences.responses)
    assert len(set(texts)) == len(texts)
    assert len(set(hall.preferences.prompts)) == 1000
    assert (hall.preferences.a_index != hall.preferences.b_index).all()
    pairs = np.sort(np.stack([hall.preferences.a_index, hall.preferences.b_index], axis=1), axis=1)
    assert len(np.unique(pairs, axis=0)) == len(pairs)
    assert len(hall.preferences.items().prompt_index) == len(texts), "no text belongs to two prompts"


def test_no_two_responses_to_a_prompt_have_the_same_features() -> None:
    town = town_hall(5700, seed=1, n_responses_per_prompt=20, pairs_per_prompt=190)
    prompt = town.preferences.items().prompt_index
    for number in range(30):
        assert len(np.unique(town.features[prompt == number], axis=0)) == 20


def test_every_attribute_is_visible_in_the_text(hall: TownHall) -> None:
    levels = Attributes(*hall.attributes.T)
    texts = list(hall.preferences.responses)

    def share(pattern: str, rows: np.ndarray) -> float:
        return float(np.mean([bool(re.search(pattern, texts[row], re.MULTILINE)) for row in np.flatnonzero(rows)]))

    words = np.array([len(text.split()) for text in texts])
    median_words = [float(np.median(words[levels.length == level])) for level in range(5)]
    assert median_words == sorted(median_words)
    assert median_words[4] > 2.5 * median_words[0]
    bullets, numbers = np.asarray(levels.structure) == 1, np.asarray(levels.structure) == 2
    assert share(r"^- ", bullets) == share(r"^1\. ", numbers) == 1
    assert share(r"^(- |1\. )", ~(bullets | numbers)) == 0
    calls, questions, support, stance, tone, length = (
        np.asarray(getattr(levels, name)) for name in ("call", "question", "support", "stance", "tone", "length")
    )
    assert (share(r"!$", calls == 1), share(r"!", calls != 1)) == (1, 0)
    assert (share(r"\?", questions == 1), share(r"\?", questions != 1)) == (1, 0)
    assert (share(r"£", support == 4), share(r"£", support != 4)) == (1, 0)
    assert share(r"\d", support == 1) == share(r"(?i)fair|just|justice", support == 3) == 1
    opposed = r"against|oppose|\bno\b|not |n't|never|mistake|wrong|bad idea"
    assert share(opposed, (stance == 1) & (length == 0)) == 1
    assert share(r"n't|I'm|I'd|let's", (tone == 1) | (tone == 2)) == 0


def test_each_text_is_readable_english(hall: TownHall) -> None:
    others = town_hall(2400, seed=9).preferences
    for text in [*hall.preferences.prompts, *hall.preferences.responses, *others.prompts, *others.responses]:
        assert not re.search(r"[{}]|  | [,.;:?!]|[,.;:?!][,.;:?!]", text), text
        assert not re.search(r"\b(\w+) \1\b", text, re.IGNORECASE), text
        assert not re.search(r"\ba [aeiou]|\ban (?!hour|honest)[^aeiou]", text), text
        for line in filter(None, text.split("\n")):
            body = re.sub(r"^(- |\d\. )", "", line)
            assert body[-1] in ".?!:", text
            for sentence in re.split(r"(?<=[.?!]) ", body):
                assert sentence[0].isupper(), text


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (r"n_pairs must be a whole number of at least 1, not 2\.5", {"n_pairs": 2.5}),
        ("votes_per_pair must be a whole number of at least 1, not 0", {"votes_per_pair": 0}),
        ("the upper end of votes_per_pair must be .* at least 5, not 3", {"votes_per_pair": (5, 3)}),
        ("pairs_per_prompt must be at most 3", {"n_responses_per_prompt": 3, "pairs_per_prompt": 4}),
        ("at most 4,147,200 distinct prompts", {"n_pairs": 5_000_000, "pairs_per_prompt": 1}),
        ("seed must be a whole number of at least 0, not -1", {"seed": -1}),
    ],
)
def test_invalid_arguments_raise_a_sentence(problem: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=problem):
        town_hall(**options)
