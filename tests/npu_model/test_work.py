"""What kernel calls ask of a chip, from their declarations."""

from __future__ import annotations

from typing import Any

import pytest
from ir_builder import IRBuilder

import npu_compiler.ops  # noqa: F401  (declares the kernels)
from npu_compiler import CompileOptions, MetalCodegenTarget
from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.kernels import KERNELS, Family, KernelCall
from npu_model import Product
from npu_model.work import Role, Work, call_work


def works(g: IRBuilder, **options: Any) -> list[Work]:
    return [call_work(call) for call in compile_ir(g.ir(), options=CompileOptions(**options)).kernels]


def linear(m: int, k: int, n: int) -> IRBuilder:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k), g.weight("b", n)))
    return g


def bytes_of(work: Work, role: Role) -> int:
    return sum(access.bytes for access in work.reads if access.role is role)


def test_every_kernel_that_multiplies_matrices_says_its_products() -> None:
    multiply = {Family.MATMUL, Family.CONV, Family.ATTENTION}
    silent = {name for name, kernel in KERNELS.items() if kernel.family in multiply and kernel.products is None}
    assert silent == {"linear_epilogue_kernel"}, "which adds and activates what another call has multiplied"
    assert all(kernel.family in multiply for kernel in KERNELS.values() if kernel.products is not None)


def test_every_element_wise_op_takes_an_operation_or_more() -> None:
    assert all(op.operations >= 1 for op in ELEMENTWISE.values())
    assert ELEMENTWISE["silu"].operations == 4, "negate, exponential, add, divide"


def test_a_linear_layer_is_one_product() -> None:
    (work,) = works(linear(4, 16, 32), compute_dtype="float16")
    assert work.operations.products == (Product(4, 32, 16),)
    assert work.operations.dtype == "float16" and work.operations.macs == 4 * 16 * 32
    assert bytes_of(work, Role.LEFT) == 2 * 4 * 16
    assert bytes_of(work, Role.RIGHT) == 2 * (16 * 32 + 32)
    assert [access.bytes for access in work.writes] == [2 * 4 * 32]


@pytest.mark.parametrize(("tokens", "keys"), [(8, 8), (1, 32), (32, 32)])
def test_a_prompt_attends_to_its_own_keys_of_a_cache(tokens: int, keys: int) -> None:
    g = IRBuilder()
    q, k, v = g.input("q", 1, 2, tokens, 16), g.input("k", 1, 2, 32, 16), g.input("v", 1, 2, 32, 16)
    g.output(g("aten.scaled_dot_product_attention.default", q, k, v))
    kernels = compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16")).kernels
    call = next(call for call in kernels if call.kernel == "attention_kernel")
    whole, prompt = call_work(call), call_work(call, {view.buffer for view in call.inputs[1:]})
    assert whole.operations.products[0].n == 32
    assert [(product.n, product.k) for product in prompt.operations.products] == [(keys, 16), (16, keys)]
    assert bytes_of(prompt, Role.RIGHT) == bytes_of(whole, Role.RIGHT) * keys // 32
    assert bytes_of(prompt, Role.LEFT) == bytes_of(whole, Role.LEFT)


def test_codes_of_4_bits_count_half_a_byte() -> None:
    (wide,) = works(linear(1, 64, 32), compute_dtype="float16")
    (narrow,) = works(linear(1, 64, 32), compute_dtype="float16", quantization="int4")
    assert narrow.operations.macs == wide.operations.macs and narrow.operations.right_bytes == 0.5
    codes = max(access.bytes for access in narrow.reads if access.role is Role.RIGHT)
    assert codes == 64 * 32 // 2
    assert narrow.operations.dtype == "float16", "the wider of the two sides is multiplied"


def test_rows_that_are_rounded_first_are_multiplied_as_integers() -> None:
    (work,) = works(linear(4, 64, 32), compute_dtype="float16", quantization="int8+int8")
    assert work.operations.dtype == "int8" and work.operations.products == (Product(4, 32, 64),)


