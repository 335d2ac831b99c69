"""Kernels of the vector and DMA engines on simulated chips, against the CPU device's NumPy kernels."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from tile_calls import CHIPS, assert_same, run_on_chip, run_on_cpu, tensor

from npu_compiler.errors import ConstraintError, InputError
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.elementwise import ACTIVATIONS, ELEMENTWISE, elementwise_kernel_name
from npu_compiler.program.kernels import KERNELS
from npu_compiler.program.views import View
from npu_model.chip import parse_chip
from npu_model.isa.instructions import Affine, Axis, Compute, Space, Step, Tile, Transfer, instructions
from npu_model.lowering.elementwise import copy, need_functions
from npu_model.lowering.emitter import Place
from npu_model.lowering.families import CannotLower
from npu_model.lowering.mapper import new_emitter
from npu_model.machine.costs import Costs

both_chips = pytest.mark.parametrize("chip", drawn(CHIPS, 1 / 2))
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


@both_chips
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
def test_epilogues_of_products_are_those_of_the_cpu(chip: str, activation: str) -> None:
    rng = generator("epilogue", chip, activation)
    for has_bias, has_residual in ((0, 0), (1, 0), (0, 1), (1, 1)):
        product, residual, out = (tensor(rng, name, (9, 40), "float16", packed=0) for name in ("p", "residual", "out"))
        given = [product, *[tensor(rng, "bias", (40,), "float16", packed=0)] * has_bias, *[residual] * has_residual]
        params = {"activation": activation, "has_bias": has_bias, "has_residual": has_residual}
        assert_same(chip, "linear_epilogue_kernel", given, [out], params, exact=True)


def test_a_chip_names_functions_that_exist() -> None:
    text = '[chip]\nname = "c"\nclock_ghz = 1\n[vector]\nlanes = 1\nrates = {float32 = 1}\nfunctions = FUNCTIONS\n'
    text += (
        "[sram]\nsize = 1024\nbanks = 1\nports = 1\nbytes_per_cycle = 1\n[dram]\nbandwidth_gb_s = 1\nlatency_ns = 0\n"
    )
    text += "[dma]\nchannels = 1\n"
    assert parse_chip(text.replace("FUNCTIONS", '["exp"]'), "c").vector.functions == ("exp",)
    assert "tanh" in CHIPS["edge"].vector.functions and "hurwitz_zeta" not in CHIPS["edge"].vector.functions
    for wrong, message in (
        ('["expo"]', "'vector.functions' has no 'expo'; there are acos"),
        ('"exp"', "write a list of names"),
    ):
        with pytest.raises(InputError, match=message):
            parse_chip(text.replace("FUNCTIONS", wrong), "c")


def test_a_copy_into_the_scratchpad_is_one_transfer() -> None:
    places = {"x": Place(Space.DRAM, "x", 0, 64), "out": Place(Space.SCRATCHPAD, "", 0, 64)}
    emitter = new_emitter(CHIPS["edge"], places, (64, 1024))
    copy(emitter, View("x", (16,), (1,), 0, "float32"), View("out", (16,), (1,), 0, "float32"), 16)
    ((instruction, _),) = instructions(emitter.finish().body())
    assert isinstance(instruction, Transfer) and instruction.source.buffer == "x"


def test_a_transfer_costs_whole_bursts_of_each_run_of_bytes() -> None:
    costs = Costs(CHIPS["edge"])  # bursts of 64 bytes, 12.8 bytes per cycle

    def cycles(strides: tuple[int, ...], shape: tuple[int, ...], **chosen: Any) -> int:
        source = Tile(Space.DRAM, "float16", Affine(), strides, "x")
        target = Tile(Space.SCRATCHPAD, "float16", Affine(), (2,) * len(shape))
        transfer = Transfer(engine="dma0", box=tuple(map(Axis, shape)), source=source, target=target, **chosen)
        return costs.cost(transfer, shape).cycles

    assert cycles((2048, 2), (32, 32)) == 32 * 64 / 12.8
    assert cycles((2, 2048), (32, 32)) == 32 * 64 / 12.8
    assert cycles((4, 2048), (32, 32)) == 1024 * 64 / 12.8
    assert cycles((64, 2), (32, 32)) == 2048 / 12.8
    index = Tile(Space.SCRATCHPAD, "int32", Affine(), (4, 0))
    assert cycles((16, 2), (32, 8), index=index, index_limit=40) == 32 * 64 / 12.8
    everywhere = Tile(Space.SCRATCHPAD, "int32", Affine(), (4, 128))
    assert cycles((16, 2), (32, 8), index=everywhere, index_limit=40) == 256 * 64 / 12.8


def test_a_step_costs_the_elements_of_its_operands() -> None:
    x, row = (Tile(Space.SCRATCHPAD, "float16", Affine(), strides) for strides in ((128, 2), (2, 0)))
    steps = [
        (Step("square", (0,)), 64 * 32),
        (Step("sum", (2,), (1,)), 64 * 32),
        (Step("sqrt", (3,)), 64),
        (Step("mul", (1, 1)), 64),
        (Step("true_divide", (0, 4)), 64 * 32),
        (Step("running_sum", (0,), (1,)), 64 * 32 * 5),
        (Step("coordinate", (), (0,)), 64),
    ]
    box = (Axis(64), Axis(32))
    for count in range(1, len(steps) + 1):
        compute = Compute(
            engine="vector", box=box, inputs=(x, row), steps=tuple(step for step, _ in steps[:count]), stores=((0, x),)
        )
        expected = max(64 * 32, sum(operations for _, operations in steps[:count]))
        assert Costs(CHIPS["edge"]).cost(compute, (64, 32)).operations == expected


# Reductions, softmax, norms

SHORT, LONG = (3, 5, 7), (2, 3, 4500)  # rows of the second do not fit the tiny chip


def _reduction_params(rng: np.random.Generator, dims: int) -> dict[str, Any]:
    order = [2.0, 1.0, 0.0, 3.0, np.inf, -np.inf][int(rng.integers(6))]
    return {"reduce_dims": dims, "correction": float(rng.integers(2)), "order": order}


@both_chips
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_those_of_the_cpu(chip: str, name: str) -> None:
    rng = generator(name, chip)
    for dtype in (*FLOATS, "int32", "bool"):
        shape = (*some_shape(rng, 40, 3), *(int(x) for x in rng.integers(1, 20, 2)))
        dims = int(rng.integers(1, 3))
        is_place = name.startswith("arg")
        integer = "int32" if dtype == "bool" else dtype
        out_dtype = {"any": "bool", "all": "bool"}.get(
            name, integer if name in ("max", "min", "sum", "prod") else "float32"
        )
        x = tensor(rng, "x", shape, dtype, packed=0, repeats=not is_place)
        out = tensor(rng, "out", shape[: len(shape) - dims], "int32" if is_place else out_dtype, packed=0)
        assert_same(chip, f"{name}_kernel", [x], [out], _reduction_params(rng, dims), tolerance=30)


@both_chips
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_long_rows_carry_what_they_have(chip: str, name: str) -> None:
    rng = generator("long", name, chip)
    for dtype in ("float16", "int32"):
        x = tensor(rng, "x", LONG, dtype, packed=0)
        out = tensor(rng, "out", LONG[:2], "int32" if name.startswith("arg") or dtype == "int32" else "float32")
        if dtype == "int32" and name in ("var", "std", "mean", "norm", "logsumexp"):
            out = tensor(rng, "out", LONG[:2], "float32")
        params = {"reduce_dims": 1, "correction": 1.0, "order": 2.0}
        run_tolerance = 300 if name in ("mean", "sum", "norm", "var", "std", "logsumexp") else 30
        assert_same(chip, f"{name}_kernel", [x], [out], params, tolerance=run_tolerance)


@both_chips
def test_the_place_of_a_maximum_is_that_of_the_first_nan(chip: str) -> None:
    rng = generator("nan", chip)
    for columns in (40, 4500):
        x = tensor(rng, "x", (4, columns), "float32")
        x.array[1, columns // 2] = x.array[1, columns - 1] = np.nan
        x.array[2] = -np.inf
        x.array[3, columns // 3] = x.array[3, columns // 2] = 99
        for name in ("argmax", "argmin", "max", "min"):
            out = tensor(rng, "out", (4,), "int32" if name.startswith("arg") else "float32")
            assert_same(chip, f"{name}_kernel", [x], [out], _reduction_params(rng, 1), exact=True)


@both_chips
@pytest.mark.parametrize("shape", [SHORT, LONG, (6, 1)])
def test_softmax_and_running_sums_are_those_of_the_cpu(chip: str, shape: tuple[int, ...]) -> None:
    rng = generator("softmax", chip, shape)
    for dtype in FLOATS:
        x, out = (tensor(rng, name, shape, dtype, packed=0) for name in ("x", "out"))
        mask = tensor(rng, "mask", shape, "float32", packed=0, repeats=True)
        mask.array[..., 0] = -np.inf
        scale = {"scale": float(rng.choice([1.0, 0.3]))}
        assert_same(chip, "softmax_kernel", [x], [out], scale)
        assert_same(chip, "log_softmax_kernel", [x], [out], scale, tolerance=5)
        assert_same(chip, "masked_softmax_kernel", [x, mask], [out], scale)
        assert_same(chip, "cumsum_kernel", [x], [out], {}, tolerance=100)
    numbers, sums = (tensor(rng, name, shape, "int32", packed=0) for name in ("x", "out"))
    numbers.array[..., 0] = 2**31 - 1
    assert_same(chip, "cumsum_kernel", [numbers], [sums], {})


@both_chips
@pytest.mark.parametrize("width", [1, 24, 4500])
def test_norms_are_those_of_the_cpu(chip: str, width: int) -> None:
    rng = generator("norms", chip, width)
    for dtype in FLOATS:
        x, out = (tensor(rng, name, (5, width), dtype, packed=1) for name in ("x", "out"))
        weight, bias = (tensor(rng, name, (width,), dtype) for name in ("weight", "bias"))
        count = int(rng.integers(3))
        present = {"has_weight": int(count > 0), "has_bias": int(count > 1)}
        sizes = {"rows": 5, "width": width, "eps": 1e-5}
        assert_same(chip, "layernorm_kernel", [x, *[weight, bias][:count]], [out], sizes | present, tolerance=5)
        rms = sizes | {"weight_offset": float(count), "has_weight": int(count > 0)}
        assert_same(chip, "rmsnorm_kernel", [x, *[weight][:count]], [out], rms, tolerance=5)


@both_chips
@pytest.mark.parametrize("pixels", [(), (3, 5), (40, 90)])
def test_group_norms_are_those_of_the_cpu(chip: str, pixels: tuple[int, ...]) -> None:
    rng = generator("group norm", chip, pixels)
    for groups in (1, 2, 6):
        x, out = (tensor(rng, name, (2, 6, *pixels), "float16", packed=0) for name in ("x", "out"))
        weight, bias = (tensor(rng, name, (6,), "float16", packed=0) for name in ("weight", "bias"))
        params = {"groups": groups, "eps": 1e-5, "has_weight": 1, "has_bias": 1}
        assert_same(chip, "groupnorm_kernel", [x, weight, bias], [out], params, tolerance=5)


# Movement


@both_chips
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "bool"])
def test_made_and_rearranged_elements_are_those_of_the_cpu(chip: str, dtype: str) -> None:
    rng = generator("movement", chip, dtype)
    value = 1 if dtype in ("int32", "bool") else 0.75
    filling = {"value": value, "int_value": int(value)}
    for shape in ((), (3, 700), some_shape(rng), (0, 2)):
        out = tensor(rng, "out", shape, dtype, packed=0)
        assert_same(chip, "fill_kernel", [], [out], filling, exact=True)
        flags = [int(x) for x in rng.integers(0, 2, len(shape))]
        x = tensor(rng, "x", shape, dtype, packed=0, repeats=True)
        dims = [*flags, *[0] * (8 - len(shape))]
        assert_same(chip, "flip_kernel", [x], [out], {"dims": dims}, exact=True)
    for shape in ((17, 9), (2, 3, 40, 41), (1, 5), (4, 1)):
        x, out = (tensor(rng, name, shape, dtype, packed=0) for name in ("x", "out"))
        triangle = {"upper": int(rng.integers(2)), "diagonal": int(rng.integers(-6, 7))}
        assert_same(chip, "triangle_kernel", [x], [out], triangle, exact=True)
    if dtype != "bool":
        counts = {"start": 3, "step": -2, "int_start": 3, "int_step": -2}
        for size in (0, 1, 90, 2000):
            out = tensor(rng, "out", (size,), dtype, packed=0)
            assert_same(chip, "arange_kernel", [], [out], counts, exact=dtype != "bfloat16")


@both_chips
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_is_that_of_the_cpu(chip: str, mode: str) -> None:
    rng = generator("padding", chip, mode)
    for dtype in ("float16", "float32", "int32", "bool"):
        shape = tuple(int(n) for n in rng.integers(3, 9, int(rng.integers(1, 5))))
        pairs = [(int(a), int(b)) if rng.random() < 0.6 else (0, 0) for a, b in rng.integers(0, 3, (len(shape), 2))]
        padded = tuple(n + a + b for n, (a, b) in zip(shape, pairs, strict=True))
        pads = [n for pair in reversed(pairs) for n in pair]
        x, out = tensor(rng, "x", shape, dtype, packed=0), tensor(rng, "out", padded, dtype, packed=0)
        value = 1 if dtype in ("int32", "bool") else -np.inf
        params = {"mode": mode, "pads": [*pads, *[0] * (12 - len(pads))], "value": value, "int_value": 1}
        assert_same(chip, "pad_kernel", [x], [out], params, exact=True)
    x, out = tensor(rng, "x", (4, 60, 60), "float16"), tensor(rng, "out", (4, 62, 63), "float16")
    params |= {"pads": [1, 2, 1, 1, *[0] * 8], "value": 0.0}
    assert_same(chip, "pad_kernel", [x], [out], params, exact=True)


@both_chips
@pytest.mark.parametrize("scale", [0.5, 1 / 3, 0.6, 1.7])
def test_repeated_pixels_are_those_of_the_cpu(chip: str, scale: float) -> None:
    rng = generator("nearest", chip, scale)
    x = tensor(rng, "x", (2, 3, 6, 7), "float16", packed=0)
    out = tensor(rng, "out", (2, 3, int(6 / scale), int(7 / 0.5)), "float16", packed=0)
    params = {"scale": [scale, 0.5], "exact": int(rng.integers(2))}
    assert_same(chip, "upsample_nearest_kernel", [x], [out], params, exact=True)


# Indexing


def _places(rng: np.random.Generator, name: str, shape: tuple[int, ...], limit: int, lowest: int = 0) -> Any:
    places = tensor(rng, name, shape, "int32", packed=0)
    places.array[...] = rng.integers(lowest, limit, shape)
    return places


@both_chips
@pytest.mark.parametrize("dtype", ["float16", "int32", "bool"])
def test_elements_picked_by_indices_are_those_of_the_cpu(chip: str, dtype: str) -> None:
    rng = generator("picked", chip, dtype)
    for ids_shape in ((), (5,), (3, 4), (2, 3, 70)):
        table, ids = tensor(rng, "table", (11, 33), dtype, packed=1), _places(rng, "ids", ids_shape, 11)
        out = tensor(rng, "out", (*ids_shape, 33), dtype, packed=0)
        assert_same(chip, "embedding_kernel", [table, ids], [out], {"rows": 11, "width": 33, "checked": 0}, exact=True)
    for _ in range(4):
        shape = tuple(int(n) for n in rng.integers(1, 8, int(rng.integers(1, 5))))
        dim = int(rng.integers(len(shape)))
        count = int(rng.integers(1, 40))
        x, places = tensor(rng, "x", shape, dtype, packed=0), _places(rng, "index", (count,), shape[dim])
        out = tensor(rng, "out", (*shape[:dim], count, *shape[dim + 1 :]), dtype, packed=0)
        assert_same(chip, "index_select_kernel", [x, places], [out], {"dim": dim}, exact=True)
        picked = tuple(count if d == dim else int(rng.integers(1, n + 1)) for d, n in enumerate(shape))
        places, out = _places(rng, "index", picked, shape[dim]), tensor(rng, "out", picked, dtype, packed=0)
        assert_same(chip, "gather_kernel", [x, places], [out], {"dim": dim}, exact=True)


@both_chips
def test_advanced_indices_are_those_of_the_cpu(chip: str) -> None:
    rng = generator("advanced", chip)
    for _ in range(8):
        shape = tuple(int(n) for n in rng.integers(1, 7, int(rng.integers(1, 5))))
        first = int(rng.integers(len(shape)))
        count = int(rng.integers(1, len(shape) - first + 1))
        spread = tuple(int(n) for n in rng.integers(1, 9, int(rng.integers(0, 3))))
        indices = [_places(rng, f"index{i}", spread, shape[first + i], -shape[first + i]) for i in range(count)]
        x = tensor(rng, "x", shape, "float16", packed=0)
        out = tensor(rng, "out", (*shape[:first], *spread, *shape[first + count :]), "float16", packed=0)
        assert_same(chip, "index_kernel", [x, *indices], [out], {"first": first, "count": count}, exact=True)


@both_chips
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_replaced_in_place_as_on_the_cpu(chip: str, dtype: str) -> None:
    rng = generator("replaced", chip, dtype)
    for shape, dim, count in (((2, 40, 9), 1, 3), ((50,), 0, 20), ((6, 4, 3, 5), 3, 1), ((300, 30), 0, 200)):
        index = _places(rng, "index", (count,), shape[dim])
        index.array[...] = rng.permutation(shape[dim])[:count]
        rows = (*shape[:dim], count, *shape[dim + 1 :])
        sources = [tensor(rng, name, rows, "float16", packed=0) for name in ("source0", "source1")]
        outs = [tensor(rng, name, shape, dtype, packed=0) for name in ("out0", "out1")]
        params = {"dim": dim, "checked": 0}
        assert_same(chip, "index_copy_kernel", [index, sources[0]], outs[:1], params, exact=True)
        assert_same(chip, "index_copy_pair_kernel", [index, *sources], outs, params, exact=True)


@both_chips
@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_elements_are_in_the_order_of_the_cpu(chip: str, dtype: str) -> None:
    rng = generator("sorted", chip, dtype)
    for _ in range(4):
        shape = (*some_shape(rng, 60, 3), int(rng.choice([1, 2, 9, 40, 130])))
        x = tensor(rng, "x", shape, dtype)
        x.array[...] = np.round(x.array)  # so that many are equal
        if dtype != "int32":
            x.array[rng.random(shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
        order = tensor(rng, "order", shape, "int32")
        assert_same(chip, "argsort_kernel", [x], [order], {"descending": int(rng.integers(2))})


@both_chips
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_scattered_elements_are_those_of_the_cpu(chip: str, dtype: str) -> None:
    rng = generator("scattered", chip, dtype)
    for shape, count in (((7,), 20), ((3, 5, 9), 4), ((40, 60), 61)):
        base, out = (tensor(rng, name, shape, dtype, packed=0) for name in ("base", "out"))
        source = tensor(rng, "source", (*shape[:-1], count), dtype, packed=0)
        index = _places(rng, "index", (*shape[:-1], count), shape[-1])
        params = {"reduce": "last", "include_self": 0}
        assert_same(chip, "scatter_kernel", [base, index, source], [out], params, exact=True)
        if dtype == "int32":
            with pytest.raises(ConstraintError, match="its vector engine joins floats, not int32"):
                run_on_chip(CHIPS[chip], "scatter_kernel", [base, index, source], [out], params | {"reduce": "sum"})


@both_chips
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_joined_elements_are_those_of_the_cpu(chip: str, reduce: str) -> None:
    rng = generator("joined", chip, reduce)
    for shape, count in (((7,), 20), ((3, 5, 9), 4), ((6, 1), 3), ((4, 60), 61)):
        base, out = (tensor(rng, name, shape, "float32", packed=0) for name in ("base", "out"))
        source = tensor(rng, "source", (*shape[:-1], count), "float32", packed=0)
        index = _places(rng, "index", (*shape[:-1], count), shape[-1])
        params = {"reduce": reduce, "include_self": int(rng.integers(2))}
        assert_same(chip, "scatter_kernel", [base, index, source], [out], params, tolerance=3)
        index.array[(0,) * index.array.ndim] = shape[-1]
        with pytest.raises(IndexError, match=f"index {shape[-1]} is out of range for {shape[-1]} rows"):
            run_on_chip(CHIPS[chip], "scatter_kernel", [base, index, source], [out], params)


@both_chips
@pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1])
def test_an_index_out_of_range_is_the_error_that_it_is_on_the_cpu(chip: str, wrong: int) -> None:
    rng = generator("wrong", chip, wrong)
    table, ids = tensor(rng, "table", (7, 3), "float16"), _places(rng, "ids", (90,), 7)
    ids.array[17] = wrong
    wide, rows = tensor(rng, "wide", (90, 3), "float16"), tensor(rng, "out", (90, 3), "float16")
    picked, both = tensor(rng, "out", (90,), "float16"), tensor(rng, "index", (90, 3), "int32")
    both.array[...] = ids.array[:, None]
    calls: list[Any] = [
        ("embedding_kernel", [table, ids], [rows], {"rows": 7, "width": 3, "checked": 0}),
        ("index_select_kernel", [table, ids], [rows], {"dim": 0}),
        ("gather_kernel", [table, both], [rows], {"dim": 0}),
        ("index_copy_kernel", [ids, wide], [table], {"dim": 0, "checked": 0}),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=f"^index {wrong} is out of range for 7 rows$"):
            run_on_cpu(*call)
        with pytest.raises(IndexError, match=f"index {wrong} is out of range for 7 rows"):
            run_on_chip(CHIPS[chip], *call)
    ids.array[17] = -8 if wrong < 0 else wrong
    third = _places(rng, "third", (90,), 3)
    for advanced in (
        ("index_kernel", [table, ids], [rows], {"first": 0, "count": 1}),
        ("index_kernel", [table, ids, third], [picked], {"first": 0, "count": 2}),
    ):
        with pytest.raises(IndexError):
            run_on_cpu(*advanced)  # type: ignore[arg-type]
        with pytest.raises(IndexError):
            run_on_chip(CHIPS[chip], *advanced)  # type: ignore[arg-type]


# Pooling, interpolation, integers, rotations


def _image(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str) -> Any:
    return tensor(rng, name, shape, dtype, packed=0)


def _pooling(rng: np.random.Generator, is_dilated: bool) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Parameters of a pooling, the image's shape and the result's."""
    window = [int(n) for n in rng.integers(1, 5, 2)]
    stride = [int(n) for n in rng.integers(1, 4, 2)]
    padding = [int(rng.integers(0, k // 2 + 1)) for k in window]
    dilation = [int(n) for n in rng.integers(1, 3, 2)] if is_dilated else [1, 1]
    image = (int(rng.integers(1, 3)), int(rng.integers(1, 6)), *(int(n) for n in rng.integers(9, 14, 2)))
    pixels = [
        (n + 2 * pad - gap * (k - 1) - 1) // step + 1
        for n, pad, gap, k, step in zip(image[2:], padding, dilation, window, stride, strict=True)
    ]
    params = {"window": window, "stride": stride, "padding": padding, "ceil_mode": 0}
    return params | ({"dilation": dilation} if is_dilated else {}), image, (*image[:2], *pixels)


@both_chips
def test_pooling_is_that_of_the_cpu(chip: str) -> None:
    rng = generator("pooling", chip)
    for dtype in (*FLOATS, "int32"):
        params, image, pooled = _pooling(rng, True)
        x, out = _image(rng, "x", image, dtype), _image(rng, "out", pooled, dtype)
        assert_same(chip, "max_pool2d_kernel", [x], [out], params, exact=True)
        if dtype == "int32":
            continue
        x.array[rng.random(image) < 0.05] = np.nan
        x.array[rng.random(image) < 0.2] = -np.inf
        assert_same(chip, "max_pool2d_kernel", [x], [out], params, exact=True)
        assert_same(chip, "max_pool2d_index_kernel", [x], [_image(rng, "out", pooled, "int32")], params)
        params, image, pooled = _pooling(rng, False)
        params |= {"count_include_pad": int(rng.integers(2)), "divisor": int(rng.choice([0, 3]))}
        x, out = _image(rng, "x", image, dtype), _image(rng, "out", pooled, dtype)
        assert_same(chip, "avg_pool2d_kernel", [x], [out], params, tolerance=3)
    for dtype in ("int8", "uint8"):
        params, image, pooled = _pooling(rng, True)
        params["dilation"] = [1, 1]
        pooled = (
            *pooled[:2],
            *(
                (n + 2 * p - k) // s + 1
                for n, p, k, s in zip(image[2:], params["padding"], params["window"], params["stride"], strict=True)
            ),
        )
        x, out = _image(rng, "x", image, dtype), _image(rng, "out", pooled, dtype)
        assert_same(chip, "integer_max_pool2d_kernel", [x], [out], params)


@both_chips
def test_windows_that_reach_beyond_the_image_hold_fewer_elements(chip: str) -> None:
    rng = generator("ceil", chip)
    x, out = _image(rng, "x", (1, 2, 6, 7), "float32"), _image(rng, "out", (1, 2, 3, 4), "float32")
    for is_counted in (0, 1):
        params = {"window": [3, 3], "stride": [2, 2], "padding": [0, 1], "ceil_mode": 1, "divisor": 0}
        params["count_include_pad"] = is_counted
        assert_same(chip, "avg_pool2d_kernel", [x], [out], params, tolerance=3)


@both_chips
@pytest.mark.parametrize("pixels", [(1, 1), (2, 3), (5, 4), (7, 9)])
def test_adaptive_pooling_and_interpolation_are_those_of_the_cpu(chip: str, pixels: tuple[int, int]) -> None:
    rng = generator("adaptive", chip, pixels)
    for dtype in FLOATS:
        x, out = _image(rng, "x", (2, 3, 6, 9), dtype), _image(rng, "out", (2, 3, *pixels), dtype)
        assert_same(chip, "adaptive_avg_pool2d_kernel", [x], [out], {}, tolerance=3)
        params = {"scale": [6 / pixels[0], 9 / pixels[1]], "align_corners": int(rng.integers(2))}
        assert_same(chip, "upsample_bilinear_kernel", [x], [out], params, tolerance=3)


def _quantization(rng: np.random.Generator, dtype: str) -> dict[str, Any]:
    low, high = (0, 255) if dtype == "uint8" else (-128, 127)
    zero = int(rng.integers(low, high + 1))
    return {"out_scale": float(rng.uniform(0.01, 0.05)), "out_zero_point": zero, "low": low, "high": high}


@both_chips
def test_integers_with_scales_are_those_of_the_cpu_bit_for_bit(chip: str) -> None:
    rng = generator("integers", chip)
    for dtype in ("int8", "uint8"):
        shape = (2, 5, 8, 9)
        source = {"x_scale": float(rng.uniform(0.01, 0.05)), "zero_point": int(rng.integers(0, 100))}
        x = _image(rng, "x", shape, dtype)
        for kind in FLOATS:
            floats = tensor(rng, "floats", shape, kind, packed=0)
            quantized = _image(rng, "out", shape, dtype)
            assert_same(chip, "quantize_activation_kernel", [floats], [quantized], _quantization(rng, dtype))
            assert_same(chip, "dequantize_activation_kernel", [x], [floats], source, exact=True)
        for out_dtype in (dtype, "float32"):
            params = source | _quantization(rng, dtype)
            residual = {
                "residual_scale": 0.03,
                "residual_zero_point": 7,
                "activation": str(rng.choice(["none", "relu"])),
            }
            other, out = _image(rng, "residual", shape, "uint8"), _image(rng, "out", shape, out_dtype)
            added = params | residual | {"has_bias": 0, "has_residual": 0}
            assert_same(
                chip, "integer_add_kernel", [x, other], [out], _declared("integer_add_kernel", added), exact=True
            )
            out = tensor(rng, "out", shape[:2], out_dtype, packed=0)
            assert_same(chip, "integer_mean_kernel", [x], [out], params, exact=True)


def _declared(kernel: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that a kernel declares."""
    return {name: value for name, value in params.items() if name in KERNELS[kernel].fields}


@both_chips
@pytest.mark.parametrize("dtype", FLOATS)
def test_rotations_are_those_of_the_cpu(chip: str, dtype: str) -> None:
    rng = generator("rope", chip, dtype)
    for lead in ((), (5,), (2, 3, 70)):
        x = tensor(rng, "x", (*lead, 16), dtype, packed=1)
        cos, sin = (tensor(rng, name, (*lead, 16), dtype, packed=0, repeats=True) for name in ("cos", "sin"))
        out = tensor(rng, "out", (*lead, 16), dtype, packed=0)
        assert_same(chip, "rope_kernel", [x, cos, sin], [out], {"rotary_dim": 16}, exact=True)
