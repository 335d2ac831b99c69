"""Auto-tuning of products: the fastest of cuBLASLt's algorithms by trials on this GPU, kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cuda_runtime.cublaslt import (
    WIDEST_ACCESS,
    Addresses,
    Algorithm,
    CublasLt,
    Launch,
    Product,
    operand_bytes,
    product_key,
)
from cuda_runtime.cuda_device import CUDADevice
from cuda_runtime.trials import fill_randomly, graph_seconds, keep_choice, kept_choice
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall

_MOST_SECONDS = 10.0  # time limit of tuning at a start; the rest use the library's suggestion
_CANDIDATES = 16
_FEWEST_LAUNCHES, _MOST_COPIES = 4, 32
# A run reads each weight once, from memory; trials rotate through more bytes of copies than the L2 cache holds.
_ROTATED_BYTES = 160 * 2**20
_BLOCK = 256  # bytes; alignment of the trials' operands


class TunedProducts:
    """The matrix products of a backend, each with the fastest algorithm of cuBLASLt on this GPU.

    Results are deterministic: a choice is kept, and algorithms without a fixed order of summation are excluded.

    Args:
        folder: Folder of the kept choices, a file each, named by a hash of all that determines the choice.
    """

    def __init__(self, device: CUDADevice, folder: Path, library: Any = None) -> None:
        self._device, self._folder = device, folder
        self._lt = CublasLt(device, library)
        self._chosen: dict[str, Algorithm] = {}

    def launch(self, call: KernelCall, places: Sequence[int]) -> Launch:
        """A function that enqueues a product with its chosen algorithm, or else with cuBLASLt's first suggestion.

        Args:
            places: The operands' addresses, inputs first.

        Raises:
            DeviceError: cuBLASLt has no algorithm for it.
        """
        at = Addresses.of(call, places)
        key = product_key(call, at)
        product = Product(self._lt, call, at)
        if key not in self._chosen:
            self._chosen[key] = product.algorithms(1)[0]
        return product.launch(self._chosen[key])

    def tune(self, calls: Iterable[KernelCall]) -> None:
        """Choose algorithms before the operands' addresses are known, from disk or else by trials.

        Products are left out if memory or the time limit does not suffice.
        """
        unknown: dict[str, KernelCall] = {}
        for call in calls:
            at = _assumed(call)
            key = product_key(call, at)
            if key not in self._chosen and key not in unknown:
                algorithm = self._recall(key, Product(self._lt, call, at))
                if algorithm is None:
                    unknown[key] = call
                else:
                    self._chosen[key] = algorithm
        if not unknown:
            return
        free, _ = self._device.runtime.memGetInfo()
        needs = {key: size for key, call in unknown.items() if (size := _scratch_bytes(call)) <= free // 2}
        scratch = self._device.allocate(max(needs.values(), default=0), "the memory that products are tried in")
        deadline = time.monotonic() + _MOST_SECONDS
        for key in needs:
            if time.monotonic() > deadline:
                break
            algorithm, seconds = self._fastest(unknown[key], scratch)
            self._chosen[key] = algorithm
            self._device.counters["tuned"] += 1
            if math.isfinite(seconds):
                self._keep(key, algorithm, seconds)

    def _fastest(self, call: KernelCall, scratch: Any) -> tuple[Algorithm, float]:
        """The fastest algorithm for a product, and its seconds."""
        fill_randomly(self._device, scratch, call.inputs[0].dtype)
        products = [Product(self._lt, call, at) for at in _placed(call, int(scratch.data.ptr))]
        tries = max(_FEWEST_LAUNCHES, len(products))
        best, least = None, math.inf
        for algorithm in products[0].algorithms(_CANDIDATES):
            launches = [product.launch(algorithm) for product in products]
            seconds = self._seconds(list(islice(cycle(launches), tries)), least)
            if seconds < least or best is None:
                best, least = algorithm, seconds
        assert best is not None
        return best, least

    def _seconds(self, launches: Sequence[Launch], least: float) -> float:
        """Seconds that a launch takes, measured in a CUDA graph of all `launches`; infinite if the algorithm fails.

        Args:
            least: The least seconds of any candidate so far; one that is clearly slower is not measured further.
        """
        with self._device.active("cannot try a product"):
            try:
                launches[0]()  # loads its code, which not every version of CUDA can do during a capture
            except DeviceError:
                return math.inf
            return graph_seconds(self._device, launches, least)

    def _path(self, key: str) -> Path:
        gpu = self._device.properties
        content = [key, gpu["name"].decode(), gpu["multiProcessorCount"], self._device.arch, self._lt.version]
        return self._folder / f"gemm_{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.json"

    def _recall(self, key: str, product: Product) -> Algorithm | None:
        """The algorithm kept on disk for a product; None if there is none, or this library does not accept it."""
        try:
            kept = kept_choice(self._path(key))
            opaque, config = bytes.fromhex(kept["algorithm"]), list(kept["config"])
        except (ValueError, TypeError, KeyError):
            return None
        return product.restored(opaque, config)

    def _keep(self, key: str, algorithm: Algorithm, seconds: float) -> None:
        content = {
            "product": json.loads(key),
            "algorithm": algorithm.opaque.hex(),
            "config": algorithm.config,
            "microseconds": round(1e6 * seconds, 3),
        }
        keep_choice(self._path(key), content)


def _assumed(call: KernelCall) -> Addresses:
    """Stand-in addresses with the alignment of the real ones; every buffer is aligned to more than `WIDEST_ACCESS`."""
    views = (*call.inputs, *call.outputs)
    return Addresses.of(call, [WIDEST_ACCESS + view.offset * itemsize(view.dtype) for view in views])


def _copies(call: KernelCall) -> int:
    """Number of copies of the weight that the trials rotate through, so that it is never in the cache."""
    return min(_MOST_COPIES, -(-_ROTATED_BYTES // max(1, operand_bytes(call)["b"])))


def _scratch_bytes(call: KernelCall) -> int:
    sizes = {name: _reserved_bytes(size) for name, size in operand_bytes(call).items()}
    return sum(sizes.values()) + (_copies(call) - 1) * sizes["b"]


def _placed(call: KernelCall, start: int) -> list[Addresses]:
    """The operands' addresses in scratch memory for each copy of the weight, with the alignment of the real ones."""
    sizes, alignments = operand_bytes(call), _assumed(call).alignments
    places = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[0] == "b"):
        places[name] = start + alignments[name] % WIDEST_ACCESS if size else 0
        start += _reserved_bytes(size)
    first = Addresses(**places)
    return [replace(first, b=first.b + copy * _reserved_bytes(sizes["b"])) for copy in range(_copies(call))]


def _reserved_bytes(size: int) -> int:
    """Bytes to reserve for an operand, its misalignment included."""
    return -(-(size + WIDEST_ACCESS) // _BLOCK) * _BLOCK
