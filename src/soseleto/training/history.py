"""The records of a run: history, messages, the run folder's metrics, and progress functions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from soseleto.data import ExampleSet
from soseleto.data.examples import truth_known
from soseleto.parallel.reducer import Reducer
from soseleto.run_folder.folder import RunFolder
from soseleto.training.options import Progress
from soseleto.weights import Weights

logger = logging.getLogger("soseleto")

STEP_INTERVAL = 0.2  # seconds between two step events
VANISHED = "the target loss has vanished"


class Records:
    """Sums the steps' numbers on the device and reads them once at the end of an epoch."""

    def __init__(self, folder: RunFolder | None, functions: Sequence[Progress] = ()) -> None:
        self.folder, self._functions = folder, functions
        self.history: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # steps with this number
        self._last_step_event = 0.0
        self._start = time.perf_counter()

    def begin(self, record: dict[str, Any], *, resumed: bool) -> None:
        """The start event, which a resumed run has in its folder already."""
        if not resumed:
            self.event("start", record)
        else:
            self._report("start", record)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, beside the size of ``metrics.jsonl``."""
        return {
            "history": self.history,
            "messages": self.messages,
            "sums": self._sums,
            "counts": self._counts,
            "seconds": self.seconds,
        }

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from ``state``; later records are removed from the run folder, since they will be written again."""
        self.history.extend(state["history"])
        self.messages.extend(state["messages"])
        self._sums = {name: total.to(device) for name, total in state["sums"].items()}
        self._counts = dict(state["counts"])
        self._start = time.perf_counter() - state["seconds"]
        if self.folder is not None and not self.folder.cut_metrics(state["metrics"]):
            self.message("metrics.jsonl has lost records that were there when the checkpoint was written")

    def event(self, name: str, record: dict[str, Any]) -> None:
        if self.folder is not None:
            self.folder.log({"event": name, **record})
        self._report(name, record)

    def end(self, record: dict[str, Any], write: Callable[[RunFolder], None]) -> None:
        """``write`` the files of the finished run, its checksums and the last event."""
        if self.folder is not None:
            write(self.folder)
            self.folder.end({"event": "end", **record})
        self._report("end", record)

    def _report(self, name: str, record: dict[str, Any]) -> None:
        for function in self._functions:
            try:
                function(name, record)
            except Exception as error:
                if name not in ("close", "end"):  # by which a function may stop a training, but not a finished one
                    raise
                logger.warning("a progress function failed at the end (%s): %s", type(error).__name__, error)

    def message(self, text: str) -> None:
        if text not in self.messages:
            self.messages.append(text)
            logger.info(text)
            self.event("message", {"text": text})

    def step(self, numbers: dict[str, Tensor], place: dict[str, Any]) -> None:
        for name, value in numbers.items():
            if name in self._sums:
                self._sums[name].add_(value)
            else:
                self._sums[name] = value.clone()  # a captured step writes its numbers to the same memory every time
            self._counts[name] = self._counts.get(name, 0) + 1
        now = time.perf_counter()
        if self._functions and now - self._last_step_event > STEP_INTERVAL:
            self._last_step_event = now
            self._report("step", {**place, **{name: float(value) for name, value in numbers.items()}})

    def epoch(self, record: dict[str, Any]) -> dict[str, Any]:
        """Close an epoch: add the means of its steps' numbers to the record."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        whole = {**record, **means, "seconds": round(time.perf_counter() - self._start, 3)}
        self.history.append(whole)
        self.event("epoch", whole)
        if means.get("held", 0.0) > 0.5 and not any(text.startswith(VANISHED) for text in self.messages):
            self.message(
                f"{VANISHED} ({means['target_loss']:.2g} in epoch {record['epoch']}), so alignments carry no signal: "
                "the weights are held"
            )
        return whole

    def close(self) -> None:
        """After the last epoch, or where the training failed."""
        self._report("close", {})

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


def weight_record(weights: Weights, source: ExampleSet, reducer: Reducer) -> dict[str, Any]:
    """A summary of the weights and, where the truth is known, the mean weight of right and wrong labels.

    weights: of this rank's examples
    """
    record: dict[str, Any] = {**weights.summary(reducer.sum)}
    if source.truth is None:
        return record
    truth, mine = source.truth.cpu(), slice(reducer.rank, None, reducer.ranks)
    both = truth_known(truth), truth != source.labels.cpu()
    known, wrong = (places[mine].to(weights.values.device) for places in both)
    record["groups"] = {}
    for name, places in (("right", known & ~wrong), ("wrong", known & wrong)):
        own = torch.stack([places.sum(), weights.values[places].sum(dtype=torch.float64)]).cpu()
        count, total = reducer.sum(own).tolist()
        if count:
            record["groups"][name] = {"mean": total / count, "count": int(count)}
    return record
