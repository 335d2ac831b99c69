"""Language models on the CUDA device and in PyTorch: decode time by position, prefill time by prompt length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import npu_compiler
from benchmarks.cuda.timing import (
    Budget,
    Ceilings,
    Contender,
    account,
    agreement,
    medians,
    steady_run,
    time_in_turn,
    torch_contender,
)
from benchmarks.figures import COMPILED, EAGER, OURS, Account, Figure
from benchmarks.peers import ATTENTION, StaticLanguageModel, compiled
from cuda_runtime import CUDABackend
from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime import DeviceBuffer, Executor, NPUBuffer, load_weights
from npu_sim.llm import Checkpoint, extract_graph
from npu_sim.llm.graph import kv_shapes, meta_model, program_formats, state_with_buffers

MODEL, LARGE_MODEL = "Qwen2.5-1.5B", "Qwen3-8B"
BYTES = 2  # of a bfloat16
POSITIONS = {
    2048: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2000),
    32768: (1, 2, 4, 8, 16, 32, 64, 128, 200, 512, 1024, 2048, 4096, 8192, 16384, 32640),
}
LARGE_POSITIONS: dict[int, tuple[int, ...]] = {2048: (1, 2000)}
FEW_POSITIONS = {2048: (1, 2000), 32768: (200, 32640)}
PROMPTS, FEW_PROMPTS = (128, 512, 2048, 8192), (128, 2048, 8192)
SHORTEST_CACHE = 2048


InFewBits = Callable[[str, tuple[int, ...]], QuantizedArray | None]
"""A function of a parameter's name and shape that returns its weight in few bits, or None if it has 16 bits."""


def seeded_checkpoint(name: str, config: Any, seed: int, in_few_bits: InFewBits | None = None) -> Checkpoint:
    """Return a checkpoint of a transformers configuration with random weights in bfloat16; see `seeded_state`."""
    checkpoint = Checkpoint(name, config, {}, "bfloat16", load_tokenizer=lambda: None)
    checkpoint.state = seeded_state(checkpoint, seed, in_few_bits)
    formats = {key: x.format for key, x in checkpoint.state.items() if isinstance(x, QuantizedArray)}
    checkpoint.quantization = formats or None
    return checkpoint


