"""Write the generated parts of README and docs/: tables from the files in results/, help texts from the commands.

Run it after a results file or a command's help has changed: python scripts/tables.py [--check]
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.testing import CliRunner

from soseleto.cli.commands import app
from soseleto.errors import counted
from soseleto.experiments import results as experiments
from soseleto.experiments.cifar10_deep import tables as cifar10_deep
from soseleto.experiments.cifar10_noise import tables as cifar10
from soseleto.experiments.noisy_text import tables as noisy_text
from soseleto.experiments.pretrained_images import tables as pretrained_images
from soseleto.experiments.results import Spread, put_between
from soseleto.experiments.svhn_mnist import tables as svhn_mnist

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = {
    "cifar10-noise": ("results/table1.md", cifar10.page),
    "svhn-mnist": ("results/table2.md", svhn_mnist.page),
    "noisy-text": ("results/noisy-text.md", noisy_text.page),
    "cifar10-deep": ("results/cifar10-deep.md", cifar10_deep.page),
    "pretrained-images": ("results/pretrained-images.md", pretrained_images.page),
}
STEPS = ("step-gpu.json", "step-cpu.json")
ENGINES = ("layerwise", "forward", "double_backward", "loop")


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / name).read_text("utf-8"))


def synthetic() -> str:
    found = load("synthetic.json")
    lines = [f"| mean ± standard deviation of {len(found['rows'])} seeds | |", "|---|---|"]
    for key, title, scale, digits in (
        ("clean_above", "correctly labelled points with a weight above 0.1", 100, 1),
        ("flipped_below", "flipped points with a weight below 0.1", 100, 1),
        ("accuracy", "accuracy on 2,000 fresh points", 1, 1),
        ("missed_distance", "median distance of the missed flipped points from the separator", 1, 3),
    ):
        values = [scale * row[key] for row in found["rows"]]
        unit = " %" if digits == 1 else ""
        lines.append(
            f"| {title} | {statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}{unit} |"
        )
        if key == "flipped_below":
            lines.append(f"| … in the worst of the seeds | {min(values):.0f}{unit} |")
    return "\n".join(lines)


def engines() -> str:
    lines = ["| | " + " | ".join(ENGINES) + " |", "|---|" + "---|" * len(ENGINES)]
    for name in ("engines-gpu.json", "engines-cpu.json"):
        found = load(name)
        for case in dict.fromkeys((row["model"], row["precision"]) for row in found["rows"]):
            times = {row["engine"]: row["times"] for row in found["rows"] if (row["model"], row["precision"]) == case}
            cells = [f"{times[e]:.2f}x" if isinstance(times[e], float) else "declines" for e in ENGINES]
            lines.append(f"| {', '.join(case)}, {found['device']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def held() -> str:
    """Exact alignments and those with BatchNorm's statistics held, mean ± standard deviation over seeds."""
    titles = {
        "exact": "exact",
        "held_statistics": "`held_statistics`",
        "held_statistics_and_gradient": "`held_statistics_and_gradient`",
        "ordinary": "weights kept at 1",
    }
    columns = {"test accuracy": "accuracy", "AUROC of weights": "AUROC weight", "AUROC of scores": "AUROC score"}
    columns |= {"norm of the convolutions": "norm of convolutions"}
    rows, lines = load("held_statistics-cpu.json")["rows"], []
    for data in dict.fromkeys(row["data"] for row in rows):
        for line, title in titles.items():
            own = [row for row in rows if (row["data"], row["line"]) == (data, line)]
            digits = {"accuracy": 1, "norm of convolutions": 1}
            cells = [_spread([row[c] for row in own if c in row], digits.get(c, 3)) for c in columns.values()]
            lines.append([data, title, *cells])
    return table(["data", "alignments", *columns], lines)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}" if values else ""


