"""GGUF files of each architecture, against what transformers computes with the weights that were converted."""

from pathlib import Path
from typing import Any

import decoders
import numpy as np
import pytest
import torch
from decoder_variants import save_model
from gguf_files import save_gguf
from tiny_llms import tensors, transformers

from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint
from npu_sim.llm.gguf_architectures import ARCHITECTURES

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("shared_programs")

WINDOW = {"sliding_window": 8}
GEMMA = {**WINDOW, "query_pre_attn_scalar": 16}
LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# Name of a test → model type, and what its config says beside the sizes of tiny models.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 6, "layer_types": LAYERS, "rope_parameters": ROPES}),
    "phi3": ("phi3", WINDOW),
    "phi3 that turns a part": ("phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", WINDOW),
    "deepseek2": (
        "deepseek_v2",
        {"num_experts_per_tok": 2, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek2 without a latent of queries": ("deepseek_v2", {"num_experts_per_tok": 2, "q_lora_rank": None}),
    "deepseek2 of version 3": ("deepseek_v3", {"first_k_dense_replace": 1}),
    "llama with experts": ("mixtral", {}),
    "llama with yarn": ("llama", {"rope_parameters": YARN}),
    "granite": ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "layer_types": None, "no_rope_layers": None}),
}


def test_each_architecture_is_tried() -> None:
    assert {name.split()[0] for name in TYPES} >= set(ARCHITECTURES) - {"qwen2", "qwen3"}  # which test_gguf.py tries


# Whose rotary embedding multiplies complex numbers in transformers, which no program does.
COMPLEX = ("deepseek2", "deepseek2 without a latent of queries")


def _saved(name: str, place: Path) -> tuple[Any, Path]:
    """A model of transformers and the same as a GGUF file."""
    kind, fields = TYPES[name]
    folder = save_model(place / "model", kind, **fields)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return whole, save_gguf(folder, place / "m.gguf")


def _rebuilt(checkpoint: Checkpoint) -> Any:
    """The model of transformers that a checkpoint's config and its dequantized tensors describe."""
    rebuilt = transformers.AutoModelForCausalLM.from_config(checkpoint.config.whole, dtype=torch.float32).eval()
    is_transposed, weights, state = checkpoint.config.model_type == "gpt_oss", tensors(checkpoint), {}
    for key, parameter in rebuilt.state_dict().items():
        if key in weights and is_transposed and parameter.ndim == 3:
            state[key] = weights[key].reshape(parameter.mT.shape).mT
        elif key in weights:
            state[key] = weights[key].reshape(parameter.shape)
    missing, _ = rebuilt.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and set(state) == set(weights)
    return rebuilt


@pytest.mark.parametrize("name", TYPES)
def test_a_file_is_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    whole, path = _saved(name, tmp_path)
    rebuilt = _rebuilt(load_checkpoint(path, "float32"))
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, decoders.VOCAB, (1, 40)))
    with torch.no_grad():
        found, expected = rebuilt(ids).logits, whole(ids).logits
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("kind", "encoding"), [("gpt_oss", "MXFP4"), ("qwen3_moe", "Q3_K"), ("qwen3_moe", "IQ4_XS"), ("phi3", "Q2_K")]
)
def test_matrices_stay_in_few_bits(kind: str, encoding: str, tmp_path: Path) -> None:
    """Those of experts too: the tokens' logits are those of the dequantized weights."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
    folder = save_model(tmp_path / "model", kind, **WINDOW, **sizes, **{"num_attention_heads": 8, "head_dim": 32})
    checkpoint = load_checkpoint(save_gguf(folder, tmp_path / "m.gguf", encoding), "float32")
    assert isinstance(checkpoint.quantization, dict)
    named = {name for name, value in checkpoint.state.items() if len(value.shape) > 1 and "bias" not in name}
    assert named == set(checkpoint.quantization) and len(named) > 8
    ids = np.random.default_rng(1).integers(0, decoders.VOCAB, 20).tolist()
    with torch.no_grad():
        expected = _rebuilt(checkpoint)(torch.tensor([ids])).logits[0, -1].numpy()
    found = LanguageModel(checkpoint, cache_length=32, device="cpu").prefill(ids)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", [name for name in TYPES if name not in COMPLEX])
def test_a_file_generates_what_the_converted_model_does(name: str, tmp_path: Path) -> None:
    whole, path = _saved(name, tmp_path)
    ids = np.random.default_rng(1).integers(0, decoders.VOCAB, 20).tolist()
    ours = LanguageModel(load_checkpoint(path, "float32"), cache_length=32, device="cpu")
    found = ours.prefill(ids)
    for _ in range(6):
        with torch.no_grad():
            expected = whole(torch.tensor([ids])).logits[0, -1].float().numpy()
        np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
        token = int(expected.argmax())
        assert int(found.argmax()) == token
        ids.append(token)
        found = ours.decode(token)
