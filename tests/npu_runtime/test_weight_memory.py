"""The memory of packed weights: aligned, apart from each other, and on huge pages where the machine has them."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.native.memory import weight_memory

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


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this machine gives a program no huge pages"
)
def test_large_weights_lie_on_huge_pages() -> None:
    data = weight_memory(32 * 2**20)
    data[:] = 1
    assert huge_kibibytes(address(data)) > 0


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
    with pytest.raises(MemoryError, match=f"{2**24} bytes for packed weights"):
        weight_memory(2**24)
