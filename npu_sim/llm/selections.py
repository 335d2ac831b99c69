"""Selections of rows by computed numbers, in traced modules, as products of all rows and masks.

    Given:   places = torch.where(mask);  y.index_add_(0, places, f(x[places]))
    Result:  every = torch.arange(len(mask));  y.index_add_(0, every, torch.where(mask, f(x[every]), 0))

The number of rows that a mask selects is known only when a program runs, so no program can have such a size. Where the
results go by the same selection, all rows may be computed instead, and those that are not selected left out at the end.
Modules choose experts or adapters so; their loop over those that have rows becomes one over all. `expert_linear` reads
less memory, and is used where transformers' own interface allows (see `experts`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from npu_compiler.errors import InputError

_LONGEST = 64  # turns of a loop over experts, each with its own products in the graph


class Selections(TorchFunctionMode):
    """A context in which selecting rows by a mask gives all rows; results of the others are replaced by 0 at their use.

    Attributes:
        counted: Counts of rows that `long()` has made of floating-point numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[Tensor] = []
        self._chosen: list[tuple[Tensor, Tensor]] = []  # indices of all rows, and which of them are selected
        self._patches = [patch.object(kind, "tolist", _sizes) for kind in (FakeTensor, FunctionalTensor)]

    def __enter__(self) -> "Selections":
        """Enter the context, and replace a method that tensors of an export have of their own, which no mode sees."""
        for replacement in self._patches:
            replacement.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for replacement in self._patches:
            replacement.stop()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule, named = _RULES.get(func), dict(kwargs or {})
        result = NotImplemented if rule is None else rule(self, *args, **named)
        return func(*args, **named) if result is NotImplemented else result

    def indices(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The indices of all elements of a mask, for each dimension, in the place of those that are not 0."""
        chosen, indices = mask.reshape(-1).bool(), []
        for dim, size in enumerate(mask.shape):
            places = torch.arange(size, device=mask.device)
            shape = [1] * dim + [-1] + [1] * (mask.dim() - dim - 1)
            indices.append(places.reshape(shape).expand(mask.shape).reshape(-1))
        self._chosen += [(index, chosen) for index in indices]
        return tuple(indices)

    def chosen(self, index: Tensor) -> Tensor | None:
        """Return which rows of an index of all rows are selected; None for other indices."""
        return next((chosen for all_rows, chosen in self._chosen if all_rows is index), None)


class _Turn(int):
    """The number of an iteration of a loop, which can be used like the tensor [1] that holds it."""

    def item(self) -> int:
        return self

    def __getitem__(self, _: Any) -> int:
        return self


class _Sizes:
    """The result of `tolist()` on a computed vector of row counts, whose values tracing does not know."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _sizes(tensor: Tensor) -> Any:
    return _Sizes(tensor) if tensor.dim() == 1 else [part.tolist() for part in tensor]


class _Part:
    """A part of rows that were split by computed sizes. It holds the values for all rows, since its size is unknown.

    Attributes:
        rows: The values that were computed of this part, for all rows.
        ends: [parts], the number of rows up to the end of each part.
    """

    def __init__(self, rows: Tensor, ends: Tensor) -> None:
        self.rows, self.ends = rows, ends

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in args if isinstance(x, _Part))
        rows = func(*(x.rows if isinstance(x, _Part) else x for x in args), **(kwargs or {}))
        return _Part(rows, first.ends) if isinstance(rows, Tensor) and len(rows) == len(first.rows) else NotImplemented


def _masked(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of the first dimensions with those of `x` behind it."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0


def _getitem(_: Selections, x: Any, index: Any) -> Any:
    if isinstance(index, _Turn):  # beyond the end for experts that are never chosen
        return x[min(int(index), x.shape[0] - 1)]
    return x.flatten(0, index.dim() - 1) if isinstance(x, Tensor) and _is_mask(index) else NotImplemented


def _setitem(_: Selections, x: Any, index: Any, value: Any) -> Any:
    if not _is_mask(index):
        return NotImplemented
    whole = value.reshape(x.shape) if isinstance(value, Tensor) and value.dim() else value
    x.copy_(torch.where(_masked(index, x), whole, x))
    return None


def _where(mode: Selections, condition: Any, *others: Any, **named: Any) -> Any:
    return NotImplemented if others or named else mode.indices(condition)


def _nonzero(mode: Selections, x: Any, *, as_tuple: bool = False) -> Any:
    if as_tuple:
        return mode.indices(x)
    count = x.shape[0]
    if x.dim() != 1 or not isinstance(count, int):
        return NotImplemented
    if count > _LONGEST:
        raise InputError(f"its module has a loop over {count} experts, of which at most {_LONGEST} are supported")
    return [_Turn(turn) for turn in range(count)]


def _index_add(func: Callable[..., Any]) -> Callable[..., Any]:
    def rule(mode: Selections, x: Tensor, dim: int, index: Tensor, source: Tensor, **named: Any) -> Any:
        chosen = mode.chosen(index)
        if chosen is None or dim != 0:
            return NotImplemented
        zero = torch.zeros((), dtype=source.dtype, device=source.device)
        return func(x, 0, index, torch.where(_masked(chosen, source), source, zero), **named)

    return rule


def _tolist(_: Selections, x: Tensor) -> Any:
    has_data = type(x) is Tensor and x.device.type != "meta"
    return NotImplemented if has_data or x.dim() != 1 or x.is_floating_point() else _Sizes(x)


def _split(_: Selections, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    if not isinstance(sizes, _Sizes) or dim != 0:
        return NotImplemented
    ends = sizes.tensor.int().cumsum(0, dtype=torch.int32)
    return [_Part(x, ends) for _ in range(ends.shape[0])]


def _cat(_: Selections, parts: Any, dim: int = 0, **named: Any) -> Any:
    if named or dim != 0 or not parts or not all(isinstance(part, _Part) for part in parts):
        return NotImplemented
    ends, rows = parts[0].ends, parts[0].rows
    places = torch.arange(rows.shape[0], device=rows.device)
    for part, start in zip(parts[1:], _each(ends), strict=False):
        rows = torch.where(_masked(places >= start, rows), part.rows, rows)
    return rows


def _each(vector: Tensor) -> Iterator[Tensor]:
    return (vector[place] for place in range(vector.shape[0]))


def _long(mode: Selections, x: Tensor) -> Any:
    """Replace `x.long()` of floats, with which modules count rows, by int32; remember the result as a count."""
    if not x.is_floating_point():
        return NotImplemented
    mode.counted.append(x.int())
    return mode.counted[-1]


def _sum(mode: Selections, x: Tensor, *dims: Any, **named: Any) -> Any:
    if "dtype" in named or not any(x is counted for counted in mode.counted):
        return NotImplemented
    return x.sum(*dims, **named, dtype=torch.int32)


def _one_hot(_: Selections, x: Tensor, num_classes: int = -1) -> Any:
    if num_classes < 1:
        return NotImplemented
    return (x[..., None] == torch.arange(num_classes, device=x.device)).long()


_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    torch.where: _where,
    torch.nonzero: _nonzero,
    Tensor.nonzero: _nonzero,
    torch.index_add: _index_add(torch.index_add),
    Tensor.index_add: _index_add(Tensor.index_add),
    Tensor.index_add_: _index_add(Tensor.index_add_),
    Tensor.long: _long,
    Tensor.sum: _sum,
    Tensor.tolist: _tolist,
    torch.split: _split,
    Tensor.split: _split,
    torch.cat: _cat,
    torch.nn.functional.one_hot: _one_hot,
}
