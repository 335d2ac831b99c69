"""Modules that torchao has quantized: their weights are taken as they are, and run as torchao computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npu_compiler
import npu_sim
from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.quantization import QuantizedFormat
from npu_runtime import Device, Executor, load_weights
from npu_runtime.torch_arrays import numpy_to_tensor, tensor_to_numpy
from npu_sim.checkpoints.torchao_tensors import as_quantized, dense_stand_ins, quantized_parameters
from npu_sim.module.trace import export, plain_ir, trace

pytest.importorskip("torchao.quantization")


def configs() -> dict[str, Any]:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup, PerTensor
    from torchao.quantization.quant_primitives import MappingType

    asymmetric = MappingType.ASYMMETRIC
    return {
        "int8 rows": (Int8WeightOnlyConfig(), QuantizedFormat("int8")),
        "int8 tensor": (Int8WeightOnlyConfig(granularity=PerTensor()), QuantizedFormat("int8")),
        "int8 groups": (Int8WeightOnlyConfig(granularity=PerGroup(32)), QuantizedFormat("int8", 32)),
        "int4 groups": (
            IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
            QuantizedFormat("int4", 32, "bfloat16"),
        ),
        "int4 rows, zero points": (
            IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0), mapping_type=asymmetric),
            QuantizedFormat("int4", 0, "bfloat16", "zero_point"),
        ),
        "int6 groups, zero points": (
            IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=PerGroup(32), mapping_type=asymmetric),
            QuantizedFormat("int8", 32, "bfloat16", "zero_point"),
        ),
        "fp8 rows": (Float8WeightOnlyConfig(), QuantizedFormat("float8_e4m3")),
    }


def _quantized(config: Any) -> nn.Module:
    from torchao.quantization import quantize_

    module = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).bfloat16().eval()
    quantize_(module, config)
    return module


@pytest.mark.parametrize("kind", configs())
def test_weights_are_those_of_torchao(kind: str) -> None:
    config, wanted = configs()[kind]
    module = _quantized(config)
    found = quantized_parameters(module)
    assert set(found) == {"0.weight", "2.weight"}
    for key, array in found.items():
        theirs = module.get_parameter(key)
        assert array.format == wanted and array.shape == tuple(theirs.shape)
        ours = numpy_to_tensor(array.dequantize()).to(theirs.dtype)
        assert torch.equal(ours, theirs.dequantize())  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["int8 rows", "int4 groups", "fp8 rows"])
def test_a_quantized_module_runs_with_its_own_weights(kind: str) -> None:
    module = _quantized(configs()[kind][0])
    weights = quantized_parameters(module)
    x = torch.randn(3, 64).bfloat16()
    with dense_stand_ins(module, weights):
        ir = plain_ir(trace(export(module, (x,)), "quantized"))
    assert set(quantized_parameters(module)) == set(weights), "the module has its own weights again"
    formats = {key: array.format for key, array in weights.items()}
    program = npu_compiler.compile(ir, options=npu_compiler.CompileOptions(quantization=formats))
    device = Device("cpu").backend
    state = {key: value for key, value in module.state_dict().items() if key not in weights} | weights
    executor = Executor(program, device)
    (result,) = executor.run({"input": x}, load_weights(state, program, device)).values()
    dense = [numpy_to_tensor(weights[key].dequantize()) for key in ("0.weight", "2.weight")]
    bias = module.get_parameter("0.bias").float()
    wanted = nn.functional.gelu(x.float() @ dense[0].T + bias) @ dense[1].T
    got = torch.as_tensor(np.asarray(result.to_numpy(), np.float32))
    torch.testing.assert_close(got, wanted.detach(), rtol=0.02, atol=0.02)


def test_int4_tensors_with_float_zero_points() -> None:
    """torchao makes them with mslk, on GPUs only; the formula is that of mslk's int4_row_quantize_zp."""
    from torchao.quantization import Int4Tensor

    q = torch.randint(-8, 8, (16, 64))
    packed = ((q[:, 0::2] & 15) | (q[:, 1::2] << 4)).to(torch.int8)
    scale, zero = torch.rand(2, 16).add(0.1).bfloat16(), torch.randn(2, 16).bfloat16()
    tensor = Int4Tensor(packed, scale, zero, [1, 32], torch.Size((16, 64)))
    array = as_quantized(tensor)
    assert array is not None and array.format == QuantizedFormat("int4", 32, "float32", "minimum")
    spread: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.float().T.repeat_interleave(32, dim=1)  # noqa: E731
    wanted = spread(scale).double() * q + spread(zero).double()
    assert torch.equal(numpy_to_tensor(array.dequantize()), wanted.float())
    symmetric = as_quantized(Int4Tensor(packed, scale, torch.zeros_like(zero), [1, 32], torch.Size((16, 64))))
    assert symmetric is not None and symmetric.format == QuantizedFormat("int4", 32, "bfloat16")
    assert torch.equal(numpy_to_tensor(symmetric.dequantize()), spread(scale) * q)


def test_plain_tensors_are_none_and_other_kinds_are_refused() -> None:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    assert as_quantized(torch.ones(2, 2)) is None
    weight = _quantized(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))[0].weight
    type(weight).__name__, kept = "NF4Tensor", type(weight).__name__
    try:
        with pytest.raises(WeightError, match="a NF4Tensor of torchao"):
            as_quantized(weight)
    finally:
        type(weight).__name__ = kept


@pytest.mark.parametrize("kind", ["int8 rows", "int4 groups", "fp8 rows"])
def test_a_quantized_module_is_compiled_and_saved_with_its_own_weights(kind: str, tmp_path: Path) -> None:
    module = _quantized(configs()[kind][0])
    x = torch.randn(3, 64).bfloat16()
    compiled = npu_sim.compile(module, (x,), device="cpu")
    weights = quantized_parameters(module)
    dense = [numpy_to_tensor(weights[key].dequantize()) for key in ("0.weight", "2.weight")]
    hidden = nn.functional.gelu(x.float() @ dense[0].T + module.get_parameter("0.bias").float())
    torch.testing.assert_close(compiled(x).float(), (hidden @ dense[1].T).detach(), rtol=0.02, atol=0.02)
    compiled.refresh()
    compiled.save(tmp_path / "m.npumod")
    loaded = npu_sim.load(tmp_path / "m.npumod", "cpu")
    np.testing.assert_array_equal(loaded(tensor_to_numpy(x)), tensor_to_numpy(compiled(x)))
    with pytest.raises(InputError, match="Sequential is quantized already; leave out quantization='int4'"):
        npu_sim.compile(module, (x,), quantization="int4")
