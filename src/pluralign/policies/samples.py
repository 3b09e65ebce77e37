"""Samples of a policy, token by token: drawing them, how likely they are, and the figures they give.

Decided here: what a policy's sample is, its KL to a reference, and how rewards are standardised and paired. Nothing is
trained; ``tuning`` trains on such samples and judges by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.answering.generate import prompt_seed
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.models.causal import LocalModel, token_log_probs
from pluralign.models.options import SamplingOptions
from pluralign.theory.intervals import Interval, clustered_interval
from pluralign.votes.prompts import PromptLike

Ids: TypeAlias = list[int]


@dataclass(frozen=True)
class Response:
    """One sampled response: its tokens, with the one that ends it where it ended by itself, and its text."""

    tokens: Ids
    text: str


Samples: TypeAlias = list[list[Response]]
"""As many responses to each of some prompts."""


# --- the policy -----------------------------------------------------------------------------------------------------


class Policy(LocalModel):
    """A causal language model that samples tokens and says how likely it finds them, with or without an adapter."""

    def check_ends(self) -> frozenset[int]:
        """Return the tokens that end a text; without any a policy could not learn when to stop."""
        if not self.ends or self.tokenizer.eos_token_id is None:
            remedy = "give its tokenizer an eos_token"
            raise DataError("the model has no token that ends a text", file=self.name, remedy=remedy)
        return frozenset(self.ends)

    def context(self, prompt: PromptLike, new: int) -> Ids:
        """Return the prompt's tokens up to where the assistant speaks; too long a prompt is a ``DataError``."""
        return list(map(int, self.prompt_tokens(prompt, new)[0]))

    def draw(self, prompt: PromptLike, n: int, options: SamplingOptions, at_once: int) -> list[Response]:
        """Return n responses, sampled with a generator of their own."""
        import torch

        ends, found = self.check_ends(), list[Ids]()
        tokens = self.prompt_tokens(prompt, options.max_new_tokens).to(self.model.device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(prompt_seed(prompt, options.seed))
            while len(found) < n:
                written = self.continuations(tokens, min(at_once, n - len(found)), options)
                found += [_up_to_the_end(row, ends) for row in written.tolist()]
        texts = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        return [Response(ids, text.strip()) for ids, text in zip(found, texts, strict=True)]

    def log_prob(self, context: Ids, responses: Sequence[Ids], temperature: float, at_once: int) -> FloatArray:
        """Return log π(response | context) summed over its tokens, ``(n_responses,)``."""
        import torch

        sums: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(responses), at_once):
                batch = responses[start : start + at_once]
                tokens = token_log_probs(self.model, [context] * len(batch), batch, temperature)
                sums += [float(log_probs.double().sum()) for log_probs in tokens]
        return np.array(sums)


def _up_to_the_end(ids: Ids, ends: frozenset[int]) -> Ids:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


# --- figures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """What standardises rewards: see ``reward_scale``."""

    mean: FloatArray
    """μ, ``(k,)``."""
    spread: FloatArray
    """σ, ``(k,)``."""

    def __call__(self, rewards: FloatArray) -> FloatArray:
        """Return (r − μ) / σ of ``(…, k)`` rewards; of a member without spread, 0."""
        known = self.spread > 0
        return np.where(known, (rewards - self.mean) / np.where(known, self.spread, 1.0), 0.0)


def reward_scale(rewards: npt.ArrayLike) -> Scale:
    """Return what standardises rewards, by samples y_1 … y_n of the base policy to each of some prompts X.

        r̃_j(x, y) = (r_j(x, y) − μ_j) / σ_j,   μ_j = mean of r_j(x, y_i) over X and i,   σ_j² = mean over X of s_j²(x),

    with s_j²(x) the unbiased variance of r_j among the samples to one prompt. So 0 is what the base earns, and 1
    what separates its answers to a prompt; how much prompts differ, which no policy can change, does not count.

    Args:
        rewards: ``(n_prompts, n_samples, k)``.

    Example:
        >>> scale = reward_scale([[[0.0], [2.0]], [[10.0], [12.0]]])
        >>> scale.mean, scale.spread.round(4), scale(np.array([6.0]))
        (array([6.]), array([1.4142]), array([0.]))
    """
    r = np.asarray(rewards, dtype=np.float64)
    spread = np.sqrt(r.var(axis=1, ddof=1).mean(axis=0))
    return Scale(r.mean(axis=(0, 1)), np.where(spread > 1e-9 * np.abs(r).max(), spread, 0.0))


def sampled_kl(log_prob: npt.ArrayLike, reference_log_prob: npt.ArrayLike) -> Interval:
    """Estimate KL(π ‖ π_ref) per response, in nats, from responses that π sampled.

        KL ≈ mean over prompts x and samples y ~ π(· | x) of  Σ_t log π(y_t | x, y_<t) − log π_ref(y_t | x, y_<t),

    the sum over all tokens of the response, the one that ends it too. Unbiased; it can fall below 0 by chance. Both are
    read at the temperature of sampling, and responses are cut at ``max_new_tokens`` as when they were sampled.

    Args:
        log_prob: log π(y | x), ``(n_prompts, n_samples)``.
        reference_log_prob: log π_ref(y | x) of the same responses.

    Returns:
        The mean, with its interval and standard error by prompt.

    Example:
        >>> sampled_kl([[-1.0, -2.0], [-1.5, -1.0]], [[-1.5, -2.0], [-2.5, -1.5]]).mean
        0.5
    """
    ratio = np.asarray(log_prob, dtype=np.float64) - np.asarray(reference_log_prob, dtype=np.float64)
    return clustered_interval(ratio.ravel(), np.repeat(np.arange(len(ratio)), ratio.shape[1]))


def best_and_worst(rewards: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return pairs of responses to one prompt: best and worst, second best and second worst, … for the best quarter.

    Example:
        >>> best_and_worst([0.1, 0.9, 0.5, 0.3, 0.2, 0.4, 0.7, 0.6])
        [(1, 0), (6, 4)]
        >>> best_and_worst([0.5, 0.5])
        []
    """
    r = np.asarray(rewards, dtype=np.float64)
    order = np.argsort(-r, kind="stable")
    ends = [(int(order[i]), int(order[-1 - i])) for i in range(max(1, len(r) // 4))]
    return [(best, worst) for best, worst in ends if r[best] > r[worst]]
