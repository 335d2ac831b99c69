"""Kernels of a source: their arguments, function constants, and the C++ entry points that bind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metal_emulator.translation.memory import SPACES
from metal_emulator.translation.program import Attributes, Item, parameters
from metal_emulator.translation.tokens import Source, Token

# Names by which a thread sees what another one does: of functions, of types, and of an address space.
_COMMUNICATION = re.compile("threadgroup|threadgroup_barrier|(?:simd|simdgroup|quad|atomic)_.*")
CONSTANT_TYPES = ("uint", "bool", "int", "float", "ushort")
# Each yields a Position from the launch and the thread.
BUILTINS = {
    "thread_position_in_grid": "metal_runtime::grid_position(launch, thread)",
    "threadgroup_position_in_grid": "thread.group->position",
    "thread_position_in_threadgroup": "thread.position",
    "thread_index_in_threadgroup": "metal_runtime::Position{thread.index, 0, 0}",
    "thread_index_in_simdgroup": "metal_runtime::Position{thread.lane, 0, 0}",
    "simdgroup_index_in_threadgroup": "metal_runtime::Position{thread.simdgroup->index, 0, 0}",
    "simdgroups_per_threadgroup": "metal_runtime::Position{(thread.group->count + 31) / 32, 0, 0}",
    "dispatch_simdgroups_per_threadgroup": "metal_runtime::Position{(thread.group->count + 31) / 32, 0, 0}",
    "threads_per_threadgroup": "thread.group->size",
    "dispatch_threads_per_threadgroup": "launch.threads",
    "threadgroups_per_grid": "launch.groups",
    "threads_per_grid": "launch.grid",
    "threads_per_simdgroup": "metal_runtime::Position{32, 0, 0}",
    "thread_execution_width": "metal_runtime::Position{32, 0, 0}",
}


@dataclass(frozen=True)
class Argument:
    """A kernel argument.

    Attributes:
        kind: `buffer`, `threadgroup` or `builtin`.
        index: Buffer or threadgroup index, -1 for a builtin.
        address_space: `device`, `constant`, `threadgroup`, or "" for a builtin.
        constant: The function constant that has to be true for the argument to exist; None if it always exists.
    """

    name: str
    kind: str
    index: int
    address_space: str
    is_const: bool
    constant: str | None


@dataclass(frozen=True)
class FunctionConstant:
    """A constant declared with `[[function_constant(index)]]`, whose value is set when a function is specialized."""

    name: str
    index: int
    type: str


@dataclass(frozen=True)
class KernelInfo:
    """A kernel's arguments, and the features that it or a function it calls may use.

    Attributes:
        used_constants: Names of function constants.
        threads_communicate: Whether there are barriers, SIMD-group operations, atomics or threadgroup memory.
    """

    name: str
    arguments: tuple[Argument, ...]
    used_constants: tuple[str, ...]
    threads_communicate: bool


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its `Argument`, and the C++ expression that computes it from `launch` and `thread`."""

    argument: Argument
    value: str


@dataclass(frozen=True)
class Kernel:
    """A kernel function, or an instance of a kernel template.

    Attributes:
        call: The C++ name to call.
        declaration: The item that has the parameters' attributes.
    """

    name: str
    call: str
    item: Item
    declaration: Item


@dataclass(frozen=True)
class Constants:
    """The function constants of a source, and (name, expression) of the constants that are computed from them."""

    declared: tuple[FunctionConstant, ...]
    derived: tuple[tuple[str, str], ...]


def take_constants(source: Source, items: Sequence[Item], attributes: Attributes) -> Constants:
    """Rewrite function constants, and constants at program scope that depend on them, as variables; return both."""
    declared = tuple(
        _function_constant(source, item, index, int(attribute[2].text, 0))
        for item in items
        if source.text(item.start) == "constant"
        for index in range(item.start, item.end)
        for attribute in attributes.get(index, [])
        if attribute and attribute[0].text == "function_constant"
    )
    names = {constant.name for constant in declared}
    derived = []
    for item in items:
        words = [source.text(index) for index in range(item.start, item.end)]
        equals = words.index("=") if "=" in words else 0
        if "constant" not in words[:equals] or "(" in words[:equals] or not item.names & names - {item.declares}:
            continue
        derived.append((item.declares, source.joined(item.start + equals + 1, item.end - 1)))
        source.blank(item.start + equals, item.end - 1)
        for index in range(item.start, item.start + equals):
            if source.text(index) in ("constant", "constexpr", "const", "static"):
                source.tokens[index].output = "static" if source.text(index) == "constant" else ""
        names.add(item.declares)
    for index, token in enumerate(source.tokens):
        if token.text == "is_function_constant_defined":
            source.blank(index, index + 4, f"metal_defined_{source.text(index + 2)}")
    return Constants(declared, tuple(derived))


def _function_constant(source: Source, item: Item, name: int, number: int) -> FunctionConstant:
    kind = source.original(item.start + 1, name)
    if kind not in CONSTANT_TYPES:
        raise source.error(name, f"function constant of type '{kind}' is none of {', '.join(CONSTANT_TYPES)}")
    source.tokens[item.start].output = f"static bool metal_defined_{source.text(name)}; static"
    return FunctionConstant(source.text(name), number, kind)


