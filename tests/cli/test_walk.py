"""A newcomer's walk: fit, rank, report, review, export, fit again, predict.

It is taken on generated images; with SOSELETO_LONG_WALK=1 also on MNIST images (two minutes) and on three times as many
of those with the library's defaults (about ten minutes).
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import soseleto
from browser import Browser, needs_browser
from experiments.data import load
from reviewing import open_review, press, serving
from soseleto.cli.main import main
from soseleto.data import Examples
from soseleto.run_folder.folder import RunFolder


@dataclass(frozen=True)
class Plan:
    """How many images there are, how ``fit`` is called, and what must come of it at least."""

    source: int
    target: int
    test: int
    wrong: int  # source images in the folder of another class
    words: str
    accuracy: float  # percent, of SOSELETO
    precision: float  # of the suspects
    recall: float
    beats: tuple[str, ...] = ()


RIVALS = ("ordinary", "target_only")
PLANS = {
    "generated": Plan(300, 60, 100, 90, "--epochs 6", 95, 0.9, 0.8),
    "mnist": Plan(1000, 100, 500, 450, "--epochs 12 --batch-size 32 --image-size 20", 89, 0.88, 0.85, RIVALS),
    "long": Plan(3000, 100, 1000, 900, "", 94, 0.95, 0.8, RIVALS),  # every choice left to the library
}
TAKEN = list(PLANS) if os.environ.get("SOSELETO_LONG_WALK") == "1" else ["generated"]


@dataclass(frozen=True)
class Walk:
    """A finished ``soseleto fit``."""

    plan: Plan
    photos: Path  # with the folders scraped, checked and test
    wrong: set[str]  # ids of the source images that are in the wrong folder
    out: Path
    printed: str

    @property
    def run(self) -> RunFolder:
        return RunFolder.open(self.out)

    @property
    def sets(self) -> list[object]:
        return ["--target", self.photos / "checked", "--test", self.photos / "test", *self.plan.words.split()]

    def suspects(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(run("rank", self.out, "--suspects"))))


def run(*words: object) -> str:
    """What a command prints; it must succeed."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code == 0, err.getvalue()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode()


def generated(count: int, draw: torch.Generator, classes: int = 4) -> Examples:
    """Noisy copies of one smooth 16 x 16 image per class."""
    coarse = torch.rand(classes, 1, 4, 4, generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, 16, mode="bicubic")
    labels = torch.arange(count) % classes
    images = 200 * smooth[labels] + 60 * torch.randn(count, 1, 16, 16, generator=draw)
    return Examples(images.clamp(0, 255).to(torch.uint8), labels)


def mnist(count: int, draw: torch.Generator, root: Path) -> Examples:
    """Training images: MNIST's own test images helped to choose the defaults."""
    train = load("mnist", "train", root=root)
    return train.subset(torch.randperm(len(train), generator=draw)[:count])


def write_images(folder: Path, examples: Examples, labels: Tensor) -> None:
    for label in labels.unique().tolist():
        (folder / str(label)).mkdir(parents=True)
    for at, (image, label) in enumerate(zip(examples.inputs[:, 0].numpy(), labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{at:04d}.png", compress_level=1)


def write_photos(root: Path, plan: Plan, every: Examples, draw: torch.Generator) -> set[str]:
    """Fill scraped/, checked/ and test/; the ids of what is in the wrong folder."""
    places = torch.arange(len(every)).split([plan.source, plan.target, plan.test])
    scraped, checked, test = (every.subset(one) for one in places)
    classes = int(every.labels.max()) + 1
    wrong = torch.randperm(plan.source, generator=draw)[: plan.wrong]
    labels = scraped.labels.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, classes, (plan.wrong,), generator=draw)) % classes
    write_images(root / "scraped", scraped, labels)
    write_images(root / "checked", checked, checked.labels)
    write_images(root / "test", test, test.labels)
    return {f"{labels[at]}/{at:04d}.png" for at in wrong.tolist()}


