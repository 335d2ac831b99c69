"""Decoders are right or refused by name: checkpoints of every model type, and of what configs can say."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import decoder_answers
import decoder_draws
import decoder_features
import decoder_variants
import decoders
import numpy as np
import pytest
import torch
from drawn import drawn
from safetensors.torch import load_file, save_file
from tiny_llms import VOCAB, save_tiny
from transformers import masking_utils

from benchmarks.pages import model_types
from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.quantization import QuantizedFormat, quantize
from npu_compiler.installing import install_command
from npu_sim.llm import LanguageModel, cache_capacity, load_checkpoint, make_sampler
from npu_sim.llm.attention import (
    PageMask,
    Paging,
    PlacedMask,
    RowPlaces,
    additive,
    attend_to_pages,
    attend_to_rows,
    mask_window,
    window_of,
)
from npu_sim.llm.checkpoint import as_input_error
from npu_sim.llm.context import context_length
from npu_sim.llm.graph import PagedShape, extract_paged, layer_states, meta_model, state_form, state_with_buffers
from npu_sim.llm.model_types import tried_types
from npu_sim.llm.modules import first_position
from npu_sim.llm.sampling import penalized
from npu_sim.llm.stored_names import Interleaved, Piece, Rows
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request, SamplingSettings

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shared_programs")
PROMPT = [5, 9, 77, 31, 2, 8, 9, 9, 60, 31]
VARIANTS = (
    *("config: cohere with logit_scale", "config: gemma3_text with final_logit", "config: llama with head_dim 32"),
    *("config: olmo with clip_qkv", "config: gpt2 with scale_attn_by", "config: stablelm with use_qkv_bias"),
    *("stored: llama, generation_config.json with repetition_penalty 0.6", "stored: gpt_neox, config.json with rope"),
    *("file: tied beside another head", "file: awq", "file: a shard is missing", "file: float8 and scales"),
    *("gguf: qwen2 with rope__freq_base 300", "gguf: llama in Q8_0"),
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", "float32")


def changed(folder: Path, target: Path, file: str = "config.json", **fields: Any) -> Path:
    """A copy of a folder in which a JSON file has other fields; those that are `...` are left out."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    whole = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    whole = {name: value for name, value in {**whole, **fields}.items() if value is not ...}
    (target / file).unlink(missing_ok=True)
    (target / file).write_text(json.dumps(whole))
    return target


