"""Transformers' architectures as small modules with random weights, with inputs that eager PyTorch accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.architectures.configs import tiny_config
from benchmarks.architectures.inputs import candidates

SEED = 20
MOST_PARAMETERS = 60_000_000


class NotBuilt(Exception):
    """Raised if the general rules give no running module for an architecture; the message gives the reason."""


@dataclass(frozen=True)
class Architecture:
    """A small model that runs in eager PyTorch.

    Attributes:
        model_type: The name of the model type.
        module: The module.
        kwargs: The keyword arguments of its call.
        expected: The tensors that eager PyTorch returns in float32, in the order of pytree.
    """

    model_type: str
    module: nn.Module
    kwargs: Mapping[str, Any]
    expected: tuple[Tensor, ...]


def model_types() -> list[str]:
    """Return every model type for which the installed transformers has a base model, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def build(model_type: str) -> Architecture:
    """Return a tiny module of the type in float32 and eval mode, with its inputs and results.

    Raises:
        NotBuilt: the rules give no module that runs in eager PyTorch, or its results are random.
    """
    module = _module(model_type)
    reasons: list[str] = []
    for kwargs in candidates(module, module.config, SEED):
        try:
            first, second = run(module, kwargs), run(module, kwargs, seed=SEED + 1)
        except Exception as error:  # of any of several hundred models; the next candidate may fit
            reasons.append(f"{', '.join(kwargs)}: {reason_of(error)}")
            continue
        if not any(x.is_floating_point() for x in first):
            reasons.append(f"{', '.join(kwargs)}: no output is a float tensor")
        elif any(not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(first, second, strict=True)):
            raise NotBuilt("its answer is random")
        elif not any(torch.isfinite(x).any() for x in first if x.is_floating_point()):
            raise NotBuilt("none of its outputs is finite")
        else:
            return Architecture(model_type, module, _prepared(module, kwargs, first), first)
    raise NotBuilt(reasons[0] if reasons else f"no rule for the arguments of {type(module).__name__}.forward")


def _prepared(module: nn.Module, kwargs: dict[str, Any], expected: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return the inputs with tensors that the library computes beforehand from grids of patches.

    The library's exporters pass these tensors as arguments, since `forward` computes them with shapes that depend on
    data. They are left out if the model's results change with them.
    """
    from transformers.exporters.utils import precompute_export_inputs

    more = dict(kwargs)
    try:
        precompute_export_inputs(module, more)
        answer = run(module, more)
    except Exception:  # of any of several hundred models; they are optional
        return kwargs
    same = len(answer) == len(expected) and all(map(torch.equal, answer, expected))
    return more if same else kwargs


def reason_of(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@torch.no_grad()
def run(module: Any, kwargs: Mapping[str, Any], seed: int = SEED) -> tuple[Tensor, ...]:
    """Call a module, or its compiled form, and return copies of the tensors among its results."""
    torch.manual_seed(seed)
    result = module(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in kwargs.items()})
    return tuple(x.detach().clone() for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


def _module(model_type: str) -> nn.Module:
    from transformers import AutoModel

    torch.manual_seed(SEED)
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            size = sum(x.numel() for x in AutoModel.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"{size / 1e6:.0f} million parameters are not tiny")
        module: nn.Module = AutoModel.from_config(config, dtype=torch.float32)
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(reason_of(error)) from error
    module = module.eval().requires_grad_(False)
    _scale_weights(module)
    return module


def _scale_weights(module: nn.Module) -> None:
    """Set random weights under which every part of a model affects its output.

    Weights of products keep the magnitude of activations; vectors and statistics are moved away from the 0 or 1 with
    which they start.
    """
    products = {id(m.weight) for m in module.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if not torch.isfinite(parameter).all():
                parameter.zero_()
            if parameter.dim() <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif id(parameter) in products or parameter.abs().max() < 0.2:
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
                parameter.normal_(0, 1 / math.sqrt(max(fan_in, 1)))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
