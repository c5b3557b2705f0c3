"""Alignments of a source batch with a target gradient: our engines against other implementations.

    python benchmarks/peers.py [--device cpu|cuda] [--language-model] [--out FILE] [--check]

Every contender gets the same model, source batch, target batch and coefficients, and two jobs:

    alignments   q_j = ⟨∂ℓ_j/∂θ, ∂L_t/∂θ⟩, including the target gradient
    step         the same, and the weighted source gradient Σ c_j ∂ℓ_j/∂θ that a training step then applies

``error`` is the largest relative error against the loop over single examples, measured before the timing, in float32
without TF32. On a GPU a contender that can be captured as a CUDA graph is timed with and without, and the better time
counts; the two loops are timed without. On a CPU the notebook's loop, a minute per batch, is timed on its first
examples and extrapolated. ``times ours`` is the time over our best in the same job; ``peak MiB`` is the peak memory
above what was allocated before. higher, TorchOpt and Opacus are included if they are installed. ``--language-model``
compares on a Llama-like model of 135M parameters instead (``language_peers``).
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from common import Case, arguments, as_graph, images, interleaved, peak_mib, settle, show, tokens, write
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Step
from soseleto.models.architectures import mlp, quick
from soseleto.task.losses import NoisyLosses

LOSSES = NoisyLosses()
JOBS = ("alignments", "step")
AT_LEAST = 2.0
AT_LEAST_LOOP = 50.0  # on a GPU
TOLERANCE = 1e-3  # relative, float32
NOTEBOOK = "loop of the notebook"
ORACLE = "loop, one example at a time"
LOOPED_ON_CPU = 9  # examples on which the notebook's loop is timed on a CPU, where a whole batch takes a minute


class Block(nn.Module):
    """Self-attention and two linear layers, built from operators that every contender supports."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        queries, keys, values = (
            part.reshape(b, length, self.heads, -1).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1)
        )
        weights = (queries @ keys.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((weights @ values).transpose(1, 2).reshape(b, length, width))
        return x + self.back(self.wide(self.between(x)).relu())


class Mean(nn.Module):
    """The mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer(layers: int, width: int) -> nn.Module:
    blocks = [Block(width, max(1, width // 64)) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(1000, width), *blocks, Mean(), nn.Linear(width, 10))


def peer_cases(device: torch.device, *, tiny: bool = False) -> list[Case]:
    """Full size on a GPU; smaller on a CPU, to take seconds; ``tiny`` takes less than one."""
    if tiny:
        return [
            Case("Quick", lambda: quick(size=16), 3, 2, lambda n: torch.randn(n, 3, 16, 16)),
            Case("MLP", lambda: mlp(48, 10, hidden=8), 12, 3, lambda n: torch.randn(n, 3, 4, 4)),
            Case("transformer", lambda: transformer(1, 16), 4, 2, tokens(5)),
        ]
    if device.type == "cuda":
        return [
            Case("Quick", quick, 256, 32, images),
            Case("MLP", lambda: mlp(3072, 10, hidden=1024, layers=3), 256, 32, images),
            Case("transformer", lambda: transformer(4, 256), 64, 8, tokens(128)),
        ]
    return [
        Case("Quick", quick, 256, 32, images),
        Case("MLP", lambda: mlp(3072, 10, hidden=128, layers=3), 256, 32, images),
        Case("transformer", lambda: transformer(2, 128), 32, 4, tokens(32)),
    ]


@dataclass(frozen=True)
class Problem:
    """The inputs of every contender."""

    model: nn.Module
    source: Batch
    target: Batch
    coefficients: Tensor  # (B,)

    @classmethod
    def of(cls, case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> Problem:
        model = case.make().to(device, dtype).train()
        source, target = (_cast(case.batch(n, device), dtype) for n in (case.source, case.target))
        return cls(model, source, target, torch.rand(case.source, device=device, dtype=dtype))

    def target_gradient(self) -> dict[str, Tensor]:
        return gradient(LOSSES.target(self.model, self.target).mean(), trainable(self.model))


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    inputs = batch.inputs.to(dtype) if batch.inputs.is_floating_point() else batch.inputs
    return Batch(batch.index, inputs, batch.labels)


@dataclass(frozen=True)
class Answer:
    """Alignments (B,), and the weighted source gradient if the job includes it."""

    alignment: Tensor
    gradient: dict[str, Tensor]


# From a problem, and whether the job includes the weighted gradient, a contender makes the function that is timed.
Contender = Callable[[Problem, bool], Callable[[], Answer]]


def layerwise(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """Ours: the target gradient, then the engine."""
    engine = make_engine("layerwise")

    def run() -> Answer:
        direction = problem.target_gradient()
        return Answer(engine(problem.model, LOSSES.source, problem.source, direction)[1], {})

    settle(run, engine)
    return run


def joint_passes(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """Ours, as in a training step: both batches in one forward pass, which always gives the weighted gradient too."""
    engine = make_engine("layerwise")

    def run() -> Answer:
        step = Step(
            problem.model,
            LOSSES,
            problem.source,
            problem.target,
            to_direction=lambda found: found,
            coefficients=problem.coefficients,
        )
        passes = engine.passes(step)
        return Answer(passes.alignment, passes.source_gradient)

    settle(run, engine)
    return run


def one_at_a_time(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """One forward and one backward per example: the reference that is obviously correct."""
    source = problem.source

    def gradient_of(j: int) -> dict[str, Tensor]:
        one = Batch(source.index[j : j + 1], source.inputs[j : j + 1], source.labels[j : j + 1])
        return gradient(LOSSES.source(problem.model, one).sum(), trainable(problem.model))

    return lambda: _one_by_one(map(gradient_of, range(len(source))), problem, weighted)


def notebook_loop(problem: Problem, weighted: bool, examples: int | None = None) -> Callable[[], Answer]:
    """The authors' notebook: one forward of the batch, then a backward through the whole batch per example.

    examples: stop after this many
    """
    parameters = trainable(problem.model)

    def gradients() -> Iterator[dict[str, Tensor]]:
        for loss in LOSSES.source(problem.model, problem.source)[:examples]:
            found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
            yield dict(zip(parameters, found, strict=True))

    return lambda: _one_by_one(gradients(), problem, weighted)


def _one_by_one(gradients: Iterable[dict[str, Tensor]], problem: Problem, weighted: bool) -> Answer:
    direction = problem.target_gradient()
    found: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for j, of_one in enumerate(gradients):
        found.append(torch.stack([(g * direction[name]).sum() for name, g in of_one.items()]).sum())
        if weighted:
            for name, g in of_one.items():
                g = g * problem.coefficients[j]
                total[name] = total[name].add_(g) if name in total else g
    return Answer(torch.stack(found), total)


def vmap_of_grad(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """torch.func: all per-example gradients at once, then their product with the target gradient."""

    def loss(parameters: dict[str, Tensor], inputs: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(problem.model, parameters, (inputs.unsqueeze(0),))
        return LOSSES.loss(outputs, label.unsqueeze(0)).squeeze(0)

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def run() -> Answer:
        direction = problem.target_gradient()
        detached = {name: p.detach() for name, p in trainable(problem.model).items()}
        return _contract(
            per_example(detached, problem.source.inputs, problem.source.labels), direction, problem, weighted
        )

    return run


def _contract(
    gradients: Mapping[str, Tensor], direction: Mapping[str, Tensor], problem: Problem, weighted: bool
) -> Answer:
    """Qᵀg, and Qc if ``weighted``, from the matrix Q of per-example gradients."""
    q = sum(rows.flatten(1) @ direction[name].flatten() for name, rows in gradients.items())
    assert isinstance(q, Tensor)
    if not weighted:
        return Answer(q, {})
    c = problem.coefficients
    return Answer(q, {name: (c @ rows.flatten(1)).view(rows.shape[1:]) for name, rows in gradients.items()})


def _after_virtual_step(
    eps: Tensor, target_loss: Tensor, losses: Tensor, parameters: Mapping[str, Tensor], problem: Problem, weighted: bool
) -> Answer:
    """With θ' = θ − Σ ε_j ∂ℓ_j/∂θ, the derivative of L_t(θ') in ε_j at ε = 0 is −q_j."""
    (slope,) = torch.autograd.grad(target_loss, eps, retain_graph=weighted)
    if not weighted:
        return Answer(-slope, {})
    found = torch.autograd.grad(losses, list(parameters.values()), grad_outputs=problem.coefficients)
    return Answer(-slope, dict(zip(parameters, found, strict=True)))


def learning_to_reweight(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """Double backward through a virtual step, in plain PyTorch."""
    model, parameters = problem.model, trainable(problem.model)

    def run() -> Answer:
        losses = LOSSES.source(model, problem.source)
        eps = torch.zeros_like(losses, requires_grad=True)
        found = torch.autograd.grad((eps * losses).sum(), list(parameters.values()), create_graph=True)
        moved = {name: p - g for (name, p), g in zip(parameters.items(), found, strict=True)}
        outputs = functional_call(model, moved, (problem.target.inputs,))
        target_loss = LOSSES.loss(outputs, problem.target.labels).mean()
        return _after_virtual_step(eps, target_loss, losses, parameters, problem, weighted)

    return run


def with_higher(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """The same virtual step with higher's differentiable SGD."""
    higher = importlib.import_module("higher")
    model = problem.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def run() -> Answer:
        with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (functional, inner):
            losses = LOSSES.source(functional, problem.source)
            eps = torch.zeros_like(losses, requires_grad=True)
            inner.step((eps * losses).sum())
            target_loss = LOSSES.target(functional, problem.target).mean()
            start = dict(zip(trainable(model), functional.parameters(time=0), strict=True))
            return _after_virtual_step(eps, target_loss, losses, start, problem, weighted)

    return run


