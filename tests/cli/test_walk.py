"""A newcomer's walk on generated images: fit, rank, report, review, export, fit again, predict."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import soseleto
from reviewing import serving
from soseleto.data import Examples
from soseleto.run_folder.folder import RunFolder
from typing_in import run

N_SOURCE, N_TARGET, N_TEST, N_WRONG = 300, 60, 100, 90


@dataclass(frozen=True)
class Walk:
    """A finished ``soseleto fit``."""

    photos: Path  # with the folders scraped, checked and test
    wrong: set[str]  # ids of the source images that are in the wrong folder
    out: Path
    printed: str

    @property
    def run(self) -> RunFolder:
        return RunFolder.open(self.out)

    @property
    def sets(self) -> list[object]:
        return ["--target", self.photos / "checked", "--test", self.photos / "test", "--epochs", 6]

    def suspects(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(run("rank", self.out, "--suspects"))))


def generated(count: int, draw: torch.Generator, classes: int = 4) -> Examples:
    """Noisy copies of one smooth 16 x 16 image per class."""
    coarse = torch.rand(classes, 1, 4, 4, generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, 16, mode="bicubic")
    labels = torch.arange(count) % classes
    images = 200 * smooth[labels] + 60 * torch.randn(count, 1, 16, 16, generator=draw)
    return Examples(images.clamp(0, 255).to(torch.uint8), labels)


def write_images(folder: Path, examples: Examples, labels: Tensor) -> None:
    for label in labels.unique().tolist():
        (folder / str(label)).mkdir(parents=True)
    for at, (image, label) in enumerate(zip(examples.inputs[:, 0].numpy(), labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{at:04d}.png", compress_level=1)


def write_photos(root: Path, draw: torch.Generator) -> set[str]:
    """Fill scraped/, checked/ and test/; the ids of what is in the wrong folder."""
    every = generated(N_SOURCE + N_TARGET + N_TEST, draw)
    places = torch.arange(len(every)).split([N_SOURCE, N_TARGET, N_TEST])
    scraped, checked, test = (every.subset(one) for one in places)
    classes = int(every.labels.max()) + 1
    wrong = torch.randperm(N_SOURCE, generator=draw)[:N_WRONG]
    labels = scraped.labels.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, classes, (N_WRONG,), generator=draw)) % classes
    write_images(root / "scraped", scraped, labels)
    write_images(root / "checked", checked, checked.labels)
    write_images(root / "test", test, test.labels)
    return {f"{labels[at]}/{at:04d}.png" for at in wrong.tolist()}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    root = tmp_path_factory.mktemp("walk")
    wrong = write_photos(root / "photos", torch.Generator().manual_seed(0))
    made = Walk(root / "photos", wrong, root / "run", "")
    printed = run("fit", "--source", root / "photos" / "scraped", *made.sets, "--out", made.out)
    return Walk(made.photos, wrong, made.out, printed)


def test_fit_compares_and_reports(walk: Walk) -> None:
    assert f"{N_SOURCE:,} source and {N_TARGET:,} target examples" in walk.printed
    assert walk.printed.endswith(f"report: {walk.out / 'report.html'}\n")
    assert accuracies(walk)["soseleto"] >= 95


def accuracies(walk: Walk) -> dict[str, float]:
    return {row["method"]: row["accuracy"] for row in (walk.run.comparison() or {})["rows"]}


def test_suspects_are_in_the_wrong_folder(walk: Walk) -> None:
    suspects = walk.suspects()
    found = {row["id"] for row in suspects}
    precision, recall = len(found & walk.wrong) / len(found), len(found & walk.wrong) / len(walk.wrong)
    assert precision >= 0.9, (precision, recall)
    assert recall >= 0.8, (precision, recall)
    estimated = walk.run.suspects() or {}
    assert estimated["precision"]["low"] - 0.02 <= precision
    assert all(row["suggested_label"] != row["label"] for row in suspects)
    assert all(Path(row["path"]).is_file() for row in suspects)


def test_the_clean_list_has_no_suspects(walk: Walk) -> None:
    found = {row["id"] for row in walk.suspects()}
    clean = walk.photos / "clean.csv"
    run("review", walk.out, "--export", clean, "--suspects", "drop")
    kept = set(labels_by_id(clean, walk))
    assert len(kept) == N_SOURCE - len(found)
    assert not found & kept


def test_report_writes_a_page(walk: Walk, tmp_path: Path) -> None:
    run("report", walk.out, "--out", tmp_path / "page.html")
    assert "the first answer" in (tmp_path / "page.html").read_text("utf-8")


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
            server.review.decide({**decision, "label": suggested[server.review.queue.ids[row]]})
    corrected, again = walk.photos / "corrected.csv", tmp_path / "again"
    assert f"{len(suggested)} relabelled" in run("review", reviewed, "--export", corrected)
    labels = labels_by_id(corrected, walk)
    assert len(labels) == N_SOURCE
    assert suggested.items() <= labels.items()
    run("fit", "--source", corrected, *walk.sets, "--no-baselines", "--out", again)
    assert predicted_accuracy(again, walk.photos / "test") >= 95
