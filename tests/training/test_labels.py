"""The share of wrong labels, estimated before the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soseleto.data import Examples, LazyDataset
from soseleto.data.feeding import make_prepare
from soseleto.training.data import Data, wrong_share
from zoo import Lambda


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_share_counts_no_label_of_a_class_without_target_examples(share: float) -> None:
    seeded = torch.Generator().manual_seed(0)

    def draw(n: int, classes: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (n,), generator=seeded)
        return 2 * torch.eye(3)[y] + 0.5 * torch.randn(n, 3, generator=seeded), y

    x, y = draw(900, 3)
    wrong = (torch.rand(900, generator=seeded) < share) & (y < 2)
    data = Data(Examples(x, torch.where(wrong, 1 - y, y)), Examples(*draw(200, 2)))
    model = nn.Linear(3, 3)
    found = wrong_share(model, make_prepare(data.source, model, standardize=None), data, seed=0)
    assert found == pytest.approx(share, abs=0.08)
    assert found <= share + 0.01


def sequences(n: int) -> Any:
    """Positive numbers, each repeated, in sequences of 3; from the 1000th example on of 9."""
    numbers = torch.randint(1, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    return [([number] * (3 if at < 1000 else 9), int(number > 25)) for at, number in enumerate(numbers)]


def padded(items: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(row) for row, _ in items]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in items])


def test_batches_padded_to_different_lengths_have_features_of_one_width() -> None:
    source, target = (LazyDataset(sequences(n), collate_fn=padded, workers=0) for n in (1100, 60))
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2), Lambda(lambda outputs: outputs.mean(1)))
    found = wrong_share(model, make_prepare(source, model, standardize=None), Data(source, target), seed=0)
    assert found is not None
    assert 0 <= found < 1
