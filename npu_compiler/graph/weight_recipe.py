"""How a program's weight is made from the checkpoint: a small expression over `state_dict` tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class WeightTransformRecipe:
    """One operation of a weight expression.

    Attributes:
        op: `key` reads `state_dict[params["key"]]`; the others (see `apply_recipe`) combine `args`.
    """

    op: str
    args: tuple[WeightTransformRecipe, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in ("key", *_TRANSFORMS):
            raise ValueError(f"unknown weight transform '{self.op}'")
        if self.op == "key" and not isinstance(self.params.get("key"), str):
            raise ValueError("a weight recipe of op 'key' does not name its key")

    def keys(self) -> Iterator[str]:
        """Every `state_dict` key that the expression reads."""
        if self.op == "key":
            yield self.params["key"]
        for arg in self.args:
            yield from arg.keys()

    def __str__(self) -> str:
        if self.op == "key":
            return str(self.params["key"])
        inside = [str(arg) for arg in self.args] + [f"{name}={value}" for name, value in self.params.items()]
        return f"{self.op}({', '.join(inside)})"


def from_key(key: str) -> WeightTransformRecipe:
    """The checkpoint's tensor as it is."""
    return WeightTransformRecipe("key", params={"key": key})


def apply_recipe(recipe: WeightTransformRecipe, state: Mapping[str, np.ndarray]) -> np.ndarray:
    """Evaluate a recipe over a checkpoint; transforms compute in float32."""
    if recipe.op == "key":
        return state[recipe.params["key"]]
    args = [apply_recipe(arg, state) for arg in recipe.args]
    return _TRANSFORMS[recipe.op](*args, **recipe.params)


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


_TRANSFORMS: dict[str, Callable[..., np.ndarray]] = {
    "bn_scale": _bn_scale,
    "bn_shift": _bn_shift,
    "scale_axis": _scale_axis,
    "multiply_add": _multiply_add,
    "concat": _concat,
    "fill": _fill,
}
