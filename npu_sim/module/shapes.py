"""Checks of the shapes of a traced module's inputs, which also yield the values of symbolic sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from npu_compiler.errors import InputError, IRError
from npu_compiler.graph.symbolic import KEY, Sizes, evaluate, is_symbolic, specialize
from npu_compiler.program.views import contiguous_strides

Key = tuple[int, ...]


class InputShapes:
    """Checks the shapes and dtypes of a call's inputs, and reads the values of symbols from them.

    Args:
        inputs: Shape and dtype of each input: sizes may be symbolic, and the dtype is any object that compares equal to
            the dtype of an accepted tensor or array.
        paths: The name of each input as the caller sees it.
        ranges: Symbol → smallest and largest value (None: no limit).
        names: Symbol → its name in messages, for symbols that have one.
        strides: Index of an input → the strides that it must have; inputs without an entry may have any.

    Raises:
        IRError: a symbol is never the whole size of a dimension, so its value cannot be read.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[tuple[Any, ...], Any]],
        paths: Sequence[str],
        ranges: Mapping[str, tuple[int, int | None]],
        names: Mapping[str, str],
        strides: Mapping[int, Sequence[Any]] = MappingProxyType({}),
    ) -> None:
        self._strides = strides
        self._paths, self._ranges = tuple(paths), dict(ranges)
        self.names = {symbol: names.get(symbol, symbol) for symbol in ranges}
        self._dtypes = [dtype for _, dtype in inputs]
        self._shapes = [shape for shape, _ in inputs]
        self._static = [shape if all(isinstance(size, int) for size in shape) else None for shape in self._shapes]
        self.symbols: tuple[str, ...] = tuple(ranges)
        bare = {size[KEY] for shape in self._shapes for size in shape if is_symbolic(size)}
        for symbol in ranges:
            if symbol not in bare:
                raise IRError(
                    f"the size '{self.names[symbol]}' is no input's dimension by itself, only a part of others"
                )

    def check(self, tensors: Sequence[Any]) -> Key:
        """Return the symbols' values in a call, in the order of `symbols`.

        Raises:
            InputError: a tensor or array has another dtype or shape than the module was compiled for.
        """
        for value, dtype, static in zip(tensors, self._dtypes, self._static, strict=True):
            if value.dtype != dtype or (static is not None and value.shape != static):
                raise self._misfit(tensors)
        return self._key(tensors) if self.symbols else ()

    def strides(self, key: Key) -> dict[int, list[int]]:
        """Return the strides in elements that inputs must have in a call, by index; other inputs may have any.

        Args:
            key: The symbols' values, from `check`.
        """
        sizes = dict(zip(self.symbols, key, strict=True))
        return {index: specialize(strides, sizes) for index, strides in self._strides.items()}

    def check_strides(self, tensors: Sequence[Any], key: Key) -> None:
        """Check the strides of those inputs for which strides decide what a call changes in place.

        Raises:
            InputError: an input has other strides.
        """
        for index, wanted in self.strides(key).items():
            if not same_layout(tensors[index], wanted):
                strides = f"has strides {list(strides_of(tensors[index]))}"
                raise InputError(
                    f"{self._problem(index, strides, str(wanted))}, which decide what it changes in place; give such a "
                    "tensor, or compile it again with this one as its example"
                )

    def _misfit(self, tensors: Sequence[Any]) -> InputError:
        """Return the error for the first input that does not fit."""
        for index, value in enumerate(tensors):
            dtype, static = self._dtypes[index], self._static[index]
            if value.dtype != dtype:
                return InputError(self._problem(index, f"has dtype {_plain(value.dtype)}", _plain(dtype)))
            if static is not None and value.shape != static:
                return InputError(self._problem(index, f"has shape {list(value.shape)}", f"{list(static)}"))
        raise AssertionError("all inputs fit")

    def _key(self, tensors: Sequence[Any]) -> Key:
        sizes: dict[str, int] = {}
        for index, value in enumerate(tensors):
            if self._static[index] is None:
                self._bind(index, value.shape, sizes)
        self._check_ranges(tensors, sizes)
        return tuple([sizes[symbol] for symbol in self.symbols])

    def _bind(self, index: int, shape: Sequence[int], sizes: dict[str, int]) -> None:
        expected = self._shapes[index]
        if len(shape) != len(expected):
            raise InputError(self._problem(index, f"has shape {list(shape)}", f"rank {len(expected)}"))
        for size, wanted in zip(shape, expected, strict=True):
            if is_symbolic(wanted) and wanted[KEY] in self._ranges:
                sizes.setdefault(wanted[KEY], int(size))

    def _check_ranges(self, tensors: Sequence[Any], sizes: Sizes) -> None:
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

    def _problem(self, index: int, actual: str, wanted: str) -> str:
        return f"argument '{self._paths[index]}' {actual}, but the module was compiled for {wanted}"


def strides_of(value: Any) -> Sequence[float]:
    """Return the strides in elements of a torch tensor or NumPy array; for other objects, those of dense memory."""
    if isinstance(value, np.ndarray):
        size = max(value.itemsize, 1)
        return [step / size if step % size else step // size for step in value.strides]
    stride = getattr(value, "stride", None)
    return stride() if callable(stride) else contiguous_strides(value.shape)


def same_layout(value: Any, strides: Sequence[int]) -> bool:
    """Whether a tensor or array has these strides; strides of dimensions of size 0 or 1 do not matter."""
    pairs = zip(value.shape, strides_of(value), strides, strict=True)
    return 0 in value.shape or all(size == 1 or own == wanted for size, own, wanted in pairs)


def dimension_names(inputs: Sequence[Mapping[str, Any]], dynamic_shapes: Sequence[Any]) -> dict[str, str]:
    """Return symbol → the name of the `torch.export.Dim` that the user gave for it.

    Args:
        inputs: The IR's description of each input.
        dynamic_shapes: Each input's dimensions as for `torch.export`: a mapping or sequence, or None for static ones.
    """
    names: dict[str, str] = {}
    for meta, dims in zip(inputs, dynamic_shapes, strict=False):
        pairs = dims.items() if isinstance(dims, Mapping) else enumerate(dims or ())
        for axis, dim in pairs:
            size, name = meta["shape"][axis], getattr(dim, "__name__", None)
            if is_symbolic(size) and name is not None and size[KEY].isidentifier():
                names[size[KEY]] = str(name)
    return names


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
