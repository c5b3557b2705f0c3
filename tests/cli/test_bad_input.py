"""Every kind of bad data, through the command line: sentences, never a traceback, and nothing is trained."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from soseleto.run_folder.folder import RunFolder
from typing_in import run, typed

Spoil = Callable[[Path], None]


def picture(path: Path, seed: int, size: tuple[int, int] = (16, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.RandomState(seed).randint(0, 256, size[::-1], dtype=np.uint8)).save(path)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Good folders and good tables; each test spoils one thing."""
    for side, first in (("source", 0), ("target", 100)):
        for at in range(8):
            picture(tmp_path / side / ("cat", "dog")[at % 2] / f"{at}.png", first + at)
        draw = np.random.RandomState(first)
        rows = [f"{','.join(f'{v:.4f}' for v in draw.rand(4))},{('cat', 'dog')[at % 2]}" for at in range(8)]
        (tmp_path / f"{side}.csv").write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")
    return tmp_path


def add(line: str, side: str = "source") -> Spoil:
    def spoil(desk: Path) -> None:
        with (desk / f"{side}.csv").open("a") as file:
            file.write(line + "\n")

    return spoil


def put(name: str, content: bytes) -> Spoil:
    def spoil(desk: Path) -> None:
        (desk / name).parent.mkdir(parents=True, exist_ok=True)
        (desk / name).write_bytes(content)

    return spoil


def rows_of_paths(*paths: str) -> Spoil:
    return put("source.csv", "\n".join(["path,label", *(f"{path},cat" for path in paths)]).encode())


def copied(desk: Path) -> None:
    (desk / "source/cat/copy.png").write_bytes((desk / "target/cat/0.png").read_bytes())


def linked_outside(desk: Path) -> None:
    picture(desk.parent / f"{desk.name}-secret.png", 5)
    (desk / "source/cat/link.png").symlink_to(desk.parent / f"{desk.name}-secret.png")


def pickled(desk: Path) -> None:
    np.savez(desk / "pickled.npz", x=np.array([{}, {}], dtype=object), y=np.zeros(2))


# What is spoiled, the source and the target that are given then, and what the sentence says.
BAD: dict[str, tuple[Spoil, str, str, str]] = {
    "unreadable": (put("source/cat/torn.png", b"\x89PNG\r\n\x1a\n"), "source", "target", "torn.png"),
    "duplicate": (copied, "source", "target", "the source has copies of 1 target example"),
    "outside": (linked_outside, "source", "target", "lead outside"),
    "infinite": (add("1,inf,3,4,cat"), "source.csv", "target.csv", "--skip-bad"),
    "stray quote": (add('1,2,3,4,"cat\n1,2,3,5,dog\n1,2,3,6,cat'), "source.csv", "target.csv", "the row in line 10 of"),
    "missing file": (rows_of_paths("gone.png"), "source.csv", "target", "none of the sampled source images can be"),
    "nothing there": (lambda desk: None, "nowhere", "target", "is not there"),
    "no known kind": (put("notes.txt", b"hello"), "notes.txt", "target", "has an unknown ending"),
    "torn npz": (put("torn.npz", b"PK"), "torn.npz", "target", "torn.npz cannot be read"),
    "pickled npz": (pickled, "pickled.npz", "target", "save numbers or fixed-length text by np.savez, not objects"),
}


def refused(desk: Path, source: str, target: str) -> str:
    words = ["fit", "--source", desk / source, "--target", desk / target, "--out", desk / "run", "--epochs", 1]
    code, _, err = typed(*words, "--folds", 0)
    assert code in (1, 2)
    first, *problems = err.splitlines()
    assert first.startswith("soseleto: ")
    assert first.endswith(".")
    assert all(line.startswith("  - ") and line.endswith(".") for line in problems)
    assert not (desk / "run").exists()
    return err


@pytest.mark.parametrize("kind", BAD)
def test_bad_data(kind: str, desk: Path) -> None:
    spoil, source, target, sentence = BAD[kind]
    spoil(desk)
    assert sentence in refused(desk, source, target)


def fit(desk: Path, source: str, target: str, *more: str) -> RunFolder:
    words = ["fit", "--source", desk / source, "--target", desk / target, "--out", desk / "run", *more]
    run(*words, "--epochs", 1, "--folds", 0, "--model", "mlp", "--device", "cpu")
    return RunFolder.open(desk / "run")


def test_bad_examples_are_left_out_when_told(desk: Path) -> None:
    add("1,inf,3,4,cat")(desk)
    trained = fit(desk, "source.csv", "target.csv", "--skip-bad")
    assert len(trained.ranking()["id"]) == 8
    (listed,) = [p for p in json.loads((trained.path / "problems.json").read_text()) if p["left_out"]]
    assert (listed["where"], listed["ids"]) == ("source", ["8"])


def test_a_name_that_is_not_utf8_is_named(desk: Path) -> None:
    folder = os.fsencode(desk / "source/cat")
    try:
        os.rename(os.path.join(folder, b"0.png"), os.path.join(folder, b"\xe9.png"))
    except OSError:
        pytest.skip("the file system has only names of text")
    assert r"'cat/\udce9.png'" in refused(desk, "source", "target")


def test_the_options_that_the_messages_name(desk: Path) -> None:
    text = (desk / "source.csv").read_text()
    (desk / "source.csv").write_bytes(text.replace("cat", "Bébé").encode("latin-1"))
    (desk / "target.csv").write_bytes((desk / "target.csv").read_text().replace("cat", "Bébé").encode("latin-1"))
    assert "encoding = 'cp1252' under [reading]" in refused(desk, "source.csv", "target.csv")
    (desk / "fit.toml").write_text("[reading]\nencoding = 'latin-1'\n")
    trained = fit(desk, "source.csv", "target.csv", "--config", f"{desk}/fit.toml")
    assert trained.config()["classes"] == ["Bébé", "dog"]
