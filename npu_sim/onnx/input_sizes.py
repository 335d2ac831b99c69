"""Shapes of a model's inputs; the user gives sizes that the file leaves open, by dimension or by input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from npu_compiler.errors import InputError, IRError
from npu_sim.onnx.rows import shown

Sizes = Mapping[str, int | Sequence[int]]


def input_shape(name: str, shape: ir.Shape | None, sizes: Sizes) -> list[int]:
    """Return the static shape of an input.

    Raises:
        IRError: a size is not known, or a given shape contradicts the model's.
    """
    given = sizes.get(name)
    if given is not None and not isinstance(given, int):
        known = given if shape is None else [x if isinstance(x, int) else None for x in shape]
        same_rank = len(known) == len(given)
        if not same_rank or any(x is not None and x != size for x, size in zip(known, given, strict=True)):
            raise IRError(f"graph input '{shown(name)}' has shape {_written(shape)}, not {list(given)}")
        return list(given)
    if shape is None:
        raise IRError(f"graph input '{shown(name)}' has no shape; give it, as in --shape {name}=1x3x224x224")
    result = [x if isinstance(x, int) else sizes.get(_name(x)) for x in shape]
    static = [size for size in result if isinstance(size, int)]
    if len(static) < len(result):
        unknown = [_name(x) for x, size in zip(shape, result, strict=True) if not isinstance(size, int)]
        advice = f"{name}=1x3x224x224" if "?" in unknown else f"{unknown[0]}=4"
        raise IRError(
            f"graph input '{shown(name)}' has shape {_written(shape)}, whose sizes are not all known; programs have "
            f"static shapes: give them, as in --shape {advice}"
        )
    return static


def check_sizes(model: ir.Model, sizes: Sizes) -> None:
    """Raise `IRError` if a size is given for a dimension or an input that the model does not have."""
    inputs = [x for x in model.graph.inputs if isinstance(x.type, ir.TensorType)]
    names = {str(x.name) for x in inputs} | {_name(dim) for x in inputs for dim in x.shape or ()}
    if unknown := [name for name in sizes if name not in names]:
        listed = ", ".join(sorted(name for name in names if name != "?" and not name.isdigit()))
        raise IRError(f"the model has no dimension or input '{unknown[0]}'; it has {listed}")


def sizes_of(model: ir.Model, examples: Sequence[torch.Tensor]) -> dict[str, list[int]]:
    """Return input name → shape of its example. Raises `InputError` if the examples do not match the model's inputs."""
    names = [str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers]
    if len(names) != len(examples) or not all(isinstance(x, torch.Tensor) for x in examples):
        raise InputError(f"the model takes {len(names)} tensors ({', '.join(names)}), not {len(examples)} as given")
    return {name: list(x.shape) for name, x in zip(names, examples, strict=True)}


def _name(dim: Any) -> str:
    """Return a dimension as text: its number, its name, or "?" if it has none."""
    if isinstance(dim, ir.SymbolicDim):
        return "?" if dim.value is None else str(dim.value)
    return str(dim)


def _written(shape: ir.Shape | None) -> str:
    return "no rank" if shape is None else "[" + ", ".join(map(_name, shape)) + "]"
