"""The training loop: the same for every method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soseleto.data import ExampleSet, TargetCycle, feed, seed_for, structure
from soseleto.data.batches import Batch
from soseleto.data.examples import in_order
from soseleto.defaults import Settings
from soseleto.engines.model_state import reshard, sharded_modules
from soseleto.errors import OutOfMemory, TrainingError, counted
from soseleto.methods.wrappers import Recording, Signals
from soseleto.parallel.fsdp import gathered
from soseleto.parallel.micro_batches import (
    PER_PART,
    Sharing,
    average_running_statistics,
    require_divisible,
    single_example,
)
from soseleto.parallel.reducer import Reducer, Single, my_rows, owned
from soseleto.run_folder.folder import SUSPECTS, RunFolder
from soseleto.run_folder.ranking import is_suspect
from soseleto.run_folder.source import save_thumbnails
from soseleto.suspects.audit import default_rows
from soseleto.suspects.suspects import Evidence
from soseleto.task.cuda_graph import CapturedStep, TakeStep
from soseleto.task.task import LossGuard, Method, NonFiniteLoss, Task, after_step
from soseleto.training.data import Data, class_count, is_out_of_memory
from soseleto.training.history import Records, weight_record
from soseleto.training.result import Result
from soseleto.training.resume import Keeper, model_fingerprint, require_same_settings
from soseleto.training.setup import Network, Options
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One training: epochs over the source, with one target batch for every source batch.

    data: on the device, with the probes
    keeps: there is a run folder, perhaps on another rank
    wrong_share: the estimated share of wrong labels that the default method was chosen by
    beliefs: (N,) where source weights can start
    """

    options: Options
    settings: Settings
    network: Network
    data: Data
    fingerprints: Mapping[str, str | None]
    sharing: Sharing
    device: torch.device
    records: Records
    keeps: bool
    wrong_share: float | None
    beliefs: Tensor | None

    @property
    def team(self) -> Reducer:
        return self.sharing.reducer

    @property
    def in_one_process(self) -> bool:
        return isinstance(self.team, Single)

    @cached_property
    def method(self) -> Method:
        """Recording what probes need."""
        method, probes = self.settings.method, self.data.probes
        return method if probes is None else Recording(method, Signals(len(self.data.source)))

    @cached_property
    def task(self) -> Task:
        model, n_source = self.network.model, len(self.data.source)
        noisy = self.options.mode == "noisy"
        classes = class_count(self.data.source, self.network.outputs)
        shares = None
        if noisy and self.settings.balanced_target and classes is not None:
            counts = torch.bincount(self.data.target.labels.cpu(), minlength=classes)
            shares = (counts.float() / len(self.data.target)).to(self.device)
        return Task(
            model=model,
            losses=self.network.losses,
            n_source=owned(n_source, self.team),
            steps=self.settings.epochs * math.ceil(n_source / self.settings.batch_size),
            shared=_trainable(model, "" if noisy else "trunk."),
            target_head=frozenset() if noisy else _trainable(model, "target_head."),
            make_optimizer=self.settings.optimizer,
            make_schedule=self.settings.schedule,
            device=self.device,
            classes=classes,
            target_shares=shares,
            guard=LossGuard(self.device, self.team, deferred=self.device.type == "cuda"),
            sharing=self.sharing,
            beliefs=self.beliefs,
        )

    @cached_property
    def target(self) -> TargetCycle:
        labels = self.data.target.labels.cpu() if self.settings.balanced_target else None
        return TargetCycle(len(self.data.target), self.settings.target_batch_size, self.options.seed, labels)

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json``."""
        return {
            **self.options.describe(),
            **self.settings.describe(),
            **({} if self.wrong_share is None else {"wrong_share": self.wrong_share}),
            "task": self.network.kind,
            "ranks": self.team.ranks,
            "probes": len(self.data.probes or ()),
            "device": str(self.device) if self.in_one_process else self.device.type,
            **self._facts,
        }

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return {**facts_of(self.data, self._source, self.network), **self.fingerprints}

    def _require_same(self, config: dict[str, Any], optimizer: Optimizer) -> None:
        """Raise where ranks train with different settings; those of a group are its learning rate and the like."""
        groups = {f"optimizer group {at}": {**group, "params": None} for at, group in enumerate(optimizer.param_groups)}
        checkpoints = [self.options.checkpoints.seconds, self.options.checkpoints.steps]
        local = {"out": self.keeps, "checkpoints": checkpoints, "parts": self.sharing.micro_batch_size}
        require_same_settings(self.team, {**config, **groups, **local})

    def run(self) -> Result:
        config, state = self.describe(), self.method.init(self.task)
        self._require_same(config, state.optimizer)
        n_source, checkpoints = len(self.data.source), self.options.checkpoints
        keeper = Keeper(self.records, self.task, state, config, checkpoints, self.keeps, n_source)
        done = keeper.begin()
        if self.team.rank:  # dropout must differ from rank to rank
            torch.manual_seed(seed_for(self.options.seed, f"training/rank {self.team.rank}", done))
        start = {"epochs": self.settings.epochs, "steps": self.task.steps, **self._facts}
        self.records.begin(start, resumed=done > 0)
        flags = [(module, module.training) for module in self.task.model.modules()]
        _train_mode(self.task.model)
        if not self.task.sharing.nothing and require_divisible(self.task.model):
            self.records.message(PER_PART)
        self._epochs(state, keeper, done)
        for module, training in flags:
            module.training = training
        return self.finish(state, config)

    def finish(self, state: Any, config: dict[str, Any]) -> Result:
        """Everything after the last step: rank and write the run."""
        if engine_used(state):
            config = {**config, "alignments": asdict(state.coverage)}
        result = self._with_evidence(self._result(state, config), state)
        parameters = self._whole_parameters(result) if self.keeps else {}
        self.team.first(lambda: self._close(result, parameters))
        return result

    def _epochs(self, state: Any, keeper: Keeper, done: int) -> None:
        """Everything after the first ``done`` steps."""
        eager = partial(self.method.step, state)
        captured = self.options.compute.cuda_graph and self.device.type == "cuda" and self.in_one_process
        step = CapturedStep(eager, state, self.records.message) if captured else eager
        epochs_done, start = divmod(done, self.task.steps // self.settings.epochs)
        with keeper.handling_signals(), closing(self.records):
            for epoch in range(epochs_done + 1, self.settings.epochs + 1):
                try:
                    self._epoch(state, step, epoch, start, keeper)
                except NonFiniteLoss as error:
                    raise self._stop(error, epoch) from error
                start = 0

    def _whole_parameters(self, result: Result) -> Mapping[str, Tensor]:
        """What the first rank writes. All ranks of a sharded model take part in computing it."""
        if sharded_modules(self.task.model) and result.learned is not None:
            result.ranking()
        reshard(self.task.model)
        return gathered(self.task.model.state_dict())

    def _within_memory(
        self, step: TakeStep, state: Any, source: Batch, target: Batch, *, monitor: bool
    ) -> dict[str, Tensor]:
        try:
            numbers = step(source, target, monitor=monitor)
            after_step(state)
            return numbers
        except Exception as error:
            if explained := single_example(error):
                raise explained from error
            if not is_out_of_memory(error):
                raise
            self.task.model.zero_grad(set_to_none=True)
            whole = self.data.probes is not None or not getattr(self.settings.method, "shares_work", False)
            raise _too_large(self.task, source, target, whole=whole) from error

    def _epoch(self, state: Any, step: TakeStep, epoch: int, start: int, keeper: Keeper) -> None:
        """The epoch's steps after the first ``start``, which were taken before the run was resumed."""
        source, size, seed = self.data.source, self.settings.batch_size, self.options.seed
        batches = source.batches(size, seed=seed, epoch=epoch, device=self._place(source))
        before = (epoch - 1) * len(batches)
        targets = self.target.batches(before, len(batches), self._place(self.data.target))
        pairs = zip(
            self._feed(source, batches, "source", epoch, start),
            self._feed(self.data.target, targets, "target", epoch, start),
            strict=True,
        )
        for count, (batch, target) in enumerate(pairs, start=start + 1):
            numbers = self._within_memory(step, state, batch, target, monitor=count == len(batches))
            average_running_statistics(self.task.model, self.team)
            if state.schedule is not None:
                state.schedule.step()
            self._report_engine(state, before + count)
            self.records.step(numbers, {"epoch": epoch, "step": before + count, "steps": self.task.steps})
            if count < len(batches):
                keeper.after(before + count)
        if epoch < self.settings.epochs:  # cached for the next epoch while a GPU still works: the guard waits for it
            source.batches(size, seed=seed, epoch=epoch + 1)
        self.task.guard.check()
        if engine_used(state):
            self.records.message(state.coverage.sentence())
        self.records.epoch(self.epoch_record(state, epoch, before + len(batches)))
        keeper.after(before + len(batches))

    def _place(self, examples: ExampleSet) -> torch.device | str:
        """Where indices are: with the examples, or on the CPU, where ranks select their rows and workers get theirs."""
        return "cpu" if examples.reads_ahead or not self.in_one_process else self.task.device

    def _report_engine(self, state: Any, step: int) -> None:
        """Record why ``auto`` took a slower engine than the fastest, and from which step on."""
        messages = getattr(getattr(state, "engine", None), "messages", None)
        while messages:
            text = messages.pop(0)
            known = step == 1 or text in self.records.messages  # known: recorded before the run was resumed
            self.records.message(text if known else f"from step {step} on {text}")

    def _feed(
        self, examples: ExampleSet, batches: Sequence[Tensor], side: str, epoch: int, start: int
    ) -> Iterator[Batch]:
        device, ranks = self.task.device, self.team.ranks
        made = feed(
            examples,
            batches,
            seed=self.options.seed,
            epoch=epoch,
            purpose=f"{side}/augment",
            augment=self.settings.augment[0 if side == "source" else 1],
            prepare=self.network.prepare,
            start=start,
            keep=my_rows(side, self.team),
        )
        for at, fed in enumerate(made, start=start):
            index = fed.index // ranks if side == "source" and ranks > 1 else fed.index  # within this rank's examples
            yield replace(fed, index=index, whole=len(batches[at])).to(device)

    def epoch_record(self, state: Any, epoch: int, step: int) -> dict[str, Any]:
        record: dict[str, Any] = {"epoch": epoch, "epochs": self.settings.epochs, "step": step}
        record["lr"] = float(state.optimizer.param_groups[0]["lr"])
        if (learned := self._learned(state)) is not None:
            record |= weight_record(learned, self._source, self.team)
        return record

    def _gathered(self, state: Any) -> Weights | None:
        """``_learned`` of all ranks."""
        learned, n = self._learned(state), len(self._source)
        if learned is None or self.team.ranks == 1:
            return learned
        whole = Weights(n)
        whole.load_state({name: self.team.gather(mine, n) for name, mine in learned.state().items()})
        return whole

    @cached_property
    def _source(self) -> ExampleSet:
        return self.data.own_source

    def _learned(self, state: Any) -> Weights | None:
        """This rank's weights without the probes'; None for a method without weights."""
        return None if state.weights is None else state.weights.first(owned(len(self._source), self.team))

    def _result(self, state: Any, config: dict[str, Any]) -> Result:
        return Result(
            model=getattr(state, "answering", self.task.model),
            source=self._source,
            history=self.records.history,
            messages=self.records.messages,
            prepare=self.network.prepare,
            device=self.task.device,
            learned=self._gathered(state),
            missing=self.data.classes_without_target() if self.options.mode == "noisy" else (),
            loss=self.options.loss[1],
            task=self.network.kind,
            classes=self.data.target.classes,
            out=None if self.records.folder is None else self.records.folder.path,
            engine=engine_used(state),
            config=config,
            settings=self.settings,
            suspect_precision=self.options.probes.precision,
        )

    def _with_evidence(self, result: Result, state: Any) -> Result:
        """With what is known of the source's labels: by probes or by a first answer, whichever is expected to find
        more wrong labels."""
        probes, first = self.data.probes, self.options.probes.evidence
        if probes is None:
            return replace(result, evidence=first)
        assert isinstance(self.method, Recording)
        recorded = {"margin": self.method.signals.margin}
        if state.weights is not None:
            recorded["score"] = state.weights.scores
        source = self.data.source
        pieces = source.pieces(1000)
        outputs = in_order(pieces, [result.outputs(inputs) for inputs, _ in source.read(pieces)])
        judgement = probes.judgement(self._source.labels, recorded, outputs.softmax(1))
        evidence = Evidence.of(judgement, result.missing)
        if len(np.unique(judgement.trusted_labels)) < 2 or not evidence.judged.any():
            self.records.message("suspects have no probabilities, since the target has too few of the source's classes")
            return replace(result, evidence=first)
        both = [evidence, *([] if first is None else [first])]
        return replace(result, evidence=max(both, key=lambda each: each.expected_hits(self.options.probes.precision)))

    def _stop(self, error: NonFiniteLoss, epoch: int) -> TrainingError:
        side = self.data.source if error.side == "source" else self.data.target
        shown = ", ".join(side.id_of(i) for i in error.index[:5]) + (", ..." if len(error.index) > 5 else "")
        examples = counted(len(error.index), f"{error.side} example")
        message = (
            f"the loss of {examples} (id {shown}) is NaN or infinite in epoch {epoch}: look at the data, or lower lr."
        )
        self.records.message(message)
        return TrainingError(message)

    def _close(self, result: Result, parameters: Mapping[str, Tensor]) -> None:
        self.records.end(
            {"seconds": round(self.records.seconds, 3)}, lambda folder: write_result(folder, result, parameters)
        )
        if self.records.folder is not None:
            self.records.folder.drop_checkpoints()


