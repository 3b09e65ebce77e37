"""Summary of a set of votes: how much people disagree, how much of it is sampling noise, and the reference scores."""

from dataclasses import dataclass

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.text import counted
from pluralign.theory import calibration
from pluralign.theory.calibration import strata
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval
from pluralign.votes.judgments import Judgments
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.town_hall.town_hall import TownHall

HISTOGRAM_BINS = 10


@dataclass(frozen=True)
class Bar:
    """Number of pairs with a majority share in [low, high), or of exactly that share if low equals high."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class JudgmentSummary:
    """What is known of single people: all that one person said about one prompt is one judgment."""

    n: int
    prompts: int
    responses: float
    """Median number of responses per judgment."""
    used: bool
    """Whether judgments that tell more than vote counts make up a tenth of the votes: then ``fit`` uses them."""

    @classmethod
    def of(cls, judgments: Judgments, used: bool) -> "JudgmentSummary":
        """Summarise judgments."""
        width = int(judgments.response.max()) + 1
        key = np.repeat(judgments.judgment.astype(np.int64), judgments.sizes) * width + judgments.response
        responses = float(np.median(np.bincount(np.unique(key) // width)))
        return cls(judgments.n, judgments.n_prompts, responses, used)


@dataclass(frozen=True, repr=False)
class Inspection:
    """Summary of a set of votes, from ``inspect``."""

    name: str
    pairs: int
    prompts: int
    responses: int
    votes: int
    votes_per_pair: float
    votes_per_pair_range: tuple[int, int]
    majority_share: float
    """Mean share of votes for the majority side: the paper's "avg p"."""
    majority_share_of_all: float
    """The same with ties in the denominator for every tie rule: the other interpretation of MultiPref's table."""
    floor: float
    constant_half: float
    noise: float
    """NaN if no pair has two votes."""
    floor_corrected: float
    """NaN if most pairs have fewer than four votes: it would be 0 by definition (``floor_is_measurable``)."""
    constant_half_corrected: float
    intervals: dict[str, Interval]
    """95 % intervals over prompts for the five figures above; empty with fewer than 20 prompts."""
    histogram: list["Bar"]
    """Pairs by majority share, as in the paper's figure: one bar per share if there are few shares, else equal bins."""
    strata: dict[str, int]
    """Pairs by how divided people are: unanimous, lopsided, contested, even."""
    ties: int
    """Tie votes on these pairs, counted or not."""
    tie_rule: str
    single_vote_pairs: int
    """Pairs with one vote. Their noise cannot be measured, so the corrected figures ignore them."""
    empty_responses: int
    """Pairs in which one response is empty text."""
    a_wins: float
    """Share of decided pairs that response a wins; near 1 if the data lists the majority response first."""
    splits: dict[str, int]
    """Pairs by official split; empty if there is none."""
    columns: list[str]
    dropped: dict[str, int]
    fingerprint: str
    judgments: JudgmentSummary | None
    """None where only vote counts are known."""

    def __repr__(self) -> str:
        """Return the main figures as a table."""
        low, high = self.votes_per_pair_range

        def with_corrected(value: float, corrected: float) -> str:
            return f"{value:.4f}" + ("" if np.isnan(corrected) else f"  corrected {corrected:.4f}")

        rows = {
            "votes per pair": f"{self.votes_per_pair:.2f} ({low} to {high})",
            "majority share": f"{self.majority_share:.3f}",
            "floor": with_corrected(self.floor, self.floor_corrected),
            "constant 1/2": with_corrected(self.constant_half, self.constant_half_corrected),
            "noise": "" if np.isnan(self.noise) else f"{self.noise:.4f}",
            "judgments": f"{self.judgments.n:,} on {counted(self.judgments.prompts, 'prompt')}"
            if self.judgments
            else "",
            "official split": ", ".join(f"{name} {count:,}" for name, count in self.splits.items()),
            "dropped": ", ".join(f"{count:,} {kind}" for kind, count in self.dropped.items()),
        }
        sizes = {"pair": self.pairs, "prompt": self.prompts, "response": self.responses, "vote": self.votes}
        size = ", ".join(counted(count, noun) for noun, count in sizes.items())
        return "\n".join(
            [f"{self.name or 'votes'}: {size}", *(f"  {name:<16}{text}" for name, text in rows.items() if text)]
        )


