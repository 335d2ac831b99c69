"""`CompiledProgram`: the result of `compile()`, and the content of a `.npubin` file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from npu_compiler.errors import InputError, ProgramFormatError, reading
from npu_compiler.files import write_atomically
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.check import check_calls
from npu_compiler.program.codec import NOT_STORED
from npu_compiler.program.describe import describe_plan
from npu_compiler.program.format import FORMAT_VERSION, MAGIC, decode, encode, sign
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan, WeightSpec
from npu_compiler.program.target import load_plugin_target
from npu_compiler.program.trust import ALLOWED, UNKNOWN, Trust
from npu_compiler.target_config import METAL_GPU, OP_LEVEL
from npu_compiler.version import __version__

_BUILT_IN = (OP_LEVEL.name, METAL_GPU.name)

__all__ = ["FORMAT_VERSION", "MAGIC", "CompiledProgram", "sign_program"]


@dataclass
class CompiledProgram:
    """A program for one target: kernels, buffers, weight recipes. Contains no weights.

    Attributes:
        name: The model's name.
        target: Name of the `TargetConfig` it was compiled for.
        compute_dtype: Storage dtype of activations.
        plan: Kernel calls, buffers and specs.
        compiler_version: Version of the compiler that compiled it.
        contains_code: Whether programs for this target contain code (see `TargetConfig.programs_are_code`), as the file
            claims; a device relies on its own target instead.
        trust: Origin of the program. Not part of the file's body, but set by `compile()` and `load()`.
    """

    name: str
    target: str
    compute_dtype: str
    plan: ExecutionPlan
    compiler_version: str = __version__
    contains_code: bool = False
    trust: Trust = field(default=UNKNOWN, compare=False, metadata=NOT_STORED)

    @property
    def input_specs(self) -> list[TensorSpec]:
        """Specs of the inputs, in order."""
        return self.plan.inputs

    @property
    def output_specs(self) -> list[TensorSpec]:
        """Specs of the outputs, in order."""
        return self.plan.outputs

    @property
    def weight_specs(self) -> dict[str, WeightSpec]:
        """Name → spec of each weight."""
        return self.plan.weights

    @property
    def kernels(self) -> list[KernelCall]:
        """The kernel calls of every run, in order."""
        return self.plan.calls

    def describe(self, *, kernels: bool = True, full: bool = False) -> str:
        """A text dump: totals, inputs and outputs, and tables of kernels, buffers and weights.

        Args:
            kernels: Show the tables, which are long.
            full: Show every line of the tables. By default, of layers that are alike only the first is shown.
        """
        import npu_compiler.ops  # noqa: F401  # it declares the kernels, whose families the totals tell

        origin = f"target {self.target}, compute dtype {self.compute_dtype}, compiler {self.compiler_version}"
        code = f"  contains code: {self.trust}\n" if self.contains_code else ""
        return f"program {self.name}\n  {origin}\n{code}{describe_plan(self.plan, tables=kernels, full=full)}"

    def to_bytes(self) -> bytes:
        """The content of the `.npubin` file.

        Code that this user compiled is authenticated with their key, if they can have one. Other code is not: an
        unknown program does not become a trusted one by being saved.
        """
        return encode(self)

    def save(self, path: str | Path) -> None:
        """Write the `.npubin`, whole or not at all: an existing file stays until the new one is on the disk.

        Raises:
            InputError: the file cannot be written (no such folder, no permission, disk full).
        """
        _write(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, allow_code: bool = False) -> CompiledProgram:
        """Read a `.npubin`, checking everything before anything is allocated. Nothing in it is run.

        Args:
            allow_code: Let the program's code run, if it contains any, whoever compiled it.

        Raises:
            ProgramFormatError: the file is missing, truncated, corrupted, of another format version, or inconsistent.
        """
        return cls.from_bytes(_read(path), str(path), allow_code)

    @classmethod
    def from_bytes(cls, data: bytes, origin: str = "program", allow_code: bool = False) -> CompiledProgram:
        """Read the content of a `.npubin`, the inverse of `to_bytes`; errors name `origin`. Otherwise as `load`."""
        program = decode(cls, data, origin)
        if not program.contains_code:  # its calls are all that it brings
            import npu_compiler.ops  # noqa: F401  (declares the kernels)

            if program.target not in _BUILT_IN:
                load_plugin_target(program.target)  # declares its own
            try:
                with reading(ProgramFormatError):
                    check_calls(program.plan)
            except ProgramFormatError as error:
                raise ProgramFormatError(f"'{origin}' is not a valid program: {error}") from error
        if allow_code and program.trust.origin == UNKNOWN.origin:
            program.trust = ALLOWED
        return program


def sign_program(path: str | Path, key_file: Path) -> str:
    """Sign a `.npubin` in place and return the fingerprint of the key.

    Args:
        key_file: An Ed25519 private key as unencrypted PEM.

    Raises:
        ProgramFormatError: the file is no valid program.
        InputError: it contains no code, there is no such key, or the file cannot be written.
    """
    data = _read(path)
    if not CompiledProgram.from_bytes(data, str(path)).contains_code:
        raise InputError(f"'{path}' contains no code: it runs without a signature")
    signed, fingerprint = sign(data, key_file, str(path))
    _write(Path(path), signed)
    return fingerprint


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ProgramFormatError(f"cannot read program '{path}': {error.strerror or error}") from error


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error
