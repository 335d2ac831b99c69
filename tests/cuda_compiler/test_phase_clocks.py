"""Clocks inside resident kernels: without them sources are as ever, with them they compile; what they note is read."""

from __future__ import annotations

import difflib
import shutil
import subprocess
from pathlib import Path

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
from cuda_llms import step_of
from cuda_wirings import WIRED, Wired, wired_program

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.resident import clocks
from cuda_compiler.resident.kernel import RESIDENT
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan


def plans(name: str = "qwen3") -> list[ExecutionPlan]:
    """Return the plans of a decode step without and with clocks."""
    return [
        npu_compiler.compile(step_of(name, 1), target=CUDACodegenTarget(GPU(phase_clocks=on))).plan
        for on in (False, True)
    ]


def resident(plan: ExecutionPlan) -> tuple[KernelCall, str]:
    (call,) = [call for call in plan.calls if call.kernel == RESIDENT]
    return call, plan.sources[call.source]


def test_clocks_only_add_lines_to_a_source() -> None:
    (_, plain), (_, clocked) = map(resident, plans())
    changes = list(difflib.ndiff(plain.splitlines(), clocked.splitlines()))
    # An operand more is one more in the constants that count them, and nothing else.
    removed = [line[2:] for line in changes if line.startswith("- ")]
    assert all(line.startswith("constexpr int OPERANDS = ") for line in removed) and len(removed) <= 1
    added = [line[2:] for line in changes if line.startswith("+ ")]
    products = plain.count("const HeldColumns held_columns(grid, scratch, input);")
    attentions = plain.count("        insert_new_rows(key_words, values, prefetched, scratch, key);")
    assert products > 0 and attentions > 0
    for which in (0, 1):
        assert sum(f"grid.clocks.mark(grid.step, {which});" in line for line in added) == products + attentions
    assert sum("grid.clocks.mark(grid.step, 2);" in line for line in added) == 1


def test_without_clocks_nothing_knows_of_them() -> None:
    target, plain, clocked = CUDACodegenTarget(), *plans()
    assert target.key != CUDACodegenTarget(GPU(phase_clocks=True)).key and "clock" not in target.key
    for plan, wanted in ((plain, False), (clocked, True)):
        call, source = resident(plan)
        assert clocks.has_clocks(call) == ("Clocks clocks;" in source) == ("%globaltimer" in source) == wanted
    assert clocked.buffers.keys() - plain.buffers.keys() == {resident(clocked)[0].outputs[-1].buffer}


def test_a_template_that_lost_a_line_is_noticed() -> None:
    _, source = resident(plans()[0])
    with pytest.raises(AssertionError, match="a template has changed"):
        clocks.with_clocks(source.replace("        grid.end_step();\n", ""), 1)


@pytest.mark.parametrize(
    ("name", "turn"), [("qwen3", 2), pytest.param("llama of long rows", 1, marks=pytest.mark.slow)]
)
def test_a_kernel_with_clocks_compiles(name: str, turn: int) -> None:
    cuda_toolchain.compile_in_turn([resident(plans(name)[1])[1]], turn)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of the CUDA toolkit")
def test_a_kernel_with_clocks_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(resident(plans()[1])[1])
    options = ["-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
    done = subprocess.run(["nvcc", *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kernel.cubin").stat().st_size > 0
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr


def noted(call: KernelCall, *blocks: list[int]) -> np.ndarray:
    """The memory of a call's clocks, as int32, with these words for the first blocks."""
    words = np.zeros((clocks.BLOCKS, clocks.words(len(call.params["clocked_steps"])) // clocks.BLOCKS), np.uint64)
    for row, block in zip(words, blocks, strict=False):
        row[: len(block)] = block
    return words.view(np.int32).reshape(-1)


def test_clock_counts_become_one_time() -> None:
    """Two multiprocessors: one counts twice a nanosecond, and begins 100 ns before the other, which counts once."""
    call = KernelCall(RESIDENT, "", (), (), clocks.labels(["product: a", "attend_keys: b"]), "b")
    fast = [8, 5000, 1000, 5500, 2000, 1200, 1600, 1800, 5, 5, 2000]  # the second step noted only its end
    slow = [3, 5100, 70, 5500, 470, 100, 200, 270, 300, 400, 470]
    found = [(x.multiprocessor, x.name, x.start, x.end) for x in clocks.intervals(call, noted(call, fast, slow))]
    assert found == [
        (2, "product: a", 100, 300),
        (2, "wait for operands", 100, 130),
        (2, "compute", 130, 230),
        (2, "pass on", 230, 300),
        (2, "attend_keys: b", 300, 500),
        (2, "wait for operands", 300, 330),
        (2, "compute", 330, 430),
        (2, "pass on", 430, 500),
        (7, "product: a", 0, 400),
        (7, "wait for operands", 0, 100),
        (7, "compute", 100, 300),
        (7, "pass on", 300, 400),
        (7, "attend_keys: b", 400, 500),
        (7, "pass on", 400, 500),
    ]


def test_a_kernel_that_has_not_run_did_nothing() -> None:
    call = KernelCall(RESIDENT, "", (), (), clocks.labels(["product: a"]), "a")
    assert list(clocks.intervals(call, noted(call))) == []


def test_the_memory_for_clocks_holds_every_step() -> None:
    call, source = resident(plans()[1])
    steps = call.params["clocked_steps"]
    assert f"constexpr int STEPS = {len(steps)};" in source
    assert call.outputs[-1].numel == 2 * clocks.words(len(steps)) and call.outputs[-1].dtype == "int32"
    assert {step.split(": ")[0] for step in steps} == {"product", "attend_keys"}


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("kind", list(WIRED)[:1])
def test_every_multiprocessor_notes_all_steps_within_the_kernels_time(kind: type[Wired], seed: int) -> None:
    from npu_runtime import Executor, Profiler

    backend = cuda_gpu.cuda_backends()[0]
    program = wired_program(kind, CUDACodegenTarget(GPU(phase_clocks=True)))
    executor, profiler = Executor(program, backend), Profiler()
    inputs, weights = (
        {spec.name: backend.allocate_zeros(spec.shape, spec.storage, spec.alloc_shape) for spec in specs}
        for specs in (program.input_specs, [weight.spec for weight in program.weight_specs.values()])
    )
    executor.run(inputs, weights)
    executor.run(inputs, weights, profiler)
    (timed,) = [timed for timed in profiler.calls if timed.call.kernel == RESIDENT]
    steps = timed.call.params["clocked_steps"]
    parts = {phase.part for phase in timed.phases}
    for part in parts:
        own = [phase for phase in timed.phases if phase.part == part and phase.name in steps]
        assert [phase.name for phase in own] == steps
        assert all(phase.start >= 0 and phase.duration >= 0 for phase in own)
        assert own[-1].start + own[-1].duration < 1e9 * timed.seconds + 50_000
    assert len(parts) == int(backend._device.properties["multiProcessorCount"])
