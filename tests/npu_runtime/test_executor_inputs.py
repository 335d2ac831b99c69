"""Inputs of an executor: their names, and that new buffers for them cost a copy but no preparation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_gpu import cuda_backends
from ir_builder import IRBuilder
from metal_harness import open_metal
from toy_device import ToyBackend

from npu_compiler import (
    CompiledProgram,
    CompileOptions,
    DeviceError,
    InputError,
    ProgramFormatError,
    compile,
    partition,
)
from npu_runtime import Backend, CPUBackend, DAGExecutor, Device, DeviceBuffer, Executor, NPUBuffer, load_weights
from npu_runtime.cpu import native
from npu_runtime.executor_inputs import SETTLED
from npu_runtime.metal.mps_accel import MPSLaunch, as_product

GPUS = cuda_backends()
EVERY_BACKEND = pytest.mark.parametrize(
    "backend",
    [
        CPUBackend(native=False),
        pytest.param(CPUBackend(), marks=pytest.mark.skipif(not native.available(), reason="no native kernels")),
        ToyBackend(),
        open_metal(mps=True)[0],
        *(pytest.param(gpu, marks=pytest.mark.gpu) for gpu in GPUS),
    ],
    ids=["torch", "native", "toy", "metal", *("cuda" for _ in GPUS)],
)


def product() -> IRBuilder:
    """out = softmax(x · wᵀ) + y: x is read by a matrix product, which MPS makes where there is one."""
    g = IRBuilder()
    x, y = g.input("x", 4, 8), g.input("y", 4, 8)
    return g.output(
        g("aten.add.Tensor", g("aten.softmax.int", g("aten.linear.default", x, g.weight("w", 8, 8)), -1), y, name="out")
    )


WEIGHT = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def expected(arrays: dict[str, np.ndarray]) -> np.ndarray:
    scores = np.exp(arrays["x"] @ WEIGHT.T)
    return scores / scores.sum(-1, keepdims=True) + arrays["y"]


class Started:
    """`product` on a device, and buffers for it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.program = compile(product().ir(), backend.target, CompileOptions(compute_dtype="float32"))
        self.weights = load_weights({"w": WEIGHT}, self.program, backend)
        self.executor = Executor(self.program, backend)
        self._rng = np.random.default_rng(1)

    def arrays(self) -> dict[str, np.ndarray]:
        return {spec.name: self._rng.normal(size=spec.shape).astype(np.float32) for spec in self.program.input_specs}

    def buffers(self, arrays: dict[str, np.ndarray]) -> dict[str, DeviceBuffer]:
        return {
            spec.name: NPUBuffer.from_numpy(arrays[spec.name], self.backend, spec=spec)
            for spec in self.program.input_specs
        }

    def check(self, inputs: Any, arrays: dict[str, np.ndarray]) -> None:
        result = self.executor.run(inputs, self.weights)["out"].to_numpy()
        np.testing.assert_allclose(result, expected(arrays), rtol=1e-4, atol=1e-5)


