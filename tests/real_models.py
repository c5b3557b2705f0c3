"""Real architectures from transformers, peft and timm, tiny and with random weights: what ``auto`` must take for each.

``Size`` holds the few numbers that all of them share: one for exactness, and a larger one for memory, at which the
activations are the largest part of a step, as they are in real runs.
"""

# ruff: noqa: E501
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data.batches import Batch

CLASSES = 3
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    source: int
    target: int
    tokens: int
    pixels: int
    width: int
    vocabulary: int = 64
    layers: int = 2


TINY = Size(source=4, target=2, tokens=8, pixels=32, width=32)
LARGER = Size(source=16, target=4, tokens=64, pixels=64, width=32, layers=6)


class RealLosses:
    """One loss for each example of a batch of named inputs; the same for both sides."""

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        self.source = self.target = loss

    def can_join(self, source: Batch, target: Batch) -> bool:
        return True

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        return self.source(model, joined(source, target))


def joined(source: Batch, target: Batch) -> Batch:
    inputs: Any = {name: torch.cat([x, target.inputs[name]]) for name, x in source.inputs.items()}  # type: ignore[call-overload]
    return Batch(torch.cat([source.index, target.index]), inputs, torch.cat([source.labels, target.labels]))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch.inputs)
    return F.cross_entropy(getattr(out, "logits", out), batch.labels, reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens of each sequence."""
    ids = batch.inputs["input_ids"]  # type: ignore[call-overload]
    logits = model(**batch.inputs).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def translate(model: nn.Module, batch: Batch) -> Tensor:
    ids = batch.inputs["decoder_input_ids"]  # type: ignore[call-overload]
    return F.cross_entropy(model(**batch.inputs).logits.transpose(1, 2), ids, reduction="none").mean(1)


def pairs(model: nn.Module, batch: Batch) -> Tensor:
    """The distance between an image's embedding and that of its own text."""
    out = model(**batch.inputs)
    return 1 - (out.image_embeds * out.text_embeds).sum(-1)


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    """CLIP's own loss, in which every text of the batch is a class."""
    logits = model(**batch.inputs).logits_per_image
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def tokens(n: int, size: Size) -> Inputs:
    """Token ids with padding at the end of every second example."""
    mask = torch.ones(n, size.tokens, dtype=torch.long)
    mask[::2, -2:] = 0
    return {"input_ids": torch.randint(3, size.vocabulary, (n, size.tokens)), "attention_mask": mask}


def unpadded(n: int, size: Size) -> Inputs:
    return {"input_ids": torch.randint(3, size.vocabulary, (n, size.tokens))}


def to_decoder(n: int, size: Size) -> Inputs:
    return {**tokens(n, size), "decoder_input_ids": torch.randint(3, size.vocabulary, (n, size.tokens))}


def pixels(n: int, size: Size) -> Inputs:
    return {"pixel_values": torch.randn(n, 3, size.pixels, size.pixels)}


def image_and_text(n: int, size: Size) -> Inputs:
    return {**tokens(n, size), **pixels(n, size)}


def image(n: int, size: Size) -> Inputs:
    return {"x": torch.randn(n, 3, size.pixels, size.pixels)}


@dataclass(frozen=True)
class RealModel:
    """A model with its inputs and loss, and the engine that it must get."""

    name: str
    make: Callable[[Size], nn.Module]
    inputs: Callable[[int, Size], Inputs]
    loss: Callable[[nn.Module, Batch], Tensor]
    engine: str = "layerwise"
    single_inside: bool = False  # computes a part in float32 also if the model is in float64
    only_single: bool = False  # does not run in float64

    def build(self, size: Size = TINY, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch, Batch]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make(size).to(dtype).train()
            source, target = (self._batch(n, size, dtype) for n in (size.source, size.target))
        return model, source, target

    def _batch(self, n: int, size: Size, dtype: torch.dtype) -> Batch:
        inputs: Any = {k: x.to(dtype) if x.is_floating_point() else x for k, x in self.inputs(n, size).items()}
        return Batch(torch.arange(n), inputs, torch.randint(CLASSES, (n,)))


def at(settings: dict[str, Any], size: Size) -> dict[str, Any]:
    return {key: value(size) if callable(value) else value for key, value in settings.items()}


def of_transformers(kind: str, experts: str = "eager", **settings: Any) -> Callable[[Size], nn.Module]:
    """A model class of transformers by its name, from its own configuration without dropout."""

    def make(size: Size) -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        made = getattr(transformers, kind)
        config = made.config_class(num_labels=CLASSES, **at(settings, size))
        config._experts_implementation = experts
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        return made(config)

    return make


def by_peft(make: Callable[[Size], nn.Module], modules: list[str], **settings: Any) -> Callable[[Size], nn.Module]:
    """Adapters on a model; their second factor starts at zero in peft, at random here."""

    def wrapped(size: Size) -> nn.Module:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        config = peft.LoraConfig(r=4, target_modules=modules, lora_dropout=0.0, **settings)
        model = peft.get_peft_model(make(size), config)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        return model

    return wrapped


def of_timm(kind: str, **settings: Any) -> Callable[[Size], nn.Module]:
    def make(size: Size) -> nn.Module:
        return import_timm().create_model(kind, num_classes=CLASSES, **at(settings, size))

    return make


def import_timm() -> Any:
    """timm, with empty modules in place of torchvision, which only its data loading needs."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    absent = importlib.util.find_spec("torchvision") is None
    finder = _EmptyTorchvision()
    if absent:
        sys.meta_path.append(finder)
    try:
        return importlib.import_module("timm")
    finally:
        if absent:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]


class _EmptyTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        return name


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


def width(times: int = 1) -> Callable[[Size], int]:
    return lambda size: times * size.width


def length(size: Size) -> int:
    return size.tokens + 4


def layers(size: Size) -> int:
    return size.layers


VOCABULARY = {"vocab_size": lambda size: size.vocabulary}
BODY = {"hidden_size": width(), "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": width(2)}
ENCODER = {**VOCABULARY, **BODY, "max_position_embeddings": length}
DECODER = {**ENCODER, "num_key_value_heads": 1, "pad_token_id": 0}
PATCHES = {**BODY, "image_size": lambda size: size.pixels, "patch_size": 8}
BERT = of_transformers("BertForSequenceClassification", **ENCODER)
GPT2 = of_transformers("GPT2LMHeadModel", **VOCABULARY, n_embd=width(), n_layer=layers, n_head=2, n_positions=length)
LLAMA = of_transformers("LlamaForCausalLM", **DECODER)
CLIP = of_transformers(
    "CLIPModel",
    text_config=partial(at, {**ENCODER, "eos_token_id": 2, "attention_dropout": 0.0}),
    vision_config=partial(at, {**PATCHES, "attention_dropout": 0.0}),
    projection_dim=16,
)

MODELS = [
    RealModel("bert", BERT, tokens, classify),
    RealModel("distilbert", of_transformers("DistilBertForSequenceClassification", **VOCABULARY, dim=width(), n_layers=layers, n_heads=2, hidden_dim=width(2), max_position_embeddings=length), tokens, classify),
    RealModel("deberta_v2", of_transformers("DebertaV2ForSequenceClassification", **ENCODER, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]), tokens, classify),
    RealModel("modernbert", of_transformers("ModernBertForSequenceClassification", **ENCODER, pad_token_id=0, local_attention=4, global_attn_every_n_layers=layers), tokens, classify, single_inside=True),
    RealModel("vit", of_transformers("ViTForImageClassification", **PATCHES), pixels, classify),
    RealModel("dinov2", of_transformers("Dinov2ForImageClassification", **PATCHES, mlp_ratio=2), pixels, classify),
    RealModel("swin", of_transformers("SwinForImageClassification", image_size=lambda size: size.pixels, patch_size=4, embed_dim=16, depths=lambda size: [size.layers] * 2, num_heads=[2, 4], window_size=4), pixels, classify),
    RealModel("convnext", of_transformers("ConvNextForImageClassification", hidden_sizes=[16, 32], depths=lambda size: [size.layers // 2] * 2, num_stages=2), pixels, classify),
    RealModel("clip", CLIP, image_and_text, pairs),
    RealModel("clip_contrastive", CLIP, image_and_text, contrast, engine="forward"),
    RealModel("gpt2", GPT2, tokens, next_token),
    RealModel("opt", of_transformers("OPTForCausalLM", **VOCABULARY, hidden_size=width(), word_embed_proj_dim=width(), num_hidden_layers=layers, num_attention_heads=2, ffn_dim=width(2), max_position_embeddings=length), tokens, next_token),
    RealModel("llama", LLAMA, tokens, next_token, single_inside=True),
    RealModel("qwen3", of_transformers("Qwen3ForCausalLM", **DECODER, head_dim=8), tokens, next_token, single_inside=True),
    RealModel("gemma", of_transformers("GemmaForCausalLM", **DECODER, head_dim=8), tokens, next_token, single_inside=True),
    RealModel("mixtral", of_transformers("MixtralForCausalLM", **DECODER, num_local_experts=3), tokens, next_token, single_inside=True, engine="forward"),
    RealModel("mixtral_grouped", of_transformers("MixtralForCausalLM", "grouped_mm", **DECODER, num_local_experts=3), tokens, next_token, only_single=True, engine="double_backward"),
    RealModel("t5", of_transformers("T5ForConditionalGeneration", **VOCABULARY, d_model=width(), d_kv=8, d_ff=width(2), num_layers=layers, num_heads=2, decoder_start_token_id=0), to_decoder, translate, single_inside=True),
    RealModel("mamba", of_transformers("MambaForCausalLM", **VOCABULARY, hidden_size=width(), num_hidden_layers=layers, state_size=4, time_step_rank=4), unpadded, next_token, single_inside=True),
    RealModel("lora_bert", by_peft(BERT, ["query", "value"], modules_to_save=["classifier"]), tokens, classify),
    RealModel("lora_gpt2", by_peft(GPT2, ["c_attn"], fan_in_fan_out=True), tokens, next_token),
    RealModel("lora_llama", by_peft(LLAMA, ["q_proj", "v_proj", "down_proj"]), tokens, next_token, single_inside=True),
    RealModel("dora_llama", by_peft(LLAMA, ["q_proj", "v_proj"], use_dora=True), tokens, next_token, single_inside=True),
]  # fmt: skip
TIMM = [
    RealModel("timm_resnet18", of_timm("resnet18", channels=(8, 8, 16, 16)), image, classify, engine="forward"),
    RealModel("timm_resnet50", of_timm("resnet50", channels=(4, 4, 8, 8)), image, classify, engine="forward"),
    RealModel("timm_efficientnet", of_timm("test_efficientnet"), image, classify, engine="forward"),
    RealModel("timm_convnext", of_timm("convnext_atto", dims=(8, 8, 16, 16), depths=lambda size: (1, 1, size.layers, 1)), image, classify),
    RealModel("timm_vit", of_timm("vit_tiny_patch16_224", img_size=lambda size: size.pixels, patch_size=8, embed_dim=32, depth=layers, num_heads=2), image, classify),
]  # fmt: skip
