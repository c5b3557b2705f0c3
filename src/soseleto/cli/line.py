"""The options of ``soseleto scan`` and ``soseleto fit``: each field is an option of the command, with its help."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from soseleto.errors import UsageError, did_you_mean

DATA, TRAINING, COMPARISON, SUSPECTS, RUN = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Data", "Training", "Comparison", "Suspects", "Run")
)
BY_MODEL = "[default: by model and data; printed at start]"
SEED = "Same seed, same result, to the last bit on a CPU."
DEVICE = "cpu, cuda, cuda:1, ..."
Precision = Annotated[
    float | None, SUSPECTS(metavar="SHARE", help="Required share of real label errors among suspects. [default: 0.9]")
]


# Options that are a field of a table: option -> (table, field)
IN_TABLES = {
    "method": ("method", "name"),
    "probes": ("probes", "share"),
    "suspect_precision": ("probes", "precision"),
    "labels_before": ("reading", "before_column"),
    "label_column": ("reading", "label_column"),
    "text_column": ("reading", "text_columns"),
    "group_column": ("reading", "group_column"),
    "drop_column": ("reading", "drop_columns"),
    "image_size": ("reading", "image_size"),
    "train": ("pretrained", "train"),
}
TABLES = ("method", "optimizer", "augment", "reading", "probes", "compute", "checkpoints", "pretrained")


@dataclass(frozen=True, kw_only=True)
class CommonLine:
    """What both commands take; None stands for the default."""

    source: Annotated[Path, DATA(help="The large, doubtful data set.")]
    target: Annotated[Path, DATA(help="The small, trusted data set.")]
    out: Annotated[Path, RUN(help="The run folder to write.")]
    label_column: Annotated[str | None, DATA(metavar="NAME", help="Column of a table with the labels.")] = None
    text_column: Annotated[list[str] | None, DATA(metavar="NAME", help="Column of texts; repeatable.")] = None
    drop_column: Annotated[list[str] | None, DATA(metavar="NAME", help="Column to ignore; repeatable.")] = None
    group_column: Annotated[
        str | None, DATA(metavar="NAME", help="Column, such as a patient, whose rows stay on one side of every split.")
    ] = None
    image_size: Annotated[int | None, DATA(help="Resize images to this many pixels a side.")] = None
    skip_bad: Annotated[bool, DATA("--skip-bad", help="Leave unusable examples out.")] = False
    seed: Annotated[int, RUN(help=SEED)] = 0
    device: Annotated[str, RUN(help=DEVICE)] = "auto"


@dataclass(frozen=True, kw_only=True)
class ScanLine(CommonLine):
    model: Annotated[
        str,
        TRAINING(
            metavar="NAME",
            help="A pretrained network whose features are used: timm:NAME or hf:FOLDER_OR_ID. [default: the inputs "
            "themselves]",
            show_default=False,
        ),
    ] = "linear"
    learner: Annotated[str, TRAINING(metavar="logistic|boosting", help="What is trained on the features.")] = "logistic"
    suspect_precision: Precision = None


@dataclass(frozen=True, kw_only=True)
class FitLine(CommonLine):
    test: Annotated[Path | None, DATA(help="Data to measure the accuracy on; nothing is chosen on it.")] = None
    mode: Annotated[str, TRAINING(metavar="noisy|transfer", help="Whether both sides have the same classes.")] = "noisy"
    method: Annotated[
        str,
        TRAINING(
            metavar="plain|strong",
            help="strong: a teacher judges labels; for many wrong labels, large networks and a GPU.",
        ),
    ] = "plain"
    model: Annotated[
        str | None,
        TRAINING(
            metavar="NAME",
            help="table, linear, mlp, quick, lenet, resnet18, resnet18-groupnorm, preact-resnet18, FILE.py:FUNCTION, "
            "timm:NAME or hf:FOLDER_OR_ID. [default: by the inputs]",
        ),
    ] = None
    train: Annotated[
        str | None, TRAINING(metavar="all|head|last:N", help="Parts of a pretrained image model to train.")
    ] = None
    epochs: Annotated[int | None, TRAINING(min=1, metavar="N", help=f"Passes over the source. {BY_MODEL}")] = None
    batch_size: Annotated[int | None, TRAINING(min=1, metavar="N", help=f"Source examples per step. {BY_MODEL}")] = None
    lr: Annotated[float | None, TRAINING(help="Learning rate at the start. [default: by model and method]")] = None
    folds: Annotated[
        int | None, COMPARISON(metavar="N", help="Number of cross-validation folds of the target. [default: 3]")
    ] = None
    baselines: Annotated[
        bool | None,
        COMPARISON(
            "--baselines/--no-baselines",
            help="Also train the network without weights, on both sets mixed, and on the target alone. [default: only "
            "where there is no first answer to compare with]",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        str,
        COMPARISON(metavar="best|soseleto", help="The model to keep: the best on held-out examples, or SOSELETO's."),
    ] = "best"
    probes: Annotated[
        float | None,
        SUSPECTS(
            metavar="SHARE",
            help="Share of the target planted in the source to calibrate the suspects. [default: 0.3, if enough]",
        ),
    ] = None
    suspect_precision: Precision = None
    labels_before: Annotated[
        str | None, SUSPECTS(metavar="COLUMN", help="Column of the target's table with its labels from before a check.")
    ] = None


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The file's options become defaults of the command; what else it has is kept for it."""
    if path is None:
        return None
    try:
        config = tomllib.loads(path.expanduser().read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}: give --config a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML ({error}): correct it.") from error
    options = [parameter.name or "" for parameter in context.command.params]
    known = [name for name in options if name not in IN_TABLES] + [*TABLES, "target_batch_size"]
    for name in config:
        if name not in known:
            raise UsageError(f"{path} has an unknown key {name!r}{did_you_mean(name, known)}.")
    if isinstance(config.get("method"), str):
        config["method"] = {"name": config["method"]}
    for name in TABLES:
        if not isinstance(config.get(name, {}), Mapping) and not (name == "augment" and config[name] is False):
            raise UsageError(f"{name} must be a table in {path}: write [{name}] and its keys below.")
    in_tables = {name: config.get(table, {}).get(key) for name, (table, key) in IN_TABLES.items()}
    defaults = {**{name: config[name] for name in config if name in options}, **in_tables}
    context.default_map = {name: value for name, value in defaults.items() if value is not None}
    context.obj = {name: value for name, value in config.items() if name in (*TABLES, "target_batch_size")}
    return path


Config = Annotated[
    Path | None,
    RUN(
        metavar="FILE.toml",
        help="These and all other settings, by their names in Python; the line wins.",
        is_eager=True,
        callback=_read_config,
    ),
]


def takes(line: type) -> Callable[[Callable[[dict[str, Any]], None]], Callable[..., None]]:
    """Make the fields of a dataclass the options of a command, which gets them and the tables of ``--config``."""

    def decorate(command: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(context: typer.Context, **options: Any) -> None:
            del options["config"]
            command({**options, "config": context.obj or {}})

        hints = get_type_hints(line, include_extras=True)
        defaults = {each.name: Parameter.empty if each.default is MISSING else each.default for each in fields(line)}
        annotated = {"context": typer.Context, **{name: hints[name] for name in defaults}, "config": Config}
        called.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=of)
                for (name, kind), of in zip(annotated.items(), [Parameter.empty, *defaults.values(), None], strict=True)
            ]
        )
        called.__annotations__ = annotated
        return called

    return decorate
