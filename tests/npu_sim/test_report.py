"""The data of reports: it is what the compiler and the program say, and the page holds it whole."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ir_builder import IRBuilder
from tiny_llms import save_tiny
from typer.testing import CliRunner, Result

from npu_compiler import CompiledProgram, CompileOptions, compile, partition, trace_stages
from npu_compiler.fusion_patterns import FUSIONS
from npu_compiler.graph.printer import tensor_type
from npu_compiler.graph.reader import read_ir
from npu_compiler.program.describe import padding_by_buffer, summary
from npu_model import load_chip, simulate
from npu_runtime.hardware import Ceilings
from npu_sim.cli import app
from npu_sim.report import (
    Roof,
    StageGraphs,
    arena_map,
    compare_programs,
    diff_contents,
    numerics_contents,
    program_facts,
    render_page,
    report_contents,
    stage_graphs,
)
from npu_sim.report.page import LIBRARIES, LICENCES, SCRIPTS, pack, unpack
from npu_sim.report.stages import replaced_nodes

ASSETS = Path(__file__).parents[2] / "npu_sim" / "report" / "assets"


def network(layers: int = 3) -> dict[str, Any]:
    """Layers of a norm written out, a linear and a SiLU written out, each with a residual, and a linear at the end."""
    g = IRBuilder("layers")
    x = g.input("x", 4, 32)
    for index in range(layers):
        mean = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", x, 2), [-1], True)
        unit = g("aten.mul.Tensor", x, g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6)))
        normal = g("aten.mul.Tensor", g.weight(f"layers.{index}.norm.weight", 32), unit)
        up = g("aten.linear.default", normal, g.weight(f"layers.{index}.up.weight", 32, 32))
        swish = g("aten.mul.Tensor", up, g("aten.sigmoid.default", up))
        x = g("aten.add.Tensor", x, swish)
    return g.output(g("aten.linear.default", x, g.weight("head.weight", 8, 32), name="head")).ir()


def convolutions() -> dict[str, Any]:
    """Two convolutions with padded channels, and a long residual around them."""
    g = IRBuilder("convolutions")
    x = g.input("x", 1, 3, 16, 16)
    first = g("aten.conv2d.default", x, g.weight("a", 12, 3, 3, 3), None, [1, 1], [1, 1])
    big = g("aten.conv2d.default", first, g.weight("b", 40, 12, 3, 3), None, [1, 1], [1, 1])
    small = g("aten.conv2d.default", big, g.weight("c", 12, 40, 3, 3), None, [1, 1], [1, 1])
    return g.output(g("aten.add.Tensor", g("aten.tanh.default", small), first)).ir()


def stages_of(ir: dict[str, Any]) -> dict[str, Any]:
    return stage_graphs(trace_stages(ir)).to_dict()


def facts_of(program: CompiledProgram) -> dict[str, Any]:
    return {**program_facts(program), "measured": None, "simulated": None}


def test_stages_can_be_rebuilt_from_what_the_page_holds() -> None:
    data = stages_of(network())
    by_stage = {stage: index for index, graph in enumerate(data["graphs"]) for stage in graph["stages"]}
    types: dict[str, str] = {}
    known: list[dict[str, str]] = []
    for graph in data["graphs"]:
        types |= {tensor: data["types"][number] for tensor, number in graph["types"].items()}
        known.append(dict(types))
    last = dict(trace_stages(network()))
    assert by_stage.keys() == last.keys()
    for name in ("read", "fuse", "assign_layout"):
        held = data["graphs"][by_stage[name]]
        nodes = [data["nodes"][number] for number in held["nodes"]]
        assert [(n[0], n[1], n[2], n[3]) for n in nodes] == [
            (n.name, n.base, list(n.inputs), list(n.outputs)) for n in last[name].nodes
        ]
        for node in last[name].nodes:
            for out in node.outputs:
                assert known[by_stage[name]][out] == tensor_type(last[name].tensors[out])


def test_a_fused_node_names_the_nodes_that_it_replaces() -> None:
    g = IRBuilder()
    up = g("aten.linear.default", g.input("x", 2, 8), g.weight("w", 8, 8), name="up")
    g.output(g("aten.mul.Tensor", up, g("aten.sigmoid.default", up, name="gate"), name="swish"))
    stages = dict(trace_stages(g.ir()))
    made = replaced_nodes(stages["read"], stages["assign_layout"])
    assert [name for names in made.values() for name in names] == ["up", "gate", "swish"]
    assert replaced_nodes(stages["read"], stages["read"]) == {}


def test_every_node_that_disappears_in_fusion_is_in_what_replaces_it() -> None:
    stages = dict(trace_stages(network()))
    before, after = stages["mark_quantized_weights"], stages["eliminate_dead_code"]
    gone = {node.name for node in before.nodes} - {node.name for node in after.nodes}
    named = {name for names in replaced_nodes(before, after).values() for name in names}
    assert gone and gone <= named


def test_layers_that_repeat_are_found_and_named_by_their_weights() -> None:
    graph = stages_of(network(5))["graphs"][0]
    ((start, period, count, labels),) = graph["runs"]
    assert (period, count) == (10, 5) and start + period * count <= len(graph["nodes"])
    assert labels == [f"layers.{index}" for index in range(5)]


def test_a_program_adds_up() -> None:
    program = compile(convolutions())
    facts, totals = program_facts(program, [0.5] * len(program.kernels)), summary(program.plan)
    assert sum(call["flops"] for call in facts["calls"]) == totals["FLOPs"]
    assert sum(call["bytes"] for call in facts["calls"]) == totals["bytes moved"]
    assert sum(row["waste"] for row in facts["padding"]) == totals["padding waste bytes"] > 0
    assert {row["name"]: row["waste"] for row in facts["padding"]} == padding_by_buffer(program.plan)
    assert [call["seconds"] for call in facts["calls"]] == [0.5] * len(program.kernels)


def test_data_flow_leads_from_each_buffer_to_its_readers() -> None:
    program = compile(convolutions())
    written: dict[str, int] = {}
    for index, (call, sources) in enumerate(zip(program.kernels, program_facts(program)["flow"], strict=True)):
        assert sources == sorted({written[v.buffer] for v in (*call.inputs, *call.outputs) if v.buffer in written})
        written |= {view.buffer: index for view in call.outputs}
    assert len(written) > 1


@pytest.mark.parametrize("disabled", [(), tuple(FUSIONS)], ids=["fused", "plain"])
@pytest.mark.parametrize("make", [network, convolutions])
def test_the_peak_is_the_most_that_is_in_use_and_each_holder_is_in_use_then(make: Any, disabled: Any) -> None:
    plan = compile(make(), options=CompileOptions(disabled_fusions=disabled)).plan
    arena = arena_map(plan)
    in_use = bytes_in_use(arena["buffers"], len(plan.calls))
    assert arena["live"] == in_use and arena["peak_bytes"] == max(in_use) == in_use[arena["peak"]] <= plan.arena_bytes
    assert sum(holder["size"] for holder in arena["holders"]) >= arena["peak_bytes"] > 0
    for holder in arena["holders"]:
        others = [b for b in arena["buffers"] if b["name"] != holder["name"]]
        if holder["idle"]:
            parts = ((holder["first"], holder["idle"][0] - 1), (holder["idle"][1] + 1, holder["last"]))
            own = next(b for b in arena["buffers"] if b["name"] == holder["name"])
            others += [{**own, "first": first, "last": last} for first, last in parts]
        assert holder["remaining"] == max(bytes_in_use(others, len(plan.calls)))


def bytes_in_use(buffers: list[dict[str, Any]], calls: int) -> list[int]:
    """Return the number of arena bytes in use during each call, counted byte by byte."""
    counts = []
    for call in range(calls):
        used = np.zeros(max((b["offset"] + b["size"] for b in buffers), default=0), bool)
        for buffer in buffers:
            if buffer["first"] <= call <= buffer["last"]:
                used[buffer["offset"] : buffer["offset"] + buffer["size"]] = True
        counts.append(int(used.sum()))
    return counts


def test_a_buffer_that_waits_through_the_peak_is_idle_there() -> None:
    plan = compile(convolutions(), options=CompileOptions(compute_dtype="float32")).plan
    arena = arena_map(plan)
    idle = [holder for holder in arena["holders"] if holder["idle"]]
    assert idle, arena
    for holder in idle:
        uses = next(b["uses"] for b in arena["buffers"] if b["name"] == holder["name"])
        assert not any(holder["idle"][0] <= call <= holder["idle"][1] for call in uses)
        assert holder["idle"][0] <= arena["peak"] <= holder["idle"][1]


def test_a_program_is_like_itself() -> None:
    facts = facts_of(compile(network()))
    same = compare_programs(facts, facts)
    assert all(row["a"] == row["b"] for row in same["totals"]) and same["nodes"] == []
    assert all(row["count_a"] == row["count_b"] for row in same["kernels"])


def test_what_a_fusion_saves_is_seen() -> None:
    fused, plain = (compile(network(), options=CompileOptions(disabled_fusions=names)) for names in ((), FUSIONS))
    found = compare_programs(facts_of(fused), facts_of(plain))
    launches = next(row for row in found["totals"] if row["name"] == "kernel launches")
    assert (launches["a"], launches["b"]) == (len(fused.kernels), len(plain.kernels))
    for side, program in (("a", fused), ("b", plain)):
        assert sum(row[f"count_{side}"] for row in found["kernels"]) == len(program.kernels)
        assert sum(row[f"bytes_{side}"] for row in found["kernels"]) == summary(program.plan)["bytes moved"]
        told = {row["node"]: row[side] for row in found["nodes"]}
        for node in told:
            assert told[node] == [call.kernel for call in program.kernels if call.node == node]


def test_partitions_are_told_with_their_reasons() -> None:
    g = IRBuilder("mixed")
    inverse = g("aten.logcumsumexp.default", g("aten.relu.default", g.input("x", 4, 8)), -1, name="inverse")
    g.output(g("aten.tanh.default", inverse))
    plan = partition(g.ir())
    stages = StageGraphs()
    stages.add("read", read_ir(g.ir()))
    stages.add_partitions(plan)
    contents = report_contents("mixed", [compile(plan.partitions[0].graph)], stages=stages, partitions=plan)
    assert [part["device"] for part in contents["partition"]] == ["npu", "CPU", "npu"]
    assert contents["reasons"].keys() == {"inverse"}
    parts = contents["stages"]["graphs"][-1]["parts"]
    assert parts == [[part.device, [node.name for node in part.graph.nodes]] for part in plan.partitions]
    assert contents["stages"]["graphs"][0]["parts"] == []


def page_of(program: CompiledProgram, title: str = "net") -> tuple[str, dict[str, Any]]:
    contents = report_contents(title, [program], stages=stage_graphs(trace_stages(network())))
    return render_page(title, contents), contents


def test_the_page_holds_the_data_and_allows_its_own_scripts_only() -> None:
    page, contents = page_of(compile(network()))
    packed = re.search(r'id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert packed and unpack(packed[1]) == json.loads(json.dumps(contents))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    inline = re.findall(r"<script>(.*?)</script>", page, re.DOTALL) + re.findall(
        r"<style>(.*?)</style>", page, re.DOTALL
    )
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline}
    assert set(re.findall(r"'sha256-([^']+)'", policy[1])) == hashes and len(inline) == len(LIBRARIES) + 2
    assert not re.search(r"<(link|img|iframe)\b|\ssrc=|sourceMappingURL", page.split('id="licences"')[0])


def test_a_title_cannot_become_markup() -> None:
    page, _ = page_of(compile(network()), "</title><script>alert(1)</script>")
    assert "<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>" in page and page.count("alert(1)") == 1


def test_each_file_of_the_page_is_used_and_each_library_has_its_licence() -> None:
    files = {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.suffix in (".js", ".txt")}
    assert files == {*SCRIPTS, *LIBRARIES, *LICENCES}
    assert len(LICENCES) == len(LIBRARIES)


def test_errors_that_are_not_finite_can_be_shown() -> None:
    from npu_sim.verify import Culprit, OutputReport, VerifyReport

    outputs = (OutputReport("y", None, float("nan"), 0.5, ("it is wrong",)),)
    kernels = [Culprit("node", "op", "kernel", "y", ("node",), float("inf"))]
    held = unpack(pack(numerics_contents(VerifyReport("float16", outputs), kernels, 3)))
    assert held["outputs"][0]["rms_error"] is None and held["outputs"][0]["problems"] == ["it is wrong"]
    assert held["kernels"][0]["error"] is None and not held["passed"]


def test_numbers_without_a_json_form_are_refused() -> None:
    with pytest.raises(ValueError):
        render_page("x", {"time": float("nan")})


def test_a_comparison_holds_both_programs() -> None:
    a, b = (compile(network(), options=CompileOptions(compute_dtype=dtype)) for dtype in ("float16", "float32"))
    contents = diff_contents(("a", "b"), (a, b), (None, None))
    assert [program["dtype"] for program in contents["programs"]] == ["float16", "float32"]
    assert not contents["is_measured"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from safetensors.numpy import save_file

    monkeypatch.chdir(tmp_path)
    Path("net.json").write_text(json.dumps(network()))
    compile(network()).save("net.npubin")
    compile(network(), options=CompileOptions(disabled_fusions=FUSIONS)).save("plain.npubin")
    rng = np.random.default_rng(3)
    weights = compile(network()).weight_specs.values()
    shapes = {key: shape for spec in weights for key, shape in spec.source_shapes.items()}
    save_file({k: rng.standard_normal(s).astype(np.float32) / 4 for k, s in shapes.items()}, "net.safetensors")
    return tmp_path


def npu_sim(*args: str) -> Result:
    return CliRunner().invoke(app, args, prog_name="npu-sim")


def held(path: str) -> dict[str, Any]:
    packed = re.search(r'id="data">([^<]*)<', Path(path).read_text("utf-8"))
    assert packed
    contents: dict[str, Any] = unpack(packed[1])
    return contents


def test_a_device_has_a_roof_where_it_knows_its_rates() -> None:
    ceilings = Ceilings(3e10, {"float32": 1e11})
    assert Roof.of(ceilings, "float32") == Roof(3e10, 1e11, of_device=True)
    assert Roof.of(ceilings, "float16") is None, "whose rate the device does not know"
    assert Roof.of(Ceilings(), "float32") is None


@pytest.mark.parametrize("source", ["net.json", "net.npubin"])
def test_report_writes_one_file(folder: Path, source: str) -> None:
    done = npu_sim("report", source, "-o", "out.html", "--bandwidth", "100", "--flops", "2000", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["bytes"] == Path("out.html").stat().st_size and told["programs"][0]["measured"] is None
    contents = held("out.html")
    assert contents["roof"] == {"bandwidth": 1e11, "flops": 2e12, "of_device": False}
    assert len(contents["programs"][0]["calls"]) == len(CompiledProgram.load("net.npubin").kernels)
    assert (contents["stages"] is None) == (source == "net.npubin")


def test_report_measures_and_verifies_where_there_are_weights(folder: Path) -> None:
    args = ("-w", "net.safetensors", "--device", "cpu", "--no-tune", "--runs", "2", "--seed", "5", "--verify")
    done = npu_sim("report", "net.json", "-o", "out.html", *args)
    assert done.exit_code == 0, done.output
    contents = held("out.html")
    (program,) = contents["programs"]
    assert program["measured"]["runs"] == 2 and program["measured"]["run"] > 0
    assert all(call["seconds"] > 0 for call in program["calls"])
    numerics = contents["numerics"]
    assert numerics["passed"] and numerics["seed"] == 5
    assert {row["node"] for row in numerics["kernels"]} == {call["node"] for call in program["calls"]}
    assert all(0 <= row["error"] <= 1 for row in numerics["kernels"])


def test_report_of_a_model_that_needs_the_cpu_shows_its_partitions(folder: Path) -> None:
    g = IRBuilder("mixed")
    inverse = g("aten.logcumsumexp.default", g("aten.relu.default", g.input("x", 4, 8)), -1)
    Path("mixed.json").write_text(json.dumps(g.output(g("aten.tanh.default", inverse)).ir()))
    done = npu_sim("report", "mixed.json", "-o", "out.html", "--device", "cpu", "--no-tune")
    assert done.exit_code == 0 and "its kernels were not measured" in done.stderr
    assert [program["name"] for program in held("out.html")["programs"]] == ["mixed.npu0", "mixed.npu2"]


def test_diff_prints_totals_and_kernels(folder: Path) -> None:
    text = npu_sim("diff", "net.npubin", "plain.npubin").stdout
    counts = [len(CompiledProgram.load(f"{name}.npubin").kernels) for name in ("net", "plain")]
    assert re.search(rf"kernel launches +{counts[0]} +{counts[1]} +\+", text), text
    assert "nodes are computed by other kernels" in text
    again = npu_sim("diff", "net.json", "net.npubin").stdout
    assert "each node has the same kernels in both" in again


def test_diff_simulates_two_programs_on_one_chip_and_one_program_on_two(folder: Path) -> None:
    done = npu_sim("diff", "net.npubin", "plain.npubin", "--npu", "edge", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    totals = {row["name"]: row for row in told["totals"]}
    for side, name in (("a", "net"), ("b", "plain")):
        result = simulate(CompiledProgram.load(f"{name}.npubin"), load_chip("edge"))
        assert totals["simulated run"][side] == pytest.approx(result.seconds)
        assert totals["energy"][side] == pytest.approx(result.energy.total)
        assert sum(row[f"seconds_{side}"] for row in told["layers"]) == pytest.approx(result.seconds)
        assert sum(row[f"seconds_{side}"] for row in told["kernels"]) == pytest.approx(result.seconds)
        assert sum(row[f"joules_{side}"] or 0 for row in told["layers"]) == pytest.approx(result.energy.total)
    done = npu_sim("diff", "net.npubin", "--npu", "edge", "--npu", "phone", "-o", "out.html")
    assert done.exit_code == 0 and "simulated run" in done.stdout, done.output
    contents = held("out.html")
    assert contents["labels"] == ["net.npubin on edge", "net.npubin on phone"]
    assert [program["simulated"]["chip"] for program in contents["programs"]] == ["edge", "phone"]
    assert contents["nodes"] == []


def test_a_report_may_have_a_sweep(folder: Path) -> None:
    done = npu_sim("report", "net.npubin", "-o", "out.html", "--npu", "edge", "--sweep", "sram=512K..1M,arrays=1..2")
    assert done.exit_code == 0, done.output
    sweep = held("out.html")["sweep"]
    assert sweep["chip"] == "edge" and sweep["knobs"] == ["sram", "arrays"]
    settings = [(point["sram"], point["arrays"]) for point in sweep["points"]]
    assert settings == [(2**20, 2), (2**19, 1), (2**19, 2), (2**20, 1)], "the chip itself first, and once"
    run = simulate(CompiledProgram.load("net.npubin"), load_chip("edge"))
    assert sweep["points"][0]["latency_us"] == pytest.approx(1e6 * run.seconds)


def test_a_report_of_a_language_model_has_its_prefill_and_a_decode_step(folder: Path) -> None:
    save_tiny(folder / "tiny", "llama", "float32", num_hidden_layers=1, vocab_size=300, max_position_embeddings=64)
    done = npu_sim("report", "tiny", "-o", "out.html", "--npu", "edge")
    assert done.exit_code == 0 and "A prefill of 64 tokens, and a decode step." in done.stderr, done.output
    contents = held("out.html")
    assert [program["name"] for program in contents["programs"]] == ["prefill", "decode"]
    assert all(program["simulated"]["run"] > 0 for program in contents["programs"])


def test_diff_writes_html_and_json_and_measures(folder: Path) -> None:
    args = ("-w", "net.safetensors", "--device", "cpu", "--no-tune", "--runs", "1", "-o", "out.html", "--json")
    done = npu_sim("diff", "net.npubin", "plain.npubin", *args)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["is_measured"] and told["totals"][-1]["name"] == "run" and told["totals"][-1]["a"] > 0
    assert held("out.html")["totals"] == told["totals"]


def test_diff_of_a_partitioned_model_is_refused(folder: Path) -> None:
    g = IRBuilder("mixed")
    g.output(g("aten.logcumsumexp.default", g("aten.relu.default", g.input("x", 4, 8)), -1))
    Path("mixed.json").write_text(json.dumps(g.ir()))
    done = npu_sim("diff", "mixed.json", "net.npubin", "-o", "out.html")
    assert done.exit_code == 2 and "'mixed.json' needs partitions" in done.stderr and not Path("out.html").exists()


def test_a_report_that_cannot_be_made_leaves_nothing(folder: Path) -> None:
    Path("bad.json").write_text("{")
    Path("bad.npubin").write_bytes(b"NPUBIN")
    for source in ("bad.json", "bad.npubin"):
        done = npu_sim("report", source, "-o", "out.html")
        assert done.exit_code == 2 and done.stderr.startswith("error: "), done.stderr
    done = npu_sim("report", "net.json", "-o", "out.html", "--device", "cpu")
    assert done.exit_code == 2 and "give their file with --weights" in done.stderr
    assert not Path("out.html").exists()
