"""Programs that share a chip: what they compute, and how long it takes them, by time and by cores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions, ConstraintError, InputError
from npu_compiler import compile as compile_ir
from npu_model import Chip, NPUTarget, load_chip
from npu_model.analysis.tenants import Sharing, join, share
from npu_model.analysis.trace import shared_timeline
from npu_model.chip.description import Cores, Network
from npu_model.machine.machine import Machine
from npu_model.machine.memory import Memory

LAWS = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def chip_of(cores: int, name: str = "edge", **dram: Any) -> Chip:
    chip = load_chip(name)
    chip = dataclasses.replace(chip, dram=dataclasses.replace(chip.dram, **dram))
    if cores == 1:
        return chip
    network = Network(bandwidth_gb_s=32.0, latency_ns=5.0)
    return dataclasses.replace(chip, cores=Cores(count=cores, network=network, split="columns"))


def chain(name: str, rows: int, *widths: int) -> CompiledProgram:
    """Linear layers, each behind the one before, with ReLU, for any chip."""
    g = IRBuilder(name)
    y = g.input("x", rows, widths[0])
    for layer, width in enumerate(widths[1:]):
        y = g("aten.relu.default", g("aten.linear.default", y, g.weight(f"w{layer}", width, g.shape(y)[-1])))
    g.output(y)
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float32"))


programs = st.builds(
    lambda rows, widths: chain("random", rows, *widths),
    st.integers(1, 40),
    st.lists(st.integers(1, 120), min_size=2, max_size=4),
)
ways = st.sampled_from([(Sharing.TIME, 1), (Sharing.TIME, 2), (Sharing.CORES, 2), (Sharing.CORES, 3)])


def on_data(machine_program: Any, chip: Chip, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The memory after a run, checked for races and reads of what was never written."""
    memory = {
        buffer.name: Memory(buffer.name, values[buffer.name].view(np.uint8).copy(), False)
        if buffer.name in values
        else Memory(buffer.name, buffer.size, True)
        for buffer in machine_program.buffers
    }
    machine = Machine(chip, machine_program, memory, checked=True)
    machine.preload()
    machine.run()
    return {name: each.data for name, each in memory.items()}


@LAWS
@given(programs, programs, ways)
def test_tenants_compute_what_they_compute_alone(
    first: CompiledProgram, second: CompiledProgram, way: tuple[Sharing, int]
) -> None:
    sharing, cores = way
    chip, rng = chip_of(cores), np.random.default_rng(1)
    joined = join([first, second], chip, sharing)
    values: dict[str, np.ndarray] = {}
    for number, program in enumerate((first, second)):
        for name, buffer in program.plan.buffers.items():
            if buffer.kind not in ("arena", "output"):
                values[f"{number}/{name}"] = rng.standard_normal(buffer.alloc_shape).astype(np.float32)
    together = on_data(joined.program, chip, values)
    for number, (tiles, own) in enumerate(zip(joined.tiles, joined.shares, strict=True)):
        prefix = f"{number}/"
        mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        alone = on_data(tiles, own.chip, mine)
        for name in (first, second)[number].plan.output_views:
            np.testing.assert_array_equal(together[prefix + name], alone[name])


@LAWS
@given(programs, programs, ways)
def test_work_is_that_of_each_alone_and_all_end_with_the_last(
    first: CompiledProgram, second: CompiledProgram, way: tuple[Sharing, int]
) -> None:
    sharing, cores = way
    run = share([first, second], chip_of(cores), sharing)
    assert run.cycles == max(tenant.shared.cycles for tenant in run.tenants)
    for tenant in run.tenants:
        assert tenant.shared.macs == tenant.alone.macs
        assert tenant.shared.cycles >= max(tenant.shared.busy.values())
    parts = sum(tenant.shared.energy.total - tenant.shared.energy.static for tenant in run.tenants)
    assert run.joules == pytest.approx(parts + run.chip.energy.static_watts * run.seconds)


