"""GGUF files of each architecture, against what transformers computes with the weights that were converted."""

from pathlib import Path
from typing import Any

import decoders
import numpy as np
import pytest
import torch
from decoder_variants import save_model
from gguf_files import save_gguf
from tiny_llms import transformers

from npu_sim.llm import LanguageModel, load_checkpoint
from npu_sim.llm.gguf_architectures import ARCHITECTURES

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("shared_programs")

WINDOW = 8
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# Name of a test → model type, and what its config says beside the sizes of tiny models.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"sliding_window": WINDOW}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention"]}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", {"sliding_window": WINDOW}),
    "deepseek2": ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek3": ("deepseek_v3", {"first_k_dense_replace": 1}),
    "mixtral": ("mixtral", {}),
    "granite": ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_file_generates_what_the_converted_model_does(name: str, tmp_path: Path) -> None:
    kind, fields = TYPES[name]
    folder = save_model(tmp_path / "model", kind, **fields)
    path = save_gguf(folder, tmp_path / "m.gguf")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
