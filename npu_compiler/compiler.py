"""`compile()`: the list of the compiler's stages, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from npu_compiler.codegen import generate_execution_plan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.constraint_checker import check_constraints, check_target
from npu_compiler.errors import ConstraintError, IRError, ProgramFormatError, reading
from npu_compiler.fusion_patterns import INTEGER_KERNELS, fuse
from npu_compiler.fusions.conv import fold_padding
from npu_compiler.fusions.outer_products import lower_outer_products
from npu_compiler.fusions.quantized_caches import quantize_caches
from npu_compiler.graph.mesh import Mesh
from npu_compiler.graph.model import IRGraph
from npu_compiler.graph.reader import read_ir
from npu_compiler.ops.rotary_region import expand_rotary_regions
from npu_compiler.passes.batch_norm import fold_batch_norm, lower_batch_norm
from npu_compiler.passes.common_subexpressions import eliminate_common_subexpressions
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_compiler.passes.functionalize import functionalize
from npu_compiler.passes.integer_ranges import bound_integers
from npu_compiler.passes.layout import assign_layout
from npu_compiler.passes.noops import eliminate_noops
from npu_compiler.passes.precision import assign_storage, choose_compute_dtype, native_dtype
from npu_compiler.passes.quantize import Quantization, mark_quantized_weights, split_quantized_weights
from npu_compiler.passes.shard import shard
from npu_compiler.program.check import check_calls, check_program, undeclared_kernels
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.target import CodegenTarget, OpLevelTarget
from npu_compiler.program.trust import MADE_HERE

Stage: TypeAlias = tuple[str, Callable[[IRGraph], IRGraph]]
StageEdit: TypeAlias = Callable[[list[Stage]], list[Stage]]


def normalize(graph: IRGraph) -> IRGraph:
    """What every user of a graph wants first: no opaque rotary regions, no in-place ops, no assertions or no-ops."""
    graph = _with_native_dtype(graph)
    for _, stage in _NORMALIZE:
        graph = stage(graph)
    return graph


_NORMALIZE: list[Stage] = [
    ("expand_rotary_regions", expand_rotary_regions),
    ("functionalize", functionalize),
    ("eliminate_noops", eliminate_noops),
    ("eliminate_dead_code", eliminate_dead_code),
]

_CHECKS = ("check_constraints", "check_target")


def _with_native_dtype(graph: IRGraph) -> IRGraph:
    """The graph with its native dtype noted, while all its weights are still there."""
    return replace(graph, native_dtype=native_dtype(graph))


def default_stages(
    compute_dtype: str,
    target: CodegenTarget,
    disabled_fusions: Collection[str] = (),
    quantization: Quantization | None = None,
    kv_cache: str | None = None,
    mesh: Mesh | None = None,
) -> list[Stage]:
    """The graph stages in order, each with its name. `compile(…, stages=…)` reorders them, cuts or extends the list."""
    unavailable = set() if target.config.integer_kernels else {INTEGER_KERNELS}
    mark = partial(mark_quantized_weights, quantization=quantization, config=target.config)
    return [
        *_NORMALIZE,
        ("check_constraints", check_constraints),
        ("bound_integers", bound_integers),
        ("eliminate_common_subexpressions", eliminate_common_subexpressions),
        ("lower_outer_products", lower_outer_products),
        ("fold_padding", fold_padding),
        ("fold_batch_norm", fold_batch_norm),
        ("lower_batch_norm", lower_batch_norm),
        ("mark_quantized_weights", mark),
        *([] if mesh is None else [("shard", partial(shard, mesh=mesh))]),
        ("fuse", partial(fuse, disabled={*disabled_fusions, *unavailable}, target=target)),
        ("eliminate_noops", eliminate_noops),
        ("eliminate_dead_code", eliminate_dead_code),
        ("assign_storage", partial(assign_storage, compute_dtype=compute_dtype)),
        ("split_quantized_weights", split_quantized_weights),
        ("quantize_caches", partial(quantize_caches, kv_cache=kv_cache, config=target.config)),
        ("assign_layout", partial(assign_layout, config=target.config)),
        ("check_target", partial(check_target, target=target)),
    ]


def _stages(
    compute_dtype: str,
    target: CodegenTarget,
    disabled_fusions: Collection[str],
    quantization: Quantization | None,
    kv_cache: str | None,
    mesh: Mesh | None,
    edit: StageEdit | None,
) -> list[Stage]:
    stages = default_stages(compute_dtype, target, disabled_fusions, quantization, kv_cache, mesh)
    return stages if edit is None else edit(stages)


def compile(
    ir: str | Path | Mapping[str, Any] | IRGraph | Any,
    target: CodegenTarget | None = None,
    *,
    compute_dtype: str | None = None,
    disabled_fusions: Collection[str] = (),
    quantization: Quantization | None = None,
    kv_cache: str | None = None,
    mesh: Mesh | None = None,
    stages: StageEdit | None = None,
) -> CompiledProgram:
    """Compile IR into a program.

    Args:
        ir: Path of IR JSON, its dict, a torch_ir `IR`, or a graph already read.
        target: Names the kernels; by default the op-level target that Metal and the CPU device share.
        compute_dtype: `float16`, `bfloat16` or `float32`; by default bfloat16 for bfloat16 models, else float16.
        disabled_fusions: Names from `FUSIONS` to leave out, for bisecting.
        quantization: How to store weights in few bits: `int4`, `int8` or `fp8`, or a `QuantizedFormat`, for all linear
            layers; or `state_dict` key → format. Weights that are not stored so already are rounded to the nearest
            when they are loaded. `int4+int8` and the like also round what these layers multiply, to int8 or fp8 with
            a scale for each row (not on Metal).
        kv_cache: `int8` or `fp8`: store KV caches in a byte an element, with a scale for each token and head, as a
            further input and output of the program, `<name>.scales` (on the CPU only). Default: in the compute dtype.
        mesh: Divide the graph among several devices, each of which runs the program with its part of the weights. The
            program has what `npu_compiler.passes.shard` makes of the graph. Default: one device.
        stages: Given the default stages, returns those to run, in order; a stage is (name, `IRGraph → IRGraph`).

    Raises:
        IRError: the IR is malformed.
        ConstraintError: the graph holds what the NPU cannot run; `partition()` can still run it. Or the target names
            kernels that are not declared.
        InputError: the quantization is unknown, a weight cannot be stored so, there is no KV cache to quantize, or the
            graph does not divide evenly among the devices.
    """
    target = target or OpLevelTarget()
    graph = read_ir(ir)
    dtype = choose_compute_dtype(graph, compute_dtype)
    source_shapes = {key: graph.tensors[name].shape for name, recipe in graph.weights.items() for key in recipe.keys()}
    graph = _with_native_dtype(graph)
    for name, stage in _stages(dtype, target, disabled_fusions, quantization, kv_cache, mesh, stages):
        with reading(partial(_contradictory, f"for stage '{name}'")):
            graph = stage(graph)
    with reading(partial(_contradictory, "for code generation")):
        plan = target.finish(generate_execution_plan(graph, target, source_shapes))
        plan = target.assemble(plan_memory(plan, target.config.buffer_alignment))
    plan.unused_weights = tuple(
        sorted(source_shapes.keys() - {key for w in plan.weights.values() for key in w.recipe.keys()})
    )
    is_code = target.config.programs_are_code
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
    return IRError(f"the graph's nodes contradict each other{where and f' {where}'}: {reason}")


def trace_stages(
    ir: str | Path | Mapping[str, Any] | IRGraph | Any,
    target: CodegenTarget | None = None,
    *,
    compute_dtype: str | None = None,
    disabled_fusions: Collection[str] = (),
    quantization: Quantization | None = None,
    kv_cache: str | None = None,
    mesh: Mesh | None = None,
    stages: StageEdit | None = None,
) -> Iterator[tuple[str, IRGraph]]:
    """Yield (stage name, graph after it), starting with the graph as read; for looking at what each stage does.

    Arguments are those of `compile`. What the NPU cannot run is traced too: constraints are not checked.
    """
    graph = _with_native_dtype(read_ir(ir))
    dtype = choose_compute_dtype(graph, compute_dtype)
    yield "read", graph
    for name, stage in _stages(
        dtype, target or OpLevelTarget(), disabled_fusions, quantization, kv_cache, mesh, stages
    ):
        if name not in _CHECKS:
            graph = stage(graph)
            yield name, graph
