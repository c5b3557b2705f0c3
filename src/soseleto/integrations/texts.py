"""A run folder of a Hugging Face training: its report, ranking and settings, with the texts in words.

write_run(trainer, "runs/sums", files=names)  # after trainer.train(); then `soseleto report` and `soseleto rank`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soseleto.defaults import to_data
from soseleto.errors import UsageError
from soseleto.integrations.batches import INDEX
from soseleto.report.html import write_report
from soseleto.run_folder.folder import REPORT, SOURCE, RunFolder

SECONDS = "train_runtime"  # of the Trainer's log


def write_run(
    trainer: Any, out: str | Path, *, texts: Sequence[str] | None = None, files: Sequence[str] | None = None
) -> Path:
    """Write what a training with source weights found to the folder ``out``; returns the path of the report.

    Of several processes the first writes.

    Args:
        trainer: a ``SoseletoTrainer`` that has trained.
        out: a new folder.
        texts: the examples of ``train_dataset`` in words; by default their tokens, decoded by the trainer's tokenizer.
        files: where each example came from, by which weights are summed up.
    """
    selection, dataset = trainer.selection, trainer.train_dataset
    n, decode = len(selection.weights), getattr(trainer.processing_class, "decode", None)
    ids = _tokens(dataset, n)
    if texts is None and decode is not None:
        texts = [decode(tokens, skip_special_tokens=True) for tokens in ids]
    for name, words in (("texts", texts), ("files", files)):
        if words is not None and len(words) != n:
            raise UsageError(f"{name} has {len(words)} entries for {n} examples: give one for each.")
    if not trainer.is_world_process_zero():
        return Path(out) / REPORT
    history = trainer.state.log_history
    folder = RunFolder.create(out)
    folder.write_config(
        {
            "mode": "transfer",  # weights are about the target, not about wrong labels
            "method": selection.settings.method.name,
            "settings": to_data(selection.settings.method),
            "alignments": selection.coverage.sentence(),
            "device": str(trainer.args.device),
            "trainer": trainer.args.to_sanitized_dict(),
        }
    )
    target = trainer.target_dataset
    n_target = sum(map(len, target.values())) if isinstance(target, Mapping) else len(target)
    folder.log({"event": "start", "n_source": n, "n_target": n_target})
    for record in history:
        if "loss" in record:
            kept = {name: record[name] for name in ("epoch", "target_loss", "mean_weight") if name in record}
            folder.log({"event": "epoch", "source_loss": record["loss"], **kept})
    order = torch.argsort(selection.scores, descending=True, stable=True)
    columns: dict[str, Any] = {
        "id": [str(i) for i in order.tolist()],
        "label": ["" if files is None else str(files[i]) for i in order.tolist()],
        "weight": selection.weights[order],
        "score": selection.scores[order],
        "visits": selection.visits[order],
        "tokens": [len(ids[i]) for i in order.tolist()],
    }
    if texts is not None:
        columns["x0"] = [texts[i] for i in order.tolist()]
        folder.write_json(SOURCE, {"features": ["text"]})
    folder.write_ranking(columns)
    seconds = [record[SECONDS] for record in history if SECONDS in record]
    folder.end({"event": "end", "seconds": seconds[-1] if seconds else None})
    return write_report(folder.path)


def _tokens(dataset: Any, n: int) -> list[Any]:
    """The tokens of each example; TRL's rows may be fewer, in another order, and hold several texts."""
    tokens: list[Any] = [np.empty(0, np.int64)] * n
    for i in range(len(dataset)):
        row = dataset[i]
        if "input_ids" not in row:
            raise UsageError(f"write_run is for texts, but rows of train_dataset have {', '.join(row)}, no input_ids.")
        ids = np.asarray(row["input_ids"])
        places = np.broadcast_to(row.get(INDEX, i), ids.shape)
        for place in np.unique(places).tolist():
            tokens[place] = ids[places == place]
    return tokens
