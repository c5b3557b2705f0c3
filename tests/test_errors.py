"""Errors: how they quote one another."""

from __future__ import annotations

import pytest

from soseleto.errors import first_line


@pytest.mark.parametrize(
    ("message", "line"), [("one. \ntwo", "one"), ("\n one", "one"), ("", "ValueError"), ("a" * 200, "a" * 160)]
)
def test_first_line_of_an_error(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
