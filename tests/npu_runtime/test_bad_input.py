"""Bad input of every kind is one clear error of the right type, and what was there before still works."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder, Tensor
from safetensors.torch import save_file

from npu_compiler import (
    CompiledProgram,
    ConstraintError,
    DeviceError,
    InputError,
    IRError,
    NPUError,
    WeightError,
    compile,
    partition,
    read_ir,
)
from npu_compiler.graph.quantization import QuantizedFormat, quantize
from npu_compiler.ops.registry import OPS
from npu_runtime import Backend, CPUBackend, DAGExecutor, Executor, NPUBuffer, load_weights
from npu_runtime.cpu import native


def classifier() -> IRBuilder:
    g = IRBuilder("classifier")
    rows = g("aten.embedding.default", g.weight("table", 9, 4), g.input("ids", 3, dtype="int64"))
    y = g("aten.add.Tensor", rows, g.input("x", 3, 4))
    return g.output(g("aten.linear.default", y, g.weight("fc.weight", 2, 4), g.weight("fc.bias", 2), name="scores"))


STATE = {
    "table": np.ones((9, 4), np.float32),
    "fc.weight": np.ones((2, 4), np.float32),
    "fc.bias": np.zeros(2, np.float32),
}
INPUTS = {"ids": np.array([0, 8, 3]), "x": np.ones((3, 4), np.float32)}


@pytest.fixture
def program(backend: Backend) -> CompiledProgram:
    return compile(classifier().ir(), backend.target)


@pytest.fixture
def executor(backend: Backend, program: CompiledProgram) -> Iterator[Executor]:
    """An executor that must still give the right answer after the test."""
    executor, weights = Executor(program, backend), load_weights(STATE, program, backend)
    executor.run(INPUTS, weights)
    yield executor
    np.testing.assert_array_equal(executor.run(INPUTS, weights)["scores"].to_numpy(), np.full((3, 2), 8.0))


# IR


def edited(**changes: Any) -> dict[str, Any]:
    """The classifier's IR with values replaced; `nodes__1__name="x"` sets ir["nodes"][1]["name"]. None deletes."""
    ir = copy.deepcopy(classifier().ir())
    for path, value in changes.items():
        *steps, last = [int(step) if step.isdigit() else step for step in path.split("__")]
        holder: Any = ir
        for step in steps:
            holder = holder[step]
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    return ir


def cyclic() -> dict[str, Any]:
    ir = classifier().ir()
    ir["nodes"][0] = {
        **ir["nodes"][0],
        "inputs": [
            ir["nodes"][0]["inputs"][0],
            {
                "name": "scores",
                "shape": [3, 2],
                "dtype": "float32",
                "producer_node": "scores",
                "producer_output_idx": 0,
            },
        ],
    }
    return ir


DANGLING = {"name": "ghost", "shape": [3, 4], "dtype": "float32", "producer_node": "ghost", "producer_output_idx": 0}


