"""What commands write: checked before the work, so that no result is lost and nothing else is replaced.

A symbolic link stays: what it points to is written. Devices, pipes and sockets are refused, since replacing them by a
file would remove them. The functions are callbacks of options.
"""

from pathlib import Path

from pluralign.core.errors import UsageError


def output_file(value: Path | None) -> Path | None:
    """Return the file to write for a path: itself, or the target of a symbolic link.

    Raises:
        UsageError: it exists and is no regular file.
    """
    target = _target(value)
    if target is not None and target.is_dir():
        raise UsageError(f"{value} is a folder; name the file to write.")
    if target is not None and target.exists() and not target.is_file():
        raise UsageError(f"{value} is a device or a pipe; name a regular file to write.")
    return target


def output_folder(value: Path | None) -> Path | None:
    """Return the folder to write for a path: itself, or the target of a symbolic link.

    Raises:
        UsageError: it exists and is no folder.
    """
    target = _target(value)
    if target is not None and target.exists() and not target.is_dir():
        raise UsageError(f"{value} is not a folder; name a folder to write.")
    return target


def _target(path: Path | None) -> Path | None:
    return path.resolve() if path is not None and path.is_symlink() else path
