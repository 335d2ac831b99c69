"""Quantized Hugging Face folders: their weights are those that the checkpoints' own libraries compute, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import (
    Compress,
    Tensors,
    awq,
    block_fp8,
    dequantized_awq,
    dequantized_fp8,
    dequantized_gptq,
    gptq,
    quantize_folder,
    write_config,
)
from safetensors.torch import load_file, save_file
from tiny_llms import save_tiny, transformers

from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.checkpoints.microscaling import Microscaled
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dense model with rows of 64 and 128 elements."""
    return save_tiny(tmp_path / "model", "llama", "bfloat16", intermediate_size=128)


def modules(stored: Tensors) -> dict[str, Tensors]:
    """Module → its tensors by their names within it, of the linear layers that are not `lm_head`."""
    found: dict[str, Tensors] = {}
    for key, value in stored.items():
        module, _, name = key.rpartition(".")
        if "_proj" in module:
            found.setdefault(module, {})[name] = value
    return found


def quantized(checkpoint: Checkpoint, module: str) -> QuantizedArray:
    value = checkpoint.state[f"{module}.weight"]
    assert isinstance(value, QuantizedArray)
    assert isinstance(checkpoint.quantization, dict) and checkpoint.quantization[f"{module}.weight"] == value.format
    return value


def assert_equal(ours: QuantizedArray, theirs: torch.Tensor) -> None:
    """Elements are equal in the dtype in which the library computes."""
    wide = ours.dequantize()
    if wide.dtype.name != str(theirs.dtype).removeprefix("torch."):
        wide = numpy_to_tensor(wide).to(theirs.dtype)
    else:
        wide = numpy_to_tensor(wide)
    assert torch.equal(wide, theirs)


def check_folder(folder: Path, stored: Tensors, reference: Callable[[Tensors], torch.Tensor]) -> None:
    """Every linear layer is what the reference makes of its tensors; the other tensors are as stored."""
    checkpoint = load_checkpoint(folder)
    wanted = modules(stored)
    assert {key.removesuffix(".weight") for key in checkpoint.quantization or {}} == set(wanted)
    for module, parts in wanted.items():
        assert_equal(quantized(checkpoint, module), reference(parts))
    dense = {key for key in stored if key.rpartition(".")[0] not in wanted}
    assert set(checkpoint.state) == dense | {f"{module}.weight" for module in wanted}
    for key in dense:
        assert torch.equal(numpy_to_tensor(checkpoint.state[key]), stored[key])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (8, 64)])
def test_gptq(folder: Path, bits: int, group: int, version: int, symmetric: bool, dtype: torch.dtype) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    stored = quantize_folder(folder, config, gptq(bits, group, symmetric, version, dtype))
    check_folder(folder, stored, lambda parts: dequantized_gptq(parts, bits, version))
    offsets = "none" if symmetric else "zero_point"
    wanted = QuantizedFormat("int4" if bits == 4 else "int8", max(group, 0), str(dtype).removeprefix("torch."), offsets)
    assert quantized(load_checkpoint(folder), Q_PROJ).format == wanted


@pytest.mark.parametrize("group", [32, 64])
def test_awq(folder: Path, group: int) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    stored = quantize_folder(folder, config, awq(group))
    check_folder(folder, stored, lambda parts: dequantized_awq(parts, group))


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (48, 64)])
def test_block_fp8(folder: Path, block: tuple[int, int]) -> None:
    config = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    stored = quantize_folder(folder, config, block_fp8(block))
    check_folder(folder, stored, lambda parts: dequantized_fp8(parts, block))