def continued(folder: Path, count: int = 12) -> list[int]:
    """Greedy tokens of transformers' own `generate`, which knows the folder's generation config."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [token for token in found[0, len(PROMPT) :].tolist() if token not in (2, 3)]


def generated(folder: Path, count: int = 12) -> list[int]:
    return list(
        LanguageModel(load_checkpoint(folder, "float32"), cache_length=32, device="cpu").generate(PROMPT, count)
    )


def served(folder: Path, *settings: SamplingSettings, speculate: bool = False) -> list[list[int]]:
    model = PagedModel(load_checkpoint(folder, "float32"), context_length=32, max_sequences=4, device="cpu")
    model.checkpoint.load_tokenizer = lambda: SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: "")
    with Engine(model, model.checkpoint, speculate="ngram" if speculate else None) as engine:
        updates = engine.generate([Request(tuple(PROMPT), 12, sampling) for sampling in settings])
    assert not any(update.error for update in updates), updates
    return [list(update.tokens) for update in updates]


def test_every_model_type_of_transformers_was_tried_and_none_is_wrong() -> None:
    outcomes = json.loads((ROOT / "npu_sim" / "data" / "model_types.json").read_text())
    assert set(decoders.model_types()) <= set(outcomes)  # an older transformers has fewer
    kinds = {name: {outcome["kind"] for outcome in routes.values()} for name, routes in outcomes.items()}
    assert {name: kind for name, kind in kinds.items() if not kind <= {"right", "refused", "fails"}} == {}
    failing = {route for routes in outcomes.values() for route, outcome in routes.items() if outcome["kind"] == "fails"}
    assert failing <= {"eager", "generate bfloat16", "serve bfloat16"}  # of transformers itself


def test_most_of_what_eager_pytorch_runs_is_right() -> None:
    types = [kind for kind in tried_types() if not kind.eager]
    assert sum(kind.generate and kind.serve for kind in types) >= 0.95 * len(types)


def test_the_page_of_model_types_is_current() -> None:
    page = model_types.PAGE.read_text()
    assert page == model_types.document(tried_types()), "run `python -m benchmarks.pages.model_types`"


@pytest.mark.parametrize("model_type", ["xlnet", "prophetnet"])
def test_model_types_that_are_not_computed_right_are_refused_in_a_sentence(model_type: str) -> None:
    outcomes = decoders.tried(model_type, dtypes=("float32",))
    assert {outcome.kind for outcome in outcomes.values()} == {"refused"}, outcomes


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("gemma2", "float32"),
        pytest.param("gpt_oss", "float32", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_model_type_is_right_by_both_routes(model_type: str, dtype: str) -> None:
    """Layers alternate between a window and all tokens; those of Gemma 2 cap scores, those of gpt-oss have sinks."""
    outcomes = decoders.tried(model_type, dtypes=(dtype,))
    assert {outcome.kind for outcome in outcomes.values()} == {"right"}, outcomes


QWEN2_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": decoders.WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}


WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": QWEN2_WINDOWS,
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "exaone4": {},
    "ministral": {},
    "gpt_oss": {},
}


@pytest.mark.parametrize("model_type", drawn(WITH_WINDOWS, 1 / 4))
def test_layers_with_windows_soft_caps_and_sinks_read_the_pool_in_place(model_type: str, tmp_path: Path) -> None:
    decoders.save_tiny(model_type, tmp_path / "model", WITH_WINDOWS[model_type])
    checkpoint = load_checkpoint(tmp_path / "model", "float32")
    states = layer_states(checkpoint)
    assert state_form(checkpoint).is_paged and decoders.WINDOW in [state.window for state in states]
    shape = PagedShape(4, 4, 2, blocks_per_sequence=2, blocks=5, block_size=16, history=8)
    nodes = [node for node in extract_paged(checkpoint, shape)["nodes"] if "paged_attention" in node["op_type"]]
    cap = getattr(checkpoint.config, "attn_logit_softcapping", None) or 0.0
    found = [[node["attrs"][name] for name in ("window", "soft_cap")] for node in nodes]
    assert found == [[state.window, cap] for state in states]
    assert {len(node["inputs"]) for node in nodes} == {7 if model_type == "gpt_oss" else 6}


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_are_part_of_attention_over_a_cache_in_one_piece(model_type: str, tmp_path: Path) -> None:
    decoders.save_tiny(model_type, tmp_path / "model")
    checkpoint = load_checkpoint(tmp_path / "model", "float32")
    calls = LanguageModel(checkpoint, device="cpu", cache_length=32).decode_program.kernels
    layers, cap = checkpoint.config.num_hidden_layers, getattr(checkpoint.config, "attn_logit_softcapping", 0.0)
    has_sinks = routes = model_type == "gpt_oss"
    features = [(call.params["soft_cap"], call.params["has_sinks"]) for call in calls if "attention" in call.kernel]
    assert features == [(cap, int(has_sinks))] * layers
    assert [call.kernel for call in calls].count("softmax_kernel") == (layers if routes else 0)


@pytest.mark.parametrize("model_type", drawn(["mistral", "gemma2", "gpt_oss"], 2 / 3))
def test_pieces_of_prompts_that_end_anywhere_in_a_window_are_right(model_type: str, tmp_path: Path) -> None:
    """Steps of few tokens of several sequences; all of Mistral's layers have windows, so its blocks are released."""
    decoders.save_tiny(model_type, tmp_path / "model")
    eager = decoder_answers.Eager(tmp_path / "model")
    whole = decoder_answers.prompts()[0]
    prompts = [whole, whole[7:50], whole[:5], whole[20:54]]
    sizes = {"block_size": 4, "blocks": 60, "max_tokens": 19, "max_sequences": 3}
    answers = decoder_answers.served(tmp_path / "model", asked=prompts, **sizes)
    outcome = decoder_answers.judged(eager, "float32", answers)
    assert outcome.kind == "right", outcome


