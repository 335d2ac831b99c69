"""Ctrl-C ends real processes at once, whatever they do: no compiler goes on, and what is left over is removed later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ir_builder import IRBuilder
from kernel_cache import put_kernels
from tiny_llms import TEMPLATE, save_tiny, save_tokenizer

from npu_compiler.files import UNFINISHED, remove_leftovers
from npu_runtime.cpu.native.build import library_path

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 5.0  # half a second on an idle machine
# Sends itself SIGINT as it enters a function, says when, and runs the command meanwhile.
SCRIPT = """
import os, signal, sys, threading, time
stage, sent, *command = sys.argv[1:]
def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_qualname == stage and "npu_" in frame.f_code.co_filename:
        sys.setprofile(None)
        threading.setprofile(None)
        with open(sent, "w") as file:
            file.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGINT)
sys.setprofile(watch)
threading.setprofile(watch)
sys.argv = ["npu-sim", *command]
from npu_sim.cli import main
main()
"""
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo fake 1.0; exit; }
echo $$ >> "$PIDS"
sleep 60
"""
# Links this machine's kernels, once a file is there.
LINKER = """#!/bin/sh
[ "$1" = --version ] && {{ echo fake 1.0; exit; }}
linked=
while [ "$1" != -o ]; do [ "$1" = -shared ] && linked=1; shift; done
[ -z "$linked" ] && {{ cat > /dev/null; echo code > "$2"; exit; }}
while [ ! -e "{go}" ]; do sleep 0.05; done
cp "{library}" "$2"
"""
GENERATE = [sys.executable, "-W", "ignore", "-m", "npu_sim.cli", "generate", "m", "--device", "cpu", "-p", "word"]


def interrupted(folder: Path, stage: str, *command: str, **env: str) -> float:
    """Seconds from the signal, as the command enters a stage, to its end, which must be that of an interrupt."""
    sent = folder / "sent"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPU_SIM_CACHE": str(folder / "cache"), **env}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, stage, str(sent), *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert sent.exists(), f"'{' '.join(command)}' did not reach {stage}: {done.stderr}"
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == "interrupted", done.stderr
    return time.monotonic() - float(sent.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 2, 4), g.weight("weight", 3, 4)))
    (tmp_path / "layer.json").write_text(json.dumps(g.ir()))
    put_kernels(tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize(
    "stage, command",
    [("compile", "compile layer.json -o layer.npubin"), ("simulate", "simulate layer.json --npu edge")],
)
def test_work_on_a_graph_is_interrupted(stage: str, command: str, folder: Path) -> None:
    assert interrupted(folder, stage, *command.split()) < MOST_SECONDS
    assert not (folder / "layer.npubin").exists() and not list(folder.glob(f"**/{UNFINISHED}*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, command",
    [
        ("export", "generate m --device cpu -p word"),
        ("load_weights", "generate m --device cpu -p word"),
        ("ContiguousModel.step", "generate m --device cpu -p word"),
        ("PagedModel.__init__", "serve m --device cpu --port 0"),
        ("quantized_layers", "quantize m --weights int8 -o out"),
    ],
)
def test_work_on_a_language_model_is_interrupted(stage: str, command: str, folder: Path) -> None:
    save_tokenizer(save_tiny(folder / "m", "llama", "bfloat16", vocab_size=320), TEMPLATE)
    assert interrupted(folder, stage, *command.split()) < MOST_SECONDS
    assert not (folder / "out").exists() and not list(folder.glob(f"**/{UNFINISHED}*"))


def test_kernels_that_are_being_compiled_in_the_background_are_given_up(folder: Path) -> None:
    """The compiler runs beside a command that does not wait for it yet, which is where Ctrl-C arrives."""
    pids, compiler, cache = folder / "pids", folder / "slow-compiler", folder / "empty"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    settings = {"NPU_SIM_CACHE": str(cache), "NPU_SIM_NATIVE": "compile", "CXX": str(compiler), "PIDS": str(pids)}
    code = (
        "import os, signal, sys, time\n"
        "import npu_compiler\n"
        "from npu_runtime import CPUBackend\n"
        "def wait(path):\n"
        "    CPUBackend()\n"
        f"    while not os.path.exists({str(pids)!r}):\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.1)\n"
        "    print(time.monotonic(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "npu_compiler.read_ir = wait\n"
        "sys.argv = ['npu-sim', 'describe', 'layer.json']\n"
        "from npu_sim.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130, done.stderr
    assert time.monotonic() - float(done.stdout) < MOST_SECONDS
    assert are_gone(pids)
    remove_leftovers.__wrapped__(cache)  # as the next process does
    assert not list(cache.glob(f"{UNFINISHED}*"))


def first_answer(folder: Path, compiler: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start `generate` with an empty cache and a compiler, a shell script; return the process once it has answered."""
    path = folder / "slow-compiler"
    path.write_text(compiler)
    path.chmod(0o755)
    save_tokenizer(save_tiny(folder / "m", "llama", "bfloat16", vocab_size=320), TEMPLATE)
    settings = {"NPU_SIM_NATIVE": "compile", "CXX": str(path), "PIDS": str(folder / "pids")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPU_SIM_CACHE": str(folder / "empty"), **settings}
    pipe = subprocess.PIPE
    running = subprocess.Popen(GENERATE, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert running.stderr is not None
    notes = []
    for line in running.stderr:
        notes.append(line)
        if "prompt tokens" in line:
            break
    assert any("PyTorch's kernels run" in line for line in notes), notes
    return running, environment


@pytest.mark.slow
def test_an_answer_comes_before_the_kernels_and_ctrl_c_ends_the_wait_for_them(folder: Path) -> None:
    running, _ = first_answer(folder, COMPILER)
    time.sleep(0.2)
    assert running.poll() is None, "it waits for the kernels, for later starts"
    sent = time.monotonic()
    running.send_signal(signal.SIGINT)
    answer, last = running.communicate(timeout=60)
    assert time.monotonic() - sent < MOST_SECONDS
    assert running.returncode == 130 and answer and last.splitlines()[-1] == "interrupted", last
    assert are_gone(folder / "pids")


@pytest.mark.slow
def test_later_starts_find_the_kernels_that_an_answer_did_not_wait_for(folder: Path) -> None:
    library = library_path()
    if library is None:
        pytest.skip("there are no native kernels")
    running, environment = first_answer(folder, LINKER.format(library=library, go=folder / "go"))
    (folder / "go").touch()
    answer, _ = running.communicate(timeout=60)
    assert running.returncode == 0 and answer
    again = subprocess.run(GENERATE, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0 and again.stdout and "kernels" not in again.stderr, again.stderr


def are_gone(pids: Path) -> bool:
    """Whether the processes of a list have ended within some seconds: a busy machine takes its time to end them."""
    for _ in range(50):
        if not any(is_running(int(pid)) for pid in pids.read_text().split()):
            return True
        time.sleep(0.1)
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
