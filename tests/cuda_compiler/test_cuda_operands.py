"""Operands of products that the CUDA target stores in another order or dtype than the graph."""

from __future__ import annotations

import torch
from cuda_reference import LaidOut, ReferenceBackend
from ir_builder import IRBuilder

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Executor, NPUBuffer, load_weights


def compiled(graph: IRBuilder, dtype: str) -> CompiledProgram:
    return npu_compiler.compile(graph.ir(), LaidOut(), npu_compiler.CompileOptions(compute_dtype=dtype))


def result(program: CompiledProgram, weights: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    backend = ReferenceBackend()
    loaded = load_weights(weights, program, backend)
    bound = {
        spec.name: NPUBuffer.from_numpy(x.numpy(), backend, spec=spec)
        for spec, x in zip(program.input_specs, inputs, strict=True)
    }
    (out,) = Executor(program, backend).run(bound, loaded).values()
    return torch.from_numpy(out.to_numpy()).float()


def test_a_transposed_operand_is_stored_in_the_order_of_its_source() -> None:
    g = IRBuilder()
    q, k = g.input("q", 3, 5, 8), g.input("k", 3, 7, 8)
    keys = g("aten.div.Tensor", g("aten.transpose.int", k, 1, 2), g.input("s", 1))
    g.output(g("aten.bmm.default", q, keys))
    program = compiled(g, "float32")
    division, product = program.plan.calls
    assert division.outputs[0].shape == (3, 7, 8) and division.outputs[0].is_contiguous
    assert all(view.strides[-1] in (0, 1) for view in division.inputs)
    assert product.inputs[1].strides == (56, 1, 8)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=generator) for shape in [(3, 5, 8), (3, 7, 8)])
    torch.testing.assert_close(result(program, {}, q, k, torch.tensor([2.5])), q @ k.transpose(1, 2) / 2.5)


def test_an_operand_that_others_read_too_keeps_its_order() -> None:
    g = IRBuilder()
    q, k = g.input("q", 3, 5, 8), g.input("k", 3, 7, 8)
    keys = g("aten.neg.default", g("aten.transpose.int", k, 1, 2))
    g.output(g("aten.bmm.default", q, keys), g("aten.cumsum.default", keys, -1))
    assert compiled(g, "float32").plan.calls[0].outputs[0].shape == (3, 8, 7)


def test_a_constant_float32_bias_is_rounded_once() -> None:
    g = IRBuilder()
    x, weight = g.input("x", 64, 16), g.weight("w", 32, 16)
    bias = g("aten.cat.default", [g.weight("b", 16), g.constant("zeros", [0.25] * 16)], 0)
    g.output(g("aten.linear.default", x, weight, bias))
    program = compiled(g, "float16")
    (product,) = program.plan.calls
    assert [view.dtype for view in product.inputs] == ["float16"] * 3
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator) for shape in [(64, 16), (32, 16), (16,)])
    expected = torch.nn.functional.linear(x, w, torch.cat([b, torch.full((16,), 0.25)]))
    torch.testing.assert_close(result(program, {"w": w, "b": b}, x.half()), expected, atol=1e-2, rtol=1e-2)
