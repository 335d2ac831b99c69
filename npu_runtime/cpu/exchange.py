"""Launches of collective kernels on the CPU device, over arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from npu_runtime.collectives import Collectives, HostCollectives, no_group
from npu_runtime.cpu.bound_call import ArrayCall, reporting
from npu_runtime.hardware import Launch


def _all_reduce(group: HostCollectives, x: np.ndarray, out: np.ndarray) -> None:
    group.all_reduce(x, out)


def _all_gather(group: HostCollectives, x: np.ndarray, out: np.ndarray) -> None:
    group.all_gather(x.view(np.uint8), out.view(np.uint8))


COLLECTIVE_KERNELS: dict[str, Callable[[HostCollectives, np.ndarray, np.ndarray], None]] = {
    "all_reduce_kernel": _all_reduce,
    "all_gather_kernel": _all_gather,
}


def collective_launch(call: ArrayCall, group: Collectives | None) -> Launch:
    """A launch of a collective operation between a call's operands and those of the other ranks.

    Raises:
        DeviceError: the device has joined no group, or one of another size.
    """
    if not isinstance(group, HostCollectives):
        raise no_group(call.call)
    group.check(call.call)
    exchange, x, out = COLLECTIVE_KERNELS[call.name], call.inputs[0], call.out

    def launch() -> None:
        exchange(group, x, out)

    return reporting(call.call, launch)
