"""How the visits of an example should enter the strong recipe's score, by which labels are ranked.

    python benchmarks/strong_scores.py --out results/choose-strong-scores-cpu.json

News with wrong labels on MiniLM's frozen embeddings (``$SOSELETO_DATA``), the line ``strong`` of the experiment with
texts that are held out, so that no test text is used. Every weight of every visit is kept, and combined afterwards:

    p = 0, 1, ...      the t-th visit counts as t(t + 1)···(t + p − 1): all alike, or later ones more
    last               the last visit alone, which is the weight

The AUROC is that of right against wrong labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from common import arguments, show, write
from experiments import measures
from experiments.noisy_text import experiment
from experiments.noisy_text.configuration import Config, configuration
from soseleto.data import Examples
from soseleto.data.batch import Batch
from soseleto.methods import Strong
from soseleto.methods.strong.method import StrongState

POWERS = (0, 1, 2, 4, 8)
CASES = (("ag_news", 100), ("ag_news", 500), ("hausa", 200))
Visit = tuple[Tensor, Tensor]  # indices of a batch, and their weights


def visits_of(config: Config, data: experiment.Data) -> list[Visit]:
    """The weights of every step of a training."""
    seen: list[Visit] = []

    class Remembering(Strong):
        def step(self, state: StrongState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
            numbers = super().step(state, source, target, monitor=monitor)
            seen.append((source.index.cpu(), state.weights.take(source.index).cpu()))  # type: ignore[union-attr]
            return numbers

    with mock.patch.object(experiment, "make_method", return_value=Remembering(**dict(config.settings))):
        experiment.train(config, data, None, "cpu")
    return seen


def score(visits: Sequence[Visit], n: int, power: int | None) -> Tensor:
    """(n,): the mean over visits in which later ones count more; None is the last alone."""
    mean, count = torch.zeros(n), torch.zeros(n)
    for index, weights in visits:
        count[index] += 1.0
        rate = 1.0 if power is None else (power + 1.0) / (count[index] + power)
        mean[index] += rate * (weights - mean[index])
    return mean


def rows_of(config: Config, data: experiment.Data) -> list[dict[str, Any]]:
    visits, n = visits_of(config, data), len(data.source)
    case = {"noise": config.noise, "n_trusted": config.n_trusted, "epochs": config.epochs, "seed": config.seed}
    scores = {**{str(p): score(visits, n, p) for p in POWERS}, "last": score(visits, n, None)}
    found = measures.detection(data.source.labels, data.truth, scores)["detection"]
    return [
        {**case, "p": p, "auroc": one["auroc"], "average precision": one["average_precision"]}
        for p, one in found.items()
    ]


def made_up(seed: int) -> experiment.Data:
    """Four clouds in place of the news, a third of their labels wrong."""
    y = torch.arange(160) % 4
    x = torch.eye(4)[y] + 0.1 * torch.randn(160, 4, generator=torch.Generator().manual_seed(seed))
    given = (y + (torch.arange(160) % 3 == 0)) % 4
    classes = tuple("abcd")
    source, trusted = Examples(x[40:], given[40:], classes=classes), Examples(x[:40], y[:40], classes=classes)
    return experiment.Data(
        source=source, trusted=trusted, evaluated=trusted, truth=y[40:], before=given[:40], preparation=None
    )


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12], help="that no table has")
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 30])
    parser.add_argument("--tiny", action="store_true", help="made-up texts, to test that it runs")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for noise, n_trusted in CASES[:1] if options.tiny else CASES:
            for epochs in options.epochs:
                config = configuration(
                    "strong", noise=noise, n_trusted=n_trusted, encoder="frozen", seed=seed, select=True, epochs=epochs
                )
                data = made_up(seed) if options.tiny else experiment.prepare_data(config, None, "cpu")
                rows += rows_of(config, data)
                write(options.out, "strong_scores", torch.device("cpu"), rows)
    show("AUROC of right against wrong labels, by what the strong recipe's score is", rows)
    return rows


if __name__ == "__main__":
    main()
