"""`npu_sim.compile` on CUDA tensors: right answers on the caller's stream, without waiting for the GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_gpu import need_gpu
from torch import nn

import npu_sim
from npu_compiler import InputError
from npu_sim.module.compiled import CompiledModule, open_backend

need_gpu()
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.no_grad():
        yield


class Words(nn.Module):
    """Takes ids and a mask, and has two outputs of different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.layer = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.norm(torch.relu(self.layer(self.table(ids))))
        if mask is not None:
            x = x * mask[..., None]
        return {"states": x, "best": x.sum(-1).argmax(-1)}


class Counting(nn.Module):
    """Changes an input in place."""

    def forward(self, cache: torch.Tensor, place: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, place, value)
        return cache.float().sum(1)


def words(dtype: torch.dtype = torch.float16) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = Words().to(CUDA, dtype).eval()
    return model, torch.randint(0, 50, (4, 16), device=CUDA), (torch.rand(4, 16, device=CUDA) > 0.3).to(dtype)


def close(found: torch.Tensor, model: nn.Module, *args: torch.Tensor) -> None:
    exact = model.double()(*(x.double() if x.is_floating_point() else x for x in args))["states"]
    assert found.device == CUDA
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_answers_are_pytorchs_and_stay_on_the_gpu(dtype: torch.dtype) -> None:
    model, ids, mask = words(dtype)
    compiled = npu_sim.compile(model, (ids, mask))
    results = [compiled(ids, mask=mask) for _ in range(5)]
    assert all(result["states"].dtype == dtype for result in results)
    assert len({result["states"].data_ptr() for result in results}) == 5, "each call returns new tensors"
    assert results[0]["best"].dtype == torch.int64
    close(results[0]["states"], model, ids, mask)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_a_call_is_one_graph_launch_and_nothing_is_downloaded_or_prepared() -> None:
    model, ids, mask = words()
    compiled = npu_sim.compile(model, (ids, mask))
    for _ in range(3):
        compiled(ids, mask)
    before = Counter(counters(compiled))
    for _ in range(10):
        compiled(ids, mask)
    assert {k: v for k, v in (counters(compiled) - before).items() if v} == {"graph_launches": 10}


def counters(compiled: CompiledModule) -> Counter[str]:
    backend: Any = compiled.backend
    found: Counter[str] = backend.counters
    return found


def test_a_call_does_not_wait_for_the_gpu() -> None:
    model, ids, mask = words()
    compiled = npu_sim.compile(model, (ids, mask))
    for _ in range(3):
        compiled(ids, mask)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    compiled(ids, mask)
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy, "the call returned while the GPU was still asleep"


def test_calls_on_several_streams_are_in_order() -> None:
    model, ids, mask = words()
    compiled = npu_sim.compile(model, (ids, mask))
    wanted = compiled(ids, mask)["states"]
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    torch.cuda.synchronize()
    for turn in range(30):
        stream = streams[turn % 3]
        with torch.cuda.stream(stream):
            other = (ids + turn) % 50
            torch.cuda._sleep(100_000)
            found = compiled(other, mask)["states"]
            again = compiled(ids, mask)["states"]
            stream.synchronize()
            close(found, model.half(), other, mask)
            model.half()
            torch.testing.assert_close(again, wanted, rtol=0, atol=0)


def test_tensors_that_are_not_dense_and_other_sizes_are_taken() -> None:
    model, ids, mask = words()
    batch = torch.export.Dim("batch", min=1, max=16)
    compiled = npu_sim.compile(model, (ids, mask), dynamic_shapes={"ids": {0: batch}, "mask": {0: batch}})
    for rows in (1, 4, 7, 16):
        wide = torch.randint(0, 50, (16, rows), device=CUDA)
        gate = torch.ones(rows, 16, device=CUDA, dtype=torch.float16)
        close(compiled(wide.t(), gate)["states"], model, wide.t(), gate)
        model.half()
    with pytest.raises(InputError, match="size 'batch' is 17, but the module was compiled for 1 to 16"):
        compiled(ids.new_zeros(17, 16), mask.new_zeros(17, 16))


def test_an_index_out_of_bounds_is_reported_by_a_later_call() -> None:
    model, ids, mask = words()
    compiled = npu_sim.compile(model, (ids, mask))
    compiled(ids, mask)
    compiled(ids + 1000, mask)
    torch.cuda.synchronize()
    with pytest.raises(InputError, match="an earlier call was given an integer out of bounds, in one of 'ids', 'mask'"):
        compiled(ids, mask)
    close(compiled(ids, mask)["states"], model, ids, mask)


