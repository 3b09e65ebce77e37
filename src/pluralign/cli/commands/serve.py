"""Commands that put an ensemble to work elsewhere: ``tune``, ``export`` and ``serve``."""

import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import pluralign
from pluralign.answering.options import TuneOptions
from pluralign.cli import console, options
from pluralign.core.errors import UsageError
from pluralign.server.options import ServeOptions
from pluralign.text.options import RemoteOptions


@options.with_options(TuneOptions)
def tune(
    ensemble: options.EnsembleFolder,
    prompts: options.Prompts,
    output: Annotated[Path, options.output_to("Folder for the adapters; a partial one is resumed.")],
    tune_options: TuneOptions,
    model: Annotated[
        str, typer.Option(help="smollm2, or the folder or hub id of a causal language model.")
    ] = "smollm2",
    member: Annotated[
        list[int], typer.Option(metavar="J", help="Tune this member only (default: all with weight). Repeatable.")
    ] = [],  # noqa: B006
    as_json: options.Json = False,
) -> None:
    """Tune a language model to each member: one LoRA adapter per member, evaluated on held-out prompts.

    Examples:
        pluralign tune ensemble prompts.jsonl -o policies --model my-org/my-model
        pluralign tune ensemble prompts.jsonl -o policies --method grpo --steps 300 --member 0 --member 3
        pluralign tune ensemble ensemble -o policies --limit 48 --steps 40 --max-new-tokens 48 --json
    """
    from pluralign.cli.render.answers import tuning_page

    with console.progress_bar(f"Tuning {model}") as progress:
        tuning = pluralign.tune(ensemble, prompts, model, output, tune_options, members=member, progress=progress)
    console.emit(tuning, tuning_page(tuning), as_json)


def export(
    ensemble: options.EnsembleFolder,
    output: Annotated[Path, options.output_to("Output folder, written atomically.")],
    member: Annotated[
        str | None,
        typer.Option(metavar="J", help="Export only this member, with one output; all: each, in folders member-0, …."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights: float32, bfloat16 or float16.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload to this repository on the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create the repository public (default: private).")] = False,
    as_json: options.Json = False,
) -> None:
    """Export an ensemble, or one fine-tuned member, as a folder that works without Pluralign.

    Fine-tuned ensembles become reward models that transformers can load. Ensembles on frozen features become a folder
    with the encoder and reward_model.py, which needs torch and transformers.

    Examples:
        pluralign export ensemble -o reward-models
        pluralign export ensemble -o member-2 --member 2 --dtype bfloat16
        pluralign export stagewise-ensemble -o members --member all
        pluralign export ensemble -o reward-models --push-to-hub my-org/reward-models
    """
    from pluralign.ensemble.ensemble import read_record
    from pluralign.ensemble.folder import read_description

    record = read_record(ensemble, read_description(ensemble))
    with console.progress_bar("Exporting"):
        exported = pluralign.export(
            ensemble,
            output,
            member=int(member) if member and member.isdecimal() else member,  # type: ignore[arg-type]  # checked there
            dtype=dtype,  # type: ignore[arg-type]  # checked there
            overwrite=overwrite,
            push_to_hub=push_to_hub,
            public=public,
            commands=options.command_history(record, ensemble, sys.argv[1:]),
        )
    for warning in exported.warnings:
        console.note(warning)
    lines = [f"Wrote {output}. {output / 'README.md'} describes it and shows how to load it."]
    if exported.hub:
        lines.append(f"Uploaded to {exported.hub}.")
    console.emit(exported, lines, as_json)


@options.with_options(ServeOptions, RemoteOptions)
def serve(
    ensemble: options.EnsembleFolder,
    serve_options: ServeOptions,
    remote_options: RemoteOptions,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than this machine requires --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free port.", min=0, max=65535)] = 8000,
    model: Annotated[
        str | None, typer.Option(help="Sample candidates from this language model; names as in generate.")
    ] = None,
    policies: options.PolicyFolder = None,
    n: Annotated[
        int | None,
        typer.Option("-n", help="Candidates to sample per prompt (default: 8), or drafts per policy (default: 1)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="First part of the model ids (default: the name of the folder).")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="PLURALIGN_API_KEY", show_envvar=True, help="API key required from clients.")
    ] = "",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log the texts of requests.")] = False,
    data: options.OtherVotesOption = None,
    as_json: options.Json = False,
) -> None:
    """Serve an ensemble over HTTP: OpenAI-compatible chat, rerank and reward endpoints, and a web page.

    Examples:
        pluralign serve ensemble
        pluralign serve ensemble --model smollm2 --port 9000
        pluralign serve ensemble --data other_votes.jsonl
        pluralign serve ensemble --model llama3.2 --base-url http://localhost:11434/v1 --name town
        pluralign serve ensemble --policies policies --base-url http://localhost:8001/v1
        PLURALIGN_API_KEY=secret pluralign serve ensemble --host 0.0.0.0 --max-texts 256
    """
    if remote_options.base_url and not (model or policies):
        raise UsageError("--base-url requires --model, the name of a model on that server, or --policies.")
    if n is not None and not 1 <= n <= serve_options.max_candidates:
        raise UsageError(f"-n must be from 1 to {serve_options.max_candidates:,} (--max-candidates), not {n:,}.")
    run = pluralign.serve  # before the work: it may need to be installed
    from pluralign.measuring.cards import load_descriptions
    from pluralign.measuring.evaluate import evaluate_held_out
    from pluralign.measuring.individuals import load_representation
    from pluralign.server.limits import Limits, ServerSettings
    from pluralign.server.run import startup_message

    answerer = pluralign.Answerer.of(ensemble, generator=model, policies=policies, remote=remote_options)
    evaluation = None
    if data:
        loaded, held_out = console.load_held_out_votes(ensemble, data)
        answerer = replace(answerer, held_out=held_out)
        evaluation = evaluate_held_out(loaded, held_out)
    settings = ServerSettings(
        name=name or re.sub(r"[^\w.-]+", "-", ensemble.resolve().name)[:100] or "pluralign",
        api_key=api_key or None,
        limits=Limits.of(serve_options, remote_options),
        sampling=serve_options.sampling(),
        n=n,
        seed=serve_options.seed,
        log_prompts=log_prompts,
        representation=load_representation(ensemble),
        descriptions=None if data else load_descriptions(ensemble),
        evaluation=evaluation,
    )
    with ExitStack() as until_ready:
        until_ready.enter_context(console.progress_bar(f"Preparing {settings.name}"))

        def ready(address: str) -> None:
            until_ready.close()
            result = {"address": address, "name": settings.name, "k": answerer.ensemble.k, "model": model}
            console.emit(result, [startup_message(address, answerer, settings)], as_json)
            sys.stdout.flush()

        run(answerer, settings, host=host, port=port, ready=ready)
