"""Kill a real ``soseleto fit`` in a chosen phase, resume it, and compare it with one that was never interrupted."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_safety.compare import differences
from data_safety.example import command, fit_words, often, write_data

PHASES = (
    "fold", "writing a run", "prediction", "baseline", "checkpoint", "suspects", "comparison", "report", "reading",
    "main training", "first answer",
)  # fmt: skip
SECONDS = {  # a kill comes within these
    "reading": 0.05, "main training": 0.1, "fold": 0.1, "baseline": 0.1, "first answer": 0.1,
}  # fmt: skip
OTHERS = 0.02


def kills(folder: Path, count: int, *, phases: Sequence[str] = PHASES, seed: int = 0) -> dict[str, Any]:
    """Kill ``count`` runs, in every phase in turn; a quarter of them by SIGINT instead of SIGKILL."""
    write_data(folder)
    seen = mmap.mmap(-1, len(PHASES))
    assert _end(_start(folder, folder / "whole", seen)) == 0
    assert all(seen[:]), "a phase was not seen"
    draw, killed, finished, wrong = random.Random(seed), Counter[str](), 0, []
    for at in range(count):
        phase = phases[at % len(phases)]
        number = signal.SIGINT if (at + at // len(phases)) % 4 == 3 else signal.SIGKILL
        out = folder / "run"
        code = _interrupted(folder, out, phase, number, draw.uniform(0, SECONDS.get(phase, OTHERS)))
        if code in (-signal.SIGKILL, 128 + signal.SIGINT):
            killed[f"{phase}, {number.name}"] += 1
        elif code:
            wrong.append({"phase": phase, "signal": number.name, "what": f"exit code {code}"})
        again = 0 if code == 0 else _end(_start(folder, out, mmap.mmap(-1, len(PHASES))))
        finished += code == 0
        problems = differences(out, folder / "whole") if again in (0, 2) else [f"resuming: exit code {again}"]
        wrong += [{"phase": phase, "signal": number.name, "what": one} for one in problems]
        shutil.rmtree(out, ignore_errors=True)
    return {"tried": count, "killed": dict(killed), "ended before the kill": finished, "wrong": wrong}


def _interrupted(folder: Path, out: Path, phase: str, number: signal.Signals, delay: float) -> int:
    """Start a run, send the signal ``delay`` seconds after the phase has begun, and return the exit code."""
    seen = mmap.mmap(-1, len(PHASES))
    process = _start(folder, out, seen)
    while not seen[PHASES.index(phase)] and _alive(process):
        time.sleep(0.0005)
    time.sleep(delay)
    if _alive(process):
        os.kill(process, number)
    return _end(process)


def _start(folder: Path, out: Path, seen: mmap.mmap) -> int:
    """The command in a forked process, which has everything imported; it marks the phases that it reaches."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _mark_phases(seen)
        said = command(*fit_words(folder, out, *often(folder), "--epochs", 1))
        code = said.code
        if code not in (0, 2, 128 + signal.SIGINT):
            os.write(2, said.err[-2000:].encode())
    except KeyboardInterrupt:  # before or after the command itself
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _alive(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _mark_phases(seen: mmap.mmap) -> None:
    from soseleto.cli import fit
    from soseleto.comparison.trainings import Comparing
    from soseleto.run_folder import checkpoint
    from soseleto.training import resume
    from soseleto.training.loop import Loop

    def mark(owner: Any, name: str, phase: str | Callable[..., str]) -> None:
        true = getattr(owner, name)

        def marked(*given: Any, **more: Any) -> Any:
            what = phase if isinstance(phase, str) else phase(*given)
            seen[PHASES.index(what)] = 1
            return true(*given, **more)

        setattr(owner, name, marked)

    mark(fit, "read_pair", "reading")
    mark(resume.Keeper, "after", _training)
    mark(checkpoint, "_write", "checkpoint")
    mark(Loop, "_with_evidence", "suspects")
    mark(Loop, "_close", "writing a run")
    mark(Comparing, "_begin", "first answer")
    mark(Comparing, "_judge", "prediction")
    mark(Comparing, "_conclude", "comparison")
    mark(fit, "write_report", "report")


def _training(keeper: Any, step: int) -> str:
    folder = str(keeper.records.folder.path)
    return "main training" if "parts" not in folder else "fold" if folder.endswith("soseleto") else "baseline"
