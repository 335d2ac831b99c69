"""The code in the pages of the documentation runs as it stands there, and is the same in every language."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_snippets
import numpy as np
import pytest
import torch
from gguf_files import save_gguf
from PIL import Image
from tiny_llms import TEMPLATE, save_tiny, save_tokenizer

from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.program.kernels import KERNELS
from npu_runtime import device
from npu_sim.llm import loading

DOCS = Path(__file__).parents[2] / "docs"
EDITS = "adding_an_op.md"  # changes the packages: `test_adding_an_op.py` runs it on a copy
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if not page.name.endswith(".ko.md")]
WITH_CODE = [
    page
    for page in PAGES
    if page.name != EDITS and any(found.language in ("python", "bash") for found in doc_snippets.snippets(page))
]
# What stands for the reader's own model in pages that are not about making one.
SETUP = """
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import npu_compiler
from npu_runtime import Device, load_weights
from npu_sim.extract import extract_ir

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
ir = extract_ir(model, (torch.randn(1, 3, 8, 8),))
program, device = npu_compiler.compile(ir), Device("cpu")
for name in ("net", "resnet18", "before", "after"):
    Path(f"{name}.json").write_text(json.dumps(ir))
    program.save(f"{name}.npubin")
    save_file(model.state_dict(), f"{name}.safetensors")
weights = load_weights(model.state_dict(), program, device)
inputs = {spec.name: torch.randn(spec.shape).numpy() for spec in program.input_specs}
"""
SET_UP = {"npu_model.md", "profiling.md", "report.md"}
SLOW = {"design_a_chip.md", "engine.md", "from_pytorch.md", "index.md", "language_models.md", "quantization.md"}
TRANSLATED = [page for page in (*PAGES, DOCS.parent / "README.md") if page.with_suffix(".ko.md").exists()]

pytestmark = pytest.mark.usefixtures("shared_programs")


def name_of(page: Path) -> str:
    return page.relative_to(DOCS.parent).as_posix()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages open: small models under the names of large ones, a text and a photograph."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct"):
        chat = folder / "Qwen" / name
        sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512, "vocab_size": 300}
        save_tiny(chat, "qwen2", "bfloat16", num_hidden_layers=1, **sizes)
        save_tokenizer(chat, TEMPLATE)
    llama = save_tiny(
        folder / "llama", "llama", "float32", num_hidden_layers=1, vocab_size=300, max_position_embeddings=256
    )
    save_tokenizer(llama, TEMPLATE)
    save_gguf(llama, folder / "smollm2.gguf")
    save_classifier(folder / "distilbert" / "distilbert-base-uncased-finetuned-sst-2-english")
    (folder / "text.txt").write_text("the cat sat on the mat. Hello, world! " * 100)
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "photo.jpg")
    return folder


def save_classifier(folder: Path) -> None:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=300, dim=64, n_heads=4, n_layers=1, hidden_dim=128)
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder, TEMPLATE)


@pytest.fixture
def folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with links to the models, in which a page is run."""
    for item in models.iterdir():
        (tmp_path / item.name).symlink_to(item)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_resolve_shorthand", lambda name: models / f"{name}.gguf")
    return tmp_path


@pytest.fixture
def registries() -> Iterator[None]:
    """Forgets the fusions, kernels and devices that a page registers, and what TorchDynamo compiled for it."""
    tables: tuple[dict[str, Any], ...] = (FUSIONS, KERNELS, device._FACTORIES)
    before = [(registry, dict(registry)) for registry in tables]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW else page for page in WITH_CODE],
    ids=name_of,
)
@pytest.mark.usefixtures("folder", "registries")
def test_the_code_of_a_page_runs(page: Path) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()  # what tests before compiled of the same libraries
    names: dict[str, Any] = {}
    if page.name in SET_UP:
        exec(SETUP, names)
    doc_snippets.run(page, names)


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_a_translation_has_the_same_code(page: Path) -> None:
    ours, theirs = (doc_snippets.snippets(found) for found in (page, page.with_suffix(".ko.md")))
    assert [found.language for found in theirs] == [found.language for found in ours]
    for there, here in zip(theirs, ours, strict=True):
        assert doc_snippets.without_comments(there) == doc_snippets.without_comments(here), there.place


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_the_tables_of_a_translation_have_the_same_names_and_numbers(page: Path) -> None:
    """Row by row, so that a figure that is measured again cannot stay in one language only."""
    ours, theirs = (doc_snippets.table_rows(found) for found in (page, page.with_suffix(".ko.md")))
    assert [row for row in theirs if row not in ours] == []
    assert theirs == ours
