"""Evidence of distinct voices in words, and the best single reward on pair counts: definition and error rate."""

import html
import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pluralign import RewardEnsemble, fit, load_preferences
from pluralign.cli.render.results import fit_page
from pluralign.core.json_values import from_json, to_json
from pluralign.ensemble.held_out import score_held_out
from pluralign.ensemble.record import SINGLE_REWARDS, Evaluation, FirstChoices, FitRecord, JudgmentFigures
from pluralign.learning.measure import evidence_of_voices, measure, read_ensemble
from pluralign.measuring.insight import with_insight
from pluralign.measuring.report_data import collect_report_data
from pluralign.publishing.card import ModelCard
from pluralign.publishing.notebook import ensemble_html
from pluralign.publishing.report import page as report_page
from pluralign.server.page import collect_page_data
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, paired_difference
from pluralign.votes.preferences import PreferenceSet, texts_of


def votes_on(prompts: int, share: np.ndarray, seed: int = 0, n_votes: int = 5) -> PreferenceSet:
    """Votes drawn from the share of each pair, with the pairs spread over prompts in turn."""
    for_a = np.random.default_rng(seed).binomial(n_votes, share)
    n = len(share)
    return PreferenceSet.from_columns(
        [f"p{i % prompts}" for i in range(n)], [f"a{i}" for i in range(n)], [f"b{i}" for i in range(n)],
        for_a, n_votes - for_a,
    )  # fmt: skip


def shares(n: int = 400, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 0.9, n)


def test_best_single_reward_is_the_one_with_the_lowest_score_on_these_votes() -> None:
    truth = shares()
    preferences = votes_on(50, truth)
    close, far = 0.9 * truth + 0.05, 0.5 * truth + 0.25
    for best in SINGLE_REWARDS:
        baselines = dict.fromkeys(SINGLE_REWARDS, far) | {best: close}
        found: Any = evidence_of_voices({"vote": far, "policy": truth}, baselines, preferences)
        assert found.best_single == best


def test_differences_are_paired_by_prompt_with_a_bonferroni_level() -> None:
    truth = shares()
    preferences, single, vote = votes_on(50, truth), 0.7 * truth + 0.15, np.round(truth * 4) / 4
    found: Any = evidence_of_voices({"vote": vote, "policy": truth}, {"soft_bt": single}, preferences)
    assert found.confidence == pytest.approx(0.975)
    other, expected = (single - preferences.prob_a) ** 2, {}
    for reading, share in (("vote", vote), ("policy", truth)):
        error = (share - preferences.prob_a) ** 2
        expected[reading] = paired_difference(error, other, preferences.prompt_index, level=0.975)
        usual = paired_difference(error, other, preferences.prompt_index)
        assert expected[reading].high - expected[reading].low > usual.high - usual.low
    assert found.difference == expected[found.reading]
    assert found.difference.high == min(interval.high for interval in expected.values())


def test_no_evidence_beyond_the_error_rate_where_voices_are_noise() -> None:
    """Both readings are the true share with independent noise of the same size as the single reward's."""
    rng, found = np.random.default_rng(7), 0
    for seed in range(150):
        truth = shares(60, seed)
        noisy = {name: np.clip(truth + 0.2 * rng.standard_normal(60), 0, 1) for name in ("vote", "policy", "soft_bt")}
        single = {"soft_bt": noisy.pop("soft_bt")}
        evidence: Any = evidence_of_voices(noisy, single, votes_on(ENOUGH_CLUSTERS, truth, seed))
        found += bool(evidence.evidence)
    assert found <= 12, "at most 5 % are expected, and 12 of 150 is the 95th percentile at that rate"


def test_one_clearly_better_reading_is_enough_on_enough_prompts() -> None:
    truth = shares()
    single = {"soft_bt": np.full(400, 0.5)}
    for prompts, policy, expected in (
        (ENOUGH_CLUSTERS, truth, (True, "policy")),
        (ENOUGH_CLUSTERS, 1 - truth, (False, "vote")),
        (ENOUGH_CLUSTERS - 1, truth, (None, "policy")),
        (1, truth, (None, "policy")),
    ):
        found: Any = evidence_of_voices({"vote": single["soft_bt"], "policy": policy}, single, votes_on(prompts, truth))
        assert (found.evidence, found.reading) == expected
    assert evidence_of_voices({"vote": truth}, {"mixture": truth, "hard_bt": truth}, votes_on(20, truth)) is None


# --- in evaluations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def town() -> PreferenceSet:
    return load_preferences("demo-rankings:800")


@pytest.fixture(scope="module")
def ensemble(town: PreferenceSet) -> RewardEnsemble:
    return fit(town, k=2, encoder="none", test_fraction=0.5)


