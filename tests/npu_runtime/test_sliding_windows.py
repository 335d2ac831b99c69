"""Sums over the taps of sliding windows, drawn by Hypothesis: `fold` and transposed convolutions of volumes."""

from __future__ import annotations

from typing import Any

import operator_database as database
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn


class Fold(nn.Module):
    """PyTorch's `fold` with settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.fold(x, **self.settings)


@st.composite
def axes(draw: Any, count: int) -> dict[str, list[int]]:
    """Settings of the axes that a window slides along, and the number of its places and of outputs along each."""
    settings: dict[str, list[int]] = {}
    for _ in range(count):
        taps, stride, dilation = (draw(st.integers(1, most)) for most in (4, 4, 3))
        places, padding, beyond = draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.integers(0, stride - 1))
        covered = (places - 1) * stride + dilation * (taps - 1) + 1
        padding = min(padding, (covered - 1) // 2)
        axis = {"kernel_size": taps, "stride": stride, "dilation": dilation, "padding": padding, "places": places}
        for name, value in {**axis, "output_size": covered - 2 * padding + beyond}.items():
            settings.setdefault(name, []).append(value)
    return settings


@given(axes(2), st.integers(1, 2), st.integers(1, 3))
def test_fold_adds_up_what_windows_hold(settings: dict[str, list[int]], batch: int, channels: int) -> None:
    places, window = settings.pop("places"), settings["kernel_size"]
    x = torch.randn(batch, channels * window[0] * window[1], places[0] * places[1])
    outcome = database.run_module(Fold(**settings).eval(), (x,), "compile")
    assert outcome is not None and outcome.kind == database.RIGHT, outcome


@given(axes(3), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_transposed_convolutions_of_volumes(
    settings: dict[str, list[int]], batch: int, groups: int, has_bias: bool
) -> None:
    places, _ = settings.pop("places"), settings.pop("output_size")
    module = nn.ConvTranspose3d(2 * groups, 3 * groups, groups=groups, bias=has_bias, **settings)  # type: ignore[arg-type]
    x = torch.randn(batch, 2 * groups, *places)
    outcome = database.run_module(module.eval(), (x,), "compile")
    assert outcome is not None and outcome.kind == database.RIGHT, outcome