def inspect(votes: VotesLike) -> Inspection:
    """Summarise a set of votes.

    Args:
        votes: a ``PreferenceSet``, a path, a pandas DataFrame, a ``datasets`` object or a list of dicts.

    Example:
        >>> from pluralign import PreferenceSet
        >>> votes = PreferenceSet.from_columns(["Tea?", "Rain?"], ["Yes.", "No."], ["No.", "Yes."], [3, 4], [1, 0])
        >>> facts = inspect(votes)
        >>> facts.majority_share, facts.floor, facts.constant_half
        (0.875, 0.03125, 0.15625)
    """
    preferences = as_preferences(votes)
    judged = preferences.judgments
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    majority = np.maximum(p, 1 - p)
    most = np.maximum(preferences.votes_a, preferences.votes_b)
    everyone = preferences.votes_a + preferences.votes_b + preferences.ties
    noise = calibration.sampling_noise(p, n, ties)
    majority_oracle = calibration.squared_error((p > 0.5).astype(float), p)
    half = calibration.squared_error(np.full(len(p), 0.5), p)
    per_pair = {
        "floor": majority_oracle,
        "constant_half": half,
        "noise": noise,
        "constant_half_corrected": half - noise,
    }
    measurable = calibration.floor_is_measurable(n)
    if measurable:
        per_pair["floor_corrected"] = majority_oracle - noise
    decided = p != 0.5
    splits = preferences.columns.get("split", np.array([], dtype=object))
    names, sizes = np.unique([str(value) for value in splits if value is not None], return_counts=True)
    empty = np.array([not text.strip() for text in preferences.responses], dtype=bool)
    return Inspection(
        name=preferences.name,
        pairs=len(preferences),
        prompts=len(preferences.prompts),
        responses=len(preferences.responses),
        votes=int(n.sum()),
        votes_per_pair=float(n.mean()),
        votes_per_pair_range=(int(n.min()), int(n.max())),
        majority_share=float(majority.mean()),
        majority_share_of_all=float((most / everyone).mean()),
        floor=calibration.floor(p),
        constant_half=calibration.constant_half(p),
        noise=calibration.noise(p, n, ties),
        floor_corrected=calibration.floor_corrected(p, n, ties) if measurable else float("nan"),
        constant_half_corrected=calibration.brier_corrected(np.full(len(p), 0.5), p, n, ties),
        intervals={
            name: clustered_interval(values, preferences.prompt_index, n_resamples=500, min_clusters=ENOUGH_CLUSTERS)
            for name, values in per_pair.items()
            if len(preferences.prompts) >= ENOUGH_CLUSTERS and not np.isnan(values).all()
        },
        histogram=_histogram(majority),
        strata={name: int(mask.sum()) for name, mask in strata(p).items()},
        ties=int(preferences.ties.sum()),
        tie_rule=preferences.tie_rule,
        single_vote_pairs=int((n == 1).sum()),
        empty_responses=int((empty[preferences.a_index] | empty[preferences.b_index]).sum()),
        a_wins=float((p[decided] > 0.5).mean()) if decided.any() else float("nan"),
        splits=dict(zip(names.tolist(), sizes.tolist(), strict=True)),
        columns=list(preferences.columns),
        dropped=dict(preferences.dropped),
        fingerprint=preferences.fingerprint,
        judgments=judged if judged is None else JudgmentSummary.of(judged, preferences.whole_judgments is not None),
    )


def _histogram(majority: FloatArray) -> list[Bar]:
    shares, counts = np.unique(majority.round(9), return_counts=True)
    if len(shares) <= HISTOGRAM_BINS:
        return [Bar(float(share), float(share), int(count)) for share, count in zip(shares, counts, strict=True)]
    counts, edges = np.histogram(majority.round(9), bins=np.linspace(0.5, 1.0, HISTOGRAM_BINS + 1).round(9))
    return [Bar(float(edges[i]), float(edges[i + 1]), int(count)) for i, count in enumerate(counts)]


@dataclass(frozen=True)
class Truth:
    """True values of figures that ``Inspection`` estimates from few votes; known only for a town hall."""

    noise: float
    """Lemma 1's C = E[(p − p*)²] = mean p*(1 − p*)/n."""
    floor: float
    constant_half: float
    majority_share: float


def inspect_truth(town: TownHall) -> Truth:
    """Return the true figures behind the votes of a town hall."""
    p_star = town.true_prob
    return Truth(
        noise=float((p_star * (1 - p_star) / town.preferences.n_votes).mean()),
        floor=calibration.floor(p_star),
        constant_half=calibration.constant_half(p_star),
        majority_share=float(np.maximum(p_star, 1 - p_star).mean()),
    )
