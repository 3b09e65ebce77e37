"""The readme of the built packages: README.md with absolute links, which also work on a package index.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = "pluralign/pluralign"


def absolute(link: re.Match[str]) -> str:
    """Return a Markdown link or image with the address of its file on GitHub."""
    image, text, target = link.groups()
    if image:
        place = f"https://raw.githubusercontent.com/{PROJECT}/main"
    else:
        place = f"https://github.com/{PROJECT}/{'blob' if '.' in Path(target).name else 'tree'}/main"
    return f"{image}[{text}]({place}/{target})"


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)", absolute, readme),
    long_description_content_type="text/markdown",
)
