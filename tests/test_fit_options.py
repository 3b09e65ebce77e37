"""The table of which option applies when, and that stating a default changes nothing."""

from dataclasses import fields
from typing import Any

import pytest

from pluralign import town_hall
from pluralign.core.errors import UsageError
from pluralign.learning.fit import fit
from pluralign.learning.options import APPLIES, FinetuneOptions, FitOptions, check_applies

FITS: dict[str, Any] = {one.name: one.default for one in fields(FitOptions)}
TUNING: dict[str, Any] = {one.name: one.default for one in fields(FinetuneOptions)}
SETTINGS: list[dict[str, Any]] = [
    {}, {"method": "stagewise"}, {"level": "policy"}, {"raters": True}, {"pooling": "attention"}, {"backbone": "x"},
    {"backbone": "x", "method": "stagewise"},
]  # fmt: skip


def check(changes: dict[str, Any]) -> None:
    options = {name: value for name, value in changes.items() if name in FITS}
    tuning = {name: value for name, value in changes.items() if name in TUNING}
    check_applies(FitOptions(**options), FinetuneOptions(**tuning), raters=bool(changes.get("raters")))


def test_the_table_lists_only_options() -> None:
    assert {*APPLIES} <= {*FITS, *TUNING, "raters", "pooling attention"}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_default_is_never_an_error(setting: dict[str, Any]) -> None:
    check({**FITS, **TUNING, **setting})


def test_a_stated_default_gives_the_fit_without_it() -> None:
    votes = town_hall(300).preferences
    given: dict[str, Any] = {"k": 2, "encoder": "none"}
    plain, stated = fit(votes, **given), fit(votes, **{**FITS, **TUNING, **given})
    assert stated.rewards([("Why?", "tea")]).tolist() == plain.rewards([("Why?", "tea")]).tolist()
    assert stated.record.options == plain.record.options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"orient": "given"}, "--orient has no effect with --method joint"),
        ({"method": "stagewise", "level": "policy"}, "--level .* --method stagewise"),
        ({"method": "stagewise", "target": "votes"}, "--target .* --method stagewise"),
        ({"method": "stagewise", "pooling": "attention"}, "--pooling attention .* --method stagewise"),
        ({"level": "policy", "target": "votes"}, "--target .* --level policy"),
        ({"raters": True, "target": "votes"}, "--target .* --raters"),
        ({"raters": True, "method": "stagewise"}, "--raters .* --method stagewise"),
        ({"raters": True, "backbone": "smollm2"}, "--backbone .* --raters"),
        ({"raters": True, "pooling": "attention"}, "--pooling attention .* --raters"),
        ({"backbone": "x", "layers": "2"}, "--layers .* --backbone; .*--encoder with --pooling attention"),
        ({"backbone": "x", "pooling": "attention"}, "--pooling .* --backbone"),
        ({"backbone": "x", "folds": 3}, "--folds .* --backbone; leave it out"),
        ({"pooling": "attention", "features": "stored"}, "--features .* --pooling attention"),
        ({"pooling": "attention", "epochs": 2.0}, "--epochs .* --pooling attention, .*--backbone fine-tunes"),
        ({"lora_rank": 4}, "--lora-rank .* without --backbone"),
        ({"report_to": "wandb"}, "--report-to .* without --backbone"),
        ({"compare_frozen": False}, "--no-compare-frozen .* without --backbone"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(changes)
