"""Quality of a language model with rounded activations and KV cache: see `benchmarks.quality`.

    python -m benchmarks.quality.rounded_rows --text alice29.txt lcet10.txt --windows 4

prints a table for docs/measurements/quantization.md. PyTorch computes in float32 with the dequantized weights; inputs
of layers whose weights are in few bits, or keys and values, are rounded by row as `quantize_rows` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.quality.page import Figure
from benchmarks.quality.windows import add_window, windows
from npu_compiler.graph.quantization import dequantize_rows, quantize_rows
from npu_sim.llm import load_checkpoint
from npu_sim.llm.graph import dense_model, program_formats


@dataclass(frozen=True)
class Rounding:
    """Formats, of `ROW_FORMATS`, to which activations and the KV cache are rounded; None means no rounding."""

    name: str
    activations: str | None = None
    kv_cache: str | None = None


REFERENCE = Rounding("nothing")
ROUNDINGS = (
    Rounding("activations int8", "int8"),
    Rounding("activations fp8", "float8_e4m3"),
    Rounding("KV cache int8", None, "int8"),
    Rounding("KV cache fp8", None, "float8_e4m3"),
    Rounding("both int8", "int8", "int8"),
)


def rounded(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Return rows [..., k] rounded by `quantize_rows` and dequantized, in float32."""
    return torch.from_numpy(dequantize_rows(*quantize_rows(rows.float().numpy(), kind), kind))


class _RoundedCache(DynamicCache):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (rounded(states, self._kind) for states in (key_states, value_states))
        return super().update(keys, values, layer_idx, *args, **kwargs)


@contextmanager
def rounding_inputs(model: Any, layers: Sequence[str], kind: str | None) -> Iterator[None]:
    """Round the inputs of the named layers to a format within this context; None means no rounding."""

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return rounded(args[0], kind or ""), *args[1:]

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook) for name in (layers if kind else ())]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.inference_mode()
def read_window(model: Any, layers: Sequence[str], ids: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return the logarithms of the probabilities of each next token, [length, vocabulary]."""
    cache = _RoundedCache(rounding.kv_cache) if rounding.kv_cache else None
    with rounding_inputs(model, layers, rounding.activations):
        logits: torch.Tensor = model(input_ids=ids[None], past_key_values=cache, use_cache=cache is not None).logits[0]
    return logits.log_softmax(-1)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table, the reference first."""
    lines = ["| rounded | perplexity | rise | KL divergence, nats | same next token |", "|---|--:|--:|--:|--:|"]
    for figure in figures:
        rest = " |  |  |"
        if figure is not figures[0]:
            rise = figure.perplexity / figures[0].perplexity - 1
            same = figure.agreement / figure.tokens
            rest = f" {rise:+.2%} | {figure.divergence / figure.tokens:.5f} | {same:.1%} |"
        lines.append(f"| {figure.variant} | {figure.perplexity:.3f} |{rest}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for npu-sim generate; its weights are in few bits")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts to read")
    parser.add_argument("--windows", type=int, default=4, help="windows to read in all")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    options = parser.parse_args()
    checkpoint = load_checkpoint(options.model, "float32", "none")
    formats = program_formats(load_checkpoint(options.model))
    if not isinstance(formats, Mapping):
        raise SystemExit(f"{options.model} has no weights in few bits")
    model = dense_model(checkpoint, "cpu")
    layers = [name.removesuffix(".weight") for name in formats if "embed_tokens" not in name]
    figures = [Figure(rounding.name, 0, 0) for rounding in (REFERENCE, *ROUNDINGS)]
    for ids in windows(checkpoint, options.text, options.windows, options.length):
        reference = read_window(model, layers, ids, REFERENCE)
        add_window(figures[0], reference, reference, ids)
        for figure, rounding in zip(figures[1:], ROUNDINGS, strict=True):
            add_window(figure, read_window(model, layers, ids, rounding), reference, ids)
        print(f"\n{figures[0].tokens} tokens\n{table(figures)}", flush=True)


if __name__ == "__main__":
    main()
