"""Runs one Metal kernel and compares all memory that it may touch with the CPU device's reference kernel.

Metal is the emulator with all checks on; with TEST_METAL=metal in the environment, it is this Mac's GPU.
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from reference_kernels import reference_launch

import metal_emulator
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.target import CodegenTarget, MetalCodegenTarget
from npu_compiler.program.views import View, contiguous_strides
from npu_runtime import Backend, DeviceBuffer, MetalBackend, Operand
from npu_runtime.cpu.native.build import find_compiler
from npu_runtime.torch_arrays import numpy_to_tensor

ON_A_MAC = os.environ.get("TEST_METAL") == "metal"
METAL_DEVICE = "metal" if ON_A_MAC else "metal-emulator-fast"  # for whole models
CPU_AND_METAL = [
    "cpu",
    pytest.param(
        METAL_DEVICE, marks=pytest.mark.skipif(find_compiler() is None, reason="the emulator needs a C++ compiler")
    ),
]
DTYPES = ("float16", "bfloat16")
THREAD_ORDERS = (1, 2, 3)
GUARD = 9  # elements behind the last one that must stay untouched
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5}


def open_metal(mps: bool) -> tuple[MetalBackend, Any]:
    """The backend, and what steers the emulator under it (None on a Mac).

    Args:
        mps: Leave matrix products to MPS; else our kernels make them all.
    """
    if ON_A_MAC:
        return MetalBackend(mps=mps), None
    api = metal_emulator.api(checks=True)
    return MetalBackend(api, mps=mps), api.emulator


@dataclass(frozen=True)
class T:
    """An operand: the geometry of its view, and its values.

    Attributes:
        dtype: `compute` (the 16-bit dtype under test), `float32`, `int32` or `bool`.
        strides, offset: In elements; row-major from 0 by default.
        values: `normal`, `positive` (0.1 to 2), `special` (infinities, NaN, zeros of both signs among normal values),
            `small` (integers -8 to 8), (low, high) for uniform values (integers: high excluded), the values
            themselves, or what makes one of these from the operand's dtype. For an output: what is there before; None
            leaves it poisoned.
    """

    shape: tuple[int, ...]
    dtype: str = "compute"
    strides: tuple[int, ...] | None = None
    offset: int = 0
    values: Any = None

    def view(self, buffer: str, compute: str) -> View:
        """The operand in a buffer of its own, with `compute` as the dtype under test."""
        strides = self.strides if self.strides is not None else contiguous_strides(self.shape)
        dtype = compute if self.dtype == "compute" else self.dtype
        return View(buffer, self.shape, tuple(strides), self.offset, dtype)


@dataclass(frozen=True)
class Case:
    """A kernel call to try.

    Attributes:
        atol: Relative to the largest expected value.
        reference: Meaning of the call, where the CPU device has another one: it raises for an index out of range.
    """

    kernel: str
    name: str
    inputs: Sequence[T]
    outputs: Sequence[T]
    params: Mapping[str, Any] = field(default_factory=dict)
    atol: float = 1e-5
    dtypes: tuple[str, ...] = DTYPES
    reference: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Mapping[str, Any]], None] | None = None

    @property
    def id(self) -> str:
        return f"{self.kernel}-{self.name}"


def all_cases() -> list[Case]:
    """The cases of every module in `metal_cases`."""
    modules = sorted(path.stem for path in (Path(__file__).parent / "metal_cases").glob("*.py"))
    return [case for name in modules for case in importlib.import_module(f"metal_cases.{name}").CASES]


def call_of(case: Case, compute: str) -> KernelCall:
    """Return a case's call, with its operands in buffers `in0`, `in1`, …, `out0`, `out1`, …."""
    inputs, outputs = (
        tuple(t.view(f"{stem}{index}", compute) for index, t in enumerate(operands))
        for stem, operands in (("in", case.inputs), ("out", case.outputs))
    )
    return KernelCall(case.kernel, _source(case), inputs, outputs, _with_defaults(case), case.name)


def memory_of(case: Case, compute: str, seed: int) -> dict[str, np.ndarray]:
    """The memory of a case's operands by the names of their buffers, with gaps and guard, filled as the case says."""
    return {memory.view.buffer: memory.data for operands in _memories(case, compute, seed) for memory in operands}


