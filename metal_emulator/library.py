"""Libraries compiled from source, their functions, and the constants that specialize functions."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metal_emulator import compiler
from metal_emulator.enums import METAL
from metal_emulator.objc import (
    BOOL,
    BYTES,
    NSSTRING,
    NSUINTEGER,
    OUT_ERROR,
    Either,
    Kind,
    Labelled,
    MetalUsageError,
    Mismatch,
    NSError,
    Object,
    Plain,
    selector,
)

if TYPE_CHECKING:
    from metal_emulator.device import MTLDevice

LIBRARY_ERRORS = "MTLLibraryErrorDomain"
CONSTANT_TYPES = {
    METAL["MTLDataTypeBool"]: ("bool", "?"),
    METAL["MTLDataTypeFloat"]: ("float", "f"),
    METAL["MTLDataTypeInt"]: ("int", "i"),
    METAL["MTLDataTypeUInt"]: ("uint", "I"),
    METAL["MTLDataTypeUShort"]: ("ushort", "H"),
}
DATA_TYPE = Either("a scalar MTLDataType", *CONSTANT_TYPES)
LANGUAGE_VERSION = Either(
    "an MTLLanguageVersion", *(value for name, value in METAL.items() if name.startswith("MTLLanguageVersion"))
)
MATH_MODE = Either("an MTLMathMode", 0, 1, 2)
KERNEL = METAL["MTLFunctionTypeKernel"]


class _Macros(Kind):
    want = "an NSDictionary from NSString to NSString or NSNumber"

    def accept(self, value: Any, receiver: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise Mismatch(f"{type(value).__name__} {value!r:.60}")
        for name, text in value.items():
            if not isinstance(name, str) or not isinstance(text, (str, int, float)):
                raise Mismatch(f"{name!r}: {text!r}")
        return {name: str(text) for name, text in value.items()}


class MTLCompileOptions(Plain):
    """Options for compiling a library: macros, math mode, language version."""

    __slots__ = ("_fast_math", "_macros", "_math_mode", "_version")

    def _defaults(self) -> None:
        self._macros: dict[str, str] = {}
        self._fast_math = True
        self._math_mode = METAL["MTLMathModeFast"]
        self._version = METAL["MTLLanguageVersion3_2"]

    @selector(_Macros())
    def setPreprocessorMacros_(self, macros: dict[str, str]) -> None:
        self._macros = macros

    @selector(BOOL)
    def setFastMathEnabled_(self, enabled: bool) -> None:
        self._fast_math = enabled

    @selector()
    def fastMathEnabled(self) -> bool:
        return self._fast_math

    @selector(MATH_MODE)
    def setMathMode_(self, mode: int) -> None:
        self._math_mode = mode

    @selector()
    def mathMode(self) -> int:
        return self._math_mode

    @selector(LANGUAGE_VERSION)
    def setLanguageVersion_(self, version: int) -> None:
        self._version = version

    @selector()
    def languageVersion(self) -> int:
        return self._version


class MTLFunctionConstantValues(Plain):
    """Values for function constants, by name or by index."""

    __slots__ = ("_values",)

    def _defaults(self) -> None:
        self._values: dict[str | int, tuple[str, int | float | bool]] = {}

    @selector(BYTES, DATA_TYPE, NSSTRING)
    def setConstantValue_type_withName_(self, value: memoryview, data_type: int, name: str) -> None:
        self._set("setConstantValue_type_withName_", name, value, data_type)

    @selector(BYTES, DATA_TYPE, NSUINTEGER)
    def setConstantValue_type_atIndex_(self, value: memoryview, data_type: int, index: int) -> None:
        self._set("setConstantValue_type_atIndex_", index, value, data_type)

    @selector()
    def reset(self) -> None:
        self._values.clear()

    def _set(self, method: str, key: str | int, value: memoryview, data_type: int) -> None:
        type_name, layout = CONSTANT_TYPES[data_type]
        size = struct.calcsize(layout)
        self._check(value.nbytes == size, method, f"a {type_name} has {size} bytes, {value.nbytes} came for {key!r}")
        self._values[key] = type_name, struct.unpack(layout, value)[0]

    def _value(self, constant: compiler.FunctionConstant) -> int | float | bool | None:
        """The value for a function constant; None if it was not set."""
        for key in (constant.name, constant.index):
            if key in self._values:
                type_name, value = self._values[key]
                if type_name != constant.type:
                    raise MetalUsageError(
                        f"the function constant {constant.name} is of type {constant.type}, and was set as {type_name}"
                    )
                return value
        return None


@dataclass(frozen=True)
class Specialized:
    """A compiled kernel together with the values of its function constants.

    `key` identifies source, macros, function and constants in a binary archive.
    """

    core: compiler.Function
    constants: Mapping[str, int | float | bool]
    key: str


class MTLFunction(Labelled):
    """A kernel function, specialized by its function constants."""

    __slots__ = ("_specialized",)

    def __init__(self, device: MTLDevice, specialized: Specialized) -> None:
        super().__init__(device)
        self._specialized = specialized

    @selector()
    def name(self) -> str:
        return self._specialized.core.name

    @selector()
    def functionType(self) -> int:
        return KERNEL


class MTLLibrary(Labelled):
    """The kernel functions of one source."""

    __slots__ = ("_core", "_digest")
    _device: MTLDevice

    def __init__(self, device: MTLDevice, core: compiler.Library, source: str, macros: Mapping[str, str]) -> None:
        super().__init__(device)
        self._core = core
        self._digest = hashlib.sha256(repr((source, sorted(macros.items()))).encode()).hexdigest()

    @selector()
    def functionNames(self) -> list[str]:
        return sorted(self._core.functions)

    @selector(NSSTRING)
    def newFunctionWithName_(self, name: str) -> MTLFunction | None:
        if name not in self._core.functions:
            return None
        used = ", ".join(sorted(self._core.functions[name].used_constants))
        self._check(not used, "newFunctionWithName_", f"{name} uses the function constants {used}: not set")
        return self._specialize(name, {})

    @selector(NSSTRING, Object("MTLFunctionConstantValues"), OUT_ERROR)
    def newFunctionWithName_constantValues_error_(
        self, name: str, values: MTLFunctionConstantValues, error: None
    ) -> tuple[MTLFunction | None, NSError | None]:
        if name not in self._core.functions:
            missing = METAL["MTLLibraryErrorFunctionNotFound"]
            return None, NSError(LIBRARY_ERRORS, missing, f"no function {name!r} in the library")
        used = sorted(self._core.functions[name].used_constants)
        values_by_constant = {constant: values._value(self._core.constants[constant]) for constant in used}
        constants = {constant: value for constant, value in values_by_constant.items() if value is not None}
        unset = ", ".join(constant for constant in used if constant not in constants)
        method = "newFunctionWithName_constantValues_error_"
        self._check(not unset, method, f"{name} uses the function constants {unset}: not set")
        return self._specialize(name, constants), None

    def _specialize(self, name: str, constants: dict[str, int | float | bool]) -> MTLFunction:
        self._device._emulator.functions += 1
        key = repr((self._digest, name, sorted(constants.items())))
        return MTLFunction(self._device, Specialized(self._core.functions[name], constants, key))