@pytest.fixture(scope="module", params=TAKEN)
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    plan = PLANS[request.param]
    root, draw = tmp_path_factory.mktemp(request.param), torch.Generator().manual_seed(0)
    count = plan.source + plan.target + plan.test
    real = request.param != "generated"
    every = mnist(count, draw, request.getfixturevalue("data_root")) if real else generated(count, draw)
    wrong = write_photos(root / "photos", plan, every, draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOSELETO_CACHE", str(root / "cache"))
        made = Walk(plan, root / "photos", wrong, root / "run", "")
        printed = run("fit", "--source", root / "photos" / "scraped", *made.sets, "--out", made.out)
        yield Walk(plan, made.photos, wrong, made.out, printed)


def test_fit_compares_and_reports(walk: Walk) -> None:
    plan = walk.plan
    assert f"{plan.source:,} source and {plan.target:,} target examples" in walk.printed
    assert walk.printed.endswith(f"report: {walk.out / 'report.html'}\n")
    rows = accuracies(walk)
    assert rows["soseleto"] >= plan.accuracy, rows
    for rival in plan.beats:
        assert rows["soseleto"] > rows.get(rival, 0), rows  # one that diverges is left out


def accuracies(walk: Walk) -> dict[str, float]:
    return {row["method"]: row["accuracy"] for row in (walk.run.comparison() or {})["rows"]}


def test_suspects_are_in_the_wrong_folder(walk: Walk) -> None:
    suspects = walk.suspects()
    found = {row["id"] for row in suspects}
    precision, recall = len(found & walk.wrong) / len(found), len(found & walk.wrong) / len(walk.wrong)
    assert precision >= walk.plan.precision, (precision, recall)
    assert recall >= walk.plan.recall, (precision, recall)
    estimated = walk.run.suspects() or {}
    assert estimated["precision"]["low"] - 0.02 <= precision
    assert all(row["suggested_label"] != row["label"] for row in suspects)
    assert all(Path(row["path"]).is_file() for row in suspects)


def test_the_clean_list_has_no_suspects(walk: Walk) -> None:
    found = {row["id"] for row in walk.suspects()}
    clean = walk.photos / "clean.csv"
    run("review", walk.out, "--export", clean, "--suspects", "drop")
    kept = set(labels_by_id(clean, walk))
    assert len(kept) == walk.plan.source - len(found)
    assert not found & kept


def test_report_writes_a_page(walk: Walk, tmp_path: Path) -> None:
    run("report", walk.out, "--out", tmp_path / "page.html")
    assert "ordinary training" in (tmp_path / "page.html").read_text("utf-8")


def test_predict_gives_the_accuracy_of_the_comparison(walk: Walk) -> None:
    assert predicted_accuracy(walk.out, walk.photos / "test") == pytest.approx(accuracies(walk)["soseleto"], abs=0.01)


def predicted_accuracy(out: Path, folder: Path) -> float:
    """In percent, by the folder that each image is in."""
    answers = json.loads(run("predict", out, folder, "--format", "json"))
    return float(100 * np.mean([Path(row["path"]).parent.name == row["label"] for row in answers]))


@pytest.fixture
def reviewed(walk: Walk, tmp_path: Path) -> Path:
    """A copy of the run folder, since decisions are kept in it."""
    return Path(shutil.copytree(walk.out, tmp_path / "run"))


@needs_browser
def test_review_in_the_browser(walk: Walk, reviewed: Path, browser: Browser) -> None:
    with serving(RunFolder.open(reviewed)) as server:  # what `soseleto review RUN` opens
        open_review(browser, server)
        assert browser.text("#which") == f"Suspect 1 of {len(walk.suspects())}"
        first, second = (server.review.queue.ids[row] for row in server.review.queue.rows[:2])
        suggested = browser.text("#suggested")
        press(browser, "s")
        press(browser, "d")
        assert browser.errors() == []
    corrected = walk.photos / "two_decisions.csv"
    assert "1 relabelled" in run("review", reviewed, "--export", corrected)
    labels = labels_by_id(corrected, walk)
    assert len(labels) == walk.plan.source - 1
    assert second not in labels
    assert labels[first] == suggested


def labels_by_id(manifest: Path, walk: Walk) -> dict[str, str]:
    source = soseleto.data.read_pair(manifest, walk.photos / "checked", mode="noisy").source
    names = source.classes or ()
    return {name: names[label] for name, label in zip(source.ids or (), source.labels.tolist(), strict=True)}


@pytest.mark.long
def test_fit_again_on_the_corrected_labels(walk: Walk, reviewed: Path, tmp_path: Path) -> None:
    """Every suggestion accepted, by what the review page sends."""
    suggested = {row["id"]: row["suggested_label"] for row in walk.suspects()}
    with serving(RunFolder.open(reviewed)) as server:
        for row in server.review.queue.rows.tolist():
            decision: dict[str, Any] = {"row": row, "action": "relabel"}
            server.review.decide({**decision, "label": suggested[server.review.queue.id_of(row)]})
    corrected, again = walk.photos / "corrected.csv", tmp_path / "again"
    assert f"{len(suggested)} relabelled" in run("review", reviewed, "--export", corrected)
    labels = labels_by_id(corrected, walk)
    assert len(labels) == walk.plan.source
    assert suggested.items() <= labels.items()
    run("fit", "--source", corrected, *walk.sets, "--no-baselines", "--out", again)
    assert predicted_accuracy(again, walk.photos / "test") >= walk.plan.accuracy
