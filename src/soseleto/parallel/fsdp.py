"""Steps of a model that ``fully_shard`` (FSDP2) has split over the ranks, for models that do not fit on one device.

Parameters, gradients, the running mean of the target gradient and the optimizer's state stay in parts. FSDP gathers a
module's parameters for its forward and its backward, and sums and splits its gradients, as in any other training. The
layerwise engine gathers one layer of the direction at a time, as the backward passes it. So that FSDP may do its work,
the source goes through the model twice: once for the alignments, once for the weighted gradient.

Every rank must take part in every pass: where one has no examples, it runs one of zeros that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soseleto.data.batch import Batch
from soseleto.engines import Engine
from soseleto.engines.contract import Coefficients, Direction, SourcePass
from soseleto.engines.layerwise.engine import tolerance
from soseleto.engines.shards import is_shard, rest, sharded_modules, whole
from soseleto.engines.unchanged import unchanged
from soseleto.errors import EngineError, UsageError
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.parallel.micro_batches import LossOf, Sharing


@dataclass(frozen=True)
class ShardedSharing(Sharing):
    """A step's work shared over the ranks that the model itself is shared over."""

    _proved: WeakSet[nn.Module] = field(default_factory=WeakSet, repr=False, compare=False)

    @property
    def nothing(self) -> bool:
        return False

    def mean_loss(self, model: nn.Module, loss: LossOf, batch: Batch) -> Tensor:
        with torch.no_grad():
            losses = [loss(model, part)[:mine] for part, mine in self._in_step(batch)]
        rest(model)
        return self.mean(torch.cat(losses), batch)

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Batch, side: str, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's losses, and its part of the gradient of Σ c_j ℓ_j over all ranks."""
        if coefficients is None:
            coefficients = torch.full((len(batch),), 1.0 / batch.total, dtype=torch.float64, device=batch.index.device)
        coefficients = coefficients * self.reducer.ranks  # since FSDP takes the mean over ranks
        losses: list[Tensor] = []
        begin = 0
        for part, mine in self._in_step(batch):
            of_part = loss(model, part)
            c = of_part.new_zeros(len(part))
            c[:mine] = coefficients[begin : begin + mine].to(c.dtype)
            of_part.backward(c)
            losses.append(of_part.detach()[:mine])
            begin += mine
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return torch.cat(losses), found

    def source_pass(
        self,
        engine: Engine,
        model: nn.Module,
        loss: LossOf,
        source: Batch,
        direction: Direction,
        coefficients: Coefficients,
    ) -> SourcePass:
        if model not in self._proved:
            self._prove(engine, model, loss, source)
            self._proved.add(model)
        alignment = self._alignment(engine, model, loss, source, direction)
        c = coefficients(alignment) if callable(coefficients) else coefficients
        losses, of_parameters = self.gradient(model, loss, source, "source", c)
        return SourcePass(losses, alignment, of_parameters)

    def _alignment(self, engine: Engine, model: nn.Module, loss: LossOf, source: Batch, direction: Direction) -> Tensor:
        with unchanged(model):  # what is drawn here is drawn again for the gradient
            found = [engine(model, loss, part, direction)[1][:mine] for part, mine in self._in_step(source)]
        return torch.cat(found)

    def _prove(self, engine: Engine, model: nn.Module, loss: LossOf, source: Batch) -> None:
        """For random c and g = Σ c_j ∂ℓ_j, alignments with g itself must give Σ c_j q_j = ‖g‖²."""
        seeded = torch.Generator().manual_seed(self.reducer.rank)
        c = (torch.rand(len(source), generator=seeded, dtype=torch.float64) + 0.5).to(source.index.device)
        with unchanged(model):
            losses, g = self.gradient(model, loss, source, "source", c / source.total)
        q = self._alignment(engine, model, loss, source, g)
        square = sum(float(whole(part.double().square().sum())) for part in g.values())
        found = float(self.sum((c / source.total * q).sum()))
        if abs(found - square) > tolerance({p.dtype for p in g.values()} | {losses.dtype}, losses.is_cuda) * square:
            raise EngineError(
                f"the {engine.name} engine is not exact for this sharded model: examples of a batch act on each "
                "other, or a parameter is used out of sight; give every rank the plain model and another engine."
            )

    def _in_step(self, batch: Batch) -> Iterator[tuple[Batch, int]]:
        """As many parts as the rank with most has; how many rows of each are examples."""
        parts = self._parts(batch)
        for k in range(self.reducer.largest(len(parts))):
            yield (parts[k], len(parts[k])) if k < len(parts) else (_nobody(batch), 0)


def split_heads(model: nn.Module, given: Sequence[nn.Module | None]) -> None:
    """The heads that were made beside a trunk of fully_shard are split over the ranks as it is; those ``given`` are
    their owner's to split."""
    from torch.distributed.fsdp import fully_shard

    if not isinstance(model, TrunkAndHeads):
        return
    mesh = next(p.device_mesh for p in model.trunk.parameters() if is_shard(p))  # type: ignore[attr-defined]
    for head in (model.source_head, model.target_head):
        if not any(head is one for one in given):
            fully_shard(head, mesh=mesh)


def require_shardable(model: nn.Module, non_finite: str, ranks: int) -> None:
    """Raise for what cannot be done with a model that fully_shard was called on."""
    if non_finite != "stop":
        raise UsageError("non_finite='skip' keeps a copy of a plain model: leave it out for one of fully_shard.")
    rest(model)
    for module in sharded_modules(model):
        if next(model.parameters()).device.type == "cpu" and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo's own mean was a sum in some versions of torch
    for name, parameter in model.named_parameters():
        if not is_shard(parameter) or parameter.device_mesh.size() != ranks or parameter.device_mesh.ndim != 1:  # type: ignore[attr-defined]
            raise UsageError(
                f"the parameter {name!r} is not sharded over all {ranks} ranks of this training: call fully_shard on "
                "the whole model, with a mesh of one dimension, and pass the reducer of soseleto.ranks() as "
                "compute=Compute(reducer=...)."
            )


def gathered(state: Any) -> Any:
    """A state with whole tensors, on the host, in place of shards; every rank must ask for it."""
    if isinstance(state, Mapping):
        return {name: gathered(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [gathered(value) for value in state]
    return whole(state).detach().cpu() if is_shard(state) else state


def in_parts(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A checkpoint, ``gathered`` before, in the parts of this rank; every rank must ask for it."""
    rest(model)
    like = dict(model.state_dict())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = saved["optimizer"]["state"]
    method = dict(saved["method"])
    if "averages" in method:
        method["averages"] = {name: _part(mean, like[name]) for name, mean in method["averages"].items()}
    return {
        **saved,
        "model": {name: _part(value, like[name]) for name, value in saved["model"].items()},
        "optimizer": {
            **saved["optimizer"],
            "state": {i: {k: _part(v, parameters[i]) for k, v in its.items()} for i, its in state.items()},
        },
        "method": method,
    }


def _part(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor, where ``like`` is a part of such a tensor."""
    if not is_shard(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def sharing_of(model: nn.Module, sharing: Sharing) -> Sharing:
    """How a step of this model is shared."""
    if not sharded_modules(model):
        return sharing
    return ShardedSharing(sharing.reducer, sharing.micro_batch_size)


def _nobody(batch: Batch) -> Batch:
    """One example of zeros, for a rank that has none."""
    index, inputs, labels = (t.new_zeros(1, *t.shape[1:]) for t in (batch.index, batch.inputs, batch.labels))
    return Batch(index, inputs, labels, whole=batch.total)