def similar() -> str:
    """How close held alignments are to exact ones within a batch, in one sentence."""
    rows = [row for row in load("held_statistics-cpu.json")["rows"] if row["line"] == "exact"]
    parts = []
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        means = {key: statistics.fmean(row[key] for row in own) for key in ("correlation", "rank correlation")}
        lowest = min(row["lowest correlation"] for row in own)
        by_rank = f"{means['rank correlation']:.2f} by rank"
        parts.append(f"{means['correlation']:.2f} on {data} ({by_rank}, {lowest:.2f} at the lowest)")
    return f"Within a batch the held alignments correlate with the exact ones by {' and '.join(parts)}."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)])


def of_files(columns: Sequence[str], row: Callable[[dict[str, Any]], Sequence[str] | None], *names: str) -> str:
    """A table with a line for each row of the existing results files, except rows for which ``row`` returns None."""
    found = [load(name) for name in names if (ROOT / "results" / name).exists()]
    lines = [[*cells, one["device"]] for one in found for r in one["rows"] if (cells := row(r)) is not None]
    return table([*columns, "machine"], lines) if lines else "Not run yet."


def step(row: dict[str, Any]) -> list[str]:
    form = ", ".join([row["precision"], *(["channels last"] if row.get("layout") == "channels last" else [])])
    memory = "" if row["memory"] is None else f"{row['memory']:.2f}x"
    times = [f"{row['ordinary ms']:.2f}", f"{row['times']:.2f}x", f"{row['floor']:.2f}x"]
    return [row["model"], form, f"{row['B']}, {row['T']}", row["engine"], *times, memory]


def fine_tuning(row: dict[str, Any]) -> list[str]:
    title = {"fit": "`fit` against a plain loop", "trainer": "`SoseletoTrainer` against `Trainer`"}[row["part"]]
    sizes, form = f"{row['B']}, {row['T']}", "graph" if row["graph"] else "one kernel at a time"
    memory = ["" if row.get(name) is None else f"{row[name]:.2f}x" for name in ("memory", "whole memory")]
    return [
        title,
        row["precision"],
        sizes,
        row["engine"],
        form,
        f"{row['plain ms']:.1f}",
        f"{row['times']:.2f}x",
        *memory,
    ]


def whole_model(row: dict[str, Any]) -> list[str]:
    sizes, form = f"{row['B']}, {row['T']}", "graph" if row["graph"] else "one kernel at a time"
    times = [f"{row['ordinary ms']:.1f}", f"{row['times']:.2f}x", f"{row['memory']:.2f}x"]
    return [row["model"], row["precision"], sizes, row["engine"], form, *times]


def price(row: dict[str, Any]) -> list[str] | None:
    if row["engine"].startswith("held"):  # not exact
        return None
    return [f"{row['model']}, {row['engine']}", row["precision"], f"{row['times']:.2f}x", f"{row['floor']:.2f}x"]


def peer(row: dict[str, Any]) -> list[str]:
    if "times ours" not in row:
        return [row["model"], row["job"], row["contender"], row["error"], ""]
    return [row["model"], row["job"], row["contender"], f"{row['times ours']:.1f}", f"{row['error']:.0e}"]


def language_peer(row: dict[str, Any]) -> list[str]:
    """A contender at the largest batch that fits; what cannot be run says why."""
    if "times ours" not in row:
        return [row["contender"], str(row["B"]), row["error"], "", "", ""]
    form = "graph" if row["graph ms"] is not None and row["graph ms"] < row["ms"] else "one kernel at a time"
    numbers = f"{row['ms an example']:.1f}", f"{row['times ours']:.2f}", f"{row['extra MiB an example']:,.0f}"
    return [row["contender"], str(row["B"]), form, *numbers]


def update(row: dict[str, Any]) -> list[str] | None:
    if row["against"] != "source examples":
        return None
    return [f"{row['size']:,}", f"{row['update µs']:.1f}", f"{row['share %']:.2f} %"]


