"""README and documentation match the code: their Python runs, their commands run, their links and names exist."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pluralign"
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "recipes/README")),
    *SITE,
]
OWN_PAGES = (
    r"https://github\.com/pluralign/pluralign/(?:blob|tree)",
    r"https://raw\.githubusercontent\.com/pluralign/pluralign",
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python")]
OUTPUTS = {line for page in SITE for line in re.findall(r"<!-- output: (.+) -->", page.read_text())}
COMMANDS = {  # a line on several pages runs once; the build of the site runs those whose output it shows
    line: page
    for page in reversed(PAGES)
    for block in blocks(page, "console")
    for line in block.splitlines()
    if line.startswith("pluralign") and not {line, f"{line} --encoder hashing"} & OUTPUTS
}


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{name(page)}-{i}" for i, (page, _) in enumerate(PYTHON)])
def test_python_blocks_run(page: Path, code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands in the documentation name."""
    from pluralign import fit, town_hall

    path = tmp_path_factory.mktemp("docs")
    train, test = town_hall(300).preferences.split(test_fraction=0.2)
    for votes, file in ((train, "votes"), (train, "town"), (test, "new-votes")):
        votes.save(path / f"{file}.jsonl.gz")
    line = {"prompt": "Tea?", "response_a": "Yes, please.", "response_b": "No."}
    (path / "pairs.jsonl").write_text(json.dumps(line))
    for ensemble in ("ensemble", "town"):
        fit(train, k=2, encoder="none", folder=path / ensemble)
    return path


