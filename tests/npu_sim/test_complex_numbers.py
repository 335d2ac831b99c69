"""Complex tensors inside a graph, which are pairs of real ones there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import tiny_config
from drawn import drawn
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.llama4 import modeling_llama4

import npu_sim
from npu_compiler import IRError


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


class Rotation(nn.Module):
    """A rotary embedding of queries and keys."""

    def __init__(self, embedding: nn.Module, rotate: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding, self.rotate = embedding, rotate

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> Any:
        return self.rotate(q, k, self.embedding(q, positions))


# Steps that keep a complex [4, 6], given another one and a real one.
STEPS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda z, w, x: z * w,
    lambda z, w, x: z * x,
    lambda z, w, x: x * z.conj(),
    lambda z, w, x: x * (0.5 - 2j),
    lambda z, w, x: z + w,
    lambda z, w, x: z + x,
    lambda z, w, x: torch.sub(z, w, alpha=2),
    lambda z, w, x: 1 - z,
    lambda z, w, x: -z * 1j,
    lambda z, w, x: z / (w * w.conj() + 1),
    lambda z, w, x: z / (x.abs() + 1),
    lambda z, w, x: torch.complex(z.imag, w.real),
    lambda z, w, x: torch.polar(w.abs(), z.angle()),
    lambda z, w, x: torch.exp(z * 0.01),
    lambda z, w, x: torch.view_as_complex(torch.view_as_real(z.contiguous()).flip(-1).contiguous()),
    lambda z, w, x: torch.view_as_real(z.resolve_conj()).flatten(1)[:, ::2].to(z.dtype),
    lambda z, w, x: torch.cat((z[:2], w[2:])),
    lambda z, w, x: torch.stack((z[:, 0], *w.unbind(1)[1:]), 1),
    lambda z, w, x: torch.where(x > 0, z, w),
    lambda z, w, x: z.reshape(6, 4).T.clone(),
    lambda z, w, x: z[:, None].expand(4, 2, 6)[:, 1],
    lambda z, w, x: z.index_select(1, torch.arange(6).flip(0)),
    lambda z, w, x: z.view(2, 2, 6).transpose(0, 1).flatten(0, 1) if z.is_contiguous() else z,
    lambda z, w, x: z.sum(1, keepdim=True) * 0.1 + w,
    lambda z, w, x: (z @ w.mT @ z) * 0.01,
    lambda z, w, x: torch.cat(z.chunk(2, 1)[::-1], 1),
)


def drawn_function(seed: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A function of real tensors that computes with complex ones."""
    draw = random.Random(seed)
    steps = [(draw.choice(STEPS), draw.randrange(4)) for _ in range(draw.randint(3, 8))]

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [torch.complex(x, y), torch.polar(y.abs(), x)]
        for step, other in steps:
            values.append(step(values[-1], values[other % len(values)], x))
        z = values[-1].resolve_conj()
        return [torch.view_as_real(z), z.real, z.imag, z.abs()]

    return function


def is_left_to_pytorch(compiled: Any) -> bool:
    """Whether ops run on the CPU though it would pay to run them on the device."""
    reasons = [node.reason for program in compiled.report().programs for node in program.off_device]
    return any("does not pay" not in reason for reason in reasons)


def assert_alike(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", drawn(range(24), 1 / 4))
def test_drawn_ops_are_pytorchs_and_run_on_the_device(seed: int) -> None:
    torch.manual_seed(seed)
    x, y, function = torch.randn(4, 6), torch.randn(4, 6), drawn_function(seed)
    compiled = npu_sim.compile(Calls(function).eval(), (x, y), device="cpu")
    assert not is_left_to_pytorch(compiled)
    assert_alike(list(compiled(x, y)), function(x, y))


def test_parts_may_be_in_half_precision() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x)[:, None] * torch.complex(y, y.flip(0)))

    x, y = torch.randn(4, 6, 2).half(), torch.randn(6).half()
    compiled = npu_sim.compile(Calls(function).eval(), (x, y), device="cpu")
    assert not is_left_to_pytorch(compiled)
    torch.testing.assert_close(compiled(x, y), function(x, y), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("sequence", [1, 7])
def test_rotary_embeddings_run_whole_on_the_device(sequence: int) -> None:
    config = tiny_config("deepseek_v2")
    deepseek = Rotation(modeling_deepseek_v2.DeepseekV2RotaryEmbedding(config), modeling_deepseek_v2.apply_rotary_emb)
    config = tiny_config("llama4_text")
    llama = Rotation(modeling_llama4.Llama4TextRotaryEmbedding(config), modeling_llama4.apply_rotary_emb)
    positions = torch.arange(sequence)[None] + 3
    for module, shape in ((deepseek, (1, 4, sequence, 8)), (llama, (1, sequence, 4, 16))):
        q, k = torch.randn(shape), torch.randn(shape)
        compiled = npu_sim.compile(module.eval(), (q, k, positions), device="cpu")
        assert not any(program.off_device for program in compiled.report().programs)
        assert_alike(tuple(compiled(q, k, positions)), tuple(module(q, k, positions)))


def test_torch_compile_computes_with_pairs() -> None:
    torch._dynamo.reset()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(torch.polar(x.abs(), y) * torch.complex(x, y)).flatten(-2)

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    assert_alike(torch.compile(function, backend="npu_sim")(x, y), function(x, y))


def changed_through_a_view(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x * 2)
    torch.view_as_real(z).add_(1)
    return torch.view_as_real(z * z)


def changed_before(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.view_as_complex(y)
    y.mul_(3)
    return z.real + y[..., 0]


def multiplied_in_place(x: Tensor) -> Tensor:
    z = torch.complex(x, x * 2)
    z[0].mul_(z[1])
    return torch.view_as_real(z * 2)


@pytest.mark.parametrize("function", [changed_before, multiplied_in_place])
def test_complex_memory_may_be_written(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4, 2)
    assert_alike(npu_sim.compile(Calls(function).eval(), (x,), device="cpu")(x), function(x))


def test_writing_to_a_complex_tensor_through_its_parts_is_refused() -> None:
    with pytest.raises(IRError, match="in-place write through 'aten.view_as_real.default'"):
        npu_sim.compile(Calls(changed_through_a_view).eval(), (torch.randn(3, 2),), device="cpu")


def test_an_input_seen_as_complex_and_returned_is_the_input() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x))

    x = torch.randn(3, 2)
    result = npu_sim.compile(Calls(function).eval(), (x,), device="cpu")(x)
    assert result.data_ptr() == x.data_ptr()


def test_results_and_ops_without_a_rule_get_complex_tensors() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, y) * torch.polar(x.abs(), y)
        return z, (torch.fft.ifft(z) * 1j).real

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    compiled = npu_sim.compile(Calls(function).eval(), (x, y), device="cpu")
    assert_alike(tuple(compiled(x, y)), function(x, y))
