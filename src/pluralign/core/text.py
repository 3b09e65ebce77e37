"""Text for people to read."""


def shortened(text: str, length: int) -> str:
    """Return a text of at most ``length`` characters; a longer text is cut and ends in an ellipsis.

    Example:
        >>> shortened("a long story", 7)
        'a long…'
    """
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
