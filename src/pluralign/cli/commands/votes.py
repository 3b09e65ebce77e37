"""Commands that read votes and need no ensemble: ``inspect`` and ``rankings``."""

from typing import Annotated

import typer

from pluralign.cli.console import emit, progress_bar
from pluralign.cli.inputs import load_votes
from pluralign.cli.options import Data, Json, Seed, with_options
from pluralign.votes.options import LoadOptions


@with_options(LoadOptions)
def inspect(data: Data, load_options: LoadOptions, as_json: Json = False) -> None:
    """Summarise votes: how much people disagree, and how much of that is sampling noise.

    Examples:
        pluralign inspect votes.jsonl.gz
        pluralign inspect demo --json
        zcat votes.jsonl.gz | pluralign inspect - --ties half
        pluralign inspect rankings.jsonl --rename prompt=question --rename responses=statements
    """
    from pluralign.cli.render.votes import inspection_page
    from pluralign.votes.summary import inspect as inspect_votes

    summary = inspect_votes(load_votes(data, load_options))
    emit(summary, inspection_page(summary), as_json)


def rankings(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON {alternatives, pairs: \\[\\[i, j, votes_i, votes_j]]}, a CSV matrix of shares, or - for "
            "standard input.",
        ),
    ],
    k: Annotated[
        int | None,
        typer.Option(help="Also draw this many rankings with equal weights (Theorem 2).", min=1, max=10_000),
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Decide whether pairwise vote shares come from a mixture of rankings, and find the nearest one.

    Examples:
        pluralign rankings sushi.json
        pluralign rankings shares.csv --k 20
        echo '{"alternatives": ["tea", "coffee"], "pairs": [[0, 1, 3, 1]]}' | pluralign rankings - --json
    """
    from pluralign.cli.render.analysis import rankings_page
    from pluralign.measuring.rankings import load_tournament
    from pluralign.measuring.rankings import rankings as find_rankings

    tournament = load_tournament(file)
    with progress_bar(f"Searching rankings of {len(tournament.alternatives)} alternatives") as progress:
        result = find_rankings(tournament, k=k, seed=seed, progress=progress)
    emit(result, rankings_page(result, tournament.name), as_json)
