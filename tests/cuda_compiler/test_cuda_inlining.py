"""Gathers, concatenations, and chains around a softmax or norm, that kernels of the CUDA target compute besides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import EmulatedBackend, run_on_cpu
from drawn import drawn
from ir_builder import IRBuilder, Tensor
from random_concatenations import RandomConcatenations
from random_rows import RandomRows
from torch import nn

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.elementwise import kernel_source
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir

RNG = np.random.default_rng(0)


def compiled(graph: IRBuilder, dtype: str = "float32") -> CompiledProgram:
    options = npu_compiler.CompileOptions(compute_dtype=dtype)
    return npu_compiler.compile(graph.ir(), target=CUDACodegenTarget(), options=options)


def results(program: CompiledProgram, folder: Path, **inputs: torch.Tensor) -> list[torch.Tensor]:
    plan = program.plan
    values = {name: x.numpy() for name, x in inputs.items()} | dict(plan.constants)
    memory = run_on_cpu(plan, values, folder)
    return [torch.from_numpy(memory[view.buffer]).reshape(view.shape) for view in plan.output_views.values()]


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape, np.float32))


@pytest.mark.parametrize("turned", [False, True])
def test_a_chain_reads_gathered_elements_in_its_own_order(turned: bool, tmp_path: Path) -> None:
    g = IRBuilder()
    x, y, index = g.input("x", 3, 7, 11), g.input("y", 3, 7, 7), g.input("index", 3, 7, 7, dtype="int64")
    picked = g("aten.gather.default", x, -1, index)
    picked = g("aten.transpose.int", picked, 1, 2) if turned else picked
    g.output(g("aten.exp.default", g("aten.add.Tensor", picked, y)))
    program = compiled(g)
    assert [call.kernel for call in program.plan.calls] == ["fused_add_exp"]
    assert program.plan.arena_bytes == 0
    values = normal(3, 7, 11), normal(3, 7, 7)
    at = torch.from_numpy(RNG.integers(0, 11, (3, 7, 7)))
    (result,) = results(program, tmp_path, x=values[0], y=values[1], index=at.int())
    gathered = values[0].gather(-1, at)
    expected = torch.exp((gathered.transpose(1, 2) if turned else gathered) + values[1])
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pairs_are_rotated_by_one_kernel(dtype: str, tmp_path: Path) -> None:
    g = IRBuilder()
    x, cos, sin = g.input("x", 2, 9, 8), g.input("cos", 9, 8), g.input("sin", 9, 8)
    even, odd = (g("aten.slice.Tensor", x, 2, first, 8, 2) for first in (0, 1))
    turned = g("aten.stack.default", [g("aten.neg.default", odd), even], -1)
    turned = g("aten.reshape.default", turned, [2, 9, 8])
    g.output(g("aten.add.Tensor", g("aten.mul.Tensor", x, cos), g("aten.mul.Tensor", turned, sin)))
    program = compiled(g, dtype)
    assert len(program.plan.calls) == 1
    values = {
        name: normal(*shape).to(getattr(torch, dtype))
        for name, shape in [("x", (2, 9, 8)), ("cos", (9, 8)), ("sin", (9, 8))]
    }
    (result,) = results(program, tmp_path, **values)
    whole, c, s = (value.float() for value in values.values())
    rotated = torch.stack([-whole[..., 1::2], whole[..., ::2]], -1).reshape(2, 9, 8)
    torch.testing.assert_close(result.float(), whole * c + rotated * s, atol=4e-3, rtol=1e-3)


@pytest.mark.parametrize("sizes", [(1, 5, 2), (8, 20, 4)], ids=["elements", "vectors"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_concatenation_of_any_pieces_is_read_where_it_is_used(
    dim: int, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_source, "_ENOUGH_THREADS", 1)  # vectors however small a tensor is
    g = IRBuilder()
    shapes = [tuple(size if at == dim else 3 if at < 2 else 4 for at in range(3)) for size in sizes]
    pieces = [g.input(f"x{at}", *shape) for at, shape in enumerate(shapes)]
    whole = tuple(sum(shape[at] for shape in shapes) if at == dim else shapes[0][at] for at in range(3))
    y = g.input("y", *whole)
    ops = ("aten.exp.default", "aten.neg.default", "aten.tanh.default")
    parts = [g(op, piece) for op, piece in zip(ops, pieces, strict=True)]
    g.output(g("aten.mul.Tensor", g("aten.cat.default", parts, dim), y))
    program = compiled(g)
    assert len(program.plan.calls) == 1 and program.plan.arena_bytes == 0
    values = {f"x{at}": normal(*shape) for at, shape in enumerate(shapes)} | {"y": normal(*whole)}
    (result,) = results(program, tmp_path, **values)
    joined = torch.cat([values["x0"].exp(), -values["x1"], values["x2"].tanh()], dim)
    torch.testing.assert_close(result, joined * values["y"])


@pytest.mark.parametrize("number", drawn(range(12), 1 / 3))
def test_drawn_chains_around_concatenations_have_pytorchs_results(
    number: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number % 2:
        monkeypatch.setattr(kernel_source, "_ENOUGH_THREADS", 1)  # vectors however small a tensor is
    module = RandomConcatenations(seed + number, moves=True).eval()
    ir, expected = extract_ir(module, (module.example,)), module(module.example)
    options = npu_compiler.CompileOptions(compute_dtype="float32")
    program = npu_compiler.compile(ir, target=CUDACodegenTarget(), options=options)
    found = results(program, tmp_path, **{program.input_specs[0].name: module.example})
    for result, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-4, rtol=1e-4, msg=module.source)


class DualPath(nn.Module):
    """Blocks of which each adds to some channels and appends others, and reads all of them, as DPN does.

    Args:
        joins: Whether a block returns one tensor, which the next one takes apart.
    """

    def __init__(self, kept: int, growth: int, depth: int, joins: bool) -> None:
        super().__init__()
        self.kept, self.joins = kept, joins
        widths = range(kept + growth, kept + growth * (depth + 1), growth)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Conv2d(width, kept + growth, 1) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, dense = x[:, : self.kept], x[:, self.kept :]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            whole = x if self.joins else torch.cat([kept, dense], 1)
            y = layer(norm(whole).relu())
            if self.joins:
                kept, dense = x[:, : self.kept], x[:, self.kept :]
            kept, added = kept + y[:, : self.kept], y[:, self.kept :]
            x, dense = torch.cat([kept, dense, added], 1), torch.cat([dense, added], 1)
        return (x if self.joins else torch.cat([kept, dense], 1)).relu()


@pytest.mark.parametrize("joins", [False, True])
def test_a_concatenation_of_values_that_are_stored_anyway_is_not_stored(joins: bool) -> None:
    depth = 4
    module = DualPath(16, 8, depth, joins).eval()
    program = npu_compiler.compile(extract_ir(module, (torch.randn(2, 24, 6, 6),)), target=CUDACodegenTarget())
    kernels = [call.kernel for call in program.plan.calls]
    assert sum("scale_shift_relu" in kernel for kernel in kernels) == depth
    assert "add_kernel" not in kernels, "a sum is computed where it is first read, and stored there for the next one"
    assert "copy_kernel" not in kernels, "new channels are stored behind those before by what reads them first"


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("widths", [(16, 8), (5, 3)])
def test_dual_paths_have_pytorchs_results(
    widths: tuple[int, int], joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_source, "_ENOUGH_THREADS", 1)  # vectors however small a tensor is
    torch.manual_seed(0)
    module = DualPath(*widths, 3, joins).eval()
    x = torch.randn(2, sum(widths), 5, 4)
    target = CUDACodegenTarget(GPU(capability=80))
    with torch.no_grad():
        ir, expected = extract_ir(module, (x,)), module(x)
    plan = npu_compiler.partition(ir, target=target, compute_dtype="float16")
    dag = DAGExecutor(plan, EmulatedBackend(tmp_path, target))
    dag.load_weights(module.state_dict())
    (name,) = [each["name"] for each in ir["graph_inputs"]]
    (result,) = dag.execute({name: x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result).float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [16, 6])
def test_a_sum_that_is_first_read_as_a_part_is_stored_for_others(
    width: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_source, "_ENOUGH_THREADS", 1)  # vectors however small a tensor is
    g = IRBuilder()
    x, y, z = (g.input(name, 5, width) for name in "xyz")
    added = g("aten.add.Tensor", x, y)
    g.output(g("aten.exp.default", g("aten.cat.default", [added, z, y], 1)))
    g.output(g("aten.mm.default", z, g("aten.t.default", added)))
    program = compiled(g, dtype)
    kernels = [call.kernel for call in program.plan.calls]
    assert kernels[0] == "exp_kernel" and len(kernels) == 2
    kind = getattr(torch, dtype)
    values = {name: normal(5, width).to(kind) for name in "xyz"}
    found = results(program, tmp_path, **values)
    x, y, z = (value.float() for value in values.values())
    whole = (x + y).to(kind).float()  # as it is stored
    expected = [torch.cat([whole, z, y], 1).exp(), z @ whole.T]
    for result, reference in zip(found, expected, strict=True):
        near = {} if kind == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
        torch.testing.assert_close(result.float(), reference.to(kind).float(), **near)


class Overwritten(nn.Module):
    """A concatenation of which a piece is replaced before others read it, and is read as a whole too."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.cat([x, y], 1)
        whole[:, : x.shape[1]] = y
        return whole.relu(), whole[:, : x.shape[1]] + whole[:, x.shape[1] :]


