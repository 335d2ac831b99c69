"""Whole networks from their configurations, without weights, in the form in which they were measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.silicon.graphs import IR

if TYPE_CHECKING:
    from npu_compiler.graph.model import IRGraph

LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {}),
    "qwen2.5-0.5b": (
        "Qwen2",
        {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2,
        },
    ),
    "smollm2-135m": (
        "Llama",
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3,
        },
    ),
}  # fmt: skip


def prefill(model: str, tokens: int) -> IR:
    """Return IR for the forward pass of one prompt, with the logits of all its tokens."""
    import torch
    import transformers

    from npu_sim.extract import extract_ir

    kind, sizes = LANGUAGE_MODELS[model]
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=True, use_cache=False)
    with torch.device("meta"):
        network = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)
    for module in network.modules():
        for name, value in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.ones(value.shape, dtype=value.dtype))  # of positions, whose values take no time

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.to(torch.bfloat16).eval()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.network(tokens, use_cache=False).logits
            return logits

    return dict(extract_ir(Forward(), (torch.zeros(1, tokens, dtype=torch.int64),)))


def resnet50() -> IRGraph:
    """Return the graph of ResNet-50 in int8."""
    from npu_compiler import read_ir
    from npu_sim.quantizing.networks.uncalibrated import quantized_from_shapes
    from npu_sim.vision.models import extract_model_ir, find_model

    return quantized_from_shapes(read_ir(extract_model_ir(find_model("resnet50"))))
