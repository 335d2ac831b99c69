"""GGUF files: llama.cpp's tensor names and layouts, converted back to those of the Hugging Face model.

transformers can load GGUF files too, but it builds the whole model and needs the package `accelerate`. Here each tensor
is dequantized when it is looked up, and what transformers makes of the metadata is cached.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime.cache_folder import source_digest
from npu_runtime.pieces import in_pieces
from npu_sim.cache import cached_facts
from npu_sim.llm.checkpoint import Checkpoint, StoredConfig, stored_fields
from npu_sim.llm.families import GGUF_ARCHITECTURES
from npu_sim.llm.gguf_blocks import quantized_format, quantized_rows
from npu_sim.llm.gguf_reader import GGUFFile, GGUFTensor, Scalar, read_gguf
from npu_sim.llm.tokenizer import load_gguf_tokenizer

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
_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output")
# Keys that say nothing about what the model computes.
_ABOUT = ("general.", "tokenizer.", "quantize.", "mradermacher.")
_OPTIONAL = (_FREQUENCIES, ".bias")
_PIECE = 2**18  # elements: their temporary arrays stay in a core's cache


def load_gguf(path: Path, dtype: str) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        InputError: the file is damaged or contradicts itself; or its architecture, its rotary scaling or a tensor's
            type is not supported.
    """
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise InputError(
            f"{path} holds a model of architecture {architecture!r:.80}; supported are {', '.join(GGUF_ARCHITECTURES)}"
        )
    settings = _config_fields(file)
    tensors = dict(file.tensors)
    divisors = tensors.pop(_FREQUENCIES, None)
    facts_key = [file.digest, source_digest("npu_sim.llm")]
    fields = cached_facts("config", facts_key, lambda: stored_fields(_config(settings)), ("transformers",))
    state = _GGUFTensors(tensors, settings, dtype)
    eos = {_whole_number(file, f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot")}
    return Checkpoint(
        name=path.stem,
        config=StoredConfig(fields, lambda: _config(settings)),
        state=state,
        dtype=dtype,
        load_tokenizer=lambda: load_gguf_tokenizer(path, file.digest),
        eos_ids=frozenset(token for token in eos if token is not None),
        inv_freq_divisors=None if divisors is None else _dequantized(divisors, "float32"),
        quantization=state.formats,
    )


def _config(settings: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings)


_REQUIRED = object()


def _whole_number(file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    """A whole number of the metadata that is not negative. Raises InputError if it is another value, or missing."""
    if key in file.arrays:
        raise InputError(f"the GGUF file has a list of values for '{key}'; only a single one is supported")
    value = file.metadata.get(key, default)
    if value is _REQUIRED:
        raise InputError(f"the GGUF file has no value for '{key}'")
    if value is not default and (type(value) is not int or value < 0):
        raise InputError(f"the GGUF file's value for '{key}' is {value!r:.80}, which is not a whole number")
    return value


class _Metadata:
    """The values that a GGUF file has for its architecture; each is used, or refused by `refuse_rest`."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._used: set[str] = set()
        self.architecture = str(file.metadata["general.architecture"])

    def _value(self, key: str, default: Any) -> tuple[str, Any]:
        name = f"{self.architecture}.{key}"
        self._used.add(name)
        if name in self._file.arrays:
            raise InputError(f"the GGUF file has a list of values for '{name}'; only a single one is supported")
        return name, self._file.metadata.get(name, default)

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        name, _ = self._value(key, None)
        number = _whole_number(self._file, name, default)
        if number == 0:
            raise InputError(f"the GGUF file's value for '{name}' is 0")
        return int(number)

    def positive(self, key: str, default: float | None = None) -> float:
        name, number = self._value(key, default)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < np.inf:
            raise InputError(f"the GGUF file's value for '{name}' is {number!r:.80}, not a positive number")
        return number

    def choice(self, key: str, *values: Scalar) -> Scalar:
        """The value of a key, which must be one of `values`; the first if it is absent. Raises InputError if not."""
        name, value = self._value(key, values[0])
        if value not in values:
            supported = " or ".join(map(repr, values))
            raise InputError(f"the GGUF file has {value!r:.80} for '{name}'; only {supported} is supported")
        return cast(Scalar, value)

    def refuse_rest(self) -> None:
        """Refuse keys that nothing has looked at: each may change what the model computes."""
        for name in sorted({*self._file.metadata, *self._file.arrays} - self._used):
            if name == "split.count" and self._file.metadata.get(name) in (0, 1):
                continue
            if name.startswith("split."):
                raise InputError("the GGUF file is one part of several; merge them with llama-gguf-split --merge")
            if not name.startswith(_ABOUT):
                raise InputError(f"the GGUF file has a value for {name!r:.120}, which is not supported")


def _rope(metadata: _Metadata) -> dict[str, Any]:
    """The rotary embedding as transformers describes it. As in llama.cpp, a factor without a type scales linearly."""
    theta = metadata.positive("rope.freq_base", 10000.0)
    old = metadata.positive("rope.scale_linear", 1.0)
    factor = metadata.positive("rope.scaling.factor", old)
    scaling = metadata.choice("rope.scaling.type", "linear", "none")
    metadata.positive("rope.scaling.original_context_length", 1)  # linear scaling does not depend on it,
    metadata.choice("rope.scaling.finetuned", False, True)  # nor on this
    if scaling == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "factor": factor, "rope_theta": theta}


def _config_fields(file: GGUFFile) -> dict[str, Any]:
    """The fields of the transformers config that is equivalent to the file's metadata, model type included.

    Raises:
        InputError: it says something that our programs do not compute, or that contradicts the tensors.
    """
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise InputError(
            f"the GGUF file holds no whole model but one of type {kind!r:.40}; merge an adapter into its model"
        )
    metadata = _Metadata(file)
    architecture = metadata.architecture
    for key in ("expert_count", "expert_used_count"):
        if file.metadata.get(f"{architecture}.{key}"):
            raise InputError("mixtures of experts are not supported")
        metadata.choice(key, 0)
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    vocabulary = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    metadata.choice("attention.value_length", head_dim)
    metadata.choice("rope.dimension_count", head_dim)
    metadata.choice("vocab_size", vocabulary)
    metadata.choice("attention.causal", True)
    metadata.choice("tensor_data_layout", "Meta AI original pth")
    fields = {
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.positive("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _whole_number(file, "tokenizer.ggml.eos_token_id", None),
        "bos_token_id": _whole_number(file, "tokenizer.ggml.bos_token_id", None),
    }
    metadata.refuse_rest()
    _check_shapes(file, fields)
    _check_names(file, architecture)
    extra = {"attention_bias": "blk.0.attn_q.bias" in file.tensors} if architecture != "qwen2" else {}
    return {**fields, **extra}


def _check_names(file: GGUFFile, architecture: str) -> None:
    """Refuse tensors that a model of the architecture lacks: its program would not use them."""
    for name in file.tensors:
        if name == _FREQUENCIES:
            continue
        stem, _, suffix = name.rpartition(".")
        part = stem.rpartition(".")[2]
        biases = ("attn_q", "attn_k", "attn_v") if architecture == "qwen2" else _BIASED
        norms = part not in ("attn_q_norm", "attn_k_norm") or architecture == "qwen3"
        if not norms or (suffix != "weight" and (suffix != "bias" or part not in biases)):
            raise InputError(
                f"the GGUF file has a tensor {name!r:.80}, which models of architecture {architecture} lack"
            )


def _check_shapes(file: GGUFFile, fields: Mapping[str, Any]) -> None:
    """Refuse metadata that does not fit the tensors, before anything of its sizes is allocated.

    Raises:
        InputError: a tensor is missing or has another shape.
    """
    for name, shape in _shapes(fields):
        actual = file.tensors[name].shape if name in file.tensors else None
        if actual is None and not name.endswith(_OPTIONAL):
            raise InputError(f"the GGUF file's metadata asks for a tensor '{name}', which it lacks")
        if actual not in (None, shape):
            raise InputError(f"'{name}' has the shape {list(actual)}, but the GGUF file's metadata says {list(shape)}")


def _shapes(fields: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors whose shapes say what the metadata says too, with these shapes."""
    hidden, inner, head_dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = (fields[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    yield "token_embd.weight", (fields["vocab_size"], hidden)
    yield _FREQUENCIES, (head_dim // 2,)
    for layer in range(fields["num_hidden_layers"]):
        yield f"blk.{layer}.attn_q.weight", (queries, hidden)
        yield f"blk.{layer}.attn_k.weight", (keys, hidden)
        yield f"blk.{layer}.attn_q.bias", (queries,)
        yield f"blk.{layer}.attn_k.bias", (keys,)
        yield f"blk.{layer}.ffn_up.weight", (inner, hidden)


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _ROOT_NAMES:
        return f"{_ROOT_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    raise InputError(f"unknown tensor {name!r:.80} in the GGUF file")


def _dequantized_rows(rows: NDArray[np.uint8], encoding: str) -> NDArray[np.float32]:
    """Rows of a stored tensor in float32. Raises InputError if the package `gguf` cannot dequantize them."""
    from gguf import quants

    if encoding in ("F32", "F16"):
        return rows.view(np.float32 if encoding == "F32" else np.float16).astype(np.float32)
    try:
        # `gguf.dequantize` does the same for 16 rows at a time, which takes twice as long.
        values: NDArray[np.float32] = getattr(quants, encoding).dequantize_rows(rows)
        return values
    except (AttributeError, NotImplementedError):
        raise InputError(f"tensors of type {encoding} are not supported in GGUF files") from None


def _dequantized(tensor: GGUFTensor, dtype: str) -> NDArray[Any]:
    """A tensor in a named dtype, computed by several threads a piece at a time."""
    target = numpy_dtype(dtype)
    result = np.empty((len(tensor.rows), tensor.shape[-1]), target)

    def convert(piece: slice) -> None:
        with np.errstate(all="ignore"):  # NaN is for whoever loads the weights to report
            result[piece] = _dequantized_rows(tensor.rows[piece], tensor.encoding)

    in_pieces(convert, len(result), max(1, _PIECE // tensor.shape[-1]))
    return result.reshape(tensor.shape)


class _GGUFTensors(Mapping[str, NDArray[Any] | QuantizedArray]):
    """The tensors of a GGUF file by Hugging Face name; each lookup converts one.

    Matrices whose type has a `QuantizedFormat` stay in few bits. The others are dequantized: to bfloat16 if that is the
    compute dtype, else to float32 (see `Widened`).

    Attributes:
        formats: Name → format, of those in few bits.
    """

    def __init__(self, tensors: Mapping[str, GGUFTensor], settings: Mapping[str, Any], dtype: str) -> None:
        self._tensors = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
        self._interleaved = {}
        if settings["model_type"] == "llama":
            self._interleaved = {
                "q_proj": settings["num_attention_heads"],
                "k_proj": settings["num_key_value_heads"],
            }
        self._dtype = "bfloat16" if dtype == "bfloat16" else "float32"
        self.formats = {
            name: format
            for name, tensor in self._tensors.items()
            if len(tensor.shape) == 2 and (format := quantized_format(tensor.encoding)) is not None
        }
        for encoding, row in {tensor.encoding: tensor.rows[:1] for tensor in self._tensors.values()}.items():
            _dequantized_rows(row, encoding)  # an encoding that is not supported is found now, not while loading

    def __getitem__(self, key: str) -> NDArray[Any] | QuantizedArray:
        tensor, heads = self._tensors[key], self._interleaved.get(key.split(".")[-2])
        if key not in self.formats:
            value = _dequantized(tensor, self._dtype)
            return value if heads is None else _half_rotation(value, heads)
        rows = tensor.rows if heads is None else _half_rotation(tensor.rows, heads)
        return quantized_rows(rows, tensor.encoding)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _half_rotation(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo llama.cpp's row order for rotary embedding, which interleaves the two halves of a head."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
