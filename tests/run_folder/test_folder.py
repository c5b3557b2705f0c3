"""The run folder: round trips, atomic writes, and no pickle."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from soseleto.errors import DataError, UsageError
from soseleto.review.decisions import Decision, Decisions
from soseleto.run_folder.files import write_text
from soseleto.run_folder.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs" / "first")
    folder.write_config({"seed": 3})
    return folder


def test_create_makes_the_folder_and_open_finds_it(run: RunFolder) -> None:
    assert RunFolder.open(run.path).config()["seed"] == 3


def test_create_refuses_a_folder_of_other_files_and_leaves_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # too common a name to mark a run
    with pytest.raises(UsageError, match="not a soseleto run: give --out"):
        RunFolder.create(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_create_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunFolder.create(tmp_path / "out")
    with pytest.raises(UsageError, match="out is a file, but a run needs a folder"):
        RunFolder.create(tmp_path / "out" / "run")


def test_create_keeps_an_earlier_run_unless_it_was_cleared(run: RunFolder) -> None:
    run.write_config({"written_by": "soseleto demo"})
    run.log({"event": "start"})
    run.write_ranking({"id": ["a"]})
    with pytest.raises(UsageError, match="holds a run already: give --out another folder"):
        RunFolder.create(run.path)
    assert (run.path / "ranking.parquet").exists()
    RunFolder.clear(run.path, written_by="soseleto demo")
    again = RunFolder.create(run.path)
    assert again.metrics() == []
    assert not (run.path / "ranking.parquet").exists()


def test_clear_deletes_nothing_that_its_command_did_not_write(run: RunFolder) -> None:
    def refused(match: str) -> None:
        before = {path: path.read_bytes() for path in run.path.iterdir()}
        with pytest.raises(UsageError, match=match):
            RunFolder.clear(run.path, written_by="soseleto demo")
        assert {path: path.read_bytes() for path in run.path.iterdir()} == before

    run.write_ranking({"id": ["a"]})
    refused("holds a run that `soseleto demo` did not write: give --out another folder")
    run.write_config({"written_by": "soseleto demo"})
    with run.held():
        refused("another process is training into")
    (run.path / "notes.txt").write_text("mine")
    refused("holds notes.txt beside the run")
    (run.path / "notes.txt").unlink()
    review = Decisions(run)
    refused("is being reviewed")
    review.decide(Decision("a", "drop"))
    review.close()
    refused("holds review decisions")


def test_create_accepts_a_folder_with_only_an_incomplete_write(tmp_path: Path) -> None:
    (tmp_path / ".config.json.17.part").write_text("{")
    RunFolder.create(tmp_path).write_config({})
    assert RunFolder(tmp_path).is_run()


def test_open_suggests_the_closest_name(run: RunFolder) -> None:
    with pytest.raises(UsageError, match=r"there is no run folder .*firts \(did you mean '.*first'\?\)"):
        RunFolder.open(run.path.with_name("firts"))


def test_open_refuses_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a soseleto run"):
        RunFolder.open(tmp_path)


def test_config_holds_versions_device_and_json_values(run: RunFolder) -> None:
    values = {"weights": torch.tensor([1.0, 2.0]), "lr": float("nan"), "path": Path("a/b"), "f": nn.Linear}
    run.write_config({"device": "cpu", "nested": values})
    config = run.config()
    assert config["versions"]["torch"] == torch.__version__
    assert config["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "soseleto" in config["versions"]
    assert "cores" in config["device_name"]
    linear = "torch.nn.modules.linear.Linear"
    assert config["nested"] == {"weights": [1.0, 2.0], "lr": None, "path": "a/b", "f": linear}


def test_metrics_come_back_in_order_and_as_valid_json(run: RunFolder) -> None:
    run.log({"event": "start", "engine": "layerwise"})
    run.log({"event": "epoch", "epoch": 1, "condition": float("inf"), "loss": np.float32(0.5)})
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.metrics()
    assert run.metrics()[1] == {"event": "epoch", "epoch": 1, "condition": None, "loss": 0.5}


def test_an_incomplete_last_line_is_ignored_and_not_joined_to_the_next_record(run: RunFolder) -> None:
    run.log({"epoch": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "source_lo')
    assert run.metrics() == [{"epoch": 1}]
    run.log({"epoch": 3})
    assert run.metrics() == [{"epoch": 1}, {"epoch": 3}]


def test_a_broken_line_in_the_middle_is_named(run: RunFolder) -> None:
    (run.path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo\n{"epoch": 3}\n')
    with pytest.raises(DataError, match="line 2 of"):
        run.metrics()


def test_ranking_round_trip_keeps_order_and_types(run: RunFolder) -> None:
    run.write_ranking(
        {
            "id": ["b", "a"],
            "label": ["cat", "<dog>"],
            "weight": torch.tensor([0.75, 0.25]),
            "visits": np.array([3, 4], dtype=np.int32),
            "wrong": [False, True],
        }
    )
    ranking = run.ranking()
    assert list(ranking["id"]) == ["b", "a"]
    assert list(ranking["label"]) == ["cat", "<dog>"]
    assert ranking["weight"].dtype == np.float32
    assert ranking["weight"].tolist() == [0.75, 0.25]
    assert ranking["visits"].tolist() == [3, 4]
    assert ranking["wrong"].tolist() == [False, True]


def test_columns_of_different_length_are_refused(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="the same length"):
        run.write_ranking({"id": ["a", "b"], "weight": [1.0]})


def test_model_round_trip_keeps_tied_weights_tied(run: RunFolder) -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    run.write_model(model.state_dict(), {"model": "tied"})
    state = run.model_state()
    assert state["head.weight"] is state["embedding.weight"]
    torch.testing.assert_close(state["head.weight"], head.weight.detach())
    assert run.model_metadata() == {"model": "tied"}
    modes = [(run.path / name).stat().st_mode for name in ("config.json", "model.safetensors")]
    assert modes[0] == modes[1]
    assert (run.path / "model.safetensors").stat().st_size < 400  # 15 floats once, not twice


def test_views_of_one_storage_keep_their_own_values(run: RunFolder) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    views = {"row": base[0], "column": base[:, 1], "turned": base.T, "whole": base}
    run.write_model(views)
    state = run.model_state()
    assert state.keys() == views.keys()
    for name, view in views.items():
        torch.testing.assert_close(state[name], view)


def test_a_state_that_is_not_a_tensor_is_named(run: RunFolder) -> None:
    with pytest.raises(DataError, match="'extra' is not a tensor"):
        run.write_model({"extra": "text"})  # type: ignore[dict-item]


@pytest.mark.parametrize("reader", ["ranking", "model_state"])
def test_a_missing_file_is_one_sentence(run: RunFolder, reader: str) -> None:
    with pytest.raises(DataError, match="the run has not finished"):
        getattr(run, reader)()


def test_a_failed_write_leaves_the_previous_file(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:1])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="No space"):
        run.write_config({"seed": 4})
    assert run.config()["seed"] == 3
    assert [entry.name for entry in run.path.iterdir()] == ["config.json"]


def test_write_text_replaces_atomically(tmp_path: Path) -> None:
    old = tmp_path / "page.html"
    old.write_text("old")
    with old.open() as reader:
        write_text(old, "new")
        assert reader.read() == "old"  # a reader that has it open keeps the old content
    assert old.read_text() == "new"


def test_the_module_imports_without_the_file_packages() -> None:
    hidden = ["safetensors", "pyarrow", "matplotlib", "jinja2", "typer", "rich"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "from soseleto.run_folder.folder import RunFolder; from soseleto.errors import DataError; import tempfile\n"
        "run = RunFolder.create(tempfile.mkdtemp()); run.log({'event': 'start'})\n"
        "try: run.write_ranking({'id': ['a']})\n"
        "except DataError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    wanted = "writing a ranking needs pyarrow, which is not installed: type pip install 'soseleto'.\n"
    assert done.stdout == wanted, done.stderr
