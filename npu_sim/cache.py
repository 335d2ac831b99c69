"""The on-disk cache of compiled programs and of facts that take long to find out.

It lies in $NPU_SIM_CACHE or, if that is not set, in ~/.cache/npu-simulation.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import NPUError
from npu_runtime.cache_folder import cache_folder, keep_entry, keep_file, read_entry, source_digest

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, CompileOptions


def compile_cached(
    ir: dict[str, Any], target: "CodegenTarget | None" = None, options: "CompileOptions | None" = None
) -> "CompiledProgram":
    """Compile IR as `npu_compiler.compile` does, or take the program from the cache; see `cached_program`."""
    return cached_program(ir["model_name"], ir, lambda: ir, target, options)


def cached_program(
    name: str,
    key: Any,
    make_ir: Callable[[], dict[str, Any]],
    target: "CodegenTarget | None" = None,
    options: "CompileOptions | None" = None,
) -> "CompiledProgram":
    """The compiled program of `make_ir()`, from the cache if it holds one for the same arguments and compiler.

    A file that is damaged, or whose code comes from somebody else, is compiled and written again. A folder that cannot
    be written causes a warning.

    Args:
        name: The beginning of the file's name.
        key: Everything that determines the IR, as JSON data. On a cache hit, `make_ir` is not called.
        target: Default: `OpLevelTarget`, for the CPU and Metal.
        options: Options of `npu_compiler.compile`, without an edit of its stages, which no key can hold.
    """
    import npu_compiler

    target = target or npu_compiler.OpLevelTarget()
    path = _program_place(name, key, target, options)
    if path.is_file():
        try:
            program = npu_compiler.CompiledProgram.load(path)
            if target.config.programs_are_code:
                program.trust.check(program.name)
            return program
        except NPUError:
            pass  # damaged, written by another version, or code by another user: compile again
    program = npu_compiler.compile(make_ir(), target, options)
    keep_file(path, program.to_bytes())
    return program


def cached_facts(name: str, key: Any, find: Callable[[], Any]) -> Any:
    """The result of `find()` as JSON data (tuples become lists), from the cache if it holds one for this key.

    Args:
        name: The beginning of the file's name.
        key: Everything that determines the result, as JSON data.
    """
    path = _place(name, key, "json")
    text = read_entry(path)
    if text is None:
        text = json.dumps(find()).encode()
        keep_entry(path, text)
    return json.loads(text)


def has_program(name: str, key: Any, target: "CodegenTarget", options: "CompileOptions | None" = None) -> bool:
    """Whether the cache holds a program for these arguments of `cached_program`."""
    return _program_place(name, key, target, options).is_file()


def _program_place(name: str, key: Any, target: "CodegenTarget", options: "CompileOptions | None") -> Path:
    return _place(name, [key, *program_key(target, options)], "npubin")


def program_key(target: "CodegenTarget", options: "CompileOptions | None" = None) -> list[Any]:
    """The part of a key that changes whenever the compiler might make another program of the same IR."""
    from npu_compiler import CompileOptions

    options = options or CompileOptions()
    assert options.stages is None, "a program of edited stages has no key"
    chosen = {each.name: getattr(options, each.name) for each in fields(options)}
    if isinstance(options.quantization, Mapping):
        chosen["quantization"] = dict(options.quantization)
    return [target.key, chosen, _compiler_digest(target)]


def _place(name: str, key: Any, suffix: str) -> Path:
    content = json.dumps(key, sort_keys=True, default=str)
    return cache_folder() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:20]}.{suffix}"


def _compiler_digest(target: "CodegenTarget") -> str:
    """A hash of the sources of the compiler and the kernels, any change of which may change the program.

    Where the target is another package's, that package is a part of the compiler.
    """
    own = type(target).__module__.partition(".")[0]
    packages = ["npu_compiler", "cuda_compiler", "metal_kernels"]
    if own not in packages and hasattr(sys.modules[own], "__path__"):
        packages.append(own)
    return source_digest(*packages)
