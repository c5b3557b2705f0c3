"""Ranking, report and review show the values of a table."""

from pathlib import Path

import numpy as np
import pandas as pd

import soseleto
from soseleto.report import write_report
from soseleto.review.queue import Queue
from soseleto.run_folder.folder import RunFolder


def rows(n: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    colour = draw.choice(["red", "blue"], n)
    note = [f"a {c} thing with number {i} came in today" for i, c in enumerate(colour)]
    label = np.where((colour == "red") ^ (draw.random(n) < 0.2), "r", "b")
    return pd.DataFrame({"colour": colour, "size": draw.normal(size=n), "note": note, "label": label})


def test_ranking_report_and_review_show_the_values_of_the_table(tmp_path: Path) -> None:
    source = rows(80, 0)
    source.loc[3, "size"] = None
    source.to_csv(tmp_path / "s.csv", index=False)
    rows(40, 1).to_csv(tmp_path / "t.csv", index=False)
    table = soseleto.data.read_pair(tmp_path / "s.csv", tmp_path / "t.csv", mode="noisy").preparation
    model = soseleto.models.table_network(table.width, 2, width=16)
    soseleto.fit(model, tmp_path / "s.csv", tmp_path / "t.csv", epochs=1, out=tmp_path / "run", device="cpu")
    run = RunFolder(tmp_path / "run")
    ranking = {name: column.copy() for name, column in run.ranking().items()}
    place = {name: row for row, name in enumerate(ranking["id"])}
    for row in range(80):
        shown = [ranking[f"x{k}"][place[str(row)]] for k in (0, 1)]
        assert shown == [source["note"][row], source["colour"][row]]
    assert np.isnan(ranking["x2"][place["3"]])
    assert "thing with number" in write_report(run.path).read_text()
    ranking["weight"][:5] = 0.0
    run.write_ranking(ranking)
    queue = Queue(run).to_json()
    assert queue["features"] == ["note", "colour", "size"]
    assert queue["items"][0]["values"][1] in ("red", "blue")