def changes(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


# inputs that the host fills together


@EVERY_BACKEND
def test_a_bound_program_takes_what_the_host_has_filled_in(backend: Backend) -> None:
    started = Started(backend)
    specs = {spec.name: spec for spec in started.program.input_specs}
    staged = backend.allocate_staged(specs.values())
    bound = started.executor.bound(started.weights, staged.buffers)
    prepared = started.executor.counters.copy()
    for _ in range(4):
        arrays = started.arrays()
        for name, array in staged.arrays.items():
            array[tuple(slice(size) for size in specs[name].shape)] = arrays[name]
        staged.upload()
        for array in staged.arrays.values():
            array.fill(99)  # too late for this run
        bound.run()
        np.testing.assert_allclose(bound.result("out").to_numpy(), expected(arrays), rtol=1e-4, atol=1e-5)
    assert changes(prepared, started.executor.counters) == {"runs": 4}
    last = bound.result("out")
    bound.run()  # with what is on the device
    np.testing.assert_allclose(bound.result("out").to_numpy(), expected(arrays), rtol=1e-4, atol=1e-5)
    with pytest.raises(DeviceError, match="overwritten by a later run"):
        last.to_numpy()


def test_bound_programs_and_threads_have_outputs_of_their_own() -> None:
    started = Started(CPUBackend())
    before = started.executor.counters.copy()
    first = started.executor.bound(started.weights)
    assert "buffers" not in changes(before, started.executor.counters), "what was there for this thread"
    second, arrays = started.executor.bound(started.weights), started.arrays()
    for bound, factor in ((first, 1), (second, 2)):
        for name, buffer in bound.inputs.items():
            buffer.write(factor * arrays[name])
        bound.run()
    started.check(started.buffers(arrays), arrays)
    for bound, factor in ((first, 1), (second, 2)):
        scaled = {name: factor * array for name, array in arrays.items()}
        np.testing.assert_allclose(bound.result("out").to_numpy(), expected(scaled), rtol=1e-4, atol=1e-5)


def test_a_program_is_bound_to_buffers_that_fit_only() -> None:
    started = Started(CPUBackend())
    wrong = NPUBuffer.zeros((4, 9), started.backend, "float32")
    with pytest.raises(InputError, match="input 'x'"):
        started.executor.bound(started.weights, {"x": wrong})
    with pytest.raises(InputError, match="unknown input 'z'"):
        started.executor.bound(started.weights, {"z": wrong})


# new buffers


@EVERY_BACKEND
def test_a_new_buffer_for_every_run_prepares_packs_and_compiles_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Counter[str]()
    make_launch = MPSLaunch.__init__

    def counted(self: MPSLaunch, *args: Any) -> None:
        made["mps launches"] += 1
        make_launch(self, *args)

    monkeypatch.setattr(MPSLaunch, "__init__", counted)
    started = Started(backend)
    of_device: Counter[str] = getattr(backend, "counters", Counter())
    for _ in range(2):
        arrays = started.arrays()
        started.check(started.buffers(arrays), arrays)
    assert bool(made) == (backend.device.startswith("Metal") and any(map(as_product, started.program.kernels)))
    prepared, launches = started.executor.counters.copy(), made.copy()
    for _ in range(5):
        arrays = started.arrays()
        inputs = started.buffers(arrays)
        before = of_device.copy()
        started.check(inputs, arrays)
        assert not changes(before, of_device).keys() & {"buffers", "allocations", "packed", "pipelines", "prepared"}
        assert all(np.array_equal(inputs[name].to_numpy(), arrays[name]) for name in arrays)
    assert changes(prepared, started.executor.counters) == {"runs": 5}
    assert made == launches


@EVERY_BACKEND
def test_a_new_array_for_every_run_allocates_and_prepares_nothing(backend: Backend) -> None:
    started = Started(backend)
    arrays = started.arrays()
    started.check(arrays, arrays)
    prepared, of_device = started.executor.counters.copy(), getattr(backend, "counters", Counter[str]())
    allocated = {key: of_device[key] for key in ("buffers", "allocations")}
    for _ in range(3):
        arrays = started.arrays()
        started.check(arrays, arrays)
    assert changes(prepared, started.executor.counters) == {"runs": 3}
    assert {key: of_device[key] for key in allocated} == allocated


@EVERY_BACKEND
def test_an_input_is_read_in_place_again_once_it_stays_in_the_same_buffer(backend: Backend) -> None:
    started = Started(backend)
    arrays = started.arrays()
    started.check(started.buffers(arrays), arrays)
    kept = started.buffers(arrays)
    for _ in range(SETTLED):
        started.check(kept, arrays)
    before = started.executor.counters.copy()
    started.check(kept, arrays)
    assert changes(before, started.executor.counters).keys() == {"runs", "prepared", "sequences"}
    before = started.executor.counters.copy()
    other = started.arrays()
    kept["x"].write(other["x"])
    started.check(kept, {**arrays, "x": other["x"]})
    assert changes(before, started.executor.counters) == {"runs": 1}


@EVERY_BACKEND
def test_one_input_may_stay_while_the_other_moves(backend: Backend) -> None:
    started = Started(backend)
    fixed = started.arrays()
    kept = started.buffers(fixed)
    for turn in range(4):
        arrays = {**fixed, "y": started.arrays()["y"]}
        started.check({**kept, "y": started.buffers(arrays)["y"] if turn % 2 else arrays["y"]}, arrays)
    assert started.executor._run.memory["x"].native_handle is kept["x"].native_handle


@EVERY_BACKEND
def test_one_buffer_may_serve_as_two_inputs_and_then_be_taken_apart(backend: Backend) -> None:
    started = Started(backend)
    for _ in range(3):
        arrays = started.arrays()
        shared = started.buffers(arrays)["x"]
        started.check({"x": shared, "y": shared}, {"x": arrays["x"], "y": arrays["x"]})
        started.check(started.buffers(arrays), arrays)


@EVERY_BACKEND
def test_a_donated_input_comes_back_in_whatever_buffer_it_came(backend: Backend) -> None:
    g = IRBuilder()
    cache, at, rows = g.input("cache", 6, 4), g.input("at", 2, dtype="int64"), g.input("rows", 2, 4)
    g.output(g("aten.index_copy.default", cache, 0, at, rows, name="new"))
    program = compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32"))
    assert program.plan.donations == {"new": "cache"}
    executor = Executor(program, backend)
    for turn in range(4):
        content = np.full((6, 4), turn, np.float32)
        buffer = NPUBuffer.from_numpy(content, backend)
        given = {"at": np.array([5, turn]), "rows": np.full((2, 4), -1, np.float32)}
        assert executor.run({"cache": buffer, **given})["new"] is buffer
        content[[5, turn]] = -1
        np.testing.assert_array_equal(buffer.to_numpy(), content)
    result = executor.run({"cache": np.zeros((6, 4), np.float32), **given})["new"]
    again = executor.run({"cache": np.ones((6, 4), np.float32), **given})["new"]
    assert result.to_numpy().sum() == -8 and again.to_numpy().sum() == 8


@EVERY_BACKEND
def test_a_plan_copies_a_value_that_is_donated_and_still_read_without_preparing_again(backend: Backend) -> None:
    g = IRBuilder()
    x, at = g.input("x", 4, 8), g.input("at", 1, dtype="int64")
    start = g("aten.relu.default", x)
    row = g("aten.slice.Tensor", g("aten.exp.default", start), 0, 0, 1)
    new = g("aten.index_copy.default", start, 0, at, row)
    g.output(g("aten.add.Tensor", g("aten.exp.default", new), start))
    plan = partition(g.ir(), lambda op: "exp" not in op, compute_dtype="float32")
    dag = DAGExecutor(plan, backend)
    donating = [executor for executor in dag.executors.values() if executor.program.plan.donations]
    assert len(donating) == 1
    value, feed = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32), np.array([2])
    before: Counter[str] = Counter()
    for turn in range(4):
        (found,) = dag.execute({"x": turn * value, "at": feed}).values()
        start_value = np.maximum(turn * value, 0)
        new_value = start_value.copy()
        new_value[2] = np.exp(start_value[0])
        np.testing.assert_allclose(found, np.exp(new_value) + start_value, rtol=1e-5)
        assert turn == 0 or changes(before, donating[0].counters) == {"runs": 1}
        before = donating[0].counters.copy()


