"""The memory of packed weights and of arenas: aligned, apart from each other, and on huge pages where there are any."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from npu_compiler.errors import DeviceError
from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.backend import CPUBackend
from npu_runtime.cpu.native.memory import weight_memory
from npu_runtime.program_run import Arena

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kibibytes(where: int) -> int:
    """KiB on huge pages of the mapping that holds an address of this process."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(span[1], 16) <= where < int(span[2], 16)
        elif holds and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


has_huge_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this machine gives a program no huge pages"
)


@has_huge_pages
def test_large_weights_lie_on_huge_pages() -> None:
    data = weight_memory(32 * 2**20)
    data[:] = 1
    assert huge_kibibytes(address(data)) > 0


@has_huge_pages
def test_a_large_arena_lies_on_huge_pages_and_other_buffers_do_not() -> None:
    backend = CPUBackend(native=False)
    arena, weight = Arena(backend).reserve(32 * 2**20), backend.allocate_zeros((32 * 2**20,), "uint8")
    assert not arena.to_numpy().any()
    arena.native_handle[:] = weight.native_handle[:] = 1
    assert huge_kibibytes(address(arena.native_handle)) > 0
    assert huge_kibibytes(address(weight.native_handle)) == 0


def test_a_small_arena_takes_no_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    plain = mmap.mmap
    monkeypatch.setattr(
        mmap, "mmap", lambda file, size, *rest, **named: mapped.append(size) or plain(file, size, *rest, **named)
    )
    backend = CPUBackend(native=False)
    assert Arena(backend).reserve(4096).size_bytes == 4096 and not mapped
    Arena(backend).reserve(2**24)
    assert mapped


def test_small_weights_are_aligned_and_do_not_overlap() -> None:
    pieces = [weight_memory(size) for size in (1, 63, 64, 65, 2**20, 2**20, 2**21 - 1, 3)]
    for number, piece in enumerate(pieces):
        assert address(piece) % 64 == 0
        piece[:] = number
    assert [np.unique(piece).tolist() for piece in pieces] == [[number] for number in range(len(pieces))]


def test_too_little_memory_is_said_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=f"{2**24} bytes on huge pages"):
        weight_memory(2**24)
    with pytest.raises(DeviceError, match=f"out of memory: .*{2**24} bytes on huge pages"):
        Arena(CPUBackend(native=False)).reserve(2**24)
