"""Codes that a target's kernels do not know: it refuses weights that are stored so, and computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ir_builder import IRBuilder

from cuda_compiler.target import CUDACodegenTarget
from npu_compiler import CompileOptions, QuantizedFormat, TargetConfig, compile, partition, quantize
from npu_compiler.errors import InputError, ProgramFormatError
from npu_compiler.graph.code_formats import CODE_FORMATS, CodeFormat
from npu_compiler.graph.quantization import NAMED_FORMATS
from npu_compiler.program.check import check_calls
from npu_compiler.program.target import CodegenTarget, MetalCodegenTarget, OpLevelTarget
from npu_compiler.target_config import KERNEL_CODES
from npu_model.chip import load_chip
from npu_model.target import NPUTarget
from npu_runtime import CPUBackend, DAGExecutor
from npu_sim.quantizing.options import QuantizeOptions

NEW = CodeFormat("uint2", 2, np.dtype(np.uint8), 0, 3, zero=2, largest=1.5)
FORMAT = {"offsets": "minimum", "group": 32}


class Custom(OpLevelTarget):
    """A target that says nothing of weights in few bits."""

    config = TargetConfig("custom")


TARGETS: dict[str, CodegenTarget] = {
    "native": CPUBackend(native=True).target,
    "pytorch": CPUBackend(native=False).target,
    "numpy": CPUBackend(native=False, pytorch=False).target,
    "metal": MetalCodegenTarget(),
    "cuda": CUDACodegenTarget(),
    "npu:edge": NPUTarget(load_chip("edge")),
}


@pytest.fixture(autouse=True)
def new_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A row of the table, and a name for it, that no kernel knows."""
    monkeypatch.setitem(CODE_FORMATS, NEW.name, NEW)
    monkeypatch.setitem(NAMED_FORMATS, "q2", QuantizedFormat(NEW.name))
    yield


def linear(rows: int) -> dict[str, Any]:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", rows, 256), g.weight("w", 512, 256)))
    return g.ir()


def lookup() -> dict[str, Any]:
    g = IRBuilder()
    g.output(g("aten.embedding.default", g.weight("w", 512, 256), g.input("ids", 3, dtype="int64")))
    return g.ir()


IRS = {"1 row": linear(1), "8 rows": linear(8), "200 rows": linear(200), "lookup": lookup()}


@pytest.mark.parametrize("ir", IRS)
@pytest.mark.parametrize("target", TARGETS)
def test_codes_that_kernels_do_not_know_are_refused(target: str, ir: str) -> None:
    options = CompileOptions(quantization={"w": QuantizedFormat(NEW.name, **FORMAT)})
    name = TARGETS[target].config.name
    with pytest.raises(
        InputError,
        match=f"^the target {name} has no kernels for weights in uint2, the codes of 'w'; it knows int4, int8, "
        "float8_e4m3, float4_e2m1, iq4_nl: store the weight in one of these, or leave it in the compute dtype$",
    ):
        compile(IRS[ir], TARGETS[target], options)


@pytest.mark.parametrize("codes", KERNEL_CODES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_new_row_changes_nothing_for_the_others(target: str, codes: str) -> None:
    options = CompileOptions(quantization={"w": QuantizedFormat(codes)})
    assert compile(IRS["8 rows"], TARGETS[target], options).plan.calls


def test_a_named_format_is_refused_as_well() -> None:
    with pytest.raises(InputError, match="the target op_level has no kernels for weights in uint2"):
        compile(IRS["1 row"], options=CompileOptions(quantization="q2"))


def test_a_target_that_names_no_codes_knows_none() -> None:
    with pytest.raises(InputError, match="the target custom has no kernels for weights in int8.* it knows none:"):
        compile(IRS["1 row"], Custom(), CompileOptions(quantization="int8"))


def test_partitions_refuse_them() -> None:
    plan = partition(IRS["1 row"], lambda op: True, quantization={"w": QuantizedFormat(NEW.name)})
    with pytest.raises(InputError, match="the target op_level has no kernels for weights in uint2"):
        DAGExecutor(plan, CPUBackend())


def test_what_no_kernel_reads_in_few_bits_is_dequantized() -> None:
    g = IRBuilder()
    g.output(g("aten.add.Tensor", g.input("x", 4, 8), g.weight("w", 4, 8)))
    rng = np.random.default_rng(0)
    weight = quantize(rng.standard_normal((4, 8)).astype(np.float32), QuantizedFormat(NEW.name))
    plan = partition(g.ir(), lambda op: True, compute_dtype="float32", quantization={"w": weight.format})
    executor = DAGExecutor(plan, CPUBackend())
    executor.load_weights({"w": weight})
    x = rng.standard_normal((4, 8)).astype(np.float32)
    (found,) = executor.execute({"x": x}).values()
    np.testing.assert_array_equal(found, x + weight.dequantize())


@pytest.mark.parametrize("ir", ["1 row", "lookup"])
def test_programs_that_name_them_are_refused(ir: str) -> None:
    plan = compile(IRS[ir], options=CompileOptions(quantization={"w": QuantizedFormat("int4")})).plan
    (call,) = [call for call in plan.calls if "codes" in call.params]
    call.params["codes"] = NEW.name
    with pytest.raises(ProgramFormatError, match="uint2"):
        check_calls(plan)


def test_folders_that_cannot_hold_them_are_refused_before_quantizing() -> None:
    with pytest.raises(InputError, match="cannot hold weights in q2; choose one of int4, int8, fp8$"):
        QuantizeOptions(weights="q2").check()