def test_pieces_are_read_as_they_were_written_last(tmp_path: Path) -> None:
    values = {"x": normal(3, 8), "y": normal(3, 8)}
    ir = extract_ir(Overwritten(), tuple(values.values()))
    options = npu_compiler.CompileOptions(compute_dtype="float32")
    program = npu_compiler.compile(ir, target=CUDACodegenTarget(), options=options)
    found = results(program, tmp_path, **values)
    torch.testing.assert_close(tuple(found), Overwritten()(*values.values()))


def test_what_others_read_too_is_stored() -> None:
    g = IRBuilder()
    x, index = g.input("x", 7, 11), g.input("index", 7, 7, dtype="int64")
    picked = g("aten.gather.default", x, -1, index)
    g.output(picked)
    g.output(g("aten.exp.default", picked))
    assert [call.kernel for call in compiled(g).plan.calls] == ["gather_kernel", "exp_kernel"]


def test_what_is_read_more_than_once_is_stored() -> None:
    g = IRBuilder()
    x, index, y = g.input("x", 7, 11), g.input("index", 7, 7, dtype="int64"), g.input("y", 9, 7, 7)
    g.output(g("aten.add.Tensor", g("aten.gather.default", x, -1, index), y))
    assert [call.kernel for call in compiled(g).plan.calls] == ["gather_kernel", "add_kernel"]


