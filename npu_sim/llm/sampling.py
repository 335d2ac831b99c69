"""Choosing the next token from logits: greedy decoding, or sampling with temperature, filters, penalties and biases.

`modules.drawn` is the same rule as a part of a decode step on the device. "top-p" means nucleus sampling (Holtzman et
al., https://arxiv.org/abs/1904.09751).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError, NPUError

Logits = NDArray[np.float32]
Sampler = Callable[[Logits], int]

_FLOAT32 = np.finfo(np.float32)
_LARGEST_TOP_K = 1 << 24  # integers up to here are exact in float32
_FIRST_SORTED = 64  # this many tokens are sorted first, which nearly always include the sampled one
NOT_FINITE = "the model's logits are not finite; try another compute dtype, such as --dtype float32"


def is_finite(logits: Logits) -> bool:
    """Whether no logit is NaN or infinite. It takes no memory for that: a prompt's first token waits for the answer."""
    return math.isfinite(logits.max()) and math.isfinite(logits.min())


def greedy(logits: Logits) -> int:
    """The most probable token of logits [vocab]; the lowest id on ties.

    Raises:
        NPUError: a logit is NaN or infinite.
    """
    return int(_finite(logits).argmax())


@dataclass(frozen=True)
class SamplingSettings:
    """The rule by which tokens are chosen: the arguments of `make_sampler` and more.

    What the device does not compute (all but temperature, top_k and top_p), the host does from the logits, in this
    order: repetition penalty, frequency and presence penalties, bias, minimum length; then the filters top_k, top_p,
    min_p and typical_p, each of which is applied to the tokens that the one before has kept.

    Attributes:
        repetition_penalty: See `penalized`. None: the checkpoint's own.
        presence_penalty: Subtracted once from the logit of each token that has occurred among the new ones.
        frequency_penalty: Subtracted from a token's logit as often as it has occurred among the new ones.
        min_p: Least probability of a token, as a share of the most probable token's. None: 0.
        typical_p: Total probability of the kept tokens, those whose information is nearest to the distribution's
            entropy (Meister et al., https://arxiv.org/abs/2202.00666). None: 1.
        logit_bias: Pairs of a token id and the number that is added to its logit.
        min_tokens: Number of new tokens before which no stop token is chosen.
        temperature, top_k, top_p, seed: See `make_sampler`. None: its default.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float | None = None
    typical_p: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def filters(self) -> bool:
        """Whether there are filters besides top_k and top_p: min_p or typical_p."""
        return bool(self.min_p) or self.typical_p not in (None, 1)

    @property
    def by_host(self) -> bool:
        """Whether the host has to choose the tokens from the logits.

        It has to for a penalty, a bias, a minimum length, min_p or typical_p; the device computes the other settings.
        """
        changes = self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens
        return bool(changes) or self.filters or self.repetition_penalty not in (None, 1)


class Drawing:
    """A random sampler with its own generator, from which each call takes one uniform number.

    Attributes:
        sampling: Settings, of which temperature, top_k and top_p count.
        settings: (temperature, top_k, top_p) in float32, as `modules.drawn` takes them.
    """

    def __init__(self, sampling: SamplingSettings) -> None:
        self.sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)
        # An infinite top_k keeps the whole vocabulary; a top_p of 1 keeps all tokens that change the float32 sum. What
        # float32 would round to 0 or infinity is kept within its range.
        top_k = np.inf if sampling.top_k is None else min(sampling.top_k, _LARGEST_TOP_K)
        top_p = 1.0 if sampling.top_p is None else max(sampling.top_p, float(_FLOAT32.tiny))
        temperature = np.clip(sampling.temperature, _FLOAT32.tiny, _FLOAT32.max)
        self.settings = np.array((temperature, top_k, top_p), np.float32)

    def __call__(self, logits: Logits) -> int:
        uniform, sampling = float(self._rng.random(dtype=np.float32)), self.sampling
        return choose(logits, uniform, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)

    def generator(self) -> np.random.Generator:
        """A copy of the generator, which returns the uniform numbers that the next calls will use."""
        return copy.deepcopy(self._rng)

    def skip(self) -> None:
        """Advance the generator by one number, since the device has used it."""
        self._rng.random(dtype=np.float32)


def penalized(logits: Logits, tokens: Sequence[int], penalty: float) -> Logits:
    """Logits [vocab] after a repetition penalty (Keskar et al., https://arxiv.org/abs/1909.05858).

    Args:
        tokens: Tokens that have occurred, including those of the prompt.
        penalty: Divides their positive logits and multiplies the negative ones; 1 changes nothing.
    """
    if penalty == 1:
        return logits
    occurred = np.unique(np.asarray(tokens, np.int64))
    result, scores, factor = logits.copy(), logits[occurred], np.float32(penalty)
    result[occurred] = np.where(scores > 0, scores / factor, scores * factor)
    return result


def adjusted(logits: Logits, sampling: SamplingSettings, tokens: Sequence[int], prompt_length: int) -> Logits:
    """Logits [vocab] after the repetition, frequency and presence penalties and the bias, in this order.

    Args:
        tokens: Tokens of the prompt and new tokens so far.
    """
    penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
    scores = penalized(logits, tokens, penalty)
    scores = scores.copy() if scores is logits else scores
    if sampling.presence_penalty or sampling.frequency_penalty:
        new, counts = np.unique(np.asarray(tokens[prompt_length:], np.int64), return_counts=True)
        scores[new] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts
    for token, bias in sampling.logit_bias:
        scores[token] += np.float32(bias)
    return scores


def check_sampling(sampling: SamplingSettings, vocab_size: int) -> None:
    """Raise InputError for settings out of their ranges, except those that `make_sampler` checks."""
    if sampling.repetition_penalty is not None:
        check_penalty(sampling.repetition_penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            raise InputError(f"{name} must be from -2 to 2, not {getattr(sampling, name)}")
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        raise InputError(f"min_p must be from 0 to 1, not {sampling.min_p}")
    if sampling.typical_p is not None and not 0 < sampling.typical_p <= 1:
        raise InputError(f"typical_p must be above 0 and at most 1, not {sampling.typical_p}")
    if sampling.min_tokens < 0:
        raise InputError(f"min_tokens must be at least 0, not {sampling.min_tokens}")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise InputError(f"logit_bias names token {token}, but the vocabulary is 0 to {vocab_size - 1}")
        if not -100 <= bias <= 100:
            raise InputError(f"the logit_bias of token {token} must be from -100 to 100, not {bias}")


def check_penalty(penalty: float) -> None:
    """Raise InputError for a repetition penalty that is not a finite number above 0."""
    if not 0 < penalty < np.inf:
        raise InputError(f"repetition_penalty must be a finite number above 0, not {penalty}")


def make_sampler(
    temperature: float = 0.0, *, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
) -> Sampler:
    """A sampler with its own random generator.

    Args:
        temperature: Divides the logits; 0 means greedy decoding.
        top_k: Sample from this many of the most probable tokens. None: all.
        top_p: Sample from the smallest set of tokens with this total probability. None: all.
        seed: Seed of the generator. None: a random one.

    Raises:
        InputError: temperature is negative or not finite, top_k is below 1, top_p is outside (0, 1], or seed below 0.
    """
    _check(temperature, top_k, top_p)
    if seed is not None and seed < 0:
        raise InputError(f"seed must be at least 0, not {seed}")
    return greedy if temperature == 0 else Drawing(SamplingSettings(temperature, top_k, top_p, seed))


def choose(
    logits: Logits, uniform: float, temperature: float = 1.0, *, top_k: int | None = None, top_p: float | None = None
) -> int:
    """Sample a token by inverse transform of the uniform number.

    The token is the first, in descending order of probability, at which the cumulative probability exceeds `uniform`.
    The probabilities are softmax(logits / temperature), restricted to the `top_k` most probable tokens, then to the
    smallest set of those whose share reaches `top_p`. On ties, lower ids are kept. Only as many tokens are sorted as
    are needed; the total of all is computed in float32's precision.

    Args:
        logits: [vocab].
        uniform: A random number from [0, 1).
        top_k, top_p: See above. None: all tokens.

    Raises:
        NPUError: a logit is NaN or infinite.
    """
    highest = _finite(logits).max()
    count, total = (_FIRST_SORTED, _total(logits, temperature)) if top_k is None else (min(top_k, len(logits)), np.inf)
    while True:
        order = _most_probable(logits, count)
        with np.errstate(over="ignore"):  # an extreme temperature leaves the most probable token, or all of them
            weights = np.exp((logits[order].astype(np.float64) - float(highest)) / temperature)
        reached = np.cumsum(weights)
        complete = top_k is not None or len(order) == len(logits)
        whole = reached[-1] if complete else total
        if top_p is not None and (complete or reached[-1] >= top_p * whole):
            reached = reached[reached - weights < top_p * whole]
            complete, whole = True, reached[-1]
        goal = uniform * whole
        if complete or (top_p is None and reached[-1] > goal):
            place = int(np.searchsorted(reached, goal, side="right"))
            return int(order[min(place, len(reached) - 1)])
        count *= _FIRST_SORTED


def choose_filtered(logits: Logits, uniform: float, sampling: SamplingSettings) -> int:
    """`choose` with min_p and typical_p too.

    Each filter keeps at least one token: the most probable or, for typical_p, the most typical one. On ties, lower ids
    come first.

    Raises:
        NPUError: a logit is NaN or infinite.
    """
    ids, probabilities = kept_tokens(logits, sampling)
    reached = np.cumsum(probabilities)
    return int(ids[min(int(np.searchsorted(reached, uniform * reached[-1], side="right")), len(ids) - 1)])


def kept_tokens(logits: Logits, sampling: SamplingSettings) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Indices of the tokens that the filters keep, most probable first, and their probabilities, which sum to 1.

    Raises:
        NPUError: as in `choose_filtered`.
    """
    order = np.argsort(-_finite(logits), kind="stable")
    scores = logits[order].astype(np.float64)
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores[0]) / sampling.temperature)
    weights = weights[: sampling.top_k]
    if sampling.top_p is not None:
        reached = np.cumsum(weights)
        weights = weights[reached - weights < sampling.top_p * reached[-1]]
    weights = weights[: max(1, int((weights >= (sampling.min_p or 0)).sum()))]
    probabilities = weights / weights.sum()
    ids = order[: len(probabilities)]
    if sampling.typical_p in (None, 1):
        return ids, probabilities
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        distance = np.abs(surprise - np.nansum(probabilities * surprise))
    nearest = np.argsort(distance, kind="stable")
    last = int((np.cumsum(probabilities[nearest]) < sampling.typical_p).sum())
    typical = np.flatnonzero(distance <= distance[nearest[min(last, len(nearest) - 1)]])
    return ids[typical], probabilities[typical] / probabilities[typical].sum()


