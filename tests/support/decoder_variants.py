"""Unusual checkpoints of supported decoders, compared with what transformers generates from them.

    python tests/support/decoder_variants.py [--compiled] [WORD ...]

Configs that change what is computed, generation configs, files, quantized folders, GGUF files and adapters. Words
choose the variants whose names contain one. The outcomes are those of `decoders.py`; where transformers opens no such
folder, or invents weights that it lacks, it must be refused. Config changes are tried by both routes, anything else by
one of them in turn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import decoders
import numpy as np
import torch
import transformers
from decoder_answers import NEAR_TIE, NEW, PROMPT, VOCAB, Outcome, Route, generated, prompts, served
from decoders import CONTEXT, WINDOW, attempt
from gguf_files import save_gguf
from quantized_folders import (
    Compress,
    Tensors,
    awq,
    block_fp8,
    dequantized_awq,
    dequantized_fp8,
    dequantized_gptq,
    gptq,
    quantize_folder,
    write_config,
)
from safetensors.torch import load_file, save_file
from tiny_llms import TEMPLATE, save_tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FULL, SLIDING, THETA = "full_attention", "sliding_attention", {"rope_theta": 10000.0}
GGUF_VOCAB = 304  # of `save_tokenizer`, with its special tokens


@dataclass(frozen=True)
class Saved:
    """A variant on disk.

    Attributes:
        opened: The folder or file that we open.
        same: The folder from which transformers generates the same tokens; None: nothing can be generated from it.
    """

    opened: Path
    same: Path | None


Save = Callable[[Path], Saved]


def save_model(folder: Path, family: str, dtype: str = "float32", **fields: Any) -> Path:
    """A random model of a family as a folder, with a window that holds everything where `fields` say no other."""
    tiny = decoders.tiny_config(family, dict.fromkeys(decoders._WINDOWS, CONTEXT)).to_dict()
    config = CONFIG_MAPPING[family].from_dict({**tiny, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    decoders.randomize(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def rewrite(folder: Path, file: str = "config.json", **fields: Any) -> Path:
    """Change fields of a JSON file in a folder; those given as `...` are removed."""
    path = folder / file
    whole = {**(json.loads(path.read_text()) if path.is_file() else {}), **fields}
    path.write_text(json.dumps({name: value for name, value in whole.items() if value is not ...}))
    return folder


def retensor(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Replace a folder's tensors by those that `change` returns, or by its argument after changes in place."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({name: x.clone() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _config(place: Path, family: str, fields: Mapping[str, Any]) -> Saved:
    folder = save_model(place / "model", family, **fields)
    return Saved(folder, folder)


def _stored(place: Path, family: str, fields: Mapping[str, Any], file: str) -> Saved:
    folder = rewrite(save_model(place / "model", family), file, **fields)
    return Saved(folder, folder)


def _files(place: Path, change: Callable[[Path], Any], family: str = "llama", **fields: Any) -> Saved:
    folder = save_model(place / "model", family, **fields)
    change(folder)
    return Saved(folder, folder)


def _tensors(place: Path, change: Callable[[Tensors], Any], family: str = "llama", **fields: Any) -> Saved:
    return _files(place, lambda folder: retensor(folder, change), family, **fields)


def _quantized(
    place: Path, config: Mapping[str, Any], compress: Compress, dense: Callable[[Tensors], torch.Tensor] | None
) -> Saved:
    """A quantized folder, and beside it the one with the weights that the quantizer's library computes."""
    folder, same = place / "model", place / "same"
    for target in (folder, same):
        save_model(target, "llama", "bfloat16", intermediate_size=128)
    stored = quantize_folder(folder, config, compress)
    if dense is None:
        return Saved(folder, None)
    modules: dict[str, Tensors] = {}
    for name, value in stored.items():
        module, _, part = name.rpartition(".")
        if "_proj" in module:
            modules.setdefault(module, {})[part] = value
    weights = {f"{module}.weight": dense(parts).float().contiguous() for module, parts in modules.items()}
    retensor(same, lambda tensors: {name: weights.get(name, x) for name, x in tensors.items()})
    return Saved(folder, same)


