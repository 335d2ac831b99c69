"""Output of the CPU benchmark, and its choice of contenders."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu.contender import NEEDED, Contender, prepare
from benchmarks.cpu.llama import write_gguf
from benchmarks.cpu.machine import Rates, level, limit_threads, usable_cores
from benchmarks.cpu.models import NETWORKS
from benchmarks.cpu.network import NetworkContenders
from benchmarks.cpu.page import LANGUAGE_TASKS, QUANTIZED_TASKS, best, document, draw, ratio
from benchmarks.figures import Figure, Run, load_run
from benchmarks.timing import LEAST_ROUNDS, interleave

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
MACHINE: dict[str, Any] = {
    "cpu": "X1 9000",
    "level": "avx2",
    "threads": 2,
    "read_gb_per_s": 20.04,
    "float32_gflop_per_s": 118.7,
    "versions": {"torch": "2.13", "openvino": "2026.4"},
    "date": "2026-01-02",
}


def figure(task: str, model: str, case: dict[str, int], ms: dict[str, float], **errors: float) -> Figure:
    known = {name: errors.get(name.split()[0].replace("-", "_").replace(".", "_"), 0.01) for name in ms}
    return Figure(task, model, case, ms, 5.0, "bytes", errors=known)


@pytest.fixture
def run() -> Run:
    decode = {"npu-sim bfloat16": 16.0, "npu-sim float32": 30.0, "llama.cpp BF16": 20.0, "llama.cpp Q8_0": 10.0}
    network = {"npu-sim bfloat16": 50.0, "npu-sim float32": 40.0, "PyTorch eager float32": 90.0, "OpenVINO float32": 60}
    figures = [
        figure("decode", "Small", {"cache": 512, "position": 128}, decode),
        figure("resnet50", "ResNet-50", {"batch": 1}, network),
    ]
    return Run(dict(MACHINE), figures)


def test_quantized_weights_do_not_make_a_best_peer(run: Run) -> None:
    assert best(run.figures[0], ours=False) == ("llama.cpp BF16", 20.0)
    assert ratio(run.figures[0]) == 1.25


def test_weights_in_few_bits_have_a_table_of_their_own(run: Run) -> None:
    times = {"npu-sim": 5.0, "llama.cpp": 10.0}
    figures = [
        figure("q4_1", "Small Q4_1", {"cache": 1024, "position": 128}, times),
        figure("q4_1", "Small Q4_1", {"tokens": 512}, times),
    ]
    page = document([replace(run, figures=[*run.figures, *figures])])
    assert page.count("| X1 9000, avx2, 2 threads: ms |") == 3
    assert "| Small Q4_1 decode | **5.000** | 10.0 | 5.000 | llama.cpp | 2.00 |" in page
    assert "| Small Q4_1 prefill of 512 | **5.000** | 10.0 | 5.000 | llama.cpp | 2.00 |" in page


def test_a_wrong_contender_is_marked_and_does_not_count(run: Run) -> None:
    errors = {**run.figures[1].errors, "OpenVINO float32": 0.2, "npu-sim float32": float("nan")}
    wrong = replace(run.figures[1], errors=errors)
    assert best(wrong, ours=False) == ("PyTorch eager float32", 90.0)
    assert best(wrong, ours=True) == ("npu-sim bfloat16", 50.0)
    page = document([replace(run, figures=[wrong])])
    assert "| ResNet-50, batch 1 | **50.0** | 40.0 (wrong) | 90.0 | 60.0 (wrong) | 5.000 |" in page


def test_the_page_names_machine_and_level_in_each_table(run: Run) -> None:
    other = replace(run, machine={**MACHINE, "cpu": "Y2", "level": "amx", "threads": 16})
    page = document([run, other])
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["X1 9000, avx2, 2 threads", "Y2, amx, 16 threads"]
    for heading in headings:
        assert page.count(f"| {heading}: ms |") == 2
    assert "| Small decode | **16.0** | 30.0 | 20.0 | 10.0 | 5.000 | llama.cpp BF16 | 1.25 |" in page
    assert "| ResNet-50, batch 1 | 50.0 | **40.0** | 90.0 | 60.0 | 5.000 | OpenVINO float32 | 1.50 |" in page
    assert "reads 20.0 GB/s" in page and "at 119 GFLOP/s" in page and "openvino 2026.4" in page
    assert "<!-- chart: cpu -->" in page


def test_a_page_is_drawn_from_saved_results_without_measuring(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    run.save(tmp_path / "a.json")
    page, chart = tmp_path / "cpu.md", tmp_path / "cpu.svg"
    options = ["--pages-from", str(tmp_path / "a.json"), "--document", str(page), "--chart", str(chart)]
    monkeypatch.setattr("sys.argv", ["cpu", *options])
    assert cpu.main() == 0
    assert page.read_text(encoding="utf-8") == document([run])
    draw([run], tmp_path / "again.svg")
    assert chart.read_bytes().startswith(b"<?xml") and chart.read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_the_page_in_docs_is_that_of_its_figures() -> None:
    files = sorted(MEASUREMENTS.glob("cpu-*.json"))
    page = (MEASUREMENTS / "cpu.md").read_text(encoding="utf-8")
    assert page == document([load_run(path) for path in files]), (
        "run python -m benchmarks.cpu --pages-from docs/measurements/cpu-*.json --document docs/measurements/cpu.md"
    )


def test_results_of_another_machine_are_not_merged(run: Run) -> None:
    for key, value in {"level": "amx", "threads": 1, "versions": {"torch": "2.12"}}.items():
        with pytest.raises(ValueError, match=f"measured with another {key}"):
            run.merged(replace(run, machine={**MACHINE, key: value}))


def test_all_tasks_are_known_to_what_measures_them() -> None:
    assert tuple(NETWORKS) == cpu.NETWORK_TASKS
    assert {*LANGUAGE_TASKS, *QUANTIZED_TASKS} == set(cpu.TASKS) - set(NETWORKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "decode,nothing"], "unknown task nothing"),
        (["--threads", "100000"], f"cannot use 100000 threads: this process may use {usable_cores()} cores"),
    ],
)
def test_what_cannot_be_done_is_said(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cpu", *options])
    with pytest.raises(SystemExit):
        cpu.main()
    assert message in capsys.readouterr().err


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot use 0 threads"):
        limit_threads(0)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("sse4_2", "baseline"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512vl", "avx512f"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512_bf16", "avx512_bf16"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512_bf16 amx_tile amx_bf16", "amx"),
        ("fp asimd asimddp bf16 i8mm", "neon, bf16"),
    ],
)
def test_the_level_is_the_highest_that_the_flags_have(flags: str, name: str) -> None:
    assert level(set(flags.split())) == name


def test_floors_are_work_over_rates() -> None:
    rates = Rates(bandwidth=20e9, matrix=100e9)
    assert rates.reading(10**9).seconds == 0.05
    assert rates.multiplying(5 * 10**9).seconds == 0.05
    assert rates.reading(10**9).says == "1000 MB of weights at 20.0 GB/s"


def _contender(value: float) -> Contender:
    return Contender(lambda: value, lambda: np.array([value]))


def test_a_peer_that_is_not_installed_or_fails_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Contender:
        raise RuntimeError("no such op\nand more")

    monkeypatch.setitem(NEEDED, "OpenVINO", ("no_such_package",))
    factories: dict[str, Callable[[], Contender]] = {
        "npu-sim float32": lambda: _contender(1.0),
        "OpenVINO float32": lambda: _contender(2.0),
        "torch.compile float32": broken,
        "PyTorch eager float32": lambda: _contender(3.0),
    }
    made = prepare(factories, lambda name: not name.startswith("PyTorch"))
    assert [(name, output.tolist()) for name, (_, output) in made.items()] == [("npu-sim float32", [1.0])]
    assert capsys.readouterr().out.splitlines() == [
        "OpenVINO float32 is left out: no_such_package not installed (the extra 'peers')",
        "torch.compile float32 is left out: no such op",
    ]


def test_rounds_end_at_the_limit_but_not_before_the_least_number() -> None:
    runs = {"a": 0, "b": 0}

    def timer(name: str) -> Callable[[], float]:
        def count() -> float:
            runs[name] += 1
            time.sleep(0.001)
            return float(runs[name])

        return count

    results = interleave({name: timer(name) for name in runs}, rounds=50, warmup=1, limit=0.0)
    assert runs == {"a": 1 + LEAST_ROUNDS, "b": 1 + LEAST_ROUNDS}
    assert results["a"].median == 3.0 and results["b"].best == 2.0


def test_ours_and_eager_pytorch_agree_on_a_network(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    contenders = NetworkContenders(nn.Sequential(nn.Linear(8, 4), nn.GELU()).eval(), torch.randn(3, 8), 1, tmp_path)
    chosen = prepare(contenders.factories(), lambda name: name.startswith(("npu-sim", "PyTorch")))
    reference = contenders.reference()
    assert set(chosen) - {"PyTorch eager bfloat16"} == {
        "npu-sim bfloat16",
        "npu-sim float16",
        "npu-sim float32",
        "PyTorch eager float32",
    }
    for contender, output in chosen.values():
        np.testing.assert_allclose(output, reference, atol=0.05)
        assert contender.seconds() > 0
    assert contenders.floor(Rates(1.0, 1.0)).seconds >= 2 * 3 * 8 * 4


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_a_gguf_file_is_copied_with_its_matrices_in_another_type(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    matrix, vector = np.random.default_rng(0).standard_normal((4, 32), np.float32), np.ones(32, np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", matrix)
    writer.add_tensor("output_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(write_gguf(tmp_path / "a.gguf", kind, tmp_path / "b.gguf"))
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["llama.context_length"].contents() == 64
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["token_embd.weight"].tensor_type.name == kind
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    found = gguf.dequantize(tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type)
    np.testing.assert_allclose(found, matrix, atol=0.02)
