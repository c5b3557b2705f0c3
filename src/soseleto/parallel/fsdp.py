"""Training steps of a model that ``fully_shard`` (FSDP2) has split over ranks, because it does not fit on one device.

Parameters, gradients, the running mean of the target gradient and the optimizer's state stay sharded. FSDP gathers a
module's parameters for its forward and its backward, and reduces and scatters its gradients, as in any other training.
The layerwise engine gathers the direction one layer at a time, when the backward reaches it. FSDP needs an ordinary
backward for the gradient, so the source goes through the model twice: for the alignments and for the weighted gradient.

Every rank must take part in every pass: a rank without examples runs one of zeros, with coefficient 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soseleto.data.batches import Batch
from soseleto.data.structure import change
from soseleto.engines import Engine
from soseleto.engines.interface import SourcePass, SourceStep
from soseleto.engines.model_state import is_shard, reshard, sharded_modules, unchanged, whole
from soseleto.engines.proof import TOLERANCE, Recorded, Schedule
from soseleto.errors import EngineError, UsageError
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.parallel.micro_batches import LossOf, Sharing


@dataclass(frozen=True)
class ShardedSharing(Sharing):
    """A step divided over the ranks that the model itself is split over."""

    _proofs: WeakKeyDictionary[nn.Module, Schedule] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    @property
    def nothing(self) -> bool:
        return False

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Batch, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's losses, and its part of the gradient of Σ c_j ℓ_j over all ranks."""
        losses: list[Tensor] = []
        reshard(model)
        for module in sharded_modules(model):
            module.set_requires_gradient_sync(True, recurse=False)  # accelerate turns it off while gradients accumulate
        before = {p: p.grad for p in model.parameters()}  # of a loop that accumulates
        model.zero_grad(set_to_none=True)
        try:
            for part, c in self._weighted(batch, coefficients):
                of_part = loss(model, part)
                of_part.backward((c * self.reducer.ranks).to(of_part.dtype))  # since FSDP takes the mean over ranks
                losses.append(of_part.detach())
            reshard(model)  # also where the user has turned that off after a backward
            of_parameters = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        finally:
            for p, g in before.items():
                p.grad = g
        return torch.cat(losses)[: len(batch)], of_parameters  # examples of zeros come last

    def source_pass(self, engine: Engine, step: SourceStep) -> SourcePass:
        schedule = self._proofs.setdefault(step.model, Schedule())
        if schedule.count() or schedule.needs_check:  # on all ranks at the same step
            self._check(engine, step, seed=schedule.calls * self.reducer.ranks + self.reducer.rank)
            schedule.proved((), is_new=False)
        alignment = self._alignment(engine, step)
        losses, gradient = self.gradient(step.model, step.loss, step.batch, step.coefficients)
        return SourcePass(losses, alignment, gradient)

    def _alignment(self, engine: Engine, step: SourceStep) -> Tensor:
        with unchanged(step.model):  # the gradient's pass draws the same random numbers
            parts = [
                engine(step.model, step.loss, part, step.direction)[1][:count]
                for part, count in self._parts(step.batch)
            ]
        return torch.cat(parts)  # one at least: see ``_parts``

    def _check(self, engine: Engine, step: SourceStep, *, seed: int) -> None:
        """For random c and g = Σ c_j ∂ℓ_j, the alignments with g itself must satisfy Σ c_j q_j = ‖g‖²."""
        source = step.batch
        seeded = torch.Generator().manual_seed(seed)
        c = (torch.rand(len(source), generator=seeded, dtype=torch.float64) + 0.5).to(source.index.device)
        with unchanged(step.model), Recorded() as seen:
            losses, g = self.gradient(step.model, step.loss, source, c / source.total)
        q = self._alignment(engine, replace(step, direction=g))
        square = sum(float(whole(part.double().square().sum())) for part in g.values())
        sum_of_alignments = float(self.sum((c / source.total * q).sum()))
        dtypes = seen.dtypes | {p.dtype for p in g.values()} | {losses.dtype}
        if abs(sum_of_alignments - square) > TOLERANCE.of(dtypes, is_cuda=losses.is_cuda) * square:
            raise EngineError(
                f"the {engine.name} engine is not exact for this sharded model: examples of a batch act on each "
                "other, or a parameter is used where the engine cannot see it; give every rank the plain model and "
                "another engine."
            )

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, int]]:
        """The same number of parts on every rank: after its own, a rank with fewer runs examples of zeros."""
        parts = list(super()._parts(batch))
        missing = self.reducer.largest(len(parts)) - len(parts)  # before the first pass: all ranks call it together
        yield from parts
        yield from [(_zero_example(batch), 0)] * missing


