"""Selections of rows by computed numbers, in traced modules.

The number of rows that a mask selects is known only when a program runs, so no program can have such a size. Where the
results go by the same selection, all rows may be computed instead, and those that are not selected left out at the end:

    Given:   places = torch.where(mask);  y.index_add_(0, places, f(x[places]))
    Result:  every = torch.arange(len(mask));  y.index_add_(0, every, torch.where(mask, f(x[every]), 0))

A loop over the experts that have rows is one product of all pairs of a row and one of its experts, which reads the
matrices of these experts only (`expert_linear`):

    Given:   mask = one_hot(chosen).permute(2, 1, 0);  for e in mask.sum((1, 2)).nonzero():
                 choice, row = torch.where(mask[e]);  y.index_add_(0, row, linear(x[row], w[e]) * weights[row, choice])
    Result:  choice, row = all pairs;  y += (expert_linear(x[row], w, chosen) * weights[row, choice]).sum(choices)

`expert_linear` is used without a loop where transformers' own interface allows (see `experts`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from npu_compiler.errors import InputError
from npu_sim.llm.experts import expert_linear


class Selections(TorchFunctionMode):
    """A context in which selecting rows by a mask gives all rows; results of the others are replaced by 0 at their use.

    Attributes:
        counted: Counts of rows that `long()` has made of floating-point numbers.
        routes: The choices of experts for which masks were made, the last one last.
        turn: The turn of a loop over experts that runs now; None outside of loops.
        matrices: Matrices of a parameter that holds one for each expert, by the `id` of each: the matrix itself, the
            parameter, and the number of the expert.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[Tensor] = []
        self.routes: list[_Route] = []
        self.turn: _Turn | None = None
        self.matrices: dict[int, tuple[Tensor, Tensor, int]] = {}
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
        if self.turn is not None:
            self.turn.calls.append(getattr(func, "__name__", str(func)))
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


@dataclass(frozen=True)
class _Route:
    """The experts that are chosen for each row, and the mask that a module makes of them.

    Attributes:
        chosen: [rows, choices], numbers of experts.
        mask: [rows, choices, experts] or, as `permuted`, [experts, choices, rows].
    """

    chosen: Tensor
    mask: Tensor
    permuted: bool = False

    @property
    def count(self) -> int:
        """Number of experts."""
        return int(self.mask.shape[0 if self.permuted else 2])


class _Number(int):
    """The number of an expert, in the place of a tensor [1] that holds it."""

    def item(self) -> int:
        return self

    def __getitem__(self, _: Any) -> int:
        return self


@dataclass
class _Turn:
    """A turn of a loop over experts, which computes all pairs of a row and one of its experts.

    Attributes:
        number: The number of the expert for which the module's code runs.
        calls: Names of the functions that this code has called.
        pairs: A mask that stands for the pairs of this expert in the module's code. None before it is asked for.
        indices: The choice and the row of each pair. None before they are asked for.
        results: Tensors to which rows are added by the pairs' rows, with what is added, [pairs, …].
    """

    route: _Route
    number: int
    calls: list[str] = field(default_factory=list)
    pairs: Tensor | None = None
    indices: tuple[Tensor, Tensor] | None = None
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def experts(self) -> Tensor:
        """[pairs], the number of each pair's expert."""
        return self.route.chosen.reshape(-1)

    def mask_of_pairs(self) -> Tensor:
        if self.pairs is None:
            self.pairs = torch.ones_like(self.route.chosen.T, dtype=torch.bool)
        return self.pairs

    def indices_of_pairs(self) -> tuple[Tensor, Tensor]:
        if self.indices is None:
            rows, choices = self.route.chosen.shape
            row, choice = (torch.arange(size, device=self.route.chosen.device) for size in (rows, choices))
            self.indices = choice.repeat(rows), row.repeat_interleave(choices)
        return self.indices

    def of_pairs(self, every: Tensor) -> Any:
        """The part of a parameter of all experts that each pair's expert has: matrices, or rows that are gathered."""
        if every.dim() == 3:
            return _Matrices(every, self.experts)
        own = every[self.experts.clamp(0, every.shape[0] - 1)]
        return own[:, None] if every.dim() == 1 else own