@pytest.mark.parametrize("width", [6, 40])
def test_a_softmax_computes_its_logits(width: int, tmp_path: Path) -> None:
    g = IRBuilder()
    x, y, index = g.input("x", 5, width, 11), g.input("y", width), g.input("index", 5, width, width, dtype="int64")
    picked = g("aten.transpose.int", g("aten.gather.default", x, -1, index), 1, 2)
    g.output(g("aten.softmax.int", g("aten.mul.Tensor", picked, y), -1))
    program = compiled(g)
    assert [call.kernel for call in program.plan.calls] == ["fused_softmax_kernel"]
    values = {"x": normal(5, width, 11), "y": normal(width)}
    at = torch.from_numpy(RNG.integers(0, 11, (5, width, width)))
    (result,) = results(program, tmp_path, index=at.int(), **values)
    logits = values["x"].gather(-1, at).transpose(1, 2) * values["y"]
    torch.testing.assert_close(result, logits.softmax(-1))


@pytest.mark.parametrize("width, dtype", [(8, "float32"), (40, "float16"), (36, "float32")])
def test_a_norm_computes_its_sums_and_stores_them_for_others(width: int, dtype: str, tmp_path: Path) -> None:
    g = IRBuilder()
    x, y, scale = g.input("x", 7, width), g.input("y", 7, width), g.input("s", width)
    total = g("aten.add.Tensor", x, g("aten.mul.Tensor", y, scale))
    normed = g("aten.layer_norm.default", total, [width], g.input("w", width), g.input("b", width), 1e-5)
    g.output(normed, g("aten.neg.default", g("aten.t.default", total)))
    program = compiled(g, dtype)
    assert [call.kernel for call in program.plan.calls] == ["fused_layernorm_kernel", "neg_kernel"]
    kind = getattr(torch, dtype)
    shapes = {"x": (7, width), "y": (7, width), "s": (width,), "w": (width,), "b": (width,)}
    values = {name: normal(*shape).to(kind) for name, shape in shapes.items()}
    result, turned = results(program, tmp_path, **values)
    x, y, s, w, b = (value.float() for value in values.values())
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if dtype == "float16" else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(turned.float(), -(x + y * s).t(), **tolerance)
    torch.testing.assert_close(result.float(), torch.nn.functional.layer_norm(x + y * s, (width,), w, b), **tolerance)


