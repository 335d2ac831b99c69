"""Random embedding models and cross-encoders of a few thousand parameters, as folders, and what they compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

WORDS = "the a cat dog sat ran on under mat tree hello world what is capital of france paris berlin and".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
TEXTS = ["the cat", "a dog ran under the tree and sat on the mat", "paris", "what is the capital of france " * 6]


def encoder_config(kind: str, **changes: Any) -> Any:
    """A tiny config of a model type of transformers."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": 66,
        "initializer_range": 0.4,
        "pad_token_id": 0,
    }
    special = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    extra: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8} if kind == "qwen3" else {}
    if kind == "modernbert":
        extra = {"local_attention": 8, **dict.fromkeys(special, 3)}
    return transformers.AutoConfig.for_model(kind, **{**sizes, **extra, **changes})


def save_word_tokenizer(folder: Path, *, decoder: bool = False) -> None:
    """A tokenizer of whole words: [CLS] text [SEP] pair [SEP], or for a decoder text [SEP]."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    single, pair = ("$A [SEP]", "$A $B [SEP]") if decoder else ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "attention_mask"] if decoder else ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
        model_input_names=names,
    ).save_pretrained(folder)


def save_embedder(
    folder: Path,
    kind: str = "bert",
    pooling: Sequence[str] = ("pooling_mode_mean_tokens",),
    *,
    normalized: bool = True,
    dense: int | None = None,
    settings: dict[str, Any] | None = None,
    include_prompt: bool = True,
    **changes: Any,
) -> Path:
    """A random embedding model as sentence-transformers saves it.

    Args:
        settings: The content of config_sentence_transformers.json.
    """
    torch.manual_seed(3)
    transformers.AutoModel.from_config(encoder_config(kind, **changes)).save_pretrained(folder)
    save_word_tokenizer(folder, decoder=kind == "qwen3")
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalized else [])]
    modules = [
        {"idx": index, "name": str(index), "path": "" if index == 0 else f"{index}_{name}",
         "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    write = {"word_embedding_dimension": 32, **dict.fromkeys(pooling, True), "include_prompt": include_prompt}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(write))
    if dense:
        from safetensors.torch import save_file

        place = folder / "2_Dense"
        place.mkdir()
        config = {"in_features": 32 * len(pooling), "out_features": dense, "bias": True,
                  "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
        (place / "config.json").write_text(json.dumps(config))
        weights = {"linear.weight": torch.randn(dense, 32 * len(pooling)), "linear.bias": torch.randn(dense)}
        save_file(weights, place / "model.safetensors")
    if settings is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def save_cross_encoder(folder: Path, kind: str = "bert", activation: str | None = None, **changes: Any) -> Path:
    """A random cross-encoder; `activation` is a class of `torch.nn`, as sentence-transformers names it."""
    torch.manual_seed(5)
    config = encoder_config(kind, num_labels=1, **changes)
    if activation is not None:
        config.sentence_transformers = {"activation_fn": f"torch.nn.modules.activation.{activation}"}
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    save_word_tokenizer(folder, decoder=kind == "qwen3")
    return folder


@torch.no_grad()
def expected_states(folder: Path, text: str) -> torch.Tensor:
    """The last hidden states [tokens, width] of one text by itself, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]  # type: ignore[no-any-return]


def expected_embedding(folder: Path, text: str, pooling: str, *, normalized: bool = True) -> torch.Tensor:
    """The embedding of one text by sentence-transformers' formula."""
    states = expected_states(folder, text)
    places = torch.arange(1, len(states) + 1)[:, None]
    vector = {
        "pooling_mode_cls_token": lambda: states[0],
        "pooling_mode_lasttoken": lambda: states[-1],
        "pooling_mode_max_tokens": lambda: states.max(0).values,
        "pooling_mode_mean_tokens": lambda: states.mean(0),
        "pooling_mode_mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
        "pooling_mode_weightedmean_tokens": lambda: (states * places).sum(0) / places.sum(),
    }[pooling]()
    return F.normalize(vector, dim=-1) if normalized else vector


@torch.no_grad()
def expected_logits(folder: Path, query: str, documents: Sequence[str]) -> list[float]:
    """The logit of each pair by itself, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return [float(model(**tokenizer(query, text, return_tensors="pt")).logits[0, 0]) for text in documents]
