"""Random language models of a few thousand parameters, and their tokenizers, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import Checkpoint
from npu_sim.llm.checkpoint import Widened
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
