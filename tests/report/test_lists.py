"""What rank and report show of suspects: basis, audited figures, and transfer mode."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabricated import add_probe_columns, fabricate
from soseleto.report import write_report
from soseleto.report.export import describe_list, export_ranking
from soseleto.report.html import render
from soseleto.run_folder.folder import AUDIT, SUSPECTS, RunFolder
from soseleto.run_folder.ranking import is_suspect, most_suspicious_first, suspect_rows
from typing_in import typed

BASIS = "assumes random mistakes"


def test_text_in_csv_is_no_formula(run: RunFolder) -> None:
    ranking = run.ranking()
    ranking["id"][:4] = ["=1+1", "@who", "-2.5", "plain"]
    run.write_ranking(ranking)
    ids = [row["id"] for row in rows(export_ranking(run.path))]
    assert {"'=1+1", "'@who", "-2.5", "plain"} < set(ids)
    assert "'" not in export_ranking(run.path, format="json").decode()


def figure(value: float | None, low: float, high: float, basis: str = BASIS) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "basis": basis}


def rows(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """100 examples with probabilities in another order than their weights, and estimates."""
    made = add_probe_columns(fabricate(tmp_path / "run", n=100, epochs=2))
    ranking = made.ranking()
    probability = np.random.default_rng(0).permutation(np.linspace(0.0, 0.99, 100)).astype(np.float32)
    made.write_ranking(ranking | {"mislabelled_probability": probability, "is_label_issue": probability > 0.8})
    made.write_json(
        SUSPECTS,
        {
            "basis": BASIS,
            "threshold": 0.8,
            "count": 19,
            "precision": figure(0.95, 0.8, 1.0),
            "recall": figure(None, 0.1, 1.0),
            "wrong_share": figure(0.2, 0.1, 0.3),
        },
    )
    return made


def test_the_worst_have_the_highest_probability(run: RunFolder, tmp_path: Path) -> None:
    found = [float(row["mislabelled_probability"]) for row in rows(export_ranking(run.path, worst=30))]
    highest = np.sort(run.ranking()["mislabelled_probability"])[::-1][:30]
    assert found == pytest.approx(highest.tolist(), rel=0.005)
    plain = fabricate(tmp_path / "plain", n=50, epochs=1)  # without probabilities: by rank
    assert [row["id"] for row in rows(export_ranking(plain.path, worst=7))] == plain.ranking()["id"][::-1][:7].tolist()


def test_without_suspects_none_are_listed(run: RunFolder) -> None:
    run.write_ranking(run.ranking() | {"is_label_issue": np.zeros(100, bool)})
    run.write_json(SUSPECTS, {**(run.suspects() or {}), "count": 0, "precision": figure(None, 0.0, 1.0)})
    assert rows(export_ranking(run.path, suspects=True)) == []
    assert json.loads(export_ranking(run.path, suspects=True, format="json")) == []
    assert describe_list(run.path) == "no suspects: no label is wrong with more than 99 % probability"
    text = text_of(render(run.path))
    assert "There are no suspects." in text
    assert "95 % (0 to 100" not in text


def test_the_report_names_the_basis_and_audited_figures(run: RunFolder) -> None:
    text = text_of(render(run.path))
    assert f"19 suspects: precision 95 % (80 to 100; {BASIS}), recall unknown." in text
    assert f"soseleto audit {run.path} measures on a random sample" in text
    figures = {name: figure(0.7, 0.6, 0.8, "audited") for name in ("precision", "recall")}
    run.write_json(AUDIT, {"figures": figures})
    text = text_of(render(run.path))
    assert f"20 % (10 to 30; {BASIS}) of the 100 labels are wrong." in text
    assert "19 suspects: precision 70 % (60 to 80; audited), recall" in text
    assert f"soseleto audit {run.path}" not in text
    assert describe_list(run.path) == "19 suspects: precision 70 % (60 to 80; audited), recall 70 % (60 to 80; audited)"


def test_transfer_mode_is_about_weights(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=60, truth=False, epochs=2)
    run.write_config({"mode": "transfer", "seed": 0})
    assert is_suspect(run.ranking()).any()
    text = text_of(render(run.path).split("</style>")[1])
    assert "suspect" not in text.lower().replace("suspects.json", "")
    assert "Lowest-ranked examples" in text
    said = typed("rank", run.path, "--suspects")
    assert said.code == 2
    assert "--worst N`" in said.err
    assert "is_label_issue" not in rows(export_ranking(run.path, worst=3))[0]
    assert write_report(run.path).exists()


WITH_PROBES = {
    "label": np.array(["a", "b", "a", "b", "a"]),  # best example first
    "weight": np.array([1.0, 0.9, 0.8, 0.05, 0.0]),
    "mislabelled_probability": np.array([0.1, 0.7, 0.2, 0.9, 0.8]),
    "is_label_issue": np.array([False, False, False, True, True]),
    "suggested_label": np.array(["a", "b", "a", "a", "a"]),
}


def test_the_most_probable_suspects_come_first() -> None:
    assert most_suspicious_first(WITH_PROBES).tolist() == [3, 4, 1, 2, 0]
    assert suspect_rows(WITH_PROBES).tolist() == [3, 4]
    unknown = {**WITH_PROBES, "mislabelled_probability": np.array([0.1, 0.7, 0.2, np.nan, 0.8])}
    assert most_suspicious_first(unknown).tolist() == [4, 3, 1, 2, 0]
