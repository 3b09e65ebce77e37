"""Each extra is complete: its commands run where only its packages can be imported.

``tests/real_extras.py`` runs the same commands in real environments, which takes minutes.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import one_extra
import pytest
from limited_imports import canonical
from packaging.requirements import Requirement

TESTS = Path(__file__).parent
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]


def closure(extra: str) -> set[str]:
    """Return the distributions of an installation with one extra, or ``core`` for none: all that pip would install."""
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    todo, done = [(Requirement(line), "") for line in wanted], set()
    while todo:
        requirement, of_extra = todo.pop()
        name = canonical(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for wanted_extra in ("", *requirement.extras):
            if (name, wanted_extra) not in done:
                done.add((name, wanted_extra))
                todo += [(Requirement(line), wanted_extra) for line in importlib.metadata.requires(name) or []]
    return {name for name, _ in done} | {"pluralign"}


def run_script(extra: str, folder: Path, *script: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script that can import the packages of one extra."""
    allowed = folder / "allowed.txt"
    allowed.write_text("\n".join(closure(extra)))
    command = [sys.executable, TESTS / "limited_imports.py", allowed, *script]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PLURALIGN_CACHE": str(folder / "cache"), "COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


# Ray starts processes whose imports are not limited; tests/test_jobs.py runs it.
@pytest.mark.slow
@pytest.mark.parametrize("extra", [extra for extra in one_extra.EXTRAS if extra != "ray"])
def test_an_installation_with_one_extra_does_what_the_extra_is_for(
    extra: str, tmp_path: Path, town_folder: Path
) -> None:
    if extra in {"server", "report"}:
        shutil.copytree(town_folder, tmp_path / "town")
    done = run_script(extra, tmp_path, TESTS / "one_extra.py", extra)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{extra}: complete\n")


def test_packages_of_other_extras_are_absent_in_these_tests(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.metadata, importlib.util, numpy, fastapi\n"
        "print([importlib.util.find_spec(name) for name in ('torch', 'jinja2', 'pytest')])\n"
        "try: importlib.metadata.version('torch')\n"
        "except importlib.metadata.PackageNotFoundError: print('absent')\n"
        "import vaderSentiment\n"
    )
    done = run_script("server", tmp_path, script)
    assert done.stdout == "[None, None, None]\nabsent\n"
    assert "ModuleNotFoundError: No module named 'vaderSentiment'" in done.stderr


def test_every_extra_for_users_has_its_commands_and_installs_every_package_it_imports_itself() -> None:
    for_users = set(PROJECT["optional-dependencies"]) - {"all", "dev", "docs"}
    assert set(one_extra.EXTRAS) == for_users | {"core"}
    assert {"jinja2", "gguf", "peft", "trl", "torch", "transformers"} <= closure("finetune")
    assert closure("server").isdisjoint({"torch", "jinja2", "vadersentiment"})
    assert closure("core") < closure("hf") < closure("finetune")