def _gguf(
    place: Path,
    family: str,
    metadata: Mapping[str, Any],
    fields: Mapping[str, Any] | None,
    encoding: str = "F32",
    built: Mapping[str, Any] | None = None,
) -> Saved:
    """A GGUF file with other metadata, and the folder whose config has the `fields` that say the same.

    Args:
        fields: None: the file must be refused.
        built: Fields of the config with which the file is written.
    """
    folder = save_model(place / "same", family, vocab_size=GGUF_VOCAB, **(built or {}))
    save_tokenizer(folder, TEMPLATE)
    eos = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    rewrite(folder, "generation_config.json", eos_token_id=eos)
    path = save_gguf(folder, place / "model.gguf", encoding, **metadata)
    if encoding != "F32":
        import gguf

        kind = gguf.GGMLQuantizationType[encoding]

        def rounded(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), kind), kind)) if x.ndim > 1 else x

        retensor(folder, lambda tensors: {name: rounded(x) for name, x in tensors.items()})
    return Saved(path, None if fields is None else rewrite(folder, **fields))


def _sharded(place: Path, change: Callable[[Path], Any] = lambda folder: None, size: str = "60KB") -> Saved:
    folder = save_model(place / "model", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=size)
    assert len(list(folder.glob("*.safetensors"))) > 2
    change(folder)
    return Saved(folder, folder)


def _without_index(place: Path) -> Saved:
    """All files of a folder are read without an index too, which transformers asks for."""
    saved = _sharded(place)
    shutil.copytree(saved.opened, place / "other")
    (place / "other" / "model.safetensors.index.json").unlink()
    return Saved(place / "other", saved.opened)


def _without_last_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def _bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


def replaced(end: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], Tensors]:
    """Return a change of tensors whose names have this end; None removes them."""

    def change(tensors: Tensors) -> Tensors:
        changed = {name: make(x) if name.endswith(end) else x for name, x in tensors.items()}
        return {name: x for name, x in changed.items() if x is not None}

    return change


def added(**tensors: Any) -> Callable[[Tensors], Tensors]:
    return lambda whole: {**whole, **{name.replace("__", "."): x for name, x in tensors.items()}}


def _yarn(**fields: Any) -> dict[str, Any]:
    known = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
    return {"rope_parameters": {**known, **fields}}


# What configs can say: family, and the fields of it. Windows hold everything but where a variant says otherwise.
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32}),
    ("llama", {"head_dim": 8, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 60, "head_dim": 10}),
    ("llama", {"vocab_size": 163, "intermediate_size": 97}),
    ("llama", {"num_hidden_layers": 5, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}),
    ("llama", {"rms_norm_eps": 0.5, "pretraining_tp": 2}),
    ("llama", {"max_position_embeddings": 32}),
    *(("llama", {"hidden_act": name}) for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "tanh")),
    *(("llama", {"hidden_act": name}) for name in ("quick_gelu", "mish", "sigmoid", "leaky_relu")),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                **THETA,
            }
        },
    ),
    *(
        ("llama", _yarn(**fields))
        for fields in (
            {},
            {"attention_factor": 1.7},
            {"beta_fast": 8.0, "beta_slow": 2.0},
            {"mscale": 0.7, "mscale_all_dim": 1.3},
            {"truncate": False, "partial_rotary_factor": 0.5},
        )
    ),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
                **THETA,
            }
        },
    ),
    ("llama", {"return_dict": False}),
    ("llama", {"use_cache": False, "attention_dropout": 0.5}),
    ("mistral", {"sliding_window": WINDOW}),
    ("mistral", {"sliding_window": None, "head_dim": 24}),
    ("ministral", {"layer_types": [FULL, SLIDING]}),
    ("ministral3", {"rope_parameters": {**_yarn()["rope_parameters"], "llama_4_scaling_beta": 0.6}}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": CONTEXT, "max_window_layers": 1, "layer_types": None}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": WINDOW, "layer_types": None}),
    ("qwen2", {**_yarn(), "num_key_value_heads": 1}),
    ("qwen3", {"attention_bias": True, "head_dim": 40}),
    ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, **THETA}}),
    ("gemma", {"head_dim": 32, "num_key_value_heads": 1, "attention_bias": True}),
    ("gemma", {"hidden_act": "gelu", "tie_word_embeddings": False}),
    ("gemma", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
    ("gemma3_text", {"attn_logit_softcapping": 1.0}),
    ("gemma3_text", {"query_pre_attn_scalar": 4}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ),
    ("cohere", {"logit_scale": 3.0, "use_qk_norm": True}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    ("cohere2", {"logit_scale": 0.5, "layer_types": [FULL, SLIDING]}),
    ("cohere2", {"sliding_window": WINDOW}),
    (
        "granite",
        {
            "embedding_multiplier": 7.0,
            "logits_scaling": 0.3,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.05,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    ("granite", {"tie_word_embeddings": True, "logits_scaling": 13.0}),
    ("hyperclovax", {"use_post_norm": False, "attention_multiplier": 0.6, "logits_scaling": 3.0}),
    ("phi", {"qk_layernorm": True}),
    ("phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, **THETA}}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}}),
    (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "partial_rotary_factor": 1.0,
                **THETA,
            },
        },
    ),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", {"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"n_inner": 72, "activation_function": "relu", "tie_word_embeddings": False}),
    ("gpt2", {"add_cross_attention": True}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("olmo", {"clip_qkv": 0.3}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    ("olmo3", {"layer_types": [FULL, FULL], "sliding_window": WINDOW}),
    ("persimmon", {"qk_layernorm": False}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    ("glm", {"attention_bias": False, "tie_word_embeddings": True}),
    ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, **THETA}}),
    ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    ("internlm3", {"rope_parameters": {"rope_type": "dynamic", "factor": 6.0, **THETA}}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, **THETA}}),
    ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True}),
    ("apertus", {"attention_bias": True, "hidden_act": "xielu"}),
    ("nanochat", {"final_logit_softcapping": 0.5, "attention_bias": True}),
    ("nanochat", {"final_logit_softcapping": None}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    ("jais2", {"attention_bias": False, "mlp_bias": False}),
    ("arcee", {"mlp_bias": True, "head_dim": 8}),
    ("helium", {"attention_bias": True, "head_dim": 32}),
]

