"""Models that transform a parameter before it meets the data, each for a few rules of the layerwise engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

CLASSES = 3


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Tokens(nn.Module):
    """Positions of one row, token types of zeros, and tokens that are expanded, repeated, written and masked in."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(11, 8), nn.Embedding(12, 8), nn.Embedding(2, 8)
        self.register_buffer("place", torch.arange(12).unsqueeze(0))
        self.first, self.last, self.mask = parameter(1, 1, 8), parameter(1, 1, 8), parameter(8)
        self.added, self.norm = parameter(8), nn.LayerNorm(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        n = len(tokens)
        h = self.words(tokens) + self.types(torch.zeros_like(tokens))
        h[tokens > 8] = self.mask
        h = torch.cat([self.first.expand(n, -1, -1), h, self.last.repeat(n, 1, 1)], 1)
        h = self.norm(h + self.places(self.place[:, : h.shape[1]]))
        h[:, 1] = self.added
        return self.out(self.layer(h)[:, 0])


class Biases(nn.Module):
    """Attention with a table of biases that is indexed, a token of its own, and a temperature for each head."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, CLASSES)
        self.table, self.key, self.log_scale = parameter(11, 2), parameter(1, 2, 1, 4), parameter(2, 1, 1)
        place = torch.arange(6)
        self.register_buffer("index", place[:, None] - place[None, :] + 5)
        self.fused = fused

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).view(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(6, 6, 2).permute(2, 0, 1).unsqueeze(0)
        if self.fused:
            k = torch.cat([self.key.expand(len(q), -1, -1, -1), k[:, :, 1:]], 2)
            mixed = F.scaled_dot_product_attention(q * self.log_scale.exp(), k, v, bias, dropout_p=0.2)
        else:
            scores = q @ k.transpose(-1, -2) * self.log_scale.clamp(max=1.0).exp()
            scores += bias
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))


class Products(nn.Module):
    """Weights that are multiplied by matmul, addmm, bmm, einsum and bilinear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.plain = parameter(7, 6), parameter(6), parameter(6, 6)
        self.parts, self.left, self.heads = parameter(2, 6, 3), parameter(3, 2), parameter(2, 3, 3)
        self.shared, self.start, self.pairs = parameter(6, 3), parameter(3, 3), parameter(4, 3, 6)
        self.bilinear, self.out = nn.Bilinear(6, 6, 4), nn.Linear(9 + 9 + 4 + 4 + 12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        h = torch.tanh(torch.addmm(self.bias, x, self.weight)) @ self.plain
        h = h + torch.einsum("bi,ij,kj->bk", h, self.plain, self.plain) / 6
        heads = torch.einsum("bi,hij->bhj", h, self.parts)  # (n, 2, 3)
        mixed = self.left @ torch.tanh(heads)  # (n, 3, 3)
        turned = torch.matmul(heads.unsqueeze(2), self.heads).flatten(1)  # (n, 6)
        same = torch.bmm(h.view(n, 1, 6).expand(n, 3, 6), self.shared.expand(n, -1, -1))
        same = torch.baddbmm(self.start.expand(n, -1, -1), same, mixed)
        chosen = self.pairs[(x[:, 0] > 0).long()].flatten(1)[:, :12] * h[:, :1]
        pairs = torch.tanh(self.pairs @ h.view(n, 1, 6, 1)).flatten(1)
        last = [mixed.flatten(1), same.flatten(1), self.bilinear(h, turned), pairs[:, :4], chosen]
        return self.out(torch.tanh(torch.cat(last, 1)))


class Gates(nn.Module):
    """Scales, shifts and gates of any shape, in functions that broadcast, some of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(7, 12), nn.Linear(12, CLASSES)
        self.rate, self.shift, self.gate = parameter(3, 1), parameter(), parameter(1, 1, 4)
        self.slope, self.floor, self.mix, self.step = nn.PReLU(3), parameter(4), parameter(3, 4), parameter(1, 3, 1)
        self.choice, self.power, self.tail = parameter(3, 4), nn.Parameter(torch.rand(4) + 1), parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.slope(self.layer(x).view(len(x), 3, 4))
        h = h / (1 + self.rate.square()) - self.shift
        h = F.softplus(h + self.step) * -self.rate.exp()
        h *= torch.sigmoid(self.gate)
        h -= self.step
        h = torch.where(h > 0, h, self.choice * h) + torch.where(h > 0.5, F.relu(self.tail + 1, inplace=True), h)
        h = torch.lerp(h, self.mix, torch.sigmoid(self.gate))
        h = torch.addcmul(self.shift, h, self.mix, value=0.5)
        h = torch.maximum(h, self.floor.clamp(max=-1.0)) + h.square().add(0.1) ** self.power
        return self.out(torch.tanh(torch.stack([h, self.choice.expand_as(h)], 1).mean(1)).flatten(1))


class Shared(nn.Module):
    """One weight as it is, transposed, normalised and as a bias: its direction is known when all uses are reached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.out = parameter(7, 7), parameter(7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, F.normalize(self.weight, dim=1), self.bias.square()))
        h = torch.tanh(h @ self.weight + self.bias)
        h = F.layer_norm(h, (7,), self.weight[0], self.bias)
        return self.out(h + F.linear(h, torch.cat([self.weight[:3], self.weight[3:].exp()])))


class Queries(nn.Module):
    """Queries of the model's own, which pass a layer before they meet the data."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.project, self.out = parameter(2, 4), nn.Linear(4, 4), nn.Linear(8, CLASSES)
        self.embed = nn.Embedding(11, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        queries = F.dropout(torch.tanh(self.project(self.queries.expand(len(tokens), -1, -1))), 0.3)
        values = self.embed(tokens)
        found = F.scaled_dot_product_attention(queries, self.project(values), values)
        return self.out(torch.tanh(found + queries).flatten(1))


class Padded(nn.Module):
    """Data that are written into a tensor of zeros: it is no constant from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(7, 5), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6, dtype=x.dtype, device=x.device)
        h[:, :5] = torch.tanh(self.layer(x))
        return self.out(h)


