"""Native CPU kernels: prepared once on fixed arrays, then run at the cost of a function call."""

from npu_runtime.cpu.native.attention.attention import QuantizedCache, attention, paged_attention, quantized_index_copy
from npu_runtime.cpu.native.bindings import NativeLaunch, NativeSequence, available
from npu_runtime.cpu.native.build import failure_reason
from npu_runtime.cpu.native.movement.movement import (
    copy,
    embedding,
    gather,
    index_copy,
    index_copy_pair,
    index_select,
)
from npu_runtime.cpu.native.products.linear import (
    PackedExperts,
    PackedWeight,
    expert_linear,
    gated_linear,
    linear,
    pack_expert_weights,
    pack_linear_weight,
)
from npu_runtime.cpu.native.products.matmul import matmul
from npu_runtime.cpu.native.quantized.quantized import (
    PackedQuantized,
    pack_quantized,
    pack_quantized_experts,
    quantized_embedding,
    quantized_expert_linear,
    quantized_gated_linear,
    quantized_linear,
)
from npu_runtime.cpu.native.rows.elementwise import elementwise
from npu_runtime.cpu.native.rows.norm import group_norm, layer_norm, rms_norm, softmax
from npu_runtime.cpu.native.rows.order import argsort, place_of_extreme
from npu_runtime.cpu.native.rows.pointwise import activation, activation_mul, cast, clamped_silu_mul, combine
from npu_runtime.cpu.native.rows.reductions import reduce_last
from npu_runtime.cpu.native.rows.rope import rope

__all__ = [
    "NativeLaunch",
    "NativeSequence",
    "PackedExperts",
    "PackedQuantized",
    "PackedWeight",
    "QuantizedCache",
    "activation",
    "activation_mul",
    "argsort",
    "attention",
    "available",
    "cast",
    "clamped_silu_mul",
    "combine",
    "copy",
    "elementwise",
    "embedding",
    "expert_linear",
    "failure_reason",
    "gated_linear",
    "gather",
    "group_norm",
    "index_copy",
    "index_copy_pair",
    "index_select",
    "layer_norm",
    "linear",
    "matmul",
    "pack_expert_weights",
    "pack_linear_weight",
    "pack_quantized",
    "pack_quantized_experts",
    "paged_attention",
    "place_of_extreme",
    "quantized_embedding",
    "quantized_expert_linear",
    "quantized_gated_linear",
    "quantized_index_copy",
    "quantized_linear",
    "reduce_last",
    "rms_norm",
    "rope",
    "softmax",
]