@EVERY_BACKEND
def test_a_buffer_takes_over_another_ones_content(backend: Backend) -> None:
    target, source = NPUBuffer.zeros((2, 3), backend, "float32"), NPUBuffer.from_numpy(np.ones((2, 3)), backend)
    target.copy_from(source)
    source.write(np.zeros((2, 3)))
    assert target.to_numpy().sum() == 6 and (target.version, source.version) == (1, 1)
    with pytest.raises(InputError, match=r"float16\[2, 3\] cannot be copied into one of float32\[2, 3\]"):
        target.copy_from(NPUBuffer.zeros((2, 3), backend))


# names


def chain(inputs: int = 1, outputs: int = 1) -> CompiledProgram:
    g = IRBuilder()
    tensors = [g.input(f"pixels{index}", 2, 2) for index in range(inputs)]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = g("aten.add.Tensor", total, tensor)
    return compile(g.output(*(g("aten.mul.Tensor", total, index + 2) for index in range(outputs))).ir())


ONES = np.ones((2, 2), np.float32)


def test_the_only_input_and_the_only_output_go_by_those_words_too() -> None:
    program = chain()
    executor, name = Executor(program, CPUBackend(native=False)), program.output_specs[0].name
    assert (program.input_specs[0].name, name) == ("pixels0", "mul")
    for given in ("pixels0", "input"):
        outputs = executor.run(inputs={given: ONES})
        assert list(outputs) == [name]
        assert outputs["output"] is outputs[name]
        assert outputs["output"].to_numpy(spec=program.output_specs[0]).tolist() == [[2, 2], [2, 2]]
    with pytest.raises(KeyError, match="result"):
        outputs["result"]
    for wrong in ({"picture": ONES}, {"input": ONES, "pixels0": ONES}, {}):
        with pytest.raises(InputError, match=r"\(the program's inputs are 'pixels0'\)"):
            executor.run(wrong)


