"""Rewrites preprocessed Metal source as C++, token by token, so that every line stays where it was.

Address spaces become pointer types, threadgroup variables become arrays of the threadgroup, writes through pointers become
calls that the runtime can check, attributes go, and every kernel gets an entry that binds its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

SPACES = ("device", "constant", "threadgroup", "thread")
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
BARRIERS = ("threadgroup_barrier", "simdgroup_barrier")
SWIZZLES = ("xy", "yz", "zw", "xz", "yw", "xyz", "yzw")
INTEGER_WORDS = ("unsigned", "signed", "int", "char", "short", "long")
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

_TOKEN = re.compile(
    r"""(?P<space>(?:\s+|(?:(?<=\n)|\A)\#[^\n]*)+)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<op><<=|>>=|\.\.\.|->|::|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)""",
    re.VERBOSE,
)
_MARKER = re.compile(r'#(?:line)?\s+(\d+)(?:\s+"([^"]*)")?')
_FLOAT = re.compile(r"(?i)(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?")


class TranslationError(Exception):
    """Source that the emulator does not understand; the message starts with file and line."""


@dataclass(frozen=True)
class Argument:
    """A kernel argument.

    Attributes:
        kind: `buffer`, `threadgroup` or `builtin`.
        index: Buffer or threadgroup index, -1 for a builtin.
        address_space: `device`, `constant`, `threadgroup`, or "" for a builtin.
        constant: The function constant without which the argument does not exist.
    """

    name: str
    kind: str
    index: int
    address_space: str
    is_const: bool
    constant: str | None


@dataclass(frozen=True)
class FunctionConstant:
    """A `[[function_constant(index)]]`."""

    name: str
    index: int
    type: str


@dataclass(frozen=True)
class Mutant:
    """A barrier or bounds guard that can be switched off at run time.

    Attributes:
        kind: `barrier` or `guard`.
        function: The function that it stands in.
        text: The barrier call, or the comparison.
        file: The name that the source's #line directives give the file.
    """

    id: int
    kind: str
    function: str
    line: int
    text: str
    file: str


@dataclass(frozen=True)
class KernelInfo:
    """A kernel's arguments and the function constants that it or a function it calls may use."""

    name: str
    arguments: tuple[Argument, ...]
    used_constants: tuple[str, ...]


@dataclass(frozen=True)
class Translation:
    """C++ source, and what it holds."""

    source: str
    kernels: tuple[KernelInfo, ...]
    constants: tuple[FunctionConstant, ...]
    mutants: tuple[Mutant, ...]

    def metadata(self) -> str:
        """Everything but the source, as JSON."""
        return json.dumps(
            {
                "kernels": [asdict(kernel) for kernel in self.kernels],
                "constants": [asdict(constant) for constant in self.constants],
                "mutants": [asdict(mutant) for mutant in self.mutants],
            }
        )


@dataclass(eq=False)
class Token:
    """A token: what it reads in the source, and what is written in its place."""

    kind: str
    text: str
    before: str
    file: str
    line: int
    output: str
    prefix: str = ""
    suffix: str = ""
    partner: int = -1
    in_attribute: bool = False
    is_scalar: bool = False  # names a threadgroup variable that is no array

    def emit(self) -> str:
        return f"{self.before}{self.prefix}{self.output}{self.suffix}"

    def wrap(self, last: Token, opening: str, closing: str) -> None:
        """Puts text around the tokens from this one to `last`, outside what was put there before."""
        self.prefix = opening + self.prefix
        last.suffix += closing


@dataclass
class _Item:
    """A declaration at program scope: tokens [start, end)."""

    start: int
    end: int
    names: frozenset[str]
    declares: str


@dataclass
class _Kernel:
    name: str
    call: str
    item: _Item
    parameters: list[tuple[Argument, str, int]] = field(default_factory=list)  # argument, C++ type, region or -1
    builtins: list[str] = field(default_factory=list)


def tokenize(text: str, file: str = "program_source") -> tuple[list[Token], str]:
    """Tokens of preprocessed text, each with the white space and line markers before it; and what follows the last."""
    tokens: list[Token] = []
    before, line, position = "", 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        position = match.end()
        piece, kind = match.group(), match.lastgroup or "op"
        if kind == "space":
            before += piece
            for row in piece.splitlines(keepends=True):
                marker = _MARKER.match(row)
                if marker:
                    line, file = int(marker.group(1)), marker.group(2) or file
                elif row.endswith("\n"):
                    line += 1
            continue
        tokens.append(Token(kind, piece, before, file, line, piece))
        before = ""
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind == "op" and token.text in "([{":
            opened.append(index)
        elif token.kind == "op" and token.text in ")]}":
            if not opened:
                raise TranslationError(f"{token.file}:{token.line}: unmatched '{token.text}'")
            token.partner = opened.pop()
            tokens[token.partner].partner = index
    if opened:
        token = tokens[opened[-1]]
        raise TranslationError(f"{token.file}:{token.line}: unmatched '{token.text}'")
    return tokens, before


def translate(preprocessed: str, not_guards: frozenset[tuple[str, int]] = frozenset()) -> Translation:
    """C++ for Metal source that the preprocessor has been through.

    Args:
        not_guards: (file, line) of lines whose comparisons are no bounds guards.

    Raises:
        TranslationError: Something that Metal does not have, or that the emulator does not support.
    """
    return _Translator(preprocessed, not_guards).run()


class _Translator:
    def __init__(self, text: str, not_guards: frozenset[tuple[str, int]]) -> None:
        self.tokens, self.rest = tokenize(text)
        self.not_guards = not_guards
        self.constants: list[FunctionConstant] = []
        self.derived: list[tuple[str, str]] = []
        self.mutants: list[Mutant] = []
        self.arrays = 0

    def run(self) -> Translation:
        self.rewrite_numbers()
        attributes = self.take_attributes()
        self.items = list(self.split_items())
        self.names_in: dict[str, set[str]] = {}
        for item in self.items:
            self.names_in.setdefault(item.declares, set()).update(item.names)
        self.take_constants(attributes)
        kernels = self.find_kernels()
        self.rewrite_address_spaces()
        for kernel in kernels:
            self.read_parameters(kernel, attributes)
        self.rewrite_addresses()
        self.rewrite_writes()
        self.rewrite_swizzles()
        self.mutate_barriers()
        self.mutate_guards()
        infos = tuple(self.describe(kernel) for kernel in kernels)
        source = "".join(token.emit() for token in self.tokens) + self.rest
        constants, mutants = tuple(self.constants), tuple(self.mutants)
        return Translation(source + self.entries(kernels), infos, constants, mutants)

    def error(self, index: int, message: str) -> TranslationError:
        token = self.tokens[min(index, len(self.tokens) - 1)]
        return TranslationError(f"{token.file}:{token.line}: error: {message}")

    def text(self, index: int) -> str:
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def is_name(self, index: int) -> bool:
        return 0 <= index < len(self.tokens) and self.tokens[index].kind == "name"

    def joined(self, start: int, end: int) -> str:
        """The tokens' output on one line."""
        return " ".join(f"{token.prefix}{token.output}{token.suffix}" for token in self.tokens[start:end]).strip()

    def original(self, start: int, end: int) -> str:
        """The tokens as they stand in the source, on one line."""
        first, *others = self.tokens[start:end]
        return first.text + "".join((" " if token.before else "") + token.text for token in others)

    def blank(self, start: int, end: int, replacement: str = "") -> None:
        for token in self.tokens[start:end]:
            token.output = ""
        self.tokens[start].output = replacement

    # Lexical details.

    def rewrite_numbers(self) -> None:
        for index, token in enumerate(self.tokens):
            if token.kind == "name" and token.text == "double":
                raise self.error(index, "Metal has no type 'double'")
            if token.kind != "number" or token.text.lower().startswith("0x"):
                continue
            if _FLOAT.fullmatch(token.text):
                token.output = f"{token.text}f"
            elif token.text[-1] in "hH":
                token.output = f"half({token.text[:-1]}f)"

    def rewrite_swizzles(self) -> None:
        for index, token in enumerate(self.tokens):
            if token.text in SWIZZLES and self.text(index - 1) == "." and self.text(index + 1) != "(":
                token.output = f"{token.text}()"

    # Attributes and program scope.

    def take_attributes(self) -> dict[int, list[list[Token]]]:
        """Blanks every `[[…]]`; the attributes by the index of the token before the first of them."""
        found: dict[int, list[list[Token]]] = {}
        index, owner = 0, -1
        while index < len(self.tokens):
            if self.text(index) == "[" and self.text(index + 1) == "[":
                end = self.tokens[index].partner
                content = self.tokens[index + 2 : end - 1]
                found.setdefault(owner, []).extend(_split(content))
                for token in self.tokens[index : end + 1]:
                    token.in_attribute = True
                self.blank(index, end + 1)
                index = end + 1
            else:
                owner = index
                index += 1
        return found

    def split_items(self) -> Iterator[_Item]:
        start = index = 0
        while index < len(self.tokens):
            token = self.tokens[index]
            if token.text == "namespace" and "{" in (self.text(index + 1), self.text(index + 2)):
                # The contents of a namespace are items too; its closing brace ends an item by itself.
                index = start = index + (2 if self.text(index + 1) == "{" else 3)
                continue
            ends = token.text == ";" or (token.text == "}" and token.kind == "op")
            if token.kind == "op" and token.text in "([{" and token.partner > index:
                index = token.partner
                ends = token.text == "{" and self.text(index + 1) != ";"
            index += 1
            if ends:
                yield self.item(start, index)
                start = index
        if start < index:
            yield self.item(start, index)

    def item(self, start: int, end: int) -> _Item:
        names = frozenset(t.text for t in self.tokens[start:end] if t.kind == "name" and not t.in_attribute)
        declares = ""
        index = start
        while index < end and not declares:
            token = self.tokens[index]
            if token.in_attribute:
                index = token.partner + 1 if token.text == "[" else index + 1
                continue
            if token.text == "template" and self.text(index + 1) == "<":
                index = self.closing_angle(index + 1) + 1
                continue
            following = self.text(index + 1)
            if token.kind == "name" and (
                (following == "(" and token.text not in ("alignas", "decltype"))
                or (following in ("=", ";", "[") and token.text != "operator")
                or (self.text(index - 1) in ("struct", "class", "enum") and following in ("{", ":"))
                or (following == "<" and self.text(self.closing_angle(index + 1) + 1) == "(")
            ):
                declares = token.text
            index += 1
        return _Item(start, end, names, declares)

    def closing_angle(self, index: int) -> int:
        """The index of the token that closes the template bracket at `index`; `index` itself if none does."""
        depth, at = 0, index
        while at < len(self.tokens):
            text = self.text(at)
            if text == "<":
                depth += 1
            elif text in (">", ">>"):
                depth -= len(text)
                if depth <= 0:
                    return at
            elif text in ("(", "[") and self.tokens[at].partner > at:
                at = self.tokens[at].partner
            elif text in (";", "{", "}", "&&", "||"):
                return index
            at += 1
        return index

    def take_constants(self, attributes: dict[int, list[list[Token]]]) -> None:
        for item in self.items:
            for index in range(item.start, item.end):
                for attribute in attributes.get(index, []):
                    if attribute and attribute[0].text == "function_constant" and self.text(item.start) == "constant":
                        self.function_constant(item, index, int(attribute[2].text, 0))
        known = {constant.name for constant in self.constants}
        for item in self.items:
            words = [self.text(index) for index in range(item.start, item.end)]
            if "constant" not in words or "(" in words[: words.index("=") if "=" in words else None]:
                continue
            if "=" in words and item.names & known and item.declares not in known:
                # It is known only when the launch's function constants are.
                equals = item.start + words.index("=")
                self.derived.append((item.declares, self.joined(equals + 1, item.end - 1)))
                self.blank(equals, item.end - 1)
                for index in range(item.start, equals):
                    if self.text(index) in ("constant", "constexpr", "const", "static"):
                        self.tokens[index].output = "static" if self.text(index) == "constant" else ""
                known.add(item.declares)
        names = {constant.name for constant in self.constants}
        for index, token in enumerate(self.tokens):
            if token.text == "is_function_constant_defined" and self.text(index + 2) in names:
                self.blank(index, index + 4, f"metal_defined_{self.text(index + 2)}")

    def function_constant(self, item: _Item, name: int, number: int) -> None:
        kind = self.original(item.start + 1, name)
        if kind not in CONSTANT_TYPES:
            raise self.error(name, f"a function constant of type '{kind}'; the emulator knows {', '.join(CONSTANT_TYPES)}")
        self.constants.append(FunctionConstant(self.text(name), number, kind))
        self.tokens[item.start].output = f"static bool metal_defined_{self.text(name)}; static"

    # Kernels.

    def find_kernels(self) -> list[_Kernel]:
        kernels = []
        for item in self.items:
            marks = [
                index
                for index in range(item.start, item.end)
                if self.text(index) == "kernel" and (not self.tokens[index].in_attribute or self.text(index - 1) == "[")
            ]
            if not marks:
                continue
            self.tokens[marks[0]].output = "static"
            is_template = self.text(item.start) == "template"
            if is_template and self.text(item.start + 1) == "<":
                continue
            opening = next(i for i in range(marks[0], item.end) if self.text(i) == "(" and not self.tokens[i].in_attribute)
            if not is_template:
                kernels.append(_Kernel(item.declares, item.declares, item))
                continue
            strings = [t.text[1:-1] for t in self.tokens[item.start : opening] if t.kind == "string"]
            angle = next((i for i in range(item.start, opening) if self.text(i) == "<"), None)
            if not strings or angle is None:
                raise self.error(item.start, "an instantiated kernel needs [[host_name(\"…\")]] and template arguments")
            kernels.append(_Kernel(strings[0], self.original(angle - 1, opening), item))
        return kernels

    def read_parameters(self, kernel: _Kernel, attributes: dict[int, list[list[Token]]]) -> None:
        item = kernel.item
        is_instance = self.text(item.start) == "template"
        template = item
        if is_instance:
            template = next(
                (i for i in self.items if i.declares == item.declares and "kernel" in i.names and i is not item), item
            )
        for own, declared in zip(self.parameters(item), self.parameters(template), strict=True):
            self.read_parameter(kernel, own, attributes.get(own[1] - 1) or attributes.get(declared[1] - 1, []))
        if is_instance:
            self.blank(item.start, item.end)

    def parameters(self, item: _Item) -> list[tuple[int, int]]:
        """Token ranges of a function's parameters, attributes left out."""
        opening = next(
            i
            for i in range(item.start, item.end)
            if self.text(i) == "(" and not self.tokens[i].in_attribute and self.text(i - 1) not in ("alignas", "decltype")
        )
        ranges, start, index = [], opening + 1, opening + 1
        end = self.tokens[opening].partner
        while index <= end:
            text = self.text(index)
            if text == "<":
                index = self.closing_angle(index)
            elif text in ("(", "[") and self.tokens[index].partner > index and not self.tokens[index].in_attribute:
                index = self.tokens[index].partner
            elif text == "," and not self.tokens[index].in_attribute or index == end:
                stop = next((i for i in range(start, index) if self.tokens[i].in_attribute), index)
                if stop > start:
                    ranges.append((start, stop))
                start = index + 1
            index += 1
        return ranges

    def read_parameter(self, kernel: _Kernel, place: tuple[int, int], attributes: list[list[Token]]) -> None:
        start, end = place
        words = [self.text(index) for index in range(start, end)]
        name = self.text(end - 1)
        kind = self.joined(start, end - 1)
        by_name = {attribute[0].text: attribute for attribute in attributes if attribute}
        space = next((word for word in words if word in SPACES), "")
        if "threadgroup" in by_name:
            raise self.error(start, f"'{name}': declare threadgroup memory in the kernel; the emulator binds none")
        if "buffer" in by_name:
            optional = by_name.get("function_constant")
            is_const = space == "constant" or "const" in words
            index = int(by_name["buffer"][2].text, 0)
            argument = Argument(name, "buffer", index, space, is_const, optional[2].text if optional else None)
            region = sum(known >= 0 for _, _, known in kernel.parameters)
            kernel.parameters.append((argument, kind, region))
            return
        builtin = next((word for word in by_name if word in BUILTINS), None)
        if builtin is None:
            raise self.error(start, f"argument '{name}' of kernel '{kernel.name}' has no attribute that the emulator knows")
        kernel.parameters.append((Argument(name, "builtin", -1, "", False, None), kind, -1))
        kernel.builtins.append(builtin)

    def describe(self, kernel: _Kernel) -> KernelInfo:
        reached, pending = set(kernel.item.names), list(kernel.item.names)
        while pending:
            new = self.names_in.get(pending.pop(), set()) - reached
            reached |= new
            pending += new
        used = {argument.constant for argument, _, _ in kernel.parameters}
        used |= {constant.name for constant in self.constants if constant.name in reached}
        arguments = tuple(argument for argument, _, _ in kernel.parameters)
        return KernelInfo(kernel.name, arguments, tuple(sorted(name for name in used if name)))

    def entries(self, kernels: list[_Kernel]) -> str:
        """What the loader looks up: an entry per kernel, and the function constants."""
        lines = ['\n# 1 "entries"']
        for index, kernel in enumerate(kernels):
            builtins = iter(kernel.builtins)
            values = [
                f"metal_runtime::bound_buffer<{kind}>::make(launch.regions[{region}])"
                if region >= 0
                else f"metal_runtime::builtin_argument<{kind}>::make({BUILTINS[next(builtins)]})"
                for _, kind, region in kernel.parameters
            ]
            lines.append(
                f'extern "C" void metal_entry_{index}(const metal_runtime::Launch &launch, '
                f"const metal_runtime::Thread &thread) {{ {kernel.call}({', '.join(values)}); }}"
            )
        for constant in self.constants:
            lines.append(
                f'extern "C" void metal_set_{constant.name}({constant.type} value, bool defined) '
                f"{{ {constant.name} = value; metal_defined_{constant.name} = defined; }}"
            )
        derived = " ".join(f"{name} = {value};" for name, value in self.derived)
        lines.append(f'extern "C" void metal_derive_constants() {{ {derived} }}\n')
        return "\n".join(lines)

    # Address spaces.

    def rewrite_address_spaces(self) -> None:
        for index, token in enumerate(self.tokens):
            if token.kind != "name" or token.text not in SPACES or token.in_attribute or token.output != token.text:
                continue
            if token.text == "thread":
                token.output = ""
            else:
                self.rewrite_space(index)

    def parse_type(self, index: int) -> tuple[str, bool, int]:
        """(type without const, whether it is const, index after it)."""
        words, is_const = [], False
        while True:
            text = self.text(index)
            if text in ("const", "volatile", "constexpr", "static"):
                is_const = is_const or text == "const"
                index += 1
            elif text in ("struct", "typename") or (text in INTEGER_WORDS and all(w in INTEGER_WORDS for w in words)):
                words.append(text)
                index += 1
            elif self.is_name(index) and (not words or words[-1] in ("struct", "typename", "::")):
                words.append(text)
                index += 1
                if self.text(index) == "<":
                    end = self.closing_angle(index)
                    words.append(self.original(index, end + 1))
                    index = end + 1
            elif text == "::":
                words.append(text)
                index += 1
            else:
                return " ".join(words), is_const, index

    def rewrite_space(self, index: int) -> None:
        space = self.text(index)
        first = index
        while self.text(first - 1) in ("const", "volatile", "static", "constexpr"):
            first -= 1
        kind, is_const, after = self.parse_type(index + 1)
        is_const = is_const or "const" in (self.text(i) for i in range(first, index))
        if not kind:
            raise self.error(index, f"expected a type after '{space}'")
        declarator = self.text(after)
        if declarator == "*":
            if self.text(after + 1) == "*":
                raise self.error(index, "pointers to pointers are not supported")
            qualified = f"const {kind}" if is_const and space != "constant" else kind
            self.blank(first, after + 1, f"::metal_runtime::{space}_pointer<{qualified}>")
        elif declarator == "&":
            self.blank(first, after, f"const {kind}" if is_const or space == "constant" else kind)
        elif declarator == "(" and self.text(after + 1) == "&" and space == "threadgroup":
            self.view_parameter(first, after, kind, is_const)
        elif space == "threadgroup" and self.text(first - 1) in (";", "{", "}"):
            self.declare_arrays(first, after, kind)
        elif space == "threadgroup" and self.text(after + 1) == "[":
            end = self.tokens[after + 1].partner
            if self.text(end + 1) == "[":
                raise self.error(index, "pass a threadgroup array of several dimensions by reference")
            self.blank(first, after, f"::metal_runtime::threadgroup_pointer<{'const ' * is_const}{kind}>")
            self.blank(after + 1, end + 1)
        elif space == "constant":
            self.blank(first, after, f"static const {kind}")
        else:
            raise self.error(index, f"a '{space}' variable must be a pointer or a reference here")

    def view_parameter(self, first: int, after: int, kind: str, is_const: bool) -> None:
        close = self.tokens[after].partner
        end = self.after_dimensions(close + 1)
        view = f"::metal_runtime::threadgroup_view<{kind}{self.joined(close + 1, end)}>"
        name = after + 2
        self.blank(first, name, view)
        self.blank(name + 1, end)

    def after_dimensions(self, index: int) -> int:
        while self.text(index) == "[" and not self.tokens[index].in_attribute:
            index = self.tokens[index].partner + 1
        return index

    def declare_arrays(self, first: int, name: int, kind: str) -> None:
        start, declarations = first, []
        scope = self.scope_end(first)
        while True:
            if not self.is_name(name):
                raise self.error(name, "expected the name of a threadgroup variable")
            after = self.after_dimensions(name + 1)
            is_scalar = after == name + 1
            array = f"{kind}{'[1]' if is_scalar else self.joined(name + 1, after)}"
            text = self.text(name)
            declarations.append(
                f"::metal_runtime::threadgroup_view<{array}> {text} = "
                f'::metal_runtime::threadgroup_array<{array}>({self.arrays}, "{text}")'
            )
            self.arrays += 1
            if is_scalar:
                self.mark_scalar(name + 1, scope, text)
            if self.text(after) == ";":
                break
            if self.text(after) != ",":
                raise self.error(after, "a threadgroup variable has no initializer")
            name = after + 1
        self.blank(start, after, "; ".join(declarations))

    def scope_end(self, index: int) -> int:
        while index < len(self.tokens) and not (self.text(index) == "}" and self.tokens[index].partner < index):
            index = self.tokens[index].partner + 1 if self.text(index) in ("(", "[", "{") else index + 1
        return index

    def mark_scalar(self, start: int, end: int, name: str) -> None:
        for index in range(start, end):
            token = self.tokens[index]
            if token.text == name and self.text(index - 1) not in (".", "->", "::"):
                token.is_scalar = True
                token.output = f"{name}[0]"

    # Pointer expressions.

    def rewrite_addresses(self) -> None:
        """`&p[i]` → `(p + (i))`: a checked pointer's element is a value and has no address."""
        for index, token in enumerate(self.tokens):
            if token.text == "reinterpret_cast":
                token.output = "::metal_runtime::pointer_cast"
            if token.text != "&" or token.kind != "op" or token.in_attribute or not self.is_prefix(index):
                continue
            end = self.postfix_end(index + 1)
            last = end - 1
            if last == index + 1 and self.tokens[last].is_scalar:
                token.output, self.tokens[last].output = "", f"({self.text(last)} + 0)"
            elif end > index + 1 and self.text(last) == "]" and token.output == "&":
                token.output = "("
                self.tokens[self.tokens[last].partner].output = " + ("
                self.tokens[last].output = "))"

    def is_prefix(self, index: int) -> bool:
        previous = self.tokens[index - 1] if index else None
        if previous is None or previous.text in ("return", "else", "case"):
            return True
        return previous.kind == "op" and previous.text not in (")", "]", "}", ">", "++", "--")

    def postfix_end(self, index: int) -> int:
        """Where the postfix expression that starts at `index` ends; `index` if none starts there."""
        if not self.is_name(index) and self.text(index) != "(":
            return index
        index = index + 1 if self.is_name(index) else self.tokens[index].partner + 1
        while True:
            text = self.text(index)
            if text in (".", "->", "::") and self.is_name(index + 1):
                index += 2
            elif text in ("[", "("):
                index = self.tokens[index].partner + 1
            else:
                return index

    def postfix_start(self, end: int) -> int:
        """Where the postfix expression that ends before `end` starts."""
        index = end - 1
        while True:
            text = self.text(index)
            if text in (")", "]"):
                index = self.tokens[index].partner
                # A name before the bracket is called or subscripted, as is what another bracket closes.
                if self.text(index - 1) in (")", "]") or (self.is_name(index - 1) and not self.is_keyword(index - 1)):
                    index -= 1
                    continue
                return index
            if self.is_name(index) and self.text(index - 1) in (".", "->", "::"):
                index -= 2
                continue
            return index

    def is_keyword(self, index: int) -> bool:
        return self.text(index) in ("return", "if", "while", "for", "switch", "else", "case", "do", "sizeof")

    def rewrite_writes(self) -> None:
        for index, token in enumerate(self.tokens):
            if token.kind != "op" or token.in_attribute:
                continue
            if token.text in ASSIGNMENTS:
                self.rewrite_assignment(index, "write" if token.text == "=" else "update")
            elif token.text in ("++", "--"):
                if not self.is_prefix(index) and not self.rewrite_element(index, "update"):
                    continue
                if self.is_prefix(index):
                    self.rewrite_element(self.postfix_end(index + 1), "update")

    def rewrite_assignment(self, index: int, function: str) -> None:
        start = self.statement_start(index)
        if self.text(start) == "*":
            self.tokens[start].output = f"::metal_runtime::{function}("
            self.tokens[index].wrap(self.tokens[index], ")", "")
        else:
            self.rewrite_element(index, function)

    def statement_start(self, index: int) -> int:
        """Where the expression that is assigned to at `index` starts."""
        at = index - 1
        while at >= 0:
            text = self.text(at)
            if text in (")", "]"):
                opening = self.tokens[at].partner
                if text == ")" and self.text(opening - 1) in ("if", "while", "for", "switch"):
                    return at + 1
                at = opening - 1
                continue
            if text in (";", "{", "}", "(", "[", ",", ":", "?", "else", "do") or text in ASSIGNMENTS:
                return at + 1
            at -= 1
        return 0

    def rewrite_element(self, end: int, function: str) -> bool:
        """The element that is written by what follows `end`: `p[i]` → `write(p, (i))`."""
        start = self.postfix_start(end)
        if self.text(start - 1) in ("*", "&", ">") or (self.is_name(start - 1) and not self.is_keyword(start - 1)):
            return False  # a declaration
        last = end - 1
        while self.is_name(last) and self.text(last - 1) in (".", "->"):
            last -= 2
        token = self.tokens[last]
        if token.is_scalar:
            token.output = f"::metal_runtime::{function}({token.text}, 0)"
            return True
        if token.text != "]" or token.partner <= start:
            return False
        self.tokens[start].prefix = f"::metal_runtime::{function}(" + self.tokens[start].prefix
        self.tokens[token.partner].output = ", ("
        token.output = "))"
        return True

    # Mutants.

    def mutate(self, first: int, last: int, kind: str, keeps: str, function: str) -> None:
        token = self.tokens[first]
        number = len(self.mutants) + 1
        self.mutants.append(Mutant(number, kind, function, token.line, self.original(first, last + 1), token.file))
        opening, closing = {
            "void": (f"METAL_UNLESS_MUTANT({number}, ", ")"),
            "true": (f"METAL_TRUE_IN_MUTANT({number}, ", ")"),
            "false": (f"METAL_FALSE_IN_MUTANT({number}, ", ")"),
        }[keeps]
        token.wrap(self.tokens[last], opening, closing)

    def function_of(self, index: int) -> str:
        return next((item.declares for item in self.items if item.start <= index < item.end), "")

    def mutate_barriers(self) -> None:
        for index, token in enumerate(self.tokens):
            if token.text in BARRIERS and self.text(index + 1) == "(":
                end = self.tokens[index + 1].partner
                start = index - 2 if self.text(index - 1) == "::" else index
                self.mutate(start, end, "barrier", "void", self.function_of(index))

    def mutate_guards(self) -> None:
        shared = self.shared_floats()
        for item in self.items:
            own_floats, own_others = self.declared(item)
            floats = (shared - own_others) | own_floats
            for index in range(item.start, item.end):
                text = self.text(index)
                if text == "if" and self.text(index + 1) == "(":
                    end = self.tokens[index + 1].partner
                    self.find_guards(item, floats, index + 2, end, "", self.leaves(end + 1))
                elif text == "?" and self.tokens[index].kind == "op":
                    self.find_guards(item, floats, self.condition_start(index), index, "", False)

    def leaves(self, index: int) -> bool:
        """Whether the statement at `index` only leaves the function or loop."""
        if self.text(index) == "{":
            end = self.tokens[index].partner
            inside = [self.text(i) for i in range(index + 1, end)]
            return bool(inside) and inside[0] in ("return", "continue", "break") and inside.count(";") == 1
        return self.text(index) in ("return", "continue", "break")

    def condition_start(self, index: int) -> int:
        at = index - 1
        while at >= 0:
            text = self.text(at)
            if text in (")", "]"):
                at = self.tokens[at].partner - 1
                continue
            if text in (";", "{", "}", "(", "[", ",", ":", "?", "return") or text in ASSIGNMENTS:
                break
            at -= 1
        return at + 1

    def find_guards(
        self, item: _Item, floats: frozenset[str], start: int, end: int, joined_by: str, leaves: bool
    ) -> None:
        for operator in ("||", "&&"):
            places = [i for i in self.top_level(start, end) if self.text(i) == operator]
            if places:
                for left, right in zip([start - 1, *places], [*places, end], strict=True):
                    self.find_guards(item, floats, left + 1, right, operator, leaves)
                return
        if self.text(start) == "(" and self.tokens[start].partner == end - 1:
            self.find_guards(item, floats, start + 1, end - 1, joined_by, leaves)
            return
        comparisons = [i for i in self.top_level(start, end) if self.text(i) in ("<", "<=", ">", ">=")]
        if len(comparisons) != 1 or not self.bounds_index(start, end, floats):
            return
        operator, right = self.text(comparisons[0]), self.original(comparisons[0] + 1, end)
        if joined_by == "||" or leaves:
            keeps = "false"
        elif joined_by == "&&" or operator in ("<", "<=") or right == "0":
            keeps = "true"
        else:
            keeps = "false"
        self.mutate(start, end - 1, "guard", keeps, item.declares)

    def top_level(self, start: int, end: int) -> Iterator[int]:
        """Indices in [start, end) that are inside no bracket, template brackets included."""
        index = start
        while index < end:
            yield_at = index
            if self.text(index) in ("(", "["):
                index = self.tokens[index].partner
            elif self.text(index) == "<" and self.opens_template(index, end):
                index = self.closing_angle(index)
            else:
                yield yield_at
            index += 1

    def opens_template(self, index: int, end: int) -> bool:
        closing = self.closing_angle(index)
        return index < closing < end and self.text(closing + 1) in ("(", "::") and self.is_name(index - 1)

    def bounds_index(self, start: int, end: int, floats: frozenset[str]) -> bool:
        tokens = self.tokens[start:end]
        if any((token.file, token.line) in self.not_guards for token in tokens):
            return False
        for index, token in enumerate(tokens):
            if token.kind == "number" and token.output != token.text:
                return False
            # The member says what it is, not the struct that it is in.
            if token.kind == "name" and self.text(start + index + 1) != "." and token.text in floats:
                return False
        return True

    def shared_floats(self) -> frozenset[str]:
        """Functions that return floating-point values and members that hold them."""
        names = {"float", "half", "bfloat", "compute_t"}
        for item in self.items:
            floats, _ = self.declared(item)
            opening = {self.text(i) for i in range(item.start, min(item.end, item.start + 12))}
            names |= floats if "struct" in opening else floats & {item.declares}
        return frozenset(names)

    def declared(self, item: _Item) -> tuple[set[str], set[str]]:
        """(names declared with a floating-point type, names declared with another) in an item."""
        floats: set[str] = set()
        others: set[str] = set()
        for index in range(item.start + 1, item.end):
            if not self.is_name(index) or self.tokens[index].in_attribute:
                continue
            at = index - 1
            while self.text(at) in ("*", "&", "const"):
                at -= 1
            if self.text(at) in (">", ","):
                continue
            if self.is_name(at) and not self.is_keyword(at) and self.text(at) not in SPACES:
                is_float = re.fullmatch(r"(?:b?float|half|compute)\d?(?:_t)?", self.text(at)) is not None
                (floats if is_float else others).add(self.text(index))
        return floats - others, others


def _split(tokens: list[Token]) -> list[list[Token]]:
    """The attributes of one `[[…]]`."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
