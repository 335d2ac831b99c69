"""Decode of mixtures of experts, of models with windows and of others on a GPU, against the bytes a step must read.

    python -m benchmarks.cuda.decoders [--models qwen3-moe gpt-oss …] [--layers 8] [--sequences 1 32]
    python -m benchmarks.cuda.decoders --products

The configurations are those of Qwen3-30B-A3B, gpt-oss-20B (experts in MXFP4), Mistral-7B, Gemma-3-4B, Qwen3-4B and
Llama-3.2-3B, with seeded weights that are made on the GPU. `--layers` takes the first layers only, with their true
sizes; the floor is then that of these layers and of the output layer. The floor is the time in which the GPU reads what
a step must read: all weights but the embedding table and the experts that no token chooses (on average, where there are
several sequences), MXFP4 in 4.25 bits, and of keys and values those within a layer's window. One sequence has a
contiguous cache, several have a paged one and are compared with PyTorch, whose layers `torch.compile` compiles and
whose step is one CUDA graph. `--products` times the products by experts alone, by the format of the weights:
gpt-oss-20B's 32 experts, each for one row, which are more than the GPU's cache holds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

import npu_compiler
from benchmarks.configurations import gemma3_4b, gpt_oss_20b, llama3_2_3b, mistral_7b, qwen3_4b, qwen3_30b
from benchmarks.cuda.batches import BLOCK, STEPS, fastest_attention, our_steps
from benchmarks.cuda.llm import Models
from benchmarks.cuda.timing import Contender, account, medians, time_in_turn, torch_contender
from benchmarks.figures import COMPILED, OURS
from benchmarks.peers import ATTENTION, compiled_by_layer
from benchmarks.timing import interleave, wall_time
from cuda_runtime import CUDABackend
from npu_compiler import CompileOptions
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_sim.llm.experts import expert_linear, joined_parameters
from npu_sim.llm.graph import layer_states, meta_model
from npu_sim.module.trace import export, plain_ir, trace
from npu_sim.serving.paged_model import PagedModel

MXFP4 = QuantizedFormat("float4_e2m1", 32, "bfloat16")
FORMATS = (
    None,
    QuantizedFormat("int8"),
    QuantizedFormat("float8_e4m3"),
    QuantizedFormat("int4", 32, "float16"),
    MXFP4,
    QuantizedFormat("float4_e2m1", 16, "float32"),
    QuantizedFormat("iq4_nl", 32, "float16"),
)


@dataclass(frozen=True)
class Decoder:
    """A configuration to measure.

    Attributes:
        config: Returns the transformers config with a number of layers.
        layers: Number of layers of the whole model.
        context: Tokens in the cache of one sequence.
        in_few_bits: Whether the experts are in MXFP4.
    """

    config: Callable[[int], Any]
    layers: int
    context: int
    in_few_bits: bool = False


DECODERS = {
    "qwen3-moe": Decoder(qwen3_30b, 48, 2048),
    "gpt-oss": Decoder(gpt_oss_20b, 24, 2048, in_few_bits=True),
    "mistral": Decoder(mistral_7b, 32, 16384),
    "gemma3": Decoder(gemma3_4b, 34, 16384),
    "qwen3": Decoder(qwen3_4b, 36, 2048),
    "llama3": Decoder(llama3_2_3b, 28, 2048),
}


class SeededDecoder(Models):
    """Compiled programs and PyTorch modules of a decoder with random weights, whose experts may be in MXFP4."""

    def __init__(self, name: str, decoder: Decoder, layers: int) -> None:
        super().__init__(name, decoder.config(layers), seed=0, in_few_bits=_codes if decoder.in_few_bits else None)

    @property
    def experts(self) -> frozenset[str]:
        """Names of the parameters that hold matrices or biases of a layer's experts."""
        matrices = joined_parameters(meta_model(self.checkpoint))
        return frozenset(name for matrix in matrices for name in (matrix, f"{matrix}_bias"))

    def least_bytes(self, sequences: int, context: int) -> float:
        """Return the bytes that a step must read, with `context` tokens of each sequence in the cache."""
        config, experts, total = self.checkpoint.config, self.experts, 0.0
        count: int = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        share = 1 - (1 - getattr(config, "num_experts_per_tok", 1) / count) ** sequences
        for name, value in self.checkpoint.state.items():
            if name == "model.embed_tokens.weight" and not config.tie_word_embeddings:
                continue
            size = np.prod(value.shape) * (17 / 32 if isinstance(value, QuantizedArray) else 2)
            total += size * (share if name in experts else 1)
        for state in layer_states(self.checkpoint):
            rows = min(state.window or context, context)
            total += sequences * rows * sum(2 * int(np.prod(row)) for row in state.rows)
        return total


