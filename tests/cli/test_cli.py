"""The command line: what it prints, what it writes, and that every mistake is one sentence and an exit code."""

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soseleto.cli import demo as synthetic
from soseleto.data import Pair
from soseleto.run_folder.folder import COMPARISON, RunFolder
from soseleto.run_folder.source import digest, remember
from soseleto.training.progress import LiveLine
from typing_in import Said, Type, typed

COMMANDS = ("demo", "fit", "report", "rank", "review", "predict", "export", "check-gradients")


@pytest.fixture
def soseleto() -> Type:
    return typed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "short"
    synthetic.run(out, epochs=2)
    return out


def in_a_shell(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "soseleto", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def one_sentence(said: Said) -> str:
    """The error as it should be: one line, our name before it, no traceback, a full stop."""
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("soseleto: ")
    assert said.err.endswith(".\n")
    return said.err.removeprefix("soseleto: ").strip()


def test_help_is_quick_and_does_without_torch() -> None:
    code = (
        "import sys\nfrom soseleto.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as left: print(left.code, 'torch' in sys.modules)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 False\n")
    assert time.monotonic() - begin < 5  # a tenth of a second on a machine at rest


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)])
def test_help_fits_eighty_columns(soseleto: Type, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = soseleto(*command, "--help")
    assert said.code == 0
    assert max(len(line) for line in said.out.splitlines()) <= 80
    plain = said.out.replace("[ARGS]...", "").replace("{FILES}...", "").replace("=...", "").replace(", ...", "")
    assert "..." not in plain  # nothing cut off


def test_without_words_it_prints_its_help(soseleto: Type) -> None:
    said = soseleto()
    assert said.code == 0
    assert all(f"│ {command} " in said.out for command in COMMANDS)


def test_version(soseleto: Type) -> None:
    said = soseleto("--version")
    assert (said.code, said.out.split()[0]) == (0, "soseleto")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert said.out.split()[1] == project["version"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dmeo"], "did you mean 'demo'"),
        (["rank"], "missing argument 'RUN' (see `soseleto rank --help`)"),
        (["rank", "RUN", "--best", "many"], "invalid value for '--best'"),
        (["rank", "RUN", "--bets", "3"], "--bets"),
        (["rank", "RUN", "--best", "3", "--worst", "3"], "--best and --worst cannot be combined"),
        (["rank", "RUN", "--worst", "0"], "--worst must be at least 1, got 0"),
        (["rank", "RUN", "--format", "cvs"], "unknown format 'cvs' (did you mean 'csv'?)"),
        (["report", "nowhere"], "there is no run folder nowhere"),
        (["report", "."], "is not a soseleto run"),
        (["check-gradients", "--engine", "forwrd"], "did you mean 'forward'"),
        (["check-gradients", "--model", "qick"], "did you mean 'quick'"),
        (["check-gradients", "--model", "gone.py:make"], "there is no file gone.py"),
        (["check-gradients", "--batch", "0"], "invalid value for '--batch'"),
        (["check-gradients", "--shape", "3x32x32"], "invalid value for '--shape'"),
        (["rank", "RUN", "--best", "3", "--suspects"], "--best and --suspects cannot be combined"),
        (["review", "RUN", "--export", "clean.txt", "--suspects", "drop"], "write clean.csv instead"),
        (["predict", "RUN", "x.csv"], "does not record how to build its model"),
        (["predict", "RUN"], "missing argument 'FILES' (see `soseleto predict --help`)"),
        (["predict", "RUN", "x.csv", "--format", "xml"], "unknown format 'xml'"),
        (["export", "RUN", "--onnx", "m.onnx"], "does not record how to build its model"),
        (["export", "RUN", "--pretrained", "gone", "--force"], "--force has no effect on --pretrained, which never"),
        (["fit", "--source", "a.csv"], "missing option '--target'"),
        (["fit", "--source", "a.csv", "--target", "b.csv", "--out", "o", "--mode", "nosy"], "did you mean 'noisy'"),
    ],
)
def test_words_that_are_off_are_one_sentence_and_exit_two(
    soseleto: Type, run: Path, words: list[str], sentence: str
) -> None:
    said = soseleto(*[str(run) if word == "RUN" else word for word in words])
    assert sentence.lower() in one_sentence(said).lower()
    assert said.code == 2


def test_work_that_fails_exits_one(soseleto: Type, run: Path, tmp_path: Path) -> None:
    copy = RunFolder.create(tmp_path / "copy")
    copy.write_config({})
    said = soseleto("rank", copy.path)
    assert "has no ranking.parquet" in one_sentence(said)
    assert said.code == 1


def test_an_error_nobody_foresaw_is_named_and_debug_shows_where(
    soseleto: Type, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, out: Path | None) -> Path:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("soseleto.report.write_report", broken)
    said = soseleto("report", run)
    assert one_sentence(said) == "unexpected ZeroDivisionError: division by zero (add --debug to see where)."
    assert said.code == 1
    loud = soseleto("report", run, "--debug")
    assert "Traceback" in loud.err
    assert "in broken" in loud.err
    assert loud.code == 1


