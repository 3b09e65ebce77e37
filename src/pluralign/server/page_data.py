"""What the page of ``pluralign serve`` shows of an ensemble, as plain values, and why each member votes as it does.

Decided here: which held-out pairs, prompts and examples are shown, how long their texts may be, and what may count as
the reason for a vote. Everything is measured elsewhere; how it looks is decided in ``static/``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.analysis.leans import CARES_LESS, DISLIKES_WORD, LIKES_WORD, MIN_LEAN, PREFERS, Lean, sample_prompts
from pluralign.analysis.member_rankings import MIN_RESPONSES, case_studies, held_out_candidates, measure_diversity
from pluralign.analysis.profiles import Profile, member_profiles
from pluralign.analysis.traits import KEYS, TRAITS, content_words, trait_values
from pluralign.answering.steering import SLIP
from pluralign.core.arrays import FloatArray
from pluralign.core.json_values import without_nan
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import worse_than_chance
from pluralign.evaluation.comparison import comparison, standing, verdicts
from pluralign.evaluation.groupings import DEFAULT_GROUPINGS
from pluralign.evaluation.groups import judge_groups
from pluralign.theory.intervals import clustered_interval
from pluralign.theory.logistic import sigmoid
from pluralign.theory.reliability import reliability
from pluralign.votes.candidates import Candidates
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt
from pluralign.votes.summary import inspect

IntArray: TypeAlias = npt.NDArray[np.int64]

TEXT_LENGTH = 1000
"""Longer texts are cut where they are only read …"""
ASKED_LENGTH = 2000
"""… and are not offered where they are scored again: examples to ask, and pairs to steer by, are whole."""
PAIRS_A_POINT = 5
EXAMPLES = 8
RESPONSES_AN_EXAMPLE = 12
STEERING_PAIRS = 6
STEERING_SEARCH = 400
"""Of the pairs that tell members apart best one by one, so many are searched for those that do so together."""
READ_CHARACTERS = 2_000_000
"""Most text that is read when a server starts, some five seconds' worth; of more votes a sample of prompts is read."""
LEANS_SHOWN = 5
REASONS = 3
CLEAR = 4.0
"""A lean is a reason from so many standard errors on, as if pairs were independent: prompts repeat, so more than 2."""

NOTICEABLE = 0.1
"""Two texts differ in a trait if their values do by more than this share of the larger one."""