def sweep(row: dict[str, Any]) -> list[str] | None:
    if row["against"] == "source examples":
        return None
    memory = [f"{row['ours MiB']:,.0f}", f"{row['ordinary MiB']:,.0f}"]
    return [row["against"], f"{row['size']:,}", f"{row['ours ms']:.2f}", f"{row['times']:.2f}x", *memory]


def training(row: dict[str, Any]) -> list[str]:
    accuracy = "random images" if row["accuracy"] is None else f"{row['accuracy']:.1f}"
    return [row["training"], row["form"], f"{row['seconds']:.1f}", accuracy]


def overhead(row: dict[str, Any]) -> list[str]:
    return [row["step"], f"{row['ms']:.1f}", f"{row['operations ms']:.1f}", f"{row['overhead %']:.1f} %"]


def speed() -> dict[str, str]:
    """The tables of docs/explanation/speed.md, by their marks."""
    heads = ["model", "precision", "B, T", "engine", "ordinary, ms", "ours", "floor", "memory"]
    trainings = ("end_to_end-gpu.json", "end_to_end-bf16-gpu.json")
    return {
        "step": of_files(
            heads,
            step,
            STEPS[0],
            "step-channels-last-gpu.json",
            "step-batch-norm-gpu.json",
            "step-last-layer-gpu.json",
            STEPS[1],
        ),
        "models": of_files(
            ["model", "precision", "B, T", "engine", "steps", "ordinary, ms", "ours", "memory"],
            whole_model,
            "models-gpu.json",
            "models-eager-gpu.json",
            "models-cpu.json",
        ),
        "fine-tuning": of_files(
            ["training", "precision", "B, T", "engine", "steps", "plain, ms", "ours", "memory", "whole memory"],
            fine_tuning,
            "fine_tuning-gpu.json",
        ),
        "peers": of_files(
            ["model", "job", "implementation", "times ours", "error"], peer, "peers-gpu.json", "peers-cpu.json"
        ),
        "language peers": of_files(
            ["implementation", "B", "steps", "ms an example", "times ours", "extra MiB an example"],
            language_peer,
            "peers-language-gpu.json",
        ),
        "sweeps": of_files(
            ["against", "size", "ours, ms", "over an ordinary step", "MiB", "MiB, ordinary on B+T"],
            sweep,
            "scaling-gpu.json",
        ),
        "update": of_files(["source examples", "µs", "of a Quick step"], update, "scaling-gpu.json"),
        "training": of_files(["training", "form", "seconds", "test accuracy"], training, *trainings),
        "overhead": of_files(["step", "ms", "operations, ms", "overhead"], overhead, "overhead-cpu.json"),
    }


def strong_steps() -> str:
    """The table of docs/explanation/strong.md: a step of the strong recipe and of its rivals."""

    def line(row: dict[str, Any]) -> list[str]:
        how = [
            name for name, on in (("torch.compile", row["compiled"]), ("cudnn.benchmark", row["cudnn.benchmark"])) if on
        ]
        return [row["line"], ", ".join(how), f"{row['ms a step']:.1f}", f"{row['times']:.2f}x"]

    return of_files(["step", "with", "ms", "ordinary steps"], line, "strong_step-gpu.json")


def chosen_strong() -> str:
    return cifar10_deep.chosen_table(load("cifar10-deep-choose.json")["rows"])


def scale() -> str:
    """The table of docs/how-to/scale.md: our step over an ordinary one, and the costs that grow with the source."""
    steps, sizes = load("step-gpu.json"), load("scaling-gpu.json")
    lines = [
        [
            f"a step of {row['model']} in {row['precision']}, B={row['B']}, T={row['T']}",
            f"{row['times']:.2f} ordinary steps",
        ]
        for row in steps["rows"]
        if row["model"] in ("ResNet-18 GroupNorm", "transformer")
    ]
    lines += [
        [
            f"weights and scores of a batch of 256, of {row['size']:,} examples in {row['MB']:,.0f} MB",
            f"{row['update µs']:.1f} µs a step, and {row['summary ms']:.1f} ms an epoch for their summary",
        ]
        for row in sizes["rows"]
        if row["against"] == "source examples" and row["size"] >= 1_000_000
    ]
    return table(["measured", steps["device"]], lines)


