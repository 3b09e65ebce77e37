"""A Python-Markdown extension that fills in the parts of the documentation that would otherwise go stale.

A marker on a line of its own is replaced when a page is built:

* ``<!-- command: fit -->``: summary, usage, arguments, options and examples, read from the command line itself;
* ``<!-- output: pluralign inspect demo -->``: the output of a command, run in a folder that one build shares;
* ``<!-- public names -->``: mkdocstrings directives for all names that ``pluralign`` exports;
* ``<!-- modules: theory -->``: mkdocstrings directives for all modules of one room.

A marker that names nothing raises an error, so the build fails.
"""

import ast
import functools
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

MARKER = re.compile(r"<!-- (command|output|public names|modules)(?:: (.+?))? -->")
SOURCE = Path(__file__).parents[1] / "src" / "pluralign"
COLUMNS = 100
"""Width of the terminal that commands believe they write to."""


def expand(text: str) -> str:
    """Replace every marker of a page by what it stands for."""
    return "\n".join("\n".join(_expanded(line)) for line in text.split("\n"))


def _expanded(line: str) -> Iterator[str]:
    if match := MARKER.fullmatch(line):
        kind, argument = match.groups()
        make: dict[str, Callable[[str], Iterator[str]]] = {
            "command": command_section, "output": command_output, "public names": public_names, "modules": room_modules,
        }  # fmt: skip
        yield from make[kind](argument or "")
    else:
        yield line


# --- the command line ------------------------------------------------------------------------------------------------


@functools.cache
def commands() -> dict[str, Any]:
    """All commands by name, as click objects."""
    import typer.main

    from pluralign.cli.main import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def command_section(name: str) -> Iterator[str]:
    """Summary, usage, arguments, options and examples of one command, as Markdown."""
    command = commands()[name]
    context = command.make_context(name, [], resilient_parsing=True)
    records = [(parameter, parameter.get_help_record(context)) for parameter in command.params]
    shown = [(parameter, *record) for parameter, record in records if record is not None]
    arguments = [
        record.split()[0] if parameter.required else f"[{record.split()[0].strip('[]')}]"
        for parameter, record, _ in shown
        if parameter.param_type_name == "argument"
    ]
    yield from (_plain(command.help), "", "```text", " ".join(["pluralign", name, "[OPTIONS]", *arguments]), "```", "")
    yield from ("| argument or option | |", "|---|---|")
    for _, names, text in shown:
        yield f"| `{names}` | {_cell(text)} |"
    examples = [line.strip() for line in (command.epilog or "").splitlines()[1:] if line.strip()]
    if examples:
        yield from ("", "```sh", *examples, "```")


def _plain(text: str) -> str:
    """Help text on one line, without rich's markup."""
    return re.sub(r"\[/?(?:bold|dim|italic|cyan|b|i)\]", "", " ".join(text.split()))


def _cell(text: str) -> str:
    return re.sub(r"([|\[\]<>*_])", r"\\\1", _plain(text))


# --- outputs ---------------------------------------------------------------------------------------------------------


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder in which the commands of one build run; removed when the build ends."""
    return tempfile.TemporaryDirectory(prefix="pluralign-docs-")


@functools.cache
def _output(line: str) -> str:
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", *shlex.split(line)],
        cwd=_folder().name,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{line!r} failed:\n{done.stderr}")
    return done.stdout


def command_output(line: str) -> Iterator[str]:
    """The command and its output, as a block of text."""
    yield from ("```text", f"$ {line}", *(row.rstrip() for row in _output(line).strip("\n").splitlines()), "```")


# --- the API ---------------------------------------------------------------------------------------------------------


def public_names(_: str) -> Iterator[str]:
    """A table of all names that ``pluralign`` exports, each with its summary and a link to its room's page."""
    import pluralign

    yield from ("| name | |", "|---|---|")
    for name in sorted(pluralign._HOME_OF, key=lambda name: (not name.islower(), name)):
        home = pluralign._HOME_OF[name]
        yield f"| [`pluralign.{name}`][pluralign.{home}.{name}] | {_cell(_summary(home, name))} |"


def _summary(module: str, name: str) -> str:
    """First paragraph of the docstring of ``name``, read without importing its module."""
    path = SOURCE.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return (ast.get_docstring(defined[name]) or "").split("\n\n")[0] if name in defined else ""


def room_modules(room: str) -> Iterator[str]:
    """A directive for every module of a room, packages inside it included."""
    folder = SOURCE / room
    if not folder.is_dir():
        raise RuntimeError(f"There is no room {room!r} in {SOURCE}.")
    for module in pkgutil.walk_packages([str(folder)], f"pluralign.{room}."):
        yield from ("", f"::: {module.name}", "    options:", "      heading_level: 2")


class _Expander(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return expand("\n".join(lines)).split("\n")


class GeneratedParts(Extension):
    """Expands the markers before any other extension sees the page."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the preprocessor."""
        md.preprocessors.register(_Expander(md), "pluralign-generated", 1000)


def makeExtension(**options: Any) -> GeneratedParts:  # noqa: N802
    """Entry point that Python-Markdown looks for."""
    return GeneratedParts(**options)
