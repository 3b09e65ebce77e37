"""Evidence of distinct voices: against its definition, and its error rate where there is one voice."""

from dataclasses import replace

import numpy as np
import pytest

from pluralign import fit, town_hall
from pluralign.cli.render.results import scores
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import headline
from pluralign.ensemble.record import SINGLE_REWARDS, FitRecord, VoicesEvidence
from pluralign.learning.measure import evidence_of_voices, measure, read_ensemble
from pluralign.measuring.verdicts import verdicts, voices_sentence
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
        found = evidence_of_voices({"vote": far, "policy": truth}, baselines, preferences)
        assert found is not None
        assert found.best_single == best


def test_differences_are_paired_by_prompt_with_a_bonferroni_level() -> None:
    truth = shares()
    preferences, single, vote = votes_on(50, truth), 0.7 * truth + 0.15, np.round(truth * 4) / 4
    found = evidence_of_voices({"vote": vote, "policy": truth}, {"soft_bt": single, "mixture": vote}, preferences)
    assert found is not None
    assert found.confidence == pytest.approx(0.975)
    for reading, share in (("vote", vote), ("policy", truth)):
        error, other = (share - preferences.prob_a) ** 2, (single - preferences.prob_a) ** 2
        expected = paired_difference(error, other, preferences.prompt_index, level=0.975)
        assert found.readings[reading] == expected
        wide = expected.high - expected.low
        usual = paired_difference(error, other, preferences.prompt_index)
        assert wide > usual.high - usual.low
    assert found.mixture == found.readings["vote"]
    assert found.difference == found.readings[found.reading]
    assert found.difference.high == min(interval.high for interval in found.readings.values())


def test_evidence_is_found_where_one_reading_is_clearly_better() -> None:
    truth = shares()
    preferences, single = votes_on(50, truth), np.full(400, 0.5)
    yes = evidence_of_voices({"vote": single, "policy": truth}, {"soft_bt": single}, preferences)
    no = evidence_of_voices({"vote": single, "policy": 1 - truth}, {"soft_bt": single}, preferences)
    assert yes is not None
    assert (yes.evidence, yes.reading) == (True, "policy")
    assert no is not None
    assert no.evidence is False


def test_no_evidence_beyond_the_error_rate_where_voices_are_noise() -> None:
    """Both readings are the true share with independent noise of the same size as the single reward's."""
    rng, found = np.random.default_rng(7), 0
    for seed in range(150):
        truth = shares(60, seed)
        noisy = {name: np.clip(truth + 0.2 * rng.standard_normal(60), 0, 1) for name in ("vote", "policy", "soft_bt")}
        single = {"soft_bt": noisy.pop("soft_bt")}
        evidence = evidence_of_voices(noisy, single, votes_on(ENOUGH_CLUSTERS, truth, seed))
        assert evidence is not None
        found += bool(evidence.evidence)
    assert found <= 12, "at most 5 % are expected, and 12 of 150 is the 95th percentile at that rate"


def test_few_prompts_are_undefined_and_say_why() -> None:
    truth = shares()
    single = {"soft_bt": np.full(400, 0.5)}
    few = evidence_of_voices({"vote": truth}, single, votes_on(ENOUGH_CLUSTERS - 1, truth))
    enough = evidence_of_voices({"vote": truth}, single, votes_on(ENOUGH_CLUSTERS, truth))
    one = evidence_of_voices({"vote": truth, "policy": 1 - truth}, single, votes_on(1, truth))
    assert few is not None
    assert few.evidence is None
    assert few.reason == "19 prompts, at least 20 needed"
    assert voices_sentence(few) == "Evidence of distinct voices: undefined (19 prompts, at least 20 needed)."
    assert enough is not None
    assert enough.evidence
    assert one is not None
    assert (one.evidence, one.reading) == (None, "vote")


def test_without_a_single_reward_there_is_no_test() -> None:
    truth = shares(40)
    assert evidence_of_voices({"vote": truth}, {"mixture": truth, "hard_bt": truth}, votes_on(20, truth)) is None


# --- in evaluations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def town() -> PreferenceSet:
    return town_hall(500).preferences


@pytest.fixture(scope="module")
def ensemble(town: PreferenceSet) -> RewardEnsemble:
    return fit(town, k=2, encoder="none", test_fraction=0.5)


def test_fit_records_the_evidence_and_reads_it_back(ensemble: RewardEnsemble) -> None:
    evaluation = ensemble.record.evaluation
    assert evaluation is not None
    voices = evaluation.voices
    assert voices is not None
    assert set(voices.readings) == {"vote", "policy"}
    stored = ensemble.record.to_json()
    assert {"evidence", "best_single", "reading", "difference"} <= set(stored["voices"])
    again = FitRecord.from_json(stored).evaluation
    assert again is not None
    assert again.voices == voices
    old = FitRecord.from_json({key: value for key, value in stored.items() if key != "voices"}).evaluation
    assert old is not None
    assert old.voices is None


def test_one_member_has_no_evidence(ensemble: RewardEnsemble, town: PreferenceSet) -> None:
    for alone in (ensemble.take([0], [1.0]), replace(ensemble, weights=np.array([1.0, 0.0]))):
        subject, baselines = read_ensemble(alone, town, ensemble.features(texts_of(town)))
        assert measure(subject, baselines, town).voices is None
    subject, baselines = read_ensemble(ensemble, town, ensemble.features(texts_of(town)))
    assert measure(subject, baselines, town).voices is not None


@pytest.mark.parametrize(
    ("evidence", "high", "kind", "says"),
    [
        (True, -0.001, "good", "Evidence of distinct voices: yes. The ensemble (policies) predicts these votes better"),
        (False, 0.001, "level", "Evidence of distinct voices: not with these features. The ensemble (policies) is not"),
    ],
)
def test_verdicts_and_the_terminal_show_the_evidence(
    ensemble: RewardEnsemble, evidence: bool, high: float, kind: str, says: str
) -> None:
    gap, second = Interval(-0.002, -0.003, high, 0.0004), Interval(0.001, -0.002, 0.004, 0.001)
    voices = VoicesEvidence(evidence, "damped_bt", "policy", gap, {"policy": gap}, second, 0.975)
    assert ensemble.record.evaluation is not None
    evaluation = replace(ensemble.record.evaluation, voices=voices)
    *_, last = verdicts(evaluation)
    assert last.kind == kind
    assert last.text.startswith(says)
    assert "the best single reward (soft BT, damped): Brier difference −0.0020 [−0.0030, " in last.text
    assert last.text.endswith("(97.5 %). EM mixture against the same reward: +0.0010 [−0.0020, +0.0040].")
    assert last.text in [str(line) for line in scores(evaluation, headline(evaluation), "")]
