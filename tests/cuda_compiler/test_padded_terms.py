"""Products on the CUDA target whose rows are not whole aligned vectors."""

from __future__ import annotations

import pytest
import torch
from cuda_reference import LaidOut, ReferenceBackend
from drawn import drawn
from torch import Tensor, nn

import npu_compiler
from npu_compiler import CompileOptions
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir


class Perceptron(nn.Module):
    """Products that read one input, of which the first is followed by an activation, and a product behind them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)) + self.gate(x).sin())


@pytest.mark.parametrize("width", drawn([32, 33, 36, 50, 100, 180], 2 / 3, str))
@pytest.mark.parametrize("hidden", [40, 60])
def test_rows_are_copied_once_with_zeros_at_their_ends(width: int, hidden: int, seed: int) -> None:
    torch.manual_seed(seed)
    module, example = Perceptron(width, hidden).eval(), torch.randn(20, width)
    with torch.no_grad():
        ir, expected = extract_ir(module, (example,)), module(example)
    calls = npu_compiler.compile(ir, LaidOut(), CompileOptions(compute_dtype="float16")).plan.calls
    copies = [call.outputs[0].shape[1] for call in calls if call.kernel == "to_channels_last"]
    wanted = [size + -size % 8 for size in (width, hidden) if size % 8]
    assert sorted(copies) == sorted(wanted)
    dag = DAGExecutor(npu_compiler.partition(ir, target=LaidOut(), compute_dtype="float16"), ReferenceBackend())
    dag.load_weights(module.state_dict())
    (result,) = dag.execute({ir["graph_inputs"][0]["name"]: example.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result).float(), expected, atol=2e-2, rtol=2e-2)


def test_products_of_few_rows_or_terms_stay_as_they_are() -> None:
    for rows, width in ((8, 36), (64, 20)):
        ir = extract_ir(nn.Linear(width, 16), (torch.randn(rows, width),))
        (call,) = npu_compiler.compile(ir, LaidOut(), CompileOptions(compute_dtype="float16")).plan.calls
        assert call.params["k"] == width
