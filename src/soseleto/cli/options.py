"""The options of ``soseleto fit`` and its ``--config FILE.toml``, as the objects that ``soseleto.compare`` takes.

A file has the options of the command by their names with underscores, ``epochs = 20``, and tables with the names that
Python uses: ``[reading]`` has the fields of ``soseleto.Reading``, ``[probes]`` those of ``soseleto.Probes``. An option
on the line takes the place of the one in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from soseleto.cli.line import IN_TABLES, FitLine
from soseleto.data import Augment, Pair, Reading, Views, check_mode
from soseleto.data.augment import AnyViews
from soseleto.data.tables import SUFFIXES
from soseleto.data.text import LONGEST, TextPreparation, Tokenizer
from soseleto.defaults import DefaultMethod, augment_for, kind_of_inputs, views_for
from soseleto.errors import UsageError, did_you_mean
from soseleto.methods.strong import Strong
from soseleto.models.pretrained import PretrainedOptions, is_for_images, is_hugging_face, is_pretrained, open_text_model
from soseleto.parallel.reducer import Reducer
from soseleto.task.task import MakeOptimizer, Method
from soseleto.training.options import Checkpoints, Compute, Probes

METHODS = ("plain", "strong")
SHORTEST = 8  # tokens, two of which are often not words
open_text = lru_cache(maxsize=2)(open_text_model)
T = TypeVar("T")


def of_table(cls: type[T], table: Mapping[str, Any], name: str, **more: Any) -> T:
    """An object of the fields in a table; ``more`` are those of the command's options, without those that are None."""
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise UsageError(f"[{name}] has no key {key!r}{did_you_mean(key, known)}.")
    values = {**table, **{key: value for key, value in more.items() if value is not None}}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise UsageError(f"[{name}] cannot be used ({error}): correct it.") from error


@dataclass(frozen=True, kw_only=True)
class FitOptions(FitLine):
    """The options of ``soseleto fit``, and what they come to."""

    config: Mapping[str, Any] = field(default_factory=dict)  # what is in the file alone

    def table(self, name: str, cls: type[T]) -> T:
        """The object of a table of the file, with the options of the line."""
        table = self.config.get(name, {})
        options = {key: getattr(self, option) for option, (of, key) in IN_TABLES.items() if of == name}
        if name == "method":
            table = {key: value for key, value in table.items() if key != "name"}
            options.pop("name")
        return of_table(cls, table, name, **options)

    def check(self) -> None:
        """Raise for what no data could make right, before any are read."""
        check_mode(self.mode)
        if self.method not in METHODS:
            hint = did_you_mean(self.method, METHODS)
            raise UsageError(f"unknown method {self.method!r}{hint}: write --method plain or strong.")
        if self.method == "strong" and self.mode == "transfer":
            raise UsageError("--method strong is for wrong labels, in noisy mode: leave it out in transfer mode.")
        if self.labels_before is not None and self.mode == "transfer":
            raise UsageError("--labels-before has no effect in transfer mode, which has no suspects: leave it out.")
        for name, cls in (("probes", Probes), ("compute", None), ("checkpoints", Checkpoints), ("reading", Reading)):
            self.compute_with(None) if cls is None else self.table(name, cls)
        self.optimizer()

    # What ``compare`` takes

    def reading(self) -> Reading:
        """With the tokenizer of a pretrained text model."""
        reading = self.table("reading", Reading)
        model = self.model or ""
        is_table = self.source.suffix.lower() in SUFFIXES and reading.path_column is None
        longest = self.config.get("pretrained", {}).get("max_tokens")
        if is_table and is_hugging_face(model) and (reading.text_columns or not is_for_images(model)):
            text = open_text(model)
            if longest is not None and not SHORTEST <= longest <= text.longest:
                raise UsageError(
                    f"max_tokens must be from {SHORTEST} to {text.longest} with this model, got {longest}."
                )
            tokenizer = Tokenizer(text.tokenizer, longest or min(LONGEST, text.longest), text.pad)
            return replace(reading, tokenizer=tokenizer)
        if longest is not None:
            raise UsageError("max_tokens has no effect without a pretrained text model: add --model hf:FOLDER_OR_ID.")
        return reading

    def probes_of(self, pair: Pair) -> Probes:
        """Labels from before a check, if not of a column, are those that ``compare`` finds in the source."""
        before = None if self.labels_before is None else pair.labels_before
        return replace(self.table("probes", Probes), share=self.probes, labels_before=before)

    def compute_with(self, reducer: Reducer | None, *, large: bool = False) -> Compute:
        """large: a network for which bfloat16 pays on a GPU."""
        table = {"dtype": "bfloat16" if large else None, **self.config.get("compute", {})}
        names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None, None: None}
        if table["dtype"] not in names:
            raise UsageError(f"unknown dtype {table['dtype']!r}: write bfloat16, float16 or float32.")
        return of_table(Compute, {**table, "dtype": names[table["dtype"]], "reducer": reducer}, "compute")

    def checkpoints(self, notes: Mapping[str, Any]) -> Checkpoints:
        return replace(self.table("checkpoints", Checkpoints), notes=notes)

    def optimizer(self) -> MakeOptimizer | None:
        """``[optimizer]`` has the name of a class of torch.optim and its arguments."""
        table = dict(self.config.get("optimizer", {}))
        if not table:
            return None
        name = str(table.pop("name", "SGD"))
        known = [each for each in dir(torch.optim) if each[0].isupper() and each != "Optimizer"]
        if name not in known:
            raise UsageError(f"[optimizer] has an unknown name {name!r}{did_you_mean(name, known)}.")
        return partial(getattr(torch.optim, name), **table)

    def chosen_method(self) -> Method | DefaultMethod:
        if self.method == "plain":
            return self.table("method", DefaultMethod)
        return self.table("method", Strong)

    def augment(self, pair: Pair) -> Augment | AnyViews | None:
        """As the file says; by default small shifts of images, and mirrored ones where they are natural."""
        asked, strong = self.config.get("augment"), self.method == "strong"
        shape = tuple(pair.source.inputs.shape[1:])
        names = pair.source.classes, pair.target.classes
        usual = augment_for(shape, None if None in names else tuple(name for side in names for name in side or ()))
        if strong:
            views = views_for(kind_of_inputs(pair.source))
            if isinstance(views, Views) and usual is not None:
                views = replace(views, flip=usual.flip)
            if asked is False:
                raise UsageError("augment = false has no effect with --method strong: leave it out.")
            return views if asked is None else of_table(type(views), asked, "augment")
        if asked is False:
            return None
        if asked is not None and len(shape) != 3:
            raise UsageError(f"[augment] is for images, and these inputs have shape {shape}: leave it out.")
        return usual if asked is None else of_table(Augment, asked, "augment")

    def pretrained(self, model: str, pair: Pair) -> PretrainedOptions | None:
        """Of a pretrained network for images; None for another model, where these options have no effect."""
        table = {key: value for key, value in self.config.get("pretrained", {}).items() if key != "max_tokens"}
        asked = of_table(PretrainedOptions, table, "pretrained", train=self.train)
        if is_pretrained(model) and not isinstance(pair.preparation, TextPreparation):
            size = self.table("reading", Reading).image_size
            return replace(asked, size=size if isinstance(size, int) else None)
        if asked != PretrainedOptions():
            wrong = "reads texts" if is_pretrained(model) else "is not a pretrained one"
            raise UsageError(
                f"--train and [pretrained] are for pretrained networks that read images, and {model} {wrong}: "
                "leave them out."
            )
        return None
