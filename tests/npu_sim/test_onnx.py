"""ONNX files: read as modules, compiled by every front door, and refused in a sentence where they are wrong."""

import json
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnx_suite
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from typer.testing import CliRunner

import npu_compiler
import npu_sim
from benchmarks.pages import onnx_operators
from npu_compiler import InputError, IRError
from npu_sim.cli import app
from npu_sim.onnx.control import CONTROL_FLOW
from npu_sim.onnx.rows import MOST_NUMBERED, ROWS
from npu_sim.onnx.sources import load, parse_sizes

CHUNKS = 12


def floats(name: str, *shape: int | str | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 20,
    functions: list[onnx.FunctionProto] | None = None,
) -> Path:
    tensors = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=functions or [])
    path.write_bytes(model.SerializeToString())
    return path


def linear(path: Path, batch: int | str | None = 2, opset: int = 20) -> tuple[Path, np.ndarray]:
    weight = np.random.default_rng(3).standard_normal((4, 3)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "layer.weight"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    return write(path, nodes, [floats("x", batch, 4)], [floats("y", batch, 3)], {"layer.weight": weight}, opset), weight


# The ONNX project's node tests


def test_a_sample_of_the_node_tests_is_right() -> None:
    sample = Random(7).sample([case for case in onnx_suite.cases() if not onnx_suite.out_of_scope(case.model)], 10)
    results = list(onnx_suite.outcomes(sample))
    assert not [x for x in results if x.kind not in (onnx_suite.RIGHT, onnx_suite.REFUSED)]
    assert sum(x.kind == onnx_suite.RIGHT for x in results) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("part", range(CHUNKS))
def test_every_node_test_is_right_or_refused_in_a_sentence(part: int) -> None:
    results = list(onnx_suite.outcomes(onnx_suite.cases()[part::CHUNKS]))
    faults = [x for x in results if x.kind not in (onnx_suite.RIGHT, onnx_suite.REFUSED)]
    inside = [x for x in results if not x.reason]
    assert not faults
    assert sum(x.kind == onnx_suite.RIGHT for x in inside) >= 0.9 * len(inside)
    assert all(x.message and "\n" not in x.message for x in results if x.kind == onnx_suite.REFUSED)


def test_the_summary_of_the_node_tests_has_no_fault_and_nine_in_ten_right() -> None:
    facts = json.loads(onnx_suite.SUMMARY.read_text())
    assert not facts["faults"]
    assert facts["inside"]["right"] >= 0.9 * sum(facts["inside"].values())
    assert sum(facts["outside"].values()) + sum(facts["inside"].values()) == facts["tests"]


def test_the_page_of_operators_is_up_to_date() -> None:
    written = onnx_operators.document(json.loads(onnx_suite.SUMMARY.read_text()))
    page = onnx_operators.DOCS / "onnx_operators.md"
    assert page.read_text() == written, "run `python -m benchmarks.pages.onnx_operators`"


def test_a_wrong_result_is_found_by_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in onnx_suite.cases() if case.name == "test_abs")
    monkeypatch.setitem(ROWS, "Abs", ROWS["Neg"])
    assert [x.kind for x in onnx_suite.outcomes([case])] == [onnx_suite.WRONG]


# Front doors


