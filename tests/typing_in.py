"""A command line typed in this process, for the tests of the commands."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from soseleto.cli.main import main


class Said(NamedTuple):
    code: int
    out: str
    err: str


Type = Callable[..., Said]


def typed(*words: object) -> Said:
    stdout, err = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(stdout, "utf-8", write_through=True)
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert isinstance(left.value.code, int)
    return Said(left.value.code, stdout.getvalue().decode(), err.getvalue())


def run(*words: object) -> str:
    """What a command prints; it must succeed."""
    said = typed(*words)
    assert said.code == 0, said.err
    return said.out
