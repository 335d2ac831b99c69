"""`DraftControl`: how long a draft is worth its time."""

MAX_DRAFT = 7  # tokens: a step of eight rows takes about as long as one of one row
_FIRST_DRAFT = 2
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 512
_POOR = 0.5  # accepted tokens per draft, below which drafting costs more than it gains


class DraftControl:
    """How many tokens of a sequence to draft: more while drafts are accepted, none for a while where they fail.

    Args:
        longest: Maximum number of tokens of a draft.
    """

    def __init__(self, longest: int = MAX_DRAFT) -> None:
        self._longest = longest
        self._length = min(_FIRST_DRAFT, longest)
        self._mean = 1.0
        self._pause = _FIRST_PAUSE
        self._resume = 0

    def length(self, tokens: int) -> int:
        """How many tokens to draft for a sequence of that many tokens."""
        return self._length if tokens >= self._resume else 0

    def learn(self, drafted: int, accepted: int, tokens: int) -> None:
        """Take the outcome of a draft; `tokens` is the sequence's length after it."""
        self._mean = 0.5 * self._mean + 0.5 * accepted
        if accepted == drafted:
            self._length = min(2 * self._length, self._longest)
            self._pause = _FIRST_PAUSE
        elif self._mean < _POOR:
            self._length = min(_FIRST_DRAFT, self._longest)
            self._resume = tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._mean = 1.0
        else:
            self._length = max(_FIRST_DRAFT, min(accepted + 1, self._longest))
