"""Template kernels: what calls become when the geometry, dtypes and parameters are compiled in.

A rule per op-level kernel chooses files, grids and constants; `Specializer` writes the sources and shares equal ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np

from cuda_compiler.target import HOPPER, HOPPER_SHARED_MEMORY
from npu_compiler.errors import NPUError
from npu_compiler.graph.dtypes import as_int32
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.kernels import KERNELS, KernelCall, KernelDecl
from npu_compiler.program.plan import BufferAllocation, BufferKind
from npu_compiler.program.views import View, collapse, contiguous_strides

Size3: TypeAlias = tuple[int, int, int]

WARP = 32
MAX_GRID = (2**31 - 1, 65535, 65535)
MULTIPROCESSORS = 132  # of a large GPU, for which work is shared out; others run the same kernels
TYPES = {"float32": "float", "float16": "f16", "bfloat16": "bf16", "int32": "int", "bool": "bool"}
_WIDEST_VECTOR = 16  # elements
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@dataclass
class Specializer:
    """Makes specialized kernels and collects their sources, equal ones once.

    Attributes:
        sources: Source text by name, a hash of the text.
        temporaries: Buffers that the rules asked for, by name.
        taken: Names of the program's buffers.
        capability: Of the GPU that is meant, as CUDA writes it: 90 is 9.0.
        shared_memory: Bytes that a block may have there.
    """

    taken: frozenset[str] = frozenset()
    capability: int = HOPPER
    shared_memory: int = HOPPER_SHARED_MEMORY
    sources: dict[str, str] = field(default_factory=dict)
    temporaries: dict[str, BufferAllocation] = field(default_factory=dict)
    _made: dict[Any, str] = field(default_factory=dict)
    _known: dict[tuple[View, Hashable], View] = field(default_factory=dict)

    def expand(self, call: KernelCall) -> list[KernelCall]:
        """The calls of template kernels that do what an op-level call does.

        Raises:
            NPUError: no template is registered for the kernel.
        """
        if call.kernel not in RULES:
            raise NPUError(f"the CUDA target has no template for kernel '{call.kernel}' (node '{call.node}')")
        return RULES[call.kernel](self, call)

    def temporary(self, stem: str, shape: tuple[int, ...], dtype: str) -> View:
        """A row-major arena buffer for a value between two kernels of one call."""
        return self._buffer(stem, "arena", shape, dtype)

    def known(self, subject: tuple[View, Hashable]) -> View | None:
        """What `learn` said of a subject, if that still holds."""
        return self._known.get(subject)

    def learn(self, subject: tuple[View, Hashable], found: View) -> None:
        """Keep where a call leaves what it found out about a view, for later calls until the view is written."""
        self._known[subject] = found

    def forget(self, written: Collection[str]) -> None:
        """Buffers are written: what was known of them no longer holds."""
        self._known = {subject: found for subject, found in self._known.items() if subject[0].buffer not in written}

    def counters(self, stem: str, count: int = 1) -> View:
        """Some int32 that are 0 when the program is loaded and keep their values from run to run."""
        return self._buffer(stem, "persistent", (count,), "int32")

    def _buffer(self, stem: str, kind: BufferKind, shape: tuple[int, ...], dtype: str) -> View:
        index = len(self.temporaries)
        while (name := f"{stem}.cuda{index}") in self.taken or name in self.temporaries:
            index += 1
        self.temporaries[name] = BufferAllocation(name, kind, shape, dtype)
        return View(name, shape, contiguous_strides(shape), 0, dtype)

    def kernel(
        self,
        call: KernelCall,
        file: str,
        *,
        grid: Size3,
        block: Size3,
        shared: int = 0,
        function: str | None = None,
        inputs: Mapping[str, View | None] | None = None,
        outputs: Mapping[str, View | None] | None = None,
        constants: Mapping[str, bool | int | float] | None = None,
        min_blocks: int = 1,
        cluster: int = 1,
    ) -> KernelCall:
        """A call of a template's kernel, specialized for its operands and the call's parameters.

        Args:
            file: In `templates`; its part for `function` is used.
            grid, block: In blocks and threads; a grid of 0 becomes 1, so templates guard their edges.
            shared: Bytes of dynamic shared memory.
            function: The kernel's name; by default the call's.
            inputs, outputs: Operand name → view, None for an absent optional one; by default the declaration's.
            constants: Further `constexpr`s, by name.
            min_blocks: That a multiprocessor should hold at a time, which bounds a thread's registers. Where it is 1,
                the compiler prefers many threads to many loads on their way.
            cluster: Neighbouring blocks along z that see each other's shared memory, on GPUs that have clusters.
        """
        function = function or call.kernel
        decl = KERNELS.get(call.kernel)
        if inputs is None or outputs is None:
            assert decl is not None
            bound = decl.bind(call)
            declared = [operand.name for operand in (*decl.inputs, *decl.outputs)]
            views = dict(zip(declared, bound, strict=True))
            inputs = {operand.name: views[operand.name] for operand in decl.inputs} if inputs is None else inputs
            outputs = {operand.name: views[operand.name] for operand in decl.outputs} if outputs is None else outputs
        source = self._source(call, decl, file, function, block, min_blocks, cluster, inputs, outputs, constants or {})
        launch = {"grid": check_grid(grid, call), "block": list(block), "shared": shared, "overlapping": True}
        present = [tuple(view for view in side.values() if view is not None) for side in (inputs, outputs)]
        return replace(call, kernel=function, source=source, inputs=present[0], outputs=present[1], params=launch)

    def add_source(self, text: str) -> str:
        """The name of a source text."""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.sources[name] = text
        return name

    def _source(
        self,
        call: KernelCall,
        decl: KernelDecl | None,
        file: str,
        function: str,
        block: Size3,
        min_blocks: int,
        cluster: int,
        inputs: Mapping[str, View | None],
        outputs: Mapping[str, View | None],
        constants: Mapping[str, bool | int | float],
    ) -> str:
        shared_buffers = _shared_buffers(inputs, outputs)
        geometry = [
            (name, view and (view.shape, view.strides, vector_width(view), view.dtype, view.buffer in shared_buffers))
            for name, view in (*inputs.items(), *outputs.items())
        ]
        shape = (block, min_blocks, cluster)
        key = repr((call.kernel, file, function, shape, geometry, len(inputs), dict(call.params), dict(constants)))
        if key not in self._made:
            parts = [
                template_text("common/common.cuh"),
                template_text("common/overlap.cuh"),
                specialized(call, decl, inputs, outputs, constants),
                _signature(inputs, outputs, shared_buffers, block, min_blocks, cluster),
                kernel_text(file, function),
            ]
            views = [view for view in (*inputs.values(), *outputs.values()) if view is not None]
            self._made[key] = self.add_source(index_type(views) + "\n".join(parts))
        return self._made[key]


def specialized(
    call: KernelCall,
    decl: KernelDecl | None,
    inputs: Mapping[str, View | None],
    outputs: Mapping[str, View | None],
    constants: Mapping[str, bool | int | float],
) -> str:
    """What a template's text refers to: a struct for each operand, the call's parameters and further constants."""
    return "\n".join(
        [
            *(_operand_struct(name, view) for name, view in (*inputs.items(), *outputs.items())),
            _parameters(decl.fields if decl is not None else {}, call.params),
            *(f"constexpr {_typed(name, value)};\n" for name, value in constants.items()),
        ]
    )


Rule: TypeAlias = Callable[[Specializer, KernelCall], list[KernelCall]]

RULES: dict[str, Rule] = {}


def template_rule(*kernels: str) -> Callable[[Rule], Rule]:
    """Register what op-level kernels become."""

    def register(rule: Rule) -> Rule:
        for kernel in kernels:
            if kernel in RULES:
                raise ValueError(f"kernel '{kernel}' has two CUDA templates")
            RULES[kernel] = rule
        return rule

    return register


def groups(count: int, size: int) -> int:
    """How many groups of a size it takes; at least one."""
    return max(1, -(-count // size))


def check_grid(grid: Size3, call: KernelCall) -> list[int]:
    """A grid as a call's parameter, at least one block in each direction.

    Raises:
        NPUError: it is larger than CUDA launches.
    """
    if any(size > most for size, most in zip(grid, MAX_GRID, strict=True)):
        raise NPUError(f"kernel '{call.kernel}' (node '{call.node}') would need a grid of {list(grid)} blocks")
    return [max(1, size) for size in grid]


def vector_width(view: View) -> int:
    """How many elements (1, 2, 4, 8 or 16) a vector access along the last dimension may have: places are multiples."""
    steps = [(dim, stride) for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)) if size > 1]
    if steps and steps[-1][0] == view.rank - 1:
        if steps.pop()[1] != 1:
            return 1
    elif view.rank:
        return 1
    width = _WIDEST_VECTOR
    while width > 1 and (view.offset % width or any(stride % width for _, stride in steps)):
        width //= 2
    return width


def index_type(views: list[View]) -> str:
    """The declaration of `index_t`, which reaches every element of every view."""
    extent = max((_extent(view) for view in views), default=0)
    return f"typedef {'unsigned' if extent < 2**31 else 'unsigned long long'} index_t;\n"


def _extent(view: View) -> int:
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True) if size)
    return max(span, view.numel)


def offset_text(view: View, index: str) -> str:
    """C for where the element of row-major number `index` starts."""
    if view.numel == 0:
        return "0"
    sizes, (strides,) = collapse(view.shape, view.strides)
    terms = []
    behind = 1
    for dim in range(len(sizes) - 1, -1, -1):
        place = index if behind == 1 else f"{index} / {behind}u"
        place = place if dim == 0 else f"{place} % {sizes[dim]}u"
        behind *= sizes[dim]
        if strides[dim]:
            terms.append(place if strides[dim] == 1 else f"{place} * {strides[dim]}u")
    return " + ".join(terms) or "0"


def float_text(value: float) -> str:
    """A float32 literal, exact; `constexpr` also where it is no number."""
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if not np.isfinite(number):
        return f"__builtin_bit_cast(float, {int(number.view(np.uint32)):#x}u)"
    return f"{number!s}f"


def int_text(value: int) -> str:
    """An int literal; the least one has no literal of its own."""
    value = as_int32(value)
    return f"({value + 1} - 1)" if value == -(2**31) else str(value)


def _typed(name: str, value: bool | int | float) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    if isinstance(value, float):
        return f"float {name} = {float_text(value)}"
    return f"int {name} = {int_text(value)}"


def _operand_struct(name: str, view: View | None) -> str:
    title = name[0].upper() + name[1:]
    if view is None:
        return f"""struct {title} {{
    using type = float;
    static constexpr bool present = false;
    static constexpr bool contiguous = true;
    static constexpr int rank = 0;
    static constexpr int vector = {_WIDEST_VECTOR};
    __device__ static constexpr index_t size(int) {{ return 1; }}
    __device__ static constexpr index_t stride(int) {{ return 0; }}
    __device__ static index_t offset(index_t) {{ return 0; }}
}};
constexpr const float *{name} = nullptr;
"""
    sizes, strides = (", ".join(f"{x}u" for x in xs) or "1u" for xs in (view.shape, view.strides))
    return f"""struct {title} {{
    using type = {TYPES[view.dtype]};
    static constexpr bool present = true;
    static constexpr bool contiguous = {str(view.is_contiguous).lower()};
    static constexpr int rank = {view.rank};
    static constexpr int vector = {vector_width(view)};
    static constexpr index_t numel = {view.numel}u;
    __device__ static constexpr index_t size(int dim) {{ constexpr index_t x[] = {{{sizes}}}; return x[dim]; }}
    __device__ static constexpr index_t stride(int dim) {{ constexpr index_t x[] = {{{strides}}}; return x[dim]; }}
    __device__ static index_t offset(index_t index) {{ return {offset_text(view, "index")}; }}
}};
"""


def _parameters(fields: Mapping[str, str], params: Mapping[str, Any]) -> str:
    """The declared parameters in namespace `param`, and the activation, if there is one, as a function."""
    lines = [line for name, fmt in fields.items() for line in _parameter(name, fmt, params)]
    text = "namespace param {\n" + "".join(f"{line}\n" for line in lines) + "}\n"
    if "activation" in fields:
        kind = params["activation"]
        op = ELEMENTWISE[_ACTIVATIONS.get(kind, kind)]
        text += f"__device__ __forceinline__ float activate(float a) {{ return {op.expr}; }}\n"
    return text


# Where the table of element-wise ops has an activation under another name.
_ACTIVATIONS = {"none": "copy", "gelu": "gelu_erf"}


# The C type of a parameter, and how its values are written, by the last letter of its format.
_LITERALS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "f": ("float", float_text),
    "i": ("int", int_text),
    "I": ("unsigned", lambda value: f"{int(value)}u"),
}


def _parameter(name: str, fmt: str, params: Mapping[str, Any]) -> list[str]:
    if fmt == "?":
        return [f"constexpr bool {name} = {str(bool(params.get(name))).lower()};"]
    if fmt[0] == "s":
        names = fmt.split()[1:]
        kind = f"{name.capitalize()}Kind"
        return [
            f"enum class {kind} {{ {', '.join(f'{each}_' for each in names)} }};",
            f"constexpr {kind} {name} = {kind}::{params[name]}_;",
        ]
    kind, text = _LITERALS[fmt[-1]]
    value = params[name]
    if isinstance(value, (list, tuple)):
        items = ", ".join(text(each) for each in value)
        return [f"__device__ constexpr {kind} {name}(int i) {{ constexpr {kind} x[] = {{{items}}}; return x[i]; }}"]
    return [f"constexpr {kind} {name} = {text(value)};"]


def _shared_buffers(inputs: Mapping[str, View | None], outputs: Mapping[str, View | None]) -> set[str]:
    """Buffers that are both read and written, or written under two names."""
    written = [view.buffer for view in outputs.values() if view is not None]
    read = {view.buffer for view in inputs.values() if view is not None}
    return {name for name in written if name in read or written.count(name) > 1}


def _signature(
    inputs: Mapping[str, View | None],
    outputs: Mapping[str, View | None],
    shared_buffers: set[str],
    block: Size3,
    min_blocks: int,
    cluster: int,
) -> str:
    """The macros by which a template begins its kernel: `WAITING_KERNEL` where it waits itself for what the kernel
    before it makes, `KERNEL` where that is needed at once."""
    arguments: dict[str, str] = {}
    for side, const in ((inputs, "const "), (outputs, "")):
        for name, view in side.items():
            if view is not None:
                alone = "" if view.buffer in shared_buffers else "__restrict__ "
                arguments[name] = f"{const}{TYPES[view.dtype]} *{alone}{name}"
    threads = block[0] * block[1] * block[2]
    bounds = f"{threads}" if min_blocks == 1 else f"{threads}, {min_blocks}"
    attributes = f"CLUSTER({cluster}) " if cluster > 1 else ""
    attributes += f"__launch_bounds__({bounds})"
    declared = ", ".join(arguments.values())
    body = f"__device__ __forceinline__ void name##_body({declared})"
    return f"""constexpr int THREADS = {threads};
#define WAITING_KERNEL(name) extern "C" __global__ void {attributes} name({declared})
#define KERNEL(name) {body}; \\
    WAITING_KERNEL(name) {{ begin_in_turn(); name##_body({", ".join(arguments)}); }} \\
    {body}
"""


@cache
def template_text(file: str) -> str:
    """A file of `templates`, with the files that it includes in their places."""
    text = (files("cuda_compiler") / "templates" / file).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: template_text(match[1]), text)


@cache
def kernel_text(file: str, function: str) -> str:
    """What of a template concerns one kernel: all before the first `#kernel` line, and the parts that name it."""
    head, *parts = template_text(file).split("\n#kernel ")
    chosen = [rest for names, _, rest in (part.partition("\n") for part in parts) if function in names.split()]
    if parts and not chosen:
        raise NPUError(f"template '{file}' has no kernel '{function}'")
    return "\n".join([head, *chosen])
