"""Tables with a column of texts for a pretrained model: the column is found in the source, and every set tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from soseleto.data import cells
from soseleto.data.columns import LEFT_OUT, Kind, kind_of
from soseleto.data.preparation import Seen
from soseleto.data.readers.problems import some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading, given_kinds
from soseleto.data.text import TextPreparation, Tokenizer
from soseleto.errors import DataError, UsageError, did_you_mean


def prepare_texts(
    raws: Sequence[Raw], reading: Reading, preparation: TextPreparation | None = None
) -> tuple[list[Raw], TextPreparation]:
    """The sets with the tokens of their texts, and the preparation.

    preparation: of an earlier training; by default the column is found in the first set, the source
    """
    for raw in raws:
        if raw.table is None:
            raise UsageError(
                f"a pretrained text model reads a column of a table, and the {raw.name} is none: give a .csv, .tsv, "
                ".parquet or .jsonl file with --text-column NAME."
            )
    if preparation is None:
        assert reading.tokenizer is not None
        preparation = _fit(raws[0], reading, reading.tokenizer)
    for raw in raws:
        if preparation.column not in raw.table.column_names:
            known = raw.table.column_names
            hint = did_you_mean(preparation.column, known) or f" among {some(known)}"
            raise DataError(f"the {raw.name} table has no text column {preparation.column!r}{hint}: name it alike.")
    return [_prepared(raw, preparation, reading) for raw in raws], preparation


def _prepared(raw: Raw, preparation: TextPreparation, reading: Reading) -> Raw:
    tokens = preparation.read(raw.table, reading.cache)
    return replace(raw, inputs=tokens, table=None, columns=preparation.names, texts=True)


def _fit(source: Raw, reading: Reading, tokenizer: Tokenizer) -> TextPreparation:
    table = source.table
    column = _text_column(source, reading)
    left_out = Kind(LEFT_OUT, "the model reads the text alone")
    kinds = {name: Kind("text") if name == column else left_out for name in table.column_names}
    readable = [name for name in table.column_names if name == column or cells.is_readable(table[name])]
    return TextPreparation(column, tokenizer, tuple(Seen.of(name, table[name], kinds[name]) for name in readable))


def _text_column(source: Raw, reading: Reading) -> str:
    """As named; else the only column of texts."""
    given, known = given_kinds(reading), source.table.column_names
    if other := [name for name, kind in given.items() if kind not in ("text", LEFT_OUT)]:
        raise UsageError(
            f"the kind of column {other[0]!r} has no effect: a pretrained text model reads the text alone."
        )
    named = list(reading.text_columns)
    if not named:
        labels = source.labels.numpy() if isinstance(source.labels, Tensor) and source.labels.ndim == 1 else None
        kinds = {name: kind_of(name, source.table[name], labels, given) for name in known if _is_words(source, name)}
        named = [name for name, kind in kinds.items() if kind.name == "text"]
    if len(named) != 1:
        found = f"{len(named)} columns of text ({some(named)})" if named else f"no column of text among {some(known)}"
        raise UsageError(f"the {source.name} table has {found}: name the one to read, --text-column NAME.")
    if named[0] not in known:
        hint = did_you_mean(named[0], known) or f": choose from {some(known)}"
        raise UsageError(f"the {source.name} table has no feature column {named[0]}{hint}.")
    if not cells.is_readable(source.table[named[0]]):
        kind = source.table[named[0]].type
        raise UsageError(f"column {named[0]!r} of the {source.name} holds {kind}, not text: name another.")
    return named[0]


def _is_words(source: Raw, name: str) -> bool:
    return cells.is_text(source.table[name])
