"""From logits to the next token: greedy, or drawn with a temperature, top-k and top-p. Pure functions on arrays."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError, NPUError

Logits = NDArray[np.float32]
Sampler = Callable[[Logits], int]

# A token that is so far behind the best one, at temperature 1, is nothing to the sum of all: exp(-50) is 2e-22. Most
# tokens of a large vocabulary are, and to leave them out early saves more time than a step of the model takes.
_NEGLIGIBLE = 50.0
NOT_FINITE = "the model gave logits that are not finite; try another compute dtype, such as float32"


def greedy(logits: Logits) -> int:
    """The likeliest token of logits [vocab]; the first one of equals."""
    return int(_finite(logits).argmax())


def make_sampler(
    temperature: float = 0.0, *, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
) -> Sampler:
    """A sampler with a generator of its own; temperature 0 is greedy.

    Raises InputError for a negative temperature, a top_k below 1, or a top_p outside (0, 1].
    """
    _check(temperature, top_k, top_p)
    if temperature == 0:
        return greedy
    rng = np.random.default_rng(seed)
    return lambda logits: draw(probabilities(logits, temperature, top_k=top_k, top_p=top_p), rng)


def probabilities(
    logits: Logits, temperature: float = 1.0, *, top_k: int | None = None, top_p: float | None = None
) -> NDArray[np.float64]:
    """softmax(logits / temperature) [vocab], cut to the `top_k` likeliest tokens, then to the fewest whose sum
    reaches `top_p`, and made to sum to 1. Of equally likely tokens, the lower ids stay.

    Raises NPUError for logits that are NaN or infinite, InputError for settings out of range (or temperature 0).
    """
    _check(temperature, top_k, top_p)
    if temperature == 0:
        raise InputError("temperature 0 leaves nothing to draw; use greedy()")
    kept = np.flatnonzero(_finite(logits) >= logits.max() - np.float32(_NEGLIGIBLE * temperature))
    scores = logits[kept].astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    order = np.arange(len(kept)) if top_k is None else _likeliest(scores, top_k)
    if top_p is not None:
        order = order[np.argsort(-scores[order], kind="stable")]
        share = weights[order] / weights[order].sum()
        order = order[np.cumsum(share) - share < top_p]
    result = np.zeros(len(logits))
    result[kept[order]] = weights[order] / weights[order].sum()
    return result


def _likeliest(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """The places of the `count` highest scores, the highest first; of equals the lower places, and those first."""
    if count < len(scores):
        candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def draw(weights: NDArray[np.float64], rng: np.random.Generator) -> int:
    """An index, drawn with these probabilities."""
    possible = np.flatnonzero(weights)
    reached = np.cumsum(weights[possible])
    return int(possible[np.searchsorted(reached, rng.random() * reached[-1], side="right")])


def _check(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (np.isfinite(temperature) and temperature >= 0):
        raise InputError(f"temperature must be a number from 0, not {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p must lie above 0 and not above 1, not {top_p}")


def _finite(logits: Logits) -> Logits:
    if not np.isfinite(logits).all():
        raise NPUError(NOT_FINITE)
    return logits
