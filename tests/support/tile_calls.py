"""Single kernel calls on a simulated chip, and on the CPU device's NumPy kernels, with operands of any strides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_compiler.graph.dtypes import itemsize, numpy_dtype
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, declaration
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View
from npu_model.chip import Chip, load_chip, parse_chip
from npu_model.isa.encoding import decode, encode
from npu_model.isa.instructions import Buffer, Space, TileProgram
from npu_model.lowering.emitter import Place
from npu_model.lowering.mapper import Candidate, Mapper
from npu_model.lowering.program import Linker, Part, chip_digest, dram_places, link_program, trimmed
from npu_model.lowering.residency import positions
from npu_model.machine.machine import Machine, Run
from npu_model.machine.memory import Memory
from npu_runtime.cpu.kernels import CPU_KERNELS
from npu_runtime.cpu.kernels.elementwise import bound_elementwise

TINY = parse_chip(
    """
[chip]
name = "tiny"
clock_ghz = 1.0
[matrix]
arrays = 1
rows = 3
columns = 5
dataflow = "weight"
rates = { int8 = 1.0, float16 = 1.0, bfloat16 = 1.0, float32 = 1.0 }
accumulator_bytes = 1024
[vector]
lanes = 3
rates = { int8 = 1.0, float16 = 1.0, bfloat16 = 1.0, float32 = 1.0 }
[sram]
size = 16384
banks = 4
ports = 1
bytes_per_cycle = 4
[dram]
bandwidth_gb_s = 2
latency_ns = 50
burst_bytes = 16
[dma]
channels = 1
""",
    "tiny",
)
CHIPS: dict[str, Chip] = {"edge": load_chip("edge"), "tiny": TINY}


@dataclass(frozen=True)
class Tensor:
    """An operand: a view, and the buffer that it shows a part of."""

    view: View
    data: np.ndarray

    @property
    def array(self) -> np.ndarray:
        """The elements that the view shows, in the buffer's own memory."""
        size = itemsize(self.view.dtype)
        strides = tuple(stride * size for stride in self.view.strides)
        return np.ndarray(
            self.view.shape, self.data.dtype, self.data.view(np.uint8).data, self.view.offset * size, strides
        )

    def like(self) -> Tensor:
        """A view of the same shape of a copy of the buffer."""
        return replace(self, data=self.data.copy())


