"""Tuned policies: train one LoRA adapter of a language model for each member of an ensemble, through TRL (§2).

All members get the same prompts, seeds and steps, and every policy is evaluated on held-out prompts. Rewards are
standardised by the base's samples on the training prompts, r̃_j = (r_j − μ_j) / σ_j (``adapters.reward_scale``). This
makes members comparable, and one β fits all. Each policy maximises E[r̃_j] − β KL(π ‖ base).

A run resumes: finished members are not trained again, and all files are written atomically. The adapters are served by
vLLM or another server, not here.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.answering import adapters, policies
from pluralign.answering.answer import Answerer
from pluralign.answering.generate import load_prompts
from pluralign.answering.options import TuneOptions
from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import JsonLines
from pluralign.core.errors import DataError, UsageError
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, worse_than_chance
from pluralign.theory.intervals import clustered_interval
from pluralign.votes.prompts import Item, Prompt, PromptLike
from pluralign.votes.values import read_prompt

BASE_FILE, SAMPLES_FOLDER = "base.jsonl", "samples"
FEWEST_PROMPTS = 4
"""Two to train on and two held out; the spread between prompts needs two."""
FEWEST_PER_SIDE = 2
EXAMPLES = 3
"""Held-out prompts whose first responses, of the base and the policy, are stored in the manifest."""


@dataclass(frozen=True, kw_only=True)
class Tuning(policies.Manifest):
    """The manifest of a folder of policies, and what ``tune`` did."""

    folder: str
    bad_rows: int
    """Number of rows without a prompt."""
    resumed: int
    """Number of members that an earlier run had finished."""
    notes: list[str]
    seconds: float


def tune(
    ensemble: RewardEnsemble | str | os.PathLike[str],
    prompts: Sequence[PromptLike] | str | os.PathLike[str],
    model: str,
    output: str | os.PathLike[str],
    options: TuneOptions | None = None,
    *,
    members: Sequence[int] = (),
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
        ensemble: the rewards: an ensemble, or its folder, whose saved votes name the members.
        prompts: prompts, or their source (``load_prompts``).
        model: ``smollm2``, or the folder or hub id of a causal language model.
        output: folder of the policies. A folder with the same settings is resumed.
        options: how to tune; ``changes`` are its fields by name.
        members: members to tune to; by default all with weight.
        progress: called with the number of finished units (sampled prompts and optimiser steps) and their total.

    Reference: Rafailov et al., "Direct Preference Optimization" (2023); Shao et al., "DeepSeekMath" (2024) for GRPO;
    Liu et al., "Understanding R1-Zero-Like Training" (2025) for Dr. GRPO.
    """
    options = with_changes(options or TuneOptions(), changes)
    started, output = time.perf_counter(), Path(output)
    answerer = Answerer.of(ensemble)
    names, ensemble = {card.member: card.name for card in answerer.cards}, answerer.ensemble
    chosen = _chosen_members(ensemble, members)
    prompts, failures = load_prompts(prompts, limit=options.limit, seed=options.seed)
    _check_enough(prompts)
    manifest = policies.load_manifest(output, policies.run_settings(ensemble, prompts, model, options))
    finished = {policy.member for policy in manifest.members}
    remaining = {j: names.get(j, f"member {j}") for j in chosen if j not in finished}
    if remaining:
        adapters.check_packages()
        manifest = _tune_members(remaining, manifest, ensemble, prompts, output, options, progress)
    return Tuning(
        **vars(manifest),
        folder=str(output),
        bad_rows=len(failures),
        resumed=len(chosen) - len(remaining),
        notes=_notes(ensemble, [policy.member for policy in manifest.members]),
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
        which = f" that fit the model's context ({too_long:,} do not)" if too_long else ""
        needed = f"at least {FEWEST_PROMPTS} are needed: two to train on and two to evaluate on"
        raise DataError(f"there are {len(prompts)} distinct prompts{which}, but {needed}", remedy="give more prompts")


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


@dataclass(eq=False)
class Run:
    """One run: the base model, the prompts, the base's responses to them, and their standardised rewards."""

    ensemble: RewardEnsemble
    policy: adapters.Policy
    """The base model; while a member is evaluated with its adapter."""
    train: list[PromptLike]
    held_out: list[PromptLike]
    output: Path
    options: TuneOptions
    advance: Callable[[], None]
    """Called after each sampled prompt and each optimiser step."""

    @cached_property
    def base(self) -> adapters.Samples:
        """The base's responses to the training prompts, then to the held-out ones.

        They are JSON Lines of {prompt, held_out, responses, tokens}; stored prompts are not sampled again.
        """
        lines = JsonLines(self.output / BASE_FILE)
        stored = {Prompt(read_prompt(row["prompt"])).key: row for row in lines.rows()}
        samples: adapters.Samples = []
        for number, prompt in enumerate([*self.train, *self.held_out]):
            if (row := stored.get(Prompt(prompt).key)) is not None:
                samples.append([adapters.Response(*both) for both in zip(row["tokens"], row["responses"], strict=True)])
                self.advance()
                continue
            (responses,) = adapters.sample_responses(self.policy, [prompt], self.options, self.advance)
            samples.append(responses)
            held_out = number >= len(self.train)
            lines.append({"prompt": Prompt(prompt).json, "held_out": held_out, **adapters.as_columns(responses)})
        return samples

    @cached_property
    def scale(self) -> adapters.Scale:
        """Standardises rewards by the base's responses to the training prompts."""
        return adapters.reward_scale(self._raw_rewards(self.train, self.base[: len(self.train)]))

    @cached_property
    def train_rewards(self) -> FloatArray:
        """``(n_train, n_samples, k)``."""
        return self.rewards(self.train, self.base[: len(self.train)])

    @cached_property
    def held_out_rewards(self) -> FloatArray:
        """``(n_held_out, n_samples, k)``."""
        return self.rewards(self.held_out, self.base[len(self.train) :])

    def rewards(self, prompts: Sequence[PromptLike], samples: adapters.Samples) -> FloatArray:
        """Return the standardised rewards of responses by all members, ``(n_prompts, n_samples, k)``."""
        return self.scale(self._raw_rewards(prompts, samples))

    def _raw_rewards(self, prompts: Sequence[PromptLike], samples: adapters.Samples) -> FloatArray:
        items = [(prompt, one.text) for prompt, responses in zip(prompts, samples, strict=True) for one in responses]
        return self.ensemble.rewards(items).reshape(len(prompts), -1, self.ensemble.k)

    def record(self, too_long: int) -> policies.BaseRecord:
        """Return the figures of the base."""
        return policies.BaseRecord(
            name=policies.served_name(self.policy.name),
            prompts=len(self.train),
            held_out=len(self.held_out),
            too_long=too_long,
            base_rewards=self.held_out_rewards.mean(axis=(0, 1)).tolist(),
            base_tokens=adapters.mean_length(self.base[len(self.train) :]),
        )


def _tune_members(
    remaining: dict[int, str],
    manifest: policies.Manifest,
    ensemble: RewardEnsemble,
    prompts: Sequence[PromptLike],
    output: Path,
    options: TuneOptions,
    progress: Progress | None,
) -> policies.Manifest:
    """Sample the base, tune the remaining members one after the other, and return the finished manifest."""
    policy = adapters.Policy(str(manifest.settings["model"]))
    policy.check_ends()
    fitting = [prompt for prompt in prompts if policy.fits(prompt, options.max_new_tokens)]
    too_long = len(prompts) - len(fitting)
    _check_enough(fitting, too_long)
    train, held_out = split_prompts(fitting, options.held_out, options.seed)
    done, total = itertools.count(1), len(fitting) + len(remaining) * (options.steps + len(held_out))

    def advance() -> None:
        if progress:
            progress(next(done), total)

    run = Run(ensemble, policy, train, held_out, output, options, advance)
    manifest = replace(manifest, pluralign=__version__)
    manifest.save(output)
    for j in remaining:
        if not run.scale.spread[j] > 0:
            raise DataError(
                f"member {j} gives all sampled responses to a prompt the same reward, so nothing can be learned",
                remedy="sample more or longer responses, or name the other members with --member",
            )
    manifest = replace(manifest, base=run.record(too_long))
    for member, name in remaining.items():
        manifest = manifest.with_member(_tune_member(member, name, run), options.lora_rank)
        manifest.save(output)
    return manifest


def _tune_member(member: int, name: str, run: Run) -> policies.TunedPolicy:
    """Tune to one member, evaluate the policy, and save its adapter and samples. The policy ends without adapter."""
    started, policy, options = time.perf_counter(), run.policy, run.options

    def reward(items: Sequence[Item]) -> FloatArray:
        return run.scale(run.ensemble.rewards(items))[:, member]

    adapted = adapters.train_adapter(run, run.train_rewards[..., member], reward)
    policy.model = adapted
    after = adapters.sample_responses(policy, run.held_out, options, run.advance)
    log_prob, base_log_prob = adapters.log_probs(policy, run.held_out, after, options)
    rewards, before = run.rewards(run.held_out, after), run.base[len(run.train) :]
    own_before, own_after = run.held_out_rewards[..., member], rewards[..., member]
    path = policies.adapter_name(member)
    adapters.save_adapter(adapted, policies.served_name(policy.name), run.output / path)
    JsonLines(run.output / SAMPLES_FOLDER / f"{path}.jsonl").replace(
        {
            "prompt": Prompt(prompt).json,
            **adapters.as_columns(after[i]),
            "rewards": own_after[i].tolist(),
            "log_prob": log_prob[i].tolist(),
            "base_log_prob": base_log_prob[i].tolist(),
        }
        for i, prompt in enumerate(run.held_out)
    )
    policy.model = adapted.unload()
    difference = own_after.mean(axis=1) - own_before.mean(axis=1)
    gain = clustered_interval(difference, np.arange(len(run.held_out)), seed=options.seed)
    kl = adapters.sampled_kl(log_prob, base_log_prob)
    return policies.TunedPolicy(
        member=member,
        name=name,
        weight=float(run.ensemble.weights[member]),
        path=path,
        reward_before=float(own_before.mean()),
        reward_after=float(own_after.mean()),
        interval=(gain.low, gain.high),
        improved=gain.low > 0,
        kl=kl.mean,
        kl_standard_error=kl.standard_error,
        rewards=rewards.mean(axis=(0, 1)).tolist(),
        tokens=adapters.mean_length(after),
        seconds=time.perf_counter() - started,
        samples=[
            policies.ExampleAnswer(
                prompt=Prompt(run.held_out[i]).json,
                before=before[i][0].text,
                after=after[i][0].text,
                reward_before=float(own_before[i, 0]),
                reward_after=float(own_after[i, 0]),
            )
            for i in range(min(EXAMPLES, len(after)))
        ],
    )
