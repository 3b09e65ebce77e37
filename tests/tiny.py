"""Tiny language models and tokenizers, and votes that the models can learn."""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from pluralign import PreferenceSet, load_preferences

ENCODER_WORDS = ["tea", "?", "yes", ".", "no", ",", "never", "thank", "you", "rum", "user", "assistant"]
"""Vocabulary of the tiny encoders and classifiers."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
WORDS = ["tea", "rum", "yes", "no", "never", "thank", "you", "so", "well", "fine", "?", ".", "user", "assistant"]


def word_tokenizer(special: list[str], **options: Any) -> Any:
    """Return a tokenizer of whole words. With ``[CLS]``, texts get their first and last token."""
    import tokenizers

    model: Any = tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(special + ENCODER_WORDS)}, unk_token=special[0]
    )
    tokenizer: Any = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if "[CLS]" in special:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            special_tokens=[("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))],
        )
    transformers: Any = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=special[0], **options)


def write_backbone(folder: Path, *, template: bool = True, pad: bool = False, eos: bool = True, **config: Any) -> Path:
    """Write a causal model of two layers, as a hub would provide it: no reward head, no padding token."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    names = ["<unk>", "<s>", *(["</s>"] if eos else []), *(["<pad>"] if pad else []), *WORDS]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(names)}, unk_token="<unk>")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>"} | ({"eos_token": "</s>"} if eos else {}) | ({"pad_token": "<pad>"} if pad else {})
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)
    tokenizer.chat_template = CHAT_TEMPLATE if template else None
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    sizes |= {
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        options = {**sizes, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None, **config}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).save_pretrained(folder)
    return folder


def two_camps(prompts: int, seed: int = 0, people: int = 10) -> list[dict[str, Any]]:
    """Return rows of votes: six of ten people prefer tea, four prefer rum; other words have no effect.

    One response has tea and one has rum, perhaps the same one, so shares are 0, .4, .6 or 1.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(prompts):
        texts = [list(rng.choice(WORDS[2:10], size=rng.integers(3, 7))) for _ in range(2)]
        tea, rum = rng.integers(2, size=2)
        texts[tea].insert(rng.integers(3), "tea")
        texts[rum].insert(rng.integers(3), "rum")
        for_a = round(people * (0.6 * (tea == 0) + 0.4 * (rum == 0)))
        responses = {"response_a": " ".join(texts[0]), "response_b": " ".join(texts[1])}
        rows.append({"prompt": f"so {number} ?", **responses, "votes_a": for_a, "votes_b": people - for_a})
    return rows


def camp_votes(folder: Path, prompts: int) -> PreferenceSet:
    """Return the votes of ``two_camps``, written into a file ``camps.jsonl``."""
    path = folder / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(prompts))))
    return load_preferences(str(path))


def ranked_camps(n: int) -> list[dict[str, Any]]:
    """Return rankings of four responses by five people: three like tea, two like rum."""
    rng, rows = np.random.default_rng(0), []
    for number in range(n):
        kinds = list(itertools.product(("tea", "never"), ("rum", "no")))
        texts = [" ".join(rng.permutation([*kind, *rng.choice(WORDS[5:10], 2)])) for kind in kinds]
        for person in range(5):
            liked = [4 * (("tea", "rum")[person > 2] in kind) + rng.gumbel() for kind in kinds]
            ranking, who = np.argsort(-np.array(liked)).tolist(), person + 5 * (number % 9)
            rows.append({"prompt": f"so {number} ?", "responses": texts, "ranking": ranking, "person": who})
    return rows


def write_sentence_encoder(folder: Path, **config: Any) -> Path:
    """Write a BERT of two narrow layers as a folder of sentence-transformers: mean over tokens."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    tokenizer = word_tokenizer(special, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=32)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 32, "max_position_embeddings": 32, "hidden_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "pad_token_id": 1, **config}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.BertModel(transformers.BertConfig(initializer_range=0.5, **sizes))
    model.save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
