"""Flip single bits over every file of a finished run, and run every command on it."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from data_safety.example import Said, finished_run, readers

ALWAYS = ("config.json",)  # read by every command
LIST = "SHA256SUMS"  # a flipped bit makes it unreadable, or another file look damaged, or that file unchecked
SENTENCE = re.compile(r"soseleto: [^\n]*\.\n")


def flips(folder: Path, count: int, *, others: int = 1, seed: int = 0) -> dict[str, Any]:
    """Flip ``count`` bits spread over all files; counts per file, and every answer that was not as it should be.

    A command that reads the damaged file must fail with one sentence that names it; any other must answer as before,
    which is checked for the first ``others`` flips of each file.
    """
    run = finished_run(folder)
    commands = readers(folder)
    before = {name: answer(run, folder) for name, (answer, _) in commands.items()}
    assert all(said.code == 0 for said in before.values()), [said.err for said in before.values()]
    draw, names = random.Random(seed), sorted(path.name for path in run.iterdir() if path.is_file())
    detected, unread, wrong = Counter[str](), Counter[str](), []
    for at in range(count):
        name = names[at % len(names)]
        with tempfile.TemporaryDirectory(dir=folder) as place:
            damaged = Path(place) / "run"
            shutil.copytree(run, damaged)
            where = flip(damaged / name, draw)
            for what, (answer, reads) in commands.items():
                concerned = name in (*ALWAYS, LIST, *reads)
                if not concerned and at >= others * len(names):
                    continue
                said = answer(damaged, folder)
                if name == LIST:
                    fine, counted = is_named(said, LIST) or same(said, before[what], damaged, run), detected
                elif concerned:
                    fine, counted = is_named(said, name), detected
                else:
                    fine, counted = same(said, before[what], damaged, run), unread
                counted[name] += fine
                if not fine:
                    wrong.append({"file": name, "place": where, "command": what, "code": said.code, "said": said.err})
    return {"tried": count, "files": names, "detected": dict(detected), "unaffected": dict(unread), "wrong": wrong}


def flip(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at, bit = draw.randrange(len(content)), draw.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"byte {at}, bit {bit}"


def is_named(said: Said, name: str) -> bool:
    return said.code == 1 and not said.out and bool(SENTENCE.fullmatch(said.err)) and name in said.err


def same(said: Said, before: Said, damaged: Path, run: Path) -> bool:
    out = said.out.replace(str(damaged).encode(), str(run).encode())  # a report names its folder
    return (said.code, out, said.err.replace(str(damaged), str(run))) == (before.code, before.out, before.err)
