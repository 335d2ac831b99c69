"""Language models with random weights as GGUF files: the CPU device against llama.cpp on the same file.

    python -m benchmarks.cpu.made [--model qwen3-moe,gemma-3-270m] [--encoding Q8_0] [--threads 1] [--rounds 9]

The files are written once, with seeded weights, into a folder for builds. Both contenders run in this process, in
turns, and are measured by the CPU time that the process takes, so that other processes of a busy machine matter little:
with one thread, that is the time on an idle machine. A round measures the prefill of a prompt and the decode of tokens
after it. The floor is the time in which one thread reads the weights that a token needs, or multiplies what a prompt
needs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu.llama import LlamaServer
from benchmarks.cpu.machine import Rates, limit_threads

PROMPT, DECODED, CACHE_LENGTH = 128, 16, 512
FOLDER = Path("build/models")
TARGETS = {"decode": 1.3, "prefill": 1.2}


@dataclass(frozen=True)
class MadeModel:
    """The configuration of a language model in llama.cpp's terms.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        experts, chosen: Number of experts of a layer, and of those that a token uses; 0 without experts.
        inner: Width of an expert, or of the layer without experts.
        is_tied: Whether the output layer's weight is that of the embedding.
        metadata: Further values, by their keys without the architecture.
        norms: Names of a layer's norms, with their widths as names of fields.
    """

    architecture: str
    layers: int
    width: int
    heads: int
    key_heads: int
    head: int
    inner: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    is_tied: bool = True
    metadata: tuple[tuple[str, Any], ...] = ()
    norms: tuple[tuple[str, str], ...] = ()

    def matrices(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Yield the name, the shape, and the share that a token reads, of each matrix."""
        yield "token_embd", (self.vocabulary, self.width), float(self.is_tied)
        if not self.is_tied:
            yield "output", (self.vocabulary, self.width), 1.0
        for layer in range(self.layers):
            for name, rows, columns in (
                ("attn_q", self.heads * self.head, self.width),
                ("attn_k", self.key_heads * self.head, self.width),
                ("attn_v", self.key_heads * self.head, self.width),
                ("attn_output", self.width, self.heads * self.head),
            ):
                yield f"blk.{layer}.{name}", (rows, columns), 1.0
            count: tuple[int, ...] = (self.experts,) if self.experts else ()
            share, end = (self.chosen / self.experts, "_exps") if self.experts else (1.0, "")
            for name, rows, columns in (
                ("ffn_gate", self.inner, self.width),
                ("ffn_up", self.inner, self.width),
                ("ffn_down", self.width, self.inner),
            ):
                yield f"blk.{layer}.{name}{end}", (*count, rows, columns), share

    def values(self) -> dict[str, Any]:
        """The metadata that describe the model, by their keys without the architecture."""
        values: dict[str, Any] = {
            "context_length": 4096,
            "embedding_length": self.width,
            "feed_forward_length": self.inner,
            "block_count": self.layers,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            **dict(self.metadata),
        }
        if self.experts:
            values |= {"expert_count": self.experts, "expert_used_count": self.chosen}
            values["expert_feed_forward_length"] = self.inner
        return values


_QWEN_NORMS = (("attn_norm", "width"), ("attn_q_norm", "head"), ("attn_k_norm", "head"), ("ffn_norm", "width"))
_GEMMA_NORMS = (*_QWEN_NORMS, ("post_attention_norm", "width"), ("post_ffw_norm", "width"))
MODELS = {
    # 0.92 billion parameters, of which a token uses 0.3 billion.
    "qwen3-moe": MadeModel("qwen3moe", 16, 1024, 16, 4, 64, 512, 32768, 32, 8, is_tied=False, norms=_QWEN_NORMS),
    "gemma-3-270m": MadeModel(
        "gemma3", 18, 640, 4, 1, 256, 2048, 262144,
        metadata=(("attention.sliding_window", 512),), norms=_GEMMA_NORMS,
    ),
}  # fmt: skip


