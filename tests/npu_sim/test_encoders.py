"""Embedding models and cross-encoders: texts of any lengths in one batch equal what transformers says of each alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import (
    TEXTS,
    expected_embedding,
    expected_logits,
    expected_states,
    save_cross_encoder,
    save_embedder,
)
from typer.testing import CliRunner

from npu_compiler import InputError
from npu_sim.cli import app
from npu_sim.encoders import CrossEncoderFolder, EmbedderFolder, TextEncoder, read_encoder
from npu_sim.encoders.folder import POOLINGS

MEAN, CLS, LAST = "pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken"


def opened(folder: Path, **options: Any) -> TextEncoder:
    read = read_encoder(folder)
    assert read is not None
    return TextEncoder(read, device="cpu", **options)


def cosine(ours: Any, theirs: torch.Tensor) -> float:
    return float(torch.cosine_similarity(torch.from_numpy(np.array(ours)), theirs, dim=-1))


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("bert", MEAN),
        ("qwen3", LAST),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("roberta", CLS), ("mpnet", MEAN), ("modernbert", CLS))
        ),
    ],
)
def test_texts_of_several_lengths_in_one_batch_are_embedded_as_each_alone(
    tmp_path: Path, kind: str, pooling: str
) -> None:
    folder = save_embedder(tmp_path, kind, [pooling])
    model = opened(folder)
    found = model.run(model.text.encode(TEXTS))
    assert found.shape == (len(TEXTS), 32) and found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    for vector, text in zip(found, TEXTS, strict=True):
        assert cosine(vector, expected_embedding(folder, text, pooling)) >= 0.9999
    others = model.run(model.text.encode(TEXTS[::-1]))[::-1]
    np.testing.assert_allclose(others, found, atol=1e-5)


def test_every_pooling_and_the_layers_behind_it_are_those_of_the_formula(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "bert", list(POOLINGS), normalized=False, dense=12)
    model = opened(folder)
    found = model.run(model.text.encode(TEXTS))
    from safetensors.torch import load_file

    weights = load_file(folder / "2_Dense" / "model.safetensors")
    for vector, text in zip(found, TEXTS, strict=True):
        parts = [expected_embedding(folder, text, pooling, normalized=False) for pooling in POOLINGS]
        theirs = torch.tanh(weights["linear.weight"] @ torch.cat(parts) + weights["linear.bias"])
        torch.testing.assert_close(torch.from_numpy(vector), theirs, rtol=1e-3, atol=1e-4)


def test_a_prompt_that_is_not_pooled_is_attended_to_only(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, settings={"prompts": {"query": "what is "}}, include_prompt=False)
    model = opened(folder)
    assert isinstance(model.folder, EmbedderFolder) and model.folder.prompts == {"query": "what is "}
    (found,) = model.run(model.text.encode(["paris"], "what is "))
    states = expected_states(folder, "what is paris")[3:]  # [CLS] what is
    assert cosine(found, states.mean(0)) >= 0.9999


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("bert", None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bert", "Identity"), ("qwen3", "Sigmoid"))),
    ],
)
def test_pairs_of_several_lengths_in_one_batch_are_scored_as_each_alone(
    tmp_path: Path, kind: str, activation: str | None
) -> None:
    folder = save_cross_encoder(tmp_path, kind, activation)
    model = opened(folder)
    query = "what is the capital of france"
    found = model.run(model.text.encode_pairs([(query, text) for text in TEXTS]))[:, 0]
    logits = torch.tensor(expected_logits(folder, query, TEXTS))
    theirs = logits if activation == "Identity" else torch.sigmoid(logits)
    torch.testing.assert_close(torch.from_numpy(found.copy()), theirs, rtol=1e-4, atol=1e-4)
    assert len(set(np.round(found, 3))) == len(TEXTS)


def test_shortened_embeddings_are_normalized_again(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path)
    model = opened(folder)
    found = model.run(model.text.encode(TEXTS))
    short = model.shortened(found, 8)
    np.testing.assert_allclose(short, found[:, :8] / np.linalg.norm(found[:, :8], axis=1, keepdims=True), rtol=1e-5)
    assert model.shortened(found, 32) is not None and np.array_equal(model.shortened(found, 32), found)


def test_a_folder_without_poolings_is_pooled_by_the_mean(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path)
    (folder / "modules.json").unlink()
    read = read_encoder(folder)
    assert isinstance(read, EmbedderFolder) and (read.poolings, read.normalized) == (("mean",), False)


def test_a_language_model_is_no_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert read_encoder(tmp_path) is None
    assert read_encoder(tmp_path / "model.gguf") is None


def test_the_context_is_what_the_model_takes(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "roberta")  # whose positions begin behind the padding token
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((folder / "tokenizer_config.json").read_text()), "model_max_length": 1000})
    )
    assert opened(folder).context_length == 65
    with pytest.raises(InputError, match="takes texts of at most 65 tokens, not 100"):
        opened(folder, context_length=100)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": True}))
    model = opened(folder)
    assert model.context_length == 20
    assert model.text.encode(["The Cat"]) == model.text.encode(["the cat"])


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_what_is_not_supported_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "embedder", dense=4)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "model.safetensors").unlink()

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            read_encoder(folder)

    for wrong, message in (
        ([modules[0]], "begins with Transformer, not with Transformer and Pooling"),
        ([*modules, {"type": "models.LSTM", "path": "4"}], "has the module LSTM there, which is not supported"),
        ([modules[0], {**modules[1], "path": "../.."}], "names '../..', which is outside the folder"),
        ([{"type": 1}], "has an entry without a type and a path"),
        ({}, "it holds no JSON array"),
    ):
        (folder / "modules.json").write_text(json.dumps(wrong))
        refused(message)
    (folder / "modules.json").write_text(json.dumps(modules))
    change(folder / "2_Dense" / "config.json", in_features="many")
    refused("says 'many' inputs and 4 outputs")
    change(folder / "2_Dense" / "config.json", in_features=32)
    change(folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False)
    refused("names no pooling; the known ones are cls, max, mean")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    refused("says 'long' for 'max_seq_length'")

    classifier = save_cross_encoder(tmp_path / "classifier")
    change(classifier / "config.json", id2label={"0": "bad", "1": "good"})
    with pytest.raises(InputError, match="a classifier of 2 labels; a cross-encoder, which ranks texts, has one"):
        read_encoder(classifier)
    change(classifier / "config.json", id2label={"0": "x"}, sentence_transformers={"activation_fn": "my.Tanh"})
    with pytest.raises(InputError, match=r"scores by my.Tanh, which is not supported; Identity and Sigmoid are"):
        read_encoder(classifier)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_embedder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "attention" in name)
    save_file({name: x for name, x in weights.items() if name != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"its files lack 1 weights, such as '{lost}'"):
        opened(folder)


def test_a_cross_encoder_says_its_activation(tmp_path: Path) -> None:
    read = read_encoder(save_cross_encoder(tmp_path, activation="Identity"))
    assert isinstance(read, CrossEncoderFolder) and read.activation == "Identity"


def run_embed(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, ["embed", *arguments, "--device", "cpu"], prog_name="npu-sim", input=text)


def test_the_command_embeds_a_text_a_line(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "model", "bert", [MEAN])
    lines = [TEXTS[0], "", *TEXTS[1:], TEXTS[0]]
    done = run_embed(str(folder), text="\n".join(lines))
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["index"] for item in found] == [*range(len(lines))]
    for item, text in zip(found, lines, strict=True):
        assert cosine(item["embedding"], expected_embedding(folder, text, MEAN)) >= 0.9999
    (tmp_path / "texts").write_text("\n".join(lines), encoding="utf-8")
    stored = tmp_path / "vectors.npy"
    assert run_embed(str(folder), str(tmp_path / "texts"), "-o", str(stored), "--dimensions", "8").exit_code == 0
    short = np.load(stored)
    assert short.shape == (len(lines), 8) and short.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-5)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    folder = str(save_embedder(tmp_path / "model", "bert", [MEAN]))
    scorer = str(save_cross_encoder(tmp_path / "scorer"))
    for arguments, text, message in (
        ((folder,), "", "there are no texts to embed"),
        ((folder, "--dimensions", "999"), "a", "has embeddings of 32 dimensions, not 999"),
        ((folder, "--prompt-name", "query"), "a", "has no prompt 'query'; it has none"),
        ((scorer,), "a", "is a cross-encoder; embed takes an embedding model"),
        ((folder,), "a\n" + "b " * 3000, "text 2 has "),
    ):
        done = run_embed(*arguments, text=text)
        assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.output
    assert run_embed(folder, "--truncate", text="b " * 3000).exit_code == 0
