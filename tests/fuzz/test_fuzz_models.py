"""Model folders with hostile settings: a library reads the folder, or one sentence refuses it; no code of it runs."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_loading import DOORS, changed, sound

from fuzz import cases, random_of
from pluralign.core.errors import PluralignError
from pluralign.text.loading import ALLOWED, CODE_KEYS

__all__ = ["sound"]
FILES = (
    *("config.json", "tokenizer_config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("1_Pooling/config.json", "2_Words/wordembedding_config.json", "2_Router/router_config.json", "tokenizer.json"),
    *("generation_config.json", "processor_config.json", "adapter_config.json", "model.safetensors.index.json"),
)
KEYS = (
    *(*CODE_KEYS, *ALLOWED, "tokenizer_file", "tokenizer_name_or_path", "_name_or_path", "subfolder", "gguf_file"),
    *("weight_map", "model_type", "architectures", "hidden_act", "dtype", "pooling_mode", "chat_template"),
    *("quantization_config", "base_model_name_or_path", "custom_generate", "backend", "vocab_file", "pad_token_id"),
)
VALUES: tuple[Any, ...] = (
    *("evil.Evil", "evil", "evil/repo", "../evil", "/etc/passwd", "", "\x1b[2J\u202e", "{{ evil.Evil }}", "x" * 500),
    *({"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, {"a": "../x.safetensors"}, ["evil.Evil"], [[]], {}),
    *(True, False, 0, -1, 10**30, 1e308, float("nan")),
)
INSIDE = ("", "", "model_kwargs", "model_args", "processor_kwargs", "tokenizer_args", "config_kwargs", "text_config")


@pytest.mark.parametrize("case", cases(share=0.5))
def test_a_hostile_model_folder_runs_no_code(case: int, sound: Path, tmp_path: Path) -> None:
    random, folder = random_of(case, "models"), tmp_path / "model"
    door = list(DOORS)[case % len(DOORS)]
    shutil.copytree(sound / ("encoder" if door == "encoder" else "causal"), folder)
    for _ in range(int(random.integers(1, 4))):
        file, key, inside = (str(random.choice(names)) for names in (FILES, KEYS, INSIDE))
        setting = {key: VALUES[int(random.integers(len(VALUES)))]}
        changed(folder / file, **({inside: setting} if inside else setting))
    if (folder / "modules.json").is_file() and random.random() < 0.3:
        modules = json.loads((folder / "modules.json").read_text())
        modules[-1][str(random.choice(["type", "path", "name"]))] = VALUES[int(random.integers(len(VALUES)))]
        (folder / "modules.json").write_text(json.dumps(modules))
    with suppress(PluralignError):
        DOORS[door](folder)
    assert not (folder / "ran").exists()
