"""The application ``pluralign``: its commands in order, its global options, and errors as one sentence.

Each command calls the public function of the same name. Results go to stdout (with ``--json`` one object and nothing
else), notes and progress to stderr. A user's mistake is one sentence on stderr and exit code 2.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NoReturn

import typer

from pluralign.cli.commands import analysis, answer, experiments, fit, serve, votes
from pluralign.cli.console import log_to_stderr
from pluralign.core.errors import PluralignError, UsageError
from pluralign.core.version import __version__

COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Start here": (experiments.demo, votes.inspect, fit.fit, fit.evaluate),
    "Analyse an ensemble": (
        analysis.profile, analysis.diversity, analysis.certify, analysis.prune, analysis.report,
    ),
    "Use an ensemble": (answer.score, answer.compare, answer.answer, serve.serve, serve.tune, serve.export),
    "Prepare data, and reproduce the paper": (fit.encode, answer.generate, votes.rankings, experiments.reproduce),
}  # fmt: skip
"""The commands, by their heading in ``--help``."""

app = typer.Typer(
    name="pluralign",
    help="Train a small weighted ensemble of reward models whose votes split as people's votes do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _register(command: Callable[..., None], panel: str) -> None:
    """Add a command to the application; the help and the examples are those of its docstring."""
    help_text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
    epilog = "\n\n".join(["Examples:", *(line.strip() for line in examples.splitlines())])
    app.command(help=help_text, epilog=epilog, rich_help_panel=panel)(command)


for heading, commands in COMMANDS.items():
    for function in commands:
        _register(function, heading)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all log messages on stderr.")] = False,
) -> None:
    """Global options."""
    log_to_stderr(verbose)
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. A user's mistake is printed as one sentence on stderr, with exit code 2."""
    try:
        _refuse_empty(sys.argv[1:])
        app(prog_name="pluralign")
    except PluralignError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of our output has closed the pipe, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError, FileExistsError) as error:
        _fail(f"{error.filename or 'a file'}: {(error.strerror or 'cannot be used').lower()}.")


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raise UsageError for an empty argument. As the name of a file it would mean the current folder."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        if equals and not value:
            place = f"the value of {option}" if option.startswith("-") else "an argument"
            raise UsageError(f"{place} is empty; check for an unset variable in quotes.")


def _fail(sentence: str) -> NoReturn:
    print(f"pluralign: {sentence}", file=sys.stderr)
    sys.exit(2)
