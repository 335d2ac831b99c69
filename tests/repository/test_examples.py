"""The examples run on a CPU and print what their docstrings say, at small sizes."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def in_this_process(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run an example here, where torch and transformers are imported already; return its output."""
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def in_another_process(name: str) -> str:
    """Run, in a new process, an example that registers an op or a device; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pearson(printed: str) -> float:
    return float(re.findall(r"Pearson r .*: ([\d.]+)", printed)[0])


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source] == []


def test_resnet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = in_this_process("resnet.py", "--size 64 --device cpu", monkeypatch, capsys)
    assert "kernel launches: 23" in printed and "same first: True" in printed
    assert pearson(printed) > 0.999


def test_qwen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--layers 1 --vocabulary 512 --tokens 2 --device cpu"
    printed = in_this_process("qwen.py", options, monkeypatch, capsys)
    assert "(updates k_0 in place)" in printed and "5 tensors updated in place" in printed
    assert pearson(printed) > 0.999


@pytest.mark.slow
def test_generate_step_by_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = in_this_process("generate_step_by_step.py", "--tokens 3 --device cpu", monkeypatch, capsys)
    assert "' Paris'" in printed and "the same tokens as LanguageModel: True" in printed


def test_bert_in_partitions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--layers 1 --tokens 16 --cpu aten.gelu --device cpu"
    printed = in_this_process("bert.py", options, monkeypatch, capsys)
    assert re.search(r"1  cpu +1 .* gelu … gelu", printed) and "bytes cross in" in printed
    assert pearson(printed) > 0.999


def test_custom_op() -> None:
    printed = in_another_process("custom_op.py")
    assert printed.count("aten.cumprod supported: ") == 2 and "supported: True" in printed
    assert "cumprod_kernel" in printed and "largest difference from PyTorch: 0.0" in printed


def test_toy_device() -> None:
    printed = in_another_process("toy_device.py")
    assert re.search(r"2 kernels, three runs: .*'prepared': 2, 'launched': 6", printed)
    assert "largest difference from the CPU device: 0.0" in printed


def test_compile_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = in_this_process("compile_module.py", "", monkeypatch, capsys)
    assert "100.0% on the device" in printed and "same five first: True" in printed
    assert float(re.findall(r"largest difference ([\d.e+-]+)", printed)[0]) < 1e-3


@pytest.mark.slow
def test_torch_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = in_this_process("torch_compile.py", "--tokens 3", monkeypatch, capsys)
    assert printed.startswith("The capital of") and "same tokens: True" in printed


def test_dynamic_shapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = in_this_process("dynamic_shapes.py", "--layers 1", monkeypatch, capsys)
    errors = [float(text) for text in re.findall(r"from PyTorch ([\d.e+-]+)", printed)]
    assert len(errors) == 4 and max(errors) < 1e-4
    assert "program for batch=4, length=30" in printed
