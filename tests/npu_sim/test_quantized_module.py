"""Modules whose weights are stored in few bits: compiled, through torch.compile, partitioned, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_sim
from npu_compiler import QuantizedFormat, partition, quantize
from npu_compiler.errors import InputError, ProgramFormatError
from npu_runtime import CPUBackend, DAGExecutor
from npu_sim.extract import extract_ir


class Net(nn.Module):
    """A table that is the last layer's weight too, a layer, and a parameter that is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 128)
        self.layer = nn.Linear(128, 128)
        self.out = nn.Linear(128, 40, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> Any:
        return self.out(torch.tanh(self.layer(self.table(ids))))


IDS = torch.tensor([[3, 1, 4, 1, 5]])
FORMATS = {"int4": QuantizedFormat("int4", 128, "float16", "zero_point"), "int8": QuantizedFormat("int8")}


@pytest.fixture
def net() -> Net:
    return Net().eval().requires_grad_(False)


def dequantized(net: Net, layer: QuantizedFormat) -> torch.Tensor:
    """The module's result with the dequantized weights."""
    table, weight = (
        torch.from_numpy(quantize(x.numpy(), format).dequantize())
        for x, format in ((net.table.weight, FORMATS["int8"]), (net.layer.weight, layer))
    )
    hidden = torch.tanh(nn.functional.linear(table[IDS], weight, net.layer.bias))
    return nn.functional.linear(hidden, table)


@pytest.mark.parametrize("name", FORMATS)
def test_every_front_door_stores_the_weights_alike(net: Net, name: str) -> None:
    expected = dequantized(net, FORMATS[name])
    compiled = npu_sim.compile(net, (IDS,), device="cpu", quantization=name)
    torch.testing.assert_close(compiled(IDS), expected, atol=1e-3, rtol=1e-3)
    torch._dynamo.reset()
    through = torch.compile(net, backend="npu_sim", options={"quantization": name, "device": "cpu"})
    torch.testing.assert_close(through(IDS), expected, atol=1e-3, rtol=1e-3)
    plan = partition(extract_ir(net, (IDS,)), compute_dtype="float32", quantization=name)
    executor = DAGExecutor(plan, CPUBackend())
    executor.load_weights(dict(net.state_dict()))
    np.testing.assert_allclose(executor.execute({"input": IDS.numpy()})["output"], expected, atol=1e-3, rtol=1e-3)


def test_a_partition_on_the_cpu_reads_dequantized_weights(net: Net) -> None:
    stored = {key: quantize(x.numpy(), FORMATS["int8"]) if x.ndim == 2 else x for key, x in net.state_dict().items()}
    plan = partition(extract_ir(net, (IDS,)), lambda op: "linear" not in op, compute_dtype="float32")
    executor = DAGExecutor(plan, CPUBackend())
    executor.load_weights(stored)
    found = executor.execute({"input": IDS.numpy()})["output"]
    np.testing.assert_allclose(found, dequantized(net, FORMATS["int8"]), atol=1e-5)


def test_a_changed_weight_is_quantized_again(net: Net) -> None:
    compiled = npu_sim.compile(net, (IDS,), device="cpu", quantization="int4")
    before = compiled(IDS)
    net.layer.weight.mul_(-2)
    torch.testing.assert_close(compiled(IDS), dequantized(net, FORMATS["int4"]), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(compiled(IDS), before, atol=1e-2)


def test_a_saved_module_holds_the_parts_only(net: Net, tmp_path: Path) -> None:
    sizes = {}
    for name in (None, "int4"):
        compiled = npu_sim.compile(
            net, (IDS,), device="cpu", quantization=name, dynamic_shapes=({1: torch.export.Dim("n")},)
        )
        compiled.save(tmp_path / "m.npumod")
        sizes[name] = (tmp_path / "m.npumod").stat().st_size
    assert sizes["int4"] < sizes[None] - 4 * 128 * 128 + 128 * 64 + 4096 * 2
    loaded = npu_sim.load(tmp_path / "m.npumod", "cpu")
    np.testing.assert_array_equal(loaded(IDS.numpy()), compiled(IDS))
    longer = torch.cat([IDS, IDS], 1)
    np.testing.assert_array_equal(loaded(longer.numpy()), compiled(longer))


def test_a_weight_that_is_a_result_is_saved_whole(tmp_path: Path) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x), self.layer.weight

    module, x = Returning().eval().requires_grad_(False), torch.ones(2, 64)
    compiled = npu_sim.compile(module, (x,), device="cpu", quantization="int8")
    compiled.save(tmp_path / "m.npumod")
    made, weight = npu_sim.load(tmp_path / "m.npumod", "cpu")(x.numpy())
    np.testing.assert_array_equal(weight, module.layer.weight)
    np.testing.assert_array_equal(made, compiled(x)[0])


def test_formats_that_do_not_fit_are_refused(net: Net) -> None:
    with pytest.raises(InputError, match="unknown quantization 'int3'; choose one of int4, int8, fp8"):
        npu_sim.compile(net, (IDS,), device="cpu", quantization="int3")
    with pytest.raises(InputError, match=r"'layer.weight' cannot be stored as int4 group 96"):
        npu_sim.compile(net, (IDS,), device="cpu", quantization={"layer.weight": QuantizedFormat("int4", 96)})


def test_a_module_file_whose_parts_contradict_each_other_is_refused(net: Net, tmp_path: Path) -> None:
    from npu_sim.module import saved_file

    npu_sim.compile(net, (IDS,), device="cpu", quantization="int4").save(tmp_path / "m.npumod")
    module, checkpoint = saved_file.read_module(tmp_path / "m.npumod")
    tensors = {
        name: saved_file.StoredTensor(x.dtype.name, x.shape, lambda x=x: np.asarray(x))
        for name, x in checkpoint.items()
    }
    scales = next(name for name in tensors if name.endswith("(scales)"))
    for changed in (None, saved_file.StoredTensor("float32", (3,), lambda: np.ones(3, np.float32))):
        others = {name: tensor for name, tensor in tensors.items() if name != scales}
        saved_file.write_module(
            tmp_path / "m.npumod", module, others if changed is None else {**others, scales: changed}
        )
        with pytest.raises(ProgramFormatError, match=r"'.*m.npumod' is not a valid module: .*scales"):
            npu_sim.load(tmp_path / "m.npumod", "cpu")
