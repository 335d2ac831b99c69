"""Rounding of dynamic sizes up to a few values, so that few programs serve many sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from npu_compiler.errors import InputError
from npu_compiler.graph.symbolic import KEY, evaluate, is_symbolic, symbols
from npu_sim.module.shapes import Key
from npu_sim.module.tensors import TensorShapes
from npu_sim.module.trace import Trace


@dataclass(frozen=True)
class Buckets:
    """The sizes to which a dimension is rounded up.

    Inputs are padded with zeros and results cut to the original size. That is correct only for a module that ignores
    the positions where its mask is 0.

    Attributes:
        sizes: The sizes, in any order.
        mask: Name of the argument that is 1 at positions to use; padding extends it by zeros.
    """

    sizes: Sequence[int]
    mask: str


class Bucketing:
    """Pads the inputs of a module to the sizes of its buckets, and cuts the results back.

    Args:
        buckets: Name of a dynamic size → its buckets.
        traced: The module's traced graph.
        shapes: The shapes of the graph's inputs, with symbols for dynamic sizes.
        paths: The name of each input as the caller sees it.

    Raises:
        InputError: there is no such size or mask, a bucket is out of the size's range, or results cannot be cut back.
    """

    def __init__(
        self, buckets: Mapping[str, Buckets], traced: Trace, shapes: TensorShapes, paths: Sequence[str]
    ) -> None:
        symbols = {name: symbol for symbol, name in shapes.names.items()}
        described = traced.ir["graph_inputs"][: len(paths)]
        for name, bucket in buckets.items():
            if name not in symbols:
                listed = ", ".join(f"'{x}'" for x in symbols) or "none"
                raise InputError(f"buckets for '{name}', which is no dynamic size; there are: {listed}")
            self._check(name, bucket, traced.ranges[symbols[name]])
            masks = [meta for meta, path in zip(described, paths, strict=True) if path == bucket.mask]
            if not any(symbols[name] in _symbols(meta["shape"]) for meta in masks):
                raise InputError(
                    f"buckets for '{name}' need a mask of that size, and '{bucket.mask}' is no such argument"
                )
        if traced.written or traced.views:
            raise InputError("a module that changes its inputs, or returns views of them, cannot have buckets")
        self._names = [shapes.names[symbol] for symbol in shapes.symbols]
        self._sizes = [sorted(buckets[name].sizes) if name in buckets else None for name in self._names]
        self._symbols = shapes.symbols
        self._inputs = [meta["shape"] for meta in described]
        self._outputs = [meta["shape"] for meta in traced.ir["graph_outputs"]]

    @staticmethod
    def _check(name: str, bucket: Buckets, limits: tuple[int, int | None]) -> None:
        low, high = limits
        wrong = [size for size in bucket.sizes if size < low or (high is not None and size > high)]
        if wrong or not bucket.sizes:
            allowed = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(f"buckets for '{name}' are {list(bucket.sizes)}, but its sizes are {allowed}")

    def rounded(self, key: Key) -> Key:
        """Return the sizes to which a call's dynamic sizes are rounded up; they identify the program that serves it.

        Raises:
            InputError: a size is above the largest bucket.
        """
        return tuple([self._round(*item) for item in zip(self._names, key, self._sizes, strict=True)])

    @staticmethod
    def _round(name: str, size: int, buckets: list[int] | None) -> int:
        if buckets is None:
            return size
        bucket_size = next((bucket for bucket in buckets if bucket >= size), None)
        if bucket_size is None:
            raise InputError(f"size '{name}' is {size}, but its largest bucket is {buckets[-1]}")
        return bucket_size

    def padded(self, tensors: Sequence[torch.Tensor], key: Key) -> list[torch.Tensor]:
        """Return the inputs, padded with zeros at the end of each dimension up to the sizes of `key`."""
        sizes = dict(zip(self._symbols, key, strict=True))
        padded_values = []
        for value, shape in zip(tensors, self._inputs, strict=True):
            missing = [wanted - size for wanted, size in zip(_sizes_of(shape, sizes), value.shape, strict=True)]
            around = [x for size in reversed(missing) for x in (0, size)]
            padded_values.append(F.pad(value, around) if any(missing) else value)
        return padded_values

    def cut(self, outputs: Sequence[torch.Tensor], key: Key) -> list[torch.Tensor]:
        """Return the outputs cut to the sizes of `key`, which are those before padding."""
        sizes = dict(zip(self._symbols, key, strict=True))
        return [
            value[tuple(slice(size) for size in _sizes_of(shape, sizes))].contiguous()
            for value, shape in zip(outputs, self._outputs, strict=True)
        ]


def _sizes_of(shape: Sequence[Any], sizes: Mapping[str, int]) -> list[int]:
    return [evaluate(size[KEY], sizes) if is_symbolic(size) else size for size in shape]


def _symbols(shape: Sequence[Any]) -> set[str]:
    return {symbol for size in shape if is_symbolic(size) for symbol in symbols(size[KEY])}
