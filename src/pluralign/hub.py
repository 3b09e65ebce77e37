"""Files of the Hugging Face hub, as a local folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pluralign.errors import DataError, MissingExtraError

HUB_REASON_LENGTH = 200


def hub_folder(
    name: str,
    kind: Literal["model", "dataset"],
    *,
    remedy: str,
    only: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    revision: str | None = None,
) -> Path:
    """Return the folder of a hub repository's files, downloaded where they are not there yet.

    Args:
        name: the repository's id.
        kind: what it holds.
        remedy: what to do where the hub cannot be reached.
        only: patterns of the files that are wanted.
        without: patterns of files that are not.
        revision: a branch, tag or commit.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtraError("huggingface-hub", "hf", f"downloading {name}") from None
    try:
        patterns = {"allow_patterns": only} if only else {"ignore_patterns": without}
        folder = huggingface_hub.snapshot_download(name, repo_type=kind, revision=revision, **patterns)
    except Exception as error:  # the hub raises a dozen unrelated types for "not there" and "no network"
        problem = f"the hub did not give it ({hub_reason(error)})"
        raise DataError(problem, file=f"hf:{name}", remedy=remedy) from error
    return Path(folder)


def hub_reason(error: Exception) -> str:
    """Return what the hub said, on one line.

    Example:
        >>> hub_reason(ConnectionError("no route\\n to host"))
        'ConnectionError: no route to host'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:HUB_REASON_LENGTH]}"
