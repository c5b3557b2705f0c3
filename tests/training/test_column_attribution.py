"""The columns of a table that speak most against a label."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import nn

import soseleto
from soseleto.data import TablePreparation
from soseleto.report import write_report
from soseleto.review.queue import Queue
from soseleto.run_folder.folder import RunFolder
from soseleto.training.result import columns_against_label, contributions


def test_contributions_of_a_linear_model_are_those_by_hand():
    draw = np.random.default_rng(0)
    values = {"size": draw.normal(size=200), "town": draw.choice(["Ulm", "Aix"], 200), "noise": draw.normal(size=200)}
    table = TablePreparation.fit(pa.table(values))
    inputs, labels = table.read(pa.table(values)), torch.from_numpy(draw.integers(0, 2, 200))
    torch.manual_seed(0)
    model = nn.Linear(table.width, 2).double()
    weight = model.weight.detach()
    weight[:, [at for at, column in enumerate(table.origins()) if column == 2]] = 0

    def prepare(rows: torch.Tensor) -> torch.Tensor:
        return table(rows).double()

    found = contributions(model, prepare, table, inputs, labels, torch.arange(200))
    x = prepare(inputs)
    for row in (0, 5, 131):
        label = int(labels[row])
        mean = x[labels == label].mean(0)
        each = (x[row] - mean) * (weight[label] - weight[1 - label])
        by_hand = [float(each[[at for at, c in enumerate(table.origins()) if c == k]].sum()) for k in range(3)]
        assert np.allclose(found[row], by_hand, atol=1e-5)
    names = columns_against_label(found, table)
    assert not any("noise" in one for one in names)
    for one, row in zip(names, found.tolist(), strict=True):
        strongest = table.used[int(np.argmin(row))] if min(row) < 0 else ""
        assert one.split(", ")[0] == strongest
    assert {one.split(", ")[0] for one in names} == {"size", "town", ""}


def test_ranking_report_and_review_show_the_values_of_the_table(tmp_path: Path):
    draw = np.random.default_rng(0)

    def rows(n: int, seed: int) -> pd.DataFrame:
        colour = np.random.default_rng(seed).choice(["red", "blue"], n)
        text = [f"a {c} thing with number {i} came in today" for i, c in enumerate(colour)]
        size = np.random.default_rng(seed).normal(size=n)
        return pd.DataFrame(
            {"colour": colour, "size": size, "note": text, "label": np.where(colour == "red", "r", "b")}
        )

    source = rows(80, 0)
    source.loc[3, "size"] = None
    flipped = draw.random(80) < 0.2
    source["label"] = np.where(flipped, np.where(source["label"] == "r", "b", "r"), source["label"])
    source.to_csv(tmp_path / "s.csv", index=False)
    rows(40, 1).to_csv(tmp_path / "t.csv", index=False)
    table = soseleto.data.read_pair(tmp_path / "s.csv", tmp_path / "t.csv", mode="noisy").preparation
    model = soseleto.models.table_network(table.width, 2, width=16)
    soseleto.fit(model, tmp_path / "s.csv", tmp_path / "t.csv", epochs=6, lr=0.1, out=tmp_path / "run", device="cpu")
    run = RunFolder(tmp_path / "run")
    ranking = {name: column.copy() for name, column in run.ranking().items()}
    place = {name: row for row, name in enumerate(ranking["id"])}
    for row in range(80):
        shown = [ranking[f"x{k}"][place[str(row)]] for k in (0, 2)]
        assert shown == [source["colour"][row], source["note"][row]]
    assert np.isnan(ranking["x1"][place["3"]])
    wrong = [place[str(row)] for row in np.flatnonzero(flipped)]
    assert sum("colour" in ranking["column_attribution"][row] for row in wrong) > len(wrong) / 2
    page = write_report(run.path).read_text()
    assert "Columns against the label" in page
    assert "thing with number" in page
    ranking["weight"][wrong] = 0.0
    run.write_ranking(ranking)
    queue = Queue(run).to_json()
    assert queue["features"] == ["colour", "size", "note"]
    assert queue["items"][0]["values"][0] in ("red", "blue")
    assert any(item["attribution"] for item in queue["items"])
