"""File formats: JSON Lines, CSV and Parquet, plain or gzipped, and Hugging Face datasets, as records.

A format is recognised by its content. Rows are counted from 1, and every damaged row is reported.
"""

import csv
import gzip
import io
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.hub import hub_reason
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows, RowError
from pluralign.votes.layouts import Record, parse_cell

CSV_FIELD_LIMIT = 2**27
"""Long responses exceed the default limit of the csv module, 128 kB."""
PROGRESS_EVERY = 5_000
"""Lines between two progress reports."""
_CSV_LOCK = threading.Lock()
_csv_readers = 0
_csv_limit_before = 0


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
    if buffered.peek(4)[:4] == b"PAR1":
        yield from _parquet_records(buffered, bad, progress)
        return
    if buffered.peek(2)[:2] == b"\x1f\x8b":
        buffered = io.BufferedReader(gzip.GzipFile(fileobj=buffered))
    try:
        start = buffered.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        start = b"{"  # the damage is reported when the first line is read
    lines = _lines(buffered, bad, report)
    if start[:1] == b"[":
        raise DataError("the file is one JSON list", file=bad.file, remedy="write one object per line (JSON Lines)")
    if only_json or start[:1] == b"{" or bad.file.removesuffix(".gz").endswith((".jsonl", ".json", ".ndjson")):
        yield from _json_records(lines, bad)
    else:
        with _long_csv_fields():
            yield from _csv_records(lines, bad)


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
        for row, line in enumerate(stream, 1):
            if row % PROGRESS_EVERY == 0:
                report()
            yield row, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        remedy = "fetch the file again, or use --skip-bad to read the rows before"
        problem = f"the gzip stream is damaged or ends early, after row {row}"
        bad.report(row + 1, RowError("truncated gzip", problem, remedy))
    report()


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} of the line is not valid UTF-8"
        raise RowError("broken UTF-8", problem, "save the file as UTF-8") from None


def _json_records(lines: Iterable[tuple[int, bytes]], bad: BadRows) -> Iterator[tuple[int, Record]]:
    for row, line in lines:
        try:
            text = _decode(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                remedy = "write one JSON object per line"
                raise RowError("not JSON", f"the line is not JSON ({_reason(error)})", remedy) from None
            if not isinstance(record, dict):
                raise RowError(
                    "not an object", f"the line holds a {type(record).__name__}", "write one object per line"
                )
            yield row, record
        except RowError as error:
            bad.report(row, error)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _csv_records(lines: Iterable[tuple[int, bytes]], bad: BadRows) -> Iterator[tuple[int, Record]]:
    # Bytes that are not UTF-8 become surrogates, so that the lines of a quoted field stay together.
    texts = (line.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff") for _, line in lines)
    first = next(texts, "")
    delimiter = max(",\t;", key=first.count)
    reader = csv.reader(itertools.chain([first], texts), strict=True, delimiter=delimiter)
    header: list[str] = []
    for row in itertools.count():
        try:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise RowError(
                    "not CSV", f"the row is not CSV ({error})", 'close every quote and double quotes inside: ""'
                ) from None
            if not header:
                header = [name.strip() for name in cells]
                if len(set(header)) != len(header):
                    raise DataError("two columns have the same name", file=bad.file, remedy="rename one of them")
                continue
            if not cells:
                continue
            if len(cells) != len(header):
                problem = f"the row has {len(cells)} fields and the header {len(header)}"
                raise RowError("wrong number of fields", problem, "quote fields that hold commas or line ends")
            try:
                "".join(cells).encode()
            except UnicodeEncodeError:
                raise RowError("broken UTF-8", "the row is not valid UTF-8", "save the file as UTF-8") from None
            yield row, {name: parse_cell(name, cell) for name, cell in zip(header, cells, strict=True)}
        except RowError as error:
            bad.report(row, error)


@contextmanager
def _long_csv_fields() -> Iterator[None]:
    """Raise the field limit of the csv module, which is global, until the last file that is being read is closed."""
    global _csv_readers, _csv_limit_before
    with _CSV_LOCK:
        if not _csv_readers:
            _csv_limit_before = csv.field_size_limit(CSV_FIELD_LIMIT)
        _csv_readers += 1
    try:
        yield
    finally:
        with _CSV_LOCK:
            _csv_readers -= 1
            if not _csv_readers:
                csv.field_size_limit(_csv_limit_before)


def _parquet_records(stream: Any, bad: BadRows, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    try:
        seekable = stream if stream.seekable() else pa.BufferReader(stream.read())
        file = pq.ParquetFile(seekable)
        row = 0
        for batch in file.iter_batches(batch_size=4096):
            for record in batch.to_pylist():
                row += 1
                yield row, record
            if progress:
                progress(row, file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"the Parquet file cannot be read ({error})", file=bad.file, remedy="write or fetch it again"
        ) from None


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
        raise DataError(
            f"the dataset could not be loaded ({hub_reason(error)})",
            file=f"hf:{name}",
            remedy="check the id and the network, or download its files and name one of them",
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
                yield row, label | dict(zip(batch, values, strict=True))
            if progress:
                progress(row, 0)
