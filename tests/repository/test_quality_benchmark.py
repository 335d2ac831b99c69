"""The quality benchmark: what it measures, and the page that is made of its results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llms import save_tiny, save_tokenizer

from benchmarks.quality import __main__ as quality
from benchmarks.quality import page
from benchmarks.quality.page import Figure, Quality, load_quality, table
from benchmarks.quality.variants import VARIANTS, Calibration, quantize_all
from benchmarks.quality.windows import add_window, read_window, windows
from npu_sim.llm import load_checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.quantizing import tuning

DOCS = Path(__file__).parents[2] / "docs"


def test_quality_of_a_tiny_model(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", "float32", intermediate_size=128, vocab_size=300, max_position_embeddings=64)
    save_tokenizer(folder, "{{ messages }}")
    checkpoint = load_checkpoint(folder, "float32", "none")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat with a hat and looked at that. " * 30, encoding="utf-8")
    ids = windows(checkpoint, [text], 3, 40)
    model = dense_model(checkpoint, "cpu")
    calibration = Calibration(("a text",), text.read_text("utf-8"), 4)
    whole = Figure("as it is", 16.0, 1.0)
    figures = [whole]
    names = ["int8", "int4-64-rtn"]
    variants = list(quantize_all(checkpoint, names, calibration, "cpu"))
    original = {name: model.get_parameter(name).data for name in variants[0][1]}
    losses = []
    for window in ids:
        reference = read_window(model, original, window)
        losses.append(float(torch.nn.functional.nll_loss(reference[:-1], window[1:], reduction="sum")))
        add_window(whole, reference, reference, window)
        for figure, weights in variants:
            add_window(figure, read_window(model, weights, window), reference, window)
    figures += [figure for figure, _ in variants]
    assert whole.divergence == 0 and whole.agreement == whole.tokens == 3 * 39
    assert -whole.log_likelihood == pytest.approx(sum(losses), rel=1e-6)
    eight, four = figures[1:]
    assert 0 < eight.divergence < four.divergence and four.bits < 5 < eight.bits < 9
    assert abs(eight.perplexity / whole.perplexity - 1) < abs(four.perplexity / whole.perplexity - 1) + 0.01
    run = Quality({"model": "tiny"}, figures)
    run.save(tmp_path / "run.json")
    loaded = load_quality(tmp_path / "run.json")
    assert table(loaded) == table(run) and loaded.figures == figures
    with pytest.raises(SystemExit, match="windows of 40 tokens, not 999"):
        windows(checkpoint, [text], 999, 40)


def test_variants_are_added_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, "llama", "float32", intermediate_size=128, vocab_size=300, max_position_embeddings=64)
    save_tokenizer(folder, "{{ messages }}")
    read, first, second = (tmp_path / name for name in ("read.txt", "cats.txt", "dogs.txt"))
    read.write_text("the cat sat on the mat with a hat and looked at that. " * 30, encoding="utf-8")
    first.write_text("a cat and a cat and two more. " * 90, encoding="utf-8")
    second.write_text("a dog or a dog or two less. " * 90, encoding="utf-8")
    monkeypatch.setitem(VARIANTS, "tuned", replace(VARIANTS["int4-64"], written=2, steps=3))
    monkeypatch.setattr(tuning, "_RATE", 0.1)  # moves what is stored in 16 bits, too
    common = ["quality", "--model", str(folder), "--device", "cpu", "--windows", "2", "--length", "40"]
    common += ["--json", str(tmp_path / "run.json"), "--samples", "8", "--text", str(read)]

    def run(*options: str) -> Quality:
        monkeypatch.setattr("sys.argv", [*common, *options])
        quality.main()
        return load_quality(tmp_path / "run.json")

    alone = run("--calibrate", str(first), "--variants", "int8", "int4-64")
    both = run("--calibrate", str(first), str(second), "--variants", "tuned", "int4-64", "--add")
    assert both.figures[:3] == alone.figures and both.figures[1].calibration == ""
    labels = [figure.calibration for figure in both.figures[2:]]
    assert labels[0] == "cats: 512 tokens" and labels[2] == "2 texts: 512 tokens"
    assert labels[1] == "2 texts: 4,352 tokens", "tuning reads as much as its steps can"
    assert [figure.variant.split(", ")[-1] for figure in both.figures[3:]] == ["tuned in 3 steps", "gptq"]
    assert {name: fact["use"] for name, fact in both.machine["texts"].items()} == {
        "read.txt": "read",
        "cats.txt": "calibration",
        "dogs.txt": "calibration",
    }
    rounded = both.figures[4]
    again = run("--calibrate", str(first), str(second), "--variants", "int4-64", "--add").figures[4]
    assert again == rounded, "a tuned variant leaves nothing of itself in the model that reads the next one's windows"
    with pytest.raises(SystemExit, match="of other windows"):
        run("--calibrate", str(first), "--variants", "int8", "--add", "--windows", "1")


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page.draw(load_quality(DOCS / "measurements" / "quality.json"), tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text("utf-8")


def test_the_section_in_docs_is_that_of_its_figures() -> None:
    run = load_quality(DOCS / "measurements" / "quality.json")
    assert page.section(run) in (DOCS / "quantization.md").read_text("utf-8"), (
        "run python -m benchmarks.quality --json docs/measurements/quality.json --document docs/quantization.md"
    )
