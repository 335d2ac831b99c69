"""Timelines: what their files hold, which timelines are refused, and that a file is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto_trace import PerfettoTrace

from npu_compiler.errors import InputError
from npu_compiler.timeline import Timeline, Track


def two_tracks() -> Timeline:
    timeline = Timeline({"device": "cpu"})
    host, kernels = timeline.track("host", "runs"), timeline.track("device", "kernels")
    timeline.slice(kernels, "linear", 1.5, 2.25, {"bytes": 12, "shapes": ["float32[2, 3]"]})
    timeline.slice(host, "run", 0.5, 4)
    timeline.instant(host, "first token", 4)
    timeline.counter("device", "arena", 1.5, 256, "bytes")
    return timeline


def saved(timeline: Timeline, path: Path) -> dict[str, Any]:
    timeline.save(path)
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return loaded


def test_a_file_holds_names_first_and_then_what_happened_in_order(tmp_path: Path) -> None:
    content = saved(two_tracks(), tmp_path / "trace.json")
    assert content["otherData"] == {"device": "cpu"}
    events = content["traceEvents"]
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"].endswith("_name")]
    assert names == [(1, 0, "host"), (1, 2, "runs"), (3, 0, "device"), (3, 4, "kernels")]
    assert [event for event in events if event["ph"] != "M"] == [
        {"ph": "X", "pid": 1, "tid": 2, "name": "run", "ts": 0.5, "dur": 4.0},
        {
            "ph": "X",
            "pid": 3,
            "tid": 4,
            "name": "linear",
            "args": {"bytes": 12, "shapes": ["float32[2, 3]"]},
            "ts": 1.5,
            "dur": 2.25,
        },
        {"ph": "C", "pid": 3, "name": "arena", "ts": 1.5, "args": {"bytes": 256}},
        {"ph": "i", "pid": 1, "tid": 2, "name": "first token", "ts": 4.0, "s": "t"},
    ]


def test_perfetto_reads_all_of_it_without_complaint(tmp_path: Path) -> None:
    two_tracks().save(tmp_path / "trace.json")
    trace = PerfettoTrace(tmp_path / "trace.json")
    assert trace.problems() == []
    on_tracks = (
        "from {} join thread_track on track_id = thread_track.id join thread using(utid) join process using(upid)"
    )
    slices = trace.rows(
        f"select process.name, thread.name, slice.name, ts, dur {on_tracks.format('slice')} order by ts"
    )
    assert slices == [
        ("host", "runs", "run", 500, 4000),
        ("device", "kernels", "linear", 1500, 2250),
        ("host", "runs", "first token", 4000, 0),
    ]
    args = trace.rows("select key, display_value from args where key like 'args.%' order by key")
    assert args == [("args.bytes", "12"), ("args.shapes[0]", "float32[2, 3]")]
    counters = "counter join process_counter_track as track on track_id = track.id join process using(upid)"
    assert trace.rows(f"select process.name, track.name, ts, value from {counters}") == [
        ("device", "arena bytes", 1500, 256.0)
    ]


def test_perfetto_complains_of_what_a_timeline_refuses(tmp_path: Path) -> None:
    """Perfetto's check finds overlapping slices, so its acceptance of other traces means something."""
    path = tmp_path / "trace.json"
    overlapping = [{"ph": "X", "pid": 1, "tid": 2, "name": "k", "ts": start, "dur": 2} for start in (0, 1)]
    path.write_text(json.dumps({"traceEvents": overlapping}))
    assert [name for name, _ in PerfettoTrace(path).problems()] == ["slice_drop_overlapping_complete_event"]


def test_an_empty_timeline_is_a_file_too(tmp_path: Path) -> None:
    assert saved(Timeline(), tmp_path / "trace.json")["traceEvents"] == []


