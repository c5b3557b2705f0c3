"""Plain alignments against those with the optimizer's preconditioner, with AdamW, on data that serve to choose.

    python benchmarks/preconditioned.py [--device cuda] [--problems NAME ...] [--seeds 3] [--tiny] --out FILE

    embeddings   headlines of NoisyAG-News as frozen MiniLM embeddings, a linear classifier
    minilm       the same headlines, MiniLM fine-tuned
    images       SVHN with 30 % of the source's labels flipped, the network Quick

Headlines: 4,000 source, 200 trusted and 2,000 test examples drawn from the training file (its test file is for reported
numbers), with people's own mistakes in the source. Images: 3,000, 200 and 2,500. Rows that are in FILE already are not
repeated. MiniLM is read from ``--minilm``, a folder for ``from_pretrained``.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import soseleto
from common import arguments, show, write
from experiments.data import data_root
from experiments.detection import auroc
from soseleto import Soseleto, data, methods
from soseleto.data import generator, symmetric
from soseleto.models.by_name import by_name
from soseleto.pieces import preconditioned, running_mean

FIRST_SEED = 100  # those of the tests and tables are below it
TOKENS = 64
CLASSES = 4

LINES: dict[str, Callable[[], Any]] = {
    "ordinary": lambda: methods.by_name("ordinary"),
    "plain": Soseleto,
    "preconditioned": lambda: Soseleto(direction=preconditioned()),
    "plain, mean 0.95": lambda: Soseleto(direction=running_mean(0.95)),
    "preconditioned, mean 0.95": lambda: Soseleto(direction=preconditioned(running_mean(0.95))),
}


@dataclass(frozen=True)
class Problem:
    """Data and model of one training; ``truth`` holds the right labels of the source."""

    model: nn.Module
    source: tuple[Any, Tensor]
    truth: Tensor
    target: tuple[Any, Tensor]
    test: tuple[Any, Tensor]
    settings: dict[str, Any]


def embeddings(seed: int, options: Any) -> Problem:
    tokens, labels, truth = texts(options)
    features = _embedded(tokens, options)
    torch.manual_seed(seed)
    settings = {"epochs": 20, "batch_size": 64, "optimizer": soseleto.adamw(1e-2), "standardize": True}
    return _problem(nn.Linear(features.shape[1], CLASSES), features, labels, truth, seed, options, settings)


def minilm(seed: int, options: Any) -> Problem:
    tokens, labels, truth = texts(options)
    torch.manual_seed(seed)
    settings = {"epochs": 3, "batch_size": 64}  # and the default optimizer of pretrained models
    return _problem(_classifier(options), tokens, labels, truth, seed, options, settings)


def images(seed: int, options: Any) -> Problem:
    sizes = (96, 32, 32) if options.tiny else (3000, 200, 2500)
    found = data.load("svhn", "train")
    places = torch.randperm(len(found), generator=generator(seed, "preconditioned"))[: sum(sizes)]
    source, target, test = (found.subset(part) for part in places.split(sizes))
    wrong = symmetric(source.labels, 0.3, classes=10, seed=seed).labels
    torch.manual_seed(seed)
    settings = {"epochs": 30, "optimizer": soseleto.adamw(1e-3), "schedule": soseleto.linear, "standardize": True}
    return Problem(
        by_name("quick", classes=10, shape=(3, 32, 32)), (source.inputs, wrong), source.labels,
        (target.inputs, target.labels), (test.inputs, test.labels), settings,
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[int, Any], Problem]] = {"embeddings": embeddings, "minilm": minilm, "images": images}


def texts(options: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tokens, the labels that people gave, and the right ones, of all headlines."""
    if options.tiny:
        ids = torch.randint(5, 100, (160, 8), generator=torch.Generator().manual_seed(0))
        truth = ids[:, 1] % CLASSES
        labels = symmetric(truth, 0.2, classes=CLASSES, seed=0).labels
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels, truth
    from transformers import AutoTokenizer

    with (data_root() / "text" / "noisy_ag_news_train.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tokenizer = AutoTokenizer.from_pretrained(options.minilm)
    settings = {"padding": "max_length", "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
    found = tokenizer([row["text"] for row in rows], **settings)
    tokens = {name: found[name] for name in ("input_ids", "attention_mask")}
    return tokens, *(torch.tensor([int(row[column]) for row in rows]) for column in ("label", "gt"))  # type: ignore[return-value]


def _classifier(options: Any) -> nn.Module:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    if not options.tiny:
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(options.minilm, num_labels=CLASSES)
        return model
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=CLASSES, **sizes))


