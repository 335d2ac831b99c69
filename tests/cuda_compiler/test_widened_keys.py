"""Attention over float32 copies of 16-bit queries and keys reads these themselves, with the same result."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_phases import Phases, run_reference

from cuda_compiler.passes.widened_keys import read_unwidened_keys


def attention(*, dtype: str = "bfloat16", values: str = "bfloat16", changed: bool = False) -> Phases:
    """Attention of two heads to 30 keys, all of which are copied to float32 first.

    Args:
        changed: Whether another call writes the keys before attention reads their copy.
    """
    phases = Phases(dtype, np.random.default_rng(0))
    q, k, other = (phases.operand(name, 1, 2, rows, 16) for name, rows in (("q", 3), ("k", 30), ("other", 30)))
    v = phases.operand("v", 1, 2, 30, 16, dtype=values)
    wide = [phases.operand(f"{x.buffer}32", *x.shape, kind="arena", dtype="float32") for x in (q, k)]
    out = phases.operand("out", 1, 2, 3, 16, kind="output", dtype=values, values=np.full((1, 2, 3, 16), np.nan))
    for x, copy in zip((q, k), wide, strict=True):
        phases.call("copy_kernel", [x], [copy], scalars=[None])
    if changed:
        phases.call("copy_kernel", [other], [k], scalars=[None])
    params = {"scale": 0.25, "causal": 0, "soft_cap": 0.0, "has_mask": 0, "has_sinks": 0}
    phases.call("attention_kernel", [*wide, v], [out], **params)
    phases.expected["out"] = phases.data["out"]
    return phases


def test_the_copies_are_left_out_and_the_result_stays() -> None:
    phases = attention()
    before = run_reference(phases)["out"]
    phases.calls = read_unwidened_keys(phases.plan).calls
    (call,) = phases.calls
    assert [view.buffer for view in call.inputs] == ["q", "k", "v"]
    np.testing.assert_array_equal(run_reference(phases)["out"], before)


def test_a_copy_that_others_read_is_kept() -> None:
    phases = attention()
    copied = next(call.outputs[0] for call in phases.calls if call.inputs[0].buffer == "k")
    phases.call("copy_kernel", [copied], [phases.operand("read", *copied.shape, kind="output")], scalars=[None])
    kernels = [call.kernel for call in read_unwidened_keys(phases.plan).calls]
    assert kernels == ["copy_kernel", "attention_kernel", "copy_kernel"]


@pytest.mark.parametrize("options", [{"changed": True}, {"values": "float32"}, {"dtype": "float32"}], ids=str)
def test_keys_that_change_or_differ_from_the_values_are_left_alone(options: dict[str, bool | str]) -> None:
    plan = attention(**options).plan  # type: ignore[arg-type]
    assert read_unwidened_keys(plan).calls == plan.calls