def write_model(model: MadeModel, encoding: str, path: Path) -> Path:
    """Write a model with seeded weights to a GGUF file; an existing file is kept.

    Args:
        encoding: Name of the ggml type of all matrices.
    """
    import gguf

    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[encoding]
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, model.architecture, use_temp_file=True)
    for key, value in model.values().items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{model.architecture}.{key}", value)
    _add_tokens(writer, model.vocabulary)
    pool = (rng.standard_normal(2**20) * model.width**-0.5).astype(np.float32)
    for name, shape, _ in model.matrices():
        # Rows of numbers that were drawn once, from different places on: a billion draws would take minutes.
        starts = rng.integers(0, len(pool) - shape[-1], shape[:-1])
        drawn = np.lib.stride_tricks.sliding_window_view(pool, shape[-1])
        if len(shape) == 3:
            stored = np.stack([gguf.quantize(drawn[own], kind) for own in starts])
        else:
            stored = gguf.quantize(drawn[starts], kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    ones = {"output_norm": model.width}
    for layer in range(model.layers):
        ones |= {f"blk.{layer}.{name}": getattr(model, width) for name, width in model.norms}
    for name, width in ones.items():
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for layer in range(model.layers if model.experts else 0):
        router = rng.standard_normal((model.experts, model.width)).astype(np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def _add_tokens(writer: Any, count: int) -> None:
    """Add a vocabulary of so many tokens, the first of which are the bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values()]
    tokens += [f"token{number}" for number in range(len(tokens), count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (count - 1) + [3])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(count - 1)
    writer.add_eos_token_id(count - 1)


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time that the whole process takes while a function runs."""
    start = time.process_time()
    run()
    return time.process_time() - start


def cpu_rates() -> Rates:
    """Return the machine's rates by CPU time: of reading memory, and of products of bfloat16 matrices."""
    memory, matrix = torch.ones(2**27), torch.ones(2048, 2048, dtype=torch.bfloat16)
    reading = min(cpu_seconds(memory.sum) for _ in range(5))
    multiplying = min(cpu_seconds(lambda: matrix @ matrix) for _ in range(5))
    return Rates(memory.nbytes / reading, 2 * 2048**3 / multiplying)


def contenders(path: Path, prompt: list[int], threads: int) -> dict[str, dict[str, Callable[[], float]]]:
    """Return, for each contender and task, a function that runs the task and returns its CPU seconds.

    The task `decode` follows `prefill`, and takes the mean of `DECODED` tokens.
    """
    from npu_sim.llm import LanguageModel, load_checkpoint

    ours = LanguageModel(load_checkpoint(path, "bfloat16"), device="cpu", cache_length=CACHE_LENGTH, chunk=PROMPT)
    llama = LlamaServer(path, CACHE_LENGTH, threads)

    def prefill() -> None:
        ours.reset()
        ours.prefill(prompt)

    def decode() -> None:
        for token in range(DECODED):
            ours.decode(token)

    def decode_by_llama() -> float:
        one = cpu_seconds(lambda: llama.complete(prompt, 1, True))
        return (cpu_seconds(lambda: llama.complete(prompt, 1 + DECODED, True)) - one) / DECODED

    return {
        "npu-sim": {"prefill": lambda: cpu_seconds(prefill), "decode": lambda: cpu_seconds(decode) / DECODED},
        "llama.cpp": {
            "prefill": lambda: cpu_seconds(lambda: llama.complete(prompt, 1, False)),
            "decode": decode_by_llama,
        },
    }


def measure(path: Path, model: MadeModel, threads: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the CPU seconds of each task, contender and round."""
    prompt = np.random.default_rng(1).integers(256, model.vocabulary - 1, PROMPT).tolist()
    ways = contenders(path, prompt, threads)
    seconds: dict[str, dict[str, list[float]]] = {task: {name: [] for name in ways} for task in TARGETS}
    for number in range(rounds + 1):  # the first round only warms up
        for name, tasks in ways.items():
            for task in ("prefill", "decode"):
                taken = tasks[task]()
                if number:
                    seconds[task][name].append(taken)
    return seconds


def floors(path: Path, model: MadeModel, rates: Rates) -> dict[str, float]:
    """Return lower bounds of the tasks' times, from the bytes that a token reads and the products of a prompt."""
    import gguf

    sizes = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors}
    read = sum(share * int(sizes[f"{name}.weight"]) for name, _, share in model.matrices())
    products = sum(share * float(np.prod(shape)) for _, shape, share in model.matrices())
    return {
        "decode": rates.reading(int(read)).seconds,
        "prefill": rates.multiplying(int(2 * PROMPT * products)).seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=",".join(MODELS), help="comma-separated models (default: %(default)s)")
    parser.add_argument("--encoding", default="Q8_0", help="ggml type of the matrices (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder for the files (default: %(default)s)")
    arguments, console = parser.parse_args(), Console()
    limit_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    rates = cpu_rates()
    for name in arguments.model.split(","):
        model = MODELS[name]
        path = write_model(model, arguments.encoding, arguments.folder / f"{name}-{arguments.encoding}.gguf")
        seconds, bounds = measure(path, model, arguments.threads, arguments.rounds), floors(path, model, rates)
        table = Table(title=f"{path.name}, {arguments.threads} threads, CPU time, {arguments.rounds} rounds")
        for column in ("", "npu-sim", "llama.cpp", "floor", "llama.cpp / npu-sim", "target"):
            table.add_column(column)
        for task, times in seconds.items():
            ratios = [peer / own for own, peer in zip(times["npu-sim"], times["llama.cpp"], strict=True)]
            medians = [f"{1e3 * statistics.median(times[way]):.1f} ms" for way in ("npu-sim", "llama.cpp")]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            table.add_row(task, *medians, f"{1e3 * bounds[task]:.1f} ms", spread, f"{TARGETS[task]:.1f}")
        console.print(table)


if __name__ == "__main__":
    main()
