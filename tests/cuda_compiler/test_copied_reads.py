"""Copies that readers do without: they read the copy's source, by views with the same elements in the same order."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from cuda_reference import LaidOut, ReferenceBackend
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from module_runs import run_module
from numpy.lib.stride_tricks import as_strided
from torch import nn

import npu_compiler
from cuda_compiler.passes.copied_reads import read_sources
from cuda_compiler.passes.packed_operands import copy
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def elements(view: View, memory: np.ndarray) -> np.ndarray:
    """A view's elements, as an array over `memory` that may be written."""
    steps = [stride * memory.itemsize for stride in view.strides]
    return as_strided(memory[view.offset :], view.shape, steps)


def plan_of(views: list[View], kinds: list[str]) -> ExecutionPlan:
    """The plan of copies from each view's buffer to the next, given as source and target in turns."""
    names = {view.buffer: kind for view, kind in zip(views, kinds, strict=True)}
    ends = {
        name: max(
            1 + view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
            for view in views
            if view.buffer == name
        )
        for name in names
    }
    buffers = {name: BufferAllocation(name, kind, (ends[name],), "float32") for name, kind in names.items()}  # type: ignore[arg-type]
    calls = [copy(source, target, target.buffer) for source, target in zip(views[::2], views[1::2], strict=True)]
    return ExecutionPlan([], calls, buffers, [], [], {"y": views[-1]}, {}, {}, {})


def in_order(name: str, shape: tuple[int, ...], order: list[int], widened: list[bool]) -> View:
    """A view whose dimensions lie in memory in an order, with gaps or with repeated elements along some of them."""
    steps = contiguous_strides(tuple(shape[dim] * (1 + widened[dim]) for dim in order))
    return View(name, shape, tuple(steps[order.index(dim)] for dim in range(len(shape))), 0, "float32")


