"""Mixtures of experts: logits are those of transformers, and what files lack of an expert is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import drawn
from safetensors.torch import load_file, save_file
from tiny_llms import VOCAB, save_tiny

import npu_compiler
from npu_compiler import CompileOptions
from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.quantization import QuantizedFormat, quantize
from npu_runtime import CPUBackend, Executor, load_weights
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import LanguageModel, load_checkpoint
from npu_sim.llm.expert_weights import Joined
from npu_sim.llm.experts import expert_linear
from npu_sim.llm.graph import state_with_buffers
from npu_sim.module.trace import export, plain_ir, trace

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shared_programs")
PROMPT = np.random.default_rng(5).integers(3, VOCAB, 21).tolist()
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
}


@pytest.fixture(scope="module", params=drawn(EXPERTS, 1 / 2))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, "float32", **EXPERTS[request.param])


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("experts"), "mixtral", "float32", **EXPERTS["mixtral"])


def reference(folder: Path, dtype: torch.dtype, state: dict[str, torch.Tensor] | None = None) -> np.ndarray:
    """Log probabilities of transformers after the prompt and after each of its next six greedy tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if state is not None:
        model.load_state_dict(state)
    ids, rows = list(PROMPT), []
    with torch.no_grad():
        for _ in range(6):
            rows.append(model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1).numpy())
            ids.append(int(rows[-1].argmax()))
    return np.stack(rows)


def ours(folder: Path, dtype: str, tokens: np.ndarray, quantization: str = "checkpoint") -> np.ndarray:
    """Log probabilities of our engine on the same tokens."""
    model = LanguageModel(load_checkpoint(folder, dtype, quantization), cache_length=48, device="cpu", chunk=16)
    logits = [model.prefill(PROMPT), *(model.decode(int(token)) for token in tokens[:-1])]
    return torch.from_numpy(np.stack(logits)).log_softmax(-1).numpy()


def test_log_probabilities_are_those_of_transformers(folder: Path) -> None:
    expected = reference(folder, torch.float32)
    np.testing.assert_allclose(ours(folder, "float32", expected.argmax(-1)), expected, atol=2e-4)


def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(folder: Path) -> None:
    expected = reference(folder, torch.float32)
    tokens = expected.argmax(-1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *tokens[:-1]]])
        half = model(ids).logits[0, len(PROMPT) - 1 :].float().log_softmax(-1).numpy()
    error = np.abs(ours(folder, "bfloat16", tokens) - expected).mean()
    assert error <= 1.5 * np.abs(half - expected).mean()


