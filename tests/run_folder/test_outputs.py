"""Where outputs may be written: not over the source, not into a run, and over other files only with ``force``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabricated import fabricate, fabricate_images
from soseleto.errors import UsageError
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.outputs import require_writable


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = fabricate(tmp_path / "run", n=10, epochs=1)
    (tmp_path / "source.csv").write_text("x,label\n1,a\n")
    made.write_source({"path": str(tmp_path / "source.csv")})
    return made


def refused(run: RunFolder, out: Path, match: str, reads: tuple[Path, ...] = ()) -> None:
    """Also with ``force``."""
    for force in (False, True):
        with pytest.raises(UsageError, match=match):
            require_writable(out, run=run, force=force, reads=reads)


def test_a_new_file_is_accepted_and_an_existing_one_needs_force(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.csv"
    require_writable(out, run=run, force=False)
    (tmp_path / "other.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"other.csv exists already: add --force"):
        require_writable(tmp_path / "other.csv", run=run, force=False)
    require_writable(tmp_path / "other.csv", run=run, force=True)
    refused(run, tmp_path, "is a folder")


def test_the_source_is_never_written_under_any_of_its_names(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, match = tmp_path / "source.csv", "belongs to the source of"
    (tmp_path / "symlink.csv").symlink_to(source)
    os.link(source, tmp_path / "hard_link.csv")
    (tmp_path / "folder").symlink_to(tmp_path)
    for out in (source, tmp_path / "symlink.csv", tmp_path / "hard_link.csv", tmp_path / "folder" / "source.csv"):
        refused(run, out, match)
    monkeypatch.chdir(tmp_path / "run")
    refused(run, Path("../source.csv"), match)


def test_no_file_in_a_run_folder_is_written(run: RunFolder, tmp_path: Path) -> None:
    other = fabricate(tmp_path / "other", n=10, epochs=1)
    inside = "is inside the run folder"
    (tmp_path / "symlink").symlink_to(run.path / "ranking.parquet")
    (tmp_path / "folder").symlink_to(run.path)
    for out in (
        run.path / "model.safetensors",
        run.path / "new" / "file.csv",
        other.path / "config.json",
        tmp_path / "symlink",
        tmp_path / "folder" / "review.jsonl",
    ):
        refused(run, out, inside)
    os.link(run.path / "ranking.parquet", tmp_path / "hard_link.parquet")
    refused(run, tmp_path / "hard_link.parquet", "is a link to")


def test_images_of_the_source_are_never_written(tmp_path: Path) -> None:
    run = fabricate_images(tmp_path / "run", n=10, files=tmp_path / "images")
    image = tmp_path / "images" / str(run.ranking()["id"][0])
    refused(run, image, "belongs to the source of")
    run.write_source({"path": str(tmp_path / "images")})
    unused = image.with_name("unused.png")
    unused.write_text("")
    refused(run, unused, "belongs to the source of")
    (tmp_path / "images" / "clean.csv").write_text("an earlier export")
    require_writable(tmp_path / "images" / "clean.csv", run=run, force=True)


def test_what_the_command_reads_is_never_written(run: RunFolder, tmp_path: Path) -> None:
    table = tmp_path / "inputs.csv"
    table.write_text("x\n1\n")
    refused(run, table, "which this command reads", reads=(table,))
