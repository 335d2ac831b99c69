"""Tiny configurations of transformers' architectures, from rules on the names of fields, not of models.

`tiny_config("bert")` takes the library's default configuration and makes its numbers small. A rule sees a field's name
and default value; sizes that a configuration class derives from others are derived again, since the object is
constructed anew. Relations between fields that a single architecture demands are data in `RELATIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

WIDTH, HEADS, HEAD_DIM, LAYERS, EXPERTS = 64, 4, 16, 2, 4
MANY_LAYERS = 6  # from here on, a list of that length is one entry per layer; a shorter one may be of stages
VOCABULARY = 128
WORDS = range(10, 100)  # ids of ordinary words; those of special tokens are outside of it

# What no rule on names can know: model type → fields.
RELATIONS: Mapping[str, Mapping[str, Any]] = {
    "autoformer": {"prediction_length": 8},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 101},
    "informer": {"prediction_length": 8},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "visual_embed": False},
    "ministral": {"head_dim": 16},
    "time_series_transformer": {"prediction_length": 8},
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "glm_image_text")
    },
    **{
        name: {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        }
        for name in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr", "glm_image", "paddleocr_vl")
    },
}


def _at_most(limit: int, divisor: int) -> Callable[[Any], Any]:
    """Return a rule that limits a number to `limit`, and divides each large number of a list by `divisor`.

    The numbers of a list are related, so they are not limited one by one.
    """

    def rule(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(
                rule(x) if isinstance(x, (list, tuple)) else x if x < 16 else max(8, x // divisor) for x in value
            )
        return min(value, limit)

    return rule


def _each_at_most(limit: int) -> Callable[[Any], Any]:
    def rule(value: Any) -> Any:
        return type(value)(rule(x) for x in value) if isinstance(value, (list, tuple)) else min(value, limit)

    return rule


def _scalar_at_most(limit: int) -> Callable[[Any], Any]:
    return lambda value: min(value, limit) if isinstance(value, int) else value


def _lists_only(rule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, int) else rule(value)


# The first pattern that matches a field's whole name decides; one without a rule leaves the field as it is.
RULES: tuple[tuple[str, Callable[[Any], Any] | None], ...] = (
    (r".*(loss|dropout|kernel|stride|max_2d).*", None),
    (r".*(in|num|input|image|audio|vision_in)_channels|channels", _lists_only(_at_most(WIDTH, 8))),
    (r"type_vocab_size|.*codebook_dim|patch_dim", None),
    (r".*vocab_size.*|n_words|n_tokens", _each_at_most(VOCABULARY)),
    (r"index_n_heads", _scalar_at_most(32)),  # fewer give scores of exactly 0, among which the choice is arbitrary
    (r"qk_head_dim", _scalar_at_most(2 * HEAD_DIM)),
    (r".*(head_dim|d_kv|d_head|head_size|dim_head|dim_per_head)", _scalar_at_most(HEAD_DIM)),
    (r".*lora_rank|.*_rank", _scalar_at_most(WIDTH // 2)),
    (r".*(heads|n_head|num_head)", _scalar_at_most(HEADS)),
    (r"depths|.*(layers|n_layer|depth|num_blocks|num_stages_per_block|layer_num)", _each_at_most(LAYERS)),
    (r".*(intermediate_sizes?|ffn_dim|d_ff|mlp_dim|n_inner|ffn_hidden_size|intermediate_dim)", _at_most(2 * WIDTH, 8)),
    (r".*(experts_per_tok|experts_per_token|moe_topk|moe_top_k|num_selected_experts)", _scalar_at_most(2)),
    (r"num_shared_experts|.*shared_experts", _scalar_at_most(1)),
    (r".*(experts|expert_num)", _scalar_at_most(EXPERTS)),
    (r"n_group|topk_group|num_expert_group", _scalar_at_most(1)),
    (r".*(sliding_window|attention_window|window_attention)", _each_at_most(8)),
    (r"index_topk", _scalar_at_most(4)),
    (r"window_size", _each_at_most(2)),
    (r"rotary_dim", _scalar_at_most(HEAD_DIM)),
    (r"num_groups", _scalar_at_most(8)),
    (r".*n_groups", _scalar_at_most(2)),
    (r".*(hidden_sizes?|d_model|n_embd|embedding_size|proj_size|_channels|in_features)", _at_most(WIDTH, 8)),
    (r".*(_dims?|_width|hidden|filters|feature_size|output_size)|dim|width", _at_most(WIDTH, 8)),
    (r".*(num_queries|num_query_tokens|num_latents|num_proposals)", _scalar_at_most(10)),
    (r".*(max_.*positions?|n_positions|max_position_embeddings|n_ctx)", _scalar_at_most(512)),
)  # fmt: skip

_COUNT_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_SPECIAL = re.compile(r".*(_token_id|_token_ids|_token_index|_token_idx|token)")
_INDICES = re.compile(r".*(indexes|indices|_idx|_layer_ids|layers_idx|mlp_only_layers|fusion_layers)")


@dataclass
class _Shrinking:
    """State shared by a configuration and all configurations nested in it.

    Attributes:
        ids: Id of a special token → its small id.
    """

    ids: dict[int, int] = field(default_factory=dict)

    def special_id(self, old: int) -> int:
        if old < WORDS.start:
            return old
        return self.ids.setdefault(old, min(WORDS.stop + len(self.ids), VOCABULARY - 1))


def tiny_config(model_type: str) -> Any:
    """Return a small configuration of a model type, whose model has at most a few million parameters.

    Raises:
        Exception: any error of the configuration's class that rejects the numbers.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _shrink(CONFIG_MAPPING[model_type](), _Shrinking(), RELATIONS.get(model_type, {}))
    for part in (config, *nested(config)):
        part.use_cache = False
    return config


