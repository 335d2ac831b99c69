"""The `.npumod` format: a module's graph, programs and weights, and the structure of its arguments, in one file.

1. The header: the magic bytes, the format's version, the lengths of the two parts (description and tensors), and a
   checksum of each.
2. The description (`SavedModule`), as msgpack of plain maps and lists.
3. Zeros, up to a multiple of `_ALIGNMENT` bytes.
4. The tensors, as the bytes of a safetensors file. They are written one by one and mapped when the file is read.

A checksum is the SHA-256 of the concatenated SHA-256 digests of the part's chunks of `_PIECE` bytes, which several
threads compute. Reading checks both checksums, so a damaged file is refused before anything in it is used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from npu_compiler.errors import InputError, ProgramFormatError, WeightError, reading
from npu_compiler.files import atomic_file
from npu_compiler.graph.dtypes import KNOWN_DTYPES, itemsize
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.quantization import PARTS, QuantizedArray, QuantizedFormat
from npu_compiler.graph.symbolic import KEY, is_symbolic, specialize
from npu_compiler.program.codec import pack, unpack
from npu_compiler.program.views import numel
from npu_runtime.pieces import in_pieces
from npu_runtime.weight_loader import SAFETENSORS_DTYPES, MappedCheckpoint, map_file
from npu_sim.module.report import OffDevice
from npu_sim.module.signature import Parameter
from npu_sim.module.structure import InputLeaf, OutputLeaf, Tree

MAGIC = b"NPUMOD"
FORMAT_VERSION = 4
_HEADER = struct.Struct("<6sHQQ32s32s")
_ALIGNMENT = 4096
_PIECE = 2**24  # bytes


@dataclass(frozen=True)
class SavedProgram:
    """A compiled program of the graph, for one combination of sizes.

    Attributes:
        sizes: The values of the module's symbols.
        target: Name of the code generation target.
        outputs: The program's names for the graph's outputs, in order.
        content: The program in the `.npubin` format.
    """

    sizes: tuple[int, ...]
    target: str
    outputs: tuple[str, ...]
    content: bytes


@dataclass(frozen=True)
class GraphInput:
    """A tensor that the graph takes; sizes may be symbolic.

    Attributes:
        name: The tensor's name in the graph.
        shape: Sizes, as numbers or symbolic expressions.
        dtype: The dtype.
        strides: The strides that the tensor must have, in elements. None: any strides will do, since they do not decide
            what a call changes in place.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: str
    strides: tuple[Any, ...] | None

    def __post_init__(self) -> None:
        if self.dtype not in KNOWN_DTYPES:
            raise ValueError(f"its dtype is '{self.dtype}'")
        if not all(_is_size(size) for size in self.shape):
            raise ValueError("its shape is not one of sizes")
        if self.strides is not None and not (
            len(self.strides) == len(self.shape) and all(_is_size(stride) for stride in self.strides)
        ):
            raise ValueError("its strides are not those of its shape")


def _is_size(value: object) -> bool:
    return (type(value) is int and value >= 0) or (is_symbolic(value) and isinstance(value[KEY], str))  # type: ignore[index]


@dataclass(frozen=True)
class Symbol:
    """A size that may change between calls.

    Attributes:
        name: The symbol in shapes.
        title: The size's name in messages.
        low: Smallest value.
        high: Largest value. None: no limit.
    """

    name: str
    title: str
    low: int
    high: int | None

    def __post_init__(self) -> None:
        if self.low < 0 or (self.high is not None and self.high < self.low):
            raise ValueError(f"it is from {self.low} to {self.high}")


