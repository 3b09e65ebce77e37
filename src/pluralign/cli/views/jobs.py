"""Views of resumable jobs that write files: ``pluralign generate``, ``pluralign encode`` and ``pluralign score -o``."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from pluralign.answering.generate import Generation
from pluralign.cli.views.tables import counted_notes, heading
from pluralign.scale.jobs import Encoded, Scored

FAILURES_SHOWN = 3


def generation_page(generation: Generation, n: int) -> Iterator[RenderableType]:
    """Yield what was sampled, what was left out, and the first failures."""
    yield heading(generation.file)
    yield Text(
        f"{generation.responses:,} responses to {generation.lines:,} of {generation.prompts:,} prompts from "
        f"{generation.model}, {generation.seconds:.0f} s"
    )
    failures = f"prompts failed; {generation.file}.failed lists them, and the same command tries them again"
    yield from counted_notes(
        (
            (generation.resumed, "prompts were finished by an earlier run"),
            (generation.repeats, "duplicate responses were dropped"),
            (generation.empty, "empty responses were dropped"),
            (generation.cut_off, "responses were cut off at --max-new-tokens; a higher value lets them end"),
            (generation.short, f"prompts have fewer than {n} distinct responses after all rounds of sampling"),
            (len(generation.failed), failures),
        )
    )
    for failure in generation.failed[:FAILURES_SHOWN]:
        yield Text(f"  {failure.error}", style="red")
    yield Text()


def shards_page(job: Encoded | Scored) -> Iterator[RenderableType]:
    """Yield what is in the folder, and how much of it an earlier run had written."""
    contents = f"vectors of {job.dimension:,} numbers" if isinstance(job, Encoded) else f"rewards of {job.k} members"
    yield heading(job.folder)
    yield Text(f"{job.rows:,} texts, {contents}, {job.shards:,} shards, {job.seconds:.0f} s")
    yield from counted_notes([(job.resumed, "shards were finished by an earlier run")])
    yield Text()
