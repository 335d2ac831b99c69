"""The rule of sampling with temperature, top-k and top-p, by sorting everything.

`npu_sim.llm.sampling` computes the same faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def probabilities(
    logits: NDArray[np.float32], temperature: float = 1.0, *, top_k: int | None = None, top_p: float | None = None
) -> NDArray[np.float64]:
    """The probabilities [vocab] to sample from: softmax(logits / temperature), restricted and normalized to sum to 1.

    The restriction is first to the `top_k` most probable tokens, then to the smallest set of those whose share of their
    sum reaches `top_p`. On ties, lower ids are kept.
    """
    order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp((logits[order].astype(np.float64) - float(logits.max())) / temperature)
    weights /= weights.sum()
    kept = np.cumsum(weights) - weights < (2 if top_p is None else top_p)
    result = np.zeros(len(logits))
    result[order[kept]] = weights[kept] / weights[kept].sum()
    return result


def draw(weights: NDArray[np.float64], uniform: float) -> int:
    """The index of a weight, drawn by inverse transform.

    It is the first at which the cumulative sum of the weights, in descending order, exceeds `uniform` times the total.
    """
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order])
    place = np.searchsorted(reached, uniform * weights.sum(), side="right")
    return int(order[min(int(place), np.count_nonzero(weights) - 1)])
