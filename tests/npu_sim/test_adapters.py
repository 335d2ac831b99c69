"""LoRA adapters: merged ones are PEFT's arithmetic; several in a batch are what each of them is alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import served
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_adapters import LINEARS, merged_weights, save_adapter, save_merged
from tiny_llms import TEMPLATE, VOCAB, save_tiny, save_tokenizer

from npu_compiler.errors import InputError
from npu_sim.llm import LanguageModel, load_checkpoint
from npu_sim.llm.graph import program_formats, state_with_buffers
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request, Update

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZES = {"block_size": 4, "blocks": 100, "context_length": 48, "max_tokens": 32, "max_sequences": 8}
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("base") / "tiny", "llama", "float32")
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
    import tempfile

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
