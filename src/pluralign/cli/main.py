"""The command line: each command calls the public function of the same name and shows what it returned.

Results go to stdout (with ``--json`` one object and nothing else), talk and progress to stderr; bad input is one
sentence on stderr and exit code 2. What the commands share is in ``commandline``.
"""

import dataclasses
import functools
import io
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, redirect_stderr
from pathlib import Path
from typing import Annotated, Any

import typer

from pluralign.cli.arguments import (
    Data,
    Ensemble,
    Folder,
    Groups,
    Json,
    Lines,
    OtherVotes,
    OtherVotesOption,
    Prompts,
    Seed,
    SubjectName,
    held_out_for,
    load_votes,
    print_json,
    progress_bar,
    stream_lines,
    with_options,
    working,
)
from pluralign.core.errors import DataError, MissingExtraError, PluralignError, UsageError
from pluralign.core.json_values import without_nan
from pluralign.core.options import changed_options
from pluralign.core.version import __version__
from pluralign.features.options import EncodeOptions
from pluralign.models.options import RemoteOptions, SamplingOptions
from pluralign.policies.options import TuneOptions
from pluralign.scale.options import EngineOptions
from pluralign.server.options import ServeOptions
from pluralign.training.options import FinetuneOptions, FitOptions
from pluralign.votes.options import LoadOptions

app = typer.Typer(
    name="pluralign",
    help="Learn a small weighted ensemble of reward models whose votes match how people's votes are shared.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# --- commands -------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n  pluralign inspect votes.jsonl.gz\n\n  pluralign inspect demo --json\n\n"
    "  zcat votes.jsonl.gz | pluralign inspect - --ties half\n\n"
    "  pluralign inspect rankings.jsonl --rename prompt=question --rename responses=statements"
)
@with_options(LoadOptions)
def inspect(data: Data, load_options: LoadOptions, as_json: Json = False, seed: Seed = 0) -> None:  # noqa: ARG001
    """Show what the votes hold: how much people disagree, and how much of it is only noise."""
    from pluralign.cli import views as terminal
    from pluralign.votes.summary import inspect as inspect_votes

    facts = inspect_votes(load_votes(data, load_options))
    if as_json:
        print_json(facts)
    else:
        terminal.show(terminal.inspection_page(facts))


@app.command(
    epilog="Examples:\n\n  pluralign fit votes.jsonl.gz -o ensemble\n\n"
    "  pluralign fit demo -o town --method stagewise --variant printed --k 4\n\n"
    "  pluralign fit votes.parquet -o soft --level policy --encoder smollm2 --json\n\n"
    "  pluralign fit votes.parquet -o tuned --backbone meta-llama/Meta-Llama-3-8B-Instruct --lora\n\n"
    "  accelerate launch -m pluralign fit votes.parquet -o tuned --backbone my-model"
)
@with_options(LoadOptions, FitOptions, FinetuneOptions)
def fit(
    data: Data,
    output: Folder,
    load_options: LoadOptions,
    fit_options: FitOptions,
    finetune_options: FinetuneOptions,
    as_json: Json = False,
) -> None:
    """Learn an ensemble and judge it on held-out prompts; the same command resumes a killed fit."""
    from pluralign.cli import views as terminal
    from pluralign.fitting.fit import fit as fit_ensemble

    # Of the processes that accelerate launches, the first one talks; errors are told by all.
    with nullcontext() if (first := os.environ.get("RANK", "0") == "0") else redirect_stderr(io.StringIO()):
        preferences = load_votes(data, load_options)
    work: dict[str, Any] = {"tuning": finetune_options, "folder": output}
    if finetune_options.backbone is None and first:
        with progress_bar("Encoding texts") as progress, terminal.FitWatch() as watch:
            ensemble = fit_ensemble(preferences, fit_options, progress=progress, watch=watch, **work)
    else:
        with progress_bar("Fine-tuning") if first else nullcontext() as progress:
            ensemble = fit_ensemble(preferences, fit_options, progress=progress, **work)
    if not first:
        return
    facts = {"folder": str(output), **ensemble.facts, "weights": ensemble.weights.tolist()}
    if as_json:
        print_json(facts)
    else:
        terminal.show(terminal.fit_page(ensemble, str(output)))


