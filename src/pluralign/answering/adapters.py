"""TRL trainers: train one LoRA adapter by DPO or GRPO, and save it.

``train_adapter`` does not change the random state of the caller, prints nothing, and leaves no files.
"""

import gc
import importlib
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.answering.generate import prompt_seed
from pluralign.answering.options import TuneOptions
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_folder
from pluralign.core.processes import launched_process
from pluralign.text.causal import LocalModel, token_log_probs
from pluralign.text.loading import quiet_transformers, random_states_restored, sort_targets
from pluralign.text.options import SamplingOptions
from pluralign.theory.intervals import Interval, clustered_interval
from pluralign.votes.prompts import Item, Prompt, PromptLike, plain_prompt

if TYPE_CHECKING:
    from pluralign.answering.tune import Run

# --- Responses sampled from a policy: drawing them, their log-probabilities, and the figures computed from them.


Ids: TypeAlias = list[int]


@dataclass(frozen=True)
class Response:
    """One sampled response: its tokens, with the end token unless it was cut off, and its text."""

    tokens: Ids
    text: str


Samples: TypeAlias = list[list[Response]]
"""Responses to several prompts, the same number per prompt."""


# --- sampling ---------------------------------------------------------------------------------------------------------


class Policy(LocalModel):
    """A causal language model that samples responses and computes their log-probabilities, with or without adapter."""

    def check_ends(self) -> frozenset[int]:
        """Return the end tokens.

        Raises:
            DataError: there is none, so a policy could not learn when to stop.
        """
        if not self.ends or self.tokenizer.eos_token_id is None:
            remedy = "give its tokenizer an eos_token"
            raise DataError("the model has no end token", file=self.name, remedy=remedy)
        return frozenset(self.ends)

    def context(self, prompt: PromptLike, new: int) -> Ids:
        """Return the tokens of a prompt, up to the start of the assistant's turn.

        Raises:
            DataError: the prompt and ``new`` more tokens exceed the model's context.
        """
        return list(map(int, self.prompt_tokens(prompt, new)[0]))

    def fits(self, prompt: PromptLike, new: int) -> bool:
        """Return whether the prompt and ``new`` more tokens fit the model's context."""
        try:
            self.context(prompt, new)
        except DataError:
            return False
        return True

    def draw(self, prompt: PromptLike, n: int, options: SamplingOptions, at_once: int) -> list[Response]:
        """Sample n responses to a prompt; the random numbers depend only on the prompt and the seed.

        Args:
            prompt: a text or a chat.
            n: number of responses.
            options: temperature, length and seed.
            at_once: maximum batch size. The responses depend on it.
        """
        import torch

        ends, sampled = self.check_ends(), list[Ids]()
        tokens = self.prompt_tokens(prompt, options.max_new_tokens).to(self.model.device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(prompt_seed(prompt, options.seed))
            while len(sampled) < n:
                continuations = self.continuations(tokens, min(at_once, n - len(sampled)), options)
                sampled += [_up_to_end_token(row, ends) for row in continuations.tolist()]
        texts = self.tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return [Response(ids, text.strip()) for ids, text in zip(sampled, texts, strict=True)]

    def log_prob(self, context: Ids, responses: Sequence[Ids], temperature: float, at_once: int) -> FloatArray:
        """Return log π(response | context), summed over the tokens, ``(n_responses,)``."""
        import torch

        sums: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(responses), at_once):
                batch = responses[start : start + at_once]
                tokens = token_log_probs(self.model, [context] * len(batch), batch, temperature)
                sums += [float(log_probs.double().sum()) for log_probs in tokens]
        return np.array(sums)


def _up_to_end_token(ids: Ids, ends: frozenset[int]) -> Ids:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


@contextmanager
def out_of_memory_advice(micro_batch: int) -> Iterator[None]:
    """Turn torch's out-of-memory error into a ``DataError`` that names a smaller --micro-batch."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        remedy = f"run the same command with --micro-batch {max(1, micro_batch // 2)} or a smaller model"
        raise DataError(f"memory ran out with {micro_batch} responses per batch", remedy=remedy) from None


# --- samples to several prompts ---------------------------------------------------------------------------------------


def sample_responses(
    policy: Policy, prompts: Sequence[PromptLike], options: TuneOptions, advance: Callable[[], None]
) -> Samples:
    """Sample responses to each prompt; ``advance`` is called after each prompt."""
    sampling = SamplingOptions(
        temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=options.seed
    )
    samples = []
    with out_of_memory_advice(options.micro_batch):
        for prompt in prompts:
            samples.append(policy.draw(prompt, options.samples, sampling, max(options.micro_batch, 2)))
            advance()
    return samples


def log_probs(
    policy: Policy, prompts: Sequence[PromptLike], samples: Samples, options: TuneOptions
) -> tuple[FloatArray, FloatArray]:
    """Return log π and log π_base of the samples, each ``(n_prompts, n_samples)``, for a policy with an adapter."""
    own, base = [], []
    for prompt, responses in zip(prompts, samples, strict=True):
        context = policy.context(prompt, options.max_new_tokens)
        tokens = [response.tokens for response in responses]
        own.append(policy.log_prob(context, tokens, options.temperature, options.micro_batch))
        with policy.model.disable_adapter():
            base.append(policy.log_prob(context, tokens, options.temperature, options.micro_batch))
    return np.array(own), np.array(base)


def as_columns(responses: Sequence[Response]) -> dict[str, list[Any]]:
    """Return the texts and tokens of the responses to one prompt, as JSON Lines files store them."""
    return {
        "responses": [response.text for response in responses],
        "tokens": [response.tokens for response in responses],
    }


def mean_length(samples: Samples) -> float:
    """Return the mean number of tokens per response."""
    return float(np.mean([len(response.tokens) for responses in samples for response in responses]))


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The mean and spread that standardise each member's rewards; see ``reward_scale``."""

    mean: FloatArray
    """μ, ``(k,)``."""
    spread: FloatArray
    """σ, ``(k,)``."""

    def __call__(self, rewards: FloatArray) -> FloatArray:
        """Return (r − μ) / σ of ``(…, k)`` rewards; 0 for a member with σ = 0."""
        varies = self.spread > 0
        return np.where(varies, (rewards - self.mean) / np.where(varies, self.spread, 1.0), 0.0)


