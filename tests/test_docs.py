"""README and docs say what is so: their Python runs, their commands run, their links lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python")]
COMMANDS = [
    (page, line)
    for page in PAGES
    for block in blocks(page, "console")
    for line in block.splitlines()
    if line.startswith("pluralign")
]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(PYTHON)])
def test_python_blocks_run(page: Path, code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def town_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pluralign import fit, town_hall

    folder = tmp_path_factory.mktemp("docs")
    for name in ("votes.jsonl.gz", "town.jsonl.gz"):
        town_hall(300).preferences.save(folder / name)
    line = {"prompt": "Tea?", "response_a": "Yes, please.", "response_b": "No."}
    (folder / "pairs.jsonl").write_text(json.dumps(line))
    fit(town_hall(300).preferences, k=2, encoder="none", folder=folder / "ensemble")
    fit(town_hall(300).preferences, k=2, encoder="none", folder=folder / "town")
    return folder


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page.name}: {line}" for page, line in COMMANDS])
def test_commands_run(page: Path, line: str, town_folder: Path) -> None:
    arguments = shlex.split(line)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "pluralign", *arguments], cwd=town_folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_readme_has_the_two_commands_and_make_has_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "demo", "test", "lint", "bench"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert blocks(ROOT / "README.md", "console")[0] == "make demo\nmake test\n"
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_readme_stays_short_and_maps_every_module() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 200
    for path in (ROOT / "src" / "pluralign").glob("*.py"):
        if not path.name.startswith("__"):
            assert f"`{path.name}`" in readme, f"the file map lacks {path.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_theory_names_functions_that_exist() -> None:
    import importlib

    modules = {path.stem for path in (ROOT / "src" / "pluralign").glob("*.py")} | {"demo"}
    named = re.findall(r"`(\w+)\.(\w+)", (ROOT / "docs" / "theory.md").read_text())
    assert len(named) > 30
    for module, name in named:
        assert module in modules, module
        assert hasattr(importlib.import_module(f"pluralign.{module}"), name), f"{module}.{name}"


def test_theory_names_tests_that_exist() -> None:
    tests = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "theory.md").read_text()))
    assert named <= tests, named - tests
