"""`CompiledProgram`: what `compile()` makes and `.npubin` holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import InputError, ProgramFormatError
from npu_compiler.files import write_atomically
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.describe import describe_plan
from npu_compiler.program.format import FORMAT_VERSION, MAGIC, decode, encode
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan, WeightSpec
from npu_compiler.version import __version__

__all__ = ["FORMAT_VERSION", "MAGIC", "CompiledProgram"]


@dataclass
class CompiledProgram:
    """A program for one target: kernels, buffers, weight recipes. Holds no weights.

    Attributes:
        name: The model's name.
        target: Name of the `TargetConfig` it was compiled for.
        compute_dtype: Storage dtype of activations.
        plan: Kernel calls, buffers and specs.
        compiler_version: Of the compiler that made it.
    """

    name: str
    target: str
    compute_dtype: str
    plan: ExecutionPlan
    compiler_version: str = __version__

    @property
    def input_specs(self) -> list[TensorSpec]:
        return self.plan.inputs

    @property
    def output_specs(self) -> list[TensorSpec]:
        return self.plan.outputs

    @property
    def weight_specs(self) -> dict[str, WeightSpec]:
        return self.plan.weights

    @property
    def kernels(self) -> list[KernelCall]:
        """The calls of every run, in order."""
        return self.plan.calls

    def describe(self, *, kernels: bool = True) -> str:
        """A text dump: kernels, buffers, memory, weights. `kernels=False` leaves the long tables out."""
        made = f"target {self.target}, compute dtype {self.compute_dtype}, compiler {self.compiler_version}"
        return f"program {self.name}\n  {made}\n{describe_plan(self.plan, tables=kernels)}"

    def to_bytes(self) -> bytes:
        return encode(self)

    def save(self, path: str | Path) -> None:
        """Write the `.npubin`, whole or not at all: a file that is there stays until the new one is on the disk.

        Raises:
            InputError: the file cannot be written (no such folder, no permission, disk full).
        """
        path = Path(path)
        try:
            write_atomically(path, self.to_bytes())
        except OSError as error:
            raise InputError(f"cannot write '{path}': {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> CompiledProgram:
        """Read a `.npubin`, checking everything before anything is allocated.

        Raises:
            ProgramFormatError: the file is missing, truncated, corrupted, of another format version, or inconsistent.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ProgramFormatError(f"cannot read program '{path}': {error.strerror or error}") from error
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, origin: str = "program") -> CompiledProgram:
        """The inverse of `to_bytes`; `origin` is named in errors. Raises as `load` does."""
        return decode(cls, data, origin)
