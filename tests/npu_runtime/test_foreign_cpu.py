"""A sample of the native kernels' tests on AArch64, under qemu; `make test-aarch64` runs all, at every level."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_cpu import ForeignLibrary, missing_tool
from native_on_tensors import native

from npu_runtime.cpu import levels
from npu_runtime.cpu.native import bindings, build

FOLDER = Path(__file__).parent
SUPPORT = FOLDER.parent / "support"
# A few tests of each kernel. Names, not numbers: a renamed test must not go missing here unnoticed.
SAMPLE = {
    "test_native.py": (
        "test_linear[5-dtype1]",
        "test_linear[13-dtype2]",
        "test_linear_rounds_once_and_overflows_to_infinity",
        "test_gated_linear[dtype0]",
        "test_matmul[dtype1]",
        "test_attention[3-dtype1]",
        "test_attention[29-dtype0]",
        "test_norms[31-dtype2]",
        "test_pointwise[shape2-dtype1]",
        "test_a_clamped_gate_reads_neighbouring_columns[4-33-dtype1]",
        "test_softmax_is_accurate_where_weights_are_tiny",
        "test_casts_round_to_nearest_even_everywhere",
        "test_rope[20-dtype2]",
        "test_copy[dtype1]",
        "test_embedding",
        "test_index_copy",
        "test_index_copy_pair",
        "test_index_select",
        "test_elementwise_ops_are_pytorchs",
        "test_places_of_extremes_are_pytorchs[33-dtype1]",
        "test_sequence_runs_all_launches_in_order",
        "test_threads_take_turns",
    ),
    "test_native_conv.py": (
        "test_pointwise[64-24-size2-pixels-dtype0]",
        "test_pointwise[16-49-size4-channels-dtype1]",
        "test_winograd[5-33-size2-padding2-winograd2-dtype0]",
        "test_winograd[3-20-size4-padding4-winograd4-dtype1]",
        "test_windows[kernel1-padding1-dilation1-stride2-pixels]",
        "test_bfloat16_pairs_are_summed_in_float32[channels]",
        "test_groups[8-12-4-pixels]",
        "test_depthwise[kernel1-stride2-size1]",
        "test_epilogue[silu-True-dtype1]",
        "test_max_pool[False-3-1-1-size2-dtype1]",
        "test_launches_run_in_sequence_and_read_operands_each_time",
    ),
    "test_native_quantized.py": (
        "test_products_of_whole_numbers_are_exact[int4-zero_point-2]",
        "test_products_of_whole_numbers_are_exact[int8-minimum-1]",
        "test_products_are_those_of_the_dequantized_weight[float8_e4m3-none-5]",
        "test_gated_products[int4-minimum]",
        "test_lookups_are_the_dequantized_rows[int8-zero_point]",
    ),
    "test_rounded_rows.py": ("test_elements_beside_ties_are_rounded_alike[int8]",),
}


@pytest.mark.slow
def test_kernels_on_aarch64() -> None:
    level = levels.find_level("aarch64")
    missing = missing_tool(level)
    if missing is not None:
        pytest.skip(f"{missing} is not installed")
    tests = [f"{FOLDER / file}::{name}" for file, names in SAMPLE.items() for name in names]
    path = os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"FOREIGN_CPU_LEVEL": level.name, "PYTHONPATH": path}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "foreign_cpu", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(tests)} passed" in done.stdout, done.stdout[-8000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def foreign() -> ForeignLibrary:
    """This machine's own library, in another process."""
    library = build.compiled_library()
    if library is None:
        pytest.skip(f"no native kernels: {build.failure_reason()}")
    return ForeignLibrary(library.level)


def test_a_launch_in_another_process_does_what_it_does_here(foreign: ForeignLibrary) -> None:
    x, weight = torch.randn(3, 40), torch.randn(70, 40)
    here, there = torch.empty(3, 70), torch.empty(3, 70)
    packed = native.pack_linear_weight(weight)
    assert packed is not None
    local, remote = (native.linear(x, packed, None, None, "none", out) for out in (here, there))
    assert local is not None and remote is not None
    local()
    foreign.launch("npu_linear", remote.args, remote._keep)
    assert torch.equal(here, there) and here.any()


def test_a_launch_must_keep_what_it_points_into(foreign: ForeignLibrary) -> None:
    x, out = torch.randn(4), torch.empty(4)
    launch = native.combine("add", [x, x], out)
    assert launch is not None
    with pytest.raises(AssertionError, match="npu_pointwise points, at offset .*, into no array that its launch keeps"):
        foreign.launch("npu_pointwise", launch.args, (x,))


def test_a_launch_leaves_neighbouring_memory_alone(foreign: ForeignLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    x, memory = torch.randn(100), torch.zeros(200)
    out, neighbour = memory.split(100)
    launch, wait = native.combine("add", [x, x], out), foreign._numbers
    assert launch is not None

    def wait_while_another_writes(count: int) -> tuple[int, ...]:
        neighbour.fill_(1)
        return wait(count)

    monkeypatch.setattr(foreign, "_numbers", wait_while_another_writes)
    foreign.launch("npu_pointwise", launch.args, launch._keep)
    assert torch.equal(out, 2 * x) and neighbour.eq(1).all()


def test_the_other_process_answers_questions(foreign: ForeignLibrary) -> None:
    level, library = foreign.npu_level, build.compiled_library()
    level.restype = ctypes.c_char_p
    assert library is not None and level() == library.level.name.encode()
    assert foreign.npu_lanes() == bindings.layout().lanes
    assert not hasattr(foreign, "npu_no_such_function")
