"""Number of threads of the native kernels, and the memory of their weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.native import threads
from npu_runtime.cpu.native.memory import weight_memory


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NPU_SIM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_THREADS", "3")
    assert threads.usable_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_threads_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NPU_SIM_THREADS", text)
    with pytest.raises(ValueError, match=f"NPU_SIM_THREADS must be a positive number of threads, not '{text}'"):
        threads.usable_threads()


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("200000 50000", 4.0), ("", None), ("1 0", None)]
)
def test_a_cgroup_limits_the_cores(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert threads.cgroup_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("50000", 0.5)])
def test_a_cgroup_of_the_first_version_limits_the_cores(tmp_path: Path, quota: str, cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert threads.cgroup_cores(tmp_path) == cores


def test_a_fraction_of_a_core_is_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads.usable_threads() == 8
    (tmp_path / "cpu.max").write_text("250000 100000")
    assert threads.usable_threads() == 3
    (tmp_path / "cpu.max").write_text("10000 100000")
    assert threads.usable_threads() == 1


@pytest.mark.skipif(not hasattr(threads.os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_limits_the_cores() -> None:
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from npu_runtime.cpu.native.threads import usable_threads
print(usable_threads())
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_weights_lie_on_cache_lines_and_do_not_overlap() -> None:
    sizes = (1, 100, 2**20, 3 * 2**20, 64, 2**21 - 1)
    blocks = [weight_memory(size) for size in sizes]
    assert [block.size for block in blocks] == list(sizes)
    assert all(address(block) % 64 == 0 for block in blocks)
    ends = sorted((address(block), address(block) + block.size) for block in blocks)
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    for value, block in enumerate(blocks):
        block.fill(value)
    assert [(int(block.min()), int(block.max())) for block in blocks] == [(value, value) for value in range(len(sizes))]
