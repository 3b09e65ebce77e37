"""Text for people to read."""


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
