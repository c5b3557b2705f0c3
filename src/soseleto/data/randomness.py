"""Stateless randomness: every random choice is a function of (seed, purpose, counter)."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, purpose: str, counter: int = 0) -> int:
    """A 63-bit seed that depends only on these three; the same on every machine."""
    digest = hashlib.sha256(f"{seed}\x1f{purpose}\x1f{counter}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, purpose: str, counter: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one purpose at one step or epoch.

    A resumed run uses the same (seed, purpose, counter) and draws the same numbers, so no random state is saved.
    Numbers drawn on different device types differ.

    >>> first = torch.rand(2, generator=generator(0, "augment", 7))
    >>> bool((first == torch.rand(2, generator=generator(0, "augment", 7))).all())
    True
    """
    made = torch.Generator(device=device)
    made.manual_seed(seed_for(seed, purpose, counter))
    return made
