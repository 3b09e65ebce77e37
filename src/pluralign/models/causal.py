"""Log-probabilities and samples of causal language models."""

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.models.batches import _in_batches, padded
from pluralign.models.loading import load_model, longest_text, reference_folder
from pluralign.models.options import SamplingOptions
from pluralign.models.remote import CutOff
from pluralign.votes.prompts import Item, Prompt, PromptLike, plain_prompt

BATCH_LOGITS = 2_048
"""Most of them where each needs the logits of a whole vocabulary: 400 MB for 49,000 words."""


def response_log_prob(folder: Path, items: Sequence[Item], progress: Progress | None = None) -> FloatArray:
    """Return log π(response | prompt) of a causal model, ``(n_items,)``.

    log π(y | x) = Σ_t log π(y_t | x, y_<t) over the tokens of the response and the end-of-sequence token after it. The
    prompt goes through the chat template up to where the assistant speaks; without a template an empty line follows it.

    Args:
        folder: a transformers folder with a …ForCausalLM model.
        items: prompts with responses.
        progress: called with items done and in all.
    """
    model, tokenizer = load_model(folder, "AutoModelForCausalLM")
    limit = longest_text(model, tokenizer)
    texts, spoken = [], []
    for prompt, response in items:
        if tokenizer.chat_template:
            before = tokenizer.apply_chat_template(Prompt(prompt).messages, tokenize=False, add_generation_prompt=True)
            context = tokenizer(before, add_special_tokens=False)["input_ids"]
        else:
            context = tokenizer(f"{plain_prompt(prompt)}\n\n")["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        answer = tokenizer(response, add_special_tokens=False)["input_ids"] + end
        if len(answer) >= limit:
            raise DataError(
                f"a response has {len(answer):,} tokens, and the model reads {limit:,}",
                file=str(folder),
                remedy="leave that response out, or name a model that reads longer texts",
            )
        context = context[-(limit - len(answer)) :]
        texts.append({"input_ids": context + answer, "attention_mask": [1] * (len(context) + len(answer))})
        spoken.append(len(answer))
    # Logits of a large vocabulary are what fills memory, and only those of the responses are needed.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def log_prob(batch: Sequence[int]) -> Any:
        import torch

        inputs = padded([texts[index] for index in batch], 0, model.device)
        length = inputs["input_ids"].shape[1]
        keep = length - min(len(texts[index]["input_ids"]) - spoken[index] for index in batch) + 1
        logits = model(**inputs, **({"logits_to_keep": keep} if keeps else {})).logits[:, -keep:]
        sums = []
        for row, index in enumerate(batch):
            last = len(texts[index]["input_ids"])
            tokens = inputs["input_ids"][row, last - spoken[index] : last, None]
            predicting = logits[row, last - spoken[index] - 1 - length + keep : last - 1 - length + keep]
            sums.append(torch.log_softmax(predicting.float(), dim=-1).gather(1, tokens).sum())
        return torch.stack(sums)[:, None]

    return _in_batches(texts, log_prob, progress, BATCH_LOGITS)[:, 0]


class LocalModel:
    """A transformers causal language model: ``smollm2`` from its wheel, a folder, or a hub id.

    Each prompt is answered by itself, its samples side by side, so nothing is padded on the left and no prompt changes
    another's responses. The model's own generation settings are set aside but for the tokens that end a text.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: tuple[Any, Any] | None = None
        self._at_once = SAMPLES_AT_ONCE

    def prepare(self) -> None:
        """Load model and tokenizer: float32 on a CPU, bfloat16 on a GPU."""
        self._loaded = load_model(reference_folder(self.name), "AutoModelForCausalLM", bf16_on_gpu=True)

    @property
    def model(self) -> Any:
        """The loaded model; another one, such as it with an adapter, may take its place."""
        return self._both()[0]

    @model.setter
    def model(self, model: Any) -> None:
        self._loaded = (model, self.tokenizer)

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._both()[1]

    def _both(self) -> tuple[Any, Any]:
        if self._loaded is None:
            self.prepare()
        assert self._loaded is not None  # noqa: S101 - it was prepared
        return self._loaded

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text; some models have none."""
        end = self.model.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        return () if end is None else tuple(end) if isinstance(end, list) else (end,)

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[str]:
        """Return n responses, sampled with a generator of their own."""
        import torch

        tokens = self.prompt_tokens(prompt, options.max_new_tokens).to(self.model.device)
        responses: list[str] = []
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            while len(responses) < n:
                try:
                    written = self.continuations(tokens, min(self._at_once, n - len(responses)), options)
                except torch.OutOfMemoryError:
                    if self._at_once == 1:
                        remedy = "use a shorter prompt, fewer --max-new-tokens or a smaller model"
                        raise DataError("one sample does not fit into the GPU's memory", remedy=remedy) from None
                    self._at_once //= 2
                    torch.cuda.empty_cache()
                    continue
                texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
                ended = [not set(self.ends).isdisjoint(row) for row in written.tolist()]
                responses += [text if end else CutOff(text) for text, end in zip(texts, ended, strict=True)]
        return responses

    def prompt_tokens(self, prompt: PromptLike, new: int) -> Any:
        """Return a prompt's tokens up to where the assistant speaks, ``(1, n_tokens)``.

        A prompt that leaves no room for ``new`` tokens more is a ``DataError``.
        """
        import torch

        tokenizer = self.tokenizer
        if tokenizer.chat_template:
            try:
                text = tokenizer.apply_chat_template(
                    Prompt(prompt).messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # templates raise jinja2's errors, and whatever their authors thought of
                reason = " ".join(str(error).split())[:200]
                raise DataError(f"the model's chat template refuses the prompt ({reason})") from None
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(f"{plain_prompt(prompt)}\n\n")["input_ids"]
        limit = longest_text(self.model, tokenizer)
        if len(ids) + new > limit:
            problem = f"the prompt has {len(ids):,} tokens and {new:,} are to follow, but the model reads {limit:,}"
            raise DataError(problem, remedy="shorten it or lower --max-new-tokens")
        return torch.tensor([ids])

    def continuations(self, tokens: Any, n: int, options: SamplingOptions) -> Any:
        """Return n sampled continuations of a prompt's tokens, ``(n, n_new)``; after its end a row is padded."""
        import torch

        transformers: Any = importlib.import_module("transformers")
        config = transformers.GenerationConfig(
            do_sample=True,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=0,
            repetition_penalty=1.0,
            max_new_tokens=options.max_new_tokens,
            num_return_sequences=n,
            eos_token_id=list(self.ends) or None,
            pad_token_id=next((t for t in (self.tokenizer.pad_token_id, *self.ends) if t is not None), 0),
        )
        written = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        return written[:, tokens.shape[1] :]


SAMPLES_AT_ONCE = 32
"""Responses to one prompt that are sampled in one batch; halved where memory does not suffice."""
