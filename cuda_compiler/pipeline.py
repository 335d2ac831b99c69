"""The stages of the CUDA target in order: op-level calls in, calls of generated kernels out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cuda_compiler.elementwise.grouping import Group, find_groups
from cuda_compiler.elementwise.kernel_source import generate_elementwise
from cuda_compiler.passes.channels_last import lay_channels_last
from cuda_compiler.passes.copies import drop_copies, write_in_place
from cuda_compiler.passes.epilogues import absorb_epilogues, products_as_convolutions
from cuda_compiler.passes.integers import lay_integers
from cuda_compiler.passes.joined_products import join_products
from cuda_compiler.passes.rank_sums import join_rank_sums
from cuda_compiler.passes.rotary_updates import join_rotary_updates
from cuda_compiler.passes.rounded_rows import join_rounding
from cuda_compiler.passes.squeeze_excite import join_squeeze_excite
from cuda_compiler.resident.kernel import form_resident_kernels
from cuda_compiler.rules.matmul import CUBLAS_GEMM
from cuda_compiler.rules.movement import transposing_copy
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.gpu import HOPPER
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan


def generate_kernels(
    plan: ExecutionPlan,
    shared_memory: int,
    capability: int,
    phase_clocks: bool = False,
    scales_products: bool = True,
    reaches_peers: bool = False,
) -> ExecutionPlan:
    """Replace every op-level call by calls of generated kernels.

    Given:  mul; add; softmax_kernel
    Result: fused_mul_add; a specialized softmax_kernel

    Buffers that were only read inside one fused kernel disappear.

    Args:
        shared_memory, capability, phase_clocks, scales_products, reaches_peers: As `CUDACodegenTarget` has them.
    """
    plan = write_in_place(absorb_epilogues(drop_copies(lay_channels_last(plan))))
    if capability >= HOPPER:  # clusters of blocks
        plan = join_squeeze_excite(plan)
    plan = lay_integers(products_as_convolutions(plan))
    taken = frozenset(plan.buffers)
    constants = frozenset(name for name, buffer in plan.buffers.items() if buffer.kind in ("weight", "constant"))
    make = Specializer(taken, capability, shared_memory, phase_clocks, scales_products, reaches_peers, constants)
    kept = {view.buffer for view in plan.output_views.values()}
    plan = replace(plan, calls=form_resident_kernels(plan, make))
    plan = replace(plan, calls=join_rotary_updates(plan, make))
    read_later = kept | {view.buffer for call in plan.calls for view in call.inputs}
    prologue = _generate(find_groups(plan.prologue), plan, make, read_later)
    make.invalidate(plan.buffers)  # the prologue's results in the arena are overwritten by every run
    plan = replace(plan, calls=join_rounding(plan, make))
    plan = replace(plan, calls=join_products(plan, make))
    plan = replace(plan, calls=join_rank_sums(plan, make))
    calls = _generate(find_groups(plan.calls), plan, make, kept)
    touched = {view.buffer for call in (*prologue, *calls) for view in (*call.inputs, *call.outputs)}
    buffers = {
        name: buffer
        for name, buffer in {**plan.buffers, **make.temporaries}.items()
        if buffer.kind not in ("arena", "persistent") or name in touched
    }
    return replace(plan, prologue=prologue, calls=calls, buffers=buffers, sources=dict(make.sources))


def _generate(
    groups: list[Group], plan: ExecutionPlan, make: Specializer, read_later: Iterable[str]
) -> list[KernelCall]:
    """The calls of generated kernels for a list of groups.

    Args:
        read_later: Buffers that are read after the last group.
    """
    readers: dict[str, set[int]] = {name: {-1} for name in read_later}
    for index, group in enumerate(groups):
        for view in group.reads:
            readers.setdefault(view.buffer, set()).add(index)
    calls: list[KernelCall] = []
    for index, group in enumerate(groups):
        make.invalidate(group.written_buffers)
        if not group.is_elementwise:
            call = group.calls[0]
            is_made = call.source in make.sources or call.kernel == CUBLAS_GEMM
            calls += [call] if is_made else expand(make, call)
            continue
        stored = [
            view
            for view in group.writes
            if plan.buffers[view.buffer].kind not in ("arena", "persistent")
            or readers.get(view.buffer, set()) - {index}
        ]
        if stored:
            alone = len(group.calls) == 1 and ELEMENTWISE_KERNELS[group.calls[0].kernel].op.name == "copy"
            copied = transposing_copy(make, group.calls[0]) if alone and len(group.reads) == 1 else None
            calls.append(copied or generate_elementwise(group, stored, make))
    return calls
