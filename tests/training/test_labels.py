"""The mistakes of a source, estimated before the training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import soseleto
from soseleto.data import Examples, LazyDataset
from soseleto.data.feeding import make_prepare
from soseleto.errors import UsageError
from soseleto.training.data import estimate_mistakes


def test_a_class_without_target_examples_is_not_a_mistake() -> None:
    seeded = torch.Generator().manual_seed(0)

    def draw(n: int, classes: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (n,), generator=seeded)
        return 2 * torch.eye(3)[y] + 0.5 * torch.randn(n, 3, generator=seeded), y

    x, y = draw(900, 3)
    wrong = (torch.rand(900, generator=seeded) < 0.2) & (y < 2)
    source, target = Examples(x, torch.where(wrong, 1 - y, y)), Examples(*draw(200, 2))
    model = nn.Linear(3, 3)
    found = estimate_mistakes(model, make_prepare(source, model, standardize=None), source, target, 3, seed=0)
    assert found.share[0] < float(wrong[y < 2].float().mean()) < found.share[1]
    assert found.share[1] < 0.3
    assert (found.labels[:, 2] < 0.05).all()


@pytest.mark.parametrize("without", [3, 0])  # the source has the target's only class, or not
def test_a_target_of_one_class_gives_no_suspects(without: int) -> None:
    y = torch.arange(300) % 3
    x = 2 * torch.eye(3)[y] + 0.5 * torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    source, target = y != without, y == 0
    result = soseleto.fit(nn.Linear(3, 3), (x[source], y[source]), (x[target], y[target]), epochs=1, probes="auto")
    assert any("too few of the source's classes" in message for message in result.messages)
    with pytest.raises(UsageError, match="the target has too few of the source's classes"):
        result.suspects()


class Sequences(Dataset[tuple[int, int]]):
    """Positive numbers, each repeated, in sequences of 3; from the 1000th example on of 9."""

    def __init__(self, n: int) -> None:
        self.numbers = torch.randint(1, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: int) -> tuple[list[int], int]:  # type: ignore[override]
        return [self.numbers[at]] * (3 if at < 1000 else 9), int(self.numbers[at] > 25)


def padded(items: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(row) for row, _ in items]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in items])


class PerToken(nn.Module):
    """The mean of a linear layer's outputs at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.embedding(ids)).mean(1)
        return outputs


def test_batches_padded_to_different_lengths_have_features_of_one_width() -> None:
    source, target = (LazyDataset(Sequences(n), collate_fn=padded, workers=0) for n in (1100, 60))
    model = PerToken()
    found = estimate_mistakes(model, make_prepare(source, model, standardize=None), source, target, 2, seed=0)
    assert 0 <= found.share[0] <= found.share[1] < 1
