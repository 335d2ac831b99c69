"""Limits of the HTTP server: sizes, times, and numbers of requests at once and per minute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from npu_sim.serving.http.errors import APIError

_ROUNDING = 1e-9  # of a bucket's level, which is the sum of what many waits have added


@dataclass(frozen=True)
class Limits:
    """Limits on sizes, times and numbers of requests.

    Attributes:
        body_bytes: Maximum size of a request's body.
        header_bytes: Maximum size of a request's head (request line and headers).
        connections: Maximum number of open connections.
        requests: Maximum number of requests at once.
        requests_per_key: Maximum number of requests at once with one API key. None: as many as `requests`.
        requests_per_minute: Maximum number of requests a minute with one API key. None: any number.
        prompt_tokens: Maximum number of tokens of a prompt. None: as many as the context holds.
        new_tokens: Maximum number of new tokens of a choice. None: as many as the context holds.
        header_seconds: Time for a request's head to arrive, and for the next request on an idle connection.
        body_seconds: Time for a request's body to arrive.
        write_seconds: Time for a client to take output that it asked for.
        request_seconds: Time from a request's arrival to its end. None: any time.
    """

    body_bytes: int = 4 << 20
    header_bytes: int = 32 << 10
    connections: int = 4096
    requests: int = 256
    requests_per_key: int | None = None
    requests_per_minute: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    request_seconds: float | None = None


class Admission:
    """Counts the requests that are being answered, and refuses those beyond the limits. Used by one thread only.

    Rates are limited by token buckets (https://en.wikipedia.org/wiki/Token_bucket) that hold a minute's requests.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._active: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}

    @property
    def active(self) -> int:
        """Number of requests that are being answered."""
        return self._active.total()

    def enter(self, key: str) -> None:
        """Count a request of the API key with that name; `leave` must be called at its end.

        Raises:
            APIError: 429, with the seconds after which to try again: a limit is reached.
        """
        most, per_key = self._limits.requests, self._limits.requests_per_key
        if self.active >= most:
            raise _too_many(f"the server is handling {most} requests, its maximum; try again later", 1)
        if per_key is not None and self._active[key] >= per_key:
            raise _too_many(f"{per_key} requests with this key are under way, its maximum; wait for one to end", 1)
        self._take(key)
        self._active[key] += 1

    def leave(self, key: str) -> None:
        self._active[key] -= 1
        if not self._active[key]:
            del self._active[key]

    def _take(self, key: str) -> None:
        rate = self._limits.requests_per_minute
        if rate is None:
            return
        now = self._clock()
        level, since = self._buckets.get(key, (float(rate), now))
        level = min(float(rate), level + (now - since) * rate / 60)
        if level < 1 - _ROUNDING:
            self._buckets[key] = (level, now)
            wait = math.ceil((1 - level) * 60 / rate)
            raise _too_many(f"this key's limit is {rate} requests a minute; try again in {wait} s", wait)
        self._buckets[key] = (max(0.0, level - 1), now)


def _too_many(message: str, seconds: int) -> APIError:
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
