"""Whole training steps of real architectures: ours against an ordinary step of the same model and optimizer.

    python benchmarks/models.py [--device cpu|cuda] [--small] [--only LINE ...] [--engine NAME] [--eager] [--out FILE]
    python benchmarks/models.py --host NAME [--out FILE]

An ordinary step is forward, backward and SGD on the source batch of B examples; ours adds a target batch of T, B exact
alignments and the update of the weights. ``times`` is the ratio of the two, timed in turns in one run, on a GPU as CUDA
graphs where both can be captured. ``memory`` is the peak of our step over that of an ordinary step on B+T examples,
both above what was allocated before. Steps that hold a proof of the engine are not timed. ``--small`` is a BERT of two
layers, for a CPU. A line that fails, because memory runs out or an engine declines, is reported, and the others follow.
All but the ResNets and Quick need transformers.

``--host`` measures what an eager step costs the host, which is what bounds it on a fast GPU: on a CPU, with models of
six layers whose tensors are so small that Python and the dispatch of operators take nearly all of the time. It is the
least CPU time of one thread over steps in turns, and the number of operators dispatched. NAME names the code that is
measured, the one that PYTHONPATH leads to; rows of other names stay in the file.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from common import arguments, as_graph, images, interleaved, settle, show, write
from memory import peak_bytes
from soseleto.algorithm import Soseleto
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.errors import SoseletoError
from soseleto.models.architectures import quick, resnet18
from soseleto.task.cuda_graph import as_if_recording
from soseleto.task.optimizers import sgd
from soseleto.task.task import Task

CLASSES = 10
PART = 128  # tokens whose logits exist at one time


class Loss:
    """One loss per example from the model's outputs, in the precision of the line."""

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor], precision: torch.dtype | None) -> None:
        self._loss, self._precision = loss, precision

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        device = batch.inputs.device.type
        with torch.autocast(device, self._precision, enabled=self._precision is not None):
            return self._loss(model, batch)

    target = source

    def can_join(self, source: Batch, target: Batch) -> bool:
        return True

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        return self.source(model, joined(source, target))


