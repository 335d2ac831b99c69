"""Cache of weights on a device that all captured graphs of a process share, keyed by the source tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from npu_runtime.buffer import DeviceBuffer
from npu_runtime.hardware import Hardware

_NUMBERS = WeakIdKeyDictionary()
_COUNT = count()


class SharedWeights(MutableMapping[str, DeviceBuffer]):
    """One graph's view of the shared weights, in the form in which `load_weights` takes a cache.

    `load_weights` uses keys that contain the graph's names for tensors; here each name is replaced by an identifier of
    the tensor and of its version, which PyTorch increments at each write. A buffer is kept while any graph uses it.

    Args:
        backend: The device.
        tensors: The graph's name of a tensor → the tensor.
    """

    def __init__(self, backend: Hardware, tensors: Mapping[str, torch.Tensor]) -> None:
        self._shared = _buffers(backend)
        self._marks = {name: _mark(value) for name, value in tensors.items()}
        self._own: dict[str, DeviceBuffer] = {}

    def __getitem__(self, key: str) -> DeviceBuffer:
        if key not in self._own:
            self._own[key] = self._shared[self._key(key)]
        return self._own[key]

    def __setitem__(self, key: str, buffer: DeviceBuffer) -> None:
        self._own[key] = self._shared[self._key(key)] = buffer

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def _key(self, key: str) -> str:
        return re.sub(r"\w+", lambda word: self._marks.get(word[0], word[0]), key)


def _mark(value: torch.Tensor) -> str:
    if value not in _NUMBERS:
        _NUMBERS[value] = next(_COUNT)
    version = 0 if value.is_inference() else value._version
    return f"<tensor {_NUMBERS[value]} at {value.data_ptr()}, version {version}>"


@cache
def _buffers(backend: Hardware) -> WeakValueDictionary[str, DeviceBuffer]:
    return WeakValueDictionary()
