"""The resident kernel: which calls become one, that it compiles everywhere, and that it does what they do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import cuda_gpu
import cuda_toolchain
import numpy as np
import pytest
import torch
from cuda_llms import CACHE, CONFIGS, checkpoint, config, plan_of, step_of
from cuda_on_cpu import EmulatedBackend
from cuda_phases import Phases
from cuda_wirings import WIRED, AddsItsInput, NarrowValues, SoftmaxBetween, Wired, check_wired, wired_program
from drawn import drawn
from transformers import AutoModelForCausalLM, LlamaConfig

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.resident import phases as resident_phases
from cuda_compiler.resident.experts import match_experts
from cuda_compiler.resident.kernel import RESIDENT, find_runs, form_resident_kernels
from cuda_compiler.resident.products import most_rows, own_rows
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler import CompiledProgram
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_runtime import Backend, CPUBackend, Executor, load_weights
from npu_sim.llm.graph import state_with_buffers

LONG_BYTES = 150_000  # so that some of the small models' weights are long ones


@pytest.mark.parametrize("name", drawn(CONFIGS, 1 / 2))
def test_a_decode_step_is_one_resident_kernel_behind_a_few_small_ones(name: str) -> None:
    calls = plan_of(name, 1).calls
    assert [call.kernel for call in calls].count(RESIDENT) == 1
    assert len(calls) <= 10
    assert calls[-1].kernel == RESIDENT
    assert "matvec" not in [call.kernel for call in calls]


@pytest.mark.parametrize("tokens", [2, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_step_of_a_few_tokens_is_one_before_the_row_of_the_head(name: str, tokens: int) -> None:
    kernels = [call.kernel for call in plan_of(name, tokens).calls]
    assert kernels.count(RESIDENT) == 1 and len(kernels) <= 10
    assert kernels[kernels.index(RESIDENT) + 1 :] == ["rmsnorm_kernel", "index_select_kernel", "matvec"]


@pytest.mark.parametrize(("tokens", "quantization", "resident"), [(8, None, 1), (1, "int8", 1), (4, "int8", 0)])
def test_several_rows_of_weights_in_few_bits_are_left_to_kernels_that_stream(
    tokens: int, quantization: str | None, resident: int
) -> None:
    ir = step_of("llama of long rows", tokens)
    plan = npu_compiler.compile(ir, CUDACodegenTarget(), npu_compiler.CompileOptions(quantization=quantization)).plan
    kernels = [call.kernel for call in plan.calls]
    assert (kernels.count(RESIDENT), "streamed" in kernels) == (resident, not resident)


def test_what_has_no_phase_stands_between_resident_kernels() -> None:
    calls = wired_program(SoftmaxBetween, CUDACodegenTarget()).plan.calls
    assert [call.kernel for call in calls] == [RESIDENT, "softmax_kernel", RESIDENT]


def normed_attention() -> Phases:
    phases = Phases("bfloat16", np.random.default_rng(0))
    phases.attention(6, 2, 1, 500, 64, 201, splits=8, normed=True)
    return phases


def normed_in_attention(plan: ExecutionPlan) -> list[bool]:
    """Return, for each attention phase, whether it normalizes queries and keys."""
    phases = [phase for run in find_runs(plan) for phase in run.phases if phase.function == "attend_keys"]
    return [bool(phase.constants["normed"]) for phase in phases]


@pytest.mark.parametrize("buffer", ["q.normal", "new.normal", "q.turned", "new.turned"])
def test_a_norm_whose_result_others_need_is_not_part_of_attention(buffer: str) -> None:
    plan = normed_attention().plan
    assert normed_in_attention(plan) == [True]
    (made,) = (view for call in plan.calls for view in call.outputs if view.buffer == buffer)
    assert normed_in_attention(replace(plan, output_views={"out": made})) == [False]


def choosing(plan: ExecutionPlan) -> int:
    """Return how many phases choose experts."""
    return sum(phase.choices > 0 for run in find_runs(plan) for phase in run.phases)


def test_experts_whose_ratings_are_no_product_in_16_bits_stay_apart() -> None:
    phases = Phases("bfloat16", np.random.default_rng(0))
    phases.experts(phases.operand("x", 1, 192), "layer", experts=40, choices=4, inner=192)
    plan = phases.plan
    assert choosing(plan) == 1
    for kernel in ("quantized_matmul_vec_kernel", "conv2d_kernel"):
        calls = [replace(call, kernel=kernel) if call.kernel == "matmul_vec_kernel" else call for call in plan.calls]
        assert match_experts(replace(plan, calls=calls), 0, plan.count_readers()) is None


def with_other_eps(norm: KernelCall) -> KernelCall:
    return replace(norm, params={**norm.params, "eps": 1e-3})


def over_all_heads(norm: KernelCall) -> KernelCall:
    (rows, width), gain = norm.inputs[0].shape, norm.inputs[1]
    x, out = (replace(v, shape=(1, rows * width), strides=(rows * width, 1)) for v in (norm.inputs[0], norm.outputs[0]))
    whole_gain = replace(gain, shape=(rows * width,))
    return replace(norm, inputs=(x, whole_gain), outputs=(out,), params={**norm.params, "width": rows * width})


@pytest.mark.parametrize("change", [with_other_eps, over_all_heads])
@pytest.mark.parametrize("which", [0, 1])
def test_only_norms_of_single_heads_that_are_alike_are_part_of_attention(
    change: Callable[[KernelCall], KernelCall], which: int
) -> None:
    plan = normed_attention().plan
    at = [index for index, call in enumerate(plan.calls) if call.kernel == "rmsnorm_kernel"][which]
    calls = [*plan.calls[:at], change(plan.calls[at]), *plan.calls[at + 1 :]]
    assert normed_in_attention(replace(plan, calls=calls)) == [False]


@pytest.mark.parametrize(("kv_heads", "most"), [(2, 66), (7, 18), (8, 16), (90, 1), (140, 1)])
def test_no_block_has_two_splits_of_keys_where_there_are_enough_blocks(kv_heads: int, most: int) -> None:
    phases = Phases("bfloat16", np.random.default_rng(0))
    phases.attention(kv_heads, kv_heads, 1, 8192, 16, 201, splits=1)
    ((phase,),) = (run.phases for run in find_runs(phases.plan))
    assert phase.constants["splits"] == most


def test_many_rows_go_to_ordinary_kernels() -> None:
    assert all(call.kernel != RESIDENT for call in plan_of("llama", 16).calls)


def test_a_gpu_with_little_shared_memory_gets_ordinary_kernels() -> None:
    ir = step_of("llama", 1)
    targets = CUDACodegenTarget(), CUDACodegenTarget(GPU(shared_memory=48 * 1024))
    has = [any(c.kernel == RESIDENT for c in npu_compiler.compile(ir, target=target).plan.calls) for target in targets]
    assert has == [True, False]
    assert targets[0].key != targets[1].key


def test_layers_of_equal_shape_share_their_code() -> None:
    sources = []
    for layers in (2, 5):
        CONFIGS["deep"] = config(LlamaConfig, num_hidden_layers=layers)
        plan = plan_of("deep", 1)
        del CONFIGS["deep"]
        call = next(call for call in plan.calls if call.kernel == RESIDENT)
        sources.append(plan.sources[call.source])
    namespaces = [source.count("namespace phase") for source in sources]
    assert namespaces[0] == namespaces[1] > 0


def test_what_a_phase_prefetches_is_written_by_no_earlier_one() -> None:
    plan = npu_compiler.compile(step_of("llama", 1)).plan
    at = [index for index, call in enumerate(plan.calls) if call.kernel == "attention_kernel"]
    first, (rope, _, second) = plan.calls[at[0]], plan.calls[at[1] - 2 : at[1] + 1]
    # As if the second layer attended to the first one's cache, and had none of its own.
    x, (q, _, _, mask) = rope.inputs[0], second.inputs
    unrotated = replace(q, buffer=x.buffer, strides=x.strides, offset=x.offset)
    sharing = replace(second, inputs=(unrotated, *first.inputs[1:3], mask))
    calls = [*plan.calls[: at[1] - 2], sharing, *plan.calls[at[1] + 1 :]]
    made = form_resident_kernels(replace(plan, calls=calls), Specializer(buffers=plan.buffers))
    resident = [call for call in made.calls if call.kernel == RESIDENT]
    key_cache = first.inputs[1]
    assert [key_cache in call.outputs for call in resident] == [True, False]
    assert [key_cache in call.inputs for call in resident] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "turn"),
    [
        ("llama of odd sizes", "float16", 0),
        ("llama of many heads", "bfloat16", 1),
        ("llama of long rows", "bfloat16", 2),
        ("qwen3", "bfloat16", 2),
        ("qwen3 of odd sizes", "float16", 1),
        ("qwen3 with experts", "bfloat16", 2),
        ("qwen3 with experts", "float16", 1),
    ],
)
def test_it_compiles(name: str, dtype: str, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_phases, "_LONG_BYTES", LONG_BYTES)
    plan = plan_of(name, 1, dtype)
    cuda_toolchain.compile_in_turn(resident_sources(plan), turn)


def resident_sources(plan: ExecutionPlan) -> list[str]:
    return [plan.sources[call.source] for call in plan.calls if call.kernel == RESIDENT]


def test_every_step_but_the_first_reads_the_mailbox_of_the_one_before() -> None:
    (source,) = resident_sources(plan_of("qwen2", 1))
    received, sent = (re.findall(rf"constexpr bool {name} = (\w+);", source) for name in ("from_mailbox", "to_mailbox"))
    assert received.count("false") == sent.count("false") == 1
    assert received.count("true") == sent.count("true") > 3


def test_products_after_long_ones_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_phases, "_LONG_BYTES", LONG_BYTES)
    (source,) = resident_sources(plan_of("qwen2", 1))
    phases = source.split("namespace phase")[1:]
    backoff = [int(value) for phase in phases for value in re.findall(r"constexpr int backoff_ns = (\d+);", phase)]
    gated = [index for index, phase in enumerate(phases) if "constexpr bool gated = true;" in phase]
    assert gated and all(backoff[index + 1] == resident_phases.BACKOFF_NS for index in gated)
    assert 0 in backoff


@pytest.mark.parametrize("kind", WIRED)
def test_what_is_read_before_the_barrier_besides_the_mailbox_is_older_than_the_last_step(kind: type[Wired]) -> None:
    (source,) = resident_sources(wired_program(kind, CUDACodegenTarget()).plan)
    assert [flag == "true" for flag in re.findall(r"constexpr bool from_mailbox = (\w+);", source)] == WIRED[kind]


def test_values_that_are_no_whole_pairs_of_packs_compile() -> None:
    cuda_toolchain.compile_in_turn(wired_program(NarrowValues, CUDACodegenTarget()).plan.sources.values())


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("kind", [*WIRED, NarrowValues, SoftmaxBetween])
def test_other_wirings_are_right_time_after_time(kind: type[Wired], seed: int) -> None:
    check_wired(kind, cuda_gpu.cuda_backends()[0], seed, times=50)


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
def test_what_is_not_a_number_passes_through_a_mailbox_like_any_value(seed: int) -> None:
    torch.manual_seed(seed)
    gpu, module = cuda_gpu.cuda_backends()[0], AddsItsInput().bfloat16().eval()
    program = wired_program(AddsItsInput, gpu.target)
    executor, weights = Executor(program, gpu), load_weights(module.state_dict(), program, gpu)
    for value in (math.nan, 1.0):
        inputs = {spec.name: np.ones(spec.shape, np.float32) for spec in program.input_specs}
        inputs[program.input_specs[0].name][0, 0, 3] = value
        (found,) = executor.run(inputs, weights).values()
        np.testing.assert_array_equal(np.isnan(found.to_numpy().astype(np.float32)), math.isnan(value))


@pytest.mark.parametrize(("rows", "most", "own"), [(2048, 8, 8), (1536, 8, 6), (8960, 4, 4), (151936, 8, 8), (5, 8, 5)])
def test_rows_are_shared_out_so_that_the_busiest_multiprocessor_has_the_fewest(rows: int, most: int, own: int) -> None:
    def busiest(own: int) -> int:
        return math.ceil(math.ceil(rows / own) / 132) * own

    assert own_rows(rows, most) == own
    assert busiest(own) == min(map(busiest, range(most // 2 + 1, most + 1)))


@pytest.mark.parametrize(
    ("rows", "columns", "gated", "most"),
    [
        (6144, 2560, False, 4),  # Qwen3-4B's QKV
        (10240, 2560, True, 2),  # Gemma 3 4B's gate
        (151936, 2048, False, 6),
        (3072, 2048, False, 8),  # Llama 3.2 1B's QKV, which is not long
        (28672, 4096, True, 4),  # Mistral 7B's gate: half a unit does not fit
        (8960, 1536, True, 4),  # Qwen2.5-1.5B's: whole units do
    ],
)
def test_units_of_long_weights_have_whole_rows_where_half_a_unit_of_them_fits(
    rows: int, columns: int, gated: bool, most: int
) -> None:
    assert most_rows(rows, 2 * columns, gated) == most


def decode(
    backend: Backend, program: CompiledProgram, state: Mapping[str, Any], tokens: int, steps: int, start: int
) -> Iterator[dict[str, np.ndarray]]:
    """The outputs of some steps over one cache, whose first rows are random."""
    rng = np.random.default_rng(7)
    weights = load_weights(state, program, backend)
    donated = set(program.plan.donations.values())
    kv = {}
    for spec in program.input_specs:
        if spec.name in donated:
            kv[spec.name] = backend.allocate_buffer(rng.standard_normal(spec.shape).astype(np.float32), spec=spec)
    executor = Executor(program, backend)
    for step in range(steps):
        values = {
            "input_ids": rng.integers(0, 500, tokens),
            "positions": start + step * tokens + np.arange(tokens),
            "last": np.array([tokens - 1]),
        }
        inputs = {
            spec.name: values[spec.name].astype(np.int32).reshape(spec.shape)
            for spec in program.input_specs
            if spec.name not in donated
        }
        found = executor.run({**kv, **inputs}, weights)
        yield {name: buffer.to_numpy().astype(np.float32) for name, buffer in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama with biases", "gemma3", "qwen3", "qwen3 with experts", "gpt-oss"])
def test_it_does_on_a_cpu_what_the_calls_do(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_phases, "_LONG_BYTES", LONG_BYTES)
    draw = Random(seed)
    backend = EmulatedBackend(tmp_path, capability=draw.choice([80, 90]), blocks=draw.choice([2, 3]))
    dtype, start = draw.choice(["bfloat16", "float16"]), draw.randrange(CACHE - 2)
    check_steps(backend, name, 1, dtype, seed, [start], steps=2, times=1)


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, "bfloat16"), (3, "bfloat16"), (8, "bfloat16"), (1, "float16")])
def test_it_does_what_the_calls_do(
    name: str, tokens: int, dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_phases, "_LONG_BYTES", LONG_BYTES)
    starts = (0, 200, CACHE - 4 * tokens)
    check_steps(cuda_gpu.cuda_backends()[0], name, tokens, dtype, seed, starts, steps=4)


def check_steps(
    gpu: Backend, name: str, tokens: int, dtype: str, seed: int, starts: Sequence[int], steps: int, times: int = 2
) -> None:
    """Compare steps of a random model from some positions on, run so many times, with those of the CPU device.

    Where the ratings of two experts are equal but for their rounding, a token may be given to the other one. So of a
    model with experts most steps have to be as near as all steps of others.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=getattr(torch, dtype))
    source = checkpoint(name, dtype, {key: value.detach() for key, value in model.state_dict().items()})
    ir, state = step_of(name, tokens, dtype), state_with_buffers(source)
    cpu = CPUBackend()
    expected = npu_compiler.compile(ir, target=cpu.target, options=npu_compiler.CompileOptions(compute_dtype=dtype))
    program = npu_compiler.compile(ir, target=gpu.target, options=npu_compiler.CompileOptions(compute_dtype=dtype))
    assert any(call.kernel == RESIDENT for call in program.plan.calls)
    for start in starts:
        runs = [
            list(decode(backend, made, state, tokens, steps, start))
            for backend, made in ((cpu, expected), *[(gpu, program)] * times)
        ]
        errors: dict[str, list[float]] = {}
        for reference, ours, *again in zip(*runs, strict=True):
            for output, value in reference.items():
                for found in again:
                    np.testing.assert_array_equal(ours[output], found[output])
                error = np.linalg.norm(ours[output] - value) / np.linalg.norm(value)
                errors.setdefault(output, []).append(float(error))
        for output, each in errors.items():
            usual, most = (float(np.median(each)), 0.3) if "experts" in name else (max(each), np.inf)
            assert usual < (2e-2 if dtype == "bfloat16" else 3e-3) and max(each) < most, (output, start, each)
