"""`Pace`: how many prompt tokens a step may compute beside the tokens that others wait for."""

import statistics
from collections import deque

FIRST_TOKENS = 128  # before anything is known
LEAST_TOKENS = 16
SLOWER = 1.8  # a step with prompt tokens may take this many times as long as one without
_KEPT = 9  # steps; of them the median counts, since a step that compiles a program takes far longer


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