_RANDOM = Random(int(os.environ["TEST_SEED"]))
DRAWN = [(name, _RANDOM.choice(decoders.DTYPES)) for name in _RANDOM.sample(decoders.model_types(), 12)]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "dtype"), DRAWN)
def test_model_types_do_what_the_page_says_or_better(model_type: str, dtype: str) -> None:
    """`make test-decoders` tries all of them in all dtypes; each takes a process of its own for some seconds."""
    known = json.loads((ROOT / "npu_sim" / "data" / "model_types.json").read_text())[model_type]
    outcomes, _ = decoders.isolated(lambda: decoders.tried(model_type, dtypes=(dtype,)))
    allowed = {"right"} | {outcome["kind"] for outcome in known.values()} & {"refused", "fails"}
    assert {outcome.kind for outcome in outcomes.values()} <= allowed, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("model_type", _RANDOM.sample(decoders.model_types(), 12))
def test_random_configs_are_computed_or_refused(model_type: str) -> None:
    """`make test-decoders` draws one of each model type."""
    outcomes, _ = decoders.isolated(lambda: decoder_draws.tried(model_type, int(os.environ["TEST_SEED"])))
    assert outcomes and {outcome.kind for outcome in outcomes.values()} <= {"right", "refused", "fails"}, outcomes


def check_variant(name: str) -> None:
    (save,) = [save for other, save in decoder_variants.variants().items() if other.startswith(name)]
    outcomes = decoder_variants.tried(save)
    assert {outcome.kind for outcome in outcomes.values()} <= {"right", "refused"}, outcomes


@pytest.mark.parametrize("name", ["config: granite with embedding_multiplier", "file: gpt2 without a prefix"])
def test_what_a_checkpoint_says_is_computed(name: str) -> None:
    check_variant(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_checkpoint_says_is_computed_or_refused(name: str) -> None:
    """`make test-decoders` tries all variants."""
    check_variant(name)


def test_parts_of_a_parameter_are_joined_and_divided_as_transformers_does(rng: np.random.Generator) -> None:
    first, second = rng.normal(size=(2, 4, 3)).astype(np.float32)
    state = {"q": first, "k": second}
    np.testing.assert_array_equal(Rows(("q", "k")).read(state), np.concatenate([first, second]))
    np.testing.assert_array_equal(Piece("q", 1, 2).read(state), first[2:])
    mixed = {"q": np.stack([first, second], 1).reshape(1, 8, 3)}
    np.testing.assert_array_equal(Interleaved("q", 1).read(mixed)[0], np.concatenate([first, second]))
    few = {"q": quantize(np.tile(first, 16), QuantizedFormat("int8"))}
    with pytest.raises(InputError, match="'q' is stored in few bits and joined or divided by transformers"):
        Piece("q", 0, 2).read(few)


def test_positions_begin_after_those_of_padding_where_a_module_counts_so() -> None:
    for model_type, first in (("roberta", 1), ("bert", 0)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(decoders.tiny_config(model_type))
        assert first_position(model) == first


@pytest.mark.parametrize("masked", [False, True])
def test_attention_sees_the_keys_that_are_chosen_for_a_query(masked: bool, rng: np.random.Generator) -> None:
    query, key, value = torch.from_numpy(rng.normal(size=(3, 1, 2, 3, 4)).astype(np.float32))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril() if masked else torch.ones(1, 1, 3, 3, dtype=torch.bool)
    chosen = torch.tensor([[[0, 0], [0, 1], [0, 2]]])
    seen = mask & torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    found, _ = attend_to_rows(torch.nn.Identity(), query, key, value, mask, indices=chosen)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2)
    torch.testing.assert_close(found, expected)


def test_a_mask_that_a_module_makes_of_the_causal_one_is_added(rng: np.random.Generator) -> None:
    query, key, value = torch.from_numpy(rng.normal(size=(3, 1, 2, 3, 4)).astype(np.float32))
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    mask = torch.from_numpy(rng.normal(size=(1, 2, 3, 3)).astype(np.float32)) + additive(seen, torch.float32)
    chosen = torch.tensor([[[0, 0], [0, 1], [0, 2]]])
    fewer = mask.masked_fill(
        torch.tensor([[False, True, True], [False, False, True], [False, True, False]]), -torch.inf
    )
    for indices, shown in ((None, mask), (chosen, fewer)):
        found, _ = attend_to_rows(torch.nn.Identity(), query, key, value, mask, indices=indices)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, shown).transpose(1, 2)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [0, 1, 3, 9])
