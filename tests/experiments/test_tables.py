"""Every table: its cells, its data, a short run of its lines, and the results files that it wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments import (
    cifar10_deep,
    digits,
    efficientnet,
    language_pools,
    news,
    noisy_text,
    pretrained_images,
    table1,
    table2,
)
from experiments.__main__ import TABLES, main, table
from experiments.experiment import Sides
from experiments.language_training import bm25
from experiments.results import Row, key, load, put_between, save, started
from experiments.results import table as markdown
from experiments.runner import configurations, run_all, run_one
from experiments.settings import make_method
from experiments.training import ByEpoch
from soseleto.cli import demo
from soseleto.data import Examples
from soseleto.defaults import resolve
from soseleto.errors import DataError, TrainingError, UsageError
from soseleto.models.architectures import by_name
from soseleto.pieces import chain
from tiny_text_model import BAD, GOOD, make_folder

ROOT = Path(__file__).parents[2]


def images(n: int, channels: int = 3, side: int = 32) -> Examples:
    """Ten brightnesses, with a little noise."""
    labels = torch.arange(n) % 10
    pixels = (labels * 25)[:, None, None, None].expand(n, channels, side, side).to(torch.uint8).clone()
    pixels += torch.randint(0, 5, pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Examples(pixels, labels, classes=tuple(map(str, range(10))))


def cifar(part: str, root: Any = None, human: str | None = None) -> Examples:
    """Every seventh human label is wrong."""
    examples = images(600 if part == "train" else 100)
    wrong = torch.arange(len(examples)) % 7 == 0
    labels = torch.where(wrong, (examples.labels + 1) % 10, examples.labels)
    return examples if human is None else replace(examples, labels=labels, truth=examples.labels)


def public(name: str, part: str, root: Any = None) -> Examples:
    return images(400, 1, 28) if name == "mnist" else images(800)


def reviews(noise: str, root: Any = None) -> news.News:
    """Reviews of two classes, a fifth labelled wrongly; of "hausa" the last 40 were never checked."""
    truth = torch.arange(200) % 2
    words = tuple(f"the {(BAD, GOOD)[truth[i]][i % 4]} film was very {' '.join(str(i))}" for i in range(200))
    labels = torch.where(torch.arange(160) % 10 < 2, 1 - truth[:160], truth[:160])
    known = truth[:160].clone()
    if noise == "hausa":
        known[-40:] = news.UNKNOWN
    return news.News(words[:160], labels, known, words[160:], truth[160:], ("bad", "good"))


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Small data in place of the public sets, and small networks in place of the pretrained ones."""
    monkeypatch.setattr(table1, "split", cifar)
    monkeypatch.setattr(digits, "load", public)
    monkeypatch.setattr(news, "read", reviews)
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path_factory.getbasetemp() / "texts"))
    cached = (digits.mnist, digits.svhn, digits.grey_cifar, digits._low)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def efficient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    small = {"STAGES": ((1, 3, 1, 4, 1), (2, 3, 2, 8, 2)), "STEM": 4, "FEATURES": 12, "IMAGENET": 7}
    for name, value in small.items():
        monkeypatch.setattr(efficientnet, name, value)
    (tmp_path / "small-net").mkdir()
    torch.manual_seed(0)
    state = efficientnet.EfficientNetLite0().state_dict()
    pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "small-net" / "model.safetensors")
    return str(tmp_path / "small-net")


TINY: dict[str, dict[str, Any]] = {
    "table1": {"n_clean": 100, "n_test": 50, "batch_size": 64, "epochs": 2, "model": "mlp"},
    "table2": {"n_source": 200, "n_test": 100, "epochs": 1},
    "cifar10_deep": {
        "n_trusted": 40, "model": "mlp", "epochs": 1, "batch_size": 64, "target_batch_size": 16, "precision": None,
    },
    "noisy_text": {"n_trusted": 40, "epochs": 1, "batch_size": 32, "target_batch_size": 8, "noise": "hausa"},
    "pretrained_images": {
        "n_source": 50, "n_trusted": 40, "size": 32, "crop": 2, "epochs": 1, "batch_size": 25, "target_batch_size": 10,
    },
}  # fmt: skip