def with_torchopt(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """The same virtual step with TorchOpt's differentiable SGD; on a copy, since it replaces the module's tensors."""
    torchopt = importlib.import_module("torchopt")
    model = copy.deepcopy(problem.model)
    parameters = trainable(model)
    inner = torchopt.MetaSGD(model, lr=1.0)
    start, start_inner = torchopt.extract_state_dict(model), torchopt.extract_state_dict(inner)

    def run() -> Answer:
        losses = LOSSES.source(model, problem.source)
        eps = torch.zeros_like(losses, requires_grad=True)
        inner.step((eps * losses).sum())
        target_loss = LOSSES.target(model, problem.target).mean()
        answer = _after_virtual_step(eps, target_loss, losses, parameters, problem, weighted)
        torchopt.recover_state_dict(model, start)
        torchopt.recover_state_dict(inner, start_inner)
        return answer

    return run


def with_opacus(problem: Problem, weighted: bool) -> Callable[[], Answer]:
    """Opacus' per-sample gradients, then a product; on a copy, since it wraps the model."""
    module = importlib.import_module("opacus.grad_sample")
    wrapped = module.GradSampleModule(copy.deepcopy(problem.model), loss_reduction="sum")
    parameters = {name.removeprefix("_module."): p for name, p in trainable(wrapped).items()}

    def run() -> Answer:
        direction = problem.target_gradient()
        for p in parameters.values():
            p.grad = p.grad_sample = None  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its hooks warn about inputs without gradient
            LOSSES.source(wrapped, problem.source).sum().backward()
        gradients = {name: p.grad_sample for name, p in parameters.items()}  # type: ignore[attr-defined]
        return _contract(gradients, direction, problem, weighted)

    return run


OURS: Mapping[str, Contender] = MappingProxyType({"ours, layerwise": layerwise, "ours, joint": joint_passes})
PEERS: Mapping[str, Contender] = MappingProxyType(
    {
        NOTEBOOK: notebook_loop,
        ORACLE: one_at_a_time,
        "torch.func vmap(grad)": vmap_of_grad,
        "double backward (Learning to Reweight)": learning_to_reweight,
        "higher": with_higher,
        "TorchOpt": with_torchopt,
        "Opacus": with_opacus,
    }
)
NEEDS: Mapping[str, str] = MappingProxyType({"higher": "higher", "TorchOpt": "torchopt", "Opacus": "opacus"})


def missing() -> dict[str, str]:
    """The peers that are not installed, and why."""
    found = {}
    for name, module in NEEDS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == module
            found[name] = "not installed" if absent else f"not installed completely ({error})"
    return found


def contenders(job: str) -> dict[str, Contender]:
    """Ours and the installed peers; for the job "step" our joint pass replaces the layerwise call."""
    ours = OURS if job == "alignments" else {"ours, joint": joint_passes}
    absent = missing()
    return {**ours, **{name: peer for name, peer in PEERS.items() if name not in absent}}


def relative_error(answer: Answer, oracle: Answer) -> float:
    """The largest of the relative errors of alignments and, if both have one, of the weighted gradient.

    An answer for the first few examples is compared on these; its gradient is only a part of the sum and not compared.
    """
    n = len(answer.alignment)
    errors = [_distance(answer.alignment, oracle.alignment[:n])]
    if answer.gradient and oracle.gradient and n == len(oracle.alignment):
        assert answer.gradient.keys() == oracle.gradient.keys(), "not the same parameters"
        errors.append(_distance(_flat(answer.gradient, oracle.gradient), _flat(oracle.gradient, oracle.gradient)))
    return max(errors)


def _distance(mine: Tensor, right: Tensor) -> float:
    return float((mine.double() - right.double()).norm() / right.double().norm())


def _flat(gradients: Mapping[str, Tensor], order: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in order])


