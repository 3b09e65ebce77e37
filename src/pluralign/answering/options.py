"""The options of ``tune``, which trains one policy per member."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pluralign.core.errors import UsageError
from pluralign.core.options import check_choices, check_seed, option

PolicyMethod: TypeAlias = Literal["dpo", "grpo"]

MAX_LORA_RANK = 512
"""Largest rank that vLLM serves."""


@dataclass(frozen=True)
class TuneOptions:
    """How a policy is tuned to a member."""

    method: PolicyMethod = option(
        "dpo", "dpo: train on pairs of the best and worst samples. grpo: train on the reward itself."
    )
    beta: float = option(0.1, "KL penalty per nat of KL to the base, in standard deviations of reward.")
    steps: int = option(100, "Optimiser steps per member.")
    batch_size: int = option(8, "Pairs per step (dpo), or prompts per step (grpo).")
    samples: int = option(8, "Responses per prompt: from the base, per group of grpo, and in the evaluation.")
    lora_rank: int = option(16, "Rank of the LoRA adapters.")
    learning_rate: float = option(1e-4, "Peak learning rate; warm-up, then cosine decay.")
    temperature: float = option(1.0, "Sampling temperature, in training and evaluation.")
    max_new_tokens: int = option(128, "Maximum length of a response, in tokens.")
    held_out: float = option(0.25, "Share of the prompts held out for the evaluation.")
    micro_batch: int = option(8, "Maximum responses per forward pass; lower it to save memory.")
    limit: int | None = option(None, "Use a random sample of this many prompts.")
    seed: int = option(0, "Random seed; the same for all members.")

    def __post_init__(self) -> None:
        check_choices(self, {"method": PolicyMethod})
        for name in ("beta", "steps", "batch_size", "lora_rank", "learning_rate", "max_new_tokens", "micro_batch"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if self.lora_rank > MAX_LORA_RANK:
            raise UsageError(f"lora_rank must be at most {MAX_LORA_RANK}, the limit of vLLM, not {self.lora_rank}.")
        if self.samples < 2:
            raise UsageError(f"samples must be at least 2, so that responses can be compared, not {self.samples}.")
        if not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out must be between 0 and 1, not {self.held_out:g}.")
        check_seed(self.seed)
