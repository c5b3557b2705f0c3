"""The strong recipe on texts and tables: it learns, resumes with its views, and refuses what cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from experiments.settings import FixMatch, ProMix
from soseleto.data import TokenViews
from soseleto.data.batches import Batch, ExampleRandom
from soseleto.errors import UsageError
from soseleto.methods import Strong
from soseleto.task.optimizers import adamw
from soseleto.training.fit import fit
from soseleto.training.options import Inputs
from two_views import close, task

WORDS, LONGEST = 12, 9


class Words(nn.Module):
    """The mean embedding of the words that are not masked, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.last = nn.Embedding(WORDS, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.last.weight.dtype)
        mean = (mask * self.embedding(input_ids)).sum(1) / mask.sum(1).clamp(min=1)
        out: Tensor = self.last(self.dropout(mean))
        return out


def made(kind: type[nn.Module]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind() if kind is Words else nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


def texts(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Words 2 to 4 are of class 0, words 5 to 7 of class 1, the others of both."""
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (n,), generator=seeded)
    ids = torch.randint(8, WORDS, (n, LONGEST), generator=seeded)
    ids[:, 1:5] = 2 + 3 * labels[:, None] + torch.randint(3, (n, 4), generator=seeded)
    mask = (torch.arange(LONGEST) < torch.randint(5, LONGEST + 1, (n, 1), generator=seeded)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, labels


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (n,), generator=seeded)
    return torch.randn(n, 6, generator=seeded) + 2.0 * (2 * labels[:, None] - 1) * (torch.arange(6) < 3), labels


def flipped(labels: Tensor) -> tuple[Tensor, Tensor]:
    flip = torch.rand(len(labels), generator=torch.Generator().manual_seed(5)) < 0.3
    return torch.where(flip, 1 - labels, labels), flip


KINDS = {"texts": (texts, Words), "rows": (rows, nn.Sequential)}


def trained(kind: str, epochs: int = 8, **options: Any) -> soseleto.Result:
    draw, model = KINDS[kind]
    inputs, labels = draw(120, 0)
    sizes = {"batch_size": 24, "target_batch_size": 12, "device": "cpu", "method": Strong()}
    return fit(made(model), (inputs, flipped(labels)[0]), draw(24, 1), epochs=epochs, **{**sizes, **options})


def test_wrong_labels_are_doubted() -> None:
    result = trained("texts", optimizer=partial(adamw, lr=0.05))
    flip = flipped(texts(120, 0)[1])[1]
    assert result.evaluate(texts(100, 2))["accuracy"] > 90
    assert float(result.weights[flip].mean()) + 0.4 < float(result.weights[~flip].mean())
    assert result.config["augment_source"] == result.config["augment_target"] == repr(TokenViews())
    assert result.config["settings"]["mixup"] == 0.0


@pytest.mark.parametrize("method", [FixMatch(threshold=0.5), Strong(mixup=0.0)], ids=lambda one: one.name)
def test_texts_padded_to_another_width_take_a_pass_of_their_own(method: FixMatch | Strong) -> None:
    (source, labels), (target, trusted) = texts(24, 0), texts(8, 1)
    wider = {name: nn.functional.pad(value, (0, 3)) for name, value in target.items()}
    models = made(Words).eval(), made(Words).eval()
    for model, side in zip(models, (target, wider), strict=True):
        torch.manual_seed(0)
        state = method.init(task(model, n_source=24, classes=2))
        for _ in range(2):
            method.step(state, _with_views(source, labels), _with_views(side, trusted))
    close(*models)
    assert not torch.equal(models[0].last.weight, made(Words).last.weight)


def _with_views(inputs: dict[str, Tensor], labels: Tensor) -> Batch:
    index = torch.arange(len(labels))
    return Batch(index, TokenViews(drop=0.3)(inputs, ExampleRandom.of(0, index)), labels)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "texts",
            {"method": Strong(mixup=0.3)},
            r"'strong' mixes inputs, and token ids cannot be mixed: write Strong\(mixup=0.0\)",
        ),
        ("texts", {"method": ProMix(), "inputs": Inputs(augment=TokenViews())}, "'promix' mixes inputs"),
        (
            "rows",
            {"inputs": Inputs(augment=TokenViews())},
            "views of texts are made of dicts with input_ids and attention_mask",
        ),
        ("texts", {"method": Strong(mixup=1.0)}, "mixes inputs"),
        ("rows", {}, r"Strong\(\) is for images and texts, .*: use soseleto.scan"),
    ],
)
def test_what_does_not_fit_is_one_sentence(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(kind, 1, **options)
