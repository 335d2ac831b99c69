"""Reductions over the last `reduce_dims` dimensions, softmax over the last one, and group norms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, to_float, torch_kernel


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """A boolean tensor as 0 and 1, for which PyTorch has positions of extremes; any other tensor unchanged."""
    return x.byte() if x.dtype is torch.bool else x


_FLAT: dict[str, Callable[[torch.Tensor, Params], torch.Tensor]] = {
    "sum": lambda x, p: x.sum(-1),
    "mean": lambda x, p: x.float().mean(-1),
    "max": lambda x, p: x.amax(-1),
    "min": lambda x, p: x.amin(-1),
    "prod": lambda x, p: x.prod(-1),
    "var": lambda x, p: x.float().var(-1, correction=p["correction"]),
    "std": lambda x, p: x.float().std(-1, correction=p["correction"]),
    "any": lambda x, p: x.bool().any(-1),
    "all": lambda x, p: x.bool().all(-1),
    "argmax": lambda x, p: _numbers(x).argmax(-1),
    "argmin": lambda x, p: _numbers(x).argmin(-1),
    "norm": lambda x, p: torch.linalg.vector_norm(x.float(), p["order"], -1),
    "logsumexp": lambda x, p: x.float().logsumexp(-1),
}


def _reduction(op: str) -> None:
    function = _FLAT[op]

    @torch_kernel(f"{op}_kernel")
    def reduce(inputs: Tensors, outputs: Tensors, params: Params) -> None:
        x = to_float(inputs[0])
        kept = x.dim() - params["reduce_dims"]
        outputs[0].copy_(function(x.reshape(*x.shape[:kept], -1), params))


for _op in _FLAT:
    _reduction(_op)


@torch_kernel("softmax_kernel")
def softmax(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].copy_(torch.softmax(to_float(inputs[0]).float() * params["scale"], -1))


@torch_kernel("log_softmax_kernel")
def log_softmax(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].copy_(torch.log_softmax(to_float(inputs[0]).float() * params["scale"], -1))


@torch_kernel("masked_softmax_kernel")
def masked_softmax(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """softmax(scale · scores + mask)."""
    scores, mask = (to_float(t).float() for t in inputs)
    outputs[0].copy_(torch.softmax(scores * params["scale"] + mask, -1))


@torch_kernel("cumsum_kernel")
def cumsum(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """Running sum along the last dimension."""
    outputs[0].copy_(to_float(inputs[0]).cumsum(-1))


@torch_kernel("groupnorm_kernel")
def group_norm(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, *affine = (to_float(t) for t in inputs)
    weight, bias = (*affine, None, None)[:2]
    # PyTorch takes the mean of squares of channels-last images, which loses digits where values are far from zero.
    outputs[0].copy_(torch.group_norm(x.contiguous(), params["groups"], weight, bias, params["eps"]))
