"""Installs the wheel in a new environment for each extra, and runs ``tests/one_extra.py`` there.

    python tests/real_extras.py              # all extras: some ten minutes and ten gigabytes
    python tests/real_extras.py core server

The workflow runs it. ``tests/test_extras.py`` runs the same commands without new environments.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from one_extra import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
WITH_TORCH = {"encoders", "finetune"}


def main() -> None:
    """Check the extras in ``sys.argv``, or all."""
    extras = sys.argv[1:] or list(EXTRAS)
    with tempfile.TemporaryDirectory(prefix="pluralign-extras-") as scratch:
        wheel = build_wheel(Path(scratch))
        for extra in extras:
            started, folder = time.monotonic(), Path(scratch) / extra
            python = make_environment(folder, wheel, extra)
            work = folder / "work"
            work.mkdir()
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            environment |= {"PLURALIGN_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
            commands: list[list[str | Path]] = [[python, ROOT / "tests" / "one_extra.py", extra]]
            if extra == "core":
                commands.append([python, "-m", "pluralign", "demo", "--pairs", "300"])  # at its real size
            for command in commands:
                subprocess.run(command, cwd=work, env=environment, check=True)
            print(f"{extra}: {time.monotonic() - started:.0f} s", flush=True)
            shutil.rmtree(folder)


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, so that no file of an earlier build gets into it."""
    source = shutil.copytree(
        ROOT, folder / "source", ignore=shutil.ignore_patterns(".*cache", ".git", ".venv", "build", "*.egg-info")
    )
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source], check=True)
    return next(folder.glob("pluralign-*.whl"))


def make_environment(folder: Path, wheel: Path, extra: str) -> Path:
    """Make an environment with the wheel, one extra and the tested versions; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    constraints = ROOT / "constraints.txt"
    if extra in WITH_TORCH:
        torch = re.findall(r"^torch==.*", constraints.read_text(), flags=re.MULTILINE)
        subprocess.run([*install, *torch], check=True)
    name = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
    subprocess.run([*install, "--constraint", constraints, name], check=True)
    return python


if __name__ == "__main__":
    main()