@pytest.mark.parametrize(
    ("ir", "message"),
    [
        (cyclic(), "the graph has a cycle through 'embedding', 'add', 'scores'"),
        (edited(graph_inputs__1__dtype="float7"), "graph input: tensor 'x': unknown dtype 'float7'; known are"),
        (edited(graph_inputs__1__dtype=["float32"]), "graph input: tensor 'x': unknown dtype"),
        (edited(nodes__1__inputs__1=DANGLING), "node 'add' input 1: reads output 0 of 'ghost', which no node or graph"),
        (
            edited(nodes__1__inputs__1={**DANGLING, "producer_node": None}),
            "'ghost' is not a weight, a graph input, or any",
        ),
        (edited(nodes__1__inputs__1={**DANGLING, "producer_node": ["add"]}), "node 'add' input 1"),
        (
            edited(nodes__1__outputs__0__shape=[3, -4]),
            r"node 'add' output 0: tensor 'add': shape \[3, -4\] has a negative",
        ),
        (edited(nodes__1__outputs__0__shape=["s0", 4]), "dimension 's0' is not an integer; shapes must be static"),
        (edited(nodes__1__outputs__0__shape=[3.0, 4]), "dimension 3.0 is not an integer"),
        (edited(nodes__1__outputs__0__shape=4), "tensor 'add': field 'shape' is missing or not a list"),
        (edited(nodes__1__name="embedding"), "node 'embedding': the name is used twice"),
        (edited(graph_inputs__1__name="ids"), "graph input 'ids': the name is used twice"),
        (edited(nodes__1__name=None), "node 1: field 'name' is missing or not a string"),
        (edited(nodes__1__op_type=None), "node 'add': field 'op_type' is missing or not a string"),
        (edited(nodes__1__inputs=None), "node 'add': field 'inputs' is missing or not a list"),
        (edited(nodes__1__outputs="add"), "node 'add': field 'outputs' is missing or not a list"),
        (edited(nodes__1__attrs=[1]), "node 'add': field 'attrs' is not an object"),
        (edited(nodes__1=7), "node 1: expected an object, got int"),
        (
            edited(nodes__1__op_type="<built-in function getitem>", nodes__1__inputs=[], nodes__1__attrs={"index": 0}),
            "node 'add' .*: it has 1 outputs, 0 inputs and index 0; needed are one output and the index of an input",
        ),
        (edited(nodes__1__op_type="getitem", nodes__1__attrs={"index": 2}), "2 inputs and index 2; needed are"),
        (edited(nodes__1__op_type="getitem"), "2 inputs and index None; needed are"),
        (edited(nodes=None), "IR field 'nodes' is missing or not a list"),
        (edited(graph_inputs=None), "IR field 'graph_inputs' is missing or not a list"),
        (edited(graph_outputs={}), "IR field 'graph_outputs' is missing or not a list"),
        (edited(weights__0__name=None), "weight: field 'name' is missing"),
        (edited(weights=7), "IR field 'weights' is not a list"),
        (
            edited(weight_name_mapping=[]) | {"weight_name_mapping": ["a"]},
            "IR field 'weight_name_mapping' is not an object",
        ),
        (
            edited(weight_name_mapping__p_table="no.such.key"),
            "'p_table' maps to 'no.such.key', which is not in 'weights'",
        ),
        (
            edited(constants={"table": {"data": [1.0], "dtype": "float32"}}),
            r"constant 'table': 1 values for shape \[9, 4\]",
        ),
        (edited(constants={"table": {"data": "abc", "dtype": "float32"}}), "constant 'table': cannot read its data"),
        (edited(constants={"table": {}}), "constant 'table': cannot read its data"),
        (edited(constants={"table": {"data": [2**70], "dtype": "int64"}}), "constant 'table': cannot read its data"),
        (edited(graph_outputs__0=DANGLING), "graph output 'ghost': reads output 0 of 'ghost'"),
        (edited(nodes__2__inputs__0__shape=[3, 5]), r"has shape \[3, 5\], but its producer declares \[3, 4\]"),
    ],
)
def test_malformed_ir_is_an_error_that_names_the_place(ir: dict[str, Any], message: str) -> None:
    with pytest.raises(IRError, match=message):
        read_ir(ir)
    with pytest.raises(IRError, match=message):
        compile(ir)


