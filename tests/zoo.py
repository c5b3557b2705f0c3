"""The models that every engine is tested on, and which engines decline which of them."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import derived
import soseleto
from soseleto.engines import make_engine

B = 5  # examples in a batch
CLASSES = 3


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def per_token(model: nn.Module, batch: Any) -> Tensor:
    """A loss per sequence: the mean over its tokens."""
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[0], reduction="none").mean(1)


@dataclass(frozen=True)
class Problem:
    """One model with a batch; ``declines`` maps an engine to words its error must contain."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy
    declines: dict[str, str] = field(default_factory=dict)
    training: bool = True
    by_differences: bool = True  # whether its gradients are those of its losses: no padding row, nothing detached

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.make().double().train(self.training)
            inputs = self.inputs()
            inputs = inputs.double() if inputs.is_floating_point() else inputs
            labels = torch.randint(CLASSES, (len(inputs),))
        return model, (inputs, labels)


def direction_for(model: nn.Module) -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: torch.randn(p.shape, dtype=p.dtype, generator=seeded) for name, p in trainable}


def require_exact(model: nn.Module, batch: Any, loss: Any = cross_entropy, engine: Any = soseleto.alignment) -> None:
    """``auto``, or an engine that was made, against ``loop``."""
    direction = direction_for(model)
    right_losses, right = make_engine("loop")(model, loss, batch, direction)
    losses, found = engine(model, loss, batch, direction)
    torch.testing.assert_close(losses, right_losses, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-10)


def vectors(width: int = 7) -> Callable[[], Tensor]:
    return lambda: torch.randn(B, width)


def images(channels: int = 3, size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(B, channels, size, size)


def tokens(length: int = 6) -> Callable[[], Tensor]:
    return lambda: torch.randint(11, (B, length))


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def head(width: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(width, CLASSES)]


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], inplace: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.one = nn.Sequential(norm(8), nn.ReLU(inplace), nn.Conv2d(8, 8, 3, padding=1, bias=False))
        self.two = nn.Sequential(norm(8), nn.ReLU(inplace), nn.Conv2d(8, 8, 3, stride=2, padding=1))
        self.short = nn.Conv2d(8, 8, 1, stride=2)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.one(x.clone())
        x = self.short(x) + self.two(x.clone())
        return self.out(x.mean((2, 3)))


class Attention(nn.Module):
    """A transformer block written out, with plain or fused attention."""

    def __init__(self, fused: bool, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 6, 8))
        self.norm_in, self.norm_out = norm(8), norm(8)
        self.qkv, self.merge = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.rand(8))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.out = nn.Linear(8, CLASSES)
        self.fused = fused

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        plain = not self.fused
        mixed = ((q @ k.transpose(-1, -2)) / 2).softmax(-1) @ v if plain else F.scaled_dot_product_attention(q, k, v)
        return self.merge(mixed.transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        x = x + self.attend(self.norm_in(x)) * self.scale
        x = x + self.mlp(self.norm_out(x))
        return self.out(x.mean(1))


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)
        self.out = nn.Linear(8, CLASSES)
        self.batch_first = batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.out(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(11, 6), kind(6, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(tokens))[0][:, -1])


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


def used_twice() -> nn.Module:
    layer = nn.Linear(7, 7)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(7, CLASSES))


def mixing() -> nn.Module:
    """Examples act on each other through an operation that has no rule."""
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), Lambda(lambda h: h - h.mean(0)), nn.Linear(7, CLASSES))


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(7, 6)), nn.Tanh(), nn.Linear(6, CLASSES))


class Unused(nn.Module):
    """Holds parameters it ignores, and one whose output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored, self.dead = nn.Linear(7, CLASSES), nn.Linear(4, 4), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dead(x)
        return self.used(x)


class ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6, dtype=torch.complex128))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(torch.complex128) @ self.weight).abs())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.body = nn.Sequential(nn.Linear(7, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 7))
        self.out = nn.Linear(7, CLASSES)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


def frozen_trunk() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), *head(64))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def frozen_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), *head(144))
    model[1].weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


class BiasUsedAgain(nn.Module):
    """One parameter is the bias of a layer and is added elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(7, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x)) + self.layer.bias)


def convolutions_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(7, 6, 3, padding=2, padding_mode="circular"), nn.Tanh(), nn.ConvTranspose1d(6, 4, 3, stride=2),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.Tanh(), Lambda(lambda x: x[..., :8]), *head(32),
    )  # fmt: skip


def convolutions_3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding="same"), nn.Tanh(), nn.Conv3d(4, 2, 3, stride=2), *head(16))


