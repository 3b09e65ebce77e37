"""Tuned policies: one LoRA adapter of a language model for each member of an ensemble, trained through TRL (§2).

Decided here: what a policy is tuned to, that all members get the same prompts, seeds and steps, and that every policy
is judged on prompts it was never trained on. Rewards are standardised by the base's samples on the training prompts,
r̃_j = (r_j − μ_j) / σ_j (``policysamples.reward_scale``): members are comparable, and one β suits all. A policy is tuned
to make E[r̃_j] − β KL(π ‖ base) large.

A finished member is not trained again; files are written whole. Serving the adapters is left to vLLM and the like.
"""

import gc
import hashlib
import importlib
import json
import logging
import math
import os
import random
import shlex
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.answering.generate import load_prompts
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.core.files import atomic_write
from pluralign.core.json_values import without_nan
from pluralign.core.options import with_changes
from pluralign.core.types import Progress
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT, worse_than_chance
from pluralign.models.loading import quiet_transformers, reference_folder
from pluralign.models.options import SamplingOptions
from pluralign.policies.options import TuneOptions
from pluralign.policies.samples import Policy, Response, Samples, best_and_worst, reward_scale, sampled_kl
from pluralign.theory.intervals import clustered_interval
from pluralign.votes.layouts import read_prompt
from pluralign.votes.prompts import Prompt, PromptLike, plain_prompt

MANIFEST_FILE, BASE_FILE, SAMPLES_FOLDER = "manifest.json", "base.jsonl", "samples"
FORMAT = "pluralign-policies"
FEWEST_PROMPTS = 4
"""Two to train on and two to judge by: less has no spread between prompts."""
FEWEST_OF_A_SIDE = 2
SHOWN = 3
"""Held-out prompts whose first answers, of the base and the policy, are kept in the manifest."""
WARM_UP_SHARE = 0.1
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank takes (vllm/config/lora.py)."""


@dataclass(frozen=True)
class TunedPolicy:
    """One member's policy, and what held-out prompts say of it; rewards are standardised."""

    member: int
    name: str
    weight: float
    path: str
    """Of the adapter, within the folder."""
    reward_before: float
    """Mean reward that its member gives the base's responses."""
    reward_after: float
    """… and the policy's."""
    interval: tuple[float, float]
    """Of after − before, 95 %, prompts drawn with replacement."""
    improved: bool
    """Whether that interval is above 0."""
    kl: float
    """KL to the base per response, in nats: see ``sampled_kl``."""
    kl_standard_error: float
    rewards: list[float]
    """Mean reward of the policy's responses by every member of the ensemble."""
    tokens: float
    """Mean length of its responses."""
    seconds: float
    samples: list[dict[str, Any]]
    """A few prompts with an answer of the base and of the policy."""


