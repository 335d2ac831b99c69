"""Simulations as traces and as pictures."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest
from ir_builder import IRBuilder
from PIL import Image

from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_model import Result, load_chip, simulate
from npu_model.analysis import trace
from npu_model.analysis.picture import check_picture, draw_run
from npu_model.analysis.trace import timeline


@pytest.fixture(scope="module")
def result() -> Result:
    g = IRBuilder("two")
    x = g.input("x", 64, 512)
    y = g("aten.silu.default", g("aten.linear.default", x, g.weight("a", 2048, 512)))
    g.output(g("aten.linear.default", y, g.weight("b", 512, 2048)))
    return simulate(compile_ir(g.ir()), load_chip("edge"), spans=True)


def test_a_trace_has_a_track_for_each_engine_and_lasts_as_long_as_the_run(result: Result, tmp_path: Path) -> None:
    timeline(result).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == result.busy.keys() and {"matrix", "output", "dma0"} <= names
    slices = [event for event in events if event["ph"] == "X"]
    latency = 1e-3 * result.chip.dram.latency_ns  # after which the last bytes have arrived
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(
        1e6 * result.seconds - latency, abs=0.01
    )
    assert {event["name"].split()[-1] for event in slices} == {call.node for call in result.calls}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"SRAM bytes in use", "GB/s from and to DRAM"}
    busy = dict.fromkeys(names, 0.0)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in slices:
        busy[threads[event["tid"]]] += event["dur"]
    for name, cycles in result.busy.items():
        assert busy[name] == pytest.approx(1e6 * result.chip.seconds(cycles), rel=1e-3)


def test_runs_follow_each_other_in_a_trace(result: Result) -> None:
    once, twice = timeline(result), timeline(result, result)
    assert len(twice.slices) == 2 * len(once.slices)
    last = max(piece.end for piece in once.slices)
    assert max(piece.end for piece in twice.slices) == pytest.approx(1e6 * result.seconds + last)


def test_very_many_instructions_are_one_slice_for_a_call_on_an_engine(
    result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_SLICES", 10)
    slices = timeline(result).slices
    assert len(slices) == len({(span.section, span.engine) for span in result.spans})
    assert "instructions of" in slices[0].name


def test_no_counter_of_bandwidth_is_above_the_chips(result: Result) -> None:
    rates = [counter.value for counter in timeline(result).counters if counter.name == "GB/s from and to DRAM"]
    assert 0 < max(rates) <= result.chip.dram.bandwidth_gb_s * 1.001


def test_a_picture_is_drawn(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_run(result, tmp_path / "run.png")
    with Image.open(tmp_path / "run.png") as picture:
        assert picture.width > 1000


def test_a_picture_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="cannot draw 'run.bmp': choose a name that ends in .png, .svg, .pdf"):
        check_picture(Path("run.bmp"))


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="a picture needs matplotlib"):
        check_picture(Path("run.png"))


def test_a_picture_on_a_full_disk_leaves_nothing(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("npu_compiler.files.os.fsync", full)
    with pytest.raises(InputError, match="cannot write .*: No space left"):
        draw_run(result, tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []
