"""A language model fine-tuned for one task on a pool of mixed use: weights learned in the run, and an oracle.

SmolLM2-135M is trained for one pass over a pool (see ``language_pools``), in the same number of steps on every line.
Measured is the loss per token of the answers to 1,319 test questions.

    python -m experiments language --methods soseleto all right --set pool=few --out FILE
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from experiments.data import data_root
from experiments.experiment import Cell, Experiment, Lines, Root, Run, fields_of, line
from experiments.language_pools import EXCHANGED, FOREIGN, KINDS, POOLS, RIGHT, Pool, Tokens
from experiments.language_pools import drawn as drawn_pool
from experiments.measures import auroc
from experiments.results import Row, table, with_count
from experiments.training import drawn
from soseleto import Selection, Soseleto
from soseleto.data import generator
from soseleto.data.batches import Batch, TargetCycle
from soseleto.integrations.huggingface import Join, default_loss, mean_embeddings
from soseleto.parallel.reducer import choose_device
from soseleto.pieces import from_features, preconditioned
from soseleto.pieces.piece import State
from soseleto.task.task import Task

NAME = "language"
WARM_UP = 5  # steps
TINY = "tiny"  # random weights, bytes as tokens
MEASURED = 64  # texts in a pass without gradient
Trained = tuple[nn.Module, Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """base: "fixed" (weights known beforehand) or "learned"; criterion: which weights
    adapter: "full", all parameters are trained
    part: of the pool's size, for tests; epochs: passes over the pool
    """

    COLUMN = ("pool", "adapter")
    FIXED: ClassVar = {"share": 0.1}

    pool: str
    adapter: str = "full"
    criterion: str = ""
    epochs: int = 1
    batch_size: int = 64
    target_batch_size: int = 16
    max_tokens: int = 384
    lr: float = 1e-4
    schedule: str = "constant"
    model: str = "smollm2-135m"
    precision: str = "bfloat16"
    part: float = 1.0


@dataclass(frozen=True)
class shuffled_from_features(from_features):
    """The control: every example has the weight of another one of its batch, whose order is random."""

    def before(self, rows: Tensor, state: State, source: Batch, task: Task) -> None:
        super().before(rows, state, source, task)
        rows[0].copy_(rows[0].roll(1))


LINES: Lines = {
    "all": line("unweighted", "fixed", criterion="all"),
    "right": line("oracle: right ones only, in the same batches", "fixed", criterion="right"),
    "soseleto": line("**SOSELETO**", "learned", criterion="features"),
    "soseleto_shuffled": line("… weights shuffled", "learned", criterion="features, shuffled"),
}
SMALL: Mapping[str, Any] = {"model": TINY, "part": 0.02, "batch_size": 16, "target_batch_size": 4, "max_tokens": 96,
                            "precision": "float32", "lr": 3e-3}  # fmt: skip


def configuration(method: str, *, seed: int = 0, small: bool = False, **changes: Any) -> Config:
    return Config(seed=seed, **fields_of(LINES, method, SMALL if small else {}, changes))


def cells(seed: int) -> list[Cell]:
    return [(name, {"pool": pool}) for pool in POOLS for name in LINES]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A pool with its tokens."""

    pool: Pool
    source: Tokens
    target: Tokens
    heldout: Tokens
    test: Tokens


def data(run: Config, root: Root, device: str) -> Prepared:
    return prepared(run.pool, run.seed, root, run.part, run.model, run.max_tokens)


@lru_cache(maxsize=1)
def prepared(name: str, seed: int, root: Root, part: float, model: str, longest: int) -> Prepared:
    pool = drawn_pool(name, seed, root, part=part)
    of = partial(Tokens.of, encode=encoder(model, root), longest=longest)
    return Prepared(pool, *map(of, (pool.source, pool.target, pool.heldout, pool.test)))


def encoder(model: str, root: Root) -> Callable[[str], list[int]]:
    """Token ids of a text."""
    if model == TINY:
        return lambda text: list(text.encode())
    found = Tokenizer.from_file(str(folder(model, root) / "tokenizer.json"))
    return lambda text: list(found.encode(text, add_special_tokens=False).ids)


def folder(model: str, root: Root) -> Path:
    return data_root(root) / "pretrained" / model


def network(run: Config, root: Root, device: torch.device) -> nn.Module:
    if run.model == TINY:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        with drawn(run.seed, "language/network"):
            made = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    else:
        made = AutoModelForCausalLM.from_pretrained(folder(run.model, root), dtype=torch.float32)
    return made.to(device).train()


def measure(run: Config, data: Prepared, root: Root, device: str) -> Row:
    place = choose_device(device)
    training = Training(run, data, partial(network, run, root, place), place)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model, learned, scores = getattr(training, run.base)()
    seconds = time.perf_counter() - begin
    kinds = data.pool.kinds
    weights = {KINDS[k]: round(float(learned[kinds == k].mean()), 4) for k in kinds.unique().tolist()}
    row: Row = {"tokens_per_second": training.tokens / seconds, "steps": training.steps, "weights": weights}
    if scores is not None:
        for kind in (EXCHANGED, FOREIGN):
            among = (kinds == RIGHT) | (kinds == kind)
            if bool((kinds == kind).any()):
                row[f"auroc_{KINDS[kind]}"] = round(auroc(scores[among], kinds[among] == kind), 4)
    if place.type == "cuda":
        row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    row["heldout_nll"] = training.nll(model, data.heldout)
    return row if run.select else {**row, "nll": training.nll(model, data.test)}