def test_a_modules_own_mask_is_that_of_a_steps_places(window: int, rng: np.random.Generator) -> None:
    size = 12
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    mask = (mask & ~mask.tril(-window) if window else mask)[None, None]
    assert mask_window(mask.float()) == window
    queries = torch.from_numpy(rng.integers(0, size, 4))
    shown = PlacedMask(RowPlaces(queries, size), window)[:, :, 3:5, :2]
    assert torch.equal(shown, mask[:, :, queries])
    assert mask_window(mask.logical_not()) is None


def test_buffers_that_a_model_fills_for_its_parts_are_computed(tmp_path: Path) -> None:
    decoders.save_tiny("falcon_h1", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    stored = state_with_buffers(load_checkpoint(tmp_path, "float32"))
    own = {name: x.numpy() for name, x in model.named_buffers() if name.endswith("mup_vector")}
    assert own
    for name, expected in own.items():
        np.testing.assert_array_equal(stored[name], expected)


def test_a_feature_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    """`make test-decoders` leaves out every field of the config and every kind of parameter of several model types."""
    folder = tmp_path / "whole"
    decoders.save_tiny("gpt_oss", folder)
    eager = decoder_answers.Eager(folder)
    tokens = eager.continued(decoder_answers.prompts()[0])
    assert decoder_answers.compared(decoder_features.traced_answer(folder, tokens), eager).kind == "right"
    sinks = [name for name in load_file(folder / "model.safetensors") if name.endswith("sinks")]
    without = {
        "sinks": decoder_features.without_parameters(folder, tmp_path / "sinks", sinks),
        "window": decoder_features.with_field(folder, tmp_path / "window", ("sliding_window",), decoders.CONTEXT),
    }
    found = {name: decoder_features.noticed(eager, tokens, other).kind for name, other in without.items()}
    assert sinks and found == {"sinks": "noticed", "window": "noticed"}


def test_names_in_files_are_those_of_transformers_own(tmp_path: Path) -> None:
    """Files of GPT-NeoX name their head as older versions do; those of GPT-2 and of base models lack a prefix."""
    for family, head in (("gpt_neox", "embed_out.weight"), ("gpt2", "lm_head.weight")):
        folder = decoder_variants.save_model(tmp_path / family, family)
        if family == "gpt2":
            decoder_variants.retensor(folder, decoder_variants.renamed("transformer.", ""))
        checkpoint = load_checkpoint(folder, "float32")
        assert head in checkpoint.state or family == "gpt2"
        assert set(meta_model(checkpoint).state_dict()) <= set(state_with_buffers(checkpoint))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (decoder_variants.replaced("model.norm.weight", lambda x: None), "the files of m lack 'model.norm.weight'"),
        (
            decoder_variants.added(model__novel__weight=torch.ones(3)),
            "hold 'model.novel.weight', which a model of",
        ),
        (
            decoder_variants.replaced("model.norm.weight", lambda x: x[:-1]),
            r"'model.norm.weight' of m has the shape \[63\], but its config says \[64\]",
        ),
    ],
)
def test_files_that_do_not_fit_their_config_are_refused_in_a_sentence(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    """Misfits are refused before anything is compiled."""
    shutil.copytree(llama, tmp_path / "m")
    decoder_variants.retensor(tmp_path / "m", change)
    monkeypatch.setattr("npu_sim.llm.graph.cached_program", None)
    for opening in (LanguageModel, PagedModel):
        with pytest.raises(InputError, match=message) as caught:
            opening(load_checkpoint(tmp_path / "m", "float32"), device="cpu")
        assert "\n" not in str(caught.value)


def test_a_weight_that_is_not_a_number_is_one_sentence(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "m")
    change = decoder_variants.replaced("0.mlp.up_proj.weight", lambda x: x * torch.nan)
    decoder_variants.retensor(tmp_path / "m", change)
    with pytest.raises(WeightError, match=r"not a number: 'model.layers.0.mlp.up_proj.weight' contains NaN$") as caught:
        LanguageModel(load_checkpoint(tmp_path / "m", "float32"), cache_length=32, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "1000000000 for 'num_hidden_layers', which is a whole number from 1 to 2048"),
        ({"num_labels": 10**18}, "1000000000000000000 for 'num_labels'"),
        ({"vocab_size": 10**12}, "1000000000000 for 'vocab_size'"),
        (
            {"vocab_size": VOCAB + 1},
            f"says a vocabulary of {VOCAB + 1} tokens, but 'model.embed_tokens.weight' has {VOCAB}",
        ),
        ({"num_hidden_layers": 900}, "says 900 layers, but its files hold 2"),
        ({"num_hidden_layers": -1}, "-1 for 'num_hidden_layers'"),
        ({"hidden_size": "64"}, "'64' for 'hidden_size'"),
        ({"hidden_size": 64.5}, "64.5 for 'hidden_size'"),
        ({"num_attention_heads": True}, "True for 'num_attention_heads'"),
        ({"num_key_value_heads": [2]}, r"\[2\] for 'num_key_value_heads'"),
        ({"rms_norm_eps": float("nan")}, "nan for 'rms_norm_eps'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}}, "1e\\+300 for 'rope_theta'"),
        ({"model_type": ...}, "names no model_type"),
        ({"model_type": ["llama"]}, "names no model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model .LlamaForSequence"),
        ({"architectures": ["LlamaModel"]}, "an embedding model .LlamaModel"),
        ({"add_cross_attention": True}, "a decoder that attends to an encoder .add_cross_attention"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, "text and images or sound, of which .*model type .qwen2_vl."),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "an embedding model .BertModel, model type .bert."),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder .model type 't5'"),
        *(
            ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, **values}}, message)
            for values, message in (
                ({"factor": "4"}, "'4' for 'factor', which is a number above 0"),
                ({"factor": 0.0}, "0.0 for 'factor'"),
                ({"factor": 2.0, "rope_theta": 0}, "0 for 'rope_theta'"),
                ({}, "Missing required keys in `rope_parameters` for 'rope_type'='linear'"),
            )
        ),
        ({"rope_parameters": {"rope_type": "novel", "factor": 2.0, "rope_theta": 1e4}}, "RoPE scaling 'novel'"),
        ({"model_type": "granite", "logits_scaling": 0.0}, "0.0 for 'logits_scaling', which is a number above 0"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_anything_is_built(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", None)
    folder = changed(llama, tmp_path / "m", **fields)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_error_of_transformers_is_one_sentence_with_its_reason() -> None:
    for text, said in (("wrong: no\nmore", "wrong: no"), ("wrong:\n    why\nmore", "wrong: why"), ("", "ValueError")):
        with pytest.raises(InputError) as raised, as_input_error("x cannot be used"):
            raise ValueError(text)
        assert str(raised.value) == f"x cannot be used: {said}"


def test_an_adapter_is_said_to_be_one(llama: Path, tmp_path: Path) -> None:
    """An adapter is refused beside a whole model too, since its weights would not be used."""
    tmp_path.joinpath("alone").mkdir()
    (tmp_path / "alone" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    beside = changed(llama, tmp_path / "beside", "adapter_config.json", peft_type="LORA")
    for folder, name in ((tmp_path / "alone", " for 'org/base'"), (beside, "")):
        with pytest.raises(InputError, match=f"holds a LoRA adapter{name}, not a whole model; open the base model and"):
            load_checkpoint(folder)


def test_a_config_that_says_tied_does_not_replace_another_head(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tied", "llama", "float32", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    heads = {"same": weights["model.embed_tokens.weight"].clone(), "other": torch.randn(VOCAB, 64)}
    expected = {}
    for name, head in heads.items():
        target = changed(folder, tmp_path / name)
        (target / "model.safetensors").unlink()
        save_file({**weights, "lm_head.weight": head}, target / "model.safetensors", {"format": "pt"})
        expected[name] = continued(target)
        assert generated(target) == expected[name]
        assert load_checkpoint(target).config.tie_word_embeddings == (name == "same")
    assert expected["same"] != expected["other"]
    assert served(tmp_path / "other", SamplingSettings()) == [expected["other"]]


def test_other_files_beside_the_model_do_not_replace_its_tensors(llama: Path, tmp_path: Path) -> None:
    """transformers reads model.safetensors and nothing else."""
    folder = changed(llama, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(x) for name, x in weights.items()}, folder / "training_state.safetensors")
    state = load_checkpoint(folder, "float32").state
    assert np.asarray(state["model.embed_tokens.weight"]).any()


def test_a_repetition_penalty_is_applied_as_transformers_does(llama: Path, tmp_path: Path) -> None:
    folder = changed(llama, tmp_path / "m", "generation_config.json", repetition_penalty=1.7)
    expected = continued(folder)
    assert expected != continued(llama)
    assert generated(folder) == expected
    neutral, sampled = SamplingSettings(repetition_penalty=1.0), SamplingSettings(0.8, seed=3)
    for speculate in (False, True):
        own, without, drawn = served(folder, SamplingSettings(), neutral, sampled, speculate=speculate)
        assert own == expected and without == continued(llama)
        model = LanguageModel(load_checkpoint(folder, "float32"), cache_length=32, device="cpu")
        assert drawn == list(model.generate(PROMPT, 12, make_sampler(0.8, seed=3)))


def test_a_penalty_is_that_of_transformers(rng: np.random.Generator) -> None:
    logits, tokens = rng.normal(size=50).astype(np.float32), rng.integers(0, 50, 20).tolist()
    process = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    expected = process(torch.tensor([tokens]), torch.from_numpy(logits)[None])[0].numpy()
    np.testing.assert_array_equal(penalized(logits, tokens, 1.3), expected)
    assert penalized(logits, tokens, 1.0) is logits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_repeat_ngram_size": 3}, "asks for no_repeat_ngram_size=3, which is not supported"),
        ({"bad_words_ids": [[4]]}, "asks for bad_words_ids="),
        ({"suppress_tokens": [4]}, "asks for suppress_tokens="),
        ({"num_beams": 4}, "asks for num_beams=4"),
        ({"min_new_tokens": 5}, "asks for min_new_tokens=5"),
        ({"guidance_scale": 1.5}, "asks for guidance_scale=1.5"),
        ({"repetition_penalty": 0.0}, "0.0 for 'repetition_penalty'"),
        ({"repetition_penalty": "x"}, "repetition_penalty"),
        ({"do_sample": True, "min_p": 1.5}, "1.5 for 'min_p', which is a number from 0 to 1"),
        ({"do_sample": True, "top_p": "x"}, "'x' for 'top_p', which is a number above 0 and at most 1"),
    ],
)
def test_what_a_generation_config_asks_for_is_not_dropped(
    llama: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = changed(llama, tmp_path / "m", "generation_config.json", **fields)
    for opening in (LanguageModel, PagedModel):
        with pytest.raises(InputError, match=message):
            opening(load_checkpoint(folder, "float32"), device="cpu")


@pytest.mark.parametrize("do_sample", [True, False, ...])
def test_sampling_settings_are_read_unless_it_says_not_to_sample(llama: Path, tmp_path: Path, do_sample: Any) -> None:
    fields = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "do_sample": do_sample}
    folder = changed(llama, tmp_path / "m", "generation_config.json", **fields)
    wanted = {} if do_sample is False else {"temperature": 0.6, "top_k": 20}
    assert load_checkpoint(folder).sampling == wanted


def test_neutral_settings_of_generation_are_taken(llama: Path, tmp_path: Path) -> None:
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "guidance_scale": 1.0, "temperature": 0.6, "do_sample": True}
    folder = changed(llama, tmp_path / "m", "generation_config.json", **neutral)
    assert load_checkpoint(folder).unsupported == ()


