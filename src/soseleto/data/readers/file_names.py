r"""File names that are not UTF-8, which ids, rankings and manifests cannot hold as they are.

Python has such a byte as a lone surrogate. It is written as ``\xff`` (``caf\xe9.png``); a path in that form is read
back as long as no file has it as its literal name.
"""

from __future__ import annotations

import os
import re

_ESCAPED = re.compile(r"\\x([89a-f][0-9a-f])")


def escaped(path: str) -> str:
    """The path as text that can be encoded."""
    if path.isascii():
        return path
    return "".join(f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else c for c in path)


def existing(path: str, *, root: str | os.PathLike[str] = "") -> str:
    """The path of the file that ``escaped`` was given, where it exists; else the path as it is."""
    if "\\x" not in path or os.path.lexists(os.path.join(root, path)):
        return path
    found = _ESCAPED.sub(lambda match: chr(0xDC00 + int(match[1], 16)), path)
    return found if os.path.lexists(os.path.join(root, found)) else path