@dataclass
class Training:
    """``fixed`` and ``learned`` return a trained model, weights, and scores: the higher, the better."""

    run: Config
    data: Prepared
    make: Callable[[], nn.Module]
    device: torch.device
    tokens: int = 0
    steps: int = 0

    def fixed(self) -> Trained:
        kinds = self.data.pool.kinds
        weights = torch.ones(len(kinds)) if self.run.criterion == "all" else (kinds == RIGHT).float()
        model = self.make()
        optimizer, schedule = self._optimizer(model)
        for index in self._batches():
            alpha = weights[index].to(self.device)
            if bool(alpha.any()):
                losses = self._losses(model, self._source(index))
                ((alpha * losses).sum() / alpha.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        return model, weights, None

    def learned(self) -> Trained:
        model, n, target = self.make(), len(self.data.source), self.data.target
        optimizer, schedule = self._optimizer(model)
        piece = from_features() if self.run.criterion == "features" else shuffled_from_features()
        selection = Selection(
            model,
            n_source=n,
            loss=default_loss(model),
            features=mean_embeddings(model),
            method=Soseleto(direction=preconditioned(), alignment=piece),
            optimizer=optimizer,
            join=Join(0),
        )
        cycle = TargetCycle(len(target), min(self.run.target_batch_size, len(target)), self.run.seed)
        for step, index in enumerate(self._batches()):
            of_target = target.batch(cycle(step).tolist(), self.device)
            with self._autocast():
                selection.backward(self._source(index), of_target, index=index)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model, selection.weights, selection.scores

    @torch.no_grad()
    def nll(self, model: nn.Module, tokens: Tokens) -> float:
        """The loss per token of the answers."""
        total, count = 0.0, 0
        for places in torch.arange(len(tokens)).split(MEASURED):
            batch = tokens.batch(places.tolist(), self.device)
            of_texts = (batch["labels"][:, 1:] >= 0).sum(1)
            total += float((self._losses(model.eval(), batch).double() * of_texts).sum())
            count += int(of_texts.sum())
        return total / count

    def _batches(self) -> Sequence[Tensor]:
        """Random batches, pass after pass over the pool."""
        n, size = len(self.data.source), self.run.batch_size
        steps = self.run.epochs * max(1, n // size)
        order: list[Tensor] = []
        while sum(map(len, order)) < steps * size:
            order.append(torch.randperm(n, generator=generator(self.run.seed, "language/order", len(order))))
        return torch.cat(order)[: steps * size].split(size)

    def _source(self, index: Tensor) -> dict[str, Tensor]:
        batch = self.data.source.batch(index.tolist(), self.device)
        self.tokens, self.steps = self.tokens + int(batch["attention_mask"].sum()), self.steps + 1
        return batch

    def _losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with self._autocast():
            losses: Tensor = default_loss(model)(model, batch)
        return losses

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, getattr(torch, self.run.precision), enabled=self.run.precision != "float32"
        )

    def _optimizer(self, model: nn.Module) -> tuple[torch.optim.AdamW, LambdaLR]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.run.lr, weight_decay=self.run.weight_decay)
        return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))


EXPERIMENT = Experiment(NAME, LINES, 3, configuration, cells, data, measure)

COLUMNS = {
    "exchanged": "700 right, 700 exchanged, 6,000 foreign",
    "few": "370 right, 7,030 foreign",
    "few exchanged": "370 right, 370 exchanged, 6,660 foreign",
}


def loss_table(rows: Sequence[Row]) -> str:
    """Loss per token of the answers to the test questions, times 100."""
    found = [{**row, "value": 100.0 * row["nll"]} for row in rows if "nll" in row]
    return _table(found)


def closed_table(rows: Sequence[Row]) -> str:
    """Percent of the way from "unweighted" to "right ones only" that a line goes, in the same draw."""
    losses = {(r["method"], r["setting"]["pool"], r["seed"]): r["nll"] for r in rows if "nll" in r}
    found = []
    for row in rows:
        of_draw = [losses.get((name, row["setting"]["pool"], row["seed"])) for name in ("all", "right")]
        if "nll" in row and row["method"] not in ("all", "right") and None not in of_draw:
            worst, best = of_draw
            found.append({**row, "value": 100.0 * (worst - row["nll"]) / (worst - best)})  # type: ignore[operator]
    return _table(found)


def auroc_table(rows: Sequence[Row], kind: str) -> str:
    """100·AUROC of right ones against those of another kind, by score."""
    name = f"auroc_{kind}"
    return _table([{**row, "value": 100.0 * row[name]} for row in rows if name in row])


def _table(rows: Sequence[Row]) -> str:
    return table(
        rows,
        methods={name: title for name, (title, _) in LINES.items()},
        settings={title: {"pool": pool, "adapter": "full"} for pool, title in COLUMNS.items()},
        show=with_count(EXPERIMENT.seeds),
    )


TABLES = {
    "loss": loss_table,
    "closed": closed_table,
    "exchanged": partial(auroc_table, kind="exchanged"),
    "foreign": partial(auroc_table, kind="foreign"),
}
