"""The trainings of one ``soseleto fit``: the main one, and the parts of the comparison with it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto import defaults, methods
from soseleto.algorithm import Soseleto
from soseleto.cli import texts
from soseleto.cli.choices import augment_for, model_for, probes_for, unlabelled_batch, views_for, with_unlabelled
from soseleto.cli.comparison import METHOD, Judged, Part
from soseleto.cli.fit_options import FitOptions, dtype_of, folds_of, labels_before_of
from soseleto.cli.pretrained import pretrained_options
from soseleto.data import Augment, Pair, Preprocess, TablePreparation, TokenViews, Views
from soseleto.data.feeding import make_prepare
from soseleto.data.text import TextPreparation
from soseleto.data.views import AnyViews
from soseleto.defaults import STRONG_TARGET_BATCH, TARGET_BATCH, DefaultMethod, kind_of_inputs, resolve
from soseleto.errors import SoseletoError, UsageError, counted
from soseleto.methods.strong import Strong, StrongTransfer
from soseleto.models.by_name import make_model
from soseleto.models.pretrained_images import PretrainedOptions, pretrained_images
from soseleto.parallel.reducer import Reducer, choose_device
from soseleto.prediction.load import load
from soseleto.run_folder.folder import PARTS, RunFolder
from soseleto.suspects.probes import AUTO_MOST, AUTO_SHARE, Share
from soseleto.task.losses import cross_entropy
from soseleto.task.task import Method
from soseleto.training.data import Labels, found_before
from soseleto.training.fit import fit
from soseleto.training.options import Checkpoints, Compute, Heads, Inputs, Probes
from soseleto.training.progress import LiveLine
from soseleto.training.result import Result
from soseleto.training.resume import comparable, differences, model_fingerprint
from soseleto.training.setup import Options


@dataclass(frozen=True)
class Trainings:
    """What the trainings have in common, decided before the first step; a part is given to each method."""

    options: FitOptions
    pair: Pair
    model: str
    classes: int
    plain_augment: Augment | None
    views: AnyViews | None  # of the strong recipe
    folds: int
    reducer: Reducer
    before: Tensor | None  # the target's labels before they were checked
    pretrained: PretrainedOptions | None  # for a model that has been trained on images before

    @classmethod
    def of(cls, options: FitOptions, pair: Pair, reducer: Reducer) -> Trainings:
        if pair.target.labels.is_floating_point():
            raise UsageError("the labels are real numbers: train a regression with soseleto.fit(..., loss=...).")
        shape, strong = tuple(pair.source.inputs.shape[1:]), options.recipe == "strong"
        _check_recipe(options)
        model = model_for(options.model, shape, pair.preparation, options.recipe, options.mode)
        return cls(
            options=options,
            pair=pair,
            model=model,
            classes=len(pair.target.classes or ()) or int(pair.target.labels.max()) + 1,
            plain_augment=augment_for(options.augment, shape, _class_names(pair)),
            views=views_for(options.augment, pair.source, _class_names(pair), options.mode) if strong else None,
            folds=folds_of(options, len(pair.target)),
            reducer=reducer,
            before=labels_before_of(options, pair),
            pretrained=pretrained_options(options, model, pair),
        )

    def train(self, part: Part, progress: LiveLine) -> Result:
        """Train one part, or continue its training."""
        options, settings = self.options, self.settings(part)
        return fit(
            self.module(),
            self.pair.source,
            part.target,
            options.mode,  # type: ignore[arg-type]  # read_pair has checked it
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            target_batch_size=settings.target_batch_size,
            optimizer=(settings.optimizer, settings.schedule),
            method=settings.method,
            inputs=Inputs(augment=settings.augment, standardize=self._standardize),
            probes=self._planted(part),
            compute=self._compute(part),
            checkpoints=self._checkpoints(part),
            seed=options.seed,
            device=options.device,
            out=self.place(part),
            progress=progress,
        )

    def _is_strong(self, part: Part) -> bool:
        """Whether a part is trained by the strong recipe; what it is compared with is not."""
        return part.method == METHOD and self.options.recipe == "strong"

    def _judges_labels(self, part: Part) -> bool:
        """Whether it is so in noisy mode, which has a batch size and, for images, an optimizer of its own."""
        return self._is_strong(part) and self.options.mode == "noisy"

    def _judges_images(self, part: Part) -> bool:
        return self._judges_labels(part) and isinstance(self.views, Views)

    def augment(self, part: Part) -> Augment | AnyViews | None:
        return self.views if self._is_strong(part) else self.plain_augment

    def settings(self, part: Part) -> defaults.Settings:
        """The complete settings of a part."""
        options = self.options
        labels = self._labels if part.method == METHOD and options.mode == "noisy" and not self._is_strong(part) else {}
        return resolve(
            self.module(),
            mode=options.mode,
            inputs=kind_of_inputs(self.pair.source),
            n_source=len(self.pair.source),
            **labels,
            method=self._method(part),
            epochs=options.epochs,
            batch_size=options.batch_size,
            target_batch_size=self._target_batch(part),
            lr=options.lr,
            weight_decay=options.weight_decay,
            augment=self.augment(part),
        )

    def _method(self, part: Part) -> Method | DefaultMethod:
        options = self.options
        if part.method != METHOD:
            return methods.by_name(part.method)
        if self._judges_labels(part):
            strong = with_unlabelled(Strong(), self.pair.unlabelled)
            return strong if options.target_share is None else replace(strong, target_share=options.target_share)
        if options.alignments not in (None, "last", "all"):
            raise UsageError(f"unknown --alignments {options.alignments!r}: write last or all.")
        changed = DefaultMethod(
            weight_step=options.weight_step,
            target_share=options.target_share,
            doubt=options.doubt_labels,
            all_layers=None if options.alignments is None else options.alignments == "all",
            engine=options.engine,
        )
        return StrongTransfer(selection=changed.for_losses("transfer")) if self._is_strong(part) else changed

    @cached_property
    def _labels(self) -> dict[str, Any]:
        """What is known about the labels of source and target."""
        return self.reducer.first(self._judged_labels)

    def _judged_labels(self) -> dict[str, Any]:
        folder, pair = RunFolder(self.options.out), self.pair
        before = folder.config() if folder.is_run() else {}
        try:
            model = self.module().to(self.device)
            prepare = make_prepare(pair.source, model, standardize=self._standardize)
            labels = Labels(model, prepare, pair.source, pair.target, self.options.seed, before)
            known = {"ends_in_linear": labels.ends_in_linear, "wrong_share": labels.wrong_share}
        except SoseletoError:
            raise
        except Exception:  # of a model of the user's: ``fit`` says what is wrong with it
            known = {}
        return {"classes": True, **known}

    @property
    def many_seem_wrong(self) -> bool:
        """Whether the default method was chosen for many wrong labels."""
        return self.settings(Part("", METHOD, self.pair.target, self.pair.target, torch.arange(0))).reason.startswith(
            "many"
        )

    def _compute(self, part: Part) -> Compute:
        """The strong recipe runs images, whose networks are large, in bfloat16 on a GPU unless asked for another."""
        options = self.options
        large = self.device.type == "cuda" and self._judges_images(part)
        wanted = "bfloat16" if options.dtype is None and large else options.dtype
        return Compute(
            dtype=dtype_of(wanted),
            micro_batch_size=options.micro_batch_size,
            non_finite=options.non_finite,  # type: ignore[arg-type]  # Compute checks it
            reducer=self.reducer,
        )

    def weights(self, part: Part) -> Tensor:
        """The learned weights of a part's training, in the source's order."""
        ranking = RunFolder(self.place(part)).ranking()
        by_id = dict(zip(ranking["id"].tolist(), ranking["weight"].tolist(), strict=True))
        return torch.tensor([by_id[self.pair.source.id_of(row)] for row in range(len(self.pair.source))])

    def judge(self, part: Part) -> Judged:
        """The part's model on the examples that it is judged by."""
        texts.keep_model(RunFolder(self.place(part)), self.pair, self.model)
        loaded = load(self.place(part), self.module(), device=self.options.device)
        return Judged(part.method, loaded.outputs(part.judged.inputs), part.judged.labels.cpu(), part.places)

    def has_ended(self, part: Part) -> bool:
        """Whether the part's training has ended; one with other settings raises."""
        folder = RunFolder(self.place(part))
        if not folder.is_run() or not folder.has_ended():
            return False
        old, new = comparable(folder.config()), self._config(part)
        old["device"] = str(old.get("device")).partition(":")[0]
        if changed := differences(old, new, new):
            raise UsageError(
                f"{folder.path} holds a training with other settings, since {', '.join(changed)}: give the same as "
                "before, or --out another folder."
            )
        return True

    def _config(self, part: Part) -> dict[str, Any]:
        """The entries of ``config.json`` that affect a part's result."""
        options = Options(
            mode=self.options.mode,
            loss=(cross_entropy, cross_entropy),
            inputs=Inputs(),
            heads=Heads(),
            probes=self._planted(part),
            compute=self._compute(part),
            checkpoints=self._checkpoints(part),
            seed=self.options.seed,
        )
        settings = self.settings(part)
        sizes = {"batch_size": settings.batch_size, "target_batch_size": settings.target_batch_size}
        return comparable({**options.describe(), **settings.describe(), **sizes, "device": self.device.type})

    @cached_property
    def device(self) -> torch.device:
        return self.reducer.device or choose_device(self.options.device)

    def _planted(self, part: Part) -> Probes:
        share = self.probes(part)
        return Probes(
            share=share,
            labels_before=self._before(part),
            precision=self.options.suspect_precision,
            guarantee=self.options.guarantee and bool(share),
        )

    def _before(self, part: Part) -> Tensor | None:
        """The earlier labels of the part's target; None where too few of them were wrong to be planted."""
        asked = not part.name and self.options.labels_before is not None
        if self.before is None or not (asked or self.probes(part)):
            return None
        if not part.name:
            return self.before
        place = {self.pair.target.id_of(row): row for row in range(len(self.pair.target))}
        before = self.before[[place[part.target.id_of(row)] for row in range(len(part.target))]]
        return found_before(before, part.target)

    def _checkpoints(self, part: Part) -> Checkpoints:
        """With the entries of ``config.json`` in addition to the training's own settings."""
        notes = {**self._notes, "probe_share": self.probes(part)}
        if self.options.unlabelled is not None and self._judges_labels(part):
            notes["unlabelled"] = str(self.options.unlabelled)
        if not part.name and self.options.mode == "noisy" and self.options.recipe == "plain":
            notes["wrong_share"] = self._labels.get("wrong_share")
        return Checkpoints(seconds=self.options.checkpoint_every, notes=notes)

    @cached_property
    def _notes(self) -> dict[str, Any]:
        """What the main training and all parts have in common."""
        columns = None if self.pair.columns is None else list(self.pair.columns)
        module, described = self._module()
        return {
            "model": self.model,
            **({} if described is None else {"pretrained": described}),
            "module_fingerprint": model_fingerprint(module),
            "n_classes": self.classes,
            "columns": columns,
            "folds": self.folds,
            "baselines": self.options.baselines,
            "labels_before": None if self.before is None else hashlib.sha256(self.before.numpy().data).hexdigest(),
            "data": _digest(self.pair),
        }

    def place(self, part: Part) -> Path:
        """The run folder of a part."""
        return _within(self.options.out, part)

    def module(self) -> nn.Module:
        """A new model with its initial parameters."""
        return self._module()[0]

    def _module(self) -> tuple[nn.Module, dict[str, Any] | None]:
        """A new model, and the description of a pretrained one."""
        options, table = self.options, self.pair.preparation
        shape = (table.width,) if isinstance(table, TablePreparation) else tuple(self.pair.source.inputs.shape[1:])
        sizes: Any = {"classes": self.classes, "shape": shape, "seed": options.seed}
        if self.pretrained is not None:
            return pretrained_images(self.model, options.mode, options=self.pretrained, **sizes)
        return make_model(self.model, options.mode, **sizes), None

    @property
    def _standardize(self) -> bool | Preprocess | TablePreparation | TextPreparation:
        """By the source's statistics; a pretrained network normalises images itself and gets values from 0 to 1."""
        if self.pretrained is None:
            return self.pair.preparation or True
        channels = self.pair.source.inputs.shape[1]
        return Preprocess((0.0,) * channels, (1.0,) * channels)

    def _target_batch(self, part: Part) -> int:
        """As given, but at most what the target has without its probes."""
        probes = self.probes(part)
        share = AUTO_SHARE if probes == "auto" else probes
        left = len(part.target) - min(AUTO_MOST, round(share * len(part.target)))
        wanted = self.options.target_batch_size
        if wanted is not None and wanted > left and not part.name:
            planted = len(part.target) - left
            beside = f" beside {counted(planted, 'probe')}" if planted else ""
            raise UsageError(
                f"--target-batch-size is {wanted}, but the target has {counted(left, 'example')} to train on{beside}: "
                f"write --target-batch-size {left} or less."
            )
        judges_texts = isinstance(self.views, TokenViews)
        usual = STRONG_TARGET_BATCH if self._judges_labels(part) and not judges_texts else TARGET_BATCH
        return min(usual, left) if wanted is None else min(wanted, left) if part.name else wanted

    def probes(self, part: Part) -> Share:
        """The share of the part's target that is planted: of the main training, which finds the suspects."""
        if self.options.mode != "noisy" or part.name:
            return 0.0
        if self.options.probes is None and (self.reducer.ranks > 1 or self.options.micro_batch_size):
            return 0.0  # they need one process and whole batches
        return probes_for(self.options.probes, len(self.pair.source), len(part.target))

    def cost(self, part: Part) -> float:
        """The work of a training, in forward passes of one example for every step of an epoch."""
        return self.settings(part).epochs * self._cost_of_step(part)

    def _cost_of_step(self, part: Part) -> float:
        settings, target = self.settings(part), self._target_batch(part)
        batch_size = settings.batch_size or 1
        if part.method != METHOD:
            return 3 * (target if part.method == "target_only" else batch_size)
        if self._judges_labels(part) and self.views is not None:
            # the teacher judges one view of the source, and the network is trained on strong views of both sides
            judged = batch_size + unlabelled_batch(self.pair.unlabelled)
            return judged + 3 * self.views.count * (judged + target)
        teacher = batch_size + target if self._is_strong(part) else 0
        by_engine = not isinstance(settings.method, Soseleto) or not settings.method.alignment.reads_layer
        return (4 if by_engine else 3) * batch_size + 3 * target + teacher


