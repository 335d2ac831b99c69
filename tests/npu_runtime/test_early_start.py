"""Programs that start on other kernels while the CPU's native ones are being compiled, and go on with these."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_runtime import CPUBackend, Executor, NPUBuffer, load_weights
from npu_runtime.cpu import backend as cpu_backend
from npu_runtime.cpu import native
from npu_runtime.cpu.native import NativeLaunch, build

STEPS, WIDTH = 8, 64
SLEEPING = """#!/bin/sh
[ "$1" = --version ] && { echo fake 1.0; exit; }
sleep 60
"""


class Build:
    """The compilation of native kernels, which ends when a test says so."""

    def __init__(self) -> None:
        self.ended, self.succeeds = threading.Event(), native.available()

    def wait(self) -> bool:
        assert self.ended.wait(20)
        return self.succeeds

    def end(self, backend: CPUBackend) -> None:
        self.ended.set()
        backend._builder.join()


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    slow = Build()
    monkeypatch.setattr(cpu_backend, "native_available", slow.wait)
    monkeypatch.setattr(cpu_backend, "is_compiling", lambda: not slow.ended.is_set())
    monkeypatch.setattr(cpu_backend, "yield_to_programs", lambda: None)
    yield slow
    slow.ended.set()


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    """A step that writes a row of its cache in place, and multiplies the whole cache by a weight."""
    g = IRBuilder()
    cache, at, x = g.input("cache", STEPS, WIDTH), g.input("at", 1, dtype="int64"), g.input("x", 1, WIDTH)
    row = g("aten.linear.default", x, g.weight("first", WIDTH, WIDTH))
    new = g("aten.index_copy.default", cache, 0, at, row, name="new")
    g.output(new)
    g.output(g("aten.linear.default", new, g.weight("second", WIDTH, WIDTH), name="result"))
    return compile(g.ir(), options=CompileOptions(compute_dtype="bfloat16"))


class Steps:
    """A sequence of steps of the program on a backend, and the results that they should have."""

    def __init__(self, program: CompiledProgram, backend: CPUBackend) -> None:
        random = np.random.default_rng(STEPS)
        self._state = {name: random.standard_normal((WIDTH, WIDTH), np.float32) / 8 for name in ("first", "second")}
        self._rows = random.standard_normal((STEPS, WIDTH), np.float32)
        self._weights = load_weights(self._state, program, backend)
        self._cache = NPUBuffer.zeros((STEPS, WIDTH), backend, "bfloat16")
        self.executor = Executor(program, backend)

    def run(self, position: int) -> None:
        x = self._rows[position : position + 1]
        inputs = {"cache": self._cache, "at": np.array([position]), "x": x}
        result = self.executor.run(inputs, self._weights)["result"].to_numpy()
        cache = np.zeros_like(self._rows)
        cache[: position + 1] = self._rows[: position + 1] @ self._state["first"].T
        np.testing.assert_allclose(result.astype(np.float32), cache @ self._state["second"].T, atol=0.03)

    def launches(self) -> list[object]:
        return list(self.executor._run._launches)

    def layouts(self) -> set[object]:
        """The kinds of layouts of the weights that are kept."""
        return {key[0] for weight in self._weights.values() for key in weight.prepared}


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("switch", [0, 1, STEPS // 2, STEPS])
def test_a_program_changes_to_native_kernels_between_two_runs(
    program: CompiledProgram, building: Build, switch: int, tune: bool
) -> None:
    backend = CPUBackend(native=True, tune=tune)
    with backend.early_start():
        steps = Steps(program, backend)
        for position in range(STEPS):
            if position == switch:
                early = steps.layouts()
                building.end(backend)
            prepared = steps.executor.counters["prepared"]
            steps.run(position)
            again = position not in (0, switch)
            assert steps.executor.counters["prepared"] == prepared or not again, "launches are kept between changes"
            is_native = [isinstance(launch, NativeLaunch) for launch in steps.launches()]
            assert any(is_native) == (position >= switch and building.succeeds)
            assert tune is False or "_tuner" not in vars(backend) or position >= switch, "no trials before"
    if switch == STEPS:
        building.end(backend)
    elif switch and building.succeeds:
        assert early and not early & steps.layouts(), "weights in layouts of other kernels are freed"
    assert backend.native == building.succeeds


def test_outside_an_early_start_a_program_waits_for_native_kernels(program: CompiledProgram, building: Build) -> None:
    backend = CPUBackend(native=True, tune=False)
    with backend.early_start():
        pass
    opened: list[Steps] = []
    opening = threading.Thread(target=lambda: opened.append(Steps(program, backend)))
    opening.start()
    opening.join(0.2)
    assert opening.is_alive() and not opened
    building.end(backend)
    opening.join()
    opened[0].run(0)
    assert any(isinstance(launch, NativeLaunch) for launch in opened[0].launches()) == building.succeeds


def test_threads_that_run_during_the_change_get_right_results(program: CompiledProgram, building: Build) -> None:
    backend = CPUBackend(native=True, tune=False)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            steps = Steps(program, backend)
            for _ in range(4):
                for position in range(STEPS):
                    steps.run(position)
                steps._cache.write(np.zeros((STEPS, WIDTH), np.float32))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    with backend.early_start():
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        building.end(backend)
        for thread in threads:
            thread.join()
    assert not errors


def test_a_failed_compilation_is_said_once_and_changes_nothing(
    program: CompiledProgram, building: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    building.succeeds = False
    monkeypatch.setattr(cpu_backend, "failure_reason", lambda: "the compiler crashed")
    cpu_backend._warn_of_missing_kernels.cache_clear()
    backend = CPUBackend(native=True, tune=False)
    with backend.early_start(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = Steps(program, backend)
        steps.run(0)
        assert not caught
        building.end(backend)
        for position in range(1, STEPS):
            steps.run(position)
    cpu_backend._warn_of_missing_kernels.cache_clear()
    assert ["the compiler crashed" in str(each.message) for each in caught] == [True]


def test_compilers_give_way_to_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The priority is that of compilers which run when a program starts, and of later ones."""
    compiler = tmp_path / "compiler"
    compiler.write_text(SLEEPING)
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "_yielding", threading.Event())

    def running() -> int:
        """Start one more compiler and return its process id."""
        others = set(build._running)
        threading.Thread(target=lambda: pytest.raises(build.CompilerError, build._run, [str(compiler)])).start()
        while not build._running - others:
            time.sleep(0.01)
        (process,) = build._running - others
        return process.pid

    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        first = running()
        assert os.getpriority(os.PRIO_PROCESS, first) == own
        build.yield_to_programs()
        later = running()
        deadline = time.monotonic() + 10
        wanted = min(own + build._NICENESS, 19)
        while (found := [os.getpriority(os.PRIO_PROCESS, each) for each in (first, later)]) != [wanted] * 2:
            assert time.monotonic() < deadline, found
    finally:
        build._stop_compilers()
