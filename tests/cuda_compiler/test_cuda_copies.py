"""Copies that the CUDA target leaves out: what is written to their targets instead, and that answers stay the same."""

from __future__ import annotations

import random

import numpy as np
import torch
from cuda_reference import LaidOut, ReferenceBackend
from torch import nn

import npu_compiler
from cuda_compiler.passes.copies import _are_apart, moved_view
from npu_compiler.program.views import View, contiguous_strides
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir


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
        if _are_apart(first, second):
            apart += 1
            assert not set(elements(first).ravel()) & set(elements(second).ravel())
    assert apart > 20


class Rotation(nn.Module):
    """Rotary embedding of all tokens but the first, as EVA-02 writes it."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rest = x[:, :, 1:]
        turned = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([x[:, :, :1], rest * cos + turned * sin], 2)


def test_rotated_rows_are_written_into_a_concatenation() -> None:
    x, cos, sin = torch.randn(2, 3, 9, 8), torch.randn(8, 8), torch.randn(8, 8)
    ir = extract_ir(Rotation(), (x, cos, sin))
    plan = npu_compiler.partition(ir, target=LaidOut(), compute_dtype="float32")
    dag = DAGExecutor(plan, ReferenceBackend())
    names = [meta["name"] for meta in ir["graph_inputs"]]
    (found,) = dag.execute(dict(zip(names, (x.numpy(), cos.numpy(), sin.numpy()), strict=True))).values()
    torch.testing.assert_close(torch.from_numpy(found), Rotation()(x, cos, sin))
    program = npu_compiler.compile(ir, LaidOut(), npu_compiler.CompileOptions(compute_dtype="float32"))
    copies = [call for call in program.kernels if call.kernel.startswith("copy")]
    assert [call.outputs[0].shape[2] for call in copies] == [1], "only the first token is copied"