@LAWS
@given(programs, programs, st.integers(2, 3))
def test_a_neighbour_on_other_cores_only_delays(first: CompiledProgram, second: CompiledProgram, cores: int) -> None:
    chip = chip_of(cores, bandwidth_gb_s=2.0)
    joined = join([first, second], chip, Sharing.CORES)
    run = share([first, second], chip, Sharing.CORES)
    apart = [Machine(own.chip, tiles).run().cycles for tiles, own in zip(joined.tiles, joined.shares, strict=True)]
    for tenant, own, cycles in zip(run.tenants, joined.shares, apart, strict=True):
        # The neighbour may change the order in which a tenant's own cores get DRAM, rarely to their advantage.
        sooner = 1.0 if own.chip.core_count == 1 else 1.1
        assert cycles <= tenant.shared.cycles * sooner
    assert run.cycles <= sum(apart)


def test_the_neighbours_transfers_make_a_program_wait() -> None:
    hungry = chain("hungry", 1, 2000, 2000)
    run = share([hungry, hungry], chip_of(2), Sharing.CORES)
    assert all(1.8 < tenant.shared.cycles / tenant.alone.cycles < 2.2 for tenant in run.tenants)
    idle = share([hungry, chain("idle", 1, 8, 8)], chip_of(2), Sharing.CORES)
    assert idle.tenants[0].slowdown < 1.1


def test_calls_take_turns_by_time() -> None:
    first, second = chain("first", 64, 256, 256, 256, 256), chain("second", 64, 256, 256)
    joined = join([first, second], chip_of(1), Sharing.TIME)
    assert joined.sections == ((0, 2, 3), (1,))
    run = share([first, second], chip_of(1), Sharing.TIME)
    assert run.tenants[1].shared.cycles < run.tenants[0].shared.cycles == run.cycles
    assert run.tenants[1].slowdown > 1.2


def test_launches_that_do_not_overlap_are_each_tenants_own() -> None:
    program = chain("small", 1, 16, 16, 16)
    chip = chip_of(2)
    slow = dataclasses.replace(chip, launch=dataclasses.replace(chip.launch, cost_us=50.0, overlapped=False))
    run = share([program, program], slow, Sharing.CORES)
    assert [tenant.slowdown for tenant in run.tenants] == pytest.approx([1.0, 1.0], rel=0.02)


def test_the_timeline_names_the_program_of_each_slice() -> None:
    run = share([chain("one", 8, 64, 64), chain("two", 8, 64, 64)], chip_of(2), Sharing.CORES, spans=True)
    events = list(shared_timeline(run).events())
    owners = {event["args"]["program"] for event in events if event["ph"] == "X"}
    assert owners == {"one", "two"}


def test_too_few_cores_are_refused() -> None:
    program = chain("p", 1, 8, 8)
    with pytest.raises(InputError, match="chip 'edge' has 1 core for 2 programs; share it by time, or give it more"):
        share([program, program], chip_of(1), Sharing.CORES)


def test_a_program_for_a_whole_chip_is_refused() -> None:
    g = IRBuilder("whole")
    g.output(g("aten.relu.default", g.input("x", 4)))
    program = compile_ir(g.ir(), NPUTarget(chip_of(2)))
    with pytest.raises(InputError, match="'whole' was compiled for npu:edge, the whole chip; to share a chip, give"):
        share([program, program], chip_of(2), Sharing.CORES)


def test_too_few_tokens_are_named() -> None:
    chip = dataclasses.replace(chip_of(1), control=dataclasses.replace(chip_of(1).control, tokens=2))
    program = chain("p", 64, 256, 256)
    with pytest.raises(
        InputError, match=r"need \d+ tokens of an engine together; chip 'edge' has 2 \('control.tokens'"
    ):
        share([program, program], chip, Sharing.TIME)


def test_a_share_that_is_too_small_is_named() -> None:
    chip = dataclasses.replace(chip_of(1), sram=dataclasses.replace(chip_of(1).sram, size=10 << 10))
    g = IRBuilder("window")
    x, w = g.input("x", 1, 1, 64, 64), g.weight("w", 1, 1, 40, 40)
    g.output(g("aten.convolution.default", x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))
    program = compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))
    with pytest.raises(ConstraintError, match="'window' with 5.0 KiB of scratchpad: node 'convolution'"):
        share([program, program], chip, Sharing.TIME)
    tiny = dataclasses.replace(chip, sram=dataclasses.replace(chip.sram, size=1600))
    with pytest.raises(InputError, match="the scratchpad of chip 'edge' is too small for 2 programs"):
        share([chain("p", 1, 8, 8), chain("q", 1, 8, 8)], tiny, Sharing.TIME)
