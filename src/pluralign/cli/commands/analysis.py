"""Commands that analyse an ensemble: ``prune``, ``certify``, ``diversity``, ``profile``, ``report``; ``rankings``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import pluralign
from pluralign.cli import console, options
from pluralign.core.errors import UsageError
from pluralign.text.options import RemoteOptions


def prune(
    ensemble: options.EnsembleFolder,
    output: Annotated[Path, options.output_to("Folder for the pruned ensemble; not DIR.")],
    beta: Annotated[
        float, typer.Option(help="Remove at most 1/(beta - 1) of the weight: a quarter at 5, a tenth at 11.")
    ] = 5.0,
    furthest: Annotated[
        bool, typer.Option("--furthest", help="Remove the furthest members, near or far, up to the weight allowed.")
    ] = False,
    data: options.OtherVotesOption = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Remove the members that can be outliers (Theorem 3), and report the cost.

    Examples:
        pluralign prune ensemble -o pruned
        pluralign prune ensemble -o pruned --beta 3 --furthest
        pluralign prune ensemble -o pruned --data other-votes.jsonl --json
    """
    from pluralign.cli.render.analysis import pruning_page
    from pluralign.measuring import pruning as prunings

    prunings.refuse_to_replace(output, ensemble, overwrite=overwrite)
    loaded, held_out = console.load_held_out_votes(ensemble, data)
    pruning = prunings.prune(loaded, held_out, beta, only_far=not furthest)
    pruning.save(output, source=ensemble, overwrite=overwrite)
    console.emit({"folder": str(output), **pruning.to_json()}, pruning_page(pruning, loaded, str(output)), as_json)


def certify(
    ensemble: options.EnsembleFolder,
    data: options.OtherVotes = None,
    epsilon: Annotated[float, typer.Option(help="Target calibration error; reports the k that guarantees it.")] = 0.025,
    delta: Annotated[float, typer.Option(help="Failure probability of a bound.")] = 0.05,
    beta: Annotated[float, typer.Option(help="Outlier threshold of Theorem 3, at least 2.")] = 5.0,
    as_json: options.Json = False,
) -> None:
    """Report what the paper's theorems guarantee for an ensemble, and which bounds are vacuous.

    Examples:
        pluralign certify ensemble
        pluralign certify ensemble other-votes.jsonl --json
        pluralign certify ensemble --epsilon 0.01 --delta 0.01 --beta 3
    """
    from pluralign.cli.render.analysis import certificate_page

    held_out = console.load_held_out_votes(ensemble, data)
    certificate = pluralign.certify(*held_out, epsilon=epsilon, delta=delta, beta=beta)
    console.emit(certificate, certificate_page(certificate, f"{ensemble} on {data or 'its held-out votes'}"), as_json)


