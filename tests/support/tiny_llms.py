"""Random language models of a few thousand parameters, and their tokenizers, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import Checkpoint, load_checkpoint
from npu_sim.llm.checkpoint import Widened
from npu_sim.llm.gguf_file import _LAYER_NAMES, _ROOT_NAMES
from npu_sim.llm.tokenizer import StoredTokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

VOCAB = 160

TEMPLATE = """
{%- if messages[0]["role"] == "system" -%}<|im|>{{ messages[0]["content"] | trim }}{% endif %}
    {% for message in messages %}
{{ bos_token }}{{ message.role }}
{{ {"text": message["content"], "ß": [1, none]} | tojson(indent=1) }}{{ eos_token }}
        {% if loop.index == 3 %}{% break %}{% endif %}
    {% endfor %}
{% if tools is not none %}tools{% endif %}
{% if add_generation_prompt %}{{ "<|im|>assistant\\n" }}{% endif %}
{% if messages[-1].content == "refuse" %}{{ raise_exception("no") }}{% endif %}
"""


def tiny_config(family: str, **changes: Any) -> Any:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": family == "qwen2",
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    extra = {"head_dim": 32} if family == "qwen3" else {}
    return transformers.AutoConfig.for_model(family, **{**sizes, **extra, **changes})


def save_tiny(folder: Path, family: str, dtype: str, **changes: Any) -> Path:
    """A random model of that family as a Hugging Face folder."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder)
    return folder


def save_letters(folder: Path, length: int) -> Any:
    """A random Qwen2 whose tokens are the letters a to z and that never ends by itself, as a Hugging Face folder.

    Args:
        length: Maximum context length.

    Returns:
        The letters as a tokenizer, which is not saved: it lacks what divides a text.
    """
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=26,
        max_position_embeddings=length,
        initializer_range=0.3,
        eos_token_id=None,
        dtype="bfloat16",
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    vocabulary = {chr(ord("a") + letter): letter for letter in range(26)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in PyTorch, those in few bits dequantized."""
    return {key: numpy_to_tensor(array) for key, array in Widened(checkpoint.state, "float32").items()}


def save_tokenizer(folder: Path, template: str) -> None:
    """A byte-level tokenizer of 300 tokens, saved as a Hugging Face folder has it."""
    from tokenizers import ByteLevelBPETokenizer

    byte_level = ByteLevelBPETokenizer()
    byte_level.train_from_iterator(["the cat sat on the mat", "naïve 🎉 日本", "Hello, world!"] * 9, vocab_size=300)
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level._tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|im|>"]
    )
    whole.chat_template = template
    whole.save_pretrained(folder)


def assert_same_tokens(ours: Any, whole: Any) -> None:
    """A tokenizer read without transformers encodes and decodes, also a part of the ids, as the one of transformers."""
    assert isinstance(ours, StoredTokenizer) and ours.eos_token_id == whole.eos_token_id
    for text in ("the cat", "  naïve 🎉\n日本 <|im|> x</s>", "", "a ,b 's n't 12345"):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == whole.encode(text, add_special_tokens=special)
            options = {"skip_special_tokens": special, "clean_up_tokenization_spaces": False}
            for end in range(len(ids) + 1):
                assert ours.decode(ids[:end], **options) == whole.decode(ids[:end], **options)


def save_gguf(folder: Path, path: Path, encoding: str = "F32", **metadata: Any) -> Path:
    """A Hugging Face folder of `save_tiny` and `save_tokenizer` as a GGUF file, as llama.cpp converts it.

    Args:
        encoding: The ggml type of the matrices; vectors are in float32.
        metadata: Values that are added to those of the architecture or replace them, with `__` for the dots in a key.
    """
    import gguf

    checkpoint = load_checkpoint(folder, "float32")
    config = checkpoint.config.whole
    writer = gguf.GGUFWriter(path, config.model_type)
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.hidden_size // config.num_attention_heads,
    }
    for key, number in {**numbers, **{name.replace("__", "."): value for name, value in metadata.items()}}.items():
        name = f"{config.model_type}.{key}"
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}.get(
            type(number), writer.add_array
        )(name, number)
    writer.add_float32(f"{config.model_type}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    _add_tokenizer(writer, folder)
    theirs = {hugging_face: ours for ours, hugging_face in {**_ROOT_NAMES, **_LAYER_NAMES}.items()}
    for name, tensor in tensors(checkpoint).items():
        stem, _, suffix = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        part = stem if layer is None else stem.split(".", 3)[3]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        array = tensor.float().numpy()
        if config.model_type == "llama" and heads is not None:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType[encoding if array.ndim > 1 else "F32"]
        prefix = "" if layer is None else f"blk.{layer}."
        stored = gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(f"{prefix}{theirs[part]}.{suffix}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
