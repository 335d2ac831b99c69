"""Choice of the kernel for a call on the CPU device: candidates, trials and the table of choices on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import drawn
from ir_builder import IRBuilder
from native_on_tensors import memory_of
from reference_kernels import reference_launch
from typer.testing import CliRunner

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.files import seal, unseal
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View
from npu_runtime import CPUBackend, Executor, NPUBuffer, load_weights
from npu_runtime.cpu import backend as cpu_backend
from npu_runtime.cpu import native
from npu_runtime.cpu.backend import CPUBuffer, bind
from npu_runtime.cpu.bound_call import ArrayCall, BoundCall, Candidate
from npu_runtime.cpu.kernels import bound_reference
from npu_runtime.cpu.native import build
from npu_runtime.cpu.torch_kernels import TORCH_KERNELS, prepacked, torch_launch
from npu_runtime.cpu.torch_kernels.launches import on_tensors
from npu_runtime.cpu.tuning import Choice, ChoiceTable, Tuner, machine, trials, tuner
from npu_runtime.hardware import Launch, Operand
from npu_sim.cli import app

DTYPES = ("float32", "float16", "bfloat16")
HALF = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
SLOW = 0.05  # seconds


@pytest.fixture(autouse=True)
def _one_thread(seed: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; the native kernels stay where they are."""
    build.library_path()
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path))
    return tmp_path


# every candidate means what the reference means


def operand(tensor: torch.Tensor, constant: bool) -> Operand:
    """The tensor's whole memory as a buffer, and a view of what the tensor shows."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    view = View("x", tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), dtype)
    return Operand(CPUBuffer(tuple(flat.shape), None, dtype, memory_of(flat)), view, 0, constant)


def bound(
    kernel: str, params: dict[str, Any], inputs: list[torch.Tensor], out: torch.Tensor, constant: tuple[int, ...] = ()
) -> ArrayCall:
    operands = [operand(x, index in constant) for index, x in enumerate(inputs)]
    work = {"flops": 10**9, "bytes_moved": 10**9}  # worth a trial
    target = operand(out, False)
    call = KernelCall(kernel, "", tuple(o.view for o in operands), (target.view,), params, "node", **work)
    return BoundCall(call, memory_of(inputs), [memory_of(out)], operands)


def spaced(*shape: int, dtype: str = "float32") -> torch.Tensor:
    """Random values whose first dimension's items are further apart than they are long."""
    return torch.randn(shape[0], 2, *shape[1:]).to(getattr(torch, dtype))[:, 0]


def linear(dtype: str, rows: int, activation: str, bias: bool, residual: bool) -> ArrayCall:
    weight = (torch.randn(24, 40) / 40**0.5).to(getattr(torch, dtype))
    extra = [torch.randn(24).to(weight.dtype)] if bias else []
    extra += [spaced(rows, 24, dtype=dtype)] if residual else []
    params = {"activation": activation, "has_bias": bias, "has_residual": residual}
    kernel = "matmul_vec_kernel" if rows == 1 else "matmul_kernel"
    out = torch.empty(rows, 24, dtype=weight.dtype)
    return bound(kernel, params, [spaced(rows, 40, dtype=dtype), weight, *extra], out, (1, 2) if bias else (1,))


def gated(dtype: str, bias: bool) -> ArrayCall:
    weight = (torch.randn(48, 40) / 40**0.5).to(getattr(torch, dtype))
    extra = [torch.randn(48).to(weight.dtype)] if bias else []
    params = {"activation": "silu", "has_bias": bias}
    out = torch.empty(1, 24, dtype=weight.dtype)
    return bound("gated_matmul_vec_kernel", params, [spaced(1, 40, dtype=dtype), weight, *extra], out, (1, 2))


