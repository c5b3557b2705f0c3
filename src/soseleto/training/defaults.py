"""The defaults that ``fit``, the command line and the estimator share. No PyTorch here: ``--help`` imports this."""

from __future__ import annotations

EPOCHS = 30
PRETRAINED_EPOCHS, PRETRAINED_IMAGE_EPOCHS = 3, 10  # for models of transformers, timm and peft
LR = 0.03  # of SGD
PRETRAINED_LR, PRETRAINED_IMAGE_LR = 3e-5, 1e-4  # of AdamW, for models of transformers, timm and peft
ADAPTER_LR = 1e-4  # of AdamW, where peft's adapters are all that is trained of a pretrained model
WEIGHT_STEP = 0.1  # Soseleto's own
TARGET_BATCH = 32
TARGET_SHARE, TRANSFER_SHARE = 0.1, 0.5  # of the target's gradient, for classes with wrong labels and in transfer mode
FEW_WAY = 0.9  # of a weight over all epochs, for classes with wrong labels; 3 costs accuracy where few are wrong
MANY_WEIGHT_STEP, MANY_SHARE = 0.3, 0.3  # of a visit, and in place of TARGET_SHARE, where many labels are wrong
CONVOLUTIONAL_WAY, LEAST_STEP = 1.5, 0.05  # of a weight over all epochs of a network with convolutions, and of a visit
PRETRAINED_WEIGHT_STEP = 2.0  # where many labels are wrong, of a pretrained network, which learns them in few epochs
STRONG_LR, STRONG_WEIGHT_DECAY, STRONG_TARGET_BATCH = 0.1, 5e-4, 64  # of recipe="strong", noisy mode
STRONG_TEXT_LR = 6e-5  # of AdamW with recipe="strong", where all of a pretrained model of texts is trained
STRONG_EPOCHS = 100  # of it on images: 95 % on CIFAR-10 with 40 % flipped, where 30 epochs have 92
LARGEST_BATCH, SMALLEST_BATCH = 256, 16
PRETRAINED_BATCH = 64  # at most, for texts
STEPS = 48  # steps per epoch to aim at, where the source is large enough
CHECKPOINT_SECONDS = 60.0
SUSPECT_PRECISION = 0.95


def few_weight_step(epochs: int = EPOCHS) -> float:
    """The step in which a weight goes its way over the epochs.

    >>> few_weight_step(), few_weight_step(5), few_weight_step(1)
    (0.03, 0.18, 0.3)
    """
    return min(FEW_WAY / max(epochs, 1), MANY_WEIGHT_STEP)


def convolutional_weight_step(epochs: int = EPOCHS) -> float:
    """The step of a network with convolutions where many labels are wrong.

    >>> convolutional_weight_step(), convolutional_weight_step(60), convolutional_weight_step(10)
    (0.05, 0.05, 0.15)
    """
    return min(max(CONVOLUTIONAL_WAY / max(epochs, 1), LEAST_STEP), MANY_WEIGHT_STEP)


def batch_size_for(n: int) -> int:
    """A power of two from 16 to 256 that gives about 48 steps per epoch or more; never above ``n``.

    >>> [batch_size_for(n) for n in (10, 500, 3000, 50_000)]
    [10, 16, 64, 256]
    """
    wanted = max(1, n // STEPS)
    power = 1 << (wanted.bit_length() - 1)
    if wanted >= 1.5 * power:
        power *= 2
    return min(n, max(SMALLEST_BATCH, min(LARGEST_BATCH, power)))
