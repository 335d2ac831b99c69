"""GGUF files: llama.cpp's tensor names and layouts, converted back to those of the Hugging Face model.

transformers can load GGUF files too, but it builds the whole model and needs the package `accelerate`. Here each tensor
is dequantized when it is looked up. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.errors import InputError
from npu_sim.llm.checkpoint import FAMILIES, Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

_ROOT_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"


def load_gguf(path: Path, dtype: str) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        InputError: the architecture, or its rotary scaling, is not supported.
        Exception: of many types, from the reader, if the file is damaged.
    """
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

    class Reader(GGUFReader):
        """Reads from a plain array: the hundred thousands of slices of a `np.memmap` would take seconds."""

        data = property(lambda self: self._plain, lambda self, mapped: setattr(self, "_plain", np.asarray(mapped)))

    reader = Reader(path)

    def field(key: str, default: Any = None) -> Any:
        return reader.fields[key].contents() if key in reader.fields else default

    architecture = field("general.architecture")
    if architecture not in FAMILIES:
        raise InputError(f"{path} holds a model of architecture '{architecture}'; supported are {', '.join(FAMILIES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(architecture, field, tensors)
    divisors = tensors.pop(_FREQUENCIES, None)
    eos = {field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} - {None}
    return Checkpoint(
        name=path.stem,
        config=config,
        state=_GGUFTensors(tensors, config, dtype),
        dtype=dtype,
        load_tokenizer=lambda: PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name),
        eos_ids=frozenset(eos),
        inv_freq_divisors=None if divisors is None else torch.from_numpy(_dequantize(divisors)),
    )


def _config(architecture: str, field: Any, tensors: Mapping[str, Any]) -> Any:
    """The transformers config that is equivalent to the file's metadata."""
    from transformers import AutoConfig

    def of(key: str, default: Any = None) -> Any:
        return field(f"{architecture}.{key}", default)

    if of("rope.scaling.type", "none") != "none":
        raise InputError(f"RoPE scaling '{of('rope.scaling.type')}' is not supported for GGUF files")
    if of("expert_count"):
        raise InputError("mixtures of experts are not supported")
    heads, hidden = of("attention.head_count"), of("embedding_length")
    extra = {"attention_bias": "blk.0.attn_q.bias" in tensors} if architecture != "qwen2" else {}
    return AutoConfig.for_model(
        architecture,
        hidden_size=hidden,
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=of("attention.head_count_kv", heads),
        head_dim=of("attention.key_length", hidden // heads),
        max_position_embeddings=of("context_length"),
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of("rope.freq_base", 10000.0)},
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        tie_word_embeddings="output.weight" not in tensors,
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        **extra,
    )


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _ROOT_NAMES:
        return f"{_ROOT_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    raise InputError(f"unknown tensor '{name}' in the GGUF file")


def _dequantize(tensor: Any) -> np.ndarray:
    """A GGUF tensor in float32, with its dimensions in PyTorch's order."""
    from gguf import dequantize

    return np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, ["C", "W"])


class _GGUFTensors(Mapping[str, "Tensor"]):
    """The tensors of a GGUF file by Hugging Face name; each lookup dequantizes one."""

    def __init__(self, tensors: Mapping[str, Any], config: Any, dtype: str) -> None:
        self._tensors = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
        self._config = config
        self._dtype = dtype

    def __getitem__(self, key: str) -> "Tensor":
        import torch

        value = _dequantize(self._tensors[key])
        if self._config.model_type == "llama" and ".q_proj." in key:
            value = _half_rotation(value, self._config.num_attention_heads)
        if self._config.model_type == "llama" and ".k_proj." in key:
            value = _half_rotation(value, self._config.num_key_value_heads)
        return torch.from_numpy(np.ascontiguousarray(value)).to(getattr(torch, self._dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _half_rotation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order for rotary embedding, which interleaves the two halves of a head."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