def run_case(case: Case, backend: Backend, dtype: str, seed: int) -> None:
    """Run a case twice, with poison in all memory that it has to write first.

    Raises:
        AssertionError: memory differs from the reference's, or from run to run.
        DeviceError: the emulator found a fault.
    """
    ins, outs = _memories(case, dtype, seed)
    call = call_of(case, dtype)
    expected = [m.data.copy() for m in outs]
    reference = [_window(data, m.view) for data, m in zip(expected, outs, strict=True)]
    sources = [_window(m.data.copy(), m.view) for m in ins]
    if case.reference is not None:
        case.reference(sources, reference, call.params)
    else:
        reference_launch(call, sources, reference)()

    buffers = [backend.allocate_buffer(m.data, spec=m.spec) for m in (*ins, *outs)]
    inputs, outputs = buffers[: len(ins)], buffers[len(ins) :]
    run = _prepare(call, backend, {m.view.buffer: b for m, b in zip((*ins, *outs), buffers, strict=True)})
    run()
    results = [buffer.to_numpy() for buffer in outputs]
    for memory, buffer in zip(outs, outputs, strict=True):
        buffer.write(memory.data)
    run()

    for memory, buffer in zip(ins, inputs, strict=True):
        assert _same_bits(buffer.to_numpy(), memory.data), f"input {memory.view.buffer} was written to"
    for memory, want, got, buffer in zip(outs, expected, results, outputs, strict=True):
        assert _same_bits(got[~memory.used], memory.data[~memory.used]), (
            f"{memory.view.buffer}: memory outside the view was written to, at elements "
            f"{np.flatnonzero(~memory.used)[_bits(got[~memory.used]) != _bits(memory.data[~memory.used])][:8]}"
        )
        _compare(got[memory.used], want[memory.used], case.atol, memory.view)
        assert _same_bits(buffer.to_numpy(), got), f"{memory.view.buffer} differs from run to run"


def run_in_several_orders(case: Case, backend: Backend, emulator: Any, dtype: str) -> None:
    """Run a case in several orders of the emulator's threads, with other values each time.

    One order is enough for a kernel whose threads cannot see what the others do.
    """
    for order in THREAD_ORDERS:
        before = emulator.order_dependent
        emulator.seed = order
        run_case(case, backend, dtype, order)
        if emulator.order_dependent == before:
            return


def plan_of(call: KernelCall, target: CodegenTarget) -> ExecutionPlan:
    """Return a plan of one call as a target turns it into kernels, with temporary buffers."""
    buffers = {
        view.buffer: BufferAllocation(view.buffer, kind, (_extent(view),), view.dtype)
        for kind, views in (("input", call.inputs), ("output", call.outputs))
        for view in views
    }
    plan = ExecutionPlan([], [call], buffers, [], [], {}, {}, {}, {})
    return finished(plan, target)


def finished(plan: ExecutionPlan, target: CodegenTarget) -> ExecutionPlan:
    """A plan of op-level calls after the target's own stages, with its memory planned."""
    for _, stage in target.stages():
        plan = stage(plan)
    return plan_memory(plan, target.config.buffer_alignment)


def _prepare(call: KernelCall, backend: Backend, memory: dict[str, DeviceBuffer]) -> Callable[[], None]:
    """Return a function that runs one call with its temporary buffers poisoned."""
    plan = plan_of(call, backend.target)
    backend.compile(plan.calls, plan.sources)
    poison = np.full(max(plan.arena_bytes, 1), 0xFF, np.uint8)
    arena = backend.allocate_zeros(poison.shape, "uint8")
    persistent = {
        buffer.name: backend.allocate_zeros(buffer.alloc_shape, buffer.dtype)
        for buffer in plan.buffers.values()
        if buffer.kind == "persistent"
    }
    constants = {name: backend.allocate_buffer(value) for name, value in plan.constants.items()}
    memory = {**memory, **persistent, **constants}

    def operand(view: View) -> Operand:
        return Operand(memory.get(view.buffer, arena), view, plan.buffers[view.buffer].offset, False)

    launches = [
        backend.prepare(part, [operand(v) for v in part.inputs], [operand(v) for v in part.outputs])
        for part in plan.calls
    ]

    def run() -> None:
        arena._upload(poison)
        for launch in launches:
            launch()
        backend.synchronize()

    return run


def _extent(view: View) -> int:
    """Elements of an operand's memory, gaps and guard included."""
    steps = zip(view.shape, view.strides, strict=True)
    last = view.offset + sum((size - 1) * stride for size, stride in steps) if 0 not in view.shape else 0
    return last + 1 + GUARD


