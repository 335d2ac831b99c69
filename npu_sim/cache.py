"""The on-disk cache of compiled programs and of facts that take long to find out.

It lies in $NPU_SIM_CACHE or, if that is not set, in ~/.cache/npu-simulation. A wheel brings some of its entries: those
with which the first answer of a small model needs no tracing (see release/programs.py).
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import NPUError
from npu_runtime.cache_folder import cache_folder, keep_entry, keep_file, read_entry, source_digest

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, CompileOptions

SHIPPED = Path(__file__).parent / "shipped"  # a wheel's folder of entries


@dataclass(frozen=True)
class Entry:
    """A file of the cache.

    Attributes:
        name: The beginning of the file's name.
        key: Everything that determines the content besides the packages, as JSON data.
        suffix: The end of the file's name.
        packages: Packages of which another version may make other content. What a wheel brings holds with any: it was
            right with the versions that made it.
    """

    name: str
    key: Any
    suffix: str
    packages: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """The place in the user's cache."""
        versions = [version(package).partition("+")[0] for package in self.packages]
        return cache_folder() / f"{self._stem}{_digest(versions, 8) if versions else ''}.{self.suffix}"

    @property
    def shipped(self) -> Path:
        """The place in the folder that a wheel brings."""
        return SHIPPED / shipped_name(f"{self._stem}.{self.suffix}")

    @property
    def _stem(self) -> str:
        return f"{self.name}-{_digest(self.key, 20)}{_VERSIONS if self.packages else ''}"

    def is_there(self) -> bool:
        """Whether the wheel or the cache has it."""
        return self.shipped.is_file() or self.path.is_file()


_VERSIONS = "-by-"  # between the digests of a file's key and of the versions that made it


def shipped_name(name: str) -> str:
    """The name under which a wheel brings a file of the cache: without the versions that made it."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem.partition(_VERSIONS)[0]}.{suffix}"


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
    packages: Sequence[str] = (),
) -> "CompiledProgram":
    """The compiled program of `make_ir()`, from the cache if it holds one for the same arguments and compiler.

    A file that is damaged, or whose code comes from somebody else, is compiled and written again. A folder that cannot
    be written causes a warning.

    Args:
        name: The beginning of the file's name.
        key: Everything that determines the IR besides the packages, as JSON data. On a cache hit, `make_ir` is not
            called.
        target: Default: `OpLevelTarget`, for the CPU and Metal.
        options: Options of `npu_compiler.compile`, without an edit of its stages, which no key can hold.
        packages: Packages of which another version may make other IR.
    """
    import npu_compiler

    target = target or npu_compiler.OpLevelTarget()
    entry = _program_entry(name, key, target, options, packages)
    for place in ("shipped", "path"):
        path: Path = getattr(entry, place)
        if not path.is_file():
            continue
        try:
            program = npu_compiler.CompiledProgram.load(path)
            if target.config.programs_are_code:
                program.trust.check(program.name)
            return program
        except NPUError:
            pass  # damaged, written by another version, or code by another user: compile again
    program = npu_compiler.compile(make_ir(), target, options)
    keep_file(entry.path, program.to_bytes())
    return program


def cached_facts(name: str, key: Any, find: Callable[[], Any], packages: Sequence[str] = ()) -> Any:
    """The result of `find()` as JSON data (tuples become lists), from the cache if it holds one for this key.

    Args:
        name: The beginning of the file's name.
        key: Everything that determines the result besides the packages, as JSON data.
        packages: Packages of which another version may find something else.
    """
    entry = Entry(name, key, "json", packages)
    text = read_entry(entry.shipped) if entry.shipped.is_file() else None
    text = read_entry(entry.path) if text is None else text
    if text is None:
        text = json.dumps(find()).encode()
        keep_entry(entry.path, text)
    return json.loads(text)


def has_program(
    name: str,
    key: Any,
    target: "CodegenTarget",
    options: "CompileOptions | None" = None,
    packages: Sequence[str] = (),
) -> bool:
    """Whether the cache holds a program for these arguments of `cached_program`."""
    return _program_entry(name, key, target, options, packages).is_there()


def _program_entry(
    name: str, key: Any, target: "CodegenTarget", options: "CompileOptions | None", packages: Sequence[str]
) -> Entry:
    return Entry(name, [key, *program_key(target, options)], "npubin", packages)


def program_key(target: "CodegenTarget", options: "CompileOptions | None" = None) -> list[Any]:
    """The part of a key that changes whenever the compiler might make another program of the same IR."""
    from npu_compiler import CompileOptions

    options = options or CompileOptions()
    assert options.stages is None, "a program of edited stages has no key"
    chosen = {each.name: getattr(options, each.name) for each in fields(options)}
    if isinstance(options.quantization, Mapping):
        chosen["quantization"] = dict(options.quantization)
    return [target.key, chosen, _compiler_digest(target)]


def _digest(key: Any, length: int) -> str:
    content = json.dumps(key, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:length]


def _compiler_digest(target: "CodegenTarget") -> str:
    """A hash of the sources of the compiler and the kernels, any change of which may change the program.

    Where the target is another package's, that package is a part of the compiler.
    """
    own = type(target).__module__.partition(".")[0]
    packages = ["npu_compiler", "cuda_compiler", "metal_kernels"]
    if own not in packages and hasattr(sys.modules[own], "__path__"):
        packages.append(own)
    return source_digest(*packages)
