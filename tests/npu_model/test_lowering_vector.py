"""Kernels of the vector and DMA engines on simulated chips, against the CPU device's NumPy kernels."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tile_calls import CHIPS, assert_same, run_on_chip, run_on_cpu, tensor

from npu_compiler.errors import ConstraintError
from npu_compiler.program.elementwise import ELEMENTWISE, elementwise_kernel_name
from npu_model.lowering.elementwise import need_functions
from npu_model.lowering.families import CannotLower

both_chips = pytest.mark.parametrize("chip", list(CHIPS))
FLOATS = ("float32", "float16", "bfloat16")


def generator(*names: object) -> np.random.Generator:
    """Random numbers of their own for each test."""
    return np.random.default_rng([int(os.environ["TEST_SEED"]), zlib.crc32(repr(names).encode())])


def some_shape(rng: np.random.Generator, most: int = 600, rank: int = 5) -> tuple[int, ...]:
    """A shape of up to `rank` dimensions and about `most` elements."""
    shape = [int(rng.choice([1, 2, 3, 5, 7, 8, 17, 33])) for _ in range(int(rng.integers(0, rank + 1)))]
    while shape and np.prod(shape) > most:
        shape.pop(int(rng.integers(len(shape))))
    return tuple(shape)


def computable(op: Any, chip: str) -> bool:
    try:
        need_functions(CHIPS[chip], op, True)
    except CannotLower:
        return False
    return True


# Element-wise


def _draw_elementwise(rng: np.random.Generator, name: str) -> tuple[str, list[Any], list[Any], dict[str, Any]]:
    op = ELEMENTWISE[name]
    shape = some_shape(rng)
    dtypes = [*FLOATS, "int32", "bool", *(("int8", "uint8") if op.bytes else ())]
    same = str(rng.choice(dtypes))
    is_strided = bool(rng.integers(2))
    inputs: list[Any] = []
    scalars: list[Any] = []
    for position in range(len(op.operands)):
        if position and rng.random() < 0.3:
            scalars.append([2, 0.5, True, -3][int(rng.integers(4))])
            continue
        scalars.append(None)
        dtype = same if rng.random() < 0.7 else str(rng.choice(dtypes))
        own = tensor(rng, f"in{position}", shape, dtype, packed=0 if is_strided else None, repeats=is_strided)
        inputs.append(own)
    over_floats = op.integer is None or any(isinstance(x, float) for x in scalars)
    over_floats |= any(own.view.dtype in FLOATS for own in inputs)
    out_dtype = str(rng.choice([*FLOATS, "bool"] if over_floats and name != "copy" else ["int32", "bool", "float32"]))
    out = tensor(rng, "out", shape, out_dtype, packed=0 if is_strided else None)
    has_scalars = any(x is not None for x in scalars)
    kernel = elementwise_kernel_name(name, has_scalars=has_scalars, is_strided=is_strided)
    return kernel, inputs, [out], {"scalars": scalars, **op.attrs}


@both_chips
def test_elementwise_ops_are_those_of_the_cpu(chip: str) -> None:
    rng = generator("elementwise", chip)
    for name in ELEMENTWISE:
        if computable(ELEMENTWISE[name], chip):
            kernel, inputs, outputs, params = _draw_elementwise(rng, name)
            assert_same(chip, kernel, inputs, outputs, params, exact=True)


@both_chips
@pytest.mark.parametrize("shape", [(), (1,), (7000,), (50, 3, 31), (0, 4)])
def test_elementwise_operands_of_any_size_are_computed_in_tiles(chip: str, shape: tuple[int, ...]) -> None:
    rng = generator("tiles", chip, shape)
    inputs = [tensor(rng, name, shape, "float16", packed=0, repeats=True) for name in ("a", "b", "c")]
    outputs = [tensor(rng, "out", shape, "float16", packed=0)]
    assert_same(chip, "where_broadcast_kernel", inputs, outputs, {"scalars": [None] * 3}, exact=True)
    cast = {"scalars": [None]}
    assert_same(chip, "copy_broadcast_kernel", inputs[:1], [tensor(rng, "out", shape, "int32")], cast)
    assert_same(chip, "copy_broadcast_kernel", inputs[:1], outputs, cast, exact=True)


@both_chips
def test_an_operation_without_tensors_fills_its_result(chip: str) -> None:
    rng = generator("scalars", chip)
    for name, scalars, dtype in (
        ("copy", [2.5], "float16"),
        ("copy", [-7], "int32"),
        ("add", [2, 3.5], "float32"),
        ("add", [2, 3], "int32"),
        ("exp", [1], "float32"),
    ):
        kernel = elementwise_kernel_name(name, has_scalars=True, is_strided=False)
        out = tensor(rng, "out", (3, 70), dtype)
        assert_same(chip, kernel, [], [out], {"scalars": scalars, **ELEMENTWISE[name].attrs}, exact=True)


def test_a_function_that_the_vector_engine_lacks_is_refused_by_name() -> None:
    rng = generator("refused")
    x, out = tensor(rng, "x", (4,), "float32"), tensor(rng, "out", (4,), "float32")
    with pytest.raises(ConstraintError, match=r"its vector engine does not compute log_gamma\(\) of 'lgamma'"):
        run_on_chip(CHIPS["edge"], "lgamma_kernel", [x], [out], {"scalars": [None]})
    able = replace(CHIPS["edge"], vector=replace(CHIPS["edge"].vector, functions=("log_gamma",)))
    run_on_chip(able, "lgamma_kernel", [x], [out], {"scalars": [None]})
    expected = out.like()
    run_on_cpu("lgamma_kernel", [x], [expected], {"scalars": [None]})
    np.testing.assert_array_equal(out.data, expected.data)
