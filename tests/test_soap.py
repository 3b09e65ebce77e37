"""SOAP: the steps of pytorch-optimizer in float32, and the variant that preconditions one side."""

import importlib
from typing import Any

import pytest

torch: Any = importlib.import_module("torch")
soap: Any = importlib.import_module("pluralign.learning.backbone.optimizer")


def regression(optimizer: Any, rows: int, columns: int, steps: int) -> tuple[float, dict[str, Any], Any]:
    """Return the last loss of a regression with inputs of different spread, the state of its matrix, and the matrix."""
    torch.manual_seed(0)
    weights, truth = torch.nn.Parameter(torch.zeros(rows, columns)), torch.randn(rows, columns)
    inputs = torch.randn(200, columns) * torch.linspace(0.1, 3, columns)
    method = optimizer([weights], lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        method.zero_grad()
        loss = ((inputs @ (weights - truth).T) ** 2).mean()
        loss.backward()
        method.step()
    return loss.item(), dict(method.state[weights]), weights.detach()


def test_float32_steps_are_those_of_pytorch_optimizer() -> None:
    library = importlib.import_module("pytorch_optimizer").SOAP
    expected, ours = (regression(method, 6, 20, 25)[2] for method in (library, soap.Soap))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(("rows", "columns", "sides"), [(6, 20, [6, 0]), (20, 6, [0, 6]), (8, 8, [8, 0])])
def test_the_one_sided_variant_preconditions_the_shorter_side_and_learns(
    rows: int, columns: int, sides: list[int]
) -> None:
    first, _, _ = regression(soap.OneSidedSoap, rows, columns, 1)
    last, state, _ = regression(soap.OneSidedSoap, rows, columns, 150)
    assert last < 0.05 * first
    for name in ("GG", "Q"):
        assert [len(matrix) for matrix in state[name]] == sides
    held = [state["exp_avg"], state["exp_avg_sq"], *state["GG"], *state["Q"]]
    numbers = sum(tensor.numel() for tensor in held if len(tensor))
    assert numbers == 2 * rows * columns + 2 * min(rows, columns) ** 2
    (basis,) = (matrix for matrix in state["Q"] if len(matrix))
    assert torch.allclose(basis.T @ basis, torch.eye(len(basis)), atol=1e-5)
    assert not torch.allclose(basis.abs(), torch.eye(len(basis)), atol=0.1)


def test_vectors_have_no_bases() -> None:
    weights = torch.nn.Parameter(torch.zeros(5))
    method = soap.OneSidedSoap([weights], lr=0.1)
    for _ in range(3):
        weights.grad = torch.ones(5)
        method.step()
    assert method.state[weights]["Q"] == [[]]
    assert bool((weights < -0.1).all())