def intervals() -> str:
    """Coverage of the intervals of suspects, with and without the rates counted on probes."""
    rates = ("wrong share", "precision", "recall")
    titles = {noise: title for title, noise in cifar10.SETTINGS.items()}
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in load("suspect_intervals-cpu.json")["rows"]:
        cells = lines.setdefault((titles[row["noise"]], row["probes"]), {})
        cells[row["rate"]] = f"{row['covered %']:.0f} % (±{row['half width']:.1f})"
        cells["alone " + row["rate"]] = f"{row['regressions alone: covered %']:.0f} % (±{row['their half width']:.1f})"
    ways = [*rates, *("alone " + rate for rate in rates)]
    return table(
        ["wrong labels", "probes", *rates, *(f"regressions alone: {rate}" for rate in rates)],
        [[noise, str(n), *(cells.get(way, "") for way in ways)] for (noise, n), cells in lines.items()],
    )


def benchmark(name: str) -> ModuleType:
    """A module of benchmarks/, by its file: a package on PyPI may have the same name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def coverage() -> str:
    """How often the intervals of suspects hold the truth, by basis and kind of mistakes."""
    if not (ROOT / "results" / "coverage.json").exists():
        return "Not run yet."
    lines = []
    rows, module = load("coverage.json")["rows"], benchmark("coverage")
    for row in module.summary(rows):
        cells = [row["basis"], row["mistakes"], str(row["draws"])]
        for name in ("share", "precision"):
            held, width = row[f"{name} held %"], row[f"{name} width"]
            cells += ["" if held is None else f"{held:.0f} % ({width:.0f})", str(row[f"{name} unknown"])]
        lines.append([*cells, str(row["no suspects"])])
    columns = ["basis", "mistakes", "draws", "wrong share held (width)", "unknown", "precision held (width)", "unknown"]
    shown = table([*columns, "no suspects"], lines)
    if len(half := module.at_half_recall(rows)) < 2:
        return shown
    own = module.reported(rows)
    kinds, seeds = dict.fromkeys(row["data"] for row in own), [row["seed"] for row in own]
    hard = " and ".join(f"{module.share_held(rows, 'hard', rate):.0f} %" for rate in (0.2, 0.4))
    return (
        f"{shown}\n\nData: {', '.join(kinds)}; seeds {min(seeds)} to {max(seeds)}, since the ones before were seen "
        "while the method was built. Without earlier labels, mistakes on hard examples are the weak place: at 20 and "
        f"40 % of them the wrong share is held in {hard} of the draws.\n\nWith 30 % of the digits taken for the next "
        "class, without earlier labels, the list of the most probable ones that has half of the wrong labels has a "
        f"precision of {_spread(half, 2)} ({len(half)} seeds)."
    )


def usual() -> str:
    """What moves the weights where few and where many labels are wrong: mean accuracies over the draws to choose on."""
    rows, lines = load("choose-usual.json")["rows"], []
    cells = list(dict.fromkeys((row["data"], row["noise"], row["rate"]) for row in rows))
    cells.sort(key=lambda cell: (cell[2] > 0.1, cell))
    for line in benchmark("choose_usual").LINES:
        shown = []
        for cell in cells:
            same = [row for row in rows if (row["data"], row["noise"], row["rate"]) == cell and row["line"] == line]
            own = [row["accuracy"] for row in same]
            shown.append(f"{statistics.fmean(own):.1f}{'¹' if len(own) == 1 else ''}" if own else "")
        lines.append([line.replace("_", " "), *shown])
    return table(["weights move by", *map(_cell, cells)], lines)


FEW_DRAWS = 4  # below which a cell states its number of draws


def usual_steps() -> str:
    """Of the second comparison: points above mixed training on the same draws."""
    rows, lines = load("choose-usual-steps.json")["rows"], []
    choose = benchmark("choose_usual")
    found = {(row["line"], row["data"], row["noise"], row["rate"], row["seed"]): row["accuracy"] for row in rows}
    for line in choose.STEP_LINES:
        shown = []
        for cell in choose.STEP_CELLS:
            own = [
                accuracy - found["mixed", *cell, key[-1]]
                for key, accuracy in found.items()
                if key[:-1] == (line, *cell) and ("mixed", *cell, key[-1]) in found
            ]
            few = f" ({len(own)})" if 0 < len(own) < FEW_DRAWS else ""
            shown.append(f"{statistics.fmean(own):+.1f}{few}" if own else "")
        if line != "mixed" and any(shown):
            lines.append([line, *shown])
    return table(["weights move by", *map(_cell, choose.STEP_CELLS)], lines)


def _cell(cell: tuple[str, str, float]) -> str:
    data, noise, rate = cell
    return f"{data} {'next class ' if noise == 'pairs' else ''}{100 * rate:g} %"


def preconditioned() -> str:
    """Plain alignments against those with the optimizer's preconditioner: means over draws."""
    titles = {
        "minilm": "MiniLM fine-tuned",
        "embeddings": "linear classifier of its embeddings",
        "images": "SVHN, 30 % flipped, Quick",
    }
    rows = [row for name in ("gpu", "cpu") for row in load(f"preconditioned-{name}.json")["rows"]]
    lines = []
    for problem, title in titles.items():
        own = [row for row in rows if row["problem"] == problem]
        for line in dict.fromkeys(row["method"] for row in own):
            found = [row for row in own if row["method"] == line]
            cells = [f"{statistics.fmean(row['accuracy'] for row in found):.1f}"]
            for name in ("AUROC weight", "AUROC score"):
                cells.append(f"{statistics.fmean(row[name] for row in found):.3f}" if name in found[0] else "")
            lines.append([title, line, *cells, str(len(found))])
    return table(["model", "alignments", "accuracy", "AUROC of weights", "of scores", "draws"], lines)


