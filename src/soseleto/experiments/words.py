"""Words that the experiments' scripts share."""

from __future__ import annotations

import ast
from typing import Any

from soseleto.errors import UsageError


def setting(word: str) -> tuple[str, Any]:
    """A setting of a method as somebody typed it: NAME=VALUE."""
    name, equals, value = word.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE, got {word!r}: as in --set weight_step=0.2.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
