"""The run folder: what may be written where, round trips, atomic writes, locks, and no pickle."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fabricated import fabricate
from soseleto.errors import DataError, DiskError, UsageError
from soseleto.run_folder.files import append_line, lines_of
from soseleto.run_folder.folder import SOURCE, RunFolder, require_writable


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs" / "first")
    folder.write_config({"seed": 3})
    return folder


def test_open_names_what_is_wrong(run: RunFolder, tmp_path: Path) -> None:
    assert RunFolder.open(run.path).config()["seed"] == 3
    with pytest.raises(UsageError, match=r"there is no run folder .*firts \(did you mean '.*first'\?\)"):
        RunFolder.open(run.path.with_name("firts"))
    with pytest.raises(UsageError, match="is not a soseleto run"):
        RunFolder.open(tmp_path)
    for read in (run.ranking, run.model_state):
        with pytest.raises(DataError, match="the run has not finished"):
            read()


def test_config_holds_versions_device_and_json_values(run: RunFolder) -> None:
    values = {"weights": torch.tensor([1.0, 2.0]), "lr": float("nan"), "path": Path("a/b"), "f": nn.Linear}
    run.write_config({"device": "cpu", "nested": values})
    config = run.config()
    assert config["versions"]["torch"] == torch.__version__
    assert "cores" in config["device_name"]
    linear = "torch.nn.modules.linear.Linear"
    assert config["nested"] == {"weights": [1.0, 2.0], "lr": None, "path": "a/b", "f": linear}


@pytest.mark.parametrize("durable", [False, True])
def test_lines_cut_at_any_byte_keep_their_complete_records(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "log.jsonl"
    records = [{"id": "a", "value": None}, {"id": "ä"}, {"id": "b"}]
    append_line(path, {"id": "a", "value": float("inf")})
    for record in records[1:]:
        append_line(path, record)
    content = path.read_bytes()
    assert [json.loads(line) for line in content.splitlines()] == records
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        complete = records[: content[:size].count(b"\n")]
        assert lines_of(path, dict, what="a record") == complete
        append_line(path, {"id": "next"}, durable=durable)
        assert lines_of(path, dict, what="a record") == [*complete, {"id": "next"}]


def test_a_failed_append_leaves_the_file_as_it_was(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.log({"event": "start"})
    before = (run.path / "metrics.jsonl").read_bytes()

    def no_space(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DiskError, match=r"cannot be written \(No space left on device\)"):
        run.end({"event": "end"})
    assert (run.path / "metrics.jsonl").read_bytes() == before


def test_ranking_round_trip_keeps_order_and_types(run: RunFolder) -> None:
    columns = {
        "id": ["b", "a", "c"],
        "label": ["cat", "<dog>", None],
        "weight": torch.tensor([0.75, 0.25, 0.0]),
        "visits": np.array([3, 4, 5], dtype=np.int32),
        "wrong": [False, True, True],
    }
    run.write_ranking(columns)
    ranking = run.ranking()
    assert ranking["weight"].dtype == np.float32
    for name, values in columns.items():
        assert ranking[name].tolist() == (values if isinstance(values, list) else values.tolist())


def test_model_round_trip_keeps_tied_weights_tied_and_views_apart(run: RunFolder) -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    run.write_model(nn.ModuleDict({"embedding": embedding, "head": head}).state_dict())
    state = run.model_state()
    assert state["head.weight"] is state["embedding.weight"]
    torch.testing.assert_close(state["head.weight"], head.weight.detach())
    modes = [(run.path / name).stat().st_mode for name in ("config.json", "model.safetensors")]
    assert modes[0] == modes[1]
    assert (run.path / "model.safetensors").stat().st_size < 400  # 15 floats once, not twice
    base = torch.arange(6.0).reshape(2, 3)
    views = {"row": base[0], "column": base[:, 1], "turned": base.T, "whole": base}
    run.write_model(views)
    state = run.model_state()
    for name, view in views.items():
        torch.testing.assert_close(state[name], view)
    with pytest.raises(DataError, match="'extra' is not a tensor"):
        run.write_model({"extra": "text"})  # type: ignore[dict-item]


def test_outputs_never_replace_inputs_or_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, source = fabricate(tmp_path / "run", n=10, epochs=1), tmp_path / "source.csv"
    source.write_text("x,label\n1,a\n")
    (tmp_path / "inputs.csv").write_text("x\n1\n")
    (tmp_path / "mine.csv").write_text("")
    run.write_json(SOURCE, {"path": str(source)})
    require_writable(tmp_path / "new" / "out.csv", run=run, force=False)
    with pytest.raises(UsageError, match=r"mine.csv exists already: add --force"):
        require_writable(tmp_path / "mine.csv", run=run, force=False)
    require_writable(tmp_path / "mine.csv", run=run, force=True)
    (tmp_path / "symlink.csv").symlink_to(source)
    os.link(source, tmp_path / "hard_link.csv")
    (tmp_path / "folder").symlink_to(run.path)
    monkeypatch.chdir(run.path)
    for out, match in {
        source: "is an input of this command",
        tmp_path / "symlink.csv": "is an input of this command",
        tmp_path / "hard_link.csv": "is an input of this command",
        Path("../source.csv"): "is an input of this command",
        tmp_path / "inputs.csv": "is an input of this command",
        tmp_path: "is a folder",
        run.path / "model.safetensors": "is inside the run folder",
        run.path / "new" / "file.csv": "is inside the run folder",
        tmp_path / "folder" / "review.jsonl": "is inside the run folder",
    }.items():
        with pytest.raises(UsageError, match=match):
            require_writable(out, run=run, force=True, reads=(tmp_path / "inputs.csv",))
