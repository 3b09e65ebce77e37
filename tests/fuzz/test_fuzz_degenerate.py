"""Fits of degenerate votes with random options."""

from typing import Any

import pytest
from degenerate import CASES
from test_degenerate_votes import check, few_steps, fit_case

from fuzz import cases, random_of

__all__ = ["few_steps"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "encoder": ("none", "hashing:16", "hashing"),
    "method": ("joint", "stagewise"),
    "level": ("vote", "policy"),
    "variant": ("symmetric", "printed"),
    "k": (1, 2, 3, "auto"),
    "undecided": (True, False),
    "raters": (False, False, True),
    "folds": (None, None, 2),
    "target": ("auto", "teacher", "mixture", "votes"),
    "max_disagreement": (0.5, 0.4, 1.0),
}


@pytest.mark.parametrize("case", cases(share=0.1))
def test_degenerate_votes_are_fitted(case: int) -> None:
    random = random_of(case, "degenerate")
    name = list(CASES)[int(random.integers(len(CASES)))]
    options = {option: values[int(random.integers(len(values)))] for option, values in CHOICES.items()}
    if options["method"] == "stagewise":
        options |= {"level": "vote", "target": "auto", "raters": False, "undecided": True}
    else:
        options.pop("variant")
    if options["level"] == "policy" or options["raters"]:
        options |= {"target": "auto"}
    if options["raters"]:
        options = {option: options[option] for option in ("encoder", "k", "raters", "undecided")}
    check(fit_case(name, options), CASES[name])