def test_of_several_each_has_to_be_called_by_its_name() -> None:
    executor = Executor(chain(inputs=2, outputs=2), CPUBackend(native=False))
    with pytest.raises(InputError, match="unknown input 'input'; missing input 'pixels0'; missing input 'pixels1'"):
        executor.run({"input": ONES})
    outputs = executor.run({"pixels0": ONES, "pixels1": ONES})
    with pytest.raises(KeyError, match="output"):
        outputs["output"]


def test_an_input_that_is_really_called_so_is_that_input() -> None:
    g = IRBuilder()
    minuend = g.input("input", 2, 2)
    difference = g("aten.sub.Tensor", minuend, g.input("other", 2, 2), name="output")
    g.output(difference, g("aten.neg.default", minuend))
    executor = Executor(compile(g.ir()), CPUBackend(native=False))
    outputs = executor.run({"input": 3 * ONES, "other": ONES})
    assert outputs["output"].to_numpy()[0, 0] == 2


def test_a_plans_only_input_and_output_go_by_those_words_too() -> None:
    g = IRBuilder()
    plan = partition(g.output(g("aten.matrix_exp.default", g("aten.relu.default", g.input("pixels", 2, 2)))).ir())
    result = DAGExecutor(plan, CPUBackend(native=False)).execute({"input": 0 * ONES})
    assert result["output"].sum() == 2 and len(result) == 1


@pytest.mark.parametrize(
    "value",
    [torch.full((2, 2), -3.0), torch.full((2, 2), -3.0, dtype=torch.bfloat16), [[-3.0, -3.0], [-3.0, -3.0]]],
    ids=["tensor", "bfloat16", "list"],
)
def test_tensors_and_lists_are_inputs_too(value: Any) -> None:
    executor = Executor(chain(), CPUBackend(native=False))
    assert np.array_equal(
        np.asarray(executor.run({"input": value})["output"]), np.asarray(executor.run({"input": -3 * ONES})[0])
    )


def test_a_buffer_is_an_array_for_numpy() -> None:
    buffer = NPUBuffer.from_numpy(ONES, CPUBackend(native=False))
    assert np.asarray(buffer).dtype == np.float32 and np.asarray(buffer, np.float64).dtype == np.float64
    assert np.array_equal(np.asarray(buffer), ONES) and (np.asarray(buffer) + 1).sum() == 8
    with pytest.raises(ValueError, match="cannot become an array without a copy"):
        np.array(buffer, copy=False)


def test_outputs_are_had_by_position_too() -> None:
    outputs = Executor(chain(inputs=2, outputs=2), CPUBackend(native=False)).run({"pixels0": ONES, "pixels1": -ONES})
    assert outputs[0] is outputs[next(iter(outputs))] and outputs[-1] is outputs[1]
    with pytest.raises(KeyError):
        outputs[2]


def test_an_executor_opens_files_and_the_best_device_by_itself(tmp_path: Path) -> None:
    program = chain()
    program.save(tmp_path / "chain.npubin")
    for given in (program, tmp_path / "chain.npubin", str(tmp_path / "chain.npubin")):
        executor = Executor(given)
        assert type(executor.backend) is type(Device().backend)
        assert executor.run({"input": ONES})[0].shape == (2, 2)
    with pytest.raises(ProgramFormatError, match="cannot read program 'missing.npubin'"):
        Executor("missing.npubin")
