"""Compute pipelines, and the archives that keep them on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from metal_emulator.enums import METAL
from metal_emulator.library import MTLFunction, Specialized
from metal_emulator.objc import (
    BOOL,
    NSUINTEGER,
    NSURL,
    OUT_ERROR,
    ArrayOf,
    Labelled,
    NSError,
    NSObject,
    Object,
    Plain,
    selector,
)
from npu_compiler.files import write_atomically

if TYPE_CHECKING:
    from metal_emulator.device import MTLDevice

ARCHIVE_ERRORS = "MTLBinaryArchiveDomain"
ARCHIVE_FORMAT = "metal-emulator archive 1"
SIMD_WIDTH = 32
MAX_THREADS = 1024


class MTLComputePipelineDescriptor(Labelled, Plain):
    """The description of a compute pipeline: its function, limits and binary archives."""

    __slots__ = ("_archives", "_function", "_max_threads", "_whole_simdgroups")

    def _defaults(self) -> None:
        self._function: MTLFunction | None = None
        self._archives: list[MTLBinaryArchive] = []
        self._max_threads = 0
        self._whole_simdgroups = False

    @selector(Object("MTLFunction", nullable=True))
    def setComputeFunction_(self, function: MTLFunction | None) -> None:
        self._function = function

    @selector()
    def computeFunction(self) -> MTLFunction | None:
        return self._function

    @selector(ArrayOf(Object("MTLBinaryArchive")))
    def setBinaryArchives_(self, archives: list[MTLBinaryArchive]) -> None:
        self._archives = archives

    @selector(NSUINTEGER)
    def setMaxTotalThreadsPerThreadgroup_(self, most: int) -> None:
        self._check(most <= MAX_THREADS, "setMaxTotalThreadsPerThreadgroup_", f"{most} threads, at most {MAX_THREADS}")
        self._max_threads = most

    @selector(BOOL)
    def setThreadGroupSizeIsMultipleOfThreadExecutionWidth_(self, promised: bool) -> None:
        self._whole_simdgroups = promised


class MTLComputePipelineState(NSObject):
    """A kernel that is ready to be dispatched."""

    __slots__ = ("_max_threads", "_needed", "_specialized", "_whole_simdgroups")

    def __init__(
        self,
        device: MTLDevice,
        specialized: Specialized,
        label: str | None = None,
        max_threads: int = 0,
        whole_simdgroups: bool = False,
    ) -> None:
        super().__init__(device)
        self._label = label
        self._specialized = specialized
        self._max_threads = max_threads or MAX_THREADS
        self._whole_simdgroups = whole_simdgroups
        constants = specialized.constants
        self._needed = tuple(
            (argument.index, argument.name, argument.address_space == "constant")
            for argument in specialized.core.arguments
            if argument.kind == "buffer" and (argument.constant is None or constants[argument.constant])
        )

    def __str__(self) -> str:
        return f"the pipeline of {self._specialized.core.name}"

    @selector()
    def label(self) -> str | None:
        return self._label

    @selector()
    def maxTotalThreadsPerThreadgroup(self) -> int:
        return self._max_threads

    @selector()
    def threadExecutionWidth(self) -> int:
        return SIMD_WIDTH


class MTLBinaryArchiveDescriptor(Plain):
    """The description of a binary archive: the file to read it from; None for an empty archive."""

    __slots__ = ("_url",)

    def _defaults(self) -> None:
        self._url: NSURL | None = None

    @selector(Object("NSURL", nullable=True))
    def setUrl_(self, url: NSURL | None) -> None:
        self._url = url

    @selector()
    def url(self) -> NSURL | None:
        return self._url


class MTLBinaryArchive(Labelled):
    """A set of compiled pipelines, by the keys of what they were compiled from."""

    __slots__ = ("_keys",)

    def __init__(self, device: MTLDevice, keys: set[str]) -> None:
        super().__init__(device)
        self._keys = keys

    @selector(Object("MTLComputePipelineDescriptor"), OUT_ERROR)
    def addComputePipelineFunctionsWithDescriptor_error_(
        self, descriptor: MTLComputePipelineDescriptor, error: None
    ) -> tuple[bool, NSError | None]:
        if descriptor._function is None:
            self._fail("addComputePipelineFunctionsWithDescriptor_error_", "the descriptor has no compute function")
        self._keys.add(descriptor._function._specialized.key)
        return True, None

    @selector(Object("NSURL"), OUT_ERROR)
    def serializeToURL_error_(self, url: NSURL, error: None) -> tuple[bool, NSError | None]:
        if not self._keys:
            return False, _archive_error("MTLBinaryArchiveErrorInternalError", "nothing to serialize")
        try:
            content = json.dumps({"format": ARCHIVE_FORMAT, "keys": sorted(self._keys)})
            write_atomically(Path(url.path()), content.encode())
        except OSError as failure:
            return False, _archive_error("MTLBinaryArchiveErrorInternalError", str(failure))
        return True, None


def read_archive(path: Path) -> tuple[set[str], NSError | None]:
    """The keys in an archive's file and None, or no keys and the error if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == ARCHIVE_FORMAT:
            return set(content["keys"]), None
        problem = "another format"
    except (OSError, ValueError, KeyError, TypeError) as failure:
        problem = str(failure)
    return set(), _archive_error("MTLBinaryArchiveErrorInvalidFile", f"invalid archive {path}: {problem}")


def _archive_error(code: str, description: str) -> NSError:
    return NSError(ARCHIVE_ERRORS, METAL[code], description)
