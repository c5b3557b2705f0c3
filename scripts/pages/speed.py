"""Tables of steps, engines and rivals."""

from __future__ import annotations

from typing import Any

from pages.common import load, of_files, table

STEPS = ("step-gpu.json", "step-cpu.json")
BATCH_NORM = "step-batch-norm-gpu.json"


ENGINES = ("layerwise", "forward", "double_backward", "loop")


def engines() -> str:
    lines = ["| | " + " | ".join(ENGINES) + " |", "|---|" + "---|" * len(ENGINES)]
    for name in ("engines-gpu.json", "engines-cpu.json"):
        found = load(name)
        for case in dict.fromkeys((row["model"], row["precision"]) for row in found["rows"]):
            times = {row["engine"]: row["times"] for row in found["rows"] if (row["model"], row["precision"]) == case}
            cells = [f"{times[e]:.2f}x" if isinstance(times[e], float) else "declines" for e in ENGINES]
            lines.append(f"| {', '.join(case)}, {found['device']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def step(row: dict[str, Any]) -> list[str] | None:
    if row["engine"].startswith("held") or ", scores " in row["model"]:  # an earlier engine; forms of equal cost
        return None
    memory = "" if row["memory"] is None else f"{row['memory']:.2f}x"
    times = [f"{row['ordinary ms']:.2f}", f"{row['times']:.2f}x", f"{row['floor']:.2f}x"]
    return [row["model"], precision(row), f"{row['B']}, {row['T']}", row["engine"], *times, memory]


def precision(row: dict[str, Any]) -> str:
    """With the memory format, where it is not the usual one."""
    return ", ".join([row["precision"], *(["channels last"] if row.get("layout") == "channels last" else [])])


def fine_tuning(row: dict[str, Any]) -> list[str]:
    method = {"many wrong": "`fit`, many wrong labels", "Soseleto()": "`fit`, `Soseleto()`"}
    fit = f"{method[row.get('method', 'Soseleto()')]}, against a plain loop"
    title = {"fit": fit, "trainer": "`SoseletoTrainer` against `Trainer`"}[row["part"]]
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


def whole_model(row: dict[str, Any]) -> list[str] | None:
    if row["model"].startswith(("Quick", "ResNet")):  # in the table of steps
        return None
    sizes, form = f"{row['B']}, {row['T']}", "graph" if row["graph"] else "one kernel at a time"
    times = [f"{row['ordinary ms']:.1f}", f"{row['times']:.2f}x", f"{row['memory']:.2f}x"]
    return [row["model"], row["precision"], sizes, row["engine"], form, *times]


def host(row: dict[str, Any]) -> list[str]:
    counts = [f"{row['ordinary operators']:,}", f"{row['our operators']:,}", f"{row['times operators']:.2f}x"]
    return [row["model"], row["code"], f"{row['ordinary ms']:.1f}", f"{row['times']:.2f}x", *counts]


def peers() -> str:
    """A whole step of each implementation by model, over the time of ours; alignments alone are in the results file."""
    rows = [row for row in load("peers-gpu.json")["rows"] if row["job"] == "step"]
    models, contenders = (dict.fromkeys(row[name] for row in rows) for name in ("model", "contender"))
    times = {(row["contender"], row["model"]): row.get("times ours") for row in rows}

    def cell(contender: str, model: str) -> str:
        found = times.get((contender, model))
        return "" if found is None else f"{found:,.1f}"

    return table(["times ours", *models], [[name, *(cell(name, model) for model in models)] for name in contenders])


def language_peer(row: dict[str, Any]) -> list[str]:
    """A contender at the largest batch that fits; what cannot be run says why."""
    if "times ours" not in row:
        return [row["contender"], str(row["B"]), row["error"], "", "", ""]
    form = "graph" if row["graph ms"] is not None and row["graph ms"] < row["ms"] else "one kernel at a time"
    numbers = f"{row['ms an example']:.1f}", f"{row['times ours']:.2f}", f"{row['extra MiB an example']:,.0f}"
    return [row["contender"], str(row["B"]), form, *numbers]


def training(row: dict[str, Any]) -> list[str]:
    accuracy = "random images" if row["accuracy"] is None else f"{row['accuracy']:.1f}"
    return [row["training"], row["form"], f"{row['seconds']:.1f}", accuracy]


def parts() -> dict[str, str]:
    """The tables of docs/explanation/speed.md, by their marks."""
    heads = ["model", "precision", "B, T", "engine", "ordinary, ms", "ours", "floor", "memory"]
    trainings = ("end_to_end-gpu.json", "end_to_end-bf16-gpu.json")
    return {
        "step": of_files(
            heads, step, STEPS[0], "step-channels-last-gpu.json", BATCH_NORM, "step-last-layer-gpu.json", STEPS[1]
        ),
        "models": of_files(
            ["model", "precision", "B, T", "engine", "steps", "ordinary, ms", "ours", "memory"],
            whole_model,
            "models-gpu.json",
            "models-eager-gpu.json",
            "models-cpu.json",
        ),
        "host": of_files(
            ["model", "code", "ordinary, ms", "ours", "ordinary operators", "ours", "ratio"], host, "host-cpu.json"
        ),
        "fine-tuning": of_files(
            ["training", "precision", "B, T", "engine", "steps", "plain, ms", "ours", "memory", "whole memory"],
            fine_tuning,
            "fine_tuning-gpu.json",
            "fine_tuning-cpu.json",
        ),
        "peers": peers(),
        "language peers": of_files(
            ["implementation", "B", "steps", "ms an example", "times ours", "extra MiB an example"],
            language_peer,
            "peers-language-gpu.json",
        ),
        "training": of_files(["training", "form", "seconds", "test accuracy"], training, *trainings),
    }


def strong_steps() -> str:
    """The table of docs/explanation/strong.md: a step of the strong recipe and of its rivals."""

    def line(row: dict[str, Any]) -> list[str]:
        how = [
            name for name, on in (("torch.compile", row["compiled"]), ("cudnn.benchmark", row["cudnn.benchmark"])) if on
        ]
        return [row["line"], ", ".join(how), f"{row['ms a step']:.1f}", f"{row['times']:.2f}x"]

    return of_files(["step", "with", "ms", "ordinary steps"], line, "strong_step-gpu.json")


def of_engines() -> dict[str, str]:
    """Of docs/explanation/engines.md."""
    return {"engines": engines()}
