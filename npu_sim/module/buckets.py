"""Rounding sizes up to a few, so that few programs serve many sizes."""

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

    Inputs are padded with zeros and results cut back. That is right only for a module that ignores the positions where
    its mask is 0.

    Attributes:
        sizes: The sizes, in any order.
        mask: The argument that holds 1 for what counts; padding adds zeros to it.
    """

    sizes: Sequence[int]
    mask: str


class Bucketing:
    """A module's buckets.

    Args:
        buckets: Name of a dynamic size → its buckets.
        paths: The caller's name of each input.

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
        """The sizes of the program that serves a call.

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
        """The inputs, with zeros up to the sizes of `key`."""
        sizes = dict(zip(self._symbols, key, strict=True))
        padded_values = []
        for value, shape in zip(tensors, self._inputs, strict=True):
            missing = [wanted - size for wanted, size in zip(_sizes_of(shape, sizes), value.shape, strict=True)]
            around = [x for size in reversed(missing) for x in (0, size)]
            padded_values.append(F.pad(value, around) if any(missing) else value)
        return padded_values

    def cut(self, outputs: Sequence[torch.Tensor], key: Key) -> list[torch.Tensor]:
        """The outputs, without what comes of the padding."""
        sizes = dict(zip(self._symbols, key, strict=True))
        return [
            value[tuple(slice(size) for size in _sizes_of(shape, sizes))].contiguous()
            for value, shape in zip(outputs, self._outputs, strict=True)
        ]


def _sizes_of(shape: Sequence[Any], sizes: Mapping[str, int]) -> list[int]:
    return [evaluate(size[KEY], sizes) if is_symbolic(size) else size for size in shape]


def _symbols(shape: Sequence[Any]) -> set[str]:
    return {symbol for size in shape if is_symbolic(size) for symbol in symbols(size[KEY])}
