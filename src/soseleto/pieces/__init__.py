"""What this package adds to the paper's algorithm, one idea a file: pieces for the arguments of ``Soseleto``.

| argument | pieces |
|---|---|
| ``direction`` | ``last_batch`` (paper), ``running_mean``, ``whitened_layers``, ``preconditioned`` |
| ``alignment`` | ``last_layer``, ``per_error``, ``scale_by_rms``, ``hold_when_vanished``, ``beyond_noise``, ``chain`` |
| ``source_loss`` | ``mean`` (paper), ``normalized``, ``label_doubt`` |
| ``gradients`` | ``target_share``, ``domain_loss``, ``clip_norm``, several with ``chain`` |
| ``scores`` | ``pooled_by_class``, ``recent_visits``, ``shrunk_by_spread``, after pieces of ``alignment`` |
| ``last_layer(...)`` | ``centred``, ``whitened``, ``unit_length``, ``at_temperature``, ``without_own_error`` |

``Piece`` is the base of a piece of your own.
"""

from soseleto.pieces.beyond_noise import beyond_noise
from soseleto.pieces.chain import chain
from soseleto.pieces.class_pooling import pooled_by_class
from soseleto.pieces.clip_norm import clip_norm
from soseleto.pieces.domain_loss import Coral, domain_loss
from soseleto.pieces.hold_when_vanished import hold_when_vanished
from soseleto.pieces.inputs import centred, unit_length, whitened
from soseleto.pieces.label_doubt import label_doubt
from soseleto.pieces.last_layer import last_layer
from soseleto.pieces.per_error import per_error
from soseleto.pieces.preconditioned import preconditioned
from soseleto.pieces.residuals import at_temperature, without_own_error
from soseleto.pieces.scale_free import scale_by_rms
from soseleto.pieces.source_loss import mean, normalized
from soseleto.pieces.target_average import last_batch, running_mean
from soseleto.pieces.target_share import target_share
from soseleto.pieces.visits import recent_visits, shrunk_by_spread
from soseleto.pieces.whitened_layers import whitened_layers
from soseleto.task.piece import Piece

__all__ = [
    "Coral",
    "Piece",
    "at_temperature",
    "beyond_noise",
    "centred",
    "chain",
    "clip_norm",
    "domain_loss",
    "hold_when_vanished",
    "label_doubt",
    "last_batch",
    "last_layer",
    "mean",
    "normalized",
    "per_error",
    "pooled_by_class",
    "preconditioned",
    "recent_visits",
    "running_mean",
    "scale_by_rms",
    "shrunk_by_spread",
    "target_share",
    "unit_length",
    "whitened",
    "whitened_layers",
    "without_own_error",
]
