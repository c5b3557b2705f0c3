"""Packages that only some readers need, imported when they are; without them the error says what to type."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from soseleto.errors import DataError

_INSTALL = {"pyarrow": "soseleto", "PIL": "soseleto", "datasets": "soseleto[huggingface]"}


def need(module: str, *, to: str) -> Any:
    """The module, or one sentence with the line to type."""
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "pillow"}.get(top, top)
        raise DataError(
            f"{to} needs {package}, which is not installed: type pip install '{_INSTALL.get(top, package)}'."
        ) from error


def decoding() -> ModuleType:
    """The image rules; they need Pillow."""
    need("PIL.Image", to="reading images")
    return importlib.import_module("soseleto.data.image_decoding.rules")
