"""Kernels that pick elements by index, and those that replace rows by index; indices out of range included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from metal_harness import Case, T

LARGE_INTS = (-(2**31), 2**31)  # floats would round them
Tensors = Sequence[torch.Tensor]
Reference = Callable[[Tensors, Tensors, Mapping[str, Any]], None]


def _ids(shape: tuple[int, ...], values: Any, **geometry: Any) -> T:
    return T(shape, "int32", values=values, **geometry)


def _missing(out: torch.Tensor, found: torch.Tensor) -> None:
    """NaN, or 0 in integers, where an index was out of range."""
    out.masked_fill_(~found, float("nan") if out.is_floating_point() else 0)


def _gather_what_is_there(inputs: Tensors, outputs: Tensors, params: Mapping[str, Any]) -> None:
    x, index = inputs[0], inputs[1].long()
    size = x.shape[params["dim"]]
    outputs[0].copy_(x.gather(params["dim"], index.clamp(0, size - 1)))
    _missing(outputs[0], (index >= 0) & (index < size))


def _select_what_is_there(inputs: Tensors, outputs: Tensors, params: Mapping[str, Any]) -> None:
    x, index, dim = inputs[0], inputs[1].long(), params["dim"]
    size = x.shape[dim]
    outputs[0].copy_(x.index_select(dim, index.clamp(0, size - 1)))
    found = ((index >= 0) & (index < size)).reshape([-1] + [1] * (x.dim() - dim - 1))
    _missing(outputs[0], found.expand(outputs[0].shape))


def _pick_what_is_there(inputs: Tensors, outputs: Tensors, params: Mapping[str, Any]) -> None:
    """Reference of picking by indices of the leading dimensions, some of which are out of range."""
    x, indices = inputs[0], [index.long() for index in inputs[1:]]
    clamped = [index.clamp(-size, size - 1) for index, size in zip(indices, x.shape, strict=False)]
    found = torch.ones_like(indices[0], dtype=torch.bool)
    for index, inside in zip(indices, clamped, strict=True):
        found &= index == inside
    outputs[0].copy_(x[tuple(clamped)])
    _missing(outputs[0], found.reshape(*found.shape, *[1] * (outputs[0].dim() - found.dim())).expand(outputs[0].shape))


def _look_up_what_is_there(inputs: Tensors, outputs: Tensors, params: Mapping[str, Any]) -> None:
    table, ids = inputs
    found = (ids >= 0) & (ids < len(table))
    outputs[0].copy_(table[ids.long().clamp(0, len(table) - 1)])
    _missing(outputs[0], found.unsqueeze(-1).expand(outputs[0].shape))


def _replace_what_is_there(inputs: Tensors, outputs: Tensors, params: Mapping[str, Any]) -> None:
    index, *sources = inputs
    for source, out in zip(sources, outputs, strict=True):
        found = (index >= 0) & (index < out.shape[params["dim"]])
        rows = source.index_select(params["dim"], found.nonzero().flatten())
        out.index_copy_(params["dim"], index[found].long(), rows.to(out.dtype))


def _gather(name: str, x: T, index: T, dim: int, out: T | None = None, reference: Reference | None = None) -> Case:
    target = out if out is not None else T(index.shape, x.dtype)
    return Case("gather_kernel", name, [x, index], [target], {"dim": dim}, atol=0.0, reference=reference)


def _select(name: str, x: T, index: T, dim: int, out: T | None = None, reference: Reference | None = None) -> Case:
    shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    target = out if out is not None else T(shape, x.dtype)
    return Case("index_select_kernel", name, [x, index], [target], {"dim": dim}, atol=0.0, reference=reference)


def _index(
    name: str, x: T, indices: list[T], first: int = 0, out: T | None = None, reference: Reference | None = None
) -> Case:
    shape = (*x.shape[:first], *indices[0].shape, *x.shape[first + len(indices) :])
    target = out if out is not None else T(shape, x.dtype)
    params = {"first": first, "count": len(indices)}
    return Case("index_kernel", name, [x, *indices], [target], params, atol=0.0, reference=reference)


def _embedding(name: str, table: T, ids: T, out: T | None = None, checked: bool = True) -> Case:
    target = out if out is not None else T((*ids.shape, table.shape[1]), table.dtype)
    params = {"rows": table.shape[0], "width": table.shape[1], "checked": checked}
    return Case("embedding_kernel", name, [table, ids], [target], params, atol=0.0)


def _index_copy(name: str, index: T, source: T, out: T, dim: int, checked: bool = True) -> Case:
    """`out` holds something before."""
    return Case("index_copy_kernel", name, [index, source], [out], {"dim": dim, "checked": checked}, atol=0.0)


def _index_copy_pair(name: str, index: T, sources: list[T], outs: list[T], dim: int, checked: bool = True) -> Case:
    return Case("index_copy_pair_kernel", name, [index, *sources], outs, {"dim": dim, "checked": checked}, atol=0.0)


def _out_of_range(case: Case) -> Case:
    reference = {"embedding_kernel": _look_up_what_is_there}.get(case.kernel, _replace_what_is_there)
    return replace(case, name=f"{case.name}-out-of-range", reference=reference)


def _scatter(
    name: str, base: T, index: T, source: T, reduction: str, includes: bool = True, out: T | None = None
) -> Case:
    params = {"reduce": reduction, "include_self": includes}
    target = out if out is not None else T(base.shape, base.dtype)
    return Case("scatter_kernel", name, [base, index, source], [target], params, atol=1e-3)


def _scatter_what_is_there(inputs: Tensors, outputs: Tensors, params: Mapping[str, Any]) -> None:
    base, index, source = inputs
    outputs[0].copy_(base)
    for row, place in torch.nonzero((index >= 0) & (index < base.shape[1])).tolist():
        outputs[0][row, index[row, place].item()] = source[row, place]


OUTSIDE = [3, -1, 0, 5, 4, -(2**31), 2**31 - 1]  # of five rows
CACHE = T((1, 2, 16, 8), values="normal")
CACHE_IN_TOKEN_ORDER = T((1, 2, 16, 8), strides=(256, 8, 16, 1), values="normal")
NEW_TOKENS = T((1, 2, 3, 8), strides=(48, 8, 16, 1), offset=4)

CASES = [
    _gather("rows", T((5, 4)), _ids((3, 4), (0, 5)), 0),
    _gather("columns", T((5, 4), values="special"), _ids((5, 7), (0, 4)), 1),
    _gather("corner", T((6, 5, 9)), _ids((2, 3, 4), (0, 9)), 2),
    _gather("beyond-a-threadgroup", T((5, 64)), _ids((5, 53), (0, 64)), 1),
    _gather("large-ints", T((5, 4), "int32", values=LARGE_INTS), _ids((5, 2), (0, 4)), 1),
    _gather(
        "strided",
        T((5, 4), strides=(1, 5)),
        _ids((3, 4), (0, 5), strides=(1, 3), offset=1),
        0,
        out=T((3, 4), strides=(6, 1), offset=2),
    ),
    *(
        _scatter(f"{reduction}{'-self' * includes}", T((3, 7)), _ids((3, 9), (0, 7)), T((3, 9)), reduction, includes)
        for reduction in "last sum prod mean amax amin".split()
        for includes in (False, True)
    ),
    *(
        _scatter(
            f"{reduction}-ints",
            T((5, 4), "int32", values=(-9, 9)),
            _ids((5, 3), (0, 4)),
            T((5, 3), "int32", values=(-9, 9)),
            reduction,
        )
        for reduction in "last sum prod amax amin".split()
    ),
    _scatter("large-ints", T((70, 4), "int32", values=LARGE_INTS), _ids((70, 3), (0, 4)), T((70, 3), "int32"), "last"),
    _scatter("oddities", T((4, 9), values="special"), _ids((4, 30), (0, 9)), T((4, 30), values="special"), "amax"),
    _scatter("booleans", T((3, 7), "bool"), _ids((3, 4), (0, 7)), T((3, 4), "bool"), "last"),
    _scatter(
        "strided",
        T((2, 3, 5), strides=(1, 10, 2)),
        _ids((2, 3, 4), (0, 5), strides=(12, 1, 3), offset=1),
        T((2, 3, 4), strides=(0, 4, 1)),
        "sum",
        out=T((2, 3, 5), strides=(30, 10, 2), offset=2),
    ),
    _scatter("vector", T((300,), "float32"), _ids((40,), (0, 300)), T((40,)), "sum", out=T((300,), "float32")),
    replace(
        _scatter("out-of-range", T((2, 5)), _ids((2, 7), [OUTSIDE, OUTSIDE]), T((2, 7)), "last"),
        reference=_scatter_what_is_there,
    ),
    _gather("one", T((1,)), _ids((1,), 0), 0),
    _gather(
        "out-of-range", T((5, 4)), _ids((7, 2), [[row, row] for row in OUTSIDE]), 0, reference=_gather_what_is_there
    ),
    _gather(
        "ints-out-of-range", T((2, 5), "int32"), _ids((2, 7), [OUTSIDE, OUTSIDE]), 1, reference=_gather_what_is_there
    ),
    _select("rows", T((5, 4)), _ids((3,), (0, 5)), 0),
    _select("columns", T((3, 5, 7)), _ids((9,), (0, 7)), 2),
    _select("middle", T((3, 5, 7), "float32"), _ids((2,), (0, 5)), 1),
    _select("beyond-a-threadgroup", T((4, 67)), _ids((5,), (0, 4)), 0),
    _select("bools", T((5, 6), "bool"), _ids((4,), (0, 6)), 1),
    _select("large-ints", T((5, 6), "int32", values=LARGE_INTS), _ids((4,), (0, 5)), 0),
    _select(
        "strided",
        T((5, 6), strides=(1, 5), offset=3),
        _ids((4,), (0, 6), strides=(3,), offset=1),
        1,
        out=T((5, 4), strides=(1, 5), offset=2),
    ),
    _select("out-of-range", T((5, 3)), _ids((7,), OUTSIDE), 0, reference=_select_what_is_there),
    _select("bools-out-of-range", T((2, 5, 2), "bool"), _ids((7,), OUTSIDE), 1, reference=_select_what_is_there),
    _index("row", T((5, 4)), [_ids((), -2)]),
    _index("rows", T((5, 4)), [_ids((3,), (-5, 5))]),
    _index("elements", T((5, 4), values="special"), [_ids((6,), (-5, 5)), _ids((6,), (-4, 4))]),
    _index("middle", T((3, 5, 7)), [_ids((2, 4), (-5, 5))], first=1),
    _index("last", T((3, 5, 7)), [_ids((2, 4), (-7, 7))], first=2),
    _index("last-two", T((3, 5, 7)), [_ids((4,), (-5, 5)), _ids((4,), (-7, 7))], first=1),
    _index("outer-product", T((3, 5, 7)), [_ids((3, 4), (0, 3), strides=(1, 0)), _ids((3, 4), (0, 5), strides=(0, 1))]),
    _index("three-of-five", T((2, 3, 4, 5, 2)), [_ids((2, 3), (-size, size)) for size in (3, 4, 5)], first=1),
    _index("all-eight", T((2, 3, 2, 3, 2, 3, 2, 3)), [_ids((9,), (-size, size)) for size in (2, 3) * 4]),
    *(_index(f"first-{count}", T((3,) * count), [_ids((5,), (-3, 3)) for _ in range(count)]) for count in range(4, 8)),
    _index("beyond-a-threadgroup", T((4, 67)), [_ids((5,), (-4, 4))]),
    _index("large-ints", T((5, 6), "int32", values=LARGE_INTS), [_ids((4,), (-5, 5))]),
    _index(
        "strided",
        T((5, 6), strides=(1, 5), offset=1),
        [_ids((4,), (-6, 6), strides=(2,), offset=2)],
        first=1,
        out=T((5, 4), strides=(8, 2), offset=3),
    ),
    _index("out-of-range", T((5, 3)), [_ids((7,), [*OUTSIDE[:5], -5, -6])], reference=_pick_what_is_there),
    _index(
        "second-out-of-range",
        T((4, 5, 2), "int32"),
        [_ids((7,), (-4, 4)), _ids((7,), [*OUTSIDE[:5], -5, -6])],
        reference=_pick_what_is_there,
    ),
    _embedding("narrow", T((5, 1)), _ids((4,), (0, 5))),
    _embedding("tail", T((5, 7)), _ids((2, 3), (0, 5))),
    _embedding("vectors", T((9, 64), values="special"), _ids((1, 5), (0, 9))),
    _embedding("vectors-and-tail", T((5, 20), strides=(28, 1)), _ids((3,), (0, 5)), T((3, 20), strides=(24, 1))),
    _embedding("rest-behind-vectors", T((5, 18), strides=(20, 1)), _ids((3,), (0, 5)), T((3, 18), strides=(20, 1))),
    _embedding("beyond-a-threadgroup", T((3, 1030)), _ids((2,), (0, 3)), checked=False),
    _embedding("float32-table", T((5, 8), "float32"), _ids((4,), (0, 5)), T((4, 8))),
    _embedding("large-ints", T((5, 8), "int32", values=LARGE_INTS), _ids((4,), (0, 5))),
    _embedding(
        "strided-ids",
        T((5, 6), offset=1),
        _ids((3, 2), (0, 5), strides=(1, 4), offset=1),
        T((3, 2, 6), strides=(30, 1, 5), offset=1),
    ),
    _out_of_range(_embedding("vectors", T((5, 8)), _ids((7,), OUTSIDE), checked=False)),
    _out_of_range(_embedding("ints", T((5, 3), "int32"), _ids((7,), OUTSIDE), checked=False)),
    _index_copy("token", _ids((1,), 5), T((1, 2, 1, 8)), CACHE, 2),
    _index_copy("tokens", _ids((3,), [0, 15, 7]), NEW_TOKENS, CACHE, 2),
    _index_copy("token-order", _ids((3,), [9, 8, 1]), NEW_TOKENS, CACHE_IN_TOKEN_ORDER, 2, checked=False),
    _index_copy(
        "rows", _ids((2,), [3, 1], strides=(3,), offset=1), T((2, 5), values="special"), T((6, 5), values="normal"), 0
    ),
    _index_copy("columns", _ids((2,), [3, 1]), T((5, 2)), T((5, 6), values="normal"), 1),
    _index_copy("whole", _ids((3,), [2, 0, 1]), T((3,)), T((3,), values="normal"), 0),
    _index_copy("beyond-a-threadgroup", _ids((5,), [4, 2, 0, 6, 1]), T((5, 53)), T((7, 53), values="normal"), 0),
    _index_copy(
        "large-ints",
        _ids((2,), [3, 1]),
        T((2, 3), "int32", values=LARGE_INTS),
        T((4, 3), "int32", values=LARGE_INTS),
        0,
    ),
    _index_copy("float32-to-compute", _ids((2,), [3, 1]), T((2, 3), "float32"), T((4, 3), values="normal"), 0),
    _out_of_range(_index_copy("rows", _ids((7,), OUTSIDE), T((7, 3)), T((5, 3), values="normal"), 0, checked=False)),
    _index_copy_pair("tokens", _ids((3,), [0, 15, 7]), [NEW_TOKENS, T((1, 2, 3, 8))], [CACHE, CACHE], 2),
    _index_copy_pair(
        "token-order",
        _ids((1,), 6),
        [T((1, 2, 1, 8)), T((1, 2, 1, 8), strides=(32, 8, 16, 1))],
        [CACHE_IN_TOKEN_ORDER, CACHE],
        2,
        checked=False,
    ),
    _index_copy_pair(
        "mixed",
        _ids((2,), [3, 1]),
        [T((2, 3), "float32"), T((2, 3), "int32", values=LARGE_INTS)],
        [T((4, 3), values="normal"), T((4, 3), "int32", values=LARGE_INTS)],
        0,
    ),
    _index_copy_pair(
        "beyond-a-threadgroup",
        _ids((5,), [4, 2, 0, 6, 1]),
        [T((5, 53)), T((5, 53), strides=(1, 5))],
        [T((7, 53), values="normal"), T((7, 53), values="normal")],
        0,
    ),
    _out_of_range(
        _index_copy_pair(
            "rows",
            _ids((7,), OUTSIDE),
            [T((7, 3)), T((7, 3), strides=(1, 7))],
            [T((5, 3), values="normal"), T((5, 3), values="normal")],
            0,
            checked=False,
        )
    ),
]
