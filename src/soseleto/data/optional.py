"""Pillow is imported only when images are read."""

from __future__ import annotations

import importlib
from types import ModuleType

from soseleto.errors import need


def decoding() -> ModuleType:
    """The module of the image decoding rules, which needs Pillow."""
    need("PIL.Image", to="reading images")
    return importlib.import_module("soseleto.data.image_decoding.rules")
