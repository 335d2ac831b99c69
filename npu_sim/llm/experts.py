"""Mixtures of experts in traced modules.

While a model is traced, `routed_experts` replaces transformers' loop over experts, whose shapes depend on the data, by
two linear layers that read only the matrices of the experts chosen for each row (`npu_compiler.ops.experts`). The
matrices [E, N, K] of a layer are one parameter [E · N, K], so that they can be quantized like any other.
"""

from typing import Any

import torch
from torch import nn

from npu_sim.llm.expert_weights import Joined

IMPLEMENTATION = "npu_routed_experts"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


@torch.library.custom_op("npu::expert_linear", mutates_args=())
def expert_linear(
    input: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, count: int
) -> torch.Tensor:
    """Multiply rows by their experts' matrices: out[m] = input[m · R // M] · weight[e]ᵀ + bias[e], e = experts[m].

    Input [R, K], weight [count · N, K] or [count, N, K], experts [M], bias [count, N] → [M, N]. M is a multiple of R:
    each row has M / R experts, one after the other. A result whose expert is not in 0..count - 1 is 0. The trace of a
    model has this as one op, which `npu_compiler.ops.experts.lower_expert_linear` lowers.

    Args:
        count: Number of experts.
    """
    matrices = weight if weight.dim() == 3 else weight.view(count, -1, weight.shape[1])
    rows = input.repeat_interleave(len(experts) // len(input), 0)
    result = rows.new_zeros(len(experts), matrices.shape[1])
    for expert in experts[(experts >= 0) & (experts < count)].unique().tolist():
        places = experts == expert
        result[places] = nn.functional.linear(rows[places], matrices[expert], None if bias is None else bias[expert])
    return result


@expert_linear.register_fake
def _(
    input: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, count: int
) -> torch.Tensor:
    return input.new_empty(experts.shape[0], weight.shape[1] if weight.dim() == 3 else weight.shape[0] // count)


def routed_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An experts function for transformers: rows [T, K], each row's experts and weights [T, choices] → rows [T, K]."""
    experts = top_k_index.reshape(-1)

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        found: torch.Tensor = expert_linear(rows, getattr(module, name), experts, bias, module.num_experts)
        return found

    if module.has_gate:
        inner = module._apply_gate(product(hidden_states, "gate_up_proj"))
    else:
        inner = module.act_fn(product(hidden_states, "up_proj"))
    outer = product(inner, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        outer = module.post_expert_norm(outer)
    weighted = outer * top_k_weights.reshape(-1, 1)
    result: torch.Tensor = weighted.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)
    return result


def join_experts(model: nn.Module) -> None:
    """Let a model's expert layers use `routed_experts`, and make the matrices of each layer one parameter."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, routed_experts)
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for module in modules:
        module.config._experts_implementation = IMPLEMENTATION
        module.joined = {}
        for name in _MATRICES:
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter) and parameter.dim() == 3:
                count, first, second = parameter.shape
                joined = Joined((count, first, second), bool(module.is_transposed))
                module.joined[name] = joined
                count, rows, width = joined.matrices
                setattr(module, name, nn.Parameter(parameter.new_empty(count * rows, width), requires_grad=False))


def joined_parameters(model: nn.Module) -> dict[str, Joined]:
    """Name → description of each parameter that `join_experts` has made from the matrices of experts."""
    return {
        f"{path}.{name}": joined
        for path, module in model.named_modules()
        for name, joined in getattr(module, "joined", {}).items()
    }
