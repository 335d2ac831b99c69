"""Compiles kernel sources by NVRTC, in parallel, with a cache on disk."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda_runtime.source_check import check_source
from npu_compiler.errors import DeviceError
from npu_runtime.cache_folder import keep_entry, read_entry

# Architecture-specific instructions (Hopper's wgmma) need the "a" variant.
_ALL_OF_IT = {90: "sm_90a"}
_OPTIONS = ("--std=c++17", "--generate-line-info")


class KernelCache:
    """A compiler of kernel sources for one GPU architecture, with a cache on disk.

    The result is a cubin if this NVRTC knows the architecture. For a newer GPU it is PTX of the newest architecture
    that NVRTC knows, which the driver compiles further.

    Args:
        nvrtc: CuPy's module of that name.
        arch: Compute capability; 90 is 9.0.
        counters: Counts `kernels_compiled` and `kernel_cache_hits`.

    Raises:
        DeviceError: this NVRTC is too new for the GPU.
    """

    def __init__(self, nvrtc: Any, arch: int, folder: Path, counters: Counter[str]) -> None:
        self._nvrtc, self._folder, self._counters = nvrtc, folder, counters
        archs = [int(other) for other in nvrtc.getSupportedArchs()]
        self._is_ptx = arch not in archs
        usable = max((other for other in archs if other <= arch), default=None)
        if usable is None:
            version = ".".join(map(str, nvrtc.getVersion()))
            raise DeviceError(
                f"NVRTC {version} makes no code for compute capability {arch / 10}, only for {min(archs) / 10} and up; "
                "install CuPy for an older CUDA"
            )
        name = f"compute_{usable}" if self._is_ptx else _ALL_OF_IT.get(usable, f"sm_{usable}")
        self._options = (f"--gpu-architecture={name}", *_OPTIONS)

    def images(self, sources: Mapping[str, str]) -> dict[str, bytes]:
        """Compile sources, and return cubin or PTX by source name.

        Args:
            sources: Source name → CUDA C.

        Raises:
            DeviceError: a source does not compile.
            ProgramFormatError: a source could make the compiler read files.
        """
        if not sources:
            return {}
        with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
            return dict(zip(sources, pool.map(self._image, *zip(*sources.items(), strict=True)), strict=True))

    def path(self, text: str) -> Path:
        """The cache file of a source, whose name is a hash of everything that determines its content."""
        content = "\0".join((text, *self._options, *map(str, self._nvrtc.getVersion())))
        return self._folder / f"{hashlib.sha256(content.encode()).hexdigest()}.{'ptx' if self._is_ptx else 'cubin'}"

    def _image(self, name: str, text: str) -> bytes:
        path = self.path(text)
        image = read_entry(path)
        if image is not None:
            self._counters["kernel_cache_hits"] += 1
            return image
        image = self._compile(name, text)
        self._counters["kernels_compiled"] += 1
        keep_entry(path, image)
        return image

    def _compile(self, name: str, text: str) -> bytes:
        check_source(name, text)
        program = self._nvrtc.createProgram(text, f"{name}.cu", (), ())
        try:
            self._nvrtc.compileProgram(program, self._options)
            if not self._is_ptx:
                return bytes(self._nvrtc.getCUBIN(program))
            ptx = self._nvrtc.getPTX(program)
            return ptx.encode() if isinstance(ptx, str) else bytes(ptx)
        except self._nvrtc.NVRTCError as error:
            log = self._nvrtc.getProgramLog(program).strip()
            raise DeviceError(
                f"kernel source '{name}' does not compile for {self._options[0]}: {error}\n{log}"
            ) from error
        finally:
            self._nvrtc.destroyProgram(program)
