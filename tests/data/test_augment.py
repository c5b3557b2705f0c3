"""Augmentation: each change against a simple reference, image by image."""

import pytest
import torch
import torch.nn.functional as F

from soseleto.data import Augment, generator
from soseleto.data.augment import Rows
from soseleto.errors import UsageError


def random_images(n=64, c=3, h=8, w=10, dtype=torch.uint8):
    images = torch.randint(1, 256, (n, c, h, w), generator=generator(0, "images", 0), dtype=torch.uint8)
    return images.to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("crop", [0, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_give_windows_of_the_padded_image(dtype, crop, flip):
    images = random_images(dtype=dtype)
    made = Augment(crop=crop, flip=flip)(images, generator(0, "augment", 0))
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
    augment = Augment(crop=2, flip=True)
    first = augment(images, generator(0, "augment", 5))
    assert torch.equal(first, augment(images, generator(0, "augment", 5)))
    assert not torch.equal(first, augment(images, generator(0, "augment", 6)))
    assert torch.equal(images, before)
    assert Augment()(images, generator(0, "augment", 5)) is images


def test_some_rows_of_a_batch_get_the_draws_of_the_whole_batch():
    images = torch.rand(12, 3, 9, 9)
    augment = Augment(crop=2, flip=True)
    whole = augment(images, generator(0, "augment", 0))
    rows = torch.tensor([1, 4, 10])
    some = augment(images[rows], Rows(generator(0, "augment", 0), 12, rows))
    assert torch.allclose(some, whole[rows], atol=1e-6)


@pytest.mark.parametrize("crop", [-1, 1.5])
def test_wrong_settings_are_refused(crop):
    with pytest.raises(UsageError, match="crop"):
        Augment(crop=crop)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_gpu_gives_the_same_for_the_same_draws(dtype):
    images = random_images(dtype=dtype)
    augment = Augment(crop=2, flip=True)
    here = augment(images, generator(0, "augment", 0))
    there = augment(images.cuda(), generator(0, "augment", 0))
    assert there.is_cuda
    assert torch.equal(there.cpu(), here)
    own = augment(images.cuda(), generator(0, "augment", 0, "cuda"))
    assert torch.equal(own, augment(images.cuda(), generator(0, "augment", 0, "cuda")))