@pytest.mark.parametrize("line", COMMANDS, ids=[f"{name(page)}: {line}" for line, page in COMMANDS.items()])
def test_commands_run(line: str, folder: Path) -> None:
    small = {name: f"{name}:300" for name in ("demo", "demo-rankings")} | {"2500": "300"}  # on fewer pairs
    first, *others = shlex.split(line)[1:]
    arguments = [first, *(small.get(argument, argument) for argument in others)]
    if first == "fit" and "--encoder" not in arguments:
        arguments += ["--encoder", "hashing", "--k", "2"]  # MiniLM would take a minute
    if first == "fit":
        arguments.append("--overwrite")  # pages use the same folder names
    command = [sys.executable, "-m", "pluralign", *arguments]
    if first == "serve":
        with subprocess.Popen([*command, "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                printed = (re.search(r"http://127\.0\.0\.1:\d+", row) for row in server.stdout)
                address = next(match[0] for match in printed if match)
                with urllib.request.urlopen(f"{address}/healthz", timeout=30) as answer:
                    assert answer.status == 200
            finally:
                server.terminate()
        return
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_no_command_evaluates_an_ensemble_on_its_training_votes() -> None:
    for page in PAGES:
        for fitted, ensemble in re.findall(r"pluralign fit (\S+) -o (\w+)", page.read_text()):
            assert f"pluralign evaluate {ensemble} {fitted}" not in page.read_text(), name(page)


def test_readme_is_short_maps_every_room_and_has_the_two_make_commands() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert "make demo\nmake test\n" in blocks(ROOT / "README.md", "console")
    assert {"setup", "demo", "test", "lint", "docs", "bench"} <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert len(readme.splitlines()) <= 200
    assert sorted(re.findall(r"^\| `(\w+)` \|", readme, flags=re.MULTILINE)) == ROOMS


def test_the_architecture_page_has_one_line_for_every_file() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    files = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if not path.name.startswith("__")]
    assert sorted(re.findall(r"^\| `([\w/]+\.py)` \|", page, flags=re.MULTILINE)) == sorted(files)
    assert set(re.findall(r"`(\w+/[\w/]+\.py)`", page)) == set(files)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_point_to_existing_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
        elif found := re.fullmatch(rf"(?:{'|'.join(OWN_PAGES)})/main/(.*)", target):
            assert (ROOT / found[1]).exists(), target


# --- names ------------------------------------------------------------------------------------------------------------


def dotted_names(page: Path) -> Iterator[str]:
    """Names in code quotes of the form room.module.name, or pluralign.room.module."""
    for quoted in re.findall(r"`(pluralign(?:\.\w+)+|\w+(?:\.\w+){2,})", page.read_text()):
        dotted = quoted.removeprefix("pluralign.")
        if dotted.split(".")[0] in ROOMS:
            yield dotted


def is_defined(dotted: str) -> bool:
    """Whether a module of this name exists, or a module that defines the rest; read without importing it."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:cut])
        if path.is_dir() or path.with_suffix(".py").is_file():
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            body: Sequence[ast.stmt] = ast.parse(file.read_text()).body
            for part in parts[cut:]:
                found = [node for node in body if part in names_defined_by(node)]
                if not found:
                    return False
                body = getattr(found[0], "body", [])
            return True
    return False


def names_defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_functions_exist(page: Path) -> None:
    if page.name == "log.md":
        return  # its names are those of the day
    missing = [dotted for dotted in dotted_names(page) if not is_defined(dotted)]
    assert missing == []


def test_named_tests_exist() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    known = {*sources, *re.findall(r"^def (test_\w+)", "\n".join(sources.values()), re.MULTILINE)}
    for page in PAGES:
        assert set(re.findall(r"`(test_\w+)`", page.read_text())) <= known, name(page)


def test_benchmarks_in_the_docs_have_these_options() -> None:
    for page in PAGES:
        for script, rest in re.findall(r"python (benchmarks/\w+\.py)([^`\n]*)", page.read_text()):
            source = (ROOT / script).read_text()
            for option in re.findall(r"--[a-z-]+", rest):
                keyword = f"{option[2:].replace('-', '_')}="
                assert f'"{option}"' in source or keyword in source, (name(page), script, option)


CURRENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "log.md")]  # those name what existed once
OF_OTHERS = set(
    re.findall(
        r"[\w-]+",
        """
        --version --install-completion --show-completion --nproc-per-node --nnodes --cpu --runner --convert --build-arg
        --max-loras --max-lora-rank --no-deps --reward
        weights_only HF_ENDPOINT THP_MEM_ALLOC_ENABLE TENSORBOARD_LOGGING_DIR TORCH_INDEX PoolerConfig PoolingParams
        remote_rm_url remote_url truncate_prompt_tokens proxy_buffering num_processes base_model_name winner_tie
        extract_anthropic_prompt three_most_similar_preferences habermas_rankings docs_build
        ONEDNN_MAX_CPU_ISA AVX512_CORE_BF16
        """,
    )
)
"""Options and names of other programs and data sets."""


def quoted(page: Path) -> list[str]:
    """Code in quotes, and the commands in blocks."""
    lines = re.findall(r"^(?:pluralign|python benchmarks/).*", page.read_text(), flags=re.MULTILINE)
    return [*re.findall(r"`([^`\n]+)`", page.read_text()), *lines]


def test_options_in_the_docs_exist() -> None:
    import typer.main

    from pluralign.cli.main import app

    group: Any = typer.main.get_command(app)
    of = {name: {o for p in one.params for o in [*p.opts, *p.secondary_opts]} for name, one in group.commands.items()}
    every = set().union(*of.values())
    for page in CURRENT:
        for code in quoted(page):
            if "benchmarks/" not in code:
                first = code.removeprefix("pluralign ").split(" ")[0]
                options = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*\b(?!-)", code))
                assert options <= of.get(first, every) | OF_OTHERS | {"--help"}, (name(page), code)


def test_fields_and_classes_in_the_docs_exist() -> None:
    files = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    texts = (path.read_text() for path in files if path.suffix in (".py", ".js", ".toml", ".html"))
    known = {word for text in texts for word in re.findall(r"\w+", text)} | {path.stem for path in files} | OF_OTHERS
    for page in CURRENT:
        words = {word for code in quoted(page) for word in re.findall(r"(?<![\w/-])(?!test_)[A-Za-z]\w*", code)}
        missing = {word for word in words if "_" in word or re.match("[A-Z][a-z]+[A-Z]", word)} - known
        assert missing == set(), name(page)


@pytest.mark.parametrize(
    "line",
    ["inspect votes.jsonl.gz", "certify town", "diversity town", "profile town", "evaluate town new-votes.jsonl.gz"],
)
def test_json_keys_are_documented(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = facts_of(*line.split())
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    section = page.split(f"<!-- command: {line.split()[0]} -->")[1].partition("\n## ")[0]
    assert set(found) <= set(re.findall(r"\w+", section))
    documented = re.findall(r"`(\w+)`", section.partition("JSON keys: ")[2])
    assert set(documented) <= set(re.findall(r"\"(\w+)\":", json.dumps(found)))


def test_every_command_and_every_room_has_its_section() -> None:
    from pluralign.cli.main import app

    named = re.findall(r"<!-- command: (\w+) -->", (ROOT / "docs" / "reference" / "command-line.md").read_text())
    commands = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert sorted(named) == sorted(commands)
    for room in ROOMS:
        assert f"<!-- modules: {room} -->" in (ROOT / "docs" / "reference" / "api" / f"{room}.md").read_text()


# --- the site ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert [address for address in loaded if address.startswith(("http", "//"))] == [], page.name
    assert "--max-disagreement" in (tmp_path / "reference" / "command-line.html").read_text()
    assert "pluralign.theory.calibration.brier" in (tmp_path / "reference" / "api" / "theory.html").read_text()


def test_citation_has_the_current_release() -> None:
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0]
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text()
