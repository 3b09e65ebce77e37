"""The model card: what an exported model is, what it was measured to do, and how to use it, as Markdown.

Decided here: what is said, and that every text from data is escaped. Nothing is measured here, and no prompt, response
or path of the machine it was made on is shown.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Literal

from pluralign.core.errors import MissingExtraError
from pluralign.core.json_values import without_nan
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import worse_than_chance
from pluralign.evaluation.comparison import comparison

Kind = Literal["ensemble", "member", "separate"]
"""All members in one model, one member, or the folder around members in models of their own."""
Reads = Literal["chat", "pair", "text"]
"""How prompt and response become one input: a chat template, two texts with a separator, or one text."""


@dataclass(frozen=True)
class ModelCard:
    """What the cards of one export have in common."""

    ensemble: RewardEnsemble
    names: Sequence[str]
    """Of all members."""
    base: str
    """What the base model is called."""
    base_id: str | None
    """Its hub id, if it has one."""
    folder: str
    """Name of the exported folder."""
    hub_id: str = ""
    """Repository it is pushed to."""
    commands: Sequence[Sequence[str]] = ()
    """The commands that lead to it, each as a list of words."""

    def member_row(self, j: int) -> dict[str, Any]:
        """Return what is said of one member: its number, name, weight, and disagreement with people."""
        told = self.ensemble.facts.get("members") or []
        disagreement = told[j].get("disagreement") if len(told) == self.ensemble.k else None
        weight = float(self.ensemble.weights[j])
        far = disagreement is not None and worse_than_chance(disagreement, weight)
        return {"member": j, "name": self.names[j], "weight": weight, "disagreement": disagreement, "far": far}

    def text(
        self,
        kind: Kind,
        members: Sequence[int],
        reads: Reads = "chat",
        place: str = ".",
        ends_in_padding: bool = False,
    ) -> str:
        """Return the card of one model.

        Args:
            kind: what the model is.
            members: those in it.
            reads: how it reads a prompt and a response.
            place: its folder inside the export.
            ends_in_padding: whether its texts end in what it takes for padding.
        """
        facts = without_nan(dict(self.ensemble.facts))
        data = facts.get("data") or {}
        where = self.hub_id if self.hub_id and kind != "separate" and place == "." else self.folder
        rows = [self.member_row(j) for j in range(self.ensemble.k)]
        card: str = _template().render(
            kind=kind,
            reads=reads,
            ends_in_padding=ends_in_padding,
            where=where if place == "." else f"{where}/{place}",
            hub_id=self.hub_id if where != self.hub_id else "",
            folder=self.folder,
            base=self.base,
            base_id=self.base_id,
            k=self.ensemble.k,
            members=members,
            rows=rows,
            far=[row["member"] for row in rows if row["far"] and row["member"] in members],
            data=data,
            data_name=PurePath(str(data.get("name", ""))).name,
            notes=[without_path(note) for note in facts.get("notes") or []],
            test=facts.get("test") or {},
            pairs=facts.get("pairs"),
            prompts=facts.get("prompts"),
            table=[asdict(row) for row in comparison(facts)] if facts.get("levels") else [],
            commands="\n".join(shlex.join(map(without_path, words)).replace("\n", " ") for words in self.commands),
            settings=without_path({key: facts[key] for key in ("options", "tuning", "versions") if facts.get(key)}),
            version=__version__,
        )
        return card


def without_path(value: Any) -> Any:
    """Return plain values with every absolute path in them cut to its last name.

    Example:
        >>> without_path({"backbone": "/home/me/models/mine", "note": "in ~/models/mine 1/2 is cut"})
        {'backbone': 'mine', 'note': 'in mine 1/2 is cut'}
    """
    if isinstance(value, Mapping):
        return {key: without_path(item) for key, item in value.items()}
    if isinstance(value, str):
        return PurePath(value).name if value.startswith(("/", "~")) else re.sub(r"(?<=\s)[~/]\S*/", "", value)
    return [without_path(item) for item in value] if isinstance(value, list) else value


# --- Markdown -------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    r"""Return text as it reads in Markdown: on one line, with nothing in it that is markup.

    Example:
        >>> print(escaped("[a](b) | <script>\n# *c*"))
        \[a\]\(b\) \| &lt;script&gt; \# \*c\*
    """
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#|~!$])", r"\\\1", line)


def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise MissingExtraError("jinja2", "report", "a model card") from None

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4f}"

    def interval(found: Mapping[str, Any] | None, sign: str = "") -> str:
        if not found or found.get("mean") is None:
            return "–"
        if found.get("low") is None:
            return f"{found['mean']:{sign}.4f}"
        return f"{found['mean']:{sign}.4f} [{found['low']:{sign}.4f}, {found['high']:{sign}.4f}]"

    def as_json(value: Any, indent: int | None = None) -> Any:
        return Markup(json.dumps(value, ensure_ascii=False, indent=indent))  # noqa: S704

    def quoted(text: str) -> Any:
        return Markup(shlex.quote(text.replace("\n", " ")))  # noqa: S704

    def verbatim(text: str) -> Any:
        return Markup(text)  # noqa: S704

    # What comes from data is escaped unless a filter says how it is written instead.
    environment = Environment(  # noqa: S701
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else escaped(str(value)),
    )
    environment.filters.update(number=number, interval=interval, as_json=as_json, quoted=quoted, verbatim=verbatim)
    return environment.from_string(
        files("pluralign").joinpath("publishing/templates/model_card.md").read_text(encoding="utf-8")
    )
