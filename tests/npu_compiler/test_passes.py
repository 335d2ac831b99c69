"""Every graph stage as text in, text out; and what an in-place program means, against eager PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder, Tensor
from torch_ir import extract_ir

from npu_compiler import (
    METAL_GPU,
    CompileOptions,
    ConstraintError,
    InputError,
    IRError,
    IRGraph,
    NPUError,
    TargetConfig,
    compile,
    print_graph,
    read_ir,
    trace_compilation,
    trace_stages,
)
from npu_compiler.fusions.cache_updates import pair_cache_updates
from npu_compiler.fusions.conv import fold_padding
from npu_compiler.fusions.einsums import lower_einsums
from npu_compiler.fusions.outer_products import lower_outer_products
from npu_compiler.fusions.rope import share_rope
from npu_compiler.ops.rotary_region import expand_rotary_regions
from npu_compiler.options import Stage, StageEdit
from npu_compiler.passes.batch_norm import fold_batch_norm, lower_batch_norm
from npu_compiler.passes.common_subexpressions import eliminate_common_subexpressions
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_compiler.passes.functionalize import functionalize
from npu_compiler.passes.layout import assign_layout, pad_channels
from npu_compiler.passes.noops import eliminate_noops
from npu_compiler.passes.precision import assign_storage, choose_compute_dtype
from npu_runtime import CPUBackend, Executor, NPUBuffer

Pass = Callable[[IRGraph], IRGraph]


def printed(stage: Pass, g: IRBuilder, *, types: bool = False) -> str:
    return print_graph(stage(read_ir(g.ir())), types=types)


def check(stage: Pass, g: IRBuilder, expected: str, *, types: bool = False) -> None:
    """The printed graph, without its first line; weights that a stage leaves unread are not printed."""

    def live(graph: IRGraph) -> IRGraph:
        return eliminate_dead_code(stage(graph))

    lines = printed(live if stage is not eliminate_noops else stage, g, types=types).split("\n")[1:]
    assert dedent("\n".join(lines)) == dedent(expected).strip("\n")


# eliminate_noops


def test_noops_and_assertions_disappear() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 8)
    y = g("aten.dropout.default", x, 0.5, False)
    g("aten._assert_tensor_metadata.default", y, out=[])
    y = g("aten.to.dtype", y, dtype="float32")
    y = g("aten.view.default", y, [2, 8])
    y = g("aten.slice.Tensor", y, 0, 0, 2)
    y = g("aten.relu.default", g("aten.mul.Tensor", y, 1))
    g.output(g("aten.sub.Scalar", g("aten.add.Scalar", y, -0.0), 0.0), x)
    check(
        eliminate_noops,
        g,
        """
        %relu = aten.relu(%x)
        return %relu, %x
    """,
    )


def test_adding_zero_to_integers_disappears() -> None:
    g = IRBuilder()
    x = g.input("x", 3, dtype="int64")
    g.output(g("aten.relu.default", g("aten.sub.Scalar", g("aten.add.Scalar", x, 0), 0)))
    check(eliminate_noops, g, "%relu = aten.relu(%x)\nreturn %relu")


@pytest.mark.parametrize(
    ("op_type", "args"),
    [
        ("aten.add.Scalar", (0.0,)),
        ("aten.add.Scalar", (0,)),
        ("aten.sub.Scalar", (-0.0,)),
        ("aten.dropout.default", (0.5, True)),
        ("aten.to.dtype", ("float16",)),
        ("aten.view.default", ([8, 2],)),
        ("aten.expand.default", ([3, 2, 8],)),
        ("aten.slice.Tensor", (0, 0, 1)),
        ("aten.add.Scalar", (1,)),
        ("aten.mul.Tensor", (2,)),
        ("aten.div.Tensor_mode", (1,)),
    ],
)
def test_what_changes_its_input_is_no_noop(op_type: str, args: tuple[Any, ...]) -> None:
    g = IRBuilder()
    kwargs = {"rounding_mode": "floor"} if op_type.endswith("_mode") else {}
    g.output(g(op_type, g.input("x", 2, 8), *args, **kwargs))
    assert len(eliminate_noops(read_ir(g.ir())).nodes) == 1


def test_an_integer_divided_by_one_is_a_float_and_stays() -> None:
    g = IRBuilder()
    g.output(g("aten.div.Tensor", g.input("x", 4, dtype="int64"), 1))
    assert len(eliminate_noops(read_ir(g.ir())).nodes) == 1


# eliminate_dead_code, eliminate_common_subexpressions


def test_dead_nodes_weights_and_constants_disappear_but_inputs_stay() -> None:
    g = IRBuilder()
    x, _ = g.input("x", 2, 8), g.input("unused", 3)
    a = g("aten.relu.default", x)
    b = g("aten.linear.default", a, g.weight("dead.weight", 8, 8))
    g("aten.add.Tensor", b, g.constant("c", np.ones(8, np.float32)))
    first, _ = g("aten.chunk.default", a, 2, 1)
    g.output(first)
    assert printed(eliminate_dead_code, g) == dedent("""\
        graph test(%x, %unused)
          %relu = aten.relu(%x)
          %chunk_0, %chunk_1 = aten.chunk(%relu) {chunks=2, dim=1}
          return %chunk_0""")


def test_equal_nodes_are_computed_once_and_random_ones_are_not() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 8)
    a, b, c = g("aten.add.Scalar", x, 1), g("aten.add.Scalar", x, 1), g("aten.add.Scalar", x, 2)
    d, e = g("aten.relu.default", a), g("aten.relu.default", b)
    g.output(g("aten.mul.Tensor", d, e), c, g("aten.bernoulli.default", x), g("aten.bernoulli.default", x))
    check(
        eliminate_common_subexpressions,
        g,
        """
        %add = aten.add(%x) {other=1}
        %add_2 = aten.add(%x) {other=2}
        %relu = aten.relu(%add)
        %mul = aten.mul(%relu, %relu)
        %bernoulli = aten.bernoulli(%x)
        %bernoulli_1 = aten.bernoulli(%x)
        return %mul, %add_2, %bernoulli, %bernoulli_1
    """,
    )


def test_casts_to_different_dtypes_are_different() -> None:
    g = IRBuilder()
    x = g.input("x", 4)
    g.output(g("aten.to.dtype", x, dtype="float16"), g("aten.to.dtype", x, dtype="bfloat16"))
    assert len(eliminate_common_subexpressions(read_ir(g.ir())).nodes) == 2


# fold_padding


def padded_conv(
    pad: list[int], *, padding: Any = (0, 0), value: float | None = None, mode: str = "constant"
) -> IRBuilder:
    g = IRBuilder()
    x, w = g.input("x", 1, 3, 8, 8), g.weight("w", 4, 3, 3, 3)
    p = g("aten.pad.default", x, pad, mode, value)
    op = "aten.conv2d.padding" if isinstance(padding, str) else "aten.conv2d.default"
    return g.output(g(op, p, w, None, [2, 2] if op.endswith("default") else [1, 1], padding))


def test_a_convolution_pads_for_itself() -> None:
    check(
        fold_padding,
        padded_conv([1, 2, 3, 4], padding=(1, 0)),
        """
        weight %p_w = w
        %conv2d = aten.conv2d(%x, %p_w) {padding=[4, 5, 1, 2], stride=[2, 2]}
        return %conv2d
    """,
    )


@pytest.mark.parametrize(
    "g",
    [
        padded_conv([1, 1, 1, 1], value=2.0),
        padded_conv([1, 1, 1, 1], mode="reflect"),
        padded_conv([-1, 1, 0, 0]),
        padded_conv([1, 1]),
        padded_conv([1, 1, 1, 1], padding="same"),
    ],
    ids=["value", "reflect", "crop", "one-axis", "same"],
)
def test_padding_that_a_convolution_cannot_do_stays(g: IRBuilder) -> None:
    assert fold_padding(read_ir(g.ir())).nodes == read_ir(g.ir()).nodes


def test_padding_that_is_read_elsewhere_is_folded_and_kept() -> None:
    g = padded_conv([1, 1, 1, 1])
    g.output(g("aten.relu.default", Tensor("pad")))
    check(
        fold_padding,
        g,
        """
        weight %p_w = w
        %pad = aten.pad(%x) {mode=constant, pad=[1, 1, 1, 1]}
        %conv2d = aten.conv2d(%x, %p_w) {padding=[1, 1, 1, 1], stride=[2, 2]}
        %relu = aten.relu(%pad)
        return %conv2d, %relu
    """,
    )


# fold_batch_norm, lower_batch_norm


def normed(
    op: str, weight: tuple[int, ...], x: tuple[int, ...], *, bias: bool = True, affine: bool = True
) -> IRBuilder:
    g = IRBuilder()
    args = [g.input("x", *x), g.weight("w", *weight)] + ([g.weight("b", 4)] if bias else [])
    y = g(op, *args)
    gamma_beta = [g.weight("bn.g", 4), g.weight("bn.b", 4)] if affine else [None, None]
    stats = [g.weight("bn.m", 4), g.weight("bn.v", 4)]
    return g.output(g("aten.batch_norm.default", y, *gamma_beta, *stats, False, 0.1, 1e-3, True))


SCALE, SHIFT = "bn_scale(bn.g, bn.v, eps=0.001)", "bn_shift(bn.g, bn.b, bn.m, bn.v, eps=0.001)"


@pytest.mark.parametrize(
    ("op", "weight", "x", "axis"),
    [
        ("aten.conv2d.default", (4, 3, 3, 3), (1, 3, 8, 8), 0),
        ("aten.conv1d.default", (4, 3, 3), (1, 3, 8), 0),
        ("aten.conv_transpose2d.input", (3, 4, 3, 3), (1, 3, 8, 8), 1),
        ("aten.linear.default", (4, 3), (2, 3), 0),
    ],
)
def test_batch_norm_folds_into_what_is_before_it(op: str, weight: Any, x: Any, axis: int) -> None:
    base = op.rsplit(".", 1)[0]
    check(
        fold_batch_norm,
        normed(op, weight, x),
        f"""
        weight %p_w.folded = scale_axis(w, {SCALE}, axis={axis})
        weight %p_w.shift = multiply_add(b, {SCALE}, {SHIFT})
        %batch_norm = {base}(%x, %p_w.folded, %p_w.shift)
        return %batch_norm
    """,
    )


def test_batch_norm_without_affine_parameters_folds_into_a_convolution_without_bias() -> None:
    ones, zeros = "fill(shape=[4], value=1.0)", "fill(shape=[4], value=0.0)"
    g = normed("aten.conv2d.default", (4, 3, 3, 3), (1, 3, 8, 8), bias=False, affine=False)
    check(
        fold_batch_norm,
        g,
        f"""
        weight %p_w.folded = scale_axis(w, bn_scale({ones}, bn.v, eps=0.001), axis=0)
        weight %p_w.shift = bn_shift({ones}, {zeros}, bn.m, bn.v, eps=0.001)
        %batch_norm = aten.conv2d(%x, %p_w.folded, %p_w.shift)
        return %batch_norm
    """,
    )


def rotary_angles(g: IRBuilder) -> Tensor:
    return g("aten.matmul.default", g.input("frequencies", 2, 4, 1), g.input("positions", 2, 1, 3))


def test_rotary_angles_are_an_element_wise_product_in_either_order() -> None:
    g = IRBuilder()
    g.output(g("aten.transpose.int", rotary_angles(g), -1, 1))
    check(
        lower_outer_products,
        g,
        """
        %positions.transposed = aten.transpose(%positions) {dim0=-2, dim1=-1}
        %frequencies.transposed = aten.transpose(%frequencies) {dim0=-2, dim1=-1}
        %transpose = aten.mul(%positions.transposed, %frequencies.transposed)
        return %transpose
    """,
    )


def test_an_outer_product_that_is_read_as_it_is_stays_in_its_order() -> None:
    g = IRBuilder()
    angles = rotary_angles(g)
    g.output(g("aten.transpose.int", angles, 1, 2))
    g.output(angles)
    check(
        lower_outer_products,
        g,
        """
        %matmul = aten.mul(%frequencies, %positions)
        %transpose = aten.transpose(%matmul) {dim0=1, dim1=2}
        return %transpose, %matmul
    """,
    )


def einsum(g: IRBuilder, equation: str, *shapes: tuple[int, ...]) -> None:
    operands = [g.input(f"x{number}", *shape) for number, shape in enumerate(shapes)]
    g.output(g("aten.einsum.default", equation, operands))


def test_an_einsum_of_one_matrix_for_each_batch_element_is_a_matmul() -> None:
    g = IRBuilder()
    einsum(g, "blhk,bthk->bhtl", (2, 3, 4, 8), (2, 5, 4, 8))
    check(
        lower_einsums,
        g,
        """
        %einsum.permuted = aten.permute(%x1) {dims=[0, 2, 1, 3]}
        %einsum.permuted__1 = aten.permute(%x0) {dims=[0, 2, 3, 1]}
        %einsum = aten.matmul(%einsum.permuted, %einsum.permuted__1)
        return %einsum
    """,
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->ik", ((2, 3, 4), (2, 4, 5))),  # sums over the batch
        ("bhlk,hkt->bhlt", ((2, 3, 4, 5), (3, 5, 6))),  # one matrix for all of a batch
        ("bij,bjk->bik", ((2, 3, 4), (1, 4, 5))),
        ("bij,bij->bij", ((2, 3, 4), (2, 3, 4))),
        ("bijl,bjlk->bik", ((2, 3, 4, 6), (2, 4, 6, 5))),  # sums over two indices
        ("bij->bji", ((2, 3, 4),)),
    ],
)
def test_other_einsums_stay(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    g = IRBuilder()
    einsum(g, equation, *shapes)
    assert [node.base for node in lower_einsums(read_ir(g.ir())).nodes] == ["aten.einsum"]


@pytest.mark.parametrize(("left", "right"), [((3, 2), (2, 3)), ((1,), (1, 3)), ((3, 1), (1,))])
def test_a_product_that_sums_or_has_a_vector_is_no_outer_product(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    g = IRBuilder()
    g.output(g("aten.matmul.default", g.input("a", *left), g.input("b", *right)))
    check(lower_outer_products, g, "%matmul = aten.matmul(%a, %b)\nreturn %matmul")


def test_batch_norm_after_a_value_that_is_read_twice_becomes_a_multiply_add() -> None:
    g = normed("aten.conv2d.default", (4, 3, 3, 3), (1, 3, 8, 8))
    g.output(Tensor("conv2d"))
    check(
        lambda graph: lower_batch_norm(fold_batch_norm(graph)),
        g,
        f"""
        weight %p_w = w
        weight %p_b = b
        weight %batch_norm.scale = {SCALE}
        weight %batch_norm.shift = {SHIFT}
        %conv2d = aten.conv2d(%x, %p_w, %p_b)
        %batch_norm = npu.scale_shift_channels(%conv2d, %batch_norm.scale, %batch_norm.shift)
        return %batch_norm, %conv2d
    """,
    )


@pytest.mark.parametrize(
    ("op", "weight", "x"),
    [
        ("aten.linear.default", (4, 3), (2, 4, 3)),
        ("aten.conv2d.default", (4, 3, 1, 1), (3, 4, 5)),
        ("aten.conv1d.default", (4, 3, 1), (3, 4)),
    ],
    ids=["linear-3d", "conv2d-unbatched", "conv1d-unbatched"],
)
def test_batch_norm_over_another_axis_than_the_weights_rows_does_not_fold(op: str, weight: Any, x: Any) -> None:
    assert len(fold_batch_norm(read_ir(normed(op, weight, x).ir())).nodes) == 2


# functionalize


def test_a_write_through_a_slice_changes_its_base_and_every_later_view() -> None:
    g = IRBuilder()
    x = g.input("x", 4, 4)
    v = g("aten.slice.Tensor", x, 0, 0, 2)
    g("aten.add_.Scalar", v, 1)
    g.output(g("aten.relu.default", x), v)
    check(
        functionalize,
        g,
        """
        %slice = aten.slice(%x) {dim=0, end=2, start=0}
        %add_ = aten.add(%slice) {other=1}
        %x.slice_scatter = aten.slice_scatter(%x, %add_) {dim=0, end=2, start=0}
        %relu = aten.relu(%x.slice_scatter)
        %x.slice_scatter.slice = aten.slice(%x.slice_scatter) {dim=0, end=2, start=0}
        return %relu, %x.slice_scatter.slice
    """,
    )


def test_a_write_through_a_chain_of_views_scatters_back_step_by_step() -> None:
    g = IRBuilder()
    x = g.input("x", 4, 4)
    g("aten.mul_.Scalar", g("aten.select.int", g("aten.transpose.int", x, 0, 1), 0, 1), 2)
    g.output(x)
    check(
        functionalize,
        g,
        """
        %transpose = aten.transpose(%x) {dim0=0, dim1=1}
        %select = aten.select(%transpose) {dim=0, index=1}
        %mul_ = aten.mul(%select) {other=2}
        %x.transpose = aten.transpose(%x) {dim0=0, dim1=1}
        %x.transpose.select_scatter = aten.select_scatter(%x.transpose, %mul_) {dim=0, index=1}
        %x.transpose.select_scatter.permute = aten.permute(%x.transpose.select_scatter) {dims=[1, 0]}
        return %x.transpose.select_scatter.permute
    """,
    )


def test_a_write_through_one_piece_of_a_split_is_a_slice_of_the_base() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 6)
    g("aten.relu_.default", g.getitem(g("aten.split.Tensor", x, 2, 1), 1))
    g.output(x)
    check(
        functionalize,
        g,
        """
        %split_0, %split_1, %split_2 = aten.split(%x) {dim=1, split_size=2}
        %getitem = getitem(%split_0, %split_1, %split_2) {index=1}
        %relu_ = aten.relu(%getitem)
        %x.slice_scatter = aten.slice_scatter(%x, %relu_) {dim=1, end=4, start=2}
        return %x.slice_scatter
    """,
    )


def test_a_write_to_a_diagonal() -> None:
    g = IRBuilder()
    x = g.input("x", 3, 3)
    g("aten.mul_.Scalar", g("aten.diagonal.default", x, 1), 2)
    g.output(x)
    check(
        functionalize,
        g,
        """
        %diagonal = aten.diagonal(%x) {offset=1}
        %mul_ = aten.mul(%diagonal) {other=2}
        %x.diagonal_scatter = aten.diagonal_scatter(%x, %mul_) {offset=1}
        return %x.diagonal_scatter
    """,
    )


def test_in_place_ops_on_a_whole_tensor_are_simply_renamed() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 3)
    g("aten.relu_.default", x)
    y = g("aten.add_.Scalar", x, 1)
    g.output(g("aten.mul.Tensor", x, y))
    check(
        functionalize,
        g,
        """
        %relu_ = aten.relu(%x)
        %add_ = aten.add(%relu_) {other=1}
        %mul = aten.mul(%add_, %add_)
        return %mul
    """,
    )


@pytest.mark.parametrize(
    ("view", "args", "message"),
    [
        ("aten.expand.default", ([4, 3],), "node 'add_': in-place write through 'aten.expand.default' .node 'expand'"),
        ("aten.as_strided.default", ([2], [1]), "node 'add_': in-place write through 'aten.as_strided.default'"),
        ("aten.unfold.default", (1, 2, 1), "node 'add_': in-place write through 'aten.unfold.default'"),
    ],
)
def test_a_write_through_a_view_without_a_scatter_twin_is_an_error(view: str, args: Any, message: str) -> None:
    g = IRBuilder()
    v = g(view, g.input("x", 1, 3), *args)
    g.output(g("aten.add_.Scalar", v, 1))
    with pytest.raises(IRError, match=message):
        functionalize(read_ir(g.ir()))


def _cast_is_its_input(x: Any) -> Any:
    y = x.float()
    y += 1
    return x * 2


def _contiguous_of_columns_is_a_copy(x: Any) -> Any:
    y = x[:, :2].contiguous()
    y += 1
    return x * 2, y


def _contiguous_of_rows_is_a_view(x: Any) -> Any:
    y = x[1:3].contiguous()
    y += 1
    return x * 2, y


def _reshape_of_columns_is_a_copy(x: Any) -> Any:
    y = x[:, :2].reshape(-1)
    y += 1
    return x * 2, y


def _reshape_of_rows_is_a_view(x: Any) -> Any:
    y = x[1:3].reshape(2, 2, 2)
    y.mul_(3)
    return x * 2, y


def _flatten_of_a_transpose_is_a_copy(x: Any) -> Any:
    y = x.clone()
    y.transpose(0, 1).flatten()[3] = 5.0
    return y


def _pieces_that_write_each_other(x: Any) -> Any:
    y = x.clone()
    a, b = y.chunk(2, 1)
    a.relu_()
    b.copy_(a + 1)
    c, d = y.split([1, 3], dim=-1)
    c.add_(d.sum(1, keepdim=True))
    return y * 2, d


def _diagonals_rows_and_columns(x: Any) -> Any:
    y = x * 1
    y.diagonal().fill_(3.0)
    y[0] = 7
    y[:, 1] += x[:, 0]
    return y


def _views_of_views(x: Any) -> Any:
    y = x.clone()
    z = y.view(2, 8)[1].view(2, 4)
    z[0, 1:3].clamp_(0, 0.1)
    y.relu_()
    return y, z


def _transposes(x: Any) -> Any:
    y = x + 0.0
    y.t()[1].neg_()
    y.permute(1, 0)[::2].add_(1)
    return y


def _unbound_columns(x: Any) -> Any:
    y = x.clone()
    a, b, _, d = y.unbind(1)
    b.exp_()
    d.copy_(b)
    return y, a + b


def _metadata_changes(x: Any) -> Any:
    y = x.clone()
    y.masked_fill_(x > 0, -1.0)
    y.unsqueeze_(0)
    y.squeeze(0).add_(1)
    return y


@pytest.mark.parametrize(
    "program",
    [
        value
        for name, value in sorted(globals().items())
        if name.startswith("_") and getattr(value, "__module__", "") == __name__
    ],
)
def test_an_in_place_program_means_what_pytorch_says(program: Callable[[Any], Any], seed: int) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return program(x)

    x = torch.randn(4, 4)
    expected = program(x.clone())
    with torch.no_grad():
        ir = extract_ir(Module().to("meta"), (x.to("meta"),), strict=False).to_dict()
    executor = Executor(compile(ir, options=CompileOptions(compute_dtype="float32")), CPUBackend())
    outputs = executor.run({executor.program.input_specs[0].name: x.numpy().copy()})
    for spec, wanted in zip(
        executor.program.output_specs, expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        np.testing.assert_allclose(outputs[spec.name].to_numpy(), wanted.numpy(), rtol=1e-6, atol=1e-6)


# expand_rotary_regions


# share_rope, pair_cache_updates


def rotated(g: IRBuilder, x: Tensor, start: int, heads: int, name: str) -> Tensor:
    """Rotary embedding of `heads` heads of width 4 in the columns of x [1, 3, N] from `start` on."""
    columns = g("aten.slice.Tensor", x, 2, start, start + 4 * heads)
    moved = g("aten.transpose.int", g("aten.view.default", columns, [1, 3, heads, 4]), 1, 2)
    return g("npu.rope", moved, Tensor("cos"), Tensor("sin"), name=name, out=((1, heads, 3, 4), "float32"))  # type: ignore[no-any-return]


def test_neighbouring_heads_turn_in_one_rotation() -> None:
    g = IRBuilder()
    x = g.input("x", 1, 3, 24)
    g.input("cos", 3, 4)
    g.input("sin", 3, 4)
    q, k, apart = rotated(g, x, 0, 2, "q"), rotated(g, x, 8, 1, "k"), rotated(g, x, 16, 1, "apart")
    g.output(g("aten.relu.default", q), g("aten.neg.default", k), g("aten.neg.default", apart))
    check(
        share_rope,
        g,
        """
        %q+k.columns = aten.slice(%x) {dim=2, end=12, start=0}
        %q+k.split = aten.view(%q+k.columns) {size=[1, 3, 3, 4]}
        %q+k.heads = aten.transpose(%q+k.split) {dim0=1, dim1=2}
        %q+k = npu.rope(%q+k.heads, %cos, %sin)
        %q = aten.slice(%q+k) {dim=1, end=2, start=0}
        %k = aten.slice(%q+k) {dim=1, end=3, start=2}
        %slice_2 = aten.slice(%x) {dim=2, end=20, start=16}
        %view_2 = aten.view(%slice_2) {size=[1, 3, 1, 4]}
        %transpose_2 = aten.transpose(%view_2) {dim0=1, dim1=2}
        %apart = npu.rope(%transpose_2, %cos, %sin)
        %relu = aten.relu(%q)
        %neg = aten.neg(%k)
        %neg_1 = aten.neg(%apart)
        return %relu, %neg, %neg_1
    """,
    )


def two_caches(*, read: bool = False, keep_old: bool = False) -> IRBuilder:
    """Keys and values that take the same two new rows; between them one may read the new keys or the old values."""
    g = IRBuilder()
    k, v = g.input("k", 8, 4), g.input("v", 8, 4)
    at, rows = g.input("at", 2, dtype="int64"), g.input("rows", 2, 4)
    keys = g("aten.index_copy.default", k, 0, at, rows, name="keys")
    values = g("aten.slice.Tensor", keys, 0, 0, 2) if read else g("aten.neg.default", rows)
    g.output(keys, g("aten.index_copy.default", v, 0, at, values, name="values"))
    if keep_old:
        g.output(g("aten.relu.default", v))
    return g


def test_an_update_that_reads_the_other_one_is_not_paired_with_it() -> None:
    check(
        pair_cache_updates,
        two_caches(read=True),
        """
        %keys = aten.index_copy(%k, %at, %rows) {dim=0}
        %slice = aten.slice(%keys) {dim=0, end=2, start=0}
        %values = aten.index_copy(%v, %at, %slice) {dim=0}
        return %keys, %values
    """,
    )


@pytest.mark.parametrize(("keep_old", "donated"), [(False, ["k", "v"]), (True, ["k"])])
def test_each_cache_of_a_pair_is_donated_by_itself(keep_old: bool, donated: list[str]) -> None:
    program = compile(two_caches(keep_old=keep_old).ir(), options=CompileOptions(compute_dtype="float32"))
    assert list(program.plan.donations.values()) == donated
    assert sum(call.kernel == "index_copy_pair_kernel" for call in program.kernels) == 1
    assert next(spec for spec in program.input_specs if spec.name == "at").bounds == (0, 7)
    backend = CPUBackend()
    old = {"k": np.ones((8, 4), np.float32), "v": np.full((8, 4), 2, np.float32)}
    feed = {**old, "at": np.array([6, 1]), "rows": np.arange(8, dtype=np.float32).reshape(2, 4) - 3}
    buffers = {spec.name: NPUBuffer.from_numpy(feed[spec.name], backend, spec=spec) for spec in program.input_specs}
    outputs = Executor(program, backend).run(buffers)
    for name, cache, rows in (("keys", "k", feed["rows"]), ("values", "v", -feed["rows"])):
        assert (outputs[name] is buffers[cache]) == (cache in donated)
        wanted = old[cache].copy()
        wanted[[6, 1]] = rows
        np.testing.assert_array_equal(outputs[name].to_numpy(), wanted)
    if keep_old:
        np.testing.assert_array_equal(buffers["v"].to_numpy(), old["v"])


def rotary(*, pairs: bool = False, sliced: bool = False, positions: str = "int64") -> IRBuilder:
    g = IRBuilder()
    p, f, q = g.input("pos", 1, 5, dtype=positions), g.weight("inv_freq", 4), g.input("q", 1, 5, 8)
    cos, sin = g("wrap_with_set_grad_enabled", p, f, name="rope", out=[((1, 5, 8), "float32")] * 2)
    cos = g("aten.slice.Tensor", cos, -1, 0, 4) if sliced else cos
    q = g("aten.slice.Tensor", q, 2, 0, None, 2) if pairs else q
    return g.output(q, cos, sin)


REGION = """
    %rope.position = aten.unsqueeze(%pos) {dim=-1}
    %rope.position_float = aten.to(%rope.position) {dtype=float32}
    %rope.angle = aten.mul(%rope.position_float, %p_inv_freq)
    %rope.angles = ANGLES
    %rope.cos = aten.cos(%rope.angles)
    %rope_0 = aten.to(%rope.cos) {dtype=float32}
    %rope.sin = aten.sin(%rope.angles)
    %rope_1 = aten.to(%rope.sin) {dtype=float32}