@app.command(
    epilog="Examples:\n\n  pluralign encode votes.parquet -o features\n\n"
    "  pluralign fit votes.parquet -o ensemble --features features\n\n"
    "  pluralign encode votes.parquet -o features --engine ray --workers 8 --encoder my-model --worker-gpus 1\n\n"
    "  pluralign encode shards -o /shared/features --engine ray --address head:6379 --json"
)
@with_options(LoadOptions, EncodeOptions, EngineOptions)
def encode(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the features; resumes there.")],
    load_options: LoadOptions,
    encode_options: EncodeOptions,
    engine_options: EngineOptions,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Encode the texts of DATA, or of a folder of Parquet shards, into features for fit; resumes a killed run."""
    from pluralign.cli import views as terminal
    from pluralign.scale.jobs import encode as encode_texts

    texts = Path(data) if Path(data).is_dir() else load_votes(data, load_options)
    with progress_bar("Encoding shards") as progress:
        done = encode_texts(texts, output, encode_options, engine_options, progress=progress)
    if as_json:
        print_json(done)
    else:
        terminal.show(terminal.shards_page(dataclasses.asdict(done)))


@app.command(
    epilog="Examples:\n\n  pluralign evaluate ensemble other-votes.jsonl\n\n"
    "  pluralign evaluate ensemble demo --json\n\n"
    "  pluralign evaluate my-org/reward-model votes.jsonl --against ensemble\n\n"
    "  pluralign evaluate scores.jsonl votes.jsonl --group length --group country\n\n"
    "  pluralign evaluate ensemble votes.jsonl --beta 0.5 --reference smollm2"
)
@with_options(LoadOptions)
def evaluate(
    subject: SubjectName,
    data: Data,
    load_options: LoadOptions,
    against: Annotated[
        list[str], typer.Option(metavar="SUBJECT", help="Compare with another subject, pair by pair. Repeatable.")
    ] = [],  # noqa: B006
    group: Groups = ["length", "topic"],  # noqa: B006
    beta: Annotated[
        list[float], typer.Option(help="Show the policy level at this strength of regularisation too. Repeatable.")
    ] = [],  # noqa: B006
    reference: Annotated[
        str | None,
        typer.Option(help="Reference policy: data (columns logprob_a, logprob_b), smollm2, a model folder or hub id."),
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Folder that pluralign encode wrote of these votes; nothing is encoded then.")
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Judge an ensemble, any reward model, or a file of scores on votes: what does it do to disagreement?"""
    from pluralign.cli import views as terminal
    from pluralign.evaluation.evaluate import evaluate as evaluate_subject
    from pluralign.evaluation.predictors import find_predictor
    from pluralign.fitting.fit import evaluation_facts

    for name in (subject, *against):
        find_predictor(name)
    preferences = load_votes(data, load_options)
    with progress_bar("Reading texts") as progress:
        evaluation = evaluate_subject(
            subject,
            preferences,
            against=against,
            groups=group,
            betas=beta,
            reference=reference,
            features=features,
            seed=seed,
            progress=progress,
        )
    facts = without_nan(evaluation_facts(evaluation))
    if as_json:
        print_json(facts)
    else:
        terminal.show(terminal.evaluation_page(facts, f"{subject} on {preferences.name}"))


@app.command(
    epilog="Examples:\n\n  pluralign prune ensemble -o pruned\n\n"
    "  pluralign prune ensemble -o pruned --beta 3 --only-far\n\n"
    "  pluralign prune ensemble -o pruned --data other-votes.jsonl --json"
)
@with_options(LoadOptions)
def prune(
    ensemble: Ensemble,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pruned ensemble, other than DIR.")],
    load_options: LoadOptions,
    beta: Annotated[
        float, typer.Option(help="At most 1/(beta - 1) of the weight is removed: a quarter at 5, a tenth at 11.")
    ] = 5.0,
    only_far: Annotated[
        bool, typer.Option("--only-far", help="Remove only members that could be outliers, not all the weight it may.")
    ] = False,
    data: OtherVotesOption = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Leave out the members furthest from the ensemble itself (Theorem 3), and say what that costs."""
    from pluralign.analysis.pruning import prune as prune_ensemble
    from pluralign.analysis.pruning import refuse_same_folder
    from pluralign.cli import views as terminal
    from pluralign.ensemble.ensemble import RewardEnsemble

    refuse_same_folder(output, ensemble)
    loaded = RewardEnsemble.load(ensemble)
    evidence = held_out_for(ensemble, loaded, data, load_options)
    pruning = prune_ensemble(loaded, evidence, beta, only_far=only_far)
    pruning.save(output, source=ensemble)
    if as_json:
        print_json({"folder": str(output), **pruning.facts()})
    else:
        terminal.show(terminal.pruning_page(pruning, loaded, str(output)))


@app.command(
    epilog="Examples:\n\n  pluralign certify ensemble\n\n  pluralign certify ensemble other-votes.jsonl --json\n\n"
    "  pluralign certify ensemble --epsilon 0.01 --delta 0.01 --beta 3"
)
@with_options(LoadOptions)
def certify(
    ensemble: Ensemble,
    load_options: LoadOptions,
    data: OtherVotes = None,
    epsilon: Annotated[float, typer.Option(help="Calibration error whose sufficient size is asked for.")] = 0.025,
    delta: Annotated[float, typer.Option(help="Chance that a bound may fail.")] = 0.05,
    beta: Annotated[float, typer.Option(help="How far out an outlier is, at least 2.")] = 5.0,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Say what the paper's theorems guarantee of an ensemble, and where they say nothing."""
    from pluralign.analysis.certificate import certify as certify_ensemble
    from pluralign.cli import views as terminal
    from pluralign.ensemble.ensemble import RewardEnsemble

    loaded = RewardEnsemble.load(ensemble)
    evidence = held_out_for(ensemble, loaded, data, load_options)
    certificate = certify_ensemble(loaded, evidence, epsilon=epsilon, delta=delta, beta=beta)
    if as_json:
        print_json(certificate)
    else:
        terminal.show(terminal.certificate_page(certificate, f"{ensemble} on {data or 'its held-out votes'}"))


@app.command(
    epilog="Examples:\n\n  pluralign diversity ensemble\n\n"
    "  pluralign diversity ensemble candidates.jsonl --cases 3\n\n"
    "  pluralign diversity ensemble candidates.jsonl --prompt 'school' --json"
)
def diversity(
    ensemble: Ensemble,
    candidates: Annotated[
        str | None,
        typer.Argument(
            metavar="[CANDIDATES]",
            help="JSON Lines of {prompt, responses}, or - for standard input; else the responses of held-out prompts.",
        ),
    ] = None,
    cases: Annotated[int, typer.Option(help="Prompts for which every member's choice is shown.", min=0)] = 1,
    prompt: Annotated[
        str | None, typer.Option(help="Show prompts that contain this text, or the prompt of this number.")
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Show how differently the members rank the same responses, and which one each would choose."""
    from pluralign.analysis import member_rankings as choices
    from pluralign.cli import views as terminal
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import REWARDS_FILE, load_held_out
    from pluralign.votes.candidates import load_candidates

    loaded = RewardEnsemble.load(ensemble)
    kept = load_held_out(ensemble) if candidates is None or (ensemble / REWARDS_FILE).exists() else None
    if candidates is None and kept:
        lists, rewards = choices.held_out_candidates(kept)
        if not lists:
            raise UsageError("no held-out prompt has three responses to rank; name a file of candidates.")
    else:
        with progress_bar("Reading candidates") as progress:
            lists = load_candidates(candidates or "-", progress)
        if repeats := sum(one.repeats for one in lists):
            print(f"note: {repeats:,} responses were given twice for one prompt and count once.", file=sys.stderr)
        with progress_bar("Encoding texts") as progress:
            rewards = choices.score_candidates(loaded, lists, progress)
    found = choices.measure_diversity(loaded, lists, rewards=rewards, evidence=kept)
    numbers = [int(prompt)] if prompt and prompt.isdecimal() else []
    shown = choices.case_studies(
        loaded, lists, cases, containing="" if numbers else prompt or "", numbers=numbers, rewards=rewards
    )
    if as_json:
        print_json({**dataclasses.asdict(found), "cases": shown})
    else:
        terminal.show(terminal.diversity_page(found, shown, f"{ensemble} on {candidates or 'its held-out prompts'}"))


@app.command(
    epilog="Examples:\n\n  pluralign generate prompts.jsonl -o candidates.jsonl -n 16\n\n"
    "  pluralign generate prism -o candidates.jsonl --model my-org/my-model -n 100 --limit 50\n\n"
    "  pluralign generate ensemble -o candidates.jsonl -n 8 --temperature 1.5 --json\n\n"
    "  pluralign generate prompts.jsonl -o candidates.jsonl --model llama3.2 --base-url http://localhost:11434/v1"
)
@with_options(SamplingOptions, RemoteOptions)
def generate(
    prompts: Prompts,
    output: Annotated[Path, typer.Option("--output", "-o", help="Candidates file; an unfinished one is gone on with.")],
    sampling_options: SamplingOptions,
    remote_options: RemoteOptions,
    model: Annotated[
        str, typer.Option(help="smollm2, a causal language model's folder or hub id, or a server's name for a model.")
    ] = "smollm2",
    n: Annotated[int, typer.Option("-n", help="Distinct responses to each prompt.")] = 8,
    limit: Annotated[int | None, typer.Option(help="Only so many prompts, drawn by the seed.")] = None,
    as_json: Json = False,
) -> None:
    """Sample several different responses to each prompt from a language model; resumes an interrupted file."""
    from pluralign.answering.generate import find_sampler
    from pluralign.answering.generate import generate as generate_candidates
    from pluralign.cli import views as terminal

    sampler = find_sampler(model, remote_options)
    together = remote_options.concurrency if remote_options.base_url else 1
    with progress_bar(f"Sampling from {sampler.name}") as progress:
        done = generate_candidates(
            prompts, output, sampler, n, sampling_options, limit=limit, concurrency=together, progress=progress
        )
    if as_json:
        print_json(done.to_json())
    else:
        terminal.show(terminal.generation_page(dataclasses.asdict(done), n))
    if done.failed:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:\n\n  pluralign profile ensemble\n\n  pluralign profile ensemble other-votes.jsonl --json"
)
@with_options(LoadOptions)
def profile(
    ensemble: Ensemble,
    load_options: LoadOptions,
    data: OtherVotes = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Describe each member by what sets it apart, in words that can be checked."""
    from pluralign.analysis.profiles import member_profiles
    from pluralign.cli import views as terminal
    from pluralign.ensemble.ensemble import RewardEnsemble

    loaded = RewardEnsemble.load(ensemble)
    evidence = held_out_for(ensemble, loaded, data, load_options)
    cards, votes = member_profiles(loaded.weights, evidence), evidence.preferences
    if as_json:
        print_json({"members": cards, "pairs": len(votes), "prompts": len(votes.prompts)})
    else:
        terminal.show(terminal.profile_page(cards, f"{ensemble} on {data or 'its held-out votes'}"))


@app.command(
    epilog="Examples:\n\n  pluralign report ensemble -o report.html\n\n"
    "  pluralign report ensemble -o report.html --candidates candidates.jsonl --prompt school --cases 6\n\n"
    "  pluralign report ensemble -o report.html --figures figures"
)
@with_options(LoadOptions)
def report(
    ensemble: Ensemble,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")],
    load_options: LoadOptions,
    data: OtherVotesOption = None,
    candidates: Annotated[
        str | None, typer.Option(help="JSON Lines of {prompt, responses} to rank; else those of held-out prompts.")
    ] = None,
    group: Groups = ["length", "topic"],  # noqa: B006
    cases: Annotated[int, typer.Option(help="How many case studies.", min=0)] = 4,
    prompt: Annotated[str, typer.Option(help="Only prompts with this text become case studies.")] = "",
    figures: Annotated[Path | None, typer.Option(help="Write the figures here too, as PNG and SVG.")] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Write one self-contained page: figures, member cards, certificate and case studies of an ensemble."""
    from pluralign.analysis.report_data import collect_report_data as study_ensemble
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.evaluation.evaluate import evaluate as evaluate_ensemble
    from pluralign.fitting.fit import evaluation_facts
    from pluralign.votes.candidates import load_candidates

    reporting = _reporting()

    if output.is_dir():
        raise UsageError(f"{output} is a folder; name the HTML file to write, such as {output / 'report.html'}.")
    loaded = RewardEnsemble.load(ensemble)
    evidence, facts = held_out_for(ensemble, loaded, data, load_options), None
    if data:
        evaluation = evaluate_ensemble(loaded, evidence.preferences, groups=[], seed=seed)
        facts = {**loaded.facts, **without_nan(evaluation_facts(evaluation))}
    with progress_bar("Measuring") as progress:
        found = study_ensemble(
            loaded,
            evidence,
            facts,
            candidates=load_candidates(candidates) if candidates else None,
            cases=cases,
            containing=prompt,
            groupings=group,
            seed=seed,
            progress=progress,
        )
    with working("Drawing"):
        commands = [_fit_command(loaded.facts, ensemble), ["pluralign", *sys.argv[1:]]]
        reporting.report(loaded, found, output, commands=commands)
        drawn = reporting.save_figures(reporting.draw_figures(found), figures) if figures else []
    if as_json:
        print_json({"report": str(output), "figures": list(map(str, drawn)), "study": found})
    else:
        print(f"Wrote {output}. Open it in a browser." + (f" Figures are in {figures}." if figures else ""))


def _reporting() -> Any:
    try:
        from pluralign.publishing import report as reporting
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or "matplotlib", "report", "a report") from None
    return reporting


def _fit_command(facts: Mapping[str, Any], folder: Path) -> list[str]:
    """The command that fits such an ensemble again."""
    words = ["pluralign", "fit", facts["data"]["name"], "-o", str(folder)]
    defaults = dataclasses.asdict(FitOptions()) | dataclasses.asdict(FinetuneOptions())
    chosen = {**facts["options"], **facts.get("tuning", {})}
    for name, value in ((name, value) for name, value in chosen.items() if name in defaults):
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"] if value != defaults[name] else []
        elif value != defaults[name]:
            words += [f"--{flag}", str(value)]
    return words


@app.command(
    epilog="Examples:\n\n  pluralign export ensemble -o reward-models\n\n"
    "  pluralign export ensemble -o member-2 --member 2 --dtype bfloat16\n\n"
    "  pluralign export stagewise-ensemble -o members --all\n\n"
    "  pluralign export ensemble -o reward-models --push-to-hub my-org/reward-models"
)
def export(
    ensemble: Ensemble,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write, written whole or not at all.")],
    member: Annotated[int | None, typer.Option(help="Export this member alone, with one output.")] = None,
    separate: Annotated[
        bool, typer.Option("--all", help="Export each member with one output, in folders member-0 and so on.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this repository of the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create that repository public, not private.")] = False,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Write a fine-tuned ensemble, or one member, as a reward model that plain transformers loads."""
    from pluralign.ensemble.ensemble import read_description
    from pluralign.publishing.transformers_export import export as export_ensemble

    facts, commands = read_description(ensemble)["facts"], [["pluralign", *sys.argv[1:]]]
    if facts.get("data") and facts.get("options"):
        commands.insert(0, _fit_command(facts, ensemble))
    with working("Exporting"):
        done = export_ensemble(
            ensemble,
            output,
            member=member,
            separate=separate,
            dtype=dtype,  # type: ignore[arg-type]
            overwrite=overwrite,
            push_to_hub=push_to_hub,
            public=public,
            commands=commands,
        )
    if as_json:
        print_json(done)
    else:
        print(f"Wrote {output}; {Path(output, 'README.md')} says what it is and how to load it.")
        if done.hub:
            print(f"Uploaded to {done.hub}.")


@app.command(epilog="Examples:\n\n  pluralign score ensemble texts.jsonl\n\n"
             "  echo '{\"prompt\": \"Tea?\", \"response\": \"Yes.\"}' | pluralign score ensemble\n\n"
             "  pluralign score ensemble shards -o scored --engine ray --workers 8 --worker-gpus 1")  # fmt: skip
@with_options(EngineOptions)
def score(
    ensemble: Ensemble,
    engine_options: EngineOptions,
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]",
            help="JSON Lines file, or - for standard input; with -o also CSV, Parquet or a folder of Parquet shards.",
        ),
    ] = "-",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for Parquet shards with rewards; resumes there.")
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
) -> None:
    """Print each member's reward for lines of {prompt, response}, or write them into Parquet shards with -o."""
    if output is None:
        from pluralign.scale.lines import score as score_lines

        if changed := changed_options(engine_options):
            raise UsageError(f"--{changed[0].replace('_', '-')} is about work that is kept: name a folder with -o.")
        stream_lines(ensemble, file, score_lines, as_json)
        return
    from pluralign.cli import views as terminal
    from pluralign.scale.jobs import score as score_shards

    with progress_bar("Scoring shards") as progress:
        done = score_shards(ensemble, file, output, engine_options, progress=progress)
    if as_json:
        print_json(done)
    else:
        terminal.show(terminal.shards_page(dataclasses.asdict(done)))


@app.command(epilog="Examples:\n\n  pluralign compare ensemble pairs.jsonl\n\n"
             "  echo '{\"prompt\": \"Tea?\", \"response_a\": \"Yes.\", \"response_b\": \"No.\"}' "
             "| pluralign compare ensemble")  # fmt: skip
def compare(ensemble: Ensemble, file: Lines = "-", as_json: Json = False, seed: Seed = 0) -> None:  # noqa: ARG001
    """Print the members' votes and their predicted share for lines of {prompt, response_a, response_b}."""
    from pluralign.scale.lines import compare as compare_lines

    stream_lines(ensemble, file, compare_lines, as_json)


@app.command(
    epilog="Examples:\n\n  pluralign answer ensemble 'Should we plant trees?' --candidates candidates.jsonl\n\n"
    "  pluralign answer ensemble 'Should we plant trees?' --candidates c.jsonl --mode steerable --like 'short and warm'"
    "\n\n  pluralign answer ensemble 'Should we plant trees?' --mode distributional --model smollm2 -n 4 --seed 7"
    "\n\n  pluralign answer ensemble 'Should we plant trees?' --model llama3.2 --base-url http://localhost:11434/v1"
)
@with_options(SamplingOptions, RemoteOptions)
def answer(
    ensemble: Ensemble,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What is asked.")],
    sampling_options: SamplingOptions,
    remote_options: RemoteOptions,
    mode: Annotated[str, typer.Option(help="balanced, steerable or distributional.")] = "balanced",
    candidates: Annotated[
        str | None, typer.Option(help="JSON Lines of {prompt, responses}, or - for standard input; its line is used.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Sample the candidates from this language model; names as for generate.")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="How many to sample.", min=1, max=1000)] = 8,
    rule: Annotated[str, typer.Option(help="Balanced: maximin, borda, schulze or lottery.")] = "maximin",
    distill: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Balanced: let this model write a statement from the slate.")
    ] = None,
    member: Annotated[int | None, typer.Option(help="Steerable: this member answers.")] = None,
    like: Annotated[str, typer.Option(help="Steerable: what you like, in words.")] = "",
    choices: Annotated[
        str | None, typer.Option(help="Steerable: your own choices, pairs with votes like any DATA.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer with the ensemble: a slate and a consensus, one chosen voice, or a draw in proportion."""
    from pluralign.analysis.profiles import member_profiles
    from pluralign.answering.answer import answer as answer_prompt
    from pluralign.answering.answer import check_request
    from pluralign.answering.consensus import WRITING_TEMPERATURE
    from pluralign.answering.generate import find_sampler, sample_distinct
    from pluralign.cli import views as terminal
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import REWARDS_FILE, load_held_out

    check_request(mode, rule)
    if (candidates is None) == (model is None):
        raise UsageError("name candidates to choose from with --candidates, or a model to sample from with --model.")
    loaded = RewardEnsemble.load(ensemble)
    kept = load_held_out(ensemble) if (ensemble / REWARDS_FILE).is_file() else None
    cards = member_profiles(loaded.weights, kept) if kept else []
    samplers = {name: find_sampler(name, remote_options) for name in (model, distill) if name}

    cooler = min(sampling_options.temperature, WRITING_TEMPERATURE)
    writing_options = dataclasses.replace(sampling_options, temperature=cooler)

    def sampled(name: str, options: SamplingOptions, words: str, count: int) -> list[str]:
        with working(f"Sampling from {samplers[name].name}"):
            return sample_distinct(samplers[name], words, count, options).responses

    for sampler in samplers.values():
        with working(f"Reaching {sampler.name}"):
            sampler.prepare()
    texts = _candidates_for(prompt, candidates) if candidates else sampled(str(model), sampling_options, prompt, n)
    if model and len(texts) < n:
        print(f"note: {model} gave {len(texts)} different responses, not {n}.", file=sys.stderr)
    own = load_votes(choices, LoadOptions(min_votes=1)) if choices else None
    writer = functools.partial(sampled, distill, writing_options) if distill else None
    with progress_bar("Encoding texts") as progress:
        found = answer_prompt(
            loaded,
            prompt,
            texts,
            mode,  # type: ignore[arg-type]  # checked there
            rule=rule,
            writer=writer,
            member=member,
            like=like,
            choices=own,
            profiles=cards,
            seed=sampling_options.seed,
            progress=progress,
        )
    if as_json:
        print_json(found)
    else:
        terminal.show(terminal.answer_page(found, prompt, {card.member: card.name for card in cards}))


def _candidates_for(prompt: str, file: str) -> list[str]:
    from pluralign.votes.candidates import load_candidates

    lists = load_candidates(file)
    found = [one for one in lists if one.prompt_text == prompt]
    if not found and len(lists) > 1:
        raise DataError("no line has this prompt", file=file, remedy="give the prompt as it stands there")
    return list((found or lists)[0].responses)


@app.command(
    epilog="Examples:\n\n  pluralign tune ensemble prompts.jsonl -o policies --model my-org/my-model\n\n"
    "  pluralign tune ensemble prompts.jsonl -o policies --method grpo --steps 300 --member 0 --member 3\n\n"
    "  pluralign tune ensemble ensemble -o policies --limit 48 --steps 40 --max-new-tokens 48 --json"
)
@with_options(TuneOptions)
def tune(
    ensemble: Ensemble,
    prompts: Prompts,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the adapters; finished ones are kept.")],
    tune_options: TuneOptions,
    model: Annotated[str, typer.Option(help="smollm2, or a causal language model's folder or hub id.")] = "smollm2",
    member: Annotated[
        list[int], typer.Option(metavar="J", help="Only this member; else all with weight. Repeatable.")
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Only so many prompts, drawn by the seed.")] = None,
    as_json: Json = False,
) -> None:
    """Tune a language model to each member: one LoRA adapter a member, judged on prompts it never trained on."""
    from pluralign.cli import views as terminal
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.policies.tune import tune as tune_policies
    from pluralign.publishing.transformers_export import member_names

    loaded = RewardEnsemble.load(ensemble)
    names = member_names(ensemble, loaded)
    with progress_bar(f"Tuning {model}") as progress:
        done = tune_policies(
            loaded, prompts, model, output, tune_options, members=member, names=names, limit=limit, progress=progress
        )
    if as_json:
        print_json(done)
    else:
        terminal.show(terminal.tuning_page(dataclasses.asdict(done)))


@app.command(
    epilog="Examples:\n\n  pluralign rankings sushi.json\n\n  pluralign rankings shares.csv --k 20\n\n"
    '  echo \'{"alternatives": ["tea", "coffee"], "pairs": [[0, 1, 3, 1]]}\' | pluralign rankings - --json'
)
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
        int | None, typer.Option(help="Also draw this many rankings of equal weight (Theorem 2).", min=1, max=10_000)
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """One context: are these pairwise shares a mixture of rankings? Of which, or why of none."""
    from pluralign.analysis.tournament import load_tournament
    from pluralign.analysis.tournament import rankings as find_rankings
    from pluralign.cli import views as terminal

    tournament = load_tournament(file)
    with progress_bar(f"Adding rankings of {len(tournament.alternatives)} alternatives") as progress:
        facts = find_rankings(tournament, k=k, seed=seed, progress=progress)
    if as_json:
        print_json(facts)
    else:
        terminal.show(terminal.rankings_page(facts, tournament.name))


@app.command(
    epilog="Examples:\n\n  pluralign serve ensemble\n\n  pluralign serve ensemble --model smollm2 --port 9000\n\n"
    "  pluralign serve ensemble --model llama3.2 --base-url http://localhost:11434/v1 --name town\n\n"
    "  PLURALIGN_API_KEY=secret pluralign serve ensemble --host 0.0.0.0 --max-texts 256"
)
@with_options(ServeOptions, RemoteOptions)
def serve(
    ensemble: Ensemble,
    serve_options: ServeOptions,
    remote_options: RemoteOptions,
    host: Annotated[str, typer.Option(help="Where to listen; other than this machine only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.", min=0, max=65535)] = 8000,
    model: Annotated[
        str | None, typer.Option(help="Sample candidates from this language model; names as for generate.")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="How many to sample for a prompt.")] = 8,
    name: Annotated[str | None, typer.Option(help="First part of the model ids; else the folder's name.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="PLURALIGN_API_KEY", show_envvar=True, help="What clients must send.")
    ] = "",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write the texts of requests to the log.")] = False,
    as_json: Json = False,
) -> None:
    """Serve an ensemble over HTTP: OpenAI's chat, rerank and reward shapes, and a page for people."""
    from pluralign.answering.generate import find_sampler
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.held_out import REWARDS_FILE, load_held_out

    if remote_options.base_url and not model:
        raise UsageError("--base-url names a server; name its model with --model too.")
    if not 1 <= n <= serve_options.max_candidates:
        raise UsageError(f"-n must be from 1 to {serve_options.max_candidates:,} (--max-candidates), not {n:,}.")
    serving = _serving()
    loaded = RewardEnsemble.load(ensemble)
    known_as = name or re.sub(r"[^\w.-]+", "-", ensemble.resolve().name)[:100] or "pluralign"
    with ExitStack() as until_ready:
        until_ready.enter_context(working(f"Preparing {known_as}"))

        def ready(address: str) -> None:
            until_ready.close()
            if as_json:
                print_json({"address": address, "name": known_as, "k": loaded.k, "model": model})
            else:
                print(serving.greeting(address, known_as, loaded.k, bool(model), bool(api_key)))
            sys.stdout.flush()

        serving.serve(
            loaded,
            find_sampler(model, remote_options) if model else None,
            host=host,
            port=port,
            api_key=api_key,
            ready=ready,
            evidence=load_held_out(ensemble) if (ensemble / REWARDS_FILE).is_file() else None,
            name=known_as,
            limits=serving.Limits.of(serve_options, remote_options),
            sampling=serve_options.sampling(),
            n=n,
            seed=serve_options.seed,
            log_prompts=log_prompts,
        )


def _serving() -> Any:
    try:
        from pluralign.server import app as serving
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or "fastapi", "server", "a server") from None
    return serving


@app.command(
    epilog="Examples:\n\n  pluralign reproduce multipref --dry-run\n\n"
    "  pluralign reproduce multipref --tiny -o rehearsal\n\n"
    "  pluralign reproduce helpsteer2 -o helpsteer2 --data helpsteer2:HelpSteer2 --backbone my-org/my-model\n\n"
    "  pluralign reproduce tldr -o frozen --data tldr:copies/comparisons --encoder minilm"
)
def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The paper's data set: multipref, personalllm, helpsteer2 or tldr.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for everything; the same command goes on in it.")
    ] = None,
    data: Annotated[str, typer.Option(help="NAME:FOLDER, a local copy of the votes; else from the hub.")] = "",
    backbone: Annotated[str, typer.Option(help="Checkpoint that members start from: a folder or a hub id.")] = "",
    encoder: Annotated[str, typer.Option(help="Frozen features of this encoder instead of a backbone.")] = "",
    model: Annotated[
        str, typer.Option(help="What writes the continuations; else the backbone, or smollm2 with an encoder.")
    ] = "",
    prompts: Annotated[str, typer.Option(help="What it continues, such as prism:FOLDER; else the recipe's own.")] = "",
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters instead of all weights.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps and what they cost; run nothing.")] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Rehearse every step here, on made-up votes and a tiny model.")
    ] = False,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Run the paper's experiment on one of its data sets, or show what it would do and cost."""
    from pluralign.cli import views as terminal
    from pluralign.experiments.reproduce import plan
    from pluralign.experiments.reproduce import reproduce as run_recipe

    given: dict[str, Any] = {"data": data, "backbone": backbone, "encoder": encoder, "model": model}
    given |= {"prompts": prompts, "lora": lora, "seed": seed}
    if dry_run:
        planned = dataclasses.asdict(plan(name, output or "OUT", **given))
        if as_json:
            print_json(planned)
        else:
            terminal.show(terminal.plan_page(planned))
        return
    if output is None:
        raise UsageError("name a folder with -o, or use --dry-run to see what would be done.")
    with progress_bar(f"Reproducing {name}") as progress:
        done = run_recipe(
            name, output, tiny=tiny, **given, say=lambda what: print(what, file=sys.stderr), progress=progress
        )
    if as_json:
        print_json(done)
    else:
        terminal.show(terminal.reproduction_page(dataclasses.asdict(done)))


