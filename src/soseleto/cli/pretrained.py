"""The options of ``soseleto fit`` for pretrained image networks."""

from __future__ import annotations

from soseleto.cli.fit_options import FitOptions
from soseleto.data import Pair
from soseleto.data.text import TextPreparation
from soseleto.errors import UsageError
from soseleto.models.pretrained_images import PretrainedOptions, is_pretrained


def pretrained_options(options: FitOptions, model: str, pair: Pair) -> PretrainedOptions | None:
    """What is asked of a pretrained network for images; None for another model, where these options have no effect."""
    names = ("weights", "train", "lora", "batch_norm")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if is_pretrained(model) and not isinstance(pair.preparation, TextPreparation):
        size = options.reading.image_size
        return PretrainedOptions(**given, size=size if isinstance(size, int) else None)
    if given:
        option = next(iter(given)).replace("_", "-")
        if is_pretrained(model):
            raise UsageError(f"--{option} is for networks that read images, and {model} reads texts: leave it out.")
        raise UsageError(f"--{option} has no effect on the model {model!r}: add --model timm:NAME or hf:FOLDER_OR_ID.")
    return None
