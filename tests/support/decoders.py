"""Every kind of causal language model of transformers, tiny and random, compared with our generation.

    python tests/support/decoders.py [--results npu_sim/data/model_types.json] [--device cuda] [MODEL_TYPE ...]

For each model type a folder is saved and read by `LanguageModel` and by the serving engine, with a window of attention
that the prompt exceeds, in float32 and in bfloat16. The outcome is `right` (the greedy tokens and log probabilities are
those of transformers: see `decoder_answers`), `refused` (an `NPUError` of one sentence), `wrong`, or `raw` (any other
error, a crash or a hang). The last two are faults. Where transformers itself builds or runs no tiny model of a type
(`eager` then says why), the type's default config stands for it, which must be refused.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from decoder_answers import ROUTES, VOCAB, Eager, Outcome, judged
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from npu_compiler.errors import NPUError
from npu_sim.llm.model_types import WHOLE

WINDOW, CONTEXT = 16, 128
DTYPES = ("float32", "bfloat16")
SECONDS = 600  # per model type, after which it counts as a hang

_WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_window_size", "attention_chunk_size")
_WINDOWS += ("sliding_window_size", "local_attention")
# Sizes by the names that configs use. A name that a config lacks is left out.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "hidden_dim", "hidden_size_global"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "d_inner"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "block_ff_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim", "d_kv"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    **dict.fromkeys(_WINDOWS, WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "num_blocks"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("eos_token_id",), None),
    **dict.fromkeys(("adapter_in_dim", "adapter_out_dim", "adapter_input_size"), 64),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("router_hidden_size", "pronunciation_embed_dim", "shape_embed_dim"), 32),
    **dict.fromkeys(("encoder_hash_byte_group_vocab", "pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    **dict.fromkeys(("indexer_n_heads", "index_n_heads"), 16),  # with few, many scores are exactly 0
    **dict.fromkeys(("indexer_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("indexer_budget", "index_topk"), WINDOW),
    "indexer_kv_heads": 1,
    "indexer_compress_ratio": 4,
    "n_shared_experts": 1,
    "zero_expert_num": 2,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "is_decoder": True,
}
# Sizes that a config needs though it has none by default.
_NEEDED = frozenset(
    {"head_dim", "sliding_window", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"}
)
_NEEDED |= {name for name in _SIZES if name.startswith("indexer_")}
# Fields that must fit each other, by one that only such configs have.
_TOGETHER: dict[str, dict[str, Any]] = {
    "kv_lora_rank": {"num_key_value_heads": 4, "head_dim": 8},  # a latent: `head_dim` is the rotated part of a key
    "attention_types": {"attention_types": [[["global", "local"], 1]]},
    "kv_n_heads": {"rope_theta": 1e4, "clip_qkv": 2.0},  # which real files have and the class does not
    "attention_hidden_size": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "expand": {"num_heads": 8},
    "num_random_blocks": {"attention_type": "original_full"},  # the only one of a decoder
    "qk_dim_factor": {"num_blocks": 2, "hidden_size": 128, "embedding_dim": 128},  # whose half is a multiple of 64
    "cca_time0": {"num_experts_per_tok": 1},
    "num_dense_layers": {"num_dense_layers": 1},
    "axial_pos_shape": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48], "hash_seed": 0},
    "default_language": {"default_language": "en_XX"},
}


def model_types() -> list[str]:
    """All model types of `AutoModelForCausalLM`."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The type's config with small sizes; the fields that `changes` names as it says."""
    kind = CONFIG_MAPPING[model_type]
    return _resized(kind, kind(), dict(changes or {}))


def _resized(kind: Any, plain: Any, changes: dict[str, Any]) -> Any:
    stored = plain.to_dict()
    fields: dict[str, Any] = {}
    for name, value in stored.items():
        if name in kind.attribute_map:
            continue
        part = vars(plain).get(name)
        if isinstance(part, transformers.PretrainedConfig):
            fields[name] = _resized(type(part), part, dict(changes)).to_dict()
        elif name in _SIZES and (value is not None or name in _NEEDED):
            fields[name] = _SIZES[name]
    fields.update(_few_layers(stored, fields))
    for name, together in _TOGETHER.items():
        if name in stored:
            fields.update(together)
    if "conv_L_cache" in stored and "layer_types" not in fields:
        fields["layer_types"] = ["conv", "full_attention"]
    if stored.get("rope_parameters") == {} and stored.get("layer_types"):
        rope = {"rope_type": "default", "rope_theta": 1e4}
        fields["rope_parameters"] = dict.fromkeys(fields["layer_types"], rope)
    fields.update({name: value for name, value in changes.items() if name in stored or name in fields})
    return kind(**fields)


