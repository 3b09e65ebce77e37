"""Synthetic inputs of a recipe: sample files in the published layouts, and a tiny language model.

With them a recipe runs end to end in a minute without a network or a GPU. Its figures mean nothing: the texts are those
of the town hall, and the weights of the model are random.
"""

import gzip
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pluralign.core.errors import MissingExtraError
from pluralign.core.files import atomic_write
from pluralign.text.loading import quiet_transformers
from pluralign.votes.paper_sets import PERSONALLLM_RATERS
from pluralign.votes.town_hall.town_hall import answers, town_hall

Row: TypeAlias = dict[str, Any]
Rated: TypeAlias = tuple[str, list[str], npt.NDArray[np.float64]]
"""A prompt, its responses, and their ratings, ``(n_responses, n_raters)``."""

TRAIN_SHARE = 0.75
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIAL = ("<|unknown|>", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def write_sample(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a few dozen synthetic rows in the published layout of a data set, and return their folder.

    Example:
        >>> import tempfile
        >>> from pluralign import load_preferences
        >>> folder = write_sample("multipref", Path(tempfile.mkdtemp()))
        >>> len(load_preferences(f"multipref:{folder}"))
        48
    """
    SAMPLES[name](folder, seed)
    return folder


def write_prism(folder: Path, *, seed: int = 0) -> Path:
    """Write synthetic conversations in the layout of PRISM, and return their folder."""
    rows = [
        {"conversation_id": f"c{i}", "conversation_type": "values guided", "opening_prompt": prompt}
        for i, prompt in enumerate(answers(12, 2, seed=seed + 1).prompts)
    ]
    _write_lines(folder / "conversations.jsonl", rows)
    return folder


def write_tiny_model(folder: Path, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write a Llama with two small layers, random weights and the words of ``texts``; return its folder."""
    try:
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise MissingExtraError("transformers", "encoders", "a tiny model") from None
    split = tokenizers.pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)} - set(SPECIAL))
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = split
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=SPECIAL[0], pad_token=SPECIAL[1], eos_token=SPECIAL[2], model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=1, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread inside the block: more threads only add overhead on such small matrices."""
    torch: Any = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- published layouts ------------------------------------------------------------------------------------------------


def _rated(prompts: int, responses: int, raters: int, seed: int) -> Iterator[Rated]:
    drawn, tastes = answers(prompts, responses, seed=seed), town_hall(40, seed=seed).tastes
    for prompt, texts, features in zip(drawn.prompts, drawn.responses, drawn.features, strict=True):
        yield prompt, texts, features @ tastes[:raters].T


def _multipref(folder: Path, seed: int) -> None:
    rows = []
    for number, (prompt, texts, ratings) in enumerate(_rated(48, 2, 4, seed)):
        votes = ["A-is-clearly-better" if a > b else "B-is-slightly-better" for a, b in ratings.T]
        people = [{"evaluator": f"person_{i}", "overall_pref": vote} for i, vote in enumerate(votes)]
        rows.append(
            {"comparison_id": f"cmp-{number}", "prompt_id": f"prm-{number}", "text": prompt}
            | {"completion_a": texts[0], "completion_b": texts[1], "model_a": "model-one", "model_b": "model-two"}
            | {"normal_worker_annotations": people[:2], "expert_worker_annotations": people[2:]}
        )
    _write_parquet(folder / "data" / "train-00000-of-00001.parquet", rows)


def _personalllm(folder: Path, seed: int) -> None:
    rows = []
    for number, (prompt, texts, ratings) in enumerate(_rated(16, 8, len(PERSONALLLM_RATERS), seed)):
        row: Row = {"prompt": prompt, "subset": "town-hall", "prompt_id": number}
        for i, text in enumerate(texts, 1):
            row |= {f"response_{i}": text, f"response_{i}_model": f"writer-{i}"}
        for j, rater in enumerate(PERSONALLLM_RATERS):
            row |= {f"response_{i}_{rater}": float(ratings[i - 1, j]) for i in range(1, 9)}
        rows.append(row)
    for split, part in _split(rows).items():
        _write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", part)


def _helpsteer2(folder: Path, seed: int) -> None:
    rows = []
    for prompt, texts, ratings in _rated(48, 2, 4, seed):
        helpfulness = np.clip(np.rint(2 + 2 * (ratings - ratings.mean(axis=0))), 0, 4).astype(int)
        pair = [
            {"prompt": prompt, "response": text, "helpfulness": values.tolist()}
            for text, values in zip(texts, helpfulness, strict=True)
        ]
        rows.append(pair)
    for split, part in _split(rows).items():
        main = [row | {"helpfulness": int(np.median(row["helpfulness"]))} for pair in part for row in pair]
        _write_lines(folder / f"{'train' if split == 'train' else 'validation'}.jsonl.gz", main)
    _write_lines(folder / "disagreements" / "disagreements.jsonl.gz", [row for pair in rows for row in pair])


def _tldr(folder: Path, seed: int) -> None:
    posts = []
    for number, (prompt, texts, ratings) in enumerate(_rated(48, 2, 7, seed)):
        info = {"id": f"t3_{number}", "post": prompt, "title": "A question for the town", "subreddit": "town"}
        summaries = [{"text": f" {text}", "policy": "sup4", "note": None} for text in texts]
        chosen = (ratings[1] > ratings[0]).astype(int).tolist()
        shared = {"info": info, "summaries": summaries, "batch": "batch3", "extra": {"confidence": 5}}
        posts.append([shared | {"choice": choice, "worker": f"w{i}"} for i, choice in enumerate(chosen)])
    labels = [
        label | {"split": "train" if split == "train" else "valid2"}
        for split, part in _split(posts).items()
        for post in part
        for label in post
    ]
    _write_lines(folder / "comparisons" / "batch3.json", labels)


SAMPLES: Mapping[str, Callable[[Path, int], None]] = {
    "multipref": _multipref,
    "personalllm": _personalllm,
    "helpsteer2": _helpsteer2,
    "tldr": _tldr,
}


def _split(rows: list[Any]) -> dict[str, list[Any]]:
    end = round(TRAIN_SHARE * len(rows))
    return {"train": rows[:end], "test": rows[end:]}


def _write_parquet(path: Path, rows: list[Row]) -> None:
    with atomic_write(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows), partial)


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with atomic_write(path) as partial:
        partial.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
