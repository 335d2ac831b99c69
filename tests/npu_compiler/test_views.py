"""`View` against torch: a view's strides must show what the same chain of torch ops shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from npu_compiler.ops.aliases import slice_bounds
from npu_compiler.program.views import View, broadcast_shapes, contiguous_strides, is_contiguous

Pair = tuple[View, torch.Tensor]
SIZES = st.sampled_from([1, 2, 3, 4, 0])


def pair(shape: tuple[int, ...], offset: int = 0) -> Pair:
    """A contiguous view of a buffer in which every element is its own position, and the torch tensor it stands for."""
    base = torch.arange(offset + torch.Size(shape).numel())
    return View("x", shape, contiguous_strides(shape), offset, "int32"), base[offset:].view(shape)


def shown(view: View, base: torch.Tensor) -> torch.Tensor:
    """Return the elements of a view, by torch's definition of strides."""
    whole = torch.arange(base.untyped_storage().nbytes() // base.itemsize)
    return whole.as_strided(view.shape, view.strides, view.offset)


def index(draw: Any, rank: int) -> int:
    return int(draw(st.integers(-rank, rank - 1)))


def slice_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    dim = index(draw, view.rank)
    size = view.shape[dim]
    start, end, step = draw(st.integers(-5, 5)), draw(st.integers(-5, 5)), draw(st.integers(1, 3))
    low, high = slice_bounds(size, start, end)
    return view.slice(dim, low, high, step), torch.ops.aten.slice(tensor, dim, start, end, step)


def permute_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    order = [d - view.rank if draw(st.booleans()) else d for d in draw(st.permutations(range(view.rank)))]
    return view.permute(order), tensor.permute(order)


def transpose_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    first, second = index(draw, view.rank), index(draw, view.rank)
    return view.transpose(first, second), tensor.transpose(first, second)


def select_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    dim = index(draw, view.rank)
    size = view.shape[dim]
    assume(size > 0)
    position = draw(st.integers(-size, size - 1))
    return view.select(dim, position), tensor.select(dim, position)


def unsqueeze_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    dim = draw(st.integers(-view.rank - 1, view.rank))
    return view.unsqueeze(dim), tensor.unsqueeze(dim)


def squeeze_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    dim = index(draw, view.rank)
    return view.squeeze(dim), tensor.squeeze(dim)


def expand_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    kept = [draw(st.integers(1, 3)) if size == 1 else draw(st.sampled_from([-1, size])) for size in view.shape]
    return view.expand([*lead, *kept]), tensor.expand([*lead, *kept])


def factorize(draw: Any, total: int) -> tuple[int, ...]:
    """A shape of that many elements, sizes of 1 included."""
    if total == 0:
        return tuple(draw(st.permutations([0, *draw(st.lists(st.integers(0, 3), max_size=3))])))
    shape = []
    while total > 1:
        size = draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0]))
        shape.append(size)
        total //= size
    shape += [1] * draw(st.integers(0, 2))
    return tuple(draw(st.permutations(shape)))


def reshape_step(draw: Any, view: View, tensor: torch.Tensor) -> Pair:
    shape = factorize(draw, view.numel)
    try:
        expected = tensor.view(shape)
    except RuntimeError:
        assert view.reshape(shape) is None, f"torch cannot view {tensor.shape} {tensor.stride()} as {shape}"
        return view, tensor
    reshaped = view.reshape(shape)
    assert reshaped is not None, f"torch can view {tensor.shape} {tensor.stride()} as {shape}"
    return reshaped, expected


NEEDS_DIMS = [slice_step, permute_step, transpose_step, select_step, squeeze_step]
ANY_RANK = [unsqueeze_step, expand_step, reshape_step, reshape_step]


@given(st.data())
def test_a_chain_of_view_operations_shows_what_torch_shows(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(SIZES, max_size=4)))
    view, tensor = pair(shape, data.draw(st.integers(0, 3)))
    for _ in range(data.draw(st.integers(1, 6))):
        steps = ANY_RANK if view.rank == 0 else ANY_RANK[:1] * (view.rank < 6) + ANY_RANK[1:] + NEEDS_DIMS
        assume(view.numel < 2000 and view.rank < 8)
        view, tensor = data.draw(st.sampled_from(steps))(data.draw, view, tensor)
        assert view.shape == tuple(tensor.shape)
        torch.testing.assert_close(shown(view, tensor), tensor, rtol=0, atol=0)
        assert view.is_contiguous == tensor.is_contiguous()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4), st.data())
def test_reshape_needs_a_copy_exactly_where_torch_view_raises(dims: list[tuple[int, int]], data: st.DataObject) -> None:
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    view = View("x", shape, strides, 0, "int32")
    tensor = torch.arange(200).as_strided(shape, strides)
    reshape_step(data.draw, view, tensor)
    result = view.reshape(factorize(data.draw, view.numel))
    if result is not None:
        expected = tensor.contiguous().view(result.shape)
        torch.testing.assert_close(torch.arange(200).as_strided(result.shape, result.strides), expected)


@given(st.lists(st.lists(st.sampled_from([1, 3]), max_size=4), min_size=1, max_size=3))
def test_broadcast_shapes_is_torch_s(shapes: list[list[int]]) -> None:
    assert broadcast_shapes(*shapes) == tuple(torch.broadcast_shapes(*shapes))


@given(st.lists(SIZES, max_size=4), st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_contiguity_is_torch_s(shape: list[int], strides: list[int]) -> None:
    tensor = torch.arange(200).as_strided(shape, strides[: len(shape)])
    assert is_contiguous(tuple(shape), tuple(strides[: len(shape)])) == tensor.is_contiguous()


@given(st.integers(0, 6), st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9))
def test_slice_bounds_clamp_as_python_does(size: int, start: int | None, end: int | None) -> None:
    low, high = slice_bounds(size, start, end)
    assert list(range(size))[low:high] == list(range(size))[start:end]


@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 3)])
def test_a_view_is_the_same_view_under_its_own_shape(shape: tuple[int, ...]) -> None:
    view, _ = pair(shape)
    assert view.reshape(shape) == replace(view, strides=view.reshape(shape).strides)  # type: ignore[union-attr]
    assert view.expand(shape) == view


@given(st.lists(SIZES, max_size=4), st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 12]), min_size=4, max_size=4))
def test_a_dense_view_covers_one_stretch_of_memory_once(shape: list[int], strides: list[int]) -> None:
    view = View("x", tuple(shape), tuple(strides[: len(shape)]), 0, "int32")
    touched = torch.arange(200).as_strided(view.shape, view.strides).flatten().sort().values
    assert view.is_dense == torch.equal(touched, torch.arange(view.numel))
