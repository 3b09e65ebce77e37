"""Pairs per step and number of steps of fine-tuning (the paper's App. Training Pipeline). It needs no torch."""

LARGEST_BATCH = 512
LEAST_STEPS = 32
"""The batch is halved from 512 until an epoch has this many steps."""
SMALLEST_BATCH = 8


def batch_and_steps(n_pairs: int, batch_size: int | None = None, epochs: float = 1.0) -> tuple[int, int]:
    """Return pairs per step, and the number of steps.

    The batch is the largest power of two from 8 to 512 that gives at least 32 steps per epoch, or 8 if none does.

    Args:
        n_pairs: number of training pairs.
        batch_size: pairs per step, if they are given.
        epochs: passes over the pairs.

    Example:
        >>> batch_and_steps(100_000), batch_and_steps(1_500)
        ((512, 195), (32, 47))
    """
    batch = batch_size
    if batch is None:
        batch = LARGEST_BATCH
        while batch > SMALLEST_BATCH and n_pairs * epochs < LEAST_STEPS * batch:
            batch //= 2
    return batch, max(1, round(n_pairs * epochs / batch))
