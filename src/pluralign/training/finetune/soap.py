"""SOAP as fine-tuning uses it: bases in float32 for bfloat16 matrices, and a variant that preconditions one side.

Reference: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), §7 for the one-sided variant.
"""

from typing import Any

import torch
from pytorch_optimizer import SOAP


class Soap(SOAP):
    """SOAP of pytorch-optimizer. First bases of half-precision matrices are computed in float32, not in float64."""

    @staticmethod
    def get_orthogonal_matrix(mat: Any) -> list[Any]:
        """Return the eigenbases of the sides of a parameter, in the precision of their matrices.

        Args:
            mat: Σ G Gᵀ of each side, and an empty list for a side without a basis.
        """
        exact = [side.float() if len(side) else [] for side in mat]
        bases = SOAP.get_orthogonal_matrix(exact)
        return [basis.to(side.dtype) if len(side) else [] for basis, side in zip(bases, mat, strict=True)]


class OneSidedSoap(Soap):
    """SOAP with a basis for the shorter side of each matrix only; for the first side of a square one.

    A linear layer of an 8B model then stores one or two matrices of its hidden size instead of four.
    """

    def init_pre_conditioner(self, grad: Any, state: Any, **settings: Any) -> None:
        """Allocate the matrix of the shorter side."""
        super().init_pre_conditioner(grad, state, **settings)
        shorter = min(range(grad.dim()), key=lambda side: grad.shape[side])
        state["GG"] = [matrix if side == shorter else [] for side, matrix in enumerate(state["GG"])]

    def update_pre_conditioner(self, grad: Any, state: Any, step: int, **settings: Any) -> None:
        """Add a gradient to the matrix of the shorter side, and renew its basis when it is due."""
        for side, matrix in enumerate(state["GG"]):
            if len(matrix):
                others = [other for other in range(grad.dim()) if other != side]
                outer = torch.tensordot(grad, grad, dims=(others, others))
                matrix.lerp_(outer.to(matrix.dtype), weight=1.0 - state["shampoo_beta"])
        if state["Q"] is None:
            state["Q"] = self.get_orthogonal_matrix(state["GG"])
        if step > 0 and step % state["precondition_frequency"] == 0:
            state["Q"] = self.get_orthogonal_matrix_qr(state, settings["max_precondition_dim"])