MIXES = {"layerwise": "training mode"}
PROBLEMS = [
    Problem("linear", lambda: nn.Linear(7, CLASSES), vectors()),
    Problem("mlp", lambda: nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, CLASSES)), vectors()),
    Problem("linear_leading_dims", lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), *head(4 * 3 * 2)), lambda: torch.randn(B, 3, 2, 6)),
    Problem("strided_convnet", lambda: nn.Sequential(nn.Conv2d(3, 6, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), *head(24)), images()),
    Problem("dilated_convnet", lambda: nn.Sequential(nn.Conv2d(3, 6, 3, dilation=2, padding=1, padding_mode="reflect"), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, padding="same"), *head(144)), images()),
    Problem("grouped_convnet", lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, padding=(1, 0)), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.AvgPool2d(2), *head(48)), images(4)),
    Problem("conv1d", convolutions_1d, lambda: torch.randn(B, 7, 6)),
    Problem("conv3d", convolutions_3d, lambda: torch.randn(B, 2, 5, 5, 5)),
    Problem("transposed_conv2d", lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), nn.AvgPool2d(4), *head(64)), images()),
    Problem("residual_groupnorm", lambda: Residual(lambda n: nn.GroupNorm(2, n)), images()),
    Problem("residual_instancenorm", lambda: Residual(lambda n: nn.InstanceNorm2d(n, affine=True)), images()),
    Problem("residual_batchnorm_eval", lambda: Residual(nn.BatchNorm2d), images(), training=False),
    Problem("residual_batchnorm_train", lambda: Residual(nn.BatchNorm2d), images(), declines=MIXES),
    Problem("batchnorm_mlp_eval", lambda: nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)), vectors(), training=False),
    Problem("attention_plain", lambda: Attention(fused=False), tokens(), by_differences=False),
    Problem("attention_fused", lambda: Attention(fused=True), tokens(), by_differences=False),
    Problem("attention_rmsnorm", lambda: Attention(fused=True, norm=nn.RMSNorm), tokens(), by_differences=False),
    Problem("transformer_encoder_layer", Encoder, tokens()),
    Problem("transformer_sequence_first", lambda: Encoder(batch_first=False), tokens(), declines={"layerwise": "rows where"}),
    Problem("transformer_sequence_first_square", lambda: Encoder(batch_first=False), tokens(B), declines={"layerwise": "not exact"}),
    Problem("lstm", lambda: Recurrent(nn.LSTM), tokens(), declines={"layerwise": "no rule"}),
    Problem("gru", lambda: Recurrent(nn.GRU), tokens(), declines={"layerwise": "no rule"}),
    Problem("tied_language_model", TiedLanguageModel, tokens(), per_token),
    Problem("used_twice", used_twice, vectors()),
    Problem("dropout", lambda: nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.ReLU(), nn.Linear(9, CLASSES)), vectors()),
    Problem("unused_parameters", Unused, vectors()),
    Problem("frozen_parameters", frozen_trunk, images()),
    Problem("frozen_norm", frozen_norm, images()),
    Problem("bias_used_again", BiasUsedAgain, vectors()),
    Problem("weight_norm", weight_norm, vectors(), declines={"forward": "forward AD"}),
    Problem("spectral_norm", derived.spectral_norm, images(), training=False),
    Problem("spectral_norm_train", derived.spectral_norm, images(), by_differences=False),
    Problem("data_in_a_constant", derived.Padded, vectors()),
    Problem("data_in_a_derived_tensor", derived.WrittenTo, vectors(), declines={"layerwise": r"'table'.* writes data"}),
    Problem("sums_in_place", lambda: derived.InPlace("sums"), vectors()),
    Problem("rows_in_place", lambda: derived.InPlace("rows_of_a_constant"), vectors()),
    Problem("mask_in_place", lambda: derived.InPlace("mask"), vectors(), declines={"layerwise": "no rule"}),
    Problem("view_in_place", lambda: derived.InPlace("view"), vectors(), declines={"forward": "its losses differ"}),
    Problem("out_of_the_graph", lambda: derived.InPlace("constants"), vectors(), by_differences=False),
    Problem("several_results", lambda: derived.InPlace("several_results"), vectors()),
    Problem("derived_tokens", derived.Tokens, tokens(9), declines={"layerwise": "no rule"}),
    Problem("derived_biases_plain", lambda: derived.Biases(fused=False), tokens()),
    Problem("derived_biases_dropout", lambda: derived.Biases(fused=True), tokens(), declines={"layerwise": "not exact"}),
    Problem("derived_products", derived.Products, vectors()),
    Problem("derived_gates", derived.Gates, vectors(), declines={"layerwise": "no rule"}),
    Problem("derived_shared", derived.Shared, vectors()),
    Problem("derived_queries_dropout", derived.Queries, tokens()),
    Problem("complex", ComplexLayer, vectors(), declines={"layerwise": "it is complex"}),
    Problem("mixing", mixing, vectors(), declines={"layerwise": "not exact"}),
    Problem("checkpointed", lambda: Checkpointed(reentrant=False), vectors()),
    Problem("checkpointed_reentrant", lambda: Checkpointed(reentrant=True), vectors(), declines=dict.fromkeys(("loop", "double_backward", "layerwise", "forward"), "use_reentrant=False")),
]  # fmt: skip
BY_NAME = {problem.name: problem for problem in PROBLEMS}
