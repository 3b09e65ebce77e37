"""Commands that use an ensemble on texts: ``score``, ``compare``, ``generate`` and ``answer``."""

import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import pluralign
from pluralign.cli import console, options
from pluralign.core.errors import DataError, UsageError
from pluralign.core.options import changed_options
from pluralign.core.text import one_line
from pluralign.scale.options import EngineOptions
from pluralign.text.options import RemoteOptions, SamplingOptions


@options.with_options(EngineOptions)
def score(
    ensemble: options.EnsembleFolder,
    engine_options: EngineOptions,
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]",
            help="JSON Lines file, or - for standard input; with -o also CSV, Parquet or a folder of Parquet shards.",
        ),
    ] = "-",
    output: Annotated[
        Path | None, options.output_to("Write Parquet shards with rewards to this folder; resumes a partial one.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print each member's reward for lines of {prompt, response}. With -o, write Parquet shards.

    Examples:
        pluralign score ensemble texts.jsonl
        echo '{"prompt": "Tea?", "response": "Yes."}' | pluralign score ensemble
        pluralign score ensemble shards -o scored --engine ray --workers 8 --worker-gpus 1
    """
    from pluralign.cli.render.answers import shards_page

    if output is None:
        if changed := changed_options(engine_options):
            raise UsageError(f"--{changed[0].replace('_', '-')} requires -o.")
        _print_lines(pluralign.score(ensemble, sys.stdin.buffer if file == "-" else file), as_json)
        return
    with console.progress_bar("Scoring texts") as progress:
        job = pluralign.score(ensemble, file, output, engine_options, progress=progress)
    console.emit(job, shards_page(job, "rewards of {:,} members"), as_json)


def compare(
    ensemble: options.EnsembleFolder,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="JSON Lines file, or - for standard input.")] = "-",
    as_json: options.Json = False,
) -> None:
    """Print the members' votes and the predicted share for lines of {prompt, response_a, response_b}.

    Examples:
        pluralign compare ensemble pairs.jsonl
        echo '{"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}' | pluralign compare ensemble
    """
    _print_lines(pluralign.compare(ensemble, sys.stdin.buffer if file == "-" else file), as_json)


def _print_lines(lines: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Print a JSON object for each line as it is read, or all of them in one object."""
    if as_json:
        console.print_json({"lines": list(lines)})
        return
    for line in lines:
        console.print_json(line)


@options.with_options(SamplingOptions, RemoteOptions)
def generate(
    prompts: options.Prompts,
    output: Annotated[Path, options.output_to("Candidates file; a partial one is resumed.", console.output_file)],
    sampling_options: SamplingOptions,
    remote_options: RemoteOptions,
    model: Annotated[
        str,
        typer.Option(help="smollm2, the folder or hub id of a causal language model, or a model name on the server."),
    ] = "smollm2",
    n: Annotated[int, typer.Option("-n", help="Distinct responses per prompt.")] = 8,
    limit: Annotated[int | None, typer.Option(help="Use a random sample of this many prompts.")] = None,
    as_json: options.Json = False,
) -> None:
    """Sample several distinct responses per prompt from a language model. Run again to resume.

    Examples:
        pluralign generate prompts.jsonl -o candidates.jsonl -n 16
        pluralign generate prism -o candidates.jsonl --model my-org/my-model -n 100 --limit 50
        pluralign generate ensemble -o candidates.jsonl -n 8 --temperature 1.5 --json
        pluralign generate prompts.jsonl -o candidates.jsonl --model llama3.2 --base-url http://localhost:11434/v1
    """
    from pluralign.cli.render.answers import generation_page
    from pluralign.text.remote import language_model

    sampler = language_model(model, remote_options)
    with console.progress_bar(f"Sampling from {sampler.name}") as progress:
        generation = pluralign.generate(prompts, output, sampler, n, sampling_options, limit=limit, progress=progress)
    console.emit(generation, generation_page(generation, n), as_json)
    if generation.failed:
        raise typer.Exit(1)


@options.with_options(SamplingOptions, RemoteOptions)
def answer(
    ensemble: options.EnsembleFolder,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question.")],
    sampling_options: SamplingOptions,
    remote_options: RemoteOptions,
    mode: Annotated[str, typer.Option(help="balanced, steerable or distributional.")] = "balanced",
    candidates: Annotated[
        str | None, typer.Option(help="Candidates: JSON Lines of {prompt, responses}, or - for standard input.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Sample the candidates from this language model; names as in generate.")
    ] = None,
    policies: options.PolicyFolder = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            help="Candidates to sample (default: 8), or drafts per policy: each member takes its best (default: 1).",
            min=1,
            max=1000,
        ),
    ] = None,
    rule: Annotated[str, typer.Option(help="Balanced: consensus rule: borda, maximin, schulze or lottery.")] = "borda",
    slate_size: Annotated[
        int | None,
        typer.Option(min=1, help="Balanced: answers on the slate.", show_default="2 or 3; every policy's own answer"),
    ] = None,
    cover: Annotated[
        str, typer.Option(help="Balanced: the slate contains people's favourite, or one of their top-two.")
    ] = "favourite",
    level: Annotated[
        str,
        typer.Option(
            help="Balanced, distributional: members choose by their policy, or each takes its favourite (vote)."
        ),
    ] = "policy",
    distill: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Balanced: write one statement from the slate with this model.")
    ] = None,
    member: Annotated[int | None, typer.Option(help="Steerable: this member answers.")] = None,
    like: Annotated[str, typer.Option(help="Steerable: your preference, in words.")] = "",
    choices: Annotated[
        str | None,
        typer.Option(
            help="Steerable: your own choices: lines {prompt, response_a, response_b, vote} and rankings {prompt, "
            "responses, ranking}, or votes in any DATA format."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Steerable: this model compares held-out answers for a person who wants --like."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Answer a prompt with the ensemble: a slate and a consensus, an answer for one user, or a random member.

    Examples:
        pluralign answer ensemble 'A held-out question of the ensemble'
        pluralign answer ensemble 'Plant trees?' --candidates c.jsonl
        pluralign answer ensemble 'Plant trees?' --candidates c.jsonl --slate-size 2 --cover top-two
        pluralign answer ensemble 'Plant trees?' --candidates c.jsonl --mode steerable --like 'short and warm'
        pluralign answer ensemble 'Plant trees?' --candidates c.jsonl --mode steerable --choices mine.jsonl
        pluralign answer ensemble 'Plant trees?' --mode distributional --model smollm2 -n 4 --seed 7
        pluralign answer ensemble 'Plant trees?' --model llama3.2 --base-url http://localhost:11434/v1
        pluralign answer ensemble 'Plant trees?' --policies policies -n 4
        pluralign answer ensemble 'Plant trees?' --policies policies --base-url http://localhost:8000/v1
    """
    from pluralign.cli.render.answers import answer_page
    from pluralign.votes.load import as_choices
    from pluralign.votes.prompts import Prompt

    request = pluralign.AnswerRequest(
        prompt,
        mode,  # type: ignore[arg-type]  # checked there
        rule=rule,
        level=level,  # type: ignore[arg-type]  # checked there
        slate_size=slate_size,
        cover=cover,
        distill=distill is not None,
        member=member,
        like=like,
        choices=as_choices(choices) if choices else None,
        n=n,
        sampling=sampling_options,
        seed=sampling_options.seed,
    )
    if candidates and model:
        raise UsageError("--candidates and --model exclude each other; give one of them.")
    names = {"generator": model, "writer": distill, "judge": judge}
    answerer = pluralign.Answerer.of(ensemble, policies=policies, remote=remote_options, **names)
    if not (candidates or model or policies) and Prompt(prompt).identity not in answerer.held_out_prompts:
        remedy = "name a file with --candidates, or a model with --model"
        raise UsageError(answerer.no_candidates(prompt, remedy))
    for sampler in answerer.samplers:
        with console.progress_bar(f"Connecting to {sampler.name}"):
            sampler.prepare()
    texts = functools.partial(_candidates_for, prompt, candidates) if candidates else None
    with console.progress_bar("Encoding texts") as progress:
        result = pluralign.answer(answerer, request, texts, progress=progress)
    prompts = len(answerer.held_out.preferences.prompts) if answerer.held_out else 0
    console.emit(result, answer_page(result, prompt, answerer.cards, prompts), as_json)


def _candidates_for(prompt: str, file: str) -> list[str]:
    """Return the responses of the line with this prompt."""
    from pluralign.votes.candidates import load_candidates
    from pluralign.votes.prompts import Prompt

    lists = load_candidates(file)
    for one in lists:
        if Prompt(one.prompt).identity == Prompt(prompt).identity:
            return list(one.responses)
    problem, row = "no line has this prompt", None
    if len(lists) == 1:
        problem, row = f"its candidates are for another prompt, “{one_line(lists[0].prompt_text)}”", 1
    raise DataError(problem, file=file, row=row, remedy="give the prompt as in the file, or name another file")