@torch.no_grad()
def seeded_state(checkpoint: Checkpoint, seed: int, in_few_bits: InFewBits | None = None) -> dict[str, Any]:
    """Return random weights on the GPU that keep activations in range; their values do not affect the time.

    Args:
        in_few_bits: Makes the weights in few bits. None: all have 16 bits.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    state: dict[str, Any] = {}
    for name, parameter in meta_model(checkpoint).named_parameters():
        codes = in_few_bits(name, tuple(parameter.shape)) if in_few_bits else None
        if codes is not None:
            state[name] = codes
            continue
        value = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
        if value.dim() == 1 and not name.endswith("bias"):
            state[name] = value.normal_(1.0, 0.1, generator=generator)
        else:
            state[name] = value.normal_(0.0, 0.02, generator=generator)
    return state


class Step:
    """A program with its executor and KV caches; programs of the same cache length share the caches."""

    def __init__(
        self,
        program: npu_compiler.CompiledProgram,
        backend: CUDABackend,
        state: Mapping[str, Any],
        shared: dict[str, DeviceBuffer],
        caches: Mapping[str, DeviceBuffer],
    ) -> None:
        self.program, self.backend = program, backend
        self._executor = Executor(program, backend)
        self._weights = load_weights(state, program, backend, cache=shared)
        self._specs = {spec.name: spec for spec in program.input_specs if spec.name not in caches}
        self._inputs = {name: NPUBuffer.zeros(spec.shape, backend, spec.storage) for name, spec in self._specs.items()}
        self._bound = {**self._inputs, **caches}

    def set(self, ids: Tensor, position: int) -> None:
        tokens = ids.shape[1]
        values = {
            "input_ids": ids.cpu().numpy().astype(np.int32),
            "positions": np.arange(position, position + tokens, dtype=np.int32),
            "last": np.array([tokens - 1], np.int32),
        }
        for name, spec in self._specs.items():
            self._inputs[name].write(values[name], spec)

    def run(self) -> dict[str, DeviceBuffer]:
        return self._executor.run(self._bound, self._weights)

    def logits(self) -> Tensor:
        output = self.run()[self.program.output_specs[0].name]
        return torch.from_numpy(output.to_numpy().reshape(-1)).cuda()


class Models:
    """Compiled programs and PyTorch modules of one model with the same random weights.

    Args:
        name: Name of the model.
        config: The transformers config.
        seed: Seed of the weights.
        in_few_bits: Makes the weights in few bits. None: all have 16 bits.
    """

    def __init__(self, name: str, config: Any, seed: int, in_few_bits: InFewBits | None = None) -> None:
        self.checkpoint = seeded_checkpoint(name, config, seed, in_few_bits)
        self.state: dict[str, Any] = {
            name: x if isinstance(x, QuantizedArray) else torch.as_tensor(x)
            for name, x in state_with_buffers(self.checkpoint).items()
        }
        self.backend = CUDABackend()
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self._shared: dict[str, DeviceBuffer] = {}
        self.caches: dict[str, DeviceBuffer] = {}
        self._cache_length = 0

    @cached_property
    def peer(self) -> StaticLanguageModel:
        return StaticLanguageModel(self.checkpoint.config, self.state)

    @cached_property
    def reference(self) -> StaticLanguageModel:
        wide = {name: self.state[name].float() for name in self.state}
        return StaticLanguageModel(self.checkpoint.config, wide)

    @property
    def other_peers(self) -> Mapping[str, StaticLanguageModel]:
        """Contender → another module to compile: the same model with weights stored by another library."""
        return {}

    def program(self, tokens: int, cache_length: int) -> npu_compiler.CompiledProgram:
        ir, formats = extract_graph(self.checkpoint, tokens, cache_length), program_formats(self.checkpoint)
        return npu_compiler.compile(ir, self.backend.target, npu_compiler.CompileOptions("bfloat16", formats))

    def source(self) -> Mapping[str, Any]:
        """Return the tensors from which the programs' weights are loaded."""
        return self.state

    def step(self, tokens: int, cache_length: int) -> Step:
        program = self.program(tokens, cache_length)
        if cache_length != self._cache_length:
            donated = set(program.plan.donations.values())
            self.caches.clear()
            self.caches.update(
                {
                    spec.name: NPUBuffer.zeros(spec.shape, self.backend, spec.storage)
                    for spec in program.input_specs
                    if spec.name in donated
                }
            )
            self._cache_length = cache_length
        return Step(program, self.backend, self.source(), self._shared, self.caches)

    def random_ids(self, tokens: int) -> Tensor:
        size = self.checkpoint.config.vocab_size
        return torch.randint(0, size, (1, tokens), device="cuda", generator=self.generator)

    @torch.no_grad()
    def fill_caches(self) -> None:
        """Fill the KV caches of our program, the peers and the reference with the same random keys and values."""
        for name, buffer in self.caches.items():
            letter, layer = name.split("_")
            values = torch.randn(buffer.shape, device="cuda", dtype=torch.bfloat16, generator=self.generator)
            from_dlpack(buffer).copy_(values)
            for model in (self.peer, self.reference, *self.other_peers.values()):
                getattr(model.layers[int(layer)], letter).copy_(values)
        torch.cuda.synchronize()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step must read: all except an embedding table that is not also the LM head."""
        state, tied = self.checkpoint.state, self.checkpoint.config.tie_word_embeddings
        read = (value for name, value in state.items() if tied or name != "model.embed_tokens.weight")
        return BYTES * sum(int(tensor.numel()) for tensor in read)


def measure_decode(
    task: str, models: Models, cache_length: int, positions: tuple[int, ...], ceilings: Ceilings, budget: Budget
) -> Iterator[Figure | Account]:
    """Time the decoding of one token at each position, over a cache filled with random keys and values."""
    model = models.checkpoint.name
    step = models.step(1, cache_length)
    attention, tried = _fastest_attention(models, 1, cache_length, ("grouped", "expanded"))
    peers = _Peers(models, 1, cache_length, attention, budget)
    models.fill_caches()
    for position in positions:
        ids = models.random_ids(1)
        step.set(ids, position)
        peers.set(ids, position)
        errors = agreement({OURS: step.logits(), **peers.logits()}, peers.reference_logits())
        results = time_in_turn({OURS: Contender(step.run, models.backend.timed), **peers.contenders()}, budget.rounds)
        least = models.weight_bytes + (position + 1) * _cache_row_bytes(models)
        case = {"cache": cache_length, "position": position}
        steady = steady_run(models.backend, step.program, step.run)
        floor, says = 1000 * least / ceilings.bandwidth, f"{least / 1e9:.2f} GB of weights, keys and values"
        yield Figure(task, model, case, medians(results), floor, says, steady, errors, tried)
        if position in (positions[0], positions[-1]):
            yield Account(task, model, case, medians(results)[OURS], account(step.run))


def measure_prefill(models: Models, tokens: int, ceilings: Ceilings, budget: Budget) -> Iterator[Figure | Account]:
    """Time the prefill of a prompt of `tokens` tokens; all contenders compute only the last token's logits."""
    cache_length = max(tokens, SHORTEST_CACHE)
    step = models.step(tokens, cache_length)
    attention, tried = _fastest_attention(models, tokens, cache_length, tuple(ATTENTION))
    peers = _Peers(models, tokens, cache_length, attention, budget)
    ids = models.random_ids(tokens)
    step.set(ids, 0)
    peers.set(ids, 0)
    errors = agreement({OURS: step.logits(), **peers.logits()}, peers.reference_logits())
    results = time_in_turn({OURS: Contender(step.run, models.backend.timed), **peers.contenders()}, budget.rounds)
    flops, case = prefill_flops(models, tokens), {"tokens": tokens, "cache": cache_length}
    by_memory, by_matrices = models.weight_bytes / ceilings.bandwidth, flops / ceilings.matrix_rate
    says = f"{models.weight_bytes / 1e9:.2f} GB of weights" if by_memory > by_matrices else f"{flops / 1e12:.2f} TFLOP"
    steady, floor = steady_run(models.backend, step.program, step.run), 1000 * max(by_memory, by_matrices)
    model = models.checkpoint.name
    yield Figure("prefill", model, case, medians(results), floor, says, steady, errors, tried)
    yield Account("prefill", model, case, medians(results)[OURS], account(step.run))