@app.command(
    epilog="Examples:\n\n  pluralign demo\n\n  pluralign demo --pairs 1000000 -o town.jsonl\n\n"
    "  pluralign demo --report town.html\n\n  pluralign demo --pairs 500 --json"
)
def demo(
    pairs: Annotated[
        int, typer.Option(help="How many comparisons the town hall holds.", min=200, max=1_000_000)
    ] = 2000,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the votes to this .jsonl[.gz] or .parquet file and stop."),
    ] = None,
    encoder: Annotated[str, typer.Option(help="What reads the texts: see pluralign fit.")] = "minilm",
    report: Annotated[Path | None, typer.Option(help="Write the joint ensemble's report to this HTML file.")] = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Tell the whole story on the built-in town hall, a made-up place where everyone's true taste is known."""
    from pluralign.cli import views as terminal
    from pluralign.experiments.demo_story import walk_through
    from pluralign.votes.summary import inspect as inspect_votes
    from pluralign.votes.summary import inspect_truth
    from pluralign.votes.town_hall import town_hall

    with working(f"Asking the town about {pairs:,} pairs"):
        town = town_hall(pairs, seed=seed)
    if output:
        with working(f"Writing {output}"):
            town.preferences.save(output)
        if as_json:
            print_json({"file": str(output), "pairs": len(town.preferences)})
        else:
            print(f"Wrote {len(town.preferences):,} pairs to {output}. Next: pluralign inspect {output}")
        return
    facts, truth = inspect_votes(town.preferences), inspect_truth(town)
    if not as_json:
        terminal.show(terminal.inspection_page(facts))
        terminal.show(terminal.example_pairs(town))
        terminal.show([terminal.truth_table(facts, truth)])
    with progress_bar("Encoding what the town wrote") as progress:
        story = walk_through(town, seed=seed, encoder=encoder, progress=progress)
    if report:
        commands = [
            _fit_command(story.ensemble.facts, Path("town")),
            ["pluralign", "report", "town", "-o", str(report)],
        ]
        _reporting().report(story.ensemble, story.study, report, name="The town hall", commands=commands)
    if as_json:
        members, pruned = story.ensemble.facts["members"], story.pruning.facts()
        told = {"inspect": facts, "truth": truth, "told": story.told, "members": members, "study": story.study}
        print_json({**told, "pruning": pruned, "rankings": story.rankings, "report": report and str(report)})
    else:
        terminal.show(terminal.story_page(story))
        if report:
            print(f"Wrote {report}. Open it in a browser.")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say more on stderr.")] = False,
) -> None:
    """What holds for every command."""
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s: %(message)s")
    logging.addLevelName(logging.WARNING, "note")
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app(standalone_mode=True)
    except PluralignError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError, FileExistsError) as error:
        _fail(f"{error.filename or 'a file'}: {(error.strerror or 'cannot be used').lower()}.")


def _fail(sentence: str) -> None:
    print(f"pluralign: {sentence}", file=sys.stderr)
    sys.exit(2)