def _codes(name: str, shape: tuple[int, ...]) -> QuantizedArray | None:
    """Random codes for matrices of experts, in memory that all layers share; None for other parameters."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    n, k = shape
    return _seeded_codes(n, k, MXFP4)


@cache
def _seeded_codes(n: int, k: int, format: QuantizedFormat) -> QuantizedArray:
    parts = format.parts((n, k))
    codes = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8), parts["codes"][0])
    codes &= 0xF7  # no float8 is NaN
    scales = np.full(parts["scales"][0], 2.0**-8, np.float32).astype(parts["scales"][1])
    return QuantizedArray(format, (n, k), codes.view(parts["codes"][1]), scales)


class AdoptingModel(PagedModel):
    """A paged model over weights that are on the GPU already, which are not copied."""

    def _begin(self, *arguments: Any) -> None:
        self._tensors: Mapping[str, Any] = dict(self._tensors)
        super()._begin(*arguments)


def measure_one(models: SeededDecoder, context: int, bandwidth: float, rounds: int) -> None:
    """Print the time of a step of one sequence at the end of its context, and what its kernels take."""
    start = time.perf_counter()
    step = models.step(1, context)
    for buffer in models.caches.values():
        from_dlpack(buffer).normal_(generator=models.generator)
    step.set(models.random_ids(1), context - 1)
    ready = time.perf_counter() - start
    taken = medians(time_in_turn({OURS: Contender(step.run, models.backend.timed)}, rounds))[OURS]
    least = models.least_bytes(1, context)
    floor = 1e3 * least / bandwidth
    name = models.checkpoint.name
    finite = bool(torch.isfinite(step.logits().float()).all())
    print(
        f"{name}, 1 sequence, {context} tokens: {taken:.3f} ms, floor {floor:.3f} ms ({least / 1e9:.2f} GB), "
        f"{100 * floor / taken:.0f} % of it; {len(step.program.plan.calls)} kernels; finite {finite}; "
        f"ready after {ready:.0f} s",
        flush=True,
    )
    _print_account(account(step.run), 1)


def measure_several(models: SeededDecoder, sequences: int, context: int, bandwidth: float, rounds: int) -> None:
    """Print the time of a step of several sequences, ours and PyTorch's."""
    per_sequence = -(-(context + STEPS) // BLOCK)
    model = AdoptingModel(
        models.checkpoint,
        device=Device("cuda"),
        block_size=BLOCK,
        blocks=sequences * per_sequence,
        context_length=per_sequence * BLOCK,
    )
    ours = our_steps(model, sequences, context)
    ours()
    floor = 1e3 * models.least_bytes(sequences, context) / bandwidth
    taken = {OURS: 1e3 * interleave({OURS: wall_time(ours)}, rounds)[OURS].median / STEPS}
    print(
        f"{models.checkpoint.name}, {sequences} sequences, {context} tokens: {taken[OURS]:.3f} ms, "
        f"floor {floor:.3f} ms, {100 * floor / taken[OURS]:.0f} % of it",
        flush=True,
    )
    _print_account(account(ours, 1), STEPS)
    theirs = _torch_step(models, sequences, context)
    taken |= medians(time_in_turn({COMPILED: torch_contender(theirs)}, rounds))
    print(f"    {COMPILED} {taken[COMPILED]:.3f} ms, {taken[COMPILED] / taken[OURS]:.2f} times ours", flush=True)


class _Product(torch.nn.Module):
    """A product by experts, of bfloat16 rows."""

    def __init__(self, count: int, rows: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.weight = torch.nn.Parameter(torch.empty(count * rows, width, dtype=torch.bfloat16, device="meta"))

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = expert_linear(x, self.weight, experts, None, self.count)
        return result


def measure_products(bandwidth: float, rounds: int) -> None:
    """Print the time of gpt-oss-20B's products by 32 experts of one row each, for several formats of the weights."""
    backend, count, choices = CUDABackend(), 32, 4
    for (n, k), tokens in itertools.product(((5760, 2880), (2880, 2880)), (8, 64)):
        x = torch.empty(tokens, k, dtype=torch.bfloat16, device="meta")
        experts = torch.empty(tokens * choices, dtype=torch.long, device="meta")
        ir = plain_ir(trace(export(_Product(count, n, k), (x, experts)), "product"))
        chosen = np.stack([np.random.default_rng(i).permutation(count) for i in range(tokens * choices // count)])
        given = {"x": np.zeros((tokens, k), ml_dtypes.bfloat16) + 1, "experts": chosen.reshape(-1).astype(np.int32)}
        for format in FORMATS:
            options = CompileOptions("bfloat16", None if format is None else {"weight": format})
            program = npu_compiler.compile(ir, backend.target, options)
            dense = torch.randn(count * n, k, device="cuda", dtype=torch.bfloat16) if format is None else None
            weight = dense if format is None else _seeded_codes(count * n, k, format)
            weights = load_weights({"weight": weight}, program, backend)
            inputs = {spec.name: NPUBuffer.from_numpy(given[spec.name], backend, spec) for spec in program.input_specs}
            run = partial(Executor(program, backend).run, inputs, weights)
            taken = 1e3 * medians(time_in_turn({OURS: Contender(run, backend.timed)}, rounds))[OURS]
            size = count * n * k * 2 if format is None else format.size_bytes((count * n, k))
            floor = 1e6 * size / bandwidth
            kernels = ", ".join(call.kernel for call in program.plan.calls)
            print(
                f"{tokens * choices} rows by {count} experts [{n}, {k}] in {format or 'bfloat16'}: {taken:.1f} µs, "
                f"floor {floor:.1f} µs, {100 * floor / taken:.0f} % of it ({kernels})",
                flush=True,
            )


def _torch_step(models: SeededDecoder, sequences: int, context: int) -> Callable[[], object]:
    name, peer = fastest_attention(models, sequences, context + STEPS), models.peer
    peer.prepare(context + STEPS, ATTENTION[name], sequences)
    ids = torch.arange(sequences, device="cuda")[:, None] % 1000
    return compiled_by_layer(peer, [ids, torch.full((1,), context, device="cuda")])


def _print_account(rows: list[tuple[str, float, float]], steps: int) -> None:
    for name, milliseconds, calls in rows[:16]:
        print(f"    {milliseconds / steps:.4f} ms, {calls / steps:5.1f} × {name[:70]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DECODERS, default=list(DECODERS))
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1], help="numbers of sequences of a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each of several sequences in the cache")
    parser.add_argument("--bandwidth", type=float, default=3.10, help="TB/s that the GPU reads (default: an H100's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--products", action="store_true", help="measure products by experts alone")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    status = 0
    if options.products:
        measure_products(1e12 * options.bandwidth, options.rounds)
        return status
    for name in options.models:
        decoder = DECODERS[name]
        layers = options.layers or decoder.layers
        try:
            models = SeededDecoder(f"{name} ({layers} of {decoder.layers} layers)", decoder, layers)
            for sequences in options.sequences:
                if sequences == 1:
                    measure_one(models, decoder.context, 1e12 * options.bandwidth, options.rounds)
                else:
                    measure_several(models, sequences, options.context, 1e12 * options.bandwidth, options.rounds)
            del models
        except Exception:  # the others are measured all the same
            traceback.print_exc()
            status = 1
        torch.cuda.empty_cache()
    return status


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