def choose_by(logits: Logits, settings: NDArray[np.float32], uniforms: NDArray[np.float32]) -> NDArray[np.int32]:
    """The token of each row of logits [R, vocab], as [R]; -1 where a logit is NaN or infinite.

    Args:
        settings: [R, 3], temperature (0: greedy), top_k (infinity: all) and top_p.
        uniforms: [R], random numbers from [0, 1).
    """
    tokens = np.full(len(logits), -1, np.int32)
    for index, (row, uniform) in enumerate(zip(logits, uniforms, strict=True)):
        temperature, top_k, top_p = map(float, settings[index])
        if is_finite(row):
            limits = None if np.isinf(top_k) else int(top_k), None if top_p == 1 else top_p
            tokens[index] = (
                row.argmax()
                if temperature == 0
                else choose(row, float(uniform), temperature, top_k=limits[0], top_p=limits[1])
            )
    return tokens


def _total(logits: Logits, temperature: float) -> float:
    """The sum of exp((logits - their maximum) / temperature)."""
    divisor = np.float32(np.clip(temperature, _FLOAT32.tiny, _FLOAT32.max))
    with np.errstate(over="ignore"):
        return float(np.exp((logits - logits.max()) / divisor).sum(dtype=np.float64))


def _most_probable(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.intp]:
    """The indices of the `count` highest scores in descending order; on ties, lower indices are kept and come first."""
    if count < len(scores):
        candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def _check(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (np.isfinite(temperature) and temperature >= 0):
        raise InputError(f"temperature must be a finite number of at least 0, not {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, not {top_p}")


def _finite(logits: Logits) -> Logits:
    if not is_finite(logits):
        raise NPUError(NOT_FINITE)
    return logits
