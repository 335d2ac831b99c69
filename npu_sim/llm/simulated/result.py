"""`ServingResult`: times, throughput and energy of serving a trace of requests."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_compiler.files import write_atomically
from npu_sim.llm.simulated.requests import TimedRequest

QUEUE_COLUMNS = ("seconds", "waiting", "running", "blocks_used")


@dataclass(slots=True)
class ServedRequest:
    """A request of a trace and how it was served.

    Attributes:
        first, last: Times of its first and of its last token.
        tokens: Number of new tokens that it got.
        refused: Whether it was refused, since the server was full when it arrived.
    """

    request: TimedRequest
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    refused: bool = False


@dataclass(frozen=True)
class Quantiles:
    """The median, the 90th and 99th percentiles and the maximum of observed times, in seconds."""

    median: float
    p90: float
    p99: float
    most: float

    @staticmethod
    def of(values: NDArray[np.float64]) -> Quantiles | None:
        """The quantiles of observed values; None if there are none."""
        return Quantiles(*np.quantile(values, [0.5, 0.9, 0.99, 1.0]).tolist()) if len(values) else None


@dataclass(frozen=True)
class ServingResult:
    """The result of serving a trace.

    Attributes:
        requests: All requests, in order of arrival.
        seconds: Time from the first arrival to the last token.
        busy_seconds: Time during which the chip ran steps.
        joules: Energy, with that of the static power over all of `seconds`; 0 for a chip without an energy table.
        gaps: Times between consecutive tokens of a request, of all requests.
        queue: (time, waiting requests, running requests, KV blocks in use) at the start of each step before which one
            of the numbers of requests changed, and whenever the last request has left.
        steps, rows: Number of steps, and of the tokens in them.
        preemptions: Number of times that a request lost its blocks to an earlier one.
    """

    requests: Sequence[ServedRequest]
    seconds: float
    busy_seconds: float
    joules: float
    gaps: NDArray[np.float64]
    queue: Sequence[tuple[float, int, int, int]]
    steps: int
    rows: int
    preemptions: int

    @property
    def finished(self) -> list[ServedRequest]:
        """The requests that were not refused."""
        return [each for each in self.requests if not each.refused]

    @property
    def new_tokens(self) -> int:
        """Total number of tokens of all replies."""
        return sum(each.tokens for each in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """New tokens for each second from the first arrival to the last token."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def joules_per_token(self) -> float | None:
        """Energy for each new token; None if the chip's description has no energy table."""
        return self.joules / self.new_tokens if self.joules and self.new_tokens else None

    @property
    def times(self) -> dict[str, Quantiles | None]:
        """Quantiles of the time to the first token, between tokens and of whole requests, by name.

        A value is None if there are no such times.
        """
        served = self.finished
        arrivals = np.array([each.request.arrival for each in served])
        first, last = (np.array([getattr(each, name) for each in served]) for name in ("first", "last"))
        return {
            "time_to_first_token": Quantiles.of(first - arrivals),
            "time_between_tokens": Quantiles.of(self.gaps),
            "request": Quantiles.of(last - arrivals),
        }

    @property
    def mean_waiting(self) -> float:
        """Number of waiting requests, averaged over time."""
        if self.seconds <= 0 or len(self.queue) < 2:
            return 0.0
        times, waiting = (np.array([row[place] for row in self.queue], float) for place in (0, 1))
        return float((np.diff(times) * waiting[:-1]).sum() / self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON data, without the queue over time."""
        return {
            "requests": len(self.requests),
            "finished": len(self.finished),
            "refused": len(self.requests) - len(self.finished),
            "cut_short": sum(each.tokens < each.request.new_tokens for each in self.finished),
            "prompt_tokens": sum(each.request.prompt_tokens for each in self.finished),
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "busy_seconds": self.busy_seconds,
            "tokens_per_second": self.tokens_per_second,
            **{f"{name}_seconds": None if times is None else vars(times).copy() for name, times in self.times.items()},
            "joules": self.joules or None,
            "joules_per_token": self.joules_per_token,
            "steps": self.steps,
            "rows_per_step": self.rows / self.steps if self.steps else 0.0,
            "mean_waiting": self.mean_waiting,
            "most_waiting": max((row[1] for row in self.queue), default=0),
            "preemptions": self.preemptions,
        }

    def write_queue(self, path: Path) -> None:
        """Write the queue over time as a CSV file. Raises `InputError` if the file cannot be written."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(QUEUE_COLUMNS)
        writer.writerows((f"{seconds:.9g}", *counts) for seconds, *counts in self.queue)
        try:
            write_atomically(path, text.getvalue().encode())
        except OSError as error:
            raise InputError(f"cannot write '{path}': {error.strerror or error}") from error
