"""What notebooks show of votes, ensembles and evaluations: small HTML tables, made without any optional package.

All texts are escaped. Nothing is measured here.
"""

import html
import math
from collections.abc import Iterator, Sequence

from pluralign.core.text import shortened
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import FEW_VOTES, headline, main_evaluation
from pluralign.ensemble.record import Evaluation
from pluralign.measuring.verdicts import comparison, floor_is_compared
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

PAIRS_SHOWN = 3
TEXT_LENGTH = 120


def evaluation_html(evaluation: Evaluation) -> str:
    """Return the headline of an evaluation and the comparison on the same votes; the main row is bold."""
    title, *lines = str(evaluation).splitlines()
    return _block(title, *_lines(lines), _comparison(evaluation))


def ensemble_html(ensemble: RewardEnsemble) -> str:
    """Return the headline of an ensemble, and the weight and the disagreement of each member."""
    record, main = ensemble.record, main_evaluation(ensemble.record)
    measured = record.evaluation.members if record.evaluation else []
    disagreement = [member.disagreement for member in measured] if len(measured) == ensemble.k else None
    rows = [
        [f"member {j}", f"{weight:.3f}", *([f"{disagreement[j]:.3f}"] if disagreement else [])]
        for j, weight in enumerate(ensemble.weights.tolist())
    ]
    if ensemble.undecided:
        rows.append(["undecided share", f"{ensemble.undecided:.3f}", *([""] if disagreement else [])])
    heads = ["", "weight", *(["disagreement"] if disagreement else [])]
    title = f"RewardEnsemble: {record.method} k={ensemble.k}, fitted for the {ensemble.level} level"
    lines = str(headline(main, record)).splitlines() if main else []
    return _block(title, *_lines(lines), _table(heads, rows))


def preferences_html(preferences: PreferenceSet) -> str:
    """Return the size of a set of votes and its first pairs."""
    rows = [
        [
            *(
                shortened(text, TEXT_LENGTH)
                for text in (
                    Prompt(preferences.prompts[preferences.prompt_index[row]]).text,
                    str(preferences.responses[preferences.a_index[row]]),
                    str(preferences.responses[preferences.b_index[row]]),
                )
            ),
            str(preferences.votes_a[row]),
            str(preferences.votes_b[row]),
        ]
        for row in range(min(PAIRS_SHOWN, len(preferences)))
    ]
    table = _table(["prompt", "response_a", "response_b", "votes_a", "votes_b"], rows, words=3)
    return _block(repr(preferences), table)


def _lines(headline: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a headline; the main figure and the verdict are bold."""
    for place, line in enumerate(headline):
        yield f"<b>{html.escape(line)}</b>" if place < 2 else html.escape(line)


def _comparison(evaluation: Evaluation) -> str:
    rows, bold = [], None
    for place, row in enumerate(comparison(evaluation)):
        gap = f"[{row.difference.low:+z.4f}, {row.difference.high:+z.4f}]" if row.difference else ""
        bold = place if row.judged else bold
        name = f"→ {row.name}" if row.judged else row.name
        rows.append([name, str(row.k), _number(row.brier), _number(row.brier_corrected), gap])
    table = _table(["", "k", "Brier", "corrected", "main − this, 95 %"], rows, bold=bold)
    return table if floor_is_compared(evaluation) else f"{table}<div>{html.escape(FEW_VOTES)}</div>"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:z.4f}"


def _block(title: str, *parts: str) -> str:
    return f"<div><div>{html.escape(title)}</div>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, bold: int | None = None) -> str:
    """Return a table whose first ``words`` columns are text; row number ``bold`` is bold."""
    aligned = ["left" if column < words else "right" for column in range(len(heads))]

    def line(tag: str, cells: Sequence[str], style: str = "") -> str:
        return "".join(
            f'<{tag} style="text-align:{side}{style}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(aligned, cells, strict=True)
        )

    body = "".join(
        f"<tr>{line('td', row, ';font-weight:bold' if place == bold else '')}</tr>" for place, row in enumerate(rows)
    )
    return f"<table><thead><tr>{line('th', heads)}</tr></thead><tbody>{body}</tbody></table>"
