"""Checks the consistency of a program from a file, before anything is allocated or run for it.

`codec` has already checked all types. Here every name must refer to something, every view must lie in its buffer, and,
for kernels that are declared, every call must fit its kernel's declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from npu_compiler.errors import ProgramFormatError
from npu_compiler.graph.dtypes import COMPUTE_DTYPES, KNOWN_DTYPES, STORED_DTYPES, is_int, itemsize
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.weight_recipe import recipe_shape
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, declaration
from npu_compiler.program.kernels import KERNELS, KernelCall, KernelDecl
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan, WeightSpec
from npu_compiler.program.target import CodegenTarget, OpLevelTarget
from npu_compiler.program.views import View, numel

# Elements that a view may repeat for each byte that the program declares; of what a compiler makes, few repeat as much.
_MOST_REPEATS = 4096
_MOST_DIMENSIONS = 64  # PyTorch's limit
_MOST_ELEMENTS = 2**48


def check_program(compute_dtype: str, plan: ExecutionPlan) -> None:
    """Check everything that can be checked without the declarations of kernels.

    Raises:
        ProgramFormatError: says what is inconsistent, and where.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise ProgramFormatError(f"its compute dtype is '{compute_dtype}'")
    _check_buffers(plan)
    _check_tensors(plan)
    calls = [*plan.prologue, *plan.calls]
    for call in calls:
        for view in (*call.inputs, *call.outputs):
            _check_view(view, plan.buffers.get(view.buffer))
    _check_outputs(plan)
    _check_writes(calls, plan)


def check_calls(plan: ExecutionPlan) -> None:
    """Check every call against the declaration of its kernel, in a program that has passed `check_program`.

    The op table, which declares the kernels, must have been imported.

    Raises:
        ProgramFormatError: no such kernel is declared, or a call does not fit it.
    """
    calls = [*plan.prologue, *plan.calls]
    _check_prologue(plan)
    _check_repeats(plan, calls)
    for call in calls:
        _check_call(call)
        _check_index(call, plan)
    for name, buffer in plan.buffers.items():
        if not -1 <= buffer.first_use <= buffer.last_use < max(len(plan.calls), 1):
            raise ProgramFormatError(f"buffer '{name}' is used by calls that it does not have")


def undeclared_kernels(calls: Iterable[KernelCall], target: CodegenTarget) -> list[str]:
    """A sentence for each kernel that a target names but nobody has declared, which says how to declare it."""
    op_level = {**{target.fused_kernel(name)[0]: decl for name, decl in KERNELS.items()}, **_products(target)}
    op_level |= {target.elementwise_kernel(name)[0]: decl for name, decl in ELEMENTWISE_KERNELS.items()}
    sentences: dict[str, str] = {}
    for call in calls:
        if call.kernel in sentences or call.kernel in KERNELS or call.kernel in ELEMENTWISE_KERNELS:
            continue
        replaced = op_level.get(call.kernel)
        model = "" if replaced is None else f", such as those of the kernel that it replaces, {replaced}"
        sentences[call.kernel] = (
            f"node '{call.node}': target '{target.config.name}' names a kernel '{call.kernel}' "
            f"(source '{call.source}') that is not declared: declare_kernel() of npu_compiler.codegen takes its "
            f"operands and parameters{model}"
        )
    return list(sentences.values())


def _products(target: CodegenTarget) -> dict[str, KernelDecl]:
    """The target's names of its matrix product kernels → the declarations of the equivalent op-level kernels."""
    plain = OpLevelTarget()
    forms = [(is_vec, transposed) for is_vec in (False, True) for transposed in (False, True)]
    return {target.matmul_kernel(*form)[0]: KERNELS[plain.matmul_kernel(*form)[0]] for form in forms}


def _check_call(call: KernelCall) -> None:
    """Check a call against the declaration of its kernel."""
    try:
        problem = declaration(call).problem(call)
    except KeyError:
        problem = "no kernel of that name is declared"
    if problem:
        raise ProgramFormatError(f"kernel '{call.kernel}' (node '{call.node}'): {problem}")


