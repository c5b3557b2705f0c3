"""Table 2's experiment: its configurations and data, and a CPU-sized version of every line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments import figures
from experiments.pseudo_labels import Unlabelled
from experiments.results import Row, load
from experiments.shuffled_weights import ShuffledWeights, _Shuffled
from experiments.svhn_mnist import data, experiment
from experiments.svhn_mnist.data import SOURCES, Digits, small_and_grey
from experiments.svhn_mnist.experiment import (
    LINES,
    PLAIN,
    Config,
    configuration,
    everything,
    heading,
    make_trunk,
    run_one,
)
from experiments.svhn_mnist.tables import (
    accuracy_table,
    classes_table,
    configs,
    detection_table,
    main,
    page,
    paired_plain_table,
    paired_sources_table,
    paired_table,
    parser,
    sources_table,
)
from soseleto.algorithm import Soseleto
from soseleto.data import Examples
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.errors import UsageError
from soseleto.pieces import chain
from soseleto.task.losses import NoisyLosses
from soseleto.task.optimizers import sgd
from soseleto.task.task import Task

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {"n_source": 200, "n_test": 100, "epochs": 1}


def drawn(n: int, channels: int, side: int, seed: int) -> Examples:
    """Ten classes of images, each a bar at its own place and slope, in noise."""
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 10
    rows = torch.linspace(-1, 1, side)
    slope, place = (labels % 5).float() - 2.0, (labels // 5).float() - 0.5
    far = rows[None, :, None] - slope[:, None, None] * rows[None, None, :] / 2 - place[:, None, None]
    images = (255 * torch.exp(-20 * far.square()))[:, None].expand(n, channels, side, side)
    images = images + 20 * torch.randn(n, channels, side, side, generator=seeded)
    names = tuple(str(c) for c in range(10))
    return Examples(images.clamp(0, 255).to(torch.uint8), labels, classes=names)


def made_up(name: str, split: str, root: Any = None) -> Examples:
    if name == "mnist":
        return drawn(400, 1, 28, seed=len(split))
    return drawn(800, 3, 32, seed=len(name))


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget = (data.mnist, data.svhn, data.grey_cifar, data._low)
    monkeypatch.setattr(data, "load", made_up)
    for cached in forget:
        cached.cache_clear()
    yield
    for cached in forget:
        cached.cache_clear()


def digits(source: str = "0-4", n_target: int = 25, **changes: Any) -> Digits:
    given: dict[str, Any] = {"seed": 0, "n_source": None, "n_heldout": 0, "n_test": None, "root": None}
    return data.prepare(source, n_target, **{**given, **changes})


@pytest.mark.parametrize("n_target", [20, 25])
def test_the_target_is_balanced_and_nothing_overlaps(no_files: None, n_target: int) -> None:
    data = digits(n_target=n_target, n_heldout=50)
    assert data.heldout is not None
    assert data.target.labels.bincount().tolist() == [n_target // 5] * 5
    ids = [set(side.ids or ()) for side in (data.target, data.heldout, data.unlabelled)]
    assert [len(i) for i in ids] == [n_target, 50, 200 - 50 - n_target]
    assert len(set.union(*ids)) == 200
    assert {int(i) % 10 for i in ids[0]} == {5, 6, 7, 8, 9}
    assert set(digits(n_target=n_target, seed=1).target.ids or ()) != ids[0]


def test_sources(no_files: None) -> None:
    low, every = digits("0-4").source, digits("0-9").source
    assert (len(low), len(every)) == (400, 800)
    assert low.inputs.shape[1:] == (1, 28, 28)
    assert int(low.labels.max()) == 4
    shuffled = digits("shuffled")
    assert shuffled.useless is not None
    assert shuffled.source.truth is not None
    assert torch.equal(shuffled.useless, shuffled.source.labels != shuffled.source.truth)
    assert shuffled.source.labels.bincount().equal(low.labels.bincount())
    assert 0.3 < float(shuffled.useless.float().mean()) < 0.45  # a half, of which a fifth is right by chance
    mixed = digits("grey-cifar")
    assert mixed.useless is not None
    assert len(mixed.source) == len(low)
    assert mixed.source.labels[mixed.useless].min() == 5
    assert mixed.source.labels[~mixed.useless].max() == 4
    assert int(mixed.useless.sum()) == 200
    assert len(digits("grey-cifar", n_source=100).source) == 100


def test_images_become_grey_and_small() -> None:
    white = Examples(torch.full((1, 3, 32, 32), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    assert bool((small_and_grey(white).inputs == 255).all())
    green = replace(white, inputs=white.inputs * torch.tensor([0, 1, 0], dtype=torch.uint8).view(1, 3, 1, 1))
    assert bool((small_and_grey(green).inputs == round(0.587 * 255)).all())


@pytest.mark.parametrize("source", SOURCES)
def test_every_line_has_the_same_data_and_budget(source: str) -> None:
    for line in LINES:
        first = configuration("soseleto_alone" if "alone" in line else "soseleto", source=source)
        other = configuration(line, source=source)
        own = ["method", "base", "settings", "unlabelled", "aligned", "rounds", "lr"]  # each has its own learning rate
        own += ["epochs"] if "longer" in line else []
        assert replace(other, **{name: getattr(first, name) for name in own}) == first


def test_the_plain_column_is_the_papers(no_files: None) -> None:
    plain = configuration("soseleto", plain=True)
    assert (plain.batch_size, plain.target_batch_size, plain.lr) == (32, 10, 0.01)
    assert not any((plain.sign, plain.rotate, plain.scale, plain.shift, plain.shear, plain.elastic))
    assert heading(plain)["setting"] == {"n_target": 25, "source": "0-4", "unlabelled": False, "plain": True}
    assert set(PLAIN) <= set(Config.__dataclass_fields__)


def test_images_are_standardised_one_by_one() -> None:
    trunk = make_trunk(configuration("soseleto"))
    images = 50 + 10 * torch.randn(3, 1, 28, 28)
    assert torch.allclose(trunk(images), trunk(3 * images + 7), atol=1e-4)


def test_a_relu_after_each_convolution_keeps_the_names_of_the_layers(no_files: None) -> None:
    plain = configuration("soseleto", plain=True)
    trunk, caffe = make_trunk(plain), make_trunk(replace(plain, relu=False, dropout=0.0))
    assert trunk.state_dict().keys() == caffe.state_dict().keys()
    kinds = [type(layer) for layer in trunk.modules()]
    assert (kinds.count(nn.ReLU), kinds.count(nn.Dropout)) == (3, 1)
    assert isinstance(trunk[-1], nn.Dropout)
    with pytest.raises(UsageError, match="dropout"):
        replace(plain, classifier="connected")


def test_rows_without_the_newer_fields_are_the_same_runs() -> None:
    assert not {"relu", "dropout"} & heading(configuration("soseleto"))["config"].keys()
    assert heading(configuration("soseleto", plain=True))["config"]["dropout"] == 0.5


def test_frozen_weights_are_frozen_in_the_rounds_too(no_files: None) -> None:
    config, data = configuration("soseleto_unlabelled_frozen"), digits()
    rounds = experiment.make_rounds(config, data)
    learned = experiment.make_rounds(configuration("soseleto_unlabelled"), data)
    assert rounds is not None
    assert learned is not None
    assert dict(config.settings)["weight_step"] is None
    assert replace(rounds, method=learned.method) == learned
    assert isinstance(learned.method, Soseleto)
    assert rounds.method == replace(learned.method, weight_step=None, gradients=chain(learned.method.gradients))


def test_luo_longer_takes_at_least_the_steps_of_the_rounds() -> None:
    n_source, n_unlabelled = 45_349, 29_379  # SVHN 0-4; MNIST training digits 5-9 without the target
    config = configuration("soseleto_unlabelled")
    rounds = Unlabelled(inputs=torch.zeros(1), **dict(config.rounds))
    shares = sum(rounds.share(number) for number in range(1, rounds.rounds + 1))
    steps = config.epochs * n_source / 32 + rounds.epochs * shares * n_unlabelled / rounds.batch_size
    longer = [configuration(line).epochs * n_source / 32 for line in ("luo_longer", "luo_label_efficient_longer")]
    assert all(steps <= given < steps + n_source / 32 for given in longer)


def short(config: Config) -> Config:
    kept = tuple((name, value) for name, value in config.rounds if name.startswith("method."))
    return replace(config, rounds=(("rounds", 1), ("epochs", 1), *kept)) if config.rounds else config


@pytest.mark.parametrize("line", LINES)
def test_every_line_runs(no_files: None, line: str) -> None:
    row = run_one(short(configuration(line, **TINY)), device="cpu")
    assert json.loads(json.dumps(row, allow_nan=False)) == {**row, "config": json.loads(json.dumps(row["config"]))}
    assert row["method"] == line
    assert 0 <= row["accuracy"] <= 100


def test_what_a_run_knows_of_its_weights(no_files: None) -> None:
    polluted = run_one(configuration("soseleto", source="shuffled", **TINY), device="cpu")
    assert set(polluted["detection"]) == {"weight", "score"}
    appendix = run_one(configuration("soseleto", source="0-9", **{**TINY, "n_source": 400}), device="cpu")["classes"]
    assert [facts["class"] for facts in appendix] == [str(c) for c in range(10)]
    for c, facts in enumerate(appendix):
        assert 0 <= facts["useful"] <= 100
        assert len(set(facts["best"] + facts["worst"])) == 20
        assert {int(i) % 10 for i in facts["best"] + facts["worst"]} == {c}


def test_shuffled_weights_weigh_other_examples() -> None:
    weights = _Shuffled(50)
    moved = torch.arange(10)
    weights.step(moved, torch.full((10,), -0.5), torch.zeros(10))
    assert weights.values[:10].eq(0.5).all()
    assert not torch.equal(weights.take(torch.arange(50)), weights.values)
    assert torch.equal(weights.take(torch.arange(50)).sort().values, weights.values.sort().values)
    weights.step(moved, torch.full((10,), -0.5), torch.zeros(10), weights.rows(moved))  # as the algorithm calls it
    assert weights.values[:10].eq(0.0).all()
    assert weights.values[10:].eq(1.0).all()


def test_the_step_of_shuffled_weights_follows_those_of_others() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(50, 4), torch.randint(3, (50,))
    moved = {}
    for method in (Soseleto(), ShuffledWeights()):
        model = nn.Linear(4, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        task = Task(
            model=model, losses=NoisyLosses(), n_source=50, steps=10, shared=frozenset(trainable(model)),
            target_head=frozenset(), make_optimizer=partial(sgd, lr=0.1, weight_decay=0.0), device=torch.device("cpu"),
            guard=lambda side, losses, index: None,
        )  # fmt: skip
        state = method.init(task)
        state.weights.values[:25] = 0.0
        weighs = state.weights.take(torch.arange(50))
        method.step(state, Batch(torch.arange(50), inputs, labels), Batch(torch.arange(4), inputs[:4], labels[:4]))
        moved[method.name] = model.weight.detach().clone()
        zeros = torch.zeros(3, 4, requires_grad=True)
        plain = F.cross_entropy(F.linear(inputs, zeros), labels, reduction="none")
        (expected,) = torch.autograd.grad((weighs * plain).sum() / weighs.sum(), zeros)
        assert torch.allclose(moved[method.name], -0.1 * expected, atol=1e-6)
    assert not torch.allclose(moved["soseleto"], moved["shuffled_weights"])


def test_differences_are_taken_within_a_draw() -> None:
    rows = [fake("target_only", a, seed=seed) for seed, a in enumerate((80.0, 90.0))]
    rows += [fake("soseleto", a, seed=seed) for seed, a in enumerate((82.0, 94.0))]
    rows += [fake("fine_tuning", 70.0, seed=7)]  # a draw that SOSELETO has not seen yet
    text = paired_table(rows)
    assert "| target only |" in text
    assert "3.0 ± 1.0 (2)" in text
    assert "fine-tuning" not in text
    rows = [fake("soseleto_paper_one", 84.0, plain=True), fake("soseleto_paper_frozen", 82.5, plain=True)]
    assert "| its weights frozen at 1 | 1.5 (1) |" in paired_plain_table([*rows, fake("target_only", 60.0)])
    rows = [fake("soseleto_alone", 88.0, source="shuffled"), fake("soseleto_alone_frozen", 85.5, source="shuffled")]
    assert "| learned weights over weights frozen at 1 | 2.5 (1) |" in paired_sources_table(rows)


def test_choosing_leaves_the_test_set_alone(no_files: None) -> None:
    row = run_one(configuration("target_only", **TINY, select=True, n_heldout=50), device="cpu")
    assert "accuracy" not in row
    assert 0 <= row["heldout_accuracy"] <= 100
    with pytest.raises(UsageError, match="n_heldout=5000"):
        configuration("target_only", select=True)


@pytest.mark.parametrize("given", [{"method": "soselto"}, {"source": "0-5"}, {"classifier": "first"}])
def test_bad_arguments_raise(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        configuration(**{"method": "soseleto", **given})


def test_arguments_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--methods soseleto fine_tuning --n-target 20 25 --source 0-4 shuffled --seeds 0 1 --epochs 3 --out x.json"
    )
    made = configs(parser().parse_args(options.split()))
    assert len(made) == 16
    assert {(c.n_target, c.source, c.seed, c.epochs) for c in made[::2]} == {
        (n, source, seed, 3) for n in (20, 25) for source in ("0-4", "shuffled") for seed in (0, 1)
    }
    with pytest.raises(SystemExit) as stop:
        main(["--methods", "soselto", "--out", str(tmp_path / "x.json")])
    assert stop.value.code == 2
    assert "did you mean 'soseleto'" in capsys.readouterr().err


def test_rounds_have_settings_of_their_own(no_files: None) -> None:
    config = configuration("soseleto_unlabelled", rounds=(("rounds", 2), ("method.weight_step", 0.7)))
    assert config.method == "soseleto_unlabelled[rounds=2,method.weight_step=0.7]"
    assert dict(config.rounds)["views"] == 4  # the line's other settings stay
    rounds = experiment.make_rounds(config, digits())
    assert rounds is not None
    assert (rounds.rounds, getattr(rounds.method, "weight_step", None)) == (2, 0.7)
    assert experiment.make_rounds(configuration("luo"), digits()) is None


def fake(line: str, accuracy: float, *, seed: int = 0, **changes: Any) -> Row:
    return {**heading(configuration(line, seed=seed, **changes)), "accuracy": accuracy}


def test_tables_have_means_and_standard_errors() -> None:
    rows = [fake("soseleto", accuracy, seed=seed) for seed, accuracy in enumerate((90.0, 94.0))]
    rows += [fake("target_only", 80.0, n_target=20), fake("target_only", 70.0, n_target=20, plain=True)]
    rows += [fake("luo", 85.0)]
    text = accuracy_table(rows)
    assert "| target only | 80.0 (1) |  | 70.0 (1) |" in text
    assert "| **SOSELETO** |  | 92.0 ± 2.0 (2) |  |" in text
    assert "| Luo et al. 2017, unlabelled data |  | 85.0 (1) |  |" in text
    assert "| paper: SOSELETO | 83.2 | 87.9 | 83.2 |" in text
    polluted = {**fake("soseleto_alone", 88.0, source="shuffled"), "detection": {"score": {"auroc": 0.9}}}
    assert "| score | 90.0 (1) |" in detection_table([polluted])
    assert "| **SOSELETO**, trunk from the source alone |  | 88.0 (1) |" in sources_table([*rows, polluted])
    appendix = {**fake("soseleto", 91.0, source="0-9"), "classes": [{"class": "3", "useful": 12.5}]}
    assert "| weight above 0.8 | 12.5 (1) |" in classes_table([appendix])


def test_the_page_holds_the_tables_of_the_results() -> None:
    results = ROOT / "results" / "svhn-mnist.json"
    text = (ROOT / "docs" / "results" / "table2.md").read_text("utf-8")
    assert page(text, results) == text


MARGIN = 40.0  # points above chance (20) that every line reaches with 25 labelled digits and 128 steps


LONG = ["matching_fine_tuned", "luo_label_efficient"] if os.environ.get("SOSELETO_LONG_EXPERIMENTS") == "1" else []


@pytest.mark.parametrize("line", ["target_only", "fine_tuning", "soseleto", *LONG])
def test_small_experiment_beats_chance(data_root: Path, line: str) -> None:
    """Real digits, seconds on a CPU."""
    row = run_one(configuration(line, small=True), data_root, "cpu")
    assert row["accuracy"] > 20.0 + MARGIN


def test_every_cell_is_run_once() -> None:
    cells = [json.dumps(heading(config)) for config in everything(range(2))]
    assert len(set(cells)) == len(cells)
    assert {json.loads(cell)["setting"]["source"] for cell in cells} == set(SOURCES)


def test_the_figures_of_the_appendix(tmp_path: Path) -> None:
    rows = load(ROOT / "results" / "svhn-mnist.json").rows
    assert "percent above 0.8" in figures.useful_classes(rows, tmp_path / "classes.svg").read_text()
    source = Examples(
        torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 1, 8, 8).clone(), torch.zeros(20)
    )
    facts = [
        {"class": "0", "best": ["3", "4"], "worst": ["19", "0"]},
        {"class": "1", "best": ["1", "2"], "worst": ["5", "6"]},
    ]
    picture = figures.best_and_worst(facts, source, tmp_path / "digits.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    strip = figures._strip(source, [3, 19])
    assert strip.shape == (8, 16, 3)
    assert (int(strip[0, 0, 0]), int(strip[0, -1, 2])) == (3, 19)
