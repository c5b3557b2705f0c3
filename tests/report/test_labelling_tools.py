"""Tasks for Label Studio, of runs on images."""

import json
from pathlib import Path

import numpy as np
import pytest

from soseleto.errors import UsageError
from soseleto.report.export import export_ranking
from soseleto.run_folder.folder import SOURCE, RunFolder


def make_run(folder: Path, **columns: list[str]) -> RunFolder:
    run = RunFolder.create(folder)
    run.write_config({"mode": "noisy", "n_source": 3, "classes": ["cat", "dog"]})
    weights = np.array([1.0, 0.5, 0.0], dtype=np.float32)
    run.write_ranking(
        {
            "id": np.array(["a", "b", "c"], dtype=object),
            "label": np.array(["cat", "dog", "cat"], dtype=object),
            "weight": weights,
            "score": weights,
            "visits": np.array([1, 1, 1]),
            "predicted_label": np.array(["cat", "dog", "dog"], dtype=object),
            **{name: np.array(values, dtype=object) for name, values in columns.items()},
        }
    )
    return run


def touched(*files: str) -> list[str]:
    for file in map(Path, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return list(files)


def test_label_studio_gets_images_below_its_document_root(tmp_path: Path) -> None:
    paths = touched(*(f"{tmp_path}/my images/{name}.png" for name in ("cat/a", "dog/b", "cat/c")))
    found = json.loads(export_ranking(make_run(tmp_path / "run", path=paths).path, format="label-studio"))
    assert [task["data"]["image"] for task in found] == [
        f"/data/local-files/?d=my%20images/{name}.png" for name in ("cat/a", "dog/b", "cat/c")
    ]
    (prediction,) = found[2]["predictions"]
    assert prediction["result"][0]["to_name"] == "image"
    assert "score" not in prediction  # nothing is known of its probability


def test_image_paths_are_absolute_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in a ranking are relative to the folder in which ``fit`` ran."""
    files = touched(*(f"{tmp_path}/images/cat/{name}.png" for name in "abc"))
    run = make_run(tmp_path / "run", path=[f"images/cat/{name}.png" for name in "abc"])
    run.write_json(SOURCE, {"path": str(tmp_path / "images"), "folder": str(tmp_path)})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = json.loads(export_ranking(run.path, format="label-studio"))
    assert [task["data"]["image"] for task in found] == [f"/data/local-files/?d=cat/{name}.png" for name in "abc"]
    Path(files[1]).unlink()
    with pytest.raises(UsageError, match=rf"^the image {files[1]} no longer exists: restore"):
        export_ranking(run.path, format="label-studio")
