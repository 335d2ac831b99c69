"""The native kernels that can run a call, as candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from npu_compiler.program.elementwise import ACTIVATION_OF, GATES, as_float32
from npu_runtime.cpu import native
from npu_runtime.cpu.arrays import strides_of, with_strides
from npu_runtime.cpu.bound_call import ArrayCall, Candidate
from npu_runtime.cpu.native import NativeLaunch, convolutions
from npu_runtime.cpu.native.integers import integer
from npu_runtime.cpu.native.numbers import ELEMENTWISE
from npu_runtime.cpu.quantized_weights import stored_weight, weight_parts

Accelerator: TypeAlias = Callable[[ArrayCall], NativeLaunch | None]
_ACCELERATORS: dict[str, Accelerator] = {}
# Element-wise op → what `native.combine` calls it, and its number of operands.
_COMBINED = {
    "add": ("add", 2),
    "mul": ("multiply", 2),
    "true_divide": ("divide", 2),
    "scale_shift": ("scale_shift", 3),
    "add_relu": ("add_relu", 2),
    "prelu": ("scale_below_zero", 2),
}


def native_candidates(call: ArrayCall) -> list[Candidate]:
    """The native kernels that may run the call, the default first; empty if there is none of that name."""
    accelerate = _ACCELERATORS.get(call.name)
    if accelerate is None or not native.available():
        return []
    variants = _conv_variants(call) if call.name == "conv2d_kernel" else []
    if call.name == "integer_conv2d_kernel":
        others = integer.alternatives(call)
        variants = [Candidate(f"native {name}", partial(integer.conv2d, algorithm=name), "native") for name in others]
    return [Candidate("native", accelerate), *variants]


def _accelerates(*kernels: str) -> Callable[[Accelerator], Accelerator]:
    def add(function: Accelerator) -> Accelerator:
        assert _ACCELERATORS.keys().isdisjoint(kernels), f"{kernels} have two functions"
        _ACCELERATORS.update(dict.fromkeys(kernels, function))
        return function

    return add


@_accelerates("matmul_kernel", "matmul_notrans_kernel", "matmul_vec_kernel", "matmul_vec_notrans_kernel")
def _linear(call: ArrayCall) -> NativeLaunch | None:
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    if bias is not None and not call.is_constant(bias):
        return None
    if not call.is_constant(1):
        plain = bias is None and residual is None and call.params["activation"] == "none"
        return native.matmul(call.inputs[0], call.inputs[1].T, call.out) if plain else None
    if call.inputs[0].dtype != call.inputs[1].dtype or call.out.shape[0] == 0:
        return None
    weight = call.prepared(1, "linear", native.pack_linear_weight)
    if weight is None:
        return None
    return native.linear(call.inputs[0], weight, call.at(bias), call.at(residual), call.params["activation"], call.out)


@_accelerates("gated_matmul_vec_kernel")
def _gated_linear(call: ArrayCall) -> NativeLaunch | None:
    (bias,) = call.optional(("has_bias",), 2)
    if not call.is_constant(1) or (bias is not None and not call.is_constant(bias)):
        return None
    weight = call.prepared(1, "linear", native.pack_linear_weight)
    if weight is None:
        return None
    return native.gated_linear(call.inputs[0], weight, call.at(bias), call.params["activation"], call.out)


@_accelerates("quantized_matmul_kernel", "quantized_matmul_vec_kernel", "dynamic_quantized_matmul_kernel")
def _quantized_linear(call: ArrayCall) -> NativeLaunch | None:
    bias, residual = call.optional(("has_bias", "has_residual"), 3 + call.params["has_offset"])
    weight = _packed_quantized(call, bias)
    if weight is None or call.out.shape[0] == 0:
        return None
    x, activation, activations = call.inputs[0], call.params["activation"], call.params.get("activations", "none")
    return native.quantized_linear(x, weight, call.at(bias), call.at(residual), activation, call.out, activations)


@_accelerates("quantized_gated_matmul_vec_kernel", "dynamic_quantized_gated_matmul_vec_kernel")
def _quantized_gated_linear(call: ArrayCall) -> NativeLaunch | None:
    (bias,) = call.optional(("has_bias",), 3 + call.params["has_offset"])
    weight = _packed_quantized(call, bias)
    if weight is None:
        return None
    x, activation, activations = call.inputs[0], call.params["activation"], call.params.get("activations", "none")
    return native.quantized_gated_linear(x, weight, call.at(bias), activation, call.out, activations)


def _packed_quantized(call: ArrayCall, bias: int | None) -> native.PackedQuantized | None:
    """A call's quantized weight in the kernels' layout; None if the weight or the bias is not constant."""
    operands, _ = weight_parts(call.operands, call.params, 1)
    if not all(part.is_constant for part in operands) or (bias is not None and not call.is_constant(bias)):
        return None
    parts, _ = weight_parts(call.inputs, call.params, 1)
    packed: native.PackedQuantized | None = call.prepared(
        1, "quantized", lambda _: native.pack_quantized(stored_weight(parts, call.params)), range(2, 1 + len(parts))
    )
    return packed


@_accelerates("expert_matmul_kernel")
def _expert_linear(call: ArrayCall) -> NativeLaunch | None:
    (bias,) = call.optional(("has_bias",), 3)
    if not call.is_constant(1) or (bias is not None and not call.is_constant(bias)):
        return None
    weight = call.prepared(1, "experts", native.pack_expert_weights)
    if weight is None:
        return None
    return native.expert_linear(call.inputs[0], weight, call.inputs[2], call.at(bias), call.out)


@_accelerates("quantized_expert_matmul_kernel")
def _quantized_expert_linear(call: ArrayCall) -> NativeLaunch | None:
    operands, (_, _, *bias) = weight_parts(call.operands, call.params, 1)
    if not all(operand.is_constant for operand in (*operands, *bias)):
        return None
    parts, (x, experts, *biases) = weight_parts(call.inputs, call.params, 1)
    count = call.params["e"]
    weight = call.prepared(
        1,
        f"experts{count}",
        lambda _: native.pack_quantized_experts(stored_weight(parts, call.params), count),
        range(2, 1 + len(parts)),
    )
    if weight is None:
        return None
    activations = call.params.get("activations", "none")
    return native.quantized_expert_linear(x, weight, experts, biases[0] if biases else None, call.out, activations)


@_accelerates("quantized_embedding_kernel")
def _quantized_embedding(call: ArrayCall) -> NativeLaunch | None:
    parts, (ids,) = weight_parts(call.inputs, call.params, 0)
    return native.quantized_embedding(ids, stored_weight(parts, call.params), call.out, bool(call.params["checked"]))


@_accelerates("batched_matmul_kernel")
def _matmul(call: ArrayCall) -> NativeLaunch | None:
    return native.matmul(call.inputs[0], call.inputs[1], call.out) if call.params["scale"] == 1.0 else None


@_accelerates("attention_kernel")
def _attention(call: ArrayCall) -> NativeLaunch | None:
    q, k, v = call.inputs[:3]
    return _any_attention(call, q, k, v)


@_accelerates("paged_attention_kernel")
def _paged_attention(call: ArrayCall) -> NativeLaunch | None:
    q, k, v, tables, sequences, positions, *sinks = call.inputs
    block_size, scale, window, soft_cap = (call.params[name] for name in ("block_size", "scale", "window", "soft_cap"))
    where = (tables, sequences, positions, block_size)
    return native.paged_attention(q, k, v, *where, scale, call.out, window, soft_cap, *sinks)


@_accelerates("quantized_attention_kernel")
def _quantized_attention(call: ArrayCall) -> NativeLaunch | None:
    q, k, k_scales, v, v_scales = call.inputs[:5]
    return _any_attention(call, q, k, v, native.QuantizedCache(call.params["format"], k_scales, v_scales))


def _any_attention(
    call: ArrayCall, q: np.ndarray, k: np.ndarray, v: np.ndarray, quantized: native.QuantizedCache | None = None
) -> NativeLaunch | None:
    mask, sinks = map(call.at, call.optional(("has_mask", "has_sinks"), 3 if quantized is None else 5))
    causal, scale, soft_cap = bool(call.params["causal"]), call.params["scale"], call.params["soft_cap"]
    return native.attention(q, k, v, mask, causal, scale, call.out, quantized, soft_cap, sinks)


@_accelerates("quantized_index_copy_kernel")
def _quantized_index_copy(call: ArrayCall) -> NativeLaunch | None:
    if not call.params["checked"]:
        return None
    (index, source), (codes, scales) = call.inputs, call.outputs
    return native.quantized_index_copy(codes, scales, index, source, call.params["format"])


@_accelerates("rmsnorm_kernel")
def _rms_norm(call: ArrayCall) -> NativeLaunch | None:
    weight = call.inputs[1] if call.params["has_weight"] else None
    return native.rms_norm(call.inputs[0], weight, call.params["eps"], call.params["weight_offset"], call.out)


@_accelerates("layernorm_kernel")
def _layer_norm(call: ArrayCall) -> NativeLaunch | None:
    weight, bias = call.optional(("has_weight", "has_bias"), 1)
    return native.layer_norm(call.inputs[0], call.at(weight), call.at(bias), call.params["eps"], call.out)


@_accelerates("groupnorm_kernel")
def _group_norm(call: ArrayCall) -> NativeLaunch | None:
    weight, bias = call.optional(("has_weight", "has_bias"), 1)
    params = call.params
    return native.group_norm(call.inputs[0], call.at(weight), call.at(bias), params["groups"], params["eps"], call.out)


@_accelerates("softmax_kernel")
def _softmax(call: ArrayCall) -> NativeLaunch | None:
    return native.softmax(call.inputs[0], call.params["scale"], call.out)


@_accelerates("rope_kernel")
def _rope(call: ArrayCall) -> NativeLaunch | None:
    x, cos, sin = call.inputs
    return native.rope(x, cos, sin, call.out)


@_accelerates("embedding_kernel")
def _embedding(call: ArrayCall) -> NativeLaunch | None:
    table, ids = call.inputs
    return native.embedding(ids, table, call.out, bool(call.params["checked"]))


@_accelerates("index_copy_kernel")
def _index_copy(call: ArrayCall) -> NativeLaunch | None:
    index, source = call.inputs
    return native.index_copy(call.out, call.params["dim"], index, source, bool(call.params["checked"]))


@_accelerates("index_copy_pair_kernel")
def _index_copy_pair(call: ArrayCall) -> NativeLaunch | None:
    index, *sources = call.inputs
    return native.index_copy_pair(call.outputs, call.params["dim"], index, sources, bool(call.params["checked"]))


@_accelerates("index_select_kernel")
def _index_select(call: ArrayCall) -> NativeLaunch | None:
    source, index = call.inputs
    return native.index_select(source, call.params["dim"], index, call.out)


@_accelerates("argmax_kernel", "argmin_kernel")
def _place_of_extreme(call: ArrayCall) -> NativeLaunch | None:
    return native.place_of_extreme(call.inputs[0], call.out, call.name == "argmin_kernel")


@_accelerates("gather_kernel")
def _gather(call: ArrayCall) -> NativeLaunch | None:
    source, index = call.inputs
    return native.gather(source, call.params["dim"], index, call.out)


@_accelerates("argsort_kernel")
def _argsort(call: ArrayCall) -> NativeLaunch | None:
    return native.argsort(call.inputs[0], call.out, bool(call.params["descending"]))


@_accelerates("sum_kernel", "norm_kernel")
def _reduction(call: ArrayCall) -> NativeLaunch | None:
    if call.name == "norm_kernel" and call.params["order"] != 2:
        return None
    return native.reduce_last(call.name.removesuffix("_kernel"), call.inputs[0], call.params["reduce_dims"], call.out)


@_accelerates("copy")
def _copy(call: ArrayCall) -> NativeLaunch | None:
    if not call.inputs:
        return None
    source = call.inputs[0]
    if source.dtype == call.out.dtype:
        return native.copy(source, call.out)
    return native.cast(source, call.out) or native.elementwise("copy", [source], call.out)


@_accelerates(*ELEMENTWISE.keys() - {"copy", *_COMBINED})
def _elementwise(call: ArrayCall) -> NativeLaunch | None:
    tensors = iter(call.inputs)
    operands = [next(tensors) if scalar is None else scalar for scalar in call.params["scalars"]]
    return native.elementwise(call.name, operands, call.out) if call.params.get("alpha", 1) == 1 else None


@_accelerates(*_COMBINED)
def _combined(call: ArrayCall) -> NativeLaunch | None:
    how, count = _COMBINED[call.name]
    plain = len(call.inputs) == count and call.params.get("alpha", 1) == 1
    combined = native.combine(how, call.inputs, call.out) if plain else None
    return combined or (_elementwise(call) if call.name in ELEMENTWISE else None)


@_accelerates("leaky_relu")
def _leaky_relu(call: ArrayCall) -> NativeLaunch | None:
    slope = np.array(as_float32(call.params["negative_slope"]), np.float32)
    return native.combine("scale_below_zero", [*call.inputs, slope], call.out)


@_accelerates("clamp_min")
def _clamp_min(call: ArrayCall) -> NativeLaunch | None:
    value, low = call.params["scalars"]
    if value is not None or low is None or math.isnan(low):
        return None
    return native.combine("at_least", [*call.inputs, np.array(as_float32(low), np.float32)], call.out)


@_accelerates(*ACTIVATION_OF)
def _activation(call: ArrayCall) -> NativeLaunch | None:
    return native.activation(ACTIVATION_OF[call.name], call.inputs[0], call.out)


@_accelerates(*GATES)
def _gated(call: ArrayCall) -> NativeLaunch | None:
    gate, up = call.inputs
    return native.activation_mul(GATES[call.name], gate, up, call.out)


@_accelerates("clamped_silu_mul")
def _clamped_gate(call: ArrayCall) -> NativeLaunch | None:
    if len(call.inputs) != 2:
        return None
    gate, up = call.inputs
    return native.clamped_silu_mul(gate, up, call.params["alpha"], call.params["limit"], call.out)


def _quad(values: Sequence[int]) -> tuple[int, int, int, int]:
    first, second, third, fourth = values
    return first, second, third, fourth


def _pair(values: Sequence[int]) -> tuple[int, int]:
    first, second = values
    return first, second


@_accelerates("conv2d_kernel")
def _conv2d(call: ArrayCall) -> NativeLaunch | None:
    return _conv2d_by(None, call)


def _conv2d_by(algorithm: str | None, call: ArrayCall) -> NativeLaunch | None:
    params = call.params
    bias, residual = call.optional(("has_bias", "has_residual"), 2)
    if not call.is_constant(1) or (bias is not None and not call.is_constant(bias)):
        return None
    weight = call.prepared(1, f"conv{params['groups']}", lambda w: convolutions.pack_conv_weight(w, params["groups"]))
    return convolutions.conv2d(
        call.inputs[0],
        weight,
        call.at(bias),
        call.at(residual),
        params["activation"],
        _pair(params["stride"]),
        _quad(params["padding"]),
        _pair(params["dilation"]),
        params["groups"],
        call.out,
        algorithm=algorithm,
    )


def _conv_variants(call: ArrayCall) -> list[Candidate]:
    """Candidates for every convolution algorithm that the default choice may have passed over."""
    params = call.params
    others = convolutions.alternatives(
        call.inputs[0],
        call.inputs[1],
        _pair(params["stride"]),
        _quad(params["padding"]),
        _pair(params["dilation"]),
        params["groups"],
        call.out,
    )
    return [Candidate(f"native {name}", partial(_conv2d_by, name), variant_of="native") for name in others]


@_accelerates("max_pool2d_kernel")
def _max_pool(call: ArrayCall) -> NativeLaunch | None:
    params = call.params
    padding = _pool_padding(call)
    return convolutions.max_pool2d(
        call.inputs[0], _pair(params["window"]), _pair(params["stride"]), padding, _pair(params["dilation"]), call.out
    )


@_accelerates("avg_pool2d_kernel")
def _avg_pool(call: ArrayCall) -> NativeLaunch | None:
    params = call.params
    if params["ceil_mode"]:
        return None
    return convolutions.avg_pool2d(
        call.inputs[0],
        _pair(params["window"]),
        _pair(params["stride"]),
        _pool_padding(call),
        call.out,
        bool(params["count_include_pad"]),
        params["divisor"] or None,
    )


@_accelerates("mean_kernel")
def _mean(call: ArrayCall) -> NativeLaunch | None:
    x, out = call.inputs[0], call.out
    if x.ndim != 4 or out.ndim != 2:
        return _reduction(call)
    pooled = convolutions.global_avg_pool2d(x, with_strides(out, (*out.shape, 1, 1), (*strides_of(out), 1, 1)))
    return pooled or _reduction(call)


@_accelerates("adaptive_avg_pool2d_kernel")
def _adaptive_avg_pool(call: ArrayCall) -> NativeLaunch | None:
    return convolutions.global_avg_pool2d(call.inputs[0], call.out) if call.out.shape[2:] == (1, 1) else None


def _pool_padding(call: ArrayCall) -> tuple[int, int, int, int]:
    top, left = call.params["padding"]
    return top, top, left, left


_accelerates("quantize_activation_kernel")(integer.quantize)
_accelerates("dequantize_activation_kernel")(integer.dequantize)
_accelerates("integer_conv2d_kernel")(integer.conv2d)
_accelerates("integer_linear_kernel")(integer.linear)
_accelerates("integer_max_pool2d_kernel")(integer.max_pool2d)
_accelerates("integer_mean_kernel")(integer.mean)
_accelerates("integer_add_kernel")(integer.add)
