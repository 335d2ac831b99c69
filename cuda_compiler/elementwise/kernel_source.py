"""Code generation of fused element-wise kernels: one CUDA C source for a group of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cuda_compiler.cuda_program import KernelLaunch
from cuda_compiler.elementwise.grouping import Group, Part, Place, place_of
from cuda_compiler.elementwise.inlining import all_calls, loaded_bytes
from cuda_compiler.elementwise.picks import Pick, is_pick, pick_of
from cuda_compiler.specialization.c_text import TYPES, expression, float_text, index_type, int_text, offset_text
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import check_grid, groups
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float, itemsize
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, as_float32
from npu_compiler.program.functions import FUNCTIONS, c_text
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.placement import is_copy
from npu_compiler.program.views import View

_BLOCK = 256
_ENOUGH_THREADS = MULTIPROCESSORS * 256  # wider vectors do not pay until this many threads have work
_SMALL = 32  # loads of each element on average
_MAX_NAME = 60


def generate_elementwise(group: Group, stored: Sequence[View], make: Specializer) -> KernelCall:
    """The call of a generated kernel that computes a whole group; intermediate values stay in registers.

    Args:
        stored: The written views that a later kernel, or the caller, reads; only these go to memory.
    """
    width, threads = _division(group, stored)
    block = min(_BLOCK, WARP * groups(threads, WARP))
    text = group_text(group, stored, width)
    lines = [*_own_elements(group, width, f"blockIdx.x * index_t({block})"), *text.statements]
    return generated_call(
        make, group, stored, GroupText(text.arguments, text.functions, lines), groups(threads, block), block
    )


def generate_side_by_side(group: Group, stored: Sequence[View], make: Specializer) -> KernelCall:
    """The call of a generated kernel that computes the groups `beside` each other.

    Args:
        stored: The written views that a later kernel, or the caller, reads; only these go to memory.
    """
    own = [(each, [view for view in stored if view in each.writes]) for each in group.beside]
    divided = [(each, views, *_division(each, views)) for each, views in own if views]
    block = min(_BLOCK, max(WARP * groups(threads, WARP) for _, _, _, threads in divided))
    scope = Scope(names_of(group), {}, {place_of(view): f"out{index}" for index, view in enumerate(stored)})
    functions, lines, blocks = dict[str, None](), list[str](), 0
    for turn, (each, views, width, threads) in enumerate(divided):
        text = group_text(each, views, width, scope=scope)
        functions |= dict.fromkeys(text.functions)
        before, blocks = blocks, blocks + groups(threads, block)
        is_last = turn + 1 == len(divided)
        body = [*_own_elements(each, width, f"(blockIdx.x - {before}u) * index_t({block})"), *text.statements]
        lines += [
            f"{'} else ' * (turn > 0)}{f'if (blockIdx.x < {blocks}u) ' * (not is_last)}{{",
            *(line if line.startswith("#") else f"    {line}" for line in body),
        ]
    arguments = arguments_of(names_of(group), stored)
    return generated_call(make, group, stored, GroupText(arguments, [*functions], [*lines, "}"]), blocks, block)


def _division(group: Group, stored: Sequence[View]) -> tuple[int, int]:
    """The number of elements for each thread of a group, and the number of threads."""
    width = _vector_width(group, stored)
    return width, -(-group.numel // width)


def _own_elements(group: Group, width: int, block: str) -> list[str]:
    """The statements that find the number of a thread's first element.

    Args:
        block: The C expression of the number of its block's first thread.
    """
    return [
        f"const index_t first = {width}u * ({block} + threadIdx.x);",
        f"if (first >= {group.numel}u) {{",
        "    return;",
        "}",
    ]


def generated_call(
    make: Specializer, group: Group, stored: Sequence[View], text: GroupText, blocks: int, threads: int
) -> KernelCall:
    """The call of a kernel that computes a group.

    Args:
        stored: The views that the kernel writes.
        text: The kernel's arguments, the definitions before it and its statements.
        blocks, threads: Number of blocks and of threads per block.
    """
    name, last = function_name(group), group.calls[-1]
    numbered = group.rows.operands if group.rows is not None else ()
    signature = f'extern "C" __global__ void __launch_bounds__({threads}) {name}({", ".join(text.arguments)})'
    source = "\n".join(
        [
            index_type([*group.loads, *stored, *numbered]) + template_text("common/common.cuh"),
            template_text("common/overlap.cuh"),
            template_text("elementwise/elementwise.cuh"),
            *text.functions,
            "",
            f"{signature} {{",
            *(line if line.startswith("#") else f"    {line}" for line in ("begin_in_turn();", *text.statements)),
            "}",
            "",
        ]
    )
    launch = KernelLaunch(check_grid((blocks, 1, 1), last), (threads, 1, 1), 0)
    return KernelCall(
        name,
        make.add_source(source),
        tuple(group.loads),
        tuple(stored),
        launch.params(),
        last.node,
        sum(call.flops for call in group.calls),
        loaded_bytes(group) + sum(distinct_bytes(view) for view in stored),
    )


def function_name(group: Group) -> str:
    """The name of a group's kernel, which tells what it computes."""
    name = "_".join(_short_name(call) for call in group.calls)
    name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME].rstrip('_')}_{len(group.calls)}"
    return f"{name}_kernel" if len(group.calls) == 1 else f"fused_{name}"


