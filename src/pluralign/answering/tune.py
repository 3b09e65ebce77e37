"""Tuned policies: train one LoRA adapter of a language model for each member of an ensemble, through TRL (§2).

All members get the same prompts, seeds and steps, and every policy is evaluated on held-out prompts. Rewards are
standardised by the base's samples on the training prompts, r̃_j = (r_j − μ_j) / σ_j (``samples.reward_scale``). This
makes members comparable, and one β fits all. Each policy maximises E[r̃_j] − β KL(π ‖ base).

A run resumes: finished members are not trained again, and all files are written atomically. The adapters are served by
vLLM or another server, not here.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.answering.adapters import (
    Policy,
    Response,
    Samples,
    Scale,
    TrainingData,
    as_columns,
    check_packages,
    log_probs,
    mean_length,
    reward_scale,
    sample_responses,
    sample_rewards,
    sampled_kl,
    save_adapter,
    train_adapter,
)
from pluralign.answering.generate import load_prompts
from pluralign.answering.options import TuneOptions
from pluralign.answering.policies import (
    BaseRecord,
    ExampleAnswer,
    Manifest,
    Serving,
    TunedPolicy,
    load_manifest,
    run_settings,
    served_name,
)
from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import JsonLines
from pluralign.core.errors import DataError, UsageError
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, worse_than_chance
from pluralign.theory.intervals import clustered_interval
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import read_prompt

# --- The base model's responses to all prompts, sampled once for all members, and the scale of rewards that they give.


@dataclass(frozen=True, eq=False)
class BaseSamples:
    """The prompts, the base's responses to them, and their standardised rewards by all members."""

    train: list[PromptLike]
    held_out: list[PromptLike]
    train_samples: Samples
    held_out_samples: Samples
    train_rewards: FloatArray
    """``(n_train, n_samples, k)``."""
    held_out_rewards: FloatArray
    """``(n_held_out, n_samples, k)``."""
    scale: Scale


def sample_base(
    policy: Policy,
    ensemble: RewardEnsemble,
    train: list[PromptLike],
    held_out: list[PromptLike],
    file: Path,
    options: TuneOptions,
    advance: Callable[[], None],
) -> BaseSamples:
    """Sample the base's responses to all prompts, and standardise rewards by the responses to the training prompts.

    Args:
        policy: the base model, without an adapter.
        ensemble: the rewards.
        train: training prompts.
        held_out: held-out prompts.
        file: JSON Lines of {prompt, held_out, responses, tokens}; stored prompts are not sampled again.
        options: number of responses per prompt, and how to sample them.
        advance: called after each prompt.
    """
    samples = _resumed_samples(policy, train, held_out, file, options, advance)
    train_samples, held_out_samples = samples[: len(train)], samples[len(train) :]
    rewards = sample_rewards(ensemble, train, train_samples)
    scale = reward_scale(rewards)
    return BaseSamples(
        train=train,
        held_out=held_out,
        train_samples=train_samples,
        held_out_samples=held_out_samples,
        train_rewards=scale(rewards),
        held_out_rewards=scale(sample_rewards(ensemble, held_out, held_out_samples)),
        scale=scale,
    )


def _resumed_samples(
    policy: Policy,
    train: list[PromptLike],
    held_out: list[PromptLike],
    file: Path,
    options: TuneOptions,
    advance: Callable[[], None],
) -> Samples:
    lines = JsonLines(file)
    stored = {Prompt(read_prompt(row["prompt"])).key: row for row in lines.rows()}
    samples: Samples = []
    for prompt, is_held_out in [*((prompt, False) for prompt in train), *((prompt, True) for prompt in held_out)]:
        if (row := stored.get(Prompt(prompt).key)) is not None:
            samples.append([Response(*both) for both in zip(row["tokens"], row["responses"], strict=True)])
            advance()
            continue
        (responses,) = sample_responses(policy, [prompt], options, advance)
        samples.append(responses)
        lines.append({"prompt": Prompt(prompt).json, "held_out": is_held_out, **as_columns(responses)})
    return samples


