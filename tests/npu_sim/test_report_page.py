"""Reports in headless Chromium: every page opens without an error or a request, and shows what the program says."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened, chromium
from drawn import drawn
from ir_builder import IRBuilder
from safetensors.numpy import save_file
from traces import qwen_step
from typer.testing import CliRunner

from npu_compiler import CompiledProgram, CompileOptions, compile, trace_stages
from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.program.describe import family_name, padding_by_buffer
from npu_compiler.program.kernels import Family
from npu_model import load_chip, simulate
from npu_sim.cli import app
from npu_sim.report import report_contents, stage_graphs, write_page
from npu_sim.report.page import unpack

LAYERS = 11
VIEWS = tuple(itertools.product(("net", "chips"), (390, 1440), ("light", "dark")))
WITHOUT_DRAM = Path(__file__).parents[1] / "fuzz" / "corpus" / "chips" / "without_dram.toml"
ALERT = "<script>alert(1)</script>"
HOSTILE = f'"></script><img src=x onerror=alert(2)>{ALERT}'


def hostile_network() -> dict[str, Any]:
    """Convolutions with padded channels and a repeated linear; names that would run if they were taken for markup."""
    g = IRBuilder(ALERT)
    x = g.input(HOSTILE, 1, 3, 8, 8)
    y = g("aten.conv2d.default", x, g.weight("<b>conv</b>", 12, 3, 3, 3), None, [1, 1], [1, 1], name=ALERT)
    y = g("aten.relu.default", y, name="'\"&amp;")
    y = g("aten.reshape.default", y, [12, 64], name="constructor")
    y = g("aten.tanh.default", y, name="__proto__")
    for index in range(LAYERS):
        up = g("aten.linear.default", y, g.weight(f"layers.{index}.<i>", 64, 64))
        y = g("aten.add.Tensor", y, g("aten.mul.Tensor", up, g("aten.sigmoid.default", up)))
    return g.output(y).ir()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measured, simulated and verified report, one that is only simulated, a comparison, and their programs."""
    folder = tmp_path_factory.mktemp("report")
    ir = hostile_network()
    (folder / "net.json").write_text(json.dumps(ir))
    program = compile(ir)
    program.save(folder / "net.npubin")
    compile(ir, options=CompileOptions(disabled_fusions=FUSIONS)).save(folder / "plain.npubin")
    rng = np.random.default_rng(3)
    shapes = {key: shape for spec in program.weight_specs.values() for key, shape in spec.source_shapes.items()}
    weights = {key: rng.standard_normal(shape).astype(np.float32) / 8 for key, shape in shapes.items()}
    save_file(weights, folder / "net.safetensors")
    measuring = ["-w", str(folder / "net.safetensors"), "--device", "cpu", "--no-tune", "--runs", "2", "--verify"]
    simulating = ["--npu", "edge", "--sweep", "sram=64K..1M,arrays=1..4"]
    chips = ["--npu", "edge", "--npu", "phone"]
    for args in (
        ["report", str(folder / "net.json"), "-o", str(folder / "net.html"), *measuring, *simulating],
        ["report", str(folder / "net.npubin"), "-o", str(folder / "simulated.html"), "--npu", "edge"],
        ["report", str(folder / "net.npubin"), "-o", str(folder / "link.html"), "--npu", str(WITHOUT_DRAM)],
        ["diff", str(folder / "net.npubin"), str(folder / "plain.npubin"), "-o", str(folder / "diff.html")],
        ["diff", str(folder / "plain.npubin"), str(folder / "net.npubin"), "-o", str(folder / "back.html")],
        ["diff", str(folder / "net.npubin"), "-o", str(folder / "chips.html"), *chips],
    ):
        done = CliRunner().invoke(app, args, prog_name="npu-sim")
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def opened(browser: Any, folder: Path) -> Iterator[Opened]:
    """The report; nothing may have gone wrong in it when the test ends."""
    report = Opened(browser, folder / "net.html")
    yield report
    report.context.close()
    assert report.problems == []


@pytest.fixture(scope="module")
def program(folder: Path) -> CompiledProgram:
    return CompiledProgram.load(folder / "net.npubin")


