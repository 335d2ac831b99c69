"""Recurrent layers: all cells, both directions, without biases, odd sizes, sequences along the second dimension."""

from __future__ import annotations

from typing import Any

from metal_harness import Case, T

from npu_compiler.ops.recurrent import GATES, present


def recurrent(
    cell: str,
    steps: int,
    rows: int,
    inputs: int,
    hidden: int,
    *,
    both: bool = False,
    biased: bool = True,
    batch_first: bool = False,
    states: str = "compute",
) -> Case:
    """A layer whose weights are small enough that hidden states do not saturate."""
    gates, directions = GATES[cell] * hidden, 1 + both
    scale = 1.5 / (inputs + hidden) ** 0.5

    def weight(*shape: int) -> T:
        return T(shape, values=(-scale, scale))

    def sequence(width: int) -> T:
        strides = (width, steps * width, 1) if batch_first else None
        return T((steps, rows, width), strides=strides)

    own = [weight(gates, inputs), weight(gates, hidden)]
    own += [weight(gates), weight(gates)] if biased else []
    state = T((directions, rows, hidden), states)
    kept = [state, state] if cell == "lstm" else [state]
    params: dict[str, Any] = present(biased=biased, backward=both)
    params |= {} if cell == "lstm" else {"cell": cell}
    name = f"{cell}-{steps}x{rows}x{inputs}x{hidden}" + "-both" * both + "-unbiased" * (not biased)
    name += "-batch-first" * batch_first + f"-{states}" * (states != "compute")
    return Case(
        "lstm_kernel" if cell == "lstm" else "rnn_kernel",
        name,
        [sequence(inputs), *kept, *(own * directions)],
        [sequence(directions * hidden), *kept],
        params,
        atol=1e-2,
    )


CASES = [
    recurrent("lstm", 1, 1, 1, 1),
    recurrent("lstm", 5, 3, 6, 8, both=True),
    recurrent("lstm", 4, 2, 5, 7, both=True, biased=False, batch_first=True),
    recurrent("lstm", 3, 9, 16, 40, states="float32"),
    recurrent("gru", 5, 3, 6, 8, both=True),
    recurrent("gru", 4, 10, 5, 33, biased=False, batch_first=True),
    recurrent("gru", 3, 2, 16, 72, both=True, states="float32"),
    recurrent("tanh", 4, 3, 6, 24, both=True),
    recurrent("relu", 4, 9, 7, 17),
]
