"""File formats: JSON Lines, CSV and Parquet, plain or gzipped, and Hugging Face datasets, as records.

A format is recognised by its content. Rows are counted from 1, and every damaged row is reported.
"""

import csv
import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.hub import hub_reason
from pluralign.core.options import spelled
from pluralign.core.text import one_line
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows
from pluralign.votes.values import Record, RowError, checked_text, parse_cell, without_arrays

CHUNK = 2**16
LONGEST_LINE = 16 * 10**6
"""Bytes. A longer line of a text file is an error: it holds no vote, and would fill the memory."""
LARGEST_EXPANSION = 200
"""Gzip data may expand to this multiple of its size; a decompression bomb expands about 1,000 times."""
FREE_BYTES = 2**26
"""The expansion counts only after this many bytes of text: short files of repeated rows are harmless."""
PARQUET_BATCH = 4_096
"""Rows that are read at once."""
PROGRESS_EVERY = 5_000
"""Lines between two progress reports."""


class _Counted:
    """A stream that counts the bytes that are read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.count = stream, 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.count += len(data)
        return data


class _Gunzipped(io.RawIOBase):
    """The text of a gzip stream. Damaged or truncated data is an ``EOFError``, and too much text a ``DataError``."""

    def __init__(self, compressed: IO[bytes], file: str) -> None:
        self._compressed, self._file, self._n_text = _Counted(compressed), file, 0
        self._text = gzip.GzipFile(fileobj=self._compressed)  # type: ignore[call-overload]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            text = self._text.read1(len(buffer))
        except (zlib.error, gzip.BadGzipFile):
            raise EOFError from None
        self._n_text += len(text)
        if self._n_text > max(FREE_BYTES, LARGEST_EXPANSION * self._compressed.count):
            problem = f"the gzip data expands to more than {LARGEST_EXPANSION} times its size"
            raise DataError(problem, file=self._file, remedy="decompress the file first if you trust it")
        buffer[: len(text)] = text
        return len(text)


def read_records(
    stream: Any, bad: BadRows, progress: Progress | None = None, *, only_json: bool = False
) -> Iterator[tuple[int, Record]]:
    """Yield the records of a JSON Lines, CSV or Parquet stream with their row numbers.

    Args:
        stream: a binary stream; its content decides the format.
        bad: where damaged rows are reported.
        progress: called with the bytes or rows read and the total.
        only_json: read any text as JSON Lines.
    """
    buffered = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
    report = _byte_progress(buffered, progress)
    if buffered.peek(2)[:2] == b"\x1f\x8b":
        buffered = io.BufferedReader(_Gunzipped(buffered, bad.file), CHUNK)
    try:
        start = buffered.peek(4096)
    except EOFError:
        start = b"{"  # the damage is reported when the first line is read
    if start[:4] == b"PAR1":
        yield from _parquet_records(buffered, bad, progress)
        return
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    lines = _lines(buffered, bad, report)
    if start[:1] == b"[":
        yield from _json_list(buffered, bad)
        return
    if only_json or start[:1] == b"{" or bad.file.removesuffix(".gz").endswith((".jsonl", ".json", ".ndjson")):
        yield from _json_records(lines, bad)
    else:
        yield from _csv_records(lines, bad)


def file_records(
    path: Path, bad: BadRows, progress: Progress | None = None, *, only_json: bool = False
) -> Iterator[tuple[int, Record]]:
    """Yield the records of a file: see ``read_records``."""
    with path.open("rb") as stream:
        yield from read_records(stream, bad, progress, only_json=only_json)


def _byte_progress(stream: Any, progress: Progress | None) -> Callable[[], None]:
    if progress is None:
        return lambda: None
    try:
        total = os.fstat(stream.fileno()).st_size if stream.seekable() else 0
    except (OSError, AttributeError):
        total = 0
    return lambda: progress(stream.tell() if total else 0, total)


def _lines(stream: IO[bytes], bad: BadRows, report: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
    row = 0
    try:
        while line := stream.readline(LONGEST_LINE + 1):
            row += 1
            if row % PROGRESS_EVERY == 0:
                report()
            if len(line) <= LONGEST_LINE:
                yield row, line
                continue
            problem = f"the line is longer than {LONGEST_LINE // 10**6} MB"
            bad.report(row, RowError("long line", problem, "write one pair of responses per line"))
            while line and not line.endswith(b"\n"):
                line = stream.readline(CHUNK)
    except EOFError:
        remedy = f"fetch the file again, or use {spelled(skip_bad=True)} to read the rows before"
        problem = f"the gzip stream is damaged or ends early, after row {row}"
        bad.report(row + 1, RowError("truncated gzip", problem, remedy))
    report()


def _json_records(lines: Iterable[tuple[int, bytes]], bad: BadRows) -> Iterator[tuple[int, Record]]:
    for row, line in lines:
        try:
            text = line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8")
            if not text.strip():
                continue
            record = json.loads(text)
            if isinstance(record, dict):
                yield row, record
                continue
            problem, kind = f"the line holds a {type(record).__name__}", "not an object"
        except UnicodeDecodeError as error:
            problem = f"byte {error.start + 1} of the line is not valid UTF-8"
            bad.report(row, RowError("broken UTF-8", problem, "save the file as UTF-8"))
            continue
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg} at character {error.pos + 1}"
            problem, kind = f"the line is not JSON ({reason})", "not JSON"
        bad.report(row, RowError(kind, problem, "write one JSON object per line"))


def _json_list(stream: IO[bytes], bad: BadRows) -> Iterator[tuple[int, Record]]:
    """Yield the objects of a file that is one JSON list."""
    try:
        records = json.loads(stream.read().decode("utf-8-sig"))
    except (ValueError, RecursionError, EOFError) as error:
        problem = f"the file is not a JSON list ({one_line(error)})"
        raise DataError(problem, file=bad.file, remedy="write it again, or one object per line (JSON Lines)") from None
    for row, record in enumerate(records, 1):
        with bad.row(row):
            if not isinstance(record, dict):
                problem = f"the list holds a {type(record).__name__}"
                raise RowError("not an object", problem, "give a list of objects")
            yield row, record


def _csv_records(lines: Iterable[tuple[int, bytes]], bad: BadRows) -> Iterator[tuple[int, Record]]:
    # Bytes that are not UTF-8 become surrogates, so that the lines of a quoted field stay together.
    texts = (line.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff") for _, line in lines)
    first = next(texts, "")
    delimiter = max(",\t;", key=first.count)
    reader = csv.reader(itertools.chain([first], texts), strict=True, delimiter=delimiter)
    header: list[str] = []
    for row in itertools.count():
        with bad.row(row):
            limit = csv.field_size_limit(LONGEST_LINE)  # of the whole process; the default is 128 kB
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                remedy = 'close every quote and double quotes inside: ""'
                raise RowError("not CSV", f"the row is not CSV ({error})", remedy) from None
            finally:
                csv.field_size_limit(limit)
            if not header:
                header = [name.strip() for name in cells]
                check_distinct(header, bad)
            elif cells:
                yield row, _csv_record(header, cells)


def _csv_record(header: list[str], cells: list[str]) -> Record:
    if len(cells) != len(header):
        problem = f"the row has {len(cells)} fields and the header {len(header)}"
        raise RowError("wrong number of fields", problem, "quote fields that hold commas or line ends")
    checked_text("".join(cells), "the row")
    return {name: parse_cell(name, cell) for name, cell in zip(header, cells, strict=True)}


def check_distinct(names: list[str], bad: BadRows) -> None:
    """Raise ``DataError`` if two columns have the same name."""
    if len(set(names)) != len(names):
        raise DataError("two columns have the same name", file=bad.file, remedy="rename one of them")


def _parquet_records(stream: Any, bad: BadRows, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    try:
        seekable = stream if stream.seekable() else pa.BufferReader(stream.read())
        file = pq.ParquetFile(seekable)
        names = file.schema_arrow.names
        check_distinct(names, bad)
        # Times are never votes or texts, and some of them have no Python value.
        columns = [column.name for column in file.schema_arrow if not pa.types.is_temporal(column.type)]
        row = 0
        for batch in file.iter_batches(batch_size=PARQUET_BATCH):
            yield from _batch_records(batch.select(columns), row, bad)
            row += len(batch)
            if progress:
                progress(row, file.metadata.num_rows)
    except (pa.ArrowException, OSError, EOFError) as error:  # EOFError: damaged gzip data
        problem = f"the Parquet file cannot be read ({one_line(error)})"
        raise DataError(problem, file=bad.file, remedy="write or fetch it again") from None


def _batch_records(batch: pa.RecordBatch, before: int, bad: BadRows) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a batch that follows ``before`` rows. Rows without a Python value are reported."""
    try:
        yield from enumerate(batch.to_pylist(), before + 1)
    except (ValueError, OverflowError):  # invalid UTF-8 is a ValueError
        for row in range(len(batch)):
            with bad.row(before + row + 1):
                cells = zip(batch.schema.names, batch.columns, strict=True)
                yield before + row + 1, {name: _cell(name, column[row]) for name, column in cells}


