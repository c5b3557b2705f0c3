"""Exact alignments against those with BatchNorm's statistics held fixed, on small images with flipped labels.

    python benchmarks/held_statistics.py [--data mnist cifar10] [--seeds 3] [--epochs 8] [--out FILE] [--tiny]

A small ResNet with BatchNorm is trained on 1,500 source images, 40 % of them with a wrong label, with 300 trusted ones.
Lines: exact alignments; held alignments with the true source gradient; held alignments and gradient; and ordinary
training (weights stay at 1). In the line of exact alignments the held ones are computed too, at the same parameters and
for the same direction, and the two are compared within each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soseleto
from common import arguments, show, write
from experiments.detection import auroc
from soseleto import data
from soseleto.data import Examples, symmetric
from soseleto.engines import make_engine
from soseleto.engines.contract import Direction, Engine, Passes, PerExampleLoss, SourcePass, SourceStep, Step
from soseleto.engines.unchanged import unchanged
from soseleto.models.architectures import _Block

SOURCE, TARGET, TEST, NOISE = 1500, 300, 2000, 0.4
SIDES = {"mnist": 7, "cifar10": 8}
LINES = ("exact", "held_statistics", "held_statistics_and_gradient", "ordinary")


@dataclass
class Compared:
    """The forward engine; ``similar`` has correlations of its alignments with the held ones, of every fourth step."""

    similar: list[tuple[float, float]] = field(default_factory=list)
    exact: Engine = field(default_factory=lambda: make_engine("forward"))
    held: Engine = field(default_factory=lambda: make_engine("held_statistics"))
    name: str = "forward"
    steps: int = 0

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        return self.exact(model, per_example_loss, batch, direction)

    def passes(self, step: Step) -> Passes:
        directions: list[Direction] = []

        def keep(found: dict[str, Tensor]) -> dict[str, Tensor]:
            directions.append(step.to_direction(found))
            return dict(directions[0])

        passes = self.exact.passes(Step(step.model, step.losses, step.source, step.target, keep, step.coefficients))
        self.steps += 1
        if self.steps % 4 == 1:
            with unchanged(step.model):
                _, q = self.held(step.model, step.losses.source, step.source, directions[0])
            self.similar.append((correlation(passes.alignment, q), correlation(ranks(passes.alignment), ranks(q))))
        return passes

    def source_pass(self, step: SourceStep) -> SourcePass:
        return self.exact.source_pass(step)


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort()


def network(channels: int, width: int) -> nn.Module:
    """Three residual blocks with BatchNorm."""
    norm = nn.BatchNorm2d
    stem = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    blocks = [_Block(width, width, 1, norm), _Block(width, 2 * width, 2, norm), _Block(2 * width, 4 * width, 2, norm)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def problem(name: str, seed: int, tiny: bool) -> tuple[Examples, Examples, Examples]:
    if tiny:
        images = torch.randint(256, (160, 1, 8, 8), dtype=torch.uint8)
        labels = torch.arange(160) % 10
        train, test, sizes = Examples(images, labels), Examples(images[:20], labels[:20]), (96, 32, 20)
    else:
        train, test, sizes = data.load(name, "train"), data.load(name, "test"), (SOURCE, TARGET, TEST)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    source, target = train.subset(order[: sizes[0]]), train.subset(order[sizes[0] : sizes[0] + sizes[1]])
    side = 8 if tiny else SIDES[name]
    noisy = symmetric(source.labels, NOISE, classes=10, seed=seed).labels
    return (
        Examples(small(source.inputs, side), noisy, truth=source.labels),
        Examples(small(target.inputs, side), target.labels),
        Examples(small(test.inputs[: sizes[2]], side), test.labels[: sizes[2]]),
    )


def small(images: Tensor, side: int) -> Tensor:
    return F.adaptive_avg_pool2d(images.float() / 255, side)


def measure(name: str, line: str, seed: int, *, epochs: int, tiny: bool) -> dict[str, Any]:
    source, target, test = problem(name, seed, tiny)
    torch.manual_seed(seed)
    model = network(source.inputs.shape[1], 4 if tiny else 8)
    compared = Compared()
    engine: Any = compared if line == "exact" else "auto" if line == "ordinary" else line
    method = soseleto.Soseleto(engine=engine, **({"weight_step": None} if line == "ordinary" else {}))
    result = soseleto.fit(
        model, source, target, test=test, method=method, epochs=epochs, batch_size=64, target_batch_size=32, seed=seed,
        optimizer=soseleto.sgd(0.05, 5e-4), device="cpu",
    )  # fmt: skip
    row = {"data": name, "line": line, "seed": seed, "accuracy": result.history[-1]["test_accuracy"]}
    norms = [m.weight.detach().norm() for m in model.modules() if isinstance(m, nn.Conv2d)]
    row["norm of convolutions"] = float(torch.stack(norms).norm())
    wrong = source.truth != source.labels
    if line != "ordinary":
        row |= {"AUROC weight": auroc(result.weights, wrong), "AUROC score": auroc(result.scores, wrong)}
    if line == "exact":
        found = torch.tensor(compared.similar)
        row |= {"correlation": float(found[:, 0].mean()), "rank correlation": float(found[:, 1].mean())}
        row |= {"lowest correlation": float(found[:, 0].min())}
    return row


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", nargs="+", default=["mnist", "cifar10"], choices=list(SIDES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="random images, for tests")
    options = parser.parse_args(given)
    names, seeds, epochs = (["mnist"], 1, 1) if options.tiny else (options.data, options.seeds, options.epochs)
    rows = []
    for name in names:
        for seed in range(seeds):
            for line in LINES:
                rows.append(measure(name, line, seed, epochs=epochs, tiny=options.tiny))
                write(options.out, "held_statistics", torch.device("cpu"), rows)
    show("Exact and held statistics", rows)


if __name__ == "__main__":
    main()
