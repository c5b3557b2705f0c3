"""The experiment with a network from ImageNet: the network itself, its lines, a run of each kind, and its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.cifar10_deep import experiment as deep
from experiments.fine_tuning import LOGISTIC
from experiments.pretrained_images import experiment, network, tables
from experiments.pretrained_images.command import configs, main, parser
from experiments.pretrained_images.experiment import (
    LINES,
    configuration,
    heading,
    make_method,
    make_model,
    prepare_data,
    run_all,
    run_one,
)
from experiments.results import Row, started
from real_models import import_timm
from soseleto.data import Examples
from soseleto.defaults import resolve
from soseleto.errors import UsageError
from soseleto.pieces import chain

save_file = pytest.importorskip("safetensors.torch").save_file
N, TESTED = 120, 20


def made_up(split: str, root: Any, human: Any) -> Examples:
    """Images of ten brightnesses in place of CIFAR-10, every seventh labelled wrongly."""
    n = N if split == "train" else TESTED
    truth = torch.arange(n) % 10
    images = (truth * 25)[:, None, None, None].expand(n, 3, 32, 32).to(torch.uint8).clone()
    labels = truth if human is None else torch.where(torch.arange(n) % 7 == 0, (truth + 1) % 10, truth)
    return Examples(images, labels, truth=None if human is None else truth)


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "_split", made_up)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The settings of runs with a small network, whose weights are in a folder."""
    small = {"STAGES": ((1, 3, 1, 4, 1), (2, 3, 2, 8, 2)), "STEM": 4, "FEATURES": 12, "IMAGENET": 7}
    for name, value in small.items():
        monkeypatch.setattr(network, name, value)
    folder = tmp_path / "small-net"
    folder.mkdir()
    torch.manual_seed(0)
    save_file(network.EfficientNetLite0().state_dict(), folder / "model.safetensors")
    sizes = {"n_trusted": 40, "size": 32, "crop": 2, "epochs": 1, "batch_size": 50, "target_batch_size": 10}
    return {"model": str(folder), **sizes}


def names_of_timm(state: dict[str, Any], network: Any) -> dict[str, Any]:
    """The names of the package efficientnet_pytorch and those made like it, as timm has them."""
    places = [f"blocks.{s}.{b}" for s, stage in enumerate(network.blocks) for b in range(len(stage))]
    outside = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    expanded = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    expanded |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    plain = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    of_attention = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
    renamed: dict[str, Any] = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[0] != "_blocks":
            renamed[".".join([outside.get(parts[0], parts[0]), *parts[1:]])] = value
            continue
        at = int(parts[1])
        names = expanded if f"_blocks.{at}._expand_conv.weight" in state else plain
        if at < len(places):
            renamed[".".join([places[at], (names | of_attention).get(parts[2], parts[2]), *parts[3:]])] = value
    return renamed


def test_the_network_is_that_of_timm() -> None:
    """With the strides' padding at even and odd sizes, and statistics of BatchNorm that matter."""
    timm = import_timm()
    torch.manual_seed(0)
    ours, theirs = network.EfficientNetLite0(), timm.create_model("tf_efficientnet_lite0")
    for module in ours.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.01, 0.1)
    theirs.load_state_dict(names_of_timm(ours.state_dict(), theirs))
    for size in (32, 47):
        x = torch.randn(2, 3, size, size)
        with torch.no_grad():
            wanted = theirs.eval()(x)
            assert wanted.std() > 1e-3
            torch.testing.assert_close(ours.eval()(x), wanted)


@pytest.mark.parametrize("batch_norm", ["fixed", "train"])
def test_weights_of_the_file_with_a_new_classifier(tiny: dict[str, Any], batch_norm: str) -> None:
    config = configuration("mixed", batch_norm=batch_norm, **tiny)
    model = make_model(config, None, "cpu")
    inner: Any = model.network
    torch.manual_seed(0)
    original = network.EfficientNetLite0().state_dict()
    for name, value in inner.state_dict().items():
        assert name.startswith("_fc.") or torch.equal(value, original[name])
    assert inner._fc.weight.shape == (10, 12)
    assert torch.equal(make_model(config, None, "cpu").network._fc.weight, inner._fc.weight)
    other = make_model(replace(config, seed=1), None, "cpu").network
    assert not torch.equal(other._fc.weight, inner._fc.weight)
    states = {m.training for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)}
    assert states == {batch_norm == "train"}
    seen = []
    inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.linspace(0, 1, 3 * 16 * 16).reshape(1, 3, 16, 16))  # resized, and on a scale from -1 to 1
    assert seen[0].shape == (1, 3, 32, 32)
    assert (seen[0].min(), seen[0].max()) == (-1, 1)


