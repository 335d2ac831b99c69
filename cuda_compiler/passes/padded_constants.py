"""Constants with zeros behind their dimensions, which the prologue of a program makes."""

from __future__ import annotations

from dataclasses import dataclass, field

from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import BufferAllocation
from npu_compiler.program.views import Shape, View, contiguous_strides

_PADS = 12  # numbers that say how a tensor is padded: two for each of its last six dimensions, from the last one on


@dataclass
class PaddedConstants:
    """The padded constants of a plan under construction.

    Attributes:
        buffers: The new buffers, among others.
        prologue: The calls that fill them.
    """

    buffers: dict[str, BufferAllocation] = field(default_factory=dict)
    prologue: list[KernelCall] = field(default_factory=list)
    _made: dict[tuple[View, Shape], View] = field(default_factory=dict)

    def padded(self, view: View, more: Shape) -> View:
        """A constant with so many zeros behind each dimension, in a new buffer."""
        if (view, more) not in self._made:
            name = f"{view.buffer}.padded{len(self.buffers)}"
            shape = tuple(size + extra for size, extra in zip(view.shape, more, strict=True))
            target = View(name, shape, contiguous_strides(shape), 0, view.dtype)
            self.buffers[name] = BufferAllocation(name, "persistent", shape, view.dtype)
            pads = [each for extra in reversed(more) for each in (0, extra)]
            params = {"mode": "constant", "pads": pads + [0] * (_PADS - len(pads)), "value": 0.0, "int_value": 0}
            moved = distinct_bytes(view) + distinct_bytes(target)
            self.prologue.append(KernelCall("pad_kernel", "", (view,), (target,), params, name, 0, moved))
            self._made[view, more] = target
        return self._made[view, more]