def test_an_input_is_changed_in_place_without_copies() -> None:
    torch.manual_seed(1)
    cache, expected = torch.randn(2, 8, 4, device=CUDA).half(), None
    expected = cache.clone()
    compiled = npu_sim.compile(Counting().eval(), (cache, torch.tensor([3], device=CUDA), cache[:, :1].clone()))
    address = cache.data_ptr()
    for step in range(8):
        place, value = torch.tensor([step], device=CUDA), torch.randn(2, 1, 4, device=CUDA).half()
        found = compiled(cache, place, value)
        wanted = Counting()(expected, place, value)
        torch.testing.assert_close(cache, expected, rtol=0, atol=0)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert cache.data_ptr() == address


def test_weights_share_the_modules_memory_and_changes_are_seen() -> None:
    model, ids, mask = words()
    torch.cuda.synchronize()
    compiled = npu_sim.compile(model, (ids, mask))
    compiled(ids, mask)
    addresses = {x.native_handle.data.ptr for x in compiled._programs._loaded.cache.values()}
    assert addresses & {x.data_ptr() for x in model.parameters()}
    model.layer.weight.mul_(0.5)
    close(compiled(ids, mask)["states"], model, ids, mask)
    model.half()
    model.layer.weight = nn.Parameter(torch.randn_like(model.layer.weight) / 8)
    close(compiled(ids, mask)["states"], model, ids, mask)


def test_what_the_device_lacks_runs_in_pytorch_on_the_gpu() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(torch.relu(x) + 5 * torch.eye(8, device=x.device)) + 1

    x = torch.rand(3, 8, 8, device=CUDA)
    compiled = npu_sim.compile(Model().eval(), (x,))
    torch.testing.assert_close(compiled(x), Model()(x), rtol=1e-3, atol=1e-3)
    (program,) = compiled.report().programs
    assert "aten.linalg_inv.default" in [node.op for node in program.off_device]
    assert 0 < compiled.report().device_share < 1


def test_tensors_of_the_cpu_are_refused(tmp_path: Path) -> None:
    model, ids, mask = words()
    compiled = npu_sim.compile(model, (ids, mask))
    with pytest.raises(InputError, match=r"argument 'args\[0\]' is on cpu, but the module was compiled for tensors on"):
        compiled(ids.cpu(), mask)


def test_all_modules_share_the_gpus_backend() -> None:
    model, ids, mask = words()
    assert npu_sim.compile(model, (ids, mask)).backend is open_backend("cuda:0")


class Rotated(nn.Module):
    """Attention with rotated neighbours behind a class token, as EVA-02 has it, by heads of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 384)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (self.rotate(each, cos, sin) for each in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rest = x[:, :, 1:]
        turned = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([x[:, :, :1], rest * cos + turned * sin], 2)


class Disentangled(nn.Module):
    """Scores with biases that are picked by relative positions, one of them transposed, as DeBERTa has them."""

    def forward(self, scores: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(scores.shape[-1], device=scores.device)
        index = (steps[:, None] - steps + 64).expand(scores.shape)
        biases = torch.gather(first, -1, index) + torch.gather(second, -1, index).transpose(-1, -2)
        return torch.softmax(scores / 3 + biases, -1)


@pytest.mark.parametrize("rows", [40, 257])
def test_rotated_neighbours_are_pytorchs(rows: int) -> None:
    torch.manual_seed(rows)
    model, x = Rotated().to(CUDA, torch.float16).eval(), torch.randn(64, rows, 128, device=CUDA).half()
    cos, sin = (torch.randn(rows - 1, 64, device=CUDA).half() for _ in range(2))
    found = npu_sim.compile(model, (x, cos, sin))(x, cos, sin)
    exact = model.double()(x.double(), cos.double(), sin.double())
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [24, 64])
def test_biases_picked_by_position_are_pytorchs(size: int) -> None:
    torch.manual_seed(size)
    arguments = [torch.randn(6, size, width, device=CUDA).half() for width in (size, 128, 128)]
    found = npu_sim.compile(Disentangled().eval(), arguments)(*arguments)
    exact = Disentangled()(*(each.double() for each in arguments))
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_pytorchs(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(1)
    layer = kind(40, 96, 2, bidirectional=True, batch_first=True).to(CUDA, torch.float16).eval()
    x = torch.randn(5, 30, 40, device=CUDA).half()
    found = npu_sim.compile(layer, (x,))(x)
    exact = kind(40, 96, 2, bidirectional=True, batch_first=True).to(CUDA, torch.float64)
    exact.load_state_dict(layer.state_dict())
    expected = exact(x.double())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-2, atol=4e-3)