@dataclass(frozen=True)
class Tuning:
    """What a folder of tuned policies holds."""

    folder: str
    model: str
    method: str
    prompts: int
    """Trained on."""
    held_out: int
    """Judged by."""
    too_long: int
    """Prompts left out, because they and a response do not fit the model's window."""
    bad_rows: int
    """Rows that hold no prompt."""
    members: list[TunedPolicy]
    matrix: list[list[float]]
    """Mean held-out reward of policy i under member j, for the tuned members in turn, standardised."""
    base: list[float]
    """The base's, under the same members."""
    base_tokens: float
    """Mean length of the base's responses."""
    resumed: int
    """Members that an earlier run had finished."""
    serving: dict[str, Any]
    """A command that serves base and adapters with vLLM, and the weights to draw them with."""
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
    """Tune a language model to each member of an ensemble, and judge the policies on held-out prompts.

    ``dpo``: n responses to each training prompt are sampled from the base once for all members. A member's pairs are
    its best and its worst response, second best and second worst, and so on for the best quarter; with log-ratios
    ρ = log π − log π_base of the chosen (+) and the rejected (−) one, −log σ(β (ρ₊ − ρ₋)) is minimised.

    ``grpo``: each step samples n responses to each of some prompts from the policy itself; the advantage of one is its
    r̃ less the mean of its group. Losses are summed over tokens (Dr. GRPO), so that β prices KL per response.

    ``dpo`` is the default: it samples once for all members instead of at every step, and its pairs are the clearest
    that n samples hold, so few steps suffice. ``grpo`` learns from its own answers and can go further in long runs.

    Args:
        ensemble: the rewards.
        prompts: prompts, or where to read them (``load_prompts``).
        model: ``smollm2``, a folder or a hub id of a causal language model.
        output: folder of the policies; one with the same settings is gone on with.
        options: how to tune; ``changes`` are its fields by name.
        members: whom to tune to; unless given, everyone with weight.
        names: what the members are called.
        limit: take only so many prompts, drawn by the seed.
        progress: called with prompts sampled and steps done, and how many there are in all.

    Reference: Rafailov et al., "Direct Preference Optimization" (2023); Shao et al., "DeepSeekMath" (2024) for GRPO;
    Liu et al., "Understanding R1-Zero-Like Training" (2025) for Dr. GRPO.
    """
    options = with_changes(options or TuneOptions(), changes)
    started, output = time.perf_counter(), Path(output)
    chosen = _chosen(ensemble, members)
    bad_rows = 0
    if isinstance(prompts, str | os.PathLike):
        prompts, failures = load_prompts(prompts, limit=limit, seed=options.seed)
        bad_rows = len(failures)
    else:
        prompts = list(dict.fromkeys(prompts))[:limit]
    _enough(prompts)
    settings = {"model": model, "ensemble": _fingerprint(ensemble), "prompts": _hashed(prompts), **asdict(options)}
    del settings["micro_batch"]  # it changes what fits, not what is learned
    manifest = _read_manifest(output, settings)
    done = {known["member"]: known for known in manifest.get("members", [])}
    resumed = [j for j in chosen if j in done]
    if len(resumed) < len(chosen):
        _check_packages()
        work = _Work(ensemble, prompts, model, output, options, progress, len(chosen) - len(resumed))
        manifest |= {"format": FORMAT, "pluralign": __version__, "settings": settings, "members": list(done.values())}
        _write_manifest(output, manifest)
        manifest |= work.read_base()
        work.check_opinions(chosen)
        for j in chosen:
            if j in done:
                continue
            policy = work.tuned(j, names[j] if names else f"member {j}")
            manifest["members"] = sorted([*manifest["members"], asdict(policy)], key=lambda known: known["member"])
            manifest["serving"] = _serving(model, options.lora_rank, manifest["members"])
            _write_manifest(output, manifest)
    policies = [TunedPolicy(**known | {"interval": tuple(known["interval"])}) for known in manifest["members"]]
    tuned = [policy.member for policy in policies]
    return Tuning(
        folder=str(output),
        model=model,
        method=options.method,
        prompts=manifest["prompts"],
        held_out=manifest["held_out"],
        too_long=manifest["too_long"],
        bad_rows=bad_rows,
        members=policies,
        matrix=[[policy.rewards[j] for j in tuned] for policy in policies],
        base=[manifest["base_rewards"][j] for j in tuned],
        base_tokens=manifest["base_tokens"],
        resumed=len(resumed),
        serving=manifest["serving"],
        notes=_notes(ensemble, tuned),
        seconds=time.perf_counter() - started,
    )


# --- what is asked --------------------------------------------------------------------------------------------------


def _chosen(ensemble: RewardEnsemble, members: Sequence[int]) -> list[int]:
    for j in members:
        if not 0 <= j < ensemble.k:
            raise UsageError(f"there is no member {j}: members are counted from 0 to {ensemble.k - 1}.")
    return sorted(set(members)) or np.flatnonzero(ensemble.weights > NEGLIGIBLE_WEIGHT).tolist()


def _enough(prompts: Sequence[PromptLike], left_out: int = 0) -> None:
    if len(prompts) < FEWEST_PROMPTS:
        fit = f" that fit the model's window ({left_out:,} do not)" if left_out else ""
        raise DataError(
            f"there are {len(prompts)} different prompts{fit}, and {FEWEST_PROMPTS} are the least: two to train on and "
            "two to judge by",
            remedy="give more prompts",
        )


