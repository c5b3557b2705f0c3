"""Run folders made to harm: every command answers with one sentence, in bounded memory and time.

All cases are run in one process whose memory is limited; this file is its program.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

MEMORY = 1 << 30  # bytes beyond what the imports need
SECONDS = 20.0  # for the commands of one case, on a busy machine
DEPTH = 10**6
DEEP = "[" * DEPTH + "]" * DEPTH


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content.encode() if isinstance(content, str) else content) and None


def sparse(name: str) -> Callable[[Path], None]:
    def grow(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.truncate(1 << 40)

    return grow


def link(name: str, to: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).unlink()
        (run / name).symlink_to(to)

    return make


def pipe(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return make


def folder(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return make


def tensors(header: object, size: int | None = None) -> Callable[[Path], None]:
    content = json.dumps(header).encode()
    return write("model.safetensors", struct.pack("<Q", len(content) if size is None else size) + content)


def columns(**found: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        table = pyarrow.table(found)
        pyarrow.parquet.write_table(table, run / "ranking.parquet", compression="zstd")

    return change


def long_texts(run: Path) -> None:
    """One text of 8 MB that stands for 100,000 rows: 800 GB."""
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int32()), ["x" * (1 << 23)])
    columns(id=text, label=text, weight=[0.5] * 100_000)(run)


FLOATS = {"dtype": "F32", "data_offsets": [0, 1 << 60]}
CASES: dict[str, Callable[[Path], None]] = {
    "deep config": write("config.json", '{"format": "soseleto run 1", "x": ' + DEEP + "}"),
    "deep metrics": write("metrics.jsonl", DEEP + "\n"),
    "deep suspects": write("suspects.json", DEEP),
    "deep checksums": write("SHA256SUMS", DEEP),
    "checksum of another file": write("SHA256SUMS", "0" * 64 + "  config.json\n"),
    "huge n_classes": edit(n_classes=10**15, classes=None),
    "large n_classes": edit(n_classes=10**7, classes=None),
    "negative n_classes": edit(n_classes=-1, classes=None),
    "n_classes of another type": edit(n_classes={"a": 1}, classes=None),
    "huge shape": edit(input_shape=[10**6, 10**6, 10**6]),
    "large shape": edit(input_shape=[1 << 28]),
    "shape of another type": edit(input_shape="large"),
    "model of another type": edit(model=[1]),
    "prepare of another type": edit(prepare={"dtype": [1]}),
    "huge mlp by a name": edit(model="resnet18", input_shape=[3, 9000, 9000], classes=None),
    "endless config": sparse("config.json"),
    "endless metrics": sparse("metrics.jsonl"),
    "endless ranking": sparse("ranking.parquet"),
    "endless model": sparse("model.safetensors"),
    "ranking links to itself": link("ranking.parquet", "ranking.parquet"),
    "model links to itself": link("model.safetensors", "model.safetensors"),
    "config links to itself": link("config.json", "config.json"),
    "model links out": link("model.safetensors", "/etc/passwd"),
    "ranking links to a device": link("ranking.parquet", "/dev/zero"),
    "metrics is a pipe": pipe("metrics.jsonl"),
    "config is a pipe": pipe("config.json"),
    "model is a folder": folder("model.safetensors"),
    "tensors of 2**60 bytes": tensors({"0.weight": {**FLOATS, "shape": [1 << 58]}}),
    "a header of 2**63 bytes": tensors({}, size=1 << 63),
    "a shape that overflows": tensors({"0.weight": {**FLOATS, "shape": [1 << 40, 1 << 40]}}),
    "deep header": write("model.safetensors", struct.pack("<Q", 2 * DEPTH) + DEEP.encode()),
    "a pickle": write("model.safetensors", pickle.dumps({"0.weight": [1.0]})),
    "no tensors": tensors({"__metadata__": {"a": "b"}}),
    "tied to nothing": tensors({"__metadata__": {"soseleto": '{"soseleto.tied": {"a": "b"}}'}}),
    "deeply tied": tensors({"__metadata__": {"soseleto": DEEP}}),
    "20 million rows in a small file": columns(id=pyarrow.nulls(20_000_000), weight=pyarrow.nulls(20_000_000)),
    "long texts": long_texts,
    "no weights": columns(id=["a"] * 24),
    "weights of another type": columns(id=["a"] * 24, label=["b"] * 24, weight=["c"] * 24),
    "nested weights": columns(id=["a"] * 24, label=["b"] * 24, weight=[[0.5]] * 24),
    "not a table": write("ranking.parquet", b"PAR1" + bytes(100) + b"PAR1"),
    "a huge footer": write("ranking.parquet", b"PAR1" + bytes(100) + struct.pack("<I", 1 << 31) + b"PAR1"),
    "an infinite temperature": write("calibration.json", '{"temperature": 1e999}'),
    "a temperature of another type": write("calibration.json", "[1]"),
    "a file that exits": write("own.py", "raise SystemExit(0)"),
    "a function that exits": write("own.py", "import sys\ndef make(classes, shape):\n    sys.exit('gone')\n"),
    "a file with an error": write("own.py", "1 / 0"),
}


def trained(out: Path) -> None:
    import torch

    import soseleto
    from soseleto.models.by_name import by_name

    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    source = soseleto.Examples(x, x[:, :3].argmax(1), classes=("a", "b", "c"))
    checkpoints = soseleto.Checkpoints(notes={"model": "mlp", "n_classes": 3, "columns": ["f0", "f1", "f2", "f3"]})
    model = by_name("mlp", classes=3, shape=(4,))
    soseleto.fit(model, source, source, epochs=1, out=out, device="cpu", checkpoints=checkpoints)
    (out / "SHA256SUMS").unlink()  # so that nothing is refused for its checksum alone


def answers(run: Path, new: Path) -> dict[str, tuple[int, str, float]]:
    from data_safety.example import command

    (new / "inputs.csv").write_text("f0,f1,f2,f3\n1,2,3,4\n")
    own = ("--model", f"{run / 'own.py'}:make") if (run / "own.py").exists() else ()
    found = {}
    for words in (("rank", run), ("report", run, "--out", new / "page.html", "--force"), ("predict", run, *own)):
        more = (new / "inputs.csv",) if words[0] == "predict" else ()
        (new / "page.html").write_text("")
        begin = time.monotonic()
        said = command(*words, *more)
        found[str(words[0])] = said.code, said.err, time.monotonic() - begin
    return found


def work(place: Path) -> None:
    """Every case, with limited memory; the answers go to standard output."""
    import resource
    import shutil

    trained(place / "whole")
    normal = answers(place / "whole", place)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    found = {"normal": normal}
    for name, make in CASES.items():
        run = place / "run"
        shutil.copytree(place / "whole", run)
        make(run)
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))
        found[name] = answers(run, place)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        shutil.rmtree(run)
    print(json.dumps(found))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as on Linux")
def test_hostile_folders_are_one_sentence_in_bounded_memory_and_time(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {code for code, _, _ in found.pop("normal").values()} == {0}
    assert found.keys() == CASES.keys()
    for name, said in found.items():
        assert any(code for code, _, _ in said.values()), name
        for command, (code, err, seconds) in said.items():
            where = f"{name}, {command}: {err[-500:]}"
            assert seconds < SECONDS, where
            if code:
                assert re.fullmatch(r"soseleto: [^\n]+\.\n", err), where
                assert "unexpected" not in err, where
                assert len(err) < 1200, where


def test_checkpoints_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    from soseleto.errors import DataError
    from soseleto.run_folder import checkpoint

    photos = tmp_path / "photos"
    for year in ("2019", "2020", "2021"):
        (photos / year).mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(photos)
    for act in (
        lambda: checkpoint.load_last(tmp_path / "run", print),
        lambda: checkpoint.save(tmp_path / "run", 1, {}),
    ):
        with pytest.raises(DataError, match="is a link, but must be a folder"):
            act()
    assert len(list(photos.iterdir())) == 3


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    work(Path(sys.argv[1]))
