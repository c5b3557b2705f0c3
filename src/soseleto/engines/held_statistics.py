"""Alignments with BatchNorm's statistics held fixed: another quantity than the exact alignments, on request only.

A BatchNorm in training mode computes y = γ(x − μ)/σ + β, with μ and σ of the batch. Here μ and σ are constants, with
the values that the batch has at this step's θ:

    q̃_j = Σ_p ⟨∂ℓ̃_j/∂p, direction[p]⟩,     ℓ̃_j(θ) = ℓ_j(θ; μ, σ fixed),     ℓ̃_j = ℓ_j at this θ.

An example's loss then depends on no other example, and the layerwise engine computes q̃ for one forward's work F where
the exact q takes 2F. Losses and running statistics are those of ordinary training: only derivatives differ. The
direction is the true target gradient, through the statistics of the target batch, from a pass of its own.

The source gradient Σ_j c_j ∂ℓ_j/∂p is either the true one, through the statistics, by a second backward of the same
graph, or the held one, Σ_j c_j ∂ℓ̃_j/∂p, from the same backward as the alignments. By counted work a step is then
(5B+3T)/(3B) or (4B+3T)/(3B) ordinary steps; the exact alignments take (5B+3T)/(3B).
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import Tensor, nn

from soseleto.engines.autograd import gradient, target_first
from soseleto.engines.contract import Passes, SourcePass, SourceStep, Step, trainable
from soseleto.engines.held_batch_norm import Holding, Switch
from soseleto.engines.layerwise.engine import LayerwiseEngine
from soseleto.engines.layerwise.sweep import alignments
from soseleto.engines.layerwise.tape import Tape

MESSAGE = "alignments with BatchNorm's statistics held fixed, another quantity than the exact alignments"


class HeldStatisticsEngine(LayerwiseEngine):
    """The engine; it is proved against ordinary autograd of the held losses ℓ̃.

    true_gradient: whether the source gradient is the true one, at the price of a second backward pass.
    """

    def __init__(self, name: str, *, true_gradient: bool) -> None:
        super().__init__()
        self.name = name
        self.messages = [MESSAGE if true_gradient else f"{MESSAGE}; the source gradient holds them too"]
        self._true_gradient = true_gradient

    def passes(self, step: Step) -> Passes:
        """The target first, in a pass of its own: source and target have statistics of their own."""
        return target_first(step, self.source_pass)

    def source_pass(self, step: SourceStep) -> SourcePass:
        return self._with_true_gradient(step) if self._true_gradient else super().source_pass(step)

    def _with_true_gradient(self, step: SourceStep) -> SourcePass:
        switch = Switch()
        tape, losses = self._held(step.model, lambda: step.loss(step.model, step.batch), switch)
        alignment = alignments(tape, losses, step.direction, retain_graph=True)
        c = step.coefficients(alignment) if callable(step.coefficients) else step.coefficients
        switch.is_held = False
        return SourcePass(losses.detach(), alignment, gradient(losses, trainable(step.model), c.to(losses.dtype)))

    def _forward(self, model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tape, Tensor]:
        return self._held(model, run, Switch())

    def _held(self, model: nn.Module, run: Callable[[], Tensor], switch: Switch) -> tuple[Tape, Tensor]:
        def held() -> Tensor:
            with Holding(switch):
                return run()

        tape, losses = super()._forward(model, held)
        reference = ref(tape)
        switch.of_tape = lambda: (found := reference()) is not None and found.in_backward
        return tape, losses
