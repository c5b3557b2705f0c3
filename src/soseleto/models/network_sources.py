"""Where pretrained image networks come from: timm and Hugging Face, each with its own configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from soseleto.errors import UsageError, did_you_mean, first_line, need

TIMM, HF = "timm:", "hf:"
RANDOM = "none"  # in place of a file of weights
SIZE, HALF = 224, (0.5, 0.5, 0.5)  # of a configuration without them


@dataclass(frozen=True)
class Source:
    """A network and what its configuration says about images: size, mean and deviation on a scale from 0 to 1."""

    network: nn.Module
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    architecture: Mapping[str, Any] | None = None  # of Hugging Face: its configuration

    def describe(self) -> dict[str, Any]:
        architecture = None if self.architecture is None else dict(self.architecture)
        return {"input_size": self.size, "mean": list(self.mean), "std": list(self.std), "architecture": architecture}


# --- timm ---------------------------------------------------------------------------------------------------------


def of_timm(name: str, weights: str | None, size: int | None) -> Source:
    """``timm:NAME`` with its own weights, those of a file, or random ones."""
    timm = need("timm", to=f"the model {name}")
    known = name.removeprefix(TIMM)
    if not timm.is_model(known.partition(".")[0]):
        raise UsageError(f"timm has no model {known!r}{did_you_mean(known, timm.list_models())}: give another name.")
    config = timm.get_pretrained_cfg(known)
    own = config.input_size[-1] if config is not None else SIZE
    fixed = {"img_size": size} if size is not None and getattr(config, "fixed_input_size", False) else {}
    try:
        network: nn.Module = timm.create_model(known, pretrained=weights is None, **fixed)
    except Exception as error:  # of the network, of the hub, or of the name's tag
        raise UsageError(
            f"{name} could not be loaded ({first_line(error)}): give --weights FILE.safetensors where there is no "
            "network, or --weights none for random ones."
        ) from error
    if weights not in (None, RANDOM):
        assert weights is not None
        _fill(network, weights)
    return Source(network, size or own, tuple(getattr(config, "mean", HALF)), tuple(getattr(config, "std", HALF)))


def _fill(network: nn.Module, file: str) -> None:
    """Load the weights of a file; the head may be of other classes."""
    from safetensors.torch import load_file

    if not Path(file).is_file():
        raise UsageError(f"there is no file {file}: give --weights a .safetensors file, or none for random weights.")
    try:
        state = load_file(file)
    except Exception as error:
        raise UsageError(f"{file} is no .safetensors file ({first_line(error)}): convert it.") from error
    if any(name.startswith("_blocks.") for name in state):
        state = _from_efficientnet_pytorch(state, network)
    head = head_of(network)
    wanted = {key: value.shape for key, value in network.state_dict().items() if not key.startswith(f"{head}.")}
    missing = [key for key, shape in wanted.items() if key not in state or state[key].shape != shape]
    if missing:
        raise UsageError(
            f"{file} does not fit the network, since {len(missing)} of {len(wanted)} tensors are missing or of another "
            f"shape, the first of them {missing[0]}: give the weights of this network."
        )
    network.load_state_dict({key: state[key] for key in wanted}, strict=False)


def _from_efficientnet_pytorch(state: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """The names of the package efficientnet_pytorch and those made like it, as timm has them."""
    places = [f"blocks.{s}.{b}" for s, stage in enumerate(network.blocks) for b in range(len(stage))]
    outside = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    expanded = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    expanded |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    plain = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    of_attention = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[0] != "_blocks":
            found[".".join([outside.get(parts[0], parts[0]), *parts[1:]])] = value
            continue
        at = int(parts[1])
        names = expanded if f"_blocks.{at}._expand_conv.weight" in state else plain
        if at < len(places):
            found[".".join([places[at], (names | of_attention).get(parts[2], parts[2]), *parts[3:]])] = value
    return found


# --- Hugging Face -------------------------------------------------------------------------------------------------


def of_hf(name: str, weights: str | None, size: int | None, architecture: Mapping[str, Any] | None = None) -> Source:
    """``hf:FOLDER_OR_ID`` with its weights, or the architecture alone."""
    transformers = need("transformers", to=f"the model {name}")
    if weights is not None:
        raise UsageError("--weights is for timm: models, and a Hugging Face folder has its own: leave it out.")
    make = transformers.AutoModelForImageClassification
    if architecture is not None:
        config = transformers.AutoConfig.for_model(**architecture)
        return _of_config(make.from_config(config), config, {}, size)
    place = _place(name)
    try:
        with _quiet(transformers):
            network = make.from_pretrained(place)
        processing = _processing(transformers, place)
    except Exception as error:  # of the folder, of the hub, or of a network for something else than images
        raise UsageError(
            f"{name} could not be loaded as an image classifier ({first_line(error)}): give a folder that "
            "save_pretrained wrote, or an id where there is network."
        ) from error
    return _of_config(network, network.config, processing, size)


def _place(name: str) -> str:
    """A folder, or an id such as OWNER/NAME."""
    place = Path(name.removeprefix(HF)).expanduser()
    is_path = place.is_absolute() or len(place.parts) > 2 or name.startswith(f"{HF}.")
    if is_path and not place.is_dir():
        raise UsageError(f"there is no folder {place}: write hf:FOLDER or hf:OWNER/NAME.")
    return str(place)


def _of_config(network: nn.Module, config: Any, processing: Mapping[str, Any], size: int | None) -> Source:
    asked = processing.get("size")
    if isinstance(asked, Mapping):
        asked = asked.get("shortest_edge") or asked.get("height")
    own = getattr(config, "image_size", None)  # of networks with positions, which run at no other
    chosen = own if isinstance(own, int) else size or asked or SIZE
    mean, std = (tuple(processing.get(name) or HALF) for name in ("image_mean", "image_std"))
    return Source(network, int(chosen), mean, std, json.loads(config.to_json_string(use_diff=True)))


def _processing(transformers: Any, place: str) -> dict[str, Any]:
    """``preprocessor_config.json``; empty where there is none."""
    with contextlib.suppress(OSError):
        found, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(place)
        return dict(found)
    return {}


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the report about a new head, and without a bar for each reading of the weights."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()


# --- heads --------------------------------------------------------------------------------------------------------


def head_of(network: nn.Module) -> str:
    """The name of the classifier: what timm says, else the last linear layer."""
    config = getattr(network, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, Mapping) else None
    if isinstance(named, str) and isinstance(_module(network, named), nn.Linear):
        return named
    found = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise UsageError(f"{type(network).__name__} has no linear layer to classify with: give another model.")
    return found[-1]


def fresh_head(network: nn.Module, head: str, classes: int | None) -> None:
    """Put a new linear layer for ``classes`` classes in the place of the head, or nothing at all."""
    old = _module(network, head)
    assert isinstance(old, nn.Linear)
    new = nn.Identity() if classes is None else nn.Linear(old.in_features, classes, bias=True)
    network.set_submodule(head, new)


def _module(network: nn.Module, name: str) -> nn.Module | None:
    return dict(network.named_modules()).get(name)
