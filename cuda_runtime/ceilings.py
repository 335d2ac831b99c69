"""Peak memory bandwidth and arithmetic rates of a GPU, computed from its clocks and widths."""

from __future__ import annotations

from collections.abc import Mapping

from npu_runtime.hardware import Ceilings

# Floating-point operations of a multiprocessor per clock: of its tensor cores, dense, in 16 bits with float32 sums, and
# of its float32 lanes. From NVIDIA's architecture papers for A100 (1024 and 64 multiply-adds) and H100 (2048 and 128).
_PER_CLOCK = {80: (2048, 128), 90: (4096, 256)}


def gpu_ceilings(attributes: Mapping[str, int], capability: int) -> Ceilings:
    """The peak bandwidth and rates at the highest clocks.

    Rates of architectures that are not in the table are left out.

    Args:
        attributes: CUDA's device attributes: clocks in kHz, the memory bus in bits. Memory transfers twice a clock.
        capability: Compute capability as CUDA writes it: 90 is 9.0.
    """
    clock, width = attributes.get("MemoryClockRate", 0), attributes.get("GlobalMemoryBusWidth", 0)
    bandwidth = 2e3 * clock * width / 8
    clocks = 1e3 * attributes.get("ClockRate", 0) * attributes.get("MultiProcessorCount", 0)
    if capability not in _PER_CLOCK or not clocks:
        return Ceilings(bandwidth or None)
    tensor, lanes = _PER_CLOCK[capability]
    rates = {"float16": tensor * clocks, "bfloat16": tensor * clocks, "float32": lanes * clocks}
    return Ceilings(bandwidth or None, rates)
