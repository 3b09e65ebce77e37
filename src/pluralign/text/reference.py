"""The reference policy of App. A: log π_ref of the responses, in two columns of the votes.

The columns come with the data or from a causal model, and stay with the votes, so that a model reads each text once.
"""

from dataclasses import replace

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.text.causal import response_log_prob
from pluralign.text.loading import model_folder
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.values import as_numbers

LOG_PROB_COLUMNS = ("logprob_a", "logprob_b")


def with_log_probs(reference: str, preferences: PreferenceSet, progress: Progress | None = None) -> PreferenceSet:
    """Return votes with log π_ref of both responses in their columns, from a causal model or, for ``data``, as given.

    Raises:
        DataError: the data has no such columns.
    """
    if reference == "data":
        log_ratio(preferences)
        return preferences
    items = preferences.items()
    log_prob = np.asarray(response_log_prob(model_folder(reference), texts_of(preferences), progress), dtype=np.float64)
    sides = zip(LOG_PROB_COLUMNS, (log_prob[items.a], log_prob[items.b]), strict=True)
    return replace(preferences, columns={**preferences.columns, **dict(sides)})


def log_ratio(preferences: PreferenceSet) -> FloatArray:
    """Return log π_ref(a) − log π_ref(b) of each pair from the columns of the votes, ``(n_pairs,)``.

    Raises:
        DataError: a column is missing, or a value is.
    """
    sides = []
    for name in LOG_PROB_COLUMNS:
        values = as_numbers(preferences.columns[name]) if name in preferences.columns else None
        if values is None:
            remedy = f"give each row numbers in {' and '.join(LOG_PROB_COLUMNS)}, or name a model as --reference"
            raise DataError(f"it has no numeric column {name}", file=preferences.name, remedy=remedy)
        if not np.isfinite(values).all():
            pair = int(np.argmin(np.isfinite(values)))
            remedy = "give the log-probability of every response"
            raise DataError(f"{name} of pair {pair + 1} is missing or not finite", file=preferences.name, remedy=remedy)
        sides.append(values)
    return np.asarray(sides[0] - sides[1])
