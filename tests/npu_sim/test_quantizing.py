"""Quantizing a language model: rounding, error compensation, the folder that is written, and wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import save_gguf
from safetensors.torch import load_file, save_file
from tiny_llms import save_tiny, save_tokenizer
from typer.testing import CliRunner

import npu_compiler.graph.quantization as formats
from npu_compiler.errors import InputError, NPUError, WeightError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.cli import app
from npu_sim.llm import LanguageModel, load_checkpoint
from npu_sim.llm.graph import dense_model, meta_model
from npu_sim.quantizing import QuantizeOptions, quantize, tuning
from npu_sim.quantizing.compensation import DAMPING, PROPAGATION, compensated, matched
from npu_sim.quantizing.layerwise import Layerwise, moments
from npu_sim.quantizing.quantizer import calibration_ids, calibration_tokens
from npu_sim.quantizing.rounding import RANGE, SEARCH, Scales, codes, fit_rows, nearest
from npu_sim.quantizing.tuning import Tuner

FORMATS = [
    QuantizedFormat("int4", 32, "float16"),
    QuantizedFormat("int4", 16, "bfloat16", "zero_point"),
    QuantizedFormat("int4", 0, "float32", "zero_point"),
    QuantizedFormat("int8", 0, "bfloat16"),
    QuantizedFormat("int8", 32, "float16", "zero_point"),
    QuantizedFormat("float8_e4m3", 0, "bfloat16"),
    QuantizedFormat("float8_e4m3", 32, "float32"),
]
TEXT = "the cat sat on the mat and looked at the hat. " * 40
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def wide(array: QuantizedArray) -> torch.Tensor:
    return numpy_to_tensor(array.dequantize())


def inputs(k: int) -> torch.Tensor:
    """Rows of k correlated numbers of different sizes."""
    return torch.randn(300, k // 4) @ torch.randn(k // 4, k) * torch.rand(k) + 0.1 * torch.randn(300, k)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rounding_to_the_nearest_is_that_of_loading(format: QuantizedFormat) -> None:
    weight = torch.randn(24, 64)
    weight[3, :32] = 0
    ours, theirs = nearest(weight, format, RANGE), formats.quantize(weight.numpy(), format)
    np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize())
    assert (ours.scales != 0).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_searching_for_scales_lessens_the_squared_error_of_each_row(format: QuantizedFormat) -> None:
    weight = torch.randn(40, 64)
    plain, searched = ((wide(nearest(weight, format, x)) - weight).square().sum(1) for x in (RANGE, SEARCH))
    assert (searched <= plain * (1 + 1e-6)).all()
    if format.codes == "int4":
        assert searched.sum() < 0.99 * plain.sum()


def gptq_reference(weight: torch.Tensor, hessian: torch.Tensor, format: QuantizedFormat) -> torch.Tensor:
    """Return the codes of "optimal brain quantization" (equation 2 of the paper).

    After each column, which are taken in the order of the Hessian's diagonal, the others are updated and the column is
    eliminated from the inverse.
    """
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    inverse, left = damped.inverse(), weight.double().clone()
    scales, found = fit_rows(weight, format, RANGE), torch.zeros_like(weight)
    group = format.group or weight.shape[1]
    for column in hessian.diagonal().argsort(descending=True).tolist():
        of_column = Scales(*(x[:, column // group, None] for x in (scales.scale, scales.zero)))
        code = codes(left[:, column, None].float(), of_column, format)
        found[:, column] = code[:, 0]
        error = (left[:, column, None] - (code - of_column.zero) * of_column.scale) / inverse[column, column]
        left -= error * inverse[column]
        inverse -= inverse[:, column, None] * inverse[column] / inverse[column, column]
        inverse[column] = inverse[:, column] = 0
        inverse[column, column] = 1
    return found


@pytest.mark.parametrize("format", [FORMATS[1], FORMATS[2], FORMATS[3], FORMATS[6]], ids=str)
def test_compensation_is_that_of_the_paper(format: QuantizedFormat) -> None:
    weight, x = torch.randn(12, 96), inputs(96)
    hessian = x.T @ x
    found = compensated(weight, hessian, format, RANGE)
    scales = fit_rows(weight, format, RANGE)
    by_element = [x.repeat_interleave(96 // x.shape[1], dim=1) for x in (scales.scale, scales.zero)]
    wanted = (gptq_reference(weight, hessian, format) - by_element[1]) * by_element[0]
    assert (wide(found) == wanted).float().mean() > 0.98, "a tie may be rounded either way"


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_compensation_lessens_the_error_of_the_output(format: QuantizedFormat) -> None:
    weight, x = torch.randn(48, 160), inputs(160)
    x[:, 5] = 0
    found, plain = compensated(weight, x.T @ x, format, RANGE), nearest(weight, format, RANGE)
    assert found.format == format
    errors = [float(((wide(array) - weight) @ x.T).norm()) for array in (found, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_weights_of_inputs_that_calibration_never_sees_are_rounded_to_the_nearest() -> None:
    weight, x = torch.randn(6, 32), inputs(32)
    x[:, [3, 20]] = 0
    format = QuantizedFormat("int8")
    found, plain = (
        wide(y)[:, [3, 20]] for y in (compensated(weight, x.T @ x, format, RANGE), nearest(weight, format, RANGE))
    )
    assert torch.equal(found, plain) and (found != 0).any()


def test_a_matched_weight_makes_up_for_the_errors_of_its_inputs() -> None:
    exact, weight = inputs(64), torch.randn(24, 64)
    rounded = exact @ (torch.eye(64) + 0.1 * torch.randn(64, 64))
    hessian, shift = moments([rounded[None]], [exact[None]])
    found = matched(weight, hessian, shift)
    lost = [float((rounded @ w.T - exact @ weight.T).norm()) for w in (weight, found)]
    assert lost[1] < (1.1 - PROPAGATION) * lost[0]
    assert torch.equal(matched(weight, hessian, torch.zeros_like(shift)), weight)


def test_moments_count_the_first_tokens_more() -> None:
    x, y = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    hessian, shift = moments([x], [y])
    weights = torch.tensor([100.0, 1, 1, 1, 1]).repeat(2)[:, None]
    rounded, exact = x.reshape(-1, 8), y.reshape(-1, 8)
    torch.testing.assert_close(hessian, (weights * rounded).T @ rounded, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(shift, (weights * (exact - rounded)).T @ rounded, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with rows of 64 and 128 elements, and its tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    save_tiny(folder, "llama", "bfloat16", intermediate_size=128, vocab_size=300, max_position_embeddings=256)
    save_tokenizer(folder, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder


def test_layers_one_at_a_time_are_the_model(source: Path) -> None:
    checkpoint = load_checkpoint(source, "float32", "none")
    network = Layerwise(checkpoint)
    ids = torch.randint(300, (2, 40))
    hidden = network.embedded(ids)
    stages = []
    for layer in network.layers(40):
        stages += layer.stages(hidden[0])
        hidden = [layer(sample) for sample in hidden]
    model = dense(checkpoint)
    wanted = model.model(input_ids=ids, output_hidden_states=False).last_hidden_state
    torch.testing.assert_close(model.model.norm(torch.cat(hidden).cpu()), wanted, rtol=1e-4, atol=1e-4)
    assert [len(names) for names in stages] == [3, 1, 2, 1] * 2
    assert sorted(name for names in stages for name in names) == sorted(network.shapes)


def dense(checkpoint: Any) -> Any:
    """The Hugging Face module with a checkpoint's weights, dequantized, in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(meta_model(checkpoint).config, dtype=torch.float32)
    state = {
        key: wide(x) if isinstance(x, QuantizedArray) else numpy_to_tensor(x) for key, x in checkpoint.state.items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    return model.eval()


CHOICES: list[dict[str, Any]] = [
    {"weights": "int4", "group": 32},
    {"weights": "int4", "group": 64, "zero_points": True, "calibrate": TEXT},
    {"weights": "int4", "group": 0, "search": True, "dtype": "float16"},
    {"weights": "int8"},
    {"weights": "int8", "group": 32, "zero_points": True, "calibrate": TEXT, "method": "rtn"},
    {"weights": "fp8"},
    {"weights": "fp8", "group": 64, "calibrate": TEXT},
]


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: "-".join(map(str, choices))[:60])
def test_the_folder_is_read_alike_here_and_by_compressed_tensors(
    source: Path, tmp_path: Path, choices: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    report = quantize(source, tmp_path / "out", QuantizeOptions(**choices))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path / "out")
    for layer in report.layers:
        module = layer.name.removesuffix(".weight")
        parts = {key.removeprefix(f"{module}."): x for key, x in stored.items() if key.startswith(f"{module}.")}
        theirs = compressor.decompress(parts, scheme)["weight"]
        ours = checkpoint.state[layer.name]
        assert isinstance(ours, QuantizedArray) and str(ours.format) == layer.format
        assert torch.equal(wide(ours).to(theirs.dtype), theirs)
    sizes = sum(x.nbytes for key, x in stored.items() if not key.endswith("weight_shape"))
    assert report.bytes_after == sizes
    assert report.bytes_after < report.bytes_before


