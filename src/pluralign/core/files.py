"""Atomic writes: readers see the old file or folder or the new one, never a part of it."""

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``. Rename it to ``path`` if the block succeeds, else remove it.

    The folder of ``path`` is created if it is missing. A killed process leaves a ``.partial`` file behind.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "votes.json"
        >>> with atomic_write(target) as partial:
        ...     _ = partial.write_text("[]")
        >>> target.read_text()
        '[]'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    # The kernel applies the umask to 0o666; tempfile would create a file that only its owner can read.
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside ``path``. It replaces ``path`` if the block succeeds, else it is removed.

    A folder cannot be replaced in one step: a process killed between the two renames leaves the old and the new folder
    in a ``.partial`` folder beside ``path``. No file is lost.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> with atomic_folder(target) as partial:
        ...     _ = (partial / "config.json").write_text("{}")
        >>> [file.name for file in target.iterdir()]
        ['config.json']
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    new, old = partial / "new", partial / "old"
    new.mkdir()  # with the usual permissions; the temporary folder is private to its owner
    try:
        yield new
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        path.rename(old)
    new.rename(path)  # if this fails, the old and the new folder stay in the temporary one
    shutil.rmtree(partial, ignore_errors=True)


def cache_folder() -> Path:
    """Return the folder of cached vectors: ``$PLURALIGN_CACHE``, else ``~/.cache/pluralign``."""
    return Path(os.environ.get("PLURALIGN_CACHE") or Path.home() / ".cache" / "pluralign")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's contents."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
