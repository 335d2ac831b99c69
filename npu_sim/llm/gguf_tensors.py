"""The tensors of a GGUF file as parameters of the Hugging Face module; reading one undoes llama.cpp's layout.

The package `gguf`'s `TensorNameMap` says which tensors a parameter is made of, by the parameter's name in the module; a
row of `_ARRANGEMENTS` says how.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime.pieces import in_pieces
from npu_sim.lazy_tensors import LazyTensors
from npu_sim.llm.gguf_architectures import Architecture
from npu_sim.llm.gguf_blocks import quantized_format, quantized_rows
from npu_sim.llm.gguf_reader import GGUFFile, GGUFTensor

_PIECE = 2**18  # elements: their temporary arrays stay in a core's cache
_EXPERTS = re.compile(r".*\.(\d+)\..*\.experts\.gate_up_proj(_bias)?")
_LATENT = re.compile(r".*\.(\d+)\.self_attn\.kv_b_proj\.weight")
_ROTATED = re.compile(r".*\.self_attn\.(q|k)_proj\.\w+")
Rows = NDArray[Any]


@dataclass(frozen=True)
class Source:
    """The tensors of a file that one parameter is made of.

    Attributes:
        names: Their names.
        arrangement: Name of a row of `_ARRANGEMENTS`.
        shape: Shape of the parameter; [E, N, K] or [E, N] if it holds the weights or biases of all experts.
        sizes: Numbers that the arrangement needs: number of heads, and the rows of each.
    """

    names: tuple[str, ...]
    arrangement: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Arrangement:
    """A way in which tensors become a parameter.

    Attributes:
        shapes: Function from a source to the shapes of its tensors; dimensions of 1 are left out of comparisons.
        arrange: Function from the source and the tensors' rows to the parameter's rows.
        keeps_rows: Whether rows are only moved, so that quantized rows need no dequantizing.
    """

    shapes: Callable[[Source], list[tuple[int, ...]]]
    arrange: Callable[[Source, Sequence[Rows]], Rows]
    keeps_rows: bool = True


def _whole(source: Source) -> list[tuple[int, ...]]:
    return [source.shape]


def _halves(source: Source, parts: Sequence[Rows]) -> Rows:
    """Undo llama.cpp's row order for rotary embedding, which interleaves the two halves of a head.

    A bias is stored as a single row, whose elements are in that order.
    """
    (rows,) = parts
    ordered = rows if len(rows) > 1 else rows.reshape(-1, 1)
    pairs = ordered.reshape(source.sizes[0], -1, 2, ordered.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _parts_of_experts(source: Source) -> list[tuple[int, ...]]:
    count, rows, *width = source.shape
    return [(count, rows // 2, *width)] * 2


def _experts(source: Source, parts: Sequence[Rows]) -> Rows:
    """The rows of each expert's gate projection, followed by those of its up projection."""
    return np.concatenate(_by_expert(source, parts), axis=1).reshape(math.prod(source.shape[:2]), -1)


def _alternating_experts(source: Source, parts: Sequence[Rows]) -> Rows:
    """The rows of each expert's gate and up projections in alternation."""
    return np.stack(_by_expert(source, parts), axis=2).reshape(math.prod(source.shape[:2]), -1)