def test_sides_are_those_of_the_deep_network_and_the_same_for_every_line() -> None:
    sizes: dict[str, Any] = {"n_trusted": 20, "select": True, "n_heldout": 30, "seed": 2}
    wanted = deep.prepare_data(deep.configuration("strong", noise="worse_label", **sizes))
    for line in LINES:
        config = configuration(line, **sizes)
        data = prepare_data(config)
        for side in ("source", "trusted", "evaluated"):
            assert getattr(data, side).fingerprint() == getattr(wanted, side).fingerprint()
        assert config.base == LOGISTIC or make_method(config).name == config.base
        steps = (config.epochs, config.batch_size, config.lr, config.schedule, config.size)
        assert steps == (10, 256, 3e-4, "warmup_cosine", 96)
    human = made_up("train", None, "worse_label").labels
    assert data.before is not None
    assert data.before.tolist() == [int(human[int(one)]) for one in data.trusted.ids or ()]
    assert data.trusted.labels.tolist() == [int(one) % 10 for one in data.trusted.ids or ()]


def test_the_usual_line_is_what_fit_chooses() -> None:
    config = configuration("soseleto_usual")
    part = type("Block", (nn.Conv2d,), {"__module__": "timm.models.block"})
    network = nn.Sequential(part(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    default: Any = resolve(
        network, classes=True, ends_in_linear=True, n_source=100, wrong_share=0.3, epochs=config.epochs
    ).method
    assert make_method(config) == replace(default, gradients=chain(default.gradients))


def test_logistic_regression_is_on_the_features_of_the_network_as_it_came(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration("logistic_mixed", **tiny)
    images, seen = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8), []
    model: Any = make_model(config, None, "cpu").eval()
    model.network._fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(images / 255.0)
    torch.testing.assert_close(experiment.features(config, images, None, "cpu"), seen[0].detach())

    def brightness(config: Any, images: torch.Tensor, root: Any, device: str) -> torch.Tensor:
        return torch.nn.functional.one_hot(images[:, 0, 0, 0].long() // 25, 10).float()

    monkeypatch.setattr(experiment, "features", brightness)
    wrong_source = {"n_source": 1}  # one image teaches nothing, so that the trusted ones decide
    assert run_one(replace(config, **wrong_source), device="cpu")["accuracy"] == 100.0


def test_runs_and_their_rows(tiny: dict[str, Any], tmp_path: Path) -> None:
    lines = (
        "logistic_noisy",
        "logistic_mixed",
        "ordinary",
        "soseleto",
        "soseleto_usual",
        "soseleto_usual_probes",
        "cleanlab",
    )
    few = {**tiny, "n_source": 50}
    todo = [configuration(line, **{**few, "folds": 2 * (line == "cleanlab")}) for line in lines]
    rows = {
        row["method"]: row for row in run_all(todo, tmp_path / "rows.json", device="cpu", report=lambda line: None).rows
    }
    for row in rows.values():
        assert 0 <= row["accuracy"] <= 100
        assert row["config"]["model"] == "small-net"  # no folder of this machine
    signals = {line: set(row["detection"]) for line, row in rows.items() if not line.startswith("logistic")}
    assert signals["ordinary"] == {"loss", "margin"}
    assert signals["soseleto"] == signals["soseleto_usual"] == {"loss", "margin", "weight", "score"}
    assert signals["soseleto_usual_probes"] == {"weight", "score", "probability"}
    assert "cleanlab_margin" in signals["cleanlab"]
    assert set(rows["cleanlab"]["issues"]) == {"count", "precision", "recall"}
    assert rows["soseleto"]["messages"] == ["alignments by the layerwise engine"]
    (suspects,) = rows["soseleto_usual_probes"]["suspects"]
    assert suspects["asked"] == 90
    many, few_wrong = list(rows.values()), [{**row, "setting": {"noise": "aggre_label"}} for row in rows.values()]
    for name, make in tables.TABLES.items():
        full, empty = (few_wrong, many) if name == "few" else (many, few_wrong)
        assert make(full).count("|") > 6
        assert make(empty) == make([])


def test_held_out_images_are_evaluated_and_test_images_are_not_read(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_alone(split: str, root: Any, human: Any) -> Examples:
        assert split == "train"
        return made_up(split, root, human)

    monkeypatch.setattr(deep, "_split", train_alone)
    larger = {**tiny, "size": 48, "precision": "bfloat16"}
    row = run_one(configuration("mixed", select=True, n_heldout=30, **larger), device="cpu")
    assert "accuracy" not in row
    assert 0 <= row["heldout_accuracy"] <= 100


def test_a_gpu_fine_tunes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration("mixed")
    assert experiment._autocast(config, "cpu") is None
    monkeypatch.setattr(experiment, "choose_device", torch.device)
    assert experiment._autocast(config, "cuda") == torch.bfloat16
    assert experiment._autocast(replace(config, precision="float32"), "cuda") is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--methods mixed soseleto --seeds 3 4 --held-out --size 128 --set weight_step=0.2 --no-cuda-graph"
    found = configs(parser().parse_args([*words.split(), "--out", "rows.json"]))
    assert [(c.method, c.seed) for c in found[2:]] == [("mixed[weight_step=0.2]", 4), ("soseleto[weight_step=0.2]", 4)]
    assert all(c.select and c.n_heldout == 5000 and c.size == 128 and not c.cuda_graph for c in found)
    assert len(configs(parser().parse_args(["--seeds", "0", "--out", "rows.json"]))) == len(LINES)
    for words in ("--batch-norm frozen", "--methods sosoleto", "--n-heldout 10"):
        with pytest.raises(SystemExit):
            main([*words.split(), "--out", str(tmp_path / "rows.json")])
    assert "batch_norm must be train or fixed, got 'frozen'" in capsys.readouterr().err


def test_what_cannot_be_is_one_sentence(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="size must be at least 32 pixels, got 16"):
        configuration("mixed", size=16)
    with pytest.raises(UsageError, match=r"has no model.safetensors: .* --model FOLDER"):
        network.weights_file("none", tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="has other weights than EfficientNet-lite0"):
        make_model(configuration("mixed", **{**tiny, "model": str(tmp_path)}), None, "cpu")


def test_reproduce_runs_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(todo: list[Any], out: Path, *, report: Any) -> Any:
        asked.extend(todo)
        return started("pretrained-images")

    monkeypatch.setattr(experiment, "run_all", note)
    experiment.reproduce(tmp_path, seeds=2, report=print)
    assert len({str(heading(config)) for config in asked}) == len(asked)
    many, few = ([one.method for one in asked if one.noise == noise] for noise in ("worse_label", "aggre_label"))
    assert sorted({*many, *few}) == sorted(LINES)
    assert len(many) == 2 * (len(LINES) - 1)
    assert sorted(few) == sorted(2 * ["ordinary", "mixed", "soseleto_usual", "soseleto_few"])


def test_tables_leave_out_held_out_runs(tmp_path: Path) -> None:
    def row(line: str, **entries: Any) -> Row:
        return {**heading(configuration(line)), "seconds": 1.0, **entries}

    detection = {"weight": {"auroc": 0.75, "average_precision": 0.5}}
    suspects = [{"precision": {"claimed": 91.0, "truth": None}, "recall": {"claimed": 50.0, "truth": 40.0}}]
    rows = [
        row("soseleto", accuracy=81.0, detection=detection),
        row("soseleto_probes", accuracy=82.0, suspects=suspects),
        row("cleanlab", accuracy=83.0, issues={"count": 3, "precision": 70.0, "recall": 20.0}),
        row("mixed", heldout_accuracy=99.0, detection=detection),
        {**row("ordinary", accuracy=98.0), "setting": {"noise": "aggre_label", "size": 96, "n_trusted": 1000}},
    ]
    made = {mark: make(rows) for mark, make in tables.TABLES.items()}
    assert made["accuracy"].splitlines()[3] == "| **SOSELETO** | 81.0 (1) | 1.0 (1) |"
    assert made["auroc"].splitlines() == ["|  | weight |", "| --- | ---: |", "| **SOSELETO** | 75.0 (1) |"]
    assert made["suspects"].splitlines()[2:] == [
        "| cleanlab, trained on what it keeps |  | 70.0 (1) | 20.0 (1) |",
        "| … with probes | 91.0 (1) |  | 40.0 (1) |",
    ]
    assert not any("99.0" in one for one in made.values())
    marks = "\n".join(f"<!-- {mark} -->\nold\n<!-- /{mark} -->" for mark in tables.TABLES)
    assert tables.page(marks, tmp_path / "none.json").count("Not run yet.") == len(tables.TABLES)