def write_result(folder: RunFolder, result: Result, parameters: Mapping[str, Tensor]) -> None:
    """The ranking with its thumbnails, the suspects and the model of a finished run."""
    if result.learned is not None:
        ranking = result.ranking()
        folder.write_ranking(ranking)
        sample = default_rows(ranking.get("mislabelled_probability"), is_suspect(ranking))
        save_thumbnails(folder, result.source, also=sample)
    if result.evidence is not None:
        folder.write_json(SUSPECTS, result.suspects().to_dict())
    folder.write_model(parameters)
    if "alignments" in result.config:
        folder.write_config({**folder.config(), "alignments": result.config["alignments"]})


def _trainable(model: nn.Module, prefix: str) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad and name.startswith(prefix))


def facts_of(data: Data, source: ExampleSet, network: Network) -> dict[str, Any]:
    """What ``config.json`` says of the data and the model; source: without probes."""
    first, _ = data.source.take(torch.tensor([0]))
    return {
        "n_source": len(source),
        "n_target": len(data.target) + len(data.probes or ()),
        "input_shape": structure.shape_of(first),
        "input_dtype": str(first.dtype).removeprefix("torch.") if isinstance(first, Tensor) else None,
        "parameters": sum(p.numel() for p in network.model.parameters()),
        "model_fingerprint": model_fingerprint(network.model),
        "classes": None if data.target.classes is None else list(data.target.classes),
        "prepare": network.prepare.describe(),
    }


