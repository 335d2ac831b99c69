"""Prefill with weights and activations in 8 bits on the CUDA device, beside bfloat16 and torchao's float8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cuda.llm import SHORTEST_CACHE, Models, prefill_flops
from benchmarks.cuda.quantized import QuantizedModels
from benchmarks.cuda.timing import (
    Budget,
    Ceilings,
    Contender,
    account,
    medians,
    steady_run,
    time_in_turn,
    torch_contender,
)
from benchmarks.figures import COMPILED, OURS, Account, Figure
from benchmarks.peers import ATTENTION, StaticLanguageModel, compiled, compiled_by_layer

_ATTENTION = ATTENTION["prompt"]  # the fastest of them for prompts
_BYTE_RATE = 2  # products of bytes per product of bfloat16, on tensor cores


def measure_rounded_prefill(
    task: str, name: str, config: Any, tokens: int, ceilings: Ceilings, budget: Budget
) -> Iterator[Figure | Account]:
    """Time the prefill of `tokens` tokens: ours in fp8, int8 and bfloat16, `torch.compile` in bfloat16 and float8.

    The float8 weights and activations of `torch.compile` are torchao's. Errors are those of the last token's logits
    with respect to PyTorch in float32 with the same dequantized weights, so they include the rounding of activations.
    """
    cache_length = max(tokens, SHORTEST_CACHE)
    contenders, errors = {}, {}
    rounded = {OURS: "fp8+fp8", f"{OURS} int8": "int8+int8"}
    models: dict[str, Models] = {x: QuantizedModels(name, config, kind, seed=0) for x, kind in rounded.items()}
    models[f"{OURS} bfloat16"] = Models(name, config, seed=0)
    steps = {}
    for contender, each in models.items():
        step = steps[contender] = each.step(tokens, cache_length)
        ids, positions = each.random_ids(tokens), torch.arange(tokens, device="cuda")
        step.set(ids, 0)
        errors[contender] = _error(step.logits(), each, ids, positions, cache_length)
        contenders[contender] = Contender(step.run, each.backend.timed)
    first, last = models[OURS], models[f"{OURS} bfloat16"]
    flops, by_memory = prefill_flops(first, tokens), first.weight_bytes / ceilings.bandwidth
    attention = 2 * config.num_hidden_layers * config.hidden_size * tokens * (tokens + 1)
    by_matrices = ((flops - attention) / _BYTE_RATE + attention) / ceilings.matrix_rate
    says = f"{flops / 1e12:.2f} TFLOP, of layers at {_BYTE_RATE} × the rate of bfloat16"
    case, model = {"tokens": tokens, "cache": cache_length}, first.checkpoint.name
    steady = steady_run(first.backend, steps[OURS].program, steps[OURS].run)

    def figure() -> Figure:
        results = medians(time_in_turn(contenders, budget.rounds))
        return Figure(task, model, case, results, 1000 * max(by_memory, by_matrices), says, steady, dict(errors))

    result = figure()
    yield result
    yield Account(task, model, case, result.ms[OURS], account(steps[OURS].run))
    ids, positions = last.random_ids(tokens), torch.arange(tokens, device="cuda")
    if budget.may_compile():
        last.peer.prepare(cache_length, _ATTENTION)
        whole = torch.no_grad()(compiled(last.peer, [ids, positions], "reduce-overhead"))
        errors[COMPILED] = _error(whole(ids, positions), last, ids, positions, cache_length)
        contenders[COMPILED] = torch_contender(lambda: whole(ids, positions))
        yield figure()
    if budget.may_compile():  # by layers, since compiling the whole model did not come to an end in five minutes
        first.peer.prepare(cache_length, _ATTENTION)
        round_layers(first.peer)
        run = compiled_by_layer(first.peer, [ids, positions])
        peer = f"{COMPILED} by layer, torchao float8"
        errors[peer] = _error(run(), first, ids, positions, cache_length)
        contenders[peer] = torch_contender(run)
        yield figure()


def round_layers(model: StaticLanguageModel) -> None:
    """Quantize the linear layers by torchao, for products of float8 activations and weights with scales by row."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    for layer in model.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            weight = getattr(layer, name)
            holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            holder.weight = nn.Parameter(weight, requires_grad=False)
            quantize_(holder, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
            layer.register_buffer(name, holder.weight.data)


@torch.no_grad()
def _error(logits: Tensor, models: Models, ids: Tensor, positions: Tensor, cache_length: int) -> float:
    """Return ‖logits - reference‖ / ‖reference‖, with PyTorch in float32 as the reference."""
    models.reference.prepare(cache_length, _ATTENTION)
    reference: Tensor = models.reference(ids, positions)
    del models.reference  # whose memory the next ones may need
    return float((logits.reshape(-1) - reference).norm() / reference.norm())
