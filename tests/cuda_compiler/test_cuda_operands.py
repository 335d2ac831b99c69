"""Operands of products that the CUDA target stores in another order or dtype than the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import run_on_cpu
from cuda_reference import LaidOut, ReferenceBackend
from ir_builder import IRBuilder
from torch import nn

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_sim.extract import extract_ir


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


def heads(g: IRBuilder, joint: str, number: int, size: int, tokens: int = 64) -> str:
    """One of three tensors of 16 heads [2, 16, tokens, size], which lie side by side in the rows of a joint one."""
    part = g("aten.slice.Tensor", joint, 2, 16 * size * number, 16 * size * (number + 1))
    return g("aten.transpose.int", g("aten.reshape.default", part, [2, tokens, 16, size]), 1, 2)


def kernels(program: CompiledProgram) -> list[str]:
    return [call.kernel for call in program.plan.calls]


def products_of_heads(tokens: int) -> IRBuilder:
    """A graph of two products of heads of a joint projection."""
    g = IRBuilder()
    joint = g.input("x", 2, tokens, 3 * 16 * 24)
    q, k, v = (heads(g, joint, number, 24, tokens) for number in range(3))
    scores = g("aten.matmul.default", q, g("aten.transpose.int", k, 2, 3))
    g.output(g("aten.matmul.default", g("aten.relu.default", scores), v))
    return g


@pytest.mark.parametrize(("tokens", "kernel"), [(256, "batched_halves"), (4096, "cublas_gemm")])
def test_products_of_heads_of_a_joint_projection_use_tensor_cores(tokens: int, kernel: str) -> None:
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    names = kernels(npu_compiler.compile(products_of_heads(tokens).ir(), CUDACodegenTarget(), options))
    assert names.count(kernel) == 2 and "tiled_batched" not in names


def test_products_of_heads_of_a_joint_projection_have_their_results() -> None:
    g = products_of_heads(256)
    x = 0.1 * torch.randn(2, 256, 3 * 16 * 24, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(2, (16, 24)).transpose(1, 2) for part in x.half().float().split(16 * 24, 2))
    expected = F.relu(q @ k.transpose(2, 3)) @ v
    torch.testing.assert_close(result(compiled(g, "float16"), {}, x.half()), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("size", [6, 20, 160])
def test_attention_over_odd_and_wide_heads_uses_tensor_cores(size: int) -> None:
    g = IRBuilder()
    joint = g.input("x", 2, 64, 3 * 16 * size)
    g.output(g("aten.scaled_dot_product_attention.default", *(heads(g, joint, number, size) for number in range(3))))
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    names = kernels(npu_compiler.compile(g.ir(), CUDACodegenTarget(), options))
    assert "attention_plain" not in names
    assert names.count("batched_halves") == (2 if size == 160 else 0)
    x = torch.randn(2, 64, 3 * 16 * size, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(2, (16, size)).transpose(1, 2) for part in x.half().float().split(16 * size, 2))
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(result(compiled(g, "float16"), {}, x.half()), expected, atol=5e-3, rtol=5e-3)


def test_attention_among_channels_reads_tokens_where_they_lie() -> None:
    g = IRBuilder()
    joint = g.input("x", 2, 400, 3 * 16 * 24)
    channels = [g("aten.transpose.int", heads(g, joint, number, 24, 400), 2, 3) for number in range(3)]
    g.output(g("aten.scaled_dot_product_attention.default", *channels))
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    names = kernels(npu_compiler.compile(g.ir(), CUDACodegenTarget(), options))
    assert names == ["batched_halves", "softmax_kernel", "batched_halves"]
    x = torch.randn(2, 400, 3 * 16 * 24, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(2, (16, 24)).permute(0, 2, 3, 1) for part in x.half().float().split(16 * 24, 2))
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(result(compiled(g, "float16"), {}, x.half()), expected, atol=5e-3, rtol=5e-3)


class AttentionOverPixels(nn.Module):
    """Attention of a vision network whose queries, keys and values are channels of one image."""

    def __init__(self, heads: int, width: int, value_width: int, side: int, with_bias: bool) -> None:
        super().__init__()
        self.sizes, self.heads = [width, width, value_width], heads
        self.before = nn.Conv2d(16, heads * sum(self.sizes), 1)
        self.after = nn.Conv2d(heads * value_width, 16, 1)
        self.bias = nn.Parameter(torch.randn(heads, side * side, side * side)) if with_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.before(x).unflatten(1, (self.heads, -1)).flatten(3).split(self.sizes, 2)
        scores = q.transpose(-2, -1) @ k * q.shape[2] ** -0.5
        weights = (scores if self.bias is None else scores + self.bias).softmax(-1)
        return self.after((v @ weights.transpose(-2, -1)).reshape(x.shape[0], -1, *x.shape[2:]))


def test_attention_over_channels_of_an_image_reads_them_where_they_lie(seed: int) -> None:
    draw = Random(seed)
    torch.manual_seed(seed)
    for _ in range(3):
        side = draw.randint(3, 9)
        sizes = draw.randint(1, 4), 8 * draw.randint(1, 4), 8 * draw.randint(1, 8), side
        module = AttentionOverPixels(*sizes, with_bias=draw.random() < 0.5).eval()
        x = torch.randn(draw.randint(1, 3), 16, side, side)
        options, ir = npu_compiler.CompileOptions(compute_dtype="float16"), extract_ir(module, [x])
        names = kernels(npu_compiler.compile(ir, CUDACodegenTarget(), options))
        last = max(number for number, name in enumerate(names) if "attention" in name)
        assert not [name for name in names[: last + 2] if "copy" in name or "transpose" in name], names
        program = npu_compiler.compile(ir, LaidOut(), options)
        with torch.no_grad():
            expected = module(x.half().float())
        torch.testing.assert_close(result(program, module.state_dict(), x.half()), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("op", "function"), [("sum.dim_IntList", torch.sum), ("mean.dim", torch.mean), ("linalg_vector_norm", torch.norm)]
)
def test_sums_of_columns_read_several_at_a_time(op: str, function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    g = IRBuilder()
    x = g.input("x", 3, 40, 17, 36)
    g.output(g(f"aten.{op}", x, [1, 2]) if "." in op else g(f"aten.{op}.default", x, 2, [1, 2]))
    program = npu_compiler.compile(g.ir(), CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype="float16"))
    name = op.removeprefix("linalg_vector_").split(".")[0]
    assert kernels(program) == [f"{name}_kernel"]
    (source,) = program.plan.sources.values()
    assert "constexpr bool along = false;" in source and "constexpr int pack = 4;" in source
    values = torch.randn(3, 40, 17, 36, generator=torch.Generator().manual_seed(0)).half()
    memory = run_on_cpu(program.plan, {"x": values.numpy()}, tmp_path)
    (view,) = program.plan.output_views.values()
    sums = torch.from_numpy(memory[view.buffer]).float().reshape(3, 36)
    torch.testing.assert_close(sums, function(values.float(), dim=(1, 2)), atol=2e-2, rtol=2e-3)