def never_worse() -> str:
    """The command line's model against the best of its rivals."""
    if not (ROOT / "results" / "never_worse.json").exists():
        return "Not run yet."
    lines = []
    for row in benchmark("never_worse").summary(load("never_worse.json")["rows"]):
        kind = "next class, " if row["mistakes"] == "pairs" else ""
        mistakes = "" if row["rate"] is None else f"{kind}{row['rate']:.0%}"
        points = [f"{row[name]:+.1f}" for name in ("SOSELETO − ordinary", "SOSELETO − best", "kept − best")]
        lines.append([row["data"], mistakes, str(row["draws"]), *points, str(row["kept SOSELETO"])])
    columns = ["data", "wrong labels", "draws", "SOSELETO − ordinary", "SOSELETO − best rival", "kept − best rival"]
    return table([*columns, "SOSELETO kept"], lines)


def large_data() -> str:
    """Every figure of the benchmark, with its limit where it has one."""
    rows = load("large_data-cpu.json")["rows"]
    return table(
        ["measured", "", "at most"],
        [
            [
                row["what"],
                ("yes" if row["value"] else "no")
                if row["unit"] == "yes or no"
                else f"{row['value']:,.0f} {row['unit']}"
                if row["value"] >= 1000
                else f"{row['value']:.3g} {row['unit']}",
                f"{row['at_most']:,g}" if "at_most" in row else "",
            ]
            for row in rows
        ],
    )