def test_every_tab_opens(opened: Opened) -> None:
    tabs = [
        tab.removeprefix("tab-") for tab in opened.value("[...document.querySelectorAll('[role=tab]')].map(t => t.id)")
    ]
    assert tabs == [
        *("overview", "timeline", "layers", "traffic", "roofline", "sweep"),
        *("graph", "memory", "kernels", "padding", "numerics"),
    ]
    for tab in tabs:
        opened.open(tab)
        text = opened.page.inner_text(f"#panel-{tab}")
        assert text.strip() and "undefined" not in text and "NaN" not in text and "[object" not in text, (tab, text)


def test_names_from_the_model_are_shown_as_text(opened: Opened) -> None:
    assert opened.texts("h1") == [ALERT] and opened.page.title() == ALERT
    assert any(
        HOSTILE in row[0] for row in opened.value("[...document.querySelectorAll('tr')].map(r => [r.textContent])")
    )
    opened.open("graph")
    opened.page.fill("#search", ALERT)
    opened.page.press("#search", "Enter")
    assert opened.page.inner_text("#selected-name") == ALERT
    assert "<b>conv</b>" in opened.page.inner_text(".details")
    assert opened.value("document.querySelectorAll('img, b, i').length") == 0


def test_kernels_are_those_of_the_program(opened: Opened, program: CompiledProgram) -> None:
    opened.open("kernels")
    counts = Counter(call.kernel for call in program.kernels)
    assert {row[0]: int(row[2]) for row in opened.rows("By kernel")} == counts
    calls = opened.rows("Every call")
    assert [(row[0], row[1]) for row in calls] == [(f"{i} {c.kernel}", c.node) for i, c in enumerate(program.kernels)]
    opened.page.click("#panel-kernels tbody button.link >> nth=2")
    assert opened.page.inner_text("#selected-name") == f"2 {program.kernels[2].kernel}"


def test_simulated_calls_are_beside_the_measured_ones(opened: Opened, program: CompiledProgram) -> None:
    simulated = simulate(program, load_chip("edge"))
    found = opened.value("reportData.programs[0].simulated")
    assert found["chip"] == "edge" and found["run"] == pytest.approx(simulated.seconds)
    assert [call["own"] for call in found["calls"]] == pytest.approx(
        [simulated.chip.seconds(call.cycles) for call in simulated.calls]
    )
    opened.open("timeline")
    assert opened.value("[...document.querySelectorAll('#panel-timeline .chart')].map(c => c.id)") == [
        "engines",
        "trace",
    ]
    opened.open("kernels")
    heads = opened.texts("#panel-kernels th button")
    assert {"time", "simulated", "share of the time"} <= set(heads)


def test_a_report_may_be_simulated_only(browser: Any, folder: Path) -> None:
    report = Opened(browser, folder / "simulated.html")
    report.open("timeline")
    assert report.value("[...document.querySelectorAll('#panel-timeline .chart')].map(c => c.id)") == ["engines"]
    before = report.value("document.querySelector('#engines canvas').toDataURL()")
    report.page.press("#engines canvas", "+")
    zoomed = report.value("document.querySelector('#engines canvas').toDataURL()")
    assert zoomed != before
    report.page.click("#panel-timeline .zoom button:has-text('All')")
    assert report.value("document.querySelector('#engines canvas').toDataURL()") == before
    report.open("kernels")
    assert "ranked by what they add to a run on the chip edge" in report.page.inner_text("#panel-kernels")
    report.open("overview")
    assert "simulated run" in report.page.inner_text("#panel-overview")
    report.context.close()
    assert report.problems == []


def test_a_chip_without_dram_shows_its_link_and_its_l2(browser: Any, folder: Path) -> None:
    report = Opened(browser, folder / "link.html")
    for tab in ("overview", "timeline", "kernels", "roofline"):
        report.open(tab)
    assert "bandwidth of its link" in report.page.inner_text("#panel-roofline")
    report.open("traffic")
    assert report.texts("#panel-traffic .bars .bar-name")[:3] == ["link, read", "link, written", "L2, read"]
    assert "DRAM" not in report.page.inner_text("#panel-traffic")
    report.context.close()
    assert report.problems == []


