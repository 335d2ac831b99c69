"""How long drafts are worth their time: `DraftControl` for a sequence, `worthwhile` for the drafts of a step.

A row more makes a step longer, on some devices by much. So a step drafts what brings most tokens a second, by how long
steps of that many rows have taken (`StepTimes`) and how often each sequence's drafts were right.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

MAX_DRAFT = 7  # tokens: with the token before them eight rows, which some devices compute in the time of one
LEAST_GAIN = 1.05  # times as many tokens a second, below which drafts are not worth it
_FIRST_DRAFT = 4
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 512
_LONGEST_WAIT = 32  # tokens
_FIRST_CREDIT, _LEAST_CREDIT, _MOST_CREDIT = 0.6, -2.0, 8.0  # tokens; one slow step is not held against a text for long
_ALLOWANCE = 0.0075  # tokens of credit for each that the sequence has more
_SURE = 0.95  # the probability that a token is right of a draft for which there is evidence
_FIRST_EVIDENCE, _MOST_EVIDENCE = 8, 64  # tokens
_FIRST_RIGHT, _FIRST_WRONG = 1.6, 0.4  # as if two tokens had been drafted: four in five are right until more is known


class DraftControl:
    """How many tokens of a sequence to draft: more while drafts are accepted, none for a while where they fail.

    A sequence has credit for the time that its drafts take, counted in tokens that could be computed in it: a little at
    first, a little for each of its tokens, and one for each that was drafted and right. Without credit it drafts
    nothing but where there is evidence that a draft is right. So however drafts fail, a long text takes hardly longer
    than without.

    Args:
        start: Number of tokens of the sequence at its beginning.
    """

    def __init__(self, start: int = 0) -> None:
        self._credit, self._counted = _FIRST_CREDIT, start  # when it had so many tokens
        self._length = _FIRST_DRAFT
        self._right, self._wrong = _FIRST_RIGHT, _FIRST_WRONG
        self._pause = _FIRST_PAUSE
        self._wait = 1
        self._resume = 0
        self._evidence = _FIRST_EVIDENCE
        self._resume_sure = 0

    def probability(self, sure: bool = False) -> float:
        """How probable it is that a drafted token is right if those before it are.

        Args:
            sure: There is evidence that the draft is right.
        """
        return max(self._right / (self._right + self._wrong), _SURE * sure)

    def length(self, tokens: int, sure: bool = False) -> int:
        """How many tokens to draft for a sequence of that many tokens."""
        if sure:
            return MAX_DRAFT
        return self._length if tokens >= self._resume and self._credit_at(tokens) > 0 else 0

    def evidence(self, tokens: int) -> int | None:
        """How many tokens before a place in the text must be the same as the last ones for a draft out of it that lack
        of credit does not prevent: twice as many after each that was not right at all or not found. None while even
        such drafts are not worth it.
        """
        return self._evidence if tokens >= self._resume_sure else None

    def spend(self, tokens: int, cost: float) -> None:
        """Take the time of looking for a draft and of computing it, in tokens, at this length of the sequence."""
        self._credit, self._counted = max(self._credit_at(tokens) - cost, _LEAST_CREDIT), tokens

    def _credit_at(self, tokens: int) -> float:
        return min(_MOST_CREDIT, self._credit + _ALLOWANCE * (tokens - self._counted))

    def learn(self, drafted: int, accepted: int) -> None:
        """Take the outcome of a draft."""
        all_right = accepted == drafted
        self._credit += accepted
        if accepted:
            self._wait = 1
        else:
            self._ask_for_more()
        self._right = 0.5 * self._right + accepted
        self._wrong = 0.5 * self._wrong + (not all_right)
        if all_right:
            self._length = min(2 * self._length, MAX_DRAFT)
            self._pause = _FIRST_PAUSE
            self._evidence = max(_FIRST_EVIDENCE, self._evidence // 2)
        else:
            self._length = min(max(_FIRST_DRAFT, accepted + 1), MAX_DRAFT)

    def _ask_for_more(self) -> None:
        self._evidence = min(2 * self._evidence, _MOST_EVIDENCE)

    def wait(self, tokens: int) -> None:
        """Ask for no draft for some tokens, each time for more: at this length of the sequence, there was none."""
        self._resume = tokens + self._wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._ask_for_more()

    def pause(self, tokens: int, sure: bool = False) -> None:
        """Draft nothing for a while, each time longer: at this length of the sequence, a draft was not worth it.

        Args:
            sure: There was evidence that it was right.
        """
        self._resume = tokens + self._pause
        if sure:
            self._resume_sure = self._resume
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._length = _FIRST_DRAFT
        self._right, self._wrong = _FIRST_RIGHT, _FIRST_WRONG


def worthwhile(
    rows: int, drafts: Sequence[tuple[float, int]], seconds: Callable[[int], float], drafting: float
) -> list[int]:
    """How many tokens of each draft a step should compute, for the most tokens a second.

    Args:
        rows: Tokens of the step without drafts, each of which brings one.
        drafts: Of each draft the probability that a token is right if those before it are, and the number of tokens.
        seconds: The time of a step of a number of tokens.
        drafting: Seconds that drafting takes, stops for it included.
    """
    chances = [
        (probability**place, index)
        for index, (probability, length) in enumerate(drafts)
        for place in range(1, length + 1)
    ]
    chances.sort(key=lambda chance: -chance[0])  # stable, so a draft's tokens stay in order
    expected = list(accumulate((chance for chance, _ in chances), initial=float(rows)))
    best, count = LEAST_GAIN * rows / seconds(rows), 0
    for more in range(1, len(chances) + 1):
        if more == len(chances) or (rows + more).bit_count() == 1:  # steps are as long as one of the next power of two
            rate = expected[more] / (seconds(rows + more) + drafting)
            if rate > best:
                best, count = rate, more
    lengths = [0] * len(drafts)
    for _, index in chances[:count]:
        lengths[index] += 1
    return lengths
