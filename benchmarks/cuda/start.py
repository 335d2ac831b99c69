"""Start-up time of `npu-sim generate` with Qwen2.5-1.5B on the CUDA device: time to first token and time per token.

    python -m benchmarks.cuda.start FOLDER

measures weight loading and steady generation for a model folder, and prints the results as JSON.
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
TEXT = "The capital of France is"


def measure_start() -> dict[str, float]:
    """Return start-up times by name: the first start, with empty disk caches, and the median of the later ones.

    The disk caches include Python's bytecode, even if site-packages is read-only or the environment disables it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder)
        caches = {"NPU_SIM_CACHE": f"{scratch}/cache", "PYTHONPYCACHEPREFIX": f"{scratch}/bytecode"}
        environment = {**os.environ, **caches}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        first, *later = [_seconds_to_text(folder, environment) for _ in range(4)]
        command = [sys.executable, "-m", "benchmarks.cuda.start", str(folder)]
        finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(finished.stdout.splitlines()[-1])
    second = sorted(later)[1]
    return {
        "first start, to the first token, s": first,
        "second start, to the first token, s": second,
        "second start, beyond reading the weights, s": second - figures["weights"],
        "weights from a warm page cache, GB/s": figures["gigabytes"] / figures["weights"],
        "greedy generation, ms a token": 1000 * figures["a_token"],
    }


def write_model(folder: Path) -> None:
    """Write a Hugging Face folder with random weights and a byte-level tokenizer padded to the vocabulary size."""
    from safetensors.torch import save_file

    from benchmarks.configurations import qwen2_1_5b
    from benchmarks.cuda.llm import seeded_checkpoint

    config = qwen2_1_5b()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    state = seeded_checkpoint("qwen2.5-1.5b", config, seed=0).state
    save_file({name: tensor.cpu() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"})
    _write_tokenizer(folder, config.vocab_size)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"<{number}>" for number in range(len(pieces), vocab_size)]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _seconds_to_text(folder: Path, environment: dict[str, str]) -> float:
    """Return the seconds from the start of the command to its first byte of output."""
    command = [
        sys.executable,
        "-m",
        "npu_sim.cli",
        "generate",
        str(folder),
        "--device",
        "cuda",
        "--no-chat",
        "--cache-length",
        str(CACHE_LENGTH),
        "--max-tokens",
        "8",
        "--prompt",
        TEXT,
    ]
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise RuntimeError(f"{' '.join(command)} wrote nothing")
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds


def generate(folder: Path) -> dict[str, float]:
    """Return seconds per token of steady generation, seconds to load the weights, and gigabytes of the weights."""
    from npu_runtime import Device, load_weights
    from npu_sim.llm import LanguageModel, load_checkpoint
    from npu_sim.llm.graph import state_with_buffers

    device = Device("cuda")
    model = LanguageModel(load_checkpoint(folder), device=device, cache_length=CACHE_LENGTH)
    tokens = model.generate(range(PROMPT), WARMUP + STEADY + 1, stop=frozenset())
    for _ in range(WARMUP + 1):
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
    return {"a_token": a_token, "weights": seconds, "gigabytes": gigabytes}


if __name__ == "__main__":
    print(json.dumps(generate(Path(sys.argv[1]))))
