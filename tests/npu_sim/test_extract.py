"""`npu_sim.extract`: the module stays as it is, and outputs are called what it calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder

from npu_compiler import CompileOptions, IRError, compile, print_graph, read_ir
from npu_compiler.graph.writer import graph_to_dict
from npu_runtime import CPUBackend, Executor, load_weights
from npu_sim.extract import extract_ir

X = torch.tensor([[1.0, 2.0, 3.0]])


class Named(torch.nn.Module):
    """Returns a dict with a dict inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"scores": self.linear(x), "more": {"twice": 2 * x, "nothing": None}}


def test_outputs_are_called_by_the_keys_under_which_the_module_returns_them() -> None:
    model = Named()
    program = compile(extract_ir(model, (X,)), options=CompileOptions(compute_dtype="float32"))
    device = CPUBackend()
    outputs = Executor(program, device).run({"x": X}, load_weights(model.state_dict(), program, device))
    assert list(outputs) == ["scores", "more.twice"]
    np.testing.assert_allclose(np.asarray(outputs["scores"]), model(X)["scores"].detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(outputs["more.twice"]), 2 * X.numpy())


class Numbers(torch.nn.Module):
    """Makes tensors of Python numbers on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.tensor(0.5, device=x.device, dtype=x.dtype)
        return torch.where(x > torch.tensor(2, device=x.device), zero, x * self.scale) * torch.tensor(
            True, device=x.device
        )


def test_numbers_that_forward_makes_keep_their_values_on_the_meta_device() -> None:
    model, device = Numbers(), CPUBackend()
    program = compile(extract_ir(Numbers().to("meta"), (X,)), options=CompileOptions(compute_dtype="float32"))
    outputs = Executor(program, device).run({"x": X}, load_weights(model.state_dict(), program, device))
    (result,) = outputs.values()
    np.testing.assert_array_equal(np.asarray(result), model(X).detach().numpy())


def test_a_module_is_left_as_it_is() -> None:
    model = Named().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extract_ir(model, (X,))
    assert model.training and not model._forward_hooks
    assert all(value.device.type == "cpu" and torch.equal(value, before[n]) for n, value in model.state_dict().items())


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", ""], ["a", 1], "ab", {"a": 1, "b": 2}])
def test_output_names_that_do_not_fit_are_refused(names: Any) -> None:
    g = IRBuilder()
    x = g.input("x", 2)
    ir = g.output(g("aten.neg.default", x), g("aten.abs.default", x)).ir()
    with pytest.raises(IRError, match="does not give each of the 2 outputs a name of its own"):
        read_ir({**ir, "output_names": names})


def test_output_names_survive_writing() -> None:
    g = IRBuilder()
    ir = {**g.output(g("aten.neg.default", g.input("x", 2))).ir(), "output_names": ["minus"]}
    graph = read_ir(graph_to_dict(read_ir(ir)))
    assert graph.output_names == ["minus"] and print_graph(graph) == print_graph(read_ir(ir))
