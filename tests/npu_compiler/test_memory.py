"""The memory planner: live buffers never share bytes, dead ones do; and what is updated in place, and what is not."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder, Tensor
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_ir import extract_ir

from npu_compiler import METAL_GPU, CompiledProgram, CompileOptions, InputError, compile, read_ir
from npu_compiler.program.describe import summary
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.plan import BufferAllocation
from npu_runtime import Backend, Executor, NPUBuffer, execute_cpu_partition

# One step of a random program: an op, and which earlier values it reads (modulo their number).
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["relu", "exp", "add", "mul", "matmul", "t", "rows", "columns", "softmax", "cat", "copy_rows"]),
        st.integers(0, 1000),
        st.integers(0, 1000),
    ),
    min_size=1,
    max_size=14,
)
RETURNED = st.lists(st.integers(0, 1000), min_size=1, max_size=3)


def random_graph(steps: list[tuple[str, int, int]], returned: list[int]) -> IRBuilder:
    """A program over 4×4 matrices. Values stay in range: exp only sees values below 1."""
    g = IRBuilder()
    values = [g.input("x", 4, 4), g.input("y", 4, 4)]
    index = g.input("at", 2, dtype="int64")
    for op, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        values.append(_step(g, op, a, b, index))
    return g.output(*(values[-1 - i % (len(values) - 1)] for i in returned))


def _step(g: IRBuilder, op: str, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    if op in ("relu", "t"):
        return g(f"aten.{op}.default", a)
    if op == "exp":
        return g("aten.exp.default", g("aten.clamp.default", a, -1, 1))
    if op == "add":
        return g("aten.add.Tensor", a, b)
    if op == "mul":
        return g("aten.mul.Tensor", a, g("aten.sigmoid.default", b))
    if op == "matmul":
        return g("aten.matmul.default", a, g("aten.softmax.int", b, -1))
    if op == "rows":
        return g("aten.cat.default", [g("aten.slice.Tensor", a, 0, 1, 4), g("aten.slice.Tensor", b, 0, 0, 1)], 0)
    if op == "columns":
        return g("aten.expand.default", g("aten.slice.Tensor", a, 1, 2, 3), [4, 4])
    if op == "cat":
        return g("aten.cat.default", [g("aten.slice.Tensor", a, 1, 0, 2), g("aten.slice.Tensor", b, 1, 2, 4)], 1)
    if op == "copy_rows":
        return g("aten.index_copy.default", a, 0, index, g("aten.slice.Tensor", b, 0, 0, 2))
    return g("aten.softmax.int", a, -1)


def arena_buffers(program: CompiledProgram) -> list[BufferAllocation]:
    return [buffer for buffer in program.plan.buffers.values() if buffer.kind == "arena"]


def are_live_together(a: BufferAllocation, b: BufferAllocation) -> bool:
    return a.first_use <= b.last_use and b.first_use <= a.last_use


def share_bytes(a: BufferAllocation, b: BufferAllocation) -> bool:
    return a.offset < b.offset + b.size_bytes and b.offset < a.offset + a.size_bytes


def is_in_place(program: CompiledProgram, a: BufferAllocation, b: BufferAllocation) -> bool:
    """Whether one is written over the other by an element-wise call that is the last to read it."""
    old, new = (a, b) if a.first_use < b.first_use else (b, a)
    call = program.plan.calls[new.first_use]
    return (
        old.last_use == new.first_use
        and elementwise_kernel(call) is not None
        and (old.offset, old.size_bytes) == (new.offset, new.size_bytes)
        and [view.buffer for view in call.inputs].count(old.name) == 1
        and [view.buffer for view in call.outputs] == [new.name]
    )


def check_plan(program: CompiledProgram, alignment: int) -> None:
    buffers = arena_buffers(program)
    for buffer in buffers:
        assert buffer.offset % alignment == 0
        assert 0 <= buffer.offset <= program.plan.arena_bytes - buffer.size_bytes
        assert 0 <= buffer.first_use <= buffer.last_use < len(program.kernels)
    for a, b in combinations(buffers, 2):
        if are_live_together(a, b) and share_bytes(a, b):
            assert is_in_place(program, a, b), f"'{a.name}' and '{b.name}' are live together and overlap"
    assert program.plan.arena_bytes <= sum(-(-b.size_bytes // alignment) * alignment for b in buffers)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, returned=RETURNED, fusions=st.booleans())
def test_no_two_live_buffers_overlap_and_the_answers_are_right(
    backend: Backend, steps: Any, returned: list[int], fusions: bool
) -> None:
    from npu_compiler.fusion_patterns import FUSIONS

    ir = random_graph(steps, returned).ir()
    program = compile(
        ir, backend.target, CompileOptions(compute_dtype="float32", disabled_fusions=() if fusions else FUSIONS)
    )
    check_plan(program, backend.config.buffer_alignment)
    rng = np.random.default_rng(len(steps))
    arrays: dict[str, np.ndarray] = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("x", "y")}
    arrays["at"] = np.array([3, 1])
    graph = read_ir(ir)
    wanted = execute_cpu_partition(graph, arrays)
    executor = Executor(program, backend)
    for _ in range(2):
        outputs = executor.run({name: value.copy() for name, value in arrays.items()})
        for name, tensor, spec in zip(graph.output_names, graph.outputs, program.output_specs, strict=True):
            np.testing.assert_allclose(outputs[name].to_numpy(spec), wanted[tensor], rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, returned=RETURNED)
def test_inputs_are_untouched_unless_donated(backend: Backend, steps: Any, returned: list[int]) -> None:
    program = compile(random_graph(steps, returned).ir(), backend.target, CompileOptions(compute_dtype="float32"))
    rng = np.random.default_rng(1)
    arrays = {
        "x": rng.normal(size=(4, 4)).astype(np.float32),
        "y": rng.normal(size=(4, 4)).astype(np.float32),
        "at": np.array([0, 2]),
    }
    buffers = {spec.name: NPUBuffer.from_numpy(arrays[spec.name], backend, spec=spec) for spec in program.input_specs}
    Executor(program, backend).run(buffers)
    for name in arrays.keys() - set(program.plan.donations.values()):
        np.testing.assert_array_equal(buffers[name].to_numpy(), arrays[name])


def chain(length: int, op: str = "aten.exp.default") -> IRBuilder:
    g = IRBuilder()
    x = g.input("x", 64, 64)
    for _ in range(length):
        x = g(op, x)
    return g.output(x)


def test_a_chain_of_elementwise_ops_reuses_one_buffer_in_place() -> None:
    program = compile(chain(6).ir(), options=CompileOptions(compute_dtype="float32"))
    assert program.plan.arena_bytes == 64 * 64 * 4
    assert {buffer.offset for buffer in arena_buffers(program)} == {0}


def test_what_is_not_elementwise_does_not_write_over_its_input() -> None:
    g = IRBuilder()
    x = g.input("x", 64, 64)
    for _ in range(5):
        x = g("aten.softmax.int", x, -1)
    program = compile(g.output(x).ir(), options=CompileOptions(compute_dtype="float32"))
    assert program.plan.arena_bytes == 2 * 64 * 64 * 4


def test_an_input_read_twice_by_a_call_is_not_written_over_while_it_is_read() -> None:
    g = IRBuilder()
    x = g("aten.exp.default", g.input("x", 4, 4))
    y = g("aten.add.Tensor", x, g("aten.t.default", x))
    g.output(g("aten.softmax.int", y, -1))
    program = compile(g.ir(), options=CompileOptions(compute_dtype="float32", disabled_fusions=["masked_softmax"]))
    a, b = sorted(arena_buffers(program), key=lambda buffer: buffer.first_use)[:2]
    assert not share_bytes(a, b)


# peak memory against eager PyTorch


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive while a model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._track(tensor)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not self.users[address]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self.users[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self.users[address] -= 1
        if not self.users[address]:
            self.now -= size


class BasicBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.softmax(torch.exp(x), -1)
        return x


MODELS = {
    "chain": (Chain, (64, 64)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10)),
        (32, 64),
    ),
    "resnet-block": (lambda: nn.Sequential(BasicBlock(32), BasicBlock(32)), (1, 32, 16, 16)),
    "transformer-layer": (
        lambda: nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True),
        (2, 16, 64),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_peak_memory_is_at_most_what_eager_pytorch_holds(name: str) -> None:
    build, shape = MODELS[name]
    model = build().eval()
    x = torch.randn(shape)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        with PeakMemory() as eager:
            model(x)
        ir = extract_ir(copy.deepcopy(model).to("meta"), (x.to("meta"),), strict=False).to_dict()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    peak = int(summary(compile(ir, options=CompileOptions(compute_dtype="float32")).plan)["peak bytes without weights"])
    rounding = METAL_GPU.buffer_alignment
    assert 0 < peak <= eager.peak + x.numel() * 4 + rounding


# donation


# Ops of which lowering makes windows onto their input, with arguments of which that is true.
WINDOWS: dict[str, tuple[Any, ...]] = {
    "aten.slice.Tensor": (0, 0, 4),
    "aten.constant_pad_nd.default": ([0, 0],),
    "aten.clone.default": (),
}


def cache_update(
    *, returned: int = 1, old_returned: bool = False, read_after: str | None = None, kept: bool = True
) -> IRBuilder:
    g = IRBuilder()
    cache, at, rows = g.input("cache", 8, 4), g.input("at", 2, dtype="int64"), g.input("rows", 2, 4)
    view = g(read_after, cache, *WINDOWS[read_after]) if read_after in WINDOWS else None
    new = g("aten.index_copy.default", cache, 0, at, rows, name="new")
    g.output(*[new] * (returned if kept else 0))
    if not kept:
        g.output(g("aten.relu.default", new))
    if old_returned:
        g.output(cache)
    if view is not None:
        g.output(g("aten.relu.default", view))
    elif read_after:
        g.output(g(read_after, cache))
    return g


def feed() -> dict[str, np.ndarray]:
    return {
        "cache": np.arange(32, dtype=np.float32).reshape(8, 4),
        "at": np.array([6, 1]),
        "rows": -np.ones((2, 4), np.float32),
    }


def test_a_cache_is_updated_in_place_and_comes_back_as_the_same_buffer(backend: Backend) -> None:
    program = compile(cache_update().ir(), backend.target, CompileOptions(compute_dtype="float32"))
    assert program.plan.donations == {"new": "cache"}
    assert [call.kernel for call in program.kernels] == ["index_copy_kernel"]
    assert "(updates cache in place)" in program.describe()
    arrays, specs = feed(), {spec.name: spec for spec in program.input_specs}
    buffers = {name: NPUBuffer.from_numpy(arrays[name], backend, spec=specs[name]) for name in specs}
    executor = Executor(program, backend)
    for _ in range(2):
        assert executor.run(buffers)["new"] is buffers["cache"]
    arrays["cache"][[6, 1]] = -1
    np.testing.assert_array_equal(buffers["cache"].to_numpy(), arrays["cache"])


@pytest.mark.parametrize(
    "g",
    [
        cache_update(read_after="aten.relu.default"),
        *(cache_update(read_after=window) for window in WINDOWS),
        cache_update(old_returned=True),
        cache_update(kept=False),
        cache_update(returned=2),
    ],
    ids=["read-later", *WINDOWS, "returned", "result-not-returned", "returned-twice"],
)
def test_a_cache_whose_old_value_is_still_wanted_is_not_donated(g: IRBuilder, backend: Backend) -> None:
    program, graph, arrays = (
        compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32")),
        read_ir(g.ir()),
        feed(),
    )
    assert program.plan.donations == {}
    specs = {spec.name: spec for spec in program.input_specs}
    buffers = {name: NPUBuffer.from_numpy(arrays[name], backend, spec=specs[name]) for name in specs}
    outputs = Executor(program, backend).run(buffers)
    wanted = execute_cpu_partition(graph, feed())
    for name, tensor in zip(graph.output_names, graph.outputs, strict=True):
        np.testing.assert_array_equal(outputs[name].to_numpy(), wanted[tensor])
    np.testing.assert_array_equal(buffers["cache"].to_numpy(), arrays["cache"])


def two_caches(backend: Backend) -> CompiledProgram:
    g = IRBuilder()
    k, v = g.input("k", 8, 4), g.input("v", 8, 4)
    at, rows = g.input("at", 2, dtype="int64"), g.input("rows", 2, 4)
    g.output(
        g("aten.index_copy.default", k, 0, at, rows),
        g("aten.index_copy.default", v, 0, at, g("aten.neg.default", rows)),
    )
    return compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32"))


def test_one_buffer_for_two_donated_inputs_is_an_error(backend: Backend) -> None:
    executor, arrays = Executor(two_caches(backend), backend), feed()
    shared = NPUBuffer.zeros((8, 4), backend, "float32")
    rest = {"at": arrays["at"], "rows": arrays["rows"]}
    with pytest.raises(
        InputError, match="inputs 'k' and 'v' are the same buffer, but the program updates 'k' in place"
    ):
        executor.run({"k": shared, "v": shared, **rest})
    outputs = executor.run({"k": shared, "v": NPUBuffer.zeros((8, 4), backend, "float32"), **rest})
    assert [out.to_numpy()[6, 0] for out in outputs.values()] == [-1, 1]


def test_an_executors_own_output_as_its_input_is_an_error(backend: Backend) -> None:
    """An output that is also an input would be overwritten while it is read."""
    g = IRBuilder()
    x = g.input("x", 4, 4)
    g.output(g("aten.exp.default", x, name="a"), g("aten.matmul.default", x, x, name="b"))
    executor = Executor(compile(g.ir(), backend.target, CompileOptions(compute_dtype="float32")), backend)
    start = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    output = executor.run({"x": start})["a"]
    with pytest.raises(InputError, match=r"input 'x' is this executor's own output 'a'.*copy\(\)"):
        executor.run({"x": output})
    again = executor.run({"x": executor.run({"x": start})["a"].copy()})
    np.testing.assert_allclose(again["b"].to_numpy(), np.exp(start) @ np.exp(start), rtol=1e-5)