def find_kernels(source: Source, items: Sequence[Item]) -> list[Kernel]:
    """The kernels of a source, including those that a template instantiation with a `host_name` defines."""
    kernels, templates = [], {}
    for item in items:
        marks = [i for i in range(item.start, item.end) if source.text(i) == "kernel" and _is_mark(source, i)]
        if not marks:
            continue
        source.tokens[marks[0]].output = "static"
        if source.text(item.start) != "template":
            kernels.append(Kernel(item.declares, item.declares, item, item))
        elif source.text(item.start + 1) == "<":
            templates[item.declares] = item
        else:
            kernels.append(_instance(source, item, templates))
    return kernels


def _is_mark(source: Source, index: int) -> bool:
    return not source.tokens[index].in_attribute or source.text(index - 1) == "["


def _instance(source: Source, item: Item, templates: Mapping[str, Item]) -> Kernel:
    """The kernel that a template instantiation defines.

    It reads `template [[host_name("name")]] kernel void function<arguments>(…);`.
    """
    names = [token.text[1:-1] for token in source.tokens[item.start : item.end] if token.kind == "string"]
    angle = next((i for i in range(item.start, item.end) if source.text(i) == "<"), item.end)
    if not names or angle == item.end or item.declares not in templates:
        raise source.error(item.start, 'an instance of a kernel template has no [[host_name("…")]]')
    call = source.original(angle - 1, source.closing_angle(angle) + 1)
    return Kernel(names[0], call, item, templates[item.declares])


def read_parameters(source: Source, kernel: Kernel, attributes: Attributes) -> list[Parameter]:
    """A kernel's parameters, to be read after their types were rewritten; removes the text of an instantiation."""
    result: list[Parameter] = []
    own, declared = parameters(source, kernel.item), parameters(source, kernel.declaration)
    for place, declaration in zip(own, declared, strict=True):
        given = attributes.get(place[1] - 1) or attributes.get(declaration[1] - 1, [])
        buffers = sum(parameter.argument.kind == "buffer" for parameter in result)
        name = source.text(declaration[1] - 1)
        result.append(_read_parameter(source, name, place, {a[0].text: a for a in given if a}, buffers))
    if kernel.item is not kernel.declaration:
        source.blank(kernel.item.start, kernel.item.end)
    return result


def _read_parameter(
    source: Source, name: str, place: tuple[int, int], attributes: Mapping[str, list[Token]], buffers: int
) -> Parameter:
    start, end = place
    words = [source.text(index) for index in range(start, end)]
    # An instantiation may leave the name out.
    kind = source.joined(start, end - 1 if words[-1] == name else end)
    if "threadgroup" in attributes:
        raise source.error(start, f"'{name}': declare threadgroup memory in the kernel; the emulator binds none")
    if "buffer" in attributes:
        space = next((word for word in words if word in SPACES), "")
        optional = attributes.get("function_constant")
        argument = Argument(
            name,
            "buffer",
            int(attributes["buffer"][2].text, 0),
            space,
            space == "constant" or "const" in words,
            optional[2].text if optional else None,
        )
        return Parameter(argument, f"metal_runtime::bound_buffer<{kind}>::make(launch.regions[{buffers}])")
    builtin = next((word for word in attributes if word in BUILTINS), None)
    if builtin is None:
        raise source.error(start, f"argument '{name}' has no attribute that the emulator knows")
    value = f"metal_runtime::builtin_argument<{kind}>::make({BUILTINS[builtin]})"
    return Parameter(Argument(name, "builtin", -1, "", False, None), value)


def describe(
    kernel: Kernel, bound: Sequence[Parameter], items: Sequence[Item], constants: Sequence[FunctionConstant]
) -> KernelInfo:
    """The facts about a kernel that a pipeline needs."""
    names_in: dict[str, set[str]] = {}
    for item in items:
        names_in.setdefault(item.declares, set()).update(item.names)
    pending = list(kernel.item.names | kernel.declaration.names)
    reached = set(pending)
    while pending:
        new = names_in.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    arguments = tuple(parameter.argument for parameter in bound)
    used = {constant.name for constant in constants if constant.name in reached}
    used |= {argument.constant for argument in arguments if argument.constant}
    threads_communicate = any(_COMMUNICATION.fullmatch(name) for name in reached)
    return KernelInfo(kernel.name, arguments, tuple(sorted(used)), threads_communicate)


def entries(kernels: Sequence[tuple[Kernel, Sequence[Parameter]]], constants: Constants) -> str:
    """C++ source of the symbols that the loader looks up: kernel entries and setters of function constants."""
    lines = ['\n# 1 "entries"']
    for index, (kernel, bound) in enumerate(kernels):
        values = ", ".join(parameter.value for parameter in bound)
        lines.append(
            f'extern "C" void metal_entry_{index}(const metal_runtime::Launch &launch, '
            f"const metal_runtime::Thread &thread) {{ {kernel.call}({values}); }}"
        )
    lines += [
        f'extern "C" void metal_set_{constant.name}({constant.type} value, bool defined) '
        f"{{ {constant.name} = value; metal_defined_{constant.name} = defined; }}"
        for constant in constants.declared
    ]
    derived = " ".join(f"{name} = {value};" for name, value in constants.derived)
    lines.append(f'extern "C" void metal_derive_constants() {{ {derived} }}\n')
    return "\n".join(lines)