def test_weights_in_few_bits_are_those_that_transformers_would_multiply_with(folder: Path) -> None:
    """Routing is exact, so each product's weight rounded by row has to give the same log probabilities."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = dict(model.state_dict())
    for name, value in state.items():
        if value.ndim >= 2 and "embed_tokens" not in name:
            matrix = value.reshape(-1, value.shape[-1]).numpy()
            rounded = quantize(matrix, QuantizedFormat("int8")).dequantize()
            state[name] = torch.from_numpy(rounded).reshape(value.shape)
    expected = reference(folder, torch.float32, state)
    found = ours(folder, "float32", expected.argmax(-1), "int8")
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_experts_of_one_sequence_do_not_depend_on_how_its_prompt_is_divided(folder: Path) -> None:
    checkpoint = load_checkpoint(folder, "float32")
    whole = LanguageModel(checkpoint, cache_length=48, device="cpu", chunk=32).prefill(PROMPT)
    pieces = LanguageModel(checkpoint, cache_length=48, device="cpu", chunk=4).prefill(PROMPT)
    np.testing.assert_allclose(pieces, whole, atol=2e-4)


@pytest.mark.parametrize(("transposed", "shape"), [(False, (3, 4, 2)), (True, (3, 2, 4))])
def test_matrices_of_experts_are_joined_row_by_row(transposed: bool, shape: tuple[int, int, int]) -> None:
    value = np.arange(24, dtype=np.float32).reshape(shape)
    joined = Joined(shape, transposed)
    assert joined.matrices == (3, 4, 2)
    wanted = [matrix.T if transposed else matrix for matrix in value]
    np.testing.assert_array_equal(joined.join(value), np.concatenate(wanted))


def test_a_row_of_no_expert_is_zero() -> None:
    rows, weight = torch.randn(3, 4), torch.randn(2 * 5, 4)
    found = expert_linear(rows, weight, torch.tensor([1, -1, 2]), torch.randn(2, 5), 2)
    assert found[0].abs().sum() > 0
    assert not found[1:].any()


class Product(torch.nn.Module):
    """`expert_linear` with weights of its own, some rows of which have no expert."""

    def __init__(self, count: int, rows: int, width: int, bias: bool) -> None:
        super().__init__()
        self.count = count
        self.weight = torch.nn.Parameter(torch.randn(count * rows, width))
        self.bias = torch.nn.Parameter(torch.randn(count, rows)) if bias else None

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return expert_linear(x, self.weight, experts, self.bias, self.count)


@pytest.mark.parametrize("seed", range(4))
def test_a_compiled_product_by_experts_is_that_of_pytorch(seed: int) -> None:
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    count, rows, width, tokens, choices = draw.integers(1, 40, 5).tolist()
    module = Product(count, rows, width, bool(seed % 2)).eval()
    x, experts = torch.randn(tokens, width), torch.randint(-1, count + 1, (tokens * choices,))
    ir = plain_ir(trace(export(module, (x, experts)), "experts"))
    program, backend = npu_compiler.compile(ir, options=CompileOptions(compute_dtype="float32")), CPUBackend()
    assert [call.kernel for call in program.kernels] == ["expert_matmul_kernel"]
    weights = load_weights({name: value.numpy() for name, value in module.state_dict().items()}, program, backend)
    given = zip(program.input_specs, (x.numpy(), experts.numpy()), strict=True)
    (found,) = Executor(program, backend).run({spec.name: value for spec, value in given}, weights).values()
    torch.testing.assert_close(torch.from_numpy(to_numpy(found)), module(x, experts), atol=1e-4, rtol=1e-4)


FORMATS = [None, QuantizedFormat("int8"), QuantizedFormat("float4_e2m1", 32, "bfloat16")]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_result_has_nothing_of_experts_that_are_not_chosen(format: QuantizedFormat | None) -> None:
    """The others hold huge numbers, which any part of them would show."""
    torch.manual_seed(0)
    module = Product(6, 5, 64, bias=False).eval()
    x, experts = torch.randn(3, 64), torch.tensor([4, 1, 1, 4, 0, 4])
    weight = module.weight.detach().numpy()
    stored: Any = weight.copy() if format is None else quantize(weight, format)
    unchosen = np.repeat(~np.isin(np.arange(6), experts.numpy()), 5)
    (stored if format is None else stored.scales)[unchosen] = 1e30
    ir = plain_ir(trace(export(module, (x, experts)), "experts"))
    options = CompileOptions(compute_dtype="float32", quantization=None if format is None else {"weight": format})
    program, backend = npu_compiler.compile(ir, options=options), CPUBackend()
    given = {spec.name: value for spec, value in zip(program.input_specs, (x.numpy(), experts.numpy()), strict=True)}
    (found,) = Executor(program, backend).run(given, load_weights({"weight": stored}, program, backend)).values()
    rounded = weight if format is None else quantize(weight, format).dequantize()
    expected = expert_linear(x, torch.from_numpy(rounded), experts, None, 6)
    torch.testing.assert_close(torch.from_numpy(to_numpy(found)), expected, atol=1e-4, rtol=1e-3)


def changed(folder: Path, target: Path, drop: str = "", **fields: Any) -> Path:
    """A copy of a folder without the tensors whose names contain `drop`, with other fields in its config."""
    target.mkdir()
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not drop or drop not in name}
    assert not drop or len(kept) < len(tensors)
    save_file(kept, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("drop", "fields", "message"),
    [
        ("layers.1.block_sparse_moe.experts.2.w3", {}, "lack a matrix of expert 2 beside '.*experts.0.w1.weight'"),
        ("", {"num_local_experts": 3}, "hold 4 experts like '.*', but the config says 3"),
        ("", {"num_local_experts": 5}, "lack a matrix of expert 4"),
        ("", {"intermediate_size": 64}, r"has the shape \[96, 64\], but its config says \[64, 64\]"),
        ("experts.", {}, "lack 'model.layers.0.mlp.experts.gate_up_proj'"),
    ],
)
def test_experts_that_files_lack_are_named(
    mixtral: Path, tmp_path: Path, drop: str, fields: dict[str, Any], message: str
) -> None:
    checkpoint = load_checkpoint(changed(mixtral, tmp_path / "m", drop, **fields), "float32")
    with pytest.raises(InputError, match=message):
        state = state_with_buffers(checkpoint)
        {name: numpy_to_tensor(np.asarray(state[name])) for name in state if "experts" in name}


def test_a_mixture_of_a_type_without_experts_is_refused(mixtral: Path, tmp_path: Path) -> None:
    folder = changed(mixtral, tmp_path / "m", model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises((InputError, WeightError), match="lack .*mlp.gate_proj"):
        LanguageModel(load_checkpoint(folder), device="cpu")
