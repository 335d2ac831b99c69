"""Tensor parallelism: Llama-3.1-8B with random weights on one GPU and on several, decode and prefill.

    python -m benchmarks.cuda.tensor_parallel [--layers 32] [GPUS ...]

Several GPUs exchange sums in turn through NCCL and by kernels that reach each other's memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import ml_dtypes
import numpy as np

from benchmarks.configurations import llama3_1_8b
from npu_sim.llm import Checkpoint, LanguageModel
from npu_sim.llm.graph import meta_model

PROMPT, CACHE, TOKENS, ROUNDS = 2048, 4096, 96, 5


def random_checkpoint(seed: int, layers: int = 32) -> Checkpoint:
    """Return a checkpoint of Llama-3.1-8B's configuration with random weights that are equal in every process."""
    name = f"Llama-3.1-8B, {layers} layers, random"
    again = "benchmarks.cuda.tensor_parallel:random_checkpoint", (seed, layers)
    checkpoint = Checkpoint(name, llama3_1_8b(layers), {}, "bfloat16", load_tokenizer=lambda: None, opened_by=again)
    shapes = {name: tuple(parameter.shape) for name, parameter in meta_model(checkpoint).named_parameters()}
    checkpoint.state = RandomWeights(shapes, seed)
    return checkpoint


class RandomWeights(Mapping[str, np.ndarray]):
    """Random weights that keep activations in range, as windows into one array, so that creating them takes no time."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        block = (np.random.default_rng(seed).standard_normal(2**22, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        largest = max(int(np.prod(shape)) for shape in shapes.values())
        self._numbers = np.tile(block, largest // block.size + 2)
        self._starts = {name: 4099 * index % block.size for index, name in enumerate(shapes)}

    def __getitem__(self, key: str) -> np.ndarray:
        shape = self._shapes[key]
        if len(shape) == 1:
            return np.ones(shape, ml_dtypes.bfloat16)
        start = self._starts[key]
        return self._numbers[start : start + int(np.prod(shape))].reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        prefill: Seconds of a prefill.
        step: Seconds of a decode step.
        tokens: The tokens of greedy decoding.
        logits: The logits after the prompt.
    """

    prefill: float
    step: float
    tokens: list[int]
    logits: np.ndarray


def measure(checkpoint: Checkpoint, gpus: int, prompt: list[int]) -> Measured:
    start = time.perf_counter()
    model = LanguageModel(checkpoint, device="cuda", cache_length=CACHE, chunk=PROMPT, tensor_parallel=gpus)
    print(f"{gpus} GPUs: ready after {time.perf_counter() - start:.1f} s", flush=True)
    try:
        prefills, steps = [], []
        for _ in range(ROUNDS):
            model.reset()
            start = time.perf_counter()
            logits = model.prefill(prompt)
            prefills.append(time.perf_counter() - start)
            first = int(logits.argmax())
            start = time.perf_counter()
            tokens = list(model.generate([*model.tokens, first], TOKENS, stop=frozenset()))
            steps.append((time.perf_counter() - start) / TOKENS)
        return Measured(median(prefills), median(steps), [first, *tokens], logits)
    finally:
        model.close()


def main(counts: list[int], exchanges: list[str], layers: int = 32) -> None:
    checkpoint = random_checkpoint(7, layers)
    prompt = np.random.default_rng(3).integers(0, checkpoint.config.vocab_size, PROMPT).tolist()
    base = None
    for gpus in counts:
        for exchange in exchanges if gpus > 1 else exchanges[:1]:
            os.environ["NPU_SIM_PEERS"] = str(int(exchange == "peers"))
            run = measure(checkpoint, gpus, prompt)
            base = base or run
            pairs = enumerate(zip(run.tokens, base.tokens, strict=True))
            same = next((index for index, (a, b) in pairs if a != b), len(run.tokens))
            print(
                f"{gpus} GPUs{f', {exchange}' if gpus > 1 else ''}: "
                f"prefill {1e3 * run.prefill:.2f} ms ({base.prefill / run.prefill:.2f} x), "
                f"decode {1e3 * run.step:.3f} ms ({base.step / run.step:.2f} x); {same} of {len(run.tokens)} "
                f"tokens as with {counts[0]}, logits r = {np.corrcoef(run.logits, base.logits)[0, 1]:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", type=int, default=[1, 2])
    ways = ["nccl", "peers"]
    parser.add_argument("--exchanges", nargs="+", choices=ways, default=ways, help="how GPUs exchange sums, in turn")
    parser.add_argument("--layers", type=int, default=32, help="number of layers")
    options = parser.parse_args()
    main(options.gpus, options.exchanges, options.layers)
