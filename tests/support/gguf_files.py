"""Hugging Face folders as GGUF files, with the keys, names and layouts of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "mixtral": "llama",
}
_PERMUTED = ("llama", "mixtral", "granite", "smollm3")
Tensors = Iterator[tuple[str, np.ndarray]]


def save_gguf(
    folder: Path,
    path: Path,
    encoding: str = "F32",
    more: Mapping[str, np.ndarray] | None = None,
    without: str = "",
    **metadata: Any,
) -> Path:
    """A Hugging Face folder of `save_tiny` and `save_tokenizer` as a GGUF file.

    Args:
        encoding: The ggml type of the matrices; vectors are in float32.
        more: Further tensors, as they are. None: there are none.
        without: Expression for names of tensors that are left out.
        metadata: Values that are added to those of the architecture or replace them, with `__` for the dots in a key;
            those that are `...` are left out.
    """
    import gguf

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        **_described(config, architecture),
        **{f"{architecture}.{name.replace('__', '.')}": value for name, value in metadata.items()},
    }
    for key, value in values.items():
        if value is not ...:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}.get(
                type(value), writer.add_array
            )(key, value)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder)
    for name, array in gguf_tensors(model, architecture):
        if not re.fullmatch(without, name):
            kind = gguf.GGMLQuantizationType["F32" if array.ndim == 1 or name.endswith("bias") else encoding]
            writer.add_tensor(name, quantized(np.ascontiguousarray(array), kind), raw_dtype=kind)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(array: np.ndarray, kind: Any) -> np.ndarray:
    """An array in a ggml type; random blocks with small scales where the package gguf only dequantizes."""
    import gguf

    try:
        stored: np.ndarray = gguf.quantize(array, kind)
        return stored
    except NotImplementedError:
        return random_blocks(kind.name, array.shape)


# Bytes at which the scales of a block stand, a float16 each, or bytes of fewer bits in MXFP4 and NVFP4.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (0, 2),
}


def random_blocks(encoding: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes [..., bytes of a row] of a ggml type, whose scales are around 1/500."""
    import gguf

    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]
    rng = np.random.default_rng(list(encoding.encode()))
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), np.uint8)
    for place in SCALES[encoding]:
        scales = (0.002 * rng.standard_normal((*blocks.shape[:-1], 1))).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8) if encoding != "NVFP4" else 0x30
    if encoding == "MXFP4":
        blocks[..., 0] = rng.integers(110, 122, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


def _described(config: Any, architecture: str) -> dict[str, Any]:
    """The keys by which the converter describes a config."""
    from gguf import Keys

    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    values = {
        Keys.LLM.CONTEXT_LENGTH: config.max_position_embeddings,
        Keys.LLM.EMBEDDING_LENGTH: config.hidden_size,
        Keys.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
        Keys.LLM.BLOCK_COUNT: config.num_hidden_layers,
        Keys.Attention.HEAD_COUNT: heads,
        Keys.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        Keys.Attention.LAYERNORM_RMS_EPS: config.rms_norm_eps,
        **_rope(config.rope_parameters),
    }
    further = _FURTHER.get(config.model_type)
    values |= further(config) if further else {}
    return {key.format(arch=architecture): value for key, value in values.items()}


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    from gguf import Keys

    rope = parameters.get("full_attention", parameters)
    values: dict[str, Any] = {Keys.Rope.FREQ_BASE: float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {Keys.Rope.SCALING_TYPE: rope["rope_type"], Keys.Rope.SCALING_FACTOR: float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values[Keys.Rope.SCALING_ORIG_CTX_LEN] = rope["original_max_position_embeddings"]
        if "mscale_all_dim" in rope:
            values[Keys.Rope.SCALING_YARN_LOG_MUL] = 0.1 * rope["mscale_all_dim"]
    return values


def _gemma(config: Any) -> dict[str, Any]:
    from gguf import Keys

    caps = {
        Keys.LLM.ATTN_LOGIT_SOFTCAPPING: config.attn_logit_softcapping,
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: config.final_logit_softcapping,
    }
    return {
        Keys.Attention.SLIDING_WINDOW: config.sliding_window,
        **{key: value for key, value in caps.items() if value is not None},
    }


def _phi3(config: Any) -> dict[str, Any]:
    from gguf import Keys

    head_dim = config.hidden_size // config.num_attention_heads
    rotated = int(config.rope_parameters.get("partial_rotary_factor", 1) * head_dim)
    return {Keys.Rope.DIMENSION_COUNT: rotated, Keys.Attention.SLIDING_WINDOW: config.sliding_window or 0}


def _experts(config: Any) -> dict[str, Any]:
    from gguf import Keys

    return {
        Keys.LLM.EXPERT_COUNT: config.num_experts if hasattr(config, "num_experts") else config.num_local_experts,
        Keys.LLM.EXPERT_USED_COUNT: config.num_experts_per_tok,
    }


def _qwen_moe(config: Any) -> dict[str, Any]:
    from gguf import Keys

    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        **_experts(config),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
        **({Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: shared} if shared else {}),
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    from gguf import Keys

    return {
        **_experts(config),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config.intermediate_size,
        Keys.Attention.SLIDING_WINDOW: config.sliding_window,
    }


def _granite(config: Any) -> dict[str, Any]:
    from gguf import Keys

    return {
        Keys.Attention.SCALE: config.attention_multiplier,
        Keys.LLM.EMBEDDING_SCALE: config.embedding_multiplier,
        Keys.LLM.RESIDUAL_SCALE: config.residual_multiplier,
        Keys.LLM.LOGIT_SCALE: config.logits_scaling,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    from gguf import ExpertGatingFuncType, Keys

    is_v3 = config.model_type == "deepseek_v3"
    return {
        **_experts(config),
        Keys.Attention.HEAD_COUNT_KV: 1,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: config.first_k_dense_replace,
        **({Keys.Attention.Q_LORA_RANK: config.q_lora_rank} if config.q_lora_rank else {}),
        Keys.Attention.KV_LORA_RANK: config.kv_lora_rank,
        Keys.Attention.KEY_LENGTH: config.kv_lora_rank + config.qk_rope_head_dim,
        Keys.Attention.VALUE_LENGTH: config.kv_lora_rank,
        Keys.Attention.KEY_LENGTH_MLA: config.qk_nope_head_dim + config.qk_rope_head_dim,
        Keys.Attention.VALUE_LENGTH_MLA: config.v_head_dim,
        Keys.Rope.DIMENSION_COUNT: config.qk_rope_head_dim,
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
        Keys.LLM.EXPERT_COUNT: config.n_routed_experts,
        Keys.LLM.EXPERT_SHARED_COUNT: config.n_shared_experts,
        Keys.LLM.EXPERT_WEIGHTS_SCALE: float(config.routed_scaling_factor),
        Keys.LLM.EXPERT_WEIGHTS_NORM: bool(getattr(config, "norm_topk_prob", False)),
        Keys.LLM.EXPERT_GATING_FUNC: int(ExpertGatingFuncType.SIGMOID if is_v3 else ExpertGatingFuncType.SOFTMAX),
        Keys.LLM.EXPERT_GROUP_COUNT: config.n_group or 1,
        Keys.LLM.EXPERT_GROUP_USED_COUNT: config.topk_group or 1,
    }


_FURTHER: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "mixtral": _experts,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def gguf_tensors(model: Any, architecture: str) -> Tensors:
    """The tensors of a model under llama.cpp's names and in its layouts."""
    import gguf

    config = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for parameter, value in state.items():
        array = value.float().numpy()
        if config.model_type.startswith("gemma") and parameter.endswith("norm.weight"):
            array = array + 1
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", parameter):
            yield from _expert_tensors(config, match, array)
        elif match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight", parameter):
            yield from _latent_tensors(config, match[1], array)
        else:
            stem, _, suffix = parameter.rpartition(".")
            if suffix == "e_score_correction_bias":
                stem, suffix = f"{stem}.e_score_correction", "bias"
            if suffix == "sinks":
                stem, suffix = parameter, "weight"
            if config.model_type in _PERMUTED and (part := stem.rpartition(".")[2]) in ("q_proj", "k_proj"):
                heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
                array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            stored = names.get_name(stem)
            assert stored is not None, parameter
            yield f"{stored}.{suffix}", array.squeeze()


def _expert_tensors(config: Any, match: re.Match[str], array: np.ndarray) -> Tensors:
    layer, part, is_bias = match.groups()
    suffix = "bias" if is_bias else "weight"
    if config.model_type == "gpt_oss" and not is_bias:
        array = array.swapaxes(1, 2)
    if part == "down":
        yield f"blk.{layer}.ffn_down_exps.{suffix}", array
        return
    half = array.shape[1] // 2
    gate, up = (array[:, :half], array[:, half:])
    if config.model_type == "gpt_oss":
        gate, up = array[:, 0::2], array[:, 1::2]
    yield f"blk.{layer}.ffn_gate_exps.{suffix}", gate
    yield f"blk.{layer}.ffn_up_exps.{suffix}", up


def _latent_tensors(config: Any, layer: str, array: np.ndarray) -> Tensors:
    heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    yield f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", values


def _add_tokenizer(writer: Any, folder: Path) -> None:
    whole = transformers.AutoTokenizer.from_pretrained(folder)
    model = json.loads(whole.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = whole.convert_ids_to_tokens(range(len(whole)))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in whole.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(whole.bos_token_id)
    writer.add_eos_token_id(whole.eos_token_id)
    writer.add_chat_template(whole.chat_template)
