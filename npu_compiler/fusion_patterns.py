"""The fusions in the order in which they are applied, and the stage that applies them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from npu_compiler.errors import NPUError
from npu_compiler.fusions.activations import (
    ADD_RELU,
    CLAMPED_GATE,
    GATED_ACTIVATION,
    GELU,
    GELU_TANH,
    QUICK_GELU,
    SILU,
)
from npu_compiler.fusions.attention import ATTENTION, MASKED_SOFTMAX, absorb_scales, share_kv_heads
from npu_compiler.fusions.cache_updates import pair_cache_updates
from npu_compiler.fusions.conv import CONV_EPILOGUE
from npu_compiler.fusions.engine import Fusion, apply_fusion
from npu_compiler.fusions.integer import fuse_integers
from npu_compiler.fusions.linear import (
    GATED_LINEAR,
    LINEAR_ACTIVATION,
    LINEAR_CAST,
    LINEAR_RESIDUAL,
    fuse_shared_input_linears,
)
from npu_compiler.fusions.norms import LAYER_NORM, RMS_NORM
from npu_compiler.fusions.rope import ROPE, ROPE_BY_HALVES, share_rope
from npu_compiler.graph.model import IRGraph
from npu_compiler.op_support import supports_node
from npu_compiler.program.target import CodegenTarget, OpLevelTarget

INTEGER_KERNELS = "integer_kernels"  # the fusion for targets that have these

FUSIONS: dict[str, Fusion | Callable[[IRGraph], IRGraph]] = {
    INTEGER_KERNELS: fuse_integers,
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "layer_norm": LAYER_NORM,
    "rms_norm": RMS_NORM,
    "attention": ATTENTION,
    "attention_scales": absorb_scales,
    "share_kv_heads": share_kv_heads,
    "rope": ROPE,
    "rope_by_halves": ROPE_BY_HALVES,
    "masked_softmax": MASKED_SOFTMAX,
    "clamped_gate": CLAMPED_GATE,
    "gated_activation": GATED_ACTIVATION,
    "quick_gelu": QUICK_GELU,
    "conv_epilogue": CONV_EPILOGUE,
    "shared_input_linears": fuse_shared_input_linears,
    "linear_activation": LINEAR_ACTIVATION,
    "linear_residual": LINEAR_RESIDUAL,
    "linear_cast": LINEAR_CAST,
    "gated_linear": GATED_LINEAR,
    "shared_rope": share_rope,
    "paired_cache_update": pair_cache_updates,
    "add_relu": ADD_RELU,
}


def fuse(graph: IRGraph, disabled: Collection[str] = (), target: CodegenTarget | None = None) -> IRGraph:
    """Apply every fusion in the order of `FUSIONS`, except those named in `disabled`.

    A match stays unfused if the target lacks the fused op.

    Raises:
        NPUError: `disabled` names no known fusion.
    """
    check_fusion_names(disabled)
    supports = partial(supports_node, target or OpLevelTarget())
    for name, fusion in FUSIONS.items():
        if name in disabled:
            continue
        if isinstance(fusion, Fusion):
            graph = apply_fusion(graph, fusion, supports)
        else:
            before, fused = set(map(id, graph.nodes)), fusion(graph)
            if all(supports(node) for node in fused.nodes if id(node) not in before):
                graph = fused
    return graph


def check_fusion_names(names: Collection[str]) -> None:
    """Raise `NPUError` if a name is not that of a fusion."""
    unknown = sorted(set(names) - FUSIONS.keys())
    if unknown:
        raise NPUError(f"unknown fusion {', '.join(unknown)}; known are {', '.join(FUSIONS)}")