@dataclass(frozen=True)
class SavedModule:
    """A file's description of a module, without the values of its tensors.

    Attributes:
        name: The module's name.
        compiler_version: Version of the compiler that wrote the file.
        ir: The graph's IR as JSON, without the data of its constants.
        graph_inputs: The tensors that the graph takes, in order.
        symbols: The sizes that may change between calls.
        weights: Key in the graph → name of the tensor in the file; tied weights are one tensor.
        constants: Key of a constant of the graph → name of the tensor in the file.
        keys: Name in the graph → key, for weights and constants that a call returns and weights that it changes.
        dtype: The compute dtype that the user asked for. None: the graph's own.
        formats: Key → format of a weight that the device stores in few bits. The file holds codes, scales and zero
            points of such a weight (see `part_name`) instead of the tensor, unless a call returns or changes the
            tensor.
        signature: The parameters of the module's `forward`. None: they are not known.
        positional: The structure of each positional argument; `keywords`: of each keyword argument.
        inputs: The leaves of all arguments, in order.
        outputs: The leaves of the result, in order; `result` is its structure.
        written: (the graph's output, name of the graph input or weight) for each tensor that a call changes in place.
        off_device: The nodes of the graph that PyTorch runs.
        programs: The programs compiled so far.
    """

    name: str
    compiler_version: str
    ir: bytes
    graph_inputs: tuple[GraphInput, ...]
    symbols: tuple[Symbol, ...]
    weights: dict[str, str]
    constants: dict[str, str]
    keys: dict[str, str]
    dtype: str | None
    formats: dict[str, QuantizedFormat]
    signature: tuple[Parameter, ...] | None
    positional: tuple[Tree, ...]
    keywords: dict[str, Tree]
    inputs: tuple[InputLeaf, ...]
    outputs: tuple[OutputLeaf, ...]
    result: Tree
    written: tuple[tuple[int, str], ...]
    off_device: tuple[OffDevice, ...]
    programs: tuple[SavedProgram, ...]

    def smallest_inputs(self) -> list[TensorSpec]:
        """Return the graph's inputs with the smallest sizes that the module allows.

        Raises:
            ProgramFormatError: the symbols' smallest values give no valid shape.
        """
        sizes = {symbol.name: symbol.low for symbol in self.symbols}
        specs = [TensorSpec(x.name, tuple(specialize(x.shape, sizes)), x.dtype) for x in self.graph_inputs]
        for spec in specs:
            if not all(type(size) is int and size >= 0 for size in spec.shape):
                raise ProgramFormatError(f"input '{spec.name}' of '{self.name}' cannot have the shape {spec.shape}")
        return specs


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to write to a file.

    Attributes:
        dtype: The dtype.
        shape: The sizes.
        read: Returns the elements, dense in row-major order; called once, when they are written.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def write_module(path: Path, module: SavedModule, tensors: Mapping[str, StoredTensor]) -> None:
    """Write a `.npumod` atomically; only one tensor's elements are in memory at a time.

    Raises:
        InputError: the file cannot be written, or the format cannot represent a tensor's dtype.
    """
    description = pack(module)
    ordered = dict(sorted(tensors.items(), key=lambda item: -itemsize(item[1].dtype)))  # so that each is aligned
    table = _table(ordered)
    start = _start(len(description))
    try:
        with atomic_file(path) as file:
            file.write(bytes(_HEADER.size))
            file.write(description)
            file.write(bytes(start - _HEADER.size - len(description)))
            out = _Hashed(file)
            out.write(np.frombuffer(table, np.uint8))
            for tensor in ordered.values():
                out.write(np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8))
            file.seek(0)
            lengths = len(description), out.size
            file.write(_HEADER.pack(MAGIC, FORMAT_VERSION, *lengths, _checksum(_bytes(description)), out.checksum()))
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error


def read_module(path: Path) -> tuple[SavedModule, MappedCheckpoint]:
    """Read the description in a `.npumod` and map its tensors into memory. No code in the file is run.

    Raises:
        ProgramFormatError: the file is missing, truncated, damaged, of another format version, or inconsistent.
    """
    try:
        whole = map_file(path)
    except OSError as error:
        raise ProgramFormatError(f"cannot read module '{path}': {error.strerror or error}") from error
    if whole[: len(MAGIC)].tobytes() != MAGIC:
        raise ProgramFormatError(f"'{path}' is not a .npumod module (it does not start with {MAGIC.decode()})")
    if whole.size < _HEADER.size:
        raise ProgramFormatError(f"'{path}' is truncated: it ends within its header")
    _, version, described, stored, description_sum, tensors_sum = _HEADER.unpack(whole[: _HEADER.size].tobytes())
    if version != FORMAT_VERSION:
        raise ProgramFormatError(
            f"'{path}' has format version {version}; this version of npu-simulation reads {FORMAT_VERSION}: save the "
            "module again"
        )
    start = _start(described)
    if whole.size != start + stored:
        problem = "is truncated" if whole.size < start + stored else "is corrupted"
        raise ProgramFormatError(f"'{path}' {problem}: it has {whole.size} bytes instead of {start + stored}")
    description, tensors = whole[_HEADER.size : _HEADER.size + described], whole[start:]
    between = whole[_HEADER.size + described : start]
    if _checksum(description) != description_sum or _checksum(tensors) != tensors_sum or between.any():
        raise ProgramFormatError(f"'{path}' is corrupted: its checksum does not match")
    try:
        with reading(ProgramFormatError):
            module, checkpoint = unpack(SavedModule, description.tobytes()), MappedCheckpoint.over(tensors)
            _check(module, checkpoint)
    except (ProgramFormatError, WeightError) as error:
        raise ProgramFormatError(f"'{path}' is not a valid module: {error}") from error
    return module, checkpoint


