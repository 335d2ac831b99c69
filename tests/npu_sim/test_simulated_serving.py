"""Serving on a chip that is only a file: prices of steps, the engine on a virtual clock, traces, and the commands."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from npu_compiler.errors import InputError
from npu_model import Chip, NPUTarget, load_chip, simulate
from npu_sim.cli import app
from npu_sim.llm import Checkpoint, load_architecture
from npu_sim.llm.graph import ContiguousShape
from npu_sim.llm.simulated import (
    PoolSettings,
    ProgramCost,
    ServingResult,
    SimulatedPrograms,
    StepPrices,
    TimedRequest,
    likely_programs,
    poisson_requests,
    read_requests,
    serve_requests,
)
from npu_sim.llm.simulated.programs import StepGraph, cost_of

pytest.importorskip("transformers")

CONTEXT = 512
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": CONTEXT,
    "torch_dtype": "bfloat16",
}
LARGEST_ERROR, MEAN_ERROR = 0.15, 0.06  # of an interpolated price, as docs/serving.md says


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return load_architecture(folder)


@pytest.fixture(scope="module", params=["edge", "datacenter"])
def programs(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> SimulatedPrograms:
    return SimulatedPrograms(checkpoint, load_chip(request.param))


def prices_of(programs: Any, context: int = CONTEXT) -> StepPrices:
    return StepPrices(programs, 128, 512, context)


def shapes(count: int, seed: int) -> list[ContiguousShape]:
    """Random decode steps and pieces of prompts, of powers of two of rows, since steps are padded to these."""
    draw, found = random.Random(seed), []
    for index in range(count):
        rows = draw.randint(20, CONTEXT)
        if index % 2:
            found.append(ContiguousShape(1 << draw.randrange(8), 1, rows))
        else:
            found.append(ContiguousShape(1, 1 << draw.randrange(2, rows.bit_length()), rows))
    return found


def price(prices: StepPrices, shape: ContiguousShape) -> float:
    if shape.tokens == 1:
        return float(prices.decode(shape.sequences, shape.sequences * shape.rows)[0][0, 0])
    return prices.step(0, 0, [(shape.tokens, shape.rows)])[0].seconds


def test_prices_of_simulated_programs_are_their_times(programs: SimulatedPrograms) -> None:
    prices = prices_of(programs)
    for shape in (ContiguousShape(32, 1, 128), ContiguousShape(1, 32, 128), ContiguousShape(128, 1, 128)):
        assert price(prices, shape) == pytest.approx(programs.cost(shape).seconds)


@pytest.mark.slow
def test_prices_between_are_near_what_a_simulation_says(programs: SimulatedPrograms) -> None:
    prices, errors = prices_of(programs), []
    for shape in shapes(12, seed=3):
        simulated = programs.cost(shape)
        assert simulated.seconds >= simulated.roofline_seconds * (1 - 1e-9) > 0
        errors.append(abs(price(prices, shape) / simulated.seconds - 1))
    assert max(errors) < LARGEST_ERROR and np.mean(errors) < MEAN_ERROR


def test_programs_are_few_and_kept(checkpoint: Checkpoint) -> None:
    requests = poisson_requests(300, 2000.0, (1, 300), (1, 200), seed=1)
    chip = dataclasses.replace(load_chip("phone"), clock_ghz=random.uniform(0.5, 2.0))  # which no earlier run has met
    first, again = (SimulatedPrograms(checkpoint, chip) for _ in range(2))
    for programs in (first, again):
        serve_requests(requests, prices_of(programs), PoolSettings(CONTEXT))
    assert first.simulated == len(first.used) <= 8 + 10 + 2 * (4 + 5)
    assert again.simulated == 0 and again.used == first.used


def test_a_program_costs_the_same_encoded_or_not(checkpoint: Checkpoint, programs: SimulatedPrograms) -> None:
    steps, target = StepGraph.of(checkpoint, programs.chip), NPUTarget(programs.chip)
    for shape in (ContiguousShape(4, 1, 100), ContiguousShape(1, 48, 128)):
        encoded = steps.compiled(shape, target)
        assert encoded.plan.machine_code
        assert programs.cost(shape) == cost_of(simulate(encoded, programs.chip))


@pytest.mark.slow
def test_processes_find_the_same_costs(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = dataclasses.replace(load_chip("phone"), clock_ghz=random.uniform(0.5, 2.0))  # whose costs are not kept
    requests = poisson_requests(40, 2000.0, (1, 100), (1, 60), seed=2)
    likely = [ContiguousShape(2, 1, 128), ContiguousShape(3, 1, 77)]  # nobody asks for the second one
    with (
        closing(SimulatedPrograms(checkpoint, chip, 2, lambda steps: likely)) as programs,
        monkeypatch.context() as patch,
    ):
        patch.setattr("npu_sim.llm.simulated.programs.StepSimulator", None)  # every program is left to a process
        result = serve_requests(requests, prices_of(programs), PoolSettings(CONTEXT))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("NPU_SIM_CACHE", folder)
        alone = SimulatedPrograms(checkpoint, chip)
        assert serve_requests(requests, prices_of(alone), PoolSettings(CONTEXT)).to_dict() == result.to_dict()
    assert alone.used == programs.used and alone.simulated == programs.simulated == len(programs.used)


def test_most_programs_of_a_trace_are_foreseen(programs: SimulatedPrograms, seed: int) -> None:
    rate = random.Random(seed).uniform(100.0, 5000.0)
    requests, pool = poisson_requests(100, rate, (1, 300), (1, 100), seed), PoolSettings(CONTEXT)
    asked = SimulatedPrograms(programs.checkpoint, programs.chip)
    serve_requests(requests, prices_of(asked), pool)
    likely = set(likely_programs(requests, pool, StepGraph.of(asked.checkpoint, asked.chip)))
    needed = len(likely & asked.used.keys())
    assert needed > len(asked.used) / 2 and needed > 0.8 * len(likely), rate


def test_a_program_that_no_process_simulates_is_simulated_here(checkpoint: Checkpoint) -> None:
    chip = dataclasses.replace(load_chip("edge"), clock_ghz=random.uniform(0.5, 2.0))
    shape = ContiguousShape(2, 1, 64)
    with closing(SimulatedPrograms(checkpoint, chip, workers=2)) as programs:
        programs.prepare([shape])
        assert programs._workers is not None and programs._workers._pool is not None
        for process in programs._workers._pool._processes.values():
            process.kill()
        cost = programs.cost(shape)
    assert cost == cost_of(simulate(StepGraph.of(checkpoint, chip).compiled(shape, NPUTarget(chip)), chip))


def test_what_a_chip_cannot_run_is_named(checkpoint: Checkpoint) -> None:
    chip = load_chip("edge")
    small = dataclasses.replace(chip, sram=dataclasses.replace(chip.sram, size=64))
    with pytest.raises(InputError, match="cannot compile .*cannot run on chip 'edge'"):
        SimulatedPrograms(checkpoint, small).cost(ContiguousShape(1, 1, 64))
    with closing(SimulatedPrograms(checkpoint, small, workers=2)) as programs:
        programs.prepare([ContiguousShape(1, 1, 64)])
        with pytest.raises(InputError, match="cannot compile .*cannot run on chip 'edge'"):
            programs.cost(ContiguousShape(1, 1, 64))


@pytest.mark.slow
def test_more_bandwidth_makes_no_step_slower(checkpoint: Checkpoint) -> None:
    from npu_model.analysis.simulation import MONOTONE_WITHIN

    chip = load_chip("edge")
    fast: Chip = dataclasses.replace(chip, dram=dataclasses.replace(chip.dram, bandwidth_gb_s=64.0))
    slower, faster = (prices_of(SimulatedPrograms(checkpoint, each)) for each in (chip, fast))
    calls = 60  # more than a program of two layers has
    accesses = calls * chip.seconds(chip.dram_latency_cycles + chip.dram.burst_bytes / fast.dram_bytes_per_cycle)
    for shape in shapes(4, seed=4):
        assert price(faster, shape) <= price(slower, shape) * (1 + MONOTONE_WITHIN) + accesses


def test_a_step_with_a_prompt_shares_the_weights_with_the_decodes(programs: SimulatedPrograms) -> None:
    prices = prices_of(programs)
    decode, piece = prices.decode(8, 800)[0][0, 0], prices.step(0, 0, [(64, 64)])[0].seconds
    both = prices.step(8, 800, [(64, 64)])[0].seconds
    assert max(decode, piece) <= both < decode + piece


@pytest.mark.slow
def test_prices_of_a_whole_model_are_near_what_a_simulation_says() -> None:
    programs = SimulatedPrograms(load_architecture("smollm2"), load_chip("edge"))
    prices = prices_of(programs)
    errors = [abs(price(prices, shape) / programs.cost(shape).seconds - 1) for shape in shapes(8, seed=5)]
    assert max(errors) < 0.05


class Formula:
    """Costs of programs by a formula, so that a trace takes no simulation."""

    least = 4e-4  # seconds of a step

    def prepare(self, shapes: Iterable[ContiguousShape]) -> None:
        """Do nothing: the formula takes no time."""

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        rows = shape.sequences * shape.tokens
        other = max(self.least, 5e-6 * rows)
        return ProgramCost(2e-8 * rows * shape.rows, 1e-7 * rows * shape.rows, other, 10 * other, 5e-5 * (rows > 1))


traces = st.lists(
    st.builds(TimedRequest, st.floats(0, 0.2), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25
).map(lambda requests: sorted(requests, key=lambda request: request.arrival))
pools = st.builds(
    PoolSettings,
    st.sampled_from([64, 100]),
    cache_tokens=st.sampled_from([None, 100, 150]),
    max_batch=st.integers(1, 8),
    max_tokens=st.sampled_from([16, 512]),
    prefill_tokens=st.none() | st.integers(1, 30),
    max_requests=st.none() | st.integers(1, 10),
)


def served(requests: Sequence[TimedRequest], pool: PoolSettings, **options: Any) -> ServingResult:
    return serve_requests(
        requests,
        StepPrices(Formula(), pool.max_batch, pool.max_tokens, pool.context_length),
        pool,
        static_watts=2.0,
        **options,
    )


@settings(max_examples=60)
@given(traces, pools)
def test_every_request_ends_and_nothing_is_lost(requests: list[TimedRequest], pool: PoolSettings) -> None:
    result = served(requests, pool)
    room = min(pool.context_length, pool.blocks * 16) + 1
    computed = 0
    for each in result.requests:
        request = each.request
        assert each.tokens == (0 if each.refused else min(request.new_tokens, room - request.prompt_tokens))
        if not each.refused:
            computed += request.prompt_tokens + each.tokens - 1
            assert each.first >= request.arrival + Formula.least
            assert each.last >= each.first + (each.tokens - 1) * Formula.least * (1 - 1e-9)
    assert len(result.gaps) == result.new_tokens - len(result.finished) and (result.gaps > 0).all()
    assert result.rows == computed if not result.preemptions else result.rows > computed
    if pool.max_requests is None:
        assert len(result.finished) == len(requests)
    times = [row[0] for row in result.queue]
    assert times == sorted(times) and result.queue[-1][1:] == (0, 0, 0)
    assert all(running <= pool.max_batch and used <= pool.blocks for _, _, running, used in result.queue)
    assert result.busy_seconds <= result.seconds * (1 + 1e-9)
    assert result.joules >= 2.0 * result.seconds
    assert result.mean_waiting <= max(row[1] for row in result.queue)


@settings(max_examples=40)
@given(traces, pools)
def test_steps_taken_as_done_are_those_that_the_scheduler_plans(
    requests: list[TimedRequest], pool: PoolSettings
) -> None:
    quick, slow = (served(requests, pool, step_by_step=each) for each in (False, True))
    assert (quick.steps, quick.rows, quick.preemptions) == (slow.steps, slow.rows, slow.preemptions)
    assert quick.joules == pytest.approx(slow.joules)
    assert [row[1:] for row in quick.queue] == [row[1:] for row in slow.queue]
    assert np.sort(quick.gaps) == pytest.approx(np.sort(slow.gaps))
    for one, other in zip(quick.requests, slow.requests, strict=True):
        assert (one.tokens, one.refused) == (other.tokens, other.refused)
        assert (one.first, one.last) == pytest.approx((other.first, other.last))


def test_a_queue_grows_when_requests_come_faster_than_they_are_served() -> None:
    pool = PoolSettings(CONTEXT, max_batch=4)
    calm, busy = (served(poisson_requests(60, rate, (50, 50), (20, 20), 0), pool) for rate in (5.0, 5000.0))
    assert calm.mean_waiting < 0.1 < 20 < busy.mean_waiting
    first = [result.times["time_to_first_token"] for result in (calm, busy)]
    assert first[0] is not None and first[1] is not None and first[1].median > 10 * first[0].p99


def test_a_server_that_is_full_refuses() -> None:
    requests = [TimedRequest(0.0, 10, 10)] * 5
    result = served(requests, PoolSettings(CONTEXT, max_requests=3))
    assert [each.refused for each in result.requests] == [False] * 3 + [True] * 2
    assert result.to_dict()["refused"] == 2


def test_random_requests_are_a_poisson_process() -> None:
    requests = poisson_requests(4000, 50.0, (10, 20), (5, 5), seed=9)
    gaps = np.diff([request.arrival for request in requests])
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05) and np.std(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert {request.prompt_tokens for request in requests} == {*range(10, 21)}
    assert requests == poisson_requests(4000, 50.0, (10, 20), (5, 5), seed=9)
    assert requests != poisson_requests(4000, 50.0, (10, 20), (5, 5), seed=8)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1), st.booleans())
def test_a_trace_is_read_in_order_of_arrival(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, int]], named: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    lines = ["arrival_seconds,prompt_tokens,new_tokens"] * named + [f"{a!r}, {p},{n}" for a, p, n in rows]
    path.write_text("\n".join(lines))
    found = [(request.arrival, request.prompt_tokens, request.new_tokens) for request in read_requests(path)]
    assert found == sorted(rows, key=lambda row: row[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace 't.csv' has no requests; each is a line of arrival_seconds, prompt_tokens, new_tokens"),
        ("0,5,5\n-1,5,5", "line 2 of 't.csv': '-1' is no time of arrival, a number of seconds from 0 on"),
        ("nan,5,5", "line 1 of 't.csv': 'nan' is no time of arrival, a number of seconds from 0 on"),
        ("0,5", "line 1 of 't.csv' has 2 columns; a request is arrival_seconds, prompt_tokens, new_tokens"),
        ("0,0,5", "line 1 of 't.csv': '0' is no number of prompt_tokens, a whole number from 1 on"),
        ("0,5,2.5", "line 1 of 't.csv': '2.5' is no number of new_tokens, a whole number from 1 on"),
        ("0,5,99999999999", "'99999999999' is no number of new_tokens"),
        ('0,"5,5', "the trace 't.csv' is no CSV file: unexpected end of data"),
        ("\x00,1,1", "line 1 of 't.csv'"),
    ],
)
def test_a_malformed_trace_is_an_error_of_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text)
    with pytest.raises(InputError) as error:
        read_requests(Path("t.csv"))
    assert message in str(error.value) and "\n" not in str(error.value)


@given(st.binary(max_size=60) | st.text('0123456789.,-\n"enaif ', max_size=60).map(str.encode))
def test_any_file_is_a_trace_or_an_input_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    path.write_bytes(content)
    try:
        requests = read_requests(path)
    except InputError:
        return
    assert all(request.arrival >= 0 and min(request.prompt_tokens, request.new_tokens) >= 1 for request in requests)


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="npu-sim")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    path.write_text("arrival_seconds,prompt_tokens,new_tokens\n0,100,20\n0.00001,30,50\n0.5,7,3\n")
    return path


def test_simulate_serves_a_recorded_trace(folder: Path, trace: Path, tmp_path: Path) -> None:
    done = run("simulate", folder, "--npu", "edge", "--trace", trace, "--csv", tmp_path / "q.csv")
    assert done.exit_code == 0, done.output
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"{folder.name} (bfloat16) on edge: 3 of 3 requests served in 500.")
    assert all(word in done.stdout for word in ("mJ a token", "time to first token", "time between tokens", "p99"))
    lines = (tmp_path / "q.csv").read_text().splitlines()
    assert lines[0] == "seconds,waiting,running,blocks_used" and lines[1] == "0,0,1,7" and lines[-1].endswith(",0,0,0")


def test_serve_simulates_random_requests(folder: Path) -> None:
    command = ["serve", folder, "--simulate", "edge", "--rate", 50000, "--requests", 80, "--prompt-lengths", "20..90"]
    done = run(*command, "--new-lengths", 30, "--seed", 5, "--context-length", 128, "--max-requests", 20, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["requests"] == 80 == found["finished"] + found["refused"] and found["refused"] > 0
    assert found["new_tokens"] == 30 * found["finished"] and found["chip"] == "edge"
    assert found["tokens_per_second"] == pytest.approx(found["new_tokens"] / found["seconds"])
    assert found["joules_per_token"] == pytest.approx(found["joules"] / found["new_tokens"])
    times = found["time_between_tokens_seconds"]
    assert 0 < times["median"] <= times["p90"] <= times["p99"] <= times["most"]


def test_a_chip_without_an_energy_table_has_no_energy(folder: Path, trace: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "npu_model/chip/chips/edge.toml").read_text()
    (tmp_path / "chip.toml").write_text(text[: text.index("[energy]")])
    for options in ([], ["--json"]):
        done = run("simulate", folder, "--npu", tmp_path / "chip.toml", "--trace", trace, *options)
        assert done.exit_code == 0, done.output
        assert "mJ" not in done.stdout
    assert json.loads(done.stdout)["joules_per_token"] is None


def test_a_prompt_that_is_too_long_is_an_error_of_one_sentence(folder: Path) -> None:
    done = run("serve", folder, "--simulate", "edge", "--rate", 1, "--prompt-lengths", 600)
    message = (
        "random request 1: its prompt has 600 tokens, but a request can have 512; give the server a longer context"
    )
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_simulate_refuses_a_trace_of_requests_where_it_means_nothing(folder: Path, trace: Path) -> None:
    for command, message in (
        (["resnet18", "--npu", "edge"], "'resnet18' is no language model but for a single run"),
        ([folder, "--npu", "edge", "--tokens", 5], "--tokens is the prompt of a single run"),
        ([folder, "--npu", "edge", "--full"], "leave out the --trace of requests"),
        ([folder, "--npu", "edge", "--csv", trace], "it is one of the files to read"),
        ([folder, "--npu", "edge", "--cache-length", 64], "line 2 of 'requests.csv': its prompt has 100 tokens"),
    ):
        done = run("simulate", *command, "--trace", trace)
        assert done.exit_code == 2 and message in done.stderr, done.output
