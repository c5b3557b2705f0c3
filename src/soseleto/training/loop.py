"""The training loop. It cannot tell one method from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from soseleto.data import Augment, Examples, TargetCycle, feed, seed_for, source_batches, source_order
from soseleto.data.batch import Batch
from soseleto.data.preprocess import Prepare
from soseleto.engines.shards import rest, sharded_modules
from soseleto.errors import TrainingError, UsageError
from soseleto.methods.wrappers.record_signals import Signals
from soseleto.parallel.device import announcing_emulation
from soseleto.parallel.fsdp import gathered
from soseleto.parallel.micro_batches import require_independent
from soseleto.parallel.reducer import Reducer, Single, my_rows, owned
from soseleto.run_folder import thumbnails
from soseleto.suspects.signals import gather
from soseleto.task.finite import NonFiniteLoss, check_guard
from soseleto.task.losses import FULL, Loss
from soseleto.task.task import Method, Task
from soseleto.training.cuda_graph import CapturedStep, EagerStep
from soseleto.training.history import Records, group_record, weight_record
from soseleto.training.out_of_memory import is_out_of_memory, too_large
from soseleto.training.result import Result
from soseleto.training.resume import Keeper, model_fingerprint
from soseleto.training.setup import Data
from soseleto.weights import Weights


@dataclass(frozen=True)
class Loop:
    """One training: epochs over the source, a target batch beside every source batch."""

    task: Task
    method: Method
    signals: Signals | None  # where there are probes
    data: Data
    fingerprints: Mapping[str, str | None]  # of the data
    prepare: Prepare
    evaluated_loss: Loss
    batch_size: int
    target: TargetCycle
    augment_source: Augment
    augment_target: Augment
    epochs: int
    seed: int
    capture: bool
    records: Records
    keeps: bool
    every: float | None
    every_steps: int | None
    suspect_precision: float

    def run(self, config: dict[str, Any]) -> Result:
        facts = self._facts()
        _require_alike(self.team.every(facts))
        config = {**config, **facts}
        state = self.method.init(self.task)
        keeper = Keeper(
            self.records,
            self.task,
            state,
            config,
            every=self.every,
            steps=self.every_steps,
            keeps=self.keeps,
            n_source=len(self.data.source),
        )
        done = keeper.begin(config)
        if self.team.rank:  # dropout must not do the same to every rank's examples
            torch.manual_seed(seed_for(self.seed, f"training/rank {self.team.rank}", done))
        self.records.begin({"epochs": self.epochs, "steps": self.task.steps, **facts}, resumed=done > 0)
        was_training = self.task.model.training
        self.task.model.train()
        if not self.task.sharing.nothing:
            require_independent(self.task.model)
        step = CapturedStep(self.method, state, self.records.message) if self.capture else EagerStep(self.method, state)
        epochs_done, start = divmod(done, self.task.steps // self.epochs)
        dtype = getattr(self.task.losses, "precision", FULL).autocast
        emulation = announcing_emulation(dtype, self.task.device, self.records.message)
        with keeper.listening(), closing(self.records), emulation:
            for epoch in range(epochs_done + 1, self.epochs + 1):
                try:
                    self._epoch(state, step, epoch, start, keeper)
                except NonFiniteLoss as error:
                    raise self._stop(error, epoch) from error
                start = 0
        self.task.model.train(was_training)
        result = self._with_evidence(replace(self._result(state, config), learned=self._gathered(state)), state)
        parameters = self._whole_parameters(result) if self.keeps else {}
        self.team.first(lambda: self._close(result, parameters))
        return result

    def _whole_parameters(self, result: Result) -> Mapping[str, Tensor]:
        """What the first rank writes; of a sharded model all ranks must run and gather what it will need."""
        if sharded_modules(self.task.model) and result.learned is not None:
            result.ranking()
        rest(self.task.model)
        return gathered(self.task.model.state_dict())

    def _within_memory(
        self, step: EagerStep | CapturedStep, state: Any, source: Batch, target: Batch, *, monitor: bool
    ) -> dict[str, Tensor]:
        try:
            return step(source, target, monitor=monitor)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.task.model.zero_grad(set_to_none=True)
            raise too_large(self.task, state, source, target) from error

    @property
    def team(self) -> Reducer:
        return self.task.sharing.reducer

    def _epoch(self, state: Any, step: EagerStep | CapturedStep, epoch: int, start: int, keeper: Keeper) -> None:
        """The epoch's steps after the first ``start``, which an earlier sitting took."""
        place = self.task.device if isinstance(self.team, Single) else "cpu"  # where ranks look for their own rows
        batches = source_batches(len(self.data.source), self.batch_size, seed=self.seed, epoch=epoch, device=place)
        before = (epoch - 1) * len(batches)
        targets = list(self.target.block(before, len(batches)).to(place))
        pairs = zip(
            self._feed(self.data.source, batches, self.augment_source, "source", epoch, start),
            self._feed(self.data.target, targets, self.augment_target, "target", epoch, start),
            strict=True,
        )
        for count, (source, target) in enumerate(pairs, start=start + 1):
            numbers = self._within_memory(step, state, source, target, monitor=count == len(batches))
            if state.schedule is not None:
                state.schedule.step()
            self.records.step(numbers, {"epoch": epoch, "step": before + count, "steps": self.task.steps})
            if count < len(batches):
                keeper.after(before + count)
        if epoch < self.epochs:  # remembered for the next epoch, while a GPU still works: check_guard waits for it
            source_order(len(self.data.source), seed=self.seed, epoch=epoch + 1)
        check_guard(self.task.guard)
        engine = getattr(getattr(state, "engine", None), "name", None)
        if engine is not None:
            self.records.message(f"alignments by the {engine} engine")
        self.records.epoch(self._epoch_record(state, epoch, before + len(batches)))
        keeper.after(before + len(batches))

    def _feed(
        self, examples: Examples, batches: Sequence[Tensor], augment: Augment, side: str, epoch: int, start: int
    ) -> Iterator[Batch]:
        device, ranks = self.task.device, self.team.ranks
        made = feed(
            examples,
            batches,
            seed=self.seed,
            epoch=epoch,
            purpose=f"{side}/augment",
            augment=None if augment.nothing else augment,
            prepare=self.prepare,
            start=start,
            keep=my_rows(side, self.team),
        )
        for whole, fed in zip(batches[start:], made, strict=True):
            index = fed.places // ranks if side == "source" and ranks > 1 else fed.places  # among those of this rank
            yield Batch(index.to(device), fed.inputs.to(device), fed.labels.to(device), whole=len(whole))

    def _epoch_record(self, state: Any, epoch: int, step: int) -> dict[str, Any]:
        record: dict[str, Any] = {"epoch": epoch, "epochs": self.epochs, "step": step}
        record["lr"] = float(state.optimizer.param_groups[0]["lr"])
        if state.weights is not None:
            record |= weight_record(self._learned(state), self._wrong(), self.team)
            if (probes := self.data.probes) is not None:
                values = state.weights.values[probes.n_source :]
                record["probe_groups"] = group_record(values, probes.wrong.to(values.device), self.team)
        if self.data.test is not None:
            numbers = self._result(state, {}).evaluate(self.data.test)
            record |= {f"test_{name}": value for name, value in numbers.items()}
        return record

    def _gathered(self, state: Any) -> Any:
        """``_learned`` of all ranks."""
        learned, n = self._learned(state), len(self._source)
        if learned is None or self.team.ranks == 1:
            return learned
        whole = Weights(n)
        whole.load_state({name: self.team.gather(mine, n) for name, mine in learned.state().items()})
        return whole

    @cached_property
    def _source(self) -> Examples:
        return self.data.own_source

    def _learned(self, state: Any) -> Any:
        """This rank's weights without the probes'; None where the method has none."""
        return None if state.weights is None else state.weights.first(owned(len(self._source), self.team))

    def _wrong(self) -> Tensor | None:
        source = self._source
        if source.truth is None:
            return None
        return (source.truth != source.labels)[self.team.rank :: self.team.ranks].to(self.task.device)

    def _result(self, state: Any, config: dict[str, Any]) -> Result:
        return Result(
            model=self.task.model,
            source=self._source,
            history=self.records.history,
            messages=self.records.messages,
            prepare=self.prepare,
            device=self.task.device,
            learned=self._learned(state),
            loss=self.evaluated_loss,
            classes=self.data.target.classes,
            out=None if self.records.folder is None else self.records.folder.path,
            engine=getattr(getattr(state, "engine", None), "name", ""),
            config=config,
            suspect_precision=self.suspect_precision,
        )

    def _with_evidence(self, result: Result, state: Any) -> Result:
        """Where there were probes, what they tell of every label."""
        probes, signals, data = self.data.probes, self.signals, self.data
        if probes is None or signals is None:
            return result
        recorded = {"mean_loss": -signals.loss, "mean_margin": signals.margin}
        if state.weights is not None:
            recorded |= {"weight": state.weights.values, "score": state.weights.scores}
        evidence = gather(result.model, result.outputs, data.source, data.target, probes, recorded, seed=self.seed)
        return replace(result, evidence=evidence)

    def _facts(self) -> dict[str, Any]:
        return {
            "n_source": len(self._source),
            "n_target": len(self.data.target) + len(self.data.probes or ()),
            "input_shape": list(self.data.source.inputs.shape[1:]),
            "parameters": sum(p.numel() for p in self.task.model.parameters()),
            "model_fingerprint": model_fingerprint(self.task.model),
            **self.fingerprints,
            "classes": None if self.data.target.classes is None else list(self.data.target.classes),
            "prepare": self.prepare.describe(),
        }

    def _stop(self, error: NonFiniteLoss, epoch: int) -> TrainingError:
        side = self.data.source if error.side == "source" else self.data.target
        shown = ", ".join(side.id_of(i) for i in error.index[:5]) + (", ..." if len(error.index) > 5 else "")
        message = (
            f"the loss of {len(error.index)} {error.side} example(s) (ids {shown}) is NaN or infinite "
            f"in epoch {epoch}: look at those examples, or lower lr."
        )
        self.records.message(message)
        return TrainingError(message)

    def _close(self, result: Result, parameters: Mapping[str, Tensor]) -> None:
        folder = self.records.folder
        if folder is not None:
            if result.learned is not None:
                folder.write_ranking(result.ranking())
                thumbnails.save(folder, result.source)
            if result.evidence is not None:
                folder.write_suspects(result.suspects().to_dict())
            folder.write_model(parameters, {"prepare": repr(self.prepare.describe())})
        last = self.records.history[-1]
        end = {name: value for name, value in last.items() if name.startswith("test_")}
        self.records.event("end", {"seconds": round(self.records.seconds, 3), **end})
        if folder is not None:
            folder.drop_checkpoints()


def _require_alike(facts: list[dict[str, Any]]) -> None:
    for rank, its in enumerate(facts):
        for name in its:
            if its[name] != facts[0][name]:
                raise UsageError(
                    f"rank {rank} and rank 0 disagree about {name} ({its[name]!r} and {facts[0][name]!r}): "
                    "give every rank the same model and data."
                )
