"""Writes through views, and the memory of results, are those of PyTorch for the strides with which it traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, currently_in_test_context, event, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import npu_sim
from npu_compiler import InputError, IRError
from npu_runtime import Device, NPUBuffer
from npu_sim.cli import app
from npu_sim.extract import extract_ir

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor(self, seed: int) -> torch.Tensor:
        """A tensor of small whole numbers, in memory that holds more than it."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        generator = torch.Generator().manual_seed(seed)
        memory = torch.randint(-8, 9, (self.offset + last + 3,), generator=generator).float()
        return torch.as_strided(memory, self.shape, self.strides, self.offset)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Dimensions in any order in memory, with gaps between them."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    stride, strides = 1, [0] * len(shape)
    for dim in draw(st.permutations(range(len(shape)))):
        stride *= draw(st.sampled_from([1, 1, 1, 2]))
        strides[dim] = stride
        stride *= shape[dim]
    return Layout(tuple(shape), tuple(strides), draw(st.integers(0, 2)))


@st.composite
def views(draw: st.DrawFn, shape: Sequence[int]) -> tuple[str, View]:
    """An op that returns a view, a copy, or one of both as strides say."""
    rank = len(shape)
    dim = draw(st.integers(0, rank - 1)) if rank else 0
    other = draw(st.integers(0, rank - 1)) if rank else 0
    order = draw(st.permutations(range(rank)))
    size = shape[dim] if rank else 1
    start, step = draw(st.integers(0, max(size - 1, 0))), draw(st.integers(1, 2))
    window = draw(st.integers(1, size))
    split = draw(st.sampled_from([x for x in range(1, size + 1) if size % x == 0]))
    target = [*shape[:dim], split, size // split, *shape[dim + 1 :]]
    if draw(st.booleans()):
        target = [math.prod(shape)] if draw(st.booleans()) else [*target[:-2], math.prod(target[-2:])]
    always: dict[str, View] = {
        "reshape": lambda x: x.reshape(target),
        "contiguous": lambda x: x.contiguous(),
        "clone": lambda x: x.clone(),
        "to": lambda x: x.to(torch.float32),
        "copy": lambda x: x.to(torch.float32, copy=True),
        "type_as": lambda x: x.type_as(x),
        "flatten": lambda x: x.flatten(),
        "ravel": lambda x: x.ravel(),
        "squeeze": lambda x: x.squeeze(),
        "unsqueeze": lambda x: x.unsqueeze(dim),
        "detach": lambda x: x.detach(),
        "reshape_as": lambda x: x.reshape_as(x.new_empty(target)),
        "dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
        "expand": lambda x: x.expand(2, *shape),
        "double": lambda x: x * 2,
        "atleast_2d": torch.atleast_2d,
    }
    if rank:
        always |= {
            "transpose": lambda x: x.transpose(dim, other),
            "permute": lambda x: x.permute(order),
            "slice": lambda x: x[(slice(None),) * dim + (slice(start, None, step),)],
            "narrow": lambda x: x.narrow(dim, start, size - start),
            "select": lambda x: x.select(dim, start),
            "unfold": lambda x: x.unfold(dim, window, step),
            "unbind": lambda x: x.unbind(dim)[start],
            "split": lambda x: x.split(window, dim)[0],
            "movedim": lambda x: x.movedim(dim, other),
            "unflatten": lambda x: x.unflatten(dim, (split, size // split)),
        }
        always["last"] = lambda x: x.squeeze(dim)
    if rank >= 2:
        always["flatten_two"] = lambda x: x.flatten(0, 1)
        if dim != other:
            always["diagonal"] = lambda x: x.diagonal(0, dim, other)
    if rank == 4:
        always["channels_last"] = lambda x: x.contiguous(memory_format=torch.channels_last)
        always["to_channels_last"] = lambda x: x.to(memory_format=torch.channels_last)
    name = draw(st.sampled_from(sorted(always)))
    return name, always[name]


WRITES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "add_": lambda x, seed: x.add_(seed),
    "mul_": lambda x, seed: x.mul_(-2),
    "first": lambda x, seed: x[..., 0].fill_(seed) if x.dim() else x.fill_(seed),
    "relu_": lambda x, seed: x.relu_(),
    "whole": lambda x, seed: x.copy_(torch.full(x.shape, float(seed))),
}


class Drawn(nn.Module):
    """Steps over a growing list of tensors, of which it returns some.

    Args:
        steps: (index of a tensor, a view of it to append, or how to write to it).
    """

    def __init__(self, steps: Sequence[tuple[int, str, Any]], results: Sequence[int]) -> None:
        super().__init__()
        self.steps, self.results = steps, results

    def forward(self, *tensors: torch.Tensor) -> Any:
        values = list(tensors)
        for seed, (index, kind, step) in enumerate(self.steps):
            if kind == "view":
                values.append(step(values[index]))
            else:
                WRITES[kind](values[index], seed + 3)
        return tuple(values[index] for index in self.results)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Layout], Drawn, str]:
    given_layouts = draw(st.lists(layouts(), min_size=1, max_size=2))
    values = [layout.tensor(0) for layout in given_layouts]
    steps: list[tuple[int, str, Any]] = []
    text = [str([(x.shape, x.strides) for x in given_layouts])]
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(max(0, len(values) - 3), len(values) - 1))
        if draw(st.integers(0, 2)):
            name, view = draw(views(tuple(values[index].shape)))
            steps.append((index, "view", view))
            values.append(view(values[index]))
        else:
            name = draw(st.sampled_from(sorted(WRITES)))
            try:
                WRITES[name](values[index], 1)
            except RuntimeError:  # elements that share memory
                continue
            steps.append((index, name, None))
        text.append(f"{len(values)}: {name}({index})")
    results = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
    return given_layouts, Drawn(steps, results).eval(), f"{'; '.join(text)}; return {results}"


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // 4,), (1,), 0)


