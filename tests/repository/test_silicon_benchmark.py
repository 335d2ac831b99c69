"""Simulated chips against silicon: a few rows of the sets whose licence allows it, through the command's own path.

Figures: SCALE-Sim and SCALE-Sim-validation (MIT), tenstorrent/tt-metal, tech_reports/GEMM_FLOPS (Apache-2.0).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.silicon import __main__ as silicon
from benchmarks.silicon.graphs import (
    IR,
    attention,
    erf_ffn,
    gated_ffn,
    gemm,
    integer_convolution,
    materialised_attention,
)
from benchmarks.silicon.page import document
from benchmarks.silicon.rows import Row, read
from benchmarks.silicon.runs import chip_of, fit, fitting_rows, run, summary
from npu_compiler import CompileOptions, compile
from npu_compiler.program.target import OpLevelTarget

FILES = {
    "tpu_v6e_gemm.csv": """\
m,n,k,value,scope
5073,2038,4403,128.1085,fusion span only (operand copies excluded)
5278,2631,3323,111.9539,fusion span only (operand copies excluded)
3272,3713,4610,156.5641,fusion span only (operand copies excluded)
3996,3511,4566,173.0480,fusion span only (operand copies excluded)
38,257,3229,2.0043,fusion span only (operand copies excluded)
""",
    "tpu_v6e_ffn_attention.csv": "op,tokens,value\n",
    "tpu_v4_gemm_fp16.csv": """\
m,n,k,value
2560,2560,2048,218.4259
3584,3584,3584,618.4432
2560,3072,3072,355.9636
4096,1536,3584,302.0987
""",
    "tenstorrent_gemm.csv": """\
chip,m,n,k,dtype,math_fidelity,config,derived_device_cycles
tenstorrent-wormhole-n150,3072,3072,3072,bfloat16,HiFi4,tuned,957403
tenstorrent-wormhole-n150,3072,4096,4096,bfloat16,HiFi2,tuned,1047319
tenstorrent-wormhole-n150,2048,2048,2048,bfloat8_b,LoFi,tuned,1
""",
    "rk3588_yolov5s_layers.csv": "layer,op,c_in,h_in,w_in,c_out,h_out,w_out,r,stride,value\n",
    "end_to_end_models.csv": "chip,model,input,dtype,batch,value\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_chips_are_near_the_silicon_that_they_are_named_after(folder: Path) -> None:
    rows = [row for row in read(folder) if row.us >= 10]
    assert len(rows) == 10 and {row.chip for row in rows} == {"tpu-v6e", "tpu-v4", "wormhole-n150"}
    outcomes = [run(row) for row in rows]
    assert summary(outcomes)[0] < 0.1
    assert max(abs(each.error) for each in outcomes) < 0.25, [(each.row.name, each.error) for each in outcomes]


def test_the_command_writes_the_page_and_the_plots(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figure = tmp_path / "page.md", tmp_path / "figure.png"
    wanted = ["--set", "Tenstorrent GEMM, tuned", "--rows", "--processes", "1"]
    assert silicon.main([str(folder), *wanted, "--page", str(page), "--figure", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Tenstorrent GEMM, tuned: 2 rows, median ")
    assert "wormhole-n150 3072x3072x3072 HiFi4: 957.4 us, simulated " in printed
    assert "| Tenstorrent GEMM, tuned | 2 | " in page.read_text() and figure.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        silicon.main([str(folder), "--set", "no such set"])


def test_a_fit_moves_numbers_until_the_error_is_least(folder: Path) -> None:
    row = next(row for row in read(folder) if row.chip == "tpu-v4")
    slower = Row(row.group, row.chip, row.name, row.graph, row.dtype, 1.5 * run(row).us)
    numbers, least = fit([slower])
    assert set(numbers) == {"launch.cost_us", "dram.efficiency", "matrix.efficiency"}
    assert least < 0.02 < abs(run(slower).error)
    assert numbers["launch.cost_us"] > chip_of(row).launch.cost_us


def test_numbers_are_fitted_on_every_third_row() -> None:
    rows = [Row("set", "tpu-v4", str(number), lambda: gemm(1, 1, 1), "float16", 9.0 + number) for number in range(8)]
    assert [row.name for row in fitting_rows(rows)] == ["1", "4", "7"]


@pytest.mark.parametrize(
    ("graph", "kernels", "unfused"),
    [
        (gated_ffn(8, 16, 32), ["matmul_kernel", "silu_mul_broadcast_kernel", "matmul_kernel"], ()),
        (erf_ffn(8, 16, 32), ["matmul_kernel", "matmul_kernel"], ()),
        (attention(4, 2, 8, 16, 16, True), ["attention_kernel"], ()),
        (materialised_attention(4, 8, 8, 16), ["batched_matmul_kernel", "batched_matmul_kernel"], ("attention",)),
    ],
)
def test_graphs_become_the_kernels_that_were_measured(graph: IR, kernels: list[str], unfused: tuple[str, ...]) -> None:
    outcome = run(Row("set", "tpu-v6e", "name", lambda: graph, "bfloat16", 10.0, unfused=unfused))
    ran = [call.kernel for call in outcome.result.calls]
    assert [name for name in ran if name in kernels] == kernels


def test_scores_are_float32_between_the_products_of_an_encoders_attention() -> None:
    options = CompileOptions(disabled_fusions=("attention",))
    program = compile(materialised_attention(4, 8, 8, 16), OpLevelTarget(), options)
    scores, softmax, values = program.plan.calls
    views = (scores.inputs[0], scores.outputs[0], softmax.outputs[0], values.outputs[0])
    assert [view.dtype for view in views] == ["bfloat16", "float32", "bfloat16", "bfloat16"]


def test_of_a_layer_of_int8_only_its_own_kernel_is_timed() -> None:
    graph = integer_convolution((8, 12, 12), 16, 3, 1, 1, residual=True, relu=True)
    outcome = run(Row("set", "rk3588", "name", lambda: graph, "float16", 100.0, kernels="integer_"))
    own = [call for call in outcome.result.calls if call.kernel == "integer_conv2d_kernel"]
    assert len(own) == 1 < len(outcome.result.calls)
    assert outcome.us == pytest.approx(1e6 * outcome.result.chip.seconds(own[0].cycles))


def test_the_page_sums_up_sets_that_belong_together() -> None:
    rows = [
        Row(group, "tpu-v6e", group, partial(attention, 2, 2, size, size, 16, False), "bfloat16", float(size))
        for group in ("v6e attention", "v6e paged attention")
        for size in (64, 512)
    ]
    outcomes = [run(row) for row in rows]
    text = document({"v6e attention": outcomes[:2], "v6e paged attention": outcomes[2:]})
    assert "| v6e attention, both | 4 |" in text
