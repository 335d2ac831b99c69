"""Torch tensors as arguments and results of a compiled module: their nested structure and their shapes."""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from npu_compiler.errors import InputError
from npu_sim.module.shapes import InputShapes, Key
from npu_sim.module.structure import Tree, field_names, type_path


def children_of(spec: pytree.TreeSpec) -> Sequence[pytree.TreeSpec]:
    """Return the structures of the elements of a structure, in order."""
    children: Sequence[pytree.TreeSpec] = (
        spec.children() if hasattr(spec, "children") else spec.children_specs  # PyTorch 2.9
    )
    return children


class PytreeStructure:
    """A `Structure` backed by PyTorch's pytree, with all types that are registered there."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec
        self.is_leaf: bool = spec.is_leaf()
        self.is_flat_tuple = spec.type is tuple and all(child.is_leaf() for child in children_of(spec))
        self.size: int = spec.num_leaves

    def leaves(self, value: Any) -> list[Any] | None:
        leaves, actual = pytree.tree_flatten(value)
        return leaves if actual == self.spec else None

    def build(self, leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(list(leaves), self.spec)

    def tree(self) -> Tree:
        """Return the structure as plain data.

        Raises:
            InputError: the structure contains a dict whose keys are not plain data.
        """
        try:
            return _tree(self.spec)
        except ValueError as error:
            raise InputError(f"a file cannot hold the structure of the arguments or results: {error}") from error


def argument_structures(spec: pytree.TreeSpec) -> tuple[list[PytreeStructure], dict[str, PytreeStructure]]:
    """Split the structure of (args, kwargs) into one for each positional and for each keyword argument."""
    positional, keyword = children_of(spec)
    structures = [PytreeStructure(child) for child in children_of(positional)]
    named = zip(keyword.context or (), children_of(keyword), strict=True)
    return structures, {name: PytreeStructure(child) for name, child in named}


def _tree(spec: pytree.TreeSpec) -> Tree:
    if spec.is_leaf():
        return Tree("leaf")
    children = tuple(_tree(child) for child in children_of(spec))
    kind, context = spec.type, spec.context
    if kind in (tuple, torch.Size, list):
        return Tree("list" if kind is list else "tuple", children)
    if kind is namedtuple:
        return Tree("namedtuple", children, context._fields, type_path(context))
    if isinstance(kind, type) and issubclass(kind, tuple) and field_names(kind) is not None:
        return Tree("namedtuple", children, field_names(kind) or (), type_path(kind))
    if kind in (dict, OrderedDict, defaultdict):
        return Tree("dict", children, tuple(context[1] if kind is defaultdict else context))
    if isinstance(context, list) and len(context) == 2 and isinstance(context[0], list):
        context = context[0]  # a dataclass: the fields that are there, and those that are None
    if not isinstance(context, list) or not all(isinstance(x, str) for x in context):
        context = list(map(str, range(len(children))))  # such as a cache, which only its library takes apart
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    absent = tuple(field.name for field in fields if field.name not in context)
    return Tree("object", children, tuple(context), type_path(kind), absent)


class TensorShapes(InputShapes):
    """`InputShapes` for torch tensors.

    Args:
        device: The torch device of all tensors.
    """

    def __init__(
        self,
        inputs: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
        ranges: Mapping[str, tuple[int, int | None]],
        names: Mapping[str, str],
        device: torch.device,
        strides: Mapping[int, Sequence[Any]],
    ) -> None:
        described = [(tuple(x["shape"]), getattr(torch, x["dtype"])) for x in inputs]
        super().__init__(described, paths, ranges, names, strides)
        self._device = device

    def check(self, tensors: Sequence[torch.Tensor]) -> Key:
        """Return the symbols' values in a call, in the order of `symbols`.

        Raises:
            InputError: a tensor has another dtype or shape, is on another device, or requires a gradient.
        """
        device, wants_gradient = self._device, torch.is_grad_enabled()
        for value, dtype, static in zip(tensors, self._dtypes, self._static, strict=True):
            if (
                value.dtype != dtype
                or value.device != device
                or (static is not None and value.shape != static)
                or (wants_gradient and value.requires_grad)
            ):
                raise self._misfit(tensors)
        key = self._key(tensors) if self.symbols else ()
        if self._strides:
            self.check_strides(tensors, key)
        return key

    def _misfit(self, tensors: Sequence[torch.Tensor]) -> InputError:
        for index, value in enumerate(tensors):
            if value.dtype == self._dtypes[index] and value.device != self._device:
                return InputError(self._problem(index, f"is on {value.device}", f"tensors on {self._device}"))
        if torch.is_grad_enabled():
            for path, value in zip(self._paths, tensors, strict=True):
                if value.requires_grad:
                    return InputError(
                        f"argument '{path}' requires a gradient, but a compiled module is for inference; "
                        "call it under torch.no_grad(), or with detached tensors"
                    )
        return super()._misfit(tensors)


def flat_dimensions(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[Any]:
    """Return the entry of `dynamic_shapes`, or None, for each tensor of the arguments, in order."""
    if dynamic_shapes is None:
        return []
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    if isinstance(dynamic_shapes, Mapping):
        given = [(value, dynamic_shapes.get(name)) for name, value in bound.items()]
    else:
        given = list(zip(bound.values(), dynamic_shapes, strict=False))
    return [dims for value, spec in given for dims in _dimensions(value, spec)]


def _dimensions(value: Any, spec: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [spec]
    if isinstance(value, Mapping):
        return [x for key, item in value.items() for x in _dimensions(item, spec[key] if spec else None)]
    if isinstance(value, (list, tuple)):
        return [x for index, item in enumerate(value) for x in _dimensions(item, spec[index] if spec else None)]
    return []
