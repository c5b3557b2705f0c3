"""Source weights in TRL's ``SFTTrainer``.

    trainer = SoseletoSFTTrainer(model, args, train_dataset=doubtful, target_dataset=trusted)
    trainer.train()
    trainer.weights  # one for each example of the train_dataset that was given

Needs TRL: ``pip install 'soseleto[trl]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl import SFTTrainer, pack_dataset

from soseleto.errors import UsageError
from soseleto.integrations.batches import INDEX
from soseleto.integrations.huggingface import SelectionMixin


class SoseletoSFTTrainer(SelectionMixin, SFTTrainer):  # type: ignore[misc]
    """``trl.SFTTrainer`` with source selection: its arguments are those of ``SFTTrainer`` and of ``SelectionMixin``.

    TRL prepares ``target_dataset`` as it does ``train_dataset``: chat template, tokens, labels, truncation. An example
    is one text, also in the rows of ``packing=True``; the target is not packed. The loss of an example is the mean over
    its labelled tokens. Texts that TRL leaves out, since truncation leaves no label, keep their place and their weight.
    """

    _plain = SFTTrainer
    _length: int | None = None  # of train_dataset before TRL prepares it; None: it does not
    _kept: Any = ()  # places of what it keeps

    def __init__(self, *args: Any, target_dataset: Any, **kwargs: Any) -> None:
        super().__init__(*args, target_dataset=target_dataset, **kwargs)
        if self.args.activation_offloading:
            raise UsageError("activation_offloading=True has no effect here: write gradient_checkpointing=True.")
        if self._length is None:
            return
        settings = self.processing_class, self.args, False, self._formatting_func
        if isinstance(target_dataset, Mapping):
            prepare = super()._prepare_dataset
            self.target_dataset = {name: prepare(task, *settings, name) for name, task in target_dataset.items()}
        else:
            self.target_dataset = super()._prepare_dataset(target_dataset, *settings, "target")
        self._unlabelled[:] = True
        self._unlabelled[self._kept] = False

    @property
    def _n_source(self) -> int:
        return super()._n_source if self._length is None else self._length

    def _ignored(self) -> dict[str, Any]:
        loss = f"loss_type={self.args.loss_type!r}"
        return {loss: self.args.loss_type != "nll", "router_aux_loss_coef": self.aux_loss_enabled, **super()._ignored()}

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """As TRL; ``train_dataset``, which comes first, gets a column with the places of its examples."""
        if self._length is not None or not hasattr(dataset, "__len__"):
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        if packing and (args.packing_strategy != "bfd" or args.max_length is None):
            raise UsageError(
                f"packing with packing_strategy={args.packing_strategy!r} and max_length={args.max_length} can cut a "
                "text in two, which would have two weights: write packing_strategy='bfd' and a max_length."
            )
        self._length = len(dataset)
        numbered = dataset.add_column(INDEX, list(range(len(dataset))))
        prepared = super()._prepare_dataset(numbered, processing_class, args, False, formatting_func, dataset_name)
        self._kept = prepared[INDEX][:]
        if not packing:
            return prepared
        with args.main_process_first():
            prepared = prepared.map(_for_each_token).select_columns(["input_ids", "labels", INDEX])
            return pack_dataset(prepared, args.max_length, args.packing_strategy, {"num_proc": args.dataset_num_proc})

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns: list[str]
        if INDEX not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, INDEX]


def _for_each_token(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of one length are packed together."""
    return {INDEX: [row[INDEX]] * len(row["input_ids"])}
