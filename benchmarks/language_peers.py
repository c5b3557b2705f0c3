"""The peers on a language model of 135M parameters, each at the largest batch that fits: called by ``peers.py``.

The job is that of a training step: alignments with the target gradient, and the weighted source gradient, in bfloat16
by autocast. A contender that runs out of memory is tried with half as many examples. ``times ours`` is the time per
example over ours; ``extra memory`` is the peak above that of an ordinary forward and backward on the same examples,
divided by ours. Opacus' and GhostSuite's ways are written out here, with the rules that this model needs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import as_graph, interleaved, settle
from memory import peak_bytes
from models import LLAMA_135M, Line, Loss, of_transformers, words
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Step

TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
Answer = tuple[Tensor, dict[str, Tensor]]  # alignments, and the weighted source gradient
OURS = "ours"
AT_LEAST = 1.5  # times as long per example as ours
AT_LEAST_MEMORY = 2.0  # times our extra memory


def per_sequence(model: nn.Module, batch: Batch) -> Tensor:
    return token_losses(model(batch.inputs).logits, batch.inputs)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def line(*, tiny: bool) -> Line:
    make = of_transformers("LlamaForCausalLM", **(TINY if tiny else LLAMA_135M))
    size = (4, 2, words(50, 6)) if tiny else (32, 2, words(49152, 1024))
    return Line("Llama 135M", make, *size, per_sequence, None if tiny else torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    loss: Loss
    source: Batch
    target: Batch
    coefficients: Tensor
    dtype: torch.dtype  # of the forward pass

    def target_gradient(self) -> dict[str, Tensor]:
        return gradient(self.loss.target(self.model, self.target).mean(), trainable(self.model))

    def ordinary(self) -> object:
        """An ordinary forward and backward on as many examples."""
        return gradient(self.loss.joint(self.model, self.source, self.target).mean(), trainable(self.model))


def problem_of(case: Line, n: int, device: torch.device, dtype: torch.dtype) -> Problem:
    model = case.model(device).to(dtype)
    source, target = case.batch(n, device), case.batch(case.target, device)
    c = torch.rand(n, device=device, dtype=dtype)
    return Problem(model, Loss(case.loss, case.precision), source, target, c, case.precision or dtype)


def ours(p: Problem) -> Callable[[], Answer]:
    engine = make_engine("layerwise")

    def run() -> Answer:
        found = engine.passes(Step(p.model, p.loss, p.source, p.target, lambda found: found, p.coefficients))
        return found.alignment, found.source_gradient

    settle(run, engine)
    return run


def vmap_of_grad(p: Problem) -> Callable[[], Answer]:
    """All per-example gradients at once by torch.func; it cannot differentiate autocast, so parameters are cast."""

    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        one = Batch(ids, ids.unsqueeze(0), ids)
        lower = {name: x.to(p.dtype) for name, x in parameters.items()}
        call = lambda x: functional_call(p.model, lower, (x,))  # noqa: E731
        return per_sequence(call, one).squeeze(0)  # type: ignore[arg-type]

    def run() -> Answer:
        direction = p.target_gradient()
        parameters = {name: x.detach() for name, x in trainable(p.model).items()}
        with sdpa_kernel(SDPBackend.MATH):
            rows = vmap(grad(loss), in_dims=(None, 0))(parameters, p.source.inputs)
        return _contracted(rows, direction, p.coefficients)

    return run


def _contracted(rows: dict[str, Tensor], direction: dict[str, Tensor], c: Tensor) -> Answer:
    q = sum(g.flatten(1) @ direction[name].flatten() for name, g in rows.items())
    assert isinstance(q, Tensor)
    return q, {name: (c @ g.flatten(1)).view(g.shape[1:]) for name, g in rows.items()}


def double_backward(p: Problem) -> Callable[[], Answer]:
    """Learning to Reweight: through a virtual step."""
    parameters = trainable(p.model)

    def run() -> Answer:
        with sdpa_kernel(SDPBackend.MATH):
            losses = p.loss.source(p.model, p.source)
            eps = torch.zeros_like(losses, requires_grad=True)
            found = torch.autograd.grad((eps * losses).sum(), list(parameters.values()), create_graph=True)
            moved = {name: x - g for (name, x), g in zip(parameters.items(), found, strict=True)}
            call = lambda x: functional_call(p.model, moved, (x,))  # noqa: E731
            (slope,) = torch.autograd.grad(p.loss.target(call, p.target).mean(), eps, retain_graph=True)  # type: ignore[arg-type]
            weighted = torch.autograd.grad(losses, list(parameters.values()), grad_outputs=p.coefficients)
        return -slope, dict(zip(parameters, weighted, strict=True))

    return run


class Hooks:
    """Calls ``use(name, module, a, δ)`` in the backward for every module that has a parameter of its own."""

    def __init__(self, model: nn.Module, use: Callable[[str, nn.Module, Tensor, Tensor], None]) -> None:
        names = {id(x): name for name, x in model.named_parameters()}
        self.handles = []
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                self.handles.append(module.register_forward_hook(self._hook(names[id(weight)], use)))

    def _hook(self, name: str, use: Callable[..., None]) -> Callable[..., None]:
        def forward(module: nn.Module, args: Any, out: Tensor) -> None:
            a = args[0].detach()
            if out.requires_grad:
                out.register_hook(lambda delta: use(name, module, a, delta))

        return forward

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def per_example(module: nn.Module, a: Tensor, delta: Tensor) -> Tensor:
    """Per-example gradients of a weight, as Opacus' rules form them."""
    if isinstance(module, nn.Linear):
        return torch.einsum("nti,nto->noi", a.to(delta.dtype), delta).float()
    if isinstance(module, nn.Embedding):
        found = torch.zeros(len(a), *module.weight.shape, device=delta.device)
        index = a.unsqueeze(-1).expand(delta.shape)
        return found.scatter_add_(1, index, delta.float())
    x = a.float()  # RMSNorm
    return (delta.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)).sum(1)  # type: ignore[operator]


