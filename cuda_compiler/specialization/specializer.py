"""`Specializer`: instantiates templates for a call's geometry, dtypes and parameters; equal kernels share a source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from cuda_compiler.cuda_program import KernelLaunch, LaunchKind, TensorMap
from cuda_compiler.specialization.c_text import index_type, kernel_signature, shared_buffers, specialized
from cuda_compiler.specialization.gpu import GPU
from cuda_compiler.specialization.sizes import Size3, check_grid, vector_width
from cuda_compiler.specialization.template_files import kernel_text, template_text
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import BufferAllocation, BufferKind
from npu_compiler.program.views import View, contiguous_strides


@dataclass(frozen=True)
class _Template:
    """A kernel's template, and what its text depends on besides the call's operands and parameters.

    Attributes:
        shape: Threads per block, minimum of blocks per multiprocessor, size of the cluster, and operands with tensor
            maps.
    """

    file: str
    function: str
    shape: tuple[Size3, int, int, tuple[str, ...]]
    constants: Mapping[str, bool | int | float]
    definitions: str


@dataclass
class Specializer:
    """Makes specialized kernels and collects their sources, which equal kernels share.

    Attributes:
        gpu: The GPU that runs the kernels.
        sources: Source text by name, a hash of the text.
        temporaries: Buffers that the rules asked for, by name.
        ahead: Calls that read only constants, which a rule moved to the end of the prologue.
        buffers: The program's own buffers, by name.
    """

    gpu: GPU = field(default_factory=GPU)
    buffers: Mapping[str, BufferAllocation] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    temporaries: dict[str, BufferAllocation] = field(default_factory=dict)
    ahead: list[KernelCall] = field(default_factory=list)
    _names: dict[Any, str] = field(default_factory=dict)
    _cached: dict[tuple[View, Hashable], View] = field(default_factory=dict)

    def never_written(self, view: View) -> bool:
        """Whether a view's buffer holds a weight or a constant, which no kernel writes."""
        buffer = self.buffers.get(view.buffer)
        return buffer is not None and buffer.kind in ("weight", "constant")

    def is_constant(self, view: View) -> bool:
        """Whether a view's buffer stays the same from run to run: a weight, a constant or a result of the prologue."""
        buffer = self.buffers.get(view.buffer)
        return buffer is not None and buffer.is_constant

    def temporary(self, stem: str, shape: tuple[int, ...], dtype: str) -> View:
        """A view of a new row-major arena buffer, for a value that passes from one kernel of a call to another.

        Args:
            stem: Beginning of the buffer's name.
        """
        return self._buffer(stem, "arena", shape, dtype)

    def constant(self, stem: str, shape: tuple[int, ...], dtype: str) -> View:
        """A view of a new row-major persistent buffer, for a result of a call in `ahead`.

        Args:
            stem: Beginning of the buffer's name.
        """
        return self._buffer(stem, "persistent", shape, dtype)

    def cached(self, subject: tuple[View, Hashable]) -> View | None:
        """The result that `cache` stored for a subject.

        None if there is none, or the subject's buffer was written since.
        """
        return self._cached.get(subject)

    def cache(self, subject: tuple[View, Hashable], result: View) -> None:
        """Store `result`, computed from the view in `subject`, for later calls until that view's buffer is written.

        A subject is that view and a key that says what was computed.
        """
        self._cached[subject] = result

    def invalidate(self, written: Collection[str]) -> None:
        """Drop the cached results whose subjects are views of buffers in `written`."""
        self._cached = {subject: result for subject, result in self._cached.items() if subject[0].buffer not in written}

    def counters(self, stem: str, count: int = 1) -> View:
        """A view [count] of new persistent int32 memory: 0 when the program is loaded, kept from run to run.

        Args:
            stem: Beginning of the buffer's name.
        """
        return self._buffer(stem, "persistent", (count,), "int32")

    def _buffer(self, stem: str, kind: BufferKind, shape: tuple[int, ...], dtype: str) -> View:
        index = len(self.temporaries)
        while (name := f"{stem}.cuda{index}") in self.buffers or name in self.temporaries:
            index += 1
        self.temporaries[name] = BufferAllocation(name, kind, shape, dtype)
        return View(name, shape, contiguous_strides(shape), 0, dtype)

    def kernel(  # noqa: PLR0913 -- an argument is a property of the kernel
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
        definitions: str = "",
        min_blocks: int = 1,
        cluster: int = 1,
        maps: Mapping[str, int] = MappingProxyType({}),
        kind: LaunchKind = LaunchKind.OVERLAPPING,
    ) -> KernelCall:
        """A call of a template's kernel, specialized for its operands and the call's parameters.

        Args:
            file: File in `templates`; its part for `function` is used.
            grid, block: Number of blocks and of threads per block; a grid of 0 becomes 1, so templates check their
                bounds.
            shared: Bytes of dynamic shared memory.
            function: The kernel's name; None means the call's.
            inputs, outputs: Operand name → view, None for an absent optional one; None means the declaration's
                operands.
            constants: Further `constexpr`s, by name.
            definitions: Further C that the template expects, such as a function.
            min_blocks: Minimum of resident blocks per multiprocessor, which limits the registers per thread. At 1 the
                compiler prefers more threads to more loads in flight.
            cluster: Size of the thread block cluster along z (distributed shared memory), on GPUs that have clusters.
            maps: Operand name → rows per box of its tensor map, which becomes a kernel parameter `<name>_map` after all
                operands.
            kind: The kind of the launch.
        """
        function = function or call.kernel
        if inputs is None or outputs is None:
            decl = KERNELS[call.kernel]
            views = decl.operands_of(call)
            inputs = decl.inputs_of(call) if inputs is None else inputs
            outputs = {operand.name: views[operand.name] for operand in decl.outputs} if outputs is None else outputs
        shape = (block, min_blocks, cluster, tuple(maps))
        source = self._source(call, _Template(file, function, shape, constants or {}, definitions), inputs, outputs)
        operands = [(name, view) for name, view in (*inputs.items(), *outputs.items()) if view is not None]
        tensor_maps = {
            name: TensorMap.of(index, view, maps[name]) for index, (name, view) in enumerate(operands) if name in maps
        }
        launch = KernelLaunch(check_grid(grid, call), block, shared, kind, tuple(tensor_maps[name] for name in maps))
        present = [tuple(view for view in side.values() if view is not None) for side in (inputs, outputs)]
        return replace(
            call, kernel=function, source=source, inputs=present[0], outputs=present[1], params=launch.params()
        )

    def add_source(self, text: str) -> str:
        """Add a source text to the program's sources and return its name."""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.sources[name] = text
        return name

    def _source(
        self,
        call: KernelCall,
        template: _Template,
        inputs: Mapping[str, View | None],
        outputs: Mapping[str, View | None],
    ) -> str:
        """Add the specialized source of a template's kernel to `sources`, and return its name."""
        shared = shared_buffers(inputs, outputs)
        geometry = [
            (name, view and (view.shape, view.strides, vector_width(view), view.dtype, view.buffer in shared))
            for name, view in (*inputs.items(), *outputs.items())
        ]
        key = repr((call.kernel, template, geometry, len(inputs), dict(call.params)))
        if key not in self._names:
            parts = [
                template_text("common/common.cuh"),
                template_text("common/overlap.cuh"),
                specialized(call, KERNELS.get(call.kernel), inputs, outputs, template.constants),
                kernel_signature(inputs, outputs, shared, *template.shape),
                *([template.definitions] if template.definitions else []),
                kernel_text(template.file, template.function, frozenset(call.params)),
            ]
            views = [view for view in (*inputs.values(), *outputs.values()) if view is not None]
            self._names[key] = self.add_source(index_type(views) + "\n".join(parts))
        return self._names[key]


Rule: TypeAlias = Callable[[Specializer, KernelCall], list[KernelCall]]
