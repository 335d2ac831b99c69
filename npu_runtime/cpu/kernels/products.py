"""Matrix products and attention in NumPy, in float32."""

from __future__ import annotations

import numpy as np

from npu_compiler.ops import ELEMENTWISE
from npu_compiler.program.elementwise import ACTIVATIONS
from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.elementwise import bound_elementwise
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, cpu_kernel, to_float
from npu_runtime.cpu.kernels.rows import softmax_of


def activated(array: np.ndarray, activation: str) -> np.ndarray:
    """The activation of a float32 array, by its name in `npu_compiler`'s `ACTIVATIONS`, or "none".

    Overwrites the array.
    """
    if activation != "none":
        op = ELEMENTWISE[ACTIVATIONS[activation]]
        bound_elementwise(op, [array], array, {"scalars": [None], **op.attrs})()
    return array


@cpu_kernel("matmul_kernel", "matmul_notrans_kernel", "matmul_vec_kernel", "matmul_vec_notrans_kernel")
def linear(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[M, N] = act(x[M, K] · w[N, K]ᵀ + bias) + residual."""
    x, weight, *rest = map(as_float32, inputs)
    linear_epilogue([x @ weight.T, *rest], outputs, params)


@cpu_kernel("linear_epilogue_kernel")
def linear_epilogue(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out = act(product + bias) + residual."""
    product, *rest = map(as_float32, inputs)
    result = product + (rest.pop(0) if params["has_bias"] else np.float32(0))
    result = activated(result, params["activation"])
    outputs[0][...] = result + rest.pop(0) if params["has_residual"] else result


@cpu_kernel("gated_matmul_vec_kernel")
def gated_linear(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[1, N] = act(gate) · up, where [gate, up] = x[1, K] · w[2N, K]ᵀ + bias."""
    x, weight, *bias = map(as_float32, inputs)
    product = x @ weight.T
    gate, up = np.split(product + bias[0] if bias else product, 2, -1)
    outputs[0][...] = activated(gate.copy(), params["activation"]) * up


@cpu_kernel("expert_matmul_kernel")
def expert_product(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[m] = x[m · R / M] · weight[experts[m]]ᵀ + bias[experts[m]], or 0 if there is no such expert."""
    x, weight, experts, *bias = inputs
    shared = len(experts) // len(x)
    outputs[0][...] = 0
    for expert in np.unique(experts[(experts >= 0) & (experts < len(weight))]):
        places = np.flatnonzero(experts == expert)
        product = as_float32(x)[places // shared] @ as_float32(weight[expert]).T
        outputs[0][places] = product + as_float32(bias[0][expert]) if bias else product


@cpu_kernel("batched_matmul_kernel")
def batched_matmul(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[…, M, N] = scale · a[…, M, K] · b[…, K, N]; integers multiply as integers."""
    product = np.matmul(*map(to_float, inputs))
    outputs[0][...] = product if params["scale"] == 1.0 else product * np.float32(params["scale"])


@cpu_kernel("attention_kernel")
def attention(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """softmax(scale · q·kᵀ + mask) · v over [B, H, T, D], KV heads shared by consecutive query heads."""
    q, k, v, *rest = inputs
    scores = _capped(_scores(q, k, params["scale"]), params["soft_cap"])
    if params["has_mask"]:
        mask = rest.pop(0)
        scores = np.where(mask, scores, np.float32(-np.inf)) if mask.dtype == bool else scores + as_float32(mask)
    if params["causal"]:
        queries, keys = scores.shape[2:]
        scores = np.where(np.tri(queries, keys, dtype=bool), scores, np.float32(-np.inf))
    sees_none = np.isneginf(scores).all(-1, keepdims=True)
    outputs[0][...] = _weighted(np.where(sees_none, np.float32(0), _weights(scores, rest)), v)


def _scores(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Scaled scores [B, H, T, S] of queries [B, H, T, D] with keys [B, KV, S, D]."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    grouped = as_float32(q).reshape(batch, groups, heads // groups, queries, width)
    scores = grouped @ as_float32(k)[:, :, None].swapaxes(-1, -2)
    scaled: np.ndarray = scores.reshape(batch, heads, queries, keys) * np.float32(scale)
    return scaled


def _capped(scores: np.ndarray, soft_cap: float) -> np.ndarray:
    """Scores s as c · tanh(s / c) if there is a soft cap c above 0."""
    cap = np.float32(soft_cap)
    return cap * np.tanh(scores / cap) if soft_cap else scores


def _weights(scores: np.ndarray, sinks: Arrays) -> np.ndarray:
    """The softmax of scores [B, H, T, S], to which the sinks [H], if there are any, add a score of no key."""
    beside = (np.broadcast_to(as_float32(sink)[:, None, None], (*scores.shape[:3], 1)) for sink in sinks)
    return softmax_of(np.concatenate([scores, *beside], -1))[..., : scores.shape[3]]


def _weighted(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Sums [B, H, T, Dv] of values [B, KV, S, Dv] with weights [B, H, T, S]."""
    batch, heads, queries, keys = weights.shape
    groups, width = v.shape[1], v.shape[3]
    sums = weights.reshape(batch, groups, heads // groups, queries, keys) @ as_float32(v)[:, :, None]
    result: np.ndarray = sums.reshape(batch, heads, queries, width)
    return result


@cpu_kernel("paged_attention_kernel")
def paged_attention(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Attention of tokens to the rows of a pool of keys and values that their sequences' tables name."""
    q, k, v, tables, sequences, positions, *sinks = inputs
    block, window = params["block_size"], params["window"]
    sequences = np.clip(sequences, 0, len(tables) - 1)
    positions = np.clip(positions, 0, tables.shape[1] * block - 1)
    for sequence in np.unique(sequences):
        tokens = np.flatnonzero(sequences == sequence)
        first = max(0, positions[tokens].min() + 1 - window) if window else 0
        places = np.arange(first, positions[tokens].max() + 1)
        rows = np.clip(tables[sequence, places // block], 0, len(k) // block - 1) * block + places % block
        own_q, own_k, own_v = (x.swapaxes(0, 1)[None] for x in (q[tokens], k[rows], v[rows]))
        seen = places <= positions[tokens, None]
        if window:
            seen &= places > positions[tokens, None] - window
        scores = _capped(_scores(own_q, own_k, params["scale"]), params["soft_cap"])
        scores = np.where(seen, scores, np.float32(-np.inf))
        outputs[0][tokens] = _weighted(_weights(scores, sinks), own_v)[0].swapaxes(0, 1)
