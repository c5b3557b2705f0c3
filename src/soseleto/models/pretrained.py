"""Pretrained networks: text models and image networks by ``hf:FOLDER_OR_ID``, and image networks by ``timm:NAME``.

They are rebuilt from the description that a run folder keeps, without the original folder or download, and without
running its code. A text model is an encoder of transformers, mean pooling and a linear classifier:

    opened = open_text_model("hf:minilm")                     # architecture and tokenizer, no weights
    model = make_text_model("hf:minilm", "noisy", classes=4)  # with its weights, ready to be fine-tuned

An image network gets images in the size and normalisation of its own configuration.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.errors import UsageError, counted, did_you_mean, first_line, need

TIMM, HF = "timm:", "hf:"
LAST = "last:"
RANDOM = "none"  # in place of a file of weights
SIZE, HALF = 224, (0.5, 0.5, 0.5)  # of a configuration without them
BATCH_NORM = ("train", "fixed")
CLASSIFIER = "classifier.safetensors"  # of an exported folder
TRUSTS_NOTHING = {"trust_remote_code": False}
WEIGHTS = {**TRUSTS_NOTHING, "use_safetensors": True}
_UNKNOWN = 1 << 20  # tokens; tokenizers without a limit report 10^30
_SPECIAL = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token", "bos_token", "eos_token")


def is_hugging_face(name: str) -> bool:
    """Whether ``name`` is ``hf:FOLDER_OR_ID``."""
    return name.startswith(HF)


def is_pretrained(name: str) -> bool:
    """Whether ``name`` is ``timm:NAME`` or ``hf:FOLDER_OR_ID``."""
    return name.startswith((TIMM, HF))


def is_for_images(name: str) -> bool:
    """Whether ``hf:FOLDER_OR_ID`` is a model that reads images."""
    with opening(name) as (transformers, place):
        return hasattr(transformers.AutoConfig.from_pretrained(place, **TRUSTS_NOTHING), "num_channels")


class TextEncoder(nn.Module):
    """A language model's last hidden states, averaged over the tokens of each text: (B, features)."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        if getattr(language_model, "pooler", None) is not None:
            language_model.pooler = None  # BERT's reads the first token only
        self.language_model = language_model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.language_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        pooled: Tensor = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return pooled


class TextClassifier(nn.Module):
    """``TextEncoder`` and a linear classifier."""

    def __init__(self, encoder: TextEncoder, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.encoder(input_ids, attention_mask))
        return outputs


@dataclass(frozen=True)
class PretrainedText:
    """Architecture and tokenizer of a pretrained text model, without its weights; a run folder keeps its ``vars``.

    config: the model's ``config.json``
    tokenizer: the tokenizer's ``tokenizer.json``
    special_tokens: such as ``{"pad_token": "[PAD]"}``
    pad: the id of the padding token
    longest: the number of tokens that the model can read
    """

    config: Mapping[str, Any]
    tokenizer: str
    special_tokens: Mapping[str, str]
    pad: int
    longest: int

    def build(self, mode: str, *, classes: int) -> nn.Module:
        """The model with random weights: a classifier, in transfer mode only its encoder."""
        transformers = need("transformers", to="a pretrained model")
        with _quiet(transformers):
            config = transformers.AutoConfig.for_model(**self.config)
            language_model = transformers.AutoModel.from_config(config, dtype=torch.float32)
        return _with_classifier(language_model, mode, classes)

    def save(self, language_model: Any, classifier: nn.Linear, folder: Path, classes: Sequence[str]) -> None:
        """Write a trained model as a folder that ``AutoModel`` and ``AutoTokenizer.from_pretrained`` read.

        ``classifier.safetensors`` has the linear layer behind the mean of the last hidden states; the names of its
        outputs are ``id2label`` in ``config.json``.
        """
        transformers = need("transformers", to="writing a pretrained model")
        tokenizers = need("tokenizers", to="writing a tokenizer")
        language_model.config.id2label = dict(enumerate(classes))
        language_model.config.label2id = {name: at for at, name in enumerate(classes)}
        with _quiet(transformers):
            language_model.save_pretrained(folder)
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizers.Tokenizer.from_str(self.tokenizer),
                model_max_length=self.longest,
                **self.special_tokens,
            ).save_pretrained(folder)
        head = {name: value.detach().cpu().contiguous() for name, value in classifier.state_dict().items()}
        need("safetensors.torch", to="saving a model").save_file(head, folder / CLASSIFIER)


