"""How often the gate refuses real statements, and how often nonsense.

    python benchmarks/statement_gate.py DIR [--write TEXTS] [--temperatures 0.5,1.2,2.0] [--prompts 24] [--json]

DIR is an ensemble with held-out votes, whose texts are the real statements. Held-out prompts are split in halves by
their hash: the gate is fitted to the first half, with the ensemble's encoder and without. The table shows the share of
refused texts on the second half. Real texts (false alarms): whole statements, their first sentences, and their first 5,
10 and 20 words. Nonsense: *keyboard* (random letters), *repeated* (two words, again and again), *shuffled* (the words
of a statement), *mixed* (five sentences about five other questions), *off topic* (a statement about another question).
With ``--write``, SmolLM2 writes statements from three real ones, as --distill does, at several temperatures; a partial
folder TEXTS is resumed.
"""

import argparse
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tables import Row, show

from pluralign.answering.gate import REASONS, fit_gate
from pluralign.answering.generate import generate
from pluralign.answering.slate import INSTRUCTION
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import load_held_out
from pluralign.votes.candidates import Candidates, candidates_of
from pluralign.votes.prompts import Prompt

SLATE = 3
"""Real statements that the writer gets."""
WORDS = (5, 10, 20)


@dataclass(frozen=True)
class Text:
    """A text with its prompt's number and its kind."""

    kind: str
    prompt: int
    text: str


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ensemble", type=Path)
    parser.add_argument("--write", type=Path, help="folder for statements of SmolLM2")
    parser.add_argument("--temperatures", default="0.5,1.2,2.0", help="comma-separated")
    parser.add_argument("--prompts", type=int, default=24, help="prompts that SmolLM2 writes statements for")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    ensemble, votes = RewardEnsemble.load(arguments.ensemble), load_held_out(arguments.ensemble).preferences
    lists = sorted(candidates_of(votes), key=lambda one: Prompt(one.prompt).hash())
    texts = [*real_texts(lists), *nonsense(lists)]
    if arguments.write:
        arguments.write.mkdir(exist_ok=True)
        for temperature in arguments.temperatures.split(","):
            texts += written(lists[: arguments.prompts], float(temperature), arguments.write)
    keys = {Prompt(one.prompt).key for one in lists[::2]}
    first = votes[np.array([Prompt(votes.prompts[number]).key in keys for number in votes.prompt_index])]
    rows: list[Row] = []
    for name, features in (("encoder", ensemble.features), ("none", None)):
        gate = fit_gate(first, features)
        if gate is None:
            raise SystemExit("the ensemble has too few held-out texts.")
        rows += list(measure(name, gate.check, lists, [text for text in texts if text.prompt % 2 == 1]))
    show(rows, f"Share of refused texts by first reason, {len(lists) // 2} prompts", as_json=arguments.json)


def measure(
    name: str, check: Callable[..., list[str]], lists: Sequence[Candidates], texts: Sequence[Text]
) -> Iterator[Row]:
    """Yield the shares of refused texts, by kind."""
    for kind in dict.fromkeys(text.kind for text in texts):
        of = [text for text in texts if text.kind == kind]
        found = check([(lists[text.prompt].prompt, text.text) for text in of])
        first = {key: float(np.mean([one == reason for one in found])) for key, reason in REASONS.items()}
        refused = float(np.mean([one != "" for one in found]))
        yield {"encoder": name, "kind": kind, "texts": len(of), "refused": refused, **first}


def real_texts(lists: Sequence[Candidates]) -> list[Text]:
    """Return the real statements, whole and in part."""
    texts = [Text("real", i, text) for i, one in enumerate(lists) for text in one.responses]
    parts = [Text("first sentence", one.prompt, re.split(r"(?<=[.!?])\s", one.text)[0]) for one in texts]
    for length in WORDS:
        words = ((one, one.text.split()[:length]) for one in texts)
        parts += [Text(f"first {length} words", one.prompt, " ".join(of)) for one, of in words if len(of) == length]
    return texts + parts


def nonsense(lists: Sequence[Candidates]) -> list[Text]:
    """Return two texts of each kind of nonsense per prompt."""
    random, texts = np.random.default_rng(0), []
    vocabulary = sorted({word for one in lists for text in one.responses for word in text.split() if word.isalpha()})
    for i, one in enumerate(lists):
        for text in one.responses[:2]:
            letters = ("".join(random.choice(list(string.ascii_lowercase), random.integers(2, 9))) for _ in range(4))
            texts.append(Text("keyboard", i, " ".join(letters)))
            a, b = random.choice(vocabulary, 2)
            texts.append(Text("repeated", i, " ".join([a] * random.integers(2, 5) + [b] * random.integers(1, 4))))
            texts.append(Text("shuffled", i, " ".join(random.permutation(text.split()))))
            others = random.choice([j for j in range(len(lists)) if j != i], size=5, replace=False)
            sentences = [random.choice(lists[j].responses[0].split(". ")) for j in others]
            texts.append(Text("mixed", i, ". ".join(sentences)))
            texts.append(Text("off topic", i, lists[others[0]].responses[0]))
    return texts


def written(lists: Sequence[Candidates], temperature: float, folder: Path) -> list[Text]:
    """Return two statements per prompt, written by SmolLM2 as --distill would request them."""
    instructions = {}
    for i, one in enumerate(lists):
        slate = list(one.responses)[:SLATE]
        answers = "\n".join(f"- ({1 / len(slate):.0%}) {text}" for text in slate)
        instructions[INSTRUCTION.format(prompt=Prompt(one.prompt).text, answers=answers)] = i
    file = folder / f"written-{temperature:g}.jsonl"
    generate(list(instructions), file, "smollm2", 2, temperature=temperature, max_new_tokens=80)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        Text(f"SmolLM2 at {temperature:g}", instructions[row["prompt"]], text)
        for row in rows
        if row["prompt"] in instructions
        for text in row["responses"]
    ]


if __name__ == "__main__":
    main()
