"""What an optimizer keeps about each parameter, by the parameter's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer


class ParameterState(NamedTuple):
    """A parameter, what the optimizer keeps about it (nothing before its first step), and its group's settings."""

    parameter: nn.Parameter
    state: Mapping[str, Any]
    group: Mapping[str, Any]


class ParameterStates:
    """Reads an optimizer's state, which stays the optimizer's own: it is neither copied nor changed."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self._model = optimizer, model
        self._groups = 0  # that the places are from
        self._places: dict[str, tuple[nn.Parameter, int]] = {}

    def of(self, name: str) -> ParameterState | None:
        """None for a parameter that the optimizer does not step."""
        if len(self.optimizer.param_groups) != self._groups:
            self._find()
        if name not in self._places:
            return None
        parameter, group = self._places[name]
        return ParameterState(parameter, self.optimizer.state.get(parameter, {}), self.optimizer.param_groups[group])

    def _find(self) -> None:
        groups = self.optimizer.param_groups
        of_group = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        named = self._model.named_parameters()
        self._places = {name: (p, of_group[id(p)]) for name, p in named if id(p) in of_group}
        self._groups = len(groups)
