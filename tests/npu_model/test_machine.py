"""The machine's clock, its order of engines, races and deadlocks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from tile_programs import arrays_of, chip, emitted_program, linear_program, memories

from npu_model.isa.assembler import assemble
from npu_model.isa.instructions import Multiply, TileProgram
from npu_model.isa.verifier import verify
from npu_model.machine import blas, streams
from npu_model.machine import machine as machine_module
from npu_model.machine.blas import one_thread
from npu_model.machine.costs import Costs
from npu_model.machine.machine import Machine, Run
from npu_model.machine.memory import MachineError, Memory


def facts(run: Run) -> Any:
    return run.cycles, [asdict(counts) for counts in run.sections], run.spans


def run(program: TileProgram, *, checked: bool = True) -> dict[str, np.ndarray]:
    """Run a program on small integers; returns its buffers."""
    arrays = arrays_of(program)
    Machine(chip(), program, memories(arrays), checked).run()
    return arrays


@pytest.mark.parametrize("ahead", [1, 2, 7, 10**6])
def test_how_far_loops_are_unrolled_changes_nothing(ahead: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    programs = [linear_program(200, 1000, 777), *(emitted_program(seed + number) for number in range(50))]
    expected = [facts(Machine(chip(), program).run(spans=True)) for program in programs]
    monkeypatch.setattr(streams, "_AHEAD", ahead)
    assert [facts(Machine(chip(), program).run(spans=True)) for program in programs] == expected


def test_timing_alone_and_checked_runs_count_the_same(seed: int) -> None:
    for number in range(50):
        program = emitted_program(seed + number)
        timed = Machine(chip(), program).run(spans=True)
        checked = Machine(chip(), program, memories(arrays_of(program)), True).run(spans=True)
        assert facts(timed) == facts(checked)


def test_emitted_programs_have_no_race_and_compute_what_their_sequence_says(seed: int) -> None:
    for number in range(100):
        program = emitted_program(seed + number)
        free, checked = run(program, checked=False), run(program)
        assert all(np.array_equal(free[name], checked[name]) for name in free)


def test_a_program_is_scheduled_once_and_computed_again_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for number in range(20):
        program = emitted_program(seed + number)
        arrays, again = arrays_of(program), arrays_of(program)
        machine = Machine(chip(), program, memories(arrays))
        expected = [facts(machine.run())]
        with monkeypatch.context() as patched:
            patched.setattr(machine_module, "Streams", None)
            expected.append(facts(machine.run()))
        runs = [facts(Machine(chip(), program, memories(again)).run()) for _ in range(2)]
        assert runs == expected
        assert all(np.array_equal(arrays[name], again[name]) for name in arrays)


LONG_SUM = """
chip edge d
buffer x 70000
buffer w 70000
section a b ""
  dma0    load    sram[0] uint8 <- x[0] uint8 [70000]   signal dma0.1
  dma0    load    sram[70016] int8 <- w[0] int8 [70000]   signal dma0.1
  matrix matmul acc[0] int32 (4, 0) = sram[0] uint8 (0, 1) * sram[70016] int8 (0, 1) [m 1, k 70000] wait dma0.1 >= 2
