"""Turning a request's tokens into text: whole characters only, and nothing that may become part of a stop string."""

from collections.abc import Sequence
from typing import Any

from npu_sim.llm import StreamDecoder


class TextOutput:
    """Turns tokens into text. A token is returned together with the beginning of its text.

    Args:
        tokenizer: The model's tokenizer. None: tokens have no text.
        stop: Strings that end the text and are not returned.

    Attributes:
        stopped: Whether a stop string has occurred; later tokens are ignored.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self._tokens: list[tuple[int, int]] = []  # (token, where its text begins, counted from the start of _held)
        self.stopped = False

    def push(self, token: int) -> tuple[tuple[int, ...], str]:
        """Take a token; return the tokens and the text that are now certain."""
        if self._decoder is None:  # and so no stop string
            return (token,), ""
        if self.stopped:
            return (), ""
        self._tokens.append((token, len(self._held)))
        self._held += self._decoder.push(token)
        return self._returned(self._safe_length())

    def finish(self) -> tuple[tuple[int, ...], str]:
        """Return the remaining tokens and text at the end; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return (), ""
        if self._decoder is not None:
            self._held += self._decoder.flush()
        end = self._safe_length()
        return self._returned(end if self.stopped else len(self._held))

    def _safe_length(self) -> int:
        """Length of the held text that can be returned: up to a stop string, or to what may become one."""
        places = [place for place in map(self._held.find, self._stop) if place >= 0]
        if places:
            self.stopped = True
            return min(places)
        return len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)

    def _returned(self, length: int) -> tuple[tuple[int, ...], str]:
        text, self._held = self._held[:length], self._held[length:]
        # A token without text of its own goes with the text before it, unless that is part of a stop string.
        ready = [token for token, start in self._tokens if start < length or (not self._held and not self.stopped)]
        self._tokens = [(token, start - length) for token, start in self._tokens[len(ready) :]]
        return tuple(ready), text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
