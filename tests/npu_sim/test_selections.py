"""Modules that select rows by computed numbers, keep no cache, or have one of their own class."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import decoders
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import npu_compiler
from npu_compiler import CompileOptions
from npu_compiler.errors import InputError
from npu_runtime import CPUBackend, Executor, load_weights
from npu_sim.llm.experts import join_experts
from npu_sim.llm.families import check_tensors
from npu_sim.llm.own_caches import OwnCache
from npu_sim.llm.selections import Selections, _Sizes
from npu_sim.llm.whole import check_causal, whole_logits
from npu_sim.module.trace import export, plain_ir, trace

transformers = pytest.importorskip("transformers")


def by_experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A loop over the experts that have rows, as transformers writes it."""
    result = torch.zeros_like(x)
    mask = nn.functional.one_hot(chosen, num_classes=len(weights) + 1).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, rows = torch.where(mask[hit[0]])
        result.index_add_(0, rows, nn.functional.linear(x[rows] + place[:, None], weights[hit[0]]))
    return result


def by_masks(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for expert in range(len(weights)):
        mask = chosen[:, 0] == expert
        result[mask] = nn.functional.linear(x[mask], weights[expert])
    return result


@pytest.mark.parametrize("function", [by_experts, by_masks])
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_selected_rows_are_all_rows_behind_a_mask(
    function: Callable[..., Tensor], rows: int, experts: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    weights = torch.randn(experts, 4, 4, generator=generator)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(rows)])
    expected = function(x, chosen, weights)
    with Selections():
        found = function(x, chosen, weights)
    torch.testing.assert_close(found, expected)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_parts_of_computed_sizes_are_joined_as_they_were_divided(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 4, generator=generator)
    weights = torch.randn(len(sizes), 3, 4, generator=generator)

    def product(given: Any) -> Tensor:
        parts = x.split(given, dim=0)
        return torch.cat([nn.functional.linear(part, w) for part, w in zip(parts, weights, strict=True)], dim=0)

    with Selections():
        found = product(_Sizes(torch.tensor(sizes)))
    torch.testing.assert_close(found, product(sizes))


def by_numbers(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A loop whose last experts have no matrix, and whose numbers are those of Python."""
    result, count = torch.zeros_like(x), len(weights) // 2 + 1
    mask = nn.functional.one_hot(chosen, num_classes=len(weights)).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False):
        number = int(hit.item())
        place, rows = torch.where(mask[number].squeeze(0))
        own = x[rows] if number >= count else x[rows].matmul(weights[number])
        result.index_add_(0, rows, own * (1 + place[:, None]))
    return result


def by_sizes(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Rows sorted by experts, whose numbers of rows divide them."""
    sizes = torch.zeros(len(x), len(weights)).scatter(1, chosen, 1).long().sum(0).tolist()
    order = chosen.flatten().sort(stable=True)[1]
    parts = x[order // chosen.shape[1]].split(sizes, dim=0)
    outer = torch.cat([nn.functional.linear(parts[i], weights[i]) for i in range(len(weights))], dim=0)
    return torch.zeros_like(x).index_add(0, order // chosen.shape[1], outer)


class Mixture(nn.Module):
    def __init__(self, function: Callable[..., Tensor], weights: Tensor) -> None:
        super().__init__()
        self.function, self.weights = function, nn.Parameter(weights)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        with Selections():
            result: Tensor = self.function(x, chosen, self.weights)
        return result


@pytest.mark.parametrize("function", [by_experts, by_numbers, by_sizes])
@pytest.mark.parametrize("experts", [2, 3, 300])
def test_a_loop_over_any_number_of_experts_is_one_product(function: Callable[..., Tensor], experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(5, 4, generator=generator)
    weights = torch.randn(experts, 4, 4, generator=generator)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(5)])
    module = Mixture(function, weights).eval()
    ir = plain_ir(trace(export(module, (x, chosen)), "mixture"))
    program = npu_compiler.compile(ir, options=CompileOptions(compute_dtype="float32"))
    assert [call.kernel for call in program.kernels if "matmul" in call.kernel] == ["expert_matmul_kernel"]
    backend = CPUBackend()
    given = {spec.name: value for spec, value in zip(program.input_specs, (x.numpy(), chosen.numpy()), strict=True)}
    (found,) = Executor(program, backend).run(given, load_weights(module.state_dict(), program, backend)).values()
    expected = function(x, chosen, weights)
    torch.testing.assert_close(torch.from_numpy(found.to_numpy()), expected, atol=1e-5, rtol=1e-5)


def test_matrices_of_experts_that_no_row_has_are_not_read() -> None:
    """The other matrices are NaN, which any product with them would show."""
    weights = torch.full((300, 4, 4), torch.nan)
    chosen = torch.tensor([[7, 250], [250, 3]])
    weights[chosen.flatten()] = torch.randn(4, 4, 4)
    x = torch.randn(2, 4)
    for function in (by_experts, by_numbers):
        expected = function(x, chosen, weights)
        with Selections():
            found = function(x, chosen, weights)
        torch.testing.assert_close(found, expected)


def loop(use: Callable[..., Any]) -> None:
    """A loop over two experts of three rows, in which `use` gets the result, the rows and the expert's matrix."""
    chosen, weights = torch.tensor([[0], [1], [1]]), torch.ones(2, 4, 4)
    mask = nn.functional.one_hot(chosen, num_classes=2).permute(2, 1, 0)
    for hit in mask.sum((1, 2)).nonzero():
        _, rows = torch.where(mask[hit[0]])
        use(torch.zeros(3, 4), rows, weights[hit[0]])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda y, rows, matrix: torch.add(matrix, 1), "uses their matrices in 'add'"),
        (lambda y, rows, matrix: torch.ones(7, 4).matmul(matrix), "multiplies other rows"),
        (lambda y, rows, matrix: y.index_add(0, rows, y), "adds rows in another way"),
        (lambda y, rows, matrix: y.__setitem__(rows, 1.0), "replaces rows"),
    ],
)
def test_a_loop_that_does_something_else_with_experts_is_refused(use: Callable[..., Any], message: str) -> None:
    with Selections(), pytest.raises(InputError, match=message):
        loop(use)


