"""The benchmark of many requests at once: its requests, what it measures of an engine, and its table."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from io import StringIO

import pytest
from rich.console import Console
from toy_batches import VOCAB, ToyModel, ToyResult

from benchmarks.serving.__main__ import (
    MEANS,
    Contender,
    Job,
    draw_jobs,
    full_batch_rate,
    gaps_while_prompts_arrive,
    make_parser,
    table,
)
from npu_sim.llm.engine.batch import Batch
from npu_sim.serving.engine import Engine


@pytest.mark.parametrize("lengths", MEANS)
def test_requests_are_as_long_as_in_the_data_set(lengths: str) -> None:
    jobs = draw_jobs(4000, lengths, 100_000, 500, 1)
    means = statistics.fmean(len(job.prompt) for job in jobs), statistics.fmean(job.new for job in jobs)
    assert means == pytest.approx(MEANS[lengths], rel=0.1)
    assert draw_jobs(40, lengths, 100_000, 500, 1) == draw_jobs(40, lengths, 100_000, 500, 1)
    assert max(len(job.prompt) + job.new for job in draw_jobs(400, lengths, 64, 500, 1)) <= 64


class Slow(ToyModel):
    """A toy that takes longer for a step than the benchmark takes to look at it."""

    def step(self, batch: Batch) -> ToyResult:
        time.sleep(0.01)
        return super().step(batch)


def test_an_engine_is_measured_with_all_its_requests_at_once() -> None:
    with Engine(Slow(blocks=400, context_length=200, max_tokens=64)) as engine:
        assert full_batch_rate(engine, [Job((1, 2, 3), 4)], 8, 128) > 0
        before = engine.stats().finished.get("length", 0)
        gaps = gaps_while_prompts_arrive(engine, Namespace(at_once=8, context=120, long=24), VOCAB)
        assert engine.stats().finished["length"] > before + 4 and max(gaps) > 0


def test_the_table_leaves_out_what_was_not_measured() -> None:
    console = Console(file=StringIO(), width=100)
    console.print(table([Contender("npu-sim", 120.0, waste=0.031), Contender("llama.cpp", 80.0)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "120.0" in text and "3.1" in text and "full batch" not in text


def test_its_help_names_the_contenders() -> None:
    assert make_parser().parse_args([]).contenders == "npu-sim,llama.cpp"
