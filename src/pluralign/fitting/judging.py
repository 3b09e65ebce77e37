"""The figures of a fitted ensemble on its test pairs, and the record of the fit.

The last step of every fit. Nothing before it reads a test vote.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Mask, Vectors
from pluralign.core.distributed import ALONE, Processes
from pluralign.core.types import Level
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, BoundCost, DataSummary, Evaluation, FitRecord, HistoryRow
from pluralign.ensemble.training_prompts import hash_prompts
from pluralign.evaluation.measure import evaluate_features
from pluralign.fitting.task import Members
from pluralign.theory import calibration
from pluralign.training.baselines import Baseline
from pluralign.training.options import FitOptions
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import hard_votes
from pluralign.votes.preferences import PreferenceSet, rows_of_texts


@dataclass(frozen=True, eq=False)
class TestPairs:
    """The pairs that measure a fit."""

    __test__ = False  # for pytest

    votes: PreferenceSet
    """All votes of the fit."""
    rows: Mask
    """Which of its pairs are held out, ``(n_pairs,)``."""
    pairs: Pairs
    """The held-out pairs with their inputs."""

    def history_row(self, members: Members, train: Pairs, level: Level) -> HistoryRow:
        """Measure the ensemble of one size on training and test pairs."""
        share, prob_a = members.prob_hat(self.pairs, level), self.pairs.prob_a
        n_votes, ties = self.votes.n_votes[self.rows], self.votes.counted_ties[self.rows]
        return HistoryRow(
            k=members.k,
            train_brier=calibration.brier(members.prob_hat(train, level), train.prob_a),
            test_brier=calibration.brier(share, prob_a),
            test_brier_corrected=calibration.brier_corrected(share, prob_a, n_votes, ties),
            weights=members.weights.tolist(),
            undecided=members.undecided,
        )


def judge(
    ensemble: RewardEnsemble,
    test: TestPairs,
    features: Vectors,
    options: FitOptions,
    baselines: Mapping[str, Baseline],
    history: Sequence[HistoryRow],
    processes: Processes = ALONE,
) -> tuple[RewardEnsemble, HeldOutVotes]:
    """Measure a fitted ensemble on the test pairs.

    Args:
        ensemble: the ensemble, without a record.
        test: the pairs to measure it on.
        features: features of all texts of the fit, in the order of ``texts_of(test.votes)``.
        options: how it was fitted.
        baselines: the baselines fitted beside it.
        history: the ensembles of each size.
        processes: the processes that share the features.

    Returns:
        The ensemble with its baselines and its record, and the held-out votes with its rewards.
    """
    votes, test_votes = test.votes, test.votes[test.rows]
    learned_from = votes.prompt_index[~test.rows]
    record = FitRecord(
        method=options.method,
        level=options.level,
        k=ensemble.k,
        baseline_formulas={name: baseline.formula for name, baseline in baselines.items()},
        options=asdict(options),
        history=list(history),
        baseline_seconds={name: baseline.seconds for name, baseline in baselines.items()},
        data=DataSummary(
            name=votes.name,
            fingerprint=votes.fingerprint,
            train_pairs=len(learned_from),
            train_prompts=len(np.unique(learned_from)),
            test_pairs=len(test_votes),
            test_prompts=len(np.unique(votes.prompt_index[test.rows])),
            loaded=votes.loaded,
        ),
        versions={"pluralign": __version__, "python": platform.python_version(), "numpy": np.__version__},
    )
    arrays = {name: baseline.arrays for name, baseline in baselines.items()}
    trained_on = hash_prompts(votes.prompts[np.unique(learned_from)])
    ensemble = replace(ensemble, record=record, baselines=arrays, trained_on=trained_on)
    test_features = gather_rows(features, rows_of_texts(test_votes, votes), processes)
    evaluation = evaluate_features(ensemble, test_votes, test_features)
    ensemble = replace(ensemble, record=replace(record, evaluation=evaluation))
    return ensemble, HeldOutVotes(test_votes, ensemble.members.rewards(test_features))


def gather_rows(features: Vectors, rows: npt.NDArray[np.int64], processes: Processes) -> Vectors:
    """Return some rows of the features, each from the process that holds it."""
    own = processes.part(len(features))
    gathered = np.zeros((len(rows), features.shape[1]), dtype=np.float32)
    mine = (rows >= own.start) & (rows < own.stop)
    gathered[mine] = features[rows[mine]]
    return processes.total(gathered)


def bound_cost(
    evaluation: Evaluation, unbounded: Members, test: Pairs, max_disagreement: float, level: Level
) -> BoundCost:
    """Measure what the bound on disagreement costs on the test pairs.

    Args:
        evaluation: the figures of the ensemble with the bound.
        unbounded: the ensemble fitted without it.
        test: the test pairs.
        max_disagreement: the bound.
        level: the reading that was optimised.
    """
    votes = hard_votes(test.difference, unbounded.theta)
    counted = unbounded.weights > NEGLIGIBLE_WEIGHT
    worst = evaluation.worst_disagreement()
    assert worst is not None  # noqa: S101 - an ensemble has members
    return BoundCost(
        max_disagreement=max_disagreement,
        brier=evaluation.test.brier,
        brier_without=calibration.brier(unbounded.prob_hat(test, level), test.prob_a),
        worst=worst,
        worst_without=float(np.asarray(calibration.disagreement(votes, test.prob_a))[counted].max()),
    )