def _cell(name: str, value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        raise RowError("broken UTF-8", f"{name} is not valid UTF-8", "save the texts as UTF-8") from None
    except (ValueError, OverflowError) as error:
        problem = f"the value of {name} cannot be read ({one_line(error)})"
        raise RowError("wrong type", problem, "write it as text or a number") from None


def hub_records(name: str, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    """Yield the rows of ``ID`` or ``ID:CONFIG`` (a hub id, or a local folder) through ``datasets``."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "hf", f"reading hf:{name}") from None
    identifier, _, config = name.partition(":")
    try:
        dataset = datasets.load_dataset(identifier, config or None)
    except Exception as error:  # the hub raises many unrelated types for "not found" and "no network"
        remedy = "check the id and the network, or download its files and name one of them"
        raise DataError(
            f"the dataset could not be loaded ({hub_reason(error)})", file=f"hf:{name}", remedy=remedy
        ) from error
    yield from dataset_records(dataset, progress)


def dataset_records(dataset: Any, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a dataset, or of all splits of a dataset dict with the name of the split in ``split``."""
    splits = dataset if isinstance(dataset, Mapping) else {"": dataset}
    row = 0
    for split, part in splits.items():
        label = {"split": split} if split and len(splits) > 1 else {}
        for batch in part.iter(batch_size=1000):
            for values in zip(*batch.values(), strict=True):
                row += 1
                yield row, without_arrays(label | dict(zip(batch, values, strict=True)))
            if progress:
                progress(row, 0)
