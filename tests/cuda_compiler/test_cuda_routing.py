"""The choice of experts is one kernel on CUDA; what something else reads, or a warp cannot choose, stays apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cuda_toolchain
import pytest
import torch
from cuda_on_cpu import run_on_cpu
from drawn import drawn
from torch import Tensor, nn
from zoo_runs import extract

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_compiler import CompiledProgram


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(x)


def program(function: Callable[[Tensor], tuple[Tensor, ...]], rows: int = 3, experts: int = 40) -> CompiledProgram:
    ir = extract(Applied(function), [torch.empty(rows, experts)])
    return npu_compiler.compile(ir, CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype="float32"))


def kernels(function: Callable[[Tensor], tuple[Tensor, ...]], rows: int = 3, experts: int = 40) -> list[str]:
    return [call.kernel for call in program(function, rows, experts).plan.calls]


def plain(x: Tensor) -> tuple[Tensor, ...]:
    values, chosen = x.topk(4, dim=-1)
    return values, chosen + 1


def before(x: Tensor) -> tuple[Tensor, ...]:
    return plain(x.softmax(-1))


def divided(x: Tensor) -> tuple[Tensor, ...]:
    values, chosen = x.softmax(-1).topk(4, dim=-1)
    return values / values.sum(-1, keepdim=True), chosen + 1


def after(x: Tensor) -> tuple[Tensor, ...]:
    values, chosen = x.topk(4, dim=-1)
    return values.softmax(-1), chosen + 1


FORMS = [plain, before, divided, after]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_choice_is_one_kernel(form: Callable[[Tensor], tuple[Tensor, ...]], rows: int) -> None:
    first, *others = kernels(form, rows)
    assert first == "route"
    assert not any(name.startswith(("softmax", "argsort", "gather", "sum", "fused_true_divide")) for name in others)


@pytest.mark.parametrize("form", drawn(FORMS, 1 / 2, lambda form: form.__name__))
def test_a_choice_is_that_of_pytorch(form: Callable[[Tensor], tuple[Tensor, ...]], tmp_path: Path) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    x[0, 3], x[1, 5] = x[0].max(), 9.0
    x[2] = x[2].round()  # of equal ones the first
    plan = program(form).plan
    memory = run_on_cpu(plan, {"x": x.numpy()}, tmp_path)
    weights, chosen = (torch.from_numpy(memory[view.buffer]).reshape(view.shape) for view in plan.output_views.values())
    order = x.sort(dim=-1, descending=True, stable=True)[1][:, :4]
    torch.testing.assert_close(chosen.long() - 1, order)
    values = (x if form in (plain, after) else x.softmax(-1)).gather(1, order)
    sums = {divided: values / values.sum(-1, keepdim=True), after: values.softmax(-1)}
    torch.testing.assert_close(weights, sums.get(form, values), equal_nan=True)


@pytest.mark.parametrize("turn", drawn(range(3), 1 / 3))
def test_the_sources_compile(turn: int) -> None:
    cuda_toolchain.architectures()
    sources: dict[str, str] = {}
    for form in FORMS:
        sources |= program(form).plan.sources | program(form, 1, 1000).plan.sources
    cuda_toolchain.compile_in_turn(sources.values(), turn)


def test_probabilities_that_something_else_reads_are_computed_before() -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        probabilities = x.softmax(-1)
        return (*plain(probabilities), probabilities.exp())

    assert kernels(both)[:2] == ["fused_softmax_kernel", "route"]


def test_weights_that_something_else_reads_are_kept_as_they_are_chosen() -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        values, chosen = x.topk(4, dim=-1)
        return values.softmax(-1), values.exp(), chosen + 1

    assert kernels(both)[0] == "route" and "softmax_kernel" in kernels(both)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.topk(4, dim=-1, largest=False)[0],),
        lambda x: (x.topk(2, dim=0)[0],),
        lambda x: (x.topk(33, dim=-1)[0],),
        lambda x: (x.gather(1, x.argsort(dim=-1, descending=True)[:, :4]), x.argsort(dim=-1, descending=True)),
        lambda x: x.sort(dim=-1, descending=True),
    ],
    ids=["least", "columns", "too-many", "whole-order", "whole-values"],
)
def test_other_orders_are_sorted(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    found = kernels(function)
    assert "argsort_kernel" in found and "route" not in found
