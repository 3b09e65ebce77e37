"""The paper's four data sets and two related ones, read as published, from a folder or from the hub.

Defined here: which files of a set are read; ``public`` tells what counts as one vote, and which rows are dropped.
docs/reference/known-sets.md gives the reasons and the sources.
"""

import itertools
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pluralign.core.errors import DataError, UsageError
from pluralign.core.hub import hub_folder
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows, Comparisons
from pluralign.votes.formats import file_records
from pluralign.votes.layouts import recognise
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.public import PUBLIC_FORMATS, text_in
from pluralign.votes.values import Record


@dataclass(frozen=True)
class KnownSet:
    """A published set: its files, and how they become votes. ``sets.toml`` has all sets and describes the fields."""

    name: str
    hub: str
    layouts: Sequence[str]
    format: str = ""
    splits: str = ""
    revision: str | None = None
    min_votes: int = 1

    def __call__(self, folder: str, options: LoadOptions, progress: Progress | None = None) -> PreferenceSet:
        """Read the set from a folder, or from the hub if ``folder`` is empty."""
        if options.rename:
            raise UsageError(f"rename does not apply to {self.name}: its columns are known.")
        files = _files(self, folder, f"{self.name}:FOLDER")
        bad = BadRows(self.name, skip=options.skip_bad, harmless=["identical responses"])
        layout, records = recognise(_rows(files, bad, progress, self.splits), bad, PUBLIC_FORMATS.get(self.format))
        comparisons = Comparisons(bad)
        layout.read(records, comparisons)
        bad.file = self.name
        return comparisons.finish(options, merge=layout.merge, min_votes=self.min_votes, drop_few=True)


def _files(known: KnownSet, folder: str, local: str) -> list[Path]:
    """Return the files of a set in a folder, or downloaded from the hub if ``folder`` is empty.

    ``local`` is what users write to read a folder.
    """
    root = Path(folder).expanduser()
    if not folder:
        wanted = f"{known.splits} {known.layouts[0]}".split()
        remedy = f"check the network, or copy its files ({', '.join(wanted)}) into a folder and use {local}"
        root = hub_folder(known.hub, "dataset", only=wanted, revision=known.revision, remedy=remedy)
    for layout in known.layouts:
        files = [sorted(root.glob(pattern)) for pattern in layout.split()]
        if all(files):
            return [*filter(Path.is_file, map(root.joinpath, known.splits.split())), *itertools.chain(*files)]
    expected = ", or ".join(layout.replace(" ", " with ") for layout in known.layouts)
    problem = f"the folder must hold {expected}" if root.is_dir() else "there is no such folder"
    remedy = f"copy the files of the dataset {known.hub} from the hub, with their names"
    raise DataError(problem, file=str(root), remedy=remedy)


def _rows(
    files: Sequence[Path], bad: BadRows, progress: Progress | None, splits: str = ""
) -> Iterator[tuple[int, Record]]:
    """Yield the records of all files, with the split that the name of a file tells.

    ``bad.file`` is the current file; progress counts the bytes of all files. Files in ``splits`` give
    only the split of a prompt.
    """
    sizes = [path.stat().st_size for path in files]
    for path, size, before in zip(files, sizes, itertools.accumulate(sizes, initial=0), strict=False):
        bad.file = str(path)

        def report(done: int, total: int, before: int = before, size: int = size) -> None:
            if progress:
                progress(before + (size * done // total if total else 0), sum(sizes))

        name = re.split(r"[-.]", path.name)[0]
        split = {"split": name} if len(files) > 1 and name in ("train", "validation", "test") else {}
        for row, record in file_records(path, bad, report):
            yield row, {**({"prompt": record.get("prompt")} if path.name in splits.split() else record), **split}


# --- the sets ---------------------------------------------------------------------------------------------------------

_SETS = tomllib.loads(resources.files("pluralign").joinpath("votes/sets.toml").read_text(encoding="utf-8"))
KNOWN_SETS = {name: KnownSet(name, **known) for name, known in _SETS.items()}
"""The sets by name. Each is called with a folder (``""`` for the hub), options and a progress callback."""

_PRISM = KnownSet("prism", "HannahRoseKirk/prism-alignment", ("conversations.jsonl", "data/conversations.jsonl"))


def prism_prompts(folder: str = "", kinds: Collection[str] = ("values guided", "controversy guided")) -> list[str]:
    """Return the distinct opening prompts of PRISM's conversations, stripped, in file order.

    Args:
        folder: a copy of ``HannahRoseKirk/prism-alignment``; if empty, the hub is used.
        kinds: kinds of conversations. The paper uses ``values guided`` and ``controversy guided``; the third kind is
            ``unguided``.
    """
    bad = BadRows("prism")
    prompts: dict[str, None] = {}
    for row, record in _rows(_files(_PRISM, folder, "prism_prompts('FOLDER')"), bad, None):
        with bad.row(row):
            if text_in(record, "conversation_type") in kinds and (text := text_in(record, "opening_prompt").strip()):
                prompts.setdefault(text)
    if not prompts:
        remedy = "known kinds are: values guided, controversy guided, unguided"
        raise DataError(f"there is no opening prompt of the kinds {', '.join(kinds)}", file=bad.file, remedy=remedy)
    return list(prompts)
