"""Loads weights from a checkpoint to a device: maps, checks and transforms tensors by the program's recipes."""

from __future__ import annotations

import copy
import json
import mmap
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, ProgramFormatError, WeightError
from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN, misfit, numpy_dtype, saturating_cast
from npu_compiler.graph.quantization import QuantizedArray, quantize
from npu_compiler.graph.weight_recipe import UNCALIBRATED, Piece, WeightTransformRecipe, apply_recipe, pieces_read
from npu_compiler.program.codec import decoder
from npu_compiler.program.plan import WeightSpec
from npu_runtime.buffer import DeviceBuffer, DeviceMemory, Opened, as_backend
from npu_runtime.packing import beyond_range, out_of_bounds, to_numpy
from npu_runtime.pieces import ahead, in_pieces

Progress = Callable[[int, int], None]


def load_weights(
    source: str | Path | Mapping[str, Any],
    program: CompiledProgram,
    device: DeviceMemory | Opened[DeviceMemory],
    *,
    strict: bool = True,
    progress: Progress | None = None,
    cache: MutableMapping[str, DeviceBuffer] | None = None,
    rank: int = 0,
) -> dict[str, DeviceBuffer]:
    """Load a program's weights onto a device.

    Args:
        source: A `.safetensors` file, a folder of them, or a mapping of `state_dict` key → array, `QuantizedArray` or
            torch tensor. Weights that the program stores quantized and the source does not are rounded to the nearest.
        strict: Refuse keys that the model does not know.
        progress: Called with (weights done, weights in all) after each weight; None for none.
        cache: Shared between programs over one checkpoint: a weight that they store alike is uploaded once. None for
            none.
        rank: The rank whose part of the weights to load, of a program for several devices; only that part is read.

    Raises:
        WeightError: lists every weight that is missing, unknown or misshapen, holds NaN, does not fit its dtype, or is
            quantized in another format than the program's.
    """
    backend = as_backend(device)
    with_state = source if isinstance(source, Mapping) else MappedCheckpoint(Path(source))
    problems = _name_problems(program, with_state, strict)
    buffers: MutableMapping[str, DeviceBuffer] = {} if cache is None else cache
    keys = {name: _identity(weight) for name, weight in program.weight_specs.items()}
    if isinstance(source, dict):  # other mappings may read a file for every access
        for name, spec in program.weight_specs.items():
            adopted = _adopted(spec, source, backend) if keys[name] not in buffers else None
            if adopted is not None:
                buffers[keys[name]] = adopted
    wanted = {keys[name]: weight for name, weight in program.weight_specs.items() if keys[name] not in buffers}
    together = [list(weights) for _, weights in groupby(wanted.values(), _keys)]
    stored = chain.from_iterable(ahead(lambda weights: _stored_parts(weights, with_state, rank), together))
    for done, key in enumerate(keys.values(), 1):
        weight = wanted.pop(key, None)
        if weight is not None:
            own_problems, parts = next(stored)
            problems += own_problems
            if not problems:
                buffers[key] = backend.allocate_joined(parts, weight.spec)
        if progress is not None:
            progress(done, len(keys))
    if problems:
        raise weight_error(f"program '{program.name}'", problems)
    return {name: buffers[key] for name, key in keys.items()}


def _identity(weight: WeightSpec) -> str:
    """A key that is equal for weights of several programs that have equal recipes, checks and storage."""
    spec = weight.spec
    return f"{weight.recipe}|{spec.storage}|{spec.alloc_shape or spec.shape}|{spec.bounds}"


def _adopted(weight: WeightSpec, source: Mapping[str, Any], backend: DeviceMemory) -> DeviceBuffer | None:
    """A buffer of a weight that is a tensor, or several joined ones, on the device already.

    None if it is not, or has to be transformed or checked.
    """
    recipe = weight.recipe
    joined = recipe.op == "concat" and recipe.params["axis"] == 0
    parts = recipe.args if joined else (recipe,)
    if weight.spec.bounds is not None or any(part.op != "key" for part in parts):
        return None
    tensors = [source.get(key) for part in parts for key in part.keys()]
    shapes = [weight.source_shapes[key] for part in parts for key in part.keys()]
    if any(getattr(x, "shape", None) != shape for x, shape in zip(tensors, shapes, strict=True)):
        return None
    if any(isinstance(x, QuantizedArray) for x in tensors):
        return None
    return backend.adopt(tensors, weight.spec)


def _keys(weight: WeightSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(weight.recipe.keys()))


def _stored_parts(
    weights: Sequence[WeightSpec], source: Mapping[str, Any], rank: int
) -> list[tuple[list[str], list[np.ndarray]]]:
    """A list of problems for each weight, with its parts in storage dtype if there are no problems.

    All weights here are computed from one set of tensors.
    """
    shapes = weights[0].source_shapes
    state = {key: _as_stored(source[key]) for key in shapes if key in source}
    read = {piece for weight in weights for piece in pieces_read(weight.recipe, shapes, rank) if piece[0] in state}
    problems = [p for key, piece in sorted(read, key=str) for p in check_weight(key, state[key], shapes[key], piece)]
    if problems or len(state) < len(shapes):
        return [(problems, []) for _ in weights]
    rounded: dict[str, QuantizedArray] = {}  # what several weights are parts of is quantized once
    return [_made_of(weight, state, rounded, rank) for weight in weights]