def _too_large(task: Task, source: Batch, target: Batch, *, whole: bool) -> OutOfMemory:
    """The error for a step that did not fit; whole: the training takes no micro-batches."""
    size = task.sharing.micro_batch_size or max(len(source), len(target))
    half = max(size // 2, 1)
    if whole:
        name = "batch_size" if len(source) >= len(target) else "target_batch_size"
        fix = f"write {name}={half} (--{name.replace('_', '-')} {half}) or less, in a new run folder"
    else:
        fix = f"add compute=Compute(micro_batch_size={half}) or less, and run the same again to resume"
    return OutOfMemory(f"there is not enough memory on {task.device} for {counted(size, 'example')} at a time: {fix}.")


def engine_used(state: Any) -> str:
    """Its name; nothing where the last layer made the alignments, and ``auto`` had nothing to choose."""
    name: str = getattr(getattr(state, "engine", None), "name", "")
    return "" if name == "auto" else name


def _train_mode(model: nn.Module) -> None:
    """Training mode; modules that the user has put in evaluation mode stay there.

    In a model that is in evaluation mode as a whole, as when it was just loaded, these are the BatchNorms that are
    frozen: those without a trainable parameter of their own.
    """
    if model.training:
        return
    frozen = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and _is_frozen(m)]
    model.train()
    for module in frozen:
        module.eval()


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)
