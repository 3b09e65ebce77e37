"""Fitted heads: fine-tuning starts from the ensemble on the base model's frozen features instead of random rewards."""

from collections.abc import Callable
from typing import Any, TypeAlias

import accelerate
import numpy as np
from threadpoolctl import threadpool_limits

from pluralign.core.arrays import FloatArray
from pluralign.core.distributed import Processes
from pluralign.ensemble.members import fit_feature_map
from pluralign.models.classifier import classifier_rewards, remove_head
from pluralign.training.finetune.base import BaseModel
from pluralign.training.finetune.batches import TextPairs
from pluralign.training.pairs import Pairs, validation_folds
from pluralign.training.teacher import Teacher, fit_teacher

Heads: TypeAlias = Callable[[Pairs, Teacher], FloatArray]
"""Fits linear rewards to pairs, ``(hidden, outputs)``."""
FirstHead: TypeAlias = Callable[[Any, Any], FloatArray]
"""Takes a fresh model and a device; returns the weights that its head starts from, ``(outputs, hidden)``."""


class HeadFitter:
    """Fits heads to the base model's features of the training texts. The model reads the texts once.

    Args:
        base: the base model.
        pairs: the training pairs.
        seed: of the validation folds.
        processes: each process reads a part of the texts.
    """

    def __init__(self, base: BaseModel, pairs: TextPairs, seed: int, processes: Processes) -> None:
        self.base, self.pairs, self.seed, self.processes = base, pairs, seed, processes
        self._read: tuple[Pairs, FloatArray] | None = None
        self._teacher: Teacher | None = None

    def fit(self, heads: Heads, model: Any, device: Any) -> FloatArray:
        """Return the weights of a head, ``(outputs, hidden)``.

        Args:
            heads: fits the rewards.
            model: a sequence classifier made from the base model, before any training.
            device: where the model reads the texts.
        """
        if self._read is None:
            self._read = self._read_texts(model, device)
        pairs, factor = self._read
        with threadpool_limits(1, user_api="blas"):
            if self._teacher is None:
                self._teacher = fit_teacher(pairs, validation_folds(pairs.prompt, self.seed))
            return np.asarray((heads(pairs, self._teacher) * factor[:, None]).T)

    def _read_texts(self, model: Any, device: Any) -> tuple[Pairs, FloatArray]:
        """Return the pairs by the scaled inputs of the head, and the scale factor of each dimension, ``(hidden,)``."""
        pairs = self.pairs
        name, head = remove_head(model)
        own = range(self.processes.rank, len(pairs.items), self.processes.count)
        items = [pairs.items[i] for i in own]
        model = model.to(device).eval()
        read = classifier_rewards(model, self.base.tokenizer, items, self.base.max_length).astype(np.float32)
        model.set_submodule(name, head.to(device))
        hidden = np.empty((len(pairs.items), read.shape[1]), dtype=np.float32)
        for rows, values in accelerate.utils.gather_object([(list(own), read)]):
            hidden[rows] = values
        used = np.unique(np.concatenate([pairs.a, pairs.b]))
        scaling = fit_feature_map(hidden[used], 0)
        inputs = Pairs(scaling(hidden), pairs.a, pairs.b, pairs.prob_a, pairs.prompt)
        return inputs, np.asarray(scaling.gain / scaling.spread, dtype=np.float64)
