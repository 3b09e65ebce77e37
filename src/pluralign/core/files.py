"""Atomic writes: readers see the old file or folder or the new one, never a part of it.

New contents are written into a ``.partial`` file or folder beside the target, and renamed. A killed process leaves it
behind; the next write of the same target takes it over. A lock shows whether its writer is alive.
"""

import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pluralign.core.errors import DataError, UsageError
from pluralign.core.options import spelled

if sys.platform != "win32":
    import fcntl

LONGEST_STEM = 180
"""Names with more bytes are hashed in the name of a partial file, so that it fits wherever the target does."""
MARKED_BYTES = 4096
"""The part of a file in which ``refuse_foreign`` looks for its mark."""
REPORT_MARK = '<meta name="generator" content="pluralign">'
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRORS = (*FULL_DISK, errno.EFBIG, errno.EIO)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``. Rename it to ``path`` if the block succeeds, else remove it.

    The folder of ``path`` is created if it is missing. Symbolic links are followed: the file they name is replaced.

    Raises:
        UsageError: ``path`` exists and is not a regular file, but a folder, a device, a pipe or a socket.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "votes.json"
        >>> with atomic_write(target) as partial:
        ...     _ = partial.write_text("[]")
        >>> target.read_text()
        '[]'
    """
    with suppress(FileNotFoundError):
        mode = Path(path).stat().st_mode  # before the link is followed by name: /dev/stdout leads to no path
        if not stat.S_ISREG(mode):
            raise UsageError(
                f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}: name another file."
            )
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial(path, _create_file, lambda partial: os.truncate(partial, 0)) as partial:
        try:
            yield partial
            _flush(partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside ``path``. It replaces ``path`` if the block succeeds, else it is removed.

    A folder cannot be replaced in one step: a process killed between the two renames leaves the old and the new folder
    in a ``.partial`` folder beside ``path``. The next call for the same path puts the old one back.

    Raises:
        UsageError: ``path`` exists and is not a folder.
        DataError: the disk is full.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> with atomic_folder(target) as partial:
        ...     _ = (partial / "config.json").write_text("{}")
        >>> [file.name for file in target.iterdir()]
        ['config.json']
    """
    if Path(path).exists() and not Path(path).is_dir():
        raise UsageError(f"{path} is not a folder: name another one.")
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)

    def take_over(partial: Path) -> None:
        if not partial.is_dir():
            raise NotADirectoryError(partial)
        if (partial / "old").is_dir() and not path.exists():
            (partial / "old").rename(path)
        for part in ("old", "new"):
            if (partial / part).is_dir():
                shutil.rmtree(partial / part)

    with _partial(path, lambda partial: partial.mkdir(0o700), take_over) as partial:
        new, old = partial / "new", partial / "old"
        try:
            new.mkdir()  # with the usual permissions; the temporary folder is private to its owner
            with disk_errors_as_data_error(path):
                yield new
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if path.exists():
            path.rename(old)
        new.rename(path)  # if this fails, the old and the new folder stay in the temporary one
        shutil.rmtree(partial, ignore_errors=True)


