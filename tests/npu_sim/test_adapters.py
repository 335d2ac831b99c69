"""LoRA adapters: merged ones are PEFT's arithmetic; several in a batch are what each of them is alone."""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import served, text_checkpoint
from gguf_files import save_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_adapters import LINEARS, merged_weights, save_adapter, save_merged
from tiny_llms import TEMPLATE, VOCAB, save_tiny, save_tokenizer
from typer.testing import CliRunner

from npu_compiler.errors import InputError
from npu_sim.cli import app
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint
from npu_sim.llm.graph import program_formats, state_with_buffers
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request, Update

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZES = {"block_size": 4, "blocks": 100, "context_length": 48, "max_tokens": 32, "max_sequences": 8}
WEIGHTS = "adapter_model.safetensors"
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("base") / "tiny", "llama", "float32", vocab_size=304)
    save_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    """Two adapters of other ranks and layers."""
    return {
        "wide": save_adapter(base.parent / "wide", base, rank=20, seed=1, use_rslora=True),
        "narrow": save_adapter(base.parent / "narrow", base, ("q_proj", "v_proj", "down_proj"), rank=3, seed=2),
    }


@settings(max_examples=25)
@given(data=st.data())
def test_merged_weights_are_those_of_peft(base: Path, data: st.DataObject) -> None:
    targets = data.draw(st.lists(st.sampled_from(LINEARS), min_size=1, unique=True))
    ranks = data.draw(st.dictionaries(st.sampled_from((*LINEARS, r"layers\.1\.mlp\..*")), st.integers(1, 256)))
    alphas = data.draw(st.dictionaries(st.sampled_from((*LINEARS, LAYER)), st.floats(-64, 64)))
    fields = {"lora_alpha": data.draw(st.integers(1, 512)), "use_rslora": data.draw(st.booleans())}
    fields |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    with tempfile.TemporaryDirectory() as place:
        rank = data.draw(st.integers(1, 256))
        folder = save_adapter(Path(place) / "adapter", base, targets, rank, data.draw(st.integers(0, 9)), **fields)
        merged = state_with_buffers(load_checkpoint(base, "float32", adapter=folder))
        stacked = state_with_buffers(load_checkpoint(base, "float32", adapters={"other": folder, "same": folder}))
        for name, weight in merged_weights(base, folder).items():
            scale = max(1.0, float(np.abs(weight).max()))
            np.testing.assert_allclose(merged[name], weight, rtol=1e-5, atol=1e-5 * scale)
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_a" in stacked:
                a, b = stacked[f"{layer}.lora_a"], stacked[f"{layer}.lora_b"]
                assert a.shape[1] % 16 == 0 and a.shape[0] == 2
                np.testing.assert_allclose(stacked[name] + b[1] @ a[1], weight, rtol=1e-5, atol=1e-5 * scale)


