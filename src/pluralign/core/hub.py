"""Files of the Hugging Face hub as a local folder, and a local folder as a repository there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pluralign.core.errors import DataError, MissingExtraError, UsageError

HUB_REASON_LENGTH = 200
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Owner and name of a repository."""


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


def check_upload(name: str) -> None:
    """Refuse a name that no repository can have, and an upload that nobody is logged in for."""
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtraError("huggingface-hub", "hf", f"uploading {name}") from None
    if not HUB_ID.fullmatch(name):
        raise UsageError(f"a hub repository is called OWNER/NAME, not {name!r}.")
    if not huggingface_hub.get_token():
        raise UsageError(f"uploading {name} needs a token: run  hf auth login  or set HF_TOKEN.")


def upload_model(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload a model's folder to a hub repository, created where there is none; return its address."""
    check_upload(name)
    import huggingface_hub

    try:
        made = huggingface_hub.create_repo(name, repo_type="model", private=private, exist_ok=True)
        huggingface_hub.upload_folder(
            repo_id=made.repo_id, folder_path=folder, repo_type="model", commit_message="Export of pluralign"
        )
    except Exception as error:  # as above: a dozen unrelated types
        remedy = f"check the name, the token's rights and the network; the export is whole in {folder}"
        raise DataError(f"the hub did not take it ({hub_reason(error)})", file=name, remedy=remedy) from error
    return str(made)


def hub_reason(error: Exception) -> str:
    """Return what the hub said, on one line.

    Example:
        >>> hub_reason(ConnectionError("no route\\n to host"))
        'ConnectionError: no route to host'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:HUB_REASON_LENGTH]}"
