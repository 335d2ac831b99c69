"""Decode of many sequences at once on a GPU: tokens a second over a paged KV cache, beside `torch.compile`.

    python -m benchmarks.cuda.batches [--sequences 8 32 128] [--context 1024] [--json cuda-batches.json]

Qwen2.5-1.5B's configuration in bfloat16 with seeded weights. Ours runs `PagedModel` as the engine does: inputs are
uploaded for every step, each step takes the tokens that the one before chooses, and these are read one step later.
PyTorch has a static batch and a static KV cache, all sequences at one position, greedy, as one CUDA graph
(`torch.compile` with `reduce-overhead`); the fastest of its ways to call SDPA counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.configurations import qwen2_1_5b
from benchmarks.cuda.llm import Models
from benchmarks.cuda.timing import account, measure_ceilings, torch_timed
from benchmarks.peers import ATTENTION, compiled
from benchmarks.timing import interleave, wall_time
from npu_runtime import Device
from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.graph import kv_shapes
from npu_sim.serving.paged_model import PagedModel

BLOCK, STEPS, ROUNDS = 16, 40, 5


def our_steps(model: PagedModel, sequences: int, context: int) -> Callable[[], None]:
    """Return a function that decodes `STEPS` tokens of `sequences` sequences with `context` cached tokens each."""
    per_sequence = -(-(context + STEPS) // BLOCK)
    tables = np.random.default_rng(1).permutation(sequences * per_sequence).reshape(sequences, -1).astype(np.int32)
    every = np.arange(sequences, dtype=np.int32)
    settings = np.tile(np.array([0, np.inf, 1], np.float32), (sequences, 1))  # greedy
    uniforms = np.zeros(sequences, np.float32)
    model.step(Batch(every % 1000, every * 0 + context - 1, every, tables, every, settings, uniforms)).tokens()

    def run() -> None:
        last = None
        for step in range(STEPS):
            tokens = every % 1000 if last is None else -1 - every
            result = model.step(Batch(tokens, every * 0 + context + step, every, tables, every, settings, uniforms))
            if last is not None:
                last.tokens()
            last = result
        assert last is not None
        last.tokens()

    return run


def torch_steps(models: Models, sequences: int, context: int) -> tuple[str, Callable[[], None]]:
    """Return the name of the fastest way to call SDPA, and a function that decodes as in `our_steps`, by PyTorch."""
    peer, name = models.peer, fastest_attention(models, sequences, context + STEPS)
    peer.prepare(context + STEPS, ATTENTION[name], sequences)
    ids = torch.zeros((sequences, 1), dtype=torch.long, device="cuda")
    positions = torch.full((1,), context, device="cuda")
    step = compiled(_Greedy(peer), (ids, positions), "reduce-overhead")

    def run() -> None:
        for _ in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            ids.copy_(step(ids, positions)[:, None])
        torch.cuda.synchronize()

    return name, run


def fastest_attention(models: Models, sequences: int, keys: int) -> str:
    """Return the name of the fastest way to call SDPA for one token of each sequence and so many keys."""
    config = models.checkpoint.config
    _, kv_heads, _, width = kv_shapes(models.checkpoint, keys)[0][0]
    shapes = ((config.num_attention_heads, 1), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(sequences, *shape, width, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device="cuda")
    taken = {name: torch_timed(lambda name=name: ATTENTION[name](q, k, v, mask)) for name in ("grouped", "expanded")}  # type: ignore[misc]
    return min(taken, key=lambda name: taken[name])


class _Greedy(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, positions)
        return logits.reshape(ids.shape[0], -1).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence that are in the cache")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--account", action="store_true", help="print what the kernels of a step take")
    options = parser.parse_args()
    config = qwen2_1_5b()
    models = Models("Qwen2.5-1.5B", config, 0)
    ceilings = measure_ceilings()
    per_sequence = -(-(options.context + STEPS) // BLOCK)
    model = PagedModel(
        models.checkpoint,
        device=Device("cuda"),
        block_size=BLOCK,
        blocks=max(options.sequences) * per_sequence,
        context_length=per_sequence * BLOCK,
    )
    rows = []
    for sequences in options.sequences:
        ours = our_steps(model, sequences, options.context)
        ours()
        way, theirs = torch_steps(models, sequences, options.context)
        for _ in range(3):
            theirs()
        results = interleave({"npu-sim": wall_time(ours), "torch.compile": wall_time(theirs)}, ROUNDS)
        step_ms = {name: 1e3 * result.median / STEPS for name, result in results.items()}
        kept = sequences * (options.context + STEPS / 2) * model.block_bytes / BLOCK
        floor = (models.weight_bytes + kept) / ceilings.bandwidth * 1e3
        rows.append({"sequences": sequences, "context": options.context, "sdpa": way, "floor": floor, **step_ms})
        rates = {name: round(sequences / step_ms[name] * 1e3) for name in step_ms}
        print(f"{sequences} sequences: {step_ms} ms a step, tokens a second {rates}, floor {floor:.3f} ms", flush=True)
        if options.account:
            for name, milliseconds, calls in account(ours, 1)[:12]:
                print(f"    {name} {milliseconds / STEPS:.4f} ms, {calls / STEPS:.1f} calls")
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