def cards(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> list[Profile]:
    """Return the members' cards; what needs texts to be read is measured within ``READ_CHARACTERS`` of them."""
    return member_profiles(ensemble.weights, evidence, max_characters=READ_CHARACTERS)


def showcase(
    ensemble: RewardEnsemble, evidence: HeldOutVotes | None, *, name: str, profiles: Sequence[Profile] | None = None
) -> dict[str, Any]:
    """Return everything that the page shows of an ensemble, ready for JSON.

    Args:
        ensemble: the one that is served.
        evidence: held-out votes with its rewards; without them only what the ensemble itself knows is shown.
        name: what the page calls it.
        profiles: the members' cards (``cards``), where they are at hand.

    Example:
        >>> from pluralign import fit, town_hall
        >>> shown = showcase(fit(town_hall(200).preferences, k=2, encoder="none"), None, name="town")
        >>> shown["name"], shown["k"], [card["name"] for card in shown["members"]], shown["examples"]
        ('town', 2, ['Member 0', 'Member 1'], [])
    """
    facts = ensemble.facts
    shown: dict[str, Any] = {
        "name": name,
        "k": ensemble.k,
        "weights": ensemble.weights.tolist(),
        "level": ensemble.level,
        "temperature": ensemble.temperature,
        "method": facts.get("method"),
        "data": dict(facts.get("data") or {}),
        "votes": None,
        "test": facts.get("test"),
        "verdicts": list(verdicts(facts)),
        "comparison": list(_comparison(facts)),
        "history": _history(facts),
        "reliability": list(_curve(facts)),
        "groups": {},
        "worst_group": None,
        "members": list(_plain_members(ensemble)),
        "disagreement": [member["disagreement"] for member in facts.get("members", [])],
        "tau": None,
        "read": None,
        "examples": [],
        "steering_pairs": [],
    }
    if evidence is not None:
        profiles = cards(ensemble, evidence) if profiles is None else profiles
        people, share, read = (
            evidence.preferences,
            evidence.prob_hat(ensemble),
            sample_prompts(evidence, READ_CHARACTERS),
        )
        counted, (groups, worst) = inspect(people), judge_groups(share, people, DEFAULT_GROUPINGS)
        shown |= {
            "votes": {
                key: getattr(counted, key) for key in ("pairs", "prompts", "votes", "votes_per_pair", "majority_share")
            },
            "reliability": list(_points(share, people)),
            "groups": {grouping: [asdict(group) for group in of] for grouping, of in groups.items()},
            "worst_group": asdict(worst) if worst else None,
            "members": [_card(profile) for profile in profiles],
            "disagreement": [profile.disagreement for profile in profiles],
            "tau": _tau(ensemble, read),
            "read": {"prompts": len(read.preferences.prompts), "of": len(people.prompts)},
            "examples": list(_examples(ensemble, read)),
            "steering_pairs": list(_steering_pairs(ensemble, evidence)),
        }
    shown["warnings"] = [
        f"Member {card['member']} is further from people than a coin: it and a random person prefer different "
        f"responses {card['disagreement']:.1%} of the time. Do not tune a policy to it."
        for card in shown["members"]
        if card["far"]
    ]
    plain: dict[str, Any] = without_nan(shown)
    return plain


# --- figures --------------------------------------------------------------------------------------------------------


def _comparison(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if facts.get("levels"):
        for row in comparison(facts):
            yield asdict(row) | {"standing": standing(row.difference) if row.difference else None}


def _history(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Brier score against the number of members, and the lines to hold it against."""
    points = [
        {"k": stage["k"], "brier": stage["test_brier"], "brier_corrected": stage.get("test_brier_corrected")}
        for stage in facts.get("history") or []
        if stage.get("test_brier") is not None
    ]
    if not points:
        return None
    baselines = facts.get("baselines") or {}
    lines = {key: baselines[key]["brier"] for key in ("floor", "soft_bt", "constant_half") if key in baselines}
    return {"points": points, "noise": (facts.get("test") or {}).get("noise"), **lines}


def _curve(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The reliability curve that ``fit`` kept, without the pairs behind it."""
    curve = facts.get("reliability") or {"predicted": [], "observed": [], "count": [], "standard_error": []}
    for predicted, observed, count, error in zip(
        *(curve[key] for key in ("predicted", "observed", "count", "standard_error")), strict=True
    ):
        spread = None if error is None else {"low": max(observed - 2 * error, 0), "high": min(observed + 2 * error, 1)}
        yield {"predicted": predicted, "observed": observed, "interval": spread, "count": count, "pairs": []}


def _points(prob_hat: FloatArray, votes: PreferenceSet) -> Iterator[dict[str, Any]]:
    """The reliability curve with an interval over prompts and a few of the pairs behind each point, drawn by lot."""
    curve, people = reliability(prob_hat, votes.prob_a), votes.prob_a
    order = np.argsort(np.round(prob_hat, 9), kind="stable")  # bins are runs of it: whole groups of equal predictions
    for number, rows in enumerate(np.split(order, np.cumsum(curve.count)[:-1])):
        spread = clustered_interval(people[rows], votes.prompt_index[rows], n_resamples=500)
        drawn = np.random.default_rng([number, 7]).permutation(rows)
        _, first = np.unique(votes.prompt_index[drawn], return_index=True)  # one pair a prompt
        yield {
            "predicted": float(curve.predicted[number]),
            "observed": float(curve.observed[number]),
            "interval": {"low": spread.low, "high": spread.high},
            "count": int(curve.count[number]),
            "pairs": [
                _pair(votes, int(row)) | {"prob_hat": float(prob_hat[row])}
                for row in drawn[np.sort(first)[:PAIRS_A_POINT]]
            ],
        }


def _pair(votes: PreferenceSet, row: int, length: int = TEXT_LENGTH) -> dict[str, Any]:
    return {
        "prompt": shortened(Prompt(votes.prompts[votes.prompt_index[row]]).text, length),
        "response_a": shortened(str(votes.responses[votes.a_index[row]]), length),
        "response_b": shortened(str(votes.responses[votes.b_index[row]]), length),
        "votes_a": int(votes.votes_a[row]),
        "votes_b": int(votes.votes_b[row]),
    }


def shortened(text: str, length: int = TEXT_LENGTH) -> str:
    """Cut a text to a length, marked by an ellipsis.

    Example:
        >>> shortened("a long story", 7)
        'a long…'
    """
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


# --- members --------------------------------------------------------------------------------------------------------


def _plain_members(ensemble: RewardEnsemble) -> Iterator[dict[str, Any]]:
    """Cards of members of which no held-out votes tell anything."""
    known = ensemble.facts.get("members") or []
    for j, weight in enumerate(ensemble.weights.tolist()):
        phi = known[j]["disagreement"] if len(known) == ensemble.k else None
        yield {
            "member": j,
            "name": f"Member {j}",
            "weight": weight,
            "disagreement": phi,
            "far": phi is not None and worse_than_chance(phi, weight),
            "description": "",
            **{key: [] for key in ("leans", "likes", "dislikes", "typical", "distinguishing")},
        }


def _card(profile: Profile) -> dict[str, Any]:
    claimed = sorted((lean for lean in profile.leans if lean.claim), key=lambda lean: -abs(lean.relative))
    return {
        "member": profile.member,
        "name": profile.name,
        "weight": profile.weight,
        "disagreement": profile.disagreement,
        "far": worse_than_chance(profile.disagreement, profile.weight),
        "description": profile.description,
        "leans": [_claimed(lean) for lean in claimed[:LEANS_SHOWN]],
        "likes": [lean.trait for lean in profile.likes],
        "dislikes": [lean.trait for lean in profile.dislikes],
        "typical": [_cut(asdict(one), "prompt", "response") for one in profile.typical],
        "distinguishing": [_cut(asdict(one), "prompt", "preferred", "other") for one in profile.distinguishing],
    }


def _claimed(lean: Lean) -> dict[str, Any]:
    """What a card claims, with the shares of pairs on which the member, all members and people side with it."""
    what = lean.claim.removeprefix(PREFERS).removeprefix(CARES_LESS)
    side = 1 if what == TRAITS[KEYS.index(lean.trait)].more else -1
    shares = {"share": lean.own, "share_of_all": lean.ensemble, "share_of_people": lean.people}
    return {
        "trait": lean.trait,
        "claim": lean.claim,
        "relative": lean.relative,
        "pairs": lean.pairs,
        **{key: min(max((1 + side * value) / 2, 0.0), 1.0) for key, value in shares.items()},
    }


def _cut(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return record | {key: shortened(record[key]) for key in keys}


def _tau(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> dict[str, Any] | None:
    """How differently the members rank; nothing where no prompt has enough responses."""
    candidates, rewards = held_out_candidates(evidence)
    return asdict(measure_diversity(ensemble, candidates, rewards=rewards, evidence=evidence)) if candidates else None


# --- what to try ----------------------------------------------------------------------------------------------------


def _examples(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> Iterator[dict[str, Any]]:
    """Held-out prompts over whose responses the members differ most, to ask without a language model."""
    for least in (MIN_RESPONSES, 2):
        candidates, rewards = held_out_candidates(evidence, least)
        whole = [p for p, one in enumerate(candidates) if _fits(one)]
        if whole:
            break
    else:
        return
    candidates, rewards = [candidates[p] for p in whole], [rewards[p] for p in whole]
    for case in case_studies(ensemble, candidates, EXAMPLES, rewards=rewards):
        one = candidates[case.number - 1]
        yield {"prompt": one.prompt_text, "responses": list(one.responses[:RESPONSES_AN_EXAMPLE])}


def _fits(one: Candidates) -> bool:
    return max(map(len, (one.prompt_text, *one.responses))) <= ASKED_LENGTH


def _steering_pairs(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> Iterator[dict[str, Any]]:
    """Held-out pairs that are quick to read, one a prompt, by which a user's taste is told best."""
    votes = evidence.preferences
    lengths = np.array([len(text) for text in votes.responses])
    prompt_lengths = np.array([len(Prompt(prompt).text) for prompt in votes.prompts])
    to_read = lengths[votes.a_index] + lengths[votes.b_index] + prompt_lengths[votes.prompt_index]
    rows = np.flatnonzero(to_read <= min(float(np.median(to_read)), ASKED_LENGTH))
    chance = SLIP / 2 + (1 - SLIP) * sigmoid(evidence.difference[rows] / ensemble.temperature)
    for chosen in telling_pairs(chance, ensemble.weights, votes.prompt_index[rows], STEERING_PAIRS):
        yield _pair(votes, int(rows[chosen]), ASKED_LENGTH)


def telling_pairs(chance: FloatArray, weights: FloatArray, prompts: npt.NDArray[Any], n: int) -> list[int]:
    """Choose pairs by whose answers a user's member is told best, one a prompt.

    With q_ij the chance that a user of member j's taste chooses response a of pair i, and the weights as the prior, a
    set S of pairs tells I(J; C_S) = H(C_S) − Σ_j α_j H(C_S | j). Greedily, the pair that adds most comes next.

    Args:
        chance: q, ``(n_pairs, k)``, strictly between 0 and 1.
        weights: α, ``(k,)``.
        prompts: of each pair, ``(n_pairs,)``.
        n: how many to choose.

    Example:
        >>> chance = np.array([[0.5, 0.5, 0.5], [0.9, 0.1, 0.1], [0.9, 0.1, 0.2], [0.5, 0.9, 0.1]])
        >>> telling_pairs(chance, np.full(3, 1 / 3), np.arange(4), 2)
        [1, 3]

    Reference: Lindley, "On a measure of the information provided by an experiment", Ann. Math. Statist. 27 (1956).
    """
    alone = _information(np.stack([chance, 1 - chance], axis=1), weights)
    pool = np.argsort(-alone, kind="stable")[:STEERING_SEARCH]
    told = np.ones((1, len(weights)))  # the chance of each course of answers so far, for each member
    chosen: list[int] = []
    while len(chosen) < n and len(pool):
        q = chance[pool, None, :]
        gain = _information(np.concatenate([told * q, told * (1 - q)], axis=1), weights)
        best = int(pool[int(gain.argmax())])
        chosen.append(best)
        told = np.concatenate([told * chance[best], told * (1 - chance[best])])
        pool = pool[prompts[pool] != prompts[best]]
    return chosen


def _information(told: FloatArray, weights: FloatArray) -> FloatArray:
    """I(J; C) from P(course | member), ``(n, n_courses, k)``."""
    together = told @ weights
    return np.asarray((np.where(told > 0, told * np.log(np.maximum(told, 1e-300)), 0.0) @ weights).sum(axis=1)
                      - (together * np.log(np.maximum(together, 1e-300))).sum(axis=1))  # fmt: skip


# --- why ------------------------------------------------------------------------------------------------------------

MEASURES: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "length": ("words", math.expm1),
    "sentence_length": ("words a sentence", float),
    "structure": ("list items or headings", math.expm1),
    "questions": ("question marks in a hundred words", lambda rate: 100 * rate),
    "first_person": ("words such as I or we in a hundred", lambda rate: 100 * rate),
    "second_person": ("words such as you in a hundred", lambda rate: 100 * rate),
    "hedging": ("hedging words in a hundred", lambda rate: 100 * rate),
    "certainty": ("words of certainty in a hundred", lambda rate: 100 * rate),
    "directives": ("commands and words such as must in a hundred", lambda rate: 100 * rate),
    "sentiment": ("points of tone, from −1 to 1", float),
    "formality": ("formal less informal words in a hundred", lambda rate: 100 * rate),
    "concreteness": ("numbers and examples in a hundred words", lambda rate: 100 * rate),
    "balance": ("words that weigh sides in a hundred", lambda rate: 100 * rate),
    "warmth": ("warm words in a hundred", lambda rate: 100 * rate),
    "readability": ("points of reading ease", float),
    "echo": ("% of its longer words from the question", lambda share: 100 * share),
}
"""How the value of each trait is said: "A has 12 words, B 80"."""
NO_CARDS = "There are no held-out votes beside this ensemble, so nothing is measured that could explain the vote."
NO_REASON = "Nothing measured on its card explains this vote."
A_TIE = "It rates both responses the same."


def explain(
    ensemble: RewardEnsemble,
    profiles: Sequence[Profile],
    prompt: str,
    response_a: str,
    response_b: str,
    reward_a: npt.ArrayLike,
    reward_b: npt.ArrayLike,
) -> list[dict[str, Any]]:
    """Say for each member which of two responses it prefers and what it has shown on held-out votes that fits.

    A reason is a trait or word that the two texts differ in, in the direction in which the member clearly leans; what
    it leans to that the other response has more of is said as well, so that nothing is explained away.

    Args:
        ensemble: whose members vote.
        profiles: their cards; none where there are no held-out votes.
        prompt: what was asked.
        response_a: one answer.
        response_b: the other.
        reward_a: the members' rewards for it, ``(k,)``.
        reward_b: for the other, ``(k,)``.

    Returns:
        Of each member ``member, name, weight, vote`` (1, 0 or ½ for a), ``margin`` (its reward for a less that for b),
        ``prob_a`` (the chance that its policy prefers a), and sentences: ``why`` and ``against``.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = fit(town_hall(200).preferences, k=2, encoder="none")
        >>> [(one["vote"], one["why"]) for one in explain(town, [], "Tea?", "Yes.", "No.", [1, 0], [0, 0])][1]
        (0.5, ['It rates both responses the same.'])
    """
    difference = np.asarray(reward_a, dtype=np.float64) - np.asarray(reward_b, dtype=np.float64)
    values = trait_values([prompt, prompt], [response_a, response_b]) if profiles else np.zeros((2, 0))
    words = content_words(response_a), content_words(response_b)
    cards = {profile.member: profile for profile in profiles}
    found = []
    for j, margin in enumerate(difference.tolist()):
        card = cards.get(j)
        reasons = list(_reasons(card, values, words)) if card else []
        why = [sentence for side, sentence in reasons if side * margin > 0]
        against = [sentence for side, sentence in reasons if side * margin < 0]
        if not margin:
            why, against = [A_TIE], []
        elif not why:
            why = [NO_REASON if card else NO_CARDS]
        found.append(
            {
                "member": j,
                "name": card.name if card else f"Member {j}",
                "weight": float(ensemble.weights[j]),
                "vote": 1.0 if margin > 0 else 0.0 if margin < 0 else 0.5,
                "margin": margin,
                "prob_a": float(sigmoid(np.array(margin / ensemble.temperature))),
                "why": why[:REASONS],
                "against": against[:REASONS],
            }
        )
    return found


def _reasons(
    card: Profile, values: FloatArray, words: tuple[frozenset[str], frozenset[str]]
) -> Iterator[tuple[int, str]]:
    """For each thing that the texts differ in and the member clearly leans on: the side it speaks for (1 is a), why."""
    told: list[tuple[float, int, str]] = []
    for lean in card.leans:
        if _is_clear(lean):
            a, b = values[:, KEYS.index(lean.trait)].tolist()
            trait = TRAITS[KEYS.index(lean.trait)]
            unit, scale = MEASURES[lean.trait]
            a, b = scale(a), scale(b)
            if abs(a - b) <= NOTICEABLE * max(abs(a), abs(b)):
                continue
            shown_a, shown_b, liked_a = _said(a), _said(b), (a - b) * lean.own > 0
            what = trait.more if lean.own > 0 else trait.less
            here = f"A has {shown_a} {unit}, B {shown_b}" if liked_a else f"B has {shown_b} {unit}, A {shown_a}"
            said = f"Leans to {what} ({_rate(lean)}): {here}."
            told.append((abs(lean.own), 1 if liked_a else -1, said))
    for lean in (*card.likes, *card.dislikes):
        has_a, has_b = (lean.trait in own for own in words)
        if has_a != has_b and np.isfinite(lean.own):
            verb = LIKES_WORD if lean.own > 0 else DISLIKES_WORD
            side = 1 if has_a == (lean.own > 0) else -1
            said = f"{verb.capitalize()}“{lean.trait}” ({_rate(lean)}): only {'A' if has_a else 'B'} has the word."
            told.append((abs(lean.own), side, said))
    for _, side, sentence in sorted(told, key=lambda entry: -entry[0]):
        yield side, sentence


def _is_clear(lean: Lean) -> bool:
    return bool(abs(lean.own) >= MIN_LEAN and abs(lean.own) * math.sqrt(lean.pairs) >= CLEAR)


def _rate(lean: Lean) -> str:
    return f"{100 * min((1 + abs(lean.own)) / 2, 1.0):.0f} % of {lean.pairs:,} held-out pairs"


def _said(value: float) -> str:
    """A value as people read it.

    Example:
        >>> _said(80.2), _said(1.25), _said(-0.5)
        ('80', '1.2', '−0.5')
    """
    text = f"{value:.0f}" if abs(value) >= 10 or abs(value - round(value)) < 1e-3 else f"{value:.1f}"
    return ("0" if text == "-0" else text).replace("-", "−")
