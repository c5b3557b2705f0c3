"""Templates, styles and scripts of our own pages, and the hashes by which a page allows these and no others."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import jinja2

HERE = Path(__file__).parent / "page"


def asset(name: str, folder: Path = HERE) -> str:
    """The text of one of our own files."""
    return (folder / name).read_text("utf-8")


def digest(text: str) -> str:
    """As a content policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def template(name: str, folder: Path = HERE, forms: tuple[Callable[..., str], ...] = ()) -> jinja2.Template:
    """An autoescaped template, in which ``forms`` are filters by their names; a name that is missing raises."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({form.__name__: form for form in forms})
    return environment.get_template(name)
