"""A Bradley–Terry reward fitted to the few choices of one rater, in the space of the choices (the dual).

A rater has tens of choices and a text hundreds of features, so the fit solves systems of the size of the choices.
"""

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.theory.logistic import sigmoid

NEWTON_STEPS = 50
NEWTON_TOLERANCE = 1e-9


def fit_rater_reward(gram: FloatArray, chose_a: npt.ArrayLike, variances: npt.ArrayLike) -> FloatArray:
    """Return the dual coefficients of the reward that fits the choices best, for each prior variance.

    With the prior θ ~ N(0, v I) the reward θ·x minimises

      Σ_i [log(1 + exp(z_i)) − y_i z_i] + |θ|² / 2v,   z_i = θ · d_i,

    for the feature differences d_i = x_a − x_b. The minimum is θ = v Σ_i c_i d_i with c_i = y_i − σ(z_i), so
    z = v G c with the Gram matrix G_il = d_i · d_l. On another pair with difference d the reward difference is
    v Σ_i c_i d_i · d.

    Args:
        gram: G, ``(n, n)``.
        chose_a: y, 1 for response a, 0 for b, 1/2 for a tie, ``(n,)``.
        variances: v, ``(n_variances,)``.

    Returns:
        v c, ``(n_variances, n)``.

    Example:
        >>> coefficients = fit_rater_reward(np.array([[4.0]]), [1.0], [0.5])
        >>> z = 4.0 * coefficients[0, 0]
        >>> bool(np.isclose(z, 4.0 * 0.5 * (1 - sigmoid(z))))
        True

    Reference: Newton's method as in Rasmussen and Williams, Gaussian Processes for Machine Learning, Algorithm 3.1.
    """
    y, v = np.asarray(chose_a, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    kernels = v[:, None, None] * gram
    n = len(y)
    z, dual = np.zeros((len(v), n)), np.zeros((len(v), n))
    for _ in range(NEWTON_STEPS):
        p = sigmoid(z)
        curvature = p * (1 - p)
        root = np.sqrt(curvature)
        target = curvature * z + (y - p)
        system = np.eye(n) + root[:, :, None] * kernels * root[:, None, :]
        right = root * np.einsum("sij,sj->si", kernels, target)
        dual = target - root * np.linalg.solve(system, right[:, :, None])[:, :, 0]
        last, z = z, np.einsum("sij,sj->si", kernels, dual)
        if not n or np.max(np.abs(z - last)) < NEWTON_TOLERANCE * (1 + np.max(np.abs(z))):
            break
    return v[:, None] * dual
