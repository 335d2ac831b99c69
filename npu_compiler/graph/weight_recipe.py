"""Weight recipes: expressions over `state_dict` tensors that compute a program's weights from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import INT32_MAX
from npu_compiler.graph.quantization import PARTS, QuantizedArray, QuantizedFormat, quantize

Shape = tuple[int, ...]
Piece = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, end) along each of its first dimensions; the remaining dimensions are whole."""
UNCALIBRATED = "uncalibrated: timing only"
"""A mark in the keys of quantized weights without values, which only serve to estimate times."""
_STORED_FIELDS = ("codes", "group", "scales", "offsets")  # of a format


@dataclass(frozen=True)
class WeightTransformRecipe:
    """One operation of a weight expression.

    Attributes:
        op: `key` reads `state_dict[params["key"]]`; `quantized` reads one part of such a tensor, quantized to a format
            that `params` give; `shard`, `on_first_rank` and `rank_start` depend on the rank that loads the weight; the
            others (see `apply_recipe`) combine `args`.
    """

    op: str
    args: tuple[WeightTransformRecipe, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in ("key", "quantized", *_SHAPES):
            raise ValueError(f"unknown weight transform '{self.op}'")
        if self.op in ("key", "quantized") and not isinstance(self.params.get("key"), str):
            raise ValueError(f"a weight recipe of op '{self.op}' does not name its key")
        if self.op == "quantized" and (self.args or self.params.get("part") not in PARTS):
            raise ValueError("a weight recipe of op 'quantized' does not name a part")

    def keys(self) -> Iterator[str]:
        """Every `state_dict` key that the expression reads."""
        if self.op in ("key", "quantized"):
            yield self.params["key"]
        for arg in self.args:
            yield from arg.keys()

    def leaves(self) -> Iterator[WeightTransformRecipe]:
        """The operations of the expression that have no arguments, such as reads of tensors."""
        if not self.args:
            yield self
        for arg in self.args:
            yield from arg.leaves()

    @property
    def format(self) -> QuantizedFormat:
        """The format of op `quantized`. Raises InputError if the parameters do not describe one."""
        fields = self.params.get("format")
        if not isinstance(fields, Mapping) or fields.keys() != set(_STORED_FIELDS):
            raise InputError(f"{fields!r:.80} is not a quantized format")
        return QuantizedFormat(**fields)

    def __str__(self) -> str:
        if self.op == "key":
            return str(self.params["key"])
        if self.op == "quantized":
            return f"{self.params['key']}.{self.params['part']} ({self.format})"
        inside = [str(arg) for arg in self.args] + [f"{name}={value}" for name, value in self.params.items()]
        return f"{self.op}({', '.join(inside)})"


def from_key(key: str) -> WeightTransformRecipe:
    """The recipe that reads a tensor of the checkpoint unchanged."""
    return WeightTransformRecipe("key", params={"key": key})


def shard_recipe(weight: WeightTransformRecipe, axis: int, parts: int, ranks: int) -> WeightTransformRecipe:
    """A rank's part of a weight that is divided along an axis into `parts`, on `ranks` ranks (see `mesh.Split`).

    The last part is padded with zeros if the axis does not divide evenly. Only the part is read from the checkpoint.
    """
    return WeightTransformRecipe("shard", (weight,), {"axis": axis, "parts": parts, "ranks": ranks})


def on_first_rank(weight: WeightTransformRecipe) -> WeightTransformRecipe:
    """The weight on rank 0 and zeros on all other ranks: a summand that must count once in a sum over ranks."""
    return WeightTransformRecipe("on_first_rank", (weight,))


def rank_start(size: int) -> WeightTransformRecipe:
    """An integer [1]: the first row of a rank's part of a table, if each part has `size` rows."""
    return WeightTransformRecipe("rank_start", (), {"size": size})


def part_recipe(weight: WeightTransformRecipe, format: QuantizedFormat, part: str) -> WeightTransformRecipe | None:
    """The recipe of one part (codes, scales or offsets) of a quantized weight.

    None unless the weight is a tensor of the checkpoint, a rank's part of one, or several of them joined by rows.
    """
    if weight.op == "key":
        fields = {name: getattr(format, name) for name in _STORED_FIELDS}
        return WeightTransformRecipe("quantized", params={**weight.params, "part": part, "format": fields})
    if weight.op == "shard" and (inner := part_recipe(weight.args[0], format, part)) is not None:
        is_whole_row = weight.params["axis"] == 1 and part != "codes" and not format.group
        return inner if is_whole_row else WeightTransformRecipe("shard", (inner,), weight.params)
    parts = [part_recipe(arg, format, part) for arg in weight.args]
    if weight.op != "concat" or weight.params["axis"] != 0 or None in parts:
        return None
    return WeightTransformRecipe("concat", tuple(x for x in parts if x is not None), weight.params)


def apply_recipe(
    recipe: WeightTransformRecipe,
    state: Mapping[str, np.ndarray] | Mapping[str, np.ndarray | QuantizedArray],
    rank: int = 0,
) -> np.ndarray:
    """Evaluate a recipe over a checkpoint; transforms compute in float32.

    A quantized tensor that is read whole is dequantized; a float tensor of which a part is read is quantized first.

    Args:
        rank: The rank that loads the weight, in a program for several.

    Raises:
        InputError: a tensor is quantized to another format than the recipe wants; nothing is requantized.
    """
    if recipe.op in ("key", "quantized"):
        value = state[recipe.params["key"]]
        if recipe.op == "key":
            return value.dequantize() if isinstance(value, QuantizedArray) else value
        format = recipe.format
        if not isinstance(value, QuantizedArray):
            value = quantize(value, format)
        if value.format != format:
            raise InputError(f"'{recipe.params['key']}' is stored as {value.format}; the program expects {format}")
        return value.part(recipe.params["part"])
    if recipe.op == "rank_start":
        return np.array([rank * recipe.params["size"]], np.int64)
    args = [apply_recipe(arg, state, rank) for arg in recipe.args]
    if recipe.op == "shard":
        return _part_of(args[0], rank, **recipe.params)
    if recipe.op == "on_first_rank":
        return args[0] if rank == 0 else np.zeros_like(args[0])
    return _TRANSFORMS[recipe.op](*args, **recipe.params)


def recipe_shape(recipe: WeightTransformRecipe, source_shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a recipe's result.

    Raises:
        ValueError: the recipe cannot be applied to tensors with these shapes, or its parameters do not suit its op.
    """
    if recipe.op == "key":
        return tuple(source_shapes[recipe.params["key"]])
    if recipe.op == "quantized":
        return _part_shape(recipe, tuple(source_shapes[recipe.params["key"]]))
    args = [recipe_shape(arg, source_shapes) for arg in recipe.args]
    try:
        shape = _SHAPES[recipe.op](*args, **recipe.params)
    except TypeError:
        shape = None  # other arguments than the op's, or of other types
    if shape is None:
        raise ValueError(f"{recipe.op} of {[list(arg) for arg in args]} with {dict(recipe.params)!r:.80}")
    return shape


def _part_shape(recipe: WeightTransformRecipe, source: Shape) -> Shape:
    try:
        format = recipe.format
    except InputError as error:
        raise ValueError(str(error)) from error
    if problem := format.problem(source):
        raise ValueError(f"{format}: {problem}")
    part = format.parts((source[0], source[1])).get(recipe.params["part"])
    if part is None:
        raise ValueError(f"{format} has no {recipe.params['part']}")
    return part[0]


def pieces_read(
    recipe: WeightTransformRecipe, source_shapes: Mapping[str, Shape], rank: int
) -> Iterator[tuple[str, Piece]]:
    """The keys that a rank reads for a recipe, each with the part of the tensor that it reads."""
    if recipe.op == "shard" and not recipe.args[0].args and "key" in recipe.args[0].params:
        key, axis = recipe.args[0].params["key"], recipe.params["axis"]
        whole = tuple((0, size) for size in source_shapes[key])
        own = _own(source_shapes[key][axis], rank, recipe.params["parts"], recipe.params["ranks"])
        yield key, (*whole[:axis], own)
    elif "key" in recipe.params:
        yield recipe.params["key"], ()
    for arg in recipe.args if recipe.op != "shard" or recipe.args[0].args else ():
        yield from pieces_read(arg, source_shapes, rank)


def _own(size: int, rank: int, parts: int, ranks: int) -> tuple[int, int]:
    """The first index, and the index after the last, of a rank's part of an axis of `size`.

    The last part may be smaller than the others.
    """
    step, index = -(-size // parts), rank * parts // ranks
    return min(index * step, size), min((index + 1) * step, size)


def _part_of(whole: np.ndarray, rank: int, axis: int, parts: int, ranks: int) -> np.ndarray:
    size = whole.shape[axis]
    part = np.ascontiguousarray(whole[(*[slice(None)] * axis, slice(*_own(size, rank, parts, ranks)))])
    missing = -(-size // parts) - part.shape[axis]
    if not missing:
        return part
    return np.concatenate([part, np.zeros((*part.shape[:axis], missing, *part.shape[axis + 1 :]), part.dtype)], axis)


def _sharded_shape(whole: Shape, axis: int, parts: int, ranks: int) -> Shape | None:
    counts = all(type(count) is int for count in (axis, parts, ranks))
    if not counts or not 0 <= axis < len(whole) or not 1 <= parts <= ranks or ranks % parts:
        return None
    return (*whole[:axis], -(-whole[axis] // parts), *whole[axis + 1 :])


def _f32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, dtype=np.float32)


def _inverse_std(var: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(1.0 / np.sqrt(var.astype(np.float64) + eps))


def _bn_scale(gamma: np.ndarray, var: np.ndarray, eps: float) -> np.ndarray:
    """gamma / sqrt(var + eps): the factor that batch normalization applies to each channel."""
    return _f32(gamma.astype(np.float64) * _inverse_std(var, eps))


def _bn_shift(gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray, eps: float) -> np.ndarray:
    """beta - mean * gamma / sqrt(var + eps): what batch normalization adds to each channel."""
    return _f32(beta.astype(np.float64) - mean.astype(np.float64) * gamma.astype(np.float64) * _inverse_std(var, eps))


def _scale_axis(weight: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
    """The weight with each slice along an axis multiplied by its own factor."""
    shape = [1] * weight.ndim
    shape[axis] = -1
    return np.asarray(_f32(weight) * _f32(scale).reshape(shape))


def _multiply_add(bias: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return np.asarray(_f32(bias) * scale + shift)


def _concat(*parts: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(parts, axis=axis)


def _fill(shape: list[int], value: float) -> np.ndarray:
    return np.full(shape, value, dtype=np.float32)


def _identity_kernel(shape: list[int]) -> np.ndarray:
    """The weight [outputs, inputs of a group, 1, …] of a convolution that returns its input."""
    kernel = np.zeros(shape, np.float32)
    outputs = np.arange(shape[0])
    kernel[outputs, outputs % shape[1]] = 1.0
    return kernel


def _pad(weight: np.ndarray, pads: list[list[int]]) -> np.ndarray:
    """The weight of a convolution with zeros before and after its windows."""
    return np.pad(_f32(weight), [(0, 0), (0, 0), *map(tuple, pads)])


def _sum(*summands: np.ndarray) -> np.ndarray:
    """The sum of equally large tensors, rounded once."""
    return _f32(np.sum([summand.astype(np.float64) for summand in summands], axis=0))


def _vectors(*shapes: Shape, eps: float) -> Shape | None:
    alike = len(set(shapes)) == 1 and len(shapes[0]) == 1
    return shapes[0] if alike and isinstance(eps, (int, float)) else None


def _scaled_shape(weight: Shape, scale: Shape, axis: int) -> Shape | None:
    return weight if type(axis) is int and 0 <= axis < len(weight) and scale == (weight[axis],) else None


def _joined_shape(first: Shape, *others: Shape, axis: int) -> Shape | None:
    if type(axis) is not int or not 0 <= axis < len(first):
        return None
    if any((*part[:axis], *part[axis + 1 :]) != (*first[:axis], *first[axis + 1 :]) for part in others):
        return None
    if any(len(part) != len(first) for part in others):
        return None
    return (*first[:axis], sum(part[axis] for part in (first, *others)), *first[axis + 1 :])


def _filled_shape(shape: list[int], value: float) -> Shape | None:
    valid = isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)
    return tuple(shape) if valid and isinstance(value, (int, float)) else None


def _kernel_shape(shape: list[int]) -> Shape | None:
    filled = _filled_shape(shape, 0.0)
    return filled if filled is not None and len(filled) > 2 and 0 not in filled[:2] else None


def _padded_shape(weight: Shape, pads: list[list[int]]) -> Shape | None:
    if not isinstance(pads, (list, tuple)) or len(pads) != len(weight) - 2:
        return None
    if any(_filled_shape(pair, 0.0) is None or len(pair) != 2 for pair in pads):
        return None
    return (*weight[:2], *(before + size + after for size, (before, after) in zip(weight[2:], pads, strict=True)))


_SHAPES: dict[str, Callable[..., Shape | None]] = {
    "bn_scale": lambda gamma, var, eps: _vectors(gamma, var, eps=eps),
    "bn_shift": lambda gamma, beta, mean, var, eps: _vectors(gamma, beta, mean, var, eps=eps),
    "scale_axis": _scaled_shape,
    "multiply_add": lambda bias, scale, shift: _vectors(bias, scale, shift, eps=0.0),
    "concat": _joined_shape,
    "fill": _filled_shape,
    "flatten": lambda whole: (math.prod(whole),),
    "identity_kernel": _kernel_shape,
    "pad": _padded_shape,
    "sum": lambda first, *others: first if all(other == first for other in others) else None,
    "shard": _sharded_shape,
    "on_first_rank": lambda whole: whole,
    "rank_start": lambda size: (1,) if type(size) is int and 0 <= size <= INT32_MAX else None,
}
_TRANSFORMS: dict[str, Callable[..., np.ndarray]] = {
    "bn_scale": _bn_scale,
    "bn_shift": _bn_shift,
    "scale_axis": _scale_axis,
    "multiply_add": _multiply_add,
    "concat": _concat,
    "fill": _fill,
    "flatten": np.ravel,
    "identity_kernel": _identity_kernel,
    "pad": _pad,
    "sum": _sum,
}
