"""IR that `npu_sim.module.trace` reads from an exported program, in particular beyond torch_ir's schema."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from npu_compiler import CompileOptions, IRError, compile, partition, read_ir
from npu_compiler.graph.symbolic import evaluate, specialize, symbols
from npu_runtime import CPUBackend, DAGExecutor
from npu_sim.module.trace import Trace, export, plain_ir, trace


class Net(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def traced(module: nn.Module, *args: torch.Tensor, **options: Any) -> Trace:
    return trace(export(module.eval(), args, **options), "net")


def answers(module: nn.Module, *args: torch.Tensor) -> None:
    """The trace, run by `DAGExecutor` in float32, gives PyTorch's answers."""
    found = traced(module, *args)
    plan = partition(plain_ir(found), compute_dtype="float32")
    dag = DAGExecutor(plan, CPUBackend())
    dag.load_weights(found.weights)
    inputs = {meta["name"]: x.numpy() for meta, x in zip(found.ir["graph_inputs"], args, strict=True)}
    expected = module(*(x.clone() for x in args))
    for index, wanted in enumerate(expected if isinstance(expected, tuple) else (expected,)):
        np.testing.assert_allclose(
            dag.execute(inputs)[index].astype(np.float32),
            wanted.detach().float().numpy(),
            rtol=0.05 if wanted.dtype == torch.bfloat16 else 1e-5,
            atol=1e-5,
        )


def test_constants_made_in_forward_keep_their_values() -> None:
    answers(Net(lambda x: x * torch.tensor([1.0, 2.0, 3.0])), torch.randn(2, 3))


def test_buffers_that_are_not_persistent_keep_their_values() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([3.0, -1.0]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    answers(Scaled(), torch.randn(4, 2))
    assert traced(Scaled(), torch.randn(4, 2)).weights == {}


def no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = torch.relu(x) + 1
        with torch.enable_grad():
            y = y * y
    return y - x


def without_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ x.t()


def test_regions_without_gradients_and_without_autocast_are_a_part_of_the_graph() -> None:
    answers(Net(no_grad), torch.randn(3, 4))
    answers(Net(without_autocast), torch.randn(3, 4))


def test_regions_under_autocast_have_its_casts() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.t()

    found = traced(Net(cast), torch.randn(3, 4))
    assert found.ir["graph_outputs"][0]["dtype"] == "bfloat16"
    assert "aten._to_copy.default" in [node["op_type"] for node in found.ir["nodes"]]
    answers(Net(cast), torch.randn(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.diff(x, append=x[:, :2]),
        lambda x: torch.diff(x, prepend=x[:, :1]),
        lambda x: torch.diff(x, prepend=x[:, :1], append=x[:, :2]),
        lambda x: torch.clamp(x, max=x.mean()),
        lambda x: torch.clamp(x, min=x.mean()),
        lambda x: torch.nn.functional.layer_norm(x, (6,), bias=x[0]),
        lambda x: torch.nn.functional.layer_norm(x, (6,), weight=x[0]),
        lambda x: torch.nn.functional.group_norm(x, 2, bias=x[0]),
    ],
    ids=["append", "prepend", "both", "max", "min", "bias", "weight", "group_norm"],
)
def test_which_optional_tensors_were_given_is_known(function: Any) -> None:
    answers(Net(function), torch.randn(4, 6))


def test_tensors_given_by_keyword_are_inputs() -> None:
    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.5)

    answers(Net(attend), torch.randn(1, 2, 5, 8), torch.rand(1, 1, 5, 5) > 0.3)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda x, y: x.add_(1) + y, ["args_0"]),
        (lambda x, y: x[:, 1:].mul_(2).sum() + y.view(-1)[:2], ["args_0"]),
        (lambda x, y: x.clone().add_(1) + y, []),
        (lambda x, y: (x + 1).relu_() + y.t().t(), []),
    ],
    ids=["whole", "view", "clone", "intermediate"],
)
def test_inputs_that_are_changed_in_place_are_told(change: Any, changed: list[str]) -> None:
    assert [name for _, name in traced(Net(change), torch.randn(2, 2), torch.randn(2, 2)).written] == changed


def test_control_flow_that_depends_on_data_is_an_error_with_pytorchs_reason() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(IRError, match="PyTorch cannot export Net as one graph: .*data-dependent"):
        traced(Net(choose), torch.randn(3))

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(IRError, match="control flow that depends on data"):
        traced(Net(branch), torch.randn(3))


def test_an_op_that_returns_a_list_among_its_results_is_refused() -> None:
    with pytest.raises(IRError, match="node 'histogramdd': the op returns a list of tensors beside others"):
        traced(Net(lambda x: torch.histogramdd(x, [3, 3])[0]), torch.randn(5, 2))


@pytest.mark.parametrize(
    "change", [lambda x: x.t_(), lambda x: x.resize_(1, 2), lambda x: x.as_strided_((2,), (1,), 0)]
)
def test_an_argument_that_gets_another_shape_is_refused(change: Any) -> None:
    with pytest.raises(IRError, match="gives argument 'args_0' another shape"):
        traced(Net(change), torch.randn(2, 3))
    answers(Net(lambda x: change(x * 1) + 1), torch.randn(2, 3))


def test_a_size_that_depends_on_values_is_an_error() -> None:
    with pytest.raises(IRError, match="depends on the values of a tensor|PyTorch cannot export"):
        traced(Net(lambda x: x[x > 0] * 2), torch.randn(5))