def _by_expert(source: Source, parts: Sequence[Rows]) -> list[Rows]:
    count, rows = source.shape[:2]
    return [part.reshape(count, rows // 2, -1) for part in parts]


def _parts_of_latent(source: Source) -> list[tuple[int, ...]]:
    heads, key, value = source.sizes
    return [(heads, source.shape[1], key), (heads, value, source.shape[1])]


def _latent(source: Source, parts: Sequence[Rows]) -> Rows:
    """The projections of latent attention, by head: for keys, which is stored transposed, then for values."""
    keys, values = (part.reshape(shape) for part, shape in zip(parts, _parts_of_latent(source), strict=True))
    return np.concatenate((keys.swapaxes(1, 2), values), axis=1).reshape(source.shape)


_ARRANGEMENTS = {
    "whole": _Arrangement(_whole, lambda source, parts: parts[0]),
    "plus 1": _Arrangement(_whole, lambda source, parts: parts[0] - 1, keeps_rows=False),
    "halves": _Arrangement(_whole, _halves),
    "experts": _Arrangement(_parts_of_experts, _experts),
    "alternating experts": _Arrangement(_parts_of_experts, _alternating_experts),
    "latent": _Arrangement(_parts_of_latent, _latent, keeps_rows=False),
}


def find_sources(
    file: GGUFFile, row: Architecture, config: Any, shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]
) -> dict[str, Source]:
    """Parameter → its source in the file, for all parameters of a module.

    Args:
        config: The transformers config.
        shapes: Parameter → shape; [E, N, K] if it holds the weights of all experts.
        tied: Parameters that are tied to another one, which the file may lack.

    Raises:
        InputError: the file lacks a tensor, has one that no parameter needs, or one of an unexpected shape.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = file.metadata["general.architecture"]
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    sources = {}
    for parameter, shape in shapes.items():
        source = _source(file, row, config, parameter, shape, names.get_name)
        if missing := [name for name in source.names if name not in file.tensors]:
            if parameter in tied:
                continue
            raise InputError(f"the GGUF file's metadata asks for a tensor '{missing[0]}', which it lacks")
        for name, said in zip(source.names, _ARRANGEMENTS[source.arrangement].shapes(source), strict=True):
            if (actual := file.tensors[name].shape) != said and _squeezed(actual) != _squeezed(said):
                raise InputError(
                    f"'{name}' has the shape {list(actual)}, but the GGUF file's metadata says {list(said)}"
                )
        sources[parameter] = source
    used = {name for source in sources.values() for name in source.names}
    if unknown := [name for name in file.tensors if name not in used]:
        raise InputError(
            f"the GGUF file has a tensor {unknown[0]!r:.80}, which models of architecture {architecture} lack"
        )
    return sources


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _source(
    file: GGUFFile,
    row: Architecture,
    config: Any,
    parameter: str,
    shape: tuple[int, ...],
    name_of: Callable[[str], str | None],
) -> Source:
    """The source of a parameter, with the names that its tensors should have in the file."""
    if match := _EXPERTS.fullmatch(parameter):
        suffix = "bias" if match[2] else "weight"
        parts = tuple(f"blk.{match[1]}.ffn_{part}_exps.{suffix}" for part in ("gate", "up"))
        return Source(parts, "alternating experts" if row.is_alternating else "experts", shape)
    match = _LATENT.fullmatch(parameter)
    if match and f"blk.{match[1]}.attn_kv_b.weight" not in file.tensors:
        parts = tuple(f"blk.{match[1]}.attn_{part}_b.weight" for part in ("k", "v"))
        sizes = (config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim)
        return Source(parts, "latent", shape, sizes)
    name = _stored_name(file, parameter, name_of)
    if row.adds_one and parameter.endswith("norm.weight"):
        return Source((name,), "plus 1", shape)
    if row.is_interleaved and (match := _ROTATED.fullmatch(parameter)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        return Source((name,), "halves", shape, (heads,))
    return Source((name,), "whole", shape)


def _stored_name(file: GGUFFile, parameter: str, name_of: Callable[[str], str | None]) -> str:
    """The name of a parameter's tensor in the file, which may have an ending that the module's name lacks."""
    stem, _, ending = parameter.rpartition(".")
    if ending not in ("weight", "bias"):
        stem, ending = (
            (parameter.removesuffix("_bias"), "bias") if parameter.endswith("_bias") else (parameter, "weight")
        )
    stored = name_of(stem)
    if stored is None:
        return parameter  # which no file has
    return stored if stored in file.tensors else f"{stored}.{ending}"


def dequantized_rows(rows: NDArray[np.uint8], encoding: str) -> NDArray[np.float32]:
    """Rows of a stored tensor in float32. Raises InputError if the package `gguf` cannot dequantize them."""
    from gguf import GGMLQuantizationType, quants

    if encoding in ("F32", "F16"):
        return rows.view(np.float32 if encoding == "F32" else np.float16).astype(np.float32)
    try:
        # `gguf.dequantize` does the same for 16 rows at a time, which takes twice as long.
        values: NDArray[np.float32] = getattr(quants, encoding).dequantize_rows(rows)
        return values
    except (AttributeError, NotImplementedError):
        known = [
            kind.name for kind in GGMLQuantizationType if kind.name in ("F32", "F16") or hasattr(quants, kind.name)
        ]
        raise InputError(
            f"tensors of type {encoding} are not supported in GGUF files; supported are {', '.join(known)}"
        ) from None


def dequantized(tensor: GGUFTensor, dtype: str) -> NDArray[Any]:
    """The rows of a tensor in a named dtype, converted by several threads that take a piece at a time."""
    target = numpy_dtype(dtype)
    result = np.empty((len(tensor.rows), tensor.shape[-1]), target)

    def convert(piece: slice) -> None:
        with np.errstate(all="ignore"):  # NaN is for whoever loads the weights to report
            result[piece] = dequantized_rows(tensor.rows[piece], tensor.encoding)

    in_pieces(convert, len(result), max(1, _PIECE // tensor.shape[-1]))
    return result


class GGUFTensors(LazyTensors[NDArray[Any] | QuantizedArray]):
    """The tensors of a GGUF file by the module's parameter names; each lookup converts one.

    Matrices whose type has a `QuantizedFormat` stay quantized. The others are dequantized: to bfloat16 if that is the
    compute dtype, else to float32 (see `Widened`). A layer's experts have one matrix, [E · N, K].

    Attributes:
        formats: Name → format of each quantized matrix.
    """

    def __init__(self, tensors: Mapping[str, GGUFTensor], sources: Mapping[str, Source], dtype: str) -> None:
        super().__init__(sources)
        self._tensors = tensors
        self._sources = sources
        self._dtype = "bfloat16" if dtype == "bfloat16" else "float32"
        self.formats = {}
        for name, source in sources.items():
            encodings = {tensors[part].encoding for part in source.names}
            is_matrix = len(source.shape) > 1 and not name.endswith("bias") and len(encodings) == 1
            format = quantized_format(encodings.pop()) if is_matrix else None
            if format is not None and _ARRANGEMENTS[source.arrangement].keeps_rows:
                self.formats[name] = format
        for encoding, row in {tensor.encoding: tensor.rows[:1] for tensor in tensors.values()}.items():
            dequantized_rows(row, encoding)  # an encoding that is not supported is found now, not while loading

    def __getitem__(self, key: str) -> NDArray[Any] | QuantizedArray:
        source = self._sources[key]
        arrangement, tensors = _ARRANGEMENTS[source.arrangement], [self._tensors[name] for name in source.names]
        if key in self.formats:
            rows = arrangement.arrange(source, [tensor.rows for tensor in tensors])
            return quantized_rows(rows, tensors[0].encoding)
        dtype = self._dtype if arrangement.keeps_rows else "float32"
        value = arrangement.arrange(source, [dequantized(tensor, dtype) for tensor in tensors])
        shape = source.shape if len(source.shape) < 3 else (-1, source.shape[2])
        return value.reshape(shape).astype(numpy_dtype(self._dtype), copy=False)
