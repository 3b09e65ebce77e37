"""Optimisers for weights in bfloat16: stochastic rounding, and AdamW with it.

A change of 2e-5 is lost on every weight above 0.01 if the sum is rounded to the nearest bfloat16. Rounded up or down at
random, in proportion to the distance, the sum is right in expectation.
"""

from collections.abc import Iterable
from typing import Any

import torch

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