def _cache_row_bytes(models: Models) -> int:
    return BYTES * sum(int(np.prod(shape)) for layer in kv_shapes(models.checkpoint, 1) for shape in layer)


def prefill_flops(models: Models, tokens: int) -> float:
    """Return the FLOP of all matrix products: layers for every token, the LM head for one, and causal attention."""
    config, state = models.checkpoint.config, models.checkpoint.state
    head = config.vocab_size * config.hidden_size
    layers = sum(tensor.numel() for tensor in state.values() if tensor.dim() == 2) - head
    attention = 2 * config.num_hidden_layers * config.hidden_size * tokens * (tokens + 1)
    return float(2 * (tokens * layers + head) + attention)


class _Peers:
    """PyTorch eager, `torch.compile` and the float32 reference for one number of tokens and cache length."""

    def __init__(self, models: Models, tokens: int, cache_length: int, attention: str, budget: Budget) -> None:
        torch._dynamo.reset()
        self._eager, self._reference = models.peer, models.reference
        self._compiled: dict[str, Callable[..., Tensor]] = {}
        others = models.other_peers
        for model in (models.peer, models.reference, *others.values()):
            model.prepare(cache_length, ATTENTION[attention])
        self._ids, self._positions = models.random_ids(tokens), torch.arange(tokens, device="cuda")
        for name, model in {**others, COMPILED: models.peer}.items():
            if budget.may_compile():
                self._compiled[name] = compiled(model, [self._ids, self._positions], "reduce-overhead")

    def set(self, ids: Tensor, position: int) -> None:
        self._ids = ids
        self._positions = torch.arange(position, position + ids.shape[1], device="cuda")

    def contenders(self) -> dict[str, Contender]:
        return {name: torch_contender(step) for name, step in self._steps().items()}

    def logits(self) -> dict[str, Tensor]:
        return {name: step().clone() for name, step in self._steps().items()}

    def _steps(self) -> dict[str, Callable[[], Tensor]]:
        models: dict[str, Callable[..., Tensor]] = {EAGER: self._eager, **self._compiled}
        return {name: self._step(model) for name, model in models.items()}

    def reference_logits(self) -> Tensor:
        return self._step(self._reference)()

    def _step(self, model: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        ids, positions = self._ids, self._positions

        @torch.no_grad()
        def run() -> Tensor:
            return model(ids, positions)

        return run


def _fastest_attention(models: Models, tokens: int, cache_length: int, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the fastest way to call SDPA for this shape, and a text with the time of each way.

    Each way is compiled and timed alone.
    """
    config = models.checkpoint.config
    shape = kv_shapes(models.checkpoint, cache_length)[0][0]
    q = torch.randn(1, config.num_attention_heads, tokens, shape[3], device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    mask = torch.ones(tokens, cache_length, device="cuda", dtype=torch.bool).tril(cache_length - tokens)[None, None]
    contenders = {}
    for name in names:
        attend = torch.compile(ATTENTION[name], fullgraph=True, dynamic=False)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            attend(q, k, v, mask)
            with torch.cuda.graph(graph):
                attend(q, k, v, mask)
        contenders[name] = torch_contender(graph.replay)
    results = time_in_turn(contenders, rounds=3)
    tried = ", ".join(f"{name} {1e6 * result.median:.0f} µs" for name, result in results.items())
    return min(results, key=lambda name: results[name].median), f"SDPA {tried}"