"""
CONCATENATED = "aten.cat(%rope.angle, %rope.angle) {dim=-1}"
INTERLEAVED = "aten.repeat_interleave(%rope.angle) {dim=-1, repeats=2}"


@pytest.mark.parametrize(
    ("g", "angles"),
    [
        (rotary(), CONCATENATED),
        (rotary(pairs=True), INTERLEAVED),
        (rotary(pairs=True, sliced=True), CONCATENATED),
    ],
    ids=["halves", "pairs", "pairs-of-half-a-cos"],
)
def test_a_rotary_region_opens_into_its_meaning_with_a_warning(g: IRBuilder, angles: str) -> None:
    with pytest.warns(UserWarning, match="compiled as a standard one.*Extract under torch.no_grad"):
        text = printed(expand_rotary_regions, g)
    region = "\n".join(line for line in text.split("\n") if "rope" in line and " = " in line and "slice" not in line)
    assert dedent(region) == dedent(REGION).strip("\n").replace("ANGLES", angles)


def test_a_region_of_another_signature_is_left_alone() -> None:
    g = rotary(positions="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert printed(expand_rotary_regions, g) == printed(lambda graph: graph, g)


# assign_storage


def test_a_bfloat16_model_keeps_the_float32_islands_that_it_asks_for() -> None:
    g = IRBuilder()
    x, w = g.input("x", 2, 8, dtype="bfloat16"), g.weight("w", 8, 8, dtype="bfloat16")
    wide = g("aten.exp.default", g("aten.to.dtype", g("aten.linear.default", x, w), dtype="float32"))
    g.output(g("aten.to.dtype", wide, dtype="bfloat16"))
    check(
        partial(assign_storage, compute_dtype="bfloat16"),
        g,
        """
        weight %p_w: bf16[8, 8] = w
        %linear: bf16[2, 8] = aten.linear(%x, %p_w)
        %to: f32[2, 8] = aten.to(%linear) {dtype=float32}
        %exp: f32[2, 8] = aten.exp(%to)
        %to_1: bf16[2, 8] = aten.to(%exp) {dtype=bfloat16}
        return %to_1
    """,
        types=True,
    )


def test_what_a_float32_model_makes_of_integers_stays_float32_and_shared_weights_split() -> None:
    g = IRBuilder()
    i, x = g.input("i", 2, 8, dtype="int64"), g.input("x", 2, 8)
    freq, table = g.weight("freq", 8), g.weight("table", 16, 8)
    angle = g("aten.mul.Tensor", g("aten.to.dtype", i, dtype="float32"), freq)
    rows = g("aten.embedding.default", table, i)
    mask = g("aten.add.Tensor", angle, g.constant("c", np.ones(8, np.float32)))
    g.output(g("aten.mul.Tensor", g("aten.cos.default", mask), x), g("aten.mul.Tensor", x, freq), rows)
    check(
        partial(assign_storage, compute_dtype="float16"),
        g,
        """
        weight %p_freq: f16[8] = freq
        weight %p_table: f16[16, 8] = table
        weight %p_freq.float32: f32[8] = freq
        constant %p_c: f32[8]
        %to: f32[2, 8] = aten.to(%i) {dtype=float32}
        %mul: f32[2, 8] = aten.mul(%to, %p_freq.float32)
        %embedding: f16[2, 8, 8] = aten.embedding(%p_table, %i)
        %add: f32[2, 8] = aten.add(%mul, %p_c)
        %cos: f32[2, 8] = aten.cos(%add)
        %mul_1: f16[2, 8] = aten.mul(%cos, %x)
        %mul_2: f16[2, 8] = aten.mul(%x, %p_freq)
        return %mul_1, %mul_2, %embedding
    """,
        types=True,
    )


def test_integers_are_stored_as_int32_and_booleans_as_they_are() -> None:
    g = IRBuilder()
    x = g.input("x", 3, dtype="int64")
    g.output(g("aten.gt.Scalar", x, 0), g("aten.add.Scalar", g.input("y", 3, dtype="uint8"), 1))
    stored = assign_storage(read_ir(g.ir()), "float16").tensors
    assert [stored[name].storage for name in ("x", "y", "gt", "add")] == ["int32", "int32", "bool", "int32"]


def test_index_inputs_carry_the_tightest_bounds_of_their_readers() -> None:
    g = IRBuilder()
    i, rows = g.input("i", 4, dtype="int64"), g.input("rows", 2, 4)
    g.output(
        g("aten.embedding.default", g.weight("table", 16, 8), i),
        g("aten.index_select.default", g.input("x", 7, 3), 0, i),
        g("aten.index_copy.default", g.input("cache", 2, 9), 1, g.input("at", 4, dtype="int64"), rows),
    )
    tensors = assign_storage(read_ir(g.ir()), "float16").tensors
    assert (tensors["i"].bounds, tensors["at"].bounds, tensors["x"].bounds) == ((0, 6), (0, 8), None)


@pytest.mark.parametrize(
    ("weights", "requested", "chosen"),
    [
        (("bfloat16",), None, "bfloat16"),
        (("float16",), None, "float16"),
        (("float32",), None, "float16"),
        (("bfloat16", "bfloat16", "float32"), None, "bfloat16"),
        (("bfloat16",), "float32", "float32"),
    ],
)
def test_the_compute_dtype_follows_most_of_the_weights(
    weights: tuple[str, ...], requested: str | None, chosen: str
) -> None:
    g = IRBuilder()
    for index, dtype in enumerate(weights):
        g.weight(f"w{index}", 8, dtype=dtype)
    assert choose_compute_dtype(read_ir(g.ir()), requested) == chosen


def test_an_unknown_compute_dtype_is_an_error() -> None:
    with pytest.raises(NPUError, match="unknown compute dtype 'int8'; choose one of float16, bfloat16, float32"):
        choose_compute_dtype(read_ir(IRBuilder().ir()), "int8")


# assign_layout


def small_cnn() -> IRBuilder:
    g = IRBuilder()
    y = g("aten.conv2d.default", g.input("x", 2, 3, 8, 8), g.weight("w", 40, 3, 3, 3))
    y = g("aten.adaptive_avg_pool2d.default", g("aten.relu.default", y), [1, 1])
    return g.output(g("aten.flatten.using_ints", y, 1))


def laid_out(graph: IRGraph, dtype: str = "float16", config: TargetConfig = METAL_GPU) -> IRGraph:
    return assign_layout(assign_storage(graph, dtype), config)


def test_convolution_activations_get_padded_channels_until_the_conv_world_ends() -> None:
    check(
        laid_out,
        small_cnn(),
        """
        weight %p_w: f16[40, 3, 3, 3] = w
        %conv2d: f16[2, 40, 6, 6] in [2, 64, 6, 6] = aten.conv2d(%x, %p_w)
        %relu: f16[2, 40, 6, 6] in [2, 64, 6, 6] = aten.relu(%conv2d)
        %adaptive_avg_pool2d: f16[2, 40, 1, 1] in [2, 64, 1, 1] = aten.adaptive_avg_pool2d(%relu) {output_size=[1, 1]}
        %flatten: f16[2, 40] = aten.flatten(%adaptive_avg_pool2d) {start_dim=1}
        return %flatten
    """,
        types=True,
    )


def test_alignment_is_in_bytes_and_can_be_switched_off() -> None:
    graph = read_ir(small_cnn().ir())
    assert laid_out(graph, "float32").tensors["x"].alloc_shape == (2, 16, 8, 8)
    unpadded = laid_out(graph, config=TargetConfig("test", channel_alignment_bytes=1))
    assert all(spec.alloc_shape is None for spec in unpadded.tensors.values())


@pytest.mark.parametrize(("channels", "size", "padded"), [(3, 2, 32), (32, 2, 32), (33, 2, 64), (3, 4, 16), (5, 1, 64)])
def test_channels_round_up_to_the_alignment(channels: int, size: int, padded: int) -> None:
    assert pad_channels(channels, size, 64) == padded


@pytest.mark.parametrize(
    ("op_type", "args"),
    [
        ("aten.sub.Tensor", (1.0,)),
        ("aten.subtract.Tensor", (1.0,)),
        ("aten.clamp.default", (0.0, 6.0)),
        ("aten.clip.default", (0.0, 6.0)),
        ("aten.true_divide.Tensor", (2.0,)),
    ],
)
def test_elementwise_ops_after_a_convolution_keep_its_padded_channels(op_type: str, args: tuple[Any, ...]) -> None:
    g = IRBuilder()
    y = g("aten.conv2d.default", g.input("x", 2, 3, 8, 8), g.weight("w", 40, 3, 3, 3))
    g.output(g("aten.relu.default", g(op_type, y, *args, name="y")))
    assert laid_out(read_ir(g.ir())).tensors["y"].alloc_shape == (2, 64, 6, 6)


def test_a_masked_fill_after_a_convolution_keeps_its_padded_channels() -> None:
    g = IRBuilder()
    y = g("aten.conv2d.default", g.input("x", 2, 3, 8, 8), g.weight("w", 40, 3, 3, 3))
    g.output(g("aten.masked_fill.Scalar", y, g("aten.lt.Scalar", y, 0.0), 0.5, name="y"))
    assert laid_out(read_ir(g.ir())).tensors["y"].alloc_shape == (2, 64, 6, 6)


# compile(…, stages=…), trace_stages


def test_trace_stages_yields_the_graph_after_each_stage() -> None:
    traced = list(trace_stages(small_cnn().ir()))
    assert [name for name, _ in traced][:2] == ["read", "expand_rotary_regions"]
    assert traced[-1][0] == "assign_layout"
    assert print_graph(traced[-1][1], types=False).count("npu.conv2d") == 1


def kernels(g: IRBuilder, edit: StageEdit | None = None) -> list[str]:
    return [call.kernel for call in compile(g.ir(), options=CompileOptions(stages=edit)).kernels]


def add_relu() -> IRBuilder:
    g = IRBuilder()
    return g.output(g("aten.relu.default", g("aten.add.Tensor", g.input("x", 2, 8), g.input("y", 2, 8))))


def test_a_stage_can_be_cut() -> None:
    def without_fusions(stages: list[Stage]) -> list[Stage]:
        return [(name, stage) for name, stage in stages if name != "fuse"]

    assert kernels(add_relu()) == ["add_relu_kernel"]
    assert kernels(add_relu(), without_fusions) == ["add_kernel", "relu_kernel"]
    assert "fuse" not in dict(trace_stages(add_relu().ir(), options=CompileOptions(stages=without_fusions)))


def test_a_stage_can_be_added() -> None:
    def relu_to_silu(graph: IRGraph) -> IRGraph:
        return graph.with_nodes(
            [replace(n, op_type="aten.silu.default") if n.base == "aten.relu" else n for n in graph.nodes]
        )

    def with_silu(stages: list[Stage]) -> list[Stage]:
        return [("relu_to_silu", relu_to_silu), *stages]

    assert kernels(add_relu(), with_silu) == ["add_kernel", "silu_kernel"]
    assert [name for name, _ in trace_stages(add_relu().ir(), options=CompileOptions(stages=with_silu))][:2] == [
        "read",
        "relu_to_silu",
    ]


def test_stages_can_be_reordered() -> None:
    """Fused before batch norms are folded, a convolution ends at its batch norm; the activation stays by itself."""

    def fuse_first(stages: list[Stage]) -> list[Stage]:
        (fuse,) = (stage for stage in stages if stage[0] == "fuse")
        rest = [stage for stage in stages if stage is not fuse]
        place = [name for name, _ in rest].index("fold_batch_norm")
        return [*rest[:place], fuse, *rest[place:]]

    g = normed("aten.conv2d.default", (4, 3, 3, 3), (1, 3, 8, 8))
    g.outputs[:] = [g("aten.relu.default", Tensor("batch_norm"))]
    assert kernels(g) == ["conv2d_kernel"]
    assert kernels(g, fuse_first) == ["conv2d_kernel", "relu_kernel"]


def test_stages_without_code_generation_make_no_plan() -> None:
    def graphs_only(stages: list[Stage]) -> list[Stage]:
        return stages[: [name for name, _ in stages].index("generate_calls")]

    with pytest.raises(InputError, match="the stages make no plan: 'generate_calls' is missing"):
        kernels(add_relu(), graphs_only)


def test_what_the_npu_cannot_run_is_traced_until_calls_are_generated() -> None:
    g = IRBuilder()
    ir = g.output(g("aten.linalg_inv.default", g.input("x", 4, 4))).ir()
    assert list(dict(trace_stages(ir)))[-1] == "assign_layout"
    names: list[str] = []
    with pytest.raises(ConstraintError, match="linalg_inv"):
        names.extend(name for name, _ in trace_compilation(ir))
    traced = [name for name, _ in trace_compilation(add_relu().ir())]
    assert traced[-3:] == ["assign_layout", "generate_calls", "plan_memory"]
