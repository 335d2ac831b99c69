"""Rules of collective operations between GPUs, which NCCL executes."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.cuda_program import CollectiveLaunch
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.program.kernels import KernelCall

_OPERATIONS = {"all_reduce_kernel": "all_reduce", "all_gather_kernel": "all_gather"}


def _exchange(make: Specializer, call: KernelCall) -> list[KernelCall]:
    operation = _OPERATIONS[call.kernel]
    launch = CollectiveLaunch(operation, call.inputs[0].numel, call.params["ranks"])
    return [replace(call, kernel=operation, source="", params=launch.params())]


RULES: dict[str, Rule] = dict.fromkeys(_OPERATIONS, _exchange)
