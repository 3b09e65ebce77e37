"""Causal language models in this process: log-probabilities of responses, and sampling."""

import importlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.text import one_line
from pluralign.core.types import Progress
from pluralign.text.loading import context_length, in_batches, load_model, model_folder, padded, without_adapter
from pluralign.text.options import SMALL_MODEL, SamplingOptions
from pluralign.votes.prompts import Item, Prompt, PromptLike, plain_prompt

# --- What a language model returns: a response with the reason why it ends there, or a choice between two letters.


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Example:
        >>> Completion("Yes, because", "length").cut_off
        True
    """

    text: str
    finish_reason: str | None = None
    """As in OpenAI's API: ``stop`` if the model ended the text, ``length`` if it reached the maximum number of tokens,
    or another reason of a server; None if unknown."""

    @property
    def cut_off(self) -> bool:
        """Whether the response was cut off at the maximum number of tokens."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Choice:
    """The answer to a question whose answer is one of two letters."""

    prob: float
    """Probability of the first letter, given that the answer is one of the two; NaN without an answer."""
    tokens_in: int = 0
    """Tokens that the model read; 0 if unknown."""
    tokens_out: int = 0
    """Tokens that the model wrote; 0 if unknown."""


class Sampler(Protocol):
    """A language model that samples responses."""

    @property
    def name(self) -> str:
        """Name of the model, stored with each line of a candidates file."""
        ...

    def prepare(self) -> None:
        """Load the model or reach its server. Called once, and only if there is something to sample."""
        ...

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        """Return n sampled responses, which may repeat each other.

        Raises:
            DataError: this prompt cannot be answered.
        """
        ...


LOGIT_TOKENS = 2_048
"""Maximum number of tokens per batch where each needs the logits of a whole vocabulary: 400 MB for 49,000 words."""
SAMPLES_AT_ONCE = 32
"""Responses to one prompt that are sampled in one batch; halved when memory runs out."""

# --- log-probabilities ------------------------------------------------------------------------------------------------


def response_log_prob(folder: Path, items: Sequence[Item], progress: Progress | None = None) -> FloatArray:
    """Return log π(response | prompt) of a causal model, ``(n_items,)``.

    log π(y | x) = Σ_t log π(y_t | x, y_<t) over the tokens of the response and the end-of-sequence token after it. The
    prompt is formatted by the chat template, up to the start of the assistant's turn. Without a template, the prompt is
    followed by an empty line. A prompt that is too long loses its beginning.

    Args:
        folder: a transformers folder with a …ForCausalLM model.
        items: prompts with responses.
        progress: called with the number of items done and the total.
    """
    model, tokenizer = load_model(folder, "AutoModelForCausalLM")
    limit = context_length(model, tokenizer)
    contexts, responses = [], []
    for prompt, text in items:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        response = tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if len(response) >= limit:
            problem = f"a response has {len(response):,} tokens, but the model reads at most {limit:,}"
            remedy = "leave that response out, or name a model that reads longer texts"
            raise DataError(problem, file=str(folder), remedy=remedy)
        contexts.append(prompt_ids(tokenizer, prompt)[-(limit - len(response)) :])
        responses.append(response)

    def summed(batch: Sequence[int]) -> Any:
        import torch

        tokens = token_log_probs(model, [contexts[i] for i in batch], [responses[i] for i in batch])
        return torch.stack([log_probs.sum() for log_probs in tokens])[:, None]

    texts = [{"input_ids": context + ids} for context, ids in zip(contexts, responses, strict=True)]
    return in_batches(texts, summed, progress, LOGIT_TOKENS)[:, 0]


def token_log_probs(
    model: Any, contexts: Sequence[list[int]], responses: Sequence[list[int]], temperature: float = 1.0
) -> list[Any]:
    """Return log π(y_t | x, y_<t) of each token of each response, in one forward pass.

    Args:
        model: a causal language model, with or without a peft adapter.
        contexts: token ids x of the prompts, one list per response. They must not be empty.
        responses: token ids y of the responses, one list per response.
        temperature: logits are divided by it.

    Returns:
        One float32 tensor per response, ``(n_tokens,)``. Call it under ``torch.inference_mode``.
    """
    import torch

    texts = [context + ids for context, ids in zip(contexts, responses, strict=True)]
    inputs = padded([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts], 0, model.device)
    length = inputs["input_ids"].shape[1]
    # Logits of a large vocabulary take most of the memory. Keep those from the last context token on.
    keep = length - min(map(len, contexts)) + 1
    can_keep = "logits_to_keep" in inspect.signature(without_adapter(model).forward).parameters
    logits = model(**inputs, **({"logits_to_keep": keep} if can_keep else {})).logits[:, -keep:]
    log_probs = []
    for row, (context, ids) in enumerate(zip(contexts, responses, strict=True)):
        first = len(context) - 1 - (length - keep)  # the logits of a token stand at the token before it
        predicted = torch.log_softmax(logits[row, first : first + len(ids)].float() / temperature, dim=-1)
        log_probs.append(predicted.gather(1, torch.tensor(ids, device=predicted.device)[:, None])[:, 0])
    return log_probs


