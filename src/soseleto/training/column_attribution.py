"""The columns of a table that speak most against an example's label.

    c_k = Σ over the numbers j that column k is encoded by of (x_j − m_j) · ∂(z_y − z_o)/∂x_j

where m is the mean of the examples with the same label y, z are the network's outputs, and o is the most probable other
class. A negative c_k is how far column k moves the network from the label, compared with a typical example of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import TablePreparation
from soseleto.models.trunk_and_heads import evaluation_mode

MOST = 3  # columns named
LEAST = 0.2  # of the strongest column's contribution
BATCH = 1000


def contributions(
    model: nn.Module,
    prepare: Callable[[Tensor], Tensor],
    table: TablePreparation,
    inputs: Tensor,
    labels: Tensor,
    places: Tensor,
) -> Tensor:
    """c of the examples at these places, for every column, (places, columns)."""
    device = next(model.parameters()).device
    origins = torch.tensor(table.origins(), device=device)
    means = _class_means(prepare, inputs, labels, device)
    pieces = []
    with evaluation_mode(model):
        for some in places.split(BATCH):
            rows, own = inputs[some], labels[some].to(device)
            encoded = prepare(rows.to(device)).detach().requires_grad_()
            outputs = model(encoded)
            given = outputs.gather(1, own[:, None])[:, 0]
            other = outputs.scatter(1, own[:, None], -torch.inf).amax(1)
            (gradient,) = torch.autograd.grad((given - other).sum(), encoded)
            each = (gradient * (encoded.detach() - means[own])).float()
            by_column = torch.zeros(len(rows), len(table.columns), device=device)
            pieces.append(by_column.index_add_(1, origins, each).cpu())
    return torch.cat(pieces)


def _class_means(prepare: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, device: torch.device) -> Tensor:
    total: Tensor | None = None
    classes = int(labels.max()) + 1
    for rows, own in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
        encoded = prepare(rows.to(device))
        if total is None:
            total = encoded.new_zeros(classes, encoded.shape[1])
        total.index_add_(0, own.to(device), encoded)
    assert total is not None
    return total / torch.bincount(labels, minlength=classes).clamp(min=1).to(device)[:, None]


def columns_against_label(contributed: Tensor, table: TablePreparation) -> np.ndarray:
    """(N,) the names of the columns that speak most against the label, strongest first; empty where none does."""
    strongest = (-contributed).topk(min(MOST, contributed.shape[1]), dim=1)
    enough = (strongest.values > 0) & (strongest.values >= LEAST * strongest.values[:, :1])
    used = table.used
    return np.array(
        [
            ", ".join(used[at] for at, is_strong in zip(places, strong, strict=True) if is_strong)
            for places, strong in zip(strongest.indices.tolist(), enough.tolist(), strict=True)
        ],
        dtype=object,
    )
