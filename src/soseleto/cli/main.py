"""The entry point of the command line: runs a command; every error is one sentence and an exit code."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import sys
import traceback
from typing import Any

import typer

from soseleto.cli import commands
from soseleto.cli.commands import app
from soseleto.errors import (
    INTERRUPTED,
    STOPPED,
    Interrupted,
    RankStopped,
    SoseletoError,
    TrainingError,
    UsageError,
    first_line,
)

DONE, FAILED, MISUSED = 0, 1, 2
TRAININGS = ("demo", "fit", "scan")
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "failed to map segment", "start new thread")
BY_SIGNAL = 128  # plus the signal's number


def main(arguments: list[str] | None = None) -> None:
    """The console entry point: every error is one sentence on standard error, and an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        from soseleto import __version__

        typer.echo(f"soseleto {__version__}")
        sys.exit(DONE)
    sys.exit(_run(words or ["--help"], debug))


class _Messages(logging.Handler):
    """Prints once what ``fit`` has chosen by default, and warnings about the data to predict on.

    The other messages of a training are printed by its live line.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.module == "fit" and (text := record.getMessage()) not in self.printed:
            self.printed.add(text)
            typer.echo(text)
        elif record.module in ("preparation", "read"):  # what is not used of the data
            typer.echo(record.getMessage(), err=True)


def _run(arguments: list[str], debug: bool) -> int:
    logger, messages = logging.getLogger("soseleto"), _Messages()
    level = logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    streams = sys.stdout, sys.stderr
    if arguments[0] in TRAININGS:
        sys.stdout, sys.stderr = (_Stream(stream) for stream in streams)
    try:
        return _code(arguments, debug)
    finally:
        sys.stdout, sys.stderr = streams
        logger.removeHandler(messages)
        logger.setLevel(level)


class _Stream:
    """A stream whose first failed write silences it: a closed pipe or a full disk must not end a training."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            _silence(self._stream)
        return len(text)


def _silence(stream: Any) -> None:
    """Let what is still in the stream's buffer, which Python writes at its end, go nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())


def _code(arguments: list[str], debug: bool) -> int:
    try:
        returned = app(arguments, prog_name="soseleto", standalone_mode=False)
        code = returned if isinstance(returned, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and not error.filename:  # standard output, which is not tried again at the end
            _silence(sys.stdout)
        if _prints_here(error):
            typer.echo(f"soseleto: {_sentence(error, arguments)}", err=True)
        if isinstance(error, Interrupted):
            return BY_SIGNAL + error.signal
        # click's errors in the command line have this code; typer has had them under several names
        misused = isinstance(error, UsageError) or getattr(error, "exit_code", None) == MISUSED
        return MISUSED if misused else FAILED
    if code == INTERRUPTED:
        typer.echo(STOPPED, err=True)
    return code


def _prints_here(error: Exception) -> bool:
    """Whether this rank prints the error: one that occurs on every rank is printed by the first only."""
    everywhere = isinstance(error, UsageError | Interrupted | RankStopped) or type(error) is TrainingError
    return os.environ.get("RANK", "0") == "0" or not everywhere


def _in_options(sentence: str, command: str) -> str:
    """What the library says of an argument, said of the command's option: --mode transfer for mode='transfer'."""
    function = getattr(commands, command.replace("-", "_"), None)
    known = inspect.signature(function).parameters if callable(function) else {}

    def option(match: re.Match[str]) -> str:
        name = match["name"]
        if name == "encoding" and command == "fit":
            return f"encoding = '{match['text']}' under [reading] in --config FILE.toml"
        return f"--{name.replace('_', '-')} {match['text'] or match['number']}" if name in known else match[0]

    return re.sub(r"\b(?P<name>[a-z_]+)=(?:'(?P<text>[\w:.+-]+)'|(?P<number>\d[\d.]*\d|\d))", option, sentence)


def _sentence(error: Exception, arguments: list[str]) -> str:
    if hasattr(error, "format_message"):
        known = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
        name = f" {arguments[0]}" if arguments[0] in known else ""
        message = error.format_message().rstrip(".?")
        return f"{message[:1].lower()}{message[1:]} (see `soseleto{name} --help`)."
    if isinstance(error, SoseletoError):
        return _in_options(str(error), arguments[0])
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}."
    if isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in NO_MEMORY):
        return f"there is not enough memory ({first_line(error)}): give less data, or free some memory."
    if isinstance(error, OSError) and error.strerror:
        return f"the output could not be written ({error.strerror.lower()}): add --out FILE on another disk."
    return f"unexpected {type(error).__name__}: {error} (add --debug to see where)."
