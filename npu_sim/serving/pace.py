"""How long steps take. `Pace`: how many prompt tokens a step may compute beside the tokens that others wait for."""

import statistics
from collections import deque

FIRST_TOKENS = 128  # before anything is known
LEAST_TOKENS = 16
SLOWER = 1.8  # a step with prompt tokens may take this many times as long as one without
_KEPT = 9  # steps; of them the median counts, since a step that compiles a program takes far longer
_FORGOTTEN = 256  # steps after which a time no longer counts


class Pace:
    """Chooses pieces of prompts so that a step with one takes no more than `SLOWER` times as long as a step without.

    So the time between two tokens stays even while long prompts arrive, on slow and on fast devices.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_KEPT)
        self._per_token: deque[float] = deque(maxlen=_KEPT)

    def tokens(self) -> int:
        """Prompt tokens of a step in which others wait for their tokens."""
        if not self._plain or not self._per_token:
            return FIRST_TOKENS
        allowed = (SLOWER - 1) * statistics.median(self._plain)
        return max(LEAST_TOKENS, int(allowed / max(statistics.median(self._per_token), 1e-9)))

    def learn(self, decoded: int, prompt_tokens: int, seconds: float) -> None:
        """Take the duration of a step that computed the tokens of `decoded` sequences and some prompt tokens."""
        if not prompt_tokens:
            self._plain.append(seconds)
        elif self._plain and decoded:
            self._per_token.append(max(0.0, seconds - statistics.median(self._plain)) / prompt_tokens)


class StepTimes:
    """How long steps without prompts take, by the number of their tokens up to the next power of two.

    Times that are older than `_FORGOTTEN` steps are forgotten, since they grow with the sequences.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._found: dict[int, deque[tuple[int, float]]] = {}
        self._drafting: deque[float] = deque([0.0], maxlen=_KEPT)

    def learn(self, tokens: int, seconds: float) -> None:
        """Take the duration of a step of that many tokens."""
        self._steps += 1
        self._found.setdefault(_size(tokens), deque(maxlen=_KEPT)).append((self._steps, seconds))

    def learn_drafting(self, seconds: float) -> None:
        """Take how long it took to draft for a step."""
        self._drafting.append(seconds)

    @property
    def drafting(self) -> float:
        """How long it takes to draft for a step."""
        return statistics.median_low(self._drafting)

    def knows(self, tokens: int) -> bool:
        """Whether steps of that many tokens have been measured lately. Once is not enough: it may have compiled."""
        return len(self._recent(_size(tokens))) > 1

    def seconds(self, tokens: int) -> float:
        """The time of a step of that many tokens; where that is not known, what is known of the next shorter ones."""
        for size in range(_size(tokens), -1, -1):
            if len(recent := self._recent(size)) > 1:
                return statistics.median_low(recent)
        return 0.0

    def _recent(self, size: int) -> list[float]:
        return [seconds for step, seconds in self._found.get(size, ()) if step > self._steps - _FORGOTTEN]


def _size(tokens: int) -> int:
    return (tokens - 1).bit_length()
