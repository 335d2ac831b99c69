"""Reading a GGUF file: its metadata, and its tensors as they are stored.

The package `gguf` has a reader too. That reader makes several arrays of every string of the vocabulary, which takes
seconds, and raises errors of many types for a damaged file. This one skips arrays of strings without decoding them, and
checks every value that it returns against the size of the file. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError

Scalar = int | float | bool | str

_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_STRINGS = 2**24  # of an array; no vocabulary is nearly that large, and walking over more would take long
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: Shape in PyTorch's order.
        encoding: The name of its ggml type, such as `F32` or `Q4_1`.
        rows: [product of all dimensions but the last, bytes of a row], uint8, memory-mapped.
    """

    shape: tuple[int, ...]
    encoding: str
    rows: NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFFile:
    """The contents of a GGUF file.

    Attributes:
        metadata: Key → value, without those that are arrays.
        arrays: The keys whose values are arrays.
        tensors: Name → tensor.
        digest: The SHA-256, as hexadecimal digits, of everything but the tensors' contents.
    """

    metadata: Mapping[str, Scalar]
    arrays: frozenset[str]
    tensors: Mapping[str, GGUFTensor]
    digest: str


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file into memory and read its metadata and its table of tensors.

    Raises:
        InputError: the file is not a GGUF file, is damaged, or has an unsupported version or tensor type.
    """
    with path.open("rb") as opened:
        size = opened.seek(0, 2)
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    cursor = _Cursor(content)
    try:
        return _read(cursor)
    except (struct.error, OverflowError, ValueError) as error:
        raise InputError(f"cannot use the GGUF file {path}: {error} (near byte {cursor.place})") from error


class _Cursor:
    """A position in a file's bytes. Reading beyond the end raises `struct.error`, `OverflowError` or `ValueError`."""

    def __init__(self, content: "mmap.mmap | bytes") -> None:
        self.content = content
        self.place = 0

    def unpack(self, form: str) -> tuple[Scalar, ...]:
        values = struct.unpack_from(form, self.content, self.place)
        self.place += struct.calcsize(form)
        return values

    def integer(self, form: str) -> int:
        return int(self.unpack(form)[0])

    def string(self) -> str:
        length = self.integer("<Q")
        text = self.content[self.place : self.place + length]
        if len(text) < length:
            raise ValueError(f"a string of {length} bytes extends beyond the end of the file")
        self.place += length
        return text.decode("utf-8")

    def skip_strings(self, count: int) -> None:
        unpack, content, place = struct.Struct("<Q").unpack_from, self.content, self.place
        for _ in range(count):
            place += 8 + unpack(content, place)[0]
        self.place = place


def _read(cursor: _Cursor) -> GGUFFile:
    if cursor.content[:4] != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    cursor.place = 4
    version, tensor_count, key_count = (cursor.integer(form) for form in ("<I", "<Q", "<Q"))
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not supported; supported are {' and '.join(map(str, _VERSIONS))}")
    metadata: dict[str, Scalar] = {}
    arrays: set[str] = set()
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata or key in arrays:
            raise ValueError(f"the key {key!r:.80} occurs twice")
        kind = cursor.integer("<I")
        if kind == _ARRAY:
            _skip_array(cursor, key)
            arrays.add(key)
        elif kind == _STRING:
            metadata[key] = cursor.string()
        elif kind in _SCALARS:
            metadata[key] = cursor.unpack(_SCALARS[kind])[0]
        else:
            raise ValueError(f"{key!r:.80} is of the unknown type {kind}")
    places = _read_tensor_table(cursor, tensor_count)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.80}, not a power of two")
    digest = hashlib.sha256(cursor.content[: cursor.place]).hexdigest()
    start = -(-cursor.place // alignment) * alignment
    whole = np.frombuffer(cursor.content, np.uint8)
    tensors = {
        name: _tensor(whole, start + offset, name, shape, kind) for name, (shape, kind, offset) in places.items()
    }
    return GGUFFile(metadata, frozenset(arrays), tensors, digest)


def _skip_array(cursor: _Cursor, key: str) -> None:
    kind, count = cursor.integer("<I"), cursor.integer("<Q")
    if kind == _STRING and count <= _MOST_STRINGS:
        cursor.skip_strings(count)
    elif kind in _SCALARS:
        cursor.place += count * struct.calcsize(_SCALARS[kind])
    else:
        raise ValueError(f"{key!r:.80} is an array of {count} elements of type {kind}, which is not supported")
    if cursor.place > len(cursor.content):
        raise ValueError(f"the array {key!r:.80} extends beyond the end of the file")


def _read_tensor_table(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Tensor name → (shape in PyTorch's order, number of the ggml type, offset in the data)."""
    places: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string()
        if name in places:
            raise ValueError(f"the tensor {name!r:.80} occurs twice")
        dimensions = cursor.integer("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name!r:.80} has {dimensions} dimensions")
        shape = tuple(cursor.integer("<Q") for _ in range(dimensions))
        places[name] = shape[::-1], cursor.integer("<I"), cursor.integer("<Q")
    return places


def _tensor(whole: NDArray[np.uint8], start: int, name: str, shape: tuple[int, ...], kind: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    encoding = next((other for other in GGML_QUANT_SIZES if other == kind), None)
    if encoding is None:
        supported = ", ".join(other.name for other in GGML_QUANT_SIZES)
        raise ValueError(f"the tensor {name!r:.80} is of the unknown type {kind}; known are {supported}")
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(encoding)]
    if 0 in shape or shape[-1] % elements:
        raise ValueError(f"the tensor {name!r:.80} of type {encoding.name} cannot have the shape {list(shape)}")
    row_bytes = shape[-1] // elements * block_bytes
    row_count = math.prod(shape[:-1])
    if start + row_count * row_bytes > len(whole):
        raise ValueError(f"the tensor {name!r:.80} of shape {list(shape)} extends beyond the end of the file")
    rows = whole[start : start + row_count * row_bytes].reshape(row_count, row_bytes)
    return GGUFTensor(shape, encoding.name, rows)
