"""Address spaces: translates pointer types, threadgroup variables, and the accesses that go through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from metal_emulator.translation.program import Item
from metal_emulator.translation.tokens import ASSIGNMENTS, Source

SPACES = ("device", "constant", "threadgroup", "thread")


def rewrite_address_spaces(source: Source, items: Sequence[Item]) -> None:
    """Rewrite pointers as `…_pointer<T>`, references as plain ones, and threadgroup variables as arrays."""
    for item in items:
        arrays = count()
        for index in range(item.start, item.end):
            token = source.tokens[index]
            if token.kind != "name" or token.text not in SPACES or token.in_attribute or token.output != token.text:
                continue
            if token.text == "thread":
                token.output = ""
            else:
                _rewrite_space(source, index, arrays)


def _rewrite_space(source: Source, index: int, arrays: Iterator[int]) -> None:
    space = source.text(index)
    first = index
    while source.text(first - 1) in ("const", "volatile", "static", "constexpr"):
        first -= 1
    kind, is_const, after = source.parse_type(index + 1)
    is_const = is_const or "const" in (source.text(i) for i in range(first, index))
    if not kind:
        raise source.error(index, f"expected a type after '{space}'")
    declarator = source.text(after)
    if declarator == "*":
        if source.text(after + 1) == "*":
            raise source.error(index, "pointers to pointers are not supported")
        qualified = f"const {kind}" if is_const and space != "constant" else kind
        source.blank(first, after + 1, f"::metal_runtime::{space}_pointer<{qualified}>")
    elif declarator == "&":
        source.blank(first, after, f"const {kind}" if is_const or space == "constant" else kind)
    elif declarator == "(" and source.text(after + 1) == "&" and space == "threadgroup":
        _view_parameter(source, first, after, kind)
    elif space == "threadgroup" and source.text(first - 1) in (";", "{", "}"):
        _declare_arrays(source, first, after, kind, arrays)
    elif space == "threadgroup" and source.text(after + 1) == "[":
        end = source.tokens[after + 1].partner
        if source.text(end + 1) == "[":
            raise source.error(index, "pass a threadgroup array of several dimensions by reference")
        source.blank(first, after, f"::metal_runtime::threadgroup_pointer<{'const ' * is_const}{kind}>")
        source.blank(after + 1, end + 1)
    elif space == "constant":
        source.blank(first, after, f"static const {kind}")
    else:
        raise source.error(index, f"a '{space}' variable must be a pointer or a reference here")


def _view_parameter(source: Source, first: int, after: int, kind: str) -> None:
    """Rewrite a parameter `threadgroup T (&name)[N][M]`, with its declarator at `after`, as a `threadgroup_view`."""
    close = source.tokens[after].partner
    end = source.after_dimensions(close + 1)
    view = f"::metal_runtime::threadgroup_view<{kind}{source.joined(close + 1, end)}>"
    name = after + 2
    source.blank(first, name, view)
    source.blank(name + 1, end)


def _declare_arrays(source: Source, first: int, name: int, kind: str, arrays: Iterator[int]) -> None:
    declarations = []
    scope = source.scope_end(first)
    while True:
        if not source.is_name(name):
            raise source.error(name, "expected the name of a threadgroup variable")
        after = source.after_dimensions(name + 1)
        is_scalar = after == name + 1
        array = f"{kind}{'[1]' if is_scalar else source.joined(name + 1, after)}"
        text = source.text(name)
        declarations.append(
            f"::metal_runtime::threadgroup_view<{array}> {text} = "
            f'::metal_runtime::threadgroup_array<{array}>({next(arrays)}, "{text}")'
        )
        if is_scalar:
            _mark_scalar(source, name + 1, scope, text)
        if source.text(after) == ";":
            break
        if source.text(after) != ",":
            raise source.error(after, "a threadgroup variable has no initializer")
        name = after + 1
    source.blank(first, after, "; ".join(declarations))


def _mark_scalar(source: Source, start: int, end: int, name: str) -> None:
    """Rewrite the uses of a scalar threadgroup variable as `name[0]`, since it is declared as an array."""
    for index in range(start, end):
        token = source.tokens[index]
        if token.text == name and source.text(index - 1) not in (".", "->", "::"):
            token.is_scalar = True
            token.output = f"{name}[0]"


def rewrite_addresses(source: Source) -> None:
    """Rewrite `&p[i]` as `(p + (i))`: a checked pointer's element is a value and has no address."""
    for index, token in enumerate(source.tokens):
        if token.text == "reinterpret_cast":
            token.output = "::metal_runtime::pointer_cast"
        if token.text != "&" or token.kind != "op" or token.in_attribute or not source.is_prefix(index):
            continue
        end = source.postfix_end(index + 1)
        last = end - 1
        if last == index + 1 and source.tokens[last].is_scalar:
            token.output, source.tokens[last].output = "", f"({source.text(last)} + 0)"
        elif end > index + 1 and source.text(last) == "]" and token.output == "&":
            token.output = "("
            source.tokens[source.tokens[last].partner].output = " + ("
            source.tokens[last].output = "))"


def rewrite_writes(source: Source) -> None:
    """Rewrite `p[i] = x` as `write(p, (i)) = x`, `*p = x` as `write(p) = x`, and `p[i] += x` with `update`."""
    for index, token in enumerate(source.tokens):
        if token.kind != "op" or token.in_attribute:
            continue
        if token.text in ASSIGNMENTS:
            _rewrite_assignment(source, index, "write" if token.text == "=" else "update")
        elif token.text in ("++", "--"):
            end = source.postfix_end(index + 1) if source.is_prefix(index) else index
            _rewrite_element(source, end, "update")


def _rewrite_assignment(source: Source, index: int, function: str) -> None:
    start = source.statement_start(index)
    if source.text(start) == "*":
        source.tokens[start].output = f"::metal_runtime::{function}("
        source.tokens[index].prefix = ")"
    else:
        _rewrite_element(source, index, function)


def _rewrite_element(source: Source, end: int, function: str) -> None:
    """Rewrite the element access that ends before `end`, if there is one, as a call of `write` or `update`."""
    start = source.postfix_start(end)
    if source.text(start - 1) in ("*", "&", ">") or (source.is_name(start - 1) and not source.is_keyword(start - 1)):
        return  # a declaration
    last = end - 1
    while source.is_name(last) and source.text(last - 1) in (".", "->"):
        last -= 2
    token = source.tokens[last]
    if token.is_scalar:
        token.output = f"::metal_runtime::{function}({token.text}, 0)"
    elif token.text == "]" and token.partner > start:
        source.tokens[start].prefix = f"::metal_runtime::{function}(" + source.tokens[start].prefix
        source.tokens[token.partner].output = ", ("
        token.output = "))"