def test_transformers_loads_the_folder(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    # With zero points, transformers 5.23 expects other shapes than compressed-tensors 0.20 itself writes.
    quantize(source, tmp_path / "out", QuantizeOptions(weights="int4", group=32, keep_worst=2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    ours = dense(load_checkpoint(tmp_path / "out"))
    ids = torch.randint(300, (1, 20))
    found, wanted = theirs(input_ids=ids).logits.float().flatten(), ours(input_ids=ids).logits.flatten()
    assert torch.corrcoef(torch.stack([found, wanted]))[0, 1] > 0.999


def test_a_quantized_model_generates_what_pytorch_does_with_its_weights(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", QuantizeOptions(weights="int4", group=64, calibrate=TEXT, dtype="float16"))
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.quantization and checkpoint.tokenizer.encode("the cat")
    ours = LanguageModel(checkpoint, device="cpu", cache_length=32)
    ids = [5, 17, 200, 99, 3]
    logits = torch.as_tensor(np.asarray(ours.prefill(ids), np.float32)).flatten()
    wanted = dense(checkpoint)(input_ids=torch.tensor([ids])).logits[0, -1]
    assert torch.corrcoef(torch.stack([logits, wanted]))[0, 1] > 0.999


def test_the_worst_layers_are_kept(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "out", QuantizeOptions(weights="int4", group=32, keep_worst=3))
    assert len(report.kept) == 3 and set(report.kept) == {layer.name for layer in report.worst(3)}
    kept = load_checkpoint(tmp_path / "out")
    before = load_checkpoint(source)
    for layer in report.layers:
        stored = kept.state[layer.name]
        if layer.name in report.kept:
            np.testing.assert_array_equal(np.asarray(stored), before.state[layer.name])
        else:
            assert isinstance(stored, QuantizedArray)
    plain = quantize(source, tmp_path / "all", QuantizeOptions(weights="int4", group=32))
    assert plain.bytes_after < report.bytes_after < report.bytes_before == plain.bytes_before


def test_errors_of_the_report_are_those_of_the_weights(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "out", QuantizeOptions(weights="int8", calibrate=TEXT, method="rtn"))
    before, after = load_checkpoint(source), load_checkpoint(tmp_path / "out")
    layer = next(layer for layer in report.layers if layer.name == Q_PROJ)
    weight = numpy_to_tensor(before.state[Q_PROJ]).float()
    lost = weight - wide(after.state[Q_PROJ])
    assert layer.weight_error == pytest.approx(float(lost.norm() / weight.norm()), rel=1e-4)
    assert layer.output_error is not None and 0 < layer.output_error < 0.1
    assert report.calibration_tokens > 100 and report.method == "rtn"


def test_a_gguf_file(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama", "float32", vocab_size=304, head_dim=16)
    save_tokenizer(folder, "{{ messages[0]['content'] }}")
    path = save_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    report = quantize(path, tmp_path / "out", QuantizeOptions(weights="int8", group=32))
    assert report.requantized
    before, after = load_checkpoint(path, "float32", "none"), load_checkpoint(tmp_path / "out")
    assert after.tokenizer.encode("the cat sat") == before.tokenizer.encode("the cat sat")
    assert after.eos_ids == before.eos_ids
    assert set(after.state) == set(before.state)
    lost = wide(after.state[Q_PROJ]) - numpy_to_tensor(before.state[Q_PROJ])
    assert lost.norm() < 0.01 * np.linalg.norm(before.state[Q_PROJ])


TUNED = [
    QuantizedFormat("int4", 64, "bfloat16", "zero_point"),
    QuantizedFormat("int4", 32, "float16"),
    QuantizedFormat("int8", 0, "bfloat16", "zero_point"),
    QuantizedFormat("float8_e4m3", 0, "bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("format", TUNED, ids=str)
def test_a_tuned_model_predicts_more_of_what_the_original_does(source: Path, format: QuantizedFormat) -> None:
    checkpoint = load_checkpoint(source, "float32", "none")
    network = Layerwise(checkpoint)
    arrays = {name: nearest(network.weight(name), format, RANGE) for name in network.shapes}
    done: list[int] = []
    tuner = Tuner(checkpoint, torch.randint(300, (33, 48)), 64, "cpu")
    tuned = tuner.tune(arrays, 60, done.append)
    found, (before, after) = tuned.arrays, tuned.divergences
    # The weights of this model are random, so there is little to gain where few are rounded far.
    most = {"int4": 0.95, "int8": 1.05, "float8_e4m3": 1.1}[format.codes]
    assert done == list(range(1, 61)) and 0 < after < most * before
    assert {name: array.format for name, array in found.items()} == dict.fromkeys(network.shapes, format)
    assert any((found[name].codes != arrays[name].codes).any() for name in found)
    model = dense_model(checkpoint, "cpu")
    weights = {name: wide(array) for name, array in found.items()} | tuned.others
    assert weights.keys() == set(checkpoint.state)
    for name, weight in weights.items():
        model.get_parameter(name).data = weight.float()
    assert tuner._divergence(model) == pytest.approx(after, rel=1e-3), "what is returned is what has been trained"
    assert any((tuned.others[name] != numpy_to_tensor(checkpoint.state[name])).any() for name in tuned.others)


@pytest.mark.parametrize(("step", "purpose"), [((Tuner, "tune"), "tuning"), ((Layerwise, "embedded"), "quantizing")])
def test_a_gpu_without_memory_is_an_error_and_nothing_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], purpose: str
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(*step, fail)
    with pytest.raises(NPUError, match=f"too small for {purpose}"):
        quantize(source, tmp_path / "out", QuantizeOptions(group=32, calibrate=TEXT, samples=2, tune=1))
    assert not list(tmp_path.iterdir())


def test_tuning_that_fails_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(source, "float32", "none")
    network = Layerwise(checkpoint)
    array = nearest(network.weight(Q_PROJ), TUNED[0], RANGE)
    monkeypatch.setattr(tuning, "_WEIGHT_RATE", float("inf"))
    with pytest.raises(NPUError, match="not finite"):
        Tuner(checkpoint, torch.randint(300, (2, 16)), 3, "cpu").tune({Q_PROJ: array}, 3)


def test_the_usual_group_gives_way_to_one_that_fits(source: Path, tmp_path: Path) -> None:
    """No row of this model is a multiple of 128."""
    report = quantize(source, tmp_path / "out")
    assert (report.group, report.usual_group) == (64, 128)
    assert all("64" in layer.format for layer in report.layers)
    assert quantize(source, tmp_path / "rows", QuantizeOptions(weights="int8")).group == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"group": 48}, r"rows of 64 elements are not a whole number of groups of 48; group sizes that fit all layers: 32"),
    ({"weights": "int3"}, "unknown weights 'int3'"),
    ({"method": "awq"}, "unknown method 'awq'"),
    ({"device": "tpu"}, "unknown device 'tpu'; choose one of cpu, gpu"),
    ({"method": "gptq"}, "needs a calibration text"),
    ({"calibrate": ""}, "the calibration text is empty"),
    ({"weights": "fp8", "zero_points": True}, "no zero points"),
    ({"samples": 0}, "at least 1"),
    ({"keep_worst": 14}, "leaves nothing to quantize: there are 14 layers"),
    ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ({"written": 2}, "needs a calibration text to begin from"),
    ({"written": -1, "calibrate": TEXT}, "at least 0"),
    ({"tune": 5}, "tuning needs a calibration text"),
    ({"tune": -1, "calibrate": TEXT}, "at least 0"),
]


@pytest.mark.parametrize(("choices", "message"), WRONG)
def test_wrong_choices_write_nothing(source: Path, tmp_path: Path, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize(source, tmp_path / "out", QuantizeOptions(**{"group": 32, **choices}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight"])
def test_weights_that_are_not_finite(source: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    state = load_file(folder / "model.safetensors")
    state[name].flatten()[7] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=name):
        quantize(folder, tmp_path / "out", QuantizeOptions(group=32))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_an_output_that_is_there_already(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    quantize(source, output, QuantizeOptions(group=32))
    (output / "extra").write_text("old")
    with pytest.raises(InputError, match="not empty"):
        quantize(source, output, QuantizeOptions(group=32))
    quantize(source, output, QuantizeOptions(weights="int8", force=True))
    assert not (output / "extra").exists() and [entry.name for entry in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "file", tmp_path / "none" / "out"):
        with pytest.raises(InputError, match="cannot write"):
            quantize(source, wrong, QuantizeOptions(group=32))


def command(*options: Any) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, options)], prog_name="npu-sim")


def test_the_command(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    options = ("--group", 32, "--calibrate", text, "--samples", 2, "--keep-worst", 1, "--zero-points")
    result = command(source, "-o", tmp_path / "table", *options)
    assert result.exit_code == 0, result.output
    assert "of 14" in result.stdout and "(kept)" in result.stdout.replace("\n", "") and "in 16 bits" in result.stdout
    result = command(source, "-o", tmp_path / "json", *options, "--json", "--written", 3, "--tune", 2)
    report = json.loads(result.stdout)
    assert report["method"] == "gptq" and len(report["layers"]) == 14 and len(report["kept"]) == 1
    checkpoint = load_checkpoint(source)
    samples, length = calibration_ids(checkpoint, calibration_tokens(checkpoint, TEXT), 2).shape
    assert report["calibration_tokens"] == (samples + 3) * length
    assert report["tuning_steps"] == 2 and len(report["divergences"]) == 2
    answer = CliRunner().invoke(
        app, ["generate", str(tmp_path / "json"), "--device", "cpu", "-p", "the cat", "-n", "3"], prog_name="npu-sim"
    )
    assert answer.exit_code == 0, answer.output


def test_the_command_says_what_is_wrong(source: Path, tmp_path: Path) -> None:
    binary = tmp_path / "text.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    cases = {
        ("nowhere/at/all",): "neither a folder",
        (source, "--calibrate", tmp_path / "none.txt"): "cannot read calibration text",
        (source, "--calibrate", binary): "is not UTF-8 text",
        (source, "--group", 24): "not a whole number of groups of 24",
        (source, "--dtype", "int9"): "unknown compute dtype",
    }
    for options, message in cases.items():
        result = command(*options, "-o", tmp_path / "out")
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert not (tmp_path / "out").exists()


def test_a_quantized_model_can_be_quantized_again_with_a_warning(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "eight", QuantizeOptions(weights="int8"))
    result = command(tmp_path / "eight", "--weights", "int4", "--group", 32, "-o", tmp_path / "four")
    assert result.exit_code == 0 and "rounded a second time" in result.stderr
    assert load_checkpoint(tmp_path / "four").quantization


def test_reports_keep_what_they_say(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "out", QuantizeOptions(group=32))
    assert replace(report, kept=()).to_dict()["layers"][0]["name"] == report.layers[0].name
    with pytest.raises(NPUError):
        load_checkpoint(tmp_path / "out", quantization="int4")