def short(name: str, line: str, **changes: Any) -> Row:
    """A run of a line that takes a second, as a results file would keep it."""
    experiment = table(name)
    run = experiment.configuration(line, **{**TINY[name], **changes})
    row = run_one(experiment.data, experiment.measure, run, device="cpu")
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["method"], row["seconds"] > 0) == (run.method, True)
    assert 0 <= row.get("accuracy", 0) <= 100
    return row


@pytest.mark.parametrize("name", TABLES)
def test_every_row_in_results_is_a_cell_of_its_table(name: str) -> None:
    """So that a results file can be continued, and its rows run again with the same settings."""
    experiment = table(name)
    cells = {key(run.heading()) for run in configurations(experiment)}
    rows = load(ROOT / "results" / f"{experiment.name}.json").rows
    others = [row for row in rows if key(row) not in cells]
    assert len(others) == (4 if name == "cifar10_deep" else 0)  # four with more seeds than a table has
    for row in others:
        changes = {k: row["config"][k] for k in ("noise", "n_trusted")}
        assert key(experiment.configuration(row["method"], seed=row["seed"], **changes).heading()) == key(row)


ONE_EACH = {
    "table1": ("ordinary_stopped", "xiao", "soseleto", "soseleto_probes", "cleanlab", "oracle"),
    "table2": ("matching_fine_tuned", "soseleto_shuffled", "luo", "soseleto_printed_first"),
    "cifar10_deep": ("strong", "strong_shuffled_others", "promix", "mixed"),
    "noisy_text": (),
    "language": (),
    "pretrained_images": (),
}
SHORT = [(name, line) for name, lines in ONE_EACH.items() for line in lines]
LONG = [
    (name, line)
    for name in ("table1", "table2", "cifar10_deep")
    for line in table(name).lines
    if line not in ONE_EACH[name] and "unlabelled" not in line
]


@pytest.mark.parametrize(("name", "line"), [*SHORT, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG)])
def test_lines_run(name: str, line: str) -> None:
    stopped = name == "table1" and table(name).lines[line][1].get("early_stopping")
    row = short(name, line, **({"n_heldout": 20} if stopped else {}))
    if line == "soseleto_probes":
        assert {"weight", "score", "probability"} == set(row["detection"])
        assert row["suspects"][0]["wrong_share"]["truth"] == 40.0
    if (name, line) == ("table1", "soseleto"):
        assert set(row["detection"]) == {"weight", "score", "loss", "margin"}
        assert row["kept"]["score"][-1] == 40.0