def diversity(
    ensemble: options.EnsembleFolder,
    candidates: Annotated[
        str | None,
        typer.Argument(
            metavar="[CANDIDATES]", help="JSON Lines of {prompt, responses}, or - (default: those of held-out prompts)."
        ),
    ] = None,
    cases: Annotated[int, typer.Option(help="Number of prompts to show with every member's choice.", min=0)] = 1,
    prompt: Annotated[
        str | None, typer.Option(help="Show prompts that contain this text, or the prompt with this number.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure how differently the members rank the same responses, and show their first choices.

    Examples:
        pluralign diversity ensemble
        pluralign diversity ensemble candidates.jsonl --cases 3
        pluralign diversity ensemble candidates.jsonl --prompt 'school' --json
    """
    from pluralign.cli.render.analysis import diversity_page
    from pluralign.votes.candidates import load_candidates

    lists = None
    if candidates is not None:
        with console.progress_bar("Reading candidates") as progress:
            lists = load_candidates(candidates, progress)
        if repeats := sum(one.repeats for one in lists):
            console.note(f"dropped {repeats:,} duplicate responses to the same prompt.")
    with console.progress_bar("Encoding texts") as progress:
        found = pluralign.diversity(ensemble, lists, cases=cases, prompt=prompt or "", progress=progress)
    console.note_left_out(found.left_out)
    title = f"{ensemble} on {candidates or 'its held-out prompts'}"
    console.emit(found, diversity_page(found, found.cases, title), as_json)


@options.with_options(RemoteOptions)
def profile(
    ensemble: options.EnsembleFolder,
    remote_options: RemoteOptions,
    data: options.OtherVotes = None,
    describe: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Let this language model write a name and a sentence per member, and check them on other prompts; "
            "names as in generate. Saves them in the ensemble folder.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Describe how each member differs from the others: style, phrases and positions, with significance tests.

    Examples:
        pluralign profile ensemble
        pluralign profile ensemble other-votes.jsonl --json
        pluralign profile ensemble --describe llama3.2 --base-url http://localhost:11434/v1
    """
    from pluralign.cli.render.analysis import profile_page
    from pluralign.text.remote import language_model

    if remote_options.base_url and not describe:
        raise UsageError("--base-url requires --describe, the name of a model on that server.")
    votes = console.load_held_out_votes(ensemble, data)[1] if data else None
    with console.progress_bar(f"Describing members with {describe}" if describe else "Comparing members") as progress:
        found = pluralign.profile(
            ensemble,
            votes,
            describe=language_model(describe, remote_options) if describe else None,
            concurrency=remote_options.concurrency if remote_options.base_url else 1,
            progress=progress,
        )
    title = f"{ensemble} on {data or 'its held-out votes'}"
    console.emit(found, profile_page(found.members, found.prompts, title), as_json)


def report(
    ensemble: options.EnsembleFolder,
    output: Annotated[Path, options.output_to("HTML file to write.", console.output_file)],
    data: options.OtherVotesOption = None,
    candidates: options.Candidates = None,
    group: options.Groups = ["length", "topic"],  # noqa: B006
    figures: Annotated[
        Path | None,
        typer.Option(callback=console.output_folder, help="Also write the figures to this folder, as PNG and SVG."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a self-contained HTML report: figures, member profiles, certificate and case studies.

    Examples:
        pluralign report ensemble -o report.html
        pluralign report ensemble -o report.html --candidates candidates.jsonl
        pluralign report ensemble -o report.html --figures figures
    """
    from pluralign.measuring.report_data import ReportOptions
    from pluralign.votes.candidates import load_candidates

    write_report = pluralign.report  # before the work: it may need to be installed
    votes = console.load_held_out_votes(ensemble, data)[1] if data else None
    shown = ReportOptions(load_candidates(candidates) if candidates else None, groupings=group)
    commands = options.command_history(pluralign.RewardEnsemble.load(ensemble).record, ensemble, sys.argv[1:])
    with console.progress_bar("Measuring") as progress:
        written = write_report(
            ensemble, output, votes, shown, figures_folder=figures, commands=commands, progress=progress
        )
    line = f"Wrote {output}. Open it in a browser." + (f" Figures are in {figures}." if figures else "")
    console.emit(written, [line], as_json)


def rankings(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON {alternatives, pairs: \\[\\[i, j, votes_i, votes_j]]}, a CSV matrix of shares, or -.",
        ),
    ],
    k: Annotated[
        int | None, typer.Option(help="Also draw this many rankings with equal weights (Theorem 2).", min=1, max=10_000)
    ] = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
) -> None:
    """Decide whether pairwise vote shares come from a mixture of rankings, and find the nearest one.

    Examples:
        pluralign rankings sushi.json
        pluralign rankings shares.csv --k 20
        echo '{"alternatives": ["tea", "coffee"], "pairs": [[0, 1, 3, 1]]}' | pluralign rankings - --json
    """
    from pluralign.cli.render.analysis import rankings_page
    from pluralign.measuring import rankings as tournaments

    tournament = tournaments.load_tournament(file)
    with console.progress_bar(f"Searching rankings of {len(tournament.alternatives)} alternatives") as progress:
        result = tournaments.rankings(tournament, k=k, seed=seed, progress=progress)
    console.emit(result, rankings_page(result, tournament.name), as_json)