def test_tables_sort_and_filter(opened: Opened, program: CompiledProgram) -> None:
    opened.open("kernels")
    opened.page.click("#panel-kernels th:has-text('launches') button")
    launches = [int(row[2]) for row in opened.rows("By kernel")]
    assert launches == sorted(launches, reverse=True) and len(set(launches)) > 1
    kernel = program.kernels[0].kernel
    opened.page.locator("#panel-kernels input[type=search]").last.fill(kernel)
    assert len(opened.rows("Every call")) == sum(call.kernel == kernel for call in program.kernels)


def test_the_graph_after_each_stage_has_its_nodes(opened: Opened) -> None:
    opened.open("graph")
    counts = {name: len(graph.nodes) for name, graph in trace_stages(hostile_network())}
    stages = opened.texts("#stage option")
    assert stages[-1] == "kernels of the program" and len(stages) > 3
    for index, title in enumerate(stages[:-1]):
        opened.page.select_option("#stage", str(index))
        assert opened.page.inner_text("#node-count") == f"{counts[title.split(' (')[0]]} nodes"
        opened.page.click("text=Open all")
        shown = opened.value("reportScene.vertices.filter(v => v.kind === 'node').length")
        assert shown == counts[title.split(" (")[0]]


def test_layers_are_folded_and_open_one_by_one(opened: Opened) -> None:
    opened.open("graph")
    groups = "reportScene.vertices.filter(v => v.kind === 'group').map(v => v.label)"
    assert opened.value(groups) == [f"layers.0 … layers.{LAYERS - 1} × {LAYERS}"]
    opened.page.fill("#search", "layers.3")
    opened.page.press("#search", "Enter")
    assert opened.value(groups) == [f"layers.{index}" for index in range(LAYERS) if index != 3]
    assert opened.value("reportScene.frames.map(f => f.label)") == ["layers.3"]
    opened.page.focus("#graph-canvas")
    opened.page.keyboard.press("Enter")
    assert opened.value(groups) == [f"layers.{index}" for index in range(LAYERS)]
    opened.page.click("text=Fold all")
    assert opened.value(groups) == [f"layers.0 … layers.{LAYERS - 1} × {LAYERS}"]


def test_no_two_boxes_of_the_graph_overlap(opened: Opened) -> None:
    opened.open("graph")
    for stage in range(len(opened.texts("#stage option"))):
        opened.page.select_option("#stage", str(stage))
        opened.page.click("text=Open all")
        boxes = opened.value("reportScene.vertices.map(v => [v.x, v.y, v.width, v.height])")
        assert overlapping(boxes) == []


def overlapping(boxes: list[list[float]]) -> list[tuple[Any, Any]]:
    by_top = sorted(boxes, key=lambda box: box[1])
    found = []
    for index, (x, y, width, height) in enumerate(by_top):
        for other in by_top[index + 1 :]:
            if other[1] >= y + height:
                break
            if other[0] < x + width and x < other[0] + other[2]:
                found.append(((x, y), other))
    return found


def test_a_fused_node_tells_what_it_computes(opened: Opened) -> None:
    opened.open("graph")
    opened.page.select_option("#stage", str(len(opened.texts("#stage option")) - 2))
    opened.page.fill("#search", "npu.")
    opened.page.press("#search", "Enter")
    assert len(opened.texts("ul.origins li")) > 1
    assert "Kernel" in opened.page.inner_text(".details")


def test_the_graph_is_used_with_the_keyboard(opened: Opened) -> None:
    opened.open("graph")
    opened.page.focus("#graph-canvas")
    for key in ("Home", "ArrowDown"):
        opened.page.keyboard.press(key)
    assert opened.page.inner_text("#selected-name") == ALERT
    opened.page.keyboard.press("ArrowDown")
    assert opened.page.inner_text("#selected-name") == "'\"&amp;"
    for key in ("+", "-", "0", "Escape", "ArrowLeft"):
        opened.page.keyboard.press(key)
    assert opened.page.locator("#selected-name").count() == 0
    opened.page.focus("#tab-graph")
    opened.page.keyboard.press("ArrowRight")
    assert opened.value("document.activeElement.id") == "tab-memory"
    assert opened.page.is_visible("#panel-memory") and not opened.page.is_visible("#panel-graph")