def _check_buffers(plan: ExecutionPlan) -> None:
    for name, buffer in plan.buffers.items():
        if buffer.name != name:
            raise ProgramFormatError("its buffers are not listed under their names")
        if buffer.dtype not in STORED_DTYPES or not _is_shape(buffer.alloc_shape):
            raise ProgramFormatError(f"buffer '{name}' has no valid shape and dtype")
        if buffer.kind == "arena" and not 0 <= buffer.offset <= plan.arena_bytes - buffer.size_bytes:
            raise ProgramFormatError(f"buffer '{name}' lies outside the arena")
        if buffer.offset % itemsize(buffer.dtype):
            raise ProgramFormatError(f"buffer '{name}' is not aligned to its elements")


def _check_tensors(plan: ExecutionPlan) -> None:
    """Check the specs of inputs, outputs and weights, and the buffers that they fill."""
    weights = {name: weight.spec for name, weight in plan.weights.items()}
    if [spec.name for spec in weights.values()] != list(weights):
        raise ProgramFormatError("its weights are not listed under their names")
    for spec in (*plan.inputs, *weights.values(), *plan.outputs):
        _check_spec(spec)
    for weight in plan.weights.values():
        _check_recipe(weight)
    filled = {  # a constant is cast to the dtype of its buffer
        **{name: ("constant", value.shape, None) for name, value in plan.constants.items()},
        **{name: ("weight", spec.alloc_shape or spec.shape, spec.storage) for name, spec in weights.items()},
        **{spec.name: ("input", spec.alloc_shape or spec.shape, spec.storage) for spec in plan.inputs},
    }
    held = {
        name: (b.kind, b.alloc_shape, None if b.kind == "constant" else b.dtype)
        for name, b in plan.buffers.items()
        if b.kind in ("input", "weight", "constant")
    }
    if held != filled or len(filled) != len(plan.constants) + len(weights) + len(plan.inputs):
        raise ProgramFormatError("its inputs, weights and constants do not match its buffers")


def _check_spec(spec: TensorSpec) -> None:
    alloc = spec.alloc_shape
    if spec.dtype not in KNOWN_DTYPES or spec.storage not in STORED_DTYPES or not _is_shape(spec.shape):
        raise ProgramFormatError(f"tensor '{spec.name}' has no valid shape and dtype")
    if alloc is None:
        return
    if len(alloc) != len(spec.shape) or any(room < size for room, size in zip(alloc, spec.shape, strict=True)):
        raise ProgramFormatError(f"tensor '{spec.name}' does not fit into its memory")


def _is_shape(shape: Sequence[int]) -> bool:
    return (
        len(shape) <= _MOST_DIMENSIONS and min((*shape, 0)) >= 0 and numel([max(n, 1) for n in shape]) < _MOST_ELEMENTS
    )


def _check_recipe(weight: WeightSpec) -> None:
    name, sources = weight.spec.name, weight.source_shapes
    if not set(weight.recipe.keys()) <= sources.keys():
        raise ProgramFormatError(f"weight '{name}' reads a key whose shape is not known")
    try:
        shape = recipe_shape(weight.recipe, sources)
    except ValueError as error:
        raise ProgramFormatError(f"weight '{name}' cannot be made: {error}") from error
    if shape != weight.spec.shape:
        raise ProgramFormatError(f"weight '{name}' would be made as {list(shape)}, not {list(weight.spec.shape)}")


def _check_view(view: View, owner: BufferAllocation | None) -> None:
    if owner is None:
        raise ProgramFormatError(f"a kernel uses buffer '{view.buffer}', which does not exist")
    fits = len(view.shape) == len(view.strides) and view.dtype == owner.dtype and _is_shape(view.shape)
    if not fits or min((*view.strides, view.offset, 0)) < 0:
        raise ProgramFormatError(f"a view of buffer '{view.buffer}' is malformed")
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if 0 not in view.shape and (last + 1) * itemsize(view.dtype) > owner.size_bytes:
        raise ProgramFormatError(f"a view reaches beyond its buffer '{view.buffer}'")
    if 0 in view.shape and view.offset * itemsize(view.dtype) > owner.size_bytes:
        raise ProgramFormatError(f"a view begins behind its buffer '{view.buffer}'")


