"""Elements that index tensors pick, which the CUDA target's element-wise kernels read where they use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import run_on_cpu
from ir_builder import IRBuilder
from torch import Tensor, nn

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.dtypes import numpy_dtype
from npu_sim.extract import extract_ir


def compiled(ir: dict[str, object], dtype: str = "float32") -> CompiledProgram:
    return npu_compiler.compile(ir, CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype=dtype))


def result(program: CompiledProgram, folder: Path, inputs: Sequence[Tensor]) -> Tensor:
    plan = program.plan
    values = dict(plan.constants)
    for spec, value in zip(program.input_specs, inputs, strict=True):
        values[spec.name] = value.numpy().astype(numpy_dtype(plan.buffers[spec.name].dtype))
    memory = run_on_cpu(plan, values, folder)
    (view,) = plan.output_views.values()
    return torch.from_numpy(memory[view.buffer]).reshape(view.shape)


def kernels(program: CompiledProgram) -> list[str]:
    return [call.kernel for call in program.plan.calls]


def along(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x` with coordinates of one dimension picked in its place; NaN or 0 where they are out of range."""
    size = x.shape[dim]
    rows = torch.where((index < 0) | (index >= size), size, index).long()
    nothing = torch.full_like(x.select(dim, 0), torch.nan if x.is_floating_point() else 0).unsqueeze(dim)
    return torch.cat([x, nothing], dim).index_select(dim, rows.flatten()).unflatten(dim, rows.shape)


@pytest.mark.parametrize("integers", [False, True])
def test_drawn_indices_of_several_dimensions_are_followed_by_the_reader(
    integers: bool, seed: int, tmp_path: Path
) -> None:
    draw, generator = Random(seed), np.random.default_rng(seed)
    for _ in range(3):
        rank = draw.randint(1, 4)
        shape = tuple(draw.randint(2, 6) for _ in range(rank))
        first = draw.randrange(rank)
        count = draw.randint(1, rank - first)
        common = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 2)))
        indices = []
        for size in shape[first : first + count]:
            own = tuple(1 if draw.random() < 0.4 else each for each in common)
            indices.append(torch.from_numpy(generator.integers(-size - 1, size + 1, own)))
        x = torch.from_numpy(generator.integers(-99, 99, shape)) if integers else torch.randn(shape)
        broadcast = torch.broadcast_tensors(*indices)
        out = (*shape[:first], *broadcast[0].shape, *shape[first + count :])
        y = torch.from_numpy(generator.integers(-99, 99, out)) if integers else torch.randn(out)
        order = draw.sample(range(len(out)), len(out))

        g, kind = IRBuilder(), "int64" if integers else "float32"
        names = [g.input(f"index{at}", *index.shape, dtype="int64") for at, index in enumerate(indices)]
        table, other = g.input("x", *shape, dtype=kind), g.input("y", *out, dtype=kind)
        picked = g("aten.index.Tensor", table, [*[None] * first, *names])
        added = g("aten.add.Tensor", g("aten.permute.default", picked, order), g("aten.permute.default", other, order))
        g.output(g("aten.neg.default", added))
        program = compiled(g.ir())
        assert kernels(program) == ["fused_add_neg"]

        flat, missing = torch.zeros_like(broadcast[0]), torch.zeros_like(broadcast[0], dtype=torch.bool)
        for size, index in zip(shape[first : first + count], broadcast, strict=True):
            rows = torch.where(index < 0, index + size, index)
            missing |= (rows < 0) | (rows >= size)
            flat = flat * size + rows
        merged = x.flatten(first, first + count - 1)
        chosen = along(merged, first, torch.where(missing, -1, flat))
        torch.testing.assert_close(
            result(program, tmp_path, [*indices, x, y]),
            -(chosen + y).permute(order).to(chosen.dtype),
            equal_nan=True,
            check_dtype=False,
        )


@pytest.mark.parametrize("op", ["index_select", "gather"])
def test_drawn_coordinates_of_one_dimension_are_followed_by_the_reader(op: str, seed: int, tmp_path: Path) -> None:
    draw, generator = Random(seed), np.random.default_rng(seed)
    for _ in range(3):
        shape = tuple(draw.randint(2, 7) for _ in range(draw.randint(1, 3)))
        dim = draw.randrange(len(shape))
        count = draw.randint(1, 9)
        out = (*shape[:dim], count, *shape[dim + 1 :])
        index = torch.from_numpy(generator.integers(0, shape[dim], (count,) if op == "index_select" else out))
        x, y = torch.randn(shape), torch.randn(out)
        g = IRBuilder()
        rows = g.input("index", *index.shape, dtype="int64")
        picked = g(f"aten.{op}.default", g.input("x", *shape), dim, rows)
        g.output(g("aten.mul.Tensor", picked, g.input("y", *out)))
        program = compiled(g.ir())
        assert kernels(program) == ["mul_kernel"]
        expected = (x.index_select(dim, index) if op == "index_select" else x.gather(dim, index)) * y
        torch.testing.assert_close(result(program, tmp_path, [index, x, y]), expected)


