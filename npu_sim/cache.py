"""Compiled programs on disk, so that a model is compiled once and found again at the next start."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import NPUError

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram


def compile_cached(
    ir: dict[str, Any], compute_dtype: str | None = None, target: "CodegenTarget | None" = None
) -> "CompiledProgram":
    """`npu_compiler.compile`, or the program that it made before from the same IR by the same compiler."""
    return cached_program(ir["model_name"], ir, lambda: ir, compute_dtype, target)


def cached_program(
    name: str,
    key: Any,
    make_ir: Callable[[], dict[str, Any]],
    compute_dtype: str | None = None,
    target: "CodegenTarget | None" = None,
) -> "CompiledProgram":
    """The program of `make_ir()`, from the cache where it holds one for this key by this compiler.

    Programs lie in $NPU_SIM_CACHE, else ~/.cache/npu-simulation. A file that cannot be read is made anew; a folder
    that cannot be written costs a warning.

    Args:
        name: How the file's name begins.
        key: Whatever decides the IR, as JSON can hold it; on a hit, `make_ir` is not called.
    """
    import npu_compiler

    target = target or npu_compiler.MetalCodegenTarget()
    folder = Path(os.environ.get("NPU_SIM_CACHE") or Path.home() / ".cache" / "npu-simulation")
    content = json.dumps([key, target.config.name, compute_dtype, _compiler_digest()], sort_keys=True, default=str)
    path = folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:20]}.npubin"
    if path.is_file():
        try:
            return npu_compiler.CompiledProgram.load(path)
        except NPUError:
            pass  # written by another version or damaged: compile again
    program = npu_compiler.compile(make_ir(), target, compute_dtype=compute_dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        program.save(path)
    except (OSError, NPUError) as error:
        warnings.warn(f"the compiled program is not cached: {error}", stacklevel=3)
    return program


@cache
def _compiler_digest() -> str:
    """A hash of the compiler's and the kernels' sources: what they make may change with any edit."""
    return source_digest("npu_compiler", "cuda_compiler", "metal_kernels")


def source_digest(*packages: str) -> str:
    """A hash of the sources in some packages; one that is not there counts as empty."""
    digest = hashlib.sha256()
    for package in packages:
        try:
            root = Path(str(files(package)))
        except ModuleNotFoundError:
            continue
        for source in sorted(root.rglob("*")):
            if source.suffix in (".py", ".metal", ".h", ".cu", ".cuh"):
                digest.update(source.read_bytes())
    return digest.hexdigest()
