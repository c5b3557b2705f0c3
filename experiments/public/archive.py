"""Safe unpacking of tar archives: only the wanted members, never outside the folder, no decompression bombs."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from soseleto.data.limits import check_expansion
from soseleto.errors import DataError


def unpack(archive: Path, folder: Path, wanted: Iterable[str]) -> list[Path]:
    """Write the wanted members (posix paths inside the archive) below ``folder``; each file is complete or absent."""
    missing = set(wanted)
    budget = archive.stat().st_size
    written, unpacked = [], 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _check_inside(member.name, archive)
                unpacked += member.size
                check_expansion(budget, unpacked, what=str(archive))
                if member.name not in missing:
                    continue
                if not member.isreg():
                    raise DataError(f"{member.name} in {archive} is a link or device, not a file: fetch it again.")
                written.append(_write(tar, member, folder))
                missing.discard(member.name)
                if not missing:
                    return written
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive} is damaged ({error}): fetch it again.") from error
    raise DataError(f"{archive} lacks {', '.join(sorted(missing))}: fetch it again.")


def _check_inside(name: str, archive: Path) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise DataError(f"{archive} has a member {name!r} that would be written outside its folder: fetch it again.")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> Path:
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.commonpath([os.path.realpath(folder), os.path.realpath(path.parent)]) != os.path.realpath(folder):
        raise DataError(f"{path.parent} is a link that leads outside {folder}: remove it.")
    part = path.with_name(path.name + ".part")
    content = tar.extractfile(member)
    assert content is not None  # a regular file
    with content, open(part, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    if part.stat().st_size != member.size:
        raise DataError(f"{member.name} in {tar.name!r} is truncated: fetch it again.")
    os.replace(part, path)
    return path