def _few_layers(stored: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something of each layer, for two layers or as many as there are kinds of them."""
    counts = [name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields]
    lists = {
        name: value
        for name, value in stored.items()
        if isinstance(value, (list, tuple)) and value and all(isinstance(kind, str) for kind in value)
        if len(value) in [stored[count] for count in counts]
    }
    each = list(zip(*lists.values(), strict=True))
    first = [each.index(kind) for kind in dict.fromkeys(each)] or [0]
    chosen = [first[i % len(first)] for i in range(max(2, len(first)))]
    fields_of_layers: dict[str, Any] = {name: [value[layer] for layer in chosen] for name, value in lists.items()}
    if isinstance(stored.get("per_layer_config"), Mapping):
        changes = {int(layer): fields for layer, fields in stored["per_layer_config"].items()}
        sizes = {**_SIZES, **_TOGETHER["kv_lora_rank"]}
        fields_of_layers["per_layer_config"] = {
            place: {
                **{name: sizes.get(name, value) for name, value in changes[layer].items()},
                **({"head_dim": 24} if "qk_nope_head_dim" in changes[layer] else {}),  # the rotated part and the other
            }
            for place, layer in enumerate(chosen)
            if layer in changes
        }
    return {**fields_of_layers, **(dict.fromkeys(counts, len(chosen)) if lists else {})}


def randomize(model: Any, seed: int = 0) -> None:
    """Randomize every parameter, biases and norms too, so that each affects the result.

    Embeddings are small: else a model whose head is tied to them repeats its last token, whatever its layers do.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                fan = parameter.shape[-1] if parameter.ndim == 2 else parameter.shape[-2]
                parameter.copy_(noise * (1.5 / max(1, fan) ** 0.5))
            else:
                parameter.copy_(parameter.nan_to_num().clamp(-4, 4) + 0.1 * noise)
        model.get_input_embeddings().weight.mul_(0.1)


def attempt(action: Callable[[], Outcome]) -> Outcome:
    """The outcome of an action; an error of ours of one sentence is a refusal, any other is raw."""
    try:
        return action()
    except NPUError as error:
        text = str(error)
        if "\n" in text or len(text) > 500:
            return Outcome("raw", f"a long refusal: {text[:300]!r}")
        return Outcome("refused", text)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames)), "")
        return Outcome("raw", f"{type(error).__name__}: {str(error)[:300]!r} at {where}")


def opened(folder: Path) -> Outcome:
    from npu_sim.llm import load_checkpoint

    load_checkpoint(folder, "float32")
    return Outcome("right")


def built(folder: Path) -> Outcome:
    """The outcome of a folder whose weights do not fit: nothing but a refusal is right."""
    from npu_sim.llm import LanguageModel, load_checkpoint

    LanguageModel(load_checkpoint(folder, "float32"), device="cpu")
    return Outcome("wrong", "it was taken without its weights")


def computes_whole(folder: Path) -> bool:
    """Whether no step can continue another one; False where the checkpoint is refused."""
    from npu_sim.llm import load_checkpoint
    from npu_sim.llm.graph import state_form

    with contextlib.suppress(NPUError):
        return state_form(load_checkpoint(folder, "float32")).is_whole
    return False


def tried(
    model_type: str, changes: Mapping[str, Any] | None = None, dtypes: Iterable[str] = DTYPES, device: str = "cpu"
) -> dict[str, Outcome]:
    """The outcomes of a model type by route on a device.

    They are `generate` and `serve` for float32, and the same with another dtype behind a space; `open` alone where the
    checkpoint is refused, beside `eager` where transformers does not run its own model. In few bits, two of three
    models decide: where rounding makes one choose other experts or keys, the error is that of the choice.
    """
    outcomes = _tried(model_type, changes, dtypes, device)
    doubtful = [label for label, outcome in outcomes.items() if outcome.kind == "wrong" and " " in label]
    if doubtful:
        again = {dtype for label in doubtful for dtype in DTYPES if label.endswith(f" {dtype}")}
        others = [_tried(model_type, changes, sorted(again), device, seed) for seed in (1, 2)]
        for label in doubtful:
            if all(other.get(label, outcomes[label]).kind == "right" for other in others):
                outcomes[label] = Outcome("right", "in two of three random models")
    return outcomes