def data_safety() -> str:
    """The campaigns against a run's files, one line each."""
    if not (ROOT / "results" / "data-safety.json").exists():
        return "Not run yet."
    rows = {row["campaign"]: row for row in load("data-safety.json")["rows"]}
    lines = []
    for name, what, outcome in (
        (
            "flips",
            "bits flipped over all {files} files of a finished run",
            "named by every command that reads the file",
        ),
        (
            "full_disk",
            "failures of one of the {writes} writes of `soseleto fit`",
            "one sentence, and the same run later",
        ),
        ("kills", "runs killed in ten phases of `soseleto fit`", "resumed to the same files"),
    ):
        if row := rows.get(name):
            words = what.format(files=len(row.get("files", ())), writes=row.get("writes"))
            lines.append([f"{row['tried']:,} {words}", outcome, str(len(row["wrong"]))])
    return table(["campaign", "outcome", "exceptions"], lines)


def adult() -> str:
    """Adult with flipped labels: accuracy of the networks and of boosting."""
    lines = {
        "gradient_boosting": "gradient boosting on source and target",
        "soseleto": "SOSELETO, `--model table`",
        "soseleto_then_boosting_doubted": "**SOSELETO, `--final boosting`**",
        "soseleto_then_boosting_frozen_doubted": "… learned weights frozen at 1",
        "soseleto_then_boosting_mean": "… labels not doubted",
        "boosting_frozen": "… labels not doubted, learned weights frozen at 1",
        "soseleto_then_boosting_each": "… labels not doubted, each row with its own learned weight",
        "gradient_boosting_clean": "gradient boosting, all labels corrected",
    }
    rows = load("tables.json")["rows"]
    noises = dict.fromkeys(row["setting"]["noise"] for row in rows)
    settings = {f"{100 * noise:.0f} % flipped": {"noise": noise, "n_target": 300} for noise in sorted(noises)}
    return experiments.table(rows, lambda row: row.get("accuracy"), methods=lines, settings=settings)


# README


def summary() -> str:
    """Table 1 in six lines: where SOSELETO is ahead and where it is not."""
    lines = {
        "ordinary": "ordinary training",
        "mixed": "source and target mixed",
        "sukhbaatar": "Sukhbaatar et al., a noise model",
        "soseleto_usual_frozen": "SOSELETO, weights frozen at 0.7",
        "soseleto_usual": "**SOSELETO, what `fit` uses**",
        "oracle": "oracle: all labels corrected",
    }
    rows = cifar10.at_every_noise(load("cifar10-noise.json")["rows"])
    columns = {"40 % flipped": 0.4}
    for title, noise in (("CIFAR-10N worse", "worse_label"), ("CIFAR-10N aggregate", "aggre_label")):
        columns[f"{title}, {wrong_share(rows, noise):.0f} % wrong"] = noise
    settings = {title: {"noise": noise} for title, noise in columns.items()}
    return experiments.table(rows, lambda row: row.get("accuracy"), methods=lines, settings=settings)


def deep() -> str:
    """What the weights add on a deep network, in one sentence."""
    lines = {"soseleto_last_layer": "learned", "soseleto_last_layer_frozen": "frozen"}
    parts = []
    for title, noise in (("40 % flipped", 0.4), ("CIFAR-10N worse", "worse_label")):
        found = _accuracies("cifar10-noise-resnet18.json", {"noise": noise}, lines)
        parts.append(f"{title} {Spread.of(found['learned'])} against {Spread.of(found['frozen'])}")
    return (
        f"- ResNet-18, plain training ({len(found['learned'])} seeds), weights learned or frozen: {', '.join(parts)}."
    )