@st.composite
def copies(draw: st.DrawFn) -> list[View]:
    """A copy's source and target, and a view of the target with its own target."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    rank = len(shape)
    flags = st.lists(st.booleans(), min_size=rank, max_size=rank)
    source = in_order("s", shape, draw(st.permutations(range(rank))), draw(flags))
    repeated = draw(flags)
    source = replace(
        source, strides=tuple(0 if no else step for no, step in zip(repeated, source.strides, strict=True))
    )
    order = draw(st.permutations(range(rank)))
    target = in_order("t", shape, order, [False] * rank)
    read = target.permute(order)
    for _ in range(draw(st.integers(0, 3))):
        read = draw(st.sampled_from([joined, divided, turned, sliced]))(read, draw)
    order = draw(st.permutations(range(read.rank)))
    return [source, target, read, in_order("y", read.shape, order, [False] * read.rank)]


def joined(view: View, draw: st.DrawFn) -> View:
    at = draw(st.integers(0, max(view.rank - 2, 0)))
    return view.reshape((*view.shape[:at], prod(view.shape[at : at + 2]), *view.shape[at + 2 :])) or view


def divided(view: View, draw: st.DrawFn) -> View:
    at = draw(st.integers(0, view.rank - 1))
    inner = draw(st.sampled_from([each for each in (1, 2, 3, 4, 6) if view.shape[at] % each == 0]))
    return view.reshape((*view.shape[:at], view.shape[at] // inner, inner, *view.shape[at + 1 :])) or view


def turned(view: View, draw: st.DrawFn) -> View:
    return view.permute(draw(st.permutations(range(view.rank))))


def sliced(view: View, draw: st.DrawFn) -> View:
    dim = draw(st.integers(0, view.rank - 1))
    start = draw(st.integers(0, view.shape[dim] - 1))
    return view.slice(dim, start, draw(st.integers(start + 1, view.shape[dim])), draw(st.integers(1, 2)))


@given(copies())
def test_readers_find_the_same_elements_in_the_source(views: list[View]) -> None:
    plan = read_sources(plan_of(views, ["input", "arena", "arena", "output"]))
    memory = {name: np.full(buffer.alloc_shape, -1) for name, buffer in plan.buffers.items()}
    memory["s"][:] = np.arange(len(memory["s"]))
    for call in plan.calls:
        elements(call.outputs[0], memory[call.outputs[0].buffer])[...] = elements(
            call.inputs[0], memory[call.inputs[0].buffer]
        )
    source, target, read, out = views
    whole = np.zeros(plan.buffers["t"].alloc_shape, int)
    elements(target, whole)[...] = elements(source, np.arange(len(memory["s"])))
    np.testing.assert_array_equal(elements(out, memory["y"]), elements(read, whole))


@given(st.data())
def test_readers_of_joined_parts_find_the_same_elements_in_the_sources(data: st.DataObject) -> None:
    """A buffer is joined of parts along one dimension; a view of it, of one part or of several, is read."""
    shape = data.draw(st.lists(SIZES, min_size=1, max_size=4).map(tuple))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.sets(st.integers(0, shape[dim]))) | {0, shape[dim]})
    whole = View("t", shape, contiguous_strides(shape), 0, "float32")
    parts = [whole.slice(dim, *bounds) for bounds in zip(cuts, cuts[1:], strict=False)]
    read = data.draw(st.sampled_from([*parts, whole]))
    for _ in range(data.draw(st.integers(0, 3))):
        read = data.draw(st.sampled_from([joined, divided, turned, sliced]))(read, data.draw)
    views = []
    for number, part in enumerate(parts):
        places = data.draw(st.permutations(range(part.rank)))
        steps = contiguous_strides(tuple(part.shape[place] for place in places))
        strides = tuple(steps[places.index(axis)] for axis in range(part.rank))
        views += [View(f"s{number}", part.shape, strides, 0, "float32"), part]
    views += [read, View("y", read.shape, contiguous_strides(read.shape), 0, "float32")]
    kinds = {"t": "arena", "y": "output"}
    plan = plan_of(views, [kinds.get(view.buffer, "input") for view in views])
    memory = {name: np.full(buffer.alloc_shape, -1) for name, buffer in plan.buffers.items()}
    for number, name in enumerate(name for name in memory if name.startswith("s")):
        memory[name][:] = 1000 * number + np.arange(memory[name].size)
    results = []
    for calls in (plan.calls, read_sources(plan).calls):
        for call in calls:
            source, target = call.inputs[0], call.outputs[0]
            elements(target, memory[target.buffer])[...] = elements(source, memory[source.buffer])
        results.append(memory["y"].copy())
    np.testing.assert_array_equal(*results)


def test_a_repeated_dimension_is_divided() -> None:
    source = View("s", (2, 4, 3, 5), (4, 1, 0, 0), 0, "float32")
    target = View("t", (2, 4, 3, 5), (60, 15, 5, 1), 0, "float32")
    read = View("t", (2, 5, 12), (60, 1, 5), 0, "float32")  # [N, C, W] as [N, W, C]
    out = View("y", (2, 5, 12), (60, 12, 1), 0, "float32")
    (call,) = read_sources(plan_of([source, target, read, out], ["input", "arena", "arena", "output"])).calls
    assert call.inputs[0].buffer == "s"
    assert (call.inputs[0].shape, call.inputs[0].strides) == ((2, 5, 4, 3), (4, 0, 1, 0))


def test_a_copy_of_an_input_that_an_output_overwrites_stays() -> None:
    source, target, out = (View(name, (2, 4), (4, 1), 0, "float32") for name in "sty")
    plan = plan_of([source, target, target, out], ["input", "arena", "arena", "output"])
    assert len(read_sources(plan).calls) == 1
    assert len(read_sources(replace(plan, donations={"y": "s"})).calls) == 2


class GroupedStatistics(nn.Module):
    """Images divided by statistics of groups of channels, as EvoNorm does, and convolved."""

    def __init__(self, draw: np.random.Generator) -> None:
        super().__init__()
        self.groups, within = (int(draw.choice(each)) for each in ((1, 2, 4), (2, 3, 8)))
        channels = self.groups * within
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.statistic = draw.choice(["var", "mean", "amax", "std"])
        self.dims = [(2, 3, 4), (3, 4), (2,), (2, 4)][draw.integers(4)]
        self.cut, self.middle = bool(draw.integers(2)), bool(draw.integers(2))
        self.example = torch.from_numpy(draw.standard_normal((2, 1 + 6 * 5, 3 * channels), np.float32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        channels = self.conv.in_channels
        part = tokens[:, 1:] if self.cut else tokens[:, :-1]
        part = part[..., channels : 2 * channels] if self.middle else part[..., :channels]
        x = part.transpose(1, 2).reshape(2, channels, 6, 5)
        x = self.conv(x)
        grouped = x.reshape(2, self.groups, channels // self.groups, 6, 5)
        found = getattr(grouped, self.statistic)(dim=self.dims, keepdim=True)
        return self.conv(torch.sigmoid(x) / (1.0 + found.expand(grouped.shape).reshape(x.shape).abs()))


@pytest.mark.parametrize("number", drawn(range(100), 0.1, str))
def test_statistics_of_groups_have_pytorchs_results(number: int) -> None:
    module = GroupedStatistics(np.random.default_rng(number)).eval()
    with torch.no_grad():
        ir, expected = extract_ir(module, (module.example,)), module(module.example)
    plan = npu_compiler.partition(ir, target=LaidOut(), compute_dtype="float32")
    dag = DAGExecutor(plan, ReferenceBackend())
    dag.load_weights(module.state_dict())
    (result,) = dag.execute({ir["graph_inputs"][0]["name"]: module.example.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result), expected, atol=2e-3, rtol=2e-3)


class SplitAttention(nn.Module):
    """Convolutions whose results are stacked, weighed by their means and added up, as in SKNet."""

    def __init__(self, draw: np.random.Generator) -> None:
        super().__init__()
        channels, self.dim = int(draw.choice([3, 8, 16])), int(draw.integers(0, 2))
        self.convs = nn.ModuleList(nn.Conv2d(3, channels, 3, padding=1) for _ in range(int(draw.integers(2, 4))))
        self.rate = nn.Conv2d(channels, channels * len(self.convs), 1)
        self.last = nn.Conv2d(channels, 4, 1)
        self.stacks, self.reads_all = bool(draw.integers(2)), bool(draw.integers(3) == 0)
        self.example = torch.from_numpy(draw.standard_normal((2, 3, 6, 5), np.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.relu(conv(x)) for conv in self.convs]
        count = len(parts)
        joined = torch.stack(parts, dim=1) if self.stacks else torch.cat(parts, dim=1).unflatten(1, (count, -1))
        ratings = self.rate(joined.sum(1).mean((2, 3), keepdim=True)).unflatten(1, (count, -1)).softmax(dim=1)
        result: torch.Tensor = self.last((joined * ratings).sum(dim=1) + joined[:, 0] * joined[:, -1])
        return result + joined.amax() if self.reads_all else result


@pytest.mark.parametrize("number", drawn(range(60), 0.2, str))
def test_parts_that_are_joined_and_read_one_by_one_have_pytorchs_results(number: int) -> None:
    module = SplitAttention(np.random.default_rng(number)).eval()
    with torch.no_grad():
        expected = module(module.example)
        program, (result,) = run_module(ReferenceBackend(), module, module.example, "float32")
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    if module.stacks and not module.reads_all:
        assert "stack" not in {view.buffer for call in program.plan.calls for view in call.outputs}


class Heads(nn.Module):
    """Heads of a joint projection in one of the orders that models have them in, and products and attention of them."""

    def __init__(self, draw: np.random.Generator) -> None:
        super().__init__()
        self.heads, self.width, self.side = (int(draw.choice(each)) for each in ((1, 2, 3), (8, 12, 16), (3, 4, 6)))
        features = self.heads * self.width
        self.project, self.last = nn.Linear(features, 3 * features), nn.Linear(features, 5)
        self.positions = nn.Parameter(
            torch.from_numpy(draw.standard_normal((self.side, self.side, self.width), np.float32))
        )
        self.joins_heads, self.kind = (
            bool(draw.integers(2)),
            str(draw.choice(["attended", "biased", "factored", "by_rows"])),
        )
        batch = int(draw.integers(1, 4))
        self.example = torch.from_numpy(draw.standard_normal((batch, self.side**2, features), np.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, features = x.shape
        joint = self.project(x).reshape(batch, tokens, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        if self.joins_heads:
            joint = joint.reshape(3, batch * self.heads, tokens, self.width)
        q, k, v = joint.unbind(0)
        result = getattr(self, self.kind)(q, k, v)
        result = result.reshape(batch, self.heads, tokens, self.width).transpose(1, 2).reshape(batch, tokens, features)
        output: torch.Tensor = self.last(result)
        return output

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def biased(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention with a bias by the distances of rows and of columns, as SAM has it."""
        grid = q.reshape(-1, self.side, self.side, self.width)
        by_row = torch.einsum("bhwc,hkc->bhwk", grid, self.positions)[..., None]
        by_column = torch.einsum("bhwc,wkc->bhwk", grid, self.positions)[..., None, :]
        bias = (by_row + by_column).reshape(*q.shape[:-1], self.side**2)
        return nn.functional.scaled_dot_product_attention(q, k, v, bias)

    def factored(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention whose keys and values are multiplied first, as CoaT has it."""
        return q @ (k.softmax(dim=-2).transpose(-1, -2) @ v)

    def by_rows(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Products of each row of an image with a matrix of its own."""
        grid = q.reshape(-1, self.side, self.side, self.width)
        return v + torch.einsum("bhwc,hkc,wkd->bhwd", grid, self.positions, self.positions).reshape(v.shape) + k


@pytest.mark.parametrize("number", drawn(range(80), 0.2, str))
def test_heads_in_drawn_orders_have_pytorchs_results(number: int) -> None:
    module = Heads(np.random.default_rng(number)).eval()
    with torch.no_grad():
        expected = module(module.example)
        _, (result,) = run_module(ReferenceBackend(), module, module.example, "float16")
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)
