"""Resuming: results of finished steps are stored, so that a killed run continues after its last finished step.

``Checkpoints`` stores results and folders of one run, under names. ``JsonLines`` is a file that grows by
one line per finished item. ``fingerprint`` identifies the inputs of a run.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from pluralign.core.errors import DataError
from pluralign.core.files import atomic_folder, atomic_write
from pluralign.core.processes import ALONE, Processes

UNFINISHED = ".unfinished-"
"""Prefix of the folders that hold the checkpoints of unfinished runs."""
DIGEST_BYTES = 32
"""The file of a step starts with the SHA-256 of the rest."""
INPUTS_FILE = "inputs.json"
"""Inputs of a run, stored beside its checkpoints."""
Arrays = dict[str, npt.NDArray[Any]]
Value = TypeVar("Value")


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that identify a value: the start of the SHA-256 of its JSON with sorted keys.

    Dataclasses count as mappings of their fields, paths as strings; arrays and bytes count by their contents.

    Example:
        >>> fingerprint({"k": 8, "seed": 0}) == fingerprint({"seed": 0, "k": 8})
        True
        >>> fingerprint({"k": 8})
        'e112e31f0bf00627'
    """
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return {"dtype": value.dtype.str, "shape": value.shape, "sha256": digest}
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    raise TypeError(f"a {type(value).__name__} has no fingerprint")


