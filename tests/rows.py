"""Models whose tensors do not have one row per example, each isolating one case, and the engine that takes them."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo import CLASSES, B, Problem, tokens

WORDS = 11


def lengths(tokens: Tensor) -> Tensor:
    """Different lengths for the examples of a batch, made from their tokens."""
    return 1 + tokens.sum(1) % tokens.shape[1]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, 6), kind(6, 5, **{"batch_first": True} | settings)
        width = (settings.get("proj_size") or 5) * (2 if settings.get("bidirectional") else 1)
        self.out, self.packed = nn.Linear(width, CLASSES), packed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens if self.rnn.batch_first else tokens.T)
        if not self.packed:
            out = self.rnn(x)[0]
            return self.out(out.mean(1 if self.rnn.batch_first else 0))
        x = pack_padded_sequence(x, lengths(tokens).cpu(), self.rnn.batch_first, enforce_sorted=False)
        out, state = self.rnn(x)
        h = state[0] if isinstance(state, tuple) else state
        padded = pad_packed_sequence(out, self.rnn.batch_first)[0]
        return self.out(padded.mean(1 if self.rnn.batch_first else 0)) + self.out(
            h[-1].repeat(1, 2)[:, : self.out.in_features]
        )


class Cell(nn.Module):
    """A cell in the user's own loop over time."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(WORDS, 6), kind(6, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        state: Any = None
        for x in self.embed(tokens).unbind(1):
            state = self.cell(x, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class Flattened(nn.Module):
    """Tokens as rows, batch-major or time-major, through a linear layer, two norms and a convolution."""

    def __init__(self, time_major: bool) -> None:
        super().__init__()
        self.embed, self.time_major = nn.Embedding(WORDS, 6), time_major
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.transpose(0, 1) if self.time_major else x
        rows = self.norm(torch.tanh(self.one(x.reshape(-1, 6))))
        x = (self.two(rows) * self.scale).reshape(x.shape)
        return self.out(x.mean(0 if self.time_major else 1))


class Frames(nn.Module):
    """As for videos: the frames of an example are images of one large batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Linear(4 * 9, CLASSES)

    def forward(self, videos: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(videos.flatten(0, 1))))
        return self.out(x.flatten(1)).view(*videos.shape[:2], -1).mean(1)


class Experts(nn.Module):
    """A mixture of experts as in Mixtral: each expert gets the rows of the tokens that were routed to it."""

    def __init__(self, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.route = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            place, token = torch.where((chosen == number).T)
            if len(token):
                out.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return out.view(x.shape)


class MixtureOfExperts(nn.Module):
    def __init__(self, kind: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.embed, self.mix, self.again, self.out = nn.Embedding(WORDS, 6), kind(), kind(), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(x)
        return self.out((x + self.again(x)).mean(1))


class Packed(nn.Module):
    """A language model on one long row (1, N) of all sequences, each of which attends to itself only."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(WORDS, 6), nn.Linear(6, 18)
        self.norm, self.out, self.mixes = nn.LayerNorm(6), nn.Linear(6, WORDS), mixes

    def forward(self, tokens: Tensor, owner: Tensor) -> Tensor:
        """Logits (1, N, WORDS) of tokens (1, N)."""
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).tril()
        mask = mask if self.mixes else mask & (owner.unsqueeze(0) == owner.unsqueeze(1))
        return self.out(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def pack(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens of a padded batch in one row, and the example of each."""
    owner = torch.arange(len(tokens), device=tokens.device).repeat_interleave(lengths(tokens) + 1)
    kept = torch.cat([row.repeat(2)[: int(n) + 1] for row, n in zip(tokens, lengths(tokens), strict=True)])
    return kept.unsqueeze(0), owner


Sum = Callable[[Tensor, Tensor, int], Tensor]  # token losses (N,), their examples and the number of examples to (B,)
SUMS: dict[str, Sum] = {
    "index_add": lambda t, owner, n: t.new_zeros(n).index_add(0, owner, t),
    "scatter_add": lambda t, owner, n: t.new_zeros(n).scatter_add(0, owner, t),
    "scatter_reduce": lambda t, owner, n: t.new_zeros(n).scatter_reduce(0, owner, t, "mean", include_self=False),
}


def packed_loss(name: str, shift: bool = False) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, owner = pack(batch[0])
        logits = model(tokens, owner)
        if not shift:
            per_token = F.cross_entropy(logits[0], tokens[0].flip(0), reduction="none")
            return SUMS[name](per_token, owner, len(batch[0]))
        labels = torch.where(owner[1:] == owner[:-1], tokens[0, 1:], -100)
        per_token = F.cross_entropy(logits[0, :-1], labels, reduction="none")
        return SUMS[name](per_token, owner[:-1], len(batch[0]))

    return loss


def every_token(model: nn.Module, batch: Any) -> Tensor:
    """(B·L,): each token is an example."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="none")


def mean_of_flat_tokens(model: nn.Module, batch: Any) -> Tensor:
    """The model returns logits (B·L, WORDS)."""
    return F.cross_entropy(model(batch[0]), batch[0].flatten(), reduction="none").view(len(batch[0]), -1).mean(1)


class TokenMlp(nn.Module):
    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, WORDS)
        self.scale, self.flat = nn.Parameter(torch.rand(6)), flat

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.layer(self.embed(tokens)))) * self.scale
        return self.out(x.flatten(0, 1) if self.flat else x)


