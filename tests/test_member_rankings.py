"""Diversity and case studies, checked by hand, and their commands."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from conftest import WriteLines, printed, run
from scipy.stats import kendalltau
from test_ensemble import some_ensemble

from pluralign import UsageError, town_hall
from pluralign.ensemble.held_out import held_out_files, score_held_out
from pluralign.measuring.diversity import diversity, held_out_candidates, measure_diversity, score_candidates
from pluralign.votes.candidates import Candidates, candidates_of

LISTS = candidates_of(town_hall(126, n_responses_per_prompt=7, pairs_per_prompt=21).preferences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ensemble with held-out votes, as ``fit`` saves them."""
    path = tmp_path_factory.mktemp("ensemble")
    ensemble = some_ensemble()
    ensemble.save(path, held_out_files(ensemble, score_held_out(ensemble, town_hall(240).preferences)))
    return path


def test_tau_is_the_mean_of_scipys_tau_over_prompts() -> None:
    ensemble = some_ensemble()
    found = diversity(ensemble, [*LISTS, Candidates("Tea?", ("Yes.",))])
    taus = []
    for one in LISTS:
        rewards = ensemble.rewards([(one.prompt, response) for response in one.responses])
        taus.append([[kendalltau(rewards[:, i], rewards[:, j]).statistic for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(found.tau, np.mean(taus, axis=0), atol=1e-12)
    np.testing.assert_allclose(found.standard_error, np.std(taus, axis=0, ddof=1) / np.sqrt(6), atol=1e-12)
    assert found.mean_off_diagonal == pytest.approx(np.mean(np.mean(taus, axis=0)[np.triu_indices(3, 1)]))
    assert (found.prompts, found.candidates, found.skipped) == (6, 42, 1)
    assert found.vote_agreement is None


def test_tops_count_the_first_choices_of_members() -> None:
    ensemble = some_ensemble().take([0, 1], [0.75, 0.25])
    rewards = [
        np.array([[3.0, 1.0], [1.0, 3.0], [0.0, 0.0]]),
        np.array([[2.0, 5.0], [1.0, 1.0]]),
    ]
    tops = measure_diversity(ensemble, rewards).tops
    assert tops.distinct == (2 + 1) / 2
    assert tops.most_popular == (0.75 + 1.0) / 2
    assert tops.distinct_if_random == pytest.approx((3 * (1 - (2 / 3) ** 2) + 1.5) / 2)


def test_near_copies_and_near_opposites_are_listed() -> None:
    ensemble = some_ensemble()
    reward = np.arange(6.0)
    rewards = [np.stack([reward, 2 * reward, -reward], axis=1)]
    found = measure_diversity(ensemble, rewards)
    assert [pair.members for pair in found.near_copies] == [(0, 1)]
    assert [pair.members for pair in found.near_opposites] == [(0, 2), (1, 2)]
    assert found.near_copies[0].weight == pytest.approx(ensemble.weights[:2].sum())


def test_stored_rewards_equal_freshly_scored_ones() -> None:
    ensemble, votes = some_ensemble(), town_hall(80).preferences
    lists, rewards = held_out_candidates(score_held_out(ensemble, votes))
    assert lists == candidates_of(votes, 3)
    for kept, fresh in zip(rewards, score_candidates(ensemble, lists), strict=True):
        np.testing.assert_allclose(kept, fresh, rtol=1e-9)


def test_a_case_shows_each_members_best_response() -> None:
    ensemble = some_ensemble()
    (case,) = diversity(ensemble, LISTS, prompt="3").cases
    rewards = ensemble.rewards([(LISTS[2].prompt, response) for response in LISTS[2].responses])
    expected = {j: LISTS[2].responses[rewards[:, j].argmax()] for j in range(3)}
    assert {j: choice.response for choice in case.choices for j in choice.members} == expected
    assert sum(choice.weight for choice in case.choices) == pytest.approx(1.0)
    assert [choice.weight for choice in case.choices] == sorted((c.weight for c in case.choices), reverse=True)
    assert (case.number, case.prompt, case.candidates) == (3, LISTS[2].prompt, 7)


def test_the_most_divided_prompts_come_first() -> None:
    cases = diversity(some_ensemble(), LISTS, cases=6).cases
    order = [(-len(case.choices), case.tau) for case in cases]
    assert order == sorted(order)
    assert {case.number for case in cases} == set(range(1, 7))
    assert diversity(some_ensemble(), LISTS, cases=2).cases == cases[:2]


def test_case_studies_are_selected_by_text_or_number() -> None:
    word = LISTS[4].prompt_text[:30].upper()
    assert [case.number for case in diversity(some_ensemble(), LISTS, prompt=word).cases] == [5]
    for prompt, problem in (("zebra", "no prompt contains 'zebra'"), ("7", "from 1 to 6; there is no prompt 7")):
        with pytest.raises(UsageError, match=problem):
            diversity(some_ensemble(), LISTS, prompt=prompt)


def test_a_single_response_cannot_be_ranked() -> None:
    with pytest.raises(UsageError, match="at least two different responses"):
        diversity(some_ensemble(), [Candidates("Tea?", ("Yes.",))])
    with pytest.raises(UsageError, match="of 2 members, but the ensemble has 3"):
        measure_diversity(some_ensemble(), [np.eye(2)])


def test_diversity_of_a_file_is_one_json_object(folder: Path, write_jsonl: WriteLines) -> None:
    path = write_jsonl([asdict(one) for one in LISTS], "candidates.jsonl")
    done = run("diversity", folder, path, "--json", "--cases", "2")
    found = json.loads(done.stdout)
    expected = diversity(some_ensemble(), LISTS)
    np.testing.assert_allclose(found["tau"], expected.tau, rtol=1e-9)
    assert found["mean_off_diagonal"] == pytest.approx(expected.mean_off_diagonal)
    assert len(found["cases"]) == 2
    assert len(found["vote_agreement"]) == 3


def test_diversity_reads_held_out_prompts_and_draws_a_heat_map(folder: Path) -> None:
    shown = printed("diversity", folder)
    assert "Kendall's τ between members" in shown
    assert "its held-out prompts" in shown
    assert "first choices among" in shown
