"""`StepTimes`: durations of steps, and the number of prompt tokens that fit beside tokens that others wait for.

A model pads a step to the next power of two of its tokens, so a step is as long as one of that many.
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
    """Durations of steps by size: the logarithm of the power of two of tokens that they are padded to."""

    def __init__(self) -> None:
        self._times: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, float | None] = {}  # of all steps of a size that are kept

    def add(self, size: int, step: int, seconds: float) -> None:
        times = self._times.setdefault(size, deque(maxlen=_KEPT))
        times.append((step, seconds))
        self._medians[size] = _median([seconds for _, seconds in times])

    def median(self, size: int, since: int = 0) -> float | None:
        """The median of steps with that number and later ones. None if there is just one, which may have compiled."""
        times = self._times.get(size)
        if not times or times[0][0] >= since:
            return self._medians.get(size)
        return _median([seconds for step, seconds in times if step >= since])

    def up_to(self, size: int, since: int = 0) -> float | None:
        """The median of the largest steps up to a size for which there is one."""
        medians = (self.median(smaller, since) for smaller in range(size, -1, -1))
        return next((seconds for seconds in medians if seconds is not None), None)


def _median(values: list[float]) -> float | None:
    return statistics.median_low(values) if len(values) > 1 else None


class StepTimes:
    """Durations of steps, without prompts and with them.

    Times that are older than `_FORGOTTEN` steps are forgotten, since they grow with the sequences.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._plain, self._mixed = _Durations(), _Durations()  # steps without prompts, and with other tokens too
        self._drafting: deque[float] = deque([0.0], maxlen=_KEPT)
        self._stops: deque[float] = deque([0.0], maxlen=_KEPT)

    def learn(self, tokens: int, seconds: float, prompt_tokens: int = 0) -> None:
        """Take the duration of a step of that many tokens, of which some may be of prompts.

        One of nothing but prompts is left out: nobody waited for a token in it.
        """
        self._steps += 1
        if prompt_tokens < tokens:
            (self._mixed if prompt_tokens else self._plain).add(_size(tokens), self._steps, seconds)

    def learn_drafting(self, seconds: float) -> None:
        """Take how long it took to draft for a step."""
        self._drafting.append(seconds)

    def learn_stop(self, seconds: float) -> None:
        """Take how long a device that runs ahead had nothing to do, since a draft needed the tokens before it."""
        self._stops.append(seconds)

    @property
    def stop(self) -> float:
        """Idle seconds of a device that runs ahead, when it must stop for the tokens that a draft needs; else 0."""
        return statistics.median_low(self._stops)

    @property
    def drafting(self) -> float:
        """Seconds that drafting for a step takes."""
        return statistics.median_low(self._drafting)

    def knows(self, tokens: int) -> bool:
        """Whether steps of that many tokens, none of a prompt, have been measured lately."""
        return self._plain.median(_size(tokens), self._since) is not None

    def seconds(self, tokens: int) -> float:
        """The time of a step without prompts; where that is not known, what is known of the next shorter ones."""
        return self._plain.up_to(_size(tokens), self._since) or 0.0

    def prompt_tokens(self, decoded: int, most: int) -> int:
        """The number of prompt tokens to compute in a step besides those that others wait for.

        They fill a step that takes no more than `SLOWER` times as long as one without: so the time between two tokens
        stays even while long prompts arrive, on slow and on fast devices. Where no step is that fast, they fill one
        that takes hardly longer than the fastest. Of such steps it is the largest of those that are longer by about the
        least for each token that they have more.

        Args:
            decoded: Tokens that others wait for, at least one.
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
    """The time of a step of a size, on a line through two measured times.

    These are the times of the two nearest smaller sizes that were measured, where a step without prompts counts as the
    smallest; if there is only one, those of a step without prompts and of the smallest measured size.
    """
    points = [(0, plain), *(((1 << other) - decoded, measured[other]) for other in sorted(measured))]
    smaller = [point for point in points if point[0] <= (1 << size) - decoded]
    (low, first), (high, second) = smaller[-2:] if len(smaller) > 1 else points[:2]
    return second + max(0.0, second - first) * ((1 << size) - decoded - high) / (high - low)


def _size(tokens: int) -> int:
    return (tokens - 1).bit_length()
