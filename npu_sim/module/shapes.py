"""The sizes of a traced module's inputs: what a call's tensors have to look like, and what its symbols then are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from npu_compiler.errors import InputError
from npu_compiler.graph.symbolic import KEY, Sizes, evaluate, is_symbolic

Key = tuple[int, ...]


class InputShapes:
    """Checks a call's tensors, and finds the values of symbols in their shapes.

    Args:
        inputs: The graph's inputs, as the IR describes them.
        paths: What the caller calls each of them.
        ranges: Symbol → smallest and largest value.
        names: Symbol → its name in messages, where it has one.
        device: On which all tensors have to be.
    """

    def __init__(
        self,
        inputs: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
        ranges: Mapping[str, tuple[int, int | None]],
        names: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._paths, self._ranges, self._device = tuple(paths), dict(ranges), device
        self.names = {symbol: names.get(symbol, symbol) for symbol in ranges}
        self._dtypes = [getattr(torch, meta["dtype"]) for meta in inputs]
        self._shapes = [tuple(meta["shape"]) for meta in inputs]
        self._static = [
            torch.Size(shape) if all(isinstance(size, int) for size in shape) else None for shape in self._shapes
        ]
        self.symbols: tuple[str, ...] = tuple(ranges)

    def check(self, tensors: Sequence[torch.Tensor]) -> Key:
        """The symbols' values in a call, in the order of `symbols`.

        Raises:
            InputError: a tensor has another dtype or shape, is on another device, or asks for a gradient.
        """
        device, wants_gradient = self._device, torch.is_grad_enabled()
        sizes: dict[str, int] = {}
        for index, value in enumerate(tensors):
            static = self._static[index]
            if value.dtype != self._dtypes[index]:
                raise InputError(self._problem(index, f"has dtype {_plain(value.dtype)}", _plain(self._dtypes[index])))
            if value.device != device:
                raise InputError(self._problem(index, f"is on {value.device}", f"tensors on {device}"))
            if static is None:
                self._bind(index, value.shape, sizes)
            elif value.shape != static:
                raise InputError(self._problem(index, f"has shape {list(value.shape)}", f"{list(static)}"))
            if wants_gradient and value.requires_grad:
                raise InputError(
                    f"argument '{self._paths[index]}' requires a gradient, but a compiled module is for inference; "
                    "call it under torch.no_grad(), or with detached tensors"
                )
        if self.symbols:
            self._check_ranges(tensors, sizes)
        return tuple(sizes[symbol] for symbol in self.symbols)

    def _bind(self, index: int, shape: Sequence[int], sizes: dict[str, int]) -> None:
        expected = self._shapes[index]
        if len(shape) != len(expected):
            raise InputError(self._problem(index, f"has shape {list(shape)}", f"rank {len(expected)}"))
        for size, wanted in zip(shape, expected, strict=True):
            if is_symbolic(wanted) and wanted[KEY] in self._ranges:
                sizes.setdefault(wanted[KEY], int(size))

    def _check_ranges(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> None:
        for index, value in enumerate(tensors):
            if self._static[index] is not None:
                continue
            wanted = [evaluate(x[KEY], sizes) if is_symbolic(x) else x for x in self._shapes[index]]
            if list(value.shape) != wanted:
                raise InputError(self._problem(index, f"has shape {list(value.shape)}", f"{wanted} beside the others"))
        for symbol, size in sizes.items():
            low, high = self._ranges[symbol]
            if size < low or (high is not None and size > high):
                allowed = f"{low} or more" if high is None else f"{low} to {high}"
                raise InputError(f"size '{self.names[symbol]}' is {size}, but the module was compiled for {allowed}")

    def _problem(self, index: int, found: str, wanted: str) -> str:
        return f"argument '{self._paths[index]}' {found}, but the module was compiled for {wanted}"


def dimension_names(inputs: Sequence[Mapping[str, Any]], dynamic_shapes: Sequence[Any]) -> dict[str, str]:
    """Symbol → the name of the `torch.export.Dim` that it stands for.

    Args:
        dynamic_shapes: For each input, as `torch.export` spells it: a mapping or sequence of dimensions, or None.
    """
    names: dict[str, str] = {}
    for meta, dims in zip(inputs, dynamic_shapes, strict=False):
        pairs = dims.items() if isinstance(dims, Mapping) else enumerate(dims or ())
        for axis, dim in pairs:
            size, name = meta["shape"][axis], getattr(dim, "__name__", None)
            if is_symbolic(size) and name is not None and size[KEY].isidentifier():
                names[size[KEY]] = str(name)
    return names


def flat_dimensions(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[Any]:
    """For each tensor of the arguments, in order, what `dynamic_shapes` says of its dimensions, or None."""
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


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