@pytest.mark.parametrize(
    "line",
    [
        "soseleto_usual_probes", "cleanlab", "strong",
        *(pytest.param(line, marks=pytest.mark.long) for line in ("logistic_right", "strong_frozen")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoder", ["trained", "frozen"])
def test_lines_of_texts_run(minilm: str, line: str, encoder: str) -> None:
    if line == "logistic_right" and encoder == "trained":
        pytest.skip("logistic regression is on frozen embeddings")
    row = short("noisy_text", line, model=minilm, encoder=encoder, **({"folds": 2} if line == "cleanlab" else {}))
    assert row["config"]["model"] == "tiny"  # no folder of this machine
    if line == "cleanlab":
        assert set(row["issues"]) == {"count", "precision", "recall"}
    if line == "soseleto_usual_probes":
        assert (row["suspects"][0]["asked"], row["suspects"][0]["basis"]) == (90, "from earlier labels")


def instructions(folder: Path) -> Path:
    """Files of sums and of other tasks, as those of ``language_pools``."""
    (folder / "text").mkdir()
    sums = [json.dumps({"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."}) for i in range(40)]
    for name in ("gsm8k_train", "gsm8k_test"):
        (folder / "text" / f"{name}.jsonl").write_text("\n".join(sums[:: 1 if "train" in name else 8]))
    for name in language_pools.FILES:
        others = [{"instruction": f"Call tool {i}.", "input": "", "output": "tool" * (i % 5)} for i in range(100)]
        (folder / "text" / f"{name}.json").write_text(json.dumps(others))
    return folder


OF_LANGUAGE = ("right", "soseleto", "greats", "less", "embeddings", "bm25")


@pytest.mark.parametrize(
    "line", [pytest.param(x, marks=() if x in OF_LANGUAGE else pytest.mark.long) for x in table("language").lines]
)
@pytest.mark.parametrize("adapter", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_lines_of_language_models_run(tmp_path: Path, line: str, adapter: str) -> None:
    if adapter == "lora":
        pytest.importorskip("peft")
    experiment = table("language")
    run = experiment.configuration(line, small=True, pool="exchanged", adapter=adapter)
    row = run_one(experiment.data, experiment.measure, run, root=instructions(tmp_path), device="cpu")
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert 0 < row["nll"] < 10
    assert row["steps"] == 9 or line in ("right", "topic")  # without batches of weight 0
    right, exchanged, foreign = (row["weights"][kind] for kind in language_pools.KINDS)
    if line == "right":
        assert (right, exchanged, foreign) == (1.0, 0.0, 0.0)
    elif run.base == "chosen":
        assert 14 * right + 14 * exchanged + 120 * foreign == pytest.approx(15, abs=0.01)
    elif line == "greats":  # half of nine batches, and four that are in none
        assert 14 * right + 14 * exchanged + 120 * foreign == pytest.approx(9 * 8 + 4, abs=0.01)
    assert line != "bm25" or (row["auroc_foreign"], foreign) == (1.0, 0.0)


def test_bm25_of_two_texts() -> None:
    texts = [language_pools.Text("one two", "two"), language_pools.Text("three", "")]
    scores = bm25([language_pools.Text("two two", "three"), language_pools.Text("four", "")], texts)
    first = 2 * math.log(2) * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 3 / 2))
    assert scores.tolist() == pytest.approx([first / 2, math.log(2) * 2.5 / (1 + 1.5 * (0.25 + 0.75 / 2)) / 2])


def test_a_pool_of_instructions(tmp_path: Path) -> None:
    pool = language_pools.draw("exchanged", 0, instructions(tmp_path), part=0.02)
    assert pool.kinds.bincount().tolist() == [14, 14, 120]
    source = pool.source.texts
    right = {t.question: t.answer for t in [*source[:14], *pool.target.texts, *pool.heldout.texts]}
    assert len(right) == 14 + 4 + 6
    assert all(answer == f"It is {2 * int(question.split()[2])}." for question, answer in right.items())
    exchanged = source[14:28]
    assert not right.keys() & {t.question for t in exchanged}
    assert all(t.answer != f"It is {2 * int(t.question.split()[2])}." for t in exchanged)
    assert ({t.file for t in source[:28]}, {t.file for t in source[28:]}) == ({"gsm8k"}, set(language_pools.FILES))


@pytest.mark.parametrize("line", ["soseleto_usual_probes", "logistic_mixed", "cleanlab"])
def test_lines_of_pretrained_images_run(efficient: str, line: str) -> None:
    changes = {"folds": 2} if line == "cleanlab" else {}
    row = short("pretrained_images", line, model=efficient, **changes)
    assert row["config"]["model"] == "small-net"


def test_rounds_on_unlabelled_digits_run() -> None:
    row = short("table2", "soseleto_unlabelled_frozen", rounds={"rounds": 1, "epochs": 1})
    assert 0 <= row["guessed_right"] <= 100
    rounds = table2.rounds_of(table2.configuration("soseleto_unlabelled_frozen"))
    learned = table2.rounds_of(table2.configuration("soseleto_unlabelled"))
    assert (rounds.rounds, rounds.views, rounds.method.weight_step) == (5, 4, None)  # type: ignore[attr-defined]
    assert replace(rounds, method=learned.method) == learned


def check_sides(sides: Sides, source: int, target: int, heldout: int) -> None:
    """Nothing overlaps, and images are labelled by their number."""
    ids = [{int(i) for i in side.ids or ()} for side in (sides.source, sides.target, sides.heldout)]
    assert [len(i) for i in ids] == [source, target, heldout]
    assert len(set.union(*ids)) == source + target + heldout
    for side in (sides.target, sides.heldout):
        assert side.labels.tolist() == [int(i) % 10 for i in side.ids or ()]
    assert sides.truth.tolist() == [int(i) % 10 for i in sides.source.ids or ()]


@pytest.mark.parametrize("noise", [0.3, "worse_label"])
def test_every_line_of_table1_has_the_same_data(noise: float | str) -> None:
    common: dict[str, Any] = {"noise": noise, "n_clean": 100, "n_heldout": 20}
    first = table1.data(table1.configuration("soseleto", **common))
    check_sides(first, 500, 80, 20)
    wrong = first.source.labels != first.truth
    assert int(wrong.sum()) == 150 if noise == 0.3 else 0 < int(wrong.sum()) < 100
    for line in table1.LINES:
        config = table1.configuration(line, **common)
        sides = table1.data(config)
        assert torch.equal(sides.target.inputs, first.target.inputs)
        if config.labels == "noisy":
            assert torch.equal(sides.source.labels, first.source.labels)
        if line not in table1.PAPER_LINES:
            assert (config.epochs, config.batch_size, config.weight_decay) == (60, 256, 5e-4)
        assert make_method(config.base, config.settings).name
    right = table1.data(table1.configuration("oracle", **common)).source
    assert torch.equal(right.labels, first.truth)


@pytest.mark.parametrize(("noise", "wrong"), [(0.5, 0.45), ("asymmetric", 0.4)])
def test_data_in_the_protocol_of_mlc(noise: float | str, wrong: float) -> None:
    config = cifar10_deep.configuration("strong", noise=noise, n_trusted=100, mlc=True)
    sides = cifar10_deep.data(config)
    assert sides.target.labels.bincount().tolist() == [10] * 10
    assert sides.truth.bincount().tolist() == [50] * 10
    for c in range(10):
        counts = sides.source.labels[sides.truth == c].bincount(minlength=10)
        assert int(counts[c]) == pytest.approx(50 * (1 - wrong), abs=1)
        assert len(counts.nonzero()) == (2 if noise == "asymmetric" else 10)


def test_rejected_labels_have_precision_recall_and_f1() -> None:
    row = short("cifar10_deep", "strong", noise=0.5, mlc=True)
    assert set(row["rejected"]) == {"weight", "score"}
    numbers = {"rejected": {"weight": {"precision": 90.0, "recall": 60.0}}, "detection": {"weight": {"precision": 0.8}}}
    usual = {**row, **numbers, "config": {**row["config"], "n_trusted": 1000}}
    assert cifar10_deep.mlc_table([usual]).splitlines()[-2] == "| published: ProMix | 97.3 |"
    shown = cifar10_deep.rejected_table([usual])
    assert shown.splitlines()[-1] == "| MLC's 50 %, 1 epochs | 90.0 | 60.0 | 72.0 | 20.0 |"


def test_sources_of_table2() -> None:
    def drawn(source: str, **changes: Any) -> digits.Digits:
        return table2.data(table2.configuration("soseleto", source=source, **changes))

    low = drawn("0-4", n_heldout=50)
    assert low.target.labels.bincount().tolist() == [5] * 5
    ids = [set(side.ids or ()) for side in (low.target, low.heldout, low.unlabelled)]
    assert ([len(i) for i in ids], len(set.union(*ids))) == ([25, 50, 125], 200)
    assert (len(low.source), int(low.source.labels.max()), low.source.inputs.shape[1:]) == (400, 4, (1, 28, 28))
    plain = drawn("0-4", plain=True)
    assert torch.allclose(plain.source.inputs, (low.source.inputs / 255 - 0.444) / 0.175)
    assert torch.allclose(plain.test.inputs, (low.test.inputs / 255 - 0.1307) / 0.3081)
    shuffled, mixed = drawn("shuffled"), drawn("grey-cifar")
    assert torch.equal(shuffled.useless, shuffled.source.labels != shuffled.source.truth)
    assert 0.3 < float(shuffled.useless.float().mean()) < 0.45  # a half, of which a fifth is right by chance
    assert int(mixed.useless.sum()) == 200
    assert (mixed.source.labels[mixed.useless].min(), mixed.source.labels[~mixed.useless].max()) == (5, 4)
    green = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    green[:, 1] = 255
    assert bool((digits.small_and_grey(Examples(green, torch.zeros(1))).inputs == round(0.587 * 255)).all())


def test_accuracy_of_every_epoch() -> None:
    row = short("table2", "soseleto_printed_first", plain=True, epochs=2)
    assert (len(row["by_epoch"]), row["by_epoch"][-1]) == (2, pytest.approx(row["accuracy"]))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    by_epoch = ByEpoch(model, lambda inputs: inputs * 0.0, some=Examples(torch.rand(8, 4), torch.zeros(8).long()))
    for bias in (1.0, -1.0):
        model[1].bias.data = torch.tensor([bias, 0.0])
        by_epoch("epoch", {})
    assert (by_epoch.percent, model.training) == ({"some": [100.0, 0.0]}, True)


def test_texts_have_no_truth_to_train_on(minilm: str) -> None:
    config = noisy_text.configuration("mixed", noise="hausa", n_trusted=40, n_heldout=30, select=True, model=minilm)
    sides, texts = noisy_text.data(config), reviews("hausa")
    source, trusted, heldout = (
        [int(i) for i in side.ids or ()] for side in (sides.source, sides.target, sides.heldout) if side is not None
    )
    assert len({*source, *trusted, *heldout}) == 160
    assert torch.equal(sides.source.labels, texts.labels[source])
    assert torch.equal(sides.truth, texts.truth[source])
    assert sides.target.labels.equal(texts.truth[trusted])
    assert int(sides.target.labels.min()) >= 0  # only checked ones
    assert sides.source.truth is None


@pytest.mark.parametrize("model", ["quick", "resnet18"])
@pytest.mark.parametrize(("noise", "many"), [(0.4, True), ("aggre_label", False)])
def test_usual_lines_are_what_fit_chooses(noise: float | str, many: bool, model: str) -> None:
    config = table1.configuration("soseleto_usual", noise=noise, epochs=20, model=model)
    known: dict[str, Any] = {"classes": True, "ends_in_linear": True, "n_source": 45000}
    network = by_name(model, classes=10, shape=(3, 32, 32))
    usual: Any = resolve(network, epochs=20, wrong_share=0.3 * many, **known).method
    ours = make_method(config.base, config.settings)
    assert ours == replace(usual, gradients=chain(usual.gradients))


def test_the_usual_line_of_a_pretrained_network_is_what_fit_chooses() -> None:
    config = pretrained_images.configuration("soseleto_usual")
    part = type("Block", (nn.Conv2d,), {"__module__": "timm.models.block"})
    network = nn.Sequential(part(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    known: dict[str, Any] = {"classes": True, "ends_in_linear": True, "n_source": 100, "wrong_share": 0.3}
    usual: Any = resolve(network, epochs=config.epochs, **known).method
    assert make_method(config.base, config.settings) == replace(usual, gradients=chain(usual.gradients))


def test_choosing_leaves_the_test_set_alone() -> None:
    row = short("table1", "mixed", n_heldout=20, select=True)
    assert "accuracy" not in row
    assert 0 <= row["heldout_accuracy"] <= 100
    with pytest.raises(UsageError, match="n_heldout=1000"):
        table1.configuration("mixed", select=True)


def test_cells_and_changes_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = configurations(
        table1.EXPERIMENT, lines=["soseleto", "mixed"], seeds=[0, 1],
        changes=["noise=0.4,worse_label", "epochs=3", "target_average=0.9"],
    )  # fmt: skip
    assert len(runs) == 8
    assert {(run.noise, run.seed) for run in runs} == {(n, s) for n in (0.4, "worse_label") for s in (0, 1)}
    assert all((run.epochs, run.settings["target_average"]) == (3, 0.9) for run in runs)
    assert {run.method for run in runs} == {"soseleto[target_average=0.9]", "mixed[target_average=0.9]"}
    (elsewhere,) = configurations(table1.EXPERIMENT, lines=["mixed"], seeds=[7], changes=["noise=0.1"])
    assert (elsewhere.noise, elsewhere.seed) == (0.1, 7)
    with pytest.raises(SystemExit) as stop:
        main(["table2", "--methods", "soselto", "--out", str(tmp_path / "x.json")])
    assert stop.value.code == 2
    assert "did you mean 'soseleto'" in capsys.readouterr().err
    monkeypatch.setattr(demo, "EPOCHS", 2)
    main(["figure1", "--seeds", "0", "--out", str(tmp_path / "figure1.json")])
    assert "seed 300: " in capsys.readouterr().out.replace("setting {}, ", "")


def fake_data(run: Any, root: Any, device: str) -> Any:
    if run.seed == 2:
        raise ValueError("lost")


def fake_measure(run: Any, data: Any, root: Any, device: str) -> Row:
    return {"accuracy": 70.0 + run.seed}


FAKE = replace(table1.EXPERIMENT, data=fake_data, measure=fake_measure)


def run_fakes(out: Path, seeds: list[int], processes: int = 1) -> list[str]:
    lines: list[str] = []
    runs = [table1.configuration("soseleto", seed=seed) for seed in seeds]
    run_all(FAKE, runs, out, device="cpu", processes=processes, report=lines.append)
    return lines


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interrupted_job_resumes(tmp_path: Path, processes: int) -> None:
    out = tmp_path / "deep" / "results.json"
    with pytest.raises(TrainingError, match="lost"):
        run_fakes(out, [0, 1, 2, 3], processes)
    assert sorted(row["seed"] for row in load(out).rows) == [0, 1, 3]  # the other runs are kept
    before = out.read_text()
    assert run_fakes(out, [0, 1, 3]) == [f"3 of 3 runs are in {out} already"]
    assert out.read_text() == before
    out.write_text("{")
    with pytest.raises(DataError, match="not a results file"):
        load(out)


def fake(name: str, line: str, accuracy: float, **fields: Any) -> Row:
    return {**table(name).configuration(line, **fields).heading(), "accuracy": accuracy}


def test_cells_have_means_spreads_and_counts(tmp_path: Path) -> None:
    rows = [fake("table1", "soseleto", 70.0 + seed, seed=seed) for seed in (0, 1)]
    rows += [fake("table1", "ordinary", 70.0, noise=0.3), fake("table1", "oracle", 90.0, noise=0.3)]
    assert table1.accuracy_table(rows).splitlines()[-3:] == [
        "| ordinary training | 70.0 (1) |  |",
        "| **SOSELETO** |  | 70.5 ± 0.7 (2) |",
        "| oracle: every label corrected | 90.0 (1) | 90.0 (1) |",  # it sees no noisy label
    ]
    other = fake("table1", "soseleto", 71.0, seed=1, lr=0.1)
    with pytest.raises(DataError, match="2 configurations"):
        markdown([rows[0], other], methods={"soseleto": "x"}, settings={"40 %": {"noise": 0.4}})
    pairs = [fake("table2", "target_only", a, seed=seed) for seed, a in enumerate((80.0, 90.0))]
    pairs += [fake("table2", "soseleto", a, seed=seed) for seed, a in enumerate((82.0, 94.0))]
    pairs += [fake("table2", "fine_tuning", 70.0, seed=7)]  # a draw that SOSELETO has not seen yet
    assert table2.paired_table(pairs).splitlines()[2:] == ["| target only | 3.0 ± 1.0 (2) |"]
    assert put_between("a <!-- t -->old<!-- /t --> b", "t", "new") == "a <!-- t -->\nnew\n<!-- /t --> b"
    saved = save(tmp_path / "some.json", started("table").merged(rows))
    assert load(saved).rows == tuple(json.loads(json.dumps(rows)))
