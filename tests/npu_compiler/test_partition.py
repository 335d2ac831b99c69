"""Partition plans: right answers however the nodes are divided, few crossings, and CPU partitions that mean PyTorch."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder
from torch import nn
from torch_ir import extract_ir

import npu_compiler
from npu_compiler import DeviceError, InputError, PartitionPlan, partition, read_ir
from npu_runtime import Backend, DAGExecutor, execute_cpu_partition


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn1, self.bn2, self.fc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)) + y)
        left, right = F.max_pool2d(y, 2).chunk(2, dim=1)
        return self.fc(torch.cat([left.exp(), right], 1).mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        q, k, v = (t.view(1, 6, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).split(16, -1))
        mask = torch.triu(torch.full((6, 6), float("-inf"), device=x.device), 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        x = x + self.out(y.transpose(1, 2).reshape(1, 6, 16))
        values, indices = torch.topk(self.head(x), 3)
        return torch.softmax(values, -1), indices


@functools.cache
def exported(
    kind: type[nn.Module],
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, np.ndarray], list[np.ndarray]]:
    torch.manual_seed(3)
    model = kind().eval()
    x = torch.randn(1, 3, 8, 8) if kind is CNN else torch.tensor([[1, 4, 10, 0, 7, 2]])
    with torch.no_grad():
        ir = extract_ir(copy.deepcopy(model).to("meta"), (x.to("meta"),)).to_dict()
        expected = model(x)
    wanted = [t.numpy() for t in (expected if isinstance(expected, tuple) else (expected,))]
    return ir, model.state_dict(), {ir["graph_inputs"][0]["name"]: x.numpy()}, wanted


def answers(backend: Backend, plan: PartitionPlan, state: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    dag = DAGExecutor(plan, backend)
    dag.load_weights(state)
    first = dag.execute(inputs)
    second = dag.execute(inputs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    return [first[name] for name in plan.graph.output_names]


def close(actual: list[np.ndarray], wanted: list[np.ndarray], atol: float = 1e-4) -> None:
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        assert (a.dtype, a.shape) == (w.dtype, w.shape)
        np.testing.assert_allclose(a, w, atol=atol, rtol=1e-4)


def devices(plan: PartitionPlan) -> list[str]:
    return [part.device for part in plan.partitions]


# how the nodes are divided


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from([CNN, Transformer]), refused=st.sets(st.integers(0, 40), max_size=12))
def test_answers_are_right_for_any_division(backend: Backend, kind: type[nn.Module], refused: set[int]) -> None:
    ir, state, inputs, wanted = exported(kind)
    count = iter(range(10**6))
    plan = partition(ir, lambda op: next(count) not in refused, compute_dtype="float32")
    close(answers(backend, plan, state, inputs), wanted)


@pytest.mark.parametrize(
    "is_supported",
    [
        lambda op: "conv" not in op,
        lambda op, attrs: attrs.get("padding") is None,
        lambda *args: "linear" in args[0],
        lambda op, attrs=None: not attrs,
        lambda op: len(op) % 2 == 0,
    ],
    ids=["one-argument", "two-arguments", "variadic", "optional", "half"],
)
@pytest.mark.parametrize("kind", [CNN, Transformer])
def test_support_functions_of_one_and_two_arguments(
    backend: Backend, kind: type[nn.Module], is_supported: Callable[..., bool]
) -> None:
    ir, state, inputs, wanted = exported(kind)
    close(answers(backend, partition(ir, is_supported, compute_dtype="float32"), state, inputs), wanted)


@pytest.mark.parametrize("kind", [CNN, Transformer])
def test_everything_on_the_cpu_is_one_partition_without_transfers(backend: Backend, kind: type[nn.Module]) -> None:
    ir, state, inputs, wanted = exported(kind)
    plan = partition(ir, lambda op: False)
    assert devices(plan) == ["cpu"] and plan.transfers == [] and plan.device_share == 0
    assert set(plan.reasons.values()) <= {"the given support function rejects the op"} | {
        reason for reason in plan.reasons.values() if reason.startswith("its producer '")
    }
    close(answers(backend, plan, state, inputs), wanted)


def test_everything_on_the_device_is_one_partition(backend: Backend) -> None:
    ir, state, inputs, wanted = exported(CNN)
    plan = partition(ir)
    assert devices(plan) == ["npu"] and plan.device_share == 1 and plan.reasons == {}
    assert [(t.source, t.target, t.bytes) for t in plan.transfers] == [
        ("cpu", "npu", 3 * 64 * 2),
        ("npu", "cpu", 5 * 2),
    ]
    close(answers(backend, plan, state, inputs), wanted, atol=2e-2)


def test_independent_cpu_nodes_are_gathered(backend: Backend) -> None:
    g = IRBuilder()
    x = g.input("x", 4, 4)
    branches = [g("aten.erfinv.default", g("aten.mul.Tensor", x, 0.1 * i)) for i in range(1, 6)]
    total = branches[0]
    for branch in branches[1:]:
        total = g("aten.add.Tensor", total, g("aten.relu.default", branch))
    plan = partition(g.output(total).ir(), lambda op: "erfinv" not in op, compute_dtype="float32")
    assert devices(plan) == ["npu", "cpu", "npu"]
    x_value = np.random.default_rng(0).uniform(-1, 1, (4, 4)).astype(np.float32)
    wanted = execute_cpu_partition(read_ir(g.ir()), {"x": x_value})
    close(answers(backend, plan, {}, {"x": x_value}), list(wanted.values()))


def test_a_getitem_goes_where_its_producer_is(backend: Backend) -> None:
    g = IRBuilder()
    pieces = g("aten.topk.default", g.input("x", 2, 8), 3)
    values = g("aten.relu.default", g.getitem(pieces, 0))
    plan = partition(g.output(values, g.getitem(pieces, 1)).ir(), lambda op: "topk" not in op, compute_dtype="float32")
    assert plan.reasons["topk"] == "the given support function rejects the op"
    assert plan.reasons["getitem"] == plan.reasons["getitem_1"] == "its producer 'topk' is on the CPU"
    assert devices(plan) == ["cpu", "npu"]
    x = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    close(answers(backend, plan, {}, {"x": x}), [np.maximum(-np.sort(-x)[:, :3], 0), np.argsort(-x)[:, :3]])


def test_what_the_op_table_cannot_lower_goes_to_the_cpu_whatever_the_function_says() -> None:
    g = IRBuilder()
    plan = partition(g.output(g("aten.logcumsumexp.default", g.input("x", 3), 0)).ir(), lambda op: True)
    assert devices(plan) == ["cpu"]
    assert plan.reasons == {"logcumsumexp": "op 'aten.logcumsumexp.default' is not in the op table"}


@pytest.mark.parametrize(
    ("op", "reason"), [("avg_pool2d", "averages of integers"), ("max_pool2d", "max pooling of integers")]
)
def test_pooled_integers_are_pytorchs(op: str, reason: str, backend: Backend) -> None:
    g = IRBuilder()
    plan = partition(g.output(g(f"aten.{op}.default", g.input("x", 1, 2, 4, 4, dtype="int64"), [2, 2])).ir())
    assert devices(plan) == ["cpu"] and reason in plan.reasons[op]
    x = np.full((1, 2, 4, 4), 2**24 + 1)
    np.testing.assert_array_equal(answers(backend, plan, {}, {"x": x}), [x[:, :, :2, :2]])


# transfers and reports


def crossing() -> PartitionPlan:
    g = IRBuilder()
    y = g("aten.linear.default", g.input("x", 2, 8, dtype="bfloat16"), g.weight("w", 4, 8, dtype="bfloat16"), name="y")
    z = g("aten.sinh.default", y, name="z")
    return partition(g.output(g("aten.mul.Tensor", z, y, name="out")).ir(), lambda op: "sinh" not in op)


def test_only_what_crosses_is_transferred_and_its_bytes_are_known() -> None:
    plan = crossing()
    assert devices(plan) == ["npu", "cpu", "npu"] and plan.compute_dtype == "bfloat16"
    crossings = [[(t.tensor, t.source, t.target, t.bytes) for t in part.transfers] for part in plan.partitions]
    assert crossings == [[("x", "cpu", "npu", 32)], [("y", "npu", "cpu", 16)], [("z", "cpu", "npu", 16)]]
    assert [(t.tensor, t.bytes) for t in plan.output_transfers] == [("out", 16)]


def test_bfloat16_survives_the_crossing(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((2, 8), (4, 8)))
    (actual,) = answers(backend, crossing(), {"w": w}, {"x": x})
    assert actual.dtype == ml_dtypes.bfloat16
    y = torch.from_numpy(x.astype(np.float32)).bfloat16() @ torch.from_numpy(w.astype(np.float32)).bfloat16().T
    np.testing.assert_allclose(actual.astype(np.float32), (y.sinh() * y).float().numpy(), rtol=2e-2)


def test_the_plan_prints_as_a_table_and_as_mermaid() -> None:
    lines = str(crossing()).split("\n")
    assert lines[0].split() == ["#", "device", "nodes", "bytes", "in", "first", "…", "last", "node"]
    assert [line.split() for line in lines[1:4]] == [
        ["0", "npu", "1", "32", "y", "…", "y"],
        ["1", "cpu", "1", "16", "z", "…", "z"],
        ["2", "npu", "1", "16", "out", "…", "out"],
    ]
    assert lines[4] == "66.7% of nodes on the device; 80 bytes cross in 4 transfers"
    assert crossing().to_mermaid().split("\n") == [
        "graph TD",
        "    inputs([inputs])",
        '    p0["NPU 0: 1 nodes"]',
        "    inputs -->|32 B| p0",
        '    p1[["CPU 1: 1 nodes"]]',
        "    p0 -->|16 B| p1",
        '    p2["NPU 2: 1 nodes"]',
        "    p1 -->|16 B| p2",
        "    p0 -->|16 B| p2",
        "    outputs([outputs])",
        "    p2 --> outputs",
    ]


# outputs and inputs of every kind


@pytest.mark.parametrize("is_supported", [lambda op: True, lambda op: False], ids=["device", "cpu"])
def test_outputs_that_are_inputs_weights_constants_or_duplicates(
    backend: Backend, is_supported: Callable[[str], bool]
) -> None:
    g = IRBuilder()
    x, w, c = g.input("x", 2), g.weight("w", 3), g.constant("c", np.array([1.0, 2.0], np.float32))
    y = g("aten.relu.default", x)
    plan = partition(g.output(y, x, w, y, c).ir(), is_supported, compute_dtype="float32")
    x_value, w_value = np.array([-1.0, 2.0], np.float32), np.arange(3, dtype=np.float32)
    relu = np.array([0.0, 2.0], np.float32)
    results = answers(backend, plan, {"w": w_value}, {"x": x_value})
    close(results, [relu, x_value, w_value, relu, np.array([1.0, 2.0], np.float32)])
    results[1][:] = 9
    assert x_value.tolist() == [-1, 2]


def test_a_graph_without_nodes_returns_its_inputs(backend: Backend) -> None:
    g = IRBuilder()
    plan = partition(g.output(g.input("x", 2)).ir())
    assert plan.partitions == () and plan.device_share == 1 and "outputs" in plan.to_mermaid() and str(plan)
    close(answers(backend, plan, {}, {"x": np.ones(2, np.float32)}), [np.ones(2, np.float32)])


def test_an_updated_value_that_a_later_partition_reads_keeps_its_old_content(backend: Backend) -> None:
    """index_copy may update in place only what nobody reads again, in this partition or any other."""
    g = IRBuilder()
    h = g("aten.relu.default", g.input("x", 4, 2))
    at, rows = g.input("at", 1, dtype="int64"), g.input("rows", 1, 2)
    new = g("aten.index_copy.default", h, 0, at, g("aten.sinh.default", rows))
    late = g("aten.add.Tensor", g("aten.sinh.default", new), h)
    plan = partition(g.output(new, late).ir(), lambda op: "sinh" not in op, compute_dtype="float32")
    inputs = {"x": np.ones((4, 2), np.float32), "at": np.array([2]), "rows": np.full((1, 2), 3, np.float32)}
    wanted = execute_cpu_partition(read_ir(g.ir()), inputs)
    close(answers(backend, plan, {}, inputs), list(wanted.values()))
    assert inputs["x"].min() == inputs["x"].max() == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"missing input 'ids' \(the graph's inputs are 'ids'\)"),
        ({"ids": np.zeros((1, 6), np.int64), "x": np.zeros(1)}, "unknown input 'x'"),
        ({"ids": np.zeros((1, 5), np.int64)}, r"'ids' has shape \[1, 5\], but the program expects \[1, 6\]"),
        ({"ids": np.zeros((1, 6))}, "'ids' has dtype float64"),
        ({"ids": np.full((1, 6), 11)}, r"'ids' holds 11, which is outside 0\.\.10"),
    ],
)
def test_bad_inputs_of_a_plan_are_refused_and_it_still_works(
    backend: Backend, inputs: dict[str, np.ndarray], message: str
) -> None:
    ir, state, good, wanted = exported(Transformer)
    dag = DAGExecutor(partition(ir, compute_dtype="float32"), backend)
    dag.load_weights(state)
    with pytest.raises(InputError, match=message):
        dag.execute(inputs)
    close(list(dag.execute(good).values()), wanted)


# CPU partitions


def on_cpu(g: IRBuilder, inputs: dict[str, np.ndarray], weights: dict[str, Any] | None = None) -> list[np.ndarray]:
    graph = read_ir(g.ir())
    outputs = execute_cpu_partition(graph, inputs, weights)
    return [outputs[name] for name in graph.outputs]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_attention_on_the_cpu_keeps_its_scale_and_causality() -> None:
    for kwargs in ({"scale": 0.7}, {"is_causal": True}, {"scale": 0.1, "is_causal": True}):
        g = IRBuilder()
        q = g.input("q", 1, 2, 5, 4)
        g.output(g("aten.scaled_dot_product_attention.default", q, q, q, **kwargs))
        t = torch.from_numpy(normal(1, 2, 5, 4))
        close(on_cpu(g, {"q": t.numpy()}), [F.scaled_dot_product_attention(t, t, t, **kwargs).numpy()])


def test_batch_norm_on_the_cpu_with_and_without_affine_parameters() -> None:
    mean, var = normal(3), np.abs(normal(3)) + 1
    for affine in (True, False):
        g = IRBuilder()
        gamma, beta = (g.weight("g", 3), g.weight("b", 3)) if affine else (None, None)
        x = g.input("x", 2, 3, 4)
        g.output(
            g("aten.batch_norm.default", x, gamma, beta, g.weight("m", 3), g.weight("v", 3), False, 0.1, 1e-3, True)
        )
        weights = {"g": normal(3) + 1, "b": normal(3) - 1, "m": mean, "v": torch.from_numpy(var)}
        t = [torch.from_numpy(np.asarray(weights[key])) if affine or key in "mv" else None for key in "mvgb"]
        wanted = F.batch_norm(torch.from_numpy(normal(2, 3, 4)), t[0], t[1], t[2], t[3], eps=1e-3)
        close(on_cpu(g, {"x": normal(2, 3, 4)}, weights), [wanted.numpy()])


def test_dtype_attributes_on_the_cpu() -> None:
    g = IRBuilder()
    x = g.input("x", 4)
    g.output(
        g("aten.to.dtype", x, dtype="bfloat16"),
        g("aten._to_copy.default", x, dtype="int64"),
        g("aten.sum.default", x, dtype="float64"),
        g("aten.softmax.int", x, 0, dtype="float64"),
        g("aten.full_like.default", x, 2.5, dtype="float16"),
        g("aten.arange.start_step", 0, 6, 2, dtype="int32"),
    )
    results = on_cpu(g, {"x": np.array([0.0, 1.5, -2.0, 3.0], np.float32)})
    assert [str(r.dtype) for r in results] == ["bfloat16", "int64", "float64", "float64", "float16", "int32"]
    assert results[1].tolist() == [0, 1, -2, 3] and results[5].tolist() == [0, 2, 4]


def test_ops_with_several_outputs_and_tensor_lists_on_the_cpu() -> None:
    g = IRBuilder()
    x = g.input("x", 3, 4)
    values, indices = g("aten.sort.default", x, 1, True)
    first, second = g("aten.split.Tensor", x, 2, 1)
    g.output(
        values,
        indices,
        g("aten.cat.default", [second, first], 1),
        g("aten.index.Tensor", x, [None, g.input("i", 2, dtype="int64")]),
    )
    a = normal(3, 4)
    order = np.argsort(-a, 1)
    picked = a[:, [3, 0]]
    close(
        on_cpu(g, {"x": a, "i": np.array([3, 0])}), [np.take_along_axis(a, order, 1), order, np.roll(a, 2, 1), picked]
    )


def test_a_model_has_the_same_compute_dtype_whole_and_in_parts() -> None:
    """The dtype of most weights decides, including weights that no node reads."""
    g = IRBuilder()
    x, dead = g.input("x", 2, 8, dtype="bfloat16"), g.weight("dead", 64, 8, dtype="bfloat16")
    g("aten.linear.default", x, dead)
    g.output(g("aten.linear.default", g("aten.to.dtype", x, torch.float32), g.weight("w", 4, 8)))
    whole, parts = npu_compiler.compile(g.ir()), partition(g.ir())
    assert whole.compute_dtype == parts.compute_dtype == "bfloat16"


def test_an_op_that_opens_a_file_is_refused(backend: Backend, tmp_path: Path) -> None:
    """PyTorch would make the file, or write to it."""
    g = IRBuilder()
    g.output(
        g("aten.add.Tensor", g.input("x", 8), g("aten.from_file.default", filename="", size=8, out=((8,), "float32")))
    )
    ir = g.ir()
    ir["nodes"][0]["attrs"] |= {"filename": str(tmp_path / "made"), "shared": True}
    with pytest.raises(DeviceError, match="'aten.from_file.default' reads and writes a file that the IR names"):
        answers(backend, partition(ir), {}, {"x": np.ones(8, np.float32)})
    assert not (tmp_path / "made").exists()


def test_an_op_that_pytorch_does_not_have_is_a_device_error(backend: Backend) -> None:
    g = IRBuilder()
    g.output(g("custom.unknown.default", g.input("x", 2), out=((2,), "float32")))
    plan = partition(g.ir())
    assert devices(plan) == ["cpu"]
    with pytest.raises(
        DeviceError, match="PyTorch has no op 'custom.unknown.default', so the CPU cannot run it either"
    ):
        answers(backend, plan, {}, {"x": np.ones(2, np.float32)})


def test_a_mask_that_does_not_broadcast_is_refused() -> None:
    """Some versions of PyTorch take any mask where there are no scores."""
    g = IRBuilder()
    q, k, v = (g.input(name, 1, 1, 0, 4) for name in "qkv")
    scaled = g(
        "aten.scaled_dot_product_attention.default", q, k, v, g.input("mask", 3, 0), out=((1, 1, 0, 4), "float32")
    )
    plan = partition(g.output(scaled).ir())
    (reason,) = plan.reasons.values()
    assert devices(plan) == ["cpu"] and reason == "an attention mask [3, 0] over scores [1, 1, 0, 0]"


@pytest.mark.parametrize(("shape", "sinks"), [((1, 4, 3, 8), (3,)), ((1, 4, 3, 8), (4, 1)), ((4, 3, 8), (4,))])
def test_sinks_that_are_not_one_of_each_head_are_refused(shape: tuple[int, ...], sinks: tuple[int, ...]) -> None:
    g = IRBuilder()
    q, k, v = (g.input(name, *shape) for name in "qkv")
    others = g.input("mask", 3, 3), g.input("sinks", *sinks)
    plan = partition(g.output(g("npu.attention.default", q, k, v, *others, out=(shape, "float32"), scale=0.5)).ir())
    (reason,) = plan.reasons.values()
    assert reason == f"attention of queries {list(shape)} with sinks {list(sinks)}"


# how partitions are compiled


@pytest.mark.parametrize("compute_dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", [CNN, Transformer])
def test_a_partitions_graph_compiles_to_the_same_program_as_its_ir(kind: type[nn.Module], compute_dtype: str) -> None:
    plan = partition(exported(kind)[0], is_supported_fn=lambda op: "mean" not in op and "layer_norm" not in op)
    on_device = [part for part in plan.partitions if part.device == "npu"]
    assert len(on_device) > 1 and any(spec.storage for part in on_device for spec in part.graph.tensors.values())
    for part in on_device:
        direct, read = (
            npu_compiler.compile(ir, options=npu_compiler.CompileOptions(compute_dtype=compute_dtype))
            for ir in (part.graph, json.loads(json.dumps(part.ir_dict)))
        )
        assert direct.to_bytes() == read.to_bytes()


def test_an_executor_of_a_plan_writes_no_ir(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    ir, state, inputs, wanted = exported(CNN)
    plan = partition(ir, compute_dtype="float32")
    monkeypatch.setattr(npu_compiler.partitioner, "graph_to_dict", None)
    close(answers(backend, plan, state, inputs), wanted)
