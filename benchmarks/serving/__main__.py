"""Many requests at once: the serving engine, and llama.cpp's server on the same model, requests and threads.

    python -m benchmarks.serving [--model smollm2] [--device cpu] [--requests 64] [--at-once 32] [--json FILE]
    python -m benchmarks.serving --contenders npu-sim --speculate ngram --long 2048

What is measured:
- *stream*: all requests are there at the start, `--at-once` of them run. Tokens a second until the last one ends; and
  *while some wait*, before their number falls.
- *full batch*: `--at-once` requests of equal lengths decode; tokens a second while all of them run.
- *long prompts*: half of `--at-once` requests decode while prompts of `--long` tokens arrive one after the other. The
  time between two tokens of those requests.
- *KV waste*: rows of the blocks in use that hold no token, during the stream, on average.

Prompts and answers are as long as in one of two data sets: log-normal, with the mean lengths that figure 11 of
https://arxiv.org/abs/2309.06180 gives for ShareGPT (161 and 338 tokens) and Alpaca (19 and 58). That the logarithm's
standard deviation is 1 is our assumption. Every answer is exactly as long as drawn: end-of-sequence ids are ignored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cpu.machine import usable_cores

if TYPE_CHECKING:
    from npu_sim.llm.checkpoint import Checkpoint
    from npu_sim.serving.engine import Engine
    from npu_sim.serving.request import Request

MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}  # tokens of prompt and answer
CONTENDERS = ("npu-sim", "llama.cpp")
SIGMA = 1.0
SEEDED = "qwen2.5-1.5b-seeded"


@dataclass(frozen=True)
class Job:
    """A request.

    Attributes:
        prompt: Token ids of the prompt.
        new: Number of tokens to generate.
    """

    prompt: tuple[int, ...]
    new: int


@dataclass(frozen=True)
class Contender:
    """Measurements of one contender; None for those that were not made.

    Attributes:
        contender: The contender's name.
        stream, full_batch: Tokens a second.
        crowded: Tokens a second of the stream while requests wait.
        median_gap, p99_gap: Seconds between two tokens while long prompts arrive.
        waste: Share of the KV rows in use that hold no token.
        accepted: Share of the drafted tokens that were right.
    """

    contender: str
    stream: float
    crowded: float | None = None
    full_batch: float | None = None
    median_gap: float | None = None
    p99_gap: float | None = None
    waste: float | None = None
    accepted: float | None = None


def seeded_qwen() -> Checkpoint:
    """Return a checkpoint of Qwen2.5-1.5B's configuration with random bfloat16 weights on a GPU."""
    from benchmarks.configurations import qwen2_1_5b
    from benchmarks.cuda.llm import seeded_checkpoint

    return seeded_checkpoint(SEEDED, qwen2_1_5b(), 0)