def leaves(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ():
        yield from leaves(item[key], (*path, key))


KINDS = [
    ("float32", (3, 4)),
    ("int64", (5,)),
    ("bool", (3, 4)),
    ("float32", (2, 3, 4, 4)),
    ("int64", ()),
    ("float32", (0, 4)),
]
NAMES = "dim index size start end dims keepdim other value dtype kernel_size stride padding indices".split()
VALUES = [0, 1, -1, 7, [], [0], [1, -1], None, True, "float32", 2.5, [[1]], "x"]


def drawn_node(op_type: str, rng: Random) -> dict[str, Any]:
    """IR of a single node with any number of inputs, outputs and attributes of any kind."""
    kinds = [rng.choice(KINDS) for _ in range(7)]
    tensors = [{"name": f"t{i}", "shape": list(shape), "dtype": dtype} for i, (dtype, shape) in enumerate(kinds)]
    inputs, outputs = tensors[:4], tensors[4 : rng.randint(4, 7)]
    attrs = {name: rng.choice(VALUES) for name in rng.sample(NAMES, rng.randrange(4))}
    read = rng.choices(inputs, k=rng.randrange(5))
    node = {"name": "n", "op_type": op_type, "inputs": read, "outputs": outputs, "attrs": attrs}
    return {"graph_inputs": inputs, "graph_outputs": outputs or inputs[:1], "weights": [], "nodes": [node]}


@pytest.mark.parametrize("use", [partition, compile], ids=["partition", "compile"])
@settings(max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_node_of_any_op_with_any_operands_is_right_or_refused(use: Callable[[Any], Any], seed: int) -> None:
    rng = Random(seed)
    for op_type in (rng.choice(sorted(OPS)), "<built-in function getitem>"):
        ir = drawn_node(op_type, rng)
        try:
            use(ir)
        except NPUError:
            pass
        except Exception as error:
            pytest.fail(f"{json.dumps(ir)}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("value", [None, "x", -1, 2**70, 1.5, [], {}, [[]], {"x": "y"}, True], ids=repr)
def test_a_field_of_another_type_is_an_error_or_harmless(value: Any) -> None:
    ir = classifier().ir()
    for path in leaves(ir):
        changed = copy.deepcopy(ir)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        try:
            read_ir(changed)
        except IRError:
            pass
        except Exception as error:
            pytest.fail(f"{path} = {value!r}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not an IR file: it is not UTF-8 text"),
        (b"[1, 2]", "holds a JSON list, not an IR object"),
        (b"{}", "IR field 'graph_inputs' is missing"),
        (b"[" * 100_000, "is not valid JSON"),
        (json.dumps(classifier().ir()).encode()[:-40], "is not valid JSON"),
    ],
    ids=["empty", "open", "binary", "list", "no-fields", "deep", "truncated"],
)
def test_a_file_that_is_no_ir(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(IRError, match=message):
        compile(path)


def test_a_file_that_is_not_there_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(IRError, match=r"cannot read IR file '.*no\.json': No such file or directory"):
        compile(tmp_path / "no.json")
    with pytest.raises(IRError, match="cannot read IR file"):
        compile(str(tmp_path))
    with pytest.raises(IRError, match="cannot read IR from a int: give a path, a dict, or a torch_ir IR"):
        compile(7)


def one_node(op_type: str, *args: Any, inputs: int = 1, attrs: Any = (), out: list[int] | None = None) -> Any:
    """The IR of one op on [2, 3], with so many inputs, attributes replaced (None deletes), another output shape."""
    g = IRBuilder()
    ir = copy.deepcopy(g.output(g(op_type, g.input("x", 2, 3), *args, name="bad")).ir())
    (node,) = ir["nodes"]
    node["inputs"] = node["inputs"][:inputs]
    node["attrs"] = {key: value for key, value in {**node["attrs"], **dict(attrs)}.items() if value is not None}
    for meta in (node["outputs"][0], ir["graph_outputs"][0]):
        meta["shape"] = out or meta["shape"]
    return ir


@pytest.mark.parametrize(
    ("ir", "message"),
    [
        (one_node("aten.softmax.int", -1, attrs={"dim": None}), r"softmax.int\): argument 'dim' is missing or unknown"),
        (one_node("aten.softmax.int", -1, attrs={"dim": "x"}), r"softmax.int\): .*not supported between"),
        (one_node("aten.add.Tensor", 1.0, attrs={"other": None}), "argument 'other' is missing or unknown"),
        (one_node("aten.relu.default", inputs=0), "argument 'self' is missing or unknown"),
        (one_node("aten.transpose.int", 0, 1, attrs={"dim1": 5}), r"there is no dimension 5 in \[2, 3\]"),
        (one_node("aten.transpose.int", 0, 1, attrs={"dim0": -3}), r"there is no dimension -3 in \[2, 3\]"),
        (
            one_node("aten.sum.dim_IntList", [1], attrs={"dim": [7]}),
            "its inputs, attributes and outputs are inconsistent",
        ),
        (one_node("aten.sum.dim_IntList", [1], out=[5]), "its inputs, attributes and outputs are inconsistent"),
        (one_node("aten.select.int", 0, 1, attrs={"index": 9}), r"there is no index 9 in dimension 0 of \[2, 3\]"),
        (one_node("aten.slice.Tensor", 0, 0, 1, attrs={"step": 0}), "no slice 0:1:0 of dimension 0"),
        (one_node("aten.narrow.default", 1, 1, 2, attrs={"length": 9}), "no slice 1:10:1 of dimension 1"),
        (one_node("aten.view.default", [3, 2], out=[3, 3]), "its inputs, attributes and outputs are inconsistent"),
        (one_node("aten.view.default", [3, 2], out=[2, 6]), "its inputs, attributes and outputs are inconsistent"),
        (one_node("aten.expand.default", [2, 3], out=[4, 3]), r"\[2, 3\] does not broadcast to \[4, 3\]"),
        (one_node("aten.relu.default", out=[300]), r"\[2, 3\] does not broadcast to \[300\]"),
        (one_node("aten.sum.dim_IntList", [1], inputs=0), "tuple index out of range"),
        (one_node("aten.relu.default", out=[3]), r"\[2, 3\] does not broadcast to \[3\]"),
    ],
)
def test_a_node_that_cannot_be_lowered_is_an_error_that_names_it(ir: dict[str, Any], message: str) -> None:
    with pytest.raises(IRError, match=rf"node 'bad' \(aten\..*{message}"):
        compile(ir)


# constraints


def test_a_constraint_error_lists_every_violation_with_node_shape_and_advice() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 3)
    a = g("aten.cummax.default", x, 1, name="greatest")
    b = g("aten.linalg_inv_ex.default", g.input("m", 3, 3), name="inverse")
    c = g("aten.dropout.default", x, 0.5, True, name="dropped")
    with pytest.raises(ConstraintError) as caught:
        compile(g.output(a[0], b[0], c).ir())
    assert len(caught.value.violations) == 3
    message = str(caught.value)
    assert message.startswith("the NPU cannot run this graph (3 violations):\n  - node 'greatest'")
    assert "node 'greatest' (aten.cummax.default → [2, 3], [2, 3])" in message
    assert "op 'aten.linalg_inv_ex.default' is not in the op table" in message
    assert "node 'dropped' (aten.dropout.default → [2, 3]): dropout in training mode" in message
    assert message.count("use partition() and DAGExecutor, which run it on the CPU") == 3


def test_complex_inputs_and_opaque_regions_have_advice_of_their_own() -> None:
    g = IRBuilder()
    z = g.input("z", 4, dtype="complex64")
    y = g("wrap_with_set_grad_enabled", g.input("x", 2), name="region", out=((2,), "float32"))
    with pytest.raises(ConstraintError) as caught:
        compile(g.output(y, z).ir())
    assert "graph input 'z' [4] has dtype complex64; split it into real parts" in str(caught.value)
    assert "extract the IR under torch.no_grad()" in str(caught.value)


# weights


def test_all_that_is_wrong_with_the_weights_is_in_one_error(
    backend: Backend, program: CompiledProgram, executor: Executor
) -> None:
    table = STATE["table"].copy()
    table[2, 2] = np.nan
    bad = {"table": table, "fc.weight": np.ones((4, 2)), "model.fc.bias": STATE["fc.bias"], "extra": np.ones(1)}
    with pytest.raises(WeightError) as caught:
        load_weights(bad, program, backend)
    assert str(caught.value).split("\n") == [
        "the weights do not fit program 'classifier':",
        "  - missing: 'fc.bias' (did you mean 'model.fc.bias'?)",
        "  - unknown: 'extra'",
        "  - unknown: 'model.fc.bias'",
        "  - not a number: 'table' contains NaN",
        "  - wrong shape: 'fc.weight' is [4, 2], the model expects [2, 4]",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_is_found_in_every_float_dtype(backend: Backend, program: CompiledProgram, dtype: torch.dtype) -> None:
    state = {key: torch.from_numpy(value).to(dtype) for key, value in STATE.items()}
    load_weights(state, program, backend)
    state["fc.bias"] = torch.tensor([0.0, float("nan")], dtype=dtype)
    with pytest.raises(WeightError, match="not a number: 'fc.bias' contains NaN"):
        load_weights(state, program, backend)
    state["fc.bias"] = torch.tensor([0.0, float("inf")], dtype=dtype)
    load_weights(state, program, backend)


def test_safetensors_files_that_cannot_be_read(backend: Backend, program: CompiledProgram, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({key: torch.from_numpy(value) for key, value in STATE.items()}, path)
    data = path.read_bytes()
    load_weights(path, program, backend)
    for length in (0, 5, 60, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(WeightError, match=r"model\.safetensors' is not a readable safetensors file"):
            load_weights(path, program, backend)
    with pytest.raises(WeightError, match="no weights at .*give a .safetensors file or a folder of them"):
        load_weights(tmp_path / "no.safetensors", program, backend)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightError, match="no weights at"):
        load_weights(tmp_path / "empty", program, backend)


def test_running_without_weights_or_with_anothers(
    backend: Backend, program: CompiledProgram, executor: Executor
) -> None:
    fresh, weights = Executor(program, backend), load_weights(STATE, program, backend)
    with pytest.raises(
        WeightError, match="missing weights: p_fc_bias, p_fc_weight, p_table; load them with load_weights"
    ):
        fresh.run(INPUTS)
    with pytest.raises(
        WeightError, match=r"weight 'p_table' is float32\[9, 4\] in memory, but the program expects float16"
    ):
        executor.run(INPUTS, {**weights, "p_table": backend.allocate_zeros((9, 4), "float32")})
    fresh.run(INPUTS, weights)


def test_a_plan_lists_bad_weights_of_device_and_cpu_partitions(backend: Backend) -> None:
    g = classifier()
    g.outputs.clear()
    y = g("aten.linear.default", g("aten.erfinv.default", Tensor("scores")), g.weight("last", 3, 2))
    g.output(g("aten.add.Tensor", y, g.weight("offset", 3)))
    plan = partition(g.ir(), lambda op: "linear" not in op)
    state = {**STATE, "last": np.ones((3, 2), np.float32), "offset": np.ones(3, np.float32)}
    dag = DAGExecutor(plan, backend)
    with pytest.raises(WeightError, match=r"load_weights\(\) was not called"):
        dag.execute(INPUTS)
    with pytest.raises(WeightError, match="(?s)missing: 'fc.bias'.*missing: 'offset'"):
        dag.load_weights({key: state[key] for key in state.keys() - {"fc.bias", "offset"}})
    for key in state:
        for value in (np.ones((7, 7), np.float32), np.full_like(state[key], np.nan)):
            with pytest.raises(WeightError, match=f"'{key}'"):
                dag.load_weights({**state, key: value})
    dag.load_weights(state)
    assert dag.execute(INPUTS)


# inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, r"missing input 'x' \(the program's inputs are 'ids', 'x'\)"),
        ({"y": INPUTS["x"]}, "unknown input 'y'"),
        ({"x": None, "y": INPUTS["x"]}, "unknown input 'y'; missing input 'x'"),
        ({"x": np.ones((4, 3), np.float32)}, r"'x' has shape \[4, 3\], but the program expects \[3, 4\]"),
        ({"x": np.ones(12, np.float32)}, r"'x' has shape \[12\]"),
        ({"x": np.ones((3, 4), np.complex64)}, "'x' has dtype complex64, but the program expects float32"),
        ({"x": np.full((3, 4), "a")}, "'x' has dtype <U1"),
        ({"x": np.full((3, 4), None)}, "'x' has dtype object"),
        ({"x": "text"}, "input 'x' is a str; give a device buffer, an array, a torch tensor or a list of numbers"),
        ({"x": [[1.0] * 4] * 2 + [[1.0]]}, "input 'x' is a list; give a device buffer, .* (setting an array|inhomog)"),
        ({"ids": np.array([0.0, 1.0, 2.0])}, "'ids' has dtype float64, but the program expects int64"),
        ({"ids": np.array([0, 9, 1])}, r"'ids' holds 9, which is outside 0\.\.8"),
        ({"ids": np.array([0, -1, 1])}, r"'ids' holds -1, which is outside 0\.\.8"),
        ({"ids": np.array([0, 2**40, 1])}, f"'ids' holds {2**40}, which is outside"),
        ({"ids": np.array([0, 2**64 - 1, 1], np.uint64)}, f"'ids' holds {2**64 - 1}, which is outside"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(executor: Executor, changes: dict[str, Any], message: str) -> None:
    inputs = {key: value for key, value in {**INPUTS, **changes}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        executor.run(inputs, executor._shared._weights)


def test_a_buffer_that_does_not_fit_is_refused(backend: Backend, executor: Executor) -> None:
    wrong = NPUBuffer.zeros((3, 4), backend, "float32")
    with pytest.raises(
        InputError, match=r"input 'x' is float32\[3, 4\] in memory, but the program expects float16\[3, 4\]; make"
    ):
        executor.run({**INPUTS, "x": wrong}, executor._shared._weights)


@pytest.mark.parametrize("native", [False, True])
def test_an_index_out_of_range_that_only_shows_at_run_time_is_an_error(native: bool) -> None:
    g = IRBuilder()
    ids = g("aten.add.Tensor", g.input("ids", 3, dtype="int64"), 1)
    g.output(g("aten.embedding.default", g.weight("table", 9, 4), ids, name="rows"))
    backend = CPUBackend(native)
    program = compile(g.ir())
    executor, weights = Executor(program, backend), load_weights({"table": STATE["table"]}, program, backend)
    for value in (8, -2, 2**30):
        with pytest.raises(DeviceError, match="embedding_kernel"):
            executor.run({"ids": np.array([0, value, 1])}, weights)
    assert executor.run({"ids": np.array([0, 7, 1])}, weights)["rows"].to_numpy().sum() == 12


@pytest.mark.parametrize(
    "data", [np.full(3, "a"), np.full(3, None), np.ones(3, np.complex64)], ids=["text", "object", "complex"]
)
def test_an_array_that_no_device_stores_is_refused(backend: Backend, data: np.ndarray) -> None:
    with pytest.raises(NPUError):
        NPUBuffer.from_numpy(data, backend)


def test_memory_that_is_too_small_or_not_to_be_had(backend: Backend) -> None:
    with pytest.raises(InputError, match=r"'buffer' of shape \[3, 4\] does not fit in \[2, 4\]"):
        NPUBuffer.from_numpy(np.ones((3, 4), np.float32), backend, alloc_shape=(2, 4))
    with pytest.raises(InputError, match=r"does not fit in \[12\]"):
        NPUBuffer.from_numpy(np.ones((3, 4), np.float32), backend, alloc_shape=(12,))
    with pytest.raises(DeviceError, match=r"out of memory: .*float32\[1099511627776, 1048576\]"):
        NPUBuffer.zeros((2**40, 2**20), backend, "float32")
    with pytest.raises(DeviceError, match="the device does not store float64; it stores bfloat16, bool"):
        NPUBuffer.zeros((2,), backend, "float64")


def test_an_output_that_a_later_run_overwrote_cannot_be_read(executor: Executor) -> None:
    first = executor.run(INPUTS, executor._shared._weights)["scores"]
    kept = first.copy()
    second = executor.run({**INPUTS, "x": np.zeros((3, 4), np.float32)}, executor._shared._weights)["scores"]
    for read in (first.to_numpy, first.copy, lambda: np.from_dlpack(first)):
        with pytest.raises(
            DeviceError, match=r"overwritten by a later run\(\); read it, or copy\(\) it, before running again"
        ):
            read()
    assert kept.to_numpy()[0, 0] == 8 and second.to_numpy()[0, 0] == 4


def test_a_stale_output_cannot_be_an_input(backend: Backend, program: CompiledProgram) -> None:
    g = IRBuilder()
    g.output(g("aten.relu.default", g.input("x", 3, 2)))
    feeds, weights = Executor(program, backend), load_weights(STATE, program, backend)
    reads = Executor(compile(g.ir(), backend.target), backend)
    stale = feeds.run(INPUTS, weights)["scores"]
    reads.run({"x": stale})
    fresh = feeds.run(INPUTS, weights)["scores"]
    with pytest.raises(DeviceError, match="overwritten by a later run"):
        reads.run({"x": stale})
    assert reads.run({"x": fresh})["relu"].to_numpy()[0, 0] == 8


def test_a_program_for_another_target_or_with_unknown_kernels_is_refused() -> None:
    backend, program = CPUBackend(native=False), compile(classifier().ir())
    with pytest.raises(DeviceError, match="compiled for 'cuda_gpu', but this device runs 'op_level' and 'metal_gpu'"):
        Executor(replace(program, target="cuda_gpu"), backend)
    calls = [replace(call, kernel="no_such_kernel", params={}) for call in program.kernels]
    strange = replace(program, plan=replace(program.plan, calls=calls))
    executor, weights = Executor(strange, backend), load_weights(STATE, program, backend)
    for _ in range(2):
        with pytest.raises(DeviceError, match="the CPU device has no kernel 'no_such_kernel'"):
            executor.run(INPUTS, weights)


def test_a_call_that_cannot_be_prepared_for_new_buffers_does_not_run_on_the_old_ones() -> None:
    class Fragile(CPUBackend):
        broken = False

        def prepare(self, *args: Any) -> Any:
            if self.broken:
                raise DeviceError("broken")
            return super().prepare(*args)

    backend, program = Fragile(native=False), compile(classifier().ir())
    executor, weights = Executor(program, backend), load_weights(STATE, program, backend)
    first, other = (
        {spec.name: NPUBuffer.from_numpy(INPUTS[spec.name] * scale, backend, spec=spec) for spec in program.input_specs}
        for scale in (1, 0)
    )
    executor.run(first, weights)
    backend.broken = True
    with pytest.raises(DeviceError, match="broken"):
        executor.run(other, weights)
    backend.broken = False
    assert executor.run(other, weights)["scores"].to_numpy()[0, 0] == 4


def test_a_linear_without_a_weight_is_malformed() -> None:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 2, 3), g.weight("w", 4, 3), name="linear"))
    ir = g.ir()
    ir["nodes"][0]["inputs"] = ir["nodes"][0]["inputs"][:1]
    with pytest.raises(IRError, match="node 'linear'"):
        compile(ir)


def test_operands_that_pytorch_does_not_take_are_a_device_error() -> None:
    """A clamp of a number, which no compiler makes, but a file may hold."""
    g = IRBuilder()
    g.output(g("aten.clamp_min.Tensor", g.input("x", 3), g.input("low", 3), name="y"))
    program = compile(g.ir())
    (call,) = program.plan.calls
    changed = replace(call, inputs=call.inputs[:1], params={"scalars": [1.0, None]})
    program.plan.calls[:] = [changed]
    with pytest.raises(DeviceError, match="clamp_min"):
        Executor(CompiledProgram.from_bytes(program.to_bytes()), CPUBackend()).run(
            {"x": np.ones(3, np.float32), "low": np.ones(3, np.float32)}
        )


def test_a_result_of_the_cpu_overflows_on_its_way_to_the_device_as_it_would_there() -> None:
    """The result becomes infinite: it is neither clamped nor an error, since nobody wrote that value."""
    g = IRBuilder()
    large = g("aten.erfinv.default", g.input("x", 3))
    g.output(g("aten.neg.default", g("aten.mul.Tensor", large, 1.0), name="y"))
    plan = partition(g.ir(), lambda op: "erfinv" not in op)
    result = DAGExecutor(plan, CPUBackend())
    result._cpu[0].run = lambda inputs: {"erfinv": np.array([1e6, -3.4e38, 2], np.float32)}  # type: ignore[method-assign]
    np.testing.assert_array_equal(result.execute({"x": np.zeros(3, np.float32)})["y"], [-np.inf, 65504, -2])


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")
def test_ids_that_nobody_checked_may_not_be_out_of_range() -> None:
    weight = quantize(np.ones((8, 32)), QuantizedFormat("int4", 32))
    for wrong in (8, -1):
        launch = native.quantized_embedding(np.array([0, wrong]), weight, np.ones((2, 32), np.float32), False)
        assert launch is not None
        with pytest.raises(DeviceError, match=f"index {wrong} is out of range in kernel quantized_embedding"):
            launch()


def test_a_copy_in_absurdly_many_parts_is_refused() -> None:
    """Kernels walk eight dimensions; what has more is copied in slices, of which there may be too many."""
    g = IRBuilder()
    g.output(g("aten.repeat.default", g.input("x", *[3] * 8), [8] * 8, name="y"))
    with pytest.raises(ConstraintError, match=r"it copies 16 dimensions in 6561 parts"):
        compile(g.ir())
