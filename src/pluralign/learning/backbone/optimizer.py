"""Optimisers for weights in bfloat16: stochastic rounding, and AdamW with it.

A change of 2e-5 is lost on every weight above 0.01 if the sum is rounded to the nearest bfloat16. Rounded up or down at
random, in proportion to the distance, the sum is right in expectation.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from pytorch_optimizer import SOAP

BLOCK = 1 << 26
"""Numbers that are updated at once. Their float32 copies take 256 MB each."""


class Rounding:
    """Rounds float32 to bfloat16 at random. All processes and resumed runs round alike.

    Args:
        group: number of the parameter group.
        step: number of the optimiser step.
    """

    def __init__(self, group: int, step: int) -> None:
        self.seed = step * 1000 + group
        self.generators: dict[Any, torch.Generator] = {}

    def store(self, target: Any, exact: Any) -> None:
        """Write a float32 tensor into another tensor, which is in float32 or bfloat16."""
        if target.dtype != torch.bfloat16:
            target.copy_(exact)
            return
        device = exact.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        generator = self.generators[device]
        # A bfloat16 is the upper half of a float32. Random lower halves are added, and carry over in proportion.
        bits = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=device, generator=generator)
        bits.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16))
        target.copy_(bits.view(torch.float32))


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose weights and moments in bfloat16 are computed in float32 and rounded stochastically.

    A second moment that is rounded to the nearest bfloat16 would never decrease, since β₂ is 0.999.

    Args:
        params: groups with ``lr`` and ``weight_decay``.
        lr: learning rate of groups without one.
        betas: decay of the two moments.
        eps: added to the denominator.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all weights."""
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            rounding = Rounding(number, group["step"])
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
                parts = (weights, weights.grad, state["exp_avg"], state["exp_avg_sq"])
                blocks = (part.view(-1).split(BLOCK) for part in parts)
                for values, grad, exp_avg, exp_avg_sq in zip(*blocks, strict=True):
                    _update(values, grad, exp_avg, exp_avg_sq, group, rounding)


def _update(weights: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, group: dict[str, Any], rounding: Rounding) -> None:
    """Take one step of AdamW (Loshchilov & Hutter, 2019, Algorithm 2) with some of the weights."""
    step, rate, (beta1, beta2) = group["step"], group["lr"], group["betas"]
    grad = grad.float()
    mean = torch.lerp(exp_avg.float(), grad, 1 - beta1)
    square = torch.lerp(exp_avg_sq.float(), grad.square(), 1 - beta2)
    scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    decayed = weights.float() * (1 - rate * group["weight_decay"])
    rounding.store(weights, decayed.addcdiv_(mean, scale, value=-rate / (1 - beta1**step)))
    rounding.store(exp_avg, mean)
    rounding.store(exp_avg_sq, square)


# --- SOAP as fine-tuning uses it: safe for weights in bfloat16, and with a variant that preconditions one side.


class Soap(SOAP):
    """SOAP of pytorch-optimizer, with the same steps in float32.

    For bfloat16 the first bases are computed in float32, weights are rounded stochastically, and no entry of the step
    exceeds the learning rate in the basis. With equal decay rates this bound holds for exact numbers in a fixed basis:
    (Σ w g)² ≤ Σ w g². Rounded moments exceed it a hundred times in directions with hardly any gradient.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all weights. The first gradient only sets the bases."""
        for number, group in enumerate(self.param_groups):
            self.init_group(group)
            group["step"] += 1
            rounding = Rounding(number, group["step"])
            for weights in group["params"]:
                if weights.grad is not None and group["step"] > 1:
                    self._update(weights, group, rounding)

    def _update(self, weights: Any, group: dict[str, Any], rounding: Rounding) -> None:
        state, grad, step = self.state[weights], weights.grad, group["step"] - 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, weight=1 - beta1)
        state["exp_avg_sq"].lerp_(self.project(grad, state).square_(), weight=1 - beta2)
        ratio = self.project(state["exp_avg"], state) / state["exp_avg_sq"].sqrt().add_(group["eps"])
        if weights.dtype == torch.bfloat16:
            ratio.clamp_(-1.0, 1.0)
        ratio = self.project(ratio, state, project_type="backward")
        rate = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        exact = weights.float().add_(ratio, alpha=-rate).mul_(1 - group["lr"] * group["weight_decay"])
        rounding.store(weights, exact)
        self.update_pre_conditioner(grad, state, step, group["max_precondition_dim"])

    @staticmethod
    def get_orthogonal_matrix(mat: Any) -> list[Any]:
        """Return the eigenbases of the sides of a parameter, in the precision of their matrices.

        Args:
            mat: Σ G Gᵀ of each side, and an empty list for a side without a basis.
        """
        exact: Any = [side.float() if len(side) else [] for side in mat]
        bases = SOAP.get_orthogonal_matrix(exact)
        return [basis.to(side.dtype) if len(side) else [] for basis, side in zip(bases, mat, strict=True)]


class OneSidedSoap(Soap):
    """SOAP with a basis for the shorter side of each matrix only; for the first side of a square one.

    A square layer then stores two matrices of its size instead of four, besides the moments.
    """

    def init_pre_conditioner(self, grad: Any, state: Any, *args: Any, **settings: Any) -> None:
        """Allocate the matrix of the shorter side."""
        super().init_pre_conditioner(grad, state, *args, **settings)
        shorter = min(range(grad.dim()), key=lambda side: grad.shape[side])
        state["GG"] = [matrix if side == shorter else [] for side, matrix in enumerate(state["GG"])]

    def update_pre_conditioner(
        self, grad: Any, state: Any, step: int, max_precondition_dim: int = 10000, *_: Any, **__: Any
    ) -> None:
        """Add a gradient to the matrix of the shorter side, and renew its basis when it is due."""
        for side, matrix in enumerate(state["GG"]):
            if len(matrix):
                others = [other for other in range(grad.dim()) if other != side]
                outer = torch.tensordot(grad, grad, dims=(others, others))
                matrix.lerp_(outer.to(matrix.dtype), weight=1.0 - state["shampoo_beta"])
        if state["Q"] is None:
            state["Q"] = self.get_orthogonal_matrix(state["GG"])
        if step > 0 and step % state["precondition_frequency"] == 0:
            state["Q"] = self.get_orthogonal_matrix_qr(state, max_precondition_dim)