@pytest.mark.parametrize(("groups", "batch", "n", "k"), [(1, 1, 16, 72), (8, 8, 2, 9)])
def test_a_convolution_is_the_product_of_its_windows_with_its_weight(groups: int, batch: int, n: int, k: int) -> None:
    g = IRBuilder()
    x, w = g.input("x", 2, 8, 12, 12), g.weight("w", 16, 8 // groups, 3, 3)
    g.output(g("aten.conv2d.default", x, w, None, [1, 1], [1, 1], [1, 1], groups))
    (work,) = [work for work in works(g) if work.operations.products]
    assert work.operations.products == (Product(2 * 12 * 12, n, k, batch),)


def test_heads_that_share_keys_are_rows_of_one_product() -> None:
    g = IRBuilder()
    q, k, v = g.input("q", 1, 8, 5, 16), g.input("k", 1, 2, 7, 16), g.input("v", 1, 2, 7, 16)
    g.output(g("aten.scaled_dot_product_attention.default", q, k, v, enable_gqa=True))
    (work,) = [work for work in works(g) if work.operations.products]
    assert work.operations.products == (Product(20, 7, 16, 2), Product(20, 16, 7, 2))
    assert bytes_of(work, Role.RIGHT) == 2 * 2 * (2 * 7 * 16), "keys and values in float16"
    assert work.operations.vector_operations >= 5 * 8 * 5 * 7, "softmax"


def test_a_lookup_touches_only_the_rows_that_it_picks() -> None:
    g = IRBuilder()
    g.output(g("aten.embedding.default", g.weight("table", 1000, 32), g.input("ids", 3, dtype="int64")))
    (work,) = works(g)
    assert sum(access.bytes for access in work.reads) == 3 * 4 + 3 * 32 * 2


def test_an_update_of_a_cache_touches_only_its_rows() -> None:
    g = IRBuilder()
    cache, rows = g.input("cache", 64, 8, dtype="float16"), g.input("rows", 2, 8, dtype="float16")
    g.output(g("aten.index_copy.default", cache, 0, g.input("index", 2, dtype="int64"), rows))
    (work,) = works(g)
    assert sum(access.bytes for access in work.writes) == 2 * 8 * 2


def test_a_targets_own_kernel_is_refused() -> None:
    call = KernelCall("generated_17", "", (), (), {}, "node")
    with pytest.raises(InputError, match="'generated_17' at node 'node' .* --target op_level"):
        call_work(call)


def test_programs_for_metal_have_the_same_work() -> None:
    g = linear(4, 16, 32)
    assert [w.operations.products for w in works(g)] == [
        call_work(call).operations.products for call in compile_ir(g.ir(), MetalCodegenTarget()).kernels
    ]


def test_a_convolution_of_bytes_multiplies_in_int8() -> None:
    g = IRBuilder()
    per_tensor = {"scale": 0.1, "zero_point": 128, "quant_min": 0, "quant_max": 255, "dtype": "uint8"}
    per_channel = {"axis": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
    name = "quantized_decomposed.{}.default"
    shape = (1, 16, 8, 8)
    codes = g(name.format("quantize_per_tensor"), g.input("x", *shape), **per_tensor, out=(shape, "uint8"))
    x = g(name.format("dequantize_per_tensor"), codes, **per_tensor, out=(shape, "float32"))
    parts = g.weight("w", 32, 16, 3, 3, dtype="int8"), g.weight("scales", 32)
    w = g(name.format("dequantize_per_channel"), *parts, **per_channel, out=((32, 16, 3, 3), "float32"))
    g.output(g("aten.conv2d.default", x, w, None, [1, 1], [1, 1]))
    (work,) = [work for work in works(g) if work.operations.products]
    assert work.operations.dtype == "int8" and (work.operations.left_bytes, work.operations.right_bytes) == (1.0, 1.0)
    assert work.operations.products == (Product(64, 32, 144),)
    assert bytes_of(work, Role.RIGHT) >= 32 * 144


def test_a_pooling_window_counts_what_it_covers() -> None:
    g = IRBuilder()
    g.output(g("aten.avg_pool2d.default", g.input("x", 1, 8, 7, 7), [1280, 1280], [1280, 1280], [0, 0], True))
    (work,) = works(g)
    assert work.operations.vector_operations == 8 * 7 * 7