def _check(module: SavedModule, checkpoint: MappedCheckpoint) -> None:
    """Check that the parts of a description agree; raise `ProgramFormatError` if they do not."""
    inputs = [meta.name for meta in module.graph_inputs]
    if [leaf.name for leaf in module.inputs if leaf.name is not None] != inputs or len(set(inputs)) < len(inputs):
        raise ProgramFormatError("the leaves of its arguments are not the inputs of its graph")
    sizes = {size[KEY] for meta in module.graph_inputs for size in meta.shape if is_symbolic(size)}
    if not {symbol.name for symbol in module.symbols} <= sizes:
        raise ProgramFormatError("a symbol of it is no size of an input")
    if any(len(program.sizes) != len(module.symbols) for program in module.programs):
        raise ProgramFormatError("a program of it is for other sizes than those that may change")
    if sum(tree.size for tree in (*module.positional, *module.keywords.values())) != len(module.inputs):
        raise ProgramFormatError("its arguments have another number of leaves than their structure")
    if module.result.size != len(module.outputs):
        raise ProgramFormatError("its result has another number of leaves than its structure")
    missing = {*module.weights.values(), *module.constants.values()} - checkpoint.keys()
    missing -= {module.weights[key] for key in module.weights if has_parts(module, key, checkpoint)}
    missing |= set(module.keys.values()) - module.weights.keys() - module.constants.keys()
    missing |= {leaf.source for leaf in module.outputs if leaf.source is not None} - {*inputs, *module.keys}
    stored = {name for name, key in module.keys.items() if key in module.weights}
    missing |= {name for _, name in module.written} - {*inputs, *stored}
    if missing:
        raise ProgramFormatError(f"it refers to tensors that it does not hold: {', '.join(sorted(map(repr, missing)))}")


def part_name(name: str, part: str) -> str:
    """Return the name in a file of one part (codes, scales or zero points) of a weight stored in few bits."""
    return f"{name} ({part})"


def has_parts(module: SavedModule, key: str, checkpoint: MappedCheckpoint) -> bool:
    """Whether the file holds a weight as codes and scales, in few bits, rather than as a tensor."""
    return key in module.formats and part_name(module.weights[key], "codes") in checkpoint


def stored_weight(module: SavedModule, key: str, checkpoint: MappedCheckpoint) -> np.ndarray | QuantizedArray:
    """Return a weight in the form in which the file holds it: an array, or a matrix in few bits.

    Raises:
        WeightError: the file has no such tensor, or its dtype is unknown.
        InputError: codes, scales and zero points of the weight contradict each other.
    """
    name = module.weights[key]
    if not has_parts(module, key, checkpoint):
        if name not in checkpoint:
            raise WeightError(f"the file has no tensor '{name}', which holds the weight '{key}'")
        return checkpoint[name]
    format = module.formats[key]
    parts = {x: checkpoint[part_name(name, x)] for x in PARTS if part_name(name, x) in checkpoint}
    codes = parts["codes"]
    if codes.ndim != 2:
        raise InputError(f"'{key}' is stored as {format}, but its codes are {list(codes.shape)}")
    if "scales" not in parts:
        raise InputError(f"'{key}' is stored as {format}, but has no scales")
    return QuantizedArray(format, (codes.shape[0], codes.shape[1] * 8 // format.bits), **parts)


def _table(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the beginning of a safetensors file: the length of the JSON header, and the header."""
    names = {name: stored for stored, name in SAFETENSORS_DTYPES.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise InputError(f"'{name}' has dtype {tensor.dtype}, which a .npumod file cannot hold")
        begin, end = end, end + numel(tensor.shape) * itemsize(tensor.dtype)
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _start(described: int) -> int:
    """Return the offset in bytes of the tensors in a file whose description has this length."""
    return -(-(_HEADER.size + described) // _ALIGNMENT) * _ALIGNMENT


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _checksum(data: np.ndarray) -> bytes:
    return _joined(in_pieces(lambda piece: hashlib.sha256(data[piece].data).digest(), data.size, _PIECE))


def _joined(digests: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()


class _Hashed:
    """A writer to a file that also computes the checksum of what is written.

    Attributes:
        size: Bytes written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self._file = file
        self._digests: list[bytes] = []
        self._current = hashlib.sha256()

    def write(self, data: np.ndarray) -> None:
        while data.size:
            piece, data = np.split(data, [_PIECE - self.size % _PIECE])
            self._file.write(piece.data)
            self._current.update(piece.data)
            self.size += piece.size
            if self.size % _PIECE == 0:
                self._finish_piece()

    def _finish_piece(self) -> None:
        self._digests.append(self._current.digest())
        self._current = hashlib.sha256()

    def checksum(self) -> bytes:
        """Return the checksum of everything written; call it once, at the end."""
        if self.size % _PIECE:
            self._finish_piece()
        return _joined(self._digests)
