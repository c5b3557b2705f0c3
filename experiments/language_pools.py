"""Pools of instructions of mixed use for one task, from ``ROOT/text``: sums in words, exchanged answers, other tasks.

The task is GSM8K. A pool has examples of it, examples of it with the answer of another question, and foreign ones:
role plays and calls of tools. Two hundred examples more are the target, three hundred are held out, and all have other
questions than the pool and the test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from experiments.data import data_root
from experiments.experiment import Root
from soseleto.data import generator
from soseleto.errors import DataError

RIGHT, EXCHANGED, FOREIGN = range(3)
KINDS = ("right", "exchanged", "foreign")
POOLS = {"exchanged": (700, 700, 6000), "few": (370, 0, 7030), "few exchanged": (370, 370, 6660)}  # by kind
N_TARGET, N_HELDOUT = 200, 300
FILES = ("roleplay", "toolformer")  # of foreign texts
IGNORED = -100
TINY = "tiny"  # a model of random weights, bytes as tokens
MEASURED = 64  # texts in a pass without gradient


class Text(NamedTuple):
    question: str
    answer: str
    file: str = "gsm8k"


@dataclass(frozen=True)
class Tokens:
    """Texts as the model reads them: a question and its answer, of which the answer has labels."""

    texts: Sequence[Text]
    ids: list[list[int]]
    prompts: list[int]  # how many tokens the question has

    @classmethod
    def of(cls, texts: Sequence[Text], encode: Callable[[str], list[int]], longest: int) -> Tokens:
        ids, prompts = [], []
        for text in texts:
            asked = encode(f"<|im_start|>user\n{text.question}<|im_end|>\n<|im_start|>assistant\n")
            both = [*asked, *encode(f"{text.answer}<|im_end|>")]
            ids.append(both[:longest])
            prompts.append(min(len(asked), longest - 1))
        return cls(texts, ids, prompts)

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

    def batches(self, device: torch.device | str) -> Iterator[dict[str, Tensor]]:
        """All texts in order, for passes without gradient."""
        return (self.batch(places.tolist(), device) for places in torch.arange(len(self)).split(MEASURED))


class Pool(NamedTuple):
    """source: the pool, each with its kind; the others are of the task alone."""

    source: Tokens
    kinds: Tensor
    target: Tokens
    heldout: Tokens
    test: Tokens


@lru_cache(maxsize=1)
def draw(name: str, seed: int, root: Root = None, *, part: float = 1.0, model: str = TINY, longest: int = 384) -> Pool:
    """A draw of a pool, in tokens of a model; ``part`` of its size, and of the others', for tests."""
    files = data_root(root) / "text"
    counts = [round(part * count) for count in POOLS[name]]
    sizes = [math.ceil(part * N_TARGET), math.ceil(part * N_HELDOUT), counts[RIGHT], counts[EXCHANGED]]
    sums = iter(_shuffled(_texts(files / "gsm8k_train.jsonl"), seed, "language/sums"))
    target, heldout, right, exchanged = (list(islice(sums, size)) for size in sizes)
    others = zip(exchanged, exchanged[1:] + exchanged[:1], strict=True)
    exchanged = [text._replace(answer=other.answer) for text, other in others]
    foreign = [text for name in FILES for text in _texts(files / f"{name}.json")]
    foreign = _shuffled(foreign, seed, "language/foreign")[: counts[FOREIGN]]
    test = _texts(files / "gsm8k_test.jsonl")
    of = partial(Tokens.of, encode=encoder(model, root), longest=longest)
    return Pool(
        source=of(right + exchanged + foreign),
        kinds=torch.arange(len(KINDS)).repeat_interleave(torch.tensor(counts)),
        target=of(target),
        heldout=of(heldout),
        test=of(test[: math.ceil(part * len(test))]),
    )


def encoder(model: str, root: Root) -> Callable[[str], list[int]]:
    """Token ids of a text."""
    if model == TINY:
        return lambda text: list(text.encode())
    found = Tokenizer.from_file(str(folder(model, root) / "tokenizer.json"))
    return lambda text: list(found.encode(text, add_special_tokens=False).ids)


def folder(model: str, root: Root) -> Path:
    return data_root(root) / "pretrained" / model


def _shuffled(items: list[Text], seed: int, purpose: str) -> list[Text]:
    return [items[i] for i in torch.randperm(len(items), generator=generator(seed, purpose)).tolist()]


def _texts(path: Path) -> list[Text]:
    """Of lines with a question and its answer, or of a list of instructions."""
    if not path.is_file():
        raise DataError(f"{path} is missing: lay the texts out below SOSELETO_DATA or --data-root.")
    content = path.read_text("utf-8")
    if path.suffix == ".jsonl":
        return [Text(one["question"], one["answer"]) for one in map(json.loads, content.splitlines())]
    items = json.loads(content)
    return [Text(f"{one['instruction']}\n{one['input']}".strip(), one["output"], path.stem) for one in items]