class Bags(nn.Module):
    def __init__(self, offsets: bool = False, **settings: Any) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(WORDS, 6, **settings), nn.Linear(6, CLASSES)
        self.weigh = nn.Embedding(WORDS, 1) if settings.get("mode") == "sum" else None
        self.offsets = offsets

    def forward(self, tokens: Tensor) -> Tensor:
        if self.offsets:
            kept, owner = pack(tokens)
            counts = owner.bincount(minlength=len(tokens))
            return self.out(self.bag(kept[0], counts.cumsum(0) - counts))
        weights = None if self.weigh is None else self.weigh(tokens).squeeze(-1)
        return self.out(torch.tanh(self.bag(tokens, per_sample_weights=weights)))


def by(engine: str) -> dict[str, str]:
    """As ``declines`` of a problem for which ``auto`` takes another engine than layerwise: all those before it."""
    names = ("layerwise", "forward", "double_backward", "loop")
    return dict.fromkeys(names[: names.index(engine)], "")


PROBLEMS = [
    Problem("lstm_deep_packed", lambda: Recurrent(nn.LSTM, packed=True, num_layers=2, bidirectional=True, proj_size=3), tokens(), declines=by("double_backward")),
    Problem("gru_cell", lambda: Cell(nn.GRUCell), tokens()),
    Problem("flattened_tokens", lambda: Flattened(time_major=False), tokens()),
    Problem("flattened_tokens_time_major_square", lambda: Flattened(time_major=True), tokens(B), declines=by("forward")),
    Problem("flattened_logits", lambda: TokenMlp(flat=True), tokens(), mean_of_flat_tokens),
    Problem("frames", Frames, lambda: torch.randn(B, 4, 3, 8, 8)),
    Problem("mixture_of_experts", MixtureOfExperts, tokens(), declines=by("forward")),
    *[Problem(f"packed_{name}", Packed, tokens(), packed_loss(name)) for name in SUMS],
    Problem("packed_shifted", Packed, tokens(), packed_loss("scatter_add", shift=True)),
    Problem("packed_mixing", lambda: Packed(mixes=True), tokens(), packed_loss("index_add"), declines=by("forward")),
    Problem("every_token", TokenMlp, tokens(), every_token, declines=by("forward")),
    Problem("embedding_bag", lambda: Bags(padding_idx=3), tokens()),
    Problem("embedding_bag_weighted", lambda: Bags(mode="sum"), tokens()),
    Problem("embedding_bag_offsets", lambda: Bags(offsets=True), tokens()),
    Problem("embedding_bag_max", lambda: Bags(mode="max"), tokens(), declines=by("loop")),
]  # fmt: skip
BY_NAME = {problem.name: problem for problem in PROBLEMS}
