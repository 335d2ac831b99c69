"""Reductions and softmaxes on CUDA: how threads walk the elements, and what the kernels compute, as C++ for the CPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cuda_on_cpu import EmulatedBackend
from cuda_reference import LaidOut, ReferenceBackend
from cuda_toolchain import compile_in_turn
from drawn import drawn
from metal_cases.reduce import FLOAT_OPS, INDEX_OPS, LOGICAL_OPS, reduction
from metal_cases.softmax import plain
from metal_harness import Case, T, call_of, run_case
from torch import nn
from torch_ir import extract_ir

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import kernel_launch_of
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import contiguous_strides
from npu_runtime import Executor, NPUBuffer, load_weights

OPS = (*FLOAT_OPS, *INDEX_OPS, *LOGICAL_OPS, "prod")


def in_order(shape: tuple[int, ...], order: tuple[int, ...], dtype: str = "compute", values: Any = None) -> T:
    """An operand whose dimensions lie in memory in `order`, from the outermost to the innermost one."""
    packed = contiguous_strides(tuple(shape[dim] for dim in order))
    strides = tuple(packed[order.index(dim)] for dim in range(len(shape)))
    return T(shape, dtype, strides, values=values)


def calls_of(case: Case, dtype: str = "float16", capability: int = 90) -> tuple[list[KernelCall], Specializer]:
    make = Specializer(GPU(capability=capability))
    return expand(make, call_of(case, dtype)), make


def drawn_case(draw: Random) -> Case:
    """A reduction of any kind over dimensions of any sizes, in any order in memory, with and without gaps."""
    rank = draw.randint(1, 4)
    sizes = [draw.choice([1, 2, 3, 5, 8, 16, 24, 40, 63]) for _ in range(rank)]
    if draw.random() < 0.3:
        sizes[draw.randrange(rank)] = draw.choice([600, 1031, 4096])
    while math.prod(sizes) > 10_000:
        sizes[sizes.index(max(sizes))] //= 3
    order = draw.sample(range(rank), rank)
    dtype = draw.choice(["compute", "compute", "float32", "int32", "bool"])
    op = draw.choice(OPS if dtype in ("compute", "float32") else ("sum", "max", "argmin", "any", "all", "prod"))
    x = in_order(tuple(sizes), tuple(order), dtype, values=(0.5, 1.5) if op == "prod" and dtype != "int32" else None)
    x = T(x.shape, x.dtype, x.strides, draw.choice([0, 0, 8, 3]), x.values or "normal")
    dims = draw.randint(0, rank)
    kept = x.shape[: rank - dims]
    wanted = "int32" if op in INDEX_OPS else "bool" if op in LOGICAL_OPS else dtype
    wanted = "int32" if wanted == "bool" and op not in LOGICAL_OPS else wanted
    out = in_order(kept, tuple(draw.sample(range(len(kept)), len(kept))), wanted)
    correction = 0.0 if math.prod(x.shape[rank - dims :]) < 2 else draw.choice([0.0, 1.0])
    order_of_norm = draw.choice([2.0, 2.0, 1.0, 0.0, 3.0, math.inf, -math.inf])
    name = "-".join(map(str, (dtype, *sizes, *order, dims, x.offset)))
    return reduction(op, name, x, dims, out, correction=correction, order=order_of_norm)


def test_drawn_reductions_are_those_of_the_cpu_device(seed: int, tmp_path: Path) -> None:
    draw, backend = Random(seed), EmulatedBackend(tmp_path)
    for _ in range(3):
        run_case(drawn_case(draw), backend, draw.choice(["float16", "bfloat16"]), seed)


@pytest.mark.parametrize("op", drawn(OPS, 1 / 8))
def test_blocks_that_share_results_find_those_of_the_cpu_device(op: str, seed: int, tmp_path: Path) -> None:
    draw = Random(f"{seed} {op}")
    shape = draw.choice([(20_011,), (2, 20_480), (4_111, 3)])
    order = tuple(draw.sample(range(len(shape)), len(shape)))
    values = (0.999, 1.001) if op == "prod" else draw.choice(["normal", "small"])
    x = in_order(shape, order, draw.choice(["compute", "float32"]), values)
    case = reduction(op, "-".join(map(str, (*shape, *order))), x, 1 if shape[0] < 5000 else len(shape))
    run_case(case, EmulatedBackend(tmp_path), "bfloat16", seed)


def test_drawn_softmaxes_are_those_of_the_cpu_device(seed: int, tmp_path: Path) -> None:
    draw, backend = Random(seed), EmulatedBackend(tmp_path)
    for _ in range(3):
        shape = tuple(draw.choice([1, 2, 3, 8, 20, 24]) for _ in range(draw.randint(1, 3)))
        shape = (*shape, draw.choice([1, 3, 40, 300]))
        orders = [tuple(draw.sample(range(len(shape)), len(shape))) for _ in range(2)]
        x, out = (in_order(shape, draw.choice(orders), draw.choice(["compute", "float32"])) for _ in range(2))
        case = draw.choice(plain("-".join(map(str, (*shape, x.strides, out.strides))), x, out, 0.5))
        run_case(case, backend, draw.choice(["float16", "bfloat16"]), seed)


def numbers_of(case: Case, *names: str) -> tuple[int, ...]:
    """Return constants of the kernel of a case."""
    (call,), make = calls_of(case)
    text = make.sources[call.source]
    return tuple(int(re.findall(rf"constexpr int {name} = (\d+);", text)[0]) for name in names)


def walk_of(op: str, x: T, dims: int, out: T | None = None) -> tuple[int, ...]:
    """Return the elements of an access, and the numbers of threads beside each other, of walkers and of chunks."""
    return numbers_of(reduction(op, "walk", x, dims, out), "pack", "columns", "walkers", "chunks")


@pytest.mark.parametrize(
    "shape, numbers",
    [((16, 128, 3137), (8, 2, 512)), ((16, 19, 3137), (1, 16, 64)), ((4, 20_000, 21), (8, 32, 8))],
    ids=["few", "odd", "many"],
)
def test_a_softmax_across_neighbours_reads_these_together(shape: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    x = in_order(shape, (0, 2, 1))
    case = plain("columns", x, x)[0]
    assert [call.kernel for call in calls_of(case)[0]] == ["softmax_columns"]
    assert numbers_of(case, "pack", "columns", "walkers") == numbers


def test_a_softmax_across_neighbours_leaves_the_chains_around_it_to_kernels_that_read_them_together() -> None:
    class Classes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.exp().softmax(1) + 1).tanh()

    program = npu_compiler.compile(
        extract_ir(Classes(), (torch.randn(2, 21, 64, 64, device="meta"),)), target=CUDACodegenTarget()
    )
    kernels = [call.kernel for call in program.plan.calls]
    assert kernels == ["exp_kernel", "softmax_columns", "fused_add_tanh"]


@pytest.mark.parametrize("stored_last", [0, 2])
def test_a_softmax_whose_rows_are_read_or_stored_side_by_side_has_a_team_for_each(stored_last: int) -> None:
    rows, columns = in_order((3, 24, 40), (0, 1, 2)), in_order((3, 24, 40), (0, 2, 1))
    case = plain("rows", *((rows, columns) if stored_last else (columns, rows)))[0]
    assert [call.kernel for call in calls_of(case)[0]] == ["softmax_kernel"]


def test_a_few_terms_of_many_results_are_summed_by_a_thread_for_each_vector_of_results() -> None:
    x = in_order((16, 56, 56, 64, 2), (0, 1, 2, 4, 3))
    assert walk_of("sum", x, 1) == (8, 256, 1, 1)


def test_neighbouring_results_are_read_together_by_blocks_that_share_long_columns() -> None:
    pack, columns, walkers, chunks = walk_of("norm", in_order((16, 320, 3136), (0, 2, 1)), 1)
    assert (pack, columns * walkers) == (8, 256)
    assert columns >= 8 and 80 * 8 // columns * chunks >= 132


def test_short_rows_have_a_few_lanes_each_and_a_long_one_has_many_blocks() -> None:
    assert walk_of("max", T((1_000_000, 8)), 1) == (8, 256, 1, 1)
    pack, columns, walkers, chunks = walk_of("argmax", T((1, 151_936)), 1)
    assert (pack, columns, walkers) == (8, 1, 256) and chunks > 8


def test_reduced_dimensions_are_walked_in_their_order_in_memory_unless_it_matters() -> None:
    x = in_order((4, 30, 16), (0, 2, 1))
    assert walk_of("max", x, 3)[0] == 8
    (call,), _ = calls_of(reduction("argmax", "ordered", x, 3))
    assert call.inputs[0].strides == (480, 1, 30)


class Split(nn.Module):
    """A split attention: two halves of a convolution's maps, weighted by what their reduction over space says."""

    def __init__(self, reduction: str, parts: int) -> None:
        super().__init__()
        self.reduce = getattr(torch, reduction)
        self.first, self.last = nn.Conv2d(16, 32 * parts, 3), nn.Conv2d(32, 16, 1)
        self.weigh, self.parts = nn.Linear(32, 32 * parts), parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.first(x).relu().unflatten(1, (self.parts, 32))
        weights = self.weigh(self.reduce(maps, 1).mean((2, 3))).unflatten(1, (self.parts, 32, 1, 1)).softmax(1)
        return self.last(self.reduce(maps * weights, 1))


