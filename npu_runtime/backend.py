"""`Backend`: the base class of all devices. A device consists of a `Backend` and its `DeviceBuffer` class."""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.compiled_program import CompiledProgram
from npu_runtime.buffer import DeviceBuffer, Shape
from npu_runtime.executor import Executor
from npu_runtime.hardware import Hardware, Launch, Operand


class Backend(Hardware):
    """A device. It defines `allocate`, which creates buffers, and `prepare`, which makes a kernel call ready to run.

    An executor calls `prepare` once per kernel call and set of buffers; every run then calls what `prepare` returned.
    """

    def create_executor(self, program: CompiledProgram) -> Executor:
        """Return an executor of a program on this backend."""
        return Executor(program, self)

    def execute(
        self, program: CompiledProgram, inputs: Mapping[str, DeviceBuffer], weights: Mapping[str, DeviceBuffer]
    ) -> dict[str, DeviceBuffer]:
        """Run a program once and return its outputs by name; keep an `Executor` to run it again."""
        return self.create_executor(program).run(inputs, weights)


__all__ = ["Backend", "DeviceBuffer", "Launch", "Operand", "Shape"]