def log_probabilities(folder: Path, ids: list[int], new: int) -> np.ndarray:
    """Log probabilities of transformers after the prompt and after each of its next greedy tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, rows = list(ids), []
    with torch.no_grad():
        for _ in range(new):
            rows.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).numpy())
            ids.append(int(rows[-1].argmax()))
    return np.stack(rows)


def assert_says(update: Update, expected: np.ndarray) -> None:
    """The tokens are the likeliest ones, and their log probabilities these."""
    assert list(update.tokens) == expected.argmax(-1).tolist()
    found = [entry.logprob for entry in update.logprobs]
    np.testing.assert_allclose(found, expected.max(-1), atol=2e-4)


def test_adapters_and_base_in_one_batch_are_each_as_alone(base: Path, adapters: dict[str, Path], seed: int) -> None:
    """All have the same prompt, twice: no block of keys under one adapter is taken for another."""
    checkpoint = load_checkpoint(base, "float32", adapters=adapters)
    prompt, names = np.random.default_rng(seed).integers(4, VOCAB, 21).tolist(), [None, *adapters]
    asked = [Request(tuple(prompt), 6, logprobs=0, adapter=name, stop_ids=frozenset()) for name in names]
    with Engine(PagedModel(checkpoint, device="cpu", **SIZES), checkpoint) as engine:
        first, again = engine.generate(asked), engine.generate(asked)
        assert engine.stats().cached_tokens == 3 * 20
    folders = [base, *(save_merged(base.parent / f"merged {name} {seed}", base, adapters[name]) for name in adapters)]
    expected = [log_probabilities(folder, prompt, 6) for folder in folders]
    assert np.abs(expected[1] - expected[0]).max() > 0.1 < np.abs(expected[2] - expected[0]).max()
    for update, rows in zip([*first, *again], [*expected, *expected], strict=True):
        assert_says(update, rows)
    for name, rows in zip(adapters, expected[1:], strict=True):
        alone = LanguageModel(load_checkpoint(base, "float32", adapter=adapters[name]), device="cpu", cache_length=48)
        assert list(alone.generate(prompt, 6, stop=frozenset())) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_merged_model_is_rounded_as_the_whole_one(
    base: Path, adapters: dict[str, Path], tmp_path: Path, quantization: str
) -> None:
    whole = save_merged(tmp_path / "whole", base, adapters["wide"])
    logits = [
        LanguageModel(checkpoint, device="cpu", cache_length=16).prefill([5, 9, 11, 4])
        for checkpoint in (
            load_checkpoint(base, "float32", quantization, adapter=adapters["wide"]),
            load_checkpoint(whole, "float32", quantization),
        )
    ]
    np.testing.assert_allclose(*logits, atol=1e-3)


def test_weights_in_few_bits_are_widened_where_an_adapter_is_merged(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    stored = save_gguf(base, tmp_path / "tiny.gguf", "Q8_0")
    checkpoint = load_checkpoint(stored, "float32", adapter=adapters["narrow"])
    formats = program_formats(checkpoint)
    assert isinstance(formats, dict) and f"{LAYER}.weight" not in formats
    assert "model.layers.0.self_attn.k_proj.weight" in formats
    found = LanguageModel(checkpoint, device="cpu", cache_length=16).prefill([5, 9, 11, 4])
    wide = load_checkpoint(stored, "float32", "none", adapter=adapters["narrow"])
    expected = LanguageModel(wide, device="cpu", cache_length=16).prefill([5, 9, 11, 4])
    np.testing.assert_allclose(found, expected, atol=1e-2)


def test_quantization_leaves_adapters_that_requests_choose_alone(base: Path, adapters: dict[str, Path]) -> None:
    checkpoint = load_checkpoint(base, "float32", "int8", adapters=adapters)
    model = PagedModel(checkpoint, device="cpu", **SIZES)
    stored = {
        str(spec.recipe.params.get("key")): spec.spec.storage
        for program in model.loaded_programs().values()
        for spec in program.weight_specs.values()
    }
    assert {storage for key, storage in stored.items() if ".lora_" in key} == {"float32"}


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]
A, B = f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight"
BAD: list[tuple[Change, str]] = [
    (lambda config, _: config.update(peft_type="IA3"), "is of the kind 'IA3'; only LORA is supported"),
    (lambda config, _: config.update(use_dora=True), r"scales the rows of weights \(DoRA\), which is not supported"),
    (lambda config, _: config.update(modules_to_save=["lm_head"]), "replaces whole modules of the base"),
    (lambda config, _: config.update(bias="all"), "changes biases"),
    (lambda config, _: config.update(init_lora_weights="pissa"), "was begun by 'pissa'"),
    (lambda config, _: config.update(something_new=3), "asks for 'something_new' = 3"),
    (lambda config, _: config.update(r=257), "has the rank 257 for '.*'; supported are 1 to 256"),
    (lambda config, _: config.update(r=5), "has the rank 5 for '.*' by its config, but matrices of the shapes"),
    (lambda config, _: config.update(r="4"), "has the rank '4'"),
    (lambda config, _: config.update(lora_alpha=float("nan")), "has the lora_alpha nan"),
    (lambda config, _: config.update(target_modules=[]), "names no target_modules"),
    (lambda config, _: config.update(target_modules="(a+"), "whose pattern .* cannot be used"),
    (
        lambda config, _: config.update(target_modules=".*0.*q_proj"),
        "holds '.*q_proj.*', which its target_modules do not",
    ),
    (lambda config, _: config.update(target_modules="all-linear"), "lacks '.*k_proj.lora_A.weight' and those of"),
    (lambda _, tensors: tensors.pop(B), f"lacks '{B}'"),
    (lambda _, tensors: [tensors.pop(A), tensors.pop(B)], f"lacks '{A}'"),
    (lambda _, tensors: tensors.update({A: tensors[A][:, :32].copy()}), "is for another base: its '.*' has 32 inputs"),
    (
        lambda _, tensors: tensors.update({name.replace("0", "7"): tensors[name] for name in (A, B)}),
        "is for another base: base has no linear layer 'model.layers.7.self_attn.q_proj'",
    ),
    (lambda _, tensors: tensors.update({f"{A}x": tensors[A]}), "is neither A nor B of a linear layer"),
    (lambda _, tensors: tensors.clear(), "holds no tensors"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_loaded(
    base: Path, tmp_path: Path, change: Change, message: str
) -> None:
    folder = save_adapter(tmp_path / "adapter", base, ("q_proj",))
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    for options in ({"adapter": folder}, {"adapters": {"one": folder}}):
        with pytest.raises(InputError, match=message.replace("base has", "tiny has")) as caught:
            state_with_buffers(load_checkpoint(base, "float32", **options))
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"the adapter {folder}")


@pytest.mark.parametrize(
    ("targets", "fields"),
    [
        (["q_proj", "k_proj"], {}),
        (["model.layers.0.self_attn.q_proj"], {}),
        (r".*\.(q_proj|up_proj)", {}),
        ("all-linear", {}),
        ("all-linear", {"exclude_modules": ["down_proj"]}),
        (["q_proj"], {"layers_to_transform": [1]}),
        (["q_proj"], {"layers_to_transform": 0, "layers_pattern": "layers"}),
    ],
)
def test_target_modules_name_layers_as_in_peft(
    base: Path, tmp_path: Path, targets: list[str] | str, fields: dict[str, Any]
) -> None:
    """The file has just the layers that the config names: one more or less would be refused."""
    last = {"q_proj", "up_proj"} if isinstance(targets, str) and "|" in targets else {"q_proj", "k_proj"}
    last = set(LINEARS) - set(fields.get("exclude_modules", [])) if targets == "all-linear" else last
    folder = save_adapter(tmp_path / "adapter", base, sorted(last))
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / WEIGHTS)
    if isinstance(targets, list):
        layer = fields.get("layers_to_transform", [0, 1] if "model" not in targets[0] else 0)
        kept = tuple(f".{number}." for number in (layer if isinstance(layer, list) else [layer]))
        names = tuple(f".{target.split('.')[-1]}." for target in targets)
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if any(number in name for number in kept) and any(target in name for target in names)
        }
        save_file(tensors, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets, **fields}))
    state_with_buffers(load_checkpoint(base, "float32", adapter=folder))


def test_adapters_with_names_are_for_engines_on_one_device(base: Path, adapters: dict[str, Path]) -> None:
    checkpoint = load_checkpoint(base, "float32", adapters=adapters)
    with pytest.raises(InputError, match="adapters with names are for an engine's requests"):
        LanguageModel(checkpoint, device="cpu")
    with pytest.raises(InputError, match="adapters that requests choose are not divided among devices"):
        PagedModel(checkpoint, device="cpu", tensor_parallel=2, **SIZES)
    with pytest.raises(InputError, match="would be merged into the base of 'wide'; give each adapter a name"):
        load_checkpoint(base, adapter=adapters["narrow"], adapters=adapters)
    engine = Engine(PagedModel(checkpoint, device="cpu", **SIZES), checkpoint)
    with engine, pytest.raises(InputError, match="there is no adapter 'huge' here"):
        engine.submit(Request((5,), 1, adapter="huge"))


def answered(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """The status and the JSON of a server's reply to a GET, or to a POST of this body."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_model_field_of_a_request_chooses_an_adapter(tmp_path: Path, adapters: dict[str, Path]) -> None:
    checkpoint: Checkpoint = text_checkpoint(tmp_path)
    checkpoint.adapters = dict.fromkeys(adapters)
    with served(checkpoint) as server:
        listed = answered(f"{server.url}/v1/models")[1]["data"]
        names = [("tiny", None), ("wide", "tiny"), ("narrow", "tiny")]
        assert [(entry["id"], entry.get("parent")) for entry in listed] == names
        assert answered(f"{server.url}/v1/models/wide") == (200, listed[1])
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        for name, adapter in (("tiny", None), ("narrow", "narrow")):
            for path, body in (("completions", {"prompt": "Hi"}), ("chat/completions", chat)):
                _, reply = answered(f"{server.url}/v1/{path}", {"model": name, **body})
                assert reply["model"] == name and server.engine.requests[-1].adapter == adapter
        status, reply = answered(f"{server.url}/v1/completions", {"model": "huge", "prompt": "Hi"})
        assert status == 404 and reply["error"]["code"] == "model_not_found"
        assert "there is no model 'huge' here; this is tiny or wide or narrow" in reply["error"]["message"]


