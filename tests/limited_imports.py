"""An environment with fewer packages, simulated: imports of all other installed packages fail, as if they were absent.

``python limited_imports.py ALLOWED SCRIPT ARGUMENTS…`` runs a script that can import the standard library, modules that
no distribution owns, and the distributions listed in the file ALLOWED, one name per line. It needs no package itself.
"""

import importlib.metadata
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class LimitedFinder:
    """Finds modules and distributions on ``sys.path``, except those that are not allowed."""

    def __init__(self, allowed: frozenset[str]) -> None:
        owners = importlib.metadata.packages_distributions()
        self.allowed = allowed
        self.hidden = {name for name, of in owners.items() if not any(canonical(one) in allowed for one in of)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module; None if it is hidden or does not exist."""
        return None if name.partition(".")[0] in self.hidden else PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """Return the distributions that are allowed; packages ask for versions of others to find out what is there."""
        found = importlib.metadata.MetadataPathFinder.find_distributions(context)
        return [one for one in found if canonical(one.metadata["Name"]) in self.allowed]

    def invalidate_caches(self) -> None:
        """Forget which files there are."""
        PathFinder.invalidate_caches()


def canonical(name: str) -> str:
    """Return the normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Limit the imports of this process, then run the script."""
    allowed = frozenset(map(canonical, Path(sys.argv[1]).read_text().split()))
    finder: Any = LimitedFinder(allowed)
    sys.meta_path[:] = [finder if found is PathFinder else found for found in sys.meta_path]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
