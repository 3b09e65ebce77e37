"""Downloads from the Hugging Face hub, and uploads of models to it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.text import one_line, printable

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of a repository id, OWNER/NAME."""


def hub_folder(
    name: str,
    kind: Literal["model", "dataset"],
    *,
    remedy: str,
    only: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    revision: str | None = None,
) -> Path:
    """Return the local folder of a hub repository. Files that are not in the cache are downloaded.

    Args:
        name: repository id.
        kind: kind of repository.
        remedy: advice in the error message if the download fails.
        only: patterns of the files to download; all if None.
        without: patterns of files to omit.
        revision: a branch, tag or commit.

    Raises:
        DataError: the download failed.
    """
    hub = _hub(f"downloading {name}")
    try:
        patterns = {"allow_patterns": only} if only else {"ignore_patterns": without}
        folder = hub.snapshot_download(name, repo_type=kind, revision=revision, **patterns)
    except Exception as error:  # the hub raises many unrelated types for "not found" and "no network"
        problem = f"the download from the hub failed ({hub_reason(error)})"
        raise DataError(problem, file=f"hf:{name}", remedy=remedy) from error
    return Path(folder)


def hub_files(name: str, revision: str | None = None) -> list[str]:
    """Return the names of the files of a model repository; none if the hub does not answer."""
    try:
        return list(_hub(f"listing {name}").list_repo_files(name, revision=revision))
    except Exception:  # many unrelated types, as above; the list only makes an error message clearer
        return []


def check_upload(name: str) -> None:
    """Raise UsageError if the repository name is invalid or there is no token for the upload."""
    hub = _hub(f"uploading {name}")
    if not HUB_ID.fullmatch(name):
        raise UsageError(f"a hub repository must be named OWNER/NAME, not {name!r}.")
    if not hub.get_token():
        raise UsageError(f"uploading {name} needs a token: run  hf auth login  or set HF_TOKEN.")


def upload_model(folder: Path, name: str, *, private: bool = True, kept: bool = True) -> str:
    """Upload the folder of a model to a hub repository, which is created if it does not exist. Return its URL.

    Args:
        folder: the files to upload.
        name: repository id.
        private: whether a new repository is private.
        kept: whether the folder stays on disk if the upload fails, for the error message.
    """
    check_upload(name)
    hub, message = _hub(f"uploading {name}"), "Export of pluralign"
    try:
        made = hub.create_repo(name, repo_type="model", private=private, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, repo_type="model", commit_message=message)
    except Exception as error:  # many unrelated types, as above
        remedy = "check the name, the permissions of the token and the network"
        remedy += f"; the export is complete in {folder}" if kept else ""
        raise DataError(f"the upload to the hub failed ({hub_reason(error)})", file=name, remedy=remedy) from error
    return str(made)


def hub_reason(error: Exception) -> str:
    """Return the error message of the hub on one line, without the token and without control characters.

    Example:
        >>> hub_reason(ConnectionError("no route\\n to \\x1bhost"))
        'ConnectionError: no route to host'
    """
    token = _hub("reading an error of the hub").get_token()
    message = str(error).replace(token, "[token]") if token else str(error)
    return f"{type(error).__name__}: {printable(one_line(message))}"


def _hub(purpose: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtraError("huggingface-hub", "hf", purpose) from None
    return huggingface_hub
