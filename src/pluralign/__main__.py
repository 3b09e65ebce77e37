"""``python -m pluralign`` is ``pluralign``."""

from pluralign.cli import main

main()
