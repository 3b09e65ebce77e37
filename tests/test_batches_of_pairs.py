"""Micro-batches of fine-tuning: whole prompts, each text once, and the same loss as pair by pair."""

from itertools import chain, combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pluralign.learning.backbone.losses import PairLessons, RunningFigures
from pluralign.learning.backbone.recipe import MicroBatch, TextPairs, draw_steps, length_groups, split_steps
from pluralign.learning.backbone.train import MicroBatches, PairTrainer
from pluralign.text.loading import padded


def squared_error(difference: Any, labels: Any, *_: Any) -> Any:
    return ((torch.sigmoid(difference[:, 0]) - labels["prob_a"]) ** 2).mean()


def pairs_of(prompts: int, responses: int, seed: int = 0) -> tuple[PairLessons, np.ndarray]:
    """Return all pairs of the responses of each prompt, and the lengths of the texts."""
    rng = np.random.default_rng(seed)
    both = np.array(list(combinations(range(responses), 2)))
    a, b = (both[:, side].astype(np.int32) + responses * np.arange(prompts, dtype=np.int32)[:, None] for side in (0, 1))
    items = [(f"prompt {text // responses}", f"text {text}") for text in range(prompts * responses)]
    prompt = np.repeat(np.arange(prompts, dtype=np.int32), len(both))
    pairs = TextPairs(items, a.ravel(), b.ravel(), rng.random(a.size), prompt)
    return PairLessons(pairs, squared_error, {"prob_a": pairs.prob_a}), rng.integers(5, 50, len(items))


def test_an_epoch_takes_every_pair_once_and_keeps_the_pairs_of_a_prompt_together() -> None:
    """Two epochs of steps that hold two whole prompts."""
    pairs, _ = pairs_of(prompts=8, responses=4)
    steps = draw_steps(pairs.prompt, 8, 12, np.random.default_rng(1))
    for epoch in (steps[:4], steps[4:]):
        assert sorted(epoch.ravel()) == list(range(48))
    assert all(len(np.unique(pairs.prompt[step])) == 2 for step in steps)
    assert not np.array_equal(steps[:4], steps[4:])


@pytest.mark.parametrize(("responses", "batch", "max_texts", "processes"), [
    (2, 8, 4, 1), (4, 12, 6, 1), (4, 12, 6, 2), (8, 56, 16, 2), (8, 14, 2, 2), (6, 7, 3, 1), (3, 4, 100, 4),
])  # fmt: skip
def test_micro_batches_hold_each_pair_of_a_step_once_and_few_texts(
    responses: int, batch: int, max_texts: int, processes: int
) -> None:
    """The split is complete, keeps to the maximum, and has the same number of micro-batches in every step."""
    pairs, lengths = pairs_of(12, responses)
    steps = draw_steps(pairs.prompt, len(pairs.texts) // batch, batch, np.random.default_rng(0))
    split = split_steps(steps, pairs, lengths, max_texts, processes)
    if (responses, batch) == (8, 56):  # the shape of PersonalLLM: reading both texts of every pair would be 56
        assert sum(len(part.texts) for parts in split for part in parts) == 12 * 8
    assert len({len(parts) for parts in split}) == 1
    assert len(split[0]) % processes == 0
    for step, parts in zip(steps, split, strict=True):
        assert sorted(np.concatenate([part.units for part in parts])) == sorted(step)
        assert np.mean([part.scale for part in parts]) == pytest.approx(1)
        for part in parts:
            used = {text for unit in part.units for text in pairs.texts[unit]}
            assert sorted(used) == part.texts.tolist()
            assert len(used) <= max_texts
            assert part.scale == pytest.approx(len(part.units) * len(parts) / batch)


def test_texts_of_similar_length_share_a_micro_batch() -> None:
    """The padding is less than in random order."""
    pairs, lengths = pairs_of(64, 2)
    steps = draw_steps(pairs.prompt, 1, 64, np.random.default_rng(0))
    (parts,) = split_steps(steps, pairs, lengths, max_texts=8)
    widths = [lengths[part.texts].max() for part in parts]
    assert widths == sorted(widths, reverse=True)
    read = sum(width * len(part.texts) for width, part in zip(widths, parts, strict=True))
    shuffled = np.random.default_rng(0).permutation(lengths).reshape(-1, 8)
    assert read < 0.85 * (shuffled.max(axis=1) * 8).sum()


@pytest.mark.parametrize("pass_tokens", [0, 7, 30, 10_000])
def test_length_groups_have_the_lowest_cost_of_all_splits_by_length(pass_tokens: int) -> None:
    """Compared with every way to cut the sorted texts."""
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 40, 7).tolist()
        groups = length_groups(lengths, pass_tokens)
        assert sorted(chain.from_iterable(groups)) == list(range(7))
        ordered = sorted(lengths, reverse=True)
        assert [lengths[text] for group in groups for text in group] == ordered
        costs = []
        for cuts in chain.from_iterable(combinations(range(1, 7), n) for n in range(7)):
            parts = [ordered[i:j] for i, j in pairwise((0, *cuts, 7))]
            costs.append(sum(len(part) * part[0] + pass_tokens for part in parts))
        assert sum(len(group) * lengths[group[0]] + pass_tokens for group in groups) == min(costs)


