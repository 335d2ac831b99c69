"""Qwen2.5-1.5B's real configuration: compiled whole from the meta device, and run as a cut of two layers."""

import secrets
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cuda_gpu import DEVICES
from metal_harness import METAL_DEVICE
from numerics import MIN_DRAWS, assert_design6
from traces import qwen_step
from transformers import AutoModelForCausalLM, Qwen2Config

import npu_compiler
from benchmarks.configurations import qwen2_1_5b
from benchmarks.pages.dispatches import DOCUMENT, measure, table, traffic
from benchmarks.qwen import CACHE_LENGTH, LAYERS, PROMPT
from npu_compiler.graph.quantization import NAMED_FORMATS
from npu_compiler.program.describe import summary
from npu_compiler.program.target import MetalCodegenTarget
from npu_sim.llm import Checkpoint, LanguageModel

SHORT_PROMPT = 32


def checkpoint(config: Qwen2Config, state: dict[str, torch.Tensor]) -> Checkpoint:
    return Checkpoint("qwen2.5-1.5b", config, state, "bfloat16", load_tokenizer=lambda: None)


@pytest.mark.parametrize(
    ("tokens", "per_layer"),
    [pytest.param(PROMPT, 10, id="prefill", marks=pytest.mark.slow), pytest.param(1, 9, id="decode")],
)
def test_the_real_configuration_is_one_partition_with_donated_caches(tokens: int, per_layer: int) -> None:
    ir = qwen_step(tokens)
    plan = npu_compiler.partition(ir)
    assert [part.device for part in plan.partitions] == ["npu"]
    program = npu_compiler.compile(ir)
    assert program.compute_dtype == "bfloat16"
    assert len(program.plan.donations) == 2 * LAYERS
    around = 13  # mask, embedding and rotary tables before the layers; the last row (prefill), norm and head after them
    assert len(program.kernels) <= per_layer * LAYERS + around


def test_a_decode_step_is_few_launches_and_moves_little_more_than_it_must() -> None:
    program = npu_compiler.compile(qwen_step(1))
    figures, least = summary(program.plan), traffic(program)
    assert int(figures["kernel launches"]) <= 300
    assert least.weights == figures["weight bytes"]
    assert least.cache == LAYERS * 2 * 2 * CACHE_LENGTH * 128 * 2
    assert least.floor < int(figures["bytes moved"]) <= 1.1 * least.floor


def test_metal_decodes_4_bit_weights_with_the_launches_of_16_bits_and_reads_each_byte_once() -> None:
    ir, target = qwen_step(1), MetalCodegenTarget()
    config, int4 = qwen2_1_5b(), NAMED_FORMATS["int4"]
    program = npu_compiler.compile(ir, target, npu_compiler.CompileOptions(quantization="int4"))
    assert len(program.kernels) == len(npu_compiler.compile(ir, target).kernels)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.hidden_size
    with_keys_and_values = heads + 2 * config.num_key_value_heads * 128
    shapes = ((with_keys_and_values, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
    packed = LAYERS * sum(int4.size_bytes(shape) for shape in shapes)
    table = NAMED_FORMATS["int8"].size_bytes((config.vocab_size, hidden))  # which embedding and head share
    floor = packed + table + traffic(program).cache
    assert floor < int(summary(program.plan)["bytes moved"]) <= 1.02 * floor


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [PROMPT, 1], ids=["prefill", "decode"])
def test_the_page_on_fusions_says_what_the_compiler_does(tokens: int) -> None:
    rows, least = measure(qwen_step(tokens))
    assert rows[0].launches > rows[-1].launches
    assert "\n".join(table(rows, least.floor)) in DOCUMENT.read_text(encoding="utf-8"), (
        "run python -m benchmarks.pages.dispatches"
    )


@dataclass(frozen=True)
class Cut:
    """Two layers of the real sizes with a smaller vocabulary, and PyTorch's logits for some texts.

    Attributes:
        texts: [texts, SHORT_PROMPT + 1].
        in_float32, in_bfloat16: [texts, 2, vocabulary], after each prompt and after the token that follows it.
    """

    checkpoint: Checkpoint
    texts: list[list[int]]
    in_float32: np.ndarray
    in_bfloat16: np.ndarray
    seed: int


@pytest.fixture(scope="module")
def cut() -> Cut:
    seed = secrets.randbits(32)
    torch.manual_seed(seed)
    config = qwen2_1_5b(2)
    config.vocab_size = 20_000
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    texts = np.random.default_rng(seed).integers(0, config.vocab_size, (MIN_DRAWS, SHORT_PROMPT + 1)).tolist()

    def logits() -> np.ndarray:
        with torch.no_grad():
            found = [model(torch.tensor([tokens]), logits_to_keep=2).logits[0] for tokens in texts]
        return torch.stack(found).float().numpy()

    state, in_bfloat16 = model.state_dict(), logits()
    model.float()
    return Cut(checkpoint(config, state), texts, logits(), in_bfloat16, seed)


@pytest.mark.slow
@pytest.mark.parametrize("device", [*DEVICES, METAL_DEVICE])
def test_a_cut_of_two_layers_is_as_good_as_pytorch(cut: Cut, device: str) -> None:
    ours = LanguageModel(cut.checkpoint, device=device, cache_length=512, chunk=SHORT_PROMPT)

    def on_device(tokens: list[int]) -> list[np.ndarray]:
        ours.reset()
        return [ours.prefill(tokens[:SHORT_PROMPT]), ours.decode(tokens[SHORT_PROMPT])]

    logits = np.array([on_device(tokens) for tokens in cut.texts])
    assert_design6(logits, cut.in_float32, cut.in_bfloat16, seed=cut.seed)
