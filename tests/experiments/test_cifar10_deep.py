"""The experiment with a deep network: its configurations, its noise, what it is evaluated on, and one run of a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.cifar10_deep import experiment, tables
from experiments.cifar10_deep.command import configs, main, parser
from experiments.cifar10_deep.experiment import (
    LINES,
    NOISE,
    PAIRS,
    configuration,
    heading,
    make_model,
    prepare_data,
)
from experiments.results import Row, save, started
from soseleto.data import Examples
from soseleto.errors import UsageError


def made_up(split: str, root: Any, human: Any) -> Examples:
    """Images of ten brightnesses in place of CIFAR-10."""
    n = 400 if split == "train" else 60
    truth = torch.arange(n) % 10
    images = (truth * 25)[:, None, None, None].expand(n, 3, 32, 32).to(torch.uint8).clone()
    labels = truth if human is None else torch.where(torch.arange(n) % 7 == 0, (truth + 1) % 10, truth)
    return Examples(images, labels, truth=None if human is None else truth)


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "_split", made_up)


TINY: dict[str, Any] = {
    "n_trusted": 40, "model": "mlp", "epochs": 1, "batch_size": 64, "target_batch_size": 16, "precision": None,
}  # fmt: skip


@pytest.mark.parametrize("noise", NOISE)
def test_sides_do_not_overlap_and_truth_is_known(noise: float | str) -> None:
    data = prepare_data(configuration("strong", noise=noise, n_trusted=40, select=True, n_heldout=60))
    ids = [set(side.ids or ()) for side in (data.source, data.trusted, data.evaluated)]
    assert [len(one) for one in ids] == [300, 40, 60]
    assert len(set.union(*ids)) == 400
    for side in (data.trusted, data.evaluated):
        assert side.labels.tolist() == [int(one) % 10 for one in side.ids or ()]
    assert data.source.truth is not None
    assert data.source.truth.tolist() == [int(one) % 10 for one in data.source.ids or ()]
    wrong = data.source.labels != data.source.truth
    if isinstance(noise, float):
        assert int(wrong.sum()) == round(300 * noise)
    tested = prepare_data(configuration("strong", noise=noise, n_trusted=40))
    assert (len(tested.source), len(tested.evaluated)) == (360, 60)


def test_asymmetric_noise_flips_the_usual_pairs() -> None:
    source = prepare_data(configuration("strong", noise="asymmetric", n_trusted=40)).source
    assert source.truth is not None
    for c in range(10):
        given = source.labels[source.truth == c]
        wrong = dict(PAIRS).get(c)
        assert int((given == c).sum()) == (len(given) if wrong is None else round(0.6 * len(given)))
        if wrong is not None:
            assert int((given == wrong).sum()) == len(given) - round(0.6 * len(given))


def test_every_line_is_a_method_and_shares_the_data() -> None:
    first = prepare_data(configuration("strong", noise=0.4, n_trusted=40))
    for line in LINES:
        config = configuration(line, noise=0.4, n_trusted=40)
        assert experiment.METHODS[config.base](**dict(config.settings)).name == config.base
        assert torch.equal(prepare_data(config).source.labels, first.source.labels)
        usual = experiment.METHODS[config.base]()
        assert all(getattr(usual, name) != value for name, value in config.settings)


PASSES: list[tuple[bool, int]] = []  # of the networks: whether they train, and the number of images


class Counting(nn.Module):
    """A small network that counts its passes, and those of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.ReLU(), nn.Linear(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        PASSES.append((torch.is_grad_enabled(), len(x)))
        scores: Tensor = self.layers(x)
        return scores


def computation(line: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of a whole training, in passes of an image; one that is trained on counts three."""
    usual = configuration(line, noise=0.4)
    small = replace(usual, n_trusted=40, n_source=320, batch_size=64, target_batch_size=16, precision=None)
    monkeypatch.setattr(experiment, "make_model", lambda config, device: Counting())

    def of_an_epoch(**phase: float) -> float:
        settings = (*(one for one in usual.settings if one[0] not in phase), *phase.items())
        counts = []
        for epochs in (1, 2):
            PASSES.clear()
            experiment.train(replace(small, epochs=epochs, settings=settings), prepare_data(small), "cpu")
            counts.append(sum(3 * n if trained else n for trained, n in PASSES))
        return float(counts[1] - counts[0]) / 320

    share = getattr(experiment.METHODS[usual.base](**dict(usual.settings)), "warm_up", None)
    if share is None:
        return usual.epochs * of_an_epoch()
    return usual.epochs * (share * of_an_epoch(warm_up=1.0) + (1 - share) * of_an_epoch(warm_up=0.0))


def test_lines_take_the_same_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = computation("strong", monkeypatch)
    assert ours == pytest.approx(100 * 2176 / 256)
    for line in ("strong_one_view", "strong_pair", "fixmatch", "divide_mix", "promix"):
        assert computation(line, monkeypatch) == pytest.approx(ours, rel=0.06 if line == "promix" else 0.02), line
    assert computation("mixed", monkeypatch) < ours


def test_the_network_is_that_of_the_papers() -> None:
    model = make_model(configuration("strong"), "cpu")
    assert sum(p.numel() for p in model.parameters()) == 11_172_170
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_run_and_its_row(tmp_path: Path) -> None:
    config = configuration("strong", noise=0.4, select=True, n_heldout=60, **TINY)
    results = experiment.run_all([config], tmp_path / "rows.json", device="cpu", report=lambda line: None)
    (row,) = results.rows
    assert "accuracy" not in row
    assert row["curve"] == [round(row["heldout_accuracy"], 2)]
    assert set(row["detection"]) == {"weight", "score"}
    config = configuration("mixed", noise=0.4, **TINY)
    row = experiment.run_one(config, device="cpu")
    assert "heldout_accuracy" not in row
    assert 0 <= row["accuracy"] <= 100


def test_the_command(tmp_path: Path) -> None:
    words = "--methods strong --noise 0.8 worse_label --seeds 3 --held-out --epochs 7 --no-cuda-graph --set mixup=1.0"
    found = configs(parser().parse_args([*words.split(), "--out", "rows.json"]))
    assert [config.noise for config in found] == [0.8, "worse_label"]
    assert all(config.seed == 3 and config.epochs == 7 and config.select for config in found)
    assert found[0].n_heldout == 5000
    assert not found[0].cuda_graph
    assert found[0].settings == (("mixup", 1.0),)
    with pytest.raises(SystemExit):
        main(["--noise", "human", "--out", str(tmp_path / "rows.json")])
    assert not (tmp_path / "rows.json").exists()


def test_promix_runs() -> None:
    (config,) = configs(
        parser().parse_args(["--methods", "promix", "--noise", "0.4", "--set", "warm_up=0.0", "--out", "rows.json"])
    )
    assert (config.base, config.views, config.schedule) == ("promix", 1, "cosine")
    row = experiment.run_one(replace(config, **TINY), device="cpu")
    assert 0 <= row["accuracy"] <= 100
    assert set(row["detection"]) == {"weight", "score"}


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="noise must be a share between 0 and 1 or one of asymmetric, aggre_label"):
        configuration("strong", noise="human")
    with pytest.raises(UsageError, match="select and n_heldout belong together"):
        configuration("strong", select=True)


def test_reproduce_runs_every_line_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(todo: list[Any], out: Path, *, report: Any) -> Any:
        asked.extend(todo)
        return started("cifar10-deep")

    monkeypatch.setattr(experiment, "run_all", note)
    experiment.reproduce(tmp_path, seeds=3, report=print)
    ours = [(config.noise, config.seed, config.n_trusted) for config in asked if config.method == "strong"]
    assert len(ours) == len(set(ours)) == 3 * 2 + 5 + 2 * 2
    assert {config.method for config in asked if config.noise == 0.4} == set(LINES) - {"strong_longer"}
    assert [(config.noise, config.epochs) for config in asked if config.method == "strong_longer"] == [(0.8, 200)]


def test_tables(tmp_path: Path) -> None:
    def row(line: str, accuracy: float, **given: Any) -> Row:
        found = {"weight": {"auroc": 0.99, "precision": 0.9}}
        return {**heading(configuration(line, **given)), "accuracy": accuracy, "seconds": 100.0, "detection": found}

    rows = [row("strong", 95.0), row("strong", 96.0, seed=1), row("strong", 90.0, n_trusted=100)]
    rows += [row("fixmatch", 92.0), row("strong", 94.0, noise="worse_label")]
    held_out = {**heading(configuration("strong", select=True, n_heldout=5000)), "heldout_accuracy": 10.0}
    assert tables.accuracy_table([*rows, held_out]).splitlines() == [
        "|  | 40 % | CIFAR-10N worst |",
        "| --- | ---: | ---: |",
        "| published: DivideMix | 94.0-94.9 | 92.6 |",
        "| published: SOP+ |  | 93.2 |",
        "| published: ProMix | 96.8 | 96.2-96.3 |",
        "| **strong recipe** | 95.5 ± 0.7 (2) | 94.0 |",
        "| FixMatch, source unlabelled | 92.0 |  |",
    ]
    assert "| 100 trusted images | 90.0 |" in tables.trusted_table(rows)
    assert "| **strong recipe** | 99.0 ± 0.0 (2) | 99.0 |" in tables.auroc_table(rows)
    text = "".join(f"<!-- {mark} --><!-- /{mark} -->" for mark in tables.TABLES)
    assert tables.page(text, tmp_path / "none.json").count("Not run yet.") == len(tables.TABLES)
    save(tmp_path / "some.json", started("cifar10-deep").merged(rows))
    assert "| 1,000 trusted images | 95.5 ± 0.7 (2) | 94.0 |" in tables.page(text, tmp_path / "some.json")
