"""LSTM, GRU and RNN written with linear layers and elementwise functions, which the tape can follow.

PyTorch computes all layers, directions and times of ``nn.LSTM`` and its relatives in one function. These functions take
the same arguments and give the same results. Dropout between the layers draws from the same distribution but not the
same masks as the fused kernels, which have a random generator of their own on some devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines.layerwise.row_owners import Gathered, RowOwners, packed_rows

State = tuple[Tensor, ...]  # (h,) or (h, c)


@dataclass(frozen=True)
class _Weights:
    """The parameters of one layer and direction."""

    of_input: tuple[Tensor, Tensor | None]
    of_state: tuple[Tensor, Tensor | None]
    projection: Tensor | None = None


# from x·W_ih + b_ih at one time, the state before it, and the weights, the state after it
Cell = Callable[[Tensor, State, _Weights], State]


def _lstm_cell(x: Tensor, state: State, weights: _Weights) -> State:
    h, c = state
    i, f, g, o = (x + F.linear(h, *weights.of_state)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h if weights.projection is None else F.linear(h, weights.projection), c


def _gru_cell(x: Tensor, state: State, weights: _Weights) -> State:
    (h,) = state
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, *weights.of_state).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return (n + z * (h - n),)


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, state, weights: (activation(x + F.linear(state[0], *weights.of_state)),)


LAYERS: dict[Any, Cell] = {
    torch.lstm: _lstm_cell,
    torch.gru: _gru_cell,
    torch.rnn_tanh: _plain_cell(torch.tanh),
    torch.rnn_relu: _plain_cell(torch.relu),
}
CELLS: dict[Any, Cell] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _plain_cell(torch.tanh),
    torch.rnn_relu_cell: _plain_cell(torch.relu),
}


def one_time(cell: Cell, x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    """``torch.lstm_cell`` and its relatives."""
    weights = _Weights((w_ih, b_ih), (w_hh, b_hh))
    found = cell(F.linear(x, *weights.of_input), (state,) if isinstance(state, Tensor) else tuple(state), weights)
    return found[0] if isinstance(state, Tensor) else found


def all_times(cell: Cell, owners: RowOwners, *args: Any) -> tuple[Tensor, ...]:
    """``torch.lstm`` and its relatives, for padded sequences or for the data of a PackedSequence."""
    if isinstance(args[3], (list, tuple)):
        data, batch_sizes, state, parameters, *settings = args
        times: _Times = _Packed(owners, data, batch_sizes)
        batch_first = True
    else:
        data, state, parameters, *settings, batch_first = args
        times = _Padded()
        data = data if batch_first else data.transpose(0, 1)
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    out, ends = _layers(cell, times, data, states, parameters, *settings)
    return out if batch_first else out.transpose(0, 1), *ends


def _layers(
    cell: Cell,
    times: _Times,
    x: Tensor,
    states: State,
    parameters: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, State]:
    """The outputs of the last layer, and the states of every layer and direction at the end."""
    weights = _by_layer(parameters, has_biases, layers * (1 + bidirectional))
    ends, number = [], 0
    for layer in range(layers):
        outputs = []
        for reverse in (False, True)[: 1 + bidirectional]:
            one = next(weights)
            start = tuple(s[number] for s in states)
            out, end = times.run(cell, F.linear(x, *one.of_input), start, one, reverse=reverse)
            outputs.append(out)
            ends.append(end)
            number += 1
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and layer + 1 < layers:
            x = F.dropout(x, dropout, training)
    return x, tuple(times.stack(each) for each in zip(*ends, strict=True))


def _by_layer(parameters: Sequence[Tensor], has_biases: bool, count: int) -> Iterator[_Weights]:
    """PyTorch's flat list: W_ih, W_hh, then b_ih, b_hh if there are biases, then W_hr if there is a projection."""
    each = len(parameters) // count
    for i in range(0, len(parameters), each):
        w_ih, w_hh, *more = parameters[i : i + each]
        b_ih, b_hh = more[:2] if has_biases else (None, None)
        projection = more[2 * has_biases :]
        yield _Weights((w_ih, b_ih), (w_hh, b_hh), projection[0] if projection else None)


class _Times:
    """The times of a batch of sequences."""

    def run(self, cell: Cell, x: Tensor, start: State, weights: _Weights, *, reverse: bool) -> tuple[Tensor, State]:
        """Outputs at all times, and the state at the end."""
        raise NotImplementedError

    def stack(self, ends: State) -> Tensor:
        return torch.stack(ends)


class _Padded(_Times):
    """x is (B, L, ...); all sequences have the same length."""

    def run(self, cell: Cell, x: Tensor, start: State, weights: _Weights, *, reverse: bool) -> tuple[Tensor, State]:
        steps, state, outputs = list(x.unbind(1)), start, []
        for step in reversed(steps) if reverse else steps:
            state = cell(step, state, weights)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs, 1), state


class _Packed(_Times):
    """x is (N, ...): the rows of all sequences at time 0, then at time 1, and so on; the longest sequence is first."""

    def __init__(self, owners: RowOwners, data: Tensor, batch_sizes: Tensor) -> None:
        self.owners, self.sizes = owners, batch_sizes.tolist()
        self.rows = owners.of(data) or Gathered(self.sizes[0], packed_rows(batch_sizes).to(data.device))
        owners.keep(data, self.rows)

    def run(self, cell: Cell, x: Tensor, start: State, weights: _Weights, *, reverse: bool) -> tuple[Tensor, State]:
        steps, state = list(x.split(self.sizes)), tuple(s[: self.sizes[-1 if reverse else 0]] for s in start)
        outputs: list[Tensor] = []
        ended: list[State] = []  # the last states of sequences that ended, longest last
        for step in reversed(steps) if reverse else steps:
            more = len(step) - len(state[0])
            if more > 0:
                state = tuple(torch.cat([s, first[len(s) : len(step)]]) for s, first in zip(state, start, strict=True))
            elif more < 0:
                ended.append(tuple(s[len(step) :] for s in state))
                state = tuple(s[: len(step)] for s in state)
            self._own(state)
            state = cell(step, state, weights)
            outputs.append(state[0])
        ends = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
        return torch.cat(outputs[::-1] if reverse else outputs), ends

    def _own(self, state: State) -> None:
        for s in state:
            self.owners.keep(s, self.rows.narrow(0, len(s)))

    def stack(self, ends: State) -> Tensor:
        found = torch.stack(ends)
        self.owners.keep(found, self.rows.narrow(0, self.sizes[0], 1))
        return found