def numbers(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Random numbers of a dtype that suit most ops."""
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if "int" in dtype:
        low, high = {"int32": (-9, 10), "int8": (-128, 128), "uint8": (0, 256)}[dtype]
        return rng.integers(low, high, count).astype(numpy_dtype(dtype))
    return rng.standard_normal(count).astype(np.float32).astype(numpy_dtype(dtype))


def tensor(
    rng: np.random.Generator,
    name: str,
    shape: Sequence[int],
    dtype: str,
    *,
    packed: int | None = None,
    repeats: bool = False,
    data: np.ndarray | None = None,
) -> Tensor:
    """A tensor whose dimensions lie in memory in any order and with gaps.

    Args:
        packed: The number of last dimensions that are row-major without gaps; None for all of them.
        repeats: Whether dimensions may have the stride 0.
        data: The elements, instead of random ones.
    """
    rank = len(shape)
    free = list(range(rank if packed is None else rank - packed)) if packed is not None else []
    order = [int(d) for d in rng.permutation(free)] + [d for d in range(rank) if d not in free]
    strides = [0] * rank
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(1, shape[d])
        if d in free:
            step += int(rng.integers(0, 3)) * (rng.random() < 0.4)
    if repeats:
        strides = [0 if d in free and rng.random() < 0.25 else stride for d, stride in enumerate(strides)]
    offset = int(rng.integers(0, 5)) if packed is not None else 0
    buffer = numbers(rng, offset + step + 3, dtype)
    made = Tensor(View(name, tuple(shape), tuple(strides), offset, dtype), buffer)
    if data is not None:
        made.array[...] = data
    return made


MOST_INSTRUCTIONS = 400  # of a tiling that is not the mapper's choice


class SomeTiling(Mapper):
    """Chooses any of the first tilings that fit and are not long, instead of the one estimated to be the fastest."""

    def __init__(self, chip: Chip, rng: np.random.Generator) -> None:
        super().__init__(chip)
        self.rng = rng

    def ranked(self, call: KernelCall, resident: Collection[int], room: int) -> list[Candidate]:
        """The candidates that fit in any order, short ones first."""
        fitting = super().ranked(call, resident, room)
        self.rng.shuffle(fitting)  # type: ignore[arg-type]
        return sorted(fitting, key=lambda each: each.executions > MOST_INSTRUCTIONS)


def run_on_chip(
    chip: Chip,
    kernel: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    params: Mapping[str, Any],
    mapper: Mapper | None = None,
) -> Run:
    """Run a call's tile program, checked, on the tensors' own buffers; `mapper` is one that the chip does not have."""
    views = [tuple(t.view for t in tensors) for tensors in (inputs, outputs)]
    call = KernelCall(kernel, "", *views, dict(params), "node")
    assert declaration(call).problem(call) is None, declaration(call).problem(call)
    tensors = {t.view.buffer: t for t in (*inputs, *outputs)}
    buffers = {name: BufferAllocation(name, "input", t.data.shape, t.view.dtype) for name, t in tensors.items()}
    plan = ExecutionPlan([], [call], buffers, [], [], {}, {}, {}, {})
    program = trimmed(link_program(plan, chip, Mapper(chip)), chip)
    if mapper is not None:
        linker = Linker(mapper, dram_places(plan, mapper), {})
        candidate = mapper.ranked(call, (), chip.sram.size)[0]
        linker.add(Part(call, candidate.tiling, chip.sram.size, candidate.scratchpad))
        program = replace(program, sections=tuple(linker.sections))
    program = decode(encode(program))
    memory = {name: Memory(name, t.data.view(np.uint8), False) for name, t in tensors.items()}
    return Machine(chip, program, memory, checked=True).run()


def run_in_scratchpad(
    chip: Chip, kernel: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], params: Mapping[str, Any]
) -> bool:
    """Run a call, checked, whose operands' buffers are brought into the scratchpad first, and back afterwards.

    Returns:
        Whether it did: they must not fill more than half of it.
    """
    tensors = {t.view.buffer: t for t in (*inputs, *outputs)}
    alignment = chip.sram.alignment
    room = chip.sram.size // 2 // alignment * alignment
    places, used = {}, 0
    for name, t in tensors.items():
        places[f"{name} in dram"] = Place(Space.DRAM, name, 0, t.data.nbytes)
        places[name] = Place(Space.SCRATCHPAD, "", room + used, t.data.nbytes)
        used += -(-t.data.nbytes // alignment) * alignment
    if used > room:
        return False
    mapper = Mapper(chip)
    linker = Linker(mapper, places, {})
    whole = {name: View(name, t.data.shape, (1,), 0, t.view.dtype) for name, t in tensors.items()}
    home = {name: replace(view, buffer=f"{name} in dram") for name, view in whole.items()}

    def add(call: KernelCall) -> None:
        own = positions(call, tensors)
        candidate = mapper.ranked(call, own, room)[0]
        linker.add(Part(call, candidate.tiling, room, candidate.needs(own)))

    def copy(source: View, target: View) -> KernelCall:
        return KernelCall("copy_kernel", "", (source,), (target,), {"scalars": [None]}, "copy")

    for name in tensors:
        add(copy(home[name], whole[name]))
    views = [tuple(t.view for t in tensors) for tensors in (inputs, outputs)]
    add(KernelCall(kernel, "", *views, dict(params), "node"))
    for t in outputs:
        add(copy(whole[t.view.buffer], home[t.view.buffer]))
    buffers = tuple(Buffer(name, t.data.nbytes) for name, t in tensors.items())
    program = TileProgram(chip.name, chip_digest(chip), buffers, (), tuple(linker.sections))
    memory = {name: Memory(name, t.data.view(np.uint8), False) for name, t in tensors.items()}
    Machine(chip, program, memory, checked=True).run()
    return True


def run_on_cpu(kernel: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], params: Mapping[str, Any]) -> None:
    """Run a call with the CPU device's NumPy kernel."""
    arrays = [t.array for t in inputs]
    if kernel in ELEMENTWISE_KERNELS:
        bound_elementwise(ELEMENTWISE_KERNELS[kernel].op, arrays, outputs[0].array, params)()
        return
    with np.errstate(all="ignore"):
        CPU_KERNELS[kernel](arrays, [t.array for t in outputs], params)


TOLERANCE = {"float32": 3e-6, "float16": 1.1e-3, "bfloat16": 8.5e-3}


def assert_same(
    chip: str,
    kernel: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    params: Mapping[str, Any],
    *,
    exact: bool = False,
    tolerance: float = 1.0,
) -> Run:
    """Compare whole output buffers of a call on a chip, in two tilings, with those on the CPU: integers bit for bit.

    Where the operands fit into the scratchpad, the call runs on them there too.

    Args:
        exact: Whether floats are equal bit for bit too.
        tolerance: Factor of the usual difference of floats that is allowed, relative and absolute.
    """
    expected, others, residents = ([t.like() for t in outputs] for _ in range(3))
    run_on_cpu(kernel, inputs, expected, params)
    run = run_on_chip(CHIPS[chip], kernel, inputs, outputs, params)
    run_on_chip(CHIPS[chip], kernel, inputs, others, params, SomeTiling(CHIPS[chip], np.random.default_rng(run.cycles)))
    if not run_in_scratchpad(CHIPS[chip], kernel, inputs, residents, params):
        residents = others
    for wanted, *actual in zip(expected, outputs, others, residents, strict=True):
        dtype = wanted.view.dtype
        close = 0.0 if exact or dtype not in TOLERANCE else tolerance * TOLERANCE[dtype]
        for each in actual:
            numbers_in = [t.data.astype(np.float64) for t in (each, wanted)]
            np.testing.assert_allclose(*numbers_in, close, close, err_msg=f"{kernel} on {chip}: {params}")
    return run
