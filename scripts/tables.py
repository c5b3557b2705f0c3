"""Write the generated parts of README and docs/: tables from the files in results/, help texts from the commands.

Run it after a results file or a command's help has changed: python scripts/tables.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from experiments import cifar10_deep, language, noisy_text, pretrained_images, table1, table2
from experiments.results import fill_page, put_between
from pages import choices, data, experiments, readme, speed, suspects
from pages.common import ROOT, load
from soseleto.cli.commands import app

EXPERIMENTS = {
    "table1.md": table1,
    "table2.md": table2,
    "noisy-text.md": noisy_text,
    "language.md": language,
    "cifar10-deep.md": cifar10_deep,
    "pretrained-images.md": pretrained_images,
}


COMMANDS = ("scan", "fit", "rank", "predict", "review", "audit")  # whose help is on the page of the command line


def commands(text: str) -> str:
    """The page of the command line, with the help of the commands that have many options."""
    width = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    for name in COMMANDS:
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="soseleto", env=width).output
        # without the boxes of the terminal
        lines = [re.sub("[╭╮╰╯│─]", "", line).rstrip() for line in shown.splitlines() if "--help" not in line]
        text = put_between(text, name, "```text\n" + "\n".join(line for line in lines if line) + "\n```")
    return text


def filled(path: str, parts: dict[str, str]) -> tuple[Path, str]:
    """A page with its generated parts, by their marks."""
    text = (ROOT / path).read_text("utf-8")
    for mark, part in parts.items():
        text = put_between(text, mark, part)
    return ROOT / path, text


def pages() -> dict[Path, str]:
    found = dict(
        [
            filled("README.md", readme.parts()),
            filled("docs/results/synthetic.md", {"synthetic": experiments.synthetic()}),
            filled("docs/results/adult.md", {"adult": experiments.adult()}),
            filled("docs/explanation/speed.md", speed.parts()),
            filled("docs/explanation/engines.md", speed.of_engines()),
            filled("docs/explanation/strong.md", {"step": speed.strong_steps()}),
            filled("docs/explanation/alignments.md", {"never worse": choices.never_worse()}),
            filled("results/choices.md", choices.parts()),
            filled("docs/how-to/suspects.md", suspects.parts()),
            filled("docs/how-to/text.md", {"scan texts": suspects.texts()}),
            filled("docs/how-to/resume.md", {"campaigns": data.safety()}),
        ]
    )
    for page, module in EXPERIMENTS.items():
        path = ROOT / "docs" / "results" / page
        found[path] = fill_page(path.read_text("utf-8"), ROOT / "results" / f"{module.NAME}.json", module.TABLES)
    of_deep = ROOT / "docs" / "results" / "table1.md"
    rows = load("cifar10-noise-resnet18.json")["rows"]
    found[of_deep] = put_between(found[of_deep], "deep", table1.deep_table(rows))
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