def reward_scale(rewards: npt.ArrayLike) -> Scale:
    """Return the scale that standardises rewards, from samples y_1 … y_n of the base to each prompt x in X.

        r̃_j(x, y) = (r_j(x, y) − μ_j) / σ_j,   μ_j = mean of r_j(x, y_i) over X and i,   σ_j² = mean over X of s_j²(x),

    where s_j²(x) is the unbiased variance of r_j among the samples to one prompt. The base has mean reward 0, and its
    responses to one prompt have a standard deviation of 1. Differences between prompts do not count: no policy can
    change them.

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
    """Estimate KL(π ‖ π_ref) per response, in nats, from responses sampled from π.

        KL ≈ mean over prompts x and samples y ~ π(· | x) of  Σ_t log π(y_t | x, y_<t) − log π_ref(y_t | x, y_<t),

    where the sum runs over all tokens of the response, including the end token. The estimate is unbiased and can be
    below 0 by chance. Both log-probabilities are taken at the sampling temperature, and responses end at
    ``max_new_tokens`` as they did in sampling.

    Args:
        log_prob: log π(y | x), ``(n_prompts, n_samples)``.
        reference_log_prob: log π_ref(y | x) of the same responses.

    Returns:
        The mean, with its interval and standard error, clustered by prompt.

    Example:
        >>> sampled_kl([[-1.0, -2.0], [-1.5, -1.0]], [[-1.5, -2.0], [-2.5, -1.5]]).mean
        0.5
    """
    ratio = np.asarray(log_prob, dtype=np.float64) - np.asarray(reference_log_prob, dtype=np.float64)
    return clustered_interval(ratio.ravel(), np.repeat(np.arange(len(ratio)), ratio.shape[1]))


def best_and_worst(rewards: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return pairs of responses to one prompt: best and worst, second best and second worst, …, for the top quarter.

    Pairs with equal rewards are left out.

    Example:
        >>> best_and_worst([0.1, 0.9, 0.5, 0.3, 0.2, 0.4, 0.7, 0.6])
        [(1, 0), (6, 4)]
        >>> best_and_worst([0.5, 0.5])
        []
    """
    r = np.asarray(rewards, dtype=np.float64)
    order = np.argsort(-r, kind="stable")
    pairs = [(int(order[i]), int(order[-1 - i])) for i in range(max(1, len(r) // 4))]
    return [(best, worst) for best, worst in pairs if r[best] > r[worst]]


WARM_UP_SHARE = 0.1
"""Share of the steps in which the learning rate rises."""
RewardFunction: TypeAlias = Callable[[Sequence[Item]], FloatArray]
"""Takes (prompt, response) items; returns one standardised reward per item."""


def check_packages() -> None:
    """Check that the packages are installed and that there is one device.

    Raises:
        MissingExtraError: a package is missing.
        UsageError: there are several GPUs, or a launcher started several processes.
    """
    for package in ("torch", "transformers", "peft", "trl", "datasets"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise MissingExtraError(package, "finetune", "tuning a policy") from None
    import torch

    if launched_process().count > 1 or torch.cuda.device_count() > 1:
        raise UsageError(
            "tune works on one device: set CUDA_VISIBLE_DEVICES to one GPU and start it without a launcher; "
            "other members can be tuned on other GPUs with --member, each into a folder of its own."
        )


def train_adapter(run: "Run", rewards: FloatArray, reward: RewardFunction) -> Any:
    """Add a fresh LoRA adapter to the base model and train it.

    Args:
        run: the base model without an adapter, the training prompts, the base's responses and the options.
        rewards: one member's standardised rewards of these responses, ``(n_prompts, n_samples)``.
        reward: the member's reward of new responses.

    Returns:
        A ``peft.PeftModel`` in evaluation mode. Its ``unload`` gives the base model back.
    """
    import torch

    with (
        quiet_trainers(),
        random_states_restored(),
        out_of_memory_advice(run.options.micro_batch),
        tempfile.TemporaryDirectory() as scratch,
    ):
        trainer = (
            dpo_trainer(run, rewards, scratch) if run.options.method == "dpo" else grpo_trainer(run, reward, scratch)
        )
        trainer.remove_callback(importlib.import_module("transformers").PrinterCallback)  # stdout is for results
        trainer.train()
        adapted = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    adapted.gradient_checkpointing_disable()
    adapted.config.use_cache = True
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return adapted.eval()


def dpo_trainer(run: "Run", rewards: FloatArray, scratch: str) -> Any:
    """Return a TRL trainer for DPO on the pairs of ``best_and_worst``."""
    trl: Any = importlib.import_module("trl")
    rows = []
    for prompt, responses, of_prompt in zip(run.train, run.base[: len(run.train)], rewards, strict=True):
        context = run.policy.context(prompt, run.options.max_new_tokens)
        for best, worst in best_and_worst(of_prompt):
            chosen, rejected = responses[best].tokens, responses[worst].tokens
            rows.append({"prompt_ids": context, "chosen_ids": chosen, "rejected_ids": rejected})
    batch = min(run.options.batch_size, len(rows))

    class TokenPairs(trl.DPOTrainer):  # type: ignore[misc]
        """DPO on the sampled tokens. From texts, TRL would add an end token also to responses that were cut off."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    arguments = _arguments(run.options, scratch, batch, max(1, run.options.micro_batch // 2))
    return TokenPairs(args=trl.DPOConfig(**arguments, max_length=None), **_model_and_data(run, rows))


def grpo_trainer(run: "Run", reward: RewardFunction, scratch: str) -> Any:
    """Return a TRL trainer for Dr. GRPO on the member's standardised reward."""
    trl: Any = importlib.import_module("trl")
    chat, options = run.policy.tokenizer.chat_template is not None, run.options

    def rewards(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] if chat else completion for completion in completions]
        items = [(run.train[i], text.strip()) for i, text in zip(index, texts, strict=True)]
        return [float(value) for value in reward(items)]

    rows = [
        {"prompt": Prompt(prompt).messages if chat else f"{plain_prompt(prompt)}\n\n", "index": index}
        for index, prompt in enumerate(run.train)
    ]
    batch = min(options.batch_size, len(rows)) * options.samples
    args = trl.GRPOConfig(
        **_arguments(options, scratch, batch, options.micro_batch),
        num_generations=options.samples,
        max_completion_length=options.max_new_tokens,
        temperature=options.temperature,
        loss_type="dr_grpo",
        scale_rewards="none",  # they are standardised already
        remove_unused_columns=False,
    )
    return trl.GRPOTrainer(args=args, reward_funcs=rewards, **_model_and_data(run, rows))


def save_adapter(adapted: Any, base: str, folder: Path) -> None:
    """Write an adapter in the format of ``PeftModel.from_pretrained`` and vLLM, in one atomic write."""
    adapted.peft_config["default"].base_model_name_or_path = base
    sort_targets(adapted)
    with atomic_folder(folder) as new:
        with quiet_trainers():
            adapted.save_pretrained(new, save_embedding_layers=False)
        (new / "README.md").unlink(missing_ok=True)  # an empty model card
        for path in new.iterdir():
            path.chmod(0o644)


@contextmanager
def quiet_trainers() -> Iterator[None]:
    """Silence TRL and the libraries it calls within the block: only errors are logged, and no warnings are shown."""
    with quiet_transformers(), warnings.catch_warnings(), ExitStack() as after:
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, ("trl", "accelerate", "peft", "datasets")):
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def _model_and_data(run: "Run", rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a trainer that name the model, the adapter, the data and the progress callback."""
    peft, datasets = importlib.import_module("peft"), importlib.import_module("datasets")
    transformers: Any = importlib.import_module("transformers")

    class StepCallback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.advance()

    adapter = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=run.options.lora_rank,
        lora_alpha=2 * run.options.lora_rank,
        lora_dropout=0.0,
        target_modules="all-linear",  # all but the head, which TRL does not train and vLLM does not serve
    )
    return {
        "model": run.policy.model,
        "processing_class": run.policy.tokenizer,
        "train_dataset": datasets.Dataset.from_list(rows),
        "peft_config": adapter,
        "callbacks": [StepCallback()],
    }


def _arguments(options: TuneOptions, scratch: str, batch: int, max_micro_batch: int) -> dict[str, Any]:
    """Return the training arguments that DPO and GRPO share. A batch is split into equal micro-batches."""
    import torch

    gpu = torch.cuda.is_available()
    micro_batch = max(size for size in range(1, min(max_micro_batch, batch) + 1) if batch % size == 0)
    return {
        "output_dir": scratch,
        "max_steps": options.steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // micro_batch,
        "beta": options.beta,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(WARM_UP_SHARE * options.steps),
        "disable_dropout": True,
        # Some CPUs report bf16 support and then raise SIGILL (docs/log.md).
        "bf16": gpu and torch.cuda.is_bf16_supported(),
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": gpu,
        "seed": options.seed,
    }
