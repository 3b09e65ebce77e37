"""``python -m pluralign`` is ``pluralign``."""

from pluralign.cli.main import main

main()
