"""Fuzz tests: seeded random cases, a few hundred in the suite and thousands with ``make fuzz``.

The contract of every case: the command works (exit 0), or it exits 2 with one sentence on stderr; there is no
traceback, and nothing is half-written. ``PLURALIGN_FUZZ_CASES`` is the number of cases per file of tests; case n is the
same in every run, so a failure is repeated with its number. Add a file ``test_fuzz_<what>.py`` for another kind of
input, with ``@pytest.mark.parametrize("case", cases())``.
"""

import os
from collections.abc import Iterator, Mapping
from subprocess import CompletedProcess
from typing import Any

import numpy as np

DEFAULT_CASES = 200


def cases(share: float = 1.0) -> range:
    """Return the numbers of the cases: ``PLURALIGN_FUZZ_CASES`` of them, or a share if each case takes long."""
    return range(max(1, round(share * int(os.environ.get("PLURALIGN_FUZZ_CASES") or DEFAULT_CASES))))


def random_of(case: int, stream: str) -> np.random.Generator:
    """Return the random numbers of one case of one test."""
    return np.random.default_rng([case, *stream.encode()])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of a JSON value and of everything in it."""
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, key))


def keeps_contract(done: CompletedProcess[str], context: object = "") -> None:
    """Check that a command worked, or failed with one sentence and exit code 2."""
    shown: Mapping[str, object] = {"command": done.args, "code": done.returncode, "stderr": done.stderr, "of": context}
    assert done.returncode in (0, 2), shown
    assert "Traceback" not in done.stderr, shown
    if done.returncode == 2:
        sentences = [line for line in done.stderr.splitlines() if line.startswith("pluralign: ")]
        assert len(sentences) == 1, shown
        assert sentences[0].endswith((".", "?")), shown
        assert done.stdout == "", shown