def _tried(
    model_type: str, changes: Mapping[str, Any] | None, dtypes: Iterable[str], device: str, seed: int = 0
) -> dict[str, Outcome]:
    """The outcomes of a model whose weights `seed` decides; arguments and result as of `tried`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        try:
            save_tiny(model_type, folder, changes, seed)
            eager = Eager(folder)
        except Exception as error:  # transformers does not run such a model
            shutil.rmtree(folder, ignore_errors=True)
            save_default(model_type, folder)
            reason = (str(error).strip().splitlines() or [""])[0]
            failed = Outcome("fails", f"{type(error).__name__}: {reason:.200}")
            return {"eager": failed, "open": attempt(lambda: built(folder))}
        opening = attempt(lambda: opened(folder))
        if opening.kind != "right":
            return {"open": opening}
        outcomes, note = {}, WHOLE if computes_whole(folder) else ""
        for dtype, (name, route) in product(dtypes, ROUTES.items()):
            judge = partial(judged, eager, dtype)
            label = name if dtype == "float32" else f"{name} {dtype}"
            outcome = attempt(lambda route=route, judge=judge, dtype=dtype: judge(route(folder, dtype, device)))
            noted = ", ".join(filter(None, (note, outcome.detail))) if outcome.kind == "right" else outcome.detail
            outcomes[label] = replace(outcome, detail=noted)
        return outcomes


def save_tiny(model_type: str, folder: Path, changes: Mapping[str, Any] | None = None, seed: int = 0) -> None:
    """A folder with a tiny random model; its config is the whole one where the class itself keeps the part for text."""
    torch.manual_seed(seed)  # some initial values stay, in part
    config = tiny_config(model_type, changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None)
    model.save_pretrained(folder)
    if model.config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.save_pretrained(folder)


def save_default(model_type: str, folder: Path) -> None:
    """A folder with the type's default config and one small tensor."""
    folder.mkdir(exist_ok=True)
    try:
        CONFIG_MAPPING[model_type]().save_pretrained(folder)
    except Exception:  # some configs need arguments
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"model.layers.0.weight": torch.zeros(1)}, folder / "model.safetensors")


def _child(send: Any, action: Callable[[], dict[str, Outcome]]) -> None:
    start = time.monotonic()
    torch.set_num_threads(1)  # a forked process lacks the others, and PyTorch crashes where it asks for them
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        outcomes = action()
    send.send((outcomes, time.monotonic() - start))


def isolated(action: Callable[[], dict[str, Outcome]]) -> tuple[dict[str, Outcome], float]:
    """The outcomes of an action in a process of its own, and the seconds that it took."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(False)
    process = context.Process(target=_child, args=(send, action))
    process.start()
    send.close()
    try:
        if not receive.poll(SECONDS):
            return {"all": Outcome("raw", f"no answer in {SECONDS} s")}, SECONDS
        return receive.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return {"all": Outcome("raw", f"the process ended with {process.exitcode}")}, 0.0
    finally:
        process.kill()
        process.join()


def print_outcomes(
    tries: Iterable[tuple[str, Callable[[], dict[str, Outcome]]]],
    note: Callable[[str, dict[str, Outcome]], None] = lambda title, outcomes: None,
) -> int:
    """Try models, each in a process of its own, and print the outcomes; return 1 if one is wrong or raw.

    Args:
        tries: A model's title, and what tries it.
        note: Is told each model's title and outcomes.
    """
    counts: Counter[str] = Counter()
    for title, action in tries:
        outcomes, seconds = isolated(action)
        for route, outcome in outcomes.items():
            counts[outcome.kind] += 1
            print(f"{title:32} {route:17} {outcome.kind:8} {seconds:5.1f}s {outcome.detail}", flush=True)
        note(title, outcomes)
    print(dict(counts))
    return 1 if counts["wrong"] or counts["raw"] else 0


def _without_place(outcome: Outcome) -> Outcome:
    """An outcome that does not say in which temporary folder the model lay."""
    return replace(outcome, detail=re.sub(r"/\S*/(?=model\b)", "", outcome.detail))


def _import() -> None:
    """Import what the processes then have, which takes most of the time of trying a type."""
    modules = (
        "torch._dynamo",
        "torch.distributed.tensor",
        "transformers.modeling_utils",
        "transformers.modeling_layers",
    )
    for module in (*modules, "npu_sim.llm", "npu_sim.module.trace", "npu_sim.serving.paged_model"):
        importlib.import_module(module)


def main(names: Iterable[str], results: Path | None, dtypes: Iterable[str], device: str) -> int:
    """Try model types on a device, and merge their outcomes into a file of results, if one is given."""
    _import()
    known = json.loads(results.read_text()) if results is not None and results.is_file() else {}

    def note(name: str, outcomes: dict[str, Outcome]) -> None:
        known[name] = {route: asdict(_without_place(outcome)) for route, outcome in outcomes.items()}
        if results is not None:
            ordered = {kind: known[kind] for kind in sorted(known)}
            results.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")

    tries = ((name, partial(tried, name, dtypes=dtypes, device=device)) for name in names or model_types())
    return print_outcomes(tries, note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, help="JSON file of outcomes that is updated")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # many small products
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.results, arguments.dtypes, arguments.device))
