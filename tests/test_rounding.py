"""Stochastic rounding: right in expectation, the same in every process, and AdamW that keeps small steps."""

import importlib
from typing import Any

import pytest

from pluralign.learning.backbone import optimizer as rounding
from pluralign.learning.backbone.optimizer import RoundedAdamW, Rounding

torch: Any = importlib.import_module("torch")


def test_rounding_is_unbiased_and_repeatable() -> None:
    exact = torch.full((100_000,), 1.0 + 2**-9)  # a quarter of the way to the next bfloat16
    first, again, later = (torch.empty(100_000, dtype=torch.bfloat16) for _ in range(3))
    for target, step in ((first, 1), (again, 1), (later, 2)):
        Rounding(0, step).store(target, exact.clone())
    assert set(first.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(first.float().mean()) == pytest.approx(1.0 + 2**-9, abs=2**-7 * 0.005)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_float32_is_not_rounded() -> None:
    target, exact = torch.empty(3), torch.tensor([1.0, 1.0 + 2**-20, -3.3])
    Rounding(0, 1).store(target, exact)
    assert torch.equal(target, exact)


def trained(optimizer: Any, dtype: Any, steps: int) -> Any:
    """Return the change of weights of about .05 whose gradients always have the same sign."""
    torch.manual_seed(0)
    start = (0.05 * torch.randn(40, 50)).to(dtype)
    direction = torch.randn(40, 50)
    weights = torch.nn.Parameter(start.clone())
    method = optimizer([{"params": [weights], "weight_decay": 0.1}], lr=2e-5)
    for _ in range(steps):
        weights.grad = (direction * (1 + 0.1 * torch.randn(40, 50))).to(dtype)
        method.step()
    return (weights.detach().float() - start.float()) * -direction.sign()


def test_rounded_adamw_is_adamw_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "BLOCK", 700)  # several blocks
    expected = trained(torch.optim.AdamW, torch.float32, 20)
    assert torch.allclose(trained(RoundedAdamW, torch.float32, 20), expected, atol=1e-8)


def test_small_steps_of_bfloat16_weights_are_not_lost() -> None:
    exact = trained(torch.optim.AdamW, torch.float32, 100).mean()
    nearest, rounded = (trained(method, torch.bfloat16, 100).mean() for method in (torch.optim.AdamW, RoundedAdamW))
    assert nearest < 0.2 * exact
    assert rounded == pytest.approx(float(exact), rel=0.1)
