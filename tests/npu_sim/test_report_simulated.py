"""The data of simulated runs in reports: it adds up, and says what the machine did."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, compile
from npu_model import Chip, load_chip, simulate
from npu_model.analysis.scratchpad import Content, residents
from npu_model.analysis.simulation import lowered, result_of
from npu_model.machine.machine import Machine
from npu_sim.report import simulated, simulated_facts


def network(width: int = 96, layers: int = 3) -> CompiledProgram:
    """Convolutions with a residual, and a product."""
    g = IRBuilder("network")
    x = g.input("x", 1, 8, 24, 24)
    for index in range(layers):
        y = g("aten.conv2d.default", x, g.weight(f"blocks.{index}.conv.weight", 8, 8, 3, 3), None, [1, 1], [1, 1])
        x = g("aten.add.Tensor", g("aten.relu.default", y), x)
    flat = g("aten.reshape.default", x, [8, 576])
    return compile(g.output(g("aten.linear.default", flat, g.weight("head.weight", width, 576))).ir())


CHIPS = [load_chip(name) for name in ("edge", "phone", "datacenter")]
one_of_each_chip = pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)


@one_of_each_chip
def test_parts_add_up_to_the_run(chip: Chip) -> None:
    program = network()
    facts, result = simulated_facts(program, chip), simulate(program, chip)
    calls = facts["calls"]
    assert facts["run"] == pytest.approx(result.seconds) and facts["cycles"] == result.cycles
    assert sum(call["own"] for call in calls) == pytest.approx(facts["run"])
    assert facts["computing"] + sum(facts["stalls"].values()) == pytest.approx(facts["run"])
    for call in calls:
        assert call["computing"] + sum(call["stalls"].values()) == pytest.approx(call["own"], abs=1e-15)
        assert call["busy"][call["engine"]] == max(call["busy"].values())
    for part in facts["energy"]:
        assert sum(call["energy"][part] for call in calls) == pytest.approx(facts["energy"][part])
    assert sum(facts["energy"].values()) == pytest.approx(result.energy.total)
    for level, moved in facts["traffic"].items():
        assert sum(call["traffic"][level] for call in calls) == moved
    assert facts["traffic"]["DRAM, read"] + facts["traffic"]["DRAM, written"] == result.dram_bytes
    assert facts["least"] <= facts["run"]


@one_of_each_chip
def test_tracks_are_what_each_engine_did(chip: Chip) -> None:
    program = network()
    facts, spans = simulated_facts(program, chip), simulate(program, chip, spans=True).spans
    assert facts["gap"] == 0
    for engine, rows in facts["tracks"].items():
        covered = {cycle for _, start, cycles in rows for cycle in range(start, start + cycles)}
        assert covered == {c for span in spans if span.engine == engine for c in range(span.start, span.end)}
    assert facts["tracks"].keys() == {span.engine for span in spans}


def test_a_page_holds_a_limited_number_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = load_chip("edge")
    program, chip = network(width=4096), dataclasses.replace(edge, sram=dataclasses.replace(edge.sram, size=65_536))
    whole = simulated_facts(program, chip)
    most = sum(map(len, whole["tracks"].values())) // 3
    monkeypatch.setattr(simulated, "MOST_SPANS", most)
    joined = simulated_facts(program, chip)
    assert joined["gap"] > 0 and 0 < sum(map(len, joined["tracks"].values())) <= most
    for engine, rows in whole["tracks"].items():
        for call, start, cycles in rows:
            hosts = [row for row in joined["tracks"][engine] if row[0] == call and row[1] <= start < sum(row[1:])]
            assert any(start + cycles <= row[1] + row[2] for row in hosts), "nothing that happened is left out"


def test_a_chip_without_energies_has_none() -> None:
    edge = load_chip("edge")
    table = edge.energy
    costs = dict.fromkeys(table.pj_per_mac, 0.0)
    others = ("pj_per_vector_operation", "pj_per_sram_byte", "pj_per_dram_byte", "static_watts")
    nothing = dataclasses.replace(table, pj_per_mac=costs, **dict.fromkeys(others, 0.0))
    facts = simulated_facts(network(), dataclasses.replace(edge, energy=nothing))
    assert facts["energy"] is None and {call["energy"] for call in facts["calls"]} == {None}


@one_of_each_chip
def test_the_scratchpad_holds_what_calls_touch_and_hand_on(chip: Chip) -> None:
    program = network()
    tiles = lowered(program, chip)
    result = result_of(program, chip, tiles, Machine(chip, tiles).run())
    taken = residents(tiles, result.calls, result.cycles)
    touched: dict[int, set[int]] = defaultdict(set)
    for part in taken:
        assert 0 <= part.first < part.last <= chip.sram.size and 0 <= part.start <= part.end <= result.cycles
        touched[part.call] |= set(range(part.first, part.last))
    for call in result.calls:
        assert len(touched[call.index]) == call.sram_used
    flow = flows(program)
    for part in (part for part in taken if part.content is Content.HANDED_ON):
        writers = {call for call in flow[part.call] if result.calls[call].end == part.start}
        assert writers, "a call reads what a call before it left"
    kept = sum(part.last - part.first for part in taken if part.content is Content.KEPT)
    assert kept >= result.kept_weight_bytes and bool(kept) == bool(result.kept_weight_bytes)


def test_what_stays_between_calls_is_seen() -> None:
    areas = simulated_facts(network(), load_chip("edge"))["scratchpad"]["areas"]
    assert {area[-1] for area in areas} == {str(content) for content in Content}


def flows(program: CompiledProgram) -> list[set[int]]:
    """For each call, the earlier calls whose results it reads."""
    written: dict[str, int] = {}
    sources = []
    for index, call in enumerate(program.kernels):
        sources.append({written[view.buffer] for view in call.inputs if view.buffer in written})
        written |= {view.buffer: index for view in call.outputs}
    return sources


def test_calls_know_the_module_whose_weights_they_read() -> None:
    from npu_sim.report import program_facts

    calls: list[dict[str, Any]] = program_facts(network())["calls"]
    assert {"blocks.0.conv", "blocks.1.conv", "blocks.2.conv", "head"} <= {call["module"] for call in calls}
