"""Reductions, softmax, norms and rotations in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, cpu_kernel, is_float, to_float


def _variance(x: np.ndarray, params: Params) -> np.ndarray:
    centred = x.astype(np.float64) - as_float32(x).mean(-1, dtype=np.float64, keepdims=True)
    variance: np.ndarray = np.square(centred).sum(-1) / np.float64(max(x.shape[-1] - params["correction"], 0.0))
    return variance


def _norm(x: np.ndarray, params: Params) -> np.ndarray:
    return np.asarray(np.linalg.norm(x.astype(np.float64), params["order"], -1))


def _log_sum_exp(x: np.ndarray, params: Params) -> np.ndarray:
    x = as_float32(x)
    largest = x.max(-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, np.float32(0))
    return np.asarray(np.log(np.exp(x - largest).sum(-1)) + largest[..., 0])


_FLAT: dict[str, Callable[[np.ndarray, Params], np.ndarray]] = {
    "sum": lambda x, p: x.sum(-1),
    "mean": lambda x, p: as_float32(x).mean(-1),
    "max": lambda x, p: x.max(-1),
    "min": lambda x, p: x.min(-1),
    "prod": lambda x, p: x.prod(-1),
    "var": _variance,
    "std": lambda x, p: np.sqrt(_variance(x, p)),
    "any": lambda x, p: np.asarray(x.astype(bool).any(-1)),
    "all": lambda x, p: np.asarray(x.astype(bool).all(-1)),
    "argmax": lambda x, p: x.argmax(-1),
    "argmin": lambda x, p: x.argmin(-1),
    "norm": _norm,
    "logsumexp": _log_sum_exp,
}


def _reduction(op: str) -> None:
    function = _FLAT[op]

    @cpu_kernel(f"{op}_kernel")
    def reduce(inputs: Arrays, outputs: Arrays, params: Params) -> None:
        x = to_float(inputs[0])
        kept = x.shape[: x.ndim - params["reduce_dims"]]
        reduced = x.shape[len(kept) :]
        result = function(x.reshape(*kept, int(np.prod(reduced))), params)
        outputs[0][...] = np.asarray(result).astype(outputs[0].dtype, copy=False)  # sums of integers wrap


for _op in _FLAT:
    _reduction(_op)


def softmax_of(x: np.ndarray) -> np.ndarray:
    """Softmax over the last dimension of a float32 array; NaN for a row that is -inf throughout."""
    exponentials = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    result: np.ndarray = exponentials / exponentials.sum(-1, keepdims=True)
    return result


def _scaled(x: np.ndarray, params: Params) -> np.ndarray:
    return as_float32(x) * np.float32(params["scale"])


@cpu_kernel("softmax_kernel")
def softmax(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    outputs[0][...] = softmax_of(_scaled(inputs[0], params))


@cpu_kernel("log_softmax_kernel")
def log_softmax(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x = _scaled(inputs[0], params)
    shifted = x - x.max(-1, keepdims=True)
    outputs[0][...] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@cpu_kernel("masked_softmax_kernel")
def masked_softmax(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """softmax(scale · scores + mask)."""
    outputs[0][...] = softmax_of(_scaled(inputs[0], params) + as_float32(inputs[1]))


@cpu_kernel("cumsum_kernel")
def cumsum(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Running sum along the last dimension."""
    x = to_float(inputs[0])
    sums = x.cumsum(-1, dtype=np.float64) + 0.0 if is_float(x.dtype) else x.cumsum(-1, dtype=np.int64)
    outputs[0][...] = sums.astype(outputs[0].dtype)  # which begin with 0.0, not with a zero's sign, and wrap


@cpu_kernel("rmsnorm_kernel")
def rms_norm(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """x · rsqrt(mean(x²) + eps) · (weight + weight_offset) over rows."""
    x, *weight = map(as_float32, inputs)
    result = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(params["eps"]))
    outputs[0][...] = result * (weight[0] + np.float32(params["weight_offset"])) if weight else result


def _normalized(x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    result: np.ndarray = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(eps))
    return result


@cpu_kernel("layernorm_kernel")
def layer_norm(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, *affine = map(as_float32, inputs)
    result = _normalized(x, params["eps"])
    outputs[0][...] = _shifted(result, affine, (-1,))


@cpu_kernel("groupnorm_kernel")
def group_norm(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, *affine = map(as_float32, inputs)
    groups = x.reshape(x.shape[0], params["groups"], int(np.prod(x.shape[1:])) // params["groups"])
    result = _normalized(groups, params["eps"]).reshape(x.shape)
    outputs[0][...] = _shifted(result, affine, (1, -1, *[1] * (x.ndim - 2)))


def _shifted(x: np.ndarray, affine: Arrays, shape: tuple[int, ...]) -> np.ndarray:
    """x · weight + bias, with those of the two that `affine` has."""
    if affine:
        x = x * affine[0].reshape(shape)
    return x + affine[1].reshape(shape) if len(affine) > 1 else x


@cpu_kernel("rope_kernel")
def rope(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """x · cos + rotate_half(x) · sin over the last dimension."""
    x, cos, sin = map(as_float32, inputs)
    first, second = np.split(x, 2, -1)
    outputs[0][...] = x * cos + np.concatenate((-second, first), -1) * sin
