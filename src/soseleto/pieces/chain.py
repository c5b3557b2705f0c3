"""Several pieces one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soseleto.errors import UsageError
from soseleto.task.piece import Piece, Step
from soseleto.task.task import Task


@dataclass(frozen=True, init=False)
class chain(Piece):
    """Apply pieces in order; ``chain()`` changes nothing. Pieces for ``alignment`` may precede one for ``scores``.

    Example:
        >>> from soseleto.pieces import chain, per_error, scale_by_rms
        >>> chain(per_error(), scale_by_rms())
        chain(per_error(), scale_by_rms())
    """

    pieces: tuple[Piece, ...]

    def __init__(self, *pieces: Piece) -> None:
        flat: list[Piece] = []
        for piece in pieces:
            flat.extend(piece.pieces if isinstance(piece, chain) else [piece])
        object.__setattr__(self, "pieces", tuple(flat))
        slots = {piece.slot for piece in flat}
        if len(slots) > 1 and [piece.slot for piece in flat] != ["alignment"] * (len(flat) - 1) + ["scores"]:
            raise UsageError(f"these pieces belong to different arguments ({', '.join(sorted(slots))}): {self}.")

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.pieces))})"

    @property
    def slot(self) -> str:  # type: ignore[override]
        return self.pieces[-1].slot if self.pieces else ""

    @property
    def needs_losses(self) -> bool:  # type: ignore[override]
        return any(piece.needs_losses for piece in self.pieces)

    @property
    def needs_target(self) -> bool:  # type: ignore[override]
        return any(piece.needs_target for piece in self.pieces)

    @property
    def replaces_engine(self) -> bool:  # type: ignore[override]
        return any(piece.replaces_engine for piece in self.pieces)

    @property
    def watched(self) -> frozenset[str | None]:  # type: ignore[override]
        return frozenset[str | None]().union(*(piece.watched for piece in self.pieces))

    @property
    def shares_work(self) -> bool:  # type: ignore[override]
        return all(piece.shares_work for piece in self.pieces)

    def init(self, task: Task) -> Any:
        return [piece.init(task) for piece in self.pieces]

    def observe(self, state: Any, step: Step) -> None:
        for piece, its in zip(self.pieces, state, strict=True):
            piece.observe(its, step)

    def update(self, value: Any, state: Any, step: Step) -> Any:
        for piece, its in zip(self.pieces, state, strict=True):
            value = piece.update(value, its, step)
        return value

    def refresh(self, state: Any) -> None:
        for piece, its in zip(self.pieces, state, strict=True):
            piece.refresh(its)
