"""How long a process takes to the first token of Qwen2.5-1.5B on the CUDA device, and to each token after it.

    python -m benchmarks.cuda_start FOLDER BEGIN

runs one such process on a model folder and prints its figures as JSON; BEGIN is the `time.time()` of its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHE_LENGTH = 2048
PROMPT, WARMUP, STEADY = 40, 50, 400


def measure_start() -> dict[str, float]:
    """Figures by what they are: a first start with empty caches on disk, and the median of later ones."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder)
        environment = {**os.environ, "NPU_SIM_CACHE": str(Path(scratch) / "cache")}
        starts = [_start(folder, environment) for _ in range(4)]
    first, later = starts[0], sorted(starts[1:], key=lambda start: start["to_first_token"])[1]
    beyond = later["to_first_token"] - later["weights"]
    return {
        "first start, to the first token, s": first["to_first_token"],
        "second start, to the first token, s": later["to_first_token"],
        "second start, beyond reading the weights, s": beyond,
        "weights from a warm page cache, GB/s": later["gigabytes"] / later["weights"],
        "greedy generation, ms a token": 1000 * later["a_token"],
    }


def write_model(folder: Path) -> None:
    """A Hugging Face folder with seeded weights, without a tokenizer."""
    from safetensors.torch import save_file

    from benchmarks.cuda_llm import seeded_state
    from benchmarks.dispatches import qwen
    from npu_sim.llm import Checkpoint

    config = qwen()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    state = seeded_state(Checkpoint("qwen2.5-1.5b", config, {}, "bfloat16", load_tokenizer=lambda: None), seed=0)
    save_file({name: tensor.cpu() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"})


def _start(folder: Path, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.cuda_start", str(folder), repr(time.time())]
    finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def generate(folder: Path, begin: float) -> dict[str, float]:
    """Seconds to the first token, of a token after it, and of a load of the weights alone; and their gigabytes."""
    from npu_runtime import Device, load_weights
    from npu_sim.llm import LanguageModel, load_checkpoint
    from npu_sim.llm.graph import state_with_buffers

    device = Device("cuda")
    model = LanguageModel(load_checkpoint(folder), device=device, cache_length=CACHE_LENGTH)
    tokens = model.generate(range(PROMPT), WARMUP + STEADY + 1, stop=frozenset())
    next(tokens)
    to_first_token = time.time() - begin
    for _ in range(WARMUP):
        next(tokens)
    start = time.perf_counter()
    for _ in range(STEADY):
        next(tokens)
    a_token = (time.perf_counter() - start) / STEADY
    again = state_with_buffers(load_checkpoint(folder))
    device.backend.synchronize()
    start = time.perf_counter()
    loaded = load_weights(again, model.decode_program, device)
    device.backend.synchronize()
    seconds = time.perf_counter() - start
    gigabytes = sum(buffer.size_bytes for buffer in loaded.values()) / 1e9
    return {"to_first_token": to_first_token, "a_token": a_token, "weights": seconds, "gigabytes": gigabytes}


if __name__ == "__main__":
    print(json.dumps(generate(Path(sys.argv[1]), float(sys.argv[2]))))
