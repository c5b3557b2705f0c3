"""Source weights in Hugging Face's ``Trainer``, and in trainers made from it.

    trainer = SoseletoTrainer(model, args, train_dataset=doubtful, target_dataset=trusted, data_collator=collator)
    trainer.train()
    trainer.weights  # one for each example of train_dataset

Everything else is the Trainer's own: optimizer, schedule, accumulation, precision, evaluation, checkpoints and resume.
``SelectionMixin`` makes the same of another trainer: ``class Selecting(SelectionMixin, SomeTrainer)``.
Needs transformers: ``pip install 'soseleto[transformers]'``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from soseleto.algorithm import Soseleto
from soseleto.data.text import padded_length
from soseleto.engines.model_state import whole
from soseleto.errors import UsageError
from soseleto.integrations.batches import INDEX, Numbered, TargetBatches, WithIndex
from soseleto.parallel.reducer import Ranks, Single
from soseleto.selection import Selection
from soseleto.task.loop import PerExampleLoss

logger = logging.getLogger("soseleto")
FILE = "selection.pt"  # in a checkpoint of the Trainer
TEXTS, LENGTHS = "soseleto_texts", "soseleto_lengths"  # of a row that holds several: whose each token is
IGNORED = -100  # a token without a label
ROWS, TOKENS = 8, 4096  # texts, or tokens of a row that holds several, whose logits are in float32 at a time
UNLIMITED = 1 << 20  # tokens that a model without a limit can read
PADDING = {"attention_mask": 0, "token_type_ids": 0, "labels": IGNORED, "special_tokens_mask": 1}
GENERATES = ("ForCausalLM", "ForConditionalGeneration")  # transformers' kinds of loss
PER_TOKEN = ("ForMaskedLM", "ForTokenClassification")
PER_EXAMPLE = tuple(f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio"))

_AnyTrainer: Any = object  # what a Trainer offers to the mixin


class SelectionMixin(_AnyTrainer):  # type: ignore[misc]
    """What makes a ``transformers.Trainer`` learn a weight for each example of its ``train_dataset``.

    Args:
        target_dataset: the trusted examples, in the form of ``train_dataset``; or several such sets by name, the tasks,
            of which a batch has equally many.
        target_batch_size: how many of them a step takes on each device; an eighth of the training batch, at least 8.
        per_example_loss: ``loss(model, inputs) -> (B,)``; by default that of the model's kind (see ``default_loss``).
        method: ``Soseleto(...)`` with settings of its own; by default as in ``Selection``, which is told the classes
            of a model for single labels and the number of epochs.
        cuda_graph: on a GPU and in one process, record the passes of a step as a CUDA graph and replay it. Texts are
            then padded to a few lengths, each of which is recorded.
    """

    _plain: Any = Trainer  # whose own loss is that of the model's kind

    def __init__(
        self,
        *args: Any,
        target_dataset: Any,
        target_batch_size: int | None = None,
        per_example_loss: PerExampleLoss | None = None,
        method: Soseleto | None = None,
        cuda_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _require_plain(self)
        if not hasattr(target_dataset, "__len__") or not hasattr(self.train_dataset, "__len__"):
            raise UsageError("train_dataset and target_dataset need a length and places: streams are not supported.")
        for name in (name for name, is_asked in self._ignored().items() if is_asked and per_example_loss is None):
            raise UsageError(
                f"{name} would be ignored in training: leave it out, or give per_example_loss=, a function of model "
                "and inputs that returns one loss per example, such as default_loss(model)."
            )
        self.target_dataset = target_dataset
        self.per_example_loss = per_example_loss or default_loss(self.model)
        self.method = method
        self._cuda_graph = cuda_graph
        self._classes: int | None = None  # of single labels, known from the first batch on
        self._join = Join(getattr(self.processing_class, "pad_token_id", None))
        self._target_batch_size = target_batch_size
        self._selection: Selection | None = None
        self._selected_for: Any = None  # the model of the selection
        self._targets: TargetBatches | None = None
        self._target_losses: list[Tensor] = []  # since the last log
        self._unlabelled = torch.zeros(self._n_source, dtype=torch.bool, device=self.args.device)
        self._announced = 0  # how many of these the log has named

    @property
    def _n_source(self) -> int:
        return len(self.train_dataset)

    def _ignored(self) -> dict[str, Any]:
        """Losses that are not of the model's kind, and whether the user asks for them."""
        trainer: Any = type(self)
        return {
            "label_smoothing_factor": self.args.label_smoothing_factor,
            "compute_loss_func": self.compute_loss_func is not None,
            f"compute_loss of {trainer.__name__}": trainer.compute_loss is not self._plain.compute_loss,
        }

    @property
    def selection(self) -> Selection:
        """Weights, scores and visits; there is none before the first step, unless a checkpoint has been loaded."""
        if self._selection is None:
            raise UsageError("no weights yet: call train() first.")
        return self._selection

    @property
    def weights(self) -> Tensor:
        """One weight for each example of ``train_dataset``."""
        return self.selection.weights

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The weighted source gradient in ``.grad``; the weights of the batch's examples move."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # one without a schedule, after an evaluation
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        index = inputs.pop(INDEX)
        if isinstance(self.per_example_loss, _PerExample):
            self._classes = self.per_example_loss.classes(self.model, inputs)
        if isinstance(self.per_example_loss, _PerToken):
            self._unlabelled[index] = self.per_example_loss.counts(inputs) == 0
        target = self._prepare_inputs(next(self._begin(model)))
        if self._cuda_graph:
            longest = getattr(getattr(self.model, "config", None), "max_position_embeddings", None) or UNLIMITED
            inputs, target = self._join.evened(inputs, target, longest)
        with self.compute_loss_context_manager():
            numbers = self.selection.backward(
                inputs,
                target,
                index=index,
                scale=1.0 / self.current_gradient_accumulation_steps,
                scaler=self.accelerator.scaler,
            )
        self._target_losses.append(numbers["target_loss"])
        if (every := self.args.torch_empty_cache_steps) is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return numbers["source_loss"].detach() / self.current_gradient_accumulation_steps

    def _begin(self, model: nn.Module, saved: Mapping[str, Any] | None = None) -> TargetBatches:
        """Selection and target batches, made when a model and its optimizer are where they stay.

        With ``model_init`` every ``train()`` has a model of its own, which starts with weights of its own; a model that
        is trained again keeps them.

        saved: of a checkpoint
        """
        if saved is not None or self._targets is None or self._selected_for is not self.model:
            rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
            plain, generates = self.accelerator.unwrap_model(model), getattr(self.per_example_loss, "generates", False)
            self._selection = Selection(
                plain,
                n_source=self._n_source,
                loss=self.per_example_loss,
                classes=self._classes,
                epochs=math.ceil(self.args.num_train_epochs) if self.args.max_steps <= 0 else None,
                features=mean_embeddings(plain) if generates else None,
                method=self.method,
                optimizer=self.optimizer.optimizer,
                reducer=Single() if ranks == 1 else Ranks(self.args.device),
                join=self._join,
                cuda_graph=self._cuda_graph,
            )
            size = self._target_batch_size or max(8, self._train_batch_size // 8)
            target = _of_columns(self, self.target_dataset)
            collate = _collator(self, self.data_collator)
            self._targets = TargetBatches(target, size, collate, seed=self.args.seed, rank=rank, ranks=ranks)
            if saved is not None:
                self._selection.load_state_dict(saved["selection"])
                self._targets.drawn = int(saved["targets"])
            self._selected_for, self._target_losses = self.model, []
        self.selection.follow(self.optimizer.optimizer)
        return self._targets

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As the Trainer's; a batch for training also has the places of its examples, whatever columns are removed."""
        make = super()._get_dataloader
        if not is_training:
            return make(dataset, description, batch_size, sampler_fn, is_training, **kwargs)
        own: Any = self.data_collator  # type: ignore[has-type]
        sampler = sampler_fn and (lambda _: sampler_fn(dataset))
        self.data_collator = _WithIndex(_collator(self, own))
        try:
            return make(Numbered(_of_columns(self, dataset)), description, batch_size, sampler, is_training, **kwargs)
        finally:
            self.data_collator = own

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._target_losses:
            target_loss, self._target_losses = float(torch.stack(self._target_losses).mean()), []
            logs = {**logs, "target_loss": target_loss, "mean_weight": float(self.weights.mean())}
        if (count := int(self._unlabelled.sum())) > self._announced:
            self._announced = count
            places = ", ".join(map(str, self._unlabelled.nonzero().flatten().tolist()[:5]))
            logger.warning(
                "%d examples of train_dataset have no token with a label (places %s%s), as when a text is cut before "
                "its answer: they teach nothing, and their weights stay", count, places, ", ..." if count > 5 else "",
            )  # fmt: skip
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._selection is None or self._targets is None:
            return
        state = {"selection": self._selection.state_dict(), "targets": self._targets.drawn, "classes": self._classes}
        if self.args.should_save:  # the others had their part in the state of a sharded model
            path = os.path.join(output_dir, FILE)
            torch.save(state, path + ".part")
            os.replace(path + ".part", path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, FILE)
        if not os.path.exists(path):
            raise UsageError(f"{checkpoint} has no {FILE}, so another trainer wrote it: train from the start.")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        self._classes = saved["classes"]
        self._begin(self.model_wrapped, saved)


class SoseletoTrainer(SelectionMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with source selection: ``train_dataset`` is the source, ``target_dataset`` the target.

    Its arguments are those of ``Trainer`` and of ``SelectionMixin``.
    """


def default_loss(model: nn.Module) -> PerExampleLoss:
    """One loss per example for the model's kind: classes, several labels, numbers, or the mean over its tokens."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    kind, config = getattr(base, "loss_type", None), getattr(base, "config", None)
    if type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():  # such as GPT2LMHeadModel
        kind = GENERATES[0]
    if kind in PER_EXAMPLE:
        return _PerExample(getattr(config, "problem_type", None))
    if kind in GENERATES or kind in PER_TOKEN:
        return _PerToken(generates=kind in GENERATES, takes_labels=bool(getattr(config, "is_encoder_decoder", False)))
    raise UsageError(
        f"the loss of one example is not known for {type(base).__name__}: "
        "give per_example_loss=, a function of model and inputs that returns one loss per example."
    )


def mean_embeddings(model: nn.Module) -> Callable[[Mapping[str, Any]], Tensor]:
    """Features of a text: the mean embedding of its tokens, by the embeddings that the model has at the time."""
    embeddings: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]

    def features(inputs: Mapping[str, Any]) -> Tensor:
        tokens, table = inputs["input_ids"], whole(embeddings.weight.detach())
        if TEXTS in inputs:
            return _by_text(F.embedding(tokens[0], table).float(), inputs) / inputs[LENGTHS].clamp_min(1)[:, None]
        counted = inputs.get("attention_mask", torch.ones_like(tokens)).to(table.dtype)
        sums = F.embedding_bag(tokens, table, per_sample_weights=counted, mode="sum")
        return sums.float() / counted.sum(1, keepdim=True, dtype=torch.float32).clamp_min(1.0)

    return features


class _PerExample:
    """As transformers' ``ForSequenceClassificationLoss``, without the mean over examples."""

    def __init__(self, problem: str | None) -> None:
        self._problem = problem

    def classes(self, model: nn.Module, inputs: Mapping[str, Any]) -> int | None:
        """The number of classes, where every example has one label."""
        labels, count = inputs["labels"], int(getattr(getattr(model, "config", None), "num_labels", 0))
        single = self._problem in (None, "single_label_classification") and labels.ndim == 1 and count > 1
        return count if single and not labels.is_floating_point() else None

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        labels = inputs["labels"]
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits.float()
        if self._problem == "multi_label_classification" or (self._problem is None and labels.ndim == 2):
            return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
        if self._problem == "regression" or logits.shape[-1] == 1:
            wanted = labels.float().reshape(len(labels), -1)
            return (logits.reshape(len(labels), -1) - wanted).square().mean(1)
        return F.cross_entropy(logits, labels.view(-1), reduction="none")


class _PerToken:
    """The mean over the tokens of an example that have a label.

    takes_labels: an encoder with a decoder makes the decoder's inputs from the labels, shifted by one.
    """

    def __init__(self, *, generates: bool, takes_labels: bool) -> None:
        self.generates, self._settings = generates, {"use_cache": False} if generates else {}
        self._shifted, self._takes_labels = generates and not takes_labels, takes_labels

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        left_out = (TEXTS, LENGTHS) if self._takes_labels else (TEXTS, LENGTHS, "labels")
        of_model = {name: value for name, value in inputs.items() if name not in left_out}
        logits, labels, rows = model(**of_model, **self._settings).logits, self._wanted(inputs), ROWS
        if TEXTS in inputs:  # every token is a row
            logits, labels, rows = logits.transpose(0, 1), labels.transpose(0, 1), TOKENS
        parts = zip(logits.split(rows), labels.split(rows), strict=True)
        sums = [checkpoint(_label_losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return _by_text(torch.cat(sums), inputs) / self.counts(inputs).clamp_min(1)

    def counts(self, inputs: Mapping[str, Any]) -> Tensor:
        """How many tokens of each example have a label."""
        labelled = self._wanted(inputs) != IGNORED
        return _by_text(labelled.flatten().long(), inputs) if TEXTS in inputs else labelled.sum(1)

    def _wanted(self, inputs: Mapping[str, Any]) -> Tensor:
        """The label that each place is to predict; shifted here, since logits are the largest tensor of all."""
        labels: Tensor = inputs["labels"]
        if self._shifted:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            if (texts := inputs.get(TEXTS)) is not None:  # the last token of a text does not predict the next text
                labels = labels.masked_fill(texts.diff(append=texts[-1:]) != 0, IGNORED)
        return labels


def _by_text(values: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Sums over the tokens of each text of a row that holds several; otherwise there is a value per text already."""
    if TEXTS not in inputs:
        return values
    n = len(inputs[LENGTHS])  # fewer than in the row where an engine asks for some: the last has the others too
    return values.new_zeros(n, *values.shape[1:]).index_add(0, inputs[TEXTS].clamp(max=n - 1), values)


def _label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over the labelled tokens of every text; recomputed in the backward pass, so as not to keep its floats."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view_as(labels).sum(1)


class Join:
    """Two batches as one, so that source and target share a pass; None where the way to pad a tensor is not known.

    A model does not see padding, since the attention mask is part of the batch.
    """

    def __init__(self, pad_token: int | None) -> None:
        self._padding = PADDING if pad_token is None else {**PADDING, "input_ids": pad_token}

    def __call__(self, source: Any, target: Any) -> Any:
        if not isinstance(source, Mapping) or source.keys() != target.keys() or TEXTS in source:
            return None
        joined = {}
        for name, of_source in source.items():
            parts: list[Any] = [of_source, target[name]]
            if not all(isinstance(part, Tensor) for part in parts) or parts[0].ndim != parts[1].ndim:
                return None
            if parts[0].shape[1:] != parts[1].shape[1:]:
                if parts[0].ndim != 2 or name not in self._padding or "attention_mask" not in source:
                    return None
                length = max(part.shape[1] for part in parts)
                parts = [self._padded(name, part, length) for part in parts]
            joined[name] = torch.cat(parts)
        return joined

    def evened(self, source: Any, target: Any, longest: int) -> tuple[Any, Any]:
        """Both padded to one of a few lengths, if all that the attention mask counts can be padded."""
        sides = source, target
        if not all(isinstance(side, Mapping) and "attention_mask" in side for side in sides):
            return source, target
        widths = [side["attention_mask"].shape[-1] for side in sides]
        texts = [
            {name for name, value in side.items() if value.ndim == 2 and value.shape[1] == width}
            for side, width in zip(sides, widths, strict=True)
        ]
        if not texts[0] | texts[1] <= self._padding.keys():
            return source, target
        length = padded_length(max(widths), max(longest, *widths))
        one, other = (
            {name: self._padded(name, value, length) if name in some else value for name, value in side.items()}
            for side, some in zip(sides, texts, strict=True)
        )
        return one, other

    def _padded(self, name: str, part: Tensor, length: int) -> Tensor:
        return F.pad(part, (0, length - part.shape[1]), value=self._padding[name])


class _WithIndex(WithIndex):
    """The index as one more entry of the batch; an item that holds several texts has the places of its tokens."""

    def __call__(self, items: Sequence[tuple[int, Any]]) -> dict[str, Any]:
        index, batch = super().__call__(items)
        if isinstance(items[0][1], Mapping) and INDEX in items[0][1]:
            index = torch.cat([torch.as_tensor(item[INDEX]).unique_consecutive() for _, item in items])
        if LENGTHS in batch and len(batch[LENGTHS]) != len(index):
            raise UsageError(
                f"{len(index)} rows of train_dataset hold {len(batch[LENGTHS])} texts, whose places are not known: "
                "give one text in each row, or use SoseletoSFTTrainer of soseleto.integrations.trl, which packs them."
            )
        return {**batch, INDEX: index}


class _Texts:
    """A collator that says whose each token is, where it makes one row of several texts."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Sequence[Any]) -> Any:
        batch = self._collate(items)
        places = batch.get("position_ids") if isinstance(batch, Mapping) else None
        if places is None or "attention_mask" in batch or "labels" not in batch or len(places) != 1:
            return batch
        n = sum(len(item.get("seq_lengths", (0,))) for item in items)
        texts = ((places[0] == 0).cumsum(0) - 1).clamp(max=n - 1)  # padding at the end begins anew
        return {LENGTHS: texts.bincount(minlength=n), TEXTS: texts, **batch}  # the first counts the examples


def _collator(trainer: Any, collate: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """The collator, without the columns that the model does not take."""
    return _Texts(trainer._get_collator_with_removed_columns(collate, description="training"))


def _of_columns(trainer: Any, dataset: Any) -> Any:
    """The data set without the columns that the model does not take, where they can be dropped before reading."""
    if isinstance(dataset, Mapping):
        return {name: _of_columns(trainer, task) for name, task in dataset.items()}
    return trainer._remove_unused_columns(dataset) if hasattr(dataset, "remove_columns") else dataset


def _require_plain(trainer: Any) -> None:
    """One device, a copy on each rank, or a model that accelerate gives to fully_shard."""
    sharded = trainer.is_fsdp_enabled and getattr(trainer.accelerator, "is_fsdp2", False)
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not sharded):
        raise UsageError(
            f"SoseletoTrainer does not train with {'DeepSpeed' if trainer.is_deepspeed_enabled else 'FSDP 1'}: write "
            'TrainingArguments(fsdp=True, fsdp_config={"version": 2}) for a model that is split over the processes.'
        )
    if sharded and type(trainer.accelerator.state.fsdp_plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UsageError("cpu_offload of fsdp_config keeps parameters on another device than losses: leave it out.")
    if trainer.args.n_gpu > 1:
        raise UsageError(
            f"this process sees {trainer.args.n_gpu} GPUs: start one for each by accelerate launch or torchrun."
        )
