"""The application ``pluralign``: its commands in order, its global options, and errors as one sentence.

Each command calls the public function of the same name. Results go to stdout (with ``--json`` one object and nothing
else), notes and progress to stderr. A user's mistake is one sentence on stderr and exit code 2.
"""

import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pluralign.cli.commands import analysis, answer, experiments, fit, serve
from pluralign.cli.console import is_first_process, log_to_stderr, say
from pluralign.core.errors import ON_COMMAND_LINE, PluralignError, UsageError
from pluralign.core.text import is_unicode, one_line, printable
from pluralign.core.version import __version__

COMMAND_LINE_ERROR: Any = typer.BadParameter.__mro__[2]
"""``ClickException``, the class of all errors in options and arguments; typer does not export it."""
COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Start here": (experiments.demo, fit.inspect, fit.fit, fit.evaluate),
    "Analyse an ensemble": (
        analysis.profile, analysis.diversity, analysis.certify, analysis.prune, analysis.report,
    ),
    "Use an ensemble": (answer.score, answer.compare, answer.answer, serve.serve, serve.tune, serve.export),
    "Prepare data, and reproduce the paper": (fit.encode, answer.generate, analysis.rankings, experiments.reproduce),
}  # fmt: skip
"""The commands, by their heading in ``--help``."""

app = typer.Typer(
    name="pluralign",
    help="Train a small weighted ensemble of reward models whose votes split as people's votes do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


for heading, commands in COMMANDS.items():
    for command in commands:  # the help and the examples are those of its docstring
        help_text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
        help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in help_text.split("\n\n"))
        epilog = "\n\n".join(["Examples:", *(line.strip() for line in examples.splitlines())])
        app.command(help=help_text, epilog=epilog, rich_help_panel=heading)(command)


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
    _open_missing_streams()
    ON_COMMAND_LINE.set()
    try:
        _check_words(sys.argv[1:])
        if {"RANK", "WORLD_SIZE"} & os.environ.keys():
            is_first_process()  # an impossible launch is an error before any output
        _run()
    except PluralignError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of our output has closed the pipe, as with `| head`
        _drop_stdout()
        sys.exit(1)
    except OSError as error:
        logging.getLogger("pluralign").debug("the error came from:", exc_info=error)
        _fail(_sentence(error))
    finally:
        ON_COMMAND_LINE.clear()


def _run() -> None:
    """Run the command. Flush its output, to notice a full disk before the interpreter ends, and leave the launch."""
    for word in sys.argv[1:]:
        if word.startswith("-") and printable(name := word.partition("=")[0]) != name:
            raise UsageError(f"there is no option {name!r}; run pluralign --help.")  # typer would print it as it is
    try:
        code = app(prog_name="pluralign", standalone_mode=False)
    except COMMAND_LINE_ERROR as error:
        if not sys.argv[1:]:  # the help is the message
            error.show()
            sys.exit(2)
        problem = one_line(error.format_message().replace("Value error, ", "").replace(". Did", "; did"), 400).rstrip(
            ".?"
        )
        command = error.ctx.command_path if getattr(error, "ctx", None) else "pluralign"
        raise UsageError(f"{problem[:1].lower()}{problem[1:]}; see {command} --help.") from None
    if code:
        sys.exit(code)
    sys.stdout.flush()
    if "torch" in sys.modules:
        from pluralign.core.processes import leave_launch

        leave_launch()


def _sentence(error: OSError) -> str:
    """Return one sentence on a file that cannot be read or written; without a file it may be stdout."""
    reason = one_line(error.strerror or error)
    if error.filename is not None:
        return f"{error.filename}: {reason.lower()}."
    if error.errno is None:
        return f"{reason.rstrip('.')}."
    _drop_stdout()  # else the interpreter flushes it once more at its end, and fails
    return f"the output cannot be written: {reason.lower()}."


def _open_missing_streams() -> None:
    """Give a process that was started without standard streams empty ones; without a stdout it has nothing to do."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        _fail("standard output is closed; redirect it to a file or to /dev/null.")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that know no ½ or τ


def _drop_stdout() -> None:
    """Send the rest of stdout nowhere."""
    with suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_words(arguments: Sequence[str]) -> None:
    """Raise UsageError for an empty argument, which as the name of a file would mean the current folder, and for one
    that is not UTF-8: no JSON or Parquet file can hold it.
    """
    if broken := [argument for argument in arguments if not is_unicode(argument)]:
        raise UsageError(f"{broken[0]} is not valid UTF-8; if it is the name of a file, rename the file.")
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        if equals and not value:
            place = f"the value of {option}" if option.startswith("-") else "an argument"
            raise UsageError(f"{place} is empty; check for an unset variable in quotes.")


def _fail(sentence: str) -> NoReturn:
    say(f"pluralign: {' '.join(sentence.splitlines())}")  # names of columns and files may hold line ends
    sys.exit(2)
