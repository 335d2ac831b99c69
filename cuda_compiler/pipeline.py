"""The stages of the CUDA target in order: op-level calls in, calls of generated kernels out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from cuda_compiler.elementwise.grouping import Group, find_groups, place_of
from cuda_compiler.elementwise.kernel_source import generate_elementwise
from cuda_compiler.passes.channels_last import lay_channels_last
from cuda_compiler.passes.copies import drop_copies, write_in_place
from cuda_compiler.passes.epilogues import absorb_epilogues, products_as_convolutions
from cuda_compiler.passes.integers import lay_integers
from cuda_compiler.passes.joined_products import join_products
from cuda_compiler.passes.open_softmaxes import open_softmaxes
from cuda_compiler.passes.rank_sums import join_rank_sums
from cuda_compiler.passes.rotary_updates import join_rotary_updates
from cuda_compiler.passes.rounded_rows import join_rounding
from cuda_compiler.passes.squeeze_excite import join_squeeze_excite
from cuda_compiler.resident.kernel import form_resident_kernels
from cuda_compiler.rules.matmul import CUBLAS_GEMM
from cuda_compiler.rules.movement import transposing_copy
from cuda_compiler.rules.norms import SOFTMAXES, fused_softmax
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.gpu import GPU
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import PlanStage


def cuda_stages(gpu: GPU) -> list[PlanStage]:
    """The stages of the CUDA target for one program, in order; those that specialize kernels share a `Specializer`.

    `generate_prologue` and `generate_kernels` are needed; each of the others may be left out.
    """
    make = Specializer(gpu)

    def specializing(stage: Callable[[ExecutionPlan, Specializer], ExecutionPlan]) -> PlanStage:
        def run(plan: ExecutionPlan) -> ExecutionPlan:
            make.buffers = plan.buffers
            return stage(plan, make)

        return stage.__name__, run

    return [
        ("lay_channels_last", lay_channels_last),
        ("drop_copies", drop_copies),
        ("absorb_epilogues", absorb_epilogues),
        ("write_in_place", write_in_place),
        *([("join_squeeze_excite", join_squeeze_excite)] if gpu.has_clusters else []),
        ("products_as_convolutions", products_as_convolutions),
        ("lay_integers", lay_integers),
        ("open_softmaxes", open_softmaxes),
        specializing(form_resident_kernels),
        specializing(join_rotary_updates),
        specializing(generate_prologue),
        specializing(join_rounding),
        specializing(join_products),
        specializing(join_rank_sums),
        specializing(generate_kernels),
    ]


def generate_prologue(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with the calls of its prologue replaced by calls of generated kernels."""
    read_later = {view.buffer for view in plan.output_views.values()}
    read_later |= {view.buffer for call in plan.calls for view in call.inputs}
    prologue = _generate(find_groups(plan.prologue), plan, make, read_later)
    make.invalidate(plan.buffers)  # the prologue's results in the arena are overwritten by every run
    return replace(plan, prologue=prologue)


def generate_kernels(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with calls of generated kernels in place of all op-level calls, with their sources.

    Given:  mul; add; softmax_kernel
    Result: fused_mul_add; a specialized softmax_kernel

    Buffers that were only read inside one fused kernel disappear.
    """
    calls = _generate(find_groups(plan.calls), plan, make, {view.buffer for view in plan.output_views.values()})
    touched = {view.buffer for call in (*plan.prologue, *calls) for view in (*call.inputs, *call.outputs)}
    buffers = {
        name: buffer
        for name, buffer in {**plan.buffers, **make.temporaries}.items()
        if buffer.kind not in ("arena", "persistent") or name in touched
    }
    return replace(plan, calls=calls, buffers=buffers, sources=dict(make.sources))


def _generate(
    groups: list[Group], plan: ExecutionPlan, make: Specializer, read_later: Iterable[str]
) -> list[KernelCall]:
    """The calls of generated kernels that replace the calls of `groups`.

    Args:
        read_later: Buffers that are read after the last group.
    """
    readers: dict[str, set[int]] = {name: {-1} for name in read_later}
    for index, group in enumerate(groups):
        for view in group.loads:
            readers.setdefault(view.buffer, set()).add(index)
    calls: list[KernelCall] = []
    softmaxes = _fused_softmaxes(groups, readers, plan, make)
    for index, group in enumerate(groups):
        make.invalidate(group.written_buffers)
        if index in softmaxes:
            calls += [softmaxes[index]] if group.calls[0].kernel in SOFTMAXES else []
            continue
        if not group.is_elementwise:
            call = group.calls[0]
            is_generated = call.source in make.sources or call.kernel == CUBLAS_GEMM
            calls += [call] if is_generated else expand(make, call)
            continue
        stored = [
            view
            for view in group.writes
            if plan.buffers[view.buffer].kind not in ("arena", "persistent")
            or readers.get(view.buffer, set()) - {index}
        ]
        if stored:
            alone = len(group.calls) == 1 and ELEMENTWISE_KERNELS[group.calls[0].kernel].op.name == "copy"
            copied = transposing_copy(make, group.calls[0]) if alone and len(group.loads) == 1 else None
            calls.append(copied or generate_elementwise(group, stored, make))
    return calls


def _fused_softmaxes(
    groups: list[Group], readers: dict[str, set[int]], plan: ExecutionPlan, make: Specializer
) -> dict[int, KernelCall]:
    """The softmaxes whose logits nothing else reads, with the element-wise group that computes these.

    Given:  fused_add_where;  softmax_kernel
    Result: fused_softmax

    Returns:
        Position of the softmax among the groups, and of the element-wise group → the call that computes both.
    """
    fused: dict[int, KernelCall] = {}
    for index, group in enumerate(groups):
        call = group.calls[0]
        if call.kernel not in SOFTMAXES or call.source:
            continue
        made = [at for at in range(index) if call.inputs[0].buffer in groups[at].written_buffers]
        if len(made) != 1 or readers.get(call.inputs[0].buffer) != {index}:
            continue
        (at,) = made
        logits, between = groups[at], groups[at + 1 : index]
        others = {view.buffer for view in logits.writes} - {call.inputs[0].buffer}
        stays = plan.buffers[call.inputs[0].buffer].kind == "arena" and not any(
            readers.get(x, set()) - {at} for x in others
        )
        places = [place_of(view) for view in logits.writes]
        if not logits.is_elementwise or place_of(call.inputs[0]) not in places or not stays:
            continue
        if any(logits.conflicts(other) for other in between):
            continue
        both = fused_softmax(make, call, logits)
        if both is not None:
            fused[at] = fused[index] = both
    return fused