# What a file beside the weights says, in fields that transformers itself no longer writes.
STORED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "config.json", {"rope_parameters": ..., "rope_theta": 300.0, "rope_scaling": None}),
    (
        "llama",
        "config.json",
        {"rope_parameters": ..., "rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    ("llama", "config.json", {"rope_parameters": ..., "rope_scaling": {"type": "su", "factor": 4.0}}),
    ("llama", "config.json", {"rope_parameters": ..., "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("llama", "config.json", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
    ("llama", "config.json", {"rope_parameters": {"rope_type": "linear", "factor": "4", "rope_theta": 1e4}}),
    ("llama", "config.json", {"rope_parameters": {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}}),
    ("llama", "config.json", {"rope_parameters": {"rope_type": "linear", "factor": 0.5, "rope_theta": 1e4}}),
    ("llama", "config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}),
    ("llama", "config.json", {"rope_parameters": "linear"}),
    ("llama", "config.json", {"rope_parameters": ["default"]}),
    ("llama", "config.json", {"rms_norm_eps": None}),
    ("llama", "config.json", {"rms_norm_eps": "small"}),
    ("llama", "config.json", {"output_attentions": True, "output_hidden_states": True}),
    ("llama", "config.json", {"hidden_act": "no_such"}),
    ("llama", "config.json", {"hidden_act": None}),
    ("llama", "config.json", {"hidden_act": ["silu"]}),
    ("llama", "config.json", {"tie_word_embeddings": "yes"}),
    ("llama", "config.json", {"num_attention_heads": 3}),
    ("llama", "config.json", {"num_key_value_heads": 3}),
    ("llama", "config.json", {"head_dim": 15}),
    ("llama", "config.json", {"intermediate_size": 95}),
    ("llama", "config.json", {"hidden_size": 32}),
    ("llama", "config.json", {"attention_bias": True}),
    ("llama", "config.json", {"num_hidden_layers": 1}),
    ("llama", "config.json", {"vocab_size": 150}),
    ("llama", "config.json", {"torchscript": True}),
    ("llama", "config.json", {"pruned_heads": {"0": [1]}}),
    ("llama", "config.json", {"is_decoder": True, "add_cross_attention": True}),
    ("llama", "config.json", {"is_encoder_decoder": True}),
    ("llama", "config.json", {"dtype": "float64"}),
    ("llama", "config.json", {"dtype": "int8"}),
    ("llama", "config.json", {"dtype": 3}),
    ("llama", "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}),
    ("llama", "config.json", {"_attn_implementation": "eager"}),
    ("llama", "config.json", {"architectures": ["LlamaForQuestionAnswering"]}),
    ("llama", "config.json", {"architectures": None}),
    ("llama", "config.json", {"pad_token_id": 10**6}),
    ("llama", "config.json", {"pad_token_id": -1}),
    ("llama", "config.json", {"eos_token_id": "</s>"}),
    ("llama", "config.json", {"sliding_window": WINDOW}),
    ("llama", "config.json", {"logit_scale": 4.0, "final_logit_softcapping": 1.0}),
    ("llama", "config.json", {"to_dict": 1, "whole": 2, "_fields": {}}),
    ("llama", "config.json", {"quantization_config": None}),
    ("llama", "config.json", {"quantization_config": "gptq"}),
    ("qwen2", "config.json", {"layer_types": [SLIDING, "novel"]}),
    ("qwen2", "config.json", {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW, "use_sliding_window": True}),
    ("qwen2", "config.json", {"layer_types": [FULL], "use_sliding_window": False}),
    ("qwen3", "config.json", {"head_dim": None}),
    ("gemma", "config.json", {"hidden_activation": "relu", "hidden_act": "gelu"}),
    ("gemma3_text", "config.json", {"sliding_window_pattern": 1, "layer_types": ...}),
    ("gemma3_text", "config.json", {"rope_parameters": ..., "rope_local_base_freq": 77.0, "rope_theta": 5e5}),
    ("gpt_neox", "config.json", {"rope_parameters": ..., "rotary_pct": 0.5, "rotary_emb_base": 500}),
    ("gpt2", "config.json", {"attn_pdrop": 1.0, "resid_pdrop": 0.9}),
    ("phi", "config.json", {"rope_parameters": ..., "partial_rotary_factor": 0.25, "rope_theta": 2e4}),
    ("smollm3", "config.json", {"no_rope_layers": ..., "no_rope_layer_interval": 2}),
    ("cohere", "config.json", {"logit_scale": None}),
    ("granite", "config.json", {"logits_scaling": 0.0}),
    ("olmo", "config.json", {"clip_qkv": 0.0}),
    *(
        ("llama", "generation_config.json", fields)
        for fields in (
            {"repetition_penalty": 1.7},
            {"repetition_penalty": 0.6, "do_sample": True, "temperature": 0.5},
            {"eos_token_id": [7, 31, 90]},
            {"eos_token_id": 10**7},
            {"eos_token_id": {"a": 1}},
            {"no_repeat_ngram_size": 2},
            {"num_beams": 3},
            {"min_new_tokens": 9, "eos_token_id": 7},
            {"suppress_tokens": [9, 12]},
            {"begin_suppress_tokens": [9, 12]},
            {"sequence_bias": [[[5], 9.0]]},
            {"forced_bos_token_id": 6},
            {"renormalize_logits": True, "remove_invalid_values": True},
            {"cache_implementation": "static", "use_cache": False},
            {"max_length": 8, "max_new_tokens": 2},
            {"num_return_sequences": 2, "return_dict_in_generate": True},
            {"prompt_lookup_num_tokens": 3},
            {"top_k": 1, "top_p": 0.1, "min_p": 0.3, "typical_p": 0.2, "do_sample": True},
            {"novel_processor": 4},
            {"encoder_repetition_penalty": 1.5},
            {"stop_strings": ["a"]},
            {"watermarking_config": {"bias": 2.5, "greenlist_ratio": 0.25}},
        )
    ),
]

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def _scaled_without_config(folder: Path) -> None:
    """Store float8 weights and scales as NVIDIA's ModelOpt does, without a word in config.json."""
    retensor(folder, lambda tensors: {**_float8(tensors), **_scales(tensors)})
    rewrite(folder, "hf_quant_config.json", quantization={"quant_algo": "FP8"})


def _float8(tensors: Tensors) -> Tensors:
    return {name: x.to(torch.float8_e4m3fn) if "_proj" in name else x for name, x in tensors.items()}


def _scales(tensors: Tensors) -> Tensors:
    return {f"{name}_scale": torch.tensor(0.5) for name in tensors if "_proj" in name}


def _bitsandbytes(tensors: Tensors) -> Tensors:
    """Return tensors as bitsandbytes stores four bits: a column of bytes and statistics."""
    made: Tensors = {}
    for name, x in tensors.items():
        packed = "_proj" in name
        made[name] = torch.zeros(x.numel() // 2, 1, dtype=torch.uint8) if packed else x
        if packed:
            made[f"{name}.absmax"] = torch.ones(x.numel() // 64)
            made[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)
    return made


def _end_in_config(folder: Path) -> None:
    """Move the end tokens to config.json and remove the generation config, as in old checkpoints."""
    rewrite(folder, eos_token_id=[7, 31])
    (folder / "generation_config.json").unlink()


def _needless(place: Path, **fields: Any) -> Saved:
    """A config with fields that we have no use for, and for which transformers refuses the folder."""
    saved = _config(place, "llama", {})
    shutil.copytree(saved.opened, place / "other")
    return Saved(rewrite(place / "other", **fields), saved.opened)


def _base_model(folder: Path) -> None:
    """The names that `LlamaModel.save_pretrained` writes, which lack the prefix."""
    retensor(folder, renamed("model.", ""))


def _adapter(folder: Path) -> None:
    rewrite(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path="org/base")
    weights = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)}
    save_file(weights, folder / "adapter_model.safetensors")


def _only_adapter(folder: Path) -> None:
    _adapter(folder)
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / name).unlink()


_LAYER = "model__layers__0__self_attn"
_HEAD = {"lm_head__weight": torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(1))}
FILES: dict[str, Save] = {
    "bfloat16": lambda place: _config_in(place, "bfloat16"),
    "float16": lambda place: _config_in(place, "float16"),
    "float64": partial(_tensors, change=lambda tensors: {name: x.double() for name, x in tensors.items()}),
    "norms in float32 beside bfloat16": partial(_tensors, change=replaced("norm.weight", lambda x: x.bfloat16())),
    "shards": _sharded,
    "shards without an index": _without_index,
    "a shard is missing": partial(_sharded, change=_without_last_shard),
    "only pytorch_model.bin": partial(_files, change=_bin),
    "tied beside another head": partial(_tensors, change=added(**_HEAD), tie_word_embeddings=True),
    "untied without a head": partial(_tensors, change=replaced("lm_head.weight", lambda x: None)),
    "a layer's matrix is missing": partial(_tensors, change=replaced("1.self_attn.q_proj.weight", lambda x: None)),
    "a norm is missing": partial(_tensors, change=replaced("model.norm.weight", lambda x: None)),
    "no embeddings": partial(_tensors, change=replaced("embed_tokens.weight", lambda x: None)),
    "a matrix is transposed": partial(_tensors, change=replaced("0.mlp.up_proj.weight", lambda x: x.T.contiguous())),
    "a norm is short": partial(_tensors, change=replaced("model.norm.weight", lambda x: x[:-1])),
    "a norm has two dimensions": partial(_tensors, change=replaced("model.norm.weight", lambda x: x[None])),
    "a norm is a scalar": partial(_tensors, change=replaced("model.norm.weight", lambda x: x[0])),
    "a matrix of integers": partial(_tensors, change=replaced("0.mlp.up_proj.weight", lambda x: x.int())),
    "a matrix of bools": partial(_tensors, change=replaced("0.mlp.up_proj.weight", lambda x: x > 0)),
    "a matrix of complex numbers": partial(_tensors, change=replaced("0.mlp.up_proj.weight", lambda x: x + 0j)),
    "a weight is not finite": partial(_tensors, change=replaced("0.mlp.up_proj.weight", lambda x: x * torch.nan)),
    "a bias that the config denies": partial(
        _tensors, change=added(model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    ),
    "a tensor that nothing uses": partial(_tensors, change=added(model__novel__weight=torch.ones(3))),
    "rotary frequencies": partial(
        _tensors, change=added(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    ),
    "names without a prefix": partial(_files, change=_base_model),
    "names without a prefix, tied": partial(_files, change=_base_model, tie_word_embeddings=True),
    "names of torch.compile": partial(_tensors, change=lambda t: {f"_orig_mod.{name}": x for name, x in t.items()}),
    "gpt2 without a prefix": partial(_tensors, change=renamed("transformer.", ""), family="gpt2"),
    "gpt2 with masks": partial(
        _tensors, change=added(transformer__h__0__attn__bias=torch.ones(1, 1, 9, 9)), family="gpt2"
    ),
    "eos ids without a generation config": partial(_files, change=_end_in_config),
    "attention by another library": partial(_needless, attn_implementation="flash_attention_2"),
    "an empty quantization_config": partial(_needless, quantization_config={}),
    "an adapter beside the model": partial(_files, change=_adapter),
    "an adapter alone": partial(_files, change=_only_adapter),
    "gptq": lambda place: _quantized(
        place, GPTQ, gptq(4, 32, symmetric=True), partial(dequantized_gptq, bits=4, version=1)
    ),
    "gptq of 8 bits": lambda place: _quantized(
        place, {**GPTQ, "bits": 8}, gptq(8, 32, symmetric=False), partial(dequantized_gptq, bits=8, version=1)
    ),
    "gptq without a method": lambda place: _quantized(
        place, {**GPTQ, "quant_method": None}, gptq(4, 32, symmetric=True), None
    ),
    "awq": lambda place: _quantized(place, AWQ, awq(32), partial(dequantized_awq, group=32)),
    "fp8": lambda place: _quantized(place, FP8, block_fp8((32, 32)), partial(dequantized_fp8, block=(32, 32))),
    "fp8 without a config": lambda place: _without_quantization(place, FP8, block_fp8((32, 32))),
    "gptq without a config": lambda place: _without_quantization(place, GPTQ, gptq(4, 32, symmetric=True)),
    "float8 and scales without a config": partial(_files, change=_scaled_without_config),
    "float8 without scales": partial(_tensors, change=_float8),
    "bitsandbytes without a config": partial(_tensors, change=_bitsandbytes),
    **{
        f"quantized by {method}": lambda place, method=method: _labelled(place, method)
        for method in ("bitsandbytes", "hqq", "aqlm", "eetq", "quanto", "mxfp4", "torchao", "exl2", "vptq", "bitnet", 7)
    },
}

SCALING = "rope__scaling__"
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}}
# Metadata of GGUF files and the fields of a config that say the same; None: such a file must be refused.
METADATA: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, {}),
    ({"rope__freq_base": 300.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    ({f"{SCALING}factor": 4.0}, LINEAR),
    ({"rope__scale_linear": 4.0}, LINEAR),
    ({f"{SCALING}type": "linear", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 32}, LINEAR),
    ({f"{SCALING}type": "none", f"{SCALING}factor": 4.0}, {}),
    ({"context_length": 96}, {"max_position_embeddings": 96}),
    ({f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 32}, YARN),
    ({f"{SCALING}type": "longrope"}, None),
    ({f"{SCALING}attn_factor": 1.5}, None),
    ({f"{SCALING}yarn_log_multiplier": 0.1}, None),
    ({"rope__dimension_count": 8}, None),
    ({"rope__dimension_sections": [4, 4, 4, 4]}, None),
    ({"rope__freq_base_swa": 100.0}, None),
    ({"attention__sliding_window": WINDOW}, None),
    ({"attention__clamp_kqv": 0.3}, None),
    ({"attention__scale": 0.3}, None),
    ({"attention__max_alibi_bias": 8.0}, None),
    ({"attention__causal": False}, None),
    ({"attention__value_length": 8}, None),
    ({"attention__head_count_kv": [2, 2]}, None),
    ({"attention__layer_norm_epsilon": 0.1}, None),
    ({"attn_logit_softcapping": 3.0}, None),
    ({"final_logit_softcapping": 3.0}, None),
    ({"logit_scale": 3.0}, None),
    ({"embedding_scale": 3.0}, None),
    ({"residual_scale": 3.0}, None),
    ({"use_parallel_residual": True}, None),
    ({"expert_count": 4}, None),
    ({"block_count": 1}, None),
    ({"block_count": 9}, None),
    ({"attention__head_count": 8}, None),
    ({"vocab_size": 9}, None),
    ({"tensor_data_layout": "novel"}, None),
    ({"novel": "x"}, None),
]
# Fields of the config from which a GGUF file is written.
BUILT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.3}),
    ("llama", {"attention_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 4}),
]


def _config_in(place: Path, dtype: str) -> Saved:
    folder = save_model(place / "model", "llama", dtype)
    return Saved(folder, folder)


def _without_quantization(place: Path, config: Mapping[str, Any], compress: Compress) -> Saved:
    saved = _quantized(place, config, compress, None)
    rewrite(saved.opened, quantization_config=...)
    return saved


def _labelled(place: Path, method: Any) -> Saved:
    """A dense folder whose config says that it is quantized."""
    folder = save_model(place / "model", "llama")
    write_config(folder, {"quant_method": method, "bits": 4, "load_in_4bit": True})
    return Saved(folder, None)


def _said(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'left out' if value is ... else value}" for name, value in fields.items())


def variants() -> dict[str, Save]:
    """All variants by name."""
    saves: dict[str, Save] = {}
    for family, fields in CONFIGS:
        saves[f"config: {family} with {_said(fields)}"] = partial(_config, family=family, fields=fields)
    for family, file, fields in STORED:
        save = partial(_stored, family=family, fields=fields, file=file)
        saves[f"stored: {family}, {file} with {_said(fields)}"] = save
    saves.update({f"file: {name}": save for name, save in FILES.items()})
    for index, (metadata, same) in enumerate(METADATA):
        family = ("llama", "qwen2", "qwen3")[index % 3]
        saves[f"gguf: {family} with {_said(metadata)}"] = partial(_gguf, family=family, metadata=metadata, fields=same)
    for family, built in BUILT:
        save = partial(_gguf, family=family, metadata={}, fields={}, built=built)
        saves[f"gguf: {family} from a config with {_said(built)}"] = save
    for family, encoding in (("llama", "F16"), ("qwen2", "BF16"), ("qwen3", "Q8_0"), ("llama", "Q8_0")):
        save = partial(_gguf, family=family, metadata={}, fields={}, encoding=encoding)
        saves[f"gguf: {family} in {encoding}"] = save
    return saves


def continued(folder: Path | None) -> list[tuple[list[int], list[float]]] | None:
    """Return tokens and margins for each prompt, by transformers' `generate`, which reads the generation config.

    None where it opens no such folder, or where it makes up weights that the files lack.
    """
    if folder is None:
        return None
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        model.config.return_dict = True  # its own `generate` fails without
        if report["missing_keys"] or report["mismatched_keys"]:
            return None
        return [_generate(model.eval(), prompt) for prompt in prompts()]
    except Exception:
        return None


def _generate(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    ids = torch.tensor([prompt])
    fixed = {"max_new_tokens": NEW, "do_sample": False, "use_cache": False, "cache_implementation": None}
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **fixed,
        num_return_sequences=1,
        prompt_lookup_num_tokens=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    gaps = [float(best[0] - best[1]) for best in (scores[0].topk(2).values for scores in answer.scores)]
    if not all(scores[0].isfinite().any() and not scores[0].isnan().any() for scores in answer.scores):
        raise ValueError("no numbers")
    tokens = answer.sequences[0, len(prompt) :].tolist()
    stops = model.generation_config.eos_token_id
    if tokens and tokens[-1] in (stops if isinstance(stops, list) else [stops]):
        del tokens[-1]
    return tokens, gaps


def compared(ours: list[int], expected: list[int], gaps: list[float]) -> Outcome:
    """Compare tokens with those of transformers; `gaps` are the margins of each over the second greatest logit."""
    for place, (mine, theirs, gap) in enumerate(zip(ours, expected, gaps, strict=False)):
        if mine != theirs:
            if gap < NEAR_TIE:
                return Outcome("right", f"a near-tie at token {place}")
            return Outcome("wrong", f"token {place} is {mine}, not {theirs} (gap {gap:.3g})")
    if len(ours) != len(expected):
        return Outcome("wrong", f"{len(ours)} tokens instead of {len(expected)}")
    return Outcome("right")


def compiled(route: Route, folder: Path, expected: list[tuple[list[int], list[float]]]) -> Outcome:
    """The outcome of programs that are compiled for a folder."""
    each = [
        compared(answer.tokens, *theirs) for answer, theirs in zip(route(folder, "float32"), expected, strict=False)
    ]
    return next((outcome for outcome in each if outcome.kind != "right"), each[0])


def computed(folder: Path, expected: list[tuple[list[int], list[float]]]) -> Outcome:
    """The outcome of the modules that we trace, run by PyTorch with the weights that the programs are given."""
    from npu_runtime.packing import to_numpy
    from npu_runtime.torch_arrays import numpy_to_tensor
    from npu_sim.llm import cache_capacity, greedy, load_checkpoint
    from npu_sim.llm.attention import attend_to_rows
    from npu_sim.llm.checkpoint import Widened, as_input_error
    from npu_sim.llm.generation_config import check_generation
    from npu_sim.llm.graph import kv_shapes, meta_model, state_form, state_with_buffers
    from npu_sim.llm.modules import CachedCausalLM
    from npu_sim.llm.sampling import penalized

    checkpoint = load_checkpoint(folder, "float32")
    check_generation(checkpoint)
    length = cache_capacity(checkpoint, PROMPT + NEW)
    state = Widened(state_with_buffers(checkpoint), "float32")
    causal = meta_model(checkpoint, attend_to_rows).to_empty(device="cpu")
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        held = causal.get_submodule(owner)
        tensor = numpy_to_tensor(to_numpy(value).astype(np.float32))
        if leaf in held._buffers:
            held._buffers[leaf] = tensor.to(held._buffers[leaf].dtype)
        else:
            held._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    model = CachedCausalLM(causal, state_form(checkpoint))
    for prompt, (tokens, gaps) in zip(prompts(), expected, strict=True):
        cache = [torch.zeros(shape) for layer in kv_shapes(checkpoint, length) for shape in layer]
        seen, ours = list(prompt), list[int]()
        given = torch.tensor([prompt])
        while len(ours) < NEW:
            positions = torch.arange(len(seen) - given.shape[1], len(seen))
            last = torch.tensor([given.shape[1] - 1]) if given.shape[1] > 1 else None
            with torch.no_grad(), as_input_error("its module fails"):  # as where it is traced
                logits, *updated = model(given, positions, last, cache[::2], cache[1::2])
            cache = list(updated)
            token = greedy(penalized(logits.flatten().numpy(), seen, checkpoint.repetition_penalty))
            if token in checkpoint.eos_ids:
                break
            ours.append(token)
            seen.append(token)
            given = torch.tensor([[token]])
        outcome = compared(ours, tokens, gaps)
        if outcome.kind != "right":
            break
    return outcome


ROUTES = {"eager": computed, "generate": partial(compiled, generated), "serve": partial(compiled, served)}


def tried(save: Save, routes: Iterable[str] = ("eager",)) -> dict[str, Outcome]:
    """The outcomes of a variant by route; by `open` alone where it is refused."""
    with tempfile.TemporaryDirectory() as place:
        try:
            saved = save(Path(place))
        except Exception as error:
            return {"save": Outcome("unsaved", f"{type(error).__name__}: {str(error)[:200]}")}
        opening = attempt(lambda: decoders.opened(saved.opened))
        if opening.kind != "right":
            return {"open": opening}
        expected = continued(saved.same)
        nothing: list[tuple[list[int], list[float]]] = [([], [])] * 2
        return {name: attempt(partial(ROUTES[name], saved.opened, expected or nothing)) for name in routes}


def main(words: Iterable[str], routes: Iterable[str]) -> int:
    counts: Counter[str] = Counter()
    chosen = {name: save for name, save in variants().items() if not words or any(word in name for word in words)}
    tried(partial(_config, family="llama", fields={}))  # imports what the processes below then have
    for name, save in chosen.items():
        outcomes, seconds = decoders.isolated(partial(tried, save, routes))
        for route, outcome in outcomes.items():
            counts[outcome.kind] += 1
            print(f"{outcome.kind:8} {route:9} {seconds:5.1f}s {name}: {outcome.detail}", flush=True)
    print(f"{len(chosen)} variants: {dict(counts)}")
    return 1 if set(counts) - {"right", "refused"} else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # many small products
    sys.exit(main(given.words, tuple(ROUTES) if given.compiled else ("eager",)))
