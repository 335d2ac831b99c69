"""Products and lookups with weights in few bits, and KV caches: what they mean is the same with what is dequantized."""

from __future__ import annotations

import torch

from npu_compiler.graph.quantization import dequantize_rows, quantize_rows
from npu_runtime.cpu.kernels.matmul import gated_linear, linear
from npu_runtime.cpu.kernels.registry import Params, Tensors, cpu_kernel
from npu_runtime.cpu.kernels.transformer import attention
from npu_runtime.cpu.quantized_weights import rounded_rows, stored_weight, weight_parts
from npu_runtime.torch_arrays import tensor_to_numpy


@cpu_kernel("quantized_matmul_kernel", "quantized_matmul_vec_kernel", "dynamic_quantized_matmul_kernel")
def quantized_linear(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    parts, (x, *rest) = weight_parts(inputs, params, 1)
    linear([_rounded(x, params), dequantized(parts, params), *rest], outputs, params)


@cpu_kernel("quantized_gated_matmul_vec_kernel", "dynamic_quantized_gated_matmul_vec_kernel")
def quantized_gated_linear(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    parts, (x, *rest) = weight_parts(inputs, params, 1)
    gated_linear([_rounded(x, params), dequantized(parts, params), *rest], outputs, params)


@cpu_kernel("quantized_embedding_kernel")
def quantized_embedding(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    parts, (ids,) = weight_parts(inputs, params, 0)
    rows = [part[ids.reshape(-1).long()] for part in parts]
    outputs[0].copy_(dequantized(rows, params).reshape(outputs[0].shape))


@cpu_kernel("quantized_index_copy_kernel")
def quantized_index_copy(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out[:, :, index[i]] = source[:, :, i], rounded by row to codes and scales, in place."""
    index, source = inputs
    for out, rows in zip(outputs, quantize_rows(tensor_to_numpy(source), params["format"]), strict=True):
        out.index_copy_(2, index.long(), torch.from_numpy(rows))


@cpu_kernel("quantized_attention_kernel")
def quantized_attention(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """`attention` with keys and values that are rounded by row."""
    q, keys, key_scales, values, value_scales, *mask = inputs
    k, v = (
        torch.from_numpy(dequantize_rows(tensor_to_numpy(codes), tensor_to_numpy(scales), params["format"]))
        for codes, scales in ((keys, key_scales), (values, value_scales))
    )
    attention([q, k, v, *mask], outputs, params)


def dequantized(parts: Tensors, params: Params) -> torch.Tensor:
    """The weight [n, k] in float32."""
    return torch.from_numpy(stored_weight([tensor_to_numpy(part) for part in parts], params).dequantize())


def _rounded(x: torch.Tensor, params: Params) -> torch.Tensor:
    """`rounded_rows` of a tensor."""
    return torch.from_numpy(rounded_rows(tensor_to_numpy(x), params)) if "activations" in params else x
