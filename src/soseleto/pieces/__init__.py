"""What this package adds to the paper's algorithm: pieces for the arguments of ``Soseleto``.

| argument | pieces |
|---|---|
| ``direction`` | ``last_batch`` (paper), ``running_mean``, ``preconditioned`` |
| ``alignment`` | ``from_features``, ``last_layer``, ``per_error``, ``scale_by_rms``, ``hold_when_vanished``, ... |
| ``source_loss`` | ``mean`` (paper), ``normalized``, ``label_doubt`` |
| ``gradients`` | ``target_share``, several with ``chain`` |
| ``scores`` | ``pooled_by_class`` after pieces of ``alignment``, or ``last_layer`` |
| ``last_layer(...)`` | ``centred``, ``whitened``, ``unit_length``, ``at_temperature``, ``without_own_error`` |

``Piece`` is the base of a piece of your own.
"""

from soseleto.pieces.alignment import beyond_noise, hold_when_vanished, per_error, pooled_by_class, scale_by_rms
from soseleto.pieces.direction import last_batch, preconditioned, running_mean
from soseleto.pieces.features import from_features
from soseleto.pieces.last_layer import at_temperature, centred, last_layer, unit_length, whitened, without_own_error
from soseleto.pieces.piece import Piece, chain
from soseleto.pieces.source_loss import label_doubt, mean, normalized, target_share

__all__ = [
    "Piece",
    "at_temperature",
    "beyond_noise",
    "centred",
    "chain",
    "from_features",
    "hold_when_vanished",
    "label_doubt",
    "last_batch",
    "last_layer",
    "mean",
    "normalized",
    "per_error",
    "pooled_by_class",
    "preconditioned",
    "running_mean",
    "scale_by_rms",
    "target_share",
    "unit_length",
    "whitened",
    "without_own_error",
]
