"""Extensibility: an op, a device and a target of one's own, each added from outside without a change to the project."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ir_builder import IRBuilder
from toy_device import ToyBackend

from npu_compiler import CompileOptions, DeviceError, OpLevelTarget, compile, get_supported_ops, is_op_supported
from npu_compiler.ops import OPS
from npu_compiler.ops.elementwise import elementwise
from npu_compiler.program.elementwise import ELEMENTWISE, ELEMENTWISE_KERNELS
from npu_compiler.target_config import TargetConfig
from npu_runtime import CPUBackend, Device, Executor, register_device

OP = "aten.sinc.default"


@pytest.fixture
def _registries_as_before() -> Iterator[None]:
    tables = (OPS, ELEMENTWISE, ELEMENTWISE_KERNELS)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def one_op(op: str) -> dict[str, object]:
    g = IRBuilder()
    return g.output(g(op, g.input("x", 2, 3), name="y")).ir()


@pytest.mark.usefixtures("_registries_as_before")
def test_an_element_wise_op_is_one_line() -> None:
    assert not is_op_supported(OP)
    elementwise("sinc", "self", "a == 0 ? 1 : sin(3.14159265358979 * a) / (3.14159265358979 * a)")
    assert is_op_supported(OP) and "aten.sinc" in get_supported_ops()
    x = np.array([[-1.5, -0.5, 0], [0.25, 0.5, 2]], np.float32)
    for backend in (CPUBackend(pytorch=False), CPUBackend(native=False)):  # by the expression, and by torch's function
        result = (
            Executor(compile(one_op(OP), options=CompileOptions(compute_dtype="float32")), backend)
            .run({"x": x})["y"]
            .to_numpy()
        )
        np.testing.assert_allclose(result, np.sinc(x), atol=1e-6)


def test_a_device_is_one_class() -> None:
    register_device("story-toy", ToyBackend)
    device = Device("story-toy")
    executor = Executor(compile(one_op("aten.exp.default"), options=CompileOptions(compute_dtype="float32")), device)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        result = executor.run({"x": x})["y"].to_numpy()
    np.testing.assert_allclose(result, np.exp(x), rtol=1e-6)
    assert isinstance(device.backend, ToyBackend)
    assert device.backend.counters["prepared"] == 1 and device.backend.counters["launched"] == 3


class WithoutExp(OpLevelTarget):
    config = TargetConfig(name="without_exp", channel_alignment_bytes=16)

    def supports(self, op_type: str, attrs: object) -> bool:
        return not op_type.startswith("aten.exp.")


def test_a_target_says_which_ops_there_are_and_which_device_runs_its_programs() -> None:
    program = compile(one_op("aten.tanh.default"), target=WithoutExp())
    assert program.target == "without_exp"
    with pytest.raises(DeviceError, match="compiled for 'without_exp'"):
        Executor(program, Device("cpu"))
    with pytest.raises(Exception, match="the target 'without_exp' does not support it"):
        compile(one_op("aten.exp.default"), target=WithoutExp())
