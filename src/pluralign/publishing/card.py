"""The model card of an exported model, as Markdown: description, calibration, members, usage and reproduction.

This module decides the content. All texts from data are escaped. Nothing is measured here, and the card contains no
prompt, no response and no local path.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from pluralign.core.errors import MissingExtraError
from pluralign.core.json_values import to_json
from pluralign.core.text import printable
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import worse_than_chance
from pluralign.ensemble.verdict import headline, main_evaluation
from pluralign.measuring.comparison import floor_is_compared
from pluralign.publishing import tables
from pluralign.publishing.tables import number
from pluralign.text.classifier import Reads

Kind = Literal["ensemble", "member", "separate", "frozen", "tuned"]
"""One model with all members, one model with one member, the folder that holds one model per member, an ensemble on
frozen features, or the folder of a fine-tuned ensemble."""


@dataclass(frozen=True)
class MemberRow:
    """A row of the table of members, with the keys of ``pluralign.json``."""

    member: int
    name: str
    weight: float
    disagreement: float | None
    """With people on held-out votes; None without an evaluation."""
    far: bool
    """Whether it disagrees with people more often than chance."""


@dataclass(frozen=True)
class ModelCard:
    """The common content of all cards of one export."""

    ensemble: RewardEnsemble
    names: Sequence[str]
    """Names of all members."""
    base: str
    """Name of the base model."""
    base_id: str | None
    """Its hub id, if it has one."""
    folder: str
    """Name of the exported folder."""
    hub_id: str = ""
    """Repository on the Hugging Face hub."""
    commands: Sequence[Sequence[str]] = ()
    """The commands that reproduce the export, each as a list of words."""

    @property
    def rows(self) -> list[MemberRow]:
        """Number, name, weight and disagreement of all members."""
        evaluation, weights = self.ensemble.record.evaluation, self.ensemble.weights.tolist()
        measured = evaluation.members if evaluation and len(evaluation.members) == self.ensemble.k else None
        found = [member.disagreement for member in measured] if measured else [None] * len(weights)
        return [
            MemberRow(j, self.names[j], weight, one, one is not None and worse_than_chance(one, weight))
            for j, (weight, one) in enumerate(zip(weights, found, strict=True))
        ]

    def text(
        self,
        kind: Kind,
        members: Sequence[int],
        reads: Reads = "chat",
        place: str = ".",
        ends_in_padding: bool = False,
        max_length: int = 0,
        script: bool = True,
    ) -> str:
        """Return the card of one model.

        Args:
            kind: which members the model has.
            members: indices of its members.
            reads: its input format.
            place: its folder inside the export.
            ends_in_padding: whether its inputs end in the padding token.
            max_length: maximum number of tokens that it reads.
            script: whether ``reward_model.py`` is in the folder; only for kind ``frozen``.
        """
        record, evaluation = self.ensemble.record, main_evaluation(self.ensemble.record)
        in_hub = self.hub_id and kind in ("ensemble", "member") and place == "."
        where = self.hub_id if in_hub else self.folder
        rows = self.rows
        settings = {"options": record.options, "tuning": record.tuning, "versions": record.versions}
        table = tables.member_table(self.ensemble.weights.tolist(), record.evaluation, self.names)
        card: str = _template().render(
            kind=kind,
            usage=f"usage_{'pluralign' if kind in ('frozen', 'tuned') else 'transformers'}.md",
            reads=reads,
            max_length=max_length,
            script=script,
            surface=getattr(self.ensemble.features, "surface", False),
            ends_in_padding=ends_in_padding,
            where=where if place == "." else f"{where}/{place}",
            card=self,
            hub_id=self.hub_id if where != self.hub_id else "",
            members=members,
            rows=rows,
            far=[row.member for row in rows if row.far and row.member in members],
            data=record.data,
            data_name=PurePath(record.data.name).name if record.data else "",
            notes=[without_path(note) for note in record.notes or []],
            evaluation=evaluation,
            headline=headline(evaluation, record) if evaluation else None,
            insight=record.insight.without_texts().text().replace("`", "'") if record.insight else "",
            cross_validated=evaluation is not None and evaluation is record.cross_validation,
            floor=evaluation is not None and floor_is_compared(evaluation),
            table=tables.comparison_table(evaluation, k=self.ensemble.k) if evaluation else None,
            judgment_tables=list(tables.judgment_tables(evaluation)) if evaluation else [],
            member_table=replace(table, main=members[0] if kind == "member" else None),
            commands="\n".join(shlex.join(map(without_path, words)).replace("\n", " ") for words in self.commands),
            settings=without_path(to_json({name: part for name, part in settings.items() if part})),
            version=__version__,
        )
        return printable(card)


def without_path(value: Any) -> Any:
    """Return JSON values with every absolute path cut to its last part.

    Example:
        >>> without_path({"backbone": "/home/me/models/mine", "note": "in ~/models/mine 1/2 is cut"})
        {'backbone': 'mine', 'note': 'in mine 1/2 is cut'}
    """
    if isinstance(value, Mapping):
        return {key: without_path(item) for key, item in value.items()}
    if isinstance(value, str):
        return PurePath(value).name if value.startswith(("/", "~")) else re.sub(r"(?<=\s)[~/]\S*/", "", value)
    return [without_path(item) for item in value] if isinstance(value, list) else value


# --- Markdown ---------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    r"""Return text escaped for Markdown, on one line.

    Example:
        >>> print(escaped("[a](b) | <script>\n# *c*"))
        \[a\]\(b\) \| &lt;script&gt; \# \*c\*
    """
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#|~!$])", r"\\\1", line)


def _template() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise MissingExtraError("jinja2", "report", "a model card") from None

    def as_json(value: Any, indent: int | None = None) -> Any:
        return Markup(json.dumps(value, ensure_ascii=False, indent=indent))  # noqa: S704

    def marked(as_text: Callable[[Any], str]) -> Callable[[Any], Any]:
        return lambda value: Markup(as_text(value))  # noqa: S704

    # All values are escaped, except those that a filter has marked as Markup.
    environment = Environment(  # noqa: S701
        loader=PackageLoader("pluralign.publishing"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else escaped(str(value)),
    )
    environment.filters.update(
        number=number,
        as_json=as_json,
        markdown=marked(lambda table: tables.as_markdown(table, escaped)),
        quoted=marked(lambda text: shlex.quote(text.replace("\n", " "))),
        verbatim=marked(str),
    )
    return environment.get_template("model_card.md")
