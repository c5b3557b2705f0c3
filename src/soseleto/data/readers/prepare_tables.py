"""Tables read together: the preparation is fitted on the source, and every problem of every column is found at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from soseleto.data import cells
from soseleto.data.columns import LEFT_OUT
from soseleto.data.preparation import TablePreparation
from soseleto.data.readers.prepare_texts import prepare_texts
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading, given_kinds
from soseleto.data.readers.unusable_values import unusable_values
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError, did_you_mean

Preparation = TablePreparation | TextPreparation


def prepare_tables(
    raws: Sequence[Raw], reading: Reading, preparation: Preparation | None = None
) -> tuple[list[Raw], Preparation | None]:
    """The sets with the inputs of their tables, and the preparation; sets that are no tables are unchanged.

    preparation: of an earlier training; by default it is fitted on the first set, the source
    """
    if isinstance(preparation, TextPreparation) or (preparation is None and reading.tokenizer is not None):
        return prepare_texts(raws, reading, preparation)
    source = raws[0]
    if source.table is None:
        _refuse_tables(raws, reading)
        return list(raws), None
    unreadable = [name for name in source.table.column_names if not cells.is_readable(source.table[name])]
    if preparation is None:
        preparation = _fit(raws, reading, unreadable)
    _require_columns(raws, preparation, reading.drop_columns)
    faulty = [name for name in unreadable if name not in reading.drop_columns]
    made = [raw if raw.table is None else _prepared(raw, preparation, faulty) for raw in raws]
    return made, preparation


def _refuse_tables(raws: Sequence[Raw], reading: Reading) -> None:
    """Where the source is no table, no other set may be one, and its columns have no kinds."""
    if kinds := given_kinds(reading):
        raise UsageError(f"the kind of column {next(iter(kinds))!r} has no effect on a source without features.")
    for raw in raws:
        if raw.table is not None:
            raise DataError(f"the {raw.name} has features but the {raws[0].name} has not: give both the same kind.")


def _fit(raws: Sequence[Raw], reading: Reading, unreadable: Sequence[str]) -> TablePreparation:
    source, known = raws[0], raws[0].table.column_names
    others = {name for raw in raws[1:] if raw.table is not None for name in raw.table.column_names if name not in known}
    given = {name: kind for name, kind in given_kinds(reading).items() if kind != LEFT_OUT or name not in others}
    if unknown := [name for name in given if name not in known]:
        hint = did_you_mean(unknown[0], known) or f": choose from {some(known)}"
        raise UsageError(f"the {source.name} table has no feature column {some(unknown)}{hint}.")
    labels = source.labels if isinstance(source.labels, Tensor) and source.labels.ndim == 1 else None
    classes = None if labels is None or labels.is_floating_point() else labels.cpu().numpy()
    made = TablePreparation.fit(source.table.drop_columns(list(unreadable)), classes, given)
    if not made.columns:
        reasons = some([f"{one.name} ({one.why})" for one in made.seen])
        raise DataError(
            f"the {source.name} table has no column that can be used as a feature: {reasons}; name one with "
            "--text-column, --categorical-column or --numeric-column to use it anyway."
        )
    return made


def _require_columns(raws: Sequence[Raw], preparation: TablePreparation, dropped: Sequence[str]) -> None:
    """Raise for all columns that are missing or additional in a table, and not dropped, at once."""
    source, faults = raws[0], []
    for raw in raws[1:]:
        if raw.table is None:
            continue
        names = raw.table.column_names
        missing = [column for column in preparation.used if column not in names]
        extra = [column for column in names if column not in (*source.table.column_names, *dropped)]
        if missing:
            faults.append(f"the {raw.name} table lacks {some(missing)}")
        if extra:
            faults.append(f"the {raw.name} table also has {some(extra)}")
    if faults:
        raise DataError(
            f"{'; '.join(faults)}: give every table the feature columns of the source, or drop others with "
            "--drop-column."
        )


def _prepared(raw: Raw, preparation: TablePreparation, unreadable: Sequence[str]) -> Raw:
    problems = list(raw.problems)
    if raw.name == "source":
        problems += [_unreadable(raw, name) for name in unreadable]
        problems += _left_out(raw, preparation)
    problems += [one.problem(raw.name) for one in unusable_values(raw.table, preparation, source=raw.name == "source")]
    return replace(
        raw,
        inputs=preparation.read(raw.table),
        table=None,
        columns=preparation.names,
        problems=tuple(problems),
    )


def _unreadable(raw: Raw, name: str) -> Problem:
    kind = raw.table[name].type
    return Problem(raw.name, "column", f"column {name!r} holds {kind}, which is not a value: --drop-column {name}.")


def _left_out(raw: Raw, preparation: TablePreparation) -> list[Problem]:
    reasons = [f"{one.name!r}, since {one.why}" for one in preparation.seen if one.kind == LEFT_OUT]
    asked = [reason for reason in reasons if not reason.endswith("as you asked")]
    if not asked:
        return []
    text = (
        f"not used as features: {'; '.join(asked)} (--numeric-column, --categorical-column or --text-column NAME uses "
        "one anyway)."
    )
    return [Problem(raw.name, "left out", text, stops=False)]
