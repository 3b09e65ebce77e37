"""Rehearsal: an experiment with few votes and a tiny language model, which runs in a minute without network or GPU.

Its figures mean nothing: the weights of the model are random.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pluralign.core.errors import MissingExtraError
from pluralign.experiments.recipes import RECIPES, Experiment
from pluralign.text.loading import quiet_transformers
from pluralign.votes.load import load_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.town_hall.town_hall import town_hall

PROMPTS, PAIRS = 48, 200
"""Maximum number of prompts and pairs of a rehearsal."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIAL = ("<|unknown|>", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def rehearsal(experiment: Experiment) -> Experiment:
    """Return an experiment with the same steps that takes seconds, and write its votes and its model into its folder.

    The votes are the first ones of the experiment, or those of the town hall if the experiment would download its own.
    """
    recipe, options, folder = experiment.recipe, experiment.options, experiment.folder / "rehearsal"
    votes, model = folder / "votes.parquet", folder / "model"
    if not votes.exists():  # a run with another seed must not change the votes of a finished one: it is rejected later
        if experiment.data in RECIPES:
            known = town_hall(PAIRS, seed=options.seed).preferences
        else:
            known = load_preferences(experiment.data, experiment.load)
        folder.mkdir(parents=True, exist_ok=True)
        known[known.prompt_index < PROMPTS][:PAIRS].save(votes)
    if not (model / "tokenizer.json").is_file():
        sample = PreferenceSet.load(votes)
        write_tiny_model(model, [*sample.responses, *map(str, sample.prompts)], seed=options.seed)
    shown = {"prompts": "held-out", "limit": 4, "n": 5, "max_new_tokens": 12}
    short = replace(
        recipe,
        title=f"{recipe.title} (rehearsal)",
        paper=None,
        fit={**recipe.fit, "k": 2},
        finetune={**recipe.finetune, "batch_size": 16, "max_length": 256, "learning_rate": 1e-3},
        generate={**recipe.generate, **shown},
    )
    chosen = replace(options, tiny=False, backbone=str(model), hardware="cpu")
    return replace(experiment, recipe=short, data=str(votes), options=chosen, load=LoadOptions())


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
