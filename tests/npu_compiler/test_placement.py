"""Tensors computed where a copy would move them: which views correspond, and which are disjoint."""

from __future__ import annotations

import random

import numpy as np

from npu_compiler.program.placement import are_apart, moved_view
from npu_compiler.program.views import View, contiguous_strides


def elements(view: View) -> np.ndarray:
    """The place in memory of each element of a view."""
    places = np.full(view.shape, view.offset)
    for dim, stride in enumerate(view.strides):
        steps = [1] * view.rank
        steps[dim] = view.shape[dim]
        places = places + stride * np.arange(view.shape[dim]).reshape(steps)
    return places


def part_of(view: View, draw: random.Random) -> View:
    for dim, size in enumerate(view.shape):
        step = draw.choice([1, 1, 2, 3])
        start = draw.randrange(size)
        view = view.slice(dim, start, draw.randint(start + 1, size), step)
    return view


def spread(shape: tuple[int, ...], draw: random.Random) -> View:
    """A view of a larger buffer, whose dimensions are slices of that buffer's."""
    whole = tuple(size + draw.randint(0, 3) for size in shape)
    view = View("target", whole, contiguous_strides(whole), 0, "float16")
    for dim, size in enumerate(shape):
        start = draw.randint(0, whole[dim] - size)
        view = view.slice(dim, start, start + size)
    return view


def test_a_part_of_a_copied_view_has_the_same_elements_in_the_target(seed: int) -> None:
    draw = random.Random(seed)
    moved = 0
    for _ in range(300):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
        source, target = View("source", shape, contiguous_strides(shape), 0, "float16"), spread(shape, draw)
        part = part_of(source, draw)
        found = moved_view(part, source, target)
        if found is not None:
            moved += 1
            expected = dict(zip(elements(source).ravel(), elements(target).ravel(), strict=True))
            assert [expected[place] for place in elements(part).ravel()] == list(elements(found).ravel())
    assert moved > 100


def test_views_that_are_said_to_be_apart_share_no_element(seed: int) -> None:
    draw = random.Random(seed)
    apart = 0
    for _ in range(500):
        shape = tuple(draw.randint(2, 6) for _ in range(draw.randint(1, 3)))
        whole = View("t", shape, contiguous_strides(shape), 0, "float16")
        first, second = part_of(whole, draw), part_of(whole, draw)
        if are_apart(first, second):
            apart += 1
            assert not set(elements(first).ravel()) & set(elements(second).ravel())
    assert apart > 20
