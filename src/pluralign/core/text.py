"""Text for people to read."""

import re


def shortened(text: str, length: int) -> str:
    """Return a text of at most ``length`` characters; a longer text is cut and ends in an ellipsis.

    Example:
        >>> shortened("a long story", 7)
        'a long…'
    """
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    Example:
        >>> counted(1, "prompt"), counted(1544, "pair")
        ('1 prompt', '1,544 pairs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def one_line(value: object, length: int = 200) -> str:
    """Return the start of a text, or of an error's message, on one line.

    Example:
        >>> one_line(OSError("no route\\n to host"))
        'no route to host'
    """
    return " ".join(str(value).split())[:length]


_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters other than tab and line feed, and characters that change the direction of other text."""
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of characters, as in file names that are no UTF-8. No encoding can write them."""


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it holds no half of a character.

    Example:
        >>> is_unicode("é"), is_unicode("\\udcff")
        (True, False)
    """
    return text.isascii() or _SURROGATES.search(text) is None


def printable(text: str) -> str:
    """Return a text that a terminal shows and does not obey: without escape sequences and other control characters.

    Example:
        >>> printable("votes\\x1b]0;title\\x07.jsonl")
        'votes]0;title.jsonl'
    """
    return _SURROGATES.sub("\ufffd", _UNSAFE.sub("", text))


def printable_json(text: str) -> str:
    """Return JSON with every character that ``printable`` changes as an escape; its value stays the same.

    Example:
        >>> printable_json('{"name": "\\x9b2J"}')
        '{"name": "\\\\u009b2J"}'
    """
    return re.sub(f"{_UNSAFE.pattern}|{_SURROGATES.pattern}", lambda found: f"\\u{ord(found[0]):04x}", text)
