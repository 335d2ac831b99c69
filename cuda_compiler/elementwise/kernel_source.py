"""Code generation of fused element-wise kernels: one CUDA C source for a group of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cuda_compiler.cuda_program import KernelLaunch
from cuda_compiler.elementwise.grouping import Group, Place, is_gather, place_of
from cuda_compiler.specialization.c_text import TYPES, expression, float_text, index_type, int_text, offset_text
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import check_grid, groups
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float, itemsize
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, as_float32
from npu_compiler.program.functions import FUNCTIONS, c_text
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

_BLOCK = 256
_ENOUGH_THREADS = MULTIPROCESSORS * 256  # wider vectors do not pay until this many threads have work
_MAX_NAME = 60


def generate_elementwise(group: Group, stored: Sequence[View], make: Specializer) -> KernelCall:
    """The call of a generated kernel that computes a whole group; intermediate values stay in registers.

    Args:
        stored: The written views that a later kernel, or the caller, reads; only these go to memory.
    """
    width = _vector_width(group, stored)
    threads = -(-group.numel // width)
    block = min(_BLOCK, WARP * groups(threads, WARP))
    name = _function_name(group)
    text = _source(group, stored, width, block, name)
    last = group.calls[-1]
    launch = KernelLaunch(check_grid((groups(threads, block), 1, 1), last), (block, 1, 1), 0)
    return KernelCall(
        name,
        make.add_source(text),
        tuple(group.loads),
        tuple(stored),
        launch.params(),
        last.node,
        sum(call.flops for call in group.calls),
        sum(distinct_bytes(view) for view in (*group.reads, *stored))
        + sum(min(distinct_bytes(view), group.numel * itemsize(view.dtype)) for view in group.sources),
    )


def _function_name(group: Group) -> str:
    name = "_".join("gather" if is_gather(x) else ELEMENTWISE_KERNELS[x.kernel].op.name for x in group.calls)
    name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME].rstrip('_')}_{len(group.calls)}"
    return f"{name}_kernel" if len(group.calls) == 1 else f"fused_{name}"


def _vector_width(group: Group, stored: Sequence[View]) -> int:
    """Elements per thread: as many as fill a 16-byte access, or fewer to have enough threads to fill the GPU.

    Fewer also if the elements of a stored view are not consecutive.
    """
    views = [*group.reads, *stored]
    width = min(8, 16 // min(itemsize(view.dtype) for view in stored))
    places = [place_of(view) for view in views]
    outputs = places[len(group.reads) :]
    while width > 1 and (
        group.numel // width < _ENOUGH_THREADS
        or any(_access(place, width) == "gather" for place in outputs)
        or any(_access(place, width) == "gather" and place.strides[-1] <= 1 for place in places)
    ):
        width //= 2
    return width


def _access(place: Place, width: int) -> str:
    """The way a thread accesses its `width` consecutive elements of a place.

    `vector` is one aligned access, `repeated` one element for all, and `gather` an access per element.
    """
    if not place.sizes:
        return "repeated"
    *outer, inner = place.strides
    if inner > 1 or place.sizes[-1] % width:
        return "gather"
    if inner == 0:
        return "repeated"
    return "gather" if place.offset % width or any(stride % width for stride in outer) else "vector"


@dataclass
class _Body:
    """The parts of a kernel's text, as they are generated.

    Attributes:
        arguments: Declarations of the pointers that the statements use.
        functions: Definition of an op's device function → its name.
        before, lane, after: Statements before, in and after the loop over a thread's elements.
        values: Place → the C variable that holds its value inside the loop, and whether that variable is an int.
        sources: View in which a gather picks elements → the kernel's argument.
    """

    arguments: list[str] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    lane: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    values: dict[Place, tuple[str, bool]] = field(default_factory=dict)
    sources: dict[View, str] = field(default_factory=dict)


def _body(group: Group, stored: Sequence[View], width: int) -> _Body:
    """The statements that compute a group's values for `width` elements, from number `first` on."""
    body = _Body()
    written = {view.buffer for view in stored}
    for index, view in enumerate(group.reads):
        alone = "" if view.buffer in written else "__restrict__ "
        body.arguments.append(f"const {TYPES[view.dtype]} *{alone}in{index}")
        _read(body, view, index, width)
    for view in group.sources:
        body.sources[view] = f"source{len(body.sources)}"
        body.arguments.append(f"const {TYPES[view.dtype]} *__restrict__ {body.sources[view]}")
    outputs = {place_of(view) for view in stored}
    last_read = {place_of(x): index for index, call in enumerate(group.calls) for x in Group.of(call).reads}
    for index, call in enumerate(group.calls):
        place = place_of(call.outputs[0])
        if is_gather(call):
            _gather(body, call, index)
        else:
            _compute(body, call, index, rounds=place in outputs and last_read.get(place, -1) > index)
    return body