def opacus_way(p: Problem) -> Callable[[], Answer]:
    """Per-example gradients by hooks, all kept until the end of the backward."""

    def run() -> Answer:
        direction = p.target_gradient()
        rows: dict[str, Tensor] = {}

        def keep(name: str, module: nn.Module, a: Tensor, delta: Tensor) -> None:
            found = per_example(module, a, delta)
            rows[name] = rows[name] + found if name in rows else found

        with Hooks(p.model, keep):
            gradient(p.loss.source(p.model, p.source).sum(), trainable(p.model))
        return _contracted(rows, {k: v.float() for k, v in direction.items()}, p.coefficients.float())

    return run


def ghost_way(p: Problem) -> Callable[[], Answer]:
    """GhostSuite: source and target in one backward; per layer the products of activations and of δ where that is less
    work than per-example gradients, which otherwise exist for one layer at a time (for a tied weight until the end).
    """
    tied = {name for name, x in trainable(p.model).items() if x is p.model.get_output_embeddings().weight}  # type: ignore[operator]

    def run() -> Answer:
        n = len(p.source)
        parts: list[Tensor] = []
        weighted: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}

        def contract(name: str, module: nn.Module, a: Tensor, delta: Tensor) -> None:
            length, size = a.shape[1], module.weight.numel()
            if name in tied:
                found = per_example(module, a, delta)
                kept[name] = kept[name] + found if name in kept else found
                return
            if isinstance(module, nn.Linear) and 2 * length * length < size:
                parts.append(_ghost(a[:n], delta[:n], a[n:], delta[n:]))
                c = p.coefficients.to(delta.dtype)
                found = torch.einsum("nti,nto,n->oi", a[:n].to(delta.dtype), delta[:n], c)
            else:
                part, found = _whole(per_example(module, a, delta), p.coefficients)
                parts.append(part)
            weighted[name] = found

        with Hooks(p.model, contract):
            losses = p.loss.joint(p.model, p.source, p.target)
            gradient(losses.sum(), trainable(p.model))
        for name, rows in kept.items():
            part, weighted[name] = _whole(rows, p.coefficients)
            parts.append(part)
        return torch.stack([part.float() for part in parts]).sum(0), weighted

    return run