def _check_outputs(plan: ExecutionPlan) -> None:
    if [spec.name for spec in plan.outputs] != list(plan.output_views):
        raise ProgramFormatError("its outputs do not match its output views")
    inputs = {spec.name: spec for spec in plan.inputs}
    for output, donated in plan.donations.items():
        if output not in plan.output_views or donated not in inputs:
            raise ProgramFormatError(f"output '{output}' cannot update '{donated}' in place")
    if len(set(plan.donations.values())) != len(plan.donations):
        raise ProgramFormatError("two of its outputs update the same input in place")
    for spec in plan.outputs:
        view, donor = plan.output_views[spec.name], plan.donations.get(spec.name)
        buffer = plan.buffers.get(view.buffer)
        _check_view(view, buffer)
        assert buffer is not None
        if donor is None:
            fits = buffer.kind == "output" and view.offset == 0
        else:
            fits = view.buffer == donor and inputs[donor].shape == spec.shape
        same_size = numel(spec.alloc_shape or spec.shape) == numel(buffer.alloc_shape)
        if not fits or spec.storage != buffer.dtype or view.shape != spec.shape or not same_size:
            raise ProgramFormatError(f"output '{spec.name}' is not what its buffer '{view.buffer}' holds")


def _check_writes(calls: Sequence[KernelCall], plan: ExecutionPlan) -> None:
    """Refuse calls that write to a read-only buffer, or that write several elements to one place."""
    donated = set(plan.donations.values())
    for call in calls:
        where = f"kernel '{call.kernel}' (node '{call.node}') writes"
        kinds = {plan.buffers[view.buffer].kind for view in call.outputs if view.buffer not in donated}
        if not call.outputs or kinds & {"input", "weight", "constant"}:
            raise ProgramFormatError(f"{where} to no buffer, or to one that is read-only")
        if not all(map(_writes_apart, call.outputs)):
            raise ProgramFormatError(f"{where} several elements to one place")


def _check_prologue(plan: ExecutionPlan) -> None:
    """Check that only the prologue writes persistent buffers, and that it reads only these, weights and constants.

    Programs that are code are exempt: their calls may keep state there from run to run.
    """
    for calls, reads, writes in (
        (plan.prologue, {"weight", "constant", "persistent"}, {"persistent"}),
        (plan.calls, None, {"input", "arena", "output"}),
    ):
        for call in calls:
            read = {plan.buffers[view.buffer].kind for view in call.inputs}
            written = {plan.buffers[view.buffer].kind for view in call.outputs}
            if not written <= writes or (reads is not None and not read <= reads):
                raise ProgramFormatError(
                    f"kernel '{call.kernel}' (node '{call.node}') makes a constant of what changes from run to run"
                )


def _writes_apart(view: View) -> bool:
    """Whether no two elements of a view share a place: each stride is longer than the reach of all shorter ones."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1
    ):
        if stride <= reach:
            return 0 in view.shape
        reach += (size - 1) * stride
    return True


def _check_repeats(plan: ExecutionPlan, calls: Sequence[KernelCall]) -> None:
    """Limit the elements of views that repeat a few by strides of 0: they take no memory, but they do take time."""
    declared = plan.arena_bytes + sum(buffer.size_bytes for buffer in plan.buffers.values()) + 1
    for call in calls:
        if any(view.numel > _MOST_REPEATS * declared for view in call.inputs):
            raise ProgramFormatError(
                f"kernel '{call.kernel}' (node '{call.node}') repeats its input beyond all that the program declares"
            )


def _check_index(call: KernelCall, plan: ExecutionPlan) -> None:
    """Check that an index that a call declares as checked is a program input whose bounds are narrow enough."""
    checked = declaration(call).checked_index(call)
    if checked is None:
        return
    index, rows = checked
    spec = next((spec for spec in plan.inputs if spec.name == index.buffer), None)
    low, high = (-1, -1) if spec is None or spec.bounds is None or not is_int(spec.dtype) else spec.bounds
    if not 0 <= low <= high < rows:
        raise ProgramFormatError(
            f"kernel '{call.kernel}' (node '{call.node}') takes '{index.buffer}' for a checked index, which it is not"
        )
