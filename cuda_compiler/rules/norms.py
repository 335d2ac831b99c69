"""Rules of softmax and the norms over rows, whose kernels keep a row in registers between their passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from cuda_compiler.rules.columns import is_by_columns, softmax_by_columns
from cuda_compiler.rules.rows import held_packs, shared_pack, small_teams_for, teams_for
from cuda_compiler.specialization.sizes import Size3, groups
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.program.kernels import KernelCall

ROW_KERNELS = {
    "softmax_kernel": "norms/softmax.cu",
    "log_softmax_kernel": "norms/softmax.cu",
    "masked_softmax_kernel": "norms/softmax.cu",
    "rmsnorm_kernel": "norms/norms.cu",
    "layernorm_kernel": "norms/norms.cu",
}
Form: TypeAlias = tuple[dict[str, bool | int | float], Size3, Size3]


def own_teams(call: KernelCall) -> Callable[[int, int], Form]:
    """The function that divides the rows of a softmax or norm among teams."""
    return teams_for if call.kernel.endswith("softmax_kernel") else small_teams_for


def row_form(call: KernelCall, pack: int, teams: Callable[[int, int], Form]) -> Form:
    """The template constants, grid and block of a kernel over rows, whose threads access `pack` elements at a time."""
    out = call.outputs[0]
    width = out.shape[-1]
    constants, grid, block = teams(out.numel // width, groups(width, pack))
    held = held_packs(width // pack, block, constants["teams"])
    return {**constants, "pack": pack, "held_packs": held}, grid, block


def _rows(make: Specializer, call: KernelCall) -> list[KernelCall]:
    if is_by_columns(call):
        return [softmax_by_columns(make, call)]
    constants, grid, block = row_form(call, shared_pack((*call.inputs, *call.outputs)), own_teams(call))
    operands: dict[str, Any] = {}
    if call.kernel.endswith("softmax_kernel"):
        x, *mask = call.inputs
        operands["inputs"] = {"x": x, "mask": mask[0] if mask else None}
    return [make.kernel(call, ROW_KERNELS[call.kernel], grid=grid, block=block, constants=constants, **operands)]


RULES: dict[str, Rule] = dict.fromkeys(ROW_KERNELS, _rows)