def joined(source: Batch, target: Batch) -> Batch:
    parts = ((source.index, target.index), (source.inputs, target.inputs), (source.labels, target.labels))
    return Batch(*(torch.cat(part) for part in parts))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch.inputs)
    return F.cross_entropy(getattr(out, "logits", out).float(), batch.labels, reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens of a sequence, with logits for ``PART`` tokens at a time."""
    hidden = model.base_model(batch.inputs).last_hidden_state[:, :-1]
    wanted = batch.inputs[:, 1:]
    parts = zip(hidden.split(PART, 1), wanted.split(PART, 1), strict=True)
    losses = [checkpoint(_of_part, model, h, ids, use_reentrant=False) for h, ids in parts]
    return torch.stack(losses).sum(0) / wanted.shape[1]


def _of_part(model: nn.Module, hidden: Tensor, wanted: Tensor) -> Tensor:
    logits = model.get_output_embeddings()(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted).sum(1)


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    name: str
    make: Callable[[], nn.Module]
    source: int
    target: int
    inputs: Callable[[int], Tensor]
    loss: Callable[[nn.Module, Batch], Tensor] = classify
    precision: torch.dtype | None = torch.bfloat16
    channels_last: bool = False
    at_most: float | None = None
    at_most_memory: float | None = None
    graph: bool = True  # False where kernels take much longer than their launches, and two graphs much memory

    def batch(self, n: int, device: torch.device) -> Batch:
        inputs = self.inputs(n).to(device)
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return Batch(torch.arange(n, device=device), inputs, torch.randint(CLASSES, (n,)).to(device))

    def model(self, device: torch.device, *, checkpointed: bool = False) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().to(device).train()
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return model


def words(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(vocabulary, (n, length))


def pictures(n: int) -> Tensor:
    return torch.randn(n, 3, 224, 224)


def of_transformers(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model class of transformers with random weights and without dropout."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, kind)
        config = made.config_class(num_labels=CLASSES, **settings)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        return made(config)

    return make


LLAMA_135M = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.body = nn.Sequential()
        for number, (before, after, kernel, step) in enumerate(sizes):
            self.body.append(nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            self.body.append(nn.BatchNorm2d(after))
            if number < 2:
                self.body.append(nn.ReLU(inplace=True))
        changes = stride != 1 or channels != 4 * width
        self.short = (
            nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet50() -> nn.Module:
    """As in torchvision."""
    blocks: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not number else 1))
            channels = 4 * (64 << stage)
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def lines(*, small: bool) -> list[Line]:
    bert, gpt2 = "BertForSequenceClassification", "GPT2LMHeadModel"
    if small:
        settings = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
        tiny = of_transformers(bert, **settings)
        return [Line("BERT tiny", tiny, 32, 4, words(30522, 128), precision=None, at_most=1.45)]
    base: dict[str, Any] = {"at_most": 1.30, "at_most_memory": 1.10}
    llama: dict[str, Any] = {"at_most": 1.20, "at_most_memory": 1.10, "graph": False}
    batch_norm: dict[str, Any] = {"channels_last": True, "at_most": 1.85}
    llama_of = "LlamaForCausalLM"
    return [
        Line("BERT-base", of_transformers(bert), 64, 8, words(30522, 128), **base),
        Line("ViT-B/16", of_transformers("ViTForImageClassification"), 64, 8, pictures, **base),
        Line("GPT-2", of_transformers(gpt2, use_cache=False), 64, 8, words(50257, 128), next_token, **base),
        Line("Llama 135M", of_transformers(llama_of, **LLAMA_135M), 32, 2, words(49152, 1024), next_token, **llama),
        Line("Llama 1B", of_transformers(llama_of, **LLAMA_1B), 32, 2, words(128256, 1024), next_token, **llama),
        Line("ResNet-18", lambda: resnet18(norm=nn.BatchNorm2d), 256, 32, images, **batch_norm),
        Line("ResNet-50", resnet50, 256, 32, pictures, **batch_norm),
        Line("Quick fp32", quick, 256, 32, images, precision=None, at_most=1.49),
        Line("Quick bf16", quick, 256, 32, images, at_most=1.50),
    ]


def host_lines() -> list[Line]:
    sizes = {"hidden_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 48}
    gpt2 = {"n_embd": 24, "n_layer": 6, "n_head": 2, "vocab_size": 64, "n_positions": 16, "use_cache": False}
    of_gpt2 = of_transformers("GPT2LMHeadModel", **gpt2, bos_token_id=0, eos_token_id=0)
    bert = of_transformers("BertForSequenceClassification", vocab_size=64, **sizes)
    vit = of_transformers("ViTForImageClassification", image_size=8, patch_size=4, **sizes)
    return [
        Line("BERT", bert, 8, 2, words(64, 8), precision=None),
        Line("ViT", vit, 8, 2, lambda n: torch.randn(n, 3, 8, 8), precision=None),
        Line("GPT-2", of_gpt2, 8, 2, words(64, 8), next_token, precision=None),
    ]


def task_for(line: Line, model: nn.Module, device: torch.device) -> Task:
    return Task(
        model=model,
        losses=Loss(line.loss, line.precision),
        n_source=line.source,
        steps=1000,
        shared=frozenset(trainable(model)),
        target_head=frozenset(),
        make_optimizer=partial(sgd, lr=1e-4, weight_decay=5e-4),
        device=device,
        guard=lambda side, losses, index: None,
    )


def ordinary_step(line: Line, model: nn.Module) -> Callable[[Batch], None]:
    optimizer, losses = partial(sgd, lr=1e-4, weight_decay=5e-4)(model.parameters()), Loss(line.loss, line.precision)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        losses.source(model, batch).mean().backward()
        optimizer.step()

    return step


def measure(line: Line, engine: str, device: torch.device, *, checkpointed: bool = False) -> dict[str, Any]:
    """One row; model and optimizer of our step are freed before those of the ordinary one are made."""
    source, target = line.batch(line.source, device), line.batch(line.target, device)
    method = Soseleto(engine=engine)
    model = line.model(device, checkpointed=checkpointed)
    state = method.init(task_for(line, model, device))
    plain = ordinary_step(line, line.model(device, checkpointed=checkpointed))
    both = joined(source, target)

    def ours() -> None:
        method.step(state, source, target)

    with as_if_recording() if line.graph else nullcontext():
        settle(ours, state.engine)
        plain(both)
        memory = peak_bytes(ours, device), peak_bytes(lambda: plain(both), device)
        seconds, is_graph = timed({"ordinary": lambda: plain(source), "ours": ours}, device, graph=line.graph)
    return {
        "model": line.name,
        "precision": "fp32" if line.precision is None else "bf16",
        "B": line.source,
        "T": line.target,
        "checkpointed": checkpointed,
        "engine": state.engine.name,
        "graph": is_graph,
        "ordinary ms": seconds["ordinary"] * 1e3,
        "ours ms": seconds["ours"] * 1e3,
        "times": seconds["ours"] / seconds["ordinary"],
        "at most": line.at_most,
        "ordinary MiB": memory[1] / 2**20,
        "memory": memory[0] / memory[1],
        "memory at most": line.at_most_memory,
        "remark": "; ".join(getattr(state.engine, "messages", ())),
    }


class Dispatched(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_row(line: Line, rounds: int = 100) -> dict[str, Any]:
    """CPU time and operators of an ordinary step with fused AdamW, and of ours in steps without a proof or check."""
    device, adamw = torch.device("cpu"), partial(torch.optim.AdamW, lr=1e-5, fused=True)
    source, target, method = line.batch(line.source, device), line.batch(line.target, device), Soseleto()
    state = method.init(replace(task_for(line, line.model(device), device), make_optimizer=adamw))
    plain = line.model(device)
    optimizer, losses = adamw(plain.parameters()), Loss(line.loss, line.precision)

    def ordinary() -> None:
        optimizer.zero_grad()
        losses.source(plain, source).mean().backward()
        optimizer.step()

    def ours() -> None:
        method.step(state, source, target)

    settle(ours, state.engine)
    seconds: dict[str, list[float]] = {"ordinary": [], "ours": []}
    counts: dict[str, int] = {}
    for _ in range(rounds):
        while state.engine.schedule is not None and state.engine.schedule.is_due:
            ours()
        for name, run in (("ordinary", ordinary), ("ours", ours)):
            begin = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - begin)
    for name, run in (("ordinary", ordinary), ("ours", ours)):
        with Dispatched() as dispatched:
            run()
        counts[name] = dispatched.count
    return {
        "model": line.name,
        "B": line.source,
        "T": line.target,
        "engine": state.engine.name,
        "ordinary ms": min(seconds["ordinary"]) * 1e3,
        "ours ms": min(seconds["ours"]) * 1e3,
        "times": min(seconds["ours"]) / min(seconds["ordinary"]),
        "ordinary operators": counts["ordinary"],
        "our operators": counts["ours"],
        "times operators": counts["ours"] / counts["ordinary"],
    }


def host_rows(name: str, out: Path | None) -> list[dict[str, Any]]:
    """Those of the code that is measured, after those that the file has of other code."""
    torch.set_num_threads(1)
    known = json.loads(out.read_text("utf-8"))["rows"] if out is not None and out.exists() else []
    return [row for row in known if row["code"] != name] + [{"code": name, **host_row(line)} for line in host_lines()]


def timed(
    runs: dict[str, Callable[[], object]], device: torch.device, *, graph: bool = True, rounds: int = 5
) -> tuple[dict[str, float], bool]:
    """Median seconds, and whether the steps were CUDA graphs: all of them, or none, which take ``rounds``."""
    how = {"rounds": rounds, "calls": 1, "warm_up": 1} if device.type == "cpu" or not graph else {}
    if not graph:
        return interleaved(runs, device, **how), False
    try:
        graphs = {name: as_graph(run, device) for name, run in runs.items()}
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"no CUDA graph: {str(error).splitlines()[0][:160]}", file=sys.stderr)
        return interleaved(runs, device, **how), False
    return interleaved(graphs, device, **how), device.type == "cuda"


def guarded(line: Line, engine: str, device: torch.device) -> dict[str, Any]:
    """The line's row; with checkpoints in every layer if memory runs out without, and the error if it fails."""
    failed = "out of memory"
    for checkpointed in (False, True):
        try:
            return measure(line, engine, device, checkpointed=checkpointed)
        except torch.OutOfMemoryError:
            if line.loss is not next_token:
                break
        except (SoseletoError, RuntimeError, ImportError) as error:
            failed = str(error).splitlines()[0]
            break
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"{line.name}: {failed}", file=sys.stderr)
    return {"model": line.name, "B": line.source, "T": line.target, "remark": failed}


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What --check reports."""
    found = []
    for row in rows:
        if "times" not in row:
            found.append(f"{row['model']}: {row['remark']}")
            continue
        for what, most in (("times", "at most"), ("memory", "memory at most")):
            if row[most] is not None and row[what] > row[most]:
                found.append(f"{row['model']}: {what} {row[what]:.2f}, more than {row[most]:g}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--small", action="store_true", help="a small BERT, for a CPU")
    parser.add_argument("--only", nargs="+", default=[], help="these lines only, by their names in the table")
    parser.add_argument("--engine", default="auto", help="the engine of our step")
    parser.add_argument("--eager", action="store_true", help="one kernel at a time, without CUDA graphs")
    parser.add_argument("--host", metavar="NAME", help="CPU time and operators of eager steps, under this name")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    known = lines(small=options.small)
    if unknown := set(options.only) - {line.name for line in known}:
        parser.error(f"no line {min(unknown)!r}: choose from {', '.join(line.name for line in known)}")
    if options.host is not None:
        rows = host_rows(options.host, options.out)
        write(options.out, "host", torch.device("cpu"), rows)
        show("Host time of an eager step", rows)
        return
    rows = []
    for line in known:
        if not options.only or line.name in options.only:
            rows.append(guarded(replace(line, graph=False) if options.eager else line, options.engine, device))
            write(options.out, "models", device, rows)  # after every line, in case the run is interrupted
    show("A step of ours against an ordinary step", rows)
    if options.check and (found := shortfalls(rows)):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
