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

from soseleto.extensions.beyond_noise import beyond_noise
from soseleto.extensions.chain import chain
from soseleto.extensions.class_pooling import pooled_by_class
from soseleto.extensions.clip_norm import clip_norm
from soseleto.extensions.domain_loss import Coral, domain_loss
from soseleto.extensions.hold_when_vanished import hold_when_vanished
from soseleto.extensions.inputs import centred, unit_length, whitened
from soseleto.extensions.label_doubt import label_doubt
from soseleto.extensions.last_layer import last_layer
from soseleto.extensions.per_error import per_error
from soseleto.extensions.preconditioned import preconditioned
from soseleto.extensions.residuals import at_temperature, without_own_error
from soseleto.extensions.scale_free import scale_by_rms
from soseleto.extensions.source_loss import mean, normalized
from soseleto.extensions.target_average import last_batch, running_mean
from soseleto.extensions.target_share import target_share
from soseleto.extensions.visits import recent_visits, shrunk_by_spread
from soseleto.extensions.whitened_layers import whitened_layers
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