class _Loop:
    """A loop over all experts, in the place of the numbers of those that have rows.

    The module's code runs for the last expert and for the first one, and where the two call other functions, as where
    some experts have no matrices, for those between at which the calls change. Of experts with the same calls, one
    turn computes the pairs of all.
    """

    def __init__(self, mode: Selections, route: _Route) -> None:
        self._mode, self._route = mode, route
        self._turns: dict[int, _Turn] = {}

    def __iter__(self) -> Iterator[_Number]:
        first, last = 0, self._route.count - 1
        for number in dict.fromkeys((last, first)):
            yield from self._run(number)
        ranges = [(first, last)]
        while ranges:
            low, high = ranges.pop()
            if high - low > 1 and self._turns[low].calls != self._turns[high].calls:
                middle = (low + high) // 2
                yield from self._run(middle)
                ranges += [(low, middle), (middle, high)]
        self._add_results()

    def _run(self, number: int) -> Iterator[_Number]:
        self._mode.turn = self._turns[number] = _Turn(self._route, number)
        yield _Number(number)
        self._mode.turn = None

    def _add_results(self) -> None:
        first = 0
        numbers = sorted(self._turns)
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            turn = self._turns[number]
            if following is not None and self._turns[following].calls == turn.calls:
                continue
            own = (turn.experts >= first) & (turn.experts <= number)
            is_whole = first == 0 and following is None
            for target, rows in turn.results:
                zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
                kept = rows if is_whole else torch.where(_masked(own, rows), rows, zero)
                target.add_(kept.reshape(*self._route.chosen.shape, *rows.shape[1:]).sum(1))
            first = number + 1


