"""Pretrained text models by ``hf:FOLDER_OR_ID``: an encoder of transformers, mean pooling and a linear classifier.

    opened = open_text_model("hf:minilm")                     # architecture and tokenizer, no weights
    model = make_text_model("hf:minilm", "noisy", classes=4)  # with its weights, ready to be fine-tuned

``PretrainedText`` is what a run folder keeps: with it and the trained weights the model is built again, without the
original folder or download, and without running its code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.errors import UsageError, first_line, need

PREFIX = "hf:"
CLASSIFIER = "classifier.safetensors"  # of an exported folder
TRUSTS_NOTHING = {"trust_remote_code": False}
WEIGHTS = {**TRUSTS_NOTHING, "use_safetensors": True}
_UNKNOWN = 1 << 20  # tokens; tokenizers without a limit report 10^30
_SPECIAL = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token", "bos_token", "eos_token")


def is_pretrained(name: str) -> bool:
    return name.startswith(PREFIX)


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
    """Architecture and tokenizer of a pretrained text model, without its weights.

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

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values; ``PretrainedText(**fields)`` reads them."""
        return {**vars(self), "config": dict(self.config), "special_tokens": dict(self.special_tokens)}

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
    transformers, place = need("transformers", to="a pretrained model"), os.path.expanduser(name.removeprefix(PREFIX))
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
