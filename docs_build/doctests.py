"""A griffe extension: doctests in docstrings become code blocks, wherever in the docstring they stand."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(
    r"^(?P<indent>[ ]*)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent)\.\.\. ?.*|\n(?P=indent)[ ]+\S.*)*", re.MULTILINE
)


class FencedDoctests(Extension):
    """Puts a fence around every doctest outside an ``Examples:`` section, which griffe recognizes by itself."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None and "Examples:" not in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return ``text`` with a fence around each doctest.

    Example:
        >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2")
        'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return DOCTEST.sub(lambda match: f"{match['indent']}```pycon\n{match[0]}\n{match['indent']}```", text)
