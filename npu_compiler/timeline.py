"""`Timeline`: events on named tracks, saved as a trace that Perfetto and Chrome's `about:tracing` open.

The file is JSON in the Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
Perfetto keeps integer nanoseconds and drops a slice that overlaps another one of its track without lying inside it. So
times are rounded to nanoseconds here, starts and ends alike, and overlaps are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from npu_compiler.errors import InputError
from npu_compiler.files import atomic_file

Args: TypeAlias = Mapping[str, Any]

_NO_ARGS: Args = MappingProxyType({})


@dataclass(frozen=True)
class Track:
    """A row of a trace: a thread of a process, where a process is any group of rows, such as a device."""

    process: str
    thread: str


@dataclass(frozen=True, slots=True)
class Slice:
    """An event with a duration. Times are in microseconds since the timeline's own zero.

    Attributes:
        args: JSON values by name, shown when the slice is selected.
    """

    track: Track
    name: str
    start: float
    duration: float
    args: Args

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Instant:
    """An event without a duration, at `at` microseconds."""

    track: Track
    name: str
    at: float
    args: Args


@dataclass(frozen=True, slots=True)
class CounterValue:
    """A value of a counter of a process, valid from `at` microseconds until the counter's next value."""

    process: str
    name: str
    at: float
    value: float
    unit: str


class Timeline:
    """Slices, instants and counters on tracks; a process and a track are shown in the order of their first mention.

    Times are in microseconds since a zero that all tracks share, and not before it. They may come in any order.

    Attributes:
        facts: JSON values by name about the whole trace, such as the device; kept in the file as `otherData`.
    """

    def __init__(self, facts: Args = _NO_ARGS) -> None:
        self.facts = dict(facts)
        self.slices: list[Slice] = []
        self.instants: list[Instant] = []
        self.counters: list[CounterValue] = []
        self._ids: dict[str | Track, int] = {}

    def track(self, process: str, thread: str) -> Track:
        """The track of that name, which is shown from now on, even while it has no events."""
        track = Track(process, thread)
        self._id(process)
        self._id(track)
        return track

    def slice(self, track: Track, name: str, start: float, duration: float, args: Args = _NO_ARGS) -> None:
        """Add a slice of `duration` microseconds; slices of a track lie inside each other or apart.

        Raises:
            ValueError: a time is negative or not finite.
        """
        if not (_is_time(start) and _is_time(duration)):
            raise ValueError(f"slice '{name}' cannot start at {start} and take {duration} microseconds")
        self.track(track.process, track.thread)
        self.slices.append(Slice(track, name, start, duration, args))

    def instant(self, track: Track, name: str, at: float, args: Args = _NO_ARGS) -> None:
        """Add an event without a duration, at `at` microseconds.

        Raises `ValueError` if the time is negative or not finite.
        """
        if not _is_time(at):
            raise ValueError(f"instant '{name}' cannot be at {at} microseconds")
        self.track(track.process, track.thread)
        self.instants.append(Instant(track, name, at, args))

    def counter(self, process: str, name: str, at: float, value: float, unit: str = "value") -> None:
        """Set a counter's value from `at` microseconds on; it is shown as "name unit".

        Raises `ValueError` if the time is negative, or the time or the value is not finite.
        """
        if not (_is_time(at) and math.isfinite(value)):
            raise ValueError(f"counter '{name}' cannot be {value} at {at} microseconds")
        self._id(process)
        self.counters.append(CounterValue(process, name, at, value, unit))

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, whole or not at all.

        Raises:
            InputError: the file cannot be written (no such folder, no permission, disk full).
            ValueError: two slices of a track overlap and neither contains the other, or an argument is no JSON value.
        """
        path, text = Path(path), "".join(self._pieces())
        try:
            with atomic_file(path) as file:
                file.write(text.encode("utf-8", "replace"))
        except OSError as error:
            raise InputError(f"cannot write '{path}': {error.strerror or error}") from error

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace's events in the Trace Event Format: names of tracks first, then all others by time.

        Raises:
            ValueError: two slices of a track overlap and neither contains the other.
        """
        for order, (named, number) in enumerate(self._ids.items()):
            is_track = isinstance(named, Track)
            process = self._ids[named.process] if isinstance(named, Track) else number
            kind, name = ("thread", named.thread) if isinstance(named, Track) else ("process", named)
            event = {"ph": "M", "pid": process, "tid": number if is_track else 0}
            yield {**event, "name": f"{kind}_name", "args": {"name": name}}
            yield {**event, "name": f"{kind}_sort_index", "args": {"sort_index": order}}
        timed = [self._slice_event(*placed) for placed in self._placed()]
        timed += map(self._instant_event, self.instants)
        timed += map(self._counter_event, self.counters)
        # Of slices that begin together the longest contains the others.
        yield from sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0)))

    def _slice_event(self, item: Slice, start: int, end: int) -> dict[str, Any]:
        return {**self._event("X", item), "ts": _microseconds(start), "dur": _microseconds(end - start)}

    def _instant_event(self, item: Instant) -> dict[str, Any]:
        return {**self._event("i", item), "ts": _microseconds(_nanoseconds(item.at)), "s": "t"}

    def _counter_event(self, item: CounterValue) -> dict[str, Any]:
        at = _microseconds(_nanoseconds(item.at))
        return {"ph": "C", "pid": self._ids[item.process], "name": item.name, "ts": at, "args": {item.unit: item.value}}

    def _event(self, kind: str, item: Slice | Instant) -> dict[str, Any]:
        track = item.track
        event = {"ph": kind, "pid": self._ids[track.process], "tid": self._ids[track], "name": item.name}
        return {**event, "args": item.args} if item.args else event

    def _id(self, named: str | Track) -> int:
        """The number of a process or a track, unique and from 1 on.

        A track never has its process's number, which a trace viewer would call the main thread.
        """
        return self._ids.setdefault(named, len(self._ids) + 1)

    def _placed(self) -> Iterator[tuple[Slice, int, int]]:
        """Each slice with its start and end in nanoseconds; an end beyond its enclosing slice by rounding is cut off.

        Raises:
            ValueError: two slices of a track overlap and neither contains the other.
        """
        under_way: dict[Track, list[tuple[Slice, int, int]]] = {}
        for item in sorted(self.slices, key=lambda item: (_nanoseconds(item.start), -_nanoseconds(item.end))):
            start, end = _nanoseconds(item.start), _nanoseconds(item.end)
            around = under_way.setdefault(item.track, [])
            while around and (around[-1][2] <= start or around[-1][2] == start + 1 < end):
                start = max(start, around.pop()[2])
            if around:
                outer, begins, ends = around[-1]
                if end > ends + 1:
                    raise ValueError(
                        f"track '{item.track.thread}' of '{item.track.process}': slice {_interval(item)} overlaps the "
                        f"end of {_interval(outer)}"
                    )
                start, end = max(start, begins), min(end, ends)
            around.append((item, start, max(start, end)))
            yield around[-1]

    def _pieces(self) -> Iterator[str]:
        yield f'{{"displayTimeUnit": "ns", "otherData": {_json(self.facts)}, "traceEvents": [\n'
        yield from _separated(map(_json, self.events()))
        yield "\n]}\n"


def _interval(item: Slice) -> str:
    return f"'{item.name}' ({item.start} to {item.end} us)"


def _separated(pieces: Iterable[str]) -> Iterator[str]:
    separator = ""
    for piece in pieces:
        yield separator + piece
        separator = ",\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _microseconds(nanoseconds: int) -> float:
    """Microseconds from which Perfetto, which multiplies by 1000 and truncates, gets back exactly these nanoseconds."""
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)
