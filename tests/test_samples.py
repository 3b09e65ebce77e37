"""Sampled responses: KL to a reference, standardised rewards, and pairs for DPO."""

import importlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tiny import write_backbone

from pluralign.answering.adapters import Policy, best_and_worst, reward_scale, sampled_kl
from pluralign.text.options import SamplingOptions

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("llama"), eos_token_id=2, initializer_range=0.2)


@pytest.fixture(scope="module")
def moved(llama: Path) -> Policy:
    """A policy with a random adapter."""
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    policy = Policy(str(llama))
    config = peft.LoraConfig("CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy.model = peft.get_peft_model(policy.model, config).eval()
    return policy


def test_the_sampled_kl_estimates_the_exact_kl_over_all_responses(moved: Policy) -> None:
    temperature, prompts = 1.3, ["tea ?", "rum ?", "so well ?", "no ?"]
    every = [[2], *([one, two] for one in range(32) for two in range(32) if one != 2)]
    exact, own, base = [], [], []
    for prompt in prompts:
        context = moved.context(prompt, 2)
        p = moved.log_prob(context, every, temperature, at_once=256)
        with moved.model.disable_adapter():
            q = moved.log_prob(context, every, temperature, at_once=256)
        assert np.exp(p).sum() == pytest.approx(1, abs=1e-4), "all responses are listed"
        exact.append(np.exp(p) @ (p - q))
        place = {tuple(ids): i for i, ids in enumerate(every)}
        drawn = moved.draw(prompt, 400, SamplingOptions(temperature=temperature, max_new_tokens=2), at_once=400)
        rows = [place[tuple(response.tokens)] for response in drawn]
        own.append(p[rows])
        base.append(q[rows])
    found = sampled_kl(own, base)
    ratio = np.array(own) - np.array(base)
    error = np.sqrt(np.mean([row.var(ddof=1) for row in ratio]) / ratio.size)
    assert np.mean(exact) > 10 * error, "the KL is far from 0"
    assert abs(found.mean - np.mean(exact)) < 4 * error


def test_the_standard_error_of_kl_counts_prompts_not_samples() -> None:
    rng = np.random.default_rng(0)
    of_prompt = rng.normal(1.0, 1.0, size=(200, 1))
    found = sampled_kl(of_prompt + rng.normal(0, 0.1, size=(200, 16)), np.zeros((200, 16)))
    assert found.standard_error == pytest.approx(of_prompt.std() / np.sqrt(200), rel=0.1)


@given(st.floats(0.01, 100), st.floats(-100, 100))
def test_standardised_rewards_do_not_depend_on_scale_and_offset(gain: float, offset: float) -> None:
    rewards = np.random.default_rng(3).normal(size=(5, 4, 2))
    other = rewards * gain + offset
    np.testing.assert_allclose(reward_scale(other)(other), reward_scale(rewards)(rewards), atol=1e-6)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=2, max_size=20))
def test_pairs_join_the_best_and_the_worst_responses(rewards: list[float]) -> None:
    pairs = best_and_worst(rewards)
    assert len({i for pair in pairs for i in pair}) == 2 * len(pairs) <= max(2, len(rewards) // 2)
    assert bool(pairs) == (min(rewards) < max(rewards))
    if pairs:
        assert (rewards[pairs[0][0]], rewards[pairs[0][1]]) == (max(rewards), min(rewards))
    for (best, worst), (next_best, next_worst) in pairwise(pairs):
        assert rewards[best] >= rewards[next_best] > rewards[next_worst] >= rewards[worst]
