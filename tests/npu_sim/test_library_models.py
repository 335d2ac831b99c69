"""Models whose export needs more than `torch.export`: vmap, asserted values, transformers' caches and hooks."""

from __future__ import annotations

import os
from random import Random

import decoders
import encoder_types
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig

import npu_sim
from npu_compiler import InputError, IRError
from npu_sim.module.library_models import is_library_hook
from npu_sim.module.trace import export, trace


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)
    model: nn.Module = AutoModel.from_config(config).eval().requires_grad_(False)
    return model


def test_a_cache_among_the_results_comes_back(llama: nn.Module) -> None:
    ids = torch.randint(0, 50, (1, 6))
    compiled = npu_sim.compile(llama, (ids,), {"use_cache": True})
    ours, want = compiled(ids, use_cache=True), llama(ids, use_cache=True)
    torch.testing.assert_close(ours.last_hidden_state, want.last_hidden_state, atol=1e-5, rtol=1e-5)
    keys = [layer.keys for layer in want.past_key_values.layers]
    for got, key in zip(ours.past_key_values.layers, keys, strict=True):
        torch.testing.assert_close(got.keys, key, atol=1e-5, rtol=1e-5)


class Vmapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        mask: Tensor = torch.vmap(lambda i: rows <= i)(rows)
        return x.masked_fill(~mask, 0.0)


def test_calls_of_vmap_are_read() -> None:
    x = torch.randn(5, 5)
    assert torch.equal(npu_sim.compile(Vmapped().eval(), x)(x), x.tril())


class Asserted(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        torch._check(lengths.max().item() <= 7)
        return x + lengths.unsqueeze(1)


class DependsOnData(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x * lengths.max().item()


def test_a_value_that_is_only_asserted_is_no_part_of_the_graph() -> None:
    x, lengths = torch.randn(3, 4), torch.tensor([3, 1, 2])
    assert torch.equal(npu_sim.compile(Asserted().eval(), (x, lengths))(x, lengths), x + lengths.unsqueeze(1))


def test_a_value_that_an_op_reads_is_refused() -> None:
    exported = export(DependsOnData(), (torch.randn(3, 4), torch.tensor([3, 1, 2])))
    with pytest.raises(IRError, match="depends on the values of a tensor"):
        trace(exported, "data")


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided(x.t() if x.shape[0] > 3 else x * 2, (2, 2, 3), (3, 3, 1))


@pytest.mark.parametrize("rows", [3, 5])
def test_windows_onto_memory_show_what_pytorch_has_there(rows: int) -> None:
    x = torch.randn(rows, 3)
    exported = export(Strided(), (x,))
    if rows == 3:
        assert torch.equal(npu_sim.compile(exported)(x), Strided()(x))
        return
    with pytest.raises(IRError, match="as_strided of a tensor that is itself a view"):
        trace(exported, "strided")


def test_hooks_of_transformers_are_its_own(llama: nn.Module) -> None:
    capturing = pytest.importorskip("transformers.utils.output_capturing", reason="this transformers installs no hooks")
    capturing.install_all_output_capturing_hooks(llama)
    hooks = [hook for part in llama.modules() for hook in part._forward_hooks.values()]
    assert hooks
    assert all(map(is_library_hook, hooks))
    ids = torch.randint(0, 50, (1, 5))
    got = npu_sim.compile(llama, (ids,), {"use_cache": False})(ids, use_cache=False)
    torch.testing.assert_close(got.last_hidden_state, llama(ids).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_a_users_hook_is_refused() -> None:
    module = nn.Linear(2, 2).eval()
    module.register_forward_hook(lambda _module, _inputs, result: 2 * result)
    with pytest.raises(InputError, match="has forward hooks"):
        npu_sim.compile(module, torch.randn(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", Random(int(os.environ["TEST_SEED"])).sample(encoder_types.model_types(), 4))
def test_model_types_are_right_or_refused(model_type: str) -> None:
    """`python tests/support/encoder_types.py` tries all of them."""
    outcomes, _ = decoders.isolated(lambda: encoder_types.tried(model_type))
    assert outcomes and {outcome.kind for outcome in outcomes.values()} <= {"right", "refused", "fails"}, outcomes
