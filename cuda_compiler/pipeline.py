"""The stages of the CUDA target in order: op-level calls in, calls of generated kernels out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from cuda_compiler.elementwise.around_rows import join_around_rows
from cuda_compiler.elementwise.grouping import Group, find_groups, join_neighbours
from cuda_compiler.elementwise.inlining import inline_reads
from cuda_compiler.elementwise.joined_reductions import join_reductions
from cuda_compiler.elementwise.kernel_source import generate_elementwise, generate_side_by_side
from cuda_compiler.elementwise.side_by_side import place_side_by_side
from cuda_compiler.elementwise.stored_parts import store_parts
from cuda_compiler.passes.attention_operands import form_attention
from cuda_compiler.passes.biases import round_biases
from cuda_compiler.passes.channels_last import lay_channels_last
from cuda_compiler.passes.copied_reads import read_sources
from cuda_compiler.passes.copies import drop_copies, write_in_place
from cuda_compiler.passes.epilogues import absorb_epilogues, products_as_convolutions
from cuda_compiler.passes.expert_products import join_expert_products
from cuda_compiler.passes.few_elements import compute_where_read
from cuda_compiler.passes.integers import lay_integers
from cuda_compiler.passes.joined_products import join_products
from cuda_compiler.passes.merged_groups import merge_groups
from cuda_compiler.passes.open_softmaxes import open_softmaxes
from cuda_compiler.passes.operand_orders import order_operands
from cuda_compiler.passes.packed_batches import pack_batches
from cuda_compiler.passes.padded_terms import pad_terms
from cuda_compiler.passes.plane_products import form_plane_products, keep_scores_in_planes
from cuda_compiler.passes.rank_sums import join_rank_sums
from cuda_compiler.passes.rotary_updates import ROTARY_UPDATE, join_rotary_updates
from cuda_compiler.passes.rounded_rows import join_rounding
from cuda_compiler.passes.routing import join_routing
from cuda_compiler.passes.shared_operands import join_shared_operands
from cuda_compiler.passes.short_reductions import open_short_reductions
from cuda_compiler.passes.squeeze_excite import join_squeeze_excite
from cuda_compiler.passes.weighted_sums import join_weighted_sums
from cuda_compiler.passes.wide_channels import widen_channels
from cuda_compiler.passes.wide_heads import widen_heads
from cuda_compiler.passes.widened_keys import read_unwidened_keys
from cuda_compiler.resident.kernel import form_resident_kernels
from cuda_compiler.rules.fused_rows import rows_with_groups
from cuda_compiler.rules.joined_reductions import reductions_with_groups
from cuda_compiler.rules.matmul import CUBLAS_GEMM
from cuda_compiler.rules.movement import transposing_copy
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
        ("open_short_reductions", open_short_reductions),
        ("keep_scores_in_planes", keep_scores_in_planes),
        ("read_sources", read_sources),
        ("merge_groups", merge_groups),
        ("widen_channels", widen_channels),
        ("lay_channels_last", lay_channels_last),
        ("read_images", read_sources),  # again: convolutions and pooling read images that lie channels-last
        ("drop_copies", drop_copies),
        ("absorb_epilogues", absorb_epilogues),
        ("form_plane_products", form_plane_products),
        *([("join_squeeze_excite", join_squeeze_excite)] if gpu.has_clusters else []),
        ("write_in_place", write_in_place),
        ("join_routing", join_routing),
        ("join_weighted_sums", join_weighted_sums),
        ("widen_heads", widen_heads),
        ("pad_terms", pad_terms),
        ("products_as_convolutions", partial(products_as_convolutions, has_warpgroups=gpu.has_warpgroups)),
        ("round_biases", round_biases),
        ("order_operands", order_operands),
        ("form_attention", form_attention),
        ("join_shared_operands", join_shared_operands),
        ("pack_batches", pack_batches),
        ("lay_integers", lay_integers),
        ("read_unwidened_keys", read_unwidened_keys),
        ("open_softmaxes", open_softmaxes),
        specializing(form_resident_kernels),
        specializing(join_expert_products),
        specializing(join_rotary_updates),
        specializing(generate_prologue),
        specializing(join_rounding),
        specializing(join_products),
        specializing(join_rank_sums),
        ("compute_where_read", compute_where_read),
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

    Buffers that were only read inside one fused kernel disappear. What rules compute of constants joins the prologue.
    """
    read_later = {view.buffer for view in plan.output_views.values()}
    private = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in read_later}
    groups = join_reductions(inline_reads(find_groups(plan.calls), private))
    groups = store_parts(join_neighbours(join_around_rows(groups, private)), private)
    if all(call.kernel != ROTARY_UPDATE for call in plan.calls):  # what stands before these is known to their pass
        groups = place_side_by_side(groups)
    calls = _generate(groups, plan, make, read_later)
    prologue = [*plan.prologue, *make.ahead]
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
    """The calls of generated kernels that replace the calls of `groups`.

    Args:
        read_later: Buffers that are read after the last group.
    """
    readers: dict[str, set[int]] = {name: {-1} for name in read_later}
    for index, group in enumerate(groups):
        for view in group.loads:
            readers.setdefault(view.buffer, set()).add(index)
    calls: list[KernelCall] = []
    for index, group in enumerate(groups):
        make.invalidate(group.written_buffers)
        call, is_fused = group.calls[0], group.prologue is not None or group.epilogue is not None
        if not (group.is_elementwise or is_fused or group.rows is not None or group.beside):
            is_generated = call.source in make.sources or call.kernel == CUBLAS_GEMM
            calls += [call] if is_generated else expand(make, call)
            continue
        stored = [
            view
            for view in group.writes
            if plan.buffers[view.buffer].kind not in ("arena", "persistent")
            or readers.get(view.buffer, set()) - {index}
        ]
        if not stored:
            continue
        if group.beside:
            calls.append(generate_side_by_side(group, stored, make))
        elif group.rows is not None:
            calls.append(reductions_with_groups(make, group, stored))
        elif is_fused:
            calls.append(rows_with_groups(make, group, stored))
        else:
            alone = len(group.calls) == 1 and ELEMENTWISE_KERNELS[call.kernel].op.name == "copy"
            copied = transposing_copy(make, call) if alone and len(group.reads) == 1 and not group.inlined else None
            calls.append(copied or generate_elementwise(group, stored, make))
    return calls
