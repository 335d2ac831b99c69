"""Which of cuBLASLt's algorithms makes a product: the one that was fastest when this GPU tried them, kept on disk."""

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
from cuda_runtime.trials import fill_randomly, graph_seconds, remember
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall

_MOST_SECONDS = 10.0  # of tuning at a time; what is left then is made as the library suggests
_CANDIDATES = 16
_FEWEST_LAUNCHES, _MOST_COPIES = 4, 32
# A run reads each weight once, so it comes from memory; these bytes of copies are more than a cache holds.
_ROTATED_BYTES = 160 * 2**20
_BLOCK = 256  # bytes; where an operand of the trials begins


class TunedProducts:
    """The products of a backend.

    Results are the same from run to run: an algorithm that was chosen is used from then on, and none that adds up in an
    order left to chance is considered.

    Args:
        folder: Where choices are kept, a file each, named by all that decides them.
    """

    def __init__(self, device: CUDADevice, folder: Path, library: Any = None) -> None:
        self._device, self._folder = device, folder
        self._lt = CublasLt(device, library)
        self._chosen: dict[str, Algorithm] = {}

    def launch(self, call: KernelCall, places: Sequence[int]) -> Launch:
        """What enqueues a product.

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
        """Choose algorithms before the operands' memory is known, by what is on disk or else by trying.

        Products that would take more memory than there is, or more time than a start should, are left out.
        """
        unknown: dict[str, KernelCall] = {}
        for call in calls:
            at = _assumed(call)
            key = product_key(call, at)
            if key not in self._chosen and key not in unknown:
                known = self._recall(key, Product(self._lt, call, at))
                if known is None:
                    unknown[key] = call
                else:
                    self._chosen[key] = known
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
        """The fastest algorithm and its seconds."""
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
        """Seconds that a launch takes in a graph of them; infinite where the algorithm does not run after all.

        Args:
            least: The best so far; what cannot come near is not measured further.
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
        """The algorithm that was kept; None where there is none, or it cannot be what it was."""
        try:
            kept = json.loads(self._path(key).read_bytes())
            opaque, config = bytes.fromhex(kept["algorithm"]), list(kept["config"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return product.restored(opaque, config)

    def _keep(self, key: str, algorithm: Algorithm, seconds: float) -> None:
        content = {
            "product": json.loads(key),
            "algorithm": algorithm.opaque.hex(),
            "config": algorithm.config,
            "microseconds": round(1e6 * seconds, 3),
        }
        remember(self._path(key), content)


def _assumed(call: KernelCall) -> Addresses:
    """Addresses as aligned as the real ones will be: buffers begin at multiples of more bytes than matter."""
    views = (*call.inputs, *call.outputs)
    return Addresses.of(call, [WIDEST_ACCESS + view.offset * itemsize(view.dtype) for view in views])


def _copies(call: KernelCall) -> int:
    """How many weights to try a product with in turn."""
    return min(_MOST_COPIES, -(-_ROTATED_BYTES // max(1, operand_bytes(call)["b"])))


def _scratch_bytes(call: KernelCall) -> int:
    rooms = {name: _room(size) for name, size in operand_bytes(call).items()}
    return sum(rooms.values()) + (_copies(call) - 1) * rooms["b"]


def _placed(call: KernelCall, start: int) -> list[Addresses]:
    """Where the operands lie in scratch memory, for each copy of the weight; as aligned as the real ones will be."""
    sizes, alignments = operand_bytes(call), _assumed(call).alignments
    places = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[0] == "b"):
        places[name] = start + alignments[name] % WIDEST_ACCESS if size else 0
        start += _room(size)
    first = Addresses(**places)
    return [replace(first, b=first.b + copy * _room(sizes["b"])) for copy in range(_copies(call))]


def _room(size: int) -> int:
    """Bytes for an operand and the gap before it."""
    return -(-(size + WIDEST_ACCESS) // _BLOCK) * _BLOCK
