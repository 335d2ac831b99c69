"""Capabilities of chips: what `[ops]`, `[host]` and `[link]` say, what is refused for it, and the page that says so."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from ir_builder import IRBuilder

from npu_compiler import ConstraintError, InputError, compile, partition, read_ir
from npu_compiler.options import CompileOptions
from npu_compiler.partitioning.prices import prices_of
from npu_model import Chip, NPUTarget, load_chip, parse_chip, shipped_chips
from npu_model.analysis.support import Support, find_support, support_page
from npu_model.capabilities import with_ops

EDGE = (files("npu_model.chip") / "chips" / "edge.toml").read_text("utf-8")


def chip(ops: str) -> Chip:
    """The chip `edge` with this table of ops."""
    return parse_chip(f"{EDGE}\n[ops]\n{ops}", "test")


def network() -> dict[str, Any]:
    g = IRBuilder()
    x = g("aten.conv2d.default", g.input("x", 1, 8, 9, 9), g.weight("w", 8, 8, 5, 5), stride=[2, 2])
    x = g("aten.gelu.default", x)
    return g.output(g("aten.softmax.int", x, -1)).ir()


def refusals(ops: str, ir: dict[str, Any] | None = None, dtype: str | None = None) -> list[str]:
    """The reasons for which a chip with these ops refuses the network."""
    with pytest.raises(ConstraintError) as error:
        compile(ir or network(), NPUTarget(chip(ops)), CompileOptions(dtype))
    return [text.partition(": ")[2].partition("; use partition()")[0] for text in error.value.violations]


@pytest.mark.parametrize(
    ("ops", "reasons"),
    [
        ('without = ["gelu"]', ["chip 'edge' lacks gelu ([ops] without)"]),
        ('without = ["softmax"]', ["chip 'edge' lacks softmax ([ops] without)"]),
        ('only = ["conv", "gelu"]', ["chip 'edge' has no softmax (it is not in [ops] only)"]),
        ('only = ["conv2d", "softmax"]', ["chip 'edge' has no gelu (it is not in [ops] only)"]),
        (
            '[ops.limits.conv]\ndtypes = ["int8"]',
            ["chip 'edge' takes conv2d in int8, not in float16"],
        ),
        (
            "[ops.limits.conv2d]\nwindow = 3",
            ["chip 'edge' takes conv2d with windows of at most 3 along an axis, not 5"],
        ),
        ("[ops.limits.conv2d]\nstride = 1", ["chip 'edge' takes conv2d with strides of at most 1, not 2"]),
        (
            "[ops.limits.softmax]\nrank = 3",
            ["chip 'edge' takes softmax of rank at most 3; tensor 'gelu' is [1, 8, 3, 3]"],
        ),
        (
            "[ops.limits.all]\nsize = 8",
            ["chip 'edge' takes conv2d with axes of at most 8 elements; tensor 'x' is [1, 8, 9, 9]"],
        ),
        (
            "[ops.limits.elementwise]\nelements = 71",
            ["chip 'edge' takes gelu with tensors of at most 71 elements; tensor 'conv2d' is [1, 8, 3, 3]"],
        ),
    ],
)
def test_what_a_chip_lacks_is_refused_with_the_reason(ops: str, reasons: list[str]) -> None:
    assert refusals(ops) == reasons


@pytest.mark.parametrize(
    "ops",
    [
        "",
        'only = ["conv", "elementwise", "softmax"]',
        'without = ["gelu"]\nalso = ["gelu"]',
        '[ops.limits.all]\nrank = 4\nwindow = 5\nstride = 2\nelements = 1600\nsize = 9\ndtypes = ["float16"]',
    ],
)
def test_what_a_chip_has_compiles(ops: str) -> None:
    assert compile(network(), NPUTarget(chip(ops))).kernels


def test_limits_are_of_the_dtype_in_which_a_model_computes() -> None:
    limits = '[ops.limits.all]\ndtypes = ["float32"]'
    assert refusals(limits)[0] == "chip 'edge' takes conv2d in float32, not in float16"
    assert compile(network(), NPUTarget(chip(limits)), CompileOptions("float32")).kernels


def attention() -> dict[str, Any]:
    g = IRBuilder()
    q, k, v = (g.input(name, 1, 2, 16, 8) for name in "qkv")
    scores = g("aten.matmul.default", q, g("aten.transpose.int", k, -2, -1))
    return g.output(g("aten.matmul.default", g("aten.softmax.int", scores, -1), v)).ir()


def test_no_kernel_is_made_of_parts_that_the_chip_lacks() -> None:
    """Products and a softmax become one attention where the chip has it, and stay apart where it has not."""
    kernels = {}
    for ops in ("", 'without = ["attention"]'):
        program = compile(attention(), NPUTarget(chip(ops)))
        kernels[ops] = {call.kernel for call in program.kernels}
    assert "attention_kernel" in kernels[""]
    assert "attention_kernel" not in kernels['without = ["attention"]']
    again = compile(attention(), NPUTarget(chip('without = ["softmax"]\nalso = ["softmax"]')))
    assert "attention_kernel" in {call.kernel for call in again.kernels}
    g = IRBuilder()
    q, k, v = (g.input(name, 1, 2, 16, 8) for name in "qkv")
    whole = g.output(g("aten.scaled_dot_product_attention.default", q, k, v)).ir()
    assert refusals('without = ["softmax"]', whole) == [
        "it contains softmax, and chip 'edge' lacks softmax ([ops] without)"
    ]


def test_a_partition_keeps_what_the_chip_lacks_on_the_host() -> None:
    plan = partition(network(), target=NPUTarget(chip('without = ["gelu"]')))
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    assert plan.reasons == {"gelu": "chip 'edge' lacks gelu ([ops] without)"}


def test_a_chip_with_further_ops_takes_them() -> None:
    own = chip('only = ["conv"]\n[ops.limits.gelu]\nrank = 2')
    assert compile(network(), NPUTarget(with_ops(own, ["gelu", "softmax"]))).kernels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[ops]\nonly = "conv"', "'ops.only' is 'conv'; write a list of names in quotes"),
        ('[ops]\nwithout = ["sofmax"]', "'ops.without' has no 'sofmax'; there are softmax"),
        ("[ops.limits.cnov2d]\nrank = 4", "'ops.limits' has no 'cnov2d'; there are conv2d"),
        ("[ops.limits.conv]\nranks = 4", "unknown key 'ops.limits.conv.ranks'; known are dtypes, rank, size"),
        ("[ops.limits.conv]\nrank = 2.5", "'ops.limits.conv.rank' is 2.5; write a whole number of at least 0"),
        ('[ops.limits.conv]\ndtypes = ["int9"]', "'ops.limits.conv.dtypes' has no 'int9'; there are int4, int8"),
        ("[ops]\nlimits = 3", "'ops.limits' is no table"),
    ],
)
def test_a_malformed_table_of_ops_is_refused_by_its_key(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_chip(f"{EDGE}\n{text}", "test")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[host]\ngflops = 0\nbandwidth_gb_s = 1", "'host.gflops' is 0; it must be a number above 0"),
        ("[host]\ngflops = 1", "lacks the key 'host.bandwidth_gb_s'"),
        ("[link]\nbandwidth_gb_s = 1\nlatency_us = -1", "'link.latency_us' is -1; it must be a number of at least 0"),
    ],
)
def test_a_malformed_host_or_link_is_refused_by_its_key(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_chip(f"{without_host()}\n{text}", "test")
    assert message in str(error.value)


def without_host() -> str:
    return EDGE.partition("# Assumed")[0]


def test_a_chip_without_host_or_link_has_no_prices() -> None:
    lone = parse_chip(without_host(), "test")
    with pytest.raises(InputError) as error:
        partition(network(), npu=lone)
    assert str(error.value) == ("chip 'edge' has no [host], so nothing can be priced; its file needs [host] and [link]")
    with pytest.raises(InputError, match="no prices are known for a str; give a chip"):
        partition(network(), npu="edge")
    assert prices_of(NPUTarget(lone)) is None


@pytest.mark.parametrize("name", shipped_chips())
def test_shipped_chips_have_a_host_and_a_link(name: str) -> None:
    assert prices_of(NPUTarget(load_chip(name))) is not None


def test_programs_do_not_depend_on_the_host() -> None:
    """A file whose host changes runs the same programs; one whose ops change does not."""
    assert NPUTarget(parse_chip(without_host(), "test")).key == NPUTarget(load_chip("edge")).key
    assert NPUTarget(chip('without = ["gelu"]')).key != NPUTarget(load_chip("edge")).key


@pytest.fixture(scope="module")
def rows() -> dict[str, Support]:
    text = 'without = ["gelu"]\n[ops.limits.conv]\nwindow = 3\ndtypes = ["int8", "float16"]'
    return {row.op: row for row in find_support(chip(text))}


def test_the_support_of_an_op_names_dtypes_and_limits(rows: dict[str, Support]) -> None:
    conv, mul = rows["aten.conv2d"], rows["aten.mul"]
    assert (conv.families, conv.dtypes, conv.limits) == (("conv",), ("int8", "float16"), "windows of at most 3")
    assert (mul.families, mul.dtypes, mul.limits) == (("elementwise",), ("float16", "bfloat16", "float32"), "")
    assert rows["aten.view"].is_view and not rows["aten.view"].reason


def test_the_support_of_an_op_that_is_lacking_says_why(rows: dict[str, Support]) -> None:
    assert rows["aten.gelu"].reason == "chip 'edge' lacks gelu ([ops] without)" and not rows["aten.gelu"].dtypes
    assert rows["aten.sort"].reason == "the NPU has no lowering for 'argsort_kernel'"


def test_few_ops_cannot_be_probed(rows: dict[str, Support]) -> None:
    """The page speaks of nearly every op of the table, not only of those whose names it knows."""
    computing = [row for row in rows.values() if not row.is_view]
    assert sum(row.is_probed for row in computing) >= 0.9 * len(computing)


def test_the_page_has_a_row_for_each_op(rows: dict[str, Support]) -> None:
    page = support_page(load_chip("edge"), list(rows.values()))
    assert "| `aten.conv2d` | conv | int8, float16 | windows of at most 3 |" in page
    assert "| `aten.gelu` | chip 'edge' lacks gelu ([ops] without) |" in page
    assert all(f"`{op}`" in page for op in rows)


def test_what_the_page_says_of_an_op_holds_for_a_node(rows: dict[str, Support]) -> None:
    """An op runs in a dtype that the page names, and is refused in one that it does not."""
    g = IRBuilder()
    ir = g.output(g("aten.conv2d.default", g.input("x", 1, 8, 9, 9), g.weight("w", 8, 8, 3, 3))).ir()
    target = NPUTarget(chip('without = ["gelu"]\n[ops.limits.conv]\nwindow = 3\ndtypes = ["int8", "float16"]'))
    for dtype in ("float16", "bfloat16"):
        if dtype in rows["aten.conv2d"].dtypes:
            assert compile(read_ir(ir), target, CompileOptions(dtype)).kernels
        else:
            with pytest.raises(ConstraintError, match="not in bfloat16"):
                compile(read_ir(ir), target, CompileOptions(dtype))
