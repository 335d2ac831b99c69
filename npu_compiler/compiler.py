"""`compile()`: the list of the compiler's stages, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from npu_compiler.codegen import generate_execution_plan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.constraint_checker import check_constraints, check_target
from npu_compiler.errors import ConstraintError, InputError, IRError, ProgramFormatError, reading
from npu_compiler.fusion_patterns import INTEGER_KERNELS, fuse
from npu_compiler.fusions.conv import fold_padding
from npu_compiler.fusions.convolution_sums import sum_convolutions
from npu_compiler.fusions.einsums import lower_einsums
from npu_compiler.fusions.outer_products import lower_outer_products
from npu_compiler.fusions.quantized_caches import quantize_caches
from npu_compiler.graph.model import IRGraph
from npu_compiler.graph.reader import read_ir
from npu_compiler.ops.rotary_region import expand_rotary_regions
from npu_compiler.options import CompileOptions, GraphStage, Stage
from npu_compiler.passes.batch_norm import fold_batch_norm, lower_batch_norm
from npu_compiler.passes.common_subexpressions import eliminate_common_subexpressions
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_compiler.passes.functionalize import functionalize
from npu_compiler.passes.integer_ranges import bound_integers
from npu_compiler.passes.layout import assign_layout
from npu_compiler.passes.noops import eliminate_noops
from npu_compiler.passes.precision import assign_storage, choose_compute_dtype, native_dtype
from npu_compiler.passes.quantize import mark_quantized_weights, split_quantized_weights
from npu_compiler.passes.shard import shard
from npu_compiler.program.check import check_calls, check_program, undeclared_kernels
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import CodegenTarget, OpLevelTarget
from npu_compiler.program.trust import MADE_HERE

Source: TypeAlias = str | Path | Mapping[str, Any] | IRGraph | Any
"""The IR to compile: a path of IR JSON, its dict, a torch_ir `IR`, or a graph already read."""

_NORMALIZE: list[GraphStage] = [
    ("expand_rotary_regions", expand_rotary_regions),
    ("functionalize", functionalize),
    ("eliminate_noops", eliminate_noops),
    ("eliminate_dead_code", eliminate_dead_code),
]

_CHECKS = ("check_constraints", "check_target")
GENERATE = "generate_calls"
"""The stage that generates a plan from the graph. Stages before it change the graph, stages after it the plan."""


def normalize(graph: IRGraph) -> IRGraph:
    """The graph in the form that all later stages expect.

    It has no in-place ops, assertions, no-ops or opaque rotary regions (nodes that hide a rotary embedding).
    """
    graph = _with_native_dtype(graph)
    for _, stage in _NORMALIZE:
        graph = stage(graph)
    return graph


def _with_native_dtype(graph: IRGraph) -> IRGraph:
    """The graph with its native float dtype recorded, while all its weights are still in it."""
    return replace(graph, native_dtype=native_dtype(graph))


def default_stages(graph: IRGraph, target: CodegenTarget, options: CompileOptions) -> list[Stage]:
    """The stages for a graph in order, each with its name, as `options.stages` receives them."""
    config = target.config
    disabled = {*options.disabled_fusions, *([] if config.integer_kernels else [INTEGER_KERNELS])}
    compute_dtype = choose_compute_dtype(graph, options.compute_dtype)
    source_shapes = {key: graph.tensors[name].shape for name, recipe in graph.weights.items() for key in recipe.keys()}
    mark = partial(mark_quantized_weights, quantization=options.quantization, config=config)
    return [
        *_NORMALIZE,
        ("check_constraints", partial(check_constraints, target=target, compute_dtype=compute_dtype)),
        ("bound_integers", bound_integers),
        ("eliminate_common_subexpressions", eliminate_common_subexpressions),
        ("lower_outer_products", lower_outer_products),
        ("lower_einsums", lower_einsums),
        ("fold_padding", fold_padding),
        ("fold_batch_norm", fold_batch_norm),
        ("lower_batch_norm", lower_batch_norm),
        ("sum_convolutions", sum_convolutions),
        ("mark_quantized_weights", mark),
        *([] if options.mesh is None else [("shard", partial(shard, mesh=options.mesh))]),
        ("fuse", partial(fuse, disabled=disabled, target=target)),
        ("eliminate_noops", eliminate_noops),
        ("eliminate_dead_code", eliminate_dead_code),
        ("assign_storage", partial(assign_storage, compute_dtype=compute_dtype)),
        ("split_quantized_weights", split_quantized_weights),
        ("quantize_caches", partial(quantize_caches, kv_cache=options.kv_cache, config=config)),
        ("assign_layout", partial(assign_layout, config=config)),
        ("check_target", partial(check_target, target=target)),
        (GENERATE, partial(generate_execution_plan, target=target, source_shapes=source_shapes)),
        *target.stages(),
        ("plan_memory", partial(plan_memory, alignment=config.buffer_alignment)),
        *([("assemble", target.assemble)] if target.assembles else []),
    ]


def _stages(graph: IRGraph, target: CodegenTarget, options: CompileOptions) -> list[Stage]:
    stages = default_stages(graph, target, options)
    return stages if options.stages is None else options.stages(stages)


def compile(ir: Source, target: CodegenTarget | None = None, options: CompileOptions | None = None) -> CompiledProgram:
    """Compile IR into a program.

    Args:
        ir: Path of IR JSON, its dict, a torch_ir `IR`, or a graph already read.
        target: Names the kernels; None means the op-level target that Metal and the CPU device share.
        options: Dtype, quantization, fusions to leave out; None means all as the graph suggests.

    Raises:
        IRError: the IR is malformed.
        ConstraintError: the graph holds what the NPU cannot run; `partition()` can still run it. Or the target names
            kernels that are not declared.
        InputError: the quantization is unknown or does not suit a weight, there is no KV cache to quantize, the graph
            does not divide evenly among the devices, or the edited stages produce no plan.
    """
    target, options = target or OpLevelTarget(), options or CompileOptions()
    graph = _with_native_dtype(read_ir(ir))
    plan: Any = graph
    for name, stage in _stages(graph, target, options):
        with reading(partial(_contradictory, f" for stage '{name}'")):
            plan = stage(plan)
    if not isinstance(plan, ExecutionPlan):
        raise InputError(f"the stages make no plan: '{GENERATE}' is missing")
    dtype, is_code = choose_compute_dtype(graph, options.compute_dtype), target.config.programs_are_code
    if not is_code and (undeclared := undeclared_kernels([*plan.prologue, *plan.calls], target)):
        raise ConstraintError(undeclared)
    try:
        check_program(dtype, plan)
        if not is_code:
            check_calls(plan)
    except ProgramFormatError as error:
        raise _contradictory("", str(error)) from error
    return CompiledProgram(graph.name, target.config.name, dtype, plan, contains_code=is_code, trust=MADE_HERE)


def _contradictory(where: str, reason: str) -> IRError:
    return IRError(f"the graph's nodes contradict each other{where}: {reason}")


def trace_compilation(
    ir: Source, target: CodegenTarget | None = None, options: CompileOptions | None = None
) -> Iterator[tuple[str, IRGraph | ExecutionPlan]]:
    """Yield (stage name, graph or plan after it), starting with the graph as read.

    Arguments are those of `compile`. A graph that the NPU cannot run is traced too, up to the error.

    Raises:
        ConstraintError: at the stage that generates calls, if the NPU cannot run the graph.
    """
    graph = _with_native_dtype(read_ir(ir))
    yield "read", graph
    state: Any = graph
    refusal: ConstraintError | None = None
    for name, stage in _stages(graph, target or OpLevelTarget(), options or CompileOptions()):
        if name not in _CHECKS:
            if name == GENERATE and refusal is not None:
                raise refusal
            state = stage(state)
            yield name, state
            continue
        try:
            stage(state)
        except ConstraintError as error:
            refusal = refusal or error


def trace_stages(
    ir: Source, target: CodegenTarget | None = None, options: CompileOptions | None = None
) -> Iterator[tuple[str, IRGraph]]:
    """Yield (stage name, graph after it), starting with the graph as read, to show the effect of each graph stage.

    Arguments are those of `compile`. Constraints are not checked, so a graph that the NPU cannot run is traced too.
    """
    options = options or CompileOptions()

    def graph_stages(stages: list[Stage]) -> list[Stage]:
        edited = stages if options.stages is None else options.stages(stages)
        return list(takewhile(lambda stage: stage[0] != GENERATE, edited))

    for name, graph in trace_compilation(ir, target, replace(options, stages=graph_stages)):
        assert isinstance(graph, IRGraph)
        yield name, graph
