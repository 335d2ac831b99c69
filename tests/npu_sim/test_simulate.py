"""`npu-sim simulate`: text, JSON, files and language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from ir_builder import IRBuilder
from typer.testing import CliRunner

from npu_compiler import compile as compile_ir
from npu_sim.cli import app

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def npu_sim(*args: object) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="npu-sim")
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def ir() -> dict[str, Any]:
    g = IRBuilder("net")
    x = g("aten.linear.default", g.input("x", 64, 256), g.weight("a", 512, 256))
    g.output(g("aten.linear.default", g("aten.relu.default", x), g.weight("b", 256, 512)))
    return g.ir()


@pytest.fixture
def program(ir: dict[str, Any], tmp_path: Path) -> Path:
    compile_ir(ir).save(tmp_path / "net.npubin")
    return tmp_path / "net.npubin"


def test_a_program_is_described(program: Path) -> None:
    text = npu_sim("simulate", program, "--npu", "edge")
    first = text.splitlines()[0]
    assert first.startswith("net on edge: ") and "the roofline allows" in first
    assert all(word in text for word in ("busy", "stalls", "DRAM", "SRAM", "energy", "matmul_kernel"))


def test_dtypes_engines_and_slow_products_are_named(program: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", str(program), "--npu", "edge"], prog_name="npu-sim")
    assert "  products float16 100.0%" in done.stdout and "matrix  matmul_kernel" in done.stdout
    assert "warning: edge multiplies float16 at 0.125 times the rate of int4" in done.stderr


def test_a_chip_without_an_energy_table_has_no_line_of_energy(program: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "npu_model/chip/chips/edge.toml").read_text()
    (tmp_path / "chip.toml").write_text(text[: text.index("[energy]")])
    assert "energy" not in npu_sim("simulate", program, "--npu", tmp_path / "chip.toml")


def test_weights_are_measured_and_their_forms_named(program: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "npu_model/chip/chips/edge.toml").read_text()
    table = '[sparsity]\npatterns = ["2:4"]\ndecoder_bytes_per_cycle = 64\nskips_zeros = true\n'
    (tmp_path / "chip.toml").write_text(text + table)
    mask = np.tile(np.array([1, 0, 0, 1], np.float32), 64)
    np.savez(tmp_path / "net.npz", a=np.ones((512, 256), np.float32) * mask, b=np.ones((256, 512), np.float32))
    args = ("simulate", program, "--npu", tmp_path / "chip.toml", "--weights", tmp_path / "net.npz")
    assert "weights  1 2:4 (144.0 KiB), 1 as they are (256.0 KiB)" in npu_sim(*args)
    found, dense = (json.loads(npu_sim(*own, "--json")) for own in (args, args[:4]))
    assert [own["form"] for own in found["weights"]] == ["2:4", "as it is"]
    assert found["macs"] == 0.75 * dense["macs"] and found["latency_us"] < dense["latency_us"]
    for more in (["--sweep", "sram=1M"], ["--with", program]):
        refused = CliRunner().invoke(app, [str(arg) for arg in (*args, *more)], prog_name="npu-sim")
        assert refused.exit_code == 2 and "--weights is for one run of a program" in refused.output


def test_json_has_every_call_and_adds_up(program: Path) -> None:
    found = json.loads(npu_sim("simulate", program, "--npu", "phone", "--json"))
    assert found["chip"] == "phone" and len(found["calls"]) == 2
    assert sum(call["own_us"] for call in found["calls"]) == pytest.approx(found["latency_us"])
    energy = found["energy_uj"]
    assert sum(value for name, value in energy.items() if name != "total") == pytest.approx(energy["total"])


def test_ir_is_compiled_first_as_asked(ir: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text(json.dumps(ir))
    plain, narrow = (
        json.loads(npu_sim("simulate", tmp_path / "net.json", "--npu", "edge", "--json", *options))
        for options in ([], ["--quantization", "int8"])
    )
    weights = 2 * 512 * 256
    whole, bytes_ = (run["dram_bytes"] + run["kept_weight_bytes"] for run in (plain, narrow))
    assert whole >= 2 * weights and 0.8 * weights < whole - bytes_ < weights


def test_a_trace_and_a_picture_are_written(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    npu_sim("simulate", program, "--npu", "edge", "--trace", tmp_path / "t.json", "--picture", tmp_path / "p.svg")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_a_sweep_prints_and_writes_a_table(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["--csv", tmp_path / "s.csv", "--picture", tmp_path / "s.png"]
    text = npu_sim("simulate", program, "--npu", "edge", "--sweep", "sram=256K..512K,arrays=1..2", *files)
    assert (tmp_path / "s.csv").read_text() == text and len(text.splitlines()) == 5
    assert text.splitlines()[1].startswith("262144,1,")
    assert (tmp_path / "s.png").stat().st_size > 1000
    rows = json.loads(npu_sim("simulate", program, "--npu", "edge", "--sweep", "arrays=1..2", "--json"))["chips"]
    assert [row["arrays"] for row in rows] == [1, 2]


def test_a_language_model_needs_only_its_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    command = ["simulate", tmp_path / "model", "--npu", "phone", "--tokens", 16]
    found = json.loads(npu_sim(*command, "--json"))
    assert found["time_to_first_token_us"] == found["prefill"]["latency_us"]
    assert found["tokens_per_second"] == pytest.approx(1e6 / found["decode"]["latency_us"])
    assert found["prefill"]["macs"] > 10 * found["decode"]["macs"]
    assert "time to first token:" in npu_sim(*command).splitlines()[-1]


def test_a_prompt_beyond_the_cache_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = CliRunner().invoke(app, ["simulate", str(tmp_path), "--npu", "edge", "--tokens", "65"], prog_name="npu-sim")
    assert done.exit_code == 2 and "a prompt of 65 tokens (--tokens) does not fit a KV cache of 64" in done.stderr


def test_a_program_for_another_target_is_refused(ir: dict[str, Any], tmp_path: Path) -> None:
    from cuda_compiler import CUDACodegenTarget

    compile_ir(ir, CUDACodegenTarget()).save(tmp_path / "gpu.npubin")
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "gpu.npubin"), "--npu", "edge"], prog_name="npu-sim")
    assert done.exit_code == 2 and "--target op_level" in done.stderr


def two_cores(tmp_path: Path) -> Path:
    """A chip file: edge with two cores."""
    from importlib.resources import files

    text = (files("npu_model.chip") / "chips" / "edge.toml").read_text("utf-8")
    path = tmp_path / "two.toml"
    path.write_text(text + "\n[cores]\ncount = 2\n\n[cores.network]\nbandwidth_gb_s = 32\nlatency_ns = 5\n")
    return path


def test_engines_of_cores_and_their_network_are_shown(program: Path, tmp_path: Path) -> None:
    text = npu_sim("simulate", program, "--npu", two_cores(tmp_path))
    assert "core0.matrix" in text and "core1.matrix" in text and "  network  " in text
    data = json.loads(npu_sim("simulate", program, "--npu", two_cores(tmp_path), "--json"))
    assert data["network_bytes"] >= 0 and data["busy_us"]["core1.matrix"] > 0


@pytest.mark.parametrize("share", drawn(["time", "cores", None], 1 / 3))
def test_models_that_share_a_chip_are_held_against_their_runs_alone(
    program: Path, ir: dict[str, Any], tmp_path: Path, share: str | None
) -> None:
    (tmp_path / "other.json").write_text(json.dumps({**ir, "model_name": "other"}))
    trace = tmp_path / "trace.json"
    options = ["--with", tmp_path / "other.json", *(["--share", share] if share else [])]
    command = ["simulate", program, "--npu", two_cores(tmp_path), *options]
    text = npu_sim(*command, "--trace", trace)
    assert text.startswith(f"2 programs share edge by {share or 'cores'}: all have ended after ")
    data = json.loads(npu_sim(*command, "--json"))
    assert [tenant["program"] for tenant in data["tenants"]] == ["net", "other"]
    assert data["latency_us"] == max(tenant["latency_us"] for tenant in data["tenants"])
    assert all(tenant["slowdown"] >= 1 for tenant in data["tenants"])
    assert "core1.matrix" in trace.read_text()