def test_the_arena_shows_its_peak(opened: Opened, program: CompiledProgram) -> None:
    opened.open("memory")
    arena = opened.value("reportData.programs[0].arena")
    assert len(opened.rows("The buffers in use during call")) == len(arena["holders"])
    assert f"during call {arena['peak']}" in opened.page.inner_text("#panel-memory")
    assert arena["bytes"] == program.plan.arena_bytes
    is_drawn = """(() => { const canvas = document.querySelector('#arena-map canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size; })()"""
    assert opened.value(is_drawn) > 10


def test_every_kernel_that_computes_is_on_the_roofline(opened: Opened, program: CompiledProgram, folder: Path) -> None:
    opened.open("roofline")
    calls = opened.value("[...document.querySelectorAll('#roofline circle.kernel')].map(c => Number(c.dataset.calls))")
    assert sum(calls) == sum(call.flops > 0 and call.bytes_moved > 0 for call in program.kernels)
    rows = opened.value(
        "[...[...document.querySelectorAll('#panel-roofline table')].pop().tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert sum(int(row[3]) for row in rows) == len(program.kernels)
    assert sorted(float(row[-1].split()[0]) for row in rows) == pytest.approx(
        roof_shares(folder / "net.html"), abs=0.06
    )


def roof_shares(page: Path) -> list[float]:
    """The shares of the roof that a report's rows show, in percent and in order, from its data."""
    packed = re.search(r'id="data">([^<]*)<', page.read_text("utf-8"))
    assert packed
    contents = unpack(packed[1])
    groups = defaultdict(list)
    for call in contents["programs"][0]["calls"]:
        groups[call["kernel"], call["flops"], call["bytes"], call["family"]].append(call["seconds"])
    times = {key: float(np.median(seconds)) for key, seconds in groups.items()}
    roof = contents["roof"] or {
        "bandwidth": max(moved / time for (_, _, moved, _), time in times.items()),
        "flops": max(flops / time for (_, flops, _, _), time in times.items()),
    }
    return sorted(
        100 * max(moved / roof["bandwidth"], flops / roof["flops"]) / time
        for (_, flops, moved, _), time in times.items()
    )


def test_padding_and_numerics_are_those_of_the_program(opened: Opened, program: CompiledProgram) -> None:
    opened.open("padding")
    assert len(opened.value("[...document.querySelectorAll('#panel-padding tbody tr')]")) == len(
        padding_by_buffer(program.plan)
    )
    opened.open("numerics")
    assert "The device agrees with PyTorch." in opened.page.inner_text("#panel-numerics")
    nodes = opened.value(
        "[...document.querySelectorAll('#panel-numerics table:last-of-type tbody td:nth-child(2)')]"
        ".map(cell => cell.textContent)"
    )
    assert {call.node for call in program.kernels} <= set(nodes)


def test_dark_mode_follows_the_system_and_the_button(browser: Any, folder: Path) -> None:
    report = Opened(browser, folder / "net.html", color_scheme="dark")
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + Number(b), 0)"
    assert report.value(brightness) < 150
    report.page.click("#theme")
    assert report.value(brightness) > 600
    assert report.problems == []
    report.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: Any, folder: Path, scheme: str) -> None:
    report = Opened(browser, folder / "net.html", color_scheme=scheme)
    for text, ground in (("ink", "ground"), ("ink", "card"), ("soft", "ground"), ("accent", "card"), ("bad", "card")):
        assert contrast(report.value(f"themeColour('{text}')"), report.value(f"themeColour('{ground}')")) >= 4.5
    report.context.close()


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours such as `#12ab34` (WCAG 2.2, definition of relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_partitions_are_shown_one_program_at_a_time(browser: Any, tmp_path: Path) -> None:
    g = IRBuilder("mixed")
    inverse = g("aten.matrix_exp.default", g("aten.relu.default", g.input("x", 4, 4)), name="toString")
    (tmp_path / "mixed.json").write_text(json.dumps(g.output(g("aten.tanh.default", inverse)).ir()))
    args = ["report", str(tmp_path / "mixed.json"), "-o", str(tmp_path / "mixed.html")]
    assert CliRunner().invoke(app, args, prog_name="npu-sim").exit_code == 0
    report = Opened(browser, tmp_path / "mixed.html")
    assert "npu (1 node), CPU (1 node), npu (1 node)" in report.page.inner_text("#panel-overview")
    report.open("graph")
    report.page.select_option("#stage", "1")
    report.page.fill("#search", "toString")
    report.page.press("#search", "Enter")
    assert {"partition", "cpu", "why"} <= set(report.texts(".details dt, .details dd"))
    report.page.select_option("#program", "1")
    report.open("kernels")
    assert [row[1] for row in report.rows("Every call")] == ["tanh"]
    assert report.problems == []
    report.context.close()


def test_a_comparison_opens(browser: Any, folder: Path) -> None:
    report = Opened(browser, folder / "diff.html")
    programs = [CompiledProgram.load(folder / f"{name}.npubin") for name in ("net", "plain")]
    totals = {row[0]: row[1:] for row in report.rows("Totals")}
    assert totals["kernel launches"][:2] == [str(len(program.kernels)) for program in programs]
    for index, program in enumerate(programs):
        report.page.select_option("#program", str(index))
        report.open("kernels")
        assert len(report.rows("Every call")) == len(program.kernels)
    assert report.problems == []
    report.context.close()


def test_nothing_is_above_the_roof_of_the_chip(opened: Opened, program: CompiledProgram) -> None:
    opened.open("roofline")
    drawn = opened.value("[...document.querySelectorAll('#chip-roofline circle.kernel')].map(c => +c.dataset.calls)")
    assert sum(drawn) == sum(call.flops > 0 for call in program.kernels)
    shares = opened.value(
        "[...document.querySelector('#panel-roofline table').tBodies[0].rows].map(row => row.lastChild.textContent)"
    )
    assert shares and all(0 < float(share.split()[0]) <= 100 for share in shares if share != "–")
    assert "Roofline of edge" in opened.page.inner_text("#panel-roofline")


def test_layers_show_time_and_energy_by_node(opened: Opened, program: CompiledProgram) -> None:
    opened.open("layers")
    nodes = opened.texts("#panel-layers .layers .layer-name button")
    assert nodes == list(dict.fromkeys(call.node for call in program.kernels))
    opened.page.select_option("#layer-order", "most time")
    order = opened.texts("#panel-layers .layers .layer-name button")
    times: Counter[str] = Counter()
    for call in simulate(program, load_chip("edge")).calls:
        times[call.node] += call.cycles
    assert [times[node] for node in order] == sorted(times.values(), reverse=True)
    opened.page.hover("#panel-layers .layer-time >> nth=0")
    assert "computing" in opened.page.inner_text(".tooltip") or "dram" in opened.page.inner_text(".tooltip")
    opened.page.click("#panel-layers .layers .layer-name button >> nth=0")
    assert opened.page.inner_text("#selected-name").endswith(
        next(call.kernel for call in program.kernels if call.node == order[0])
    )
    details = opened.texts(".details dt")
    assert {"simulated", "engine", "stalls", "moves", "scratchpad"} <= set(details)


def test_traffic_is_that_of_the_run(opened: Opened, program: CompiledProgram) -> None:
    opened.open("traffic")
    result = simulate(program, load_chip("edge"))
    assert len(opened.rows("By call")) == len(result.calls)
    written = opened.value("formatBytes(reportData.programs[0].simulated.traffic['scratchpad'])")
    assert written in opened.page.inner_text("#panel-traffic .bars")
    assert opened.value("reportData.programs[0].simulated.traffic['scratchpad']") == result.sram_bytes


def test_two_chips_of_a_sweep_are_picked_and_compared(opened: Opened) -> None:
    opened.open("sweep")
    points = opened.value("reportData.sweep.points")
    runs = [index for index, point in enumerate(points) if not point["problem"]]
    best = {index for index in runs if points[index]["pareto"]}
    on_front = "[...document.querySelectorAll('#sweep .point.best')].map(point => Number(point.dataset.index))"
    assert len(runs) > 3 and set(opened.value(on_front)) == best
    opened.page.select_option("#sweep-y", "energy_uj")
    figures = [(points[index]["area_mm2"], points[index]["energy_uj"]) for index in runs]
    assert set(opened.value(on_front)) == {
        index
        for index, (area, energy) in zip(runs, figures, strict=True)
        if not any(a <= area and e <= energy and (a, e) != (area, energy) for a, e in figures)
    }
    opened.page.hover("#sweep .point >> nth=0")
    assert "edge: sram" in opened.page.inner_text(".tooltip")
    other = runs[1]
    opened.page.focus(f"#sweep [data-index='{other}']")
    opened.page.keyboard.press("Enter")
    rows = {row[0]: row[1:] for row in opened.rows("The two that are picked")}
    assert rows["arrays"][:2] == [str(points[0]["arrays"]), str(points[other]["arrays"])]
    ratio = points[other]["latency_us"] / points[0]["latency_us"]
    assert float(rows["latency"][2].removeprefix("× ")) == pytest.approx(ratio, rel=0.01)
    assert opened.page.locator("#sweep .point.picked").count() == 2


def test_tooltips_stay_inside_the_window(opened: Opened) -> None:
    opened.open("timeline")
    opened.page.locator("#engines").scroll_into_view_if_needed()
    box = opened.page.locator("#engines canvas").bounding_box()
    assert box is not None
    shown = 0
    for part in range(1, 40):
        opened.page.mouse.move(box["x"] + box["width"] * part / 40, min(box["y"] + 35, 845))
        if opened.page.is_visible(".tooltip"):
            shown += 1
            place = opened.page.locator(".tooltip").bounding_box()
            assert place is not None and place["x"] >= 0 and place["x"] + place["width"] <= 1300
            assert place["y"] >= 0 and place["y"] + place["height"] <= 850
    assert shown > 10


@pytest.mark.parametrize("view", drawn(VIEWS, 1 / 4, lambda view: "-".join(map(str, view))))
def test_pages_fit_a_telephone_and_a_desk(browser: Any, folder: Path, view: tuple[str, int, str]) -> None:
    page, width, scheme = view
    report = Opened(browser, folder / f"{page}.html", color_scheme=scheme)
    report.page.set_viewport_size({"width": width, "height": 800})
    for tab in report.value("[...document.querySelectorAll('[role=tab]')].map(t => t.id.slice(4))"):
        report.open(tab)
        assert report.value("document.documentElement.scrollWidth") <= width, tab
        for chart in report.page.locator("section:not([hidden]) .chart > svg, section:not([hidden]) canvas").all():
            box = chart.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, tab
    report.context.close()
    assert report.problems == []


def test_a_kind_of_work_has_one_colour_in_every_stage(opened: Opened, program: CompiledProgram) -> None:
    colours = opened.value("FAMILY_COLOURS")
    assert {family.value for family in Family} <= colours.keys() and len(set(colours.values())) == len(colours)
    families = opened.value("familiesByStage(reportData).map(stage => [...stage])")
    assert len(families) == opened.value("reportData.stages.graphs.length")
    read = dict(families[0])
    assert read[ALERT] == read["'\"&amp;"] == "conv", "a convolution and the activation that is fused into it"
    final = dict(families[-1])
    assert final == {call.node: family_name(call) for call in program.kernels if call.node in final}


def test_an_axis_has_one_unit_of_time(opened: Opened) -> None:
    ticks = "(end) => timeTicks(d3.scaleLinear([0, end], [0, 100]), 6)"
    for end, unit in ((2e-3, "ms"), (1.2e-3, "ms"), (8e-7, "ns"), (3.0, "s")):
        found = opened.page.evaluate(ticks, end)
        assert found["unit"] == unit
        texts = [text for _, text in found["ticks"]]
        assert len(set(texts)) == len(texts) and len({len(text.partition(".")[2]) for text in texts}) == 1


def test_the_sum_of_calls_is_compared_with_the_run_as_it_is(opened: Opened) -> None:
    words = [opened.value(f"compared({time}, 1)") for time in (1.2, 0.8, 1.001)]
    assert words == ["more than", "less than", "as much as"]
    opened.open("kernels")
    measured = opened.value("reportData.programs[0].measured.run")
    whole = sum(opened.value("reportData.programs[0].calls.map(call => call.seconds)"))
    word = "more" if whole > 1.005 * measured else "less" if whole < 0.995 * measured else "as much"
    assert f", {word}" in opened.page.inner_text("#panel-kernels .note")


def test_bars_are_named_by_node(opened: Opened, program: CompiledProgram) -> None:
    opened.open("kernels")
    names = opened.texts("#panel-kernels .bars .bar-name")
    nodes = {call.node for call in program.kernels}
    assert names and all(any(name.startswith(node) for node in nodes) for name in names)


def test_two_chips_are_compared_node_by_node(browser: Any, folder: Path, program: CompiledProgram) -> None:
    report = Opened(browser, folder / "chips.html")
    totals = {row[0]: row[1:] for row in report.rows("Totals")}
    for side, chip in enumerate(("edge", "phone")):
        run = simulate(program, load_chip(chip))
        assert totals["simulated run"][side] == report.value(f"formatTime({run.seconds})")
    named = report.texts("#panel-compare .layers .layer-name")
    assert len(named) == min(20, len({call.node for call in program.kernels}))
    report.context.close()
    assert report.problems == []


@pytest.mark.parametrize(("page", "names"), [("diff", ("net", "plain")), ("back", ("plain", "net"))])
def test_what_only_one_program_has_is_marked_as_in_the_graph(
    browser: Any, folder: Path, page: str, names: tuple[str, str]
) -> None:
    report = Opened(browser, folder / f"{page}.html")
    rows = "[...document.querySelectorAll('#panel-compare tbody tr')].map(r => [r.cells[0].textContent, r.className])"
    marks = dict(report.value(rows))
    programs = (CompiledProgram.load(folder / f"{name}.npubin") for name in names)
    a, b = ({call.kernel for call in program.kernels} for program in programs)
    assert a ^ b
    assert {kernel for kernel in a | b if marks[kernel] == "gone"} == a - b
    assert {kernel for kernel in a | b if marks[kernel] == "fresh"} == b - a
    report.context.close()
    assert report.problems == []


@pytest.mark.slow
def test_a_language_model_fits_in_five_megabytes(browser: Any, tmp_path: Path) -> None:
    ir = qwen_step(1)
    stages = stage_graphs(trace_stages(ir))
    size = write_page(tmp_path / "qwen.html", "Qwen", report_contents("Qwen", [compile(ir)], stages=stages))
    assert size < 5e6
    report = Opened(browser, tmp_path / "qwen.html")
    report.open("graph")
    assert report.page.inner_text("#node-count") == f"{len(ir['nodes']):,} nodes"
    labels = report.value("reportScene.vertices.filter(v => v.kind === 'group').map(v => v.label)")
    assert labels == ["model.layers.0 … model.layers.27 × 28"]
    assert report.problems == []
    report.context.close()


@pytest.mark.slow
def test_five_thousand_nodes_that_do_not_repeat(browser: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    g = IRBuilder("large")
    values = [g.input("x", 2, 4)]
    ops = ("relu", "sigmoid", "tanh", "neg", "exp")
    spec = ((2, 4), "float32")
    for _ in range(5000):
        near = values[max(0, len(values) - 1 - int(rng.integers(8)))]
        if rng.random() < 0.4:
            values.append(g("aten.add.Tensor", values[-1], near, out=spec))
        else:
            values.append(g(f"aten.{ops[rng.integers(5)]}.default", near, out=spec))
    ir = g.output(values[-1]).ir()
    stages = stage_graphs(trace_stages(ir))
    write_page(tmp_path / "large.html", "large", report_contents("large", [compile(ir)], stages=stages))
    report = Opened(browser, tmp_path / "large.html")
    report.open("graph")
    assert report.page.inner_text("#node-count") == "5,000 nodes"
    report.page.click("text=Open all")
    assert report.value("reportScene.vertices.filter(v => v.kind === 'node').length") == 5000
    assert overlapping(report.value("reportScene.vertices.map(v => [v.x, v.y, v.width, v.height])")) == []
    last = ir["nodes"][-1]["name"]
    report.page.fill("#search", last)
    report.page.press("#search", "Enter")
    assert report.page.inner_text("#selected-name") == last
    report.page.focus("#graph-canvas")
    for key in ("ArrowUp", "0", "+"):
        report.page.keyboard.press(key)
    for tab in ("memory", "roofline", "kernels"):
        report.open(tab)
    assert report.problems == []
    report.context.close()
