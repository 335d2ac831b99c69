"""The table of rules: op-level kernel → rule. A family of rules is registered here."""

from __future__ import annotations

from collections.abc import Mapping

from cuda_compiler.rules import (
    attention,
    collectives,
    conv,
    experts,
    group_norm,
    integer,
    matmul,
    movement,
    norms,
    planes,
    pooling,
    quantized,
    recurrent,
    reductions,
    rotary,
    rounded,
    sorting,
)
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.errors import NPUError
from npu_compiler.program.kernels import KernelCall


def _joined(*families: Mapping[str, Rule]) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for family in families:
        if twice := sorted(rules.keys() & family.keys()):
            raise ValueError(f"kernels with two CUDA rules: {', '.join(twice)}")
        rules.update(family)
    return rules


RULES = _joined(
    attention.RULES,
    collectives.RULES,
    conv.RULES,
    experts.RULES,
    integer.RULES,
    matmul.RULES,
    movement.RULES,
    norms.RULES,
    group_norm.RULES,
    planes.RULES,
    pooling.RULES,
    quantized.RULES,
    recurrent.RULES,
    reductions.RULES,
    rotary.RULES,
    rounded.RULES,
    sorting.RULES,
)


def expand(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The calls of specialized kernels that replace an op-level call.

    Raises:
        NPUError: there is no rule for the call's kernel.
    """
    if call.kernel not in RULES:
        raise NPUError(f"the CUDA target has no template for kernel '{call.kernel}' (node '{call.node}')")
    return RULES[call.kernel](make, call)
