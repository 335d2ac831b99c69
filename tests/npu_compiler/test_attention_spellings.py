"""Attention that is written as products and a softmax, in drawn spellings: one attention op, with PyTorch's result."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from npu_compiler import CompileOptions, compile, read_ir
from npu_compiler.compiler import normalize
from npu_compiler.fusion_patterns import fuse
from npu_compiler.fusions.attention import ATTENTION_OPS
from npu_compiler.fusions.einsums import lower_einsums
from npu_runtime import Backend, Executor, load_weights
from npu_sim.extract import extract_ir

Draw = st.DrawFn


@dataclass(frozen=True)
class Spelling:
    """A way to write attention over [batch, heads, queries or keys, 8].

    Attributes:
        product: How queries and keys are multiplied.
        scaled: What is scaled, and how.
        terms: For each tensor that is added to the scores, in which dimensions it is as large as they are.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    product: str
    scaled: str
    terms: tuple[tuple[bool, bool, bool, bool], ...]

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys

    def inputs(self) -> list[Tensor]:
        """Return random queries, keys, values and terms."""
        torch.manual_seed(0)
        lead = (self.batch, self.heads)
        tensors = [torch.randn(*lead, tokens, 8) for tokens in (self.queries, self.keys, self.keys)]
        shapes = ([size if whole else 1 for size, whole in zip(self.scores, term, strict=True)] for term in self.terms)
        return tensors + [torch.randn(shape) for shape in shapes]


@st.composite
def spellings(draw: Draw) -> Spelling:
    product = draw(st.sampled_from(("matmul", "bmm", "baddbmm", "einsum")))
    scales = ("queries", "scores", "quotient", "nothing") if product != "baddbmm" else ("queries", "nothing", "alpha")
    flags = st.tuples(*[st.booleans()] * 4)
    terms = draw(st.lists(flags, min_size=product == "baddbmm", max_size=3))
    sizes = [draw(st.integers(low, 4)) for low in (1, 1, 2, 2)]
    return Spelling(*sizes, product, draw(st.sampled_from(scales)), tuple(terms))


class Spelled(nn.Module):
    """Attention as a spelling says."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *terms: Tensor) -> Tensor:
        spelling, together = self.spelling, self.spelling.product in ("bmm", "baddbmm")
        if together:
            q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        if spelling.scaled == "queries":
            q = q * 0.25
        rest = list(terms)
        if spelling.product == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        elif spelling.product == "baddbmm":
            first = rest.pop(0).expand(spelling.batch, spelling.heads, -1, -1).flatten(0, 1)
            alpha = 0.25 if spelling.scaled == "alpha" else 1
            scores = torch.baddbmm(first, q, k.transpose(1, 2), alpha=alpha)
        else:
            scores = q @ k.transpose(-1, -2)
        if spelling.scaled == "scores":
            scores = scores * 0.25
        if spelling.scaled == "quotient":
            scores = scores / 4
        if rest:
            scores = scores.view(spelling.scores)
        for term in rest:
            scores = scores + term
        weights = scores.softmax(-1)
        if together:
            return torch.bmm(weights.view(-1, *spelling.scores[2:]), v)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v) if spelling.product == "einsum" else weights @ v


def check_result(module: nn.Module, inputs: list[Tensor], backend: Backend) -> None:
    """Check a module's result on a device against PyTorch's."""
    program = compile(extract_ir(module, inputs), backend.target, CompileOptions(compute_dtype="float32"))
    arrays = {spec.name: x.numpy() for spec, x in zip(program.input_specs, inputs, strict=True)}
    (found,) = Executor(program, backend).run(arrays, load_weights({}, program, backend)).values()
    torch.testing.assert_close(torch.from_numpy(found.to_numpy()), module(*inputs), atol=1e-5, rtol=1e-5)


@settings(max_examples=30)  # each is exported
@given(spelling=spellings())
def test_drawn_attention_is_one_op_with_the_result_of_pytorch(backend: Backend, spelling: Spelling) -> None:
    module, inputs = Spelled(spelling), spelling.inputs()
    graph = fuse(lower_einsums(normalize(read_ir(extract_ir(module, inputs)))))
    bases = [node.base for node in graph.nodes]
    assert sum(base in ATTENTION_OPS for base in bases) == 1 and "aten.softmax" not in bases, spelling
    check_result(module, inputs, backend)


@pytest.mark.parametrize("shape", [(2, 12, 4), (2, 3, 16)])
def test_scores_whose_rows_a_reshape_changes_are_no_attention(backend: Backend, shape: tuple[int, ...]) -> None:
    class Mixed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            scores = ((q @ k.transpose(-1, -2)).reshape(shape) + mask).softmax(-1)
            return scores.reshape(2, 3, 4, 4) @ v

    check_result(Mixed(), [*(torch.randn(2, 3, 4, 8) for _ in range(3)), torch.randn(shape)], backend)