def compare(case: Case, job: str, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Every contender's error against the loop over single examples, on a new problem, without TF32."""
    found, runs = {}, _runs(Problem.of(case, device, dtype), job)
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        oracle = runs[ORACLE]()
        for name, run in runs.items():
            found[name] = relative_error(run(), oracle)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution
    return found


def _runs(problem: Problem, job: str) -> dict[str, Callable[[], Answer]]:
    found = {name: make(problem, job == "step") for name, make in contenders(job).items()}
    if _cut(problem):
        found[NOTEBOOK] = notebook_loop(problem, job == "step", LOOPED_ON_CPU)
    return found


def _cut(problem: Problem) -> bool:
    return problem.source.inputs.device.type == "cpu" and len(problem.source) > LOOPED_ON_CPU


def _seconds(problem: Problem, job: str, runs: Mapping[str, Any], device: torch.device, **how: int) -> dict[str, float]:
    """Seconds per call; those of a shortened loop are extrapolated linearly from one and from several examples."""
    if device.type == "cuda":  # the loops take half a second per call: one call is enough
        loops = {name: run for name, run in runs.items() if name in (NOTEBOOK, ORACLE)}
        others = {name: run for name, run in runs.items() if name not in loops}
        return interleaved(others, device, **how) | interleaved(loops, device, rounds=1, calls=1, warm_up=1)
    if not _cut(problem):
        return interleaved(dict(runs), device, **how)
    first = notebook_loop(problem, job == "step", 1)
    seconds = interleaved({**runs, "first": first}, device, **how)
    one = seconds.pop("first")
    more = (seconds[NOTEBOOK] - one) / (LOOPED_ON_CPU - 1)
    seconds[NOTEBOOK] = one + (len(problem.source) - 1) * more
    return seconds


def measure(case: Case, job: str, device: torch.device, *, rounds: int, calls: int) -> list[dict[str, Any]]:
    errors = compare(case, job, device)
    problem = Problem.of(case, device)
    runs = _runs(problem, job)
    seconds = _seconds(problem, job, runs, device, rounds=rounds, calls=calls)
    peaks = {name: peak_mib(run, device) for name, run in runs.items()}
    graphs = _captured(runs, device)
    as_graphs = interleaved(graphs, device, rounds=rounds, calls=calls) if graphs else {}
    best = {name: min(s, as_graphs.get(name, s)) for name, s in seconds.items()}
    ours = min(best[name] for name in OURS if name in best)
    return [
        {
            "model": case.name,
            "B": case.source,
            "T": case.target,
            "job": job,
            "contender": name,
            "error": errors[name],
            "ms": seconds[name] * 1e3,
            "graph ms": as_graphs[name] * 1e3 if name in as_graphs else None,
            "times ours": best[name] / ours,
            "peak MiB": peaks[name],
        }
        for name in runs
    ] + [
        {"model": case.name, "B": case.source, "T": case.target, "job": job, "contender": name, "error": why}
        for name, why in missing().items()
    ]


def _captured(runs: Mapping[str, Callable[[], Answer]], device: torch.device) -> dict[str, Callable[[], object]]:
    """The contenders that can be captured as a CUDA graph, without the loops."""
    if device.type != "cuda":
        return {}
    found = {}
    for name, run in runs.items():
        if name in (NOTEBOOK, ORACLE):
            continue
        try:
            found[name] = as_graph(run, device)
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"{name} cannot be captured as a CUDA graph: {str(error).splitlines()[0][:120]}", file=sys.stderr)
    return found