@pytest.mark.parametrize("beyond", [False, True])
def test_the_norm_of_embeddings_and_positions_reads_both_tables(beyond: bool, seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    rows, length, width = draw.randint(3, 30), draw.randint(1, 9), 8 * draw.randint(1, 9)
    ids = torch.randint(0, rows, (2, length))
    ids[0, 0] = rows - 1
    table, positions, gain, bias = (
        torch.randn(*shape) for shape in ((rows, width), (length, width), (width,), (width,))
    )
    g = IRBuilder()
    names = g.input("ids", 2, length, dtype="int64")
    if beyond:  # by ids that are computed, so that nothing has checked them
        names = g("aten.add.Tensor", names, 1)
    embedded = g("aten.embedding.default", g.input("table", rows, width), names)
    summed = g("aten.add.Tensor", embedded, g.input("positions", length, width))
    g.output(g("aten.layer_norm.default", summed, [width], g.input("gain", width), g.input("bias", width), 1e-5))
    program = compiled(g.ir(), "float16")
    assert kernels(program)[-1] == "fused_layernorm_kernel" and "embedding_kernel" not in kernels(program)
    (norm,) = [call for call in program.plan.calls if call.kernel == "fused_layernorm_kernel"]
    assert "load_pack<N>(in0 + " in program.plan.sources[norm.source]
    halves = [x.half().float() for x in (table, positions, gain, bias)]
    chosen = along(halves[0], 0, ids + int(beyond))
    expected = F.layer_norm(chosen + halves[1], (width,), halves[2], halves[3])
    torch.testing.assert_close(
        result(program, tmp_path, [ids, table, positions, gain, bias]).float(),
        expected,
        atol=1e-2,
        rtol=1e-2,
        equal_nan=True,
    )


@pytest.mark.parametrize("columns", [1, 3])
def test_many_embeddings_are_read_as_vectors(columns: int, seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    rows, width = draw.randint(3, 30), 8 * draw.randint(12, 20)
    ids = torch.randint(0, rows, (columns, 300 * 8 // columns))
    table, scale = torch.randn(rows, width), torch.randn(width)
    g = IRBuilder()
    names = g.input("ids", *ids.shape, dtype="int64")
    embedded = g("aten.embedding.default", g.input("table", rows, width), names)
    g.output(g("aten.mul.Tensor", embedded, g.input("scale", width)))
    program = compiled(g.ir(), "float16")
    (call,) = program.plan.calls
    source = program.plan.sources[call.source]
    assert call.kernel == "mul_kernel" and re.search(r"load_pack<[48]>\(in\d .*picked0", source)
    assert call.bytes_moved < 3 * 2 * ids.numel() * width
    expected = table.half().float()[ids] * scale.half().float()
    torch.testing.assert_close(result(program, tmp_path, [ids, table, scale]).float(), expected, atol=1e-2, rtol=1e-2)


def test_a_concatenation_of_picked_elements_and_others_is_read_where_it_is_used(seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    rows, width = draw.randint(2, 9), draw.randint(1, 9)
    index = torch.randint(-rows, rows, (draw.randint(1, 9),))
    x, first, y = torch.randn(rows, width), torch.randn(2, width), torch.randn(2 + len(index), width)
    g = IRBuilder()
    rows_of = g.input("index", *index.shape, dtype="int64")
    picked = g("aten.index.Tensor", g.input("x", rows, width), [rows_of])
    whole = g("aten.cat.default", [g("aten.exp.default", g.input("first", 2, width)), g("aten.neg.default", picked)], 0)
    g.output(g("aten.mul.Tensor", whole, g.input("y", *y.shape)))
    program = compiled(g.ir())
    assert kernels(program) == ["mul_kernel"]
    expected = torch.cat([first.exp(), -x[index]]) * y
    torch.testing.assert_close(result(program, tmp_path, [index, x, first, y]), expected)


def test_a_large_copy_in_another_order_reads_stored_elements() -> None:
    g = IRBuilder()
    picked = g("aten.index_select.default", g.input("x", 300, 256), 0, g.input("index", 300, dtype="int64"))
    g.output(g("aten.reshape.default", g("aten.t.default", picked), [256 * 300]))
    assert kernels(compiled(g.ir())) == ["index_select_kernel", "transpose"]


class Resized(nn.Module):
    def __init__(self, size: tuple[int, int], corners: bool) -> None:
        super().__init__()
        self.size, self.corners = size, corners

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, self.size, mode="bicubic", align_corners=self.corners)


def test_bicubic_resizing_is_one_kernel(seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    for dtype, tolerance in (("float32", 1e-4), ("float16", 1e-2)):
        x = torch.randn(draw.randint(1, 2), draw.randint(1, 4), draw.randint(4, 12), draw.randint(4, 12))
        model = Resized((draw.randint(2, 14), draw.randint(2, 14)), draw.random() < 0.5)
        program = compiled(extract_ir(model, [x]), dtype)
        assert len(program.plan.calls) == 1
        kind = getattr(torch, dtype)
        expected = model(x.to(kind).float())
        torch.testing.assert_close(result(program, tmp_path, [x]).float(), expected, atol=tolerance, rtol=tolerance)
