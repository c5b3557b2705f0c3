"""Tables read together: the preparation is fitted on the source, and every problem of every column is found at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from soseleto.data import cells
from soseleto.data.columns import LEFT_OUT, Category, Date, Kind, Number, Text, kind_of
from soseleto.data.preparation import Seen, TablePreparation
from soseleto.data.reading import Problem, Raw, Reading, some
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError, counted, did_you_mean

Preparation = TablePreparation | TextPreparation

_OTHER_KIND = 0.5  # share among the present values, from which a column of numbers or dates is of another kind
_UNSEEN = 0.9  # the same of categories, whose values may well be new
_FAULTS = {
    Number: ("not numbers", "cannot be read as numbers"),
    Date: ("not dates", "cannot be read as dates of a certain format"),
    Category: ("unseen", "the source does not have"),
}
logger = logging.getLogger("soseleto")


def prepare(
    raws: Sequence[Raw], reading: Reading, preparation: Preparation | None = None
) -> tuple[list[Raw], Preparation | None]:
    """The sets with the inputs of their tables, and the preparation; sets that are no tables are unchanged.

    preparation: of an earlier training; by default it is fitted on the first set, the source
    """
    source = raws[0]
    is_text = isinstance(preparation, TextPreparation) or (preparation is None and reading.tokenizer is not None)
    if source.table is None and not is_text:
        if reading.kinds:
            raise UsageError(f"the kind of column {next(iter(reading.kinds))!r} has no effect on a source of images.")
        if other := next((raw for raw in raws if raw.table is not None), None):
            raise DataError(f"the {other.name} has features but the source has not: give both the same kind.")
        return list(raws), None
    if is_text and (other := next((raw for raw in raws if raw.table is None), None)):
        raise UsageError(
            f"a pretrained text model reads a column of a table, and the {other.name} is none: give a .csv, .tsv, "
            ".parquet or .jsonl file with --text-column NAME."
        )
    if preparation is None:
        preparation = _fit_text(source, reading) if is_text else _fit(raws, reading)
    _require_columns(raws, preparation, reading)
    return [raw if raw.table is None else _prepared(raw, preparation, reading) for raw in raws], preparation


def _fit(raws: Sequence[Raw], reading: Reading) -> TablePreparation:
    source = raws[0]
    others = {name for raw in raws[1:] if raw.table is not None for name in raw.table.column_names}
    _require_known(source, [name for name, kind in reading.kinds.items() if kind != LEFT_OUT or name not in others])
    labels = source.labels if isinstance(source.labels, Tensor) and source.labels.ndim == 1 else None
    classes = None if labels is None or labels.is_floating_point() else labels.cpu().numpy()
    preparation = TablePreparation.fit(source.table.drop_columns(_unreadable(source.table)), classes, reading.kinds)
    if not preparation.columns:
        reasons = some([f"{seen.name} ({seen.why})" for seen in preparation.seen])
        raise DataError(
            f"the {source.name} table has no column that can be used as a feature: {reasons}; name one with "
            "--text-column, or in categorical_columns or numeric_columns of [reading], to use it anyway."
        )
    return preparation


def _fit_text(source: Raw, reading: Reading) -> TextPreparation:
    """For the column that is named, else the only column of texts."""
    table, kinds = source.table, reading.kinds
    columns = [name for name in table.column_names if cells.is_readable(table[name])]
    if other := next((name for name, kind in kinds.items() if kind not in ("text", LEFT_OUT)), None):
        raise UsageError(f"the kind of column {other!r} has no effect: a pretrained text model reads the text alone.")
    named = list(reading.text_columns)
    if not named:
        named = [n for n in columns if cells.is_text(table[n]) and kind_of(n, table[n], None, kinds).name == "text"]
    if len(named) != 1:
        which = f"{len(named)} columns of text ({some(named)})" if named else f"no column of text among {some(columns)}"
        raise UsageError(f"the {source.name} table has {which}: name the one to read, --text-column NAME.")
    _require_known(source, named)
    if named[0] not in columns:
        raise UsageError(f"column {named[0]!r} of the {source.name} holds {table[named[0]].type}, not text.")
    left_out = Kind(LEFT_OUT, "the model reads the text alone")
    seen = (Seen.of(name, table[name], Kind("text") if name == named[0] else left_out) for name in columns)
    assert reading.tokenizer is not None
    return TextPreparation(named[0], reading.tokenizer, tuple(seen))


def _require_known(source: Raw, names: Sequence[str]) -> None:
    known = source.table.column_names
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known) or f": choose from {some(known)}"
        raise UsageError(f"the {source.name} table has no feature column {some(unknown)}{hint}.")


def _require_columns(raws: Sequence[Raw], preparation: Preparation, reading: Reading) -> None:
    """Raise for all columns that are missing or additional in a table, and not dropped, at once."""
    faults = []
    for raw in raws:
        if raw.table is None:
            continue
        names, known = raw.table.column_names, {*raws[0].table.column_names, *reading.drop_columns}
        if missing := [column for column in preparation.used if column not in names]:
            faults.append(f"the {raw.name} table lacks {some(missing)}")
        extra = [column for column in names if column not in known]
        if extra and isinstance(preparation, TablePreparation):
            faults.append(f"the {raw.name} table also has {some(extra)}")
    if faults:
        raise DataError(
            f"{'; '.join(faults)}: give every table the feature columns of the source, or drop others with "
            "--drop-column."
        )


def _unreadable(table: Any) -> list[str]:
    return [name for name in table.column_names if not cells.is_readable(table[name])]


def _prepared(raw: Raw, preparation: Preparation, reading: Reading) -> Raw:
    problems = list(raw.problems)
    if isinstance(preparation, TablePreparation):
        problems += _left_out(raw, preparation, reading) if raw.name == "source" else []
        problems += unusable_values(raw.table, preparation, where=raw.name)
    return replace(
        raw,
        inputs=preparation.read(raw.table),
        table=None,
        columns=preparation.names,
        texts=isinstance(preparation, TextPreparation),
        problems=tuple(problems),
    )


def _left_out(source: Raw, preparation: TablePreparation, reading: Reading) -> list[Problem]:
    problems = []
    for name in _unreadable(source.table):
        if name not in reading.drop_columns:
            text = f"column {name!r} holds {source.table[name].type}, which is not a value: --drop-column {name}."
            problems.append(Problem("source", "column", text))
    left = [seen for seen in preparation.seen if seen.kind == LEFT_OUT and seen.name not in reading.drop_columns]
    if left:
        reasons = "; ".join(f"{seen.name!r}, since {seen.why}" for seen in left)
        kinds = "--text-column, or numeric_columns or categorical_columns of [reading], uses one anyway"
        text = f"not used as features: {reasons} ({kinds})."
        problems.append(Problem("source", "left out", text, stops=False))
    return problems


def unusable_values(table: Any, preparation: TablePreparation, *, where: str) -> list[Problem]:
    """The values of each column that are not of its kind: they are read as missing, or as unseen.

    It stops where most values of another table's column are no numbers or dates. Unseen categories are reported where
    nearly all values are.
    """
    examples = {seen.name: seen.examples for seen in preparation.seen}
    problems = []
    for column in preparation.formatted_as(table):
        unseen = isinstance(column, Category)
        if isinstance(column, Text) or (unseen and where == "source"):
            continue
        words = cells.words(table[column.name])
        rows = np.flatnonzero(column.unusable(table[column.name]))
        most = len(rows) > (_UNSEEN if unseen else _OTHER_KIND) * (len(words) - words.null_count)
        if not len(rows) or (unseen and not most):
            continue
        stops = most and not unseen and where != "source"
        fix = "write them like those" if stops else f"they are read as {'one unseen value' if unseen else 'missing'}"
        shown = some(list(dict.fromkeys(map(repr, words.take(rows[:1000]).to_pylist()))))
        beside = "" if where == "source" else f"; the source has {', '.join(examples[column.name])}"
        kind, fault = _FAULTS[type(column)]
        text = f"column {column.name!r} has {counted(len(rows), 'value')} that {fault} ({shown}{beside}): {fix}."
        problems.append(Problem(where, kind, text, stops=stops))
    return problems


def prepared(table: Any, preparation: Preparation, what: str) -> Tensor:
    """The inputs of a pyarrow table by the preparation of a training; columns that it did not use are ignored."""
    names = table.column_names
    if missing := [column for column in preparation.used if column not in names]:
        hint = did_you_mean(missing[0], names)
        raise DataError(f"{what} has no column {some(missing)}{hint}: give all columns that the model was trained on.")
    if twice := [column for column in preparation.used if names.count(column) > 1]:
        raise DataError(f"{what} has two columns of one name: rename one of {some(twice)}.")
    problems = unusable_values(table, preparation, where=what) if isinstance(preparation, TablePreparation) else []
    if stopping := [str(problem) for problem in problems if problem.stops]:
        raise DataError(" ".join(stopping))
    for problem in problems:
        if problem.kind == "unseen":
            logger.warning("%s", problem)
    inputs = preparation.read(table)
    if rows := (~inputs.isfinite()).any(1).nonzero().flatten().tolist():
        shown = some([str(row) for row in rows])
        raise DataError(f"{counted(len(rows), 'row')} of {what} with infinite values ({shown}): remove them.")
    return inputs
