"""`CompiledProgram`: what `compile()` makes and `.npubin` holds."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import InputError, ProgramFormatError
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.describe import describe_plan
from npu_compiler.program.format import FORMAT_VERSION, MAGIC, decode, encode
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan, WeightSpec
from npu_compiler.version import __version__

__all__ = ["FORMAT_VERSION", "MAGIC", "CompiledProgram", "write_atomically"]


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

    def describe(self, *, kernels: bool = True, full: bool = False) -> str:
        """A text dump: totals, inputs and outputs, and tables of kernels, buffers and weights.

        Args:
            kernels: With the tables, which are long.
            full: Every line of them; by default, of layers that are alike only the first is shown.
        """
        import npu_compiler.ops  # noqa: F401  # it declares the kernels, whose families the totals tell

        made = f"target {self.target}, compute dtype {self.compute_dtype}, compiler {self.compiler_version}"
        return f"program {self.name}\n  {made}\n{describe_plan(self.plan, tables=kernels, full=full)}"

    def to_bytes(self) -> bytes:
        return encode(self)

    def save(self, path: str | Path) -> None:
        """Write the `.npubin`: to a temporary file first, then renamed, so that no half-written file is ever seen.

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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or none of it. Raises `OSError`, also for a path that names no file ('.', '/')."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
