"""TRL trainers: train one LoRA adapter by DPO or GRPO, and save it.

``train_adapter`` does not change the random state of the caller, prints nothing, and leaves no files.
"""

import gc
import importlib
import logging
import math
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.distributed import launched_process
from pluralign.core.errors import MissingExtraError, UsageError
from pluralign.core.files import atomic_folder
from pluralign.models.loading import quiet_transformers
from pluralign.policies.options import TuneOptions
from pluralign.policies.samples import Policy, Samples, best_and_worst, out_of_memory_advice
from pluralign.votes.prompts import Item, Prompt, PromptLike, plain_prompt

WARM_UP_SHARE = 0.1
"""Share of the steps in which the learning rate rises."""
RewardFunction: TypeAlias = Callable[[Sequence[Item]], FloatArray]
"""Takes (prompt, response) items; returns one standardised reward per item."""


@dataclass(frozen=True)
class TrainingData:
    """The training prompts, the base's responses to them, and one member's rewards."""

    prompts: Sequence[PromptLike]
    samples: Samples
    """Responses of the base to each prompt."""
    rewards: FloatArray
    """Standardised rewards of these responses, ``(n_prompts, n_samples)``."""
    reward: RewardFunction
    """The member's reward of new responses."""


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


def train_adapter(policy: Policy, data: TrainingData, options: TuneOptions, advance: Callable[[], None]) -> Any:
    """Add a fresh LoRA adapter to the base model and train it.

    Args:
        policy: the base model, without an adapter.
        data: prompts, responses and rewards.
        options: the method and its settings.
        advance: called after each optimiser step.

    Returns:
        A ``peft.PeftModel`` in evaluation mode. Its ``unload`` gives the base model back.
    """
    import torch

    build = {"dpo": dpo_trainer, "grpo": grpo_trainer}[options.method]
    with (
        quiet_trainers(),
        _restored_random_state(),
        out_of_memory_advice(options.micro_batch),
        tempfile.TemporaryDirectory() as scratch,
    ):
        trainer = build(policy, data, options, scratch, advance)
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


def dpo_trainer(
    policy: Policy, data: TrainingData, options: TuneOptions, scratch: str, advance: Callable[[], None]
) -> Any:
    """Return a TRL trainer for DPO on the pairs of ``best_and_worst``."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    rows = []
    for prompt, responses, rewards in zip(data.prompts, data.samples, data.rewards, strict=True):
        context = policy.context(prompt, options.max_new_tokens)
        for best, worst in best_and_worst(rewards):
            chosen, rejected = responses[best].tokens, responses[worst].tokens
            rows.append({"prompt_ids": context, "chosen_ids": chosen, "rejected_ids": rejected})
    batch = min(options.batch_size, len(rows))

    class TokenPairs(trl.DPOTrainer):  # type: ignore[misc]
        """DPO on the sampled tokens. From texts, TRL would add an end token also to responses that were cut off."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    return TokenPairs(
        args=trl.DPOConfig(**_arguments(options, scratch, batch, max(1, options.micro_batch // 2)), max_length=None),
        train_dataset=datasets.Dataset.from_list(rows),
        **_model_arguments(policy, options, advance),
    )


def grpo_trainer(
    policy: Policy, data: TrainingData, options: TuneOptions, scratch: str, advance: Callable[[], None]
) -> Any:
    """Return a TRL trainer for Dr. GRPO on the member's standardised reward."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    chat = policy.tokenizer.chat_template is not None

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] if chat else completion for completion in completions]
        items = [(data.prompts[i], text.strip()) for i, text in zip(index, texts, strict=True)]
        return [float(value) for value in data.reward(items)]

    rows = [
        {"prompt": Prompt(prompt).messages if chat else f"{plain_prompt(prompt)}\n\n", "index": index}
        for index, prompt in enumerate(data.prompts)
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
    return trl.GRPOTrainer(
        args=args,
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list(rows),
        **_model_arguments(policy, options, advance),
    )


def save_adapter(adapted: Any, base: str, folder: Path) -> None:
    """Write an adapter in the format of ``PeftModel.from_pretrained`` and vLLM, in one atomic write."""
    adapted.peft_config["default"].base_model_name_or_path = base
    with atomic_folder(folder) as new:
        with quiet_trainers():
            adapted.save_pretrained(new, save_embedding_layers=False)
        (new / "README.md").unlink(missing_ok=True)  # an empty model card
        for path in new.iterdir():
            path.chmod(0o644)


@contextmanager
def quiet_trainers() -> Iterator[None]:
    """Silence TRL and the libraries it calls within the block: only errors are logged, and no warnings are shown."""
    loggers = [logging.getLogger(name) for name in ("trl", "accelerate", "peft", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _restored_random_state() -> Iterator[None]:
    """Restore the random states that trainers seed: of Python, numpy and torch."""
    import torch

    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - trainers seed this one
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


def _model_arguments(policy: Policy, options: TuneOptions, advance: Callable[[], None]) -> dict[str, Any]:
    """Return the arguments of a trainer that name the model, the adapter and the progress callback."""
    peft = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")

    class StepCallback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            advance()

    adapter = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=options.lora_rank,
        lora_alpha=2 * options.lora_rank,
        lora_dropout=0.0,
        target_modules="all-linear",  # all but the head, which TRL does not train and vLLM does not serve
    )
    return {
        "model": policy.model,
        "processing_class": policy.tokenizer,
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
