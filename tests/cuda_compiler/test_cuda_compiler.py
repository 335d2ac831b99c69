"""The CUDA target: which calls fuse, what their sources look like, and that every source compiles. Needs no GPU."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from random import Random

import numpy as np
import pytest
from cuda_toolchain import compile_in_turn
from ir_builder import IRBuilder, Tensor
from metal_harness import all_cases, call_of

import npu_compiler
from cuda_compiler import CUDA_GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import LaunchKind, kernel_launch_of
from cuda_compiler.elementwise.grouping import MAX_CALLS, Place, find_groups, join_neighbours, may_overlap, place_of
from cuda_compiler.elementwise.kernel_source import generate_elementwise
from cuda_compiler.op_classify import classify
from cuda_compiler.resident.kernel import RESIDENT
from cuda_compiler.rules.table import RULES, expand
from cuda_compiler.specialization.c_text import float_text, offset_text
from cuda_compiler.specialization.sizes import vector_width
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View, contiguous_strides

TARGET = CUDACodegenTarget()
N = 64


def view(text: str, shape: tuple[int, ...] = (N,), dtype: str = "float32") -> View:
    """`a` is the whole of a buffer; `a@8` starts at element 8 of it; `a/2` takes every second element."""
    name, _, offset = text.partition("@")
    name, _, step = name.partition("/")
    strides = tuple(stride * int(step or 1) for stride in contiguous_strides(shape))
    return View(name, shape, strides, int(offset or 0), dtype)


def calls(text: str) -> list[KernelCall]:
    """One call a line: `out = op(operand, …)`; a number is a scalar, an op with a capital is not element-wise."""
    made = []
    for line in filter(None, map(str.strip, text.splitlines())):
        out, _, right = line.partition(" = ")
        op, _, operands = right.rstrip(")").partition("(")
        given = [x.strip() for x in operands.split(",") if x.strip()]
        scalars = [float(x) if x[0].isdigit() else None for x in given]
        inputs = tuple(view(x) for x in given if not x[0].isdigit())
        params = {} if op[0].isupper() else {"scalars": scalars, "alpha": 1}
        kernel = op if op[0].isupper() else f"{op}_kernel"
        made.append(KernelCall(kernel, "", inputs, (view(out),), params, out))
    return made


def groups(text: str) -> list[str]:
    """A line per group: its ops, what it reads and what it writes."""
    lines = []
    for group in find_groups(calls(text)):
        names = " + ".join(call.kernel.removesuffix("_kernel") for call in group.calls)
        reads, writes = (" ".join(sorted({view.buffer for view in views})) for views in (group.reads, group.writes))
        lines.append(f"{names}: {reads} -> {writes}")
    return lines


def test_a_chain_and_a_tree_become_one_kernel() -> None:
    assert groups("""
        t = mul(a, b)
        u = mul(c, d)
        v = add(t, u)
        w = exp(v)
    """) == ["mul + mul + add + exp: a b c d -> t u v w"]


def test_a_group_moves_down_to_its_reader() -> None:
    assert groups("""
        t = mul(a, b)
        m = Product(x, y)
        u = add(t, m)
    """) == ["Product: x y -> m", "mul + add: a b m -> t u"]


def test_a_reader_moves_up_to_its_group() -> None:
    assert groups("""
        t = mul(a, b)
        m = Product(t, y)
        u = exp(t)
    """) == ["mul + exp: a b -> t u", "Product: t y -> m"]


def test_calls_that_read_the_same_values_are_one_kernel() -> None:
    assert groups("""
        c = cos(a)
        s = sin(a)
        o = cos(b)
    """) == ["cos + sin: a -> c s", "cos: b -> o"]


@pytest.mark.parametrize(
    "hazard",
    [
        pytest.param("m = Product(t, x)\nu = add(m, t)", id="the reader waits for a call that waits for the group"),
        pytest.param("t = Update(x)\nu = exp(t)", id="the value is replaced in between"),
        pytest.param("m = Product(t, x)\na = Update(m)\nu = mul(t, a)", id="an input is updated in place in between"),
        pytest.param("u = exp(t@8)", id="another thread's elements are read"),
        pytest.param("u = exp(t/2)", id="other elements of the value are read"),
        pytest.param("a@8 = exp(t)", id="what another thread reads is written"),
        pytest.param("t@8 = exp(t)", id="what another thread writes is written again"),
    ],
)
def test_nothing_fuses_across_a_hazard(hazard: str) -> None:
    assert groups(f"t = mul(a, b)\n{hazard}")[0] == "mul: a b -> t"


def test_an_element_may_be_updated_by_the_thread_that_reads_it() -> None:
    assert groups("""
        t = mul(a, b)
        a = add(t, 1)
        a = exp(a)
    """) == ["mul + add + exp: a b -> a t"]


def test_slices_of_one_buffer_may_be_written_by_one_kernel() -> None:
    assert groups("""
        t = exp(a)
        cat = copy(t)
        cat@64 = copy(a)
    """) == ["exp + copy + copy: a -> cat t"]


def test_interleaved_columns_of_one_buffer_may_be_written_by_one_kernel() -> None:
    assert groups("""
        t/2 = exp(a)
        t/2@1 = sin(a)
    """) == ["exp + sin: a -> t"]
    assert len(groups("t/2 = exp(a)\nt/2@2 = sin(a)")) == 2


def biased_softmax(g: IRBuilder, op: str = "aten.softmax.int") -> Tensor:
    """The softmax of scores with positions picked from a table, as DeBERTa has it; returns the logits."""
    scores, table = g.input("scores", 4, 20, 24), g.input("table", 4, 20, 50)
    index = g.input("index", 4, 20, 24, dtype="int64")
    bias = g("aten.gather.default", table, 2, index)
    logits = g("aten.add.Tensor", g("aten.mul.Tensor", scores, 0.3), bias)
    g.output(g(op, logits, -1))
    return logits


@pytest.mark.parametrize("op", ["aten.softmax.int", "aten.log_softmax.int"])
def test_a_softmax_computes_the_logits_that_nothing_else_reads(op: str) -> None:
    g = IRBuilder()
    biased_softmax(g, op)
    program = compile_cuda(g)
    (call,) = program.kernels
    assert call.kernel == ("fused_softmax_kernel" if op == "aten.softmax.int" else "fused_log_softmax_kernel")
    compile_in_turn(program.plan.sources.values())


def test_a_softmax_reads_logits_that_are_read_elsewhere_too() -> None:
    g = IRBuilder()
    g.output(g("aten.exp.default", biased_softmax(g)))
    assert [call.kernel for call in compile_cuda(g).kernels][-1] == "softmax_kernel"


def test_a_kernel_does_not_grow_without_bound() -> None:
    chain = "\n".join(f"v{i + 1} = exp(v{i})" for i in range(MAX_CALLS + 5))
    assert [line.count("exp") for line in groups(chain)] == [MAX_CALLS, 5]


def test_a_reshaped_value_fuses_and_a_transposed_one_does_not() -> None:
    square = View("t", (8, 8), (8, 1), 0, "float32")
    params = {"scalars": [None]}
    first = KernelCall("exp_kernel", "", (view("a"),), (view("t"),), params, "t")
    assert len(find_groups([first, KernelCall("exp_kernel", "", (square,), (view("u", (8, 8)),), params, "u")])) == 1
    turned = KernelCall("exp_kernel", "", (square.transpose(0, 1),), (view("u", (8, 8)),), params, "u")
    assert len(find_groups([first, turned])) == 2


@pytest.mark.parametrize(("start", "count"), [(16, 1), (8, 2), (24, 2)])
def test_copies_within_rows_are_one_kernel_unless_their_columns_overlap(start: int, count: int) -> None:
    """Sixteen columns from the 24th of 32 on reach into the next rows."""
    first = replace(view("x", (8, 32)), shape=(8, 16))
    params = {"scalars": [None]}
    written = KernelCall("exp_kernel", "", (view("a", (8, 16)),), (first,), params, "x")
    copied = KernelCall("copy_kernel", "", (first,), (replace(first, offset=start),), params, "x")
    assert len(find_groups([written, copied])) == count


def test_places_do_not_overlap_only_if_no_element_is_in_both() -> None:
    draw, apart = Random(os.environ["TEST_SEED"]), 0
    for _ in range(2000):
        places = [_drawn_place(draw), _drawn_place(draw)]
        if not may_overlap(*places):
            apart += 1
            first, second = map(_elements, places)
            assert first.isdisjoint(second), places
    assert apart > 100


def _drawn_place(draw: Random) -> Place:
    shape, strides = (tuple(draw.choices(values, k=3)) for values in ((1, 2, 3, 5), (0, 1, 2, 4, 6, 12)))
    return place_of(View("x", shape, strides, draw.randrange(20), "float32"))


def _elements(place: Place) -> set[int]:
    indices = itertools.product(*map(range, place.sizes))
    return {place.offset + sum(i * n for i, n in zip(index, place.strides, strict=True)) for index in indices}


def test_the_tables_of_a_rotation_by_halves_are_one_kernel() -> None:
    g = IRBuilder()
    x, angles = g.input("x", 1, 2, 3, 16), g.input("angles", 3, 8)
    cos, sin = g("aten.cos.default", angles), g("aten.sin.default", angles)
    first, second = (g("aten.slice.Tensor", x, 3, start, start + 8) for start in (0, 8))
    lower = g("aten.sub.Tensor", g("aten.mul.Tensor", first, cos), g("aten.mul.Tensor", second, sin))
    upper = g("aten.add.Tensor", g("aten.mul.Tensor", second, cos), g("aten.mul.Tensor", first, sin))
    g.output(g("aten.cat.default", [lower, upper], -1))
    assert [call.kernel for call in compile_cuda(g).kernels] == ["fused_cos_sin_copy_copy", "rope_kernel"]


def test_neighbours_that_copy_columns_of_one_buffer_are_one_kernel() -> None:
    whole = view("x", (8, 32))
    parts = [replace(whole, shape=(8, 16), offset=offset) for offset in (0, 16)]
    copies = [
        KernelCall("copy_kernel", "", (x,), (view(f"t{x.offset}", (8, 16)),), {"scalars": [None]}, "t") for x in parts
    ]
    (joined,) = join_neighbours(find_groups(copies))
    assert [x.buffer for x in joined.writes] == ["t0", "t16"]
    turned = replace(copies[1], inputs=(parts[1].transpose(0, 1),), outputs=(view("u", (16, 8)),))
    assert len(join_neighbours(find_groups([copies[0], turned]))) == 2


def compile_cuda(graph: IRBuilder, dtype: str = "float16") -> CompiledProgram:
    return npu_compiler.compile(graph.ir(), target=TARGET, options=npu_compiler.CompileOptions(compute_dtype=dtype))


def test_a_value_that_only_the_kernel_reads_has_no_buffer() -> None:
    g = IRBuilder()
    a, b = g.input("a", 4, 32), g.input("b", 4, 32)
    t = g("aten.mul.Tensor", a, b)
    g.output(g("aten.exp.default", g("aten.add.Tensor", t, b)))
    program = compile_cuda(g)
    (call,) = program.kernels
    assert call.kernel == "fused_mul_add_exp"
    assert [v.buffer for v in call.inputs] == ["a", "b"] and len(call.outputs) == 1
    assert program.plan.arena_bytes == 0
    assert "load_pack<1>(in0 + first)" in program.plan.sources[call.source], "few elements: threads before vectors"


def test_a_value_that_is_also_an_output_is_written_and_read_as_it_is_stored() -> None:
    g = IRBuilder()
    a, b = g.input("a", 4, 32), g.input("b", 4, 32)
    t = g("aten.mul.Tensor", a, b)
    g.output(t)
    g.output(g("aten.eq.Tensor", t, a))
    program = compile_cuda(g)
    (call,) = program.kernels
    assert call.kernel == "fused_mul_eq" and len(call.outputs) == 2
    assert "v0 = to_float(from<f16>(mul_0(" in program.plan.sources[call.source]


def test_large_contiguous_operands_are_read_in_sixteen_bytes() -> None:
    g = IRBuilder()
    a, b, c = g.input("a", 4096, 512), g.input("b", 4096, 512), g.input("c", 4096, 1)
    g.output(g("aten.mul.Tensor", g("aten.add.Tensor", a, b), c))
    program = compile_cuda(g)
    (call,) = program.kernels
    source = program.plan.sources[call.source]
    assert source.count("const Pack<f16, 8> pack") == 2 and "store_pack<8>" in source
    assert "item2 = in2[first / 512u]" in source
    assert kernel_launch_of(call).grid == (4096 * 512 // 8 // 256, 1, 1)


def test_a_prologue_is_fused_apart_from_the_run() -> None:
    g = IRBuilder()
    x, w, v = g.input("x", 8, 8), g.weight("w", 8, 8), g.weight("v", 8, 8)
    constant = g("aten.exp.default", g("aten.mul.Tensor", w, v))
    g.output(g("aten.mul.Tensor", x, constant))
    plan = compile_cuda(g).plan
    assert [call.kernel for call in plan.prologue] == ["fused_mul_exp"]
    assert [call.kernel for call in plan.calls] == ["mul_kernel"]
    assert sum(buffer.kind == "persistent" for buffer in plan.buffers.values()) == 1


def layers(count: int) -> IRBuilder:
    g = IRBuilder()
    x = g.input("x", 1, 64)
    for index in range(count):
        w, scale = g.weight(f"{index}.w", 64, 64), g.weight(f"{index}.s", 64)
        y = g("aten.linear.default", x, w)
        x = g("aten.add.Tensor", x, g("aten.tanh.default", g("aten.mul.Tensor", y, scale)))
    g.output(x)
    return g


def test_equal_layers_share_their_sources_and_texts_are_reproducible() -> None:
    two, many = compile_cuda(layers(3)), compile_cuda(layers(28))
    assert many.plan.sources == two.plan.sources
    assert {call.source for call in many.kernels if call.source} == set(many.plan.sources)
    assert compile_cuda(layers(28)).to_bytes() == many.to_bytes()


def test_two_thousand_nodes_need_few_sources() -> None:
    program = compile_cuda(layers(500))
    assert len(program.plan.calls) >= 1000 and len(program.plan.sources) <= 8


def test_the_program_survives_the_file_and_names_its_target() -> None:
    program = compile_cuda(layers(2))
    again = CompiledProgram.from_bytes(program.to_bytes())
    assert again.plan.sources == program.plan.sources and again.kernels == program.kernels
    assert again.target == CUDA_GPU.name == "cuda_gpu"


def test_every_kernel_waits_for_the_one_before_it() -> None:
    g = IRBuilder()
    x = g.input("x", 8, 64)
    g.output(g("aten.exp.default", g("aten.t.default", g("aten.softmax.int", x, -1))))
    plan = compile_cuda(g).plan
    assert [call.kernel for call in plan.calls] == ["softmax_kernel", "exp_kernel"]
    assert all(kernel_launch_of(call).kind is LaunchKind.OVERLAPPING for call in plan.calls)
    assert "{ begin_in_turn(); name##_body(" in plan.sources[plan.calls[0].source]
    assert "{\n    begin_in_turn();" in plan.sources[plan.calls[1].source]
    templates = Path(str(files("cuda_compiler") / "templates"))
    texts = [template_text(file.relative_to(templates).as_posix()) for file in templates.rglob("*.cu")]
    parts = [part for text in texts for part in text.split("\n#kernel ")]
    waiting = [part for part in parts if "WAITING_KERNEL(" in part]
    waits = ("begin_in_turn();", "wait_for_inputs();")
    assert waiting and [part for part in waiting if not any(wait in part for wait in waits)] == []


def test_every_kernel_has_a_category_and_a_template() -> None:
    shared = {name for name, decl in KERNELS.items() if decl.source}  # the others are the CPU device's
    assert sorted(shared - RULES.keys()) == []
    for kernel in shared:
        assert classify(KernelCall(kernel, "", (), (), {}, "")) != "elementwise"


@pytest.mark.parametrize(
    "shape, strides, offset, width",
    [
        ((4, 32), (32, 1), 0, 16),
        ((4, 32), (32, 1), 8, 8),
        ((4, 31), (31, 1), 0, 1),
        ((4, 31), (36, 1), 4, 4),
        ((32, 4), (1, 32), 0, 1),
        ((4, 32), (0, 1), 0, 16),
        ((4, 1), (32, 1), 0, 1),
        ((), (), 6, 2),
        ((1, 31), (99, 1), 0, 16),
    ],
)
def test_a_vector_is_as_wide_as_its_places_allow(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int
) -> None:
    assert vector_width(View("x", shape, strides, offset, "float16")) == width


def test_offsets_in_c_are_the_views_own() -> None:
    for shape, strides in [((3, 4, 5), (20, 5, 1)), ((3, 4, 5), (1, 15, 3)), ((2, 3, 2), (0, 7, 1)), ((1, 1), (9, 9))]:
        x = View("x", shape, strides, 0, "float32")
        text = offset_text(x, "i").replace("/", "//").replace("u", "")
        expected = np.lib.stride_tricks.as_strided(np.arange(99), shape, [8 * s for s in strides]).reshape(-1)
        assert [eval(text, {"i": i}) for i in range(x.numel)] == expected.tolist()


def test_floats_are_written_exactly() -> None:
    for value in (0.1, 1e-45, 3.4028234663852886e38, 1e20, -0.0, 1 / 3):
        assert np.float32(float_text(value).rstrip("f")).tobytes() == np.float32(value).tobytes()
    assert float_text(float("-inf")) == "__builtin_bit_cast(float, 0xff800000u)"


def test_the_sources_of_models_compile() -> None:
    g = IRBuilder()
    x = g.input("x", 1, 3, 16, 16)
    y = g("aten.conv2d.default", x, g.weight("c", 16, 3, 3, 3), g.weight("b", 16), [1, 1], [1, 1])
    y = g("aten.max_pool2d.default", g("aten.relu.default", y), [2, 2])
    y = g("aten.flatten.using_ints", y, 1)
    g.output(g("aten.gelu.default", g("aten.linear.default", y, g.weight("l", 10, 1024), g.weight("m", 10))))
    sources = dict(compile_cuda(g).plan.sources)
    for dtype in ("float32", "bfloat16"):
        sources |= compile_cuda(layers(2), dtype).plan.sources
    assert len(sources) >= 6
    compile_in_turn(sources.values())


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 128])
def test_qwen_needs_few_sources_whatever_its_depth_and_they_compile(tokens: int) -> None:
    pytest.importorskip("transformers", reason="the model comes from Hugging Face")
    from traces import qwen_step

    plans = [npu_compiler.compile(qwen_step(tokens, layers), target=TARGET).plan for layers in (2, 3)]
    # A resident kernel lists its steps, so it is another one for another depth.
    two, three = ({call.source for call in plan.calls if call.kernel != RESIDENT} for plan in plans)
    assert two == three and len(two) < 25
    compile_in_turn(plans[0].sources.values())


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    """One case of each kernel; `test_cuda_kernels.py` compiles them all, where there is a GPU to run them on."""
    first = {case.kernel: case for case in reversed(all_cases()) if not case.kernel.endswith("_broadcast_kernel")}
    make = Specializer()
    for case in first.values():
        call = call_of(case, "bfloat16")
        if elementwise_kernel(call) is not None:
            (group,) = find_groups([call])
            generate_elementwise(group, group.writes, make)
        else:
            expand(make, call)
    assert len(make.sources) > 100
    compile_in_turn(make.sources.values())
