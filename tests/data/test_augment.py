"""Augmentation: each change against a simple reference, image by image."""

import pytest
import torch
import torch.nn.functional as F

from soseleto.data import Augment, generator
from soseleto.data.batches import ExampleRandom
from soseleto.errors import UsageError


def draws(n, key=0, device="cpu"):
    return ExampleRandom.of(key, torch.arange(n, device=device))


def random_images(n=64, c=3, h=8, w=10, dtype=torch.uint8):
    images = torch.randint(1, 256, (n, c, h, w), generator=generator(0, "images", 0), dtype=torch.uint8)
    return images.to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("crop", [0, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_give_windows_of_the_padded_image(dtype, crop, flip):
    images = random_images(dtype=dtype)
    made = Augment(crop=crop, flip=flip)(images, draws(len(images)))
    assert made.dtype == dtype
    seen = set()
    for image, new in zip(images, made, strict=True):
        padded = F.pad(image, (crop, crop, crop, crop))
        choices = {
            (top, left, mirrored): (window.flip(2) if mirrored else window)
            for top in range(2 * crop + 1)
            for left in range(2 * crop + 1)
            for mirrored in ((False, True) if flip else (False,))
            for window in [padded[:, top : top + 8, left : left + 10]]
        }
        matching = [key for key, window in choices.items() if torch.equal(window, new)]
        assert len(matching) == 1
        seen.add(matching[0])
    wanted = {
        (crop, flip) == (0, False): 1,
        (crop, flip) == (0, True): 2,
        (crop, flip) == (2, False): 18,  # of 25
        (crop, flip) == (2, True): 30,  # of 50
    }[True]
    assert len(seen) >= wanted
    assert flip == any(key[2] for key in seen)


def test_a_seed_decides_and_the_batch_is_left_alone():
    images = random_images()
    before = images.clone()
    augment = Augment(crop=2, flip=True, rotate=10, scale=0.1, shift=0.1, sign=True, shear=10, elastic=0.05)
    first = augment(images, draws(len(images), 5))
    assert torch.equal(first, augment(images, draws(len(images), 5)))
    assert not torch.equal(first, augment(images, draws(len(images), 6)))
    assert torch.equal(images, before)
    assert Augment()(images, draws(len(images), 5)) is images


def test_affine_turns_by_the_angle_it_draws():
    image = torch.zeros(400, 1, 33, 61)  # oblong: distances are those of pixels
    image[:, 0, 16, 40] = 1.0  # ten pixels to the right of the centre
    made = Augment(rotate=90)(image, draws(len(image)))
    mass = made.sum((1, 2, 3))
    rows = (made[:, 0].sum(2) * torch.arange(33)).sum(1) / mass - 16
    columns = (made[:, 0].sum(1) * torch.arange(61)).sum(1) / mass - 30
    radius = (rows**2 + columns**2).sqrt()
    assert radius.min() > 9.4
    assert radius.max() < 10.6
    angle = torch.rad2deg(torch.atan2(rows, columns))
    assert angle.abs().max() <= 91
    assert angle.min() < -80
    assert angle.max() > 80


def test_some_rows_of_a_batch_get_the_draws_of_the_whole_batch():
    images = torch.rand(12, 3, 9, 9)
    augment = Augment(crop=2, flip=True, rotate=20, sign=True)
    whole = augment(images, draws(12))
    rows = torch.tensor([1, 4, 10])
    some = augment(images[rows], ExampleRandom.of(0, rows))
    assert torch.allclose(some, whole[rows], atol=1e-6)
    assert augment(images[:0], draws(0)).shape == (0, 3, 9, 9)


def test_shift_and_scale_stay_within_their_shares():
    image = torch.zeros(300, 1, 40, 40)
    image[:, 0, 15:25, 15:25] = 1.0
    moved = Augment(shift=0.2)(image, draws(len(image)))[:, 0]
    centre = (moved.sum(1) * torch.arange(40)).sum(1) / moved.sum((1, 2)) - 19.5
    assert centre.abs().max() <= 8.1
    assert centre.max() > 6
    sizes = Augment(scale=0.2)(image, draws(len(image))).sum((1, 2, 3)) / 100
    assert 0.6 < sizes.min() < 0.75
    assert 1.3 < sizes.max() < 1.48


def test_shear_slants_by_the_angle_it_draws():
    image = torch.zeros(400, 1, 41, 41)
    image[:, 0, 10, 20] = image[:, 0, 30, 20] = 1.0  # ten pixels above and below the centre
    made = Augment(shear=30)(image, draws(len(image)))[:, 0]
    places = torch.arange(41.0) - 20
    above = (made[:, 10] * places).sum(1) / made[:, 10].sum(1)
    below = (made[:, 30] * places).sum(1) / made[:, 30].sum(1)
    assert torch.allclose(above, -below, atol=1e-3)
    slant = torch.rad2deg(torch.atan2(above, torch.tensor(10.0)))
    assert 28 < slant.max() <= 30.1
    assert -30.1 <= slant.min() < -28


def test_elastic_bends_smoothly_within_its_share():
    ramp = torch.arange(40.0).view(1, 1, 1, 40).expand(200, 1, 40, 40)  # a pixel's value is its column
    bent = Augment(elastic=0.1)(ramp, draws(len(ramp)))[:, 0, 8:32, 8:32] - torch.arange(40.0)[8:32]
    assert bent.abs().max() <= 1.5 * 0.1 * 40  # cubic interpolation goes a little beyond its points
    assert bent.abs().max() > 0.05 * 40
    assert bent.diff(dim=2).abs().max() < 1.0
    assert float(bent.std(dim=0).min()) > 0.3
    assert float(bent.mean(dim=0).abs().max()) < 0.6


def test_sign_gives_the_negative_of_about_half():
    for dtype, opposite in ((torch.uint8, lambda x: 255 - x), (torch.float32, lambda x: -x)):
        images = random_images(n=200, dtype=dtype)
        made = Augment(sign=True)(images, draws(len(images)))
        kept = (made == images).flatten(1).all(1)
        turned = (made == opposite(images)).flatten(1).all(1)
        assert bool((kept ^ turned).all())
        assert 60 < int(turned.sum()) < 140


@pytest.mark.parametrize(
    "wrong", [{"crop": -1}, {"crop": 1.5}, {"scale": 1.0}, {"shear": 90}, {"elastic": -0.1}, {"rotate": float("nan")}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Augment(**wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_gpu_gives_the_same_for_the_same_draws(dtype):
    images = random_images(dtype=dtype)
    augment = Augment(crop=2, flip=True, sign=True)
    here = augment(images, draws(len(images)))
    there = augment(images.cuda(), draws(len(images), device="cuda"))
    assert there.is_cuda
    assert torch.equal(there.cpu(), here)