def prompt_ids(tokenizer: Any, prompt: PromptLike) -> list[int]:
    """Return the token ids of a prompt, up to the start of the assistant's turn.

    Raises:
        DataError: the chat template rejects the prompt.
    """
    if not tokenizer.chat_template:
        return list(tokenizer(f"{plain_prompt(prompt)}\n\n")["input_ids"])
    try:
        text = tokenizer.apply_chat_template(Prompt(prompt).messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of jinja2 and of their authors' choice
        raise DataError(f"the model's chat template rejects the prompt ({one_line(error)})") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# --- sampling ---------------------------------------------------------------------------------------------------------


def parameter_count(folder: Path) -> int:
    """Return the number of parameters in the safetensors files of a folder, from their headers alone."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


class LocalModel:
    """A causal language model of transformers: ``smollm2`` from its wheel, a folder, or a hub id.

    Each prompt is sampled by itself, its responses in one batch. So no padding is needed on the left, and prompts do
    not affect each other's responses. Of the model's own generation settings only the end-of-text tokens are used.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._at_once = SAMPLES_AT_ONCE

    def prepare(self) -> None:
        """Load model and tokenizer: float32 on a CPU, bfloat16 on a GPU."""
        self.model, self.tokenizer = load_model(model_folder(self.name), "AutoModelForCausalLM", bf16_on_gpu=True)

    @cached_property
    def model(self) -> Any:
        """The loaded model. It can be replaced, for example by the same model with an adapter."""
        self.prepare()
        return self.model

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        self.prepare()
        return self.tokenizer

    @cached_property
    def is_small(self) -> bool:
        """Whether it has fewer than ``SMALL_MODEL`` parameters. The model is not loaded for this."""
        return parameter_count(model_folder(self.name)) < SMALL_MODEL

    def with_defaults(self, options: SamplingOptions) -> SamplingOptions:
        """Return the options with the temperature for a model of this size, if none was given."""
        return options.with_defaults(small=options.temperature is None and self.is_small)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text; some models have none."""
        end = self.model.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        return () if end is None else tuple(end) if isinstance(end, list) else (end,)

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        """Return n sampled responses. The caller's random state does not change.

        Raises:
            DataError: the prompt is too long, or a single response does not fit into the GPU's memory.
        """
        import torch

        tokens = self.prompt_tokens(prompt, options.max_new_tokens).to(self.model.device)
        completions: list[Completion] = []
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            while len(completions) < n:
                try:
                    written = self.continuations(tokens, min(self._at_once, n - len(completions)), options)
                except torch.OutOfMemoryError:
                    if self._at_once == 1:
                        remedy = "use a shorter prompt, fewer --max-new-tokens or a smaller model"
                        raise DataError("one response does not fit into the GPU's memory", remedy=remedy) from None
                    self._at_once //= 2
                    torch.cuda.empty_cache()
                    continue
                texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
                for text, row in zip(texts, written.tolist(), strict=True):
                    completions.append(Completion(text, "length" if set(self.ends).isdisjoint(row) else "stop"))
        return completions

    def choose(self, prompt: PromptLike, letters: Sequence[str]) -> Choice:
        """Return the probability that the response begins with the first of two letters rather than the second.

        Raises:
            DataError: the prompt is too long, or the tokenizer has no different tokens for the letters.
        """
        import torch

        tokens = self.prompt_tokens(prompt, 1).to(self.model.device)
        first = [self.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in letters]
        if len(set(first)) < len(first):
            raise DataError(f"the model's tokenizer does not distinguish {' and '.join(letters)}")
        with torch.inference_mode():
            logits = self.model(tokens).logits[0, -1, first].float()
        return Choice(float(torch.softmax(logits, dim=0)[0]), tokens.shape[1], 1)

    def prompt_tokens(self, prompt: PromptLike, new: int) -> Any:
        """Return the tokens of a prompt up to the start of the assistant's turn, ``(1, n_tokens)``.

        Raises:
            DataError: the chat template rejects the prompt, or the prompt leaves no room for ``new`` more tokens.
        """
        import torch

        ids = prompt_ids(self.tokenizer, prompt)
        limit = context_length(self.model, self.tokenizer)
        if len(ids) + new > limit:
            tokens = f"{len(ids):,} tokens and the response up to {new:,}, but the model reads {limit:,}"
            raise DataError(f"the prompt has {tokens}", remedy="shorten the prompt or lower --max-new-tokens")
        return torch.tensor([ids])

    def continuations(self, tokens: Any, n: int, options: SamplingOptions) -> Any:
        """Return n sampled continuations of a prompt's tokens, ``(n, n_new)``. Rows are padded after their end."""
        import torch

        transformers: Any = importlib.import_module("transformers")
        options = self.with_defaults(options)
        sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0, "repetition_penalty": 1.0}
        pad = next((t for t in (self.tokenizer.pad_token_id, *self.ends) if t is not None), 0)
        length = {
            "max_new_tokens": options.max_new_tokens,
            "eos_token_id": list(self.ends) or None,
            "pad_token_id": pad,
        }
        config = transformers.GenerationConfig(do_sample=True, num_return_sequences=n, **sampling, **length)
        written = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        return written[:, tokens.shape[1] :]
