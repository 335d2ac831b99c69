"""GGUF files of each architecture, against what transformers computes with the weights that were converted."""

import re
from pathlib import Path
from typing import Any

import decoders
import numpy as np
import pytest
import torch
from decoder_variants import save_model
from drawn import drawn
from gguf_files import save_gguf
from tiny_llms import TEMPLATE, save_tokenizer, tensors, transformers

from npu_compiler.errors import InputError
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


@pytest.mark.parametrize("name", drawn(TYPES, 1 / 5))
def test_a_file_is_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    whole, path = _saved(name, tmp_path)
    rebuilt = _rebuilt(load_checkpoint(path, "float32"))
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, decoders.VOCAB, (1, 40)))
    with torch.no_grad():
        found, expected = rebuilt(ids).logits, whole(ids).logits
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "made",
    drawn([("gpt_oss", "MXFP4"), ("qwen3_moe", "Q3_K"), ("qwen3_moe", "IQ4_XS"), ("phi3", "Q2_K")], 1 / 2, "-".join),
)
def test_matrices_stay_in_few_bits(made: tuple[str, str], tmp_path: Path) -> None:
    """Logits are those of the dequantized weights, with matrices of experts in few bits too."""
    kind, encoding = made
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


@pytest.mark.parametrize("name", drawn(TYPES, 1 / 5))
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


def test_a_latent_may_be_stored_as_one_matrix(tmp_path: Path) -> None:
    """Older converters write it so, with the lengths of whole keys and values."""
    folder = save_model(tmp_path / "model", "deepseek_v3", first_k_dense_replace=1)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    matrices = {
        f"blk.{layer}.attn_kv_b.weight": whole.model.layers[layer].self_attn.kv_b_proj.weight.detach().numpy()
        for layer in range(2)
    }
    config = whole.config
    keys = {"key_length": config.qk_nope_head_dim + config.qk_rope_head_dim, "value_length": config.v_head_dim}
    older = {f"attention__{name}": size for name, size in keys.items()}
    newer = {f"attention__{name}_mla": ... for name in keys}
    heads = {"attention__head_count_kv": config.num_attention_heads}
    path = save_gguf(
        folder, tmp_path / "m.gguf", more=matrices, without=r".*attn_[kv]_b\..*", **older, **newer, **heads
    )
    found = _rebuilt(load_checkpoint(path, "float32")).state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found[name], value)


def test_factors_of_a_long_context_are_those_of_the_file(tmp_path: Path) -> None:
    long, short = (np.linspace(1, end, 8, dtype=np.float32) for end in (9, 3))
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": 32,
    }
    folder = save_model(tmp_path / "model", "phi3", rope_parameters=rope, original_max_position_embeddings=32)
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    keys = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": 1.25}
    checkpoint = load_checkpoint(save_gguf(folder, tmp_path / "m.gguf", more=factors, **keys), "float32")
    found = checkpoint.config.to_dict()["rope_parameters"]
    assert {name: found[name] for name in rope} == rope and found["attention_factor"] == 1.25
    rope["attention_factor"] = 1.25
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, rope_parameters=rope).eval()
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, decoders.VOCAB, (1, 20)))
    with torch.no_grad():
        torch.testing.assert_close(_rebuilt(checkpoint)(ids).logits, whole(ids).logits)
    with pytest.raises(InputError, match="rotary factors for short or for long contexts, but not for both"):
        load_checkpoint(save_gguf(folder, tmp_path / "n.gguf", more={"rope_factors_long.weight": long}, **keys))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"attention__sliding_window": ...}, "no value for 'gemma3.attention.sliding_window'"),
        ("gemma2", {"attention__sliding_window_pattern": 3}, "a value for '.*sliding_window_pattern', which is not"),
        ("qwen3moe", {"expert_weights_norm": False}, "has False for 'qwen3moe.expert_weights_norm'; only True"),
        ("qwen3moe", {"expert_feed_forward_length": 64}, r"'blk.0.ffn_gate_exps.weight' has the shape \[4, 32, 64\]"),
        ("qwen3moe", {"expert_count": 5}, r"'blk.0.ffn_\w+.weight' has the shape \[4, .* says \[5, "),
        ("gpt-oss", {"expert_feed_forward_length": 64}, "says 64 for '.*', but another of its keys says 96"),
        ("deepseek2", {"expert_weights_norm": True}, "has True for 'deepseek2.expert_weights_norm'; only False"),
        ("deepseek2", {"attention__key_length": 9}, "has 9 for 'deepseek2.attention.key_length'; only 40"),
        ("phi3", {"rope__dimension_count": 17}, "rotates 17 elements of heads that have 16"),
        ("granite", {"attention__scale": -1.0}, "'granite.attention.scale' is -1.0, not a positive number"),
        ("llama with experts", {"expert_used_count": ...}, "no value for 'llama.expert_used_count'"),
    ],
)
def test_metadata_of_an_architecture_is_checked(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind, fields = TYPES[name]
    folder = save_model(tmp_path / "model", kind, **fields)
    with pytest.raises(InputError, match=message):
        load_checkpoint(save_gguf(folder, tmp_path / "m.gguf", **changes))


def test_what_is_unknown_is_refused_with_what_is_known(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    path = save_gguf(folder, tmp_path / "m.gguf")
    (tmp_path / "n.gguf").write_bytes(path.read_bytes().replace(b"llama", b"lamas"))
    with pytest.raises(InputError, match="architecture 'lamas'; supported are llama, qwen2, .*gpt-oss, deepseek2"):
        load_checkpoint(tmp_path / "n.gguf")
    more = {"output_norm.weight": np.ones(64, np.float64)}
    with pytest.raises(InputError, match="tensors of type F64 are not supported in GGUF files; supported are F32, F16"):
        load_checkpoint(save_gguf(folder, tmp_path / "n.gguf", more=more, without="output_norm.*"))


def test_experts_whose_factors_are_of_two_types_are_widened(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", norm_topk_prob=True)
    save_tokenizer(folder, TEMPLATE)
    name = "blk.1.ffn_up_exps.weight"
    up = np.random.default_rng(1).standard_normal((4, 32, 64)).astype(np.float16)
    path = save_gguf(folder, tmp_path / "m.gguf", "Q8_0", more={name: up}, without=re.escape(name))
    checkpoint = load_checkpoint(path, "float32")
    assert isinstance(checkpoint.quantization, dict)
    joined = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]
    assert [name in checkpoint.quantization for name in joined] == [True, False]
    np.testing.assert_array_equal(checkpoint.state[joined[1]].reshape(4, 64, 64)[:, 32:], up.astype(np.float32))
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("the cat")) == "the cat"
    assert np.isfinite(LanguageModel(checkpoint, cache_length=16, device="cpu").prefill([1, 2, 3])).all()
