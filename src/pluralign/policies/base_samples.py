"""The base model's responses to all prompts, sampled once for all members, and the scale of rewards that they give.

Each prompt is one line of a file. A killed run resumes from that file and draws the same responses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import JsonLines
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.policies.options import TuneOptions
from pluralign.policies.samples import (
    Policy,
    Response,
    Samples,
    Scale,
    as_columns,
    reward_scale,
    sample_responses,
    sample_rewards,
)
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import read_prompt


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
