"""Fine-tuning of language models: a step with source weights against the same step without, in time and memory.

    python benchmarks/language.py [--device cpu|cuda] [--tiny] [--only NAME ...] [--out FILE] [--check]

Both in bfloat16 by autocast, with AdamW: ours by ``Selection`` with features, as ``SoseletoTrainer`` has it, on B texts
and B/16 of the target (one at least); the other by the model's own loss on the B texts alone. Both run one kernel at a
time (``time``) and both with all but the optimizer's part as a CUDA graph (``graph time``). Sizes are those of SmolLM2
135M and 360M and of Llama 3.2 1B, with random weights, fully trained and by LoRA of rank 16 on all linear layers, on
texts of 1,024 and of 4,096 tokens, half of which have labels. ``time`` and ``memory`` are ratios; memory is the peak of
everything, model and optimizer included, without graphs. Needs transformers and peft.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from common import arguments, as_graph, interleaved, settle, show, write
from memory import peak_bytes
from models import LLAMA_1B, LLAMA_135M
from soseleto import Selection
from soseleto.integrations.huggingface import IGNORED, Join, default_loss, mean_embeddings

LLAMA_360M = {
    "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
    "num_key_value_heads": 5, "vocab_size": 49152, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
AT_MOST = {"full": 1.25, "lora": 1.12}
AT_MOST_MEMORY = 1.15
STEPS = 20  # of a source, so that indices do not run out


@dataclass(frozen=True)
class Case:
    model: str
    config: Mapping[str, Any]
    adapter: str
    texts: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.adapter} {self.tokens}"

    def make(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        longest = {"max_position_embeddings": self.tokens}
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**self.config, **longest)).to(device)
        if self.adapter == "lora":
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        made: nn.Module = model.train()
        return made

    def batch(self, n: int, device: torch.device) -> dict[str, Tensor]:
        ids = torch.randint(self.config["vocab_size"], (n, self.tokens), device=device)
        labels = torch.where(torch.arange(self.tokens, device=device) < self.tokens // 2, IGNORED, ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def cases(*, tiny: bool) -> list[Case]:
    if tiny:
        return [Case("tiny", TINY, adapter, 4, 8) for adapter in AT_MOST]
    sizes = {"135M": LLAMA_135M, "360M": LLAMA_360M, "1B": LLAMA_1B}
    return [
        Case(name, config, adapter, 16 * 1024 // tokens, tokens)
        for name, config in sizes.items()
        for adapter in AT_MOST
        for tokens in (1024, 4096)
    ]


def ordinary(case: Case, device: torch.device, *, graph: bool = False) -> Callable[[], object]:
    model, batch = case.make(device), case.batch(case.texts, device)
    optimizer = _optimizer(model)

    def backward() -> None:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=not graph):
            loss = model(**batch).loss
        loss.backward()

    passes = as_graph(backward, device) if graph else backward

    def step() -> None:
        passes()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not graph)

    return step


def ours(case: Case, device: torch.device, *, settled: bool = False, graph: bool = False) -> Callable[[], object]:
    """settled: after the engine's first proofs."""
    model = case.make(device)
    optimizer, calls = _optimizer(model), count()
    source, target = (case.batch(n, device) for n in (case.texts, max(1, case.texts // 16)))
    selection = Selection(
        model, n_source=case.texts * STEPS, loss=default_loss(model), features=mean_embeddings(model),
        optimizer=optimizer, join=Join(0), cuda_graph=graph,
    )  # fmt: skip
    places = torch.arange(case.texts, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            selection.backward(source, target, index=places + case.texts * (next(calls) % STEPS))
        optimizer.step()
        optimizer.zero_grad()

    if settled:
        settle(step, selection._state.engine)
    if graph and device.type == "cuda":
        step()
        if not all(recorded._recorded for recorded in selection._recorded.values()):
            raise RuntimeError("the step could not be recorded as a CUDA graph")
    return step


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=trained[0].is_cuda)


def measure(case: Case, device: torch.device, *, rounds: int) -> dict[str, Any]:
    """Time with both models at hand, then the peak of each alone, the engine's first proofs included."""
    row: dict[str, Any] = {"case": case.name, "texts": case.texts, "tokens": case.tokens, "adapter": case.adapter}
    for graph in (False, True) if device.type == "cuda" else (False,):
        name = "graph " if graph else ""
        try:
            runs = {
                "ordinary": ordinary(case, device, graph=graph),
                "ours": ours(case, device, settled=True, graph=graph),
            }
            seconds = interleaved(runs, device, rounds=rounds, calls=2, warm_up=1)
        except RuntimeError as error:
            if not graph:
                raise
            row["remark"] = str(error).splitlines()[0][:160]
        else:
            row |= {f"{name}{run} ms": 1e3 * taken for run, taken in seconds.items()}
            row[f"{name}time"] = seconds["ours"] / seconds["ordinary"]
        runs = {}
        gc.collect()
    peaks = {}
    for name, make in (("ordinary", ordinary), ("ours", ours)):
        peaks[name] = peak_bytes(partial(_several, make, case, device), device)
        gc.collect()
    return row | {
        "at most": AT_MOST[case.adapter], "memory": peaks["ours"] / peaks["ordinary"],
        "ordinary GB": peaks["ordinary"] / 1e9,
    }  # fmt: skip


def _several(make: Callable[..., Callable[[], object]], case: Case, device: torch.device) -> None:
    step = make(case, device)
    for _ in range(6):
        step()


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("Steps with source weights against fine-tuning without, for language models")
    parser.add_argument("--tiny", action="store_true", help="one model of a few parameters")
    parser.add_argument("--only", nargs="+", default=[], help="how their names begin, such as 135M")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    rows: list[dict[str, Any]] = []
    for case in cases(tiny=given.tiny):
        if not given.only or any(case.name.startswith(name) for name in given.only):
            try:
                rows.append(measure(case, device, rounds=1 if given.tiny else 7))
            except torch.OutOfMemoryError:
                rows.append({"case": case.name, "error": "out of memory"})
            write(given.out, "language", device, rows)
    show("language models", rows)
    slow = [row["case"] for row in rows if row.get("graph time", row.get("time", 0.0)) > row.get("at most", 1.0)]
    large = [row["case"] for row in rows if row.get("memory", 0.0) > AT_MOST_MEMORY]
    if given.check and (slow or large):
        raise SystemExit(f"above the bars of time: {slow}, of memory: {large}")


if __name__ == "__main__":
    main()
