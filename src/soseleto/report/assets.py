"""Templates, styles and scripts of the pages, and their hashes for the content security policy."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import jinja2

HERE = Path(__file__).parent / "page"


def asset(name: str, folder: Path = HERE) -> str:
    """The text of a file of this package."""
    return (folder / name).read_text("utf-8")


def digest(text: str) -> str:
    """The source expression of an inline style or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def template(name: str, folder: Path = HERE, filters: tuple[Callable[..., str], ...] = ()) -> jinja2.Template:
    """An autoescaped template with ``filters`` under their function names; undefined names raise."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({one.__name__: one for one in filters})
    return environment.get_template(name)
