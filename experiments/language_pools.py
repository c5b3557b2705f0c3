"""Pools of instructions of mixed use for one task, from ``ROOT/text``: sums in words, exchanged answers, other tasks.

The task is GSM8K. A pool has examples of it, examples of it with the answer of another question, and foreign ones:
role plays and calls of tools. Two hundred examples more are the target, three hundred are held out, and all have other
questions than the pool and the test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.data import data_root
from soseleto.data import generator
from soseleto.errors import DataError

RIGHT, EXCHANGED, FOREIGN = range(3)
KINDS = ("right", "exchanged", "foreign")
POOLS = {"exchanged": (700, 700, 6000), "few": (370, 0, 7030), "few exchanged": (370, 370, 6660)}  # by kind
N_TARGET, N_HELDOUT = 200, 300
FILES = ("roleplay", "toolformer")  # of foreign texts
IGNORED = -100


class Text(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True, eq=False)
class Pool:
    """source: the pool, each with its kind; the others are of the task alone."""

    source: list[Text]
    kinds: Tensor
    target: list[Text]
    heldout: list[Text]
    test: list[Text]


def drawn(name: str, seed: int, root: str | Path | None = None, *, part: float = 1.0) -> Pool:
    """A draw of a pool; ``part`` of its size, and of the others', for tests."""
    folder = data_root(root) / "text"
    sums = [Text(one["question"], one["answer"]) for one in _lines(folder / "gsm8k_train.jsonl")]
    others = [_instruction(one) for name in FILES for one in json.loads(_read(folder / f"{name}.json"))]
    counts = [round(part * count) for count in POOLS[name]]
    n_target, n_heldout = (math.ceil(part * n) for n in (N_TARGET, N_HELDOUT))
    sums = _shuffled(sums, seed, "language/sums")
    cut = [n_target, n_heldout, counts[RIGHT], counts[EXCHANGED]]
    target, heldout, right, exchanged = (sums[sum(cut[:i]) : sum(cut[: i + 1])] for i in range(len(cut)))
    answers = [text.answer for text in exchanged]
    exchanged = [Text(text.question, answer) for text, answer in zip(exchanged, answers[1:] + answers[:1], strict=True)]
    foreign = _shuffled(others, seed, "language/foreign")[: counts[FOREIGN]]
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    test = [Text(one["question"], one["answer"]) for one in _lines(folder / "gsm8k_test.jsonl")]
    return Pool(
        source=right + exchanged + foreign,
        kinds=torch.tensor(kinds),
        target=target,
        heldout=heldout,
        test=test[: math.ceil(part * len(test))],
    )


@dataclass(frozen=True)
class Tokens:
    """Texts as the model reads them: a question and its answer, of which the answer has labels."""

    ids: list[list[int]]
    prompts: list[int]  # how many tokens the question has

    @classmethod
    def of(cls, texts: Sequence[Text], encode: Any, longest: int) -> Tokens:
        ids, prompts = [], []
        for text in texts:
            asked = encode(f"<|im_start|>user\n{text.question}<|im_end|>\n<|im_start|>assistant\n")
            both = [*asked, *encode(f"{text.answer}<|im_end|>")]
            ids.append(both[:longest])
            prompts.append(min(len(asked), longest - 1))
        return cls(ids, prompts)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, places: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        """These texts, padded to the longest."""
        length = max(len(self.ids[i]) for i in places)
        ids = torch.zeros(len(places), length, dtype=torch.int64)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for row, i in enumerate(places):
            n = len(self.ids[i])
            ids[row, :n], mask[row, :n] = torch.tensor(self.ids[i]), 1
            labels[row, self.prompts[i] : n] = ids[row, self.prompts[i] : n]
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def _instruction(one: dict[str, str]) -> Text:
    return Text(f"{one['instruction']}\n{one['input']}".strip(), one["output"])


def _shuffled(items: list[Any], seed: int, purpose: str) -> list[Any]:
    return [items[i] for i in torch.randperm(len(items), generator=generator(seed, purpose)).tolist()]


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in _read(path).splitlines()]


def _read(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} is missing: lay the texts out below SOSELETO_DATA or --data-root.")
    return path.read_text("utf-8")
