"""From logits to the next token: greedy, or drawn with a temperature, top-k and top-p.

`modules.drawn` is the same as part of a decode step.
"""

import copy
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError, NPUError

Logits = NDArray[np.float32]
Sampler = Callable[[Logits], int]

# A token that is so far behind the best one, at temperature 1, is nothing to the sum of all: exp(-50) is 2e-22. Most
# tokens of a large vocabulary are, and to leave them out early saves more time than a step of the model takes.
_NEGLIGIBLE = 50.0
_LIKELY = 64  # tokens among which the drawn one mostly is; all of them are sorted only when it is not
NOT_FINITE = "the model gave logits that are not finite; try another compute dtype, such as float32"


def greedy(logits: Logits) -> int:
    """The likeliest token of logits [vocab]; the first one of equals."""
    return int(_finite(logits).argmax())


class Drawing:
    """A sampler that draws, with a generator of its own: each call takes the next of its uniform numbers.

    Attributes:
        settings: What a step that samples on the device takes: (temperature, top_k, top_p), float32.
    """

    def __init__(self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> None:
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self._rng = np.random.default_rng(seed)
        # A top_k beyond the vocabulary keeps all of it, and a top_p of 1 all but what is lost in the sum's last bit.
        values = (temperature, np.inf if top_k is None else top_k, 1.0 if top_p is None else top_p)
        self.settings = np.array(values, np.float32)

    def __call__(self, logits: Logits) -> int:
        weights = probabilities(logits, self._temperature, top_k=self._top_k, top_p=self._top_p)
        return draw(weights, float(self._rng.random(dtype=np.float32)))

    def upcoming(self, count: int) -> NDArray[np.float32]:
        """The uniform numbers that the next calls will take; they are not taken by this."""
        return copy.deepcopy(self._rng).random(count, dtype=np.float32)

    def skip(self) -> None:
        """Take a uniform number that was used elsewhere."""
        self._rng.random(dtype=np.float32)


def make_sampler(
    temperature: float = 0.0, *, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
) -> Sampler:
    """A sampler with a generator of its own; temperature 0 is greedy.

    Raises InputError for a negative temperature, a top_k below 1, or a top_p outside (0, 1].
    """
    _check(temperature, top_k, top_p)
    return greedy if temperature == 0 else Drawing(temperature, top_k, top_p, seed)


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


def draw(weights: NDArray[np.float64], uniform: float) -> int:
    """The index at which the sum of the weights, the greatest first, passes `uniform` (from [0, 1)) of all."""
    possible = np.flatnonzero(weights)
    weights = weights[possible]
    goal, count = uniform * weights.sum(), _LIKELY
    while True:
        order = _likeliest(weights, count)
        reached = np.cumsum(weights[order])
        if reached[-1] > goal or len(order) == len(weights):
            place = np.searchsorted(reached, goal, side="right")
            return int(possible[order[min(place, len(order) - 1)]])
        count *= _LIKELY


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
