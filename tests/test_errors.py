"""Errors: how they quote one another."""

from __future__ import annotations

import pytest

from soseleto.errors import counted, first_line


@pytest.mark.parametrize(
    ("message", "line"), [("one. \ntwo", "one"), ("\n one", "one"), ("", "ValueError"), ("a" * 200, "a" * 160)]
)
def test_first_line_of_an_error(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("row",), "0 rows"),
        (1, ("row",), "1 row"),
        (1234567, ("row",), "1,234,567 rows"),
        (1, ("class has", "classes have"), "1 class has"),
        (2, ("class has", "classes have"), "2 classes have"),
    ],
)
def test_a_number_with_its_noun(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text
