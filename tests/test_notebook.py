"""What Python and notebooks show of votes, ensembles and evaluations."""

import html
import re
import sys
from dataclasses import replace

import pytest
from conftest import evaluation_of
from matplotlib import _pylab_helpers

from pluralign import PreferenceSet, RewardEnsemble, evaluate, town_hall
from pluralign.core.errors import MissingExtraError
from pluralign.ensemble.record import FitRecord
from pluralign.ensemble.verdict import FEW_VOTES, headline, voices_sentence
from pluralign.measuring.comparison import undecided_sentence
from pluralign.measuring.evaluate import FullEvaluation
from pluralign.publishing.figures import Drawing

HOSTILE = "<script>alert(1)</script> & “"


@pytest.fixture(scope="module")
def evaluation(ensemble: RewardEnsemble) -> FullEvaluation:
    return evaluate(ensemble, town_hall(300, seed=5).preferences, groups=[])


def cells(text: str) -> list[list[str]]:
    """Return the cells of a table without its head."""
    return [
        [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text)[1:]
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def test_printing_an_evaluation_shows_its_headline(evaluation: FullEvaluation, ensemble: RewardEnsemble) -> None:
    assert evaluation.insight is not None
    assert str(evaluation).startswith(evaluation.insight.text())
    assert str(evaluation).endswith(f"{evaluation.subject.name}: 300 pairs\n{evaluation.headline}")
    own = evaluation_of(ensemble)
    assert str(own) == f"{own.pairs} pairs\n{headline(own).main}\n{headline(own).verdict}\n{voices_sentence(own)}"


def test_the_prompt_shows_a_summary_without_numbers(evaluation: FullEvaluation, ensemble: RewardEnsemble) -> None:
    assert repr(evaluation) == f"<FullEvaluation: {evaluation}>"
    assert repr(evaluation_of(ensemble)).startswith("<Evaluation: ")
    assert re.fullmatch(r"FitRecord\(joint k=3, vote level, demo: \d+ training pairs\)", repr(ensemble.record))


# --- HTML -------------------------------------------------------------------------------------------------------------


def test_an_evaluation_shows_its_headline_and_one_marked_row(evaluation: FullEvaluation) -> None:
    text = evaluation._repr_html_()
    assert evaluation.insight is not None
    for line in (evaluation.insight.title, *evaluation.insight.findings, *evaluation.summary):
        assert html.escape(line) in text
    marked = [row[0] for row in cells(text) if row[0].startswith("→ ")]
    assert marked == ["→ ensemble: votes"]
    assert len(re.findall(r'font-weight:bold"><td[^>]*>→ ', text)) == 1
    assert "floor" in [row[0] for row in cells(text)]
    assert FEW_VOTES not in text


def test_an_ensemble_shows_its_members(ensemble: RewardEnsemble) -> None:
    text = ensemble._repr_html_()
    members = evaluation_of(ensemble).members
    shown = [[f"{value:.3f}" for value in (one.weight, one.disagreement, one.regret)] for one in members]
    assert cells(text) == [[f"member {j}", *row] for j, row in enumerate(shown)]
    assert undecided_sentence(ensemble.undecided) in text
    assert html.escape(headline(evaluation_of(ensemble), ensemble.record).verdict) in text


def test_an_ensemble_built_by_hand_shows_its_weights_only(ensemble: RewardEnsemble) -> None:
    bare = replace(ensemble, record=FitRecord(), undecided=0.0)
    assert cells(bare._repr_html_()) == [[f"member {j}", f"{one:.3f}"] for j, one in enumerate(bare.weights)]


def test_votes_show_their_first_pairs_with_escaped_texts() -> None:
    unsafe = [f"\x1b\u202e{HOSTILE}\x07"] * 4
    votes = PreferenceSet.from_columns(unsafe, ["a", "b", "c", "d"], unsafe, [3] * 4, [2] * 4)
    text = votes._repr_html_()
    assert "<script>" not in text
    assert cells(text) == [[HOSTILE, letter, HOSTILE, "3", "2"] for letter in "abc"]


def test_names_of_predictors_are_escaped(evaluation: FullEvaluation) -> None:
    named = replace(evaluation, subject=replace(evaluation.subject, name=HOSTILE, kind="scores"))
    assert "<script>" not in named._repr_html_()


# --- figures ----------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_plotted_as_reliability(evaluation: FullEvaluation) -> None:
    assert evaluation.plot().axes[0].get_xlabel().startswith("predicted share")


def test_an_ensemble_is_plotted_as_brier_by_size_beside_reliability(ensemble: RewardEnsemble) -> None:
    sizes, reliability = ensemble.plot().axes
    assert sizes.get_xlabel() == "number of members (k)"
    assert reliability.get_xlabel().startswith("predicted share")


def test_a_notebook_shows_a_figure_without_pyplot(ensemble: RewardEnsemble) -> None:
    drawing = ensemble.plot()
    assert isinstance(drawing, Drawing)
    assert drawing._repr_png_().startswith(b"\x89PNG")
    assert not _pylab_helpers.Gcf.figs, "no figure stays in memory"


def test_a_missing_matplotlib_is_named(ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "pluralign.publishing.figures"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for plot in (ensemble.plot, evaluation_of(ensemble).plot):
        with pytest.raises(MissingExtraError, match=r"a figure needs the package matplotlib: run  pip install 'plural"):
            plot()