def test_a_processor_in_the_config_itself_counts(llama: Path, tmp_path: Path) -> None:
    """Old checkpoints have no generation config; transformers then looks into the config."""
    folder = changed(llama, tmp_path / "m", repetition_penalty=1.7)
    (folder / "generation_config.json").unlink()
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.repetition_penalty == 1.7
    assert load_checkpoint(folder).repetition_penalty == 1.7


@pytest.mark.parametrize("rows", [1, 3])
def test_a_sink_takes_its_share_of_the_weights(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    query, sinks = torch.randn(2, 6, rows, 4, generator=generator), torch.randn(6, generator=generator)
    key, value = torch.randn(2, 2, 2, 5, 4, generator=generator)
    mask = torch.rand(1, 1, rows, 5, generator=generator) < 0.7
    found, _ = attend_to_rows(torch.nn.Identity(), query, key, value, mask, scaling=0.3, s_aux=sinks)
    wide_key, wide_value = (x.repeat_interleave(3, 1) for x in (key, value))
    weights = torch.where(mask, (0.3 * query @ wide_key.transpose(2, 3)).exp(), 0.0)
    expected = weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ wide_value
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_attention_refuses_what_it_does_not_compute(llama: Path) -> None:
    query, mask = torch.zeros(1, 2, 3, 4), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    asked = {"s_aux": torch.zeros(2), "softcap": 30.0, "position_bias": torch.zeros(1), "novel": 1}
    paging = Paging(*(torch.zeros(3, dtype=torch.long) for _ in "ps"), torch.zeros(1, 1, dtype=torch.long), 16)
    pool = torch.zeros(16, 2, 4)
    for name, value in asked.items():
        if name != "s_aux":  # which rows of a cache have a function for
            with pytest.raises(InputError, match=name):
                attend_to_rows(torch.nn.Identity(), query, query, query, mask, scaling=1.0, **{name: value})
        if name not in ("softcap", "s_aux"):  # which pages have parameters for
            asked = {name: value}
            with pytest.raises(InputError, match=name):
                attend_to_pages(torch.nn.Identity(), query, pool, pool, PageMask(paging, 0), scaling=1.0, **asked)
    with pytest.raises(InputError, match="a dropout of 0.1"):
        attend_to_rows(torch.nn.Identity(), query, query, query, mask, dropout=0.1)
    with pytest.raises(InputError, match="a mask of its own"):
        attend_to_rows(torch.nn.Identity(), query, query, query, None)


@pytest.mark.parametrize("window", [1, 2, 16, 4096])
def test_the_window_of_a_mask_is_what_transformers_shows(window: int) -> None:
    assert window_of(masking_utils.sliding_window_causal_mask_function(window)) == window


def test_masks_that_are_no_window_have_none() -> None:
    padding = torch.zeros(1, dtype=torch.long)
    assert window_of(masking_utils.causal_mask_function) == 0
    assert window_of(masking_utils.chunked_causal_mask_function(8, padding)) is None
    shifted = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k >= 3)
    assert window_of(shifted) is None
    with pytest.raises(InputError, match="not causal"):
        window_of(masking_utils.bidirectional_mask_function)