@pytest.mark.parametrize("reduction", ["sum", "mean", "amax", "amin", "prod"])
def test_split_attention_reads_its_maps_as_they_lie_and_writes_their_sum(reduction: str, seed: int) -> None:
    torch.manual_seed(seed)
    parts = Random(seed).randint(2, 5)
    module, x = Split(reduction, parts).eval(), torch.randn(3, 16, 9, 11)
    ir = extract_ir(module, (x,), strict=False).to_dict()
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    plan = npu_compiler.compile(ir, CUDACodegenTarget(), options).plan
    kernels = [call.kernel for call in plan.calls]
    assert not [name for name in kernels if name in (f"{reduction}_kernel", "max_kernel", "min_kernel")]
    joined = [call for call in plan.calls if call.kernel.startswith("fused_") and len(call.inputs) == 2 * parts]
    assert [call.outputs[0].strides[-1] for call in joined] == [1]
    assert {view.strides[-1] for view in joined[0].inputs} == {1}
    program = npu_compiler.compile(ir, LaidOut(), npu_compiler.CompileOptions(compute_dtype="float32"))
    backend = ReferenceBackend()
    weights = load_weights(module.state_dict(), program, backend)
    given = {program.input_specs[0].name: NPUBuffer.from_numpy(x.numpy(), backend, spec=program.input_specs[0])}
    (result,) = Executor(program, backend).run(given, weights).values()
    torch.testing.assert_close(torch.from_numpy(result.to_numpy()), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sources_of_drawn_reductions_compile(seed: int) -> None:
    draw = Random(seed)
    sources = {}
    for _ in range(24):
        sources |= calls_of(drawn_case(draw), draw.choice(["float16", "bfloat16"]), draw.choice([80, 90]))[1].sources
    compile_in_turn(sources.values())


def test_a_reduction_has_a_grid_even_without_results() -> None:
    assert calls_of(reduction("sum", "nothing", T((0, 4))))[0] == []
    (call,), _ = calls_of(reduction("sum", "one", T((1, 1))))
    assert kernel_launch_of(call).grid == (1, 1, 1)
