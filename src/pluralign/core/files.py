"""Writing files whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it over ``path`` only if the block succeeds.

    A reader sees the old file or the new one, never a part. A killed writer leaves a ``.partial`` file behind.

    Example:
        >>> import tempfile, pathlib
        >>> target = pathlib.Path(tempfile.mkdtemp()) / "votes.json"
        >>> with write_whole(target) as partial:
        ...     _ = partial.write_text("[]")
        >>> target.read_text()
        '[]'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def cache_folder() -> Path:
    """Return the folder of cached vectors: ``$PLURALIGN_CACHE``, else ``~/.cache/pluralign``."""
    return Path(os.environ.get("PLURALIGN_CACHE") or Path.home() / ".cache" / "pluralign")