def open_text_model(name: str) -> PretrainedText:
    """Architecture and tokenizer of ``hf:FOLDER_OR_ID``."""
    with opening(name) as (transformers, place):
        config = transformers.AutoConfig.from_pretrained(place, **TRUSTS_NOTHING)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **TRUSTS_NOTHING)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{name} is an encoder with a decoder: choose an encoder such as BERT or MiniLM.")
    if getattr(config, "hidden_size", None) is None or not getattr(tokenizer, "is_fast", False):
        raise UsageError(f"{name} ({config.model_type}) is not a text model with a fast tokenizer: choose another.")
    limits = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    kept = {key: value for key, value in config.to_dict().items() if key not in ("auto_map", "_name_or_path")}
    special = {key: getattr(tokenizer, key, None) for key in _SPECIAL}
    return PretrainedText(
        config=kept,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        special_tokens={key: str(token) for key, token in special.items() if token is not None},
        pad=tokenizer.pad_token_id or 0,
        longest=int(min([limit for limit in limits if limit is not None and limit < _UNKNOWN], default=512)),
    )


def make_text_model(name: str, mode: str, *, classes: int) -> nn.Module:
    """The pretrained model with a new linear classifier; in transfer mode without one."""
    with opening(name) as (transformers, place):
        language_model = transformers.AutoModel.from_pretrained(place, dtype=torch.float32, **WEIGHTS)
    return _with_classifier(language_model, mode, classes)


def _with_classifier(language_model: Any, mode: str, classes: int) -> nn.Module:
    encoder = TextEncoder(language_model)
    return TextClassifier(encoder, int(language_model.config.hidden_size), classes) if mode == "noisy" else encoder


