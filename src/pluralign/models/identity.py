"""Identity of a model folder: a hash of its contents, so that a copy or a fresh download is the same model.

Decided here: which files count, and how much of the weights is read. Names of folders and modification times do not
count. Small files are hashed whole. Of a large weights file, the header, the size and a block of every tensor are
hashed: a few megabytes, whatever the size of the model. A tensor that was trained further has changed in every block.
"""

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path

PREFIX = "content-"
"""Start of the identities that are computed here. Earlier versions started with the name of the folder."""
TEXT_FILES = (".json", ".txt", ".jinja", ".model", ".py")
"""Configuration, vocabulary and chat template."""
WEIGHT_FILES = (".safetensors", ".bin")
"""Only the first kind counts if a folder has both: it is the one that is loaded."""
OTHER_FORMATS = ("onnx", "openvino", "original", "coreml", "metal")
"""Subfolders that are never loaded; downloads leave them out."""
CONSOLIDATED = "consolidated"
"""Start of the names of weights in the format of a model's authors. They are never loaded and not downloaded either."""
WHOLE_BYTES = 2**24
"""Weights files up to this size are hashed whole."""
SAMPLE_BYTES = 2**22
"""Larger ones are sampled with about this many bytes."""
BLOCK_BYTES = 4096
"""Largest block per tensor."""
SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")
"""End of the path of a snapshot in the cache of the hub."""


def folder_identity(folder: Path) -> str:
    """Return a hash of the contents that the vectors of a model depend on, without reading gigabytes."""
    digest = hashlib.sha256()
    for path in model_files(folder):
        if path.suffix in TEXT_FILES:
            hashed = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            stat = path.stat()
            hashed = _weights_hash(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        digest.update(f"{path.relative_to(folder).as_posix()} {hashed}\n".encode())
    return f"{PREFIX}{digest.hexdigest()[:32]}"


def model_files(folder: Path) -> list[Path]:
    """Return the files that belong to the model of a folder: weights, configuration, vocabulary, chat template."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and _counts(path.relative_to(folder))]
    kinds = {path.suffix for path in paths}
    weights = next((kind for kind in WEIGHT_FILES if kind in kinds), "")
    return [path for path in paths if path.suffix in (*TEXT_FILES, weights)]


def earlier_folder_identity(folder: Path) -> str:
    """Return the identity of versions before content hashes: the folder's name, small files, sizes and times."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        digest.update(f"{path.relative_to(folder)} {stat.st_size} ".encode())
        small = path.suffix in (".json", ".txt", ".jinja")
        digest.update(path.read_bytes() if small else str(stat.st_mtime_ns).encode())
    return f"{folder.name}-{digest.hexdigest()[:16]}"


def hub_source(folder: Path) -> tuple[str, str] | None:
    """Return the repository and the commit of a folder that is a snapshot in the cache of the hub, else None.

    Example:
        >>> hub_source(Path("/cache/models--my-org--my-model/snapshots") / ("0a" * 20))
        ('my-org/my-model', '0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a')
    """
    found = SNAPSHOT.search(folder.absolute().as_posix())
    if found is None or found.end() != len(folder.absolute().as_posix()):
        return None
    return f"{found['owner']}/{found['name']}", found["commit"]


def _counts(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.parts[0] not in OTHER_FORMATS and not path.name.startswith(CONSOLIDATED)


@lru_cache(maxsize=1024)
def _weights_hash(path: Path, size: int, *_: int) -> str:
    """Return the hash of a weights file. In memory it is kept until the size or a time of the file changes."""
    if size <= WHOLE_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little") if path.suffix == ".safetensors" else 0
        start = 8 + header_bytes
        header = stream.read(header_bytes) if start <= size else b""
        digest.update(header)
        for first, length in _blocks(header, start, size):
            stream.seek(first)
            digest.update(stream.read(length))
    return digest.hexdigest()


def _blocks(header: bytes, start: int, size: int) -> list[tuple[int, int]]:
    """Return first byte and length of each block to read: the middle of every tensor, or evenly spaced blocks."""
    try:
        tensors = [part["data_offsets"] for name, part in json.loads(header).items() if name != "__metadata__"]
        ends = sorted((start + int(first), start + int(last)) for first, last in tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        count = SAMPLE_BYTES // BLOCK_BYTES
        ends = [(size * number // count, size * (number + 1) // count) for number in range(count)]
    length = max(64, min(BLOCK_BYTES, SAMPLE_BYTES // max(len(ends), 1)))
    return [(max(first, (first + last - length) // 2), min(length, last - first)) for first, last in ends]
