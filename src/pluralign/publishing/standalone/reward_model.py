"""Rewards of an ensemble on frozen text features, without Pluralign.

It needs numpy and safetensors, and for ensembles with a language model as encoder also torch and transformers.

    from reward_model import RewardModel

    model = RewardModel.from_pretrained(".")
    model.rewards([("Tea?", "Yes, please."), ("Tea?", "No.")])  # one row per text, one column per member

On the command line, with lines of {"prompt": …, "response": …}:

    python reward_model.py < texts.jsonl
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from pluralign.text.pooling import attention_pool, load_attention
from pluralign.text.surface import hashed_words, surface_features

BATCH_SIZE = 32
CHECK_TOLERANCE = 0.05
"""Rewards of the stored text may differ by this much, relative to their size; another encoder differs by more."""


@dataclass(frozen=True, eq=False)
class RewardModel:
    """The members of an ensemble: linear rewards on features of a prompt with a response."""

    folder: Path
    index: Mapping[str, Any]
    """Contents of ``pluralign.json``."""
    arrays: Mapping[str, Any]

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str] = ".", revision: str | None = None) -> "RewardModel":
        """Load an exported folder, or a repository of the Hugging Face hub."""
        if not Path(folder).is_dir():
            import huggingface_hub

            folder = huggingface_hub.snapshot_download(str(folder), revision=revision)
        place = Path(folder)
        index = json.loads((place / "pluralign.json").read_text(encoding="utf-8"))
        arrays = safetensors.numpy.load_file(place / index["arrays"])
        parts = {name.removeprefix("members/"): part for name, part in arrays.items() if name.startswith("members/")}
        return cls(place, index, parts)

    @property
    def names(self) -> list[str]:
        """Names of the members."""
        return [str(member["name"]) for member in self.index["members"]]

    @property
    def weights(self) -> Any:
        """Weights of the members, ``(k,)``."""
        return np.array([member["weight"] for member in self.index["members"]])

    def rewards(self, items: Sequence[tuple[Any, str]]) -> Any:
        """Return the reward of each member for each (prompt, response), ``(n_items, k)``.

        A prompt is a text, or a list of messages {"role": …, "content": …}.
        """
        return self._rewards_of(self.features(items))

    def prob_hat(self, prompt: Any, response_a: str, response_b: str) -> float:
        """Return the predicted share of people who prefer response a to response b."""
        reward_a, reward_b = self.rewards([(prompt, response_a), (prompt, response_b)])
        undecided, votes = self.index["undecided"], np.where(reward_a == reward_b, 0.5, reward_a > reward_b)
        return float(undecided / 2 + (1 - undecided) * (self.weights @ votes))

    def reward_func(self, member: int) -> Callable[..., list[float]]:
        """Return one member as a reward function for TRL: ``GRPOTrainer(reward_funcs=model.reward_func(0), …)``."""

        def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
            items = [_trl_item(*item) for item in zip(prompts, completions, strict=True)]
            distinct = list({_key(item): item for item in items}.values())
            rewards = dict(zip(map(_key, distinct), self.rewards(distinct)[:, member].tolist(), strict=True))
            return [rewards[_key(item)] for item in items]

        reward.__name__ = f"member_{member}"
        return reward

    # --- features ---------------------------------------------------------------------------------------------------

    def features(self, items: Sequence[tuple[Any, str]]) -> Any:
        """Return the ``(n_items, dimension)`` features: vectors of the encoder, then surface features."""
        reader, responses = self.index["reader"], [response for _, response in items]
        parts = []
        if reader["kind"] == "hashing":
            parts.append(hashed_words(responses, reader["dimension"]))
        elif reader["kind"] == "transformer":
            parts.append(self._encoder.vectors(items))
        if reader["surface"]:
            parts.append(surface_features(responses))
        return np.hstack(parts)

    def _rewards_of(self, features: Any) -> Any:
        arrays = self.arrays
        inputs = np.clip((features - arrays["mean"]) / arrays["spread"], -arrays["clip"], arrays["clip"])
        inputs = (inputs * arrays["gain"]).astype(np.float32)
        if "axes" in arrays:
            inputs = (inputs @ arrays["axes"]).astype(np.float32)
        return inputs @ arrays["theta"].astype(np.float64)

    @functools.cached_property
    def _encoder(self) -> "_Encoder":
        """The encoder, loaded once. Raises ValueError if it does not give the stored text its stored rewards."""
        encoder, check = _Encoder(self.folder, self.index["reader"]), self.index.get("check")
        if check:
            vectors, expected = encoder.vectors([(check["prompt"], check["response"])]), np.array(check["rewards"])
            if self.index["reader"]["surface"]:
                vectors = np.hstack([vectors, surface_features([check["response"]])])
            rewards = self._rewards_of(vectors)[0]
            if not np.all(np.abs(rewards - expected) <= CHECK_TOLERANCE * (1 + np.abs(expected))):
                raise ValueError("the encoder is not the one that the ensemble was fitted with.")
        return encoder


class _Encoder:
    """A transformers model with pooled layers."""

    def __init__(self, folder: Path, reader: Mapping[str, Any]) -> None:
        import torch
        import transformers

        beside, source = folder / "encoder", {}
        where = str(beside) if beside.is_dir() else reader["hub_id"]
        if not beside.is_dir() and reader["revision"]:
            source = {"revision": reader["revision"]}
        cut = {} if reader["keep_layers"] is None else {"num_hidden_layers": reader["keep_layers"]}
        config: Any = transformers.AutoConfig.from_pretrained(where, **source, **cut)
        load: Any = transformers.AutoModel.from_pretrained
        logging: Any = transformers.logging
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # weights of layers that are left out on purpose
        try:
            model = load(where, config=config, dtype=getattr(torch, reader["dtype"]), use_safetensors=True, **source)
        finally:
            logging.set_verbosity(verbosity)
        self.reader, self.model = reader, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(where, **source)
        self.tokenizer.truncation_side = "left"  # the response comes last
        self.attended, weights = load_attention(Path(where)) or (0, {})
        self.attention = {name: part.to(self.model.device) for name, part in weights.items()}

    def vectors(self, items: Sequence[tuple[Any, str]]) -> Any:
        """Return one vector per item, ``(n_items, dimension)``, as float32."""
        tokens = [self._tokens(*item) for item in items]
        found: dict[int, Any] = {}
        order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
        for start in range(0, len(order), BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            found.update(zip(batch, self._pooled([tokens[index] for index in batch]), strict=True))
        return np.stack([found[index] for index in range(len(tokens))])

    def _tokens(self, prompt: Any, response: str) -> list[int]:
        if self.reader["chat"]:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
            chat = [*turns, {"role": "assistant", "content": response}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        else:
            text = f"{_plain_prompt(prompt)}\n\n{response}"
        special = not self.reader["chat"]
        limit = self.reader["max_length"]
        return list(self.tokenizer(text, add_special_tokens=special, truncation=True, max_length=limit)["input_ids"])

    def _pooled(self, tokens: Sequence[Sequence[int]]) -> Any:
        import torch

        reader, width = self.reader, max(map(len, tokens))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens], device=self.model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in tokens], device=self.model.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            layers = [output.hidden_states[n] for n in reader["layers"]] or [output.last_hidden_state]
            states = output.hidden_states[self.attended]
            trained = [attention_pool(states, mask, self.attention)] if self.attention else []
            vectors = torch.hstack([*(_pool(states.float(), mask, reader["pooling"]) for states in layers), *trained])
            vectors = torch.nn.functional.normalize(vectors, dim=1) if reader["unit_length"] else vectors
        return vectors.cpu().numpy()


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[range(len(states)), mask.sum(dim=1) - 1]
    return (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


# --- texts ------------------------------------------------------------------------------------------------------------


def _messages(chat: Sequence[Any]) -> list[dict[str, str]]:
    return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in chat]


def _plain_prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in _messages(prompt))


def _trl_item(prompt: Any, completion: Any) -> tuple[Any, str]:
    """Return a prompt and a completion of TRL, texts or messages. A single user message counts as a text."""
    turns = [] if isinstance(prompt, str) else _messages(prompt)
    if not isinstance(completion, str):
        *between, last = _messages(completion)
        turns, completion = turns + between, last["content"]
    if not turns:
        return prompt, completion
    return (turns[0]["content"] if len(turns) == 1 and turns[0]["role"] == "user" else turns), completion


def _key(item: tuple[Any, str]) -> str:
    return json.dumps(item)


def main() -> None:
    """Print the rewards of the lines on stdin."""
    rows = [json.loads(line) for line in sys.stdin if line.strip()]
    model = RewardModel.from_pretrained(Path(__file__).parent)
    for rewards in model.rewards([(row["prompt"], row["response"]) for row in rows]):
        print(json.dumps({"rewards": rewards.tolist()}))


if __name__ == "__main__":
    main()
