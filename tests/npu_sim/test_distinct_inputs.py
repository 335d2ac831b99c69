"""Inputs stay distinct, whatever tensors were their examples: a graph's inputs are those of `forward`."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import npu_sim
from npu_compiler import IRError

Pair = namedtuple("Pair", "first second")


@dataclass
class Operands:
    first: torch.Tensor
    second: torch.Tensor


class Weighted(nn.Module):
    """Each tensor that it is given, or has, has another factor in the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("buffer", torch.randn(3, 4))
        self.plain = torch.randn(3, 4)
        self.listed = [torch.randn(3, 4)]

    def forward(self, first: torch.Tensor, second: Any, *, third: torch.Tensor) -> torch.Tensor:
        inner = second.values() if isinstance(second, dict) else second
        if isinstance(second, Operands):
            inner = (second.first, second.second)
        tensors = (first, *inner, third, self.weight, self.buffer, self.plain, *self.listed)
        return sum((index + 2) * x for index, x in enumerate(tensors))


def answers_for(call: Callable[..., Any], module: nn.Module, wrap: Callable[..., Any]) -> None:
    """A call with different tensors gives PyTorch's answer."""
    a, b, c, d = (torch.randn(3, 4) for _ in range(4))
    wanted = module(a, wrap(b, c), third=d)
    torch.testing.assert_close(torch.as_tensor(call(a, wrap(b, c), third=d)), wanted)


WRAPS = [lambda *x: x, lambda *x: list(x), lambda x, y: {"a": x, "b": y}, Operands, Pair]


@pytest.mark.parametrize("wrap", WRAPS, ids=["tuple", "list", "dict", "dataclass", "namedtuple"])
def test_one_example_for_all_inputs(wrap: Callable[..., Any], tmp_path: Path) -> None:
    module, x = Weighted().eval(), torch.randn(3, 4)
    with torch.no_grad():
        compiled = npu_sim.compile(module, (x, wrap(x, x)), {"third": x})
        answers_for(compiled, module, wrap)
        compiled.save(tmp_path / "net.npumod")
        answers_for(npu_sim.load(tmp_path / "net.npumod"), module, wrap)


@pytest.mark.parametrize(
    "example",
    [
        lambda module: module.weight,
        lambda module: module.weight.data,
        lambda module: module.buffer,
        lambda module: module.buffer[:],
        lambda module: module.plain,
        lambda module: module.listed[0],
    ],
    ids=["parameter", "its-data", "buffer", "a-view-of-it", "attribute", "in-a-list"],
)
def test_an_example_that_is_a_tensor_of_the_module(example: Callable[[Weighted], torch.Tensor]) -> None:
    module = Weighted().eval()
    with torch.no_grad():
        x = example(module)
        answers_for(npu_sim.compile(module, (x, (x, x)), {"third": x}), module, lambda *x: x)
        compiled = torch.compile(module, backend="npu_sim")
        compiled(x, (x, x), third=x)
        answers_for(compiled, module, lambda *x: x)


def test_examples_that_are_views_of_one_another() -> None:
    module, x = Weighted().eval(), torch.randn(3, 4)
    with torch.no_grad():
        compiled = npu_sim.compile(module, (x, (x[:], x.view(3, 4))), {"third": x.detach()})
        answers_for(compiled, module, lambda *x: x)


class Total(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.sum() - 2 * second.sum()


def test_sizes_that_are_equal_in_the_example_change_apart() -> None:
    module, x = Total().eval(), torch.randn(5, 4)
    compiled = npu_sim.compile(module, (x, x), dynamic_shapes=({0: Dim("a")}, {0: Dim("b")}))
    first, second = torch.randn(3, 4), torch.randn(7, 4)
    torch.testing.assert_close(compiled(first, second), module(first, second))


def test_an_example_keeps_its_strides() -> None:
    class Written(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            second.contiguous().add_(1)
            return first - 2 * second

    x = torch.randn(4, 3).t()
    compiled = npu_sim.compile(Written().eval(), (x, x))
    first, second = torch.randn(4, 3).t(), torch.randn(4, 3).t()
    before = second.clone()
    torch.testing.assert_close(compiled(first, second), first - 2 * before)
    assert torch.equal(second, before)


def test_a_program_that_was_exported_with_one_tensor_for_two_inputs_is_refused(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    exported = torch.export.export(Total().eval(), (x, x))
    torch.export.save(exported, tmp_path / "net.pt2")
    for program in (exported, tmp_path / "net.pt2"):
        with pytest.raises(IRError, match=r"example of input 'args\[1\]' was the same tensor as 'args\[0\]'.* export"):
            npu_sim.compile(program)
    module = Weighted().eval()
    exported = torch.export.export(module, (module.weight, (x, x.clone())), {"third": x.clone()})
    with pytest.raises(IRError, match=r"input 'args\[0\]' was the same tensor as 'weight'"):
        npu_sim.compile(exported)