def test_frequencies_that_depend_on_a_sequences_length_limit_the_context(llama: Path, tmp_path: Path) -> None:
    factors = [1.0] * (json.loads((llama / "config.json").read_text())["head_dim"] // 2)
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 48
    folder = changed(llama, tmp_path / "m", rope_parameters=rope)
    checkpoint = load_checkpoint(folder, "float32")
    assert cache_capacity(checkpoint) == 48
    with pytest.raises(InputError, match="other rotary frequencies for sequences of more than 48 tokens .longrope."):
        cache_capacity(checkpoint, 64)
    for _ in range(50):
        wanted, chunk = _RANDOM.randint(1, 48), _RANDOM.randint(1, 64)
        used, length = context_length(checkpoint, wanted, chunk)
        assert length <= 48 and length % used == 0 and wanted - used < length < wanted + used, (wanted, chunk)


FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param({"rope_type": "dynamic", "factor": 4.0}, id="dynamic", marks=pytest.mark.slow),
        pytest.param({"rope_type": "longrope", "original_max_position_embeddings": 128, **FACTORS}, id="longrope"),
    ],
)
def test_frequencies_that_hold_in_every_context_are_computed(scaling: dict[str, Any]) -> None:
    fields = {"rope_parameters": {"rope_theta": 1e4, **scaling}, "max_position_embeddings": 256}
    outcomes, _ = decoders.isolated(lambda: decoders.tried("llama", fields, ("float32",)))
    kinds = {route: outcome.kind for route, outcome in outcomes.items()}
    assert kinds == dict.fromkeys(decoders.ROUTES, "right"), outcomes


def test_a_missing_package_is_named_with_what_installs_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_sim.llm import packages

    def absent(name: str) -> str:
        raise packages.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", absent)
    with pytest.raises(InputError, match=rf"needs transformers .*: {re.escape(install_command('llm'))}"):
        load_checkpoint(llama)
