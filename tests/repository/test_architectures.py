"""The table of architectures: tiny configurations by rules, inputs by name, a process for each model, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.architectures import __main__ as architectures
from benchmarks.architectures.configs import HEADS, LAYERS, VOCABULARY, WIDTH, WORDS, nested, tiny_config
from benchmarks.architectures.models import NotBuilt, build, model_types
from benchmarks.architectures.page import document, histogram, summary
from benchmarks.architectures.routes import RIGHT, WRONG, Outcome, attempt, judge


def outcome(**known: Any) -> Outcome:
    return Outcome("bert", "compile", "cpu", "float32", **known)


def test_the_library_has_hundreds_of_types() -> None:
    assert len(model_types()) >= 200


def test_rules_shrink_a_language_model_and_keep_its_relations() -> None:
    config = tiny_config("llama")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (WIDTH, LAYERS, VOCABULARY)
    assert config.num_attention_heads == HEADS
    assert not config.use_cache


def test_grouped_query_attention_stays_grouped() -> None:
    config = tiny_config("mistral")
    assert 0 < config.num_key_value_heads < config.num_attention_heads


def test_each_kind_of_layer_stays() -> None:
    assert set(tiny_config("gpt_oss").layer_types) == {"sliding_attention", "full_attention"}


def test_configurations_within_are_shrunk_too() -> None:
    widths = [part.hidden_size for part in nested(tiny_config("clip"))]
    assert widths
    assert max(widths) <= WIDTH


def test_special_tokens_are_no_words() -> None:
    config = tiny_config("bart")
    assert config.eos_token_id not in WORDS
    assert config.eos_token_id < config.vocab_size


@pytest.mark.parametrize("model_type", ["bert", "clip", "resnet", "t5"])
def test_rules_make_a_module_that_runs_and_shows_its_input(model_type: str) -> None:
    model = build(model_type)
    floats = [x for x in model.expected if x.is_floating_point()]
    assert floats
    assert all(torch.isfinite(x).all() and x.std() > 1e-3 for x in floats)


def test_a_random_answer_is_not_compared() -> None:
    with pytest.raises(NotBuilt, match="random"):
        build("vit_mae")


def test_an_architecture_through_the_front_door() -> None:
    result = attempt("bert", "compile", "cpu", "float32")
    assert (result.status, result.reason) == (RIGHT, "")
    assert result.nodes == result.on_device > 0
    assert result.error is not None
    assert result.error < 1e-4


def judged(ours: torch.Tensor, exact: torch.Tensor) -> Outcome:
    result = outcome()
    judge(result, (ours,), (exact,), (exact,))
    return result


def test_a_small_error_of_float32_is_right_and_a_large_one_is_not() -> None:
    exact = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32))
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(20, 50)).astype(np.float32))
    assert judged(exact + 2e-5 * noise, exact).status == RIGHT
    assert judged(exact + 2e-3 * noise, exact).status == WRONG
    assert "has shape (20, 49)" in judged(exact[:, 1:], exact).reason
    assert judged(torch.tensor([1, 2]), torch.tensor([1, 3])).status == WRONG


def test_results_are_kept_and_a_second_start_runs_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def run_all(keys: list[tuple[str, str, str, str]], *_: object) -> Any:
        asked.extend(keys)
        return [Outcome(*key, status="right", nodes=4, on_device=4).to_dict() for key in keys]

    monkeypatch.setattr(architectures, "run_all", run_all)
    results = tmp_path / "cpu.jsonl"
    command = ["--results", str(results), "--only"]
    architectures.main([*command, "bert"])
    architectures.main([*command, "bert", "t5"])
    assert asked == [("bert", "compile", "cpu", "float32"), ("t5", "compile", "cpu", "float32")]
    assert [json.loads(line)["model_type"] for line in results.read_text().splitlines()] == ["bert", "t5"]
    assert "2 of 2 right (100.0%)" in capsys.readouterr().out


def test_the_page_has_a_row_for_each_model_that_ran() -> None:
    cpu = {"aten.foo.default: op 'aten.foo.default' is not in the op table": 2}
    records = [
        outcome(status="right", pearson=1.0, error=1e-7, largest=2e-7, nodes=10, on_device=8, cpu=cpu).to_dict(),
        {**outcome(status="refused", reason="IRError: a | b").to_dict(), "model_type": "led"},
        {**outcome(status="unbuilt", reason="no").to_dict(), "model_type": "timm"},
    ]
    page = document(records)
    assert "| bert | right | 1.000000 | 1.0e-07 | 2.0e-07 | 10 | 80% | 0 |" in page
    assert "IRError: a \\| b" in page
    assert "lacking a package: timm" in page
    assert summary(records).startswith("1 of 2 right (50.0%), 0 wrong, 1 refused")
    assert histogram(records)[0].split()[:4] == ["2", "nodes,", "1", "models"]