def _loop(body: _Body, width: int) -> list[str]:
    """The statements before, in and after the loop over a thread's elements."""
    return [
        *(f"    {line}" for line in body.before),
        "#pragma unroll",
        f"    for (int lane = 0; lane < {width}; lane++) {{",
        *(f"        {line}" for line in body.lane),
        "    }",
        *(f"    {line}" for line in body.after),
    ]


def _functions(group: Group, body: _Body) -> list[str]:
    """The device functions that a group's statements call."""
    kernels = [ELEMENTWISE_KERNELS[call.kernel] for call in group.calls if not is_gather(call)]
    needed = {function.name for kernel in kernels for function in kernel.op.functions}
    special = [c_text(x, "__device__ __forceinline__") for name, x in FUNCTIONS.items() if name in needed]
    helpers = [f"__device__ __forceinline__ {text.replace('$', name)}" for text, name in body.functions.items()]
    return [template_text("elementwise/elementwise.cuh"), *special, *helpers]


def _source(group: Group, stored: Sequence[View], width: int, block: int, name: str) -> str:
    body = _body(group, stored, width)
    outputs = {place_of(view): index for index, view in enumerate(stored)}
    for view in stored:
        index = outputs[place_of(view)]
        body.arguments.append(f"{TYPES[view.dtype]} *out{index}")
        _write(body, view, index, width)
    lines = [
        "    begin_in_turn();",
        f"    const index_t first = {width}u * (blockIdx.x * index_t({block}) + threadIdx.x);",
        f"    if (first >= {group.numel}u) {{",
        "        return;",
        "    }",
        *_loop(body, width),
    ]
    signature = f'extern "C" __global__ void __launch_bounds__({block}) {name}({", ".join(body.arguments)})'
    return "\n".join(
        [
            index_type([*group.loads, *stored]) + template_text("common/common.cuh"),
            template_text("common/overlap.cuh"),
            *_functions(group, body),
            "",
            f"{signature} {{",
            *lines,
            "}",
            "",
        ]
    )


def fused_values(group: Group, result: View, width: int) -> tuple[dict[str, View], str]:
    """The operands and the C struct `Fused`, whose `get` computes `width` elements of a group's result.

    Args:
        result: The view that the group would write.
        width: Number of elements; their first one's row-major number is a multiple of it.
    """
    body = _body(group, [], width)
    value, _ = body.values[place_of(result)]
    body.lane.append(f"values[lane] = {value};")
    operands = {f"in{index}": view for index, view in enumerate(group.reads)}
    operands |= {name: view for view, name in body.sources.items()}
    members = (argument.replace("__restrict__ ", "") for argument in body.arguments)
    lines = [
        *_functions(group, body),
        f"#define FUSED_OPERANDS {', '.join(operands)}",
        "struct Fused {",
        *(f"    {member};" for member in members),
        f"    __device__ __forceinline__ void get(float (&values)[{width}], index_t first) const {{",
        *(f"    {line}" for line in _loop(body, width)),
        "    }",
        "};",
        "",
    ]
    return operands, "\n".join(lines)


