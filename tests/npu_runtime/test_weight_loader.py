"""Reading, checking and casting weights: any stored dtype, large tensors by several threads, and joined ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_gpu import DEVICES
from ir_builder import IRBuilder
from safetensors.torch import save_file

from npu_compiler import CompiledProgram, compile, partition
from npu_compiler.errors import InputError, NumericalWarning, WeightError
from npu_compiler.graph.dtypes import saturating_cast
from npu_compiler.graph.model import TensorSpec
from npu_runtime import CPUBackend, DAGExecutor, Device, Executor, load_weights
from npu_runtime.numerics import doubtful_values
from npu_runtime.pieces import ahead
from npu_runtime.weight_loader import MappedCheckpoint, cast_weight, check_weight, holds_nan, to_numpy

SEVERAL_PIECES = 2_500_001  # elements


def test_mapped_tensors_are_what_was_saved(tmp_path: Path) -> None:
    tensors = {
        str(dtype): (10 * torch.randn(3, 5)).to(dtype)
        for dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "w.safetensors", {"format": "pt"})
    mapped = MappedCheckpoint(tmp_path)
    assert set(mapped) == set(tensors)
    for key, tensor in tensors.items():
        assert mapped[key].dtype == to_numpy(tensor).dtype
        np.testing.assert_array_equal(mapped[key], to_numpy(tensor))
    mapped["scalar"][...] = 0
    assert MappedCheckpoint(tmp_path)["scalar"] == 2.5, "the file is not written to"


def test_a_file_whose_header_leaves_its_data_at_an_odd_place_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)
    data = np.array([1.5, -2], "<f4").tobytes()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert len(header) % 2
    np.testing.assert_array_equal(MappedCheckpoint(tmp_path)["w"], [1.5, -2])


def test_a_dtype_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2).to(torch.float8_e5m2)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightError, match="'w' is stored as F8_E5M2; supported are F64, F32"):
        MappedCheckpoint(tmp_path)["w"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_nan_of_16_bits_is_found_and_nothing_else(dtype: type) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    expected = np.isnan(every.astype(np.float32))
    assert [holds_nan(every[place : place + 1]) for place in range(2**16)] == expected.tolist()
    assert holds_nan(every) and not holds_nan(every[~expected])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_one_nan_among_millions_is_found(dtype: type, rng: np.random.Generator) -> None:
    values = rng.standard_normal(SEVERAL_PIECES, np.float32).astype(dtype)
    assert not holds_nan(values)
    values[rng.integers(SEVERAL_PIECES)] = np.nan
    assert holds_nan(values)


@pytest.mark.parametrize(
    ("value", "fits"), [(2**31 - 1, True), (2**31, False), (-(2**31), True), (-(2**31) - 1, False)]
)
def test_integers_beyond_what_the_device_holds_are_a_problem(value: int, fits: bool) -> None:
    problems = list(check_weight("table", np.array([0, value], np.int64), (2,)))
    assert problems == ([] if fits else ["too large: 'table' contains integers that do not fit in 32 bits"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_large_cast_is_the_cast_of_its_elements(dtype: str, rng: np.random.Generator) -> None:
    values = rng.standard_normal((5, SEVERAL_PIECES // 5), np.float32)
    values[:, ::1000] *= 3e37
    cast = cast_weight(values, dtype)
    assert cast.shape == values.shape and np.isfinite(cast.astype(np.float32)).all()
    np.testing.assert_array_equal(cast, saturating_cast(values, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_joined_parts_lie_behind_each_other(device: str, storage: str, rng: np.random.Generator) -> None:
    """Parts are joined both as they are and where the device has to cast them."""
    parts = [rng.integers(-99, 99, (rows, 700)).astype(np.float16) for rows in (1, 3000, 7)]
    whole = np.concatenate(parts)
    buffer = Device(device).backend.allocate_joined(parts, TensorSpec("w", whole.shape, "float16", storage))
    assert buffer.dtype == storage
    np.testing.assert_array_equal(buffer.to_numpy(), whole)


def test_work_done_ahead_comes_in_order_and_is_bounded() -> None:
    started: list[int] = []

    def work(number: int) -> int:
        started.append(number)
        return number * number

    results = ahead(work, range(100))
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(started) <= 9
    assert list(results) == [number * number for number in range(5, 100)] and sorted(started) == list(range(100))


def test_an_error_of_work_done_ahead_arrives_at_its_turn() -> None:
    results = ahead(lambda number: 6 // (3 - number), range(5))
    assert [next(results) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)


def half_linear() -> CompiledProgram:
    g = IRBuilder()
    return compile(g.output(g("aten.linear.default", g.input("x", 2, 3), g.weight("w", 4, 3), name="y")).ir())


def test_a_weight_beyond_its_dtype_is_an_error_that_offers_wider_ones() -> None:
    weight = np.ones((4, 3), np.float32)
    weight[2, 1] = 1.15e5
    message = r"too large: 'w' contains 115000, which float16 cannot hold \(at most 65504\); compile for compute dtype"
    with pytest.raises(WeightError, match=message):
        load_weights({"w": weight}, half_linear(), Device("cpu"))
    for value in (np.inf, -1e9, float(np.finfo(np.float32).min), 65519.0):  # masks, and what rounds to the largest
        weight[2, 1] = value
        load_weights({"w": weight}, half_linear(), Device("cpu"))


def test_an_input_beyond_its_dtype_is_an_error_that_offers_wider_ones() -> None:
    program, x = half_linear(), np.ones((2, 3), np.float32)
    weights = load_weights({"w": np.ones((4, 3), np.float32)}, program, Device("cpu"))
    executor = Executor(program, Device("cpu"))
    x[1, 1] = 1e6
    message = r"'x' holds 1e\+06, which float16 cannot hold \(at most 65504\); compile the program for compute dtype"
    with pytest.raises(InputError, match=message):
        executor.run({"x": x}, weights)
    x[1, 1] = np.finfo(np.float32).min
    assert np.isfinite(executor.run({"x": x * 0 + 1}, weights)[0].to_numpy()).all()


def test_doubtful_outputs_are_warned_of_where_it_is_asked_for() -> None:
    program = half_linear()
    weights = load_weights({"w": np.full((4, 3), 300, np.float32)}, program, Device("cpu"))
    x = np.full((2, 3), 300, np.float32)
    with pytest.warns(NumericalWarning, match=r"output 'y': 8 of 8 values are not finite; compute dtype bfloat16 or"):
        Executor(program, Device("cpu"), check_outputs=True).run({"x": x}, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Executor(program, Device("cpu")).run({"x": x}, weights)
        Executor(program, Device("cpu"), check_outputs=True).run({"x": x / 300}, weights)
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 2, 3), g.weight("w", 4, 3), name="y"))
    dag = DAGExecutor(partition(g.ir()), CPUBackend(), check_outputs=True)
    dag.load_weights({"w": np.full((4, 3), 300, np.float32)})
    with pytest.warns(NumericalWarning, match="output 'y': 8 of 8 values are not finite"):
        dag.execute({"x": x})


def test_values_at_the_limit_of_float16_are_doubtful() -> None:
    spec = TensorSpec("y", (3,), "float32", "float16")
    (sentence,) = doubtful_values({"y": np.array([1, -65504, 3], np.float16)}, [spec])
    assert sentence.startswith(
        "output 'y': 1 of 3 values are at the limit of float16, 65504; compute dtype bfloat16 or"
    )
    assert doubtful_values({"y": np.array([1, 2, 3], np.float16)}, [spec]) == []
    assert doubtful_values({"y": np.array([1, 2])}, [TensorSpec("y", (2,), "int64", "int32")]) == []