def test_names_that_are_no_unicode_text_are_written_with_question_marks(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.slice(Track("p", "t"), "linear \udc80", 0, 1)
    assert saved(timeline, tmp_path / "trace.json")["traceEvents"][-1]["name"] == "linear ?"


@given(st.sets(st.integers(0, 2**50), min_size=2, max_size=20))
def test_perfetto_reads_neighbours_as_neighbours(nanoseconds: set[int]) -> None:
    """Perfetto multiplies by 1000 in double precision and cuts off; a slice must not end after the next one starts."""
    borders = sorted(nanoseconds)
    timeline = Timeline()
    for start, end in zip(borders, borders[1:], strict=False):
        timeline.slice(Track("p", "t"), "kernel", start / 1000, end / 1000 - start / 1000)
    read = [(int(e["ts"] * 1000), int(e["dur"] * 1000)) for e in timeline.events() if e["ph"] == "X"]
    assert all(start + duration <= after for (start, duration), (after, _) in zip(read, read[1:], strict=False))


def test_slices_lie_inside_each_other_or_apart(tmp_path: Path) -> None:
    timeline, track = Timeline(), Track("device", "kernels")
    for name, start, duration in [("inner", 2, 3), ("outer", 1, 4), ("same", 1, 4), ("next", 5, 1)]:
        timeline.slice(track, name, start, duration)
    timeline.slice(Track("device", "other"), "elsewhere", 4, 4)
    timeline.save(tmp_path / "trace.json")
    timeline.slice(track, "late", 4, 2)
    with pytest.raises(ValueError, match=r"'kernels' of 'device': slice 'late' .* overlaps the end of 'inner'"):
        timeline.save(tmp_path / "other.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


@given(st.floats(0, 1e6), st.lists(st.floats(0.3, 10), min_size=1, max_size=20), st.floats(1, 100))
def test_rounding_makes_no_overlaps(zero: float, durations: list[float], scale: float) -> None:
    """Slices that touch, and lie inside another one up to its end, whose ends are sums in another order."""
    timeline, track = Timeline(), Track("p", "t")
    edges = [0.0]
    for duration in durations:
        edges.append(edges[-1] + duration / scale)
    timeline.slice(track, "outer", zero, edges[-1])
    for start, end in zip(edges, edges[1:], strict=False):
        timeline.slice(track, "inner", zero + start, end - start)
    placed = [(event["ts"], event["ts"] + event["dur"]) for event in timeline.events() if event["ph"] == "X"]
    assert len(placed) == len(durations) + 1
    whole = [(round(1000 * start), round(1000 * end)) for start, end in placed]
    assert all(whole[0][0] <= start <= end <= whole[0][1] for start, end in whole)
    assert all(end <= start for (_, end), (start, _) in zip(whole[1:], whole[2:], strict=False))


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_times_are_finite_and_not_negative(time: float) -> None:
    timeline, track = Timeline(), Track("p", "t")
    for add in (
        lambda: timeline.slice(track, "s", time, 1),
        lambda: timeline.slice(track, "s", 1, time),
        lambda: timeline.instant(track, "i", time),
        lambda: timeline.counter("p", "c", time, 1),
    ):
        with pytest.raises(ValueError, match="'[sic]' cannot"):
            add()
    assert not timeline.slices and not timeline.instants and not timeline.counters


def test_a_counter_has_finite_values() -> None:
    with pytest.raises(ValueError, match="counter 'bandwidth' cannot be inf"):
        Timeline().counter("device", "bandwidth", 0, float("inf"))


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write '.*trace\.json': No space left on device"):
        two_tracks().save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"] and path.read_bytes() == b"old"


def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"cannot write '.*pipe': it is no regular file"):
        two_tracks().save(pipe)
    assert pipe.is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_trace_needs_a_folder_and_a_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write '.*trace\.json': No such file or directory"):
        two_tracks().save(tmp_path / "missing" / "trace.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot write '.*folder': Is a directory"):
        two_tracks().save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and not any((tmp_path / "folder").iterdir())