def sharing(results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return, for each result, the arguments and results that share its memory."""
    everything = [x.untyped_storage().data_ptr() for x in (*arguments, *results)]
    return [tuple(i for i, x in enumerate(everything) if x == own) for own in everything[len(arguments) :]]


def note_event(text: str) -> None:
    if currently_in_test_context():
        event(text)


def check_route(compiled: Callable[..., Any], module: nn.Module, given_layouts: Sequence[Layout]) -> None:
    """Two calls give PyTorch's results, in memory that PyTorch's share too, and change the arguments as it does."""
    for seed in (1, 2):
        mine = [layout.tensor(seed + 10 * i) for i, layout in enumerate(given_layouts)]
        its = [layout.tensor(seed + 10 * i) for i, layout in enumerate(given_layouts)]
        got, wanted = compiled(*mine), module(*its)
        for one, other in zip(got, wanted, strict=True):
            assert one.shape == other.shape and torch.equal(one, other)
        for one, other in zip(mine, its, strict=True):
            assert torch.equal(memory_of(one), memory_of(other))
        assert sharing(got, mine) == sharing(wanted, its)


@torch.no_grad()
def check(program: tuple[list[Layout], Drawn, str]) -> None:
    given_layouts, module, _ = program
    try:
        compiled = npu_sim.compile(module, tuple(layout.tensor(5) for layout in given_layouts))
    except IRError as error:
        note_event("refused")
        assert "no out-of-place form" in str(error)
    else:
        note_event(type(compiled).__name__)
        check_route(compiled, module, given_layouts)
    torch._dynamo.reset()
    check_route(torch.compile(module, backend="npu_sim"), module, given_layouts)


_HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=4, deadline=None, suppress_health_check=_HEALTH, derandomize=True)
@given(programs())
def test_a_few_drawn_views_and_writes(program: tuple[list[Layout], Drawn, str]) -> None:
    check(program)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=_HEALTH)
@given(programs())
def test_drawn_views_and_writes(program: tuple[list[Layout], Drawn, str]) -> None:
    check(program)


def _copies_of_transposes(x: torch.Tensor) -> Any:
    y = x.contiguous()
    y.add_(1)
    z = (x.t() * 2).reshape(-1)
    z[0] = 3.0
    return x * 2, y, z


def _a_product_in_column_order(x: torch.Tensor) -> Any:
    h = x.t() * 2
    h.reshape(-1)[0] = 3.0
    h.t().flatten()[2] = 9.0
    return h


def _channels_last(x: torch.Tensor) -> Any:
    h = x.reshape(1, 4, 3, 2).contiguous(memory_format=torch.channels_last) * 1
    h.permute(0, 2, 3, 1).reshape(-1, 4)[:, 0] = 100
    h.contiguous()[0, 0] = -1
    return h


def _under_no_grad(x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x.t().reshape(-1)
        y[0] = 7
    return x + 1, y


def _dropout(x: torch.Tensor) -> Any:
    y = nn.functional.dropout(x, 0.5, training=False).reshape(-1)
    y.add_(1)
    return x * 2, y


def _several_at_once(x: torch.Tensor) -> Any:
    a, b = x * 1, x * 2
    torch._foreach_add_([a, b], 1)
    return a, b


def _out(x: torch.Tensor) -> Any:
    z = torch.zeros_like(x)
    torch.add(x, x, out=z[:])
    return z


def _operators(x: torch.Tensor) -> Any:
    flags = x > 3
    flags &= x < 9
    flags ^= x > 5
    return flags


def _views_that_are_not_annotated(x: torch.Tensor) -> Any:
    z = x[0] * 1
    torch.atleast_2d(z)[0, 0] = 77
    a, b = torch.meshgrid(z, z, indexing="ij")
    w = torch.broadcast_tensors(z, x)[0]
    z.add_(1)
    return z, a, b, w


def _an_einsum_that_is_a_view(x: torch.Tensor) -> Any:
    z = x * 1
    torch.einsum("ij->ji", z)[0, 1] = 77
    return z


def _as_strided(x: torch.Tensor) -> Any:
    z = (x * 1).contiguous()
    torch.as_strided(z, (2,), (2,))[0] = 5
    return z


def _another_dtype(x: torch.Tensor) -> Any:
    z = (x * 1).contiguous()
    z.view(torch.int32)[0] = 0
    return z


CASES = [
    value for name, value in sorted(globals().items()) if name.startswith("_") and hasattr(value, "__annotations__")
]
LAYOUTS = [Layout((4, 6), (6, 1), 0), Layout((4, 6), (1, 4), 1), Layout((4, 6), (12, 2), 0)]


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        result = self.function(*args)
        return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["rows", "columns", "gaps"])
@pytest.mark.parametrize("function", [pytest.param(x, id=x.__name__[1:]) for x in CASES if x.__module__ == __name__])
def test_views_and_copies_are_told_apart_by_strides(function: Callable[..., Any], layout: Layout) -> None:
    check(([layout], Function(function).eval(), ""))


def test_programs_from_files_know_their_views_too(tmp_path: Path) -> None:
    for function in (_copies_of_transposes, _a_product_in_column_order, _under_no_grad, _dropout):
        for layout in LAYOUTS[:2]:
            module = Function(function).eval()
            exported = torch.export.export(module, (layout.tensor(0),))
            torch.export.save(exported, tmp_path / "net.pt2")
            for program in (exported, tmp_path / "net.pt2"):
                check_route(npu_sim.compile(program), module, [layout])


@torch.no_grad()
def test_a_written_argument_has_the_strides_of_the_example() -> None:
    module = Function(lambda x: x.contiguous().add_(1)).eval()
    compiled = npu_sim.compile(module, (torch.zeros(3, 4),))
    compiled(torch.zeros(3, 4))
    with pytest.raises(
        InputError, match=r"'args\[0\]' has strides \[1, 3\], but .* compiled for \[4, 1\], which decide"
    ):
        compiled(torch.zeros(4, 3).t())
    rows = {"args": ({0: torch.export.Dim("rows")},)}
    compiled = npu_sim.compile(module, (torch.zeros(4, 3).t(),), dynamic_shapes=rows)
    check_route(compiled, module, [Layout((5, 4), (1, 5), 0)])


@torch.no_grad()
def test_a_written_argument_of_a_loaded_module_has_the_strides_of_the_example(tmp_path: Path) -> None:
    """`contiguous` of a transposed matrix is a copy, of others the matrix itself, which PyTorch would write."""
    module = Function(lambda x: x.contiguous().add_(1)).eval()
    rows = {"args": ({0: torch.export.Dim("rows")},)}
    npu_sim.compile(module, (torch.zeros(4, 3).t(),), dynamic_shapes=rows).save(tmp_path / "net.npumod")
    loaded = npu_sim.load(tmp_path / "net.npumod", device="cpu")
    for x in (torch.zeros(4, 5).t(), np.zeros((4, 5), np.float32).T):
        assert np.all(loaded(x)[0] == 1) and not np.asarray(x).any()
    dense = np.zeros((5, 4), np.float32)
    for x in (torch.zeros(5, 4), dense, NPUBuffer.from_numpy(dense, Device("cpu"))):
        with pytest.raises(InputError, match=r"'args\[0\]' has strides \[4, 1\], but .* for \[1, 5\], which decide"):
            loaded(x)
    result = CliRunner().invoke(app, ["run", str(tmp_path / "net.npumod"), "--device", "cpu"])
    assert result.exit_code == 0, result.output


class Sharing(nn.Module):
    """A buffer, and a part of it in another buffer, which calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(6))
        self.register_buffer("part", self.whole[:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.add_(1)
        return x + self.whole[:3]


@torch.no_grad()
def test_state_that_shares_memory_with_a_weight_is_not_taken_for_another_tensor(tmp_path: Path) -> None:
    with pytest.raises(IRError, match="'part' is changed in place, but shares memory with another parameter or buffer"):
        npu_sim.compile(Sharing().eval(), (torch.zeros(3),))
    x, ours, theirs = torch.ones(3), Sharing().eval(), Sharing().eval()
    compiled = torch.compile(ours, backend="npu_sim")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), theirs(x))
    torch.testing.assert_close(ours.whole, theirs.whole)
    apart = Sharing().eval()
    apart.part = torch.zeros(3)
    compiled = npu_sim.compile(apart, (x,))
    assert compiled(x).eq(1).all() and apart.part.eq(1).all()
    apart.part = apart.whole[:3]
    with pytest.raises(InputError, match="'part' is changed in place, but shares memory with another"):
        compiled(x)
    with pytest.raises(InputError, match="a file cannot hold that 'part', which a call changes, shares memory"):
        compiled.save(tmp_path / "net.npumod")