class Grid(nn.Module):
    """Sizes appear in shapes, arguments and arithmetic."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        halves = (
            x.view(rows, 2, columns // 2).flip(1).permute(1, 0, 2).reshape(rows * 2, -1)
        )  # PyTorch 2.11 exports no copy-free one
        places = torch.arange(columns // 2, dtype=x.dtype) / columns
        return torch.cat([halves + places, y], 0)[: rows + 1]


def test_a_symbolic_trace_is_specialized_to_any_sizes() -> None:
    batch, half = Dim("batch", max=9), Dim("half", max=20)
    x, y = torch.randn(3, 8), torch.randn(1, 4)
    found = traced(Grid(), x, y, dynamic_shapes={"x": {0: batch, 1: 2 * half}, "y": {1: half}})
    assert {limits[1] for limits in found.ranges.values()} == {9, 20}
    (rows,), columns = ([s for s, r in found.ranges.items() if r[1] == size] for size in (9, 20))
    for batch_size, half_size in ((2, 3), (3, 4), (9, 20)):
        ir = specialize(found.ir, {rows: batch_size, columns[0]: half_size})
        program = compile(ir, options=CompileOptions(compute_dtype="float32"))
        assert [spec.shape for spec in program.input_specs] == [(batch_size, 2 * half_size), (1, half_size)]
        x, y = torch.randn(batch_size, 2 * half_size), torch.randn(1, half_size)
        dag = DAGExecutor(partition(ir, compute_dtype="float32"), CPUBackend())
        result = dag.execute({"x": x.numpy(), "y": y.numpy()})[0]
        np.testing.assert_allclose(result, Grid()(x, y).numpy(), rtol=1e-6)


def test_symbolic_ir_by_itself_is_refused() -> None:
    found = traced(Net(lambda x: x + 1), torch.randn(3, 2), dynamic_shapes=(({0: Dim("n", max=8)},),))
    with pytest.raises(IRError, match="shapes must be static"):
        read_ir(found.ir)
    with pytest.raises(IRError, match="has dynamic shapes"):
        plain_ir(found)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0 + 1", 8),
        ("2*s0 - s1", 11),
        ("(s0//2)", 3),
        ("Max(1, s1 - 5)", 1),
        ("s0**2", 49),
        ("Mod(s0, 4)", 3),
        ("(s0*(s1 - 1) + 2)**2", 256),
        ("s0**2**2", 2401),
        ("-s0", -7),
        ("(s0 > 3) & ~(s1 > 3)", True),
        ("s0/2", 3.5),
    ],
)
def test_expressions_of_sizes(text: str, value: int) -> None:
    assert evaluate(text, {"s0": 7, "s1": 3}) == value
    assert symbols(text) <= {"s0", "s1"}


@pytest.mark.parametrize(
    "text", ["__import__('os')", "s0.real", "[1]", "(lambda: 1)()", "'a'", "9**9**9", "s0 +", "open", "s9", "1//0"]
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(IRError, match="size '"):
        evaluate(text, {"s0": 7})


TOWER = "**".join(["9"] * 200)


@pytest.mark.parametrize(
    "text",
    [
        TOWER,
        "((((2**16)**16)**16)**16)**16",
        "PowByNatural(PowByNatural(s0, 63), 63)",
        "2**(2**(2**(2**9)))",
        "s0**99999999999",
        "9" * 5000,
        "1e308*10.0",
        "-" * 9000 + "1",
        "+".join(["s0"] * 4000),
        "(" * 9999,
        "(s0" * 3000 + ")" * 3000,
        "Max(" * 150 + "s0" + ")" * 150,
        "1" + "a" * 200_000,
        "1 " * 200_000,
        "s0*" * 3000 + "s0",
        "1 << 10**9",
        "s0 >> -1",
        "FloatPow(-1.0, 0.5)",
        "s0 if s0 else s0",
        "[s0 for s0 in s0]",
        "Max(*s0)",
        "Max(a=s0)",
        "s0 < s0 < s0",
        "s0\0",
        "True.real",
        "2**0.5",
    ],
)
def test_an_expression_without_measure_is_refused_at_once(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(IRError, match="^size '") as raised:
        evaluate(text, {"s0": 7})
    assert time.process_time() - begun < 0.5 and len(str(raised.value)) < 500


@pytest.mark.parametrize("value", [None, 7, ["s0"], {"$size": "s0"}, b"s0"])
def test_what_is_no_text_is_no_expression(value: Any) -> None:
    with pytest.raises(IRError, match="is no size"):
        specialize({"$size": value}, {"s0": 7})


PARTS = st.sampled_from(
    ["s0", "s1", "7", "0", "2.5", "(", ")", ",", "+", "-", "*", "**", "//", "/", "%", "&", "~", "Max(", "FloorDiv(",
     "PowByNatural(", "sqrt(", "Mod(", " ", "<", "not ", " and ", "1e300", "9" * 30, "\n", ">>"]
)  # fmt: skip


@given(st.lists(PARTS, max_size=60))
def test_any_text_has_a_value_or_is_refused(parts: list[str]) -> None:
    try:
        value = evaluate("".join(parts), {"s0": 7, "s1": 3})
    except IRError:
        return
    assert isinstance(value, (int, float)) and abs(value) <= 2**63


def test_exported_programs_and_pt2_files_are_ir(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval()
    exported = torch.export.export(module, (torch.randn(2, 8),))
    torch.export.save(exported, tmp_path / "m.pt2")
    assert [node.op_type for node in read_ir(exported)] == ["aten.linear.default", "aten.relu.default"]
    assert read_ir(tmp_path / "m.pt2").name == "m"


def test_what_is_no_pt2_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IRError, match="there is no such file"):
        read_ir(tmp_path / "none.pt2")
    (tmp_path / "bad.pt2").write_bytes(b"not an archive")
    with pytest.raises(IRError, match="is not a .pt2 file, which is a zip archive"):
        read_ir(tmp_path / "bad.pt2")
