"""How well measures of novelty tell nonsense from real statements, and what the gate of --distill refuses.

    python benchmarks/statement_gate.py DIR TEXTS [--prompts 24] [--temperatures 0.5,1.2,2.0] [--perplexity] [--json]

DIR is an ensemble with held-out votes, whose texts are the real statements. TEXTS is a folder for statements that
SmolLM2 writes from three real statements of a prompt, at several temperatures; a partial one is resumed. Other nonsense
is made from real statements: *shuffled* (the words of one), *mixed* (five sentences about five other questions) and
*off topic* (a statement about another question).

Held-out prompts are split in halves by their hash. Thresholds, word models and reference features come from the first
half: thresholds are quantiles of its statements, each measured without its own prompts. The table shows the second
half: the share above the threshold, at 1 % and at 5 %, of real statements (false alarms) and of each kind of nonsense.
``--perplexity`` adds SmolLM2's own mean log-probability per token, which is slow; TEXTS caches it. The last rows are
the gate itself, fitted to the first half.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from pluralign.answering.gate import (
    REASONS,
    WordModel,
    conformal_quantile,
    fit_gate,
    last_layer,
    measure_held_out,
    measure_texts,
)
from pluralign.answering.generate import generate
from pluralign.answering.slate import INSTRUCTION
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import load_held_out
from pluralign.votes.candidates import Candidates, candidates_of
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

LEVELS = (0.01, 0.05)
SLATE = 3
"""Real statements that the writer gets."""
NEIGHBOURS = 3
COMPONENTS = 48
"""Principal components of Mahalanobis distances; the other directions share one variance."""
SCORED_TOKENS, SCORED_PROMPTS = 120, 64
"""Perplexity: tokens per text, and held-out prompts whose statements give the threshold, two of every other prompt."""


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
    parser.add_argument("texts", type=Path)
    parser.add_argument("--prompts", type=int, default=24, help="prompts that SmolLM2 writes statements for")
    parser.add_argument("--temperatures", default="0.5,1.2,1.5,2.0", help="comma-separated; empty for none")
    parser.add_argument("--perplexity", action="store_true", help="score texts with SmolLM2 too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    ensemble, held_out = RewardEnsemble.load(arguments.ensemble), load_held_out(arguments.ensemble)
    lists = sorted(candidates_of(held_out.preferences), key=lambda one: Prompt(one.prompt).hash())
    arguments.texts.mkdir(exist_ok=True)
    texts = [Text("real", i, text) for i, one in enumerate(lists) for text in one.responses]
    for temperature in filter(None, arguments.temperatures.split(",")):
        texts += written(lists[: arguments.prompts], float(temperature), arguments.texts)
    texts += made_nonsense(lists)
    results = measure_all(ensemble, lists, texts, arguments.texts if arguments.perplexity else None, arguments.prompts)
    first = [i for i in range(len(lists)) if i % 2 == 0]
    prompt_of = held_out.preferences.prompt_index
    keys = [Prompt(prompt).key for prompt in held_out.preferences.prompts]
    chosen = {Prompt(lists[i].prompt).key for i in first}
    mask = np.array([keys[number] in chosen for number in prompt_of])
    results |= gate_rows(ensemble, held_out.preferences[mask], lists, texts)
    if arguments.json:
        print(json.dumps(results))
        return
    kinds = list(dict.fromkeys(text.kind for text in texts))
    table = Table(box=box.SIMPLE_HEAD, title=f"Share refused at 1 % / 5 %, {len(lists) - len(first)} prompts")
    for heading in ("measure", *kinds):
        table.add_column(heading, justify="right" if heading != "measure" else "left")
    for name, row in results.items():
        table.add_row(
            name, *(" / ".join(f"{value:.3f}" for value in row[kind]) if kind in row else "" for kind in kinds)
        )
    counts = {kind: sum(text.kind == kind and text.prompt % 2 == 1 for text in texts) for kind in kinds}
    table.add_row("texts", *(str(counts[kind]) for kind in kinds))
    Console(width=160).print(table)


# --- texts ------------------------------------------------------------------------------------------------------------


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
        Text(f"T {temperature:g}", instructions[row["prompt"]], text)
        for row in rows
        if row["prompt"] in instructions
        for text in row["responses"]
    ]


def made_nonsense(lists: Sequence[Candidates]) -> list[Text]:
    """Return one text of each other kind per prompt."""
    random, texts = np.random.default_rng(0), []
    for i, one in enumerate(lists):
        words = one.responses[0].split()
        texts.append(Text("shuffled", i, " ".join(words[j] for j in random.permutation(len(words)))))
        others = random.choice([j for j in range(len(lists)) if j != i], size=5, replace=False)
        sentences = [random.choice(lists[j].responses[0].split(". ")) for j in others]
        texts.append(Text("mixed", i, ". ".join(sentences)))
        texts.append(Text("off topic", i, lists[others[0]].responses[0]))
    return texts


# --- measures ---------------------------------------------------------------------------------------------------------


def measure_all(
    ensemble: RewardEnsemble, lists: Sequence[Candidates], texts: Sequence[Text], cache: Path | None, scored: int
) -> dict[str, dict[str, list[float]]]:
    """Return the shares above the thresholds, by measure and kind."""
    first = [text for text in texts if text.kind == "real" and text.prompt % 2 == 0]
    second = [text for text in texts if text.prompt % 2 == 1]
    fold = np.array([text.prompt // 2 % 5 for text in first])
    order = np.argsort(fold, kind="stable")
    first, fold = [first[i] for i in order], fold[order]
    questions = [Prompt(one.prompt).text for one in lists]
    known, new = ([(questions[text.prompt], text.text) for text in part] for part in (first, second))
    embed, model = last_layer(ensemble.features), WordModel.of([text for _, text in known])
    measured = {
        **_named(measure_held_out(known, fold, embed), measure_texts(model, embed, new)),
        **_named(
            {"lacking": measure_held_out(known, fold, None)["topic"]},
            {"lacking": measure_texts(model, None, new)["topic"]},
        ),
    }
    known_features, new_features = (
        ensemble.features([(lists[text.prompt].prompt, text.text) for text in part]) for part in (first, second)
    )
    for name, columns in layers(ensemble, known_features.shape[1]).items():
        a, b = known_features[:, columns].astype(np.float64), new_features[:, columns].astype(np.float64)
        if name == "surface":
            centre, spread = a.mean(axis=0), np.maximum(a.std(axis=0), 1e-9)
            a, b = (a - centre) / spread, (b - centre) / spread
        for kind, distance in (("kNN", nearest), ("Mahalanobis", mahalanobis)):
            held_out = np.empty(len(a))
            for number in np.unique(fold):
                held_out[fold == number] = distance(a[fold == number], a[fold != number])
            measured[f"{kind}, {name}"] = (held_out, distance(b, a))
    results = {name: shares(before, after, second) for name, (before, after) in measured.items()}
    if cache is not None:
        log_prob = partial(perplexity, questions, cache / "perplexity.json")
        two = {i: list(one.responses)[:2] for i, one in enumerate(lists)}
        of_first = [text for text in first if text.prompt < SCORED_PROMPTS and text.text in two[text.prompt]]
        of_second = [text for text in second if text.prompt < scored]
        of_second = [text for text in of_second if text.kind != "real" or text.text in two[text.prompt]]
        results["perplexity of SmolLM2"] = shares(log_prob(of_first), log_prob(of_second), of_second)
    return results


def _named(before: dict[str, FloatArray], after: dict[str, FloatArray]) -> dict[str, tuple[FloatArray, FloatArray]]:
    return {name: (before[name], after[name]) for name in before}


def layers(ensemble: RewardEnsemble, n_columns: int) -> dict[str, slice]:
    """Return the columns of each layer of the encoder, and of the surface features."""
    from pluralign.text.surface import NAMES

    n_layers = getattr(ensemble.features, "n_layers", 1)
    size = (n_columns - len(NAMES)) // n_layers
    found = {
        f"layer {number + 1} of {n_layers}": slice(number * size, (number + 1) * size) for number in range(n_layers)
    }
    return found | {"surface": slice(n_columns - len(NAMES), n_columns)}


def nearest(new: FloatArray, known: FloatArray) -> FloatArray:
    """Return the mean cosine distance to the nearest known texts, ``(n_new,)``."""
    a, b = (part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12) for part in (new, known))
    return np.asarray(1 - np.sort(a @ b.T, axis=1)[:, -NEIGHBOURS:].mean(axis=1))


def mahalanobis(new: FloatArray, known: FloatArray) -> FloatArray:
    """Return the squared distance from the mean of the known texts, in units of their variance, ``(n_new,)``."""
    a, b = (part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12) for part in (new, known))
    a, b = a - b.mean(axis=0), b - b.mean(axis=0)
    _, _, directions = np.linalg.svd(b, full_matrices=False)
    directions = directions[:COMPONENTS].T
    inside, inside_known = a @ directions, b @ directions
    outside, outside_known = (
        (part**2).sum(axis=1) - (projected**2).sum(axis=1) for part, projected in ((a, inside), (b, inside_known))
    )
    variance = float(outside_known.mean()) / max(1, min(b.shape) - COMPONENTS)
    within = ((inside / np.maximum(inside_known.std(axis=0), 1e-9)) ** 2).sum(axis=1)
    return np.asarray(within + outside / max(variance, 1e-12))


def perplexity(questions: Sequence[str], cache: Path, texts: Sequence[Text]) -> FloatArray:
    """Return −log π per token by SmolLM2, given the question, ``(n_texts,)``."""
    import torch

    from pluralign.text.causal import LocalModel, prompt_ids, token_log_probs

    known = json.loads(cache.read_text()) if cache.exists() else {}
    model = LocalModel("smollm2")
    for text in texts:
        key = f"{questions[text.prompt]}|{text.text}"
        if key in known:
            continue
        ids = model.tokenizer(text.text, add_special_tokens=False)["input_ids"][:SCORED_TOKENS]
        with torch.inference_mode():
            context = prompt_ids(model.tokenizer, questions[text.prompt])
            known[key] = -float(token_log_probs(model.model, [context], [ids])[0].mean())
        cache.write_text(json.dumps(known))
    return np.array([known[f"{questions[text.prompt]}|{text.text}"] for text in texts])


def shares(before: FloatArray, after: FloatArray, texts: Sequence[Text]) -> dict[str, list[float]]:
    """Return the shares of texts above the thresholds of ``before``, by kind."""
    thresholds = [conformal_quantile(before, level) for level in LEVELS]
    kinds = np.array([text.kind for text in texts])
    return {
        kind: [float((after[kinds == kind] > threshold).mean()) for threshold in thresholds]
        for kind in dict.fromkeys(kinds.tolist())
    }


def gate_rows(
    ensemble: RewardEnsemble, first: PreferenceSet, lists: Sequence[Candidates], texts: Sequence[Text]
) -> dict[str, dict[str, list[float]]]:
    """Return the shares that the gate refuses at both levels, for any reason and by its first reason."""
    second = [text for text in texts if text.prompt % 2 == 1]
    refuse: dict[float, Callable[..., list[str]]] = {}
    for level in LEVELS:
        gate = fit_gate(first, ensemble.features, level)
        assert gate is not None
        refuse[level] = gate.reasons
    reasons = {level: [refuse[level](lists[text.prompt].prompt, [text.text])[0] for text in second] for level in LEVELS}
    kinds = list(dict.fromkeys(text.kind for text in second))

    def share(kind: str, level: float, wanted: str | None) -> float:
        hits = [
            reason != "" if wanted is None else reason == wanted
            for text, reason in zip(second, reasons[level], strict=True)
            if text.kind == kind
        ]
        return float(np.mean(hits))

    rows = {"the gate": {kind: [share(kind, level, None) for level in LEVELS] for kind in kinds}}
    for name, reason in REASONS.items():
        rows[f"… first by {name}"] = {kind: [share(kind, level, reason) for level in LEVELS] for kind in kinds}
    return rows


if __name__ == "__main__":
    main()