def _read(body: _Body, view: View, index: int, width: int) -> None:
    place = place_of(view)
    access = _access(place, width)
    item = f"pack{index}.item[lane]"
    if access == "vector":
        offset = offset_text(view, "first")
        body.before.append(
            f"const Pack<{TYPES[view.dtype]}, {width}> pack{index} = load_pack<{width}>(in{index} + {offset});"
        )
    elif access == "repeated":
        body.before.append(f"const {TYPES[view.dtype]} item{index} = in{index}[{offset_text(view, 'first')}];")
        item = f"item{index}"
    else:
        item = f"in{index}[{offset_text(view, '(first + lane)')}]"
    convert, kind = ("to_float", "float") if is_float(view.dtype) else ("to_int", "int")
    body.lane.append(f"const {kind} x{index} = {convert}({item});")
    body.values[place] = (f"x{index}", kind == "int")


def _compute(body: _Body, call: KernelCall, index: int, rounds: bool) -> None:
    """Append the statements of one call to the kernel's body.

    Args:
        rounds: Round a 16-bit result here, so that readers inside the kernel see the same value as readers of the
            stored one.
    """
    op = ELEMENTWISE_KERNELS[call.kernel].op
    scalars = list(call.params["scalars"])
    inputs = [body.values[place_of(view)] for view in call.inputs]
    whole = op.integer is not None and not any(isinstance(x, float) for x in scalars)
    integer = whole and all(view.dtype in ("int32", "bool") for view in call.inputs)
    kind = "int" if integer else "float"
    remaining = iter(inputs)
    arguments = []
    for scalar in scalars:
        if scalar is not None:
            arguments.append(int_text(scalar) if integer else float_text(as_float32(scalar)))
            continue
        variable, is_int = next(remaining)
        arguments.append(variable if is_int == integer else f"{kind}({variable})")
    attributes = "".join(f"const float {attr} = {float_text(call.params[attr])}; " for attr in op.attrs)
    operands = ", ".join(f"{kind} {letter}" for letter, _ in zip("abc", arguments, strict=False))
    out = call.outputs[0]
    expr = op.integer if integer else expression(op, rounds=out.dtype in HALF_DTYPES)
    text = f"{kind} $({operands}) {{ {attributes}return {expr}; }}"
    function = body.functions.setdefault(text, f"{op.name}_{len(body.functions)}")
    result = f"{function}({', '.join(arguments)})"
    if out.dtype == "int32":
        result = f"from<int>({result})"
    elif out.dtype == "bool":
        result = f"int(from<bool>({result}))"
    elif rounds and out.dtype in HALF_DTYPES:
        result = f"to_float(from<{TYPES[out.dtype]}>({result}))"
    body.lane.append(f"const {'float' if is_float(out.dtype) else 'int'} v{index} = {result};")
    body.values[place_of(out)] = (f"v{index}", not is_float(out.dtype))


def _gather(body: _Body, call: KernelCall, index: int) -> None:
    """Append the statements of a gather: an index that is out of range picks what stands for a missing value."""
    (source, _), (out,), dim = call.inputs, call.outputs, call.params["dim"]
    picked, _ = body.values[place_of(call.inputs[1])]
    steps = tuple(0 if axis == dim else step for axis, step in enumerate(source.strides))
    along = offset_text(replace(source, shape=out.shape, strides=steps), "(first + lane)")
    convert, kind = ("to_float", "float") if is_float(source.dtype) else ("to_int", "int")
    place = f"{body.sources[source]}[index_t({picked}) * {source.strides[dim]}u + {along}]"
    value = f"unsigned({picked}) < {source.shape[dim]}u ? {convert}({place}) : missing<{kind}>()"
    body.lane.append(f"const {kind} v{index} = {value};")
    body.values[place_of(out)] = (f"v{index}", kind == "int")


def _write(body: _Body, view: View, index: int, width: int) -> None:
    place = place_of(view)
    value = f"from<{TYPES[view.dtype]}>({body.values[place][0]})"
    if _access(place, width) == "vector":
        body.before.append(f"Pack<{TYPES[view.dtype]}, {width}> result{index};")
        body.lane.append(f"result{index}.item[lane] = {value};")
        body.after.append(f"store_pack<{width}>(out{index} + {offset_text(view, 'first')}, result{index});")
    else:
        body.lane.append(f"out{index}[{offset_text(view, '(first + lane)')}] = {value};")
