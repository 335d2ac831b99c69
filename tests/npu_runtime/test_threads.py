"""One executor shared by many threads: every answer is that of the caller's own inputs, on every device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_gpu import cuda_backends
from ir_builder import IRBuilder
from metal_harness import open_metal
from toy_device import ToyBackend

from npu_compiler import CompileOptions, compile, partition
from npu_runtime import Backend, CPUBackend, DAGExecutor, Executor, NPUBuffer, load_weights

THREADS = 50
RUNS = 6
GPUS = cuda_backends()
EVERY_BACKEND = pytest.mark.parametrize(
    "backend",
    [
        CPUBackend(native=False),
        CPUBackend(),
        ToyBackend(),
        open_metal(mps=True)[0],
        *(pytest.param(gpu, marks=pytest.mark.gpu) for gpu in GPUS),
    ],
    ids=["torch", "native", "toy", "metal", *("cuda" for _ in GPUS)],
)
WEIGHT = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def network() -> IRBuilder:
    """softmax(relu(x · wᵀ) · wᵀ) + x: several launches, whose intermediate results share the arena."""
    g = IRBuilder()
    x, w = g.input("x", 4, 8), g.weight("w", 8, 8)
    hidden = g("aten.relu.default", g("aten.linear.default", x, w))
    scores = g("aten.softmax.int", g("aten.linear.default", hidden, w), -1)
    return g.output(g("aten.add.Tensor", scores, x, name="out"))


def expected(x: np.ndarray, weight: np.ndarray = WEIGHT) -> np.ndarray:
    scores = np.exp(np.maximum(x @ weight.T, 0) @ weight.T)
    return scores / scores.sum(-1, keepdims=True) + x


def in_threads(work: Callable[[int], None]) -> None:
    """Call `work` with 0, 1, … in as many threads, all of which have begun before any of them goes on."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(begin, range(THREADS)))


@EVERY_BACKEND
def test_every_thread_gets_the_answers_to_its_own_inputs(backend: Backend) -> None:
    program = compile(network().ir(), backend.target, CompileOptions(compute_dtype="float32"))
    weights, executor = load_weights({"w": WEIGHT}, program, backend), Executor(program, backend)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(RUNS):
            x = rng.normal(size=(4, 8)).astype(np.float32)
            given = NPUBuffer.from_numpy(x, backend, spec=program.input_specs[0]) if turn % 2 else x
            out = executor.run({"x": given}, weights)["out"]
            np.testing.assert_allclose(out.to_numpy(), expected(x), atol=1e-5)

    in_threads(work)
    assert executor.counters["runs"] == THREADS * RUNS


@EVERY_BACKEND
def test_an_output_holds_until_its_own_threads_next_run(backend: Backend) -> None:
    program = compile(network().ir(), backend.target, CompileOptions(compute_dtype="float32"))
    weights, executor = load_weights({"w": WEIGHT}, program, backend), Executor(program, backend)
    x = np.ones((4, 8), np.float32)
    mine = executor.run({"x": x}, weights)["out"]
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(lambda: executor.run({"x": -x}, weights)["out"].to_numpy()).result()
    np.testing.assert_allclose(theirs, expected(-x), atol=1e-5)
    np.testing.assert_allclose(mine.to_numpy(), expected(x), atol=1e-5)


@EVERY_BACKEND
def test_threads_may_run_one_program_with_weights_of_their_own(backend: Backend) -> None:
    """A matrix product with the transposed weight, which the prologue of some targets makes, follows the weights."""
    g = IRBuilder()
    x, w = g.input("x", 4, 8), g.weight("w", 8, 8)
    turned = g("aten.contiguous.default", g("aten.transpose.int", w, 0, 1))
    doubled = g("aten.mul.Tensor", turned, 2.0)
    g.output(g("aten.matmul.default", x, doubled, name="out"))
    program = compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32"))
    executor = Executor(program, backend)
    x_value = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    matrices = [WEIGHT * (number + 1) for number in range(2)]
    sets = [load_weights({"w": matrix}, program, backend) for matrix in matrices]

    def work(number: int) -> None:
        for _ in range(2):
            out = executor.run({"x": x_value}, sets[number % 2])["out"].to_numpy()
            np.testing.assert_allclose(out, 2 * x_value @ matrices[number % 2].T, rtol=1e-4, atol=1e-4)

    in_threads(work)


@EVERY_BACKEND
def test_a_partitioned_graph_may_be_shared(backend: Backend) -> None:
    plan = partition(network().ir(), lambda op: "relu" not in op, compute_dtype="float32")
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    dag = DAGExecutor(plan, backend)
    dag.load_weights({"w": WEIGHT})

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(RUNS):
            x = rng.normal(size=(4, 8)).astype(np.float32)
            np.testing.assert_allclose(dag.execute({"x": x})["out"], expected(x), atol=1e-5)

    in_threads(work)


def test_executors_of_one_machine_do_not_disturb_each_other() -> None:
    """Two devices stand for the same CPU, whose native kernels have one pool of threads."""
    program = compile(network().ir(), options=CompileOptions(compute_dtype="float32"))
    backends = [CPUBackend(), CPUBackend()]
    executors = [Executor(program, backend) for backend in backends]
    weights = [load_weights({"w": WEIGHT}, program, backend) for backend in backends]

    def work(number: int) -> None:
        x = np.random.default_rng(number).normal(size=(4, 8)).astype(np.float32)
        for _ in range(RUNS):
            out = executors[number % 2].run({"x": x}, weights[number % 2])["out"]
            np.testing.assert_allclose(out.to_numpy(), expected(x), atol=1e-5)

    in_threads(work)


def test_what_a_thread_has_of_its_own_goes_when_it_ends() -> None:
    program = compile(network().ir(), options=CompileOptions(compute_dtype="float32"))
    backend = CPUBackend()
    weights, executor = load_weights({"w": WEIGHT}, program, backend), Executor(program, backend)
    seen = []

    def work() -> None:
        executor.run({"x": np.ones((4, 8), np.float32)}, weights)
        seen.append(weakref.ref(executor._run))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert seen[0]() is None
