"""Shell completion, asked for as the shells do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_model import shipped_chips

ROOT = Path(__file__).parents[2]
CODE = """
import atexit, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "cupy", "prompt_toolkit"}:
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Blocked())
"""
ONE = """
sys.argv = ["npu-sim", *sys.argv[1:]]
from npu_sim.cli import main
main()
"""
# Answers many questions in one process, which is importing for most of its time: environments in, what is printed out.
MANY = """
import functools, json, typer.testing
from npu_sim.cli import app

typer.testing._get_command = functools.cache(typer.testing._get_command)  # as in conftest.py
runner = typer.testing.CliRunner()
done = [runner.invoke(app, [], prog_name="npu-sim", env=environment) for environment in json.load(sys.stdin)]
print(json.dumps([(result.stdout, result.stderr) for result in done]))
"""


def npu_sim(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE + ONE, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def with_files(folder: Path) -> Path:
    for name in ("net.npubin", "net.json", "net.txt", "model.gguf", "sub/deep.npubin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_files(tmp_path)


# Line → what bash is offered.
OFFERED = {
    "npu-sim cl": {"classify"},
    "npu-sim run --dev": {"--device"},
    "npu-sim run --device me": {"metal", "metal-emulator", "metal-emulator-fast"},
    "npu-sim generate smollm2 --dtype ": {"float16", "bfloat16", "float32"},
    "npu-sim generate smollm2 --activations ": {"checkpoint", "none", "int8", "fp8"},
    "npu-sim generate smollm2 --kv-cache ": {"none", "int8", "fp8"},
    "npu-sim compile net.json --activations ": {"int8", "fp8"},
    "npu-sim generate s": {"smollm2", "sub/"},
    "npu-sim generate m": {"model.gguf"},
    "npu-sim serve m": {"model.gguf"},
    "npu-sim serve smollm2 --draft m": {"model.gguf"},
    "npu-sim serve smollm2 --log-level ": {"debug", "info", "warning", "error"},
    "npu-sim classify x.png --model res": {"resnet18", "resnet50"},
    "npu-sim compile net.json --target ": {
        "op_level",
        "metal_gpu",
        "cuda_gpu",
        *(f"npu:{chip}" for chip in shipped_chips()),
    },
    "npu-sim compile net.json --disable-fusion linear_r": {"linear_residual"},
    "npu-sim extract m --task text-": {"text-generation", "text-classification"},
    "npu-sim compile n": {"net.json"},
    "npu-sim simulate res": {"resnet18", "resnet50"},
    "npu-sim simulate net": {"net.npubin", "net.json"},
    "npu-sim simulate net.npubin --npu e": {"edge", "ethos-u65-512", "ethos-u85-2048", "eyeriss"},
    "npu-sim run ": {"net.npubin", "sub/"},
    "npu-sim run sub/": {"sub/deep.npubin"},
    "npu-sim report net": {"net.npubin", "net.json"},
    "npu-sim diff net.npubin s": {"smollm2", "sub/"},
    "npu-sim describe net": {"net.npubin", "net.json"},
    "npu-sim run net.t": set(),
    "npu-sim run absent/": set(),
    "npu-sim bench cpu": {"cpu", "cpu.int8", "cpu.made"},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Line → standard output and standard error of the command that bash runs to complete it."""
    folder = with_files(tmp_path_factory.mktemp("completion"))
    questions = [
        {
            "_NPU_SIM_COMPLETE": "complete_bash",
            "COMP_WORDS": line.replace(" ", "\n"),
            "COMP_CWORD": str(line.count(" ")),
        }
        for line in OFFERED
    ]
    done = subprocess.run(
        [sys.executable, "-c", CODE + MANY],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(OFFERED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", OFFERED)
def test_bash_is_offered_names_and_files(answers: dict[str, tuple[str, str]], line: str) -> None:
    output, errors = answers[line]
    assert set(output.split()) == OFFERED[line], errors


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_runs_the_command_to_complete_a_line(folder: Path, shell: str) -> None:
    words = {"COMP_WORDS": "npu-sim\nrun\n--device\nmetal-emulator-", "COMP_CWORD": "3"}
    environment = {"bash": words, "zsh": {}, "fish": {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}}[shell]
    done = npu_sim(
        folder,
        _NPU_SIM_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS="npu-sim run --device metal-emulator-",
        **environment,
    )
    assert "metal-emulator-fast" in done.stdout, done.stderr


def test_a_script_for_the_shell_can_be_shown_and_installed(folder: Path) -> None:
    shown = npu_sim(folder, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0 and "_NPU_SIM_COMPLETE=complete_bash" in shown.stdout, shown.stderr
    assert "complete -o default -F _npu_sim_completion npu-sim" in shown.stdout
    installed = npu_sim(
        folder, "--install-completion", "bash", HOME=str(folder), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert installed.returncode == 0, installed.stderr
    assert any("npu-sim" in path.read_text() for path in folder.glob(".bash_completions/*")), installed.stdout