def shortfalls(rows: Sequence[Mapping[str, Any]], device: torch.device) -> list[str]:
    """What --check reports: answers that are not exact, and peers that are faster than allowed."""
    found = []
    for row in rows:
        where = f"{row['contender']}, {row['model']}, {row['job']}"
        if "times ours" not in row:
            continue
        if not (math.isfinite(row["error"]) and row["error"] < TOLERANCE):
            found.append(f"{where}: off by {row['error']:.2g}")
        least = AT_LEAST_LOOP if row["contender"] == NOTEBOOK and device.type == "cuda" else AT_LEAST
        if row["contender"] in PEERS and row["times ours"] < least:
            found.append(f"{where}: ours is {row['times ours']:.2f}x faster, {least:g}x is required")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test that it runs")
    parser.add_argument("--language-model", action="store_true", help="only a language model of 135M parameters")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    torch.manual_seed(0)
    for name, why in missing().items():
        print(f"{name}: {why}")
    large = options.language_model or device.type != "cuda"
    rounds, calls = (1, 1) if options.tiny else (3, 1 if device.type == "cpu" else 3) if large else (5, 5)
    rows: list[dict[str, Any]] = []
    if options.language_model:
        import language_peers

        rows = language_peers.measure(device, tiny=options.tiny, rounds=rounds, calls=calls)
        write(options.out, "peers", device, rows)
        show("Ours against its peers on a language model, each at the largest batch that fits", rows)
        if options.check and (found := language_peers.shortfalls(rows)):
            raise SystemExit("\n".join(found))
        return
    for case in peer_cases(device, tiny=options.tiny):
        for job in JOBS:
            rows += measure(case, job, device, rounds=rounds, calls=calls)
            write(options.out, "peers", device, rows)  # after every case, in case the run is interrupted
    show("Ours against its peers", rows)
    if options.check and (found := shortfalls(rows, device)):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
