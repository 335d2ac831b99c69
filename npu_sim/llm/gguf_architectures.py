"""GGUF architectures as model types of transformers: a row for each, and the config that a file's metadata means.

Most fields of the config are those that transformers' `GGUF_CONFIG_MAPPING` has for the keys. A row adds the rest:
further keys, fields that follow from others or that llama.cpp has in its code, and how its converter changes tensors
(https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from npu_compiler.errors import InputError
from npu_sim.llm.gguf_reader import GGUFFile, Scalar

Fields = dict[str, Any]
# Keys that say nothing about what the model computes.
_ABOUT = ("general.", "tokenizer.", "quantize.", "mradermacher.")
_SIGMOID = 2  # gguf.ExpertGatingFuncType
# Keys whose values are numbers of any kind; those of the others are whole.
_REAL = ("epsilon", "scale", "softcapping")
_MAY_BE_ZERO = ("attention.sliding_window", "leading_dense_block_count", "expert_shared_count")


@dataclass(frozen=True)
class Architecture:
    """A model type as GGUF files hold it.

    Attributes:
        model_type: Model type in transformers.
        fields: Metadata key → field of the config, in addition to those in transformers' table. Only the counts of
            experts are required.
        fixed: Metadata key → the supported values. A file without the key means the first one.
        derive: Function from the metadata and the fields so far to further fields.
        is_interleaved: Whether the file has the rows of query and key weights in the order for an interleaved rotary
            embedding.
        is_alternating: Whether the rows of an expert's gate and up projections alternate in transformers' weights.
        adds_one: Whether the file stores norm weights plus 1.
        is_partial: Whether the rotary embedding may apply to a part of each head only.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    derive: "Callable[[Metadata, Fields], Fields]" = lambda metadata, fields: {}
    is_interleaved: bool = False
    is_alternating: bool = False
    adds_one: bool = False
    is_partial: bool = False


_REQUIRED = object()