"""


def test_an_error_of_a_later_run_names_its_instruction_too() -> None:
    program = assemble(LONG_SUM)
    verify(program, chip())
    arrays = {"x": np.zeros(70000, np.uint8), "w": np.full(70000, 0x80, np.uint8)}
    machine = Machine(chip(), program, memories(arrays))
    machine.run()
    arrays["x"][:] = 255
    with pytest.raises(MachineError, match=r"^multiply on matrix of node 'a': a sum in the accumulators leaves the"):
        machine.run()


def blas_threads() -> set[int]:
    """Threads of the BLAS libraries that were there when the first machine ran: SciPy may bring another one later."""
    return {each["num_threads"] for each in blas._LIMIT.controller.info() if each["user_api"] == "blas"}


class Watched(Memory):
    """A memory that notes the threads of BLAS when it is used."""

    def view(self, *args: Any) -> np.ndarray:
        self.threads = blas_threads()
        return super().view(*args)


def test_tiles_are_multiplied_by_one_thread() -> None:
    program = linear_program(4, 4, 4)
    memory = {name: Watched(name, array, False) for name, array in arrays_of(program).items()}
    Machine(chip(), program, memory).run()
    assert all(each.threads <= {1} for each in memory.values() if "threads" in vars(each))
    assert any("threads" in vars(each) for each in memory.values())


def test_the_last_machine_that_runs_gives_threads_back() -> None:
    before = blas_threads()
    with one_thread():
        with ThreadPoolExecutor(1) as pool:
            first = one_thread()
            pool.submit(first.__enter__).result()
            assert blas_threads() <= {1}
            pool.submit(first.__exit__, None, None, None).result()
        assert blas_threads() <= {1}
    assert blas_threads() == before


def test_a_layer_of_many_instructions_is_timed_within_its_rooflines() -> None:
    program = linear_program(512, 2048, 1024, 2)
    result = Machine(chip(), program).run()
    moved = sum(section.dram_read + section.dram_written for section in result.sections)
    busy = max(sum(section.busy.get(name, 0) for section in result.sections) for name in ("matrix", "output"))
    assert result.cycles >= max(busy, moved / chip().dram_bytes_per_cycle)
    assert result.cycles == sum(c.progress + sum(c.stalls.values()) for c in result.sections)


TWO_ENGINES = """
chip edge d
buffer x 64
buffer y 64
section a b ""
  loop t0 in 4:
    dma0    load    sram[64*(t0 % 2)] int32 <- x[16*t0] int32 [4]   wait vector.1 >= t0 - 1   signal dma0.1
    vector  compute [4]   wait dma0.1 >= t0 + 1, dma1.1 >= t0 - 1   signal vector.1, vector.2
            r0 = sram[64*(t0 % 2)] int32
            r1 = add(r0, 1.0; 1.0)
            sram[128 + 64*(t0 % 2)] int32 <- r1
    dma1    store   y[16*t0] int32 <- sram[128 + 64*(t0 % 2)] int32 [4]   wait vector.2 >= t0 + 1   signal dma1.1
