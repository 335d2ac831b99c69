"""Auto-tuning by trials on this GPU: input data, timing, and choices kept on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuda_runtime.cuda_device import CUDADevice
from npu_compiler.graph.dtypes import itemsize, numpy_dtype
from npu_runtime.cache_folder import keep_entry, read_entry

_ROUNDS = 3
_HOPELESS = 1.3  # a candidate this many times slower than the best in one round is not measured further
_PATTERN_BYTES = 2**20


def graph_seconds(device: CUDADevice, launches: Sequence[Callable[[], object]], least: float) -> float:
    """Seconds per launch, measured in a CUDA graph.

    The caller has made the device current, and has run every launch once, so that its code is loaded.

    Args:
        least: The least seconds of any candidate so far; one that is clearly slower is not measured further.
    """
    cuda, stream = device.cupy.cuda, device.stream
    stream.begin_capture()
    try:
        for launch in launches:
            launch()
    finally:
        graph = stream.end_capture()
    start, end = cuda.Event(), cuda.Event()
    seconds = math.inf
    for _ in range(_ROUNDS):
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        seconds = min(seconds, cuda.get_elapsed_time(start, end) / 1000 / len(launches))
        if seconds > _HOPELESS * least:
            break
    return seconds


def fill_randomly(device: CUDADevice, memory: Any, dtype: str) -> None:
    """Fill memory with random numbers of a dtype, since a GPU is faster on zeros; float8 codes are never NaN."""
    count, rng = min(_PATTERN_BYTES, memory.nbytes) // itemsize(dtype), np.random.default_rng(0)
    numbers = rng.integers(256, size=count) & 0xF7 if dtype == "uint8" else rng.standard_normal(count)
    pattern = numbers.astype(numpy_dtype(dtype))
    device.upload(memory, pattern)
    runtime, stream, start = device.runtime, device.stream, memory.data.ptr
    done = pattern.nbytes
    with device.active("cannot fill memory"):
        while 0 < done < memory.nbytes:
            size = min(done, memory.nbytes - done)
            runtime.memcpyAsync(start + done, start, size, runtime.memcpyDeviceToDevice, stream.ptr)
            done += size


def keep_choice(path: Path, content: Mapping[str, Any]) -> None:
    """Write a choice to a file; failure to write is ignored, since it only makes the next start slower."""
    keep_entry(path, json.dumps(content, indent=1).encode())


def kept_choice(path: Path) -> Any:
    """The choice that `keep_choice` wrote to a file; None if there is no file, or it is damaged."""
    content = read_entry(path)
    return None if content is None else json.loads(content)