class WrittenTo(nn.Module):
    """Data that are written into a tensor computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = parameter(1, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table.repeat(len(x), 1)
        h[:, 0] = x[:, 0]
        return self.out(torch.tanh(h))


class InPlace(nn.Module):
    """Writes to activations, in place of them and of constants, and takes some out of the graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.token = nn.Linear(7, 6), nn.Linear(6, CLASSES), nn.Parameter(torch.ones(6))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.two(getattr(self, self.kind)(self.one(x)))

    def sums(self, h: Tensor) -> Tensor:
        h += torch.tanh(h)
        h *= 2
        return F.silu(h.clamp_(min=-1), inplace=True)

    def rows_of_a_constant(self, h: Tensor) -> Tensor:
        total, rows = torch.zeros_like(h).detach(), torch.arange(len(h), device=h.device)
        total.index_add_(0, rows, h)
        total.index_add_(0, rows, torch.tanh(h))
        return total

    def view(self, h: Tensor) -> Tensor:
        h.view(-1).mul_(2.0)
        return h

    def mask(self, h: Tensor) -> Tensor:
        h[h[:, 0] > 0] = self.token
        return h

    def constants(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.tanh(h)
        return h * gate + h.detach()

    def several_results(self, h: Tensor) -> Tensor:
        first, *others = h.unbind(1)
        return h + h.topk(2).values.sum(1, keepdim=True) + (first + others[0]).unsqueeze(1).T.T


def spectral_norm() -> nn.Module:
    norm = parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.Tanh(), nn.Flatten(), norm(nn.Linear(144, CLASSES)))


class RmsNorm(nn.Module):
    """As written in many language models: computed in float32, with a weight that is stored as a difference from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + self.weight.float())).type_as(x)
