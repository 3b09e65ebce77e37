"""What notebooks show of votes, ensembles and evaluations: small HTML tables, made without any optional package.

All texts are escaped. Nothing is measured here.
"""

import html
from collections.abc import Sequence
from dataclasses import replace

from pluralign.core.text import printable, shortened
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Evaluation
from pluralign.ensemble.verdict import headline, main_evaluation
from pluralign.measuring.comparison import undecided_sentence
from pluralign.measuring.evaluate import FullEvaluation
from pluralign.publishing import tables
from pluralign.publishing.tables import Table
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt

PAIRS_SHOWN = 3
TEXT_LENGTH = 120


def evaluation_html(evaluation: Evaluation) -> str:
    """Return the insight and the headline of an evaluation and its tables; main rows are bold."""
    full = evaluation if isinstance(evaluation, FullEvaluation) else None
    title, *lines = full.summary if full else str(evaluation).splitlines()
    shown = _block(title, lines, tables.comparison_table(evaluation), *tables.judgment_tables(evaluation))
    return (tables.insight_html(full.insight) if full and full.insight else "") + shown


def ensemble_html(ensemble: RewardEnsemble) -> str:
    """Return the insight and the headline of an ensemble, and the weight and the disagreement of each member."""
    record, main = ensemble.record, main_evaluation(ensemble.record)
    title = f"RewardEnsemble: {record.method} k={ensemble.k}, fitted for the {ensemble.level} level"
    lines = str(headline(main, record)).splitlines() if main else []
    table = replace(tables.member_table(ensemble.weights.tolist(), record.evaluation), title="")
    table = replace(table, note=f"{table.note} {undecided_sentence(ensemble.undecided)}".strip())
    return (tables.insight_html(record.insight) if record.insight else "") + _block(title, lines, table)


def preferences_html(preferences: PreferenceSet) -> str:
    """Return the size of a set of votes and its first pairs."""
    rows = []
    for row in range(min(PAIRS_SHOWN, len(preferences))):
        prompt = Prompt(preferences.prompts[preferences.prompt_index[row]]).text
        responses = (preferences.responses[index[row]] for index in (preferences.a_index, preferences.b_index))
        texts = (shortened(str(text), TEXT_LENGTH) for text in (prompt, *responses))
        rows.append([*texts, str(preferences.votes_a[row]), str(preferences.votes_b[row])])
    columns = ("prompt", "response_a", "response_b", "votes_a", "votes_b")
    return _block(repr(preferences), [], Table("", columns, rows, texts=(0, 1, 2)))


def _block(title: str, headline: Sequence[str], *shown_tables: Table) -> str:
    """Return a title, the lines of a headline, whose main figure and verdict are bold, and tables."""
    lines = [html.escape(line) for line in headline]
    shown = [
        html.escape(title),
        *(f"<b>{line}</b>" for line in lines[:2]),
        *lines[2:],
        *map(tables.as_html, shown_tables),
    ]
    return printable(f"<div>{''.join(f'<div>{part}</div>' for part in shown)}</div>")
