"""``soseleto fit`` on a column of texts: with a pretrained model, ``--model hf:FOLDER_OR_ID``, or as a bag of words."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from soseleto.data import Pair, Reading
from soseleto.data.tables import SUFFIXES
from soseleto.data.text import LONGEST, TextPreparation, Tokenizer
from soseleto.errors import UsageError
from soseleto.models.pretrained_text import PretrainedText, is_for_images, is_pretrained, open_text_model
from soseleto.run_folder.folder import PRETRAINED, RunFolder

_SHORTEST = 8  # tokens, two of which are often not words
_opened = lru_cache(maxsize=2)(open_text_model)


def with_tokenizer(reading: Reading, source: Path, model: str | None, max_tokens: int | None) -> Reading:
    """The reading with the tokenizer of a pretrained model, where the source is a table of texts."""
    if model is None or not _reads_texts(model, source, reading):
        if max_tokens is not None:
            raise UsageError("--max-tokens has no effect without a pretrained text model: add --model hf:FOLDER_OR_ID.")
        return reading
    opened = _opened(model)
    return replace(reading, tokenizer=Tokenizer(opened.tokenizer, _longest(opened, max_tokens), opened.pad))


def _reads_texts(model: str, source: Path, reading: Reading) -> bool:
    """Whether the model is a pretrained one for a column of texts; a table may have paths of images instead."""
    if not is_pretrained(model) or source.suffix.lower() not in SUFFIXES or reading.path_column is not None:
        return False
    return bool(reading.text_columns) or not is_for_images(model)


def _longest(opened: PretrainedText, wanted: int | None) -> int:
    if wanted is None:
        return min(LONGEST, opened.longest)
    if not _SHORTEST <= wanted <= opened.longest:
        raise UsageError(f"--max-tokens must be from {_SHORTEST} to {opened.longest} with this model, got {wanted}.")
    return wanted


def plan(pair: Pair, model: str | None) -> list[str]:
    """What the plan says about texts."""
    table = pair.preparation
    if isinstance(table, TextPreparation):
        full = int(table.cut(pair.source.inputs).sum())
        cut = f"; {full:,} of {len(pair.source):,} source texts reach that (--max-tokens N)" if full else ""
        return [f"column {table.column!r} is read up to {table.tokenizer.longest} tokens a text{cut}"]
    if table is None or not table.texts or model is not None:
        return []
    return [
        "texts are read as hashed words and pairs of words, a fast default that knows nothing of their meaning; for a "
        "pretrained model, which does, add --model hf:FOLDER_OR_ID"
    ]


def keep_model(folder: RunFolder, pair: Pair, model: str | None) -> None:
    """Write what the run's model is built from again."""
    if isinstance(pair.preparation, TextPreparation) and model is not None:
        folder.write_json(PRETRAINED, _opened(model).to_dict(), indent=None)
