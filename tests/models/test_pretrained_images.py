"""Pretrained image networks: their weights, size and normalisation, what is trained, and that they can be rebuilt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from real_models import import_timm
from soseleto.errors import DataError, UsageError
from soseleto.models.pretrained import PretrainedOptions, last_blocks, pretrained_images, rebuilt

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT as ``save_pretrained`` writes it, with the configuration of its preprocessing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)
    folder = tmp_path_factory.mktemp("vit")
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    written = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(written), "utf-8")
    return folder


def made(name: str, mode: str = "noisy", *, seed: int = 0, **options: Any) -> tuple[Any, dict[str, Any]]:
    if name.startswith("timm:"):
        import_timm()
    asked = PretrainedOptions(**options)
    return pretrained_images(name, mode, classes=4, shape=SHAPE, options=asked, seed=seed)


def trained(model: nn.Module) -> set[str]:
    return {name.removeprefix("network.") for name, p in model.named_parameters() if p.requires_grad}


def test_images_get_the_size_and_normalisation_of_the_configuration(vit: Path) -> None:
    model, described = made(f"hf:{vit}")
    transformers = pytest.importorskip("transformers")
    own = transformers.ViTForImageClassification.from_pretrained(vit).eval()
    images = torch.rand(2, 3, 32, 32)
    seen = F.interpolate(images, size=(16, 16), mode="bilinear", antialias=True)
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1), torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)
    features = own.vit((seen - mean) / std).last_hidden_state[:, 0]
    head = model.network.classifier
    torch.testing.assert_close(model.eval()(images), F.linear(features, head.weight, head.bias))
    assert (described["input_size"], described["mean"]) == (16, [0.1, 0.2, 0.3])
    grey = torch.rand(2, 1, 32, 32)
    assert torch.equal(model(grey), model(grey.repeat(1, 3, 1, 1)))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(images.bfloat16()).float(), model(images).float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("mode", ["noisy", "transfer"])
@pytest.mark.parametrize(
    "options", [{}, {"train": "last:1"}, {"train": "head", "batch_norm": "fixed"}, {"size": 24}], ids=lambda o: str(o)
)
@pytest.mark.parametrize("name", ["timm:test_resnet", "hf"])
def test_a_network_is_rebuilt_from_its_description(name: str, options: Any, mode: str, vit: Path) -> None:
    weights = {"weights": "none"} if name.startswith("timm:") else {}
    if mode == "transfer" and options.get("train") == "head":
        pytest.skip("a trunk without anything to train is refused")
    model, described = made(f"hf:{vit}" if name == "hf" else name, mode, **weights, **options)
    absent = "hf:not there" if name == "hf" else name
    again = rebuilt(absent, mode, classes=4, described=json.loads(json.dumps(described)))
    again.load_state_dict(model.state_dict())
    assert trained(again) == trained(model)
    images = torch.rand(2, *SHAPE)
    features = 4 if mode == "noisy" else again.eval()(images).shape[1]
    assert again.eval()(images).shape == (2, features)
    assert torch.equal(again(images), model.eval()(images))


def test_what_is_trained(vit: Path) -> None:
    everything = trained(made(f"hf:{vit}")[0])
    assert trained(made(f"hf:{vit}", train="head")[0]) == {"classifier.weight", "classifier.bias"}
    last = trained(made(f"hf:{vit}", train="last:1")[0])
    assert {name.partition("layers.")[2].partition(".")[0] for name in last if "layers." in name} == {"2"}
    assert {"classifier.weight", "vit.layernorm.weight"} < last < everything
    of_timm = trained(made("timm:test_resnet", weights="none", train="last:1")[0])
    assert {name.partition(".")[0] for name in of_timm} == {"layer4", "fc"}
    with pytest.raises(UsageError, match="has 3 blocks, not 4"):
        made(f"hf:{vit}", train="last:4")


def test_a_new_head_follows_from_the_seed(vit: Path) -> None:
    heads = []
    for seed in (0, 0, 1):
        torch.rand(1)  # the global random state has no part in it
        before = torch.get_rng_state()
        heads.append(made(f"hf:{vit}", seed=seed)[0].network.classifier.weight)
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_training_mode_is_on_and_batch_norm_is_as_asked(vit: Path) -> None:
    assert all(module.training for module in made(f"hf:{vit}")[0].modules())  # from_pretrained turns it off

    def flags(model: nn.Module) -> set[bool]:
        return {m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d)}

    fixed, _ = made("timm:test_resnet", weights="none", batch_norm="fixed")
    assert flags(fixed) == {False}
    assert fixed.training
    assert flags(made("timm:test_resnet", weights="none")[0]) == {True}


def test_weights_of_a_file(tmp_path: Path) -> None:
    timm = import_timm()
    torch.manual_seed(1)
    state = timm.create_model("test_resnet", num_classes=7).state_dict()
    save_file(state, tmp_path / "of.safetensors")
    model, described = made("timm:test_resnet", weights=str(tmp_path / "of.safetensors"))
    assert torch.equal(model.network.layer4[0].conv1.weight, state["layer4.0.conv1.weight"])
    assert model.network.fc.out_features == 4
    assert described["weights"] == "of.safetensors"
    save_file({**state, "conv1.0.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"1 of \d+ tensors .* the first of them conv1.0.weight"):
        made("timm:test_resnet", weights=str(tmp_path / "other.safetensors"))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("timm:test_resnt", {}, "timm has no model 'test_resnt' .did you mean"),
        ("timm:test_resnet", {"weights": "missing.safetensors"}, "there is no file missing.safetensors"),
        ("hf:/not/there", {}, "there is no folder '/not/there'"),
        ("hf:x", {"weights": "a.safetensors"}, "weights are for timm"),
        ("hf:x", {"train": "last"}, "write --train last:2"),
        ("hf:x", {"batch_norm": "no"}, "train or fixed"),
    ],
)
def test_mistakes_are_one_sentence(name: str, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(name, **options)


@pytest.mark.parametrize(("package", "name"), [("timm", "timm:resnet18"), ("transformers", "hf:x")])
def test_a_package_that_is_missing_is_named(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_timm()
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DataError, match=rf"needs {package}, which is not installed: type pip install 'soseleto\["):
        pretrained_images(name, "noisy", classes=2, shape=SHAPE, options=PretrainedOptions(), seed=0)


def test_a_network_without_network_access(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = import_timm()

    def offline(*_: Any, **__: Any) -> Tensor:
        raise OSError("no connection")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(UsageError, match=r"could not be loaded .no connection.: without a network give weights"):
        made("timm:test_resnet")


def stacked(blocks: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks)), nn.LayerNorm(3))


def test_the_last_blocks_and_what_follows() -> None:
    assert last_blocks(stacked(12), 2) == ("1.10.", "1.11.", "2.weight", "2.bias")
    assert last_blocks(stacked(2), 2) == ()  # they are all
    assert last_blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), 1) == ()
    network: Any = stacked(5)
    network[1][4].requires_grad_(False)  # one that is not trained does not count
    assert last_blocks(network, 2) == ("1.2.", "1.3.", "2.weight", "2.bias")
    network[1][:3].requires_grad_(False)
    assert last_blocks(network, 2) == ()  # one is left
