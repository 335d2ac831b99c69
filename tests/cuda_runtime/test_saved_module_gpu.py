"""Modules saved on the CPU or the GPU, loaded on the GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_gpu import need_gpu
from torch import nn

need_gpu()

import npu_sim  # noqa: E402

pytestmark = pytest.mark.gpu
BATCH = torch.export.Dim("batch", min=1, max=8)


def saved(folder: Path, device: str) -> tuple[nn.Module, Path]:
    module = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU()).eval().to(device)
    ids = torch.zeros(2, 7, dtype=torch.int64, device=device)
    compiled = npu_sim.compile(module, ids, dynamic_shapes=({0: BATCH},))
    with torch.no_grad():
        compiled(ids)
    compiled.save(folder / "model.npumod")
    return module, folder / "model.npumod"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_answers_as_pytorch_does(tmp_path: Path, device: str) -> None:
    module, file = saved(tmp_path, device)
    after = npu_sim.load(file, "cuda")
    for batch in (2, 5):
        ids = torch.randint(0, 50, (batch, 7), device=device)
        with torch.no_grad():
            wanted = module(ids).float().cpu().numpy()
        np.testing.assert_allclose(after(ids.cpu().numpy()), wanted, rtol=1e-3, atol=1e-3)


def test_arrays_on_the_gpu_go_in_and_out(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    module, file = saved(tmp_path, "cuda")
    after = npu_sim.load(file, "cuda", dlpack=True)
    ids = torch.randint(0, 50, (2, 7), device="cuda")
    with torch.no_grad():
        wanted = module(ids)
    for given in (ids, cupy.from_dlpack(ids)):
        found = after(given)
        np.testing.assert_allclose(cupy.asnumpy(cupy.from_dlpack(found)), wanted.cpu().numpy(), rtol=1e-3, atol=1e-3)


def test_floats_on_the_gpu_are_read_there(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    module = nn.Linear(8, 8).eval().cuda()
    npu_sim.compile(module, torch.zeros(2, 8, device="cuda")).save(tmp_path / "model.npumod")
    after = npu_sim.load(tmp_path / "model.npumod", "cuda")
    x = torch.randn(2, 8, device="cuda")
    with torch.no_grad():
        wanted = module(x).cpu().numpy()
    for given in (x, cupy.from_dlpack(x), x.t().contiguous().t()):
        np.testing.assert_allclose(after(given), wanted, rtol=1e-3, atol=1e-3)


def test_code_of_somebody_unknown_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, file = saved(tmp_path, "cuda")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    ids = torch.randint(0, 50, (2, 7))
    after = npu_sim.load(file, "cuda")
    with torch.no_grad():
        np.testing.assert_allclose(after(ids.numpy()), module(ids.cuda()).cpu().numpy(), rtol=1e-3, atol=1e-3)
    assert [str(x.made.trust) for x in after._programs.values()] == ["made here"]
