"""Fine-tuning of MiniLM: our steps against plain ones of the same model, and SoseletoTrainer against Trainer.

    python benchmarks/fine_tuning.py [--device cpu|cuda] [--minilm FOLDER] [--only fit trainer] [--out FILE] [--check]

``fit``: the step of ``soseleto.fit`` (source batch of B texts, target batch of T, AdamW, engine ``auto``) against
forward, backward and AdamW on the source batch alone; on a GPU in bfloat16, with both as CUDA graphs and with both
eager. It is that of the method which ``fit`` chooses where many labels are wrong, by the alignments of the last blocks,
and that of ``Soseleto()``, by all layers. ``trainer``: ``SoseletoTrainer`` against ``transformers.Trainer`` with the
same model, data and arguments, in seconds per step over a window of steps without a proof of the engine; they train in
turns, and the median is taken.

``memory`` is the peak of our step over that of a plain step on B+T texts, both above what was allocated before; on a
CPU it counts tensors. ``whole memory`` (GPU) is the peak of everything, model, optimizer and running means included,
over that of plain fine-tuning on B texts. Without ``--minilm`` the model has MiniLM's sizes and random weights. Texts
are random tokens, 32 to 128 a text, padded to 128. Needs transformers and accelerate.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from common import arguments, settle, show, write
from memory import peak_bytes
from models import timed
from soseleto.algorithm import Soseleto
from soseleto.data.batches import Batch
from soseleto.defaults import PRETRAINED_LR, resolve
from soseleto.engines import trainable
from soseleto.integrations.huggingface import SoseletoTrainer
from soseleto.models.pretrained import PretrainedText, make_text_model
from soseleto.task.cuda_graph import as_if_recording
from soseleto.task.losses import NoisyLosses, Precision
from soseleto.task.optimizers import adamw
from soseleto.task.task import Task

CLASSES = 4
PARTS = ("fit", "trainer")
AT_MOST = {"fit": 1.30, "trainer": 1.35}
AT_MOST_MEMORY = 1.15
MINILM = {
    "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "vocab_size": 30522,
}  # fmt: skip
TINY = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "vocab_size": 40,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The model, the sizes of the batches, and how long is measured.

    folder: of the model's weights; without one they are random, in the architecture of ``config``
    before, steps: of a training by a trainer, steps that are not timed and steps that are; proofs of the engine are
        held at steps 1 to 8, 16, 32 and 64
    rounds: trainings of each trainer; step_rounds: of single steps, where these are no CUDA graphs
    """

    config: Mapping[str, Any]
    folder: Path | None
    source: int
    target: int
    tokens: int
    before: int
    steps: int
    rounds: int
    device: torch.device
    step_rounds: int = 15

    @property
    def precision(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device.type == "cuda" else None

    def ids(self, n: int) -> tuple[Tensor, Tensor]:
        """Random tokens (n, tokens) with their mask."""
        lengths = torch.randint(self.tokens // 4, self.tokens + 1, (n, 1))
        mask = (torch.arange(self.tokens) < lengths).long()
        return torch.randint(1, self.config["vocab_size"], (n, self.tokens)) * mask, mask

    def batch(self, n: int) -> Batch:
        ids, mask = (tensor.to(self.device) for tensor in self.ids(n))
        labels = torch.randint(CLASSES, (n,)).to(self.device)
        return Batch(torch.arange(n, device=self.device), {"input_ids": ids, "attention_mask": mask}, labels)

    def fit_model(self) -> nn.Module:
        """As ``soseleto fit --model hf:FOLDER`` makes it."""
        torch.manual_seed(0)
        if self.folder is not None:
            made = make_text_model(f"hf:{self.folder}", "noisy", classes=CLASSES)
        else:
            made = PretrainedText(self.config, "", {}, pad=0, longest=self.tokens).build("noisy", classes=CLASSES)
        return made.to(self.device).train()

    def trainer_model(self) -> nn.Module:
        """As users of transformers make it."""
        torch.manual_seed(0)
        auto = transformers.AutoModelForSequenceClassification
        if self.folder is not None:
            model: nn.Module = auto.from_pretrained(self.folder, num_labels=CLASSES)
        else:
            model = auto.from_config(transformers.AutoConfig.for_model(**self.config, num_labels=CLASSES))
        return model


# --- the step of fit ----------------------------------------------------------------------------------------------


def many_wrong(model: nn.Module) -> Soseleto:
    """What ``fit`` chooses where many labels are wrong."""
    method = resolve(model, classes=True, ends_in_linear=True, wrong_share=0.3).method
    assert isinstance(method, Soseleto)
    return method


METHODS: Mapping[str, Callable[[nn.Module], Soseleto]] = {
    "many wrong": many_wrong,
    "Soseleto()": lambda model: Soseleto(),
}


def fit_row(case: Case, name: str, *, graph: bool) -> dict[str, Any]:
    """Time and memory of a step by ``auto``, of the method by that name."""
    with as_if_recording() if graph else nullcontext():
        start = _allocated(case.device)
        ours, engine = our_step(case, METHODS[name])
        with_ours = _allocated(case.device)
        plain = plain_step(case)
        source, both = case.batch(case.source), case.batch(case.source + case.target)
        plain(source)
        with_plain = _allocated(case.device)
        peaks = [peak_bytes(run, case.device) for run in (ours, lambda: plain(both), lambda: plain(source))]
        whole = None
        if case.device.type == "cuda":
            whole = (with_ours - start + peaks[0]) / (with_plain - with_ours + peaks[2])
        seconds, is_graph = timed(
            {"plain": lambda: plain(source), "ours": ours}, case.device, graph=graph, rounds=case.step_rounds
        )
    return {
        "part": "fit",
        "method": name,
        "B": case.source,
        "T": case.target,
        "tokens": case.tokens,
        "precision": _name(case.precision),
        "graph": is_graph,
        "engine": engine(),
        "plain ms": seconds["plain"] * 1e3,
        "ours ms": seconds["ours"] * 1e3,
        "times": seconds["ours"] / seconds["plain"],
        "at most": AT_MOST["fit"] if is_graph or case.device.type == "cpu" else None,
        "plain MiB": peaks[1] / 2**20,
        "memory": peaks[0] / peaks[1],
        "whole memory": whole,
    }


def our_step(case: Case, made: Callable[[nn.Module], Soseleto]) -> tuple[Callable[[], object], Callable[[], str]]:
    """SOSELETO's step, after those that hold the first proofs, and the name of its engine."""
    model = case.fit_model()
    method = made(model)
    task = Task(
        model=model,
        losses=NoisyLosses(precision=Precision(case.precision)),
        n_source=case.source,
        steps=1000,
        shared=frozenset(trainable(model)),
        classes=CLASSES,
        target_head=frozenset(),
        make_optimizer=partial(adamw, lr=PRETRAINED_LR),
        device=case.device,
        guard=lambda side, losses, index: None,
    )
    state, source, target = method.init(task), case.batch(case.source), case.batch(case.target)
    settle(lambda: method.step(state, source, target), state.engine)
    return lambda: method.step(state, source, target), lambda: state.engine.name


def plain_step(case: Case) -> Callable[[Batch], None]:
    """Plain fine-tuning with the same optimizer."""
    model, precision = case.fit_model(), Precision(case.precision)
    optimizer = partial(adamw, lr=PRETRAINED_LR)(model.parameters())

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(precision(model, batch.inputs), batch.labels).backward()
        optimizer.step()

    return step


# --- trainers -----------------------------------------------------------------------------------------------------


class Items(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random texts as a Trainer reads them."""

    def __init__(self, case: Case, n: int) -> None:
        self._ids, self._mask = case.ids(n)
        self._labels = torch.randint(CLASSES, (n,))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[i], "attention_mask": self._mask[i], "labels": self._labels[i]}


class Window(transformers.TrainerCallback):  # type: ignore[misc]
    """Times the steps after the first ``before`` ones."""

    def __init__(self, case: Case) -> None:
        self._case, self._begin = case, 0.0
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self._case.before, self._case.before + self._case.steps):
            _synchronize(self._case.device)
            self.seconds = (time.perf_counter() - self._begin) / self._case.steps
            self._begin = time.perf_counter()


@dataclass(frozen=True)
class Trained:
    """One training: seconds per step, peak bytes of the whole training (GPU), and the engine of ours."""

    seconds: float
    peak: int | None
    engine: str | None


def trained(case: Case, kind: Callable[..., Any], folder: str, **more: Any) -> Trained:
    _clean(case.device)
    held, window = _allocated(case.device), Window(case)
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=case.source,
        max_steps=case.before + case.steps,
        learning_rate=PRETRAINED_LR,
        optim="adamw_torch_fused" if case.device.type == "cuda" else "adamw_torch",
        bf16=case.precision is not None,
        use_cpu=case.device.type == "cpu",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    texts = Items(case, case.source * 8)
    trainer = kind(model=case.trainer_model(), args=args, train_dataset=texts, callbacks=[window], **more)
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() - held if case.device.type == "cuda" else None
    return Trained(window.seconds, peak, trainer.selection.engine if kind is SoseletoTrainer else None)


def trainer_row(case: Case, *, graph: bool) -> dict[str, Any]:
    """SoseletoTrainer against Trainer, in turns."""
    trusted = Items(case, case.target * 8)
    plain, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(case.rounds):
            plain.append(trained(case, transformers.Trainer, folder))
            more = {"target_dataset": trusted, "target_batch_size": case.target, "cuda_graph": graph}
            more["method"] = Soseleto()  # by all layers; the default for classes needs no engine
            ours.append(trained(case, SoseletoTrainer, folder, **more))
    of_plain, of_ours = (statistics.median(one.seconds for one in those) for those in (plain, ours))
    peaks = plain[0].peak, ours[0].peak
    return {
        "part": "trainer",
        "B": case.source,
        "T": case.target,
        "tokens": case.tokens,
        "precision": _name(case.precision),
        "graph": graph,
        "engine": ours[0].engine,
        "plain ms": of_plain * 1e3,
        "ours ms": of_ours * 1e3,
        "times": of_ours / of_plain,
        "at most": AT_MOST["trainer"] if graph or case.device.type == "cpu" else None,
        "whole memory": None if peaks[0] is None or peaks[1] is None else peaks[1] / peaks[0],
    }


def shortfalls(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What --check reports."""
    found = []
    for row in rows:
        name = ", ".join(
            [row["part"], *([row["method"]] if "method" in row else []), *(["graph"] if row["graph"] else [])]
        )
        if row["engine"] != "layerwise":
            found.append(f"{name}: the engine is {row['engine']}, not layerwise")
        if row["at most"] is not None and row["times"] > row["at most"]:
            found.append(f"{name}: {row['times']:.2f}x a plain step, more than {row['at most']:g}x")
        if row.get("memory") is not None and row["memory"] > AT_MOST_MEMORY:
            found.append(f"{name}: {row['memory']:.2f}x the memory, more than {AT_MOST_MEMORY:g}x")
    return found


def _name(precision: torch.dtype | None) -> str:
    return "fp32" if precision is None else "bf16"


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clean(device: torch.device) -> None:
    """Free models and graphs of before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def case_of(options: Any) -> Case:
    device = torch.device(options.device)
    if options.tiny:
        return Case(TINY, None, 6, 2, 8, before=2, steps=2, rounds=1, device=device, step_rounds=1)
    how = {"before": 33, "steps": 30, "rounds": 5} if device.type == "cuda" else {"before": 9, "steps": 6, "rounds": 1}
    return Case(MINILM, options.minilm, options.batch, options.target_batch, options.tokens, **how, device=device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test that it runs")
    parser.add_argument("--minilm", type=Path, metavar="FOLDER", help="the pretrained model; random weights without it")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="one part of the table")
    parser.add_argument("--batch", type=int, default=64, help="B, source texts per step")
    parser.add_argument("--target-batch", type=int, default=8, help="T, target texts per step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that texts are padded to")
    options = parser.parse_args(argv)
    case, rows = case_of(options), list[dict[str, Any]]()
    graphs = (True, False) if case.device.type == "cuda" else (False,)
    jobs = {
        "fit": [partial(fit_row, case, name, graph=graph) for graph in graphs for name in METHODS],
        "trainer": [partial(trainer_row, case, graph=graph) for graph in graphs],
    }
    for job in [job for part in options.only for job in jobs[part]]:
        rows.append(job())
        _clean(case.device)
        write(options.out, "fine_tuning", case.device, rows)  # after every row, in case the run is interrupted
    show("Fine-tuning of MiniLM: a step of ours against a plain one", rows)
    if options.check and (found := shortfalls(rows)):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
