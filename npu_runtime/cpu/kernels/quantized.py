"""Products and lookups with quantized weights, and KV caches, in NumPy: operands are dequantized first."""

from __future__ import annotations

from npu_compiler.graph.quantization import dequantize_rows, quantize_rows
from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.products import attention, expert_product, gated_linear, linear
from npu_runtime.cpu.kernels.registry import Arrays, cpu_kernel, in_range
from npu_runtime.cpu.quantized_weights import rounded_rows, stored_weight, weight_parts


@cpu_kernel("quantized_matmul_kernel", "quantized_matmul_vec_kernel", "dynamic_quantized_matmul_kernel")
def quantized_linear(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    parts, (x, *rest) = weight_parts(inputs, params, 1)
    linear([rounded_rows(x, params), stored_weight(parts, params).dequantize(), *rest], outputs, params)


@cpu_kernel("quantized_gated_matmul_vec_kernel", "dynamic_quantized_gated_matmul_vec_kernel")
def quantized_gated_linear(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    parts, (x, *rest) = weight_parts(inputs, params, 1)
    gated_linear([rounded_rows(x, params), stored_weight(parts, params).dequantize(), *rest], outputs, params)


@cpu_kernel("quantized_expert_matmul_kernel")
def quantized_expert_product(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    parts, (x, *rest) = weight_parts(inputs, params, 1)
    weight = stored_weight(parts, params).dequantize().reshape(params["e"], outputs[0].shape[1], -1)
    expert_product([rounded_rows(x, params), weight, *rest], outputs, params)


@cpu_kernel("quantized_embedding_kernel")
def quantized_embedding(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    parts, (ids,) = weight_parts(inputs, params, 0)
    rows = in_range(ids, len(parts[0])).reshape(-1)
    weight = stored_weight([part[rows] for part in parts], params)
    outputs[0][...] = weight.dequantize().reshape(outputs[0].shape)


@cpu_kernel("quantized_index_copy_kernel")
def quantized_index_copy(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[:, :, index[i]] = source[:, :, i], quantized by row to codes and scales, in place."""
    index, source = inputs
    places = in_range(index, outputs[0].shape[2])
    for out, rows in zip(outputs, quantize_rows(source, params["format"]), strict=True):
        out[:, :, places] = rows


@cpu_kernel("quantized_attention_kernel")
def quantized_attention(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Attention with keys and values that are quantized by row."""
    q, keys, key_scales, values, value_scales, *others = inputs
    k, v = (
        dequantize_rows(codes, scales, params["format"])
        for codes, scales in ((keys, key_scales), (values, value_scales))
    )
    attention([q, k, v, *others], outputs, params)