def test_rows_too_long_for_registers_are_stored() -> None:
    g = IRBuilder()
    g.output(g("aten.softmax.int", g("aten.exp.default", g.input("x", 2, 200_000)), -1))
    assert [call.kernel for call in compiled(g).plan.calls] == ["exp_kernel", "softmax_kernel"]


def kernels(program: CompiledProgram) -> list[str]:
    return [call.kernel for call in program.plan.calls]


def normed(g: IRBuilder, x: Tensor) -> Tensor:
    return g("aten.layer_norm.default", x, list(g.shape(x)[-1:]), None, None, 1e-5)


def swapped(g: IRBuilder, x: Tensor) -> Tensor:
    """The 10 rows of x, of which first every even one and then every odd one."""
    pairs = g("aten.transpose.int", g("aten.reshape.default", x, [5, 2, g.shape(x)[-1]]), 0, 1)
    return g("aten.reshape.default", pairs, list(g.shape(x)))


@pytest.mark.parametrize("number", drawn(range(24), 1 / 4))
def test_drawn_chains_around_rows_have_pytorchs_results(number: int, seed: int, tmp_path: Path) -> None:
    module = RandomRows(seed + number).eval()
    options = npu_compiler.CompileOptions(compute_dtype="float32")
    program = npu_compiler.compile(extract_ir(module, module.examples), target=CUDACodegenTarget(), options=options)
    inputs = dict(zip((spec.name for spec in program.input_specs), module.examples, strict=True))
    found = results(program, tmp_path, **inputs)
    for result, reference in zip(found, module(*module.examples), strict=True):
        torch.testing.assert_close(result, reference, atol=1e-4, rtol=1e-4, msg=module.source)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [8, 40, 37])
@pytest.mark.parametrize("op", ["aten.softmax.int", "aten.log_softmax.int", "aten.rms_norm.default"])
def test_rows_are_changed_before_they_are_stored(op: str, width: int, dtype: str, tmp_path: Path) -> None:
    g = IRBuilder()
    x, y, scale = g.input("x", 2, 7, width), g.input("y", 2, 7, width), g.input("s", width)
    rows = g(op, x, *([[width]] if "norm" in op else [-1]))
    g.output(g("aten.add.Tensor", y, g("aten.mul.Tensor", g("aten.gelu.default", rows), scale)))
    program = compiled(g, dtype)
    assert len(program.plan.calls) == 1 and program.plan.arena_bytes == 0
    shapes = {"x": (2, 7, width), "y": (2, 7, width), "s": (width,)}
    values = {name: normal(*shape).to(getattr(torch, dtype)) for name, shape in shapes.items()}
    (result,) = results(program, tmp_path, **values)
    x, y, s = (value.float() for value in values.values())
    kinds = {"softmax": x.softmax(-1), "log_softmax": x.log_softmax(-1), "rms_norm": F.rms_norm(x, (width,))}
    tolerance = {"atol": 1e-2, "rtol": 1e-2} if dtype == "float16" else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(result.float(), y + F.gelu(kinds[op.split(".")[1]]) * s, **tolerance)


