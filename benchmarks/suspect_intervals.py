"""Coverage of the 95 % intervals of suspects: trainings on CIFAR-10, and probes drawn repeatedly.

    python benchmarks/suspect_intervals.py [--noise 0.4 worse_label] [--draws 100] [--out FILE]

Each training gives every source example its signals. Since the true labels of the source are known, any of its examples
can serve as probes: some are drawn, the others are the source, and the estimates are compared with the true rates. So
the assumption behind the intervals (wrong probes are like wrong source labels) holds by construction, and only the
intervals are tested. *Regressions alone* are intervals without the rates counted on probes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import soseleto
from common import arguments, show, write
from experiments.table1 import configuration, method_of, model_of
from experiments.table1 import data as data_of
from soseleto.data import Augment, Examples, symmetric
from soseleto.models.architectures import mlp
from soseleto.suspects.probes import AUTO_SHARE, PlantedProbes, how_many_wrong
from soseleto.suspects.signals import Evidence
from soseleto.suspects.suspects import Calibrated, Estimate
from soseleto.task.optimizers import sgd

NOISE = (0.3, 0.4, 0.5, "worse_label", "aggre_label")
PROBES = (1500, 300, 60)
ASKED = (0.8, 0.9, 0.95)
MOST = 20_000  # source examples besides the probes
Array = np.ndarray


def trained(noise: float | str, epochs: int, device: str) -> tuple[Evidence, Array]:
    """The evidence of one training on images of half the size, and which source labels are wrong."""
    config = configuration("soseleto_probes", noise=noise, size=16)
    data = data_of(config)
    result = soseleto.fit(
        model_of(config), data.source, data.target, method=method_of(config, data), mode="noisy", epochs=epochs,
        batch_size=256, optimizer=partial(sgd, lr=config.lr, weight_decay=config.weight_decay),
        inputs=soseleto.Inputs(augment=Augment(crop=2, flip=True)),
        probes=soseleto.Probes(labels_before=data.before), device=device,
    )  # fmt: skip
    return of(result)


def tiny() -> tuple[Evidence, Array]:
    """A training on points in the plane, which takes a second."""
    points = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0))
    truth = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    source = Examples(points[:1000], symmetric(truth[:1000], 0.3, classes=4, seed=0).labels, truth=truth[:1000])
    target = Examples(points[1000:], truth[1000:])
    return of(soseleto.fit(mlp(2, 4), source, target, epochs=5, lr=0.1, batch_size=64, probes="auto", device="cpu"))


def of(result: soseleto.Result) -> tuple[Evidence, Array]:
    source = result.source
    assert result.evidence is not None
    assert source.truth is not None
    return result.evidence.gathered, (source.labels != source.truth).cpu().numpy()


def redrawn(evidence: Evidence, wrong: Array, m: int, human: bool, draw: np.random.Generator) -> tuple[Evidence, Array]:
    """Draw m source examples as probes for the others, with as many wrong ones as ``fit`` would plant."""
    order = draw.permutation(len(wrong))
    checked = None
    pool = order
    if human:
        pool = order[: round(m / AUTO_SHARE)]  # the target whose labels were checked
        checked = (len(pool), int(wrong[pool].sum()))
    bad, good = pool[wrong[pool]], pool[~wrong[pool]]
    n_bad = how_many_wrong(m, len(bad), len(good)) if human else m // 2
    probes = np.concatenate([bad[:n_bad], good[: m - n_bad]])
    others = order[~np.isin(order, pool if human else probes)][:MOST]
    at = torch.from_numpy(np.concatenate([others, probes]))
    labels = evidence.labels[at]
    planted = labels[len(others) :]
    truth = torch.where(torch.from_numpy(wrong[probes]), planted + 1, planted)  # which other class does not matter
    found = Evidence(
        PlantedProbes(len(others), planted, truth, checked),
        labels,
        {name: signal[at] for name, signal in evidence.signals.items()},
        evidence.probabilities[at],
        evidence.support[at],
    )
    return found, wrong[others]


def rates(calibrated: Calibrated, wrong: Array) -> Iterator[tuple[str, Estimate, Array, float]]:
    """For each rate: its estimate, its values by the regressions alone, and the true value."""
    again = calibrated.resampled  # of all examples, since there are at most MOST
    yield "wrong share", calibrated.wrong_share, again.mean(axis=1), wrong.mean()
    for asked in ASKED:
        found = calibrated.for_precision(asked)
        if len(found) == 0:
            continue  # no threshold reaches this precision
        chosen = found.is_suspect.numpy()
        hits, right = again[:, chosen].sum(axis=1), (chosen & wrong).sum()
        yield "precision", found.precision, hits / chosen.sum(), right / chosen.sum()
        yield "recall", found.recall, hits / again.sum(axis=1), right / wrong.sum()


def measure(evidence: Evidence, wrong: Array, m: int, human: bool, draws: int) -> list[dict[str, Any]]:
    seen = defaultdict(list)
    for number in range(draws):
        drawn, truth = redrawn(evidence, wrong, m, human, np.random.default_rng((m, number)))
        for rate, estimate, alone, true in rates(Calibrated.learn(drawn, seed=number), truth):
            interval = (estimate.low, estimate.high, *np.quantile(alone, [0.025, 0.975]))
            seen[rate].append((estimate.value, *interval, true))
    rows = []
    for rate, cases in seen.items():
        value, low, high, alone_low, alone_high, true = 100 * np.array(cases).T
        rows.append(
            {
                "rate": rate,
                "cases": len(value),
                "covered %": 100 * float(((low <= true) & (true <= high)).mean()),
                "half width": float((high - low).mean() / 2),
                "regressions alone: covered %": 100 * float(((alone_low <= true) & (true <= alone_high)).mean()),
                "their half width": float((alone_high - alone_low).mean() / 2),
                "mean error": float(np.abs(value - true).mean()),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--noise", nargs="+", default=list(NOISE))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test that it runs")
    options = parser.parse_args(argv)
    rows = []
    for name in ["toy"] if options.tiny else options.noise:
        noise = name if str(name).isidentifier() else float(name)
        evidence, wrong = tiny() if options.tiny else trained(noise, options.epochs, options.device)
        for m in (60,) if options.tiny else PROBES:
            found = measure(evidence, wrong, m, str(noise).endswith("_label"), 2 if options.tiny else options.draws)
            rows += [{"noise": noise, "probes": m, **row} for row in found]
        show(f"95 % intervals, {noise}", [row for row in rows if row["noise"] == noise])
    write(options.out, "suspect_intervals", torch.device(options.device), rows)


if __name__ == "__main__":
    main()