def test_generate_adds_an_adapter_to_the_weights(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    whole = save_merged(tmp_path / "whole", base, adapters["wide"])

    def said(*arguments: str) -> str:
        options = ["-p", "the cat", "--no-chat", "-n", "6", "--dtype", "float32", "--device", "cpu", "--json"]
        result = CliRunner().invoke(app, ["generate", *arguments, *options])
        assert result.exit_code == 0, result.output
        return str(json.loads(result.stdout)["text"])

    assert said(str(base), "--adapter", str(adapters["wide"])) == said(str(whole)) != said(str(base))


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ["--adapter", "one=DIR"], "names are for npu-sim serve"),
        ("generate", ["--adapter", "DIR", "--adapter", "DIR"], "which only one adapter can be"),
        ("serve", ["--adapter", "one=DIR", "--adapter", "one=DIR"], "two adapters have the name 'one'"),
        ("serve", ["--adapter", "=DIR"], "has no name before '='"),
        ("serve", ["--adapter", "tiny=DIR"], "the name 'tiny' is that of the base"),
        ("serve", ["--adapter", "one=DIR", "--adapter", "DIR"], "give each adapter a name"),
        ("serve", ["--adapter", "one=absent"], "absent has no adapter_config.json"),
        ("serve", ["--adapter", "one=DIR", "--simulate", "edge"], "--adapter means nothing on a simulated chip"),
    ],
)
def test_options_that_name_no_adapters_are_refused(
    base: Path, adapters: dict[str, Path], command: str, options: list[str], message: str
) -> None:
    filled = [option.replace("DIR", str(adapters["narrow"])) for option in options]
    prompt = ["-p", "Hi"] if command == "generate" else ["--port", "0", "--device", "cpu"]
    result = CliRunner().invoke(app, [command, str(base), *filled, *prompt])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
