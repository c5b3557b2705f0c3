"""Learning-rate schedules: functions of an optimizer and the number of steps, as in ``fit(optimizer=(make, linear))``.

``None`` in place of a schedule keeps the rate constant.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

WARM_UP = 0.1  # share of the steps in which ``warmup_cosine`` rises

__all__ = ["cosine", "linear", "warmup_cosine"]


def linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls linearly from its first value to 0 over all steps."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls to 0 along half a cosine."""
    return LambdaLR(optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0))))


def warmup_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate rises linearly over the first tenth of the steps, then falls to 0 along half a cosine."""
    rising = math.ceil(WARM_UP * steps)

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1.0 + math.cos(math.pi * min((step - rising) / max(1, steps - rising), 1.0)))

    return LambdaLR(optimizer, share)


# By name, for command lines and experiments.
SCHEDULES = {"linear": linear, "cosine": cosine, "warmup_cosine": warmup_cosine, "constant": None}
