"""Strong augmentation: every change against Pillow or a loop over pixels, and draws that belong to the example."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from soseleto.data import Examples, StrongAugment, TargetCycle, Views, feed
from soseleto.data.augment import CHANGES, _blended, _recoloured, _resampled
from soseleto.data.batches import ExampleRandom
from soseleto.errors import DataError, UsageError


def images(n: int = 12, channels: int = 3, h: int = 10, w: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, channels, h, w), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def same_change(name: str, size: float, n: int = 1) -> tuple[Tensor, Tensor]:
    return torch.full((n,), CHANGES.index(name)), torch.full((n,), size)


@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("colour", ImageEnhance.Color),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
@pytest.mark.parametrize("size", [-0.7, 0.8])
def test_blends_are_those_of_pillow(name: str, enhance: Any, size: float) -> None:
    given = images(1, h=15, w=16)
    image = enhance(Image.fromarray(given[0].permute(1, 2, 0).numpy())).enhance(1 + 0.9 * size)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
    found = _blended(given.float(), *same_change(name, size))[0]
    assert (found - expected)[:, 1:-1, 1:-1].abs().max() <= 2  # Pillow rounds, and does not blur the border


def test_posterise_solarise_and_autocontrast_against_a_loop() -> None:
    given = images(1, h=5, w=6) // 2 + 30
    flat = given.flatten().tolist()
    found = _recoloured(given.float(), *same_change("posterise", -0.5))
    assert found.flatten().tolist() == [float(value // 4 * 4) for value in flat]
    found = _recoloured(given.float(), *same_change("solarise", 0.5))
    assert found.flatten().tolist() == [float(255 - value if value >= 128 else value) for value in flat]
    found = _recoloured(given.float(), *same_change("autocontrast", 0.1))
    for channel, stretched in zip(given[0].flatten(1).tolist(), found[0].flatten(1).tolist(), strict=True):
        low, high = min(channel), max(channel)
        assert stretched == pytest.approx([(value - low) * 255 / (high - low) for value in channel], abs=1e-3)


def test_geometry_moves_pixels_and_fills_with_grey() -> None:
    given = images(1).float()
    right = _resampled(given, [same_change("shift_x", -2 / 3)])  # by 0.2 of the width
    torch.testing.assert_close(right[..., 2:], given[..., :-2], rtol=0, atol=1e-3)
    assert right[..., :2].eq(127.5).all()
    down = _resampled(given, [same_change("shift_y", -1.0)])
    torch.testing.assert_close(down[..., 3:, :], given[..., :-3, :], rtol=0, atol=1e-3)
    kept = _resampled(given, [same_change("brightness", 1.0)])
    torch.testing.assert_close(kept, given, rtol=0, atol=1e-3)


@pytest.mark.parametrize("change", ["rotate", "shear_x", "shear_y"])
def test_a_line_is_turned_or_slanted_by_the_angle(change: str) -> None:
    wide = torch.zeros(1, 1, 41, 81)  # not square: angles are those of pixels
    row, column = torch.meshgrid(torch.arange(41.0) - 20, torch.arange(81.0) - 40, indexing="ij")
    made = _resampled(
        wide + column * (change != "shear_y") + row * (change == "shear_y") + 127.5, [same_change(change, 1.0)]
    )
    angle = math.radians(30)
    expected = {"rotate": column * math.cos(angle) + row * math.sin(angle), "shear_x": column + 0.3 * row,
                "shear_y": row + 0.3 * column}[change]  # fmt: skip
    middle = (slice(15, 26), slice(30, 51))
    torch.testing.assert_close(made[0, 0][middle] - 127.5, expected[middle], rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 10, 10), (1, 7, 12), (4, 33, 5)])
def test_an_image_depends_on_its_own_draws_alone(shape: tuple[int, int, int]) -> None:
    given = images(9, *shape)
    made = StrongAugment(changes=3)(given, ExampleRandom.of(5, torch.arange(9)))
    assert made.shape == given.shape
    assert made.dtype == torch.uint8
    assert not torch.equal(made, given)
    for i in range(9):
        alone = StrongAugment(changes=3)(given[i : i + 1], ExampleRandom.of(5, torch.tensor([i])))
        assert torch.equal(alone[0], made[i])


def test_cutout_covers_a_square() -> None:
    given = torch.zeros(200, 1, 20, 20, dtype=torch.uint8)
    made = StrongAugment(changes=0, cutout=0.5)(given, ExampleRandom.of(1, torch.arange(200))) != 0
    sides = made.any(3).sum(2).flatten(), made.any(2).sum(2).flatten()
    assert int(torch.stack(sides).max()) == 10
    assert torch.equal(made.sum((1, 2, 3)), sides[0] * sides[1])
    assert torch.equal(StrongAugment(changes=0, cutout=0.0)(given, ExampleRandom.of(1, torch.arange(200))), given)


def test_a_target_example_has_other_views_at_every_visit_of_an_epoch() -> None:
    data = Examples(images(4), torch.arange(4))
    first, second = feed(data, list(TargetCycle(4, 4, 0).block(0, 2)), seed=0, epoch=2, augment=Views(count=2))
    back = second.index.argsort()[first.index]
    assert not torch.equal(first.inputs[1], second.inputs[1][back])


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(DataError, match="strong augmentation is for uint8 images"):
        StrongAugment()(torch.zeros(2, 3, 8, 8), ExampleRandom.of(0, torch.arange(2)))
    with pytest.raises(UsageError, match="changes of StrongAugment must be 0 or more, got -1"):
        StrongAugment(changes=-1)
    with pytest.raises(UsageError, match=r"cutout of StrongAugment must lie in \[0, 1\], got 2"):
        StrongAugment(cutout=2)
    with pytest.raises(UsageError, match="count at least 1"):
        Views(count=0)
    with pytest.raises(UsageError, match="crop must be a share"):
        Views(crop=4)