@pytest.mark.parametrize("processes", [1, 2])
def test_rewards_do_not_depend_on_the_groups_of_a_micro_batch(processes: int) -> None:
    """In several processes there is one forward pass."""
    rng = np.random.default_rng(0)
    tokens = [{"input_ids": rng.integers(1, 9, n).tolist(), "attention_mask": [1] * n} for n in (5, 300, 7, 280, 6)]
    inputs, shapes = padded(tokens, 0, "cpu"), []

    def model(input_ids: Any, attention_mask: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=(input_ids * attention_mask).sum(1, keepdim=True))

    trainer: Any = SimpleNamespace(args=SimpleNamespace(world_size=processes, device=torch.device("cpu")))
    rewards = PairTrainer.rewards(trainer, model, inputs)
    assert rewards[:, 0].tolist() == [sum(text["input_ids"]) for text in tokens]
    assert shapes == ([(2, 300), (3, 7)] if processes == 1 else [(5, 300)])


def test_gradient_of_a_step_is_that_of_reading_both_texts_of_every_pair() -> None:
    """A linear reward of token counts, with a loss that is a mean over pairs."""
    pairs, lengths = pairs_of(6, 5)
    rng = np.random.default_rng(3)
    tokens = [{"input_ids": rng.integers(1, 9, n).tolist(), "attention_mask": [1] * n} for n in lengths.tolist()]
    steps = draw_steps(pairs.prompt, 2, 30, rng)
    split = split_steps(steps, pairs, lengths, max_texts=12)

    def batch_loss(part: MicroBatch, weight: Any) -> Any:
        data = MicroBatches([part], tokens, pad=0)[0]
        reward = (weight[data["input_ids"]] * data["attention_mask"]).sum(1, keepdim=True)
        return part.scale * pairs.loss(reward, data["batch"], RunningFigures(), 0.0)

    for step, parts in zip(steps, split, strict=True):
        weight = torch.linspace(-0.1, 0.1, 9, requires_grad=True)
        loss: Any = torch.stack([batch_loss(part, weight) for part in parts]).mean()
        loss.backward()
        alone = torch.linspace(-0.1, 0.1, 9, requires_grad=True)
        one_by_one = []
        for pair in step:
            a, b = (alone[tokens[text]["input_ids"]].sum() for text in pairs.texts[pair])
            one_by_one.append((torch.sigmoid(a - b) - pairs.pairs.prob_a[pair]) ** 2)
        pair_loss: Any = torch.stack(one_by_one).mean()
        pair_loss.backward()
        assert weight.grad is not None
        assert alone.grad is not None
        torch.testing.assert_close(weight.grad, alone.grad.float(), rtol=1e-4, atol=1e-6)
