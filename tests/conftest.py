"""Votes and files that many tests write."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("pluralign", deadline=None)  # machines are noisy; time is measured in benchmarks/
settings.load_profile("pluralign")

WriteLines = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the commands they start, never touch the user's cache of vectors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLURALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteLines:
    """Write records, or raw lines where they are text or bytes, to a .jsonl file."""

    def write(records: Iterable[Mapping[str, Any] | str | bytes], name: str = "votes.jsonl") -> Path:
        path = tmp_path / name
        with path.open("wb") as stream:
            for record in records:
                line = json.dumps(record) if isinstance(record, Mapping) else record
                stream.write((line.encode() if isinstance(line, str) else line) + b"\n")
        return path

    return write


def wide(**changes: Any) -> dict[str, Any]:
    """One good row in the wide layout, with some columns changed; None removes a column."""
    row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No.", "votes_a": 3, "votes_b": 2} | changes
    return {name: value for name, value in row.items() if value is not None}
