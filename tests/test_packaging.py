"""What is published: the wheel, the source distribution, their metadata, and the container image."""

import email
import email.message
import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import run

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_PUBLISHED = (".git", ".venv", "build", "dist", "site", ".*_cache", ".hypothesis", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and the wheel that was built from it alone."""
    folder = tmp_path_factory.mktemp("built")
    source = shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_PUBLISHED))
    (source / "src" / "pluralign" / "__pycache__").mkdir(exist_ok=True)
    (source / "src" / "pluralign" / "__pycache__" / "stale.cpython-311.pyc").touch()
    build("sdist", source, folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    build("wheel", next(folder.glob("pluralign-*/")), folder)
    return folder


def build(kind: str, source: Path, output: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(output)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def in_wheel(built: Path) -> set[str]:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def metadata(built: Path) -> email.message.Message:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def tracked(folder: Path) -> Iterator[str]:
    """Yield the files of a folder as they are in the repository, without what runs leave there."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.match("__pycache__/*") and path.suffix not in (".pyc", ".partial"):
            yield path.relative_to(ROOT).as_posix()


# --- wheel and source distribution ------------------------------------------------------------------------------------


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(in_wheel: set[str]) -> None:
    package = {name.removeprefix("src/") for name in tracked(ROOT / "src" / "pluralign")}
    of_wheel = {name for name in in_wheel if not re.match(r"pluralign-[^/]+\.dist-info/", name)}
    assert of_wheel == package
    assert {"pluralign/py.typed", "pluralign/server/static/index.html"} <= of_wheel


def test_the_source_distribution_has_docs_tests_and_changelog(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["CHANGELOG.md", "CITATION.cff", "Dockerfile", "LICENSE", "Makefile", "README.md", "constraints.txt"]
    for folder in ("src", "docs", "tests", "examples", "benchmarks"):
        wanted += tracked(ROOT / folder)
    missing = {name for name in wanted if ".egg-info/" not in name} - names
    assert missing == set()
    assert [name for name in names if re.search(r"__pycache__|\.pyc$|\.venv/|\.git/|\.\w+_cache/", name)] == []


def test_metadata_name_the_project_and_its_pages(metadata: email.message.Message) -> None:
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    pages = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert set(pages) >= {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert all(address.startswith("https://github.com/pluralign/pluralign") for address in pages.values())
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_links_and_images_of_the_readme_work_on_a_package_index(metadata: email.message.Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", description)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text())) > 20
    for image, target in links:
        assert target.startswith("https://"), target
        if found := re.match(r"https://github\.com/pluralign/pluralign/(blob|tree)/main/([^#]+)", target):
            assert (ROOT / found[2]).is_dir() == (found[1] == "tree"), target
            assert (ROOT / found[2]).exists(), target
        if image:
            raw = target.removeprefix("https://raw.githubusercontent.com/pluralign/pluralign/main/")
            assert (ROOT / raw).is_file(), target


# --- the container image ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(r"^(\w+) +(.*?) *$", text, flags=re.MULTILINE)


def arguments(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for instruction, rest in instructions if instruction == name]


def test_copied_files_exist_and_are_sent_to_the_builder(instructions: list[tuple[str, str]]) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [shlex.split(rest) for rest in arguments(instructions, "COPY") if not rest.startswith("--from")]
    copied = [source for words in copies for source in words[:-1]]
    assert sorted(copied) == sorted(sent)
    assert all((ROOT / source).exists() for source in copied)
    assert {"setup.py", "pyproject.toml", "README.md", "src"} < set(copied)  # what the build of the wheel reads


def test_the_image_runs_without_privileges_and_is_checked(instructions: list[tuple[str, str]]) -> None:
    names = [name for name, _ in instructions]
    assert arguments(instructions, "USER") == ["10001"]
    assert "--uid 10001" in arguments(instructions, "RUN")[-1]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))
    assert arguments(instructions, "EXPOSE") == ["8000"]
    check = arguments(instructions, "HEALTHCHECK")[0]
    assert "http://127.0.0.1:8000/healthz" in check
    compile(json.loads(check.partition("CMD ")[2])[2], "HEALTHCHECK", "exec")


def test_the_image_has_no_secret_and_only_known_settings(instructions: list[tuple[str, str]]) -> None:
    settings = [word.partition("=")[0] for rest in arguments(instructions, "ENV") for word in shlex.split(rest)]
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in settings:
        assert f'"{name}"' in sources or fnmatch.fnmatch(name, "P[IY][PT]*_*") or name == "PYTHONUNBUFFERED", name
    values = " ".join(rest for name, rest in instructions if name in ("ENV", "ARG"))
    assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", values)


def test_the_image_installs_extras_that_exist_with_tested_versions(instructions: list[tuple[str, str]]) -> None:
    given = dict(rest.split("=", 1) for rest in arguments(instructions, "ARG"))
    assert set(given["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])
    runs = " ".join(arguments(instructions, "RUN"))
    assert "--constraint constraints.txt" in runs
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert f'"Programming Language :: Python :: {given["PYTHON"]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_image_starts_a_server_that_requires_a_key(
    instructions: list[tuple[str, str]], town_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, command = (json.loads(arguments(instructions, name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == [*PROJECT["scripts"]]
    monkeypatch.delenv("PLURALIGN_API_KEY", raising=False)
    done = run(*(town_folder if word == "/ensemble" else word for word in command))
    assert done.returncode == 2
    assert "requires an API key: give --api-key or set PLURALIGN_API_KEY" in done.stderr