_CACHE: dict[str, Tensor] = {}


@torch.no_grad()
def _embedded(tokens: dict[str, Tensor], options: Any) -> Tensor:
    """Mean over a headline's tokens of what the encoder returns for them."""
    if "features" not in _CACHE:
        encoder: Any = _classifier(options).base_model.to(options.device).eval()  # type: ignore[operator, union-attr]
        parts = []
        for begin in range(0, len(tokens["input_ids"]), 256):
            batch = {name: value[begin : begin + 256].to(options.device) for name, value in tokens.items()}
            mask = batch["attention_mask"][..., None]
            parts.append(((encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)).cpu())
        _CACHE["features"] = torch.cat(parts)
    return _CACHE["features"]


def _problem(
    model: nn.Module,
    inputs: Any,
    labels: Tensor,
    truth: Tensor,
    seed: int,
    options: Any,
    settings: dict[str, Any],
) -> Problem:
    sizes = (96, 32, 32) if options.tiny else (4000, 200, 2000)
    places = torch.randperm(len(labels), generator=generator(seed, "preconditioned"))[: sum(sizes)]
    source, target, test = places.split(sizes)
    rows: Callable[[Tensor], Any] = lambda at: (  # noqa: E731
        inputs[at] if isinstance(inputs, Tensor) else {name: value[at] for name, value in inputs.items()}
    )
    return Problem(
        model, (rows(source), labels[source]), truth[source], (rows(target), truth[target]),
        (rows(test), truth[test]), settings,
    )  # fmt: skip


def run(name: str, line: str, seed: int, options: Any) -> dict[str, Any]:
    problem = PROBLEMS[name](seed, options)
    settings = {**problem.settings, **({"epochs": 1} if options.tiny else {})}
    begin = time.perf_counter()
    how = {"method": LINES[line](), "seed": seed, "device": options.device, **settings}
    result = soseleto.fit(problem.model, problem.source, problem.target, **how)
    seconds = time.perf_counter() - begin
    found = {"problem": name, "method": line, "seed": seed, "accuracy": result.evaluate(problem.test)["accuracy"]}
    wrong = problem.source[1] != problem.truth
    if line != "ordinary":
        found |= {"AUROC weight": auroc(result.weights, wrong), "AUROC score": auroc(result.scores, wrong)}
    return found | {"seconds": round(seconds, 1), "engine": result.engine}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=list(LINES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minilm", type=Path, default=data_root() / "pretrained" / "minilm")
    parser.add_argument("--tiny", action="store_true", help="small sizes and a random model, to test that it runs")
    options = parser.parse_args(argv)
    _CACHE.clear()
    kept: Path | None = options.out
    rows = json.loads(kept.read_text("utf-8"))["rows"] if kept is not None and kept.exists() else []
    done = {(row["problem"], row["method"], row["seed"]) for row in rows}
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    for job in [(problem, line, seed) for problem in options.problems for seed in seeds for line in options.lines]:
        if job not in done:
            rows.append(run(*job, options))
            write(kept, "preconditioned", torch.device(options.device), rows)
    show("Plain and preconditioned alignments", rows)
    return rows


if __name__ == "__main__":
    main()