def compressed(format: str, **weights: Any) -> tuple[dict[str, Any], Compress, Callable[[Tensors], torch.Tensor]]:
    """A config, and how compressed-tensors compresses and decompresses one weight with it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    assert scheme.weights is not None
    compressor = BaseCompressor.get_value_from_registry(format)
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }

    def compress(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
        args = scheme.weights
        assert args is not None
        n, k = weight.shape
        shape: tuple[int, ...] = {"tensor": (1,), "channel": (n, 1)}.get(str(args.strategy), ())
        if args.strategy in ("group", "tensor_group"):
            assert args.group_size is not None
            shape = (n, k // args.group_size)
        elif args.strategy == "block":
            assert args.block_structure is not None
            shape = (-(-n // args.block_structure[0]), -(-k // args.block_structure[1]))
        largest = 400.0 if args.type == "float" else 2.0 ** (args.num_bits - 1)
        scale = (torch.rand(shape, generator=generator) + 0.5) / largest
        state = {"weight": weight.bfloat16(), "weight_scale": scale.bfloat16()}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = torch.rand(1, generator=generator) * 9 + 0.1
        if not args.symmetric:
            half = 2 ** (args.num_bits - 1)
            state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
        made: Tensors = compressor.compress(state, scheme)
        return made

    def decompress(parts: Tensors) -> torch.Tensor:
        weight: torch.Tensor = compressor.decompress(dict(parts), scheme)["weight"]
        return weight

    return config, compress, decompress


@pytest.mark.parametrize(
    ("activations", "wanted"),
    [
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "int8"),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, "float8_e4m3"),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}, "none"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}, "none"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": True}, "none"),
        (None, "none"),
    ],
)
def test_dynamic_activations_of_compressed_tensors(
    folder: Path, activations: dict[str, Any] | None, wanted: str
) -> None:
    config, compress, _ = compressed("int-quantized", num_bits=8, strategy="channel")
    if activations is not None:
        from compressed_tensors.quantization import QuantizationArgs

        settings = QuantizationArgs(**activations).model_dump(mode="json")
        config["config_groups"]["group_0"]["input_activations"] = settings
    quantize_folder(folder, config, compress)

    def found(**settings: str) -> set[str]:
        formats = load_checkpoint(folder, **settings).quantization
        assert isinstance(formats, dict)
        return {format.activations for format in formats.values()}

    assert found() == {wanted}
    assert found(activations="none") == {"none"} and found(activations="fp8") == {"float8_e4m3"}


def test_activations_are_rounded_for_weights_in_few_bits_only(folder: Path) -> None:
    with pytest.raises(InputError, match="has no weights in few bits, whose products could round activations to int8"):
        load_checkpoint(folder, activations="int8")
    assert load_checkpoint(folder, activations="none").quantization is None
    assert load_checkpoint(folder, quantization="int4", activations="int8").quantization == "int4+int8"
    for settings in ({"activations": "int4"}, {"kv_cache": "int4"}):
        with pytest.raises(InputError, match="unknown format of a.* 'int4'; choose one of .*none, int8, fp8"):
            load_checkpoint(folder, **settings)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", [{"strategy": "group", "group_size": 32}, {"strategy": "channel"}])
def test_compressed_tensors_packed(folder: Path, scales: dict[str, Any], bits: int, symmetric: bool) -> None:
    config, compress, decompress = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **scales)
    check_folder(folder, quantize_folder(folder, config, compress), decompress)


PLAIN = [
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("naive-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 48]}),
]


@pytest.mark.parametrize(("format", "weights"), PLAIN)
def test_compressed_tensors_of_one_byte(folder: Path, format: str, weights: dict[str, Any]) -> None:
    config, compress, decompress = compressed(format, **weights)
    check_folder(folder, quantize_folder(folder, config, compress), decompress)


MICROSCALED = [
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
]


@pytest.mark.parametrize(("format", "weights"), MICROSCALED)
def test_compressed_tensors_with_scales_of_one_byte(folder: Path, format: str, weights: dict[str, Any]) -> None:
    config, compress, decompress = compressed(format, **weights)
    check_folder(folder, quantize_folder(folder, config, compress), decompress)


@pytest.mark.parametrize("exponent", [0, 1, 127, 254])
def test_each_code_of_mxfp4_is_what_the_library_makes_of_it(exponent: int) -> None:
    packed, scales = np.arange(256, dtype=np.uint8).reshape(16, 16), np.full((16, 1), exponent, np.uint8)
    _, _, decompress = compressed(MICROSCALED[0][0], **MICROSCALED[0][1])
    parts = {"weight_packed": packed, "weight_scale": scales}
    theirs = decompress({name: torch.from_numpy(part) for name, part in parts.items()})
    assert_equal(Microscaled(4, 32).array(parts), theirs)


@pytest.mark.parametrize(("format", "weights"), MICROSCALED)
def test_scales_of_one_byte_that_fit_nothing_are_refused(folder: Path, format: str, weights: dict[str, Any]) -> None:
    config, compress, _ = compressed(format, **weights)
    quantize_folder(folder, config, compress)
    _changed(folder, "weight_scale", lambda scales: scales[:, :1])
    with pytest.raises(WeightError, match=f"'{Q_PROJ}' cannot be used: its weight_scale are .* ask for .* \\[64, "):
        load_checkpoint(folder)
    config["config_groups"]["group_0"]["weights"]["group_size"] = 64
    write_config(folder, config)
    with pytest.raises(InputError, match="has the group_size 64; supported: "):
        load_checkpoint(folder)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, Any]:
    """A gpt-oss folder with experts in MXFP4, and the model of transformers with the same weights in bfloat16."""
    from decoder_variants import save_model
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = save_model(tmp_path / "model", "gpt_oss", "bfloat16", sliding_window=8)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, rows = stored.pop(name).shape
        blocks = torch.randint(256, (count, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    write_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return folder, whole


def test_gpt_oss_in_mxfp4(gpt_oss: tuple[Path, Any]) -> None:
    folder, whole = gpt_oss
    checkpoint = load_checkpoint(folder, "float32")
    assert isinstance(checkpoint.quantization, dict) and len(checkpoint.quantization) == 4
    for name in checkpoint.quantization:
        matrices = whole.get_parameter(name).mT
        assert_equal(checkpoint.state[name], matrices.reshape(-1, matrices.shape[2]))
    ids = np.random.default_rng(1).integers(0, 150, 20).tolist()
    with torch.no_grad():
        expected = whole.float()(torch.tensor([ids])).logits[0, -1].numpy()
    found = LanguageModel(checkpoint, cache_length=32, device="cpu").prefill(ids)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("_scales", lambda x: None, "down_proj_blocks' has no scales"),
        ("_scales", lambda x: x[:, :3], r"blocks and scales of '.*down_proj' are uint8.* do not fit each other"),
        ("_blocks", lambda x: x.to(torch.int32), "blocks and scales of '.*down_proj' are int32"),
        ("_scales", lambda x: torch.full_like(x, 255), "scales contain values that are not finite"),
    ],
)
def test_blocks_of_gpt_oss_that_cannot_be_used(
    gpt_oss: tuple[Path, Any], end: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    module = "model.layers.1.mlp.experts"
    _changed(gpt_oss[0], f"down_proj{end}", change, module)
    with pytest.raises(WeightError, match=message):
        _ = load_checkpoint(gpt_oss[0]).state[f"{module}.down_proj"]


def test_what_is_only_for_activations_is_left_out(folder: Path) -> None:
    config, compress, decompress = compressed("int-quantized", num_bits=8, strategy="channel")
    stored = quantize_folder(folder, config, compress)
    extra = {f"{Q_PROJ}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file({**stored, **extra}, folder / "model.safetensors")
    check_folder(folder, stored, decompress)


def test_the_most_specific_target_says_how_a_module_is_stored(folder: Path) -> None:
    config, four, decompress = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    other, eight, decompress_eight = compressed("pack-quantized", num_bits=8, strategy="channel")
    down = "model.layers.0.mlp.down_proj"
    narrow = {**other["config_groups"]["group_0"], "targets": ["re:.*down_proj$"]}
    config["config_groups"] = {"group_0": config["config_groups"]["group_0"], "group_1": narrow}
    config["ignore"] = [Q_PROJ, "re:.*layers.0.self_attn.*"]
    skip = (Q_PROJ, *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"))
    weights = load_file(folder / "model.safetensors")
    stored = quantize_folder(folder, config, four, skip)
    for layer in (0, 1):
        module = f"model.layers.{layer}.mlp.down_proj"
        made = eight(weights[f"{module}.weight"].float(), torch.Generator().manual_seed(layer))
        stored.update({f"{module}.{name}": value for name, value in made.items()})
    save_file(stored, folder / "model.safetensors")
    checkpoint = load_checkpoint(folder)
    assert_equal(quantized(checkpoint, down), decompress_eight(modules(stored)[down]))
    up = "model.layers.0.mlp.up_proj"
    assert_equal(quantized(checkpoint, up), decompress(modules(stored)[up]))
    assert quantized(checkpoint, down).format.codes == "int8" and quantized(checkpoint, up).format.codes == "int4"
    assert isinstance(checkpoint.state[f"{Q_PROJ}.weight"], np.ndarray)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
BAD_CONFIGS = [
    ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'"),
    ({**GPTQ, "bits": 3}, "the bits 3; supported: 4, 8"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({**GPTQ, "group_size": 48}, "rows of 128 elements are not a whole number of groups of 48"),
    ({**GPTQ, "group_size": 64}, r"its scales are float16 \[4, 64\]; the other tensors ask for"),
    ({**GPTQ, "group_size": "x"}, "group_size 'x'"),
    ({**GPTQ, "dynamic": {"-:x": {}}}, "settings of their own"),
    ({**GPTQ, "modules_to_not_convert": ["q_proj"]}, "q_proj' is quantized, although"),
    ({**GPTQ, "modules_to_not_convert": 3}, "not a list of names"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "malformed"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "a tensor 'g_idx', which is of another format"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "malformed"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp6-pack-quantized",
            "config_groups": {"x": {"weights": {}}},
        },
        "in the format 'mxfp6-pack-quantized'",
    ),
    ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, "is a preset"),
    ({"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"x": 1}}, "transform_config"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "although the quantization_config says"),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_a_config_that_cannot_be_used(folder: Path, config: dict[str, Any], message: str) -> None:
    quantize_folder(folder, GPTQ, gptq(4, 32, symmetric=True))
    write_config(folder, config)
    with pytest.raises((InputError, WeightError), match=message):
        load_checkpoint(folder)


def _changed(
    folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], module: str = Q_PROJ
) -> None:
    stored = load_file(folder / "model.safetensors")
    value = change(stored.pop(f"{module}.{name}"))
    if value is not None:
        stored[f"{module}.{name}"] = value.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


BAD_TENSORS = [
    ("g_idx", lambda x: x.flip(0), "desc_act"),
    ("scales", lambda x: x[:, :-1], "scales are float16"),
    ("scales", lambda x: x.to(torch.int32), "scales are int32"),
    ("qzeros", lambda x: x[:, :-1], "qzeros are int32"),
    ("qweight", lambda x: x.float(), "not a matrix of int32"),
    ("qzeros", lambda x: None, "lacks its tensor 'qzeros'"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD_TENSORS)
def test_tensors_that_do_not_fit_are_found_when_opening(
    folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    quantize_folder(folder, GPTQ, gptq(4, 32, symmetric=True))
    _changed(folder, name, change)
    with pytest.raises(WeightError, match=message) as caught:
        load_checkpoint(folder)
    assert Q_PROJ in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "its scales are 0 where its codes are not"), (np.nan, "not finite"), (np.inf, "not")]
)
def test_scales_that_no_quantizer_writes(folder: Path, value: float, message: str) -> None:
    quantize_folder(folder, GPTQ, gptq(4, 32, symmetric=True))

    def damage(scales: torch.Tensor) -> torch.Tensor:
        scales[1, 3] = value
        return scales

    _changed(folder, "scales", damage)
    checkpoint = load_checkpoint(folder)
    with pytest.raises(WeightError, match=message):
        checkpoint.state[f"{Q_PROJ}.weight"]


def test_float8_without_scales_and_with_nan(folder: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantize_folder(folder, config, block_fp8((32, 32)))
    _changed(folder, "weight", lambda x: x.view(torch.uint8).index_fill(0, torch.tensor(2), 0x7F).view(x.dtype))
    with pytest.raises(WeightError, match="float8 codes contain NaN"):
        load_checkpoint(folder).state[f"{Q_PROJ}.weight"]
    _changed(folder, "weight_scale_inv", lambda x: None)
    with pytest.raises(WeightError, match="stored as float8, but has no scales"):
        load_checkpoint(folder)


def test_a_truncated_file(folder: Path) -> None:
    quantize_folder(folder, GPTQ, gptq(4, 32, symmetric=True))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises((InputError, WeightError), match="not a readable safetensors file"):
        load_checkpoint(folder)


def test_the_config_keeps_its_quantization(folder: Path) -> None:
    quantize_folder(folder, GPTQ, gptq(4, 32, symmetric=True))
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["bits"] == 4
    assert load_checkpoint(folder, quantization="none").quantization is None