@contextmanager
def opening(name: str) -> Iterator[tuple[Any, str]]:
    """transformers, and the folder or hub id of ``name``; turns an error of transformers into one sentence."""
    transformers, place = need("transformers", to="a pretrained model"), os.path.expanduser(name.removeprefix(HF))
    is_folder = Path(place).is_dir()
    if is_folder and not (Path(place) / "config.json").is_file():
        raise UsageError(f"{place} is not a folder of a pretrained model, since it has no config.json: name another.")
    if not is_folder and (not place or place.startswith(("/", ".", "~")) or place.count("/") > 1):
        raise UsageError(f"there is no folder {place!r}: write --model hf:FOLDER, or hf:OWNER/NAME of the hub.")
    if is_folder and any(Path(place).glob("*.bin")) and not any(Path(place).glob("*.safetensors")):
        raise UsageError(
            f"the weights in {place} are a pickle (.bin), which can run code and is not loaded: save the model again "
            "with model.save_pretrained(FOLDER), which writes model.safetensors."
        )
    try:
        with _quiet(transformers):
            yield transformers, place
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{name} needs code of its own, which is not run: choose a model of transformers."
            ) from error
        if is_folder:
            raise UsageError(f"{name} cannot be read ({first_line(error)}): give another folder.") from error
        raise UsageError(
            f"{name} is no folder here and could not be loaded from the Hugging Face hub ({first_line(error)}): check "
            "the name and the network, or give a folder."
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and warnings of transformers, and the retries of its downloads."""
    own, hub = transformers.utils.logging, logging.getLogger("huggingface_hub")
    level, bars, of_hub = own.get_verbosity(), own.is_progress_bar_enabled(), hub.level
    own.set_verbosity_error()
    own.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        own.set_verbosity(level)
        hub.setLevel(of_hub)
        if bars:
            own.enable_progress_bar()


# Image networks, with what is trained of them


@dataclass(frozen=True, kw_only=True)
class PretrainedOptions:
    """What is asked of a pretrained network.

    weights: a .safetensors file in place of the network's own weights, or ``"none"`` for random ones (timm)
    train: ``"all"``, ``"head"``, or ``"last:N"``, the last N blocks with what follows them
    batch_norm: ``"fixed"`` keeps the statistics of BatchNorm as they are; ``"train"`` takes each batch's
    size: pixels a side at which the network runs; None takes the network's own
    """

    weights: str | None = None
    train: str = "all"
    batch_norm: str = "train"
    size: int | None = None

    def __post_init__(self) -> None:
        blocks = self.train.removeprefix(LAST)
        is_last = self.train.startswith(LAST) and blocks.isdecimal() and int(blocks) > 0
        if self.train not in ("all", "head") and not is_last:
            raise UsageError(
                f"train must be all, head or last:N with N at least 1, got {self.train!r}: write --train last:2."
            )
        if self.batch_norm not in BATCH_NORM:
            raise UsageError(f"batch-norm must be train or fixed, got {self.batch_norm!r}.")


@dataclass(frozen=True)
class Source:
    """A network and what its configuration says about images: size, mean and deviation on a scale from 0 to 1."""

    network: nn.Module
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    architecture: Mapping[str, Any] | None = None  # of Hugging Face: its configuration


class ImageNetwork(nn.Module):
    """A network behind the preprocessing of its own configuration; takes images (B, C, H, W) with values from 0 to 1.

    Grey images are repeated for its three channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, source: Source) -> None:
        super().__init__()
        self.network, self.size = network, source.size
        self.register_buffer("mean", torch.tensor(source.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(source.std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, self.mean.shape[1], -1, -1)
        if images.shape[2:] != (self.size, self.size):
            # In float32 or better: PyTorch does not resize bfloat16 with anti-aliasing on every device.
            wide = images.float() if images.dtype in (torch.bfloat16, torch.float16) else images
            resized = F.interpolate(wide, size=(self.size, self.size), mode="bilinear", antialias=True)
            images = resized.to(images.dtype)
        outputs = self.network((images - self.mean) / self.std)
        logits: Tensor = getattr(outputs, "logits", outputs)  # a Hugging Face ModelOutput has them by name
        return logits


def pretrained_images(
    name: str, mode: str, *, classes: int, shape: tuple[int, ...], options: PretrainedOptions, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """A network with its weights (in transfer mode the trunk), and its description for ``rebuilt``.

    A new head is initialised from the seed.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UsageError(f"model {name!r} takes images with 1 or 3 channels, got inputs of shape {shape}: give others.")
    if mode == "transfer" and options.train == "head":
        raise UsageError("in transfer mode the heads are new and --train head leaves the trunk as it is: leave it out.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        source = (_of_timm if name.startswith(TIMM) else _of_hf)(name, options.weights, options.size)
        own = {"input_size": source.size, "mean": [*source.mean], "std": [*source.std]}
        description = {**asdict(options), **own, "architecture": source.architecture}
        if options.weights is not None:
            description["weights"] = Path(options.weights).name
        return _with_head(source, mode, classes, options), description


def rebuilt(name: str, mode: str, *, classes: int, described: Mapping[str, Any]) -> nn.Module:
    """The architecture that ``described`` says, with random weights."""
    options = PretrainedOptions(**{field: described[field] for field in ("train", "batch_norm")})
    size = described["input_size"]
    if name.startswith(TIMM):
        source = _of_timm(name, RANDOM, size)
    else:
        transformers = need("transformers", to=f"the model {name}")
        config = transformers.AutoConfig.for_model(**described["architecture"])
        source = _of_config(transformers.AutoModelForImageClassification.from_config(config), {}, size)
    source = replace(source, size=size, mean=tuple(described["mean"]), std=tuple(described["std"]))
    return _with_head(source, mode, classes, options)


# Where image networks come from


def _of_timm(name: str, weights: str | None, size: int | None) -> Source:
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
            f"{name} could not be loaded ({first_line(error)}): without a network give weights = "
            "'FILE.safetensors' in [pretrained], or 'none' for random ones."
        ) from error
    if weights is not None and weights != RANDOM:
        _load_weights(network, weights)
    return Source(network, size or own, tuple(getattr(config, "mean", HALF)), tuple(getattr(config, "std", HALF)))


def _load_weights(network: nn.Module, file: str) -> None:
    """Load the weights of a file; the head may be of other classes."""
    if not Path(file).is_file():
        raise UsageError(f"there is no file {file}: give weights a .safetensors file, or none for random ones.")
    try:
        state = need("safetensors.torch", to="reading weights").load_file(file)
    except Exception as error:
        raise UsageError(f"{file} is no .safetensors file ({first_line(error)}): convert it.") from error
    head = _head_of(network)
    wanted = {key: value.shape for key, value in network.state_dict().items() if not key.startswith(f"{head}.")}
    missing = [key for key, shape in wanted.items() if key not in state or state[key].shape != shape]
    if missing:
        raise UsageError(
            f"{file} does not fit the network, since {len(missing)} of {len(wanted)} tensors are missing or of another "
            f"shape, the first of them {missing[0]}: give the weights of this network."
        )
    network.load_state_dict({key: state[key] for key in wanted}, strict=False)


def _of_hf(name: str, weights: str | None, size: int | None) -> Source:
    """``hf:FOLDER_OR_ID`` with its weights."""
    if weights is not None:
        raise UsageError("weights are for timm: models, and a Hugging Face folder has its own: leave it out.")
    with opening(name) as (transformers, place):
        network = transformers.AutoModelForImageClassification.from_pretrained(place, **WEIGHTS)
        processing: dict[str, Any] = {}
        with suppress(OSError):  # no preprocessor_config.json
            processing, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(place)
    return _of_config(network, processing, size)


def _of_config(network: Any, processing: Mapping[str, Any], size: int | None) -> Source:
    asked = processing.get("size")
    if isinstance(asked, Mapping):
        asked = asked.get("shortest_edge") or asked.get("height")
    own = getattr(network.config, "image_size", None)  # of networks with positions, which run at no other
    chosen = own if isinstance(own, int) else size or asked or SIZE
    mean, std = (tuple(processing.get(name) or HALF) for name in ("image_mean", "image_std"))
    return Source(network, int(chosen), mean, std, json.loads(network.config.to_json_string(use_diff=True)))


# What is trained of them


def _with_head(source: Source, mode: str, classes: int, options: PretrainedOptions) -> nn.Module:
    """The network with a new head, or none in transfer mode; parameters that are not trained get no gradient."""
    network = source.network.train()
    head = _head_of(network)
    old = network.get_submodule(head)
    if options.train != "all":
        count = int(options.train.removeprefix(LAST)) if options.train.startswith(LAST) else 0
        kept = _in_last_blocks(network, count) if count else set()
        for name, p in network.named_parameters():
            p.requires_grad_(name in kept)
    assert isinstance(old, nn.Linear)
    network.set_submodule(head, nn.Linear(old.in_features, classes) if mode == "noisy" else nn.Identity())
    if options.batch_norm == "fixed":
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    return ImageNetwork(network, source)


def _head_of(network: nn.Module) -> str:
    """The name of the classifier: what timm says, else the last linear layer."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UsageError(f"{type(network).__name__} has no linear layer to classify with: give another model.")
    config = getattr(network, "pretrained_cfg", None)
    by_timm = config.get("classifier") if isinstance(config, Mapping) else None
    return by_timm if isinstance(by_timm, str) and by_timm in linear else linear[-1]


def last_blocks(network: nn.Module, wanted: int) -> tuple[str, ...]:
    """Prefixes of the parameters in the last blocks, and of those after them; empty if no more blocks are trained.

    Example:
        >>> blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        >>> last_blocks(nn.Sequential(blocks, nn.Linear(3, 2)), 2)
        ('0.2.', '0.3.', '1.weight', '1.bias')
    """
    name, blocks = _longest_list(network)
    trained = [at for at, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters())]
    if len(trained) <= wanted:
        return ()
    return (*(f"{name}.{at}." for at in trained[-wanted:]), *_stem_blocks_end(network)[-1])


def _in_last_blocks(network: Any, wanted: int) -> set[str]:
    """The parameters of the last blocks, and of all that comes after them."""
    if hasattr(network, "group_matcher"):  # timm says itself what a block is
        helpers = need("timm.models", to="training the last blocks")
        by_number: dict[int, list[str]] = helpers.group_parameters(network, network.group_matcher(coarse=False))
        groups = [by_number[number] for number in sorted(by_number)]
    else:
        groups = _stem_blocks_end(network)
    blocks = len(groups) - 2  # beside the stem and the end
    if wanted > blocks:
        raise UsageError(f"the network has {counted(blocks, 'block')}, not {wanted}: write --train all, or fewer.")
    return {name for group in groups[-1 - wanted :] for name in group}


def _stem_blocks_end(network: nn.Module) -> list[list[str]]:
    """The names of parameters in stem, blocks and end, by the ModuleList with the most parameters."""
    name, blocks = _longest_list(network)
    if not blocks:
        raise UsageError(f"{type(network).__name__} has no list of blocks: write --train all or --train head.")
    names = [key for key, _ in network.named_parameters()]  # in the order of the layers
    inside = [[key for key in names if key.startswith(f"{name}.{at}.")] for at in range(len(blocks))]
    begin, end = names.index(inside[0][0]), names.index(inside[-1][-1])
    return [names[:begin], *inside, names[end + 1 :]]


def _longest_list(network: nn.Module) -> tuple[str, nn.ModuleList]:
    """The ModuleList with the most parameters, by name; an empty one where there is none."""
    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    return max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()), default=("", nn.ModuleList()))
