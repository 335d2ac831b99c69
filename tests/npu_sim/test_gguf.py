"""GGUF files: tensors, metadata and tokenizer as transformers reads them, quick second starts, and damaged files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import drawn
from gguf_files import SCALES, random_blocks, save_gguf
from kernel_cache import put_kernels
from tiny_llms import TEMPLATE, assert_same_tokens, save_tiny, save_tokenizer, tensors, transformers

from npu_compiler import OpLevelTarget
from npu_compiler.errors import InputError, NPUError
from npu_runtime.cpu import native
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import LanguageModel, compile_decode_loop, load_checkpoint
from npu_sim.llm.gguf_blocks import quantized_encodings, quantized_rows
from npu_sim.llm.gguf_reader import read_gguf
from npu_sim.llm.graph import INV_FREQ, state_with_buffers

gguf = pytest.importorskip("gguf")
BLOCKS = {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1] for name in quantized_encodings()}
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module", params=drawn(["llama", "qwen2"], 1 / 2))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny(tmp_path_factory.mktemp(request.param), request.param, "float32", vocab_size=304)
    save_tokenizer(made, TEMPLATE)
    return made


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_gguf_file_is_the_model_that_was_converted(folder: Path, file: Path) -> None:
    ours, theirs = load_checkpoint(file, "float32"), load_checkpoint(folder, "float32")
    state = tensors(theirs)
    assert set(ours.state) == set(state)
    for name, value in tensors(ours).items():
        np.testing.assert_array_equal(value.numpy(), state[name].numpy())
    ids = [3, 1, 4, 1, 5]
    found, expected = (LanguageModel(x, cache_length=16, chunk=8, device="cpu").prefill(ids) for x in (ours, theirs))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensors_are_what_the_package_gguf_makes_of_them(
    folder: Path, tmp_path: Path, encoding: str, dtype: str
) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf", encoding)
    checkpoint = load_checkpoint(path, dtype, "none")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {"model.embed_tokens": "token_embd", "model.layers.1.mlp.up_proj": "blk.1.ffn_up"}
    for ours, theirs in names.items():
        stored = reader[f"{theirs}.weight"]
        assert stored.tensor_type.name == encoding
        expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32))
        found = numpy_to_tensor(checkpoint.state[f"{ours}.weight"])
        assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("encoding", quantized_encodings())
def test_blocks_are_taken_bit_for_bit(encoding: str, rng: np.random.Generator) -> None:
    rows = rng.integers(0, 256, (50, 2 * BLOCKS[encoding]), np.uint8)
    rows[:9, : BLOCKS[encoding] // 2] = rows[:9, -16:] = 0  # scales of 0
    with np.errstate(all="ignore"):  # random scales overflow, and some are NaN
        expected = getattr(gguf.quants, encoding).dequantize_rows(rows)
        np.testing.assert_array_equal(quantized_rows(rows, encoding).dequantize(), expected)


@pytest.mark.parametrize("encoding", quantized_encodings())
def test_codes_of_a_group_whose_scale_is_0_are_no_defect(encoding: str, rng: np.random.Generator) -> None:
    """Writers leave any codes there."""
    rows = random_blocks(encoding, (8, 512))
    blocks = rows.reshape(-1, BLOCKS[encoding])
    places = SCALES[encoding]
    for place in places:
        blocks[::3, place : place + 2] = 0
    assert not list(quantized_rows(rows, encoding).problems())


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_1"])
def test_quantized_weights_stay_in_few_bits_on_the_device(folder: Path, tmp_path: Path, encoding: str) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf", encoding)
    sizes = {}
    for quantization in ("checkpoint", "none"):
        checkpoint = load_checkpoint(path, quantization=quantization)
        program = compile_decode_loop(checkpoint, 16, OpLevelTarget())
        sizes[quantization] = sum(b.size_bytes for b in program.plan.buffers.values() if b.kind == "weight")
    assert sizes["checkpoint"] < {"Q8_0": 0.6, "Q4_1": 0.4}[encoding] * sizes["none"]


def test_a_quantized_file_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf", "Q4_0")
    with pytest.raises(InputError, match="m is quantized already; --quantization int8 would round"):
        load_checkpoint(path, quantization="int8")
    with pytest.raises(InputError, match="unknown quantization 'int3'; choose one of checkpoint, none, int4"):
        load_checkpoint(path, quantization="int3")


def test_a_gguf_tokenizer_does_what_the_whole_one_does(file: Path) -> None:
    ours = load_checkpoint(file).tokenizer
    whole = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    assert_same_tokens(ours, whole)
    talk = [{"role": "system", "content": " Be brief "}, {"role": "user", "content": "Hi <b>"}]
    options = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(talk, **options) == whole.apply_chat_template(talk, **options)


def test_another_tokenizer_beside_the_file_is_not_mistaken_for_the_stored_one(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file.read_bytes())
    before = load_checkpoint(path).tokenizer.chat_template
    save_tokenizer(tmp_path, "{{ 1 }}")
    whole = transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    assert before == TEMPLATE and load_checkpoint(path).tokenizer.chat_template == whole.chat_template


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_second_start_needs_neither_torch_nor_transformers(file: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from cuda_compiler import CUDACodegenTarget
from npu_sim.llm import LanguageModel, compile_decode_loop, load_checkpoint
from npu_sim.llm.graph import state_with_buffers
checkpoint, target = load_checkpoint({str(file)!r}), CUDACodegenTarget()
program = compile_decode_loop(checkpoint, 24, target)
state = state_with_buffers(checkpoint)
assert all(state[key].size for weight in program.weight_specs.values() for key in weight.recipe.keys())
prompt = checkpoint.tokenizer.encode("the cat")
assert prompt and checkpoint.eos_ids
if {native.available()}:
    model = LanguageModel(checkpoint, device="cpu", cache_length=24, chunk=2)
    assert len(list(model.generate(prompt, max_new_tokens=3))) <= 3
    assert "native" in model.device.backend.device
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    put_kernels(tmp_path)
    environment = {**os.environ, "NPU_SIM_CACHE": str(tmp_path), "NPU_SIM_TUNE": "1"}
    starts = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
        ).stdout
        for _ in range(2)
    ]
    assert [start.split() for start in starts] == [["True", "True"], ["False", "False"]]


def test_asking_whether_a_tensor_is_there_does_not_read_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = load_checkpoint(file).state
    monkeypatch.setattr(type(state), "__getitem__", lambda *_: pytest.fail("it was read"))
    assert "model.norm.weight" in state and "model.norm.bias" not in state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 3}, "says 3 layers, but its tensors are those of 2"),
        ({"block_count": 1}, "says 1 layers, but its tensors are those of 2"),
        ({"block_count": 2**31}, "says 2147483648 layers, but its tensors are those of 2"),
        ({"embedding_length": 128}, r"'token_embd.weight' has the shape \[304, 64\], but .* says \[304, 128\]"),
        ({"attention__key_length": 2**20, "attention__value_length": ...}, "'blk.0.attn_q.weight' has the shape"),
        ({"attention__head_count_kv": 4}, "'blk.0.attn_k.weight' has the shape"),
        ({"attention__head_count": 0}, "attention.head_count' is 0"),
        ({"feed_forward_length": 2**31}, r"'blk.0.ffn_\w+.weight' has the shape"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf", **changes)
    with pytest.raises(InputError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__dimension_count": 8}, "has 8 for '.*rope.dimension_count'; only 16 is supported"),
        ({"rope__scaling__type": "su", "rope__scaling__factor": 4.0}, "has 'su' for '.*rope.scaling.type'"),
        ({"rope__scaling__type": "longrope"}, "by 'longrope', but lacks the factors"),
        ({"rope__scaling__factor": -2.0}, "-2.0, not a positive number"),
        ({"rope__freq_base": [1.0, 2.0]}, "a list of values for '.*rope.freq_base'"),
        ({"rope__scaling__attn_factor": 1.5}, "a value for '.*rope.scaling.attn_factor', which is not supported"),
        ({"attention__value_length": 8}, "has 8 for '.*attention.value_length'"),
        ({"attention__sliding_window": 16}, "a value for '.*attention.sliding_window'"),
        ({"attention__causal": False}, "has False for '.*attention.causal'"),
        ({"attention__scale": 0.3}, "a value for '.*attention.scale'"),
        ({"attn_logit_softcapping": 30.0}, "a value for '.*attn_logit_softcapping'"),
        ({"logit_scale": 2.0}, "a value for '.*logit_scale'"),
        ({"vocab_size": 7}, "has 7 for '.*vocab_size'; only 304"),
        ({"expert_used_count": 8}, "has 8 for '.*expert_used_count'; only 0"),
        ({"pooling_type": 1}, "a value for '.*pooling_type'"),
        ({"layer_flags": [1, 2]}, "a value for '.*layer_flags'"),
    ],
)
def test_no_key_of_the_metadata_is_skipped(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf", **changes)
    with pytest.raises(InputError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, 4),
        ({"rope__scale_linear": 4.0}, 4),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0, "rope__scaling__finetuned": True}, 4),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1),
        ({"rope__dimension_count": 16, "vocab_size": 304, "attention__causal": True}, 1),
    ],
)
def test_linear_rope_scaling_is_computed_as_llama_cpp_does(
    folder: Path, tmp_path: Path, changes: dict[str, Any], factor: int
) -> None:
    """llama.cpp scales linearly where a factor has no type, and looks for an old name of it."""
    plain, scaled = (
        state_with_buffers(load_checkpoint(save_gguf(folder, tmp_path / name, **keys)))[INV_FREQ]
        for name, keys in (("plain.gguf", {}), ("scaled.gguf", changes))
    )
    np.testing.assert_allclose(scaled, plain / factor, rtol=1e-6)


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_up_shexp.weight", "output_norm.bias"])
def test_a_tensor_that_the_architecture_lacks_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf", more={name: np.ones(64, np.float32)})
    with pytest.raises(InputError, match=f"a tensor '{name}', which models of architecture"):
        load_checkpoint(path)


def test_damaged_files_are_one_clear_sentence(file: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """Opening a file with a changed header or a cut end, and reading its tensors, works or is refused."""
    whole = file.read_bytes()
    header = len(whole) - sum(tensor.rows.size for tensor in read_gguf(file).tensors.values())
    path = tmp_path / "m.gguf"
    refused = 0
    for number in range(400):
        damaged = bytearray(whole)
        for place in rng.integers(0, header, rng.integers(1, 4)):
            damaged[place] = rng.choice([0, 1, 8, 9, 0x7F, 0x80, 0xFF, damaged[place] ^ 1, rng.integers(256)])
        if number % 5 == 0:
            del damaged[rng.integers(0, len(damaged)) :]
        path.write_bytes(damaged)
        try:
            checkpoint = load_checkpoint(path)
            for name in checkpoint.state:
                assert checkpoint.state[name].shape
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 80


def test_a_tokenizer_that_cannot_be_read_is_one_clear_sentence(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    with pytest.raises(InputError, match="cannot read the tokenizer of m"):
        _ = load_checkpoint(path).tokenizer


def test_a_weight_that_float16_cannot_hold_is_not_made_infinite(folder: Path, tmp_path: Path) -> None:
    path = save_gguf(folder, tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[-4:] = np.float32(1e6).tobytes()
    path.write_bytes(content)
    state = load_checkpoint(path, "float16").state
    assert sum(float(np.nanmax(np.abs(value.astype(np.float32)))) == 1e6 for value in state.values()) == 1


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"GGUF", b"GGUF" + bytes(40), b"\x00" * 100):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(NPUError, match=r"cannot use the GGUF file .*m\.gguf: "):
            load_checkpoint(tmp_path / "m.gguf")
