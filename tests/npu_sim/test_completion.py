"""Shell completion, asked for as the shells do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import atexit, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "cupy", "prompt_toolkit"}:
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Blocked())
sys.argv = ["npu-sim", *sys.argv[1:]]
from npu_sim.cli import main
main()
"""


def npu_sim(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("net.npubin", "net.json", "net.txt", "model.gguf", "sub/deep.npubin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("npu-sim cl", {"classify"}),
        ("npu-sim run --dev", {"--device"}),
        ("npu-sim run --device me", {"metal", "metal-emulator", "metal-emulator-fast"}),
        ("npu-sim generate smollm2 --dtype ", {"float16", "bfloat16", "float32"}),
        ("npu-sim generate smollm2 --activations ", {"checkpoint", "none", "int8", "fp8"}),
        ("npu-sim generate smollm2 --kv-cache ", {"none", "int8", "fp8"}),
        ("npu-sim compile net.json --activations ", {"int8", "fp8"}),
        ("npu-sim generate s", {"smollm2", "sub/"}),
        ("npu-sim generate m", {"model.gguf"}),
        ("npu-sim serve m", {"model.gguf"}),
        ("npu-sim serve smollm2 --log-level ", {"debug", "info", "warning", "error"}),
        ("npu-sim classify x.png --model res", {"resnet18", "resnet50"}),
        ("npu-sim compile net.json --target ", {"op_level", "metal_gpu", "cuda_gpu"}),
        ("npu-sim compile net.json --disable-fusion linear_r", {"linear_residual"}),
        ("npu-sim extract m --task text-", {"text-generation", "text-classification"}),
        ("npu-sim compile n", {"net.json"}),
        ("npu-sim simulate res", {"resnet18", "resnet50"}),
        ("npu-sim simulate net", {"net.npubin", "net.json"}),
        ("npu-sim simulate net.npubin --npu e", {"edge"}),
        ("npu-sim run ", {"net.npubin", "sub/"}),
        ("npu-sim run sub/", {"sub/deep.npubin"}),
        ("npu-sim report net", {"net.npubin", "net.json"}),
        ("npu-sim diff net.npubin s", set()),
        ("npu-sim describe net", {"net.npubin", "net.json"}),
        ("npu-sim run net.t", set()),
        ("npu-sim run absent/", set()),
        ("npu-sim bench cpu", {"cpu", "cpu_int8"}),
    ],
)
def test_bash_is_offered_names_and_files(folder: Path, line: str, offered: set[str]) -> None:
    words = line.split(" ")
    done = npu_sim(
        folder, _NPU_SIM_COMPLETE="complete_bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1)
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(folder: Path, shell: str) -> None:
    environment = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {}
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