def test_rank_prints_the_whole_ranking_best_first(soseleto: Type, run: Path) -> None:
    said = soseleto("rank", run)
    rows = list(csv.DictReader(io.StringIO(said.out)))
    ranking = RunFolder.open(run).ranking()
    assert [row["id"] for row in rows] == list(ranking["id"])
    assert [float(row["weight"]) for row in rows] == pytest.approx(ranking["weight"].tolist(), abs=5e-4)
    assert rows[0].keys() >= ranking.keys()


def test_demo_writes_a_run_a_report_and_what_it_found(
    soseleto: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "EPOCHS", 1)
    said = soseleto("demo", "--out", tmp_path / "demo", "--seed", 1)
    assert said.code == 0
    assert "test accuracy" in said.out
    assert said.out.endswith(f"report: {tmp_path / 'demo' / 'report.html'}\n")
    assert "engine" in said.err  # the run's message; no progress line, as this is no terminal
    assert RunFolder.open(tmp_path / "demo").config()["seed"] == 1
    assert "mislabelled peak near" in (tmp_path / "demo" / "report.html").read_text("utf-8")


def test_fit_checks_the_run_folder_before_it_reads_anything(soseleto: Type, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")  # too common a name to mark a run
    words = ["fit", "--source", tmp_path / "none.csv", "--target", tmp_path / "none.csv", "--out"]
    for out in (file, file / "run"):
        assert "config.json is a file, but a run needs a folder" in one_sentence(soseleto(*words, out))
    assert "holds files that are not a soseleto run" in one_sentence(soseleto(*words, tmp_path))
    assert file.read_text() == "{}"


@pytest.mark.parametrize("words", [["predict", "RUN", "x.csv"], ["export", "RUN", "--onnx", "m.onnx"]])
def test_answers_of_a_fit_that_has_not_ended_are_called_so(
    soseleto: Type, run: Path, tmp_path: Path, words: list[str]
) -> None:
    unfinished = tmp_path / "run"
    shutil.copytree(run, unfinished)
    words = [str(unfinished) if word == "RUN" else word for word in words]
    note = f"the fit of {unfinished} has not ended, so probabilities are not calibrated"
    assert note not in soseleto(*words).err
    (unfinished / "parts" / "fold-1").mkdir(parents=True)
    assert soseleto(*words).err.count(note) == 1
    RunFolder(unfinished).write_json(COMPARISON, {"rows": []})
    assert note not in soseleto(*words).err


@pytest.mark.skipif(os.name != "posix", reason="signals are a matter of POSIX")
def test_control_c_ends_with_one_sentence_and_keeps_what_was_written(tmp_path: Path) -> None:
    process = in_a_shell("demo", "--out", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and "epoch" in metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("soseleto: stopped")
    assert "Traceback" not in err
    assert out.startswith("alignments of all layers, weight step")  # the settings
    assert RunFolder.open(tmp_path / "run").metrics()[0]["event"] == "start"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_ends_no_training_and_is_one_sentence_elsewhere(
    run: Path, tmp_path: Path
) -> None:
    def ends(*words: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "soseleto", *map(str, words)]
        with FULL.open("w") as full:
            errors: Any = full if words[0] == "scan" else subprocess.PIPE
            done = subprocess.run(command, stdout=full, stderr=errors, text=True)
        return done.returncode, done.stderr

    for name, count in (("source", 40), ("target", 12)):
        rows = (f"{at % 7},{at % 5 - 2},{'ab'[at % 2]}" for at in range(count))
        (tmp_path / f"{name}.csv").write_text("\n".join(["u,v,label", *rows]))
    data = ("--source", tmp_path / "source.csv", "--target", tmp_path / "target.csv")
    assert ends("scan", *data, "--out", tmp_path / "run") == (0, None)
    assert RunFolder.open(tmp_path / "run").has_ended()
    sentence = "soseleto: the output could not be written (no space left on device): add --out FILE on another disk.\n"
    assert ends("rank", run) == (1, sentence)


def test_a_reader_that_leaves_early_is_no_error(run: Path) -> None:
    process = in_a_shell("rank", run)
    assert process.stdout.readline().startswith("id,label")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


def test_check_gradients_prints_every_engine(soseleto: Type) -> None:
    said = soseleto("check-gradients", "--model", "mlp", "--batch", 4)
    assert said.code == 0
    assert all(engine in said.out for engine in ("layerwise", "forward", "double_backward", "loop"))
    assert said.out.endswith("auto takes layerwise.\n")


def test_check_gradients_on_the_users_model(soseleto: Type, tmp_path: Path) -> None:
    """A model as for fit, with a file beside it; its BatchNorm is why layerwise declines, with its name."""
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom beside import WIDTH\n"
        "def make(classes, shape):\n"
        "    return nn.Sequential(nn.Linear(*shape, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, classes))\n"
    )
    words = ["check-gradients", "--shape", 2, "--batch", 8, "--model"]
    said = soseleto(*words, f"{tmp_path}/net.py:make")
    assert said.code == 0
    assert "BatchNorm1d '1'" in " ".join(word for word in said.out.split() if word != "│")
    assert said.out.endswith("auto takes forward.\n")
    some = soseleto(*words, f"{tmp_path}/net.py:make", "--engine", "forward")
    assert "│ forward" in some.out
    assert "│ layerwise" not in some.out
    wrong = soseleto(*words, f"{tmp_path}/net.py:mak")
    assert "has no function 'mak' (did you mean 'make'?)" in one_sentence(wrong)


def test_the_live_line_shows_numbers_and_leaves_nothing_behind() -> None:
    file = io.StringIO()
    file.isatty = lambda: True
    with LiveLine(file) as line:
        line("start", {"epochs": 4, "steps": 40})
        line("message", {"text": "alignments by the [loop] engine"})
        line("epoch", {"epoch": 1, "step": 10, "source_loss": 0.41, "mean_weight": 0.5, "effective_source": 1234.4})
        line("step", {"epoch": 2, "step": 20, "source_loss": 0.25})
        assert line.line() == "epoch 2/4 · source 0.25 · weight 0.50 · effective 1,234"
    text = file.getvalue()
    assert "alignments by the [loop] engine\n" in text
    assert "source 0.41" in text
    assert text.endswith("\r\x1b[2K")


class Clock:
    """``time.monotonic`` that advances only by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds_per_step", "lines"), [(0.01, 0), (6.0, 100), (600.0, 1000)])
def test_without_a_terminal_there_is_a_line_a_minute(
    seconds_per_step: float, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, file = Clock(), io.StringIO()
    monkeypatch.setattr("soseleto.training.progress.time.monotonic", clock)
    with LiveLine(file) as line:
        line.stage("ordinary training, fold 2")
        line("start", {"epochs": 10, "steps": 1000})
        line("message", {"text": "said"})
        for step in range(1, 1001):
            clock.now += seconds_per_step
            line("step", {"epoch": 1 + step // 100, "step": step, "source_loss": 0.41234})
    first, *printed = file.getvalue().splitlines()
    assert first == "said"
    assert abs(len(printed) - lines) <= 1
    expected = r"ordinary training, fold 2 · epoch \d+/10 · source 0.412( · (\d+ days?, )?[\d:]+ left)?"
    assert all(re.fullmatch(expected, one) for one in printed), printed[:2]
    assert "\x1b" not in file.getvalue()


@pytest.fixture
def table_run(tmp_path: Path) -> tuple[Path, Path]:
    """A run and the table that it was trained on, with an id for every row."""
    run, source = RunFolder.create(tmp_path / "run"), tmp_path / "source.csv"
    source.write_text("id,x,label\n" + "".join(f"r{i},{i}.5,{'ab'[i % 2]}\n" for i in range(10)))
    run.write_config({})
    run.write_ranking(
        {"id": [f"r{i}" for i in range(10)], "label": list("ab" * 5), "weight": np.float32([1.0] * 8 + [0.0] * 2)}
    )
    remember(run, source, Pair(None, None, None), digest(source))
    return run.path, source


OUTPUTS = [
    ["rank", "RUN", "--out", "FILE"],
    ["review", "RUN", "--export", "FILE"],
    ["predict", "RUN", "x.csv", "--out", "FILE"],
    ["export", "RUN", "--onnx", "FILE"],
    ["report", "RUN", "--out", "FILE"],
]


@pytest.mark.parametrize("words", OUTPUTS, ids=lambda words: f"{words[0]} {words[-2]}")
def test_no_command_writes_over_the_source_or_a_run_or_without_force_over_any_file(
    soseleto: Type, table_run: tuple[Path, Path], tmp_path: Path, words: list[str]
) -> None:
    run, source = table_run
    (run / "review.jsonl").write_text('{"id": "r1", "action": "drop"}\n')
    (tmp_path / "mine.csv").write_text("precious")
    in_the_run = run / "ranking.csv"
    os.link(run / "ranking.parquet", in_the_run)
    before = {file: file.read_bytes() for file in (source, in_the_run, tmp_path / "mine.csv", *run.iterdir())}

    def with_output(file: Path, *more: str) -> Said:
        return soseleto(*[{"RUN": run, "FILE": file}.get(word, word) for word in words], *more)

    for said, sentence in (
        (with_output(source), "is an input of this command"),
        (with_output(source, "--force"), "is an input of this command"),
        (with_output(in_the_run), "is inside the run folder"),
        (with_output(in_the_run, "--force"), "is inside the run folder"),
        (with_output(tmp_path / "mine.csv"), "exists already: add --force"),
    ):
        assert sentence in one_sentence(said)
        assert said.code == 2
    assert {file: file.read_bytes() for file in before} == before


def test_force_replaces_another_file(soseleto: Type, table_run: tuple[Path, Path], tmp_path: Path) -> None:
    run, out = table_run[0], tmp_path / "out.csv"
    for words in (["rank", run, "--out", out], ["review", run, "--export", out, "--suspects", "drop"]):
        out.write_text("old")
        assert soseleto(*words, "--force").code == 0
        assert "label" in out.read_text()
    assert "--force has no effect without an output file" in one_sentence(soseleto("rank", run, "--force"))
