"""`StepTimes`: measured durations of steps, and from them the number of prompt tokens that a step can take on.

A model pads a step to a power of two of tokens, so a step takes as long as one of the padded number.
"""

import statistics
from collections import deque
from collections.abc import Mapping

FIRST_TOKENS = 128  # before anything is known
LEAST_TOKENS = 8
SLOWER = 1.8  # a step with prompt tokens may take this many times as long as one without
_ALIKE = 1.1  # times that differ by no more are worth more tokens
_ALIKE_RATE = 0.8  # of the most tokens for each second that a step is longer by
_LEAST_LONGER = 0.05  # of a step's time; what is shorter cannot be told from noise
_KEPT = 9  # steps; of them the median counts, since a step that compiles a program takes far longer
_FORGOTTEN = 256  # steps after which a time no longer counts


class _Durations:
    """Durations of steps by size. A size is the base-2 logarithm of the padded number of tokens."""

    def __init__(self) -> None:
        self._times: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, float | None] = {}  # of all steps of a size that are kept

    def add(self, size: int, step: int, seconds: float) -> None:
        times = self._times.setdefault(size, deque(maxlen=_KEPT))
        times.append((step, seconds))
        self._medians[size] = _median([seconds for _, seconds in times])

    def median(self, size: int, since: int = 0) -> float | None:
        """The median duration of a size, of steps from number `since` on.

        None for fewer than two steps: a single one may have included compiling.
        """
        times = self._times.get(size)
        if not times or times[0][0] >= since:
            return self._medians.get(size)
        return _median([seconds for step, seconds in times if step >= since])

    def up_to(self, size: int, since: int = 0) -> float | None:
        """The median duration of the largest size, `size` at most, that has one; None if no size has."""
        medians = (self.median(smaller, since) for smaller in range(size, -1, -1))
        return next((seconds for seconds in medians if seconds is not None), None)


def _median(values: list[float]) -> float | None:
    return statistics.median_low(values) if len(values) > 1 else None


class StepTimes:
    """Measured durations of steps without prompt tokens, and of steps with both prompt and decoded tokens.

    Durations are ignored after `_FORGOTTEN` further steps, since steps become longer as the sequences grow.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._plain, self._mixed = _Durations(), _Durations()  # steps without prompts, and with other tokens too
        self._drafting: deque[float] = deque([0.0], maxlen=_KEPT)
        self._stops: deque[float] = deque([0.0], maxlen=_KEPT)

    def learn(self, tokens: int, seconds: float, prompt_tokens: int = 0) -> None:
        """Record the duration of a step of `tokens` tokens, `prompt_tokens` of which belong to prompts.

        A step of prompt tokens only is left out: nobody waited for a token in it.
        """
        self._steps += 1
        if prompt_tokens < tokens:
            (self._mixed if prompt_tokens else self._plain).add(_size(tokens), self._steps, seconds)

    def learn_drafting(self, seconds: float) -> None:
        """Record the seconds that drafting took for a step."""
        self._drafting.append(seconds)

    def learn_stop(self, seconds: float) -> None:
        """Record the seconds that a device that runs ahead was idle, waiting for a draft."""
        self._stops.append(seconds)

    @property
    def stop(self) -> float:
        """Idle seconds of the device when drafting makes it wait for tokens: the median measured, 0 at first."""
        return statistics.median_low(self._stops)

    @property
    def drafting(self) -> float:
        """Seconds that drafting for a step takes: the median of recent steps."""
        return statistics.median_low(self._drafting)

    def knows(self, tokens: int) -> bool:
        """Whether steps of that many tokens, none of them a prompt's, have been measured recently."""
        return self._plain.median(_size(tokens), self._since) is not None

    def seconds(self, tokens: int) -> float:
        """The duration of a step of that many tokens without prompts; if unknown, that of the next smaller known size.

        0 if no smaller one is known either.
        """
        return self._plain.up_to(_size(tokens), self._since) or 0.0

    def prompt_tokens(self, decoded: int, most: int) -> int:
        """The number of prompt tokens to compute in a step that also decodes `decoded` tokens.

        Steps up to `SLOWER` times as long as one without prompt tokens are allowed, so that the time between two tokens
        stays even while long prompts arrive. Where no step is that fast, those hardly longer than the fastest are. Of
        the allowed sizes, the largest is taken whose prompt tokens a second come near the best rate.

        Args:
            decoded: Tokens of decoding sequences, at least one.
            most: Maximum number of tokens of a step.
        """
        if decoded == most:
            return 0
        sizes = range(_size(min(decoded + LEAST_TOKENS, most)), _size(most) + 1)
        # Of any age: where prompts never cease to arrive, there is no step without.
        plain = self._plain.up_to(_size(decoded))
        measured = {size: seconds for size in sizes if (seconds := self._mixed.median(size, self._since)) is not None}
        if plain is None or not measured:
            chosen = max(sizes[0], (decoded + FIRST_TOKENS).bit_length() - 1)  # up to `FIRST_TOKENS` of prompts
        else:
            estimates = {size: _estimate(size, decoded, plain, measured) for size in sizes}
            fastest = min(estimates.values())
            limit = SLOWER * plain if fastest <= SLOWER * plain else _ALIKE * fastest
            rates = {
                size: ((1 << size) - (1 << _size(decoded))) / max(seconds - plain, _LEAST_LONGER * plain)
                for size, seconds in estimates.items()
                if seconds <= limit
            }
            chosen = max(size for size, rate in rates.items() if rate >= _ALIKE_RATE * max(rates.values()))
        return min(1 << chosen, most) - decoded

    @property
    def _since(self) -> int:
        return self._steps - _FORGOTTEN + 1


def _estimate(size: int, decoded: int, plain: float, measured: Mapping[int, float]) -> float:
    """The estimated duration of a step of a size, on a line through two measured durations.

    These are the two nearest smaller sizes that were measured, where a step without prompt tokens (`plain`) counts as
    the smallest. If there is only one, the line goes through `plain` and the smallest measured size.
    """
    points = [(0, plain), *(((1 << other) - decoded, measured[other]) for other in sorted(measured))]
    smaller = [point for point in points if point[0] <= (1 << size) - decoded]
    (low, first), (high, second) = smaller[-2:] if len(smaller) > 1 else points[:2]
    return second + max(0.0, second - first) * ((1 << size) - decoded - high) / (high - low)


def _size(tokens: int) -> int:
    return (tokens - 1).bit_length()
