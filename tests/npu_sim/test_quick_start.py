"""The README's quick start: at most six lines from a Hugging Face model to an answer, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cuda_gpu import DEVICES

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A folder with a small DistilBERT of the README's kind, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "What", "a", "delight", "!"])}
    whole = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path)
    torch.manual_seed(5)
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    config = DistilBertConfig(vocab_size=6, dim=64, n_heads=4, n_layers=2, hidden_dim=128, id2label=labels)
    model = DistilBertForSequenceClassification(config)
    model.classifier.bias.data[1] += 5
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("device", DEVICES)
def test_the_quick_start_runs_as_it_stands(classifier: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 6 and "npu_sim.compile" in code
    names = [index for index, line in enumerate(lines) if line.startswith("name = ")]
    assert len(names) == 1
    lines[names[0]] = f"name = {str(classifier)!r}"
    found: dict[str, object] = {}
    with torch.device(device):
        exec("\n".join(lines), found)
    assert capsys.readouterr().out.split() == ["POSITIVE"]
    compiled = found["compiled"]
    assert compiled.device.type == device  # type: ignore[attr-defined]
    assert compiled.report().device_share > 0.9  # type: ignore[attr-defined]