def link_folder(source: Path, target: Path, kept: Collection[str] = (".",)) -> None:
    """Put a folder, or some of its subfolders, into a new one, all or nothing. Files are hard-linked if possible.

    Args:
        source: the folder.
        target: the new folder.
        kept: the subfolders to take; ``.`` is the folder itself.
    """

    def link_or_copy(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copy2(file, to)

    with atomic_folder(target) as partial:
        for name in kept:
            shutil.copytree(source / name, partial / name, copy_function=link_or_copy, dirs_exist_ok=True)


@contextmanager
def disk_errors_as_data_error(
    path: str | os.PathLike[str], remedy: str = "free some space and run the same command"
) -> Iterator[None]:
    """Raise ``DataError`` if the block fails because the disk is full, also where a library has its own error for it.

    safetensors raises ``SafetensorError`` with "(os error 28)", and torch ``RuntimeError``.

    Args:
        path: file or folder that is written.
        remedy: what the user should do.

    Example:
        >>> with disk_errors_as_data_error("model"):
        ...     raise RuntimeError("I/O error: No space left on device (os error 28)")
        Traceback (most recent call last):
        pluralign.core.errors.DataError: model: the disk is full; free some space and run the same command.
    """
    try:
        yield
    except Exception as error:  # see above: these errors have no common class
        named = re.search(r"\(os error (\d+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else int(named[1]) if named else None
        is_full = code in FULL_DISK or "No space left" in str(error)
        if not is_full and code not in DISK_ERRORS:
            raise
        reason = "the disk is full" if is_full else os.strerror(code or 0).lower()
        raise DataError(reason, file=str(path), remedy=remedy) from error


def refuse_foreign(path: str | os.PathLike[str], *marks: str, overwrite: bool | None = None) -> None:
    """Raise UsageError if a path holds something that the caller did not write, so that nothing is lost by mistake.

    Args:
        path: of the output. It may be missing or empty. A folder with nothing but hidden files is empty.
        marks: the start of a file that the caller writes holds one of them; in a folder one is the start of a name.
        overwrite: whether to replace anything; None if the user has no such option.
    """
    path = Path(path)
    if overwrite or not path.exists():
        return
    if path.is_dir():
        names = [found.name for found in path.iterdir() if not found.name.startswith(".")]
        ours, problem = not names or any(name.startswith(marks) for name in names), "holds other files"
    else:
        with path.open("rb") as stream:
            start = stream.read(MARKED_BYTES).decode(errors="replace")
        ours, problem = not start or any(mark in start for mark in marks), "was not written by this command"
    if not ours:
        kind = "folder" if path.is_dir() else "file"
        remedy = "remove this one" if overwrite is None else f"use {spelled(overwrite=True)}"
        raise UsageError(f"{path} {problem}; name another {kind}, or {remedy}.")


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Let one process at a time run the block for this folder. The folder is created if it is missing.

    The lock ends with the process. File systems without locks are used without one.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- partial files ----------------------------------------------------------------------------------------------------


@contextmanager
def _partial(target: Path, create: Callable[[Path], None], take_over: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a new partial file or folder, or that of a killed process, emptied by ``take_over``. It stays locked.

    It has a random name if another writer of the same target is alive.
    """
    name = os.fsencode(target.name)
    stem = target.name if len(name) <= LONGEST_STEM else hashlib.sha256(name).hexdigest()[:32]
    for attempt in itertools.count():
        unique = f".{secrets.token_hex(4)}" if attempt or sys.platform == "win32" else ""
        partial = target.parent / f".{stem}{unique}.partial"
        try:
            create(partial)
            is_new = True
        except FileExistsError:
            is_new = False
        with _lock(partial, is_new) as is_locked:
            if is_locked and not is_new:
                try:
                    take_over(partial)
                except OSError:  # it belongs to another user
                    continue
            if is_locked:
                yield partial
                return


@contextmanager
def _lock(path: Path, is_new: bool) -> Iterator[bool]:
    """Lock a file or folder. Yield False if another writer has locked, renamed or removed it."""
    if sys.platform == "win32":
        yield is_new
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        if is_new and path.exists():
            raise
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(descriptor), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError:  # a file system without locks
            is_ours = is_new
        yield is_ours
    finally:
        os.close(descriptor)


def _create_file(path: Path) -> None:
    # The kernel applies the umask to 0o666; tempfile would create a file that only its owner can read.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def _flush(path: Path) -> None:
    """Return when the contents are on the disk, so that a power cut after the rename leaves no empty file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- other ------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of cached vectors: ``$PLURALIGN_CACHE``, else ``~/.cache/pluralign``."""
    return Path(os.environ.get("PLURALIGN_CACHE") or Path.home() / ".cache" / "pluralign")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's contents."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
