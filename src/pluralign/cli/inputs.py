"""What commands read: votes, the held-out votes of an ensemble, and packages of optional extras."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pluralign.cli.console import is_first_process, note, progress_bar
from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.votes.options import LoadOptions

if TYPE_CHECKING:
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import HeldOutVotes
    from pluralign.ensemble.record import Evaluation, LeftOut
    from pluralign.votes.preferences import PreferenceSet
    from pluralign.votes.raters import RaterVotes


def load_votes(data: str, options: LoadOptions) -> "PreferenceSet":
    """Return the votes that DATA names; a note on stderr counts the rows and votes that were dropped."""
    from pluralign.votes.load import load_preferences

    with progress_bar(f"Reading {data}") as progress:
        preferences = load_preferences(data, options, progress=progress)
    _note_dropped(preferences)
    return preferences


def load_votes_of_raters(data: str, column: str, options: LoadOptions) -> "RaterVotes":
    """Return the votes that DATA names with the rater of each; a note on stderr counts what was dropped."""
    from pluralign.votes.raters import load_rater_votes

    with progress_bar(f"Reading {data}") as progress:
        votes = load_rater_votes(data, column, options, progress=progress)
    _note_dropped(votes.preferences)
    if votes.without_rater and is_first_process():
        note(f"{votes.without_rater:,} votes have no rater.")
    return votes


def _note_dropped(preferences: "PreferenceSet") -> None:
    if preferences.dropped and is_first_process():
        dropped = ", ".join(f"{count:,} {kind}" for kind, count in preferences.dropped.items())
        note(f"dropped from {preferences.name}: {dropped}.")


def load_held_out_votes(
    folder: Path, ensemble: "RewardEnsemble", data: str | None, *, all_prompts: bool = False
) -> "HeldOutVotes":
    """Return the held-out votes that fit saved in a folder, or those of DATA with the ensemble's rewards.

    DATA is read with the options that fit recorded. Its prompts that the ensemble was trained on are left out unless
    ``all_prompts``; a note on stderr counts them.
    """
    from pluralign.ensemble.held_out import load_held_out, score_held_out

    if data is None:
        if all_prompts:
            raise UsageError("--all needs DATA: the ensemble folder holds the held-out votes only.")
        return load_held_out(folder, ensemble)
    fitted = ensemble.record.data
    preferences = load_votes(data, LoadOptions(**fitted.loaded.options) if fitted and fitted.loaded else LoadOptions())
    with progress_bar("Encoding texts") as progress:
        held_out = score_held_out(ensemble, preferences, progress, all_prompts=all_prompts)
    note_left_out(held_out.left_out)
    return held_out


def evaluate_held_out(ensemble: "RewardEnsemble", held_out: "HeldOutVotes", seed: int = 0) -> "Evaluation":
    """Return the figures on votes that were scored already, with the number of pairs left out."""
    from pluralign.measuring.evaluate import evaluate

    evaluation = evaluate(ensemble, held_out.preferences, groups=[], all_prompts=True, seed=seed)
    return dataclasses.replace(evaluation, left_out=held_out.left_out)


def note_left_out(left_out: "LeftOut") -> None:
    """Say on stderr how many pairs were left out because the ensemble was trained on their prompts."""
    if left_out.sentence and is_first_process():
        note(left_out.sentence + (" evaluate --all includes them." if left_out.prompts else ""))


def saved_held_out_votes(folder: Path) -> "HeldOutVotes | None":
    """Return the held-out votes that fit saved in a folder, or None if it saved none."""
    from pluralign.ensemble.held_out import has_held_out, load_held_out

    return load_held_out(folder) if has_held_out(folder) else None


@contextmanager
def needs_extra(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import inside the block into a sentence with the ``pip install`` command of the extra.

    Args:
        package: the package to name if the failed import does not.
        extra: the extra that installs it.
        purpose: what needs it, such as "a report".
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or package, extra, purpose) from None