def convolutional_steps() -> str:
    """Held-out accuracy by what moves the weights of a network with convolutions, a share of 0.3."""
    rows = [row for row in load("choose-convolutional-gpu.json")["rows"] if row["target_share"] == 0.3]
    assert {row.get("beyond_noise", 0.0) for row in rows} <= {0.0, 2.0}
    columns = {
        "Quick, 30 %": ("quick", 0.3),
        "Quick, 40 %": ("quick", 0.4),
        "Quick, 50 %": ("quick", 0.5),
        "Quick, CIFAR-10N worse": ("quick", "worse_label"),
        "ResNet-18, 40 %": ("resnet18", 0.4),
        "ResNet-18, CIFAR-10N worse": ("resnet18", "worse_label"),
    }

    def line(row: dict[str, Any]) -> str:
        if row["base"] == "mixed":
            return "mixed"
        if row["weight_step"] is None:
            return f"weights frozen at {row['initial_weight']:g}"
        way = row["weight_step"] * row["epochs"]
        step = f"{row['weight_step']:g}" if not row["beyond_noise"] else f"{way:.2g}/epochs, beyond 2 standard errors"
        return f"{step}, first weight {row.get('initial_weight', 1.0):g}"

    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        found.setdefault((line(row), row["model"], row["noise"]), []).append(row["heldout_accuracy"])
    lines = sorted({name for name, *_ in found})

    def cell(own: list[float]) -> str:
        return f"{sum(own) / len(own):.1f}" + (f" ({len(own)})" if len(own) > 1 else "") if own else ""

    cells = [[cell(found.get((name, *at), [])) for at in columns.values()] for name in lines]
    return table(["weight step", *columns], [[name, *own] for name, own in zip(lines, cells, strict=True)])


def wrong_share(rows: Sequence[dict[str, Any]], noise: str) -> float:
    """The true share of wrong labels, percent, as the runs with probes recorded it."""
    row = next(row for row in rows if row["setting"]["noise"] == noise and row.get("suspects"))
    return row["suspects"][0]["wrong_share"]["truth"]


def transfer() -> str:
    """Table 2 in one sentence."""
    lines = {
        "soseleto": "SOSELETO",
        "soseleto_frozen": "weights frozen",
        "target_only": "target alone",
        "fine_tuning": "fine-tuning",
    }
    found = _accuracies("svhn-mnist.json", {"n_target": 25, "source": "0-4", "unlabelled": False}, lines)
    cells = [f"{title} {Spread.of(values).with_error()}" for title, values in found.items()]
    draws = f"{len(found['SOSELETO'])} draws, ± standard error"
    return f"Table 2, SVHN digits to 25 MNIST digits of other classes ({draws}): {', '.join(cells)}."


def fine_tuned() -> str:
    """Pretrained models, texts and photos in a sentence each."""
    lines = {
        "soseleto_usual": "SOSELETO",
        "soseleto_usual_frozen": "weights frozen",
        "target_only": "target alone",
        "cleanlab": "after cleanlab",
        "ordinary": "ordinary",
    }
    sentences = []
    for what, file, setting in (
        (
            "News that people labelled, 20 % wrong, 200 checked, MiniLM",
            "noisy-text.json",
            {"noise": "ag_news", "n_trusted": 200, "encoder": "trained"},
        ),
        (
            "CIFAR-10N worse, 40 % wrong, 1,000 checked, EfficientNet-lite0",
            "pretrained-images.json",
            {"noise": "worse_label", "size": 96, "n_trusted": 1000},
        ),
    ):
        found = _accuracies(file, setting, lines)
        seeds = len(found["SOSELETO"])
        cells = [
            f"{title} {Spread.of(values)}"
            + ("" if len(values) == seeds else f" ({counted(len(values), 'seed', 'seeds')})")
            for title, values in found.items()
        ]
        sentences.append(f"- {what} ({seeds} seeds): {', '.join(cells)}.")
    return "\n".join(sentences)


def strong_recipe() -> str:
    """The strong recipe in a sentence."""
    rows = [row for row in load("cifar10-deep.json")["rows"] if row["method"] == "strong" and row["seed"] == 0]
    rows = [row for row in rows if row["config"]["n_trusted"] == cifar10_deep.Config.n_trusted]
    of = {row["setting"]["noise"]: row for row in rows}
    minutes = max(of[noise]["seconds"] for noise in cifar10_deep.MAIN) / 60
    cells = [
        f"{title} {of[noise]['accuracy']:.1f}" for title, noise in (("40 % flipped", 0.4), ("worse", "worse_label"))
    ]
    return (
        "- [Strong recipe](docs/results/cifar10-deep.md), which learns from rejected images too, PreAct ResNet-18, "
        f"1,000 checked, {minutes:.1f} minutes (1 seed): {', '.join(cells)}."
    )


