"""The margin of a label: a label-quality signal that methods record and suspects use."""

from __future__ import annotations

from torch import Tensor


def label_margin(scores: Tensor, labels: Tensor) -> Tensor:
    """The score (logit) of each example's label minus the largest score of another class, (B,) from (B, classes).

    >>> import torch
    >>> label_margin(torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.tensor([0, 1]))
    tensor([ 1., -2.])
    """
    label = labels[:, None]
    others = scores.scatter(1, label, float("-inf")).amax(1)
    return scores.gather(1, label).squeeze(1) - others
