"""The layout of a resident block: which threads do what, and which part of the shared memory serves what."""

from __future__ import annotations

from collections.abc import Sequence

from cuda_compiler.resident.phases import IN_FLIGHT, Phase
from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import groups

THREADS = 256  # of a block that compute
ALL_THREADS = THREADS + 4 * WARP  # with a warp each that fetches weights, runs the grid barrier, prefetches, and idles
WARPS = THREADS // WARP
UNIT_ROWS = 8  # of a weight, at most, that tensor cores multiply at a time
LINE_BYTES = 128  # of each row that a warp takes at a time
SLOT_BYTES = UNIT_ROWS * 3072  # at most, of a weight in 16 bits
QUANTIZED_SLOT_BYTES = 12 * 3072  # of the codes of a weight in few bits; scales and offsets come on top
PREFETCH_DEPTH = 3  # steps that may be prefetched at a time
MOST_OWN_TURNS = 10  # lines of x that a warp keeps in registers, where it receives them itself
UNITS_AHEAD = 8  # of a weight in 16 bits, after the ring: prefetched into the L2 cache while the ring is full
AHEAD_NS = 500  # from one such prefetch to the next
_BARRIER_BYTES = 16  # of the limit's barrier, with the block's progress
LEAST_SHARED = 99 * 1024  # what a block may have on GPUs that copy asynchronously; others have less


def scratch_bytes(phases: Sequence[Phase]) -> int:
    """Bytes of shared memory before the ring of weight slots: the prefetch queue and the largest phase's scratch."""
    return prefetch_queue_bytes(phases) + max(phase.scratch for phase in phases)


def prefetch_queue_bytes(phases: Sequence[Phase]) -> int:
    operands = max(len(phase.operands) for phase in phases)
    step = groups(8 + 8 * operands, 16) * 16  # the C struct `StepOperands`
    return whole_lines(PREFETCH_DEPTH * (step + prefetched_bytes(phases)) + 16 * PREFETCH_DEPTH)


def prefetched_bytes(phases: Sequence[Phase]) -> int:
    """Bytes of shared memory for the small operands that are prefetched for one step."""
    return whole_lines(max(phase.prefetched_bytes for phase in phases))


def least_shared(phases: Sequence[Phase]) -> int:
    """Minimum bytes of shared memory of a block: everything before the ring, and a ring of the fewest slots."""
    return scratch_bytes(phases) + IN_FLIGHT * (slot_bytes(phases) + 16) + bytes_after_ring(phases)


def most_choices(phases: Sequence[Phase]) -> int:
    """Maximum number of experts that a phase chooses; 0 if none does."""
    return max(phase.choices for phase in phases)


def bytes_after_ring(phases: Sequence[Phase]) -> int:
    """Bytes of shared memory for the limit's barrier, the block's progress, and a choice of experts."""
    choices = most_choices(phases)
    return _BARRIER_BYTES + (8 + 8 * choices if choices else 0)


def slot_bytes(phases: Sequence[Phase]) -> int:
    return max(whole_lines(phase.stream.slot_bytes) for phase in phases if phase.stream is not None)


def whole_lines(size: int) -> int:
    return groups(size, 128) * 128
