"""`DraftBudget`: how many tokens of a sequence to draft; `draft_lengths`: how many of them a step should verify.

Each drafted token is one more row of the step that verifies it, which makes the step longer, on some devices by much.
So a step verifies the number of drafted tokens that promises most tokens a second, by the measured times of steps with
that many rows and the acceptance rate of each sequence.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

MAX_DRAFT = 7  # tokens: with the token before them eight rows, which some devices compute in the time of one
LEAST_GAIN = 1.05  # times as many tokens a second, below which drafts are not worth it
_FIRST_DRAFT = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512  # tokens
_LONGEST_BACK_OFF = 32  # tokens
_FIRST_BALANCE, _LEAST_BALANCE, _MOST_BALANCE = 0.6, -2.0, 8.0  # tokens; a text soon recovers from one slow step
_ALLOWANCE = 0.0075  # tokens of budget for each token that the sequence grows by
_LONG_MATCH_RATE = 0.95  # acceptance rate of drafts after a long match
_SHORTEST_MATCH, _LONGEST_MATCH = 8, 64  # tokens
_FIRST_ACCEPTED, _FIRST_REJECTED = 1.6, 0.4  # as if two tokens had been drafted: four in five are right at first


class DraftBudget:
    """The draft length of a sequence: longer while drafts are accepted, 0 for a while after drafts that fail.

    The time of a sequence's drafts is paid from a budget, counted in tokens that could be computed in that time. It
    starts with a little, and grows a little with each token of the sequence and by one with each accepted token. A
    sequence without budget drafts only after a long match, that is, when many of its last tokens also occur together
    earlier in its text. So even if all drafts fail, a long text takes hardly longer than without drafts.

    Args:
        start: Number of tokens of the sequence's prompt.
    """

    def __init__(self, start: int = 0) -> None:
        self._balance, self._updated = _FIRST_BALANCE, start  # at this length of the sequence
        self._length = _FIRST_DRAFT
        self._accepted, self._rejected = _FIRST_ACCEPTED, _FIRST_REJECTED
        self._pause, self._back_off = _FIRST_PAUSE, 1
        self._match = _SHORTEST_MATCH
        self._resume = self._resume_matching = 0

    def acceptance_rate(self, long_match: bool = False) -> float:
        """The estimated probability that a drafted token is accepted if those before it are.

        Args:
            long_match: Whether the draft follows a long match (see the class).
        """
        return max(self._accepted / (self._accepted + self._rejected), _LONG_MATCH_RATE * long_match)

    def length(self, tokens: int, long_match: bool = False) -> int:
        """Number of tokens to draft for a sequence that now has `tokens` tokens; 0: draft none.

        Args:
            long_match: Whether the draft would follow a long match (see the class).
        """
        if long_match:
            return MAX_DRAFT
        return self._length if tokens >= self._resume and self._balance_at(tokens) > 0 else 0

    def long_match(self, tokens: int) -> int | None:
        """Number of last tokens that must also occur earlier in the text to make a long match.

        None while even drafts after a long match are not worth their time.

        The number doubles after each draft of which no token was accepted, and when no draft was found.
        """
        return self._match if tokens >= self._resume_matching else None

    def spend(self, tokens: int, cost: float) -> None:
        """Take the cost of drafting and verifying, counted in tokens, from the budget.

        `tokens` is the present length of the sequence.
        """
        self._balance, self._updated = max(self._balance_at(tokens) - cost, _LEAST_BALANCE), tokens

    def _balance_at(self, tokens: int) -> float:
        return min(_MOST_BALANCE, self._balance + _ALLOWANCE * (tokens - self._updated))

    def record(self, drafted: int, accepted: int) -> None:
        """Adapt draft length and acceptance rate to the outcome of a draft.

        The first `accepted` of its `drafted` tokens proved right.
        """
        whole = accepted == drafted
        self._balance += accepted
        if accepted:
            self._back_off = 1
        else:
            self._match = min(2 * self._match, _LONGEST_MATCH)
        self._accepted = 0.5 * self._accepted + accepted
        self._rejected = 0.5 * self._rejected + (not whole)
        if whole:
            self._length = min(2 * self._length, MAX_DRAFT)
            self._pause = _FIRST_PAUSE
            self._match = max(_SHORTEST_MATCH, self._match // 2)
        else:
            self._length = min(max(_FIRST_DRAFT, accepted + 1), MAX_DRAFT)

    def back_off(self, tokens: int) -> None:
        """Draft nothing for some tokens, since no draft was found; each time for more tokens.

        `tokens` is the present length of the sequence.
        """
        self._resume = tokens + self._back_off
        self._back_off = min(2 * self._back_off, _LONGEST_BACK_OFF)
        self._match = min(2 * self._match, _LONGEST_MATCH)

    def pause(self, tokens: int, long_match: bool = False) -> None:
        """Draft nothing for some tokens, since a draft was not worth its time; each time for more tokens.

        Args:
            tokens: The present length of the sequence.
            long_match: Whether the draft followed a long match (see the class); then no draft follows one either.
        """
        self._resume = tokens + self._pause
        if long_match:
            self._resume_matching = self._resume
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._length = _FIRST_DRAFT
        self._accepted, self._rejected = _FIRST_ACCEPTED, _FIRST_REJECTED


def draft_lengths(
    rows: int, drafts: Sequence[tuple[float, int]], seconds: Callable[[int], float], overhead: float
) -> list[int]:
    """The number of tokens of each draft that a step should verify to get the most tokens a second.

    Args:
        rows: Number of tokens of the step without drafts, each of which yields a new token.
        drafts: The acceptance rate and the number of tokens of each draft.
        seconds: Function from a number of tokens to the time of such a step.
        overhead: Seconds that drafting takes, including the time that the device idles for it.
    """
    chances = [(rate**place, index) for index, (rate, length) in enumerate(drafts) for place in range(1, length + 1)]
    chances.sort(key=lambda chance: -chance[0])  # stable, so a draft's tokens stay in order
    expected = list(accumulate((chance for chance, _ in chances), initial=float(rows)))
    best, count = LEAST_GAIN * rows / seconds(rows), 0
    for more in range(1, len(chances) + 1):
        if more == len(chances) or (rows + more).bit_count() == 1:  # steps are as long as one of the next power of two
            rate = expected[more] / (seconds(rows + more) + overhead)
            if rate > best:
                best, count = rate, more
    kept = [index for _, index in chances[:count]]
    return [kept.count(index) for index in range(len(drafts))]
