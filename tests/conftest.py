"""Fixtures and seeds that all test files share."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import random
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import traces
import typer.testing
from cuda_gpu import DEVICES, PROBLEM
from drawn import SHARE, left_out
from hypothesis import HealthCheck, settings
from kernel_cache import put_kernels

from npu_compiler import CompiledProgram, compiler
from npu_compiler.program.trust import UNKNOWN
from npu_runtime import Backend, CPUBackend, Device
from npu_runtime.cpu import native
from npu_runtime.cpu.native.threads import usable_threads

# In the environment, since pytest's workers are processes that inherit it.
SEED = int(os.environ.setdefault("TEST_SEED", str(random.SystemRandom().randrange(2**31))))

# Results must not depend on measurements, nor tests wait for them.
os.environ.setdefault("NPU_SIM_TUNE", "0")

# Where workers and the processes of their tests share the cores, PyTorch's threads would take a multiple of the time to
# wait for each other awake. This is for pytest's workers and for processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("npu", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("npu")


# Nobody reads the stacks that exporting a model keeps for each node, for an eighth of its time.
if hasattr(torch.fx.config, "do_not_emit_stack_traces"):  # PyTorch 2.9 has no such option
    torch.fx.config.do_not_emit_stack_traces = True

# What collecting makes stays: the garbage collector would walk over it, syntax trees too, time and again.
gc.disable()

# Typer would build all commands for each one that is run, which takes 50 ms; most commands take less.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is beyond the share of slow tests' cases that TEST_SHARE asks for."""
    left = set(left_out(items)) if SHARE < 1 else set()
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Turn the garbage collector on again, with what is there now left out of its walks.

    Tracing makes so many objects that by its usual threshold it would take a fifth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than there are cores for this process: tests of servers wait for some of their time."""
    return usable_threads() + 1


def pytest_configure(config: pytest.Config) -> None:
    """Share torch's threads out among pytest's workers; give these a folder for what they trace, and one for keys."""
    if not hasattr(config, "workerinput"):
        for variable, prefix in ((traces.FOLDER, "traces-"), ("XDG_CONFIG_HOME", "config-")):
            folder = tempfile.TemporaryDirectory(prefix=prefix)
            os.environ[variable] = folder.name
            config.add_cleanup(folder.cleanup)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_report_header() -> str:
    return f"TEST_SEED={SEED} (set it to repeat this run's random inputs)"


@pytest.fixture(scope="session", autouse=True)
def compiled_programs_are_saved_and_loaded(pytestconfig: pytest.Config) -> Iterator[None]:
    """Save and load programs that a test compiles in its own process: their files must hold all of them.

    It costs a tenth of the time, so that `make test` and `make test-all` do it for every third program.
    """
    checked: set[int] = set()
    is_part = SHARE < 1 or pytestconfig.getoption("markexpr") == "not slow"
    number, every = itertools.count(SEED), 3 if is_part else 1

    def compiled(*args: Any, **options: Any) -> CompiledProgram:
        program = CompiledProgram(*args, **options)
        if next(number) % every:
            return program
        data = replace(program, trust=UNKNOWN).to_bytes()  # code would be authenticated, with a key made for that
        if hash(data) not in checked:
            checked.add(hash(data))
            assert CompiledProgram.from_bytes(data).to_bytes() == data, "a loaded program is not as it was saved"
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "CompiledProgram", compiled)
        yield


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """One cache of programs in all of pytest's workers, away from the user's; for a whole file."""
    cache = Path(os.environ[traces.FOLDER], "programs")
    put_kernels(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_CACHE", str(cache))
        yield


@pytest.fixture(autouse=True)
def handlers_of_a_server_end_with_the_test() -> Iterator[None]:
    """Take from the loggers what `serve` added: its threads may log once more when pytest has closed stderr."""
    yield
    for name in ("npu_sim.serving.http", "uvicorn.error"):
        logging.getLogger(name).handlers.clear()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed, from the run's; torch's and NumPy's global generators start from it."""
    value = zlib.crc32(f"{SEED} {request.node.nodeid}".encode())
    # Where there is no GPU, `torch.manual_seed` writes down the whole stack for its absent generator, in 1 ms.
    (torch.default_generator.manual_seed if PROBLEM else torch.manual_seed)(value)
    np.random.seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("seed", f"repeat with TEST_SEED={SEED} pytest '{item.nodeid}'"))
    return report


NATIVE = [
    pytest.param(False, id="torch"),
    pytest.param(
        True,
        id="native",
        marks=pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}"),
    ),
]


@pytest.fixture(params=NATIVE)
def cpu(request: pytest.FixtureRequest) -> CPUBackend:
    """The CPU device, once with torch kernels only and once with the native ones."""
    return CPUBackend(native=request.param)


@pytest.fixture(scope="session", params=DEVICES)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every device here in turn: the CPU with torch kernels only, and the GPU where there is one.

    What runs on it is compiled with `target=backend.target`.
    """
    return CPUBackend(native=False) if request.param == "cpu" else Device(request.param).backend