def draw_jobs(count: int, lengths: str, limit: int, vocabulary: int, seed: int) -> list[Job]:
    """Return jobs with random tokens as prompts; prompt and answer of each have at most `limit` tokens together."""
    rng = np.random.default_rng(seed)

    def draw(mean: float) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
        return [int(size) for size in np.clip(np.rint(drawn), 1, limit // 2)]

    prompts, answers = (draw(mean) for mean in MEANS[lengths])
    return [
        Job(tuple(rng.integers(0, vocabulary, prompt).tolist()), answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def request_of(job: Job) -> Request:
    from npu_sim.serving.request import Request

    return Request(job.prompt, job.new, stop_ids=frozenset())


def measure_ours(checkpoint: Checkpoint, jobs: list[Job], arguments: argparse.Namespace, console: Console) -> Contender:
    from npu_sim.serving.engine import Engine
    from npu_sim.serving.engine_setup import prepare_steps
    from npu_sim.serving.paged_model import PagedModel

    context = arguments.context
    model = PagedModel(
        checkpoint,
        device=arguments.device,
        context_length=context,
        blocks=arguments.at_once * context // 16,
        max_sequences=arguments.at_once,
    )
    with Engine(model, speculate=arguments.speculate, prefill_tokens=arguments.prefill_tokens) as engine:
        console.print("npu-sim: compiling what the stream needs", style="dim")
        warm = [Job((5, 6, 7) * 5, 8), *(Job((index + 100,) * 40, 24) for index in range(arguments.at_once))]
        prepare_steps(model, lambda done, total: None)
        engine.generate(map(request_of, warm + [Job((9,) * (context // 2), 2)]))
        wastes, done = [0.0], threading.Event()
        crowd, made_before = (0.0, 0), engine.stats().new_tokens  # seconds and tokens while requests wait

        def watch() -> None:
            nonlocal crowd
            while not done.wait(0.05):
                stats = engine.stats()
                if stats.waiting:
                    crowd = time.perf_counter() - start, stats.new_tokens - made_before
                if stats.blocks_used:
                    wastes.append(stats.rows_empty / (stats.blocks_used * model.block_size))

        watcher = threading.Thread(target=watch)
        start = time.perf_counter()
        watcher.start()
        answers = engine.generate(map(request_of, jobs))
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        assert [len(answer.tokens) for answer in answers] == [job.new for job in jobs]
        stats = engine.stats()
        accepted = stats.accepted_tokens / stats.drafted_tokens if stats.drafted_tokens else None
        rate = sum(job.new for job in jobs) / seconds
        console.print(f"npu-sim: stream {rate:.1f} tokens/s, {stats.preemptions} preemptions", style="dim")
        full = full_batch_rate(engine, jobs, arguments.at_once, context)
        gaps = gaps_while_prompts_arrive(engine, arguments, model.vocab_size)
        tail = float(np.quantile(gaps, 0.99))
        waste = statistics.fmean(wastes)
        crowded = crowd[1] / crowd[0] if crowd[0] else None
        return Contender("npu-sim", rate, crowded, full, statistics.median(gaps), tail, waste, accepted)


def full_batch_rate(engine: Engine, jobs: list[Job], at_once: int, context: int) -> float:
    """Return the tokens a second while `at_once` requests, with prompts of the jobs' mean length, decode together."""
    length = min(context // 2, round(statistics.fmean(len(job.prompt) for job in jobs)))
    new = context - 2 * (length // 2 + 1)
    handles = [engine.submit(request_of(Job((index, 1) * (length // 2 + 1), new))) for index in range(at_once)]
    while min(handle.usage.new_tokens for handle in handles) < 2:
        time.sleep(0.005)
    start, before = time.perf_counter(), [handle.usage.new_tokens for handle in handles]
    last = min(new - 1, max(before) + 32)
    while max(handle.usage.new_tokens for handle in handles) < last:
        time.sleep(0.005)
    new_tokens, end = sum(handle.usage.new_tokens for handle in handles) - sum(before), time.perf_counter()
    for handle in handles:
        handle.cancel()
        handle.result()
    return new_tokens / (end - start)


def gaps_while_prompts_arrive(engine: Engine, arguments: argparse.Namespace, vocabulary: int) -> list[float]:
    """Return the seconds between the tokens of requests that decode while long prompts arrive."""
    rng = np.random.default_rng(1)
    gaps: list[float] = []

    def read(job: Job) -> None:
        times = [time.perf_counter() for _ in engine.submit(request_of(job))]
        gaps.extend(np.diff(times).tolist())

    new = arguments.context // 4
    with ThreadPoolExecutor(arguments.at_once) as pool:
        decoding = [pool.submit(read, Job((index, 7), new)) for index in range(max(1, arguments.at_once // 2))]
        while not all(future.done() for future in decoding):
            long = tuple(rng.integers(0, vocabulary, arguments.long).tolist())
            handle = engine.submit(request_of(Job(long, 1)))
            handle.result()
            time.sleep(0.2)
        for future in decoding:
            future.result()
    return gaps


def measure_llama(path: Path, jobs: list[Job], arguments: argparse.Namespace) -> Contender:
    """Measure llama.cpp's server, with as many slots as requests run at once and a client thread for each."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel = arguments.context * arguments.at_once, arguments.at_once
    parameters.n_gpu_layers, parameters.cont_batching = 0, True
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = arguments.threads
    parameters.cache_ram_mib, parameters.verbosity = 0, 0
    server = xllamacpp.Server(parameters)

    def ask(job: Job) -> int:
        answer: dict[str, Any] = server.handle_completions(
            {
                "prompt": list(job.prompt),
                "n_predict": job.new,
                "cache_prompt": False,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
            }
        )
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(ask, [Job((100 + index,) * 20, 4) for index in range(arguments.at_once)]))
        start = time.perf_counter()
        counts = list(pool.map(ask, jobs))
        seconds = time.perf_counter() - start
    if counts != [job.new for job in jobs]:
        raise RuntimeError("llama.cpp's answers are not as long as asked")
    return Contender("llama.cpp", sum(counts) / seconds)


def table(contenders: list[Contender]) -> Table:
    result = Table("", *(each.contender for each in contenders))

    def row(name: str, values: list[float | None], form: str, factor: float = 1.0) -> None:
        if any(value is not None for value in values):
            result.add_row(name, *("" if value is None else form.format(value * factor) for value in values))

    row("stream, tokens/s", [each.stream for each in contenders], "{:.1f}")
    row("while some wait, tokens/s", [each.crowded for each in contenders], "{:.1f}")
    row("full batch, tokens/s", [each.full_batch for each in contenders], "{:.1f}")
    row("between tokens, median, ms", [each.median_gap for each in contenders], "{:.1f}", 1e3)
    row("between tokens, 99 %, ms", [each.p99_gap for each in contenders], "{:.1f}", 1e3)
    row("KV waste, %", [each.waste for each in contenders], "{:.1f}", 100)
    row("drafts accepted, %", [each.accepted for each in contenders], "{:.0f}", 100)
    return result


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        default="smollm2",
        help=f"as for `npu-sim generate`, or {SEEDED}; llama.cpp needs a .gguf file or smollm2",
    )
    add("--device", default="cpu", help="of npu-sim (default: %(default)s)")
    add("--contenders", default=",".join(CONTENDERS), help="comma-separated (default: %(default)s)")
    add("--requests", type=int, default=64, help="number of requests in the stream (default: %(default)s)")
    add("--at-once", type=int, default=32, help="requests that run at once (default: %(default)s)")
    add("--lengths", choices=MEANS, default="sharegpt", help="of which data set (default: %(default)s)")
    add("--context", type=int, default=1024, help="maximum tokens of a request (default: %(default)s)")
    add("--longest", type=int, help="maximum tokens of a request in the stream (default: that of --context)")
    add("--long", type=int, default=768, help="tokens of a long prompt (default: %(default)s)")
    add("--prefill-tokens", type=int, help="maximum number of prompt tokens of a step of npu-sim")
    add("--speculate", choices=["ngram"], help="let npu-sim draft tokens")
    add("--threads", type=int, default=usable_cores(), help="of llama.cpp (default: all usable cores, as npu-sim)")
    add("--seed", type=int, default=0, help="of the lengths and prompts (default: %(default)s)")
    add("--json", type=Path, help="write the results to this file")
    return parser


def main() -> None:
    from npu_compiler.files import write_atomically
    from npu_sim.llm import load_checkpoint

    arguments, console = make_parser().parse_args(), Console()
    checkpoint = seeded_qwen() if arguments.model == SEEDED else load_checkpoint(arguments.model)
    vocabulary = int(checkpoint.config.vocab_size)
    longest = arguments.longest or arguments.context
    jobs = draw_jobs(arguments.requests, arguments.lengths, longest, vocabulary, arguments.seed)
    tokens = [sum(len(job.prompt) for job in jobs), sum(job.new for job in jobs)]
    console.print(f"{len(jobs)} requests with {tokens[0]} prompt tokens and {tokens[1]} new ones")
    contenders = []
    for contender in arguments.contenders.split(","):
        if contender == "npu-sim":
            contenders.append(measure_ours(checkpoint, jobs, arguments, console))
        else:
            from benchmarks.cpu.llm import shipped_file

            path = shipped_file() if arguments.model == "smollm2" else Path(arguments.model)
            contenders.append(measure_llama(path, jobs, arguments))
    console.print(table(contenders))
    if arguments.json:
        write_atomically(arguments.json, json.dumps([asdict(each) for each in contenders], indent=2).encode())


if __name__ == "__main__":
    main()