def _check_recipe(options: FitOptions) -> None:
    """Raise for an unknown recipe, and for options that the strong one has not."""
    changed = {
        "--weight-step": options.weight_step is not None,
        "--engine": options.engine != "auto",
        "--alignments": options.alignments is not None,
        "--doubt-labels": options.doubt_labels is True,
        "--no-doubt-labels": options.doubt_labels is False,
    }
    if options.recipe == "strong" and options.micro_batch_size is not None:
        raise UsageError("--micro-batch-size does not go with --recipe strong: leave it out, or write --recipe plain.")
    if options.recipe == "strong" and options.mode == "transfer" and options.doubt_labels:
        raise UsageError(
            "--doubt-labels does not go with --recipe strong in transfer mode, which mixes labels: leave it out."
        )
    if options.recipe == "strong" and options.mode == "noisy" and any(changed.values()):
        named = next(name for name, is_changed in changed.items() if is_changed)
        raise UsageError(f"{named} has no effect with --recipe strong, whose teacher judges the labels: leave it out.")


def _class_names(pair: Pair) -> tuple[str, ...] | None:
    """Of both sides; None where a side has none."""
    names = pair.source.classes, pair.target.classes
    return None if None in names else tuple(name for side in names for name in side or ())


def _within(folder: Path, part: Part) -> Path:
    return folder / PARTS / part.name if part.name else folder


def _digest(pair: Pair) -> str:
    """sha256 of the data sets with the names of their classes and, where known, the correct labels."""
    digest = hashlib.sha256()
    for one in [pair.source, pair.target, *([] if pair.test is None else [pair.test])]:
        truth = None if one.truth is None else one.truth.tolist()
        digest.update(f"{one.fingerprint()}{one.classes}{truth}".encode())
    return digest.hexdigest()