BASE_FILE, SAMPLES_FOLDER = "base.jsonl", "samples"
FEWEST_PROMPTS = 4
"""Two to train on and two held out; the spread between prompts needs two."""
FEWEST_PER_SIDE = 2
EXAMPLES = 3
"""Held-out prompts whose first responses, of the base and the policy, are stored in the manifest."""


@dataclass(frozen=True)
class Tuning:
    """The contents of a folder of tuned policies."""

    folder: str
    model: str
    method: str
    prompts: int
    """Number of training prompts."""
    held_out: int
    """Number of held-out prompts."""
    too_long: int
    """Number of prompts left out: together with a response they exceed the model's context."""
    bad_rows: int
    """Number of rows without a prompt."""
    members: list[TunedPolicy]
    matrix: list[list[float]]
    """Mean held-out reward of policy i by member j, over the tuned members, standardised."""
    base: list[float]
    """The same of the base."""
    base_tokens: float
    """Mean length of the base's responses."""
    resumed: int
    """Number of members that an earlier run had finished."""
    serving: Serving
    notes: list[str]
    seconds: float


def tune(
    ensemble: RewardEnsemble,
    prompts: Sequence[PromptLike] | str | os.PathLike[str],
    model: str,
    output: str | os.PathLike[str],
    options: TuneOptions | None = None,
    *,
    members: Sequence[int] = (),
    names: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> Tuning:
    """Tune a language model to each member of an ensemble, and evaluate the policies on held-out prompts.

    ``dpo``: n responses to each training prompt are sampled from the base, once for all members. A member's pairs are
    its best and its worst response, its second best and second worst, and so on for the top quarter. With log-ratios
    ρ = log π − log π_base of the chosen (+) and the rejected (−) response, the loss is −log σ(β (ρ₊ − ρ₋)).

    ``grpo``: each step samples n responses to each prompt of a batch from the policy itself. A response's advantage is
    its r̃ less the mean of its group. Losses are summed over tokens (Dr. GRPO), so that β penalises KL per response.

    ``dpo`` is the default. It samples once for all members instead of at every step, and its pairs are the most
    different of n samples, so few steps suffice. ``grpo`` learns from its own responses and can improve further in long
    runs.

    Args:
        ensemble: the rewards.
        prompts: prompts, or their source (``load_prompts``).
        model: ``smollm2``, or the folder or hub id of a causal language model.
        output: folder of the policies. A folder with the same settings is resumed.
        options: how to tune; ``changes`` are its fields by name.
        members: members to tune to; by default all with weight.
        names: names of all members.
        limit: maximum number of prompts, drawn by the seed.
        progress: called with the number of finished units (sampled prompts and optimiser steps) and their total.

    Reference: Rafailov et al., "Direct Preference Optimization" (2023); Shao et al., "DeepSeekMath" (2024) for GRPO;
    Liu et al., "Understanding R1-Zero-Like Training" (2025) for Dr. GRPO.
    """
    options = with_changes(options or TuneOptions(), changes)
    started, output = time.perf_counter(), Path(output)
    chosen = _chosen_members(ensemble, members)
    bad_rows = 0
    if isinstance(prompts, str | os.PathLike):
        prompts, failures = load_prompts(prompts, limit=limit, seed=options.seed)
        bad_rows = len(failures)
    else:
        prompts = list(dict.fromkeys(prompts))[:limit]
    _check_enough(prompts)
    manifest = load_manifest(output, run_settings(ensemble, prompts, model, options))
    finished = {policy.member for policy in manifest.members}
    remaining = {j: names[j] if names else f"member {j}" for j in chosen if j not in finished}
    if remaining:
        check_packages()
        manifest = _tune_members(remaining, manifest, ensemble, prompts, model, output, options, progress)
    assert manifest.base is not None and manifest.serving is not None  # noqa: S101, PT018 - there is a finished member
    tuned = [policy.member for policy in manifest.members]
    return Tuning(
        folder=str(output),
        model=model,
        method=options.method,
        prompts=manifest.base.prompts,
        held_out=manifest.base.held_out,
        too_long=manifest.base.too_long,
        bad_rows=bad_rows,
        members=list(manifest.members),
        matrix=[[policy.rewards[j] for j in tuned] for policy in manifest.members],
        base=[manifest.base.base_rewards[j] for j in tuned],
        base_tokens=manifest.base.base_tokens,
        resumed=len(chosen) - len(remaining),
        serving=manifest.serving,
        notes=_notes(ensemble, tuned),
        seconds=time.perf_counter() - started,
    )


# --- members and prompts ----------------------------------------------------------------------------------------------


def _chosen_members(ensemble: RewardEnsemble, members: Sequence[int]) -> list[int]:
    for j in members:
        if not 0 <= j < ensemble.k:
            raise UsageError(f"members are numbered from 0 to {ensemble.k - 1}; there is no member {j}.")
    return sorted(set(members)) or np.flatnonzero(ensemble.weights > NEGLIGIBLE_WEIGHT).tolist()


def _check_enough(prompts: Sequence[PromptLike], too_long: int = 0) -> None:
    if len(prompts) < FEWEST_PROMPTS:
        given = f"there are {len(prompts)} distinct prompts"
        if too_long:
            given += f" that fit the model's context ({too_long:,} do not)"
        problem = f"{given}, but at least {FEWEST_PROMPTS} are needed: two to train on and two to evaluate on"
        raise DataError(problem, remedy="give more prompts")


def split_prompts(
    prompts: Sequence[PromptLike], held_out: float, seed: int
) -> tuple[list[PromptLike], list[PromptLike]]:
    """Return the training prompts and the held-out ones: the share with the smallest hashes, at least two each.

    Example:
        >>> train, held_out = split_prompts(["Tea?", "Rum?", "Milk?", "Water?", "Beer?"], 0.25, seed=0)
        >>> len(train), len(held_out), set(train) & set(held_out)
        (3, 2, set())
    """
    n = min(max(round(held_out * len(prompts)), FEWEST_PER_SIDE), len(prompts) - FEWEST_PER_SIDE)
    smallest = set(sorted(prompts, key=lambda prompt: Prompt(prompt).hash(seed))[:n])
    return [one for one in prompts if one not in smallest], [one for one in prompts if one in smallest]


def _notes(ensemble: RewardEnsemble, tuned: Sequence[int]) -> list[str]:
    figures = ensemble.record.evaluation.members if ensemble.record.evaluation else []
    return [
        f"member {j} is worse than chance (disagreement {figures[j].disagreement:.3f}): reconsider serving its policy"
        for j in tuned
        if j < len(figures) and worse_than_chance(figures[j].disagreement, ensemble.weights[j])
    ]


# --- tuning -----------------------------------------------------------------------------------------------------------


def _tune_members(
    remaining: dict[int, str],
    manifest: Manifest,
    ensemble: RewardEnsemble,
    prompts: Sequence[PromptLike],
    model: str,
    output: Path,
    options: TuneOptions,
    progress: Progress | None,
) -> Manifest:
    """Sample the base, tune the remaining members one after the other, and return the finished manifest."""
    policy = Policy(model)
    policy.check_ends()
    fitting = [prompt for prompt in prompts if policy.fits(prompt, options.max_new_tokens)]
    too_long = len(prompts) - len(fitting)
    _check_enough(fitting, too_long)
    train, held_out = split_prompts(fitting, options.held_out, options.seed)
    advance = _counter(progress, len(fitting) + len(remaining) * (options.steps + len(held_out)))
    manifest = replace(manifest, pluralign=__version__)
    manifest.save(output)
    base = sample_base(policy, ensemble, train, held_out, output / BASE_FILE, options, advance)
    _check_spread(base.scale, remaining)
    record = BaseRecord(
        base=served_name(model),
        prompts=len(train),
        held_out=len(held_out),
        too_long=too_long,
        scale={"mean": base.scale.mean.tolist(), "spread": base.scale.spread.tolist()},
        base_rewards=base.held_out_rewards.mean(axis=(0, 1)).tolist(),
        base_tokens=mean_length(base.held_out_samples),
    )
    manifest = replace(manifest, base=record)
    for member, name in remaining.items():
        tuned = _tune_member(member, name, policy, ensemble, base, output, options, advance)
        manifest = manifest.with_member(tuned, options.lora_rank)
        manifest.save(output)
    return manifest


def _tune_member(
    member: int,
    name: str,
    policy: Policy,
    ensemble: RewardEnsemble,
    base: BaseSamples,
    output: Path,
    options: TuneOptions,
    advance: Callable[[], None],
) -> TunedPolicy:
    """Tune to one member, evaluate the policy, and save its adapter and samples. ``policy`` ends without adapter."""
    started = time.perf_counter()
    data = TrainingData(
        base.train,
        base.train_samples,
        base.train_rewards[..., member],
        lambda items: base.scale(ensemble.rewards(items))[:, member],
    )
    adapted = train_adapter(policy, data, options, advance)
    policy.model = adapted
    after = sample_responses(policy, base.held_out, options, advance)
    log_prob, base_log_prob = log_probs(policy, base.held_out, after, options)
    rewards = base.scale(sample_rewards(ensemble, base.held_out, after))
    own_before, own_after = base.held_out_rewards[..., member], rewards[..., member]
    path = f"member-{member}"
    save_adapter(adapted, served_name(policy.name), output / path)
    samples_file = JsonLines(output / SAMPLES_FOLDER / f"{path}.jsonl")
    samples_file.replace(
        {
            "prompt": Prompt(prompt).json,
            **as_columns(after[i]),
            "rewards": own_after[i].tolist(),
            "log_prob": log_prob[i].tolist(),
            "base_log_prob": base_log_prob[i].tolist(),
        }
        for i, prompt in enumerate(base.held_out)
    )
    policy.model = adapted.unload()
    gain = clustered_interval(
        own_after.mean(axis=1) - own_before.mean(axis=1), np.arange(len(base.held_out)), seed=options.seed
    )
    kl = sampled_kl(log_prob, base_log_prob)
    return TunedPolicy(
        member=member,
        name=name,
        weight=float(ensemble.weights[member]),
        path=path,
        reward_before=float(own_before.mean()),
        reward_after=float(own_after.mean()),
        interval=(gain.low, gain.high),
        improved=gain.low > 0,
        kl=kl.mean,
        kl_standard_error=kl.standard_error,
        rewards=rewards.mean(axis=(0, 1)).tolist(),
        tokens=mean_length(after),
        seconds=time.perf_counter() - started,
        samples=[
            ExampleAnswer(
                prompt=Prompt(base.held_out[i]).json,
                before=base.held_out_samples[i][0].text,
                after=after[i][0].text,
                reward_before=float(own_before[i, 0]),
                reward_after=float(own_after[i, 0]),
            )
            for i in range(min(EXAMPLES, len(after)))
        ],
    )


def _check_spread(scale: Scale, members: Collection[int]) -> None:
    for j in members:
        if not scale.spread[j] > 0:
            raise DataError(
                f"member {j} gives all sampled responses to a prompt the same reward, so nothing can be learned",
                remedy="sample more or longer responses, or name the other members with --member",
            )


def _counter(progress: Progress | None, total: int) -> Callable[[], None]:
    """Return a function that reports one more finished unit: a sampled prompt or an optimiser step."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    return advance
