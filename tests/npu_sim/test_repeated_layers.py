"""Graphs of models whose layers repeat: those of a few layers, copied, are those of all; or all layers are traced."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from torch import nn

from npu_compiler.graph.symbolic import specialize
from npu_sim.llm import graph, load_architecture
from npu_sim.llm.repeated_layers import SAMPLE, canonical, recorded, trace_few

pytest.importorskip("transformers")

LAYERS = SAMPLE + 1
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
GPT2 = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "vocab_size": 100, "torch_dtype": "float16"}


class Layers(nn.Module):
    """Linear layers with a state each, and another one at the end."""

    def __init__(self, factors: Sequence[float], last: float) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.Linear(8, 8, device="meta") for _ in factors)
        self.head = nn.Linear(8, 5, device="meta")
        self.factors, self.last = factors, last

    def forward(self, x: torch.Tensor, k: list[torch.Tensor], v: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        shared, states = torch.cos(x), []
        for number, (layer, factor) in enumerate(zip(self.stack, self.factors, strict=True)):
            y = layer(x) * shared
            states += [k[number] + y, v[number] * factor]
            x = x + states[-1] + states[-2]
        return self.head(x * self.last), *states


def built(factors: Sequence[float]) -> Callable[[int], tuple[nn.Module, list[Any]]]:
    def build(count: int) -> tuple[nn.Module, list[Any]]:
        x, *states = (torch.empty(3, 8, device="meta") for _ in range(1 + 2 * count))
        return Layers(factors[:count], 0.5), [x, states[:count], states[count:]]

    return build


@pytest.mark.parametrize("count", [SAMPLE + 1, 9])
def test_copies_are_the_calls_of_all_layers(count: int) -> None:
    build = built([2.0] * count)
    ir = trace_few("stack", count, build, lambda module, inputs: recorded(module, inputs))
    assert ir is not None and canonical(ir) == canonical(recorded(*build(count)))
    assert {x["name"] for node in ir["nodes"] for x in node["inputs"]} >= {
        f"k_{count - 1}",
        f"stack.{count - 1}.weight",
    }


@pytest.mark.parametrize("other", [0, 1, SAMPLE - 1, SAMPLE, 6])
def test_a_layer_with_another_number_is_seen_wherever_it_is(other: int) -> None:
    factors = [2.0] * 7
    factors[other] = 3.0
    build, traced = built(factors), []
    ir = trace_few("stack", 7, build, lambda *given: traced.append(given) or recorded(*given))
    if other == 0:  # the first layer is not copied
        assert ir is not None and canonical(ir) == canonical(recorded(*build(7)))
    else:
        assert ir is None and not traced


def sizes(ir: dict[str, Any]) -> dict[str, int]:
    return graph._sizes(ir, {"input_ids": [2, 5], "k_0": [60]})


MODELS = {
    "qwen2": ("qwen2", CONFIG, True),
    "gpt2": ("gpt2", GPT2, True),
    "windows": (
        "qwen2",
        {**CONFIG, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": SAMPLE},
        False,
    ),
}


@pytest.mark.parametrize("name", drawn(MODELS, 1 / 3))
def test_a_model_has_one_graph_however_many_layers_are_traced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, config, few = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    checkpoint = load_architecture(tmp_path)
    traced, trace = [], graph._trace_symbolic
    monkeypatch.setattr(graph, "_trace_symbolic", lambda *given: traced.append(len(given[2][3])) or trace(*given))
    ir = graph._symbolic_contiguous(checkpoint)
    monkeypatch.setattr(graph, "_layers_path", lambda _: None)
    whole = graph._symbolic_contiguous(checkpoint)
    assert traced == [SAMPLE if few else LAYERS, LAYERS]
    # PyTorch numbers its symbols anew in each trace.
    assert canonical(specialize(ir, sizes(ir))) == canonical(specialize(whole, sizes(whole)))
