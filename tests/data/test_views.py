"""Views of texts and of tables: what is dropped, how often, and that it depends on the example alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from soseleto.data import Augment, Examples, TokenViews, Views, feed, source_batches
from soseleto.data.batches import ExampleRandom
from soseleto.data.structure import tensors
from soseleto.data.text import NO_TOKEN, TextExamples
from soseleto.errors import UsageError


def texts(n: int, width: int = 40) -> Tensor:
    """Tokens 10, 11, ... of texts of 1 to ``width`` tokens."""
    lengths = torch.arange(n) % width + 1
    places = torch.arange(width)
    return torch.where(places < lengths[:, None], 10 + places, NO_TOKEN).to(torch.int32)


def as_dict(tokens: Tensor) -> dict[str, Tensor]:
    known = tokens != NO_TOKEN
    return {"input_ids": tokens.clamp(min=0).long(), "attention_mask": known.long()}


def test_tokens_are_dropped_inside_of_a_text() -> None:
    tokens = texts(400)
    weak, first, second = TokenViews(drop=0.3)(tokens, ExampleRandom.of(0, torch.arange(400)))
    assert weak is tokens
    assert not torch.equal(first, second)
    lengths = (tokens != NO_TOKEN).sum(1)
    for view in (first, second):
        assert torch.equal(view[view != NO_TOKEN], tokens[view != NO_TOKEN])  # what is kept keeps its place
        rows = torch.arange(400)
        assert bool((view[rows, 0] == tokens[:, 0]).all())
        assert bool((view[rows, lengths - 1] == tokens[rows, lengths - 1]).all())
        inside = (tokens != NO_TOKEN).sum() - torch.minimum(lengths, torch.tensor(2)).sum()
        assert float((tokens != view).sum() / inside) == pytest.approx(0.3, abs=0.02)


def test_views_of_a_text_do_not_depend_on_the_batch_or_its_width() -> None:
    tokens, views = texts(40), TokenViews(drop=0.3, count=3)
    whole = views(tokens, ExampleRandom.of(5, torch.arange(40)))
    for i in (4, 9, 20):
        alone = views(tokens[i : i + 1, : i + 1], ExampleRandom.of(5, torch.tensor([i])))
        for mine, all_ in zip(alone, whole, strict=True):
            assert torch.equal(mine[0], all_[i, : i + 1])


def fruit() -> pa.Table:
    return pa.table(
        {
            "size": [1.0, 2.0, None, 4.0, 9.0] * 6,
            "weight": [3.0, 1.0, 2.0, 2.0, 5.0] * 6,
            "colour": ["red", "green", "blue", "red", None] * 6,
            "note": [f"came by boat {i} on a rainy day of {i % 7} hours" for i in range(30)],
        }
    )


@pytest.mark.parametrize("kind", ["tokens", "dict", "images", "one view"])
def test_a_resumed_epoch_has_the_same_batches_and_others_differ(kind: str) -> None:
    labels, pictures = torch.arange(60) % 3, torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8)
    sets: dict[str, tuple[Any, Any]] = {
        "tokens": (TextExamples(texts(60), labels), TokenViews(drop=0.3)),
        "dict": (Examples(as_dict(texts(60)), labels), TokenViews(drop=0.3)),
        "images": (Examples(pictures, labels), Views()),
        "one view": (Examples(pictures, labels), Augment(crop=2, flip=True)),
    }
    data, views = sets[kind]
    batches = source_batches(60, 8, seed=0, epoch=2)

    def fed(start: int = 0, **changes: int) -> list[Any]:
        return list(
            feed(
                data, batches, augment=views, prepare=lambda one: one, start=start, **{"seed": 0, "epoch": 2, **changes}
            )
        )

    whole = fed()
    for start in (1, 5, 7):
        for batch, expected in zip(fed(start), whole[start:], strict=True):
            for mine, its in zip(tensors(batch.inputs), tensors(expected.inputs), strict=True):
                assert torch.equal(mine, its)
    for other in (fed(seed=1), fed(epoch=3)):
        pairs = zip(tensors(other[0].inputs), tensors(whole[0].inputs), strict=True)
        assert not all(torch.equal(*pair) for pair in pairs)


def test_bad_settings_are_one_sentence() -> None:
    for make in (lambda: TokenViews(drop=1.0), lambda: TokenViews(drop=-0.1), lambda: TokenViews(count=0)):
        with pytest.raises(UsageError, match=r"drop must be a probability below 1, .*count at least 1, got \w+Views\("):
            make()
