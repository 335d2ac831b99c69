"""Requests with arrival times, for simulated serving: recorded ones from a CSV file, or random ones."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from npu_compiler.errors import InputError

COLUMNS = ("arrival_seconds", "prompt_tokens", "new_tokens")
MOST_REQUESTS = 1_000_000
_MOST_SECONDS, _MOST_TOKENS = 1e9, 2**31 - 1


@dataclass(frozen=True)
class TimedRequest:
    """A request of a trace: when it arrives, and the lengths of prompt and reply.

    Attributes:
        arrival: Seconds from the start of the trace.
        prompt_tokens, new_tokens: Number of tokens of the prompt and of the reply.
        origin: Where the request comes from, such as a line of a file, for messages.
    """

    arrival: float
    prompt_tokens: int
    new_tokens: int
    origin: str = "a request"


def read_requests(path: Path) -> list[TimedRequest]:
    """Read a trace from a CSV file: a line for each request, with the columns `COLUMNS`.

    The first line may hold the names of the columns.

    Returns:
        The requests in order of arrival.

    Raises:
        InputError: the file cannot be read, or a line of it is malformed; the message names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = list(_parsed(path, csv.reader(file, strict=True)))
    except OSError as error:
        raise InputError(f"cannot read the trace '{path}': {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InputError(f"the trace '{path}' is not UTF-8 text") from None
    except csv.Error as error:
        raise InputError(f"the trace '{path}' is no CSV file: {error}") from None
    if not requests:
        raise InputError(f"the trace '{path}' has no requests; each is a line of {', '.join(COLUMNS)}")
    return sorted(requests, key=lambda request: request.arrival)


def _parsed(path: Path, lines: Iterator[list[str]]) -> Iterator[TimedRequest]:
    reader = iter(lines)
    first = True
    for number, cells in enumerate(reader, 1):
        cells = [cell.strip() for cell in cells]
        if not any(cells) or first and tuple(cells) == COLUMNS:
            first = first and not any(cells)
            continue
        first = False
        origin = f"line {number} of '{path.name}'"
        if number > MOST_REQUESTS:
            raise InputError(f"{origin}: a trace has at most {MOST_REQUESTS} lines")
        if len(cells) != len(COLUMNS):
            raise InputError(f"{origin} has {len(cells)} columns; a request is {', '.join(COLUMNS)}")
        arrival = _number(cells[0])
        if arrival is None or not 0 <= arrival <= _MOST_SECONDS:
            raise InputError(f"{origin}: '{cells[0]:.40}' is no time of arrival, a number of seconds from 0 on")
        prompt, new = (_count(cell) for cell in cells[1:])
        for name, cell, count in zip(COLUMNS[1:], cells[1:], (prompt, new), strict=True):
            if count is None:
                raise InputError(f"{origin}: '{cell:.40}' is no number of {name}, a whole number from 1 on")
        assert prompt is not None and new is not None
        yield TimedRequest(arrival, prompt, new, origin)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= _MOST_TOKENS else None


def parse_lengths(text: str) -> tuple[int, int]:
    """The shortest and the longest length in a text like "512" or "64..1024".

    Raises `InputError` for any other text.
    """
    low, dots, high = text.partition("..")
    first, last = _count(low), _count(high if dots else low)
    if first is None or last is None or first > last:
        raise InputError(f"'{text:.40}' is neither a number of tokens nor a range of them, such as 64..1024")
    return first, last


def poisson_requests(
    count: int, rate: float, prompt_tokens: tuple[int, int], new_tokens: tuple[int, int], seed: int
) -> list[TimedRequest]:
    """Random requests: a Poisson process in time, lengths uniform from a shortest to a longest one.

    Args:
        rate: Mean number of requests a second.

    Raises:
        InputError: the count is below 1, or the rate is not a positive number.
    """
    if not 1 <= count <= MOST_REQUESTS:
        raise InputError(f"a trace has 1 to {MOST_REQUESTS} requests, not {count}")
    if not (math.isfinite(rate) and rate > 0 and count / rate <= _MOST_SECONDS):
        raise InputError(f"requests come at a rate above 0 a second, not {rate}")
    generator = np.random.default_rng(seed)
    arrivals = generator.exponential(1 / rate, count).cumsum()
    prompts, news = (generator.integers(low, high + 1, count) for low, high in (prompt_tokens, new_tokens))
    return [
        TimedRequest(float(arrival), int(prompt), int(new), f"random request {number}")
        for number, (arrival, prompt, new) in enumerate(zip(arrivals, prompts, news, strict=True), 1)
    ]