def _whole(rows: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Alignments of the source rows with the mean of the target rows, and their weighted sum."""
    source, along = rows[: len(c)].flatten(1), rows[len(c) :].mean(0)
    return source @ along.flatten(), (c.to(source.dtype) @ source).view_as(along)


def _ghost(a: Tensor, delta: Tensor, target_a: Tensor, target_delta: Tensor) -> Tensor:
    """Σ_v ⟨a_j a_vᵀ, δ_j δ_vᵀ⟩ / T for every example j."""
    total = torch.zeros(len(a), device=a.device)
    for one_a, one_delta in zip(target_a, target_delta, strict=True):
        total += ((a.to(delta.dtype) @ one_a.to(delta.dtype).T) * (delta @ one_delta.T)).float().sum((1, 2))
    return total / len(target_a)


CONTENDERS: dict[str, Callable[[Problem], Callable[[], Answer]]] = {
    OURS: ours,
    "torch.func vmap(grad)": vmap_of_grad,
    "Opacus' way": opacus_way,
    "GhostSuite's way": ghost_way,
    "double backward (Learning to Reweight)": double_backward,
}


def measure(device: torch.device, *, tiny: bool = False, **how: int) -> list[dict[str, Any]]:
    """One row for each contender; ours is the first."""
    case, rows = line(tiny=tiny), []
    for name, make in CONTENDERS.items():
        row = {"model": case.name, "job": "step", "contender": name, "T": case.target}
        rows.append(row | largest_batch(case, make, device, how))
        print(rows[-1], file=sys.stderr, flush=True)  # a contender may take a minute
    us = rows[0]
    for row in rows:
        if "ms an example" in row and "ms an example" in us:
            row["times ours"] = row["ms an example"] / us["ms an example"]
            row["extra memory"] = row["extra MiB an example"] / max(us["extra MiB an example"], 1e-9)
    return rows


def largest_batch(case: Line, make: Any, device: torch.device, how: dict[str, int]) -> dict[str, Any]:
    n = case.source
    while n:
        try:
            return timed(case, make, n, device, how)
        except torch.OutOfMemoryError:
            n //= 2
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return {"B": n, "error": str(error).splitlines()[0][:160]}
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return {"B": 0, "error": "out of memory with one example"}


def timed(case: Line, make: Any, n: int, device: torch.device, how: dict[str, int]) -> dict[str, Any]:
    problem = problem_of(case, n, device, torch.float32)
    run = make(problem)
    for _ in range(2):
        run()
    extra = (peak_bytes(run, device) - peak_bytes(problem.ordinary, device)) / 2**20
    seconds = interleaved({"": run}, device, **how)[""]
    try:
        captured = interleaved({"": as_graph(run, device)}, device, **how)[""] if device.type == "cuda" else None
    except torch.OutOfMemoryError:
        captured = None
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"no CUDA graph: {str(error).splitlines()[0][:120]}", file=sys.stderr)
        captured = None
    best = seconds if captured is None else min(seconds, captured)
    return {
        "B": n,
        "ms": seconds * 1e3,
        "graph ms": None if captured is None else captured * 1e3,
        "ms an example": best * 1e3 / n,
        "extra MiB an example": extra / n,
    }


def shortfalls(rows: list[dict[str, Any]]) -> list[str]:
    """What --check reports."""
    found = []
    for row in rows:
        if row["contender"] == OURS or "times ours" not in row:
            continue
        for what, least in (("times ours", AT_LEAST), ("extra memory", AT_LEAST_MEMORY)):
            if row[what] < least:
                found.append(f"{row['contender']}: {what} {row[what]:.2f}, at least {least:g} is required")
    return found
