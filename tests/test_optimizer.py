"""Optimisers for weights in bfloat16: SOAP's steps, its one-sided variant, stochastic rounding, and AdamW with it."""

import importlib
from typing import Any

import pytest

from pluralign.learning.backbone import optimizer
from pluralign.learning.backbone.optimizer import RoundedAdamW, Rounding

torch: Any = importlib.import_module("torch")


def regression(kind: Any, rows: int, columns: int, steps: int) -> tuple[float, dict[str, Any], Any]:
    """Return the last loss of a regression with inputs of different spread, the state of its matrix, and the matrix."""
    torch.manual_seed(0)
    weights, truth = torch.nn.Parameter(torch.zeros(rows, columns)), torch.randn(rows, columns)
    inputs = torch.randn(200, columns) * torch.linspace(0.1, 3, columns)
    method = kind([weights], lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        method.zero_grad()
        loss = ((inputs @ (weights - truth).T) ** 2).mean()
        loss.backward()
        method.step()
    return loss.item(), dict(method.state[weights]), weights.detach()


def test_float32_steps_are_those_of_pytorch_optimizer() -> None:
    library = importlib.import_module("pytorch_optimizer").SOAP
    expected, ours = (regression(method, 6, 20, 25)[2] for method in (library, optimizer.Soap))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(("rows", "columns", "sides"), [(6, 20, [6, 0]), (20, 6, [0, 6]), (8, 8, [8, 0])])
def test_the_one_sided_variant_preconditions_the_shorter_side(rows: int, columns: int, sides: list[int]) -> None:
    first, _, _ = regression(optimizer.OneSidedSoap, rows, columns, 1)
    last, state, _ = regression(optimizer.OneSidedSoap, rows, columns, 150)
    assert last < 0.05 * first
    assert [[len(matrix) for matrix in state[name]] for name in ("GG", "Q")] == [sides, sides]
    held = [state["exp_avg"], state["exp_avg_sq"], *state["GG"], *state["Q"]]
    numbers = sum(tensor.numel() for tensor in held if len(tensor))
    assert numbers == 2 * rows * columns + 2 * min(rows, columns) ** 2
    (basis,) = (matrix for matrix in state["Q"] if len(matrix))
    assert torch.allclose(basis.T @ basis, torch.eye(len(basis)), atol=1e-5)
    assert not torch.allclose(basis.abs(), torch.eye(len(basis)), atol=0.1)


def test_vectors_have_no_bases() -> None:
    weights = torch.nn.Parameter(torch.zeros(5))
    method = optimizer.OneSidedSoap([weights], lr=0.1)
    for _ in range(3):
        weights.grad = torch.ones(5)
        method.step()
    assert method.state[weights]["Q"] == [[]]
    assert bool((weights < -0.1).all())


# --- stochastic rounding


def test_rounding_is_unbiased_and_repeatable() -> None:
    exact = torch.full((100_000,), 1.0 + 2**-9)  # a quarter of the way to the next bfloat16
    first, again, later = (torch.empty(100_000, dtype=torch.bfloat16) for _ in range(3))
    for target, step in ((first, 1), (again, 1), (later, 2)):
        Rounding(0, step).store(target, exact.clone())
    assert set(first.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(first.float().mean()) == pytest.approx(1.0 + 2**-9, abs=2**-7 * 0.005)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    single = torch.empty(100_000)
    Rounding(0, 1).store(single, exact)
    assert torch.equal(single, exact), "float32 is not rounded"


def trained(kind: Any, dtype: Any, steps: int) -> Any:
    """Return the change of weights of about .05 whose gradients always have the same sign."""
    torch.manual_seed(0)
    start = (0.05 * torch.randn(40, 50)).to(dtype)
    direction = torch.randn(40, 50)
    weights = torch.nn.Parameter(start.clone())
    method = kind([{"params": [weights], "weight_decay": 0.1}], lr=2e-5)
    for _ in range(steps):
        weights.grad = (direction * (1 + 0.1 * torch.randn(40, 50))).to(dtype)
        method.step()
    return (weights.detach().float() - start.float()) * -direction.sign()


def test_rounded_adamw_is_adamw_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "BLOCK", 700)  # several blocks
    expected = trained(torch.optim.AdamW, torch.float32, 20)
    assert torch.allclose(trained(RoundedAdamW, torch.float32, 20), expected, atol=1e-8)


def test_small_steps_of_bfloat16_weights_are_not_lost() -> None:
    exact = trained(torch.optim.AdamW, torch.float32, 100).mean()
    nearest, rounded = (trained(method, torch.bfloat16, 100).mean() for method in (torch.optim.AdamW, RoundedAdamW))
    assert nearest < 0.2 * exact
    assert rounded == pytest.approx(float(exact), rel=0.1)
