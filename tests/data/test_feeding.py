"""Blocks of batches: the right examples, and the same ones after a resume."""

import torch

from soseleto.data import Augment, Examples, Preprocess, feed, source_batches


def examples(n=100):
    inputs = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Examples(inputs, torch.arange(n) % 7)


def epoch_of(data, batches, **options):
    return list(feed(data, batches, seed=0, epoch=3, **options))


def test_a_resumed_epoch_continues_with_the_same_batches():
    data, prepare = examples(400), Preprocess.of(examples(400).inputs)
    batches = source_batches(400, 8, seed=0, epoch=3)
    options = {"augment": Augment(crop=2, flip=True), "prepare": prepare}
    whole = epoch_of(data, batches, **options)
    for start in (0, 1, 15, 16, 17, 49):
        rest = epoch_of(data, batches, start=start, **options)
        assert len(rest) == 50 - start
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(rest, whole[start:], strict=True))
    other = list(feed(data, batches, seed=1, epoch=3, **options))
    assert not torch.equal(other[0].inputs, whole[0].inputs)


def test_blocks_of_many_steps_hold_the_same_batches(monkeypatch):
    data, batches = examples(), source_batches(100, 8, seed=0, epoch=3)
    single = epoch_of(data, batches)
    assert all(torch.equal(batch.inputs, data.inputs[index]) for batch, index in zip(single, batches, strict=True))
    monkeypatch.setattr("soseleto.data.feeding.block_steps", lambda examples, batch_size: 4)
    for start in (0, 3, 4, 12):
        blocks = epoch_of(data, batches, start=start)
        assert len(blocks) == 13 - start
        for one, other in zip(single[start:], blocks, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