def _made_of(
    weight: WeightSpec,
    state: Mapping[str, np.ndarray | QuantizedArray],
    rounded: dict[str, QuantizedArray],
    rank: int,
) -> tuple[list[str], list[np.ndarray]]:
    if weight.spec.bounds is not None:
        arrays = ((key, array) for key, array in state.items() if isinstance(array, np.ndarray) and array.size)
        problems_by_key = ((key, out_of_bounds(array, *weight.spec.bounds)) for key, array in arrays)
        if problems := [f"too large: '{key}' {problem}" for key, problem in problems_by_key if problem is not None]:
            return problems, []
    sources = dict(state)
    try:
        for leaf in weight.recipe.leaves():
            key = leaf.params.get("key", "")
            if leaf.op == "quantized" and isinstance(value := state[key], np.ndarray):
                if key not in rounded:
                    rounded[key] = quantize(value, leaf.format)
                sources[key] = rounded[key]
        parts = _parts(weight.recipe, sources, rank)
    except InputError as error:
        return [f"'{weight.recipe}': {error}"], []
    misfits = (find_misfit(part, weight.spec.storage) for part in parts)
    lost = next((value for value in misfits if value is not None), None)
    if lost is not None:
        reason = f"contains {beyond_range(lost, weight.spec.storage)}; compile for compute dtype bfloat16 or float32"
        return [f"too large: '{weight.recipe}' {reason}"], []
    return [], [cast_weight(part, weight.spec.storage) for part in parts]


def find_misfit(array: np.ndarray, dtype: str) -> float | None:
    """A finite value that a float dtype cannot hold, found by several threads as by `dtypes.misfit`.

    None if there is none.
    """
    flat = array.reshape(-1)
    misfits = in_pieces(lambda piece: misfit(flat[piece], dtype), flat.size, _PIECE)
    return next((value for value in misfits if value is not None), None)


def _as_stored(value: Any) -> np.ndarray | QuantizedArray:
    return value if isinstance(value, QuantizedArray) else to_numpy(value)


def _parts(
    recipe: WeightTransformRecipe, state: Mapping[str, np.ndarray | QuantizedArray], rank: int
) -> list[np.ndarray]:
    """The arrays that, joined along the first dimension, are the weight: one, or the operands of a concatenation."""
    joined = recipe.op == "concat" and recipe.params["axis"] == 0
    return [apply_recipe(part, state, rank) for part in (recipe.args if joined else (recipe,))]


def weight_error(model: str, problems: list[str]) -> WeightError:
    """An error that lists the problems of weights, or says that the network was never calibrated and has none."""
    different = list(dict.fromkeys(problems))
    if any(UNCALIBRATED in problem for problem in different):
        return WeightError(
            f"{model} cannot run: it is int8 as its shapes alone tell it ({UNCALIBRATED}); quantize the network with "
            "calibration images (`npu-sim quantize-network`) to compute values"
        )
    if len(different) == 1:
        return WeightError(f"the weights do not fit {model}: {different[0]}")
    listed = "\n".join(f"  - {problem}" for problem in different)
    return WeightError(f"the weights do not fit {model}:\n{listed}")


def _name_problems(program: CompiledProgram, state: Mapping[str, Any], strict: bool) -> list[str]:
    needed = {key for weight in program.weight_specs.values() for key in weight.recipe.keys()}
    problems = [f"missing: '{key}'{_suggest(key, state)}" for key in sorted(needed - set(state))]
    if strict:
        expected = needed | set(program.plan.unused_weights)
        problems += [f"unknown: '{key}'" for key in sorted(set(state) - expected)]
    return problems


def _suggest(key: str, state: Mapping[str, Any]) -> str:
    if "lifted_tensor" in key:
        return " (created inside forward(): extraction on the meta device loses its value; extract from CPU tensors)"
    tail = key.split(".")[-2:]
    close = [other for other in state if other.split(".")[-2:] == tail and (other in key or key in other)]
    return f" (did you mean '{close[0]}'?)" if close else ""


def check_weight(
    key: str, array: np.ndarray | QuantizedArray, shape: tuple[int, ...], piece: Piece = ()
) -> Iterator[str]:
    """The problems of one tensor of a checkpoint, in words.

    Args:
        piece: The part of it that is checked, as in `pieces_read`; by default all of it.
    """
    if tuple(array.shape) != shape:
        yield f"wrong shape: '{key}' is {list(array.shape)}, the model expects {list(shape)}"
        return
    if isinstance(array, QuantizedArray):
        yield from (f"not a number: '{key}': {problem}" for problem in array.rows(*piece[:1]).problems())
        return
    array = array[tuple(slice(*bounds) for bounds in piece)]
    if holds_nan(array):
        yield f"not a number: '{key}' contains NaN"
    elif _is_wide_int(array) and array.size and (array.min() < INT32_MIN or array.max() > INT32_MAX):
        yield f"too large: '{key}' contains integers that do not fit in 32 bits"