def nested(config: Any) -> Iterator[Any]:
    """Yield the configurations nested in a configuration, at any depth."""
    from transformers import PreTrainedConfig

    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from nested(value)


def _shrink(config: Any, shared: _Shrinking, extra: Mapping[str, Any]) -> Any:
    from transformers import PreTrainedConfig

    changed: dict[str, Any] = {}
    declared = {f.name for f in fields(config)}
    layers = next((getattr(config, x) for x in _COUNT_OF_LAYERS if isinstance(getattr(config, x, None), int)), 0)
    kinds = next((x for name, x in vars(config).items() if _is_layer_list(name, x, layers)), ())
    kept = max(LAYERS, len(dict.fromkeys(kinds)))
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            changed[name] = _shrink(value, shared, extra.get(name, {}))
        elif name in declared and not name.startswith("_"):
            small = _shrink_field(name, value, layers, kept, shared)
            if small != value:
                changed[name] = small
    for relate in (_relate_layers, _relate_images, _relate_heads, _relate_rope, _relate_state_space):
        relate(config, changed, kept)
    demanded = {
        name: value for name, value in extra.items() if not isinstance(vars(config).get(name), PreTrainedConfig)
    }
    return type(config)(**{**changed, **demanded})


def _is_layer_list(name: str, value: Any, layers: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == layers >= MANY_LAYERS
        and all(isinstance(x, str) for x in value)
    )


def _shrink_field(name: str, value: Any, layers: int, kept: int, shared: _Shrinking) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if _SPECIAL.fullmatch(name):
        if isinstance(value, int):
            return shared.special_id(value)
        if isinstance(value, (list, tuple)):
            return type(value)(shared.special_id(x) if isinstance(x, int) else x for x in value)
        return value
    if isinstance(value, (list, tuple)) and len(value) == layers >= MANY_LAYERS:
        firsts = list(dict.fromkeys(value)) if all(isinstance(x, str) for x in value) else list(value)
        return type(value)((firsts * kept)[:kept])
    if isinstance(value, (list, tuple)) and _INDICES.fullmatch(name):
        return type(value)(sorted({min(x, kept - 1) for x in value if isinstance(x, int)}))
    numbers = value if isinstance(value, (list, tuple)) else (value,)
    if not _all_ints(numbers):
        return value
    if name in _COUNT_OF_LAYERS and isinstance(value, int):
        return min(value, kept)
    rule = next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)
    return value if rule is None else rule(value)


def _all_ints(values: Any) -> bool:
    return all(
        _all_ints(x) if isinstance(x, (list, tuple)) else isinstance(x, int) and not isinstance(x, bool) for x in values
    )


def _relate_layers(config: Any, changed: dict[str, Any], kept: int) -> None:
    """Keep numbers that count or index layers below the number of layers."""
    for name, value in vars(config).items():
        if isinstance(value, int) and re.fullmatch(r"first_k_dense_replace|max_window_layers|.*_layer_id", name):
            changed[name] = min(value, 1)
        if isinstance(value, int) and name in ("num_kv_shared_layers", "num_nextn_predict_layers"):
            changed[name] = 0


def _relate_images(config: Any, changed: dict[str, Any], kept: int) -> None:
    """Reduce image sizes to four patches a side, or to 64 pixels if patches are at most 8 pixels wide or unknown."""
    patch = getattr(config, "patch_size", None)
    patch = max(patch) if isinstance(patch, (list, tuple)) else patch
    side = 4 * patch if isinstance(patch, int) and patch > 8 else 64
    for name in ("image_size", "pretrain_image_size", "input_size"):
        value: Any = getattr(config, name, None)
        if isinstance(value, int) and value > side:
            changed[name] = side
        elif _is_list(value) and len(value) == 2 and min(value) > side:
            changed[name] = type(value)([side] * 2)


def _relate_heads(config: Any, changed: dict[str, Any], kept: int) -> None:
    """Keep fewer key heads than query heads for grouped-query attention, and widths that a stage's heads divide."""
    names = ("num_heads", "num_attention_heads")
    stages: Any = next((getattr(config, x, 0) for x in names if _is_list(getattr(config, x, 0))), ())
    if stages and isinstance(getattr(config, "embed_dim", None), int):
        changed["embed_dim"] = HEAD_DIM * stages[0]
    heads, key_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if (
        isinstance(heads, int)
        and isinstance(key_heads, int)
        and "num_key_value_heads" in {f.name for f in fields(config)}
    ):
        changed["num_key_value_heads"] = min(HEADS, heads) if key_heads == heads else min(key_heads, HEADS // 2)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and _all_ints(value)


def _relate_rope(config: Any, changed: dict[str, Any], kept: int) -> None:
    """Make the sections of a multi-axis rotary embedding add up to half of a head."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and "mrope_section" in parameters:
        sections = parameters["mrope_section"]
        half = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
        share = [half * x // sum(sections) for x in sections]
        share[0] += half - sum(share)
        changed["rope_parameters"] = {**parameters, "mrope_section": share}


def _relate_state_space(config: Any, changed: dict[str, Any], kept: int) -> None:
    """Make the heads of a state-space layer cover its expanded width."""
    for expand, heads, size in (
        ("expand", "num_heads", "head_dim"),
        ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
        ("expand", "mamba_num_heads", "mamba_head_dim"),
    ):
        if all(isinstance(getattr(config, x, None), int) for x in (expand, heads, size)):
            changed[heads] = HEADS
            changed[size] = getattr(config, expand) * WIDTH // HEADS