class _Matrices:
    """The matrix of each pair's expert.

    Attributes:
        every: [experts, N, K], the matrices of all experts.
        experts: [pairs], the number of each pair's expert.
    """

    def __init__(self, every: Tensor, experts: Tensor) -> None:
        self.every, self.experts = every, experts

    @property
    def T(self) -> "_Matrices":  # noqa: N802 - the name that tensors have
        return self.transpose(0, 1)

    def transpose(self, *_: int) -> "_Matrices":
        return _Matrices(self.every.transpose(1, 2), self.experts)

    t = transpose

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        x, own, bias = (*args, *(kwargs or {}).values(), None, None)[:3]
        if isinstance(own, _Matrices) and func is torch.nn.functional.linear:
            return own.product(x) if bias is None else own.product(x) + bias
        if isinstance(own, _Matrices) and func in _PRODUCTS:
            return own.T.product(x)
        raise InputError(f"its loop over experts uses their matrices in '{func.__name__}', which is not supported")

    def product(self, x: Tensor) -> Tensor:
        """Multiply rows [pairs, K] by their experts' matrices."""
        if x.dim() != 2 or x.shape[0] != self.experts.shape[0]:
            raise InputError("its loop over experts multiplies other rows than those that it selects")
        result: Tensor = expert_linear(x, self.every, self.experts, None, self.every.shape[0])
        return result


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


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
        number: The number of the part.
        factors: The rows and the matrices [parts, N, K] whose product by the matrix of each part's number the function
            is; None for other functions.
    """

    def __init__(
        self,
        mode: Selections,
        rows: Callable[[], Tensor],
        ends: Tensor,
        number: int,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._mode, self._make, self.ends, self.number, self.factors = mode, rows, ends, number, factors

    @property
    def rows(self) -> Tensor:
        return self._make()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in args if isinstance(x, _Part))
        given = [x.rows if isinstance(x, _Part) else x for x in args]
        factors = None
        if func is torch.nn.functional.linear and args[0] is first and not kwargs and len(args) == 2:
            _, every, number = first._mode.matrices.get(id(args[1]), (None, None, -1))
            if every is not None and number == first.number and len(every) == len(first.ends):
                factors = (given[0], every)
                return _Part(first._mode, lambda: func(*given), first.ends, number, factors)
        rows = func(*given, **(kwargs or {}))
        whole = next(x for x, part in zip(given, args, strict=True) if part is first)
        if not isinstance(rows, Tensor) or len(rows) != len(whole):
            return NotImplemented
        return _Part(first._mode, lambda: rows, first.ends, first.number)


def _masked(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of the first dimensions with those of `x` behind it."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0


def _getitem(mode: Selections, x: Any, index: Any) -> Any:
    turn = mode.turn
    if turn is not None and type(index) in (int, _Number) and index == turn.number:
        if x is turn.route.mask:
            return turn.mask_of_pairs()
        if isinstance(index, _Number) or x.dim() == 3:
            return turn.of_pairs(x)
    if type(index) is int and isinstance(x, Tensor) and x.dim() == 3:
        matrix = torch.select(x, 0, index)
        mode.matrices[id(matrix)] = matrix, x, index
        return matrix
    return x.flatten(0, index.dim() - 1) if isinstance(x, Tensor) and _is_mask(index) else NotImplemented


def _setitem(mode: Selections, x: Any, index: Any, value: Any) -> Any:
    if mode.turn is not None:
        raise InputError("its loop over experts replaces rows, where only adding to them is supported")
    if not _is_mask(index):
        return NotImplemented
    whole = value.reshape(x.shape) if isinstance(value, Tensor) and value.dim() else value
    x.copy_(torch.where(_masked(index, x), whole, x))
    return None


def _where(mode: Selections, condition: Any, *others: Any, **named: Any) -> Any:
    if others or named:
        return NotImplemented
    if mode.turn is not None and condition is mode.turn.pairs:
        return mode.turn.indices_of_pairs()
    return mode.indices(condition)


def _squeeze(mode: Selections, x: Any, *dims: Any) -> Any:
    is_of_pairs = mode.turn is not None and x is mode.turn.pairs
    return x if is_of_pairs and dims == (0,) and x.shape[0] != 1 else NotImplemented


def _nonzero(mode: Selections, x: Any, *, as_tuple: bool = False) -> Any:
    if as_tuple:
        return mode.indices(x)
    if x.dim() != 1:
        return NotImplemented
    route = next((route for route in reversed(mode.routes) if route.permuted and route.count == x.shape[0]), None)
    return NotImplemented if route is None else _Loop(mode, route)


def _index_add(func: Callable[..., Any]) -> Callable[..., Any]:
    def rule(mode: Selections, x: Tensor, dim: int, index: Tensor, source: Tensor, **named: Any) -> Any:
        turn = mode.turn
        if turn is not None and turn.indices is not None and index is turn.indices[1]:
            if func is not Tensor.index_add_ or dim != 0 or named:
                raise InputError("its loop over experts adds rows in another way than by `index_add_`")
            turn.results.append((x, source))
            return x
        chosen = mode.chosen(index)
        if chosen is None or dim != 0:
            return NotImplemented
        zero = torch.zeros((), dtype=source.dtype, device=source.device)
        return func(x, 0, index, torch.where(_masked(chosen, source), source, zero), **named)

    return rule


def _tolist(_: Selections, x: Tensor) -> Any:
    has_data = type(x) is Tensor and x.device.type != "meta"
    return NotImplemented if has_data or x.dim() != 1 or x.is_floating_point() else _Sizes(x)


def _split(mode: Selections, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    if not isinstance(sizes, _Sizes) or dim != 0:
        return NotImplemented
    ends = sizes.tensor.int().cumsum(0, dtype=torch.int32)
    return [_Part(mode, lambda: x, ends, number) for number in range(ends.shape[0])]


def _cat(_: Selections, parts: Any, dim: int = 0, **named: Any) -> Any:
    if named or dim != 0 or not parts or not all(isinstance(part, _Part) for part in parts):
        return NotImplemented
    ends = parts[0].ends
    if (product := _common_product(parts)) is not None:
        x, every = product
        places = torch.arange(x.shape[0], device=x.device)
        experts = (ends <= places[:, None]).sum(1)
        return expert_linear(x, every, experts, None, every.shape[0])
    rows = parts[0].rows
    places = torch.arange(rows.shape[0], device=rows.device)
    for part, start in zip(parts[1:], _each(ends), strict=False):
        rows = torch.where(_masked(places >= start, rows), part.rows, rows)
    return rows


def _common_product(parts: Sequence[_Part]) -> tuple[Tensor, Tensor] | None:
    """The rows and the matrices of all parts, in order, if each is their product by the matrix of its number."""
    first = parts[0].factors
    if first is None or len(parts) != len(first[1]):
        return None
    for number, part in enumerate(parts):
        if part.number != number or part.factors is None:
            return None
        if any(own is not other for own, other in zip(part.factors, first, strict=True)):
            return None
    return first


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


def _one_hot(mode: Selections, x: Tensor, num_classes: int = -1) -> Any:
    if num_classes < 1:
        return NotImplemented
    mask = (x[..., None] == torch.arange(num_classes, device=x.device)).long()
    if x.dim() == 2:
        mode.routes.append(_Route(x, mask))
    return mask


def _permute(mode: Selections, x: Tensor, *dims: Any) -> Any:
    route = next((route for route in mode.routes if x is route.mask and not route.permuted), None)
    if route is None or dims not in ((2, 1, 0), ((2, 1, 0),)):
        return NotImplemented
    mode.routes.append(_Route(route.chosen, torch.permute(x, (2, 1, 0)), permuted=True))
    return mode.routes[-1].mask


_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.permute: _permute,
    Tensor.squeeze: _squeeze,
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
