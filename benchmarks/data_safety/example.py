"""A small ``soseleto fit`` that writes every kind of file, and the commands that read its run."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import typer
from PIL import Image

from soseleto.cli import main as command_line
from soseleto.review.queue import Decision, Decisions
from soseleto.review.server import Review
from soseleto.run_folder.folder import RunFolder

SIDE = 8  # pixels


@dataclass(frozen=True)
class Said:
    """What one command answered."""

    code: int
    out: bytes
    err: str


@functools.cache
def _built() -> Any:
    """The parser of the command line, which a process usually builds once."""
    return typer.main.get_command(command_line.app)


def command(*words: object) -> Said:
    """Run ``soseleto WORDS`` in this process."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    built = mock.patch.object(command_line, "app", _built())
    with built, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line.main([str(word) for word in words])
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
    out.flush()
    return Said(code, out.buffer.getvalue(), err.getvalue())


def write_data(folder: Path) -> None:
    """Tables of image paths: a source with flipped labels and one unusable row, and a target."""
    (folder / "images").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count, flipped in (("source", 60, 0.2), ("target", 40, 0.0)):
        lines = ["path,label"]
        for at in range(count):
            label = at % 2
            pixels = draw.integers(0, 120, (SIDE, SIDE)) + 130 * (np.arange(SIDE) // (SIDE // 2) == label)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{name}-{at}.png")
            shown = 1 - label if draw.random() < flipped else label
            lines.append(f"images/{name}-{at}.png,{('left', 'right')[shown]}")
        if name == "source":
            (folder / "images" / "damaged.png").write_bytes(b"not an image")
            lines.append("images/damaged.png,left")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def often(data: Path) -> list[object]:
    """A checkpoint after every step."""
    (data / "often.toml").write_text("[checkpoints]\nseconds = 0\n")
    return ["--config", data / "often.toml"]


def fit_words(data: Path, out: Path, *more: object) -> list[str]:
    words = ["fit", "--source", data / "source.csv", "--target", data / "target.csv", "--out", out, "--epochs", 2]
    words += ["--skip-bad", "--baselines", "--folds", 2, "--batch-size", 16, "--device", "cpu", *more]
    return [str(word) for word in words]


def finished_run(folder: Path) -> Path:
    """A reviewed run with every kind of file."""
    write_data(folder)
    done = command(*fit_words(folder, folder / "run", "--no-baselines", "--keep", "soseleto"))
    assert done.code == 0, done.err
    run = RunFolder.open(folder / "run")
    decisions = Decisions(run)
    for at, name in enumerate(run.ranking()["id"][-3:]):
        decisions.decide(Decision(str(name), "drop" if at else "keep"))
    decisions.close()
    return run.path


Answer = Callable[[Path, Path], Said]  # of a run folder, with a new folder for files


def readers(data: Path) -> dict[str, tuple[Answer, tuple[str, ...]]]:
    """Every command that reads a run, and the files that it reads beside config.json and SHA256SUMS."""
    image = data / "images" / "target-0.png"
    exported = ("ranking.parquet", "source.json")
    drawn = ("metrics.jsonl", "ranking.parquet", "pictures.parquet", "source.json")
    drawn += ("comparison.json", "suspects.json", "problems.json")
    reviewed = ("ranking.parquet", "pictures.parquet", "source.json", "suspects.json", "review.jsonl")
    return {
        "predict": (
            lambda run, new: command("predict", run, image),
            ("model.safetensors", "comparison.json", "calibration.json"),
        ),
        "rank": (lambda run, new: command("rank", run), exported),
        "review --export": (
            lambda run, new: _with_file(data, lambda out: command("review", run, "--export", out)),
            (*exported, "review.jsonl"),
        ),
        "report": (lambda run, new: _with_file(new, lambda out: command("report", run, "--out", out)), drawn),
        "review": (lambda run, new: _page(run), reviewed),
    }


def _with_file(folder: Path, write: Callable[[Path], Said]) -> Said:
    """The answer with the content of the file that was written, and without its name."""
    out = folder / f"written-{os.getpid()}.csv"
    said = write(out)
    content = out.read_bytes() if out.exists() else b""
    out.unlink(missing_ok=True)
    return Said(said.code, content, said.err)


def _page(run: Path) -> Said:
    """What the review page would show; the server itself is not started."""
    from soseleto.errors import SoseletoError

    try:
        review = Review(run)
    except SoseletoError as error:
        return Said(1, b"", f"soseleto: {error}\n")
    try:
        return Said(0, repr((review.state(), review.queue.pictures)).encode(), "")
    finally:
        review.decisions.close()