def test_what_reads_rows_that_are_stored_too_sees_them_as_stored(tmp_path: Path) -> None:
    g = IRBuilder()
    x, y = g.input("x", 9, 64), g.input("y", 9, 64)
    rows = normed(g, x)
    g.output(rows, g("aten.add.Tensor", rows, y))
    program = compiled(g, "float16")
    assert kernels(program) == ["fused_layernorm_kernel"]
    values = {name: normal(9, 64).half() for name in ("x", "y")}
    stored, total = results(program, tmp_path, **values)
    torch.testing.assert_close(total, stored + values["y"], atol=0, rtol=0)


def test_a_norm_adds_its_result_to_the_sum_that_it_is_of(tmp_path: Path) -> None:
    g = IRBuilder()
    x, y = g.input("x", 9, 40), g.input("y", 9, 40)
    total = g("aten.add.Tensor", x, y)
    g.output(g("aten.add.Tensor", total, normed(g, total)))
    program = compiled(g)
    assert kernels(program) == ["fused_layernorm_kernel"]
    values = {name: normal(9, 40) for name in ("x", "y")}
    (result,) = results(program, tmp_path, **values)
    total = values["x"] + values["y"]
    torch.testing.assert_close(result, total + F.layer_norm(total, (40,)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("read_again", [False, True])
def test_a_chain_between_norms_is_computed_where_fewer_values_are_stored(read_again: bool) -> None:
    g = IRBuilder()
    x, y = g.input("x", 9, 40), g.input("y", 9, 40)
    first = normed(g, x)
    total = g("aten.add.Tensor", first, y)
    g.output(normed(g, total), *([first] if read_again else []))
    expected = ["fused_layernorm_kernel", "layernorm_kernel"]
    assert kernels(compiled(g)) == (expected[::-1] if read_again else expected)


def test_a_chain_of_what_is_computed_later_stands_behind_the_norm(tmp_path: Path) -> None:
    g = IRBuilder()
    x, y = g.input("x", 9, 40), g.input("y", 9, 40)
    first, second = normed(g, x), g("aten.sum.dim_IntList", y, [0], True)
    g.output(g("aten.add.Tensor", first, second))
    program = compiled(g)
    assert kernels(program)[0] == "layernorm_kernel" and kernels(program)[-1] == "add_kernel"
    values = {name: normal(9, 40) for name in ("x", "y")}
    (result,) = results(program, tmp_path, **values)
    torch.testing.assert_close(result, F.layer_norm(values["x"], (40,)) + values["y"].sum(0, True))


@pytest.mark.parametrize("of_sum", [False, True])
def test_a_norm_adds_only_what_its_threads_have_themselves(of_sum: bool, tmp_path: Path) -> None:
    g = IRBuilder()
    x, y = g.input("x", 10, 40), g.input("y", 10, 40)
    total = g("aten.add.Tensor", x, y)
    rows = normed(g, total)
    g.output(g("aten.add.Tensor", *((rows, swapped(g, total)) if of_sum else (swapped(g, rows), y))))
    values = {name: normal(10, 40) for name in ("x", "y")}
    (result,) = results(compiled(g), tmp_path, **values)
    total = values["x"] + values["y"]
    rows, order = F.layer_norm(total, (40,)), [*range(0, 10, 2), *range(1, 10, 2)]
    expected = rows + total[order] if of_sum else rows[order] + values["y"]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("op", ["aten.gt.Scalar", "aten.t.default", "aten.sum.default"])
def test_what_a_norm_does_not_store_by_elements_of_floats_in_order_has_a_kernel(op: str) -> None:
    g = IRBuilder()
    rows = normed(g, g.input("x", 40, 40))
    scalar = [0] if op == "aten.gt.Scalar" else []
    read = g(op, rows, *scalar)
    g.output(g("aten.add.Tensor", read, g.input("y", 40, 40)) if op == "aten.t.default" else read)
    assert kernels(compiled(g))[0] == "layernorm_kernel"


def test_rows_too_long_for_registers_are_read_by_more_than_one_block() -> None:
    g = IRBuilder()
    g.output(g("aten.exp.default", g("aten.softmax.int", g.input("x", 2, 200_000), -1)))
    assert kernels(compiled(g)) == ["softmax_kernel", "exp_kernel"]
