"""Random configs of every kind of causal language model of transformers, compared with our generation.

    python tests/support/decoder_draws.py [--seed 0] [--count 1] [--dtypes float32] [MODEL_TYPE ...]

A draw changes one to three fields of a type's tiny config: flags, numbers, activations, numbers of heads and experts,
widths, windows, kinds of layers and of rotary embeddings. The outcomes are those of `decoders.py`; configs that
transformers itself does not run are drawn again.
"""

from __future__ import annotations

import argparse
import random
import sys
import zlib
from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import decoders
import torch
import transformers
from decoder_answers import Outcome
from decoder_features import other_values

_ATTEMPTS = 8
# Other values of sizes, by the names that configs use.
_SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), (32, 96)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), (40, 128)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), (1, 3)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), (2, 8)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), (1, 4)),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim"), (8, 24, 32)),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), (4, 16)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), (16, 40)),
    **dict.fromkeys(decoders._WINDOWS, (3, 8, 40)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (3, 8)),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), (1, 3)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (24, 64)),
    **dict.fromkeys(
        ("n_shared_experts", "num_dense_layers", "first_k_dense_replace", "num_nextn_predict_layers"), (0, 2)
    ),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "conv_kernel", "conv_L_cache"), (2, 3)),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_d_conv", "d_conv"), (4,)),
}
# Fields that say how an answer is given or a model is trained, not what is computed.
_LEFT = frozenset(
    {"use_cache", "return_dict", "is_decoder", "is_encoder_decoder", "add_cross_attention", "torchscript"}
)
_LEFT |= {
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "gradient_checkpointing",
    "use_mems_train",
}
_OF_TRAINING = ("dropout", "drop_", "initializer", "init_", "_init", "coef", "loss", "jitter", "_std")  # parts of names
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "default", "rope_theta": 500.0},
)  # fmt: skip
_STEPS = {"short": 0.1, "long": 0.5}  # between the factors of two neighbouring rotary frequencies


def rotated_width(config: dict[str, Any]) -> int:
    """The number of elements of a head that are rotated where all are."""
    heads = config.get("num_attention_heads") or 1
    return config.get("qk_rope_head_dim") or config.get("head_dim") or (config.get("hidden_size") or 0) // heads


def other_ropes(value: Any, width: int) -> list[dict[str, Any]]:
    """Other rotary embeddings of a config, of one kind of layer where each kind has its own.

    Args:
        width: See `rotated_width`.
    """
    if not isinstance(value, dict):
        return []
    if "rope_theta" not in value:
        return [{**value, kind: rope} for kind, part in value.items() for rope in other_ropes(part, width)]
    ropes = [{**value, **rope} for rope in _ROPES]
    ropes += [{**rope, "partial_rotary_factor": part} for rope in ropes for part in (0.5, 0.25)]
    for part in (1.0, 0.5):
        pairs = int(width * part) // 2
        scaled = {f"{name}_factor": [1.0 + step * pair for pair in range(pairs)] for name, step in _STEPS.items()}
        scaled |= {"rope_type": "longrope", "factor": 4.0, "partial_rotary_factor": part}
        # Shorter than the prompt, and longer than the answer.
        ropes += [{**value, **scaled, "original_max_position_embeddings": length} for length in (32, decoders.CONTEXT)]
    return ropes


def other_kinds(kinds: list[Any]) -> list[list[Any]]:
    """Other kinds of layers: the same for all, and others in each place."""
    names = list(dict.fromkeys(kinds))
    return [list(chosen) for chosen in product(names, repeat=len(kinds)) if list(chosen) != kinds][:16]


def choices(config: dict[str, Any]) -> dict[str, list[Any]]:
    """Field of a config → other values that it may be given, the fields of parts included."""
    found: dict[str, list[Any]] = {}
    for name, value in config.items():
        if name in _LEFT or any(part in name for part in _OF_TRAINING):
            continue
        if name in ("rope_parameters", "rope_scaling"):
            if others := other_ropes(value, rotated_width(config)):
                found[name] = others
        elif isinstance(value, dict):
            found.update(choices({key: inner for key, inner in value.items() if isinstance(key, str)}))
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            found[name] = [*_SIZES[name]]
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            found[name] = other_kinds(value)
        elif value is not None and (others := other_values(name, value)):
            found[name] = others
    return {name: others for name, values in found.items() if (others := [x for x in values if x != config.get(name)])}


def drawn_changes(model_type: str, draw: random.Random) -> dict[str, Any]:
    """One to three changed fields of a type's tiny config; none where transformers makes no tiny config."""
    try:
        config = decoders.tiny_config(model_type).to_dict()
    except Exception:  # such configs raise anything
        return {}
    found = choices(config)
    names = draw.sample(sorted(found), min(len(found), draw.randint(1, 3)))
    return {name: draw.choice(found[name]) for name in names}


def tried(model_type: str, seed: int, dtypes: Iterable[str] = ("float32",)) -> dict[str, Outcome]:
    """The outcomes of a drawn config by route, the changed fields in each; see `decoders.tried`."""
    draw = random.Random(zlib.crc32(f"{model_type} {seed}".encode()))
    for _ in range(_ATTEMPTS):
        changes = drawn_changes(model_type, draw)
        outcomes = decoders.tried(model_type, changes, dtypes)
        if "eager" not in outcomes:
            break
    return {route: Outcome(one.kind, f"{changes} {one.detail}".strip()) for route, one in outcomes.items()}


def main(names: Iterable[str], seeds: Iterable[int], dtypes: Iterable[str]) -> int:
    """Try draws of model types and print their outcomes; return 1 if one is wrong or raw."""
    decoders._import()
    drawn = product(seeds, list(names) or decoders.model_types())
    return decoders.print_outcomes((f"{name} {seed}", partial(tried, name, seed, dtypes)) for seed, name in drawn)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="draws per type")
    parser.add_argument("--dtypes", nargs="+", choices=decoders.DTYPES, default=("float32",))
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # many small products
    given = parser.parse_args()
    sys.exit(main(given.names, range(given.seed, given.seed + given.count), given.dtypes))
