"""Traces of profiled runs: what is on which track, what a kernel's slice says, and that Perfetto reads all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ir_builder import IRBuilder
from perfetto_trace import PerfettoTrace

from cuda_runtime.ceilings import gpu_ceilings
from npu_compiler import InputError, compile, partition
from npu_compiler.graph.model import IRGraph
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View
from npu_compiler.timeline import Slice, Timeline
from npu_runtime import Backend, CPUBackend, DAGExecutor, Executor, Profiler
from npu_runtime.hardware import Ceilings, PhaseTime
from npu_runtime.profile_trace import arena_use


class KnownCPU(CPUBackend):
    """A CPU whose ceilings need no measuring."""

    ceilings = Ceilings(1e9, {"float16": 1e9})  # type: ignore[assignment]


@pytest.fixture
def backend() -> Backend:
    return KnownCPU(tune=False)


def graph() -> IRGraph:
    """A product, a softmax and a product: with the softmax on the CPU, three partitions."""
    g = IRBuilder()
    x, y = g.input("x", 4, 8), g.input("y", 8, 8)
    g.output(g("aten.matmul.default", g("aten.softmax.int", g("aten.matmul.default", x, y), -1), y))
    return g.ir()


def inputs() -> dict[str, np.ndarray]:
    return {"x": np.ones((4, 8), np.float32), "y": np.ones((8, 8), np.float32)}


def profile_of(backend: Backend, runs: int = 2) -> tuple[Profiler, Executor]:
    executor, profiler = Executor(compile(graph(), backend.target), backend), Profiler()
    for _ in range(runs):
        executor.run(inputs(), profiler=profiler)
    return profiler, executor


def on(timeline: Timeline, thread: str) -> list[Slice]:
    return [item for item in timeline.slices if item.track.thread == thread]


def test_a_slice_a_kernel_says_what_it_did(backend: Backend) -> None:
    profiler, executor = profile_of(backend)
    calls = executor.program.plan.calls
    kernels = on(profiler.timeline(), "kernels")
    assert [item.name for item in kernels] == 2 * [call.kernel for call in calls]
    assert {item.track.process for item in kernels} == {backend.device}
    for item, call in zip(kernels, 2 * calls, strict=True):
        assert item.args["node"] == call.node and item.args["FLOP"] == call.flops
        assert item.args["bytes"] == call.bytes_moved and len(item.args["inputs"]) == len(call.inputs)
        assert item.args["GB/s"] == pytest.approx(call.bytes_moved / item.duration / 1e3)
    first = kernels[0].args
    assert first["inputs"][0] == "float16[4, 8]" and first["outputs"] == ["float16[4, 8]"]
    least = max(calls[0].bytes_moved, calls[0].flops) / 1e9
    assert first["share of the roofline"] == pytest.approx(least / kernels[0].duration * 1e6)
    assert first["roofline limit"] == ("memory" if calls[0].bytes_moved > calls[0].flops else "compute")


def test_runs_enclose_kernels_and_uploads(backend: Backend) -> None:
    profiler, executor = profile_of(backend)
    timeline = profiler.timeline()
    runs, uploads = on(timeline, "runs"), on(timeline, "transfers")
    assert [run.name for run in runs] == 2 * [executor.program.name]
    assert [(item.name, item.args["tensor"], item.args["bytes"]) for item in uploads] == 2 * [
        ("host → device", "x", 64),
        ("host → device", "y", 128),
    ]
    inside = [item for item in timeline.slices if item.track.thread != "runs"]
    assert all(any(run.start <= item.start and item.end <= run.end + 1e-3 for run in runs) for item in inside)


def test_counters_of_arena_and_bandwidth(backend: Backend) -> None:
    profiler, executor = profile_of(backend, runs=1)
    plan, counters = executor.program.plan, profiler.timeline().counters
    arena = [item.value for item in counters if item.name == "arena"]
    alive = [
        sum(b.size_bytes for b in plan.buffers.values() if b.kind == "arena" and b.first_use <= i <= b.last_use)
        for i in range(len(plan.calls))
    ]
    assert arena == [*alive, 0.0] and arena_use(plan) == alive and max(alive) > 0
    bandwidth = [item.value for item in counters if item.name == "bandwidth"]
    assert len(bandwidth) == 2 * len(plan.calls) and min(bandwidth[::2]) > 0 and set(bandwidth[1::2]) == {0.0}


def test_a_plans_trace_has_cpu_partitions_op_by_op_and_all_transfers(backend: Backend, tmp_path: Path) -> None:
    plan = partition(graph(), lambda op: "softmax" not in op)
    dag, profiler = DAGExecutor(plan, backend), Profiler()
    dag.execute(inputs(), profiler)
    timeline = profiler.timeline()
    host = {item.name: item for item in on(timeline, "runs")}
    assert {plan.graph.name, "cpu partition 1", "aten.softmax.int"} <= host.keys()
    op = host["aten.softmax.int"]
    assert op.args["inputs"] == ["float32[4, 8]"] == op.args["outputs"]
    assert host["cpu partition 1"].start <= op.start and op.end <= host["cpu partition 1"].end
    assert [item.name for item in on(timeline, "transfers")].count("device → host") == 2
    assert profiler.runs == 1 and profiler.total == pytest.approx(host[plan.graph.name].duration / 1e6)
    profiler.save_trace(tmp_path / "trace.json")
    trace = PerfettoTrace(tmp_path / "trace.json")
    assert trace.problems() == []
    assert trace.rows("select count(*) from slice") == [(len(timeline.slices),)]
    assert trace.rows("select count(*) from counter") == [(len(timeline.counters),)]


def test_what_a_devices_parts_did_has_tracks_of_its_own(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    times = (PhaseTime("part 0", "product", 0, 100), PhaseTime("part 1", "product", 10, 100))
    monkeypatch.setattr(backend, "phases", lambda call, memory: times if call.outputs[0].buffer in memory else ())
    profiler, executor = profile_of(backend, runs=1)
    timeline = profiler.timeline()
    kernels = on(timeline, "kernels")
    assert len(on(timeline, "part 0")) == len(on(timeline, "part 1")) == len(kernels)
    inside = on(timeline, "part 1")[0]
    assert inside.track.process == f"{backend.device}, inside of kernels"
    assert (inside.start, inside.duration) == (pytest.approx(kernels[0].start + 0.01), pytest.approx(0.1))


def test_clocks_that_disagree_make_no_overlapping_slices(backend: Backend, tmp_path: Path) -> None:
    backend.timed = lambda launch: (launch(), 1.0)[1]  # type: ignore[method-assign, func-returns-value]
    profiler, executor = profile_of(backend)
    profiler.save_trace(tmp_path / "trace.json")
    assert sum(item.duration for item in on(profiler.timeline(), "kernels")) == pytest.approx(
        2e6 * len(executor.program.plan.calls)
    )


def test_a_call_with_many_operands_lists_the_first_of_them(backend: Backend) -> None:
    profiler, _ = profile_of(backend, runs=1)
    call = profiler.calls[0].call
    profiler.calls[0].plan.calls[0] = KernelCall(
        call.kernel, call.source, 20 * call.inputs, call.outputs, call.params, call.node
    )
    listed = on(profiler.timeline(), "kernels")[0].args["inputs"]
    assert len(listed) == 17 and listed[-1] == f"and {20 * len(call.inputs) - 16} more"


def test_nothing_recorded_is_an_empty_trace(tmp_path: Path) -> None:
    Profiler().save_trace(tmp_path / "trace.json")
    assert PerfettoTrace(tmp_path / "trace.json").problems() == []
    with pytest.raises(InputError, match=r"cannot write '.*missing/trace\.json': No such file or directory"):
        Profiler().save_trace(tmp_path / "missing" / "trace.json")


def call_of(dtype: str, flops: int, moved: int) -> KernelCall:
    view = View("x", (2,), (1,), 0, dtype)
    return KernelCall("k", "", (view,), (view,), {}, "node", flops, moved)


def test_the_roofline_is_the_slower_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings(100.0, {"float16": 1000.0})
    assert ceilings.least_seconds(call_of("float16", 500, 100)) == (1.0, "memory")
    assert ceilings.least_seconds(call_of("float16", 5000, 100)) == (5.0, "compute")
    assert ceilings.least_seconds(call_of("float32", 5000, 100)) == (1.0, "memory")
    assert Ceilings().least_seconds(call_of("float16", 500, 100)) is None
    assert ceilings.least_seconds(call_of("int32", 0, 0)) is None


def test_the_cpus_ceilings_are_measured_once() -> None:
    found = CPUBackend(tune=False).ceilings
    assert found.bandwidth is not None and found.bandwidth > 1e8 and found.flops["float32"] > 1e8
    assert CPUBackend(tune=False).ceilings is found


def test_a_gpus_ceilings_are_those_of_its_data_sheet() -> None:
    """NVIDIA's A100 (40 GB) data sheet: 1555 GB/s, 312 TFLOP/s in 16 bits, 19.5 in float32."""
    a100 = {"MemoryClockRate": 1215000, "GlobalMemoryBusWidth": 5120, "ClockRate": 1410000, "MultiProcessorCount": 108}
    found = gpu_ceilings(a100, 80)
    assert found.bandwidth == pytest.approx(1555e9, rel=0.001)
    assert found.flops["bfloat16"] == pytest.approx(312e12, rel=0.001)
    assert found.flops["float32"] == pytest.approx(19.5e12, rel=0.001)
    assert gpu_ceilings(a100, 86).flops == {} and gpu_ceilings({}, 80) == Ceilings()
