"""Which alignments should move the weights and which should make the score: CIFAR-10 at settings no table reports.

    python benchmarks/choose_alignments.py --out FILE [--model quick resnet18] [--noise 0.2 0.6 random_label1]
        [--weights NAME ...] [--scores NAME ...] [--seeds 0 1] [--share 0.0] [--device auto] [--tiny] [--show]

43,000 source images, 2,000 trusted ones and 5,000 held-out ones, all of the training set; no number is of the test set.
A run trains with one form of what moves the weights. Scores do not act on the training, so every form of score is
recorded in the same run, beside the running loss and margin. A row has the accuracy on the held-out images, and for
every signal the AUROC of right against wrong labels and the percentage of wrong ones in the better half. Rows are saved
as runs end, and a job that is started again continues. Every form of score costs time: ``--scores`` leaves some out,
and with them the other ways to combine visits. ``--show`` prints the means of what FILE holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.cifar10_noise.experiment import Config, detection, prepare_data, train
from experiments.results import Row, load
from experiments.runner import run_all
from soseleto.algorithm import Soseleto
from soseleto.methods import Recording, Signals
from soseleto.methods.wrappers.inner import Transparent
from soseleto.parallel.device import choose_device
from soseleto.pieces import (
    at_temperature,
    beyond_noise,
    centred,
    chain,
    hold_when_vanished,
    label_doubt,
    last_layer,
    recent_visits,
    scale_by_rms,
    shrunk_by_spread,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.pieces.last_layer import Form
from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Method, Task
from soseleto.training.usual import STANDARD_ERRORS

NAME = "choose-alignments"
FROZEN = 1e-12  # a weight step that moves nothing, while scores are recorded
SIZED = (scale_by_rms(), hold_when_vanished())
HOT: tuple[Form, ...] = (at_temperature(4.0), without_own_error())
FORMS: dict[str, tuple[Form, ...]] = {
    "raw": (),
    "hot": HOT,
    "centred": (centred(),),
    "centred hot": (centred(), unit_length(), *HOT),
    "centred hot, own error": (centred(), unit_length(), at_temperature(4.0)),
    "whitened hot": (whitened(), unit_length(), *HOT),
    "half whitened hot": (whitened(shrink=1.0), unit_length(), *HOT),
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "frozen": {"weight_step": FROZEN},
    "all layers": {},
    "raw": {"alignment": chain(last_layer(), *SIZED)},
    "raw, beyond noise": {"alignment": chain(last_layer(), *SIZED, beyond_noise())},
    "hot": {"alignment": chain(last_layer(*FORMS["hot"]), *SIZED)},
    "centred hot": {"alignment": chain(last_layer(*FORMS["centred hot"]), *SIZED)},
    "whitened hot": {"alignment": chain(last_layer(*FORMS["whitened hot"]), *SIZED)},
    **{
        f"doubted, {name}beyond noise": {
            "source_loss": label_doubt(),
            "alignment": chain(*([] if forms is None else [last_layer(*forms)]), *SIZED, beyond_noise(STANDARD_ERRORS)),
        }
        for name, forms in {"": None, **{f"{name}, ": forms for name, forms in FORMS.items()}}.items()
    },
}
SCORES: dict[str, Piece] = {"as the weights": chain(), **{name: last_layer(*forms) for name, forms in FORMS.items()}}
VISITS: dict[str, Piece] = {", recent": recent_visits(), ", shrunk": shrunk_by_spread()}  # beside the plain mean
COMMON: dict[str, Any] = {
    "n_clean": 7000,
    "n_heldout": 5000,
    "n_test": 10,
    "select": True,
    "precision": "bfloat16",
    "record": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "quick": {"model": "quick", "epochs": 60, "lr": 0.03},
    "resnet18": {"model": "resnet18", "epochs": 30, "lr": 0.05},
}
TINY: dict[str, Any] = {
    "model": "mlp",
    "size": 16,
    "n_source": 300,
    "n_clean": 200,
    "n_heldout": 100,
    "epochs": 2,
    "batch_size": 64,
    "target_batch_size": 16,
    "crop": 0,
    "flip": False,
    "precision": None,
}


@dataclass(frozen=True)
class every_form(Piece):
    """Records scores side by side, of every form and every way to combine visits; the run's own are the weights'."""

    forms: tuple[tuple[str, Piece], ...]
    visits: tuple[tuple[str, Piece], ...]

    slot: ClassVar[str] = "scores"

    @property
    def watched(self) -> frozenset[str | None]:  # type: ignore[override]
        return frozenset[str | None]().union(*(piece.watched for _, piece in self.forms))

    def init(self, task: Task) -> State:
        names = [f"{form}{ending}" for form, _ in self.forms for ending in ("", *dict(self.visits))]
        return {
            "forms": [piece.init(task) for _, piece in self.forms],
            "visits": [[piece.init(task) for _, piece in self.visits] for _ in self.forms],
            "examples": {name: torch.zeros(task.n_source, device=task.device) for name in (*names, "visits")},
        }

    def update(self, value: Alignment, state: Any, step: Step) -> Alignment:
        examples, index = state["examples"], step.source.index
        visits = examples["visits"][index] + 1.0
        examples["visits"][index] = visits
        for (name, piece), its, of_visits in zip(self.forms, state["forms"], state["visits"], strict=True):
            found = piece.update(value, its, step)
            mean = examples[name][index]
            examples[name][index] = mean + (found.scaled.to(mean.dtype) - mean) / visits  # as in Weights
            for (ending, combine), own in zip(self.visits, of_visits, strict=True):
                examples[f"{name}{ending}"][index] = combine.update(found, own, step)
        return value

    def refresh(self, state: Any) -> None:
        for (_, piece), its in zip(self.forms, state["forms"], strict=True):
            piece.refresh(its)


class Kept(Transparent):
    """``method`` unchanged; its state can be read after the training."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state: Any = None

    def init(self, task: Task) -> Any:
        self.state = self.method.init(task)
        return self.state

    def step(self, state: Any, *batches: Any, monitor: bool = False) -> dict[str, Tensor]:
        return self.method.step(state, *batches, monitor=monitor)


def candidate(config: Config, names: Sequence[str]) -> Soseleto:
    """The method of a configuration: its form for the weights, and these forms of scores."""
    share = dict(config.settings).get("share", 0.0)
    settings: dict[str, Any] = {"gradients": target_share(share)} if share else {}
    visits = tuple(VISITS.items()) if len(names) == len(SCORES) else ()
    scores = every_form(tuple((name, SCORES[name]) for name in names), visits)
    return Soseleto(**WEIGHTS[config.method], **settings, scores=scores)


def heading(config: Config) -> Row:
    """The entries of a row that are known before the run."""
    names = ("model", "size", "n_clean", "n_heldout", "n_source", "epochs", "batch_size", "target_batch_size", "lr")
    setting = {"noise": config.noise, "model": config.model, **dict(config.settings)}
    kept = {name: getattr(config, name) for name in (*names, "precision")}
    return {"method": config.method, "setting": setting, "seed": config.seed, "config": kept}


def run_one(
    config: Config, *, scores: Sequence[str] = tuple(SCORES), root: str | None = None, device: str = "auto"
) -> Row:
    data = prepare_data(config, root)
    assert data.heldout is not None
    method, signals = Kept(candidate(config, scores)), Signals(len(data.source))
    begin = time.perf_counter()
    result = train(config, data, Recording(method, signals), device)
    seconds = time.perf_counter() - begin
    recorded = {name: values.cpu() for name, values in method.state.pieces["scores"]["examples"].items()}
    trust = {name: values for name, values in recorded.items() if name != "visits"}
    trust |= {"weight": result.weights, "loss": -signals.loss.cpu(), "margin": signals.margin.cpu()}
    found = detection(data.source, trust)
    kept = found["kept"]
    half = {name: kept[name][kept["fraction"].index(0.5)] for name in trust}
    return {
        **heading(config),
        "heldout_accuracy": result.evaluate(data.heldout)["accuracy"],
        "mean_weight": float(result.weights.mean()),
        "seconds": seconds,
        "detection": found["detection"],
        "wrong_in_better_half": half,
    }


def table(rows: Sequence[Row]) -> str:
    """Means over seeds: accuracy by what moves the weights, AUROC and better half by signal."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[", ".join(f"{name} {value}" for name, value in row["setting"].items()), row["method"]].append(row)
    lines = []
    for (setting, method), same in groups.items():
        accuracy = statistics.mean(row["heldout_accuracy"] for row in same)
        lines.append(f"{setting}; weights {method}: held-out {accuracy:.2f}, {len(same)} seeds")
        for signal in same[0]["detection"]:
            auroc = statistics.mean(row["detection"][signal]["auroc"] for row in same)
            half = statistics.mean(row["wrong_in_better_half"][signal] for row in same)
            lines.append(f"    {signal:34} AUROC {auroc:.4f}, wrong in the better half {half:5.2f} %")
    return "\n".join(lines)


def configurations(options: argparse.Namespace) -> list[Config]:
    return [
        Config(
            method=weights,
            base="soseleto",
            noise=noise,
            seed=seed,
            settings=(("share", options.share),),
            **{**COMMON, **MODELS[model], **(TINY if options.tiny else {})},
        )
        for seed in options.seeds
        for model in options.model
        for noise in options.noise
        for weights in options.weights
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results file, continued if it exists")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--noise", nargs="+", default=[0.2, 0.6, "random_label1"], type=_noise)
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS), metavar="NAME")
    parser.add_argument("--scores", nargs="+", default=list(SCORES), choices=list(SCORES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--share", type=float, default=0.0, help="of the target's gradient in the step of the network")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--root", help="the data folder; SOSELETO_DATA by default")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--show", action="store_true", help="print the means of the file, run nothing")
    options = parser.parse_args(arguments)
    if not options.show:
        run = partial(run_one, scores=options.scores, root=options.root, device=options.device)
        place = str(choose_device(options.device))
        run_all(
            configurations(options),
            options.out,
            run,
            name=NAME,
            heading=heading,
            device=place,
            processes=options.processes,
        )
    print(table(load(options.out).rows))


def _noise(text: str) -> float | str:
    return text if text.startswith("random") else float(text)


if __name__ == "__main__":
    main()