def changed_inputs(known: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of ``inputs`` whose value in ``known`` is missing or different. Values are compared as JSON.

    Example:
        >>> changed_inputs({"k": 8, "seed": 0}, {"k": 8, "seed": 1, "version": "2"})
        ['seed', 'version']
    """
    return [name for name, value in inputs.items() if name not in known or _canonical(known[name]) != _canonical(value)]


class Checkpoints:
    """Results of the named steps of one run, stored in a folder.

    The inputs identify the run: other data, options or another version are another run, which starts from the
    beginning. Steps must be deterministic, so that a resumed run gives the same result as an uninterrupted one.

    Args:
        folder: root folder of checkpoints; with None nothing is stored.
        inputs: everything the results depend on, as ``fingerprint`` takes it.
        processes: the processes of this run. Each of them must call the same steps in the same order; the first one
            reads and writes.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, inputs: Mapping[str, Any], processes: Processes = ALONE
    ) -> None:
        self.root = None if folder is None else Path(folder)
        self.inputs = inputs
        self.processes = processes
        self._done: dict[str, Arrays] = {}

    @property
    def path(self) -> Path | None:
        """Folder of this run's checkpoints, or None without a root folder."""
        return None if self.root is None else self.root / f"{UNFINISHED}{fingerprint(self.inputs)}"

    def keep(self, name: str, kind: type[Value], compute: Callable[[], Value]) -> Value:
        """Return the result of a step: as stored if the step was finished, else computed and stored.

        A damaged file counts as missing. A computed result is taken apart and put together too, so that it equals a
        stored one to the last digit.

        Args:
            name: of the step.
            kind: type of the result: an array, a number, a text, a dataclass of these, or a mapping (with int or str
                keys without "/") or sequence of these. Mappings come back sorted by key, and an optional part that is
                empty comes back as None.
            compute: computes the result.

        Example:
            >>> @dataclasses.dataclass(frozen=True)
            ... class Fit:
            ...     theta: npt.NDArray[Any]
            ...     undecided: float
            >>> Checkpoints(None, {}).keep("joint", dict[int, Fit], lambda: {8: Fit(np.zeros(2), 0.1)})
            {8: Fit(theta=array([0., 0.]), undecided=0.1)}
        """
        path = None if self.path is None else self.path / f"{name}.safetensors"
        if name not in self._done:
            stored = None if path is None else self.processes.agreed(lambda: _read_step(path))
            # Stored arrays come back in C order, and the order can change the last digit of a product.
            order: Any = "K" if path is None else "C"
            self._done[name] = (
                safetensors.numpy.load(stored)
                if stored is not None
                else {key: np.asarray(array, order=order) for key, array in _taken_apart(compute()).items()}
            )
            if path is not None and stored is None and self.processes.first:
                data = safetensors.numpy.save(self._done[name])
                with atomic_write(path) as partial:
                    partial.write_bytes(hashlib.sha256(data).digest() + data)
                self._store_inputs()
        result: Value = _put_together(kind, self._done[name])
        return result

    def folder(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Return the folder of a step: as stored if the step was finished, else created and filled by ``fill``.

        ``fill`` gets a temporary folder, the same one in every process. It is renamed when ``fill`` returns.
        """
        if self.path is None:
            raise ValueError("checkpoint folders need a root folder")
        target = self.path / name
        if self.processes.agreed(target.is_dir):
            return target
        self._store_inputs()  # before a step that may take hours
        with ExitStack() as stack:  # of the first process; the others enter nothing
            partial = self.processes.agreed(lambda: stack.enter_context(atomic_folder(target)))
            fill(partial)
            self.processes.wait()
        self.processes.wait()
        return target

    def finish(self) -> None:
        """Remove the checkpoints of this run and of all other runs in the root folder."""
        if self.root is not None and self.processes.first:
            for path in self.root.glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _store_inputs(self) -> None:
        if self.path is not None and self.processes.first and not (self.path / INPUTS_FILE).is_file():
            with atomic_write(self.path / INPUTS_FILE) as partial:
                partial.write_text(_canonical(self.inputs), encoding="utf-8")


def _read_step(path: Path) -> bytes | None:
    """Return the contents of a step without its hash; None if the file is missing or damaged: then it is computed."""
    stored = path.read_bytes() if path.is_file() else b""
    digest, data = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def _taken_apart(value: Any) -> Arrays:
    """Return the arrays of a value by path, such as ``8/theta``; the path of an array itself is empty."""
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    elif isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {str(i): part for i, part in enumerate(value)}
    elif value is None:
        return {}
    else:
        return {"": np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value)}
    return {
        f"{name}/{path}" if path else name: array
        for name, part in parts.items()
        for path, array in _taken_apart(part).items()
    }


def _put_together(kind: Any, arrays: Arrays) -> Any:
    """Return the value of a type that ``_taken_apart`` took apart."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (kind,) = (choice for choice in arguments if choice is not types.NoneType)
        return _put_together(kind, arrays) if arrays else None
    below: dict[str, Arrays] = {}
    for path, array in arrays.items():
        name, _, rest = path.partition("/")
        below.setdefault(name, {})[rest] = array
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return kind(**{name: _put_together(hints[name], below.get(name, {})) for name in names})  # type: ignore[operator]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys = sorted(map(arguments[0], below))
        return {key: _put_together(arguments[1], below[str(key)]) for key in keys}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        items = [_put_together(arguments[0], below[name]) for name in sorted(below, key=int)]
        return tuple(items) if origin is tuple else items
    (array,) = arrays.values()
    if kind is str:
        return array.tobytes().decode()
    return kind(array.item()) if kind in (float, int, bool) else array


class JsonLines:
    """A JSON Lines file that grows by one line per finished item, and survives a kill.

    An appended line is on the disk when ``append`` returns. A kill can tear only the last line; a torn line has no line
    break at its end, and is dropped.

    Example:
        >>> import tempfile, pathlib
        >>> lines = JsonLines(pathlib.Path(tempfile.mkdtemp()) / "done.jsonl")
        >>> lines.append({"prompt": "Tea?"})
        >>> with lines.path.open("a") as file:
        ...     _ = file.write('{"prom')
        >>> list(lines.rows())
        [{'prompt': 'Tea?'}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._checked = False

    def rows(self) -> Iterator[Any]:
        """Yield the value of each complete line, in order. A missing file has no lines.

        Raises:
            DataError: a complete line is not JSON.
        """
        if not self.path.is_file():
            return
        with self.path.open("rb") as stream:
            for row, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    value = json.loads(line)
                except ValueError:
                    remedy = "name another file, or remove this one"
                    raise DataError("the line is not JSON", file=str(self.path), row=row, remedy=remedy) from None
                yield value

    def append(self, row: Any) -> None:
        """Add one line. The file and its folder are created if they are missing; a torn last line is removed first."""
        if not self._checked:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.drop_torn_line()
            self._checked = True
        with self.path.open("ab") as stream:
            stream.write(_line(row))
            stream.flush()
            os.fsync(stream.fileno())

    def replace(self, rows: Iterable[Any]) -> None:
        """Replace all lines, in one atomic write."""
        with atomic_write(self.path) as partial, partial.open("wb") as stream:
            stream.writelines(map(_line, rows))

    def drop_torn_line(self) -> None:
        """Remove a last line that a killed writer left without its line break."""
        if not self.path.is_file():
            return
        with self.path.open("r+b") as stream:
            complete = sum(len(line) for line in stream if line.endswith(b"\n"))
            if complete < self.path.stat().st_size:
                stream.truncate(complete)


def _line(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
