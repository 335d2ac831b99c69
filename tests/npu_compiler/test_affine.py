"""Nodes that quantize and dequantize: those of torchao, and those that are malformed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder
from torch.ao.quantization.fx import _decomposed  # noqa: F401 (registers its ops)

from npu_compiler import CompileOptions, IRError, compile
from npu_runtime import Backend, Executor, load_weights

QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


@pytest.mark.parametrize(
    ("blocks", "shape"), [((1, 8), (3, 1)), ((2, 4), (3, 2)), ((6, 8), (1, 1)), ((-1, 2), (1, 4)), ((1, 1), (6, 8))]
)
def test_blocks_of_torchao_have_a_scale_each(
    blocks: tuple[int, int], shape: tuple[int, int], backend: Backend, seed: int
) -> None:
    pytest.importorskip("torchao.quantization")
    rows = 6 if blocks[0] != 1 or shape[0] == 6 else 3
    x, zeros = torch.randn(rows, 8), torch.randint(-9, 9, shape)
    scales = torch.rand(shape) + 0.1

    class Rounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ops = torch.ops.torchao
            codes = ops.quantize_affine(x, list(blocks), scales, zeros, torch.int8)
            return ops.dequantize_affine(codes, list(blocks), scales, zeros, torch.int8)  # type: ignore[no-any-return]

    from npu_sim.extract import extract_ir

    program = compile(extract_ir(Rounded(), (x,)), backend.target, CompileOptions(compute_dtype="float32"))
    found = Executor(program, backend).run({"x": x.numpy()}, load_weights({}, program, backend))
    (spec,) = program.output_specs
    np.testing.assert_allclose(found[spec.name].to_numpy(spec), Rounded()(x).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scale": 0.0}, "its scale is 0.0; a scale is a finite number above 0"),
        ({"scale": float("nan")}, "its scale is nan"),
        ({"scale": float("inf")}, "its scale is inf"),
        ({"zero_point": 200}, r"its zero point 200 is outside -128..127"),
        ({"quant_max": 300}, r"its limits -128..300 are no range within int8"),
        ({"quant_min": 127}, r"its limits 127..127 are no range within int8"),
        ({"dtype": "float32"}, "it quantizes to float32, which is no integer dtype"),
    ],
)
def test_what_no_value_can_be_quantized_with_is_an_error_that_names_the_node(
    change: dict[str, Any], problem: str
) -> None:
    g = IRBuilder()
    x = g.input("x", 2, 4)
    given = {"scale": 0.1, "zero_point": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8", **change}
    g.output(g(QUANTIZE, x, **given, name="rounded", out=((2, 4), "int8")))
    with pytest.raises(IRError, match=f"'rounded'.*{problem}"):
        compile(g.ir())


def test_scales_of_another_number_than_the_channels_are_an_error() -> None:
    g = IRBuilder()
    x, scales = g.input("x", 2, 4), g.weight("scales", 3)
    channels = {"axis": 1, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
    g.output(g("quantized_decomposed.quantize_per_channel.default", x, scales, **channels, out=((2, 4), "int8")))
    with pytest.raises(IRError, match=r"its scales have shape \[3\], not \[4\]"):
        compile(g.ir())
