"""The on-disk cache of compiled programs and of other results that take long to compute.

The cache folder is $NPU_SIM_CACHE or, if that is not set, ~/.cache/npu-simulation. The package's wheel ships some
entries in a read-only folder of its own, so that the first answer of a small model needs no tracing (see
release/programs.py).
"""

import functools
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
    """A cached file, named by a hash of everything that determines its content.

    Attributes:
        name: The beginning of the file's name.
        key: Everything that determines the content besides the packages, as JSON data.
        suffix: The end of the file's name.
        packages: Packages whose versions are also part of the file's name, since another version may produce different
            content. An entry that the wheel ships is valid for any versions, as it was checked with those that produced
            it.
    """

    name: str
    key: Any
    suffix: str
    packages: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """Path of the entry in the user's cache folder, whether or not the file exists."""
        versions = [package_version(package) for package in self.packages]
        return cache_folder() / f"{self._stem}{_digest(versions, 8) if versions else ''}.{self.suffix}"

    @property
    def shipped(self) -> Path:
        """Path of the entry in the folder that the wheel ships, whether or not the file exists."""
        return SHIPPED / shipped_name(f"{self._stem}.{self.suffix}")

    @property
    def _stem(self) -> str:
        return f"{self.name}-{_digest(self.key, 20)}{_VERSIONS if self.packages else ''}"

    def is_there(self) -> bool:
        """Whether the entry's file exists in the wheel's folder or in the user's cache."""
        return self.shipped.is_file() or self.path.is_file()


_VERSIONS = "-by-"  # between the digests of a file's key and of the versions that made it


def shipped_name(name: str) -> str:
    """Return the name of a cache file as the wheel ships it: without the hash of the package versions."""
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
    """Return the compiled program of `make_ir()`, from the cache if it holds one for these arguments and this compiler.

    A cached file that is damaged, or that contains code not made by this user, is replaced by a new compilation. A
    cache folder that cannot be written causes a warning.

    Args:
        name: The beginning of the cache file's name.
        key: Everything that determines the IR besides the packages, as JSON data. On a cache hit, `make_ir` is not
            called.
        target: Default: `OpLevelTarget`, for the CPU and Metal.
        options: Options of `npu_compiler.compile`. `stages`, an edit of the compiler's pipeline, must be None, since a
            key cannot hold functions.
        packages: Packages of which another version may produce different IR.
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
    """Return the result of `find()` as JSON data (tuples become lists), from the cache if it holds one for this key.

    Args:
        name: The beginning of the cache file's name.
        key: Everything that determines the result besides the packages, as JSON data.
        packages: Packages of which another version may give a different result.
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
    """Whether the cache or the wheel holds the program that `cached_program` would return for these arguments."""
    return _program_entry(name, key, target, options, packages).is_there()


def _program_entry(
    name: str, key: Any, target: "CodegenTarget", options: "CompileOptions | None", packages: Sequence[str]
) -> Entry:
    return Entry(name, [key, *program_key(target, options)], "npubin", packages)


def program_key(target: "CodegenTarget", options: "CompileOptions | None" = None) -> list[Any]:
    """Return the part of a cache key that changes with the target, the options and the compiler's source code."""
    from npu_compiler import CompileOptions

    options = options or CompileOptions()
    assert options.stages is None, "a program of edited stages has no key"
    chosen = {each.name: getattr(options, each.name) for each in fields(options)}
    if isinstance(options.quantization, Mapping):
        chosen["quantization"] = dict(options.quantization)
    return [target.key, chosen, _compiler_digest(target)]


@functools.cache
def package_version(package: str) -> str:
    """Return the version of an installed package, without its local part such as `+cpu`."""
    return version(package).partition("+")[0]


def _digest(key: Any, length: int) -> str:
    content = json.dumps(key, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:length]


def _compiler_digest(target: "CodegenTarget") -> str:
    """Return a hash of the sources of the compiler and the kernels; a change to them invalidates cached programs.

    If the target is defined in another package, the sources of that package are hashed too.
    """
    own = type(target).__module__.partition(".")[0]
    packages = ["npu_compiler", "cuda_compiler", "metal_kernels"]
    if own not in packages and hasattr(sys.modules[own], "__path__"):
        packages.append(own)
    return source_digest(*packages)