def split_heads(model: nn.Module, given: Sequence[nn.Module | None]) -> None:
    """Shard the heads that we made as the trunk is sharded; heads ``given`` by the user are left as they are."""
    from torch.distributed.fsdp import fully_shard

    if not isinstance(model, TrunkAndHeads):
        return
    mesh = next(p.device_mesh for p in model.trunk.parameters() if is_shard(p))  # type: ignore[attr-defined]
    for head in (model.source_head, model.target_head):
        if not any(head is one for one in given):
            fully_shard(head, mesh=mesh)


def require_shardable(model: nn.Module, ranks: int) -> None:
    """Raise for settings that a sharded model does not support."""
    reshard(model)
    for module in sharded_modules(model):
        if next(model.parameters()).device.type == "cpu" and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo's mean was a sum in some versions of torch
    for name, parameter in model.named_parameters():
        if not is_shard(parameter) or parameter.device_mesh.size() != ranks or parameter.device_mesh.ndim != 1:  # type: ignore[attr-defined]
            raise UsageError(
                f"the parameter {name!r} is not sharded over all {ranks} ranks of this training: call fully_shard on "
                "the whole model, with a mesh of one dimension, and pass the reducer of soseleto.ranks() as "
                "compute=Compute(reducer=...)."
            )


def gathered(state: Any) -> Any:
    """A state with whole tensors on the host in place of shards; a collective that every rank must call."""
    if isinstance(state, Mapping):
        return {name: gathered(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [gathered(value) for value in state]
    return whole(state).detach().cpu() if is_shard(state) else state


def in_parts(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A ``gathered`` checkpoint, sharded again for this rank; a collective that every rank must call."""
    like = shards(model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = saved["optimizer"]["state"]
    return {
        **saved,
        "model": {name: _part(value, like[name]) for name, value in saved["model"].items()},
        "optimizer": {
            **saved["optimizer"],
            "state": {i: {k: _part(v, parameters[i]) for k, v in its.items()} for i, its in state.items()},
        },
        "method": parts_of(saved["method"], like),
    }


def shards(model: nn.Module) -> dict[str, Any]:
    """What this rank holds, by the names of checkpoints and by those of parameters, which wrappers can change."""
    reshard(model)
    return {**model.state_dict(), **dict(model.named_parameters())}


def parts_of(tree: Any, like: Mapping[str, Any]) -> Any:
    """A method's state with its whole tensors by parameter name in the parts of this rank."""
    if isinstance(tree, Mapping):
        return {name: _part(v, like[name]) if name in like else parts_of(v, like) for name, v in tree.items()}
    return [parts_of(value, like) for value in tree] if isinstance(tree, list | tuple) else tree


def _part(value: Any, like: Any) -> Any:
    """This rank's shard of a whole tensor, if ``like`` is a shard of the same shape; else the value itself."""
    if not is_shard(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def sharing_of(model: nn.Module, sharing: Sharing) -> Sharing:
    """How a step of this model is divided: ``sharing``, or its counterpart for a sharded model."""
    if not sharded_modules(model):
        return sharing
    require_shardable(model, sharing.reducer.ranks)
    return ShardedSharing(sharing.reducer, sharing.micro_batch_size)


def _zero_example(batch: Batch) -> Batch:
    """One example of zeros, for a rank without examples."""
    index, inputs, labels = change(
        lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]), (batch.index, batch.inputs, batch.labels)
    )
    return replace(batch, index=index, inputs=inputs, labels=labels, whole=batch.total)
