"""`torch.compile(model, backend="npu_sim")` on CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cuda_gpu import need_gpu
from torch import nn

import npu_sim
from npu_sim.module.dynamo_backend import Options, Subgraph, compile_graph
from npu_sim.module.hardware import open_backend

need_gpu()
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Recorder:
    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph_module: Any, example_inputs: Sequence[Any], **_: Any) -> Any:
        self.graphs.append(compile_graph(graph_module, Options()))
        return self.graphs[-1]

    def check(self, count: int) -> None:
        assert len(self.graphs) == count
        for graph in self.graphs:
            assert isinstance(graph, Subgraph) and graph.failure is None
            assert graph._settings.backend is open_backend("cuda:0")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cuda_tensors_go_to_the_cuda_device(dtype: torch.dtype, dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)).to(CUDA, dtype).eval()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 64, device=CUDA, dtype=dtype)
        got = compiled(x)
        assert got.device == CUDA and got.dtype == dtype
        tolerance = 1e-3 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, model(x), rtol=tolerance, atol=tolerance)
    recorder.check(1 if dynamic else 2)
    model[0].weight.mul_(2)
    torch.testing.assert_close(compiled(x), model(x), rtol=tolerance, atol=tolerance)


def test_numbers_on_the_cpu_beside_cuda_tensors() -> None:
    recorder = Recorder()
    compiled = torch.compile(lambda x, factor: x * factor + 1, backend=recorder)
    x = torch.randn(4, 8, device=CUDA)
    for factor in (2.0, 3.0):
        torch.testing.assert_close(compiled(x, torch.tensor(factor)), x * factor + 1)
    recorder.check(1)


def test_a_cache_is_updated_in_its_own_memory() -> None:
    def f(cache: torch.Tensor, place: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, place, row)
        return row @ cache.t()

    compiled = torch.compile(f, backend=npu_sim.backend)
    cache = torch.randn(64, 64, device=CUDA, dtype=torch.float16)
    known, address = cache.clone(), cache.data_ptr()
    for index in (1, 3, 1):
        row, place = torch.randn(1, 64, device=CUDA, dtype=torch.float16), torch.tensor([index], device=CUDA)
        torch.testing.assert_close(compiled(cache, place, row), f(known, place, row), rtol=1e-2, atol=1e-2)
        assert torch.equal(cache, known) and cache.data_ptr() == address


def test_generate_with_a_static_cache_gives_the_same_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).to(CUDA).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    ids = torch.randint(3, 512, (1, 7), device=CUDA)
    how = {"max_new_tokens": 16, "do_sample": False}
    want = model.generate(ids, **how)
    recorder = Recorder()
    model.compile(backend=recorder)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **how, cache_implementation="static"), want)
    recorder.check(2)  # prefill and decode