def conv(
    dtype: str,
    kernel: int,
    activation: str = "none",
    stride: int = 1,
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    groups: int = 1,
    bias: bool = True,
    residual: bool = False,
) -> ArrayCall:
    weight = (torch.randn(32, 32 // groups, kernel, kernel) / (32 / groups * kernel**2) ** 0.5).to(
        getattr(torch, dtype)
    )
    x = spaced(2, 32, 9, 11, dtype=dtype)
    top, bottom, left, right = padding
    height, width = (9 + top + bottom - kernel) // stride + 1, (11 + left + right - kernel) // stride + 1
    out = spaced(2, 32, height, width, dtype=dtype)
    extra = [torch.randn(32).to(weight.dtype)] if bias else []
    extra += [spaced(2, 32, height, width, dtype=dtype)] if residual else []
    params = {
        "activation": activation,
        "has_bias": bias,
        "has_residual": residual,
        "stride": (stride, stride),
        "padding": padding,
        "dilation": (1, 1),
        "groups": groups,
    }
    return bound("conv2d_kernel", params, [x, weight, *extra], out, (1, 2) if bias else (1,))


def attention(
    dtype: str, queries: int, mask: str, causal: bool = False, soft_cap: float = 0.0, sinks: bool = False
) -> ArrayCall:
    q, k, v = (spaced(2, heads, length, 16, dtype=dtype) for heads, length in ((4, queries), (2, 40), (2, 40)))
    seen = (torch.arange(40) <= 20 + torch.arange(queries)[:, None])[None, None].expand(2, 1, queries, 40).clone()
    seen[0, :, -1] = False  # a row that attends nothing
    masks = {"none": [], "bool": [seen], "float": [torch.where(seen, torch.randn(seen.shape), -torch.inf)]}
    beside = [torch.tensor([0.5, -torch.inf, 90.0, -2.0]).to(q.dtype)] if sinks else []
    params = {"causal": causal, "has_mask": mask != "none", "has_sinks": sinks, "scale": 0.25, "soft_cap": soft_cap}
    out = torch.empty(2, 4, queries, 16, dtype=q.dtype)
    return bound("attention_kernel", params, [q, k, v, *masks[mask], *beside], out)


def product(dtype: str) -> ArrayCall:
    a, b = spaced(3, 9, 20, dtype=dtype), spaced(3, 20, 7, dtype=dtype)
    return bound("batched_matmul_kernel", {"scale": 1.0}, [a, b], torch.empty(3, 9, 7, dtype=a.dtype))


def pool(dtype: str) -> ArrayCall:
    x = spaced(2, 8, 12, 12, dtype=dtype)
    params = {"window": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "ceil_mode": False}
    return bound("max_pool2d_kernel", params, [x], torch.empty(2, 8, 6, 6, dtype=x.dtype))


ACTIVATIONS = ("none", "relu", "relu6", "gelu", "gelu_tanh", "silu", "hardswish", "hardsigmoid", "sigmoid")
CASES: dict[str, Callable[[str], ArrayCall]] = {
    **{
        f"linear {rows} {activation}{' bias' * bias}{' residual' * residual}": (
            lambda dtype, rows=rows, a=activation, b=bias, r=residual: linear(dtype, rows, a, b, r)
        )
        for rows in (1, 6)
        for activation in ACTIVATIONS
        for bias, residual in ((False, False), (True, False), (True, True))
    },
    "gated": lambda dtype: gated(dtype, False),
    "gated bias": lambda dtype: gated(dtype, True),
    **{f"conv 3x3 {a}": lambda dtype, a=a: conv(dtype, 3, a, padding=(1, 1, 1, 1)) for a in ACTIVATIONS},
    **{f"conv residual {a}": lambda dtype, a=a: conv(dtype, 1, a, residual=True) for a in ("none", "relu", "silu")},
    "conv 1x1": lambda dtype: conv(dtype, 1, "relu", bias=False),
    "conv stride": lambda dtype: conv(dtype, 3, "relu", stride=2, padding=(0, 1, 0, 1)),
    "conv groups": lambda dtype: conv(dtype, 3, groups=4, padding=(1, 1, 1, 1)),
    "conv depthwise": lambda dtype: conv(dtype, 3, "relu6", groups=32, padding=(1, 1, 1, 1)),
    "attention": lambda dtype: attention(dtype, 40, "none"),
    "attention causal": lambda dtype: attention(dtype, 40, "none", causal=True),
    "attention capped": lambda dtype: attention(dtype, 40, "float", soft_cap=0.5),
    "attention capped causal": lambda dtype: attention(dtype, 40, "none", causal=True, soft_cap=0.5),
    "attention decode": lambda dtype: attention(dtype, 1, "bool"),
    "attention mask": lambda dtype: attention(dtype, 12, "bool"),
    "attention additive": lambda dtype: attention(dtype, 12, "float"),
    "attention sinks": lambda dtype: attention(dtype, 12, "float", soft_cap=0.5, sinks=True),
    "attention sinks causal": lambda dtype: attention(dtype, 40, "none", causal=True, sinks=True),
    "attention sinks decode": lambda dtype: attention(dtype, 1, "bool", sinks=True),
    "product": product,
    "pool": pool,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_candidate_computes_what_the_reference_does(case: str, dtype: str) -> None:
    call = CASES[case](dtype)
    tensors = on_tensors(call)
    exact = torch.empty_like(tensors.out, dtype=torch.float32)
    reference_launch(call.call, tensors.inputs, [exact])()
    before = [x.clone() for x in tensors.inputs]
    names = []
    for candidate in [*cpu_backend.candidates(call, native.available()), Candidate("numpy", bound_reference)]:
        launch = candidate.make(call)
        if launch is None:
            continue
        names.append(candidate.name)
        for _ in range(2):
            tensors.out.fill_(torch.nan)
            launch()
            # One rounding, and float32 sums in another order; attention in 16 bits also rounds its weights.
            rounding = HALF[dtype] * (4 if call.name == "attention_kernel" else 1)
            error = (tensors.out.float() - exact).abs()
            limit = 1e-4 + rounding * torch.maximum(exact.abs(), torch.tensor(1.0 if rounding > HALF[dtype] else 0.0))
            assert (error <= limit).all(), f"{candidate.name}: {(error - limit).max()} above the limit"
    assert all(torch.equal(x, y) for x, y in zip(tensors.inputs, before, strict=True))
    assert "numpy" in names and set(names) - {"native", "numpy"}, (
        "PyTorch's kernels refused operands that they should handle"
    )


@pytest.mark.parametrize("case", ["linear 1 none", "linear 6 none bias", "conv 1x1", "product", "attention mask"])
def test_candidates_refuse_what_is_not_floating_point(case: str) -> None:
    call = on_tensors(CASES[case]("float32"))
    inputs = [(4 * x).to(torch.int32) for x in call.inputs]
    whole = bound(call.call.kernel, dict(call.params), inputs, call.out.to(torch.int32), (1, 2))
    for candidate in cpu_backend.candidates(whole, native.available()):
        assert candidate.name == "torch" or candidate.make(whole) is None


@pytest.mark.parametrize("case", ["linear 1 none", "linear 6 none bias", "gated", "conv 1x1"])
def test_weights_are_not_widened_where_memory_is_short(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CASES[case]("bfloat16")
    assert any(candidate.make(call) for candidate in cpu_backend.candidates(call, native=False))
    monkeypatch.setattr(prepacked, "_available_bytes", lambda: 4.0 * call.inputs[1].size)
    assert not any(candidate.make(call) for candidate in cpu_backend.candidates(call, native=False))


def test_a_residual_may_be_updated_in_place() -> None:
    for case in ("linear 6 relu bias residual", "conv residual relu"):
        call = on_tensors(CASES[case]("bfloat16"))
        residual = call.inputs[-1].clone()
        expected = torch.empty_like(call.out)
        reference_launch(call.call, call.inputs, [expected])()
        for candidate in cpu_backend.candidates(CASES[case]("bfloat16"), native.available()):
            shared = residual.clone()
            again = bound(call.call.kernel, dict(call.params), [*call.inputs[:-1], shared], shared, (1, 2))
            launch = candidate.make(again)
            if launch is not None:
                launch()
                torch.testing.assert_close(shared, expected, rtol=2**-7, atol=1e-4)


# programs


def mlp(rows: int = 8) -> CompiledProgram:
    """y = x + down(relu(up(x))), with rows · 64 activations."""
    g = IRBuilder()
    x = g.input("x", rows, 64)
    hidden = g("aten.relu.default", g("aten.linear.default", x, g.weight("up.weight", 256, 64)))
    y = g("aten.add.Tensor", g("aten.linear.default", hidden, g.weight("down.weight", 64, 256)), x)
    g.output(g("aten.tanh.default", y))
    return compile(g.ir(), options=CompileOptions(compute_dtype="float32"))


def mlp_weights() -> dict[str, torch.Tensor]:
    return {"up.weight": torch.randn(256, 64) / 8, "down.weight": torch.randn(64, 256) / 16}


def run_mlp(backend: CPUBackend, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """The result, and what it should be."""
    program, state = mlp(rows), mlp_weights()
    executor, weights = Executor(program, backend), load_weights(state, program, backend)
    x = torch.randn(rows, 64)
    result = executor.run({"x": x.numpy()}, weights)["output"].to_numpy()
    expected = torch.tanh(x + torch.relu(x @ state["up.weight"].T) @ state["down.weight"].T).numpy()
    return result, expected


def sleeping(launch: Launch) -> Launch:
    def run() -> None:
        time.sleep(SLOW)
        launch()

    return run


@pytest.fixture
def slow_native(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Native kernels of products that take 50 ms more than they need; the list holds a name for each that was made."""
    made: list[str] = []

    def make(call: ArrayCall) -> Launch:
        made.append(call.name)
        return sleeping(bound_reference(call))

    def candidates(call: ArrayCall) -> list[Candidate]:
        return [Candidate("native", make)] if call.name.startswith("matmul") else []

    monkeypatch.setattr(cpu_backend, "native_candidates", candidates)
    monkeypatch.setattr(tuner, "_SHORT", 0.0)
    monkeypatch.setattr(tuner, "_MOST_SECONDS", float("inf"))
    monkeypatch.setattr(trials, "_AGREEMENT", float("inf"))  # on a busy machine PyTorch's own times may differ much
    return made


def native_backend(tune: bool) -> CPUBackend:
    """A backend that asks `native_candidates`, whether or not there is a compiler."""

    class NativeBackend(CPUBackend):
        native = True

    return NativeBackend(native=False, tune=tune)


def test_a_slow_native_kernel_is_given_to_pytorch_and_the_choice_is_kept(slow_native: list[str]) -> None:
    backend = native_backend(tune=True)
    result, expected = run_mlp(backend)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert backend._tuner.trials == 2 and len(slow_native) == 2, "one trial for each of two different calls"
    kept = json.loads(unseal(backend.choices.path.read_bytes(), backend.choices.path.name) or b"")["choices"]
    assert len(kept) == 2
    for choice in kept.values():
        assert choice["chosen"] in ("onednn", "sgemm")
        assert choice["microseconds"]["native"] >= 1e6 * SLOW > choice["microseconds"][choice["chosen"]]
    slow_native.clear()
    later = native_backend(tune=True)
    result, expected = run_mlp(later)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert later._tuner.trials == 0 and not slow_native, "the choice comes from the file"


@pytest.mark.parametrize("variables", drawn(({}, {"OMP_NUM_THREADS": "1"}), 1 / 2))
def test_a_kept_choice_is_found_by_a_process_that_has_not_imported_pytorch(variables: dict[str, str]) -> None:
    """PyTorch begins with as many threads as are expected of it before, which are a part of the name of a choice."""
    code = (
        "import sys; from npu_runtime.cpu.tuning import machine; from npu_runtime.pytorch import torch_threads;"
        "print(*machine(False).values(), torch_threads(), 'torch' in sys.modules);"
    )
    after = f"{code} import torch; {code}"
    done = subprocess.run(
        [sys.executable, "-c", after], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.endswith(" False") and second == first.replace("False", "True")


def test_a_call_of_another_shape_is_tried_by_itself(slow_native: list[str]) -> None:
    run_mlp(native_backend(tune=True))
    other = native_backend(tune=True)
    run_mlp(other, rows=5)
    assert other._tuner.trials == 2 and len(other.choices.choices) == 4


def test_without_tuning_the_default_runs_and_no_table_is_made(slow_native: list[str], cache: Path) -> None:
    backend = native_backend(tune=False)
    result, expected = run_mlp(backend)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert len(slow_native) == 2 and backend._tuner.trials == 0
    assert not list(cache.glob("cpu-choices-*"))


def test_tuning_is_on_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CPUBackend().tune, "tests run without"
    monkeypatch.delenv("NPU_SIM_TUNE")
    assert CPUBackend().tune and not CPUBackend(tune=False).tune
    monkeypatch.setenv("NPU_SIM_TUNE", "0")
    assert not CPUBackend().tune and CPUBackend(tune=True).tune


def test_short_calls_are_not_tried(slow_native: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_SHORT", 1.0)
    backend = native_backend(tune=True)
    run_mlp(backend)
    assert backend._tuner.trials == 0 and len(slow_native) == 2


def test_trials_end_when_their_time_is_spent(slow_native: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_MOST_SECONDS", SLOW / 10)
    backend = native_backend(tune=True)
    run_mlp(backend)
    assert backend._tuner.trials == 1, "the first call's trial has spent it"


def test_a_failing_candidate_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(call: ArrayCall) -> Launch:
        def fail() -> None:
            raise RuntimeError("no primitive for this processor")

        return fail

    monkeypatch.setattr(cpu_backend, "native_candidates", lambda call: [Candidate("native", make)])
    monkeypatch.setattr(tuner, "_SHORT", 0.0)
    call = linear("float32", 6, "none", False, False)
    table = ChoiceTable(machine(native=False))
    launch = Tuner(table).launch(call, cpu_backend.candidates(call, native=True))
    assert launch is not None
    launch()
    np.testing.assert_allclose(call.out, call.inputs[0] @ call.inputs[1].T, rtol=1e-5, atol=1e-5)
    assert all("native" not in choice.microseconds for choice in table.choices.values())


# trials


def test_a_trial_leaves_the_programs_memory_alone(slow_native: list[str]) -> None:
    backend = native_backend(tune=True)
    call = linear("float32", 6, "relu", True, True)
    call.out.fill(7.0)
    arrays = (*call.inputs, call.out)
    before = [x.copy() for x in arrays]
    assert backend._tuner.launch(call, cpu_backend.candidates(call, native=True)) is not None
    assert backend._tuner.trials == 1
    assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))


def test_a_trial_keeps_only_the_winners_weights(slow_native: list[str]) -> None:
    backend = native_backend(tune=True)
    call = linear("bfloat16", 6, "none", False, False)
    backend._tuner.launch(call, cpu_backend.candidates(call, native=True))
    assert len(call.operands[1].memory.prepared) == 1


def test_stand_ins_share_constants_only() -> None:
    call = attention("bfloat16", 12, "bool")
    stand = trials.stand_in(call)
    for x, y in zip((*call.inputs, call.out), (*stand.inputs, stand.out), strict=True):
        assert (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype)
        assert not np.may_share_memory(x, y)
    assert 0 < stand.inputs[3].mean() < 1, "some keys are hidden, as in a cache in use"
    weighted = linear("bfloat16", 6, "none", True, True)
    shared = [x is y for x, y in zip(weighted.inputs, trials.stand_in(weighted).inputs, strict=True)]
    assert shared == [False, True, True, False]


def test_a_mask_that_all_heads_share_has_a_stand_in() -> None:
    call = attention("float32", 12, "float")
    tensors = on_tensors(call)
    inputs = [*tensors.inputs[:3], tensors.inputs[3].expand(2, 4, 12, 40)]
    stand = trials.stand_in(bound(call.call.kernel, dict(call.params), inputs, tensors.out))
    assert np.isinf(stand.inputs[3]).any() and (stand.inputs[3] == 0).any()


def test_rounds_that_do_not_agree_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "measure", lambda *_: trials.Times({"onednn": 2.0, "sgemm": 1.0}, agree=False))
    table = ChoiceTable(machine(native=False))
    call, chooser = linear("float32", 6, "none", False, False), Tuner(table)
    for _ in range(2):
        assert chooser.launch(call, cpu_backend.candidates(call, native=False)) is not None
    assert chooser.trials == 1 and not table.path.exists(), "the choice holds for this start only"


def test_candidates_that_are_close_are_measured_until_their_times_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    call, now = trials.stand_in(linear("float32", 6, "none", False, False)), [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trials, "_evict", lambda: None)

    def candidate(name: str, *milliseconds: float) -> Candidate:
        left = list(milliseconds)

        def launch() -> None:
            now[0] += 1e-3 * (left.pop(0) if len(left) > 1 else left[0])

        return Candidate(name, lambda _: launch)

    close = [candidate("steady", 1.0), candidate("disturbed", 9.0, 1.1, 1.15, 1.3, 0.8)]
    times = trials.measure(call, [*close, candidate("slow", 2.0)])
    assert times.seconds == pytest.approx({"steady": 1e-3, "disturbed": 0.8e-3, "slow": 2e-3}) and times.agree
    assert times.spreads == pytest.approx({"steady": 0.0, "disturbed": 0.3e-3, "slow": 0.0}, abs=1e-9)
    never = iter(range(1, 1000))
    rising = Candidate("rising", lambda _: lambda: now.__setitem__(0, now[0] + 1e-3 / (1 + next(never) / 10)))
    assert trials.measure(call, [candidate("steady", 0.7), rising]).seconds["rising"] > 1e-3 / 2.5, "not for ever"


def test_a_measured_launch_that_is_alone_or_fails_is_no_error() -> None:
    call = trials.stand_in(linear("float32", 6, "none", False, False))

    def fail() -> None:
        raise RuntimeError("out of order")

    good, bad, absent = (
        Candidate("good", lambda _: lambda: None),
        Candidate("bad", lambda _: fail),
        Candidate("absent", lambda _: None),
    )
    times = trials.measure(call, [bad, good, absent])
    assert times.seconds["good"] < times.seconds["bad"] == float("inf") and times.agree
    assert list(times.seconds) == ["bad", "good"]
    assert trials.measure(call, [bad, absent]).seconds == {"bad": float("inf")}


def test_variants_of_a_hopeless_kernel_are_not_tried() -> None:
    call = trials.stand_in(linear("float32", 6, "none", False, False))
    slow, variant, quick = (
        Candidate("native", lambda _: lambda: time.sleep(6 * SLOW)),
        Candidate("native other", lambda _: lambda: None, variant_of="native"),
        Candidate("sgemm", lambda _: lambda: None),
    )
    assert list(trials.measure(call, [slow, variant, quick]).seconds) == ["native", "sgemm"]
    assert list(trials.measure(call, [slow, variant]).seconds) == ["native", "native other"]


def test_a_later_candidate_has_to_be_clearly_faster() -> None:
    assert trials.best_of({"native": 1.0, "onednn": 0.95}, 0.1, {}) == "native"
    assert trials.best_of({"native": 1.0, "native pixels": 0.8, "onednn": 0.75}, 0.1, {}) == "native pixels"
    assert trials.best_of({"native": 1.0, "onednn": 0.95, "sgemm": 0.85}, 0.1, {}) == "sgemm"
    assert trials.best_of({"native": 1.0, "sgemm": 0.85}, 0.1, {"sgemm": 0.1}) == "native", "with what it costs besides"


# the table


IDENTITY = {"processor": "one", "torch": "2"}
CHOICE = Choice("sgemm", {"native": 9.5, "sgemm": 1.5})


def test_choices_come_back(tmp_path: Path) -> None:
    ChoiceTable(IDENTITY, tmp_path).keep("a call", CHOICE)
    assert ChoiceTable(IDENTITY, tmp_path).choices == {"a call": CHOICE}
    assert ChoiceTable({**IDENTITY, "torch": "3"}, tmp_path).choices == {}


def damaged(path: Path) -> dict[str, bytes]:
    whole = json.loads(unseal(path.read_bytes(), path.name) or b"")

    def changed(**fields: Any) -> bytes:
        return seal(json.dumps({**whole, **fields}).encode(), path.name)

    return {
        "truncated": path.read_bytes()[:-20],
        "empty": b"",
        "unsealed": unseal(path.read_bytes(), path.name) or b"",
        "no text": seal(b"\xff\xfe\x00", path.name),
        "another version": changed(format=99),
        "another machine": changed(machine={**whole["machine"], "processor": "other"}),
        "a list": seal(b"[]", path.name),
        "a name that is a number": changed(choices={"a call": {"chosen": 3, "microseconds": {}}}),
        "a time that is text": changed(choices={"a call": {"chosen": "sgemm", "microseconds": {"sgemm": "fast"}}}),
        "no choices": changed(choices=None),
    }


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "unsealed",
        "no text",
        "another version",
        "another machine",
        "a list",
        "a name that is a number",
        "a time that is text",
        "no choices",
    ],
)
def test_a_damaged_or_foreign_table_is_ignored_with_a_word_and_replaced(tmp_path: Path, how: str) -> None:
    table = ChoiceTable(IDENTITY, tmp_path)
    table.keep("a call", CHOICE)
    table.path.write_bytes(damaged(table.path)[how])
    again = ChoiceTable(IDENTITY, tmp_path)
    with pytest.warns(UserWarning, match="ignoring the table of measured CPU kernels") as caught:
        assert again.choices == {}
    assert len(caught) == 1 and str(table.path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.keep("another call", CHOICE)
        assert ChoiceTable(IDENTITY, tmp_path).choices == {"another call": CHOICE}


def test_a_choice_that_no_longer_exists_is_made_again(slow_native: list[str]) -> None:
    call = linear("float32", 6, "none", False, False)
    table = ChoiceTable(machine(native=False))
    table.keep(tuner.call_key(call), Choice("a kernel of the past", {"a kernel of the past": 0.1}))
    chooser = Tuner(table)
    chooser.launch(call, cpu_backend.candidates(call, native=True))
    assert chooser.trials == 1 and table.choices[tuner.call_key(call)].chosen in ("onednn", "sgemm")


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    table = ChoiceTable(IDENTITY, tmp_path / "file" / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table.keep("a call", CHOICE)
    assert table.choices == {"a call": CHOICE}


WRITER = """
import sys
from pathlib import Path
from npu_runtime.cpu.tuning import Choice, ChoiceTable
table = ChoiceTable({"processor": "one", "torch": "2"}, Path(sys.argv[1]))
for number in range(40):
    table.keep(f"{sys.argv[2]} {number}", Choice("sgemm", {"sgemm": 1.0}))
"""


def test_processes_that_write_at_once_leave_a_whole_table(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in ("a", "b")]
    assert [writer.wait() for writer in writers] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choices = ChoiceTable(IDENTITY, tmp_path).choices
    written = {name: {f"{name} {number}" for number in range(40)} for name in "ab"}
    assert choices.keys() <= written["a"] | written["b"]
    assert any(names <= choices.keys() for names in written.values()), "the last to write has lost nothing of its own"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "no temporary file is left"


def test_tables_are_apart_for_what_decides_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ChoiceTable(machine(native=False)).path
    monkeypatch.setenv("NPU_SIM_CPU_LEVEL", "v2")
    assert ChoiceTable(machine(native=False)).path != plain


# without a compiler


def test_a_missing_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "native_available", lambda: False)
    monkeypatch.setattr(cpu_backend, "failure_reason", lambda: "no C++ compiler found")
    cpu_backend._warn_of_missing_kernels.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backends = [CPUBackend(native=native) for native in (True, True, False)]
        assert not caught, "nothing has been run"
        for backend in backends:
            run_mlp(backend)
    assert not any(backend.native for backend in backends)
    (message,) = [str(warning.message) for warning in caught]
    assert "no C++ compiler found" in message and "With a C++ compiler" in message
    cpu_backend._warn_of_missing_kernels.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_native_kernels_a_weight_is_widened_once(dtype: str) -> None:
    g = IRBuilder()
    maps = g.input("maps", 1, 8, 6, 6)
    shifted = g("aten.conv2d.default", maps, g.weight("conv.weight", 16, 8, 3, 3), None, [1, 1], [1, 1])
    pooled = g("aten.flatten.using_ints", g("aten.relu.default", shifted), 1)
    g.output(g("aten.linear.default", pooled, g.weight("fc.weight", 5, 16 * 36)))
    program, backend = compile(g.ir(), options=CompileOptions(compute_dtype=dtype)), CPUBackend(native=False)
    state = {"conv.weight": torch.randn(16, 8, 3, 3) / 8, "fc.weight": torch.randn(5, 16 * 36) / 24}
    executor, weights = Executor(program, backend), load_weights(state, program, backend)
    x = torch.randn(1, 8, 6, 6)
    inputs = {"maps": NPUBuffer.from_numpy(x.numpy(), backend, spec=program.input_specs[0])}
    result = executor.run(inputs, weights)["output"].to_numpy()
    convolved = torch.relu(torch.conv2d(x, state["conv.weight"], padding=1))
    expected = (convolved.flatten(1) @ state["fc.weight"].T).numpy()
    assert np.corrcoef(np.asarray(result, np.float32).ravel(), expected.ravel())[0, 1] > 0.999
    prepared = {name: dict(buffer.prepared) for name, buffer in weights.items()}
    assert all(len(layouts) == 1 for layouts in prepared.values())
    executor.run(inputs, weights)
    assert all(
        made is weights[name].prepared[key] for name, layouts in prepared.items() for key, made in layouts.items()
    )


# the command


def test_no_tune_is_for_the_cpu(tmp_path: Path) -> None:
    program = tmp_path / "mlp.npubin"
    mlp().save(program)
    arguments = ["run", str(program), "--seed", "1", "--no-tune"]
    np.savez(tmp_path / "weights.npz", **{name: value.numpy() for name, value in mlp_weights().items()})
    arguments += ["-w", str(tmp_path / "weights.npz")]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"], env={"NPU_SIM_TUNE": "1"})
    assert done.exit_code == 0, done.output
    assert not list(tmp_path.glob("cpu-choices-*"))
    refused = CliRunner().invoke(app, [*arguments, "--device", "metal-emulator"])
    assert refused.exit_code == 2 and "--no-tune is for --device cpu only" in str(refused.output) + str(refused.stderr)


def test_bind_and_operand_agree() -> None:
    x = spaced(3, 4)
    assert np.array_equal(bind(operand(x, True)), x.numpy())


@pytest.mark.parametrize(("rows", "among_native", "threads"), [(64, True, 1), (64, False, 2), (1 << 16, True, 2)])
def test_among_native_kernels_pytorch_wakes_its_threads_for_long_work_alone(
    rows: int, among_native: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    seen: list[int] = []

    def observed(inputs: Any, outputs: Any, params: Any) -> None:
        seen.append(torch.get_num_threads())

    monkeypatch.setitem(TORCH_KERNELS, "softmax_kernel", observed)
    operands = [operand(torch.zeros(rows, 64), False) for _ in range(2)]
    views = [each.view for each in operands]
    call = KernelCall("softmax_kernel", "", (views[0],), (views[1],), {"scale": 1.0}, "weights")
    launch = torch_launch(BoundCall(call, [bind(operands[0])], [bind(operands[1])], operands[:1]), among_native)
    assert launch is not None
    launch()
    assert seen == [threads] and torch.get_num_threads() == 2