def test_every_front_door_computes_the_same(tmp_path: Path) -> None:
    path, weight = linear(tmp_path / "model.onnx")
    x = np.random.default_rng(4).standard_normal((2, 4)).astype(np.float32)
    wanted = np.maximum(x @ weight, 0)
    np.testing.assert_allclose(load(path)(torch.from_numpy(x)), wanted, rtol=1e-5)
    np.testing.assert_allclose(npu_sim.compile(path)(torch.from_numpy(x)), wanted, rtol=1e-5)
    program = npu_compiler.compile(path, options=npu_compiler.CompileOptions(compute_dtype="float32"))
    assert [spec.name for spec in (*program.input_specs, *program.output_specs)] == ["x", "y"]
    program.save(tmp_path / "model.npubin")
    np.savez(tmp_path / "x.npz", x=x)
    for model in (["model.npubin", "-w", "model.onnx"], ["model.onnx"]):
        files = [str(tmp_path / part) if "." in part else part for part in model]
        run = ["run", *files, "--device", "cpu", "-i", str(tmp_path / "x.npz"), "-o", str(tmp_path / "out.npz")]
        assert CliRunner().invoke(app, run).exit_code == 0
        np.testing.assert_allclose(np.load(tmp_path / "out.npz")["y"], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        ["describe"],
        ["partition"],
        ["simulate", "--npu", "edge"],
        ["compile", "-o", "program.npubin"],
        ["extract", "-o", "ir.json", "--weights", "weights.safetensors"],
        ["report", "-o", "page.html"],
        ["verify", "--device", "cpu", "-w", "model.onnx"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_take_onnx_files(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    linear(tmp_path / "model.onnx")
    result = CliRunner().invoke(app, [arguments[0], "model.onnx", *arguments[1:]])
    assert result.exit_code == 0, result.output


def test_weights_keep_their_names_and_may_be_beside_the_file(tmp_path: Path) -> None:
    path, weight = linear(tmp_path / "model.onnx")
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").stat().st_size == weight.nbytes
    np.testing.assert_array_equal(load(path).state_dict()["layer.weight"], weight)


@pytest.mark.parametrize("opset", [13, 17, 21, 24])
def test_opsets_from_13_are_read(opset: int, tmp_path: Path) -> None:
    path, weight = linear(tmp_path / "model.onnx", opset=opset)
    x = torch.ones(2, 4)
    np.testing.assert_allclose(load(path)(x), np.maximum(x.numpy() @ weight, 0), rtol=1e-5)


# Sizes


def test_dynamic_sizes_are_given_by_name_by_shape_or_by_examples(tmp_path: Path) -> None:
    path, weight = linear(tmp_path / "model.onnx", "batch")
    x = torch.randn(5, 4)
    wanted = np.maximum(x.numpy() @ weight, 0)
    for module in (load(path, {"batch": 5}), load(path, {"x": [5, 4]}), npu_sim.compile(path, x)):
        np.testing.assert_allclose(module(x), wanted, rtol=1e-4, atol=1e-6)
    out = tmp_path / "p.npubin"
    assert CliRunner().invoke(app, ["compile", str(path), "--shape", "batch=5", "-o", str(out)]).exit_code == 0
    assert npu_compiler.CompiledProgram.load(out).input_specs[0].shape == (5, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, r"graph input 'x' has shape \[batch, 4\], whose sizes are not all known.*--shape batch=4"),
        ({"x": [2, 5]}, r"graph input 'x' has shape \[batch, 4\], not \[2, 5\]"),
        ({"batsh": 2}, "the model has no dimension or input 'batsh'; it has batch, x"),
    ],
)
def test_sizes_that_are_missing_or_wrong_are_named(
    sizes: dict[str, int | list[int]], message: str, tmp_path: Path
) -> None:
    path, _ = linear(tmp_path / "model.onnx", "batch")
    with pytest.raises(IRError, match=message):
        load(path, sizes)


def test_sizes_are_parsed_and_refused_in_a_sentence() -> None:
    assert parse_sizes(["batch=4", "x=1x3x8"]) == {"batch": 4, "x": [1, 3, 8]}
    for text in ("batch", "=4", "x=1x", "x=-1", "x=a"):
        with pytest.raises(InputError, match="--shape takes a dimension's size"):
            parse_sizes([text])


def test_sizes_computed_of_shapes_are_constants(tmp_path: Path) -> None:
    """Given: reshape(x, concat(gather(shape(x), 0), [-1])). Result: one view."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["first"]),
        helper.make_node("Unsqueeze", ["first", "axes"], ["row"]),
        helper.make_node("Concat", ["row", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["x", "wanted"], ["y"]),
    ]
    numbers = {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1])}
    path = write(tmp_path / "m.onnx", nodes, [floats("x", 2, 3, 4)], [floats("y", 2, 12)], numbers)
    graph = npu_compiler.read_ir(path)
    assert [node.base for node in graph.nodes] == ["aten.reshape"]
    assert not graph.weights


def test_a_constant_that_is_too_large_to_be_folded_is_computed_by_the_program(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["c"], value=numpy_helper.from_array(np.array([2.0], "f4")))
    ]
    nodes.append(helper.make_node("Add", ["x", "c"], ["y"]))
    numbers = {"shape": np.array([300, 300])}
    path = write(tmp_path / "m.onnx", nodes, [floats("x", 300)], [floats("y", 300, 300)], numbers)
    x = torch.randn(300)
    torch.testing.assert_close(npu_sim.compile(path)(x), (x + 2).expand(300, 300))


# Structure


def test_functions_of_the_model_are_expanded(tmp_path: Path) -> None:
    body = [
        helper.make_node("LeakyRelu", ["a"], ["b"]),
        helper.make_node("Mul", ["b", "b"], ["c"]),
    ]
    body[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    function = helper.make_function("local", "Square", ["a"], ["c"], body, [helper.make_opsetid("", 20)], ["slope"])
    node = helper.make_node("Square", ["x"], ["y"], domain="local", slope=0.5)
    path = write(tmp_path / "m.onnx", [node], [floats("x", 3)], [floats("y", 3)], functions=[function])
    x = torch.tensor([-2.0, 0.0, 3.0])
    torch.testing.assert_close(load(path)(x), torch.tensor([1.0, 0.0, 9.0]))


def branches() -> onnx.NodeProto:
    def branch(op: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(op, ["x"], [f"{op}_y"])], op, [], [floats(f"{op}_y", 3)])

    return helper.make_node("If", ["goes"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs"))


def test_a_branch_is_taken_where_its_condition_is_constant(tmp_path: Path) -> None:
    goes = {"goes": np.array(False)}
    path = write(tmp_path / "m.onnx", [branches()], [floats("x", 3)], [floats("y", 3)], goes)
    assert [node.base for node in npu_compiler.read_ir(path).nodes] == ["aten.abs"]


def test_a_branch_that_depends_on_an_input_is_refused(tmp_path: Path) -> None:
    goes = helper.make_tensor_value_info("goes", TensorProto.BOOL, ())
    path = write(tmp_path / "m.onnx", [branches()], [floats("x", 3), goes], [floats("y", 3)])
    with pytest.raises(IRError, match=r"node 'y' \(If\) needs a constant as its condition.*depends on 'goes'"):
        load(path)


def quantized_network(path: Path) -> tuple[Path, nn.Module]:
    """Write a convolution between a quantize and a dequantize; return its float form too."""
    generator = np.random.default_rng(5)
    codes = generator.integers(-127, 128, (8, 4, 3, 3)).astype(np.int8)
    scales = (0.01 + 0.01 * generator.random(8)).astype(np.float32)
    weights = {
        "w": codes,
        "w_scale": scales,
        "w_zero": np.zeros(8, np.int8),
        "s": np.array(0.05, np.float32),
        "z": np.array(128, np.uint8),
        "t": np.array(0.4, np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wf"], axis=0),
        helper.make_node("Conv", ["xf", "wf"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "t", "z"], ["rq"]),
        helper.make_node("DequantizeLinear", ["rq", "t", "z"], ["y"]),
    ]
    write(path, nodes, [floats("x", 1, 4, 8, 8)], [floats("y", 1, 8, 8, 8)], weights)
    convolution = nn.Conv2d(4, 8, 3, padding=1, bias=False)
    convolution.weight.data = torch.from_numpy(codes * scales[:, None, None, None])
    return path, convolution.eval()


def test_quantized_convolutions_run_on_integers(tmp_path: Path) -> None:
    path, convolution = quantized_network(tmp_path / "m.onnx")
    kernels = [call.kernel for call in npu_compiler.compile(path).kernels]
    assert any("integer" in kernel for kernel in kernels)
    assert not any(kernel.startswith("conv2d") for kernel in kernels)
    x = 0.05 * torch.randint(-100, 100, (1, 4, 8, 8))
    with torch.no_grad():
        wanted = torch.relu(convolution(x))
    result = npu_sim.compile(path)(x)
    assert (result - wanted.clamp(max=0.4 * 127)).abs().max() <= 0.21


# Networks that PyTorch exports


def exported(module: nn.Module, args: tuple[torch.Tensor, ...], path: Path) -> Path:
    torch.onnx.export(module, args, str(path), dynamo=True, verbose=False, external_data=False)
    return path


def settled(module: nn.Module) -> nn.Module:
    """Give a network weights with which its activations neither vanish nor explode."""
    torch.manual_seed(11)
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 1.5)
            nn.init.normal_(part.running_mean, std=0.1)
    return module.eval()


def compare(module: nn.Module, args: tuple[torch.Tensor, ...], path: Path) -> None:
    compiled = npu_sim.compile(exported(module, args, path))
    with torch.no_grad():
        wanted = module(*args)
    tensors = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted.values())
    results = compiled(*args)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    for result, tensor in zip(results, tensors, strict=True):
        assert tensor.abs().max() > 1e-3
        torch.testing.assert_close(result, tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max()))
    assert all(not program.off_device for program in compiled.report().programs)


def test_a_small_exported_network_equals_pytorch(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Flatten(), nn.Linear(128, 5))
    compare(settled(layers), (torch.randn(2, 3, 8, 8),), tmp_path / "m.onnx")


@pytest.mark.slow
def test_resnet50_exported_by_pytorch_equals_pytorch(tmp_path: Path) -> None:
    from npu_sim.vision.resnet import resnet50

    compare(settled(resnet50()), (torch.randn(1, 3, 128, 128),), tmp_path / "m.onnx")


@pytest.mark.slow
def test_mobilenet_v2_exported_by_pytorch_equals_pytorch(tmp_path: Path) -> None:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    network = MobileNetV2ForImageClassification(MobileNetV2Config(image_size=128, num_labels=100))
    compare(settled(network), (torch.randn(1, 3, 128, 128),), tmp_path / "m.onnx")


@pytest.mark.slow
def test_bert_exported_by_pytorch_equals_pytorch(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(12)
    network = BertModel(BertConfig(num_hidden_layers=3, vocab_size=1000)).eval()
    compare(network, (torch.randint(0, 1000, (2, 24)),), tmp_path / "m.onnx")


# What is refused


def changed(path: Path, **fields: object) -> Path:
    """Write a model of one node that is wrong in some way."""
    facts: dict[str, object] = {"op": "Relu", "inputs": ["x"], "domain": "", "opset": 20, "attrs": {}, **fields}
    node = helper.make_node(facts["op"], facts["inputs"], ["y"], domain=facts["domain"], **facts["attrs"])  # type: ignore[arg-type]
    return write(path, [node], [floats("x", 2, 3)], [floats("y", 2, 3)], opset=int(str(facts["opset"])))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opset": 12}, "imports opset 12; the oldest that is read is 13"),
        ({"opset": 99}, "imports opset 99; the newest that is read is 28"),
        ({"op": "Nonsense"}, r"node 'y' \(Nonsense\) is an operator that has no converter"),
        ({"domain": "com.example"}, r"node 'y' \(Relu\) is an operator of domain com.example that has no converter"),
        ({"inputs": ["z"]}, r"node 'y' \(Relu\) reads 'z', which is no input, no initializer and no node's output"),
        ({"op": "Cast", "attrs": {"to": 8}}, r"node 'y' \(Cast\) has a tensor of dtype STRING; known are BOOL"),
        ({"op": "Cast", "attrs": {"to": 1000}}, r"node 'y' \(Cast\) has a tensor of dtype unknown; known are BOOL"),
        ({"op": "Concat"}, r"node 'y' \(Concat\) cannot be computed for its inputs"),
        ({"op": "Transpose", "attrs": {"perm": [0, 0]}}, r"node 'y' \(Transpose\) cannot be computed for its inputs"),
        ({"op": "MatMul", "inputs": ["x", "x"]}, r"node 'y' \(MatMul\) cannot be computed for its inputs"),
        ({"op": "Reshape", "inputs": ["x", "x"]}, r"node 'y' \(Reshape\) needs a constant as its input 1.*'x'"),
        ({"op": "Resize", "inputs": ["x"]}, r"node 'y' \(Resize\) has neither scales nor sizes"),
        ({"op": "NonZero"}, r"node 'y' \(NonZero\) needs a constant"),
    ],
)
def test_models_that_cannot_be_read_are_refused_in_a_sentence(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(IRError, match=message) as caught:
        load(changed(tmp_path / "m.onnx", **fields))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_onnx_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path, _ = linear(tmp_path / "model.onnx")
    whole = path.read_bytes()
    with pytest.raises(IRError, match="there is no such file"):
        load(tmp_path / "none.onnx")
    for content in (b"", b"not a model", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(IRError, match=r"model.onnx' is not an ONNX file: ") as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    path = write(tmp_path / "m.onnx", nodes, [floats("x", 3)], [floats("b", 3)])
    with pytest.raises(IRError, match="has a graph with a cycle"):
        load(path)


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    path, _ = linear(tmp_path / "model.onnx")
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(IRError, match="cannot read the data of initializer 'layer.weight'"):
        load(path)


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "a/../../weights.bin"])
def test_external_data_outside_of_the_folder_is_not_read(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path, weight = linear(folder / "model.onnx")
    (tmp_path / "weights.bin").write_bytes(weight.tobytes())
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, location, 0, weight.nbytes)
    tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(IRError, match="external data has to be in the folder of the model"):
        load(path)


def asks_for(what: str, count: int, path: Path) -> Path:
    """Write a model of a few bytes whose reading takes that many turns."""
    x, weights, kwargs = floats("x", 1, 3, 4, 4), {}, {}
    if what == "resize":
        weights = {"sizes": np.array([1, 3, 4, count])}
        inputs, kwargs = ["x", "", "", "sizes"], {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    elif what == "pad":
        weights, kwargs = {"pads": np.array([0, 0, 0, count, 0, 0, 0, 0])}, {"mode": "reflect"}
        inputs = ["x", "pads"]
    elif what == "lrn":
        inputs, kwargs = ["x"], {"size": count}
    elif what == "pool":
        inputs, kwargs = ["x"], {"kernel_shape": [1, count], "pads": [0, count, 0, count]}
    elif what == "mel":
        settings = {"bins": count, "length": 16, "rate": 8000}
        weights = {name: np.array(value) for name, value in settings.items()}
        weights |= {"low": np.array(0.0, np.float32), "high": np.array(4000.0, np.float32)}
        inputs = list(weights)
    else:
        x = floats("x", count, 1, 2)
        weights = {"w": np.zeros((1, 4, 2), np.float32), "r": np.zeros((1, 4, 1), np.float32)}
        inputs, kwargs = ["x", "w", "r"], {"hidden_size": 1}
    ops = {"resize": "Resize", "pad": "Pad", "lrn": "LRN", "pool": "LpPool", "mel": "MelWeightMatrix", "lstm": "LSTM"}
    node = helper.make_node(ops[what], inputs, ["y"], "many", **kwargs)
    return write(path / "model.onnx", [node], [x], [floats("y", *[None] * 4)], weights)


@pytest.mark.parametrize("what", ["resize", "pad", "lrn", "pool", "mel", "lstm"])
def test_a_small_file_that_asks_for_much_work_is_refused_before_it_is_done(what: str, tmp_path: Path) -> None:
    count = int(2 ** Random(what).uniform(20, 30))
    with pytest.raises(IRError, match=f"'many'.* has [0-9]+ [a-z ]+; known are at most {MOST_NUMBERED}"):
        load(asks_for(what, count, tmp_path))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path, _ = linear(tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"the model takes 1 tensors \(x\), not 2 as given"):
        npu_sim.compile(path, (torch.zeros(2, 4), torch.zeros(2)))
    with pytest.raises(InputError, match="the example of input 'x' is torch.int64; the model takes torch.float32"):
        npu_sim.compile(path, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(InputError, match="an ONNX model is compiled for static shapes"):
        npu_sim.compile(path, torch.zeros(2, 4), dynamic_shapes=({},))
    result = CliRunner().invoke(app, ["extract", str(path), "-o", str(tmp_path / "m.json"), "-i", "float32[1]"])
    assert "an ONNX model has its own inputs and task" in result.output + str(result.exception)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = linear(tmp_path / "model.onnx")
    monkeypatch.setattr("npu_sim.onnx.sources.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs the packages onnx and onnx-ir"):
        load(path)


def test_every_row_is_an_operator_of_onnx() -> None:
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert {*ROWS, *CONTROL_FLOW} <= names