def _short_name(call: KernelCall) -> str:
    decl = ELEMENTWISE_KERNELS.get(call.kernel)
    return call.kernel.removesuffix("_kernel") if decl is None else decl.op.name


def _vector_width(group: Group, stored: Sequence[View]) -> int:
    """Elements per thread: as many as fill a 16-byte access, or fewer to have enough threads to fill the GPU.

    Fewer also if the elements of a stored view are not consecutive, or those of a loaded one, unless it is so small
    that each of its elements is loaded from a cache most of the time.
    """
    width = min(8, 16 // min(itemsize(view.dtype) for view in stored))
    outputs = [place_of(view) for view in stored]
    loaded = [view for view in group.reads if view.buffer not in group.inlined]
    small = group.numel // _SMALL
    places = [*(place_of(view) for view in loaded if distinct_bytes(view) > small * itemsize(view.dtype)), *outputs]
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
        inputs: View that is loaded from memory → the name of its argument.
        outputs: Place that goes to memory → the name of its argument.
        functions: Definition of an op's device function → its name.
        before, lane, after: Statements before, in and after the loop over a thread's elements.
        values: Place → the C variable that holds its value inside the loop, and whether that variable is an int.
    """

    inputs: Mapping[View, str]
    outputs: Mapping[Place, str]
    functions: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    lane: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    values: dict[Place, tuple[str, bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupText:
    """The C text that computes a group.

    Attributes:
        arguments: The declarations of the kernel's arguments: those of `group.loads`, then those of the stored views.
        functions: Definitions of the functions that the statements call.
        statements: Statements that compute and store the elements of a thread, from number `first` on.
    """

    arguments: list[str]
    functions: list[str]
    statements: list[str]


def names_of(group: Group) -> dict[View, str]:
    """View that a group's kernel loads → the name of its argument."""
    return {view: f"in{index}" for index, view in enumerate(group.loads)}


def arguments_of(names: Mapping[View, str], stored: Sequence[View]) -> list[str]:
    """The declarations of a kernel's arguments: those of loaded views, by `names_of`, then those of stored ones."""
    written = {view.buffer for view in stored}
    return [
        *(
            f"const {TYPES[view.dtype]} *{'' if view.buffer in written else '__restrict__ '}{name}"
            for view, name in names.items()
        ),
        *(f"{TYPES[view.dtype]} *out{index}" for index, view in enumerate(stored)),
    ]


@dataclass(frozen=True)
class Scope:
    """The names that the groups which one kernel computes share.

    Attributes:
        names: View that is loaded → the name of its argument.
        variables: Place that calls read, not among their groups' reads → the float variable that all its elements are.
        outputs: Place that goes to memory → the name of its argument; where empty, a group's stored views are numbered.
        functions: Definition of an op's device function → its name; each group adds those that it needs.
    """

    names: Mapping[View, str]
    variables: Mapping[Place, str]
    outputs: Mapping[Place, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)


def group_text(
    group: Group,
    stored: Sequence[View],
    width: int,
    bound: str = "",
    result: View | None = None,
    given: View | None = None,
    scope: Scope | None = None,
) -> GroupText:
    """The C text that computes `width` elements of a group.

    Args:
        stored: The written views that go to memory, and `given` if it does.
        bound: The C expression of the number of elements, an upper bound of `width`; empty means `width`.
        result: The written view whose elements are put into the array `values` too; None for none.
        given: The view, not among the group's reads, whose elements are in the array `values`; None for none.
        scope: What other groups of the same kernel have defined; None for none.
    """
    bound = bound or str(width)
    inputs = scope.names if scope else names_of(group)
    numbered = {place_of(view): f"out{index}" for index, view in enumerate(stored)}
    outputs = scope.outputs if scope and scope.outputs else numbered
    body = _Body(inputs, outputs)
    if scope is not None:
        body.functions = scope.functions
        body.values |= {place: (name, False) for place, name in scope.variables.items()}
    for index, view in enumerate(group.reads):
        pick = _pick_of_vectors(group, view, width)
        if pick is not None:
            _read_picked(body, pick, view, index, bound)
        elif _lies_in_parts(group, view, width):
            _read_parts(body, group.inlined[view.buffer], view, index, width, bound)
        elif view.buffer in group.inlined:
            kind = _element_kind(view)
            body.lane += [f"{kind} x{index};", *_inlined(body, group, view, f"x{index}", "(first + lane)", 0)]
            body.values[place_of(view)] = (f"x{index}", kind == "int")
        else:
            _read(body, view, index, width, bound)
    if given is not None:
        _read_given(body, given, rounds=place_of(given) in outputs)
    last_read = {place_of(view): index for index, call in enumerate(group.calls) for view in call.inputs}
    if result is not None:
        last_read[place_of(result)] = len(group.calls)
    for index, call in enumerate(group.calls):
        place = place_of(call.outputs[0])
        _compute(body, call, index, rounds=place in outputs and last_read.get(place, -1) > index)
    if result is not None:
        body.lane.append(f"values[lane] = {body.values[place_of(result)][0]};")
    for index, view in enumerate(stored):
        if place_of(view) in body.values:  # else it is what a part keeps
            _write(body, view, index, width, bound)
    statements = [*body.before, *_for_each_lane(body.lane, bound), *body.after]
    needed = {function.name for call in all_calls(group) for function in ELEMENTWISE_KERNELS[call.kernel].op.functions}
    special = [c_text(x, "__device__ __forceinline__") for name, x in FUNCTIONS.items() if name in needed]
    helpers = [f"__device__ __forceinline__ {text.replace('$', name)}" for text, name in body.functions.items()]
    return GroupText(arguments_of(inputs, stored), [*special, *helpers], statements)


def _element_kind(view: View) -> str:
    return "float" if is_float(view.dtype) else "int"


def _inlined(body: _Body, group: Group, view: View, variable: str, number: str, depth: int) -> list[str]:
    """The statements that compute one element of a buffer that is not stored.

    Args:
        group: The group that reads the buffer by `view`.
        variable: The C variable that gets the element's value.
        number: The C expression of the element's row-major number in `view`.
        depth: Number of inlined reads around this one, which are in scope.
    """
    at, lines = f"at{depth}", []
    parts = group.inlined[view.buffer]
    offset = offset_text(view, number)
    offset = f"{offset} + {view.offset}u" if view.offset else offset
    for turn, part in enumerate(parts):
        inside = f"row{depth}" if len(parts) > 1 else at
        computed = [f"    {line}" for line in _element(body, part.group, variable, inside, depth + 1)]
        if len(parts) == 1:
            return ["{", f"    const index_t {at} = {offset};", *computed, "}"]
        lines += [
            f"    {'} else ' * (turn > 0)}{f'if (place{depth} < {part.high}u) ' * (turn + 1 < len(parts))}{{",
            f"        const index_t {inside} = {_row_of_part(part, at, f'place{depth}')};",
            *(f"    {line}" for line in computed),
        ]
    part = parts[0]
    return [
        "{",
        f"    const index_t {at} = {offset};",
        f"    const index_t place{depth} = {at} / {part.inner}u % {part.size}u;",
        *lines,
        "    }",
        "}",
    ]


def _element(body: _Body, group: Group, variable: str, number: str, depth: int) -> list[str]:
    """The statements that compute one element, with row-major number `number`, of a group's last result."""
    if is_pick(group.calls[0]):
        pick = pick_of(group.calls[0])
        lines, offset, condition = _picked_place(body, pick, number, "picked")
        value = f"{_conversion(pick.table)}({body.inputs[pick.table]}[{' + '.join(offset)}])"
        return [*lines, f"{variable} = {f'{condition} ? {value} : {_missing(pick.table)}' if condition else value};"]
    inner = _Body(body.inputs, body.outputs, body.functions)
    for each, view in enumerate(group.reads):
        name, kind = f"x{depth}_{each}", _element_kind(view)
        if view.buffer in group.inlined:
            inner.lane += [f"{kind} {name};", *_inlined(inner, group, view, name, number, depth)]
        else:
            element = f"{body.inputs[view]}[{offset_text(view, number)}]"
            inner.lane.append(f"const {kind} {name} = to_{kind}({element});")
        inner.values[place_of(view)] = (name, kind == "int")
    for each, call in enumerate(group.calls):
        _compute(inner, call, each, rounds=False, stem=f"v{depth}_")
    value = inner.values[place_of(group.calls[-1].outputs[0])][0]
    name = _kept_at(body, group)
    if group.kept is None or not name:
        return [*inner.lane, f"{variable} = {value};"]
    kind = TYPES[group.kept.dtype]
    return [
        *inner.lane,
        f"const {kind} kept{depth} = from<{kind}>({value});",
        f"{name}[{offset_text(group.kept, number)}] = kept{depth};",
        f"{variable} = to_float(kept{depth});",
    ]


def _kept_at(body: _Body, group: Group) -> str:
    """The argument to which a group's last result goes too; empty if it does not, or nobody reads it there."""
    return body.outputs.get(place_of(group.kept), "") if group.kept is not None else ""


def _picked_place(body: _Body, pick: Pick, number: str, name: str) -> tuple[list[str], list[str], str]:
    """The place in its table of a picked element: statements that find its coordinates, and what depends on these.

    Args:
        number: The C expression of the element's row-major number.
        name: The C variable that gets the picked coordinate; the beginning of its name if there are several.

    Returns:
        The statements, the terms of the offset in the table, that of coordinate 0 first, and the C condition that the
        coordinates are in range, empty if they are known to be.
    """
    lines, offset, conditions = [], [offset_text(pick.walk, number)], []
    for turn, dim in enumerate(pick.dims):
        picked = name if len(pick.dims) == 1 else f"{name}_{turn}"
        index = f"{body.inputs[dim.operand]}[{offset_text(dim.walk, number)}]"
        if dim.wraps:
            lines.append(f"const int signed_{picked} = {index};")
            index = f"signed_{picked} < 0 ? signed_{picked} + {dim.size} : signed_{picked}"
        lines.append(f"const index_t {picked} = unsigned({index});")
        offset.append(f"{picked} * {dim.step}u")
        conditions.append(f"{picked} < {dim.size}u")
    return lines, offset, "" if pick.checked else " && ".join(conditions)


def _pick_of_vectors(group: Group, view: View, width: int) -> Pick | None:
    """The pick whose result a group reads by `view`, if a thread's elements are consecutive in the table; else None."""
    parts = group.inlined.get(view.buffer, ())
    if width == 1 or len(parts) != 1 or not is_pick(parts[0].group.calls[0]):
        return None
    pick, place = pick_of(parts[0].group.calls[0]), place_of(view)
    in_order = place.strides == (1,) and place.offset == 0
    aligned = _access(place_of(pick.walk), width) == "vector" and all(dim.step % width == 0 for dim in pick.dims)
    of_one = all(_access(place_of(dim.walk), width) == "repeated" for dim in pick.dims)
    return pick if in_order and aligned and of_one else None


def _read_picked(body: _Body, pick: Pick, view: View, index: int, bound: str) -> None:
    """Append the statements that read a thread's elements of a pick as one vector."""
    lines, (start, *steps), condition = _picked_place(body, pick, "first", f"picked{index}")
    table, kind = body.inputs[pick.table], TYPES[pick.table.dtype]
    moved, value = " + ".join(steps), f"{_conversion(pick.table)}(pack{index}.item[lane])"
    if condition:
        lines.append(f"const bool found{index} = {condition};")
        moved, value = f"(found{index} ? {moved} : 0u)", f"found{index} ? {value} : {_missing(pick.table)}"
    body.before += lines
    body.before.append(f"const Pack<{kind}, {bound}> pack{index} = load_pack<{bound}>({table} + {start} + {moved});")
    body.lane.append(f"const {_element_kind(view)} x{index} = {value};")
    body.values[place_of(view)] = (f"x{index}", not is_float(view.dtype))


def _conversion(view: View) -> str:
    """The C function that converts an element of a view to the type in which kernels compute with it."""
    return "to_float" if is_float(view.dtype) else "to_int"


def _missing(table: View) -> str:
    """The C value of an element that is picked from outside of a table."""
    return "NAN_F" if is_float(table.dtype) else "0"


def _lies_in_parts(group: Group, view: View, width: int) -> bool:
    """Whether a thread's elements of an inlined buffer are neighbours in one of several parts, wherever it begins."""
    parts = group.inlined.get(view.buffer, ())
    bounds = (bound * part.inner for part in _all_parts(parts) for bound in (part.low, part.high, part.size))
    in_one = len(parts) > 1 and all(bound % width == 0 for bound in bounds)
    return width > 1 and in_one and _access(place_of(view), width) == "vector"


def _inner_parts(part: Part) -> Sequence[Part]:
    """The parts that a part is divided into along another dimension; empty if it is computed as one."""
    calls, reads, inlined = part.group.calls, part.group.reads, part.group.inlined
    if len(calls) > 1 or is_pick(calls[0]) or not is_copy(calls[0]) or not reads[0].is_contiguous:
        return ()
    found = inlined.get(reads[0].buffer, ())
    return found if len(found) > 1 and reads[0].offset == 0 else ()


def _all_parts(parts: Sequence[Part]) -> list[Part]:
    """Parts and, behind each, those that it is divided into."""
    return [each for part in parts for each in (part, *_all_parts(_inner_parts(part)))]


def _read_parts(body: _Body, parts: Sequence[Part], view: View, index: int, width: int, bound: str) -> None:
    """Append the statements that compute a thread's elements of a buffer that is not stored; all are in one part.

    Copied parts are loaded by one statement, so that threads of different parts do not wait in turn.
    """
    kind, element = _element_kind(view), TYPES[view.dtype]
    begin = offset_text(view, "first") + (f" + {view.offset}u" if view.offset else "")
    leaves = [part for part in _all_parts(parts) if not _inner_parts(part)]
    copied = [_copied_vectors(part, view.dtype, width) is not None for part in leaves]
    values = f"of_parts{index}"

    def found(part: Part, row: str) -> list[str]:
        source = _copied_vectors(part, view.dtype, width)
        if source is not None:
            return [f"start{index} = {body.inputs[source]} + {offset_text(source, row)};"]
        return _part_of_vectors(body, part, kind, width, bound, f"{values}[lane]", row)

    declared = [f"{kind} {values}[{bound}];"] * (not all(copied))
    if any(copied):
        declared.append(f"const {element} *start{index}{'' if all(copied) else ' = nullptr'};")
    body.before += [*declared, "{", f"    const index_t at = {begin};", *_in_its_part(parts, "at", 0, found), "}"]
    load = f"const Pack<{element}, {bound}> pack{index} = load_pack<{bound}>(start{index});"
    item = f"{_conversion(view)}(pack{index}.item[lane])"
    if all(copied):
        body.before.append(load)
    elif any(copied):
        lines = [load, *_for_each_lane([f"{values}[lane] = {item};"], bound)]
        body.before += [f"if (start{index} != nullptr) {{", *(f"    {line}" for line in lines), "}"]
    body.lane.append(f"const {kind} x{index} = {item if all(copied) else f'{values}[lane]'};")
    body.values[place_of(view)] = (f"x{index}", kind == "int")


def _in_its_part(parts: Sequence[Part], number: str, depth: int, found: Callable[[Part, str], list[str]]) -> list[str]:
    """The statements that find the part in which an element lies, and compute it there.

    Args:
        number: The C variable of the element's row-major number in the buffer.
        depth: Number of divided parts around these.
        found: Returns the statements of a part for the C variable of the element's row-major number in that.
    """
    place, row = f"place{depth}", f"row{depth}"
    lines = [f"    const index_t {place} = {number} / {parts[0].inner}u % {parts[0].size}u;"]
    for turn, part in enumerate(parts):
        condition = f"if ({place} < {part.high}u) " * (turn + 1 < len(parts))
        inner = _inner_parts(part)
        own = _in_its_part(inner, row, depth + 1, found) if inner else found(part, row)
        lines += [
            f"    {'} else ' * (turn > 0)}{condition}{{",
            f"        const index_t {row} = {_row_of_part(part, number, place)};",
            *(f"        {line}" for line in own),
        ]
    return [*lines, "    }"]


def _row_of_part(part: Part, at: str, place: str) -> str:
    """The C expression of an element's row-major number in a part.

    Args:
        at: The C expression of its number in the whole buffer.
        place: That of its coordinate along the dimension in which the buffer is parted.
    """
    count = (part.high - part.low) * part.inner
    return (
        f"{at} / {part.size * part.inner}u * {count}u + ({place} - {part.low}u) * {part.inner}u + {at} % {part.inner}u"
    )


def _copied_vectors(part: Part, dtype: str, width: int) -> View | None:
    """The view that a part copies elements of a dtype from, if a thread loads them as one vector; else None."""
    calls, reads = part.group.calls, part.group.reads
    if len(calls) != 1 or not is_copy(calls[0]) or part.group.inlined or reads[0].dtype != dtype:
        return None
    if part.group.kept is not None:  # which needs the elements, to store them
        return None
    return reads[0] if _access(place_of(reads[0]), width) == "vector" else None


def _part_of_vectors(body: _Body, part: Part, kind: str, width: int, bound: str, target: str, row: str) -> list[str]:
    """The statements that compute a thread's elements of a part.

    Args:
        target: The C expression of the place for the element of `lane`.
        row: The C variable of the row-major number of the first in the part's result.
    """
    own = _Body(body.inputs, body.outputs, body.functions)
    if is_pick(part.group.calls[0]) or part.group.inlined:
        single = _element(body, part.group, "element", f"({row} + lane)", 0)
        return _for_each_lane([f"{kind} element;", *single, f"{target} = element;"], bound)
    for each, read in enumerate(part.group.reads):
        _read(own, read, each, width, bound, row)
    for each, call in enumerate(part.group.calls):
        _compute(own, call, each, rounds=False)
    value = own.values[place_of(part.group.calls[-1].outputs[0])][0]
    kept, name, after = part.group.kept, _kept_at(body, part.group), list[str]()
    if kept is not None and name:
        element = TYPES[kept.dtype]
        own.before.append(f"Pack<{element}, {bound}> kept;")
        own.lane.append(f"kept.item[lane] = from<{element}>({value});")
        value = "to_float(kept.item[lane])"
        if _access(place_of(kept), width) == "vector":
            after.append(f"store_pack<{bound}>({name} + {offset_text(kept, row)}, kept);")
        else:
            own.lane.append(f"{name}[{offset_text(kept, f'({row} + lane)')}] = kept.item[lane];")
    own.lane.append(f"{target} = {value};")
    return [*own.before, *_for_each_lane(own.lane, bound), *after]


def _for_each_lane(lines: Sequence[str], bound: str) -> list[str]:
    """The loop that runs statements for each of a thread's elements."""
    return ["#pragma unroll", f"for (int lane = 0; lane < {bound}; lane++) {{", *(f"    {line}" for line in lines), "}"]


def _read(body: _Body, view: View, index: int, width: int, bound: str, first: str = "first") -> None:
    place, source = place_of(view), body.inputs[view]
    access = _access(place, width)
    item = f"pack{index}.item[lane]"
    if access == "vector":
        offset = offset_text(view, first)
        body.before.append(
            f"const Pack<{TYPES[view.dtype]}, {bound}> pack{index} = load_pack<{bound}>({source} + {offset});"
        )
    elif access == "repeated":
        body.before.append(f"const {TYPES[view.dtype]} item{index} = {source}[{offset_text(view, first)}];")
        item = f"item{index}"
    else:
        item = f"{source}[{offset_text(view, f'({first} + lane)')}]"
    kind = _element_kind(view)
    body.lane.append(f"const {kind} x{index} = {_conversion(view)}({item});")
    body.values[place] = (f"x{index}", kind == "int")


def _read_given(body: _Body, view: View, rounds: bool) -> None:
    """Append the statement that takes an element of a view from the array `values`.

    Args:
        rounds: As in `_compute`.
    """
    value = f"to_float(from<{TYPES[view.dtype]}>(values[lane]))" if rounds else "values[lane]"
    body.lane.append(f"const float given = {value};")
    body.values[place_of(view)] = ("given", False)


def _compute(body: _Body, call: KernelCall, index: int, rounds: bool, stem: str = "v") -> None:
    """Append the statements of one call to the kernel's body.

    Args:
        rounds: Round a 16-bit result here, so that readers inside the kernel see the same value as readers of the
            stored one.
        stem: Beginning of the name of the C variable that gets the result.
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
    body.lane.append(f"const {_element_kind(out)} {stem}{index} = {result};")
    body.values[place_of(out)] = (f"{stem}{index}", not is_float(out.dtype))


def _write(body: _Body, view: View, index: int, width: int, bound: str) -> None:
    place = place_of(view)
    value, target = f"from<{TYPES[view.dtype]}>({body.values[place][0]})", body.outputs[place]
    if _access(place, width) == "vector":
        body.before.append(f"Pack<{TYPES[view.dtype]}, {bound}> result{index};")
        body.lane.append(f"result{index}.item[lane] = {value};")
        body.after.append(f"store_pack<{bound}>({target} + {offset_text(view, 'first')}, result{index});")
    else:
        body.lane.append(f"{target}[{offset_text(view, '(first + lane)')}] = {value};")
