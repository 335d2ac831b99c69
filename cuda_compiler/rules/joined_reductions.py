"""The kernel of reductions of rows and the element-wise calls around them: a team of threads goes through each row."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cuda_compiler.cuda_program import KernelLaunch
from cuda_compiler.elementwise.grouping import Group, Place, Rows, place_of
from cuda_compiler.elementwise.inlining import loaded_bytes
from cuda_compiler.elementwise.joined_reductions import KINDS
from cuda_compiler.elementwise.kernel_source import Scope, function_name, group_text
from cuda_compiler.rules.rows import small_teams_for
from cuda_compiler.specialization.c_text import TYPES, float_text, index_type, offset_text
from cuda_compiler.specialization.sizes import check_grid
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

_WIDEST = 8  # elements that a thread computes side by side


def reductions_with_groups(make: Specializer, group: Group, stored: Sequence[View]) -> KernelCall:
    """The call of a generated kernel that computes reductions and the element-wise calls around them.

    For each reduction, and at last for what is stored, a team goes through the row and computes what that needs.

    Args:
        stored: The written views that a later kernel, or the caller, reads; only these go to memory.
    """
    rows = group.rows
    assert rows is not None
    results = {call.outputs[0].buffer for call in group.calls if call.kernel in KINDS}
    stored = sorted(stored, key=lambda view: view.buffer in results)
    pack = _pack(rows, (*stored, *rows.operands))
    constants, grid, block = small_teams_for(rows.kept.numel, rows.reduced.numel // pack)
    name, last = function_name(group), group.calls[-1]
    lines, definitions = _body(group, rows, stored, pack)
    arguments = [
        f"const {TYPES[view.dtype]} *{_restrict(view, stored)}in{index}" for index, view in enumerate(group.loads)
    ]
    arguments += [f"{TYPES[view.dtype]} *out{index}" for index, view in enumerate(stored)]
    text = "\n".join(
        [
            index_type([*group.loads, *stored, *rows.operands]) + template_text("common/common.cuh"),
            template_text("common/overlap.cuh"),
            template_text("elementwise/elementwise.cuh"),
            *(f"constexpr int {key} = {value};" for key, value in constants.items()),
            template_text("reductions/teams.cuh"),
            *definitions,
            f'extern "C" __global__ void __launch_bounds__({block[0]}) {name}({", ".join(arguments)}) {{',
            *(line if line.startswith("#") else f"    {line}" for line in lines),
            "}",
            "",
        ]
    )
    launch = KernelLaunch(check_grid(grid, last), block, 0)
    return KernelCall(
        name,
        make.add_source(text),
        tuple(group.loads),
        tuple(stored),
        launch.params(),
        last.node,
        sum(call.flops for call in group.calls),
        loaded_bytes(group) + sum(distinct_bytes(view) for view in stored),
    )


def _restrict(view: View, stored: Sequence[View]) -> str:
    return "" if view.buffer in {each.buffer for each in stored} else "__restrict__ "


def _pack(rows: Rows, views: Sequence[View]) -> int:
    """Elements of a row that a thread computes side by side; their numbers follow each other from a multiple of it."""
    pack = min(_WIDEST, *(16 // itemsize(view.dtype) for view in views))
    dims = [
        (size, step)
        for view in (rows.kept, rows.reduced)
        for size, step in zip(view.shape, view.strides, strict=True)
        if size > 1
    ]
    *outer, (inner, step) = dims
    while pack > 1 and (step != 1 or inner % pack or any(each % pack for _, each in outer)):
        pack //= 2
    return pack


def _body(group: Group, rows: Rows, stored: Sequence[View], pack: int) -> tuple[list[str], list[str]]:
    """The statements of the kernel, and the definitions before it."""
    reductions = [call for call in group.calls if call.kernel in KINDS]
    numbers = {call.outputs[0].buffer: index for index, call in enumerate(reductions)}
    names = {view: f"in{index}" for index, view in enumerate(group.loads)}
    reads = [view for call in group.calls for view in call.inputs if view.buffer in numbers]
    variables = {place_of(view): f"row{numbers[view.buffer]}" for view in reads}
    scope = Scope(names, variables)
    definitions: dict[str, None] = {}
    step = f"Place::threads() * {pack}u"
    lines = [
        "begin_in_turn();",
        "const Place place;",
        f"if (place.row >= {rows.kept.numel}u) {{",
        "    return;",
        "}",
        f"const index_t begin = {offset_text(rows.kept, 'place.row')};",
    ]

    def go_through(
        kept: Sequence[View], result: View | None = None, before: Sequence[str] = (), behind: Sequence[str] = ()
    ) -> None:
        needed = _needed(group, [result] if result is not None else kept, variables)
        text = group_text(needed, kept, pack, result=result, scope=scope)
        definitions.update(dict.fromkeys(text.functions))
        lines.extend(
            [
                "#pragma unroll 4",
                f"for (index_t column = place.thread() * {pack}u; column < {rows.reduced.numel}u; column += {step}) {{",
                f"    const index_t first = begin + {offset_text(rows.reduced, 'column')};",
                *(line if line.startswith("#") else f"    {line}" for line in (*before, *text.statements, *behind)),
                "}",
            ]
        )

    for index, (call, operand) in enumerate(zip(reductions, rows.operands, strict=True)):
        definitions.update(dict.fromkeys([_traits(index, call, rows.reduced.numel)]))
        lines.append(f"{KINDS[call.kernel]}<Of{index}> state{index};")
        before = [f"float found[1][{pack}];", f"float (&values)[{pack}] = found[0];"]
        go_through((), operand, before, [f"add_some(state{index}, found, column, 1);"])
        lines.append(f"const float row{index} = result_of_team(state{index}, place);")
    elements = [view for view in stored if view.buffer not in numbers]
    if elements:
        go_through(elements)
    for index, view in enumerate(stored):
        if view.buffer in numbers:
            value = f"from<{TYPES[view.dtype]}>(row{numbers[view.buffer]})"
            lines += ["if (place.thread() == 0) {", f"    out{index}[place.row] = {value};", "}"]
    return lines, list(definitions)


def _traits(index: int, call: KernelCall, count: int) -> str:
    """The C struct that tells a reduction's state about the reduction."""
    return "\n".join(
        [
            f"struct Of{index} {{",
            "    static constexpr bool integers = false;",
            f"    static constexpr index_t count = {count}u;",
            f"    static constexpr float correction = {float_text(call.params['correction'])};",
            f"    static constexpr float order = {float_text(call.params['order'])};",
            "};",
        ]
    )


def _needed(group: Group, results: Sequence[View], variables: Collection[Place]) -> Group:
    """The element-wise calls of a group that some results need, and what these read; none for what is only read."""
    wanted = {place_of(view): view for view in results}
    calls: list[KernelCall] = []
    for call in reversed(group.calls):
        if call.kernel not in KINDS and place_of(call.outputs[0]) in wanted:
            del wanted[place_of(call.outputs[0])]
            wanted |= {place_of(view): view for view in call.inputs if place_of(view) not in variables}
            calls.append(call)
    return Group(calls[::-1], list(wanted.values()), list(results), group.inlined)