"""


def changed(old: str, new: str) -> TileProgram:
    assert old in TWO_ENGINES
    program = assemble(TWO_ENGINES.replace(old, new, 1))
    verify(program, chip())
    return program


def test_engines_that_wait_for_each_other_hand_data_on() -> None:
    program = assemble(TWO_ENGINES)
    arrays = run(program)
    assert np.array_equal(arrays["y"].view(np.int32), arrays["x"].view(np.int32) + 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("wait dma0.1 >= t0 + 1, ", "wait ", "bytes 0 to 16 of sram are read while dma0 may still write them"),
        ("wait dma0.1 >= t0 + 1, ", "wait dma0.1 >= t0, ", "of sram are read while dma0 may still write them"),
        ("wait vector.1 >= t0 - 1", "", r"race: bytes \d+ to \d+ of sram are \w+ while \w+ may"),
        ("wait vector.1 >= t0 - 1", "wait vector.1 >= t0 - 2", r"race: bytes \d+ to \d+ of sram are \w+ while \w+ may"),
        (", dma1.1 >= t0 - 1", "", "race: bytes 128 to 144 of sram are"),
        ("wait vector.2 >= t0 + 1", "", "byte 128 of the scratchpad is read and was never"),
        ("sram[128 + 64*(t0 % 2)] int32 <- r1", "sram[128] int32 <- r1", "race: bytes 128 to 144 of sram are"),
        ("sram[128 + 64*(t0 % 2)] int32 <- r1", "sram[140] int32 <- r1", "byte 128 of the scratchpad is read and was"),
    ],
)  # fmt: skip
def test_a_race_is_found_whether_or_not_it_happens(old: str, new: str, message: str) -> None:
    with pytest.raises(MachineError, match=rf"^\w+ on \w+ in round \d of node 'a': .*{message}"):
        run(changed(old, new))


def test_columns_of_two_engines_side_by_side_are_no_race() -> None:
    program = assemble(
        'chip edge d\nbuffer x 64\nsection a b ""\n'
        "  dma0 load sram[0] int8 (8, 1) <- x[0] int8 (8, 1) [8, 4]\n"
        "  dma1 load sram[4] int8 (8, 1) <- x[4] int8 (8, 1) [8, 4]\n"
    )
    run(program)
    text = 'chip edge d\nbuffer x 64\nsection a b ""\n' + (
        "  dma0 load sram[0] int8 (8, 1) <- x[0] int8 (8, 1) [8, 5]\n"
        "  dma1 load sram[4] int8 (8, 1) <- x[4] int8 (8, 1) [8, 4]\n"
    )
    with pytest.raises(MachineError, match="race: bytes 4 to 61 of sram are written while dma0 may still write them"):
        run(assemble(text))


def test_a_deadlock_names_engines_and_tokens() -> None:
    program = changed("wait vector.1 >= t0 - 1", "wait vector.1 >= t0 + 1")
    with pytest.raises(MachineError) as stuck:
        Machine(chip(), program).run()
    assert str(stuck.value) == (
        "deadlock: dma0 (node 'a') waits for vector.1 to be raised 1 times, which it is 0 times; "
        "dma1 (node 'a') waits for vector.2 to be raised 1 times, which it is 0 times; "
        "vector (node 'a') waits for dma0.1 to be raised 1 times, which it is 0 times"
    )


def test_what_numpy_cannot_compute_is_the_machines_error() -> None:
    program = changed("r1 = add(r0, 1.0; 1.0)", "r1 = add(r0, 1e300; 1.0)")
    with pytest.raises(MachineError, match="compute on vector in round 0 of node 'a' cannot be executed: "):
        run(program)


def test_spans_of_an_engine_do_not_overlap(seed: int) -> None:
    result = Machine(chip(), emitted_program(seed)).run(spans=True)
    for name in {span.engine for span in result.spans}:
        spans = [span for span in result.spans if span.engine == name]
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
    assert not re.search("[A-Z]", "".join(span.name for span in result.spans))


def test_a_fence_behind_a_load_ends_when_the_data_are_there() -> None:
    program = assemble(
        'chip edge d\nbuffer x 64\nsection a b ""\n'
        "  dma0 load sram[0] int32 <- x[0] int32 [4]\n"
        "  dma0 fence signal dma0.0\n"
        "  vector compute [4] wait dma0.0 >= 1\n"
        "         r0 = sram[0] int32\n"
        "         sram[64] int32 <- r0\n"
    )
    load, compute = Machine(chip(), program, memories(arrays_of(program)), True).run(spans=True).spans
    assert compute.start == load.end + round(chip().dram_latency_cycles)


PRODUCT = """
chip edge d
buffer x 128
buffer w 64
section a b ""
  dma0    load    sram[0] int8 <- x[0] int8 [64]   signal dma0.1
  dma0    load    sram[64] int8 <- w[0] int8 [64]   signal dma0.1
  matrix matmul acc[0] int32 (0) = sram[0] int8 * sram[64] int8 [k 64]   wait dma0.1 >= 2   signal matrix.1
  dma0    load    sram[0] int8 <- x[64] int8 [64]   wait matrix.1 >= 1   signal dma0.2
  vector  compute [1]   wait matrix.1 >= 1
          r0 = acc[0] int32
          sram[128] int32 <- r0
"""


def test_an_operands_bytes_are_free_once_it_has_entered_the_array_and_sums_are_read_when_they_are_complete() -> None:
    program = assemble(PRODUCT)
    product = next(node for node in program.sections[0].body if isinstance(node, Multiply))
    depth = Costs(chip()).cost(product, [64]).latency
    spans = Machine(chip(), program, memories(arrays_of(program)), True).run(spans=True).spans
    multiply, load, compute = sorted(spans, key=lambda span: span.start)[2:]
    assert (multiply.engine, load.engine, compute.engine) == ("matrix", "dma0", "vector")
    assert load.start == multiply.end
    assert compute.start == multiply.end + depth > multiply.end


def test_a_load_behind_a_product_does_not_say_that_its_sums_are_complete() -> None:
    program = assemble(PRODUCT.replace("compute [1]   wait matrix.1 >= 1", "compute [1]   wait dma0.2 >= 1"))
    with pytest.raises(MachineError, match="race: bytes 0 to 4 of acc are read while matrix may still write them"):
        run(program)
