"""ProMix: two networks that select clean examples for each other, class by class, and train the others debiased."""

from experiments.methods.promix.method import ProMix

__all__ = ["ProMix"]