class Mean(nn.Module):
    """A model whose logits come from the mean of all tokens, or of those up to each."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.table, self.is_causal = nn.Embedding(40, 8), is_causal
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=50))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        rows = self.table(input_ids)
        counts = torch.arange(1, rows.shape[1] + 1)[:, None]
        means = rows.cumsum(1) / counts if self.is_causal else rows.mean(1, keepdim=True).expand_as(rows)
        return SimpleNamespace(logits=means @ self.table.weight.T)


def test_a_model_whose_steps_compute_the_whole_sequence_must_be_causal() -> None:
    check_causal(Mean(is_causal=True))
    with pytest.raises(InputError, match="its attention is not causal"):
        check_causal(Mean(is_causal=False))


def test_logits_of_whole_sequences_are_those_at_the_rows() -> None:
    """Tokens behind the longest context, and beyond the vocabulary, are of no sequence."""
    model, ids = Mean(is_causal=True), torch.randint(0, 40, (2, 60))
    ids[0, 20:], ids[1, 49:] = 10**6, -1
    found = whole_logits(model, ids, torch.tensor([19, 60 + 48]))
    expected = [model(ids[:1, :20], False).logits[0, -1], model(ids[1:, :49], False).logits[0, -1]]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(("model_type", "takes_sequences"), [("rwkv", False), ("xlstm", True)])
def test_a_cache_of_a_modules_own_class_is_found(model_type: str, takes_sequences: bool) -> None:
    """The code of RWKV mixes the rows of several sequences."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(decoders.tiny_config(model_type)).eval()
    join_experts(model)
    cache = OwnCache(model)
    assert cache.takes_sequences == takes_sequences
    states = [torch.empty(1, *x.shape[1:], dtype=x.dtype, device="meta") for x in cache.states]
    logits, new = cache.step(model, torch.empty(1, 1, dtype=torch.long, device="meta"), states)
    assert len(logits) == 1
    assert [(x.shape, x.dtype) for x in new] == [(x.shape, x.dtype) for x in states]


def test_tables_of_embeddings_may_be_padded_but_not_shorter() -> None:
    fields = {"vocab_size": 160, "num_hidden_layers": 1}
    check_tensors(fields, {"model.embed_tokens.weight": (168, 8), "model.layers.0.x": (1,)})
    with pytest.raises(InputError, match="says a vocabulary of 160 tokens, but 'model.embed_tokens.weight' has 159"):
        check_tensors(fields, {"model.embed_tokens.weight": (159, 8), "model.layers.0.x": (1,)})