def split_prompts(
    prompts: Sequence[PromptLike], held_out: float, seed: int
) -> tuple[list[PromptLike], list[PromptLike]]:
    """Return the prompts to train on and those to judge by: the share with the smallest hashes, two at least.

    Example:
        >>> train, held_out = split_prompts(["Tea?", "Rum?", "Milk?", "Water?", "Beer?"], 0.25, seed=0)
        >>> len(train), len(held_out), set(train) & set(held_out)
        (3, 2, set())
    """
    n = min(max(round(held_out * len(prompts)), FEWEST_OF_A_SIDE), len(prompts) - FEWEST_OF_A_SIDE)
    judged = set(sorted(prompts, key=lambda prompt: Prompt(prompt).hash(seed))[:n])
    return [prompt for prompt in prompts if prompt not in judged], [prompt for prompt in prompts if prompt in judged]


def _fingerprint(ensemble: RewardEnsemble) -> str:
    digest = hashlib.sha256(json.dumps(ensemble.features.described(), sort_keys=True, default=str).encode())
    digest.update(ensemble.weights.tobytes())
    for name, array in sorted(ensemble.members.arrays().items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _hashed(prompts: Sequence[PromptLike]) -> str:
    return hashlib.sha256("\0".join(sorted(Prompt(prompt).key for prompt in prompts)).encode()).hexdigest()[:16]


def _check_packages() -> None:
    for package in ("torch", "transformers", "peft", "trl", "datasets"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise MissingExtraError(package, "finetune", "tuned policies") from None
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.cuda.device_count() > 1:
        raise UsageError(
            "tune works on one device: set CUDA_VISIBLE_DEVICES to one GPU and start it without a launcher; "
            "other members can be tuned on other GPUs with --member, each into a folder of its own."
        )


def _notes(ensemble: RewardEnsemble, tuned: Sequence[int]) -> list[str]:
    facts = ensemble.facts.get("members", [])
    far = [j for j in tuned if j < len(facts) and worse_than_chance(facts[j]["disagreement"], ensemble.weights[j])]
    return [f"member {j} is further from people than a coin: think before serving a policy tuned to it" for j in far]


# --- one folder of policies -----------------------------------------------------------------------------------------


class _Work:
    """What all members share: the base, its samples, the scale of rewards and the recipe."""

    def __init__(
        self,
        ensemble: RewardEnsemble,
        prompts: Sequence[PromptLike],
        model: str,
        output: Path,
        options: TuneOptions,
        progress: Progress | None,
        members: int,
    ) -> None:
        self.ensemble, self.output, self.options, self.progress = ensemble, output, options, progress
        self.policy = Policy(model)
        self.policy.check_ends()
        self.sampling = SamplingOptions(
            temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=options.seed
        )
        fitting = [prompt for prompt in prompts if self._fits(prompt)]
        _enough(fitting, len(prompts) - len(fitting))
        self.train, self.judged = split_prompts(fitting, options.held_out, options.seed)
        self.done, self.total = 0, len(fitting) + members * (options.steps + len(self.judged))
        self.too_long = len(prompts) - len(fitting)

    def read_base(self) -> dict[str, Any]:
        """Sample the base and standardise rewards by it; return what the manifest says of it."""
        base = self._base_samples()
        self.samples, self.before = base[: len(self.train)], base[len(self.train) :]
        self.rewards = self._rewards(self.train, self.samples)
        self.scale = reward_scale(self.rewards)
        self.rewards_before = self.scale(self._rewards(self.judged, self.before))
        return {
            "base": served_name(self.policy.name),
            "prompts": len(self.train),
            "held_out": len(self.judged),
            "too_long": self.too_long,
            "scale": {"mean": self.scale.mean.tolist(), "spread": self.scale.spread.tolist()},
            "base_rewards": self.rewards_before.mean(axis=(0, 1)).tolist(),
            "base_tokens": _mean_length(self.before),
        }

    def check_opinions(self, members: Sequence[int]) -> None:
        """Refuse members that find all of the base's answers to a prompt equally good."""
        for j in members:
            if not self.scale.spread[j] > 0:
                raise DataError(
                    f"member {j} gives all sampled responses to a prompt the same reward, so nothing can be learned",
                    remedy="sample more or longer responses, or name the other members with --member",
                )

    def tuned(self, member: int, name: str) -> TunedPolicy:
        """Tune to one member, judge the policy, write its adapter and samples, and leave the base as it was."""
        started, options = time.perf_counter(), self.options
        adapted = self._train(member)
        self.policy.model = adapted
        after = self._sampled(self.judged)
        log_prob, base_log_prob = self._log_probs(after)
        kl = sampled_kl(log_prob, base_log_prob)
        rewards = self.scale(self._rewards(self.judged, after))
        own_before, own_after = self.rewards_before[..., member], rewards[..., member]
        gain = clustered_interval(
            own_after.mean(axis=1) - own_before.mean(axis=1), np.arange(len(self.judged)), seed=options.seed
        )
        path = f"member-{member}"
        _save_adapter(adapted, served_name(self.policy.name), self.output / path)
        _write_lines(
            self.output / SAMPLES_FOLDER / f"{path}.jsonl",
            [
                {
                    "prompt": Prompt(prompt).json,
                    "responses": [one.text for one in row],
                    "tokens": [one.tokens for one in row],
                    "rewards": own.tolist(),
                    "log_prob": likely.tolist(),
                    "base_log_prob": likely_before.tolist(),
                }
                for prompt, row, own, likely, likely_before in zip(
                    self.judged, after, own_after, log_prob, base_log_prob, strict=True
                )
            ],
        )
        self.policy.model = adapted.unload()
        return TunedPolicy(
            member=member,
            name=name,
            weight=float(self.ensemble.weights[member]),
            path=path,
            reward_before=float(own_before.mean()),
            reward_after=float(own_after.mean()),
            interval=(gain.low, gain.high),
            improved=gain.low > 0,
            kl=kl.mean,
            kl_standard_error=kl.standard_error,
            rewards=rewards.mean(axis=(0, 1)).tolist(),
            tokens=_mean_length(after),
            seconds=time.perf_counter() - started,
            samples=[
                {"prompt": Prompt(prompt).json, "before": old[0].text, "after": new[0].text,
                 "reward_before": float(was[0]), "reward_after": float(now[0])}
                for prompt, old, new, was, now in list(
                    zip(self.judged, self.before, after, own_before, own_after, strict=True)
                )[:SHOWN]
            ],
        )  # fmt: skip

    def advance(self) -> None:
        """Report one more prompt sampled or step done."""
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)

    # --- samples ----------------------------------------------------------------------------------------------------

    def _fits(self, prompt: PromptLike) -> bool:
        try:
            self.policy.context(prompt, self.options.max_new_tokens)
        except DataError:
            return False
        return True

    def _base_samples(self) -> Samples:
        """Return the base's responses to all prompts; a line is kept of each, so that a killed run goes on from it."""
        path, judged = self.output / BASE_FILE, set(self.judged)
        known = {Prompt(read_prompt(row["prompt"])).key: row for row in _whole_lines(path)}
        _write_lines(path, list(known.values()))
        samples: Samples = []
        with path.open("a", encoding="utf-8") as stream:
            for prompt in [*self.train, *self.judged]:
                if (row := known.get(Prompt(prompt).key)) is not None:
                    samples.append([Response(*one) for one in zip(row["tokens"], row["responses"], strict=True)])
                    self.advance()
                    continue
                samples += self._sampled([prompt])
                texts, tokens = [one.text for one in samples[-1]], [one.tokens for one in samples[-1]]
                line = {
                    "prompt": Prompt(prompt).json,
                    "held_out": prompt in judged,
                    "responses": texts,
                    "tokens": tokens,
                }
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                stream.flush()
        return samples

    def _sampled(self, prompts: Sequence[PromptLike]) -> Samples:
        samples = []
        with _enough_memory(self.options):
            for prompt in prompts:
                at_once = max(self.options.micro_batch, 2)
                samples.append(self.policy.draw(prompt, self.options.samples, self.sampling, at_once))
                self.advance()
        return samples

    def _rewards(self, prompts: Sequence[PromptLike], samples: Samples) -> FloatArray:
        items = [(prompt, one.text) for prompt, row in zip(prompts, samples, strict=True) for one in row]
        return self.ensemble.rewards(items).reshape(len(prompts), -1, self.ensemble.k)

    def _log_probs(self, samples: Samples) -> tuple[FloatArray, FloatArray]:
        """Return log π and log π_base of the policy's responses to the held-out prompts."""
        both = []
        for prompt, row in zip(self.judged, samples, strict=True):
            context = self.policy.context(prompt, self.options.max_new_tokens)
            read = ([one.tokens for one in row], self.options.temperature, self.options.micro_batch)
            own = self.policy.log_prob(context, *read)
            with self.policy.model.disable_adapter():
                both.append((own, self.policy.log_prob(context, *read)))
        return np.array([own for own, _ in both]), np.array([reference for _, reference in both])

    # --- training ---------------------------------------------------------------------------------------------------

    def _train(self, member: int) -> Any:
        """Return the base with a fresh adapter around it, trained."""
        import torch

        trainer_of = {"dpo": self._dpo, "grpo": self._grpo}[self.options.method]
        with _quiet(), _own_randomness(), _enough_memory(self.options), tempfile.TemporaryDirectory() as scratch:
            trainer = trainer_of(member, scratch)
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

    def _dpo(self, member: int, scratch: str) -> Any:
        trl: Any = importlib.import_module("trl")
        datasets: Any = importlib.import_module("datasets")
        rewards = self.scale(self.rewards)[..., member]
        rows = []
        for prompt, row, own in zip(self.train, self.samples, rewards, strict=True):
            context = self.policy.context(prompt, self.options.max_new_tokens)
            for best, worst in best_and_worst(own):
                rows.append({"prompt_ids": context, "chosen_ids": row[best].tokens, "rejected_ids": row[worst].tokens})
        pairs = min(self.options.batch_size, len(rows))

        class TokenPairs(trl.DPOTrainer):  # type: ignore[misc]
            """DPO on the very tokens that were sampled: of text, TRL would also end responses that were cut short."""

            def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
                return dataset

        return TokenPairs(
            args=trl.DPOConfig(
                **self._arguments(scratch, pairs, max(1, self.options.micro_batch // 2)), max_length=None
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            **self._trained(),
        )

    def _grpo(self, member: int, scratch: str) -> Any:
        trl: Any = importlib.import_module("trl")
        datasets: Any = importlib.import_module("datasets")
        options, chat = self.options, self.policy.tokenizer.chat_template is not None

        def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
            texts = [one[0]["content"] if chat else one for one in completions]
            items = [(self.train[i], text.strip()) for i, text in zip(index, texts, strict=True)]
            return [float(value) for value in self.scale(self.ensemble.rewards(items))[:, member]]

        rows = [
            {"prompt": Prompt(prompt).messages if chat else f"{plain_prompt(prompt)}\n\n", "index": index}
            for index, prompt in enumerate(self.train)
        ]
        responses = min(options.batch_size, len(rows)) * options.samples
        args = trl.GRPOConfig(
            **self._arguments(scratch, responses, options.micro_batch),
            num_generations=options.samples,
            max_completion_length=options.max_new_tokens,
            temperature=options.temperature,
            loss_type="dr_grpo",
            scale_rewards="none",  # they are standardised already
            remove_unused_columns=False,
        )
        return trl.GRPOTrainer(
            args=args, reward_funcs=reward, train_dataset=datasets.Dataset.from_list(rows), **self._trained()
        )

    def _trained(self) -> dict[str, Any]:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            r=self.options.lora_rank,
            lora_alpha=2 * self.options.lora_rank,
            lora_dropout=0.0,
            target_modules="all-linear",  # but not the head, which TRL does not train and vLLM does not serve
        )
        return {
            "model": self.policy.model,
            "processing_class": self.policy.tokenizer,
            "peft_config": config,
            "callbacks": [_watch(self.advance)],
        }

    def _arguments(self, scratch: str, batch: int, most: int) -> dict[str, Any]:
        import torch

        gpu, options = torch.cuda.is_available(), self.options
        micro = max(size for size in range(1, min(most, batch) + 1) if batch % size == 0)
        return {
            "output_dir": scratch,
            "max_steps": options.steps,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": batch // micro,
            "beta": options.beta,
            "learning_rate": options.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": math.ceil(WARM_UP_SHARE * options.steps),
            "disable_dropout": True,
            # Some CPUs claim bf16 and die of it (docs/log.md).
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


def _watch(advance: Callable[[], None]) -> Any:
    transformers: Any = importlib.import_module("transformers")

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            advance()

    return Watch()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep TRL and what it calls from talking."""
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
def _own_randomness() -> Iterator[None]:
    """Keep the seeds that trainers set from whoever called us."""
    import torch

    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - it is what trainers seed
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


@contextmanager
def _enough_memory(options: TuneOptions) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        remedy = f"run the same command with --micro-batch {max(1, options.micro_batch // 2)} or a smaller model"
        raise DataError(f"memory ran out with {options.micro_batch} responses at once", remedy=remedy) from None


# --- files ----------------------------------------------------------------------------------------------------------


def served_name(model: str) -> str:
    """Return what a server calls the base: a hub id, or the folder of a local model."""
    return str(reference_folder(model).resolve()) if model == "smollm2" or Path(model).exists() else model


def _serving(model: str, rank: int, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a command of vLLM for base and adapters, to be run in the folder, and the weights to draw them with."""
    total = sum(known["weight"] for known in members)
    command = [
        *("vllm", "serve", served_name(model), "--enable-lora", "--max-loras", str(len(members)), "--max-lora-rank"),
        str(next(allowed for allowed in VLLM_RANKS if allowed >= rank)),
        *("--lora-modules", *(f"{known['path']}={known['path']}" for known in members)),
    ]
    return {
        "command": shlex.join(command),
        "weights": {known["path"]: known["weight"] / total if total else 1 / len(members) for known in members},
    }


def _read_manifest(output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier run left; other settings and other things are refused."""
    path = output / MANIFEST_FILE
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; name a folder.")
    if not path.is_file():
        if output.is_dir() and any(output.iterdir()):
            raise DataError("there are other things in it", file=str(output), remedy="name a new folder")
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known, _ = manifest["settings"], manifest["members"]
    except (ValueError, KeyError, TypeError):
        remedy = "name another folder"
        raise DataError("pluralign tune did not write this", file=str(path), remedy=remedy) from None
    if other := [name for name in settings if known.get(name) != settings[name]]:
        hashes = {"ensemble": "another ensemble", "prompts": "other prompts"}
        was = ", ".join(hashes.get(name, f"{name} {known.get(name)}") for name in other)
        remedy = "name another folder, or use these settings to go on with it"
        raise DataError(f"its policies were tuned with {was}", file=str(output), remedy=remedy)
    manifest["members"] = [one for one in manifest["members"] if (output / one["path"]).is_dir()]
    return dict(manifest)


def _write_manifest(output: Path, manifest: dict[str, Any]) -> None:
    with atomic_write(output / MANIFEST_FILE) as partial:
        text = json.dumps(without_nan(manifest), indent=1, ensure_ascii=False, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with atomic_write(path) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file but for one that a kill cut short."""
    if not path.is_file():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def _save_adapter(model: Any, base: str, place: Path) -> None:
    """Write an adapter as ``PeftModel.from_pretrained`` and vLLM read it, whole or not at all."""
    model.peft_config["default"].base_model_name_or_path = base
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as partial:
        new = Path(partial) / "new"
        with _quiet():
            model.save_pretrained(new, save_embedding_layers=False)
        (new / "README.md").unlink(missing_ok=True)  # a card with nothing filled in
        for path in new.iterdir():
            path.chmod(0o644)
        shutil.rmtree(place, ignore_errors=True)  # of a run that was killed before it took note of it
        new.rename(place)


def _mean_length(samples: Samples) -> float:
    return float(np.mean([len(one.tokens) for row in samples for one in row]))