def whole_number(file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    """A non-negative whole number in the metadata. Raises InputError for another value, or a missing required one."""
    if key in file.arrays:
        raise InputError(f"the GGUF file has a list of values for '{key}'; only a single one is supported")
    value = file.metadata.get(key, default)
    if value is _REQUIRED:
        raise InputError(f"the GGUF file has no value for '{key}'")
    if value is not default and (type(value) is not int or value < 0):
        raise InputError(f"the GGUF file's value for '{key}' is {value!r:.80}, which is not a whole number")
    return value


class Metadata:
    """A GGUF file's metadata for its architecture. Each value is either read, or refused by `refuse_rest`.

    Attributes:
        architecture: Name of the architecture.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._used: set[str] = set()
        self.architecture = str(file.metadata["general.architecture"])

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._file.metadata

    def _value(self, key: str, default: Any) -> tuple[str, Any]:
        name = f"{self.architecture}.{key}"
        self._used.add(name)
        if name in self._file.arrays:
            raise InputError(f"the GGUF file has a list of values for '{name}'; only a single one is supported")
        return name, self._file.metadata.get(name, default)

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        name, _ = self._value(key, None)
        number = whole_number(self._file, name, default)
        if number == 0 and key not in _MAY_BE_ZERO:
            raise InputError(f"the GGUF file's value for '{name}' is 0")
        return int(number)

    def positive(self, key: str, default: float | None = None) -> float:
        name, number = self._value(key, default)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise InputError(f"the GGUF file's value for '{name}' is {number!r:.80}, not a positive number")
        return number

    def flag(self, key: str) -> bool:
        name, value = self._value(key, None)
        if type(value) is not bool:
            raise InputError(f"the GGUF file's value for '{name}' is {value!r:.80}, which is neither true nor false")
        return value

    def number(self, key: str) -> int | float | bool:
        """The value of a key that the file has: a flag, a positive number or a whole number, depending on the key."""
        if key == "expert_weights_norm":
            return self.flag(key)
        return self.positive(key) if key.endswith(_REAL) else self.count(key)

    def choice(self, key: str, *values: Scalar) -> Scalar:
        """The value of a key, which is the first of `values` if the file lacks it.

        Raises InputError if it is none of `values`.
        """
        name, value = self._value(key, values[0])
        if value not in values:
            supported = " or ".join(map(repr, values))
            raise InputError(f"the GGUF file has {value!r:.80} for '{name}'; only {supported} is supported")
        return cast(Scalar, value)

    def refuse_rest(self) -> None:
        """Raise InputError if there are keys that nothing has read: they may change what the model computes."""
        for name in sorted({*self._file.metadata, *self._file.arrays} - self._used):
            if name == "split.count" and self._file.metadata.get(name) in (0, 1):
                continue
            if name.startswith("split."):
                raise InputError("the GGUF file is one part of several; merge them with llama-gguf-split --merge")
            if not name.startswith(_ABOUT):
                raise InputError(f"the GGUF file has a value for {name!r:.120}, which is not supported")


def _gemma(largest: int) -> Callable[[Metadata, Fields], Fields]:
    """A `derive` function for Gemma's attention scale.

    The model with `largest` layers takes the scale from another size than the smaller ones.
    """

    def derive(metadata: Metadata, fields: Fields) -> Fields:
        heads, is_largest = fields["num_attention_heads"], fields["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": fields["hidden_size"] // heads if is_largest else fields["head_dim"]}

    return derive


def _gemma3(metadata: Metadata, fields: Fields) -> Fields:
    """Gemma 3's attention scale, and its rotary embeddings: that of layers with a window is never scaled."""
    if not fields.get("sliding_window"):
        raise InputError("the GGUF file has no value for 'gemma3.attention.sliding_window'")
    local = {"rope_type": "default", "rope_theta": metadata.positive("rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    # transformers has caps of its own where nothing is said
    caps = dict.fromkeys(name for name in ("attn_logit_softcapping", "final_logit_softcapping") if name not in fields)
    return {**_gemma(62)(metadata, fields), **caps, "rope_parameters": ropes}


def _granite(metadata: Metadata, fields: Fields) -> Fields:
    return {"attention_multiplier": fields.get("attention_multiplier", fields["head_dim"] ** -0.5)}


def _gpt_oss(metadata: Metadata, fields: Fields) -> Fields:
    if not fields.get("sliding_window"):
        raise InputError("the GGUF file has no value for 'gpt-oss.attention.sliding_window'")
    return {"rope_parameters": {**fields["rope_parameters"], "truncate": False}}


def _deepseek(metadata: Metadata, fields: Fields) -> Fields:
    """Sizes of DeepSeek's latent attention.

    A file gives the key and value sizes either of the heads, or of the compressed latent as one head.
    """
    rotary, latent = metadata.count("rope.dimension_count"), metadata.count("attention.kv_lora_rank")
    key, value = metadata.count("attention.key_length"), metadata.count("attention.value_length")
    if "attention.key_length_mla" in metadata:
        metadata.choice("attention.key_length", latent + rotary)
        metadata.choice("attention.value_length", latent)
        key, value = metadata.count("attention.key_length_mla"), metadata.count("attention.value_length_mla")
    if key <= rotary:
        raise InputError(f"the GGUF file says {key} for the length of a key, of which {rotary} are rotated")
    groups = fields.get("n_group", 1)
    return {
        "kv_lora_rank": latent,
        "q_lora_rank": fields.get("q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "head_dim": rotary,
        "num_key_value_heads": fields["num_attention_heads"],
        "n_shared_experts": fields.get("n_shared_experts"),
        "first_k_dense_replace": fields.get("first_k_dense_replace", 0),
        "n_group": groups,
        "topk_group": fields.get("topk_group", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "routed_scaling_factor": fields.get("routed_scaling_factor", 1.0),
        "norm_topk_prob": fields.get("norm_topk_prob", False),
    }


_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}
_DEEPSEEK = {
    **_EXPERT_SIZE,
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
}
ARCHITECTURES = {
    "llama": Architecture("llama", is_interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", {**_WINDOW, **_CAPS}, derive=_gemma(46), adds_one=True),
    "gemma3": Architecture("gemma3_text", {**_WINDOW, **_CAPS}, derive=_gemma3, adds_one=True),
    "phi3": Architecture("phi3", _WINDOW, is_partial=True),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_EXPERT_SIZE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"expert_weights_norm": (False,), "expert_weights_scale": (1.0,)},
        lambda metadata, fields: {"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _EXPERT_SIZE,
        {"expert_weights_norm": (True,), "expert_weights_scale": (1.0,)},
        lambda metadata, fields: {"norm_topk_prob": True},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**_WINDOW, "expert_feed_forward_length": "intermediate_size"},
        derive=_gpt_oss,
        is_alternating=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v2", _DEEPSEEK, {"expert_gating_func": (1,), "expert_weights_norm": (False,)}, _deepseek
    ),
    "granite": Architecture("granite", _GRANITE, derive=_granite, is_interleaved=True),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", is_interleaved=True),
}
_MIXTRAL = Architecture(
    "mixtral",
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    is_interleaved=True,
)
_DEEPSEEK_V3 = Architecture("deepseek_v3", _DEEPSEEK, {"expert_gating_func": (_SIGMOID,)}, _deepseek)


def architecture_of(file: GGUFFile) -> Architecture:
    """The `Architecture` row for a file. Some names of architectures have two rows.

    Raises:
        InputError: the architecture is not supported, or the file holds only a part of a model.
    """
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise InputError(
            f"the GGUF file holds a model of architecture {name!r:.80}; supported are {', '.join(ARCHITECTURES)}"
        )
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise InputError(
            f"the GGUF file holds no whole model but one of type {kind!r:.40}; merge an adapter into its model"
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if file.metadata.get(f"{name}.expert_gating_func") == _SIGMOID and name == "deepseek2":
        return _DEEPSEEK_V3
    return ARCHITECTURES[str(name)]


def config_fields(file: GGUFFile, row: Architecture, rope_factors: Mapping[str, list[float]]) -> Fields:
    """The fields of the transformers config that is equivalent to the file's metadata, model type included.

    Args:
        rope_factors: The file's divisors of rotary frequencies, `long_factor` and `short_factor`; empty without any.

    Raises:
        InputError: the metadata says something that our programs do not compute, or that contradicts the tensors.
    """
    metadata = Metadata(file)
    vocabulary = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    fields = {
        **_table_fields(metadata, row),
        "model_type": row.model_type,
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": whole_number(file, "tokenizer.ggml.eos_token_id", None),
        "bos_token_id": whole_number(file, "tokenizer.ggml.bos_token_id", None),
        "pad_token_id": None,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if "expert_count" not in row.fields and "num_experts" not in fields and "num_local_experts" not in fields:
        metadata.choice("expert_count", 0)
        metadata.choice("expert_used_count", 0)
    metadata.choice("vocab_size", vocabulary)
    metadata.choice("attention.causal", True)
    metadata.choice("tensor_data_layout", "Meta AI original pth")
    for key, values in row.fixed.items():
        metadata.choice(key, *values)
    is_latent = "attention.kv_lora_rank" in metadata
    if not is_latent:
        heads = fields["num_attention_heads"]
        fields["head_dim"] = metadata.count("attention.key_length", fields["hidden_size"] // heads)
        metadata.choice("attention.value_length", fields["head_dim"])
    fields["rope_parameters"] = _rope(metadata, row, 0 if is_latent else fields["head_dim"], fields, rope_factors)
    fields |= row.derive(metadata, fields)
    metadata.refuse_rest()
    return fields


def _table_fields(metadata: Metadata, row: Architecture) -> Fields:
    """The config fields that are single values of the metadata, by transformers' table and the architecture's row."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    tables = cast(Mapping[str, Mapping[str, str]], GGUF_CONFIG_MAPPING)
    table = next(tables[name] for name in (row.model_type, metadata.architecture, "llama") if name in tables)
    stated = ("embedding_length", "block_count", "attention.", "feed_forward", "context", "expert_")
    keys = {key: name for key, name in table.items() if key.startswith(stated) and key != "attention.key_length"}
    optional = {"attention.head_count_kv", *row.fields} - {"expert_count", "expert_used_count"}
    fields: Fields = {}
    for key, name in {**keys, **row.fields}.items():
        if key in optional and key not in metadata:
            metadata.count(key, 1)  # refuses a list
            continue
        value = metadata.number(key)
        if fields.setdefault(name, value) != value:
            said = f"'{metadata.architecture}.{key}'"
            raise InputError(f"the GGUF file says {value} for {said}, but another of its keys says {fields[name]}")
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if fields.get("sliding_window") == 0:
        fields["sliding_window"] = None
    return fields


def _rope(
    metadata: Metadata, row: Architecture, head_dim: int, fields: Fields, factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The rotary embedding's settings in transformers' form.

    As in llama.cpp, a factor without a type means linear scaling.

    Args:
        head_dim: Size of a head. 0: the row's `derive` determines by itself which part of a head is rotated.
        factors: As for `config_fields`.
    """
    theta = metadata.positive("rope.freq_base", 10000.0)
    old = metadata.positive("rope.scale_linear", 1.0)
    factor = metadata.positive("rope.scaling.factor", old)
    scaling = metadata.choice("rope.scaling.type", "linear", "none", "yarn", "longrope")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if head_dim and not row.is_partial:
        metadata.choice("rope.dimension_count", head_dim)
    elif head_dim:
        rotated = metadata.count("rope.dimension_count", head_dim)
        if rotated > head_dim:
            raise InputError(f"the GGUF file rotates {rotated} elements of heads that have {head_dim}")
        rope["partial_rotary_factor"] = rotated / head_dim
    original = metadata.positive("rope.scaling.original_context_length", fields["max_position_embeddings"])
    metadata.choice("rope.scaling.finetuned", False, True)  # nothing depends on it
    if factors:
        rope |= {"rope_type": "longrope", **factors, "original_max_position_embeddings": int(original)}
        fields["original_max_position_embeddings"] = int(original)  # which Phi's configs prefer
        if "rope.scaling.attn_factor" in metadata:
            rope["attention_factor"] = metadata.positive("rope.scaling.attn_factor")
    elif scaling == "longrope":
        raise InputError("the GGUF file scales rotary frequencies by 'longrope', but lacks the factors")
    elif scaling == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
        rope |= _yarn(metadata)
    elif scaling != "none" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    return rope


def _yarn(metadata: Metadata) -> dict[str, float]:
    """The settings of YaRN scaling apart from its factor."""
    metadata.choice("rope.scaling.yarn_ext_factor", 1.0)
    metadata.choice("rope.scaling.yarn_attn_factor", 1.0)
    metadata.choice("rope.scaling.attn_factor", 1.0)
    said = {
        "beta_fast": metadata.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.positive("rope.scaling.yarn_beta_slow", 1.0),
    }
    if "rope.scaling.yarn_log_multiplier" in metadata:
        scale = round(10 * metadata.positive("rope.scaling.yarn_log_multiplier"), 6)
        said |= {"mscale": scale, "mscale_all_dim": scale}
    return said
