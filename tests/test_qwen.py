"""Qwen2.5-1.5B's real configuration: compiled whole from the meta device, and run as a cut of four layers."""

import secrets

import numpy as np
import pytest
import torch
from numerics import assert_design6
from transformers import AutoModelForCausalLM, Qwen2Config

import npu_compiler
from npu_sim.llm import Checkpoint, LanguageModel, extract_graph

CACHE_LENGTH = 2048
PROMPT = 128


def qwen(layers: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def checkpoint(config: Qwen2Config, state: dict[str, torch.Tensor]) -> Checkpoint:
    return Checkpoint("qwen2.5-1.5b", config, state, "bfloat16", load_tokenizer=lambda: None)


@pytest.mark.parametrize("tokens", [PROMPT, 1], ids=["prefill", "decode"])
def test_the_real_configuration_is_one_partition_with_donated_caches(tokens: int) -> None:
    layers = 28
    ir = extract_graph(checkpoint(qwen(layers), {}), tokens, CACHE_LENGTH)
    plan = npu_compiler.partition(ir)
    assert [part.device for part in plan.partitions] == ["npu"]
    program = npu_compiler.compile(ir)
    assert program.compute_dtype == "bfloat16"
    assert len(program.plan.donations) == 2 * layers
    around = 16  # mask, embedding and rotary tables before the layers; norm and head after them
    assert len(program.kernels) <= 12 * layers + around


@pytest.mark.slow
def test_a_cut_of_four_layers_is_as_good_as_pytorch() -> None:
    seed = secrets.randbits(32)
    torch.manual_seed(seed)
    config = qwen(4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, PROMPT + 3).tolist()
    with torch.no_grad():
        ref_16bit = model(torch.tensor([tokens])).logits[0, PROMPT - 1 :].float().numpy()
        device = LanguageModel(checkpoint(config, model.state_dict()), device="cpu", cache_length=CACHE_LENGTH)
        ours = [device.prefill(tokens[:PROMPT])] + [device.decode(token) for token in tokens[PROMPT:]]
        ref_f32 = model.float()(torch.tensor([tokens])).logits[0, PROMPT - 1 :].numpy()
    assert_design6(np.stack(ours), ref_f32, ref_16bit, seed=seed)