@torch.no_grad()
def test_a_weight_as_an_argument_that_is_written_is_refused() -> None:
    module = nn.Linear(3, 3, bias=False).eval()
    compiled = npu_sim.compile(Function(lambda x: (x.add_(1), module(x))).eval(), (torch.zeros(3, 3),))
    with pytest.raises(InputError, match=r"argument 'args_0' is changed in place, but shares memory with another"):
        compiled(module.weight.detach())


@torch.no_grad()
def test_tracing_leaves_tensors_in_plain_attributes_as_they_are() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.counts = torch.zeros(3), [torch.zeros(3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts[0].mul_(2).add_(1)
            return x + self.count.add_(1) + self.counts[0]

    x, ours, theirs = torch.ones(3), Counter().eval(), Counter().eval()
    compiled = npu_sim.compile(ours, (x,))
    assert not ours.count.any() and not ours.counts[0].any()
    for _ in range(3):
        torch.testing.assert_close(compiled(x), theirs(x))
    torch.testing.assert_close([ours.count, *ours.counts], [theirs.count, *theirs.counts])


def test_a_module_without_data_is_traced_with_its_plain_attributes() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(3, 3, device="meta"), torch.zeros(3, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.shift.to(x.dtype)

    assert extract_ir(Shifted().eval(), (torch.zeros(3, device="meta"),))["nodes"]


@torch.no_grad()
def test_a_written_argument_whose_elements_share_memory_is_not_taken_for_a_dense_one() -> None:
    module = Function(lambda x: x[0].add_(1)).eval()
    with pytest.raises(IRError, match="its elements share memory; clone it first"):
        npu_sim.compile(torch.export.export(module, (torch.zeros(1, 4).expand(3, 4),)))
    with pytest.raises(InputError, match=r"argument 'args\[0\]' has strides"):
        npu_sim.compile(module, (torch.zeros(3, 4),))(torch.zeros(1, 4).expand(3, 4))
    memory = torch.zeros(1, 4)
    npu_sim.compile(module, (torch.zeros(1, 4).expand(3, 4),))(memory.expand(3, 4))
    assert memory.eq(1).all()
