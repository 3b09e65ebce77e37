"""Commands that read votes: ``inspect`` them, ``encode`` their texts, ``fit`` an ensemble, and ``evaluate`` it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

import pluralign
from pluralign.cli import console, options
from pluralign.core.errors import UsageError
from pluralign.core.files import atomic_write, refuse_foreign
from pluralign.learning.options import FinetuneOptions, FitOptions, check_applies
from pluralign.scale.options import EngineOptions
from pluralign.text.options import EncodeOptions, RemoteOptions
from pluralign.votes.options import LoadOptions


@options.with_options(LoadOptions)
def inspect(data: options.Data, load_options: LoadOptions, as_json: options.Json = False) -> None:
    """Summarise votes: how much people disagree, and how much of that is sampling noise.

    Examples:
        pluralign inspect votes.jsonl.gz
        pluralign inspect demo --json
        zcat votes.jsonl.gz | pluralign inspect - --ties half
        pluralign inspect rankings.jsonl --rename prompt=question --rename responses=statements
    """
    from pluralign.cli.render.analysis import inspection_page

    summary = pluralign.inspect(console.load_votes(data, load_options))
    console.emit(summary, inspection_page(summary), as_json)


@options.with_options(LoadOptions, EncodeOptions, EngineOptions)
def encode(
    data: options.Data,
    output: Annotated[Path, options.output_to("Output folder; a partial one is resumed.")],
    load_options: LoadOptions,
    encode_options: EncodeOptions,
    engine_options: EngineOptions,
    as_json: options.Json = False,
) -> None:
    """Precompute the text features of DATA, or of a folder of Parquet shards, for fit. Run again to resume.

    Examples:
        pluralign encode votes.parquet -o features
        pluralign fit votes.parquet -o ensemble --features features
        pluralign encode votes.parquet -o features --engine ray --workers 8 --encoder my-model --worker-gpus 1
        RAY_ADDRESS=head:6379 pluralign encode shards -o /shared/features --engine ray --json
    """
    from pluralign.cli.render.answers import shards_page

    texts = Path(data) if Path(data).is_dir() else console.load_votes(data, load_options)
    with console.progress_bar("Encoding texts") as progress:
        job = pluralign.encode(texts, output, encode_options, engine_options, progress=progress)
    console.emit(job, shards_page(job, "vectors of {:,} numbers"), as_json)


@options.with_options(LoadOptions, FitOptions, FinetuneOptions)
def fit(
    data: options.Data,
    output: Annotated[Path, options.output_to("Folder for the ensemble and for unfinished work.")],
    context: typer.Context,
    load_options: LoadOptions,
    fit_options: FitOptions,
    finetune_options: FinetuneOptions,
    raters: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of rater ids (one row per vote; not saved): fit members to raters, at the policy level.",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    config: options.Config = None,  # noqa: ARG001  # read before the other options
    save_config: options.SaveConfig = None,
) -> None:
    """Train an ensemble and evaluate it on held-out prompts. Run again to resume.

    Examples:
        pluralign fit votes.jsonl.gz -o ensemble
        pluralign fit demo -o town --method stagewise --variant printed --k 4
        pluralign fit votes.parquet -o soft --level policy --encoder smollm2 --json
        pluralign fit votes.jsonl -o soft --level policy --reference smollm2
        pluralign fit votes.jsonl -o voices --raters annotator
        pluralign fit votes.jsonl -o ensemble --k 4 --ties half --save-config run.toml
        pluralign fit --config run.toml -o again --seed 1
        pluralign fit votes.parquet -o tuned --pooling attention
        pluralign fit votes.parquet -o tuned --backbone meta-llama/Meta-Llama-3-8B-Instruct --lora
        accelerate launch -m pluralign fit votes.parquet -o tuned --backbone my-model
    """
    from pluralign.cli.render.results import FitWatch, fit_page
    from pluralign.ensemble.verdict import headline, main_evaluation

    check_applies(fit_options, finetune_options, raters=raters is not None)
    frozen = finetune_options.backbone is None and fit_options.pooling != "attention"
    prints, task = console.is_first_process(), "Encoding texts" if frozen else "Encoding and fine-tuning"
    if save_config is not None:
        refuse_foreign(save_config, options.CONFIG_MARK, overwrite=overwrite)
        toml = options.config_text(context, save_config)
    votes = (
        console.load_votes(data, load_options) if raters is None else console.rater_votes(data, raters, load_options)
    )
    with ExitStack() as until_fitted:
        progress = until_fitted.enter_context(console.progress_bar(task))
        watcher = until_fitted.enter_context(FitWatch()) if frozen and prints else None
        ensemble = pluralign.fit(
            votes,
            fit_options,
            finetuning=finetune_options,
            folder=output,
            overwrite=overwrite,
            progress=progress,
            watcher=watcher,
        )
    if prints:
        if save_config is not None:
            with atomic_write(save_config) as partial:
                partial.write_bytes(toml)
        own = {"weights": ensemble.weights.tolist(), "undecided": ensemble.undecided}
        counts = main_evaluation(ensemble.record)
        first = headline(counts, ensemble.record, str(output)) if counts else None
        result = {"folder": str(output), "headline": first, **ensemble.record.to_json(), **own}
        console.emit(result, fit_page(ensemble, str(output)), as_json)


@options.with_options(LoadOptions, RemoteOptions)
def evaluate(
    predictor: Annotated[
        str,
        typer.Argument(
            metavar="PREDICTOR",
            help="Ensemble folder, a transformers reward model (folder or hub id), a .jsonl, .csv or .parquet file of "
            "scores or probabilities, or personas:FILE or personas:NUMBER (with --model).",
        ),
    ],
    data: options.Data,
    load_options: LoadOptions,
    remote_options: RemoteOptions,
    against: Annotated[
        list[str], typer.Option(metavar="PREDICTOR", help="Compare with another predictor, pair by pair. Repeatable.")
    ] = [],  # noqa: B006
    group: options.Groups = ["length", "topic"],  # noqa: B006
    beta: Annotated[
        list[float], typer.Option(help="Also score the policy level at this regularisation strength. Repeatable.")
    ] = [],  # noqa: B006
    reference: Annotated[
        str | None,
        typer.Option(
            help="Reference policy: data (columns logprob_a and logprob_b), smollm2, a model folder or a hub id, or "
            "none (default: that of the fit)."
        ),
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Precomputed features from pluralign encode; skips encoding.")
    ] = None,
    raters: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of rater ids (one row per vote; not saved): also measure how well a rater's votes are "
            "predicted from the rater's own choices. The figures are saved in the ensemble folder.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Language model that judges as each persona; names as in generate.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Evaluate on a random sample of at most this many pairs, prompt by prompt.", min=1),
    ] = None,
    all_prompts: Annotated[
        bool, typer.Option("--all", help="Measure on training prompts too (default: left out). Scores are too good.")
    ] = False,
    as_json: options.Json = False,
    seed: options.Seed = 0,
) -> None:
    """Evaluate an ensemble, a reward model, a file of scores or personas on votes.

    Examples:
        pluralign evaluate ensemble other-votes.jsonl
        pluralign evaluate ensemble demo --json
        pluralign evaluate my-org/reward-model votes.jsonl --against ensemble
        pluralign evaluate scores.jsonl votes.jsonl --group length --group country
        pluralign evaluate ensemble votes.jsonl --beta 0.5 --reference smollm2
        pluralign evaluate ensemble single-votes.jsonl --raters worker_id
        pluralign evaluate personas:people.txt votes.jsonl --model smollm2 --limit 200 --against ensemble
    """
    from pluralign.cli.render.results import evaluation_page
    from pluralign.measuring.individuals import save_representation
    from pluralign.measuring.personas import find_personas
    from pluralign.measuring.predictors import find_predictor
    from pluralign.text.remote import language_model

    kinds = [find_predictor(name) for name in (predictor, *against)]
    if (model is None) == ("personas" in kinds):
        raise UsageError("personas:FILE and --model, the language model that judges, need each other.")
    if remote_options.base_url and model is None:
        raise UsageError("--base-url requires --model, the name of a model on that server.")
    judge = language_model(model, remote_options) if model else None
    concurrency = remote_options.concurrency if remote_options.base_url else 1
    sources = [
        find_personas(name, judge, concurrency) if kind == "personas" else name
        for name, kind in zip((predictor, *against), kinds, strict=True)
    ]
    if raters and kinds[0] != "ensemble":
        raise UsageError("--raters needs an ensemble folder: other predictors have no members to choose from.")
    of_raters = console.rater_votes(data, raters, load_options) if raters else None
    preferences = of_raters.preferences if of_raters else console.load_votes(data, load_options)
    with console.progress_bar("Judging pairs" if judge else "Encoding texts") as progress:
        evaluation = pluralign.evaluate(
            sources[0],
            preferences,
            against=sources[1:],
            groups=group,
            betas=beta,
            reference=reference,
            features=features,
            raters=of_raters,
            all_prompts=all_prompts,
            limit=limit,
            seed=seed,
            progress=progress,
        )
    console.note_left_out(evaluation.left_out)
    if evaluation.representation:
        save_representation(evaluation.representation, predictor)
    console.emit(evaluation, evaluation_page(evaluation, f"{predictor} on {preferences.name}"), as_json)
