"""Going through a run's suspects by hand: a page on this machine only, decisions that survive, a corrected manifest."""

from soseleto.review.decisions import Decision, Decisions, read_decisions
from soseleto.review.manifest import Exported, export_manifest
from soseleto.review.server import Review, serve

__all__ = ["Decision", "Decisions", "Exported", "Review", "export_manifest", "read_decisions", "serve"]