class _Memory:
    """An operand's memory, gaps and guard included.

    Attributes:
        used: Mask of the elements of `data` that the view holds.
    """

    def __init__(self, name: str, operand: T, compute: str, rng: np.random.Generator, poison: bool) -> None:
        self.view = operand.view(name, compute)
        dtype, strides = self.view.dtype, self.view.strides
        raw = np.full(_extent(self.view) * numpy_dtype(dtype).itemsize, 0xFF, np.uint8)
        self.data = raw.view(numpy_dtype(dtype))
        index = np.arange(self.data.size)
        inner = np.lib.stride_tricks.as_strided(
            index[operand.offset :], operand.shape, [s * index.itemsize for s in strides]
        )
        self.used = np.zeros(self.data.size, bool)
        self.used[inner.reshape(-1)] = True
        if not poison:
            self.data[inner] = _values(operand, dtype, rng)

    @property
    def spec(self) -> TensorSpec:
        """Spec of the whole memory, stored in the dtype that it has."""
        return TensorSpec(self.view.buffer, self.data.shape, self.view.dtype, self.view.dtype)


def _memories(case: Case, compute: str, seed: int) -> tuple[list[_Memory], list[_Memory]]:
    """The memories of a case's inputs and of its outputs, these poisoned where the case does not fill them."""
    rng = np.random.default_rng([seed, zlib.crc32(case.id.encode())])
    ins = [_Memory(f"in{i}", t, compute, rng, poison=False) for i, t in enumerate(case.inputs)]
    outs = [_Memory(f"out{i}", t, compute, rng, poison=t.values is None) for i, t in enumerate(case.outputs)]
    return ins, outs


def _values(operand: T, dtype: str, rng: np.random.Generator) -> np.ndarray:
    shape = operand.shape
    kind = operand.values(dtype) if callable(operand.values) else operand.values
    if kind is None:
        kind = {"int32": "small", "bool": (0, 2)}.get(dtype, "normal")
    if isinstance(kind, tuple) and len(kind) == 2 and not isinstance(kind[0], (tuple, list)):
        low, high = kind
        drawn = rng.integers(low, high, shape) if dtype in ("int32", "bool") else rng.uniform(low, high, shape)
    elif not isinstance(kind, str):
        drawn = np.broadcast_to(np.asarray(kind), shape)
    elif kind == "small":
        drawn = rng.integers(-8, 9, shape)
    elif kind == "positive":
        drawn = rng.uniform(0.1, 2.0, shape)
    else:
        drawn = rng.standard_normal(shape)
        if kind == "special":
            odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 3e4, 1e-7])
            drawn = np.where(rng.random(shape) < 0.5, rng.choice(odd, shape), drawn)
    with np.errstate(all="ignore"):
        return np.asarray(drawn).astype(numpy_dtype(dtype))


def _window(data: np.ndarray, view: View) -> torch.Tensor:
    return numpy_to_tensor(data).as_strided(view.shape, view.strides, view.offset)


def _with_defaults(case: Case) -> dict[str, Any]:
    kernel = ELEMENTWISE_KERNELS.get(case.kernel)
    return {**(kernel.op.attrs if kernel is not None else {}), **case.params}


def _source(case: Case) -> str:
    return MetalCodegenTarget().source(case.kernel)


def _compare(got: np.ndarray, want: np.ndarray, atol: float, view: View) -> None:
    if view.dtype not in _EPSILON:
        wrong = got != want
    else:
        epsilon = _EPSILON[view.dtype]
        a, b = got.astype(np.float64), want.astype(np.float64)
        finite = np.abs(b[np.isfinite(b)])
        # Below the smallest normal number, steps are as large as there.
        size = np.maximum(np.abs(b), float(ml_dtypes.finfo(numpy_dtype(view.dtype)).smallest_normal))
        allowed = 2 * epsilon * size + atol * max(finite.max(initial=0.0), 1e-30)
        with np.errstate(invalid="ignore"):
            close = np.abs(a - b) <= np.where(np.isfinite(allowed), allowed, 0)
        wrong = ~(close | (np.isnan(a) & np.isnan(b)) | (a == b))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise AssertionError(
            f"{view.buffer} {view.dtype}{list(view.shape)}: {int(wrong.sum())} of {wrong.size} elements differ, "
            f"first at {first}: {got[first]} instead of {want[first]}"
        )


def _bits(data: np.ndarray) -> np.ndarray:
    return data.view(np.dtype(f"u{data.itemsize}"))


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((_bits(np.ascontiguousarray(a)) == _bits(np.ascontiguousarray(b))).all())
