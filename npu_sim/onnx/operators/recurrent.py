"""Converters of recurrent layers, unrolled over a static number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npu_sim.onnx.rows import Call, Refusal, converts, numbered

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
_State = tuple[Tensor, ...]


class _Direction:
    """One direction of a recurrent layer: its weights, initial states and activations."""

    def __init__(self, call: Call, index: int, gates: int, tensors: dict[str, Tensor | None]) -> None:
        self.call = call
        self.parts = {name: None if x is None else x[index] for name, x in tensors.items()}
        defaults = {1: ["Tanh"], 3: ["Sigmoid", "Tanh"], 4: ["Sigmoid", "Tanh", "Tanh"]}[gates]
        names = call.attr("activations", [])[index * len(defaults) : (index + 1) * len(defaults)] or defaults
        unknown = [name for name in names if name.lower() not in _ACTIVATIONS]
        if unknown:
            raise Refusal(f"has the activation {unknown[0]}; known are Relu, Sigmoid and Tanh")
        self.activations = [_ACTIVATIONS[name.lower()] for name in names]
        hidden = self.weight("R").shape[-1]
        bias = self.parts["B"]
        zeros = self.weight("R").new_zeros(gates * hidden)
        self.w_bias: Tensor
        self.r_bias: Tensor
        self.w_bias, self.r_bias = (zeros, zeros) if bias is None else bias.split(gates * hidden)

    def weight(self, name: str) -> Tensor:
        """Return a weight that the node must have."""
        value = self.parts[name]
        assert value is not None
        return value

    def bounded(self, x: Tensor) -> Tensor:
        """Clamp the input of an activation to the limit of the attribute `clip`, if that is given."""
        limit = self.call.attr("clip", 0.0)
        return torch.clamp(x, -limit, limit) if limit else x


def _rnn_step(direction: _Direction, x: Tensor, state: _State) -> _State:
    total = x @ direction.weight("W").T + state[0] @ direction.weight("R").T + direction.w_bias + direction.r_bias
    return (direction.activations[0](direction.bounded(total)),)


def _gru_step(direction: _Direction, x: Tensor, state: _State) -> _State:
    (hidden,) = state
    f, g = direction.activations
    wz, wr, wh = (x @ direction.weight("W").T + direction.w_bias).chunk(3, -1)
    rz, rr, rh = (hidden @ direction.weight("R").T).chunk(3, -1)
    bz, br, bh = direction.r_bias.chunk(3)
    update, reset = f(direction.bounded(wz + rz + bz)), f(direction.bounded(wr + rr + br))
    if direction.call.attr("linear_before_reset", 0):
        candidate = g(direction.bounded(wh + reset * (rh + bh)))
    else:
        last = direction.weight("R").chunk(3, 0)[2]
        candidate = g(direction.bounded(wh + (reset * hidden) @ last.T + bh))
    return ((1 - update) * candidate + update * hidden,)


def _lstm_step(direction: _Direction, x: Tensor, state: _State) -> _State:
    hidden, cell = state
    f, g, h = direction.activations
    total = x @ direction.weight("W").T + hidden @ direction.weight("R").T + direction.w_bias + direction.r_bias
    i, o, forget, c = total.chunk(4, -1)
    peepholes = direction.parts["P"]
    pi, po, pf = (None, None, None) if peepholes is None else peepholes.chunk(3)
    enter = f(direction.bounded(i if pi is None else i + pi * cell))
    keep = 1 - enter if direction.call.attr("input_forget", 0) else f(direction.bounded(_peeped(forget, pf, cell)))
    cell = keep * cell + enter * g(direction.bounded(c))
    leave = f(direction.bounded(_peeped(o, po, cell)))
    return leave * h(cell), cell


def _peeped(gate: Tensor, peephole: Tensor | None, cell: Tensor) -> Tensor:
    return gate if peephole is None else gate + peephole * cell


_KINDS: dict[str, tuple[int, int, Any]] = {
    "RNN": (1, 1, _rnn_step),
    "GRU": (3, 1, _gru_step),
    "LSTM": (4, 2, _lstm_step),
}  # gates, states, step


@converts("RNN", "GRU", "LSTM")
def _recurrent(
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *rest: Tensor | None,
) -> tuple[Tensor, ...]:
    gates, states, step = _KINDS[call.op]
    initial = [*rest, None, None, None]
    by_batch = call.attr("layout", 0)
    x = x.transpose(0, 1) if by_batch else x
    batch, hidden = x.shape[1], r.shape[-1]
    way = call.attr("direction", "forward")
    outputs, lasts = [], []
    for index in range(w.shape[0]):
        tensors = {"W": w, "R": r, "B": bias, "P": initial[2] if call.op == "LSTM" else None}
        direction = _Direction(call, index, gates, tensors)
        first = [_initial(initial[s], index, by_batch, x, (batch, hidden)) for s in range(states)]
        backwards = way == "reverse" or index == 1
        ys, last = _unrolled(direction, step, x, tuple(first), lengths, backwards)
        outputs.append(ys)
        lasts.append(last)
    y = torch.stack(outputs, 1)
    finals = [torch.stack([last[s] for last in lasts]) for s in range(states)]
    if by_batch:
        y, finals = y.permute(2, 0, 1, 3), [final.transpose(0, 1) for final in finals]
    return (y, *finals)


def _initial(state: Tensor | None, index: int, by_batch: int, x: Tensor, shape: tuple[int, int]) -> Tensor:
    if state is None:
        return x.new_zeros(shape)
    return state[:, index] if by_batch else state[index]


def _unrolled(
    direction: _Direction,
    step: Callable[[_Direction, Tensor, _State], _State],
    x: Tensor,
    state: _State,
    lengths: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, _State]:
    """Return the outputs of all steps and the last states.

    After the end of its sequence, a row of the batch keeps its state, and its outputs are 0.

    Args:
        lengths: Length of each row's sequence. None: all have the full length.
    """
    outputs: list[Tensor] = []
    steps = numbered(x.shape[0], "steps")
    for place in reversed(steps) if backwards else steps:
        after = step(direction, x[place], state)
        shown = after[0]
        if lengths is not None:
            runs = (place < lengths)[:, None]
            after = tuple(torch.where(runs, new, old) for new, old in zip(after, state, strict=True))
            shown = torch.where(runs, shown, torch.zeros_like(shown))
        outputs.append(shown)
        state = after
    return torch.stack(outputs[::-1] if backwards else outputs), state
