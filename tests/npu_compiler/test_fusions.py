"""Each fusion's effect on a graph, as text: the graph that the fusions before it leave, and the graph after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent

import numpy as np
import pytest
from ir_builder import IRBuilder, Tensor
from torch.ao.quantization.fx import _decomposed  # noqa: F401 (registers its ops)

from npu_compiler import CompileOptions, IRGraph, compile, print_graph, read_ir
from npu_compiler.fusion_patterns import FUSIONS, fuse
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_runtime import Backend, Executor, execute_cpu_partition, load_weights


@dataclass(frozen=True)
class Shown:
    """A graph in which a fusion fires, and its text before and after."""

    fusion: str
    build: Callable[[IRBuilder], None]
    given: str
    result: str

    @property
    def graph(self) -> IRGraph:
        g = IRBuilder()
        self.build(g)
        return read_ir(g.ir())


SHOWN: dict[str, Shown] = {}


def shows(fusion: str, *, given: str, result: str) -> Callable[[Callable[[IRBuilder], None]], None]:
    """Adds to `SHOWN` the graph that the decorated function builds."""

    def add(build: Callable[[IRBuilder], None]) -> None:
        SHOWN[build.__name__] = Shown(fusion, build, given, result)

    return add


@shows(
    "silu",
    given="""
    %sigmoid = aten.sigmoid(%x)
    %mul = aten.mul(%x, %sigmoid)
    return %mul
    """,
    result="""
    %mul = aten.silu(%x)
    return %mul
    """,
)
def silu(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    g.output(g("aten.mul.Tensor", x, g("aten.sigmoid.default", x)))


@shows(
    "gelu",
    given="""
    %div = aten.div(%x) {other=1.4142135623730951}
    %erf = aten.erf(%div)
    %mul = aten.mul(%x) {other=0.5}
    %add = aten.add(%erf) {other=1.0}
    %mul_1 = aten.mul(%mul, %add)
    return %mul_1
    """,
    result="""
    %mul_1 = aten.gelu(%x)
    return %mul_1
    """,
)
def gelu(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    erf = g("aten.erf.default", g("aten.div.Tensor", x, 1.4142135623730951))
    g.output(g("aten.mul.Tensor", g("aten.mul.Tensor", x, 0.5), g("aten.add.Tensor", erf, 1.0)))


@shows(
    "gelu_tanh",
    given="""
    %pow = aten.pow(%x) {exponent=3.0}
    %mul = aten.mul(%pow) {other=0.044715}
    %add = aten.add(%x, %mul)
    %mul_1 = aten.mul(%add) {other=0.7978845608028654}
    %tanh = aten.tanh(%mul_1)
    %mul_2 = aten.mul(%x) {other=0.5}
    %add_1 = aten.add(%tanh) {other=1.0}
    %mul_3 = aten.mul(%mul_2, %add_1)
    return %mul_3
    """,
    result="""
    %mul_3 = aten.gelu(%x) {approximate=tanh}
    return %mul_3
    """,
)
def gelu_tanh(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    cubed = g("aten.mul.Tensor", g("aten.pow.Tensor_Scalar", x, 3.0), 0.044715)
    tanh = g("aten.tanh.default", g("aten.mul.Tensor", g("aten.add.Tensor", x, cubed), 0.7978845608028654))
    g.output(g("aten.mul.Tensor", g("aten.mul.Tensor", x, 0.5), g("aten.add.Tensor", tanh, 1.0)))


@shows(
    "layer_norm",
    given="""
    weight %p_w = w
    weight %p_b = b
    %mean = aten.mean(%x) {dim=[-1], keepdim=True}
    %sub = aten.sub(%x, %mean)
    %pow = aten.pow(%sub) {exponent=2}
    %mean_1 = aten.mean(%pow) {dim=[-1], keepdim=True}
    %add = aten.add(%mean_1) {other=1e-05}
    %sqrt = aten.sqrt(%add)
    %div = aten.div(%sub, %sqrt)
    %mul = aten.mul(%p_w, %div)
    %add_1 = aten.add(%mul, %p_b)
    return %add_1
    """,
    result="""
    weight %p_w = w
    weight %p_b = b
    %add_1 = npu.layer_norm(%x, %p_w, %p_b) {eps=1e-05, normalized_shape=[8]}
    return %add_1
    """,
)
def layer_norm(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    centered = g("aten.sub.Tensor", x, g("aten.mean.dim", x, [-1], True))
    variance = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", centered, 2), [-1], True)
    normal = g("aten.div.Tensor", centered, g("aten.sqrt.default", g("aten.add.Tensor", variance, 1e-5)))
    g.output(g("aten.add.Tensor", g("aten.mul.Tensor", g.weight("w", 8), normal), g.weight("b", 8)))


@shows(
    "rms_norm",
    given="""
    weight %p_w = w
    %pow = aten.pow(%x) {exponent=2}
    %mean = aten.mean(%pow) {dim=[-1], keepdim=True}
    %add = aten.add(%mean) {other=1e-06}
    %rsqrt = aten.rsqrt(%add)
    %expand = aten.expand(%rsqrt) {size=[2, 8]}
    %mul = aten.mul(%x, %expand)
    %mul_1 = aten.mul(%mul, %p_w)
    return %mul_1
    """,
    result="""
    weight %p_w = w
    %mul_1 = npu.rms_norm(%x, %p_w) {eps=1e-06, weight_offset=0.0}
    return %mul_1
    """,
)
def rms_norm_with_an_expanded_scale(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    mean = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", x, 2), [-1], True)
    scale = g("aten.expand.default", g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6)), [2, 8])
    g.output(g("aten.mul.Tensor", g("aten.mul.Tensor", x, scale), g.weight("w", 8)))


@shows(
    "rms_norm",
    given="""
    weight %p_w = w
    %mul = aten.mul(%x, %x)
    %mean = aten.mean(%mul) {dim=[-1], keepdim=True}
    %add = aten.add(%mean) {other=1e-06}
    %rsqrt = aten.rsqrt(%add)
    %mul_1 = aten.mul(%x, %rsqrt)
    %mul_2 = aten.mul(%p_w, %mul_1)
    return %mul_2
    """,
    result="""
    weight %p_w = w
    %mul_2 = npu.rms_norm(%x, %p_w) {eps=1e-06, weight_offset=0.0}
    return %mul_2
    """,
)
def rms_norm_of_x_times_x(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    mean = g("aten.mean.dim", g("aten.mul.Tensor", x, x), [-1], True)
    scale = g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6))
    g.output(g("aten.mul.Tensor", g.weight("w", 8), g("aten.mul.Tensor", x, scale)))


@shows(
    "rms_norm",
    given="""
    weight %p_w = w
    %pow = aten.pow(%x) {exponent=2}
    %mean = aten.mean(%pow) {dim=[-1], keepdim=True}
    %add = aten.add(%mean) {other=1e-06}
    %rsqrt = aten.rsqrt(%add)
    %mul = aten.mul(%x, %rsqrt)
    %add_1 = aten.add(%p_w) {other=1.0}
    %mul_1 = aten.mul(%mul, %add_1)
    return %mul_1
    """,
    result="""
    weight %p_w = w
    %mul_1 = npu.rms_norm(%x, %p_w) {eps=1e-06, weight_offset=1.0}
    return %mul_1
    """,
)
def rms_norm_with_one_plus_weight(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    mean = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", x, 2), [-1], True)
    scale = g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6))
    g.output(g("aten.mul.Tensor", g("aten.mul.Tensor", x, scale), g("aten.add.Tensor", g.weight("w", 8), 1.0)))


@shows(
    "attention",
    given="""
    %transpose = aten.transpose(%k) {dim0=2, dim1=3}
    %matmul = aten.matmul(%q, %transpose)
    %mul = aten.mul(%matmul) {other=0.25}
    %add = aten.add(%mul, %mask)
    %softmax = aten.softmax(%add) {dim=-1}
    %matmul_1 = aten.matmul(%softmax, %v)
    return %matmul_1
    """,
    result="""
    %transpose = aten.transpose(%k) {dim0=2, dim1=3}
    %matmul_1.key = aten.transpose(%transpose) {dim0=-2, dim1=-1}
    %matmul_1 = npu.attention(%q, %matmul_1.key, %v, %mask) {scale=0.25}
    return %matmul_1
    """,
)
def attention(g: IRBuilder) -> None:
    attention_of(g, lambda scores: g("aten.mul.Tensor", scores, 0.25))


def attention_of(g: IRBuilder, scaled: Callable[[Tensor], Tensor]) -> None:
    """Make masked attention, whose scores are those that `scaled` makes of the products of queries and keys."""
    q, k, v = (g.input(name, 1, 4, 5, 8) for name in "qkv")
    scores = scaled(g("aten.matmul.default", q, g("aten.transpose.int", k, 2, 3)))
    masked = g("aten.add.Tensor", scores, g.input("mask", 1, 1, 5, 5))
    g.output(g("aten.matmul.default", g("aten.softmax.int", masked, -1), v))


@shows(
    "attention",
    given="""
    %transpose = aten.transpose(%k) {dim0=2, dim1=3}
    %matmul = aten.matmul(%q, %transpose)
    %mul = aten.mul(%matmul) {other=0.25}
    %div = aten.div(%mul) {other=30.0}
    %tanh = aten.tanh(%div)
    %mul_1 = aten.mul(%tanh) {other=30.0}
    %add = aten.add(%mul_1, %mask)
    %softmax = aten.softmax(%add) {dim=-1}
    %matmul_1 = aten.matmul(%softmax, %v)
    return %matmul_1
    """,
    result="""
    %transpose = aten.transpose(%k) {dim0=2, dim1=3}
    %matmul_1.key = aten.transpose(%transpose) {dim0=-2, dim1=-1}
    %matmul_1 = npu.attention(%q, %matmul_1.key, %v, %mask) {scale=0.25, soft_cap=30.0}
    return %matmul_1
    """,
)
def attention_with_a_soft_cap(g: IRBuilder) -> None:
    capped_attention(g, 30.0)


def capped_attention(g: IRBuilder, bound: float) -> None:
    def capped(scores: Tensor) -> Tensor:
        fraction = g("aten.div.Tensor", g("aten.mul.Tensor", scores, 0.25), 30.0)
        return g("aten.mul.Tensor", g("aten.tanh.default", fraction), bound)

    attention_of(g, capped)


@shows(
    "attention",
    given="""
    %transpose = aten.transpose(%k) {dim0=2, dim1=3}
    %matmul = aten.matmul(%q, %transpose)
    %mul = aten.mul(%matmul, %gain)
    %add = aten.add(%mul, %mask)
    %softmax = aten.softmax(%add) {dim=-1}
    %matmul_1 = aten.matmul(%softmax, %v)
    return %matmul_1
    """,
    result="""
    %transpose = aten.transpose(%k) {dim0=2, dim1=3}
    %matmul_1.query = aten.mul(%q, %gain)
    %matmul_1.key = aten.transpose(%transpose) {dim0=-2, dim1=-1}
    %matmul_1 = npu.attention(%matmul_1.query, %matmul_1.key, %v, %mask) {scale=1.0}
    return %matmul_1
    """,
)
def attention_with_a_gain_for_each_head(g: IRBuilder) -> None:
    attention_with_a_gain(g, 4, 1, 1)


@shows(
    "attention",
    given="""
    %reshape = aten.reshape(%q) {shape=[8, 5, 16]}
    %reshape_1 = aten.reshape(%k) {shape=[8, 5, 16]}
    %reshape_2 = aten.reshape(%v) {shape=[8, 5, 16]}
    %transpose = aten.transpose(%reshape_1) {dim0=1, dim1=2}
    %baddbmm = aten.baddbmm(%slopes, %reshape, %transpose) {alpha=0.25, beta=1}
    %view = aten.view(%baddbmm) {size=[2, 4, 5, 5]}
    %add = aten.add(%view, %mask)
    %softmax = aten.softmax(%add) {dim=-1}
    %view_1 = aten.view(%softmax) {size=[8, 5, 5]}
    %bmm = aten.bmm(%view_1, %reshape_2)
    return %bmm
    """,
    result="""
    %transpose.heads = aten.transpose(%k) {dim0=-2, dim1=-1}
    %bmm.key.heads = aten.transpose(%transpose.heads) {dim0=-2, dim1=-1}
    %bmm.term0 = aten.view(%slopes) {size=[2, 4, 1, 5]}
    %bmm.terms = aten.add(%bmm.term0, %mask)
    %bmm.attended = npu.attention(%q, %bmm.key.heads, %v, %bmm.terms) {scale=0.25}
    %bmm = aten.view(%bmm.attended) {size=[8, 5, 16]}
    return %bmm
    """,
)
def attention_of_batches_and_heads_in_one_dimension(g: IRBuilder) -> None:
    q, k, v = (g("aten.reshape.default", g.input(name, 2, 4, 5, 16), [8, 5, 16]) for name in "qkv")
    slopes, mask = g.input("slopes", 8, 1, 5), g.input("mask", 2, 1, 5, 5)
    scores = g("aten.baddbmm.default", slopes, q, g("aten.transpose.int", k, 1, 2), beta=1, alpha=0.25)
    masked = g("aten.add.Tensor", g("aten.view.default", scores, [2, 4, 5, 5]), mask)
    weights = g("aten.view.default", g("aten.softmax.int", masked, -1), [8, 5, 5])
    g.output(g("aten.bmm.default", weights, v))


@shows(
    "attention_scales",
    given="""
    %mul = aten.mul(%x) {other=0.25}
    %transpose = aten.transpose(%mul) {dim0=1, dim1=2}
    %scaled_dot_product_attention = aten.scaled_dot_product_attention(%transpose, %k, %v) {scale=1.0}
    return %scaled_dot_product_attention
    """,
    result="""
    %transpose = aten.transpose(%x) {dim0=1, dim1=2}
    %scaled_dot_product_attention = aten.scaled_dot_product_attention(%transpose, %k, %v) {scale=0.25}
    return %scaled_dot_product_attention
    """,
)
def attention_of_scaled_queries(g: IRBuilder) -> None:
    q = g("aten.transpose.int", g("aten.mul.Tensor", g.input("x", 2, 5, 4, 8), 0.25), 1, 2)
    k, v = (g.input(name, 2, 4, 5, 8) for name in "kv")
    g.output(g("aten.scaled_dot_product_attention.default", q, k, v, scale=1.0))


def test_scaled_queries_that_others_read_stay() -> None:
    g = IRBuilder()
    q = g("aten.mul.Tensor", g.input("x", 2, 4, 5, 8), 0.25)
    k, v = (g.input(name, 2, 4, 5, 8) for name in "kv")
    g.output(g("aten.scaled_dot_product_attention.default", q, k, v))
    g.output(g("aten.relu.default", q))
    assert "aten.mul.Tensor" in [node.op_type for node in fuse(read_ir(g.ir())).nodes]


@shows(
    "quick_gelu",
    given="""
    %mul = aten.mul(%x) {other=1.702}
    %sigmoid = aten.sigmoid(%mul)
    %mul_1 = aten.mul(%x, %sigmoid)
    return %mul_1
    """,
    result="""
    %mul_1.scaled = aten.mul(%x) {other=1.702}
    %mul_1.gated = aten.silu(%mul_1.scaled)
    %mul_1 = aten.mul(%mul_1.gated) {other=0.5875440658049353}
    return %mul_1
    """,
)
def quick_gelu(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    g.output(g("aten.mul.Tensor", x, g("aten.sigmoid.default", g("aten.mul.Tensor", x, 1.702))))


def attention_with_a_gain(g: IRBuilder, *shape: int) -> None:
    attention_of(g, lambda scores: g("aten.mul.Tensor", scores, g.input("gain", *shape)))


@pytest.mark.parametrize("shape", [(5,), (4, 5, 5), (2, 4, 5, 1)])
def test_gains_that_are_no_factors_of_queries_stay(shape: tuple[int, ...]) -> None:
    g = IRBuilder()
    attention_with_a_gain(g, *shape)
    assert "npu.attention" not in [node.op_type for node in fuse(read_ir(g.ir())).nodes]


def test_scores_that_are_divided_by_another_number_have_no_soft_cap() -> None:
    g = IRBuilder()
    capped_attention(g, 29.0)
    assert "npu.attention" not in [node.op_type for node in fuse(read_ir(g.ir())).nodes]


@shows(
    "share_kv_heads",
    given="""
    %unsqueeze = aten.unsqueeze(%k) {dim=2}
    %expand = aten.expand(%unsqueeze) {size=[1, 2, 2, 5, 8]}
    %reshape = aten.reshape(%expand) {shape=[1, 4, 5, 8]}
    %unsqueeze_1 = aten.unsqueeze(%v) {dim=2}
    %expand_1 = aten.expand(%unsqueeze_1) {size=[1, 2, 2, 5, 8]}
    %reshape_1 = aten.reshape(%expand_1) {shape=[1, 4, 5, 8]}
    %scaled_dot_product_attention = aten.scaled_dot_product_attention(%q, %reshape, %reshape_1)
    return %scaled_dot_product_attention
    """,
    result="""
    %scaled_dot_product_attention = aten.scaled_dot_product_attention(%q, %k, %v)
    return %scaled_dot_product_attention
    """,
)
def share_kv_heads(g: IRBuilder) -> None:
    q, k, v = g.input("q", 1, 4, 5, 8), g.input("k", 1, 2, 5, 8), g.input("v", 1, 2, 5, 8)

    def repeated(x: Tensor) -> Tensor:
        wide = g("aten.expand.default", g("aten.unsqueeze.default", x, 2), [1, 2, 2, 5, 8])
        return g("aten.reshape.default", wide, [1, 4, 5, 8])

    g.output(g("aten.scaled_dot_product_attention.default", q, repeated(k), repeated(v)))


@shows(
    "rope",
    given="""
    %slice = aten.slice(%x) {dim=3, end=4, start=0}
    %slice_1 = aten.slice(%x) {dim=3, end=8, start=4}
    %neg = aten.neg(%slice_1)
    %cat = aten.cat(%neg, %slice) {dim=-1}
    %mul = aten.mul(%x, %cos)
    %mul_1 = aten.mul(%cat, %sin)
    %add = aten.add(%mul, %mul_1)
    return %add
    """,
    result="""
    %add = npu.rope(%x, %cos, %sin)
    return %add
    """,
)
def rope(g: IRBuilder) -> None:
    x, cos, sin = g.input("x", 1, 4, 5, 8), g.input("cos", 1, 1, 5, 8), g.input("sin", 1, 1, 5, 8)
    first, second = g("aten.slice.Tensor", x, 3, 0, 4), g("aten.slice.Tensor", x, 3, 4, 8)
    turned = g("aten.cat.default", [g("aten.neg.default", second), first], -1)
    g.output(g("aten.add.Tensor", g("aten.mul.Tensor", x, cos), g("aten.mul.Tensor", turned, sin)))


@shows(
    "rope",
    given="""
    %slice = aten.slice(%x) {dim=3, end=8, start=1, step=2}
    %slice_1 = aten.slice(%x) {dim=3, end=8, start=0, step=2}
    %neg = aten.neg(%slice)
    %stack = aten.stack(%neg, %slice_1) {dim=-1}
    %reshape = aten.reshape(%stack) {shape=[1, 4, 5, 8]}
    %mul = aten.mul(%x, %cos)
    %mul_1 = aten.mul(%reshape, %sin)
    %add = aten.add(%mul, %mul_1)
    return %add
    """,
    result="""
    %add = npu.rope_pairs(%x, %cos, %sin)
    return %add
    """,
)
def rope_of_neighbours(g: IRBuilder) -> None:
    x, cos, sin = g.input("x", 1, 4, 5, 8), g.input("cos", 1, 1, 5, 8), g.input("sin", 1, 1, 5, 8)
    odd, even = g("aten.slice.Tensor", x, 3, 1, 8, 2), g("aten.slice.Tensor", x, 3, 0, 8, 2)
    turned = g("aten.reshape.default", g("aten.stack.default", [g("aten.neg.default", odd), even], -1), [1, 4, 5, 8])
    g.output(g("aten.add.Tensor", g("aten.mul.Tensor", x, cos), g("aten.mul.Tensor", turned, sin)))


@shows(
    "rope_by_halves",
    given="""
    %slice = aten.slice(%q) {dim=3, end=4, start=0}
    %slice_1 = aten.slice(%q) {dim=3, end=8, start=4}
    %mul = aten.mul(%slice, %cos)
    %mul_1 = aten.mul(%slice_1, %sin)
    %sub = aten.sub(%mul, %mul_1)
    %mul_2 = aten.mul(%slice_1, %cos)
    %mul_3 = aten.mul(%slice, %sin)
    %add = aten.add(%mul_2, %mul_3)
    %cat = aten.cat(%sub, %add) {dim=-1}
    %slice_2 = aten.slice(%k) {dim=3, end=4, start=0}
    %slice_3 = aten.slice(%k) {dim=3, end=8, start=4}
    %mul_4 = aten.mul(%slice_2, %cos)
    %mul_5 = aten.mul(%slice_3, %sin)
    %sub_1 = aten.sub(%mul_4, %mul_5)
    %mul_6 = aten.mul(%slice_3, %cos)
    %mul_7 = aten.mul(%slice_2, %sin)
    %add_1 = aten.add(%mul_6, %mul_7)
    %cat_1 = aten.cat(%sub_1, %add_1) {dim=-1}
    return %cat, %cat_1
    """,
    result="""
    %cos.twice = aten.cat(%cos, %cos) {dim=-1}
    %sin.twice = aten.cat(%sin, %sin) {dim=-1}
    %cat = npu.rope(%q, %cos.twice, %sin.twice)
    %cat_1 = npu.rope(%k, %cos.twice, %sin.twice)
    return %cat, %cat_1
    """,
)
def rope_by_halves(g: IRBuilder) -> None:
    q, k = g.input("q", 1, 4, 5, 8), g.input("k", 1, 2, 5, 8)
    cos, sin = g.input("cos", 1, 1, 5, 4), g.input("sin", 1, 1, 5, 4)
    rotated = []
    for x in (q, k):
        first, second = (g("aten.slice.Tensor", x, 3, start, start + 4) for start in (0, 4))
        products = [g("aten.mul.Tensor", half, table) for half, table in ((first, cos), (second, sin))]
        lower = g("aten.sub.Tensor", *products)
        products = [g("aten.mul.Tensor", half, table) for half, table in ((second, cos), (first, sin))]
        rotated.append(g("aten.cat.default", [lower, g("aten.add.Tensor", *products)], -1))
    g.output(*rotated)


@shows(
    "masked_softmax",
    given="""
    %add = aten.add(%scores, %mask)
    %softmax = aten.softmax(%add) {dim=-1}
    return %softmax
    """,
    result="""
    %softmax = npu.masked_softmax(%scores, %mask)
    return %softmax
    """,
)
def masked_softmax(g: IRBuilder) -> None:
    masked = g("aten.add.Tensor", g.input("scores", 2, 4, 8), g.input("mask", 4, 8))
    g.output(g("aten.softmax.int", masked, -1))


@shows(
    "clamped_gate",
    given="""
    %gate = aten.slice(%x) {dim=1, end=16, start=0, step=2}
    %up = aten.slice(%x) {dim=1, end=16, start=1, step=2}
    %clamp = aten.clamp(%gate) {max=2.5}
    %clamp_1 = aten.clamp(%up) {max=2.5, min=-2.5}
    %mul = aten.mul(%clamp) {other=1.702}
    %sigmoid = aten.sigmoid(%mul)
    %mul_1 = aten.mul(%clamp, %sigmoid)
    %add = aten.add(%clamp_1) {other=1}
    %mul_2 = aten.mul(%add, %mul_1)
    return %mul_2
    """,
    result="""
    %gate = aten.slice(%x) {dim=1, end=16, start=0, step=2}
    %up = aten.slice(%x) {dim=1, end=16, start=1, step=2}
    %mul_2 = npu.clamped_silu_mul(%gate, %up) {alpha=1.702, limit=2.5}
    return %mul_2
    """,
)
def clamped_gate(g: IRBuilder) -> None:
    x = g.input("x", 3, 16)
    gate, up = (g("aten.slice.Tensor", x, 1, first, 16, 2, name=name) for first, name in ((0, "gate"), (1, "up")))
    gate, up = g("aten.clamp.default", gate, None, 2.5), g("aten.clamp.default", up, -2.5, 2.5)
    opened = g("aten.mul.Tensor", gate, g("aten.sigmoid.default", g("aten.mul.Tensor", gate, 1.702)))
    g.output(g("aten.mul.Tensor", g("aten.add.Tensor", up, 1), opened))


@shows(
    "gated_activation",
    given="""
    %gelu = aten.gelu(%gate)
    %mul = aten.mul(%gelu, %up)
    return %mul
    """,
    result="""
    %mul = npu.gelu_mul(%gate, %up)
    return %mul
    """,
)
def gated_activation(g: IRBuilder) -> None:
    gate = g("aten.gelu.default", g.input("gate", 2, 8))
    g.output(g("aten.mul.Tensor", gate, g.input("up", 2, 8)))


@shows(
    "conv_epilogue",
    given="""
    weight %p_w = w
    weight %p_b = b
    %conv2d = aten.conv2d(%x, %p_w, %p_b)
    %add = aten.add(%conv2d, %residual)
    %relu = aten.relu(%add)
    return %relu
    """,
    result="""
    weight %p_w = w
    weight %p_b = b
    %relu = npu.conv2d(%x, %p_w, %p_b, %residual) {activation=relu, has_bias=True, has_residual=True}
    return %relu
    """,
)
def conv_epilogue(g: IRBuilder) -> None:
    conv = g("aten.conv2d.default", g.input("x", 1, 3, 6, 6), g.weight("w", 4, 3, 3, 3), g.weight("b", 4))
    g.output(g("aten.relu.default", g("aten.add.Tensor", conv, g.input("residual", 1, 4, 4, 4))))


@shows(
    "shared_input_linears",
    given="""
    weight %p_q_w = q.w
    weight %p_q_b = q.b
    weight %p_k_w = k.w
    %q = aten.linear(%x, %p_q_w, %p_q_b)
    %k = aten.linear(%x, %p_k_w)
    %tanh = aten.tanh(%q)
    %tanh_1 = aten.tanh(%k)
    return %tanh, %tanh_1
    """,
    result="""
    weight %q+k.weight = concat(q.w, k.w, axis=0)
    weight %q+k.bias = concat(q.b, fill(shape=[4], value=0.0), axis=0)
    %q+k = aten.linear(%x, %q+k.weight, %q+k.bias)
    %q = aten.slice(%q+k) {dim=1, end=8, start=0}
    %k = aten.slice(%q+k) {dim=1, end=12, start=8}
    %tanh = aten.tanh(%q)
    %tanh_1 = aten.tanh(%k)
    return %tanh, %tanh_1
    """,
)
def shared_input_linears(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    q = g("aten.linear.default", x, g.weight("q.w", 8, 8), g.weight("q.b", 8), name="q")
    k = g("aten.linear.default", x, g.weight("k.w", 4, 8), name="k")
    g.output(g("aten.tanh.default", q), g("aten.tanh.default", k))


@shows(
    "linear_activation",
    given="""
    weight %p_w = w
    weight %p_b = b
    %linear = aten.linear(%x, %p_w, %p_b)
    %gelu = aten.gelu(%linear) {approximate=tanh}
    return %gelu
    """,
    result="""
    weight %p_w = w
    weight %p_b = b
    %gelu = npu.linear(%x, %p_w, %p_b) {activation=gelu_tanh, has_bias=True, has_residual=False}
    return %gelu
    """,
)
def linear_activation(g: IRBuilder) -> None:
    y = g("aten.linear.default", g.input("x", 2, 8), g.weight("w", 6, 8), g.weight("b", 6))
    g.output(g("aten.gelu.default", y, approximate="tanh"))


@shows(
    "linear_residual",
    given="""
    weight %p_w = w
    %linear = aten.linear(%x, %p_w)
    %add = aten.add(%x, %linear)
    return %add
    """,
    result="""
    weight %p_w = w
    %add = npu.linear(%x, %p_w, %x) {activation=none, has_bias=False, has_residual=True}
    return %add
    """,
)
def linear_residual(g: IRBuilder) -> None:
    x = g.input("x", 2, 8)
    g.output(g("aten.add.Tensor", x, g("aten.linear.default", x, g.weight("w", 8, 8))))


@shows(
    "linear_cast",
    given="""
    weight %p_w = w
    %linear = aten.linear(%x, %p_w)
    %to = aten.to(%linear) {dtype=float32}
    return %to
    """,
    result="""
    weight %p_w = w
    %to = npu.linear(%x, %p_w) {has_bias=False}
    return %to
    """,
)
def linear_cast(g: IRBuilder) -> None:
    y = g("aten.linear.default", g.input("x", 2, 8, dtype="float16"), g.weight("w", 4, 8, dtype="float16"))
    g.output(g("aten.to.dtype", y, "float32"))


@shows(
    "gated_linear",
    given="""
    weight %gate+up.weight = concat(gate.w, up.w, axis=0)
    %gate+up = aten.linear(%x, %gate+up.weight)
    %gate = aten.slice(%gate+up) {dim=1, end=16, start=0}
    %up = aten.slice(%gate+up) {dim=1, end=32, start=16}
    %mul = npu.silu_mul(%gate, %up)
    return %mul
    """,
    result="""
    weight %gate+up.weight = concat(gate.w, up.w, axis=0)
    %mul = npu.gated_linear(%x, %gate+up.weight) {activation=silu}
    return %mul
    """,
)
def gated_linear(g: IRBuilder) -> None:
    x = g.input("x", 1, 8)
    gate = g("aten.linear.default", x, g.weight("gate.w", 16, 8), name="gate")
    up = g("aten.linear.default", x, g.weight("up.w", 16, 8), name="up")
    g.output(g("aten.mul.Tensor", g("aten.silu.default", gate), up))


@shows(
    "shared_rope",
    given="""
    %slice = aten.slice(%x) {dim=2, end=8, start=0}
    %view = aten.view(%slice) {size=[1, 3, 2, 4]}
    %transpose = aten.transpose(%view) {dim0=1, dim1=2}
    %q = npu.rope(%transpose, %cos, %sin)
    %tanh = aten.tanh(%q)
    %slice_3 = aten.slice(%x) {dim=2, end=12, start=8}
    %view_1 = aten.view(%slice_3) {size=[1, 3, 1, 4]}
    %transpose_1 = aten.transpose(%view_1) {dim0=1, dim1=2}
    %k = npu.rope(%transpose_1, %cos, %sin)
    %tanh_1 = aten.tanh(%k)
    return %tanh, %tanh_1
    """,
    result="""
    %q+k.columns = aten.slice(%x) {dim=2, end=12, start=0}
    %q+k.split = aten.view(%q+k.columns) {size=[1, 3, 3, 4]}
    %q+k.heads = aten.transpose(%q+k.split) {dim0=1, dim1=2}
    %q+k = npu.rope(%q+k.heads, %cos, %sin)
    %q = aten.slice(%q+k) {dim=1, end=2, start=0}
    %k = aten.slice(%q+k) {dim=1, end=3, start=2}
    %tanh = aten.tanh(%q)
    %tanh_1 = aten.tanh(%k)
    return %tanh, %tanh_1
    """,
)
def shared_rope(g: IRBuilder) -> None:
    x, cos, sin = g.input("x", 1, 3, 12), g.input("cos", 1, 1, 3, 4), g.input("sin", 1, 1, 3, 4)
    for name, start, count in (("q", 0, 2), ("k", 8, 1)):
        columns = g("aten.slice.Tensor", x, 2, start, start + 4 * count)
        heads = g("aten.transpose.int", g("aten.view.default", columns, [1, 3, count, 4]), 1, 2)
        first, second = g("aten.slice.Tensor", heads, 3, 0, 2), g("aten.slice.Tensor", heads, 3, 2, 4)
        turned = g("aten.cat.default", [g("aten.neg.default", second), first], -1)
        turns = g("aten.mul.Tensor", heads, cos), g("aten.mul.Tensor", turned, sin)
        g.output(g("aten.tanh.default", g("aten.add.Tensor", *turns, name=name)))


@shows(
    "paired_cache_update",
    given="""
    %keys = aten.index_copy(%k, %at, %rows) {dim=0}
    %neg = aten.neg(%rows)
    %values = aten.index_copy(%v, %at, %neg) {dim=0}
    return %keys, %values
    """,
    result="""
    %neg = aten.neg(%rows)
    %keys, %values = npu.index_copy_pair(%k, %at, %rows, %v, %neg) {dim=0}
    return %keys, %values
    """,
)
def paired_cache_update(g: IRBuilder) -> None:
    k, v = g.input("k", 8, 4), g.input("v", 8, 4)
    at, rows = g.input("at", 2, dtype="int64"), g.input("rows", 2, 4)
    g.output(g("aten.index_copy.default", k, 0, at, rows, name="keys"))
    g.output(g("aten.index_copy.default", v, 0, at, g("aten.neg.default", rows), name="values"))


@shows(
    "add_relu",
    given="""
    %add = aten.add(%x, %y)
    %relu = aten.relu(%add)
    return %relu
    """,
    result="""
    %relu = npu.add_relu(%x, %y)
    return %relu
    """,
)
def add_relu(g: IRBuilder) -> None:
    g.output(g("aten.relu.default", g("aten.add.Tensor", g.input("x", 2, 8), g.input("y", 2, 8))))


@shows(
    "integer_kernels",
    given="""
    weight %p_w = w
    weight %p_s = s
    %q = quantized_decomposed.quantize_per_tensor.default(%x) {dtype=uint8, quant_max=255, quant_min=0, scale=0.25, zero_point=9}
    %f = quantized_decomposed.dequantize_per_tensor.default(%q) {dtype=uint8, quant_max=255, quant_min=0, scale=0.25, zero_point=9}
    %v = quantized_decomposed.dequantize_per_channel.default(%p_w, %p_s) {axis=0, dtype=int8, quant_max=127, quant_min=-128}
    %linear = aten.linear(%f, %v)
    %relu = aten.relu(%linear)
    return %relu
    """,  # noqa: E501
    result="""
    weight %p_w = w
    weight %p_s = s
    %q = npu.quantize(%x) {high=255, low=0, out_scale=0.25, out_zero_point=9}
    %relu = npu.integer_linear(%q, %p_w, %p_s) {activation=relu, has_bias=False, has_residual=False, has_weight_zeros=False, high=0, low=0, out_scale=1.0, out_zero_point=0, residual_scale=1.0, residual_zero_point=0, x_scale=0.25, zero_point=9}
    return %relu
    """,  # noqa: E501
)
def integer_kernels(g: IRBuilder) -> None:
    x, ends = g.input("x", 2, 8), {"quant_min": 0, "quant_max": 255, "dtype": "uint8"}
    pair = {"scale": 0.25, "zero_point": 9, **ends}
    codes = g("quantized_decomposed.quantize_per_tensor.default", x, **pair, name="q", out=((2, 8), "uint8"))
    rounded = g("quantized_decomposed.dequantize_per_tensor.default", codes, **pair, name="f", out=((2, 8), "float32"))
    along = {"axis": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
    weight = g(
        "quantized_decomposed.dequantize_per_channel.default",
        *(g.weight("w", 4, 8, dtype="int8"), g.weight("s", 4)),
        **along,
        name="v",
        out=((4, 8), "float32"),
    )
    g.output(g("aten.relu.default", g("aten.linear.default", rounded, weight)))


EVERY_GRAPH = pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)


def text(graph: IRGraph) -> str:
    """The graph without its first line and without what nothing reads."""
    _, *lines = print_graph(eliminate_dead_code(graph), types=False).split("\n")
    return dedent("\n".join(lines))


@EVERY_GRAPH
def test_a_fusion_makes_of_one_graph_the_other(shown: Shown) -> None:
    later = list(FUSIONS)[list(FUSIONS).index(shown.fusion) + 1 :]
    assert text(fuse(shown.graph, [shown.fusion, *later])) == dedent(shown.given).strip()
    assert text(fuse(shown.graph, later)) == dedent(shown.result).strip()


@EVERY_GRAPH
def test_the_fused_program_computes_what_pytorch_does(shown: Shown, backend: Backend, rng: np.random.Generator) -> None:
    graph = shown.graph

    def values(name: str) -> np.ndarray:
        spec = graph.tensors[name]
        if "int" in spec.dtype:
            return rng.permutation(spec.shape[0]) if len(spec.shape) == 1 else rng.integers(-9, 9, spec.shape)
        return rng.standard_normal(spec.shape).astype(numpy_dtype(spec.dtype))

    inputs = {name: values(name) for name in graph.inputs}
    weights = {key: values(name) for name, recipe in graph.weights.items() for key in recipe.keys()}
    expected = execute_cpu_partition(graph, inputs, weights)
    program = compile(graph, backend.target, CompileOptions(compute_dtype="float32"))
    outputs = Executor(program, backend).run(inputs, load_weights(weights, program, backend))
    tolerance = 4e-3 if "float16" in {spec.dtype for spec in graph.tensors.values()} else 1e-5
    for name, spec in zip(graph.outputs, program.output_specs, strict=True):
        np.testing.assert_allclose(outputs[spec.name].to_numpy(spec), expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name, shown in SHOWN.items() if shown.fusion == "rms_norm"])
def test_every_form_of_rms_norm_is_one_kernel(name: str) -> None:
    assert [call.kernel for call in compile(SHOWN[name].graph).kernels] == ["rmsnorm_kernel"]


def test_every_fusion_is_shown() -> None:
    assert {shown.fusion for shown in SHOWN.values()} == set(FUSIONS)
