"""Each command where only the base dependencies are installed: it works, or says what to install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from kernel_cache import put_kernels
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image
from torch import nn

import npu_compiler
import npu_sim
from npu_compiler import installing
from npu_sim.commands.application import app
from npu_sim.extract import extract_ir

# What each command is called with, in a folder with a model in all forms.
CALLS = {
    "extract": ["mine.py:make", "-i", "float32[1,4]", "-o", "out.json"],
    "compile": ["model.json", "-o", "out.npubin"],
    "describe": ["model.npubin"],
    "run": ["model.npubin", "-w", "weights.safetensors", "-i", "input=x.npy"],
    "partition": ["model.json"],
    "ops": ["--npu", "no-such-chip"],
    "verify": ["model.json", "-w", "weights.safetensors"],
    "profile": ["model.json", "-w", "weights.safetensors"],
    "simulate": ["model.npubin", "--npu", "edge", "--picture", "out.png"],
    "report": ["model.json", "-o", "out.html"],
    "diff": ["model.npubin", "model.npubin"],
    "keygen": ["key"],
    "sign": ["model.npubin", "--key", "key"],
    "trust": [],
    "generate": ["llm.gguf", "-p", "Hello"],
    "serve": ["llm.gguf"],
    "embed": ["llm.gguf"],
    "classify": ["cat.png"],
    "quantize": ["llm.gguf", "--weights", "int4", "-o", "out"],
    "quantize-network": ["mine.py:make", "-i", "float32[1,4]", "--calibrate", "x.npy", "-o", "out.npumod"],
    "bench": ["no-such-suite"],
    "doctor": [],
    "models": [],
}
# Runs the commands one after the other; a module of a package that the base does not bring cannot be imported.
SCRIPT = """
import json, sys, traceback
refused = set(json.loads(sys.argv[1]))

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse)
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in refused else find_spec(name, *rest)
import importlib.metadata
from_name = importlib.metadata.Distribution.from_name
owners = importlib.metadata.packages_distributions()
absent = {importlib.metadata.Prepared(x).normalized for name in refused for x in owners.get(name, ())}

def find(name):
    if importlib.metadata.Prepared(name).normalized in absent:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)

importlib.metadata.Distribution.from_name = find
from typer.testing import CliRunner
from npu_sim.commands.application import app

results = {}
for command, arguments in json.loads(sys.argv[2]).items():
    done = CliRunner().invoke(app, [command, *arguments])
    results[command] = [done.exit_code, done.output, repr(done.exception)]
print(json.dumps(results))
"""


def needed(package: str) -> set[str]:
    """The packages that installing one brings, itself among them."""
    names, left = set(), [package]
    while left:
        name = canonicalize_name(left.pop())
        if name not in names:
            names.add(name)
            lines = requires(name) or []
            wanted = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})]
            left += [requirement.name for requirement in wanted]
    return names


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    folder = tmp_path_factory.mktemp("base")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    ir = extract_ir(model, (torch.ones(1, 4),))
    (folder / "model.json").write_text(json.dumps(ir))
    npu_compiler.compile(ir).save(folder / "model.npubin")
    np.save(folder / "x.npy", np.ones((1, 4), np.float32))
    Image.new("RGB", (32, 32)).save(folder / "cat.png")
    (folder / "llm.gguf").write_bytes(b"GGUF")
    (folder / "mine.py").write_text("def make():\n    import torch\n    return torch.nn.Linear(4, 4)\n")
    from safetensors.torch import save_file

    save_file(dict(model.state_dict()), folder / "weights.safetensors")
    base = needed("npu-simulation")
    refused = [m for m, ds in packages_distributions().items() if not any(canonicalize_name(d) in base for d in ds)]
    root = Path(__file__).resolve().parents[2]
    put_kernels(folder / "cache")  # compiling them for the empty home takes longer than all commands
    env = {**os.environ, "PYTHONPATH": str(root), "HOME": str(folder), "NPU_SIM_CACHE": str(folder / "cache")}
    refused = [name for name in refused if name != "pip" and not (root / name).exists()]
    command = [sys.executable, "-c", SCRIPT, json.dumps(refused), json.dumps(CALLS)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: tuple(result) for name, result in json.loads(done.stdout.splitlines()[-1]).items()}


def test_every_command_is_called() -> None:
    assert CALLS.keys() == typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("command", CALLS)
def test_a_command_works_or_says_what_to_install(command: str, results: dict[str, tuple[int, str, str]]) -> None:
    status, output, exception = results[command]
    assert status in (0, 1, 2), output
    assert not re.search(r"(?<!\()No module named", output), output  # doctor gives it as the reason of a sentence
    assert "unexpected" not in output and "Traceback" not in output, output
    assert "ModuleNotFound" not in exception and "ImportError" not in exception, exception


@pytest.mark.slow
def test_most_commands_need_no_more_than_the_base(results: dict[str, tuple[int, str, str]]) -> None:
    able = {command for command, (status, *_) in results.items() if status == 0}
    assert able >= {"compile", "describe", "run", "partition", "report", "diff", "keygen", "trust", "doctor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, extra", [("extract", "torch"), ("verify", "torch"), ("generate", "llm"), ("serve", "serve")]
)
def test_the_command_that_installs_the_extra_is_given(
    command: str, extra: str, results: dict[str, tuple[int, str, str]]
) -> None:
    assert installing.install_command(extra) in results[command][1].replace("\n", " "), results[command]


def test_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("npu_sim.module.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(npu_compiler.InputError, match="npu_sim.compile: this needs torch, which is not installed: "):
        _ = npu_sim.compile
