"""A newcomer's walk on real files: 3,000 MNIST images of which 30 % lie in the wrong folder, and 100 checked ones."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import soseleto
from browser import Browser, needs_browser
from reviewing import open_review, press, serving
from soseleto.cli.main import main
from soseleto.data import Examples, load
from soseleto.run_folder.folder import RunFolder

SOURCE, TARGET, TEST, WRONG = 3000, 100, 1000, 900


def write_images(folder: Path, examples: Examples, labels: torch.Tensor) -> None:
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    for at, (image, label) in enumerate(zip(examples.inputs[:, 0].numpy(), labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{at:04d}.png", compress_level=1)


@pytest.fixture(scope="module")
def photos(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The folders scraped/, checked/ and test/, and the ids of what is in the wrong folder."""
    root = tmp_path_factory.mktemp("photos")
    train = load("mnist", "train", root=data_root)  # MNIST's own test images helped to choose the defaults
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(train), generator=draw)
    scraped, checked = train.subset(order[:SOURCE]), train.subset(order[SOURCE : SOURCE + TARGET])
    wrong = torch.randperm(SOURCE, generator=draw)[:WRONG]
    labels = scraped.labels.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (WRONG,), generator=draw)) % 10
    write_images(root / "scraped", scraped, labels)
    write_images(root / "checked", checked, checked.labels)
    judged = train.subset(order[SOURCE + TARGET :][:TEST])
    write_images(root / "test", judged, judged.labels)
    return root, {f"{labels[at]}/{at:04d}.png" for at in wrong.tolist()}


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    return out


@needs_browser
def test_the_walk(
    photos: tuple[Path, set[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    browser: Browser,
) -> None:
    root, wrong = photos
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "run"
    sets = ["--source", root / "scraped", "--target", root / "checked", "--test", root / "test"]
    said = run(capsys, "fit", *sets, "--out", out)  # every choice left to the library
    assert "3,000 source and 100 target examples" in said
    assert said.endswith(f"report: {out / 'report.html'}\n")

    rows = {row["method"]: row["accuracy"] for row in (RunFolder.open(out).comparison() or {})["rows"]}
    assert rows["soseleto"] > rows["ordinary"], rows
    assert rows["soseleto"] > rows.get("target_only", 0), rows  # which may diverge, and is then left out
    assert rows["soseleto"] > 94

    suspects = list(csv.DictReader(io.StringIO(run(capsys, "rank", out, "--suspects"))))
    found = {row["id"] for row in suspects}
    precision, recall = len(found & wrong) / len(found), len(found & wrong) / len(wrong)
    assert precision >= 0.95, (precision, recall)
    assert recall >= 0.8, (precision, recall)
    estimated = RunFolder.open(out).suspects() or {}
    assert estimated["precision"]["low"] - 0.02 <= precision  # what it promised was not too much
    assert all(row["suggested_label"] != row["given_label"] == row["label"] for row in suspects)
    assert all(Path(row["filepath"]).is_file() for row in suspects)

    clean = root / "clean.csv"
    run(capsys, "rank", out, "--export-clean", clean)
    pair = soseleto.data.read_pair(clean, root / "checked", mode="noisy")
    assert len(pair.source) == SOURCE - len(found)
    assert not found & set(pair.source.ids or ())

    page = tmp_path / "page.html"
    run(capsys, "report", out, "--out", page)
    assert "ordinary training" in page.read_text("utf-8")

    answers = json.loads(run(capsys, "predict", out, root / "test", "--format", "json"))
    right = np.mean([Path(row["path"]).parent.name == row["label"] for row in answers])
    assert 100 * right == pytest.approx(rows["soseleto"], abs=0.01)

    with serving(RunFolder.open(out)) as server:  # what `soseleto review RUN` opens
        open_review(browser, server)
        assert browser.text("#which") == f"Suspect 1 of {len(found)}"
        first, second = (server.review.queue.id_of(row) for row in server.review.queue.rows[:2])
        suggested = browser.text("#suggested")
        press(browser, "s")
        press(browser, "d")
        assert browser.errors() == []
    corrected = root / "corrected.csv"
    assert "1 relabelled" in run(capsys, "review", out, "--export", corrected)
    again = soseleto.data.read_pair(corrected, root / "checked", mode="noisy").source
    labels = dict(zip(again.ids or (), again.labels.tolist(), strict=True))
    assert len(labels) == SOURCE - 1
    assert second not in labels
    assert (again.classes or ())[labels[first]] == suggested