def _is_wide_int(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu" and not np.can_cast(array.dtype, np.int32)


_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
_PIECE = 2**20  # elements


def holds_nan(array: np.ndarray) -> bool:
    """Whether any element of a float array is NaN.

    Of the 16-bit floats, read as integers, NaNs are those above +inf, and with the sign those above -inf: two maxima
    find them, without a temporary array.
    """
    flat = array.reshape(-1)
    if array.dtype.name in _INFINITY:
        infinity = _INFINITY[array.dtype.name]

        def above(piece: slice) -> bool:
            words = flat[piece].view(np.uint16)
            return bool(words.view(np.int16).max() > infinity or words.max() > infinity + 0x8000)

        return any(in_pieces(above, flat.size, _PIECE))
    return array.dtype.kind == "f" and any(
        in_pieces(lambda piece: bool(np.isnan(flat[piece]).any()), flat.size, _PIECE)
    )


def cast_weight(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array in another dtype as by `saturating_cast`, converted by several threads."""
    target = numpy_dtype(dtype)
    if array.dtype == target:
        return array
    source, result = array.reshape(-1), np.empty(array.shape, target)
    flat = result.reshape(-1)

    def cast(piece: slice) -> None:
        flat[piece] = saturating_cast(source[piece], dtype)

    in_pieces(cast, source.size, _PIECE)
    return result


# The names of dtypes in safetensors files.
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_FLOAT8 = "F8_E4M3"  # no tensor of a graph has this dtype: it is one of codes, which need scales


@dataclass(frozen=True)
class _Entry:
    """The entry of a tensor in a safetensors file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def map_file(file: Path) -> np.ndarray:
    """A file's bytes as an array, each read from the file when it is used; changes stay in memory. Raises `OSError`."""
    with file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


class MappedCheckpoint(Mapping[str, np.ndarray]):
    """A safetensors file, or a folder of them, mapped to memory: a tensor's bytes are read when they are used.

    Raises:
        WeightError: there is no such file, or it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise WeightError(f"no weights at '{path}': give a .safetensors file or a folder of them")
        self._where: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        for file in files:
            try:
                with safe_open(str(file), framework="np"):
                    pass  # it checks the header, and so finds damaged files
                self._map(file)
            except (SafetensorError, OSError) as error:
                raise WeightError(f"'{file}' is not a readable safetensors file: {error}") from error

    def without(self, unwanted: Callable[[str], bool]) -> MappedCheckpoint:
        """A copy of the checkpoint without the tensors whose key `unwanted` accepts."""
        kept = copy.copy(self)
        kept._where = {key: place for key, place in self._where.items() if not unwanted(key)}
        return kept

    @classmethod
    def over(cls, content: np.ndarray) -> MappedCheckpoint:
        """The checkpoint in the bytes of a safetensors file that are in memory, or mapped, already.

        Raises:
            WeightError: the bytes are not in safetensors format.
        """
        self = cls.__new__(cls)
        self._where = {}
        try:
            self._add(content)
            decoder(dict[str, _Entry])({key: entry for key, (_, entry) in self._where.items()}, 0)
        except (ValueError, AttributeError, RecursionError, ProgramFormatError) as error:
            raise WeightError(f"the tensors are not in safetensors format: {error}") from error
        return self

    def _map(self, file: Path) -> None:
        self._add(map_file(file))

    def _add(self, whole: np.ndarray) -> None:
        """Add the tensors of a file: 8 bytes with the header's length, the header in JSON, then the data."""
        start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
        header = json.loads(whole[8:start].tobytes())
        header.pop("__metadata__", None)
        self._where.update({key: (whole[start:], entry) for key, entry in header.items()})

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header; the data are not read."""
        return tuple(self._where[key][1]["shape"])

    def __getitem__(self, key: str) -> np.ndarray:
        data, entry = self._where[key]
        if entry["dtype"] not in (*SAFETENSORS_DTYPES, _FLOAT8):
            raise WeightError(f"'{key}' is stored as {entry['dtype']}; supported are {', '.join(SAFETENSORS_DTYPES)}")
        float8 = entry["dtype"] == _FLOAT8
        dtype = np.dtype(ml_dtypes.float8_e4m3fn) if float8 else numpy_dtype(SAFETENSORS_DTYPES[entry["dtype"]])
        content = data[slice(*entry["data_offsets"])]
        if content.ctypes.data % dtype.itemsize:
            content = content.copy()
        try:
            return content.view(dtype).reshape(entry["shape"])
        except ValueError as error:
            raise WeightError(f"'{key}' cannot have the shape {reprlib.repr(entry['shape'])}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


__all__ = ["WeightTransformRecipe", "check_weight", "holds_nan", "load_weights", "to_numpy", "weight_error"]