def test_fit_records_the_evidence_and_reads_it_back(ensemble: RewardEnsemble) -> None:
    evaluation: Any = ensemble.record.evaluation
    voices: Any = evaluation.voices
    stored = ensemble.record.to_json()
    assert {"evidence", "best_single", "reading", "difference"} <= set(stored["voices"])
    keys = {"t", "sets", "error", "corrected", "interval", "soft_bt", "uniform", "difference"}
    assert [one["t"] for one in stored["first_choices"] if set(one) == keys] == [2, 3, 4]
    again: Any = FitRecord.from_json(stored).evaluation
    assert (again.voices, again.first_choices) == (voices, evaluation.first_choices)
    old: Any = FitRecord.from_json({key: value for key, value in stored.items() if key != "voices"}).evaluation
    assert old.voices is None


def test_one_member_has_no_evidence(ensemble: RewardEnsemble, town: PreferenceSet) -> None:
    for alone in (ensemble.take([0], [1.0]), replace(ensemble, weights=np.array([1.0, 0.0]))):
        subject, baselines = read_ensemble(alone, town, ensemble.features(texts_of(town)))
        assert measure(subject, baselines, town).voices is None
    subject, baselines = read_ensemble(ensemble, town, ensemble.features(texts_of(town)))
    assert measure(subject, baselines, town).voices is not None


# --- in words ---------------------------------------------------------------------------------------------------------

NAN = math.nan
FOUND = JudgmentFigures(549, 56, -2.825, -3.178, -2.851, Interval(0.026, 0.0149, 0.036, 0.005), 5.0)
CASES = {
    "yes": (FOUND, [],
        "Distinct voices: yes. The ensemble predicts a whole ranking better than the best single reward by "
        "+0.026 [0.015, 0.036] log-likelihood per judgment (549 judgments, 56 held-out prompts)."),
    "no": (replace(FOUND, gain=Interval(-0.001, -0.004, 0.002, 0.001)), [],
        "No evidence of distinct voices: the ensemble does not predict a whole ranking better than the best single "
        "reward (difference −0.001 [−0.004, 0.002] log-likelihood per judgment; 549 judgments, 56 held-out prompts)."),
    "few": (replace(FOUND, prompts=19, gain=Interval(0.02, NAN, NAN, NAN)), [],
        "Distinct voices: unknown. 19 held-out prompts with judgments, and an interval needs at least 20."),
    "alone": (replace(FOUND, people=1.0, gain=Interval(0.02, NAN, NAN, NAN)), [],
        "Distinct voices: unknown. Most prompts were judged by one person each, and preferences that differ between "
        "prompts look the same as people who differ."),
    "counts": (None, [2, 3],
        "Distinct voices: unknown. Pair counts alone cannot show whether people differ."),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_surface_says_the_same_about_distinct_voices(
    ensemble: RewardEnsemble, town: PreferenceSet, case: str
) -> None:
    judgments, sizes, sentence = CASES[case]
    record, gap = ensemble.record, Interval(-0.01, -0.02, 0.005, 0.006)
    assert record.evaluation is not None
    chosen = [FirstChoices(t, 300, 0.15, 0.1, Interval(0.1, 0.06, 0.14, 0.02), 0.16, 0.2, gap) for t in sizes]
    evaluation = replace(record.evaluation, judgments=judgments, first_choices=chosen)
    assert Evaluation.__str__(from_json(Evaluation, to_json(evaluation))).splitlines()[-1] == sentence
    test = town[np.isin(town.prompt_index, np.unique(town.prompt_index)[:20])]
    held_out = score_held_out(ensemble, test, all_prompts=True)
    shown = with_insight(replace(ensemble, record=replace(record, evaluation=evaluation)), held_out)
    terminal = Console(file=io.StringIO(), width=300)
    for line in fit_page(shown, "DIR"):
        terminal.print(line)
    page = to_json(collect_page_data(shown, None, name=""))
    surfaces = {
        "terminal": terminal.file.getvalue(),  # type: ignore[attr-defined]
        "report": html.unescape(report_page(shown, collect_report_data(shown, held_out))),
        "card": ModelCard(shown, ["a", "b"], "none", None, "").text("frozen", [0, 1]).replace("\\", ""),
        "notebook": html.unescape(ensemble_html(shown)),
        "page": json.dumps(page, ensure_ascii=False),
    }
    for name, text in surfaces.items():
        assert " ".join(text.split()).count(sentence) == 1, name
        if name != "notebook":
            assert ("Whole judgments" in text) == ("−2.851" in text) == (judgments is not None), name
            assert ("First choices" in text) == ("0.1000 [0.0600, 0.1400]" in text) == bool(sizes), name
    titles = [one["title"].split()[0] for one in page["tables"]]
    assert [one for one in titles if one in ("Whole", "First")] == ["Whole"] * bool(judgments) + ["First"] * bool(sizes)
    assert to_json(evaluation)["first_choices"] == [asdict(one) for one in chosen]


def test_other_predictors_have_no_sentence_about_voices(town: PreferenceSet) -> None:
    evaluation: Any = fit(town, k=1, encoder="none").record.evaluation
    assert "voices" not in str(evaluation)
