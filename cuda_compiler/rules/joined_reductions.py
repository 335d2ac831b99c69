"""The kernel of reductions of rows and the element-wise calls around them: a team of threads goes through each row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cuda_compiler.elementwise.grouping import Group, Place, Rows, place_of
from cuda_compiler.elementwise.joined_reductions import KINDS
from cuda_compiler.elementwise.kernel_source import GroupText, Scope, arguments_of, generated_call, group_text, names_of
from cuda_compiler.rules.reductions import FILLING
from cuda_compiler.rules.rows import MOST_WARPS, small_teams_for
from cuda_compiler.specialization.c_text import TYPES, float_text, offset_text
from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import Size3, groups
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

_WIDEST = 8  # elements that a thread computes side by side
_MOST_TURNS = 4  # vectors of these that it loads before it needs any


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
    items = rows.reduced.numel // pack
    constants, grid, block = _teams(rows.kept.numel, items)
    turns = min(_MOST_TURNS, max(1, items // (int(constants["team_warps"]) * int(constants["team_lanes"]))))
    lines, definitions = _body(group, rows, stored, pack, turns)
    division = (f"constexpr int {key} = {value};" for key, value in constants.items())
    before = [*division, template_text("reductions/teams.cuh"), *definitions]
    text = GroupText(arguments_of(names_of(group), stored), before, lines)
    return generated_call(make, group, stored, text, grid[0], block[0])


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


def _teams(rows: int, items: int) -> tuple[Mapping[str, bool | int | float], Size3, Size3]:
    """Constants, grid and block: with many rows, a thread computes several of a row's `items`."""
    turns = next(turns for turns in (_MOST_TURNS, 2, 1) if turns == 1 or rows * items >= turns * FILLING)
    warps = min(groups(items, WARP * turns), MOST_WARPS)
    if warps == 1:
        return small_teams_for(rows, items)
    return {"team_warps": warps, "team_lanes": WARP, "teams": 1}, (rows, 1, 1), (warps * WARP, 1, 1)


def _body(group: Group, rows: Rows, stored: Sequence[View], pack: int, turns: int) -> tuple[list[str], list[str]]:
    """The statements of the kernel, and the definitions before it.

    Args:
        turns: Number of vectors that a thread loads before it needs any.
    """
    reductions = [call for call in group.calls if call.kernel in KINDS]
    numbers = {call.outputs[0].buffer: index for index, call in enumerate(reductions)}
    reads = [view for call in group.calls for view in call.inputs if view.buffer in numbers]
    variables = {place_of(view): f"row{numbers[view.buffer]}" for view in reads}
    scope = Scope(names_of(group), variables)
    definitions: dict[str, None] = {}
    step, width = f"Place::threads() * {pack}u", rows.reduced.numel
    lines = [
        "const Place place;",
        f"if (place.row >= {rows.kept.numel}u) {{",
        "    return;",
        "}",
        f"const index_t begin = {offset_text(rows.kept, 'place.row')};",
    ]

    def go_through(counter: str, kept: Sequence[View], result: View | None = None, behind: Sequence[str] = ()) -> None:
        needed = _needed(group, [result] if result is not None else kept, variables)
        text = group_text(needed, kept, pack, result=result, scope=scope)
        definitions.update(dict.fromkeys(text.functions))
        lines.append(f"index_t {counter} = place.thread() * {pack}u;")
        for together in dict.fromkeys((turns, 1)):
            found = [] if result is None else [f"    float found[{together}][{pack}];"]
            values = [] if result is None else [f"        float (&values)[{pack}] = found[turn];"]
            lines.extend(
                [
                    f"for (; {counter} + {together - 1}u * {step} < {width}u; {counter} += {together}u * {step}) {{",
                    *found,
                    "#pragma unroll",
                    f"    for (int turn = 0; turn < {together}; turn++) {{",
                    f"        const index_t column = {counter} + turn * {step};",
                    f"        const index_t first = begin + {offset_text(rows.reduced, 'column')};",
                    *values,
                    *(line if line.startswith("#") else f"        {line}" for line in text.statements),
                    "    }",
                    *behind,
                    "}",
                ]
            )

    for index, (call, operand) in enumerate(zip(reductions, rows.operands, strict=True)):
        definitions.update(dict.fromkeys([_traits(index, call, rows.reduced.numel)]))
        lines.append(f"{KINDS[call.kernel]}<Of{index}> state{index};")
        go_through(f"at{index}", (), operand, [f"    add_some(state{index}, found, at{index}, Place::threads());"])
        lines.append(f"const float row{index} = result_of_team(state{index}, place);")
    elements = [view for view in stored if view.buffer not in numbers]
    if elements:
        go_through("at", elements)
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
    loaded = {place_of(view): view for view in group.loads}  # by which the kernel's arguments are named
    return Group(calls[::-1], [loaded.get(place, view) for place, view in wanted.items()], list(results), group.inlined)
