"""Output of the benchmarks: JSON, tables, a chart; and the checks before anything is timed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.configurations import qwen2_1_5b, qwen3_8b
from benchmarks.cuda import __main__ as cuda
from benchmarks.cuda.page import document, draw
from benchmarks.cuda.timing import agreement
from benchmarks.figures import COMPILED, EAGER, OURS, Account, Figure, Run, load_run
from benchmarks.peers import ATTENTION, StaticLanguageModel

MACHINE: dict[str, Any] = {
    "gpu": "NVIDIA X1",
    "torch": "2.11",
    "cuda": "13.0",
    "date": "2026-01-02",
    "read_tb_per_s": 4.4839,
    "bfloat16_tflop_per_s": 788.6,
}


def figure(task: str, model: str, ours: float, compiled: float | None, **case: int) -> Figure:
    ms = {OURS: ours, EAGER: 20.0} if compiled is None else {OURS: ours, EAGER: 20.0, COMPILED: compiled}
    steady = {"kernels": 200, "graph_launches": 1}
    return Figure(task, model, case, ms, 0.5, "bytes", steady, {OURS: 0.01, EAGER: 0.02}, "SDPA: grouped")


@pytest.fixture
def run() -> Run:
    rows = [(f"kernel_{index}<int|long>", 0.01, 2.0) for index in range(20)]
    figures = [
        figure("decode", "Qwen", 1.0, 2.0, cache=32768, position=4),
        figure("decode", "Qwen", 1.0, None, cache=32768, position=16),
        figure("decode", "Qwen", 0.8, 2.0, cache=2048, position=1),
        figure("large-decode", "Qwen L", 4.0, None, cache=2048, position=2000),
        figure("prefill", "Qwen", 10.5, 21.0, tokens=128, cache=2048),
        figure("vision", "ResNet-18", 0.25, 0.5, batch=64),
    ]
    account = Account("decode", "Qwen", {"cache": 2048, "position": 1}, 0.8, rows)
    return Run(dict(MACHINE), figures, [account], {"second start, s": 0.75})


def test_a_run_comes_back_from_its_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cuda.json"
    run.save(path)
    assert load_run(path) == run


def test_merging_keeps_other_figures_in_order_and_takes_the_later_of_the_same(run: Run) -> None:
    again = replace(run.figures[2], ms={OURS: 0.7})
    new = figure("vision", "ResNet-18", 0.1, 0.3, batch=1)
    later = Run({**MACHINE, "date": "2026-01-03"}, [again, new], [], {"weights, GB/s": 6.0})
    merged = run.merged(later)
    assert merged.figures == [again, *run.figures[:2], *run.figures[3:5], new, run.figures[5]]
    assert merged.accounts == run.accounts
    assert merged.other == {"second start, s": 0.75, "weights, GB/s": 6.0}
    assert merged.machine["date"] == "2026-01-03"
    assert run.merged(Run(later.machine, other=later.other)).machine == run.machine  # of which the floors are made
    with pytest.raises(ValueError, match=f"measured with another gpu {MACHINE['gpu']}"):
        run.merged(Run({**MACHINE, "gpu": "another"}))


def test_the_page_has_a_table_for_each_cache_and_task(run: Run) -> None:
    page = document(run)
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        "Decode, cache 2,048",
        "Decode, cache 32,768",
        "Decode of a larger model",
        "Prefill",
        "ResNets, float16",
        "Start-up",
        "Counters and errors of one step",
        "Time per kernel",
    ]
    assert "| 1 | **0.800** | 0.500 | 62% | 2.000 | 20.0 | 2.50 |" in page
    assert "| Qwen L, 2,048, 2,000 | **4.000** | 0.500 | 12% |  | 20.0 |  |" in page
    assert "| 128 | **10.5** | 0.500 | 5% | 21.0 | 20.0 | 2.00 |" in page
    assert "| ResNet-18, 64 | **0.250** | 0.500 | 200% | 0.500 | 20.0 | 2.00 |" in page
    assert "| second start, s | 0.75 |" in page
    assert "| Qwen decode (cache 2,048, position 1) | 200 | 1 | none | 1.00e-02 | 2.00e-02 | SDPA: grouped |" in page
    assert "reads memory at 4.48 TB/s" in page and "<!-- chart: cuda -->" in page


def test_a_peer_that_was_not_measured_leaves_its_cells_empty(run: Run) -> None:
    assert "| 16 | **1.000** | 0.500 | 50% |  | 20.0 |  |" in document(run)


def test_an_account_sums_up_its_small_kernels(run: Run) -> None:
    page = document(run)
    assert "### Qwen decode (cache 2,048, position 1): 0.800 ms, of which 0.200 ms in kernels" in page
    assert "| `kernel_0<int/long>` | 2 | 10.0 | 5.0% |" in page
    assert "| `8 others` | 16 | 80.0 | 40.0% |" in page
    assert "kernel_12<" not in page


def test_only_drawing_needs_no_gpu(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    run.save(tmp_path / "cuda.json")
    places = {"--json": "cuda.json", "--document": "cuda.md", "--chart": "cuda.svg"}
    options = [text for option, name in places.items() for text in (option, str(tmp_path / name))]
    monkeypatch.setattr("sys.argv", ["cuda", "--only", "none", "--merge", *options])
    assert cuda.main() == 0
    assert (tmp_path / "cuda.md").read_text(encoding="utf-8") == document(run)
    drawn = (tmp_path / "cuda.svg").read_bytes()
    draw(run, tmp_path / "again.svg")
    assert drawn.startswith(b"<?xml") and drawn == (tmp_path / "again.svg").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--only", "decode,nothing"], "unknown task nothing"), (["--only", "none"], "there are no results")],
)
def test_what_cannot_be_done_is_said(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cuda", *options])
    with pytest.raises(SystemExit):
        cuda.main()
    assert message in capsys.readouterr().err


def test_the_page_in_docs_is_that_of_its_figures() -> None:
    folder = Path(__file__).parents[2] / "docs" / "measurements"
    page = (folder / "cuda.md").read_text(encoding="utf-8")
    assert page == document(load_run(folder / "cuda.json")), (
        "run python -m benchmarks.cuda --only none --merge --json docs/measurements/cuda.json "
        "--document docs/measurements/cuda.md"
    )


def test_agreement_refuses_logits_that_are_wrong() -> None:
    reference = torch.linspace(-1, 1, 400).reshape(2, 200)
    eager = reference + 1e-3
    errors = agreement({OURS: reference + 1e-4 * torch.randn(2, 200), EAGER: eager}, reference)
    assert 0 < errors[OURS] < errors[EAGER]
    elsewhere, lost = reference.clone(), reference.clone()
    elsewhere[1, 150], lost[0, 0] = 1.01, float("nan")
    wrong = {"npu-sim: Pearson r": reference.flip(1), "the argmax is 0.2": elsewhere, "r is nan": lost}
    for message, logits in wrong.items():
        with pytest.raises(ValueError, match=message):
            agreement({OURS: logits, EAGER: eager}, reference)
    with pytest.raises(ValueError, match="by torch.compile"):
        agreement({OURS: reference, EAGER: eager, COMPILED: -reference}, reference)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("model", [qwen2_1_5b, qwen3_8b])
def test_the_peer_is_the_hugging_face_model(model: Callable[[], Any], attention: str) -> None:
    from transformers import AutoModelForCausalLM

    seed = secrets.randbits(32)
    torch.manual_seed(seed)
    config = model()
    config.vocab_size, config.hidden_size, config.intermediate_size, config.num_attention_heads = 300, 192, 256, 6
    config.num_hidden_layers, config.num_key_value_heads = 2, 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {**model.state_dict(), "model.rotary_emb.inv_freq": model.model.rotary_emb.inv_freq}
    for name in state:
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            state[name].normal_()
    ids = torch.randint(0, config.vocab_size, (1, 20))
    peer = StaticLanguageModel(config, state)
    peer.prepare(cache_length=32, attend=ATTENTION[attention])
    with torch.no_grad():
        wanted = model(ids).logits[0]
        torch.testing.assert_close(peer(ids[:, :19], torch.arange(19)), wanted[18], rtol=1e-4, atol=1e-5, msg=str(seed))
        if attention != "prompt":
            torch.testing.assert_close(peer(ids[:, 19:], torch.tensor([19])), wanted[19], rtol=1e-4, atol=1e-5)
