"""Compiled programs on disk, so that a model is compiled once and found again at the next start."""

import hashlib
import json
import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.compiled_program import write_atomically
from npu_compiler.errors import NPUError
from npu_runtime.cache_folder import cache_folder

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

    target = target or npu_compiler.OpLevelTarget()
    path = _place(name, [key, target.key, compute_dtype, _compiler_digest()], "npubin")
    if path.is_file():
        try:
            return npu_compiler.CompiledProgram.load(path)
        except NPUError:
            pass  # written by another version or damaged: compile again
    program = npu_compiler.compile(make_ir(), target, compute_dtype=compute_dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        program.save(path)
    except (OSError, NPUError) as error:
        warnings.warn(f"the compiled program is not cached: {error}", stacklevel=3)
    return program


def cached_facts(name: str, key: Any, find: Callable[[], Any]) -> Any:
    """What `find()` returned when it was last asked with this key, as JSON keeps it (tuples become lists, …).

    Args:
        key: Whatever decides the facts, as JSON can hold it.
    """
    path = _place(name, key, "json")
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        pass  # not there, or damaged: find them again
    text = json.dumps(find())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError:
        pass  # finding them again at the next start takes time, nothing else
    return json.loads(text)


def _place(name: str, key: Any, suffix: str) -> Path:
    content = json.dumps(key, sort_keys=True, default=str)
    return cache_folder() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:20]}.{suffix}"


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
