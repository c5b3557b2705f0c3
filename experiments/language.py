"""A language model fine-tuned for one task on a pool of mixed use: weights learned in the run, and other selections.

SmolLM2-135M is trained for one pass over a pool (see ``language_pools``), in the same number of steps on every line;
lines that choose before the training (see ``language_training``) pass over what they chose several times. Measured is
the loss per token of the answers to 1,319 test questions. The cost of choosing is not counted, in favour of the others.

    python -m experiments language --methods soseleto all right --set pool=few --out FILE
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from experiments.experiment import Cell, Experiment, Lines, Root, fields_of, line
from experiments.language_pools import EXCHANGED, FOREIGN, KINDS, RIGHT, TINY, Pool, draw, folder
from experiments.language_training import Config, Training
from experiments.measures import auroc
from experiments.results import Row, table, with_count
from experiments.training import drawn
from soseleto.parallel.reducer import choose_device

NAME = "language"
LINES: Lines = {
    "all": line("unweighted", "fixed", criterion="all"),
    "right": line("oracle: right ones only, in the same batches", "fixed", criterion="right"),
    "topic": line("oracle: right and exchanged ones, in the same batches", "fixed", criterion="topic"),
    "soseleto": line("**SOSELETO**", "learned", criterion="features"),
    "soseleto_shuffled": line("… weights shuffled", "learned", criterion="features, shuffled"),
    "soseleto_plain": line("… without Adam's scaling", "learned", criterion="features, plain"),
    "soseleto_after": line("… without features, weights after the visit", "learned", criterion="after"),
    "greats": line("GREATS-like: the better half of each batch", "learned", criterion="greats"),
    "similarity": line("weights by similarity to the target (ADAPT-like)", "fixed", criterion="similarity"),
    "random": line("random 10 %", "chosen", criterion="random"),
    "balanced": line("10 %, balanced by source file", "chosen", criterion="balanced"),
    "shortest": line("shortest 10 %", "chosen", criterion="shortest"),
    "longest": line("longest 10 %", "chosen", criterion="longest"),
    "bm25": line("BM25, best 10 %", "chosen", criterion="bm25"),
    "embeddings_once": line(
        "the model's embeddings, best 10 %, in the same batches", "fixed", criterion="nearest tenth"
    ),
    "embeddings": line("the model's embeddings (RDS+), best 10 %", "chosen", criterion="embeddings"),
    "loss": line("smallest loss, 10 %", "chosen", criterion="loss"),
    "less": line("LESS-like: alignments after a warm-up, best 10 %", "chosen", criterion="less"),
}
COLUMNS = {
    "700 right, 700 exchanged, 6,000 foreign": {"pool": "exchanged", "adapter": "full"},
    "370 right, 7,030 foreign": {"pool": "few", "adapter": "full"},
    "370 right, 370 exchanged, 6,660 foreign": {"pool": "few exchanged", "adapter": "full"},
}
SMALL: Mapping[str, Any] = {"model": TINY, "part": 0.02, "batch_size": 16, "target_batch_size": 4, "max_tokens": 96,
                            "precision": "float32", "lr": 3e-3}  # fmt: skip


def configuration(method: str, *, seed: int = 0, small: bool = False, **changes: Any) -> Config:
    return Config(seed=seed, **fields_of(LINES, method, SMALL if small else {}, changes))


def cells(seed: int) -> list[Cell]:
    return [(name, column) for column in COLUMNS.values() for name in LINES]


def data(run: Config, root: Root, device: str) -> Pool:
    return draw(run.pool, run.seed, root, part=run.part, model=run.model, longest=run.max_tokens)


def network(run: Config, root: Root, device: torch.device) -> nn.Module:
    if run.model == TINY:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        with drawn(run.seed, "language/network"):
            made: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    else:
        made = AutoModelForCausalLM.from_pretrained(folder(run.model, root), dtype=torch.float32)
    if run.adapter == "lora":
        import peft

        with drawn(run.seed, "language/adapter"):
            made = peft.get_peft_model(made, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    return made.to(device).train()


def measure(run: Config, data: Pool, root: Root, device: str) -> Row:
    place = choose_device(device)
    training = Training(run, data, partial(network, run, root, place), place)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model, learned, scores = getattr(training, run.base)()
    seconds = time.perf_counter() - begin
    kinds = data.kinds
    row: Row = {"tokens_per_second": training.tokens / seconds, "tokens": training.tokens, "steps": training.steps}
    row["weights"] = {KINDS[k]: round(float(learned[kinds == k].mean()), 4) for k in kinds.unique().tolist()}
    if scores is not None:
        for kind in (EXCHANGED, FOREIGN):
            among = (kinds == RIGHT) | (kinds == kind)
            if bool((kinds == kind).any()):
                row[f"auroc_{KINDS[kind]}"] = round(auroc(scores[among], kinds[among] == kind), 4)
    if place.type == "cuda":
        row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    row["heldout_nll"] = training.nll(model, data.heldout)
    return row if run.select else {**row, "nll": training.nll(model, data.test)}


EXPERIMENT = Experiment(NAME, LINES, 3, configuration, cells, data, measure)


def gain_table(rows: Sequence[Row]) -> str:
    """How much smaller the loss is than that of "unweighted" in the same draw."""
    losses = {(r["method"], *r["setting"].values(), r["seed"]): r["nll"] for r in rows if "nll" in r}
    plain = [losses.get(("all", *r["setting"].values(), r["seed"])) for r in rows]
    pairs = [(r, p) for r, p in zip(rows, plain, strict=True) if r["method"] != "all" and "nll" in r and p]
    return table_of([{**row, "gain": without - row["nll"]} for row, without in pairs], "gain")


def table_of(rows: Sequence[Row], name: str) -> str:
    """A hundred times that entry of the rows that have it."""
    return table(
        [{**row, "value": 100.0 * row[name]} for row in rows if name in row],
        methods={name: title for name, (title, _) in LINES.items()},
        settings=COLUMNS,
        show=with_count(EXPERIMENT.seeds),
    )


TABLES = {
    "loss": partial(table_of, name="nll"),
    "gain": gain_table,
    "exchanged": partial(table_of, name="auroc_exchanged"),
    "foreign": partial(table_of, name="auroc_foreign"),
}