def _accuracies(file: str, setting: dict[str, Any], titles: Mapping[str, str]) -> dict[str, list[float]]:
    """Of the methods in one setting, by their titles."""
    rows = [row for row in load(file)["rows"] if row["setting"] == setting]
    return {title: [r["accuracy"] for r in rows if r["method"] == name] for name, title in titles.items()}


def cost() -> str:
    """The price of a step in one sentence."""
    found = load(STEPS[0])
    every = [*found["rows"], *load("step-batch-norm-gpu.json")["rows"]]
    exact = [row for row in every if not row["engine"].startswith("held")]
    small = [row["times"] for row in exact if row["T"] * 8 == row["B"]]
    equal = [row["times"] for row in exact if row["T"] == row["B"]]
    return (
        f"A step costs {min(small):.2f} to {max(small):.2f} ordinary steps with a target batch an eighth of "
        f"the source batch, {max(equal):.2f} with equal batches ({found['device']})."
    )


# Pages


def commands(text: str) -> str:
    """The page of the command line, with the help of every command."""
    width = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="soseleto", env=width).output
        text = put_between(text, name, f"```text\n{shown.strip()}\n```")
    return text


def filled(path: str, parts: dict[str, str]) -> tuple[Path, str]:
    """A page with its generated parts, by their marks."""
    text = (ROOT / path).read_text("utf-8")
    for mark, part in parts.items():
        text = put_between(text, mark, part)
    return ROOT / path, text


def pages() -> dict[Path, str]:
    price_table = of_files(["model", "precision", "ours", "floor"], price, *STEPS)
    found = dict(
        [
            filled(
                "README.md",
                {
                    "summary": summary(),
                    "weights": f"{deep()}\n{fine_tuned()}\n{strong_recipe()}",
                    "transfer": transfer(),
                    "cost": cost(),
                },
            ),
            filled("docs/results/synthetic.md", {"synthetic": synthetic()}),
            filled("docs/results/price.md", {"price": price_table}),
            filled("docs/results/adult.md", {"adult": adult()}),
            filled("docs/explanation/speed.md", speed()),
            filled("docs/explanation/engines.md", {"engines": engines(), "held": held(), "similar": similar()}),
            filled("docs/explanation/strong.md", {"chosen": chosen_strong(), "step": strong_steps()}),
            filled("docs/how-to/scale.md", {"measured": scale()}),
            filled("docs/how-to/suspects.md", {"intervals": intervals(), "coverage": coverage()}),
            filled("docs/how-to/data.md", {"large data": large_data()}),
            filled("docs/how-to/damaged.md", {"campaigns": data_safety()}),
            filled(
                "docs/explanation/alignments.md",
                {
                    "usual": usual(),
                    "usual steps": usual_steps(),
                    "never worse": never_worse(),
                    "preconditioned": preconditioned(),
                },
            ),
        ]
    )
    for name, (page, tables) in EXPERIMENTS.items():
        path = ROOT / "docs" / page
        found[path] = tables(path.read_text("utf-8"), ROOT / "results" / f"{name}.json")
    table1 = ROOT / "docs" / "results" / "table1.md"
    of_deep = cifar10.deep_table(load("cifar10-noise-resnet18.json")["rows"])
    found[table1] = put_between(put_between(found[table1], "deep", of_deep), "chosen", convolutional_steps())
    reference = ROOT / "docs" / "reference" / "command-line.md"
    return {**found, reference: commands(reference.read_text("utf-8"))}


def main() -> None:
    stale = [path for path, text in pages().items() if path.read_text("utf-8") != text]
    if "--check" in sys.argv:
        sys.exit(f"out of date, run python scripts/tables.py: {[p.name for p in stale]}" if stale else 0)
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
