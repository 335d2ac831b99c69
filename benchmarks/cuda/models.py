"""Models of vision, language and diffusion in float16 on the CUDA device, against `torch.compile`.

    python -m benchmarks.cuda.models [--only convnext,…] [--batches 1,many] [--peers reduce-overhead,…] [--accounts]
    python -m benchmarks.cuda.models --draw SEED [--library transformers] [--count 40] [--batches 1,16] …

The second form measures models drawn at random.

Programs and peers are compiled in several processes at a time, which share the GPUs. When all of these are ready, each
in turn has its GPU for itself and times all contenders of its row in turns. Each is compared with PyTorch in float32.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import npu_compiler
from benchmarks.cuda.timing import Contender, account, medians, time_in_turn, torch_contender
from benchmarks.draws import LIBRARIES, drawn, entry_of
from benchmarks.peers import compiled
from benchmarks.zoo import ENTRIES, seeded
from cuda_runtime import CUDABackend
from npu_runtime import Executor, NPUBuffer, load_weights
from npu_runtime.cache_folder import cache_folder
from npu_sim.extract import extract_ir

PEERS = ("reduce-overhead", "max-autotune")
OURS, EAGER = "ours", "eager"
PATIENCE = 40  # seconds
SLACK, ROUNDING = 2.0, 2e-3  # how far from float32 a result may be: times eager PyTorch's error, and beyond


@dataclass(frozen=True)
class Queue:
    """The turns of processes on the GPUs after they have prepared their rows.

    Attributes:
        folder: Folder in which each process creates a file when it is ready.
        others: Number of processes to wait for.
        until: Time (`time.time`) at which waiting ends, as it does when none became ready for `PATIENCE` seconds.
    """

    folder: Path
    others: int
    until: float

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the body of this context in one process of a GPU at a time, after the other processes are ready."""
        Path(self.folder, str(os.getpid())).touch()
        ready, since = 1, time.time()
        while ready < self.others and time.time() < min(since + PATIENCE, self.until):
            time.sleep(0.2)
            count = len(list(self.folder.iterdir()))
            if count != ready:
                ready, since = count, time.time()
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        with Path(self.folder.parent, f"{self.folder.name}-{gpu}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def errors_of(results: dict[str, Tensor], reference: Tensor) -> dict[str, float]:
    """Return contender → ‖result - reference‖ / ‖reference‖.

    Raises:
        ValueError: a contender's error is much larger than that of eager PyTorch, whose own answer must be finite.
    """
    if not results[EAGER].isfinite().all():
        raise ValueError("eager PyTorch's answer in float16 is not finite: these random weights decide nothing")
    errors = {name: float((result.float() - reference).norm() / reference.norm()) for name, result in results.items()}
    if any(not error <= SLACK * errors[EAGER] + ROUNDING for error in errors.values()):
        raise ValueError(f"wrong results; relative errors: {errors}")
    return errors


class Ours:
    """A module as a program on the CUDA device, with its inputs in device memory."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        ir = extract_ir(module, inputs)
        started = time.perf_counter()
        self.program = npu_compiler.compile(ir, CUDABackend().target)
        self.compile_seconds = time.perf_counter() - started
        self._inputs, self._state = inputs, {**dict(module.named_buffers()), **module.state_dict()}

    def prepare(self) -> None:
        """Compile the kernels, whatever else the GPU does meanwhile; forget what trials chose."""
        Executor(self.program, CUDABackend())
        for path in (cache_folder() / "cuda").glob("*.json"):
            path.unlink()

    def start(self) -> None:
        """Choose among the compiled kernels by trials, and load the weights."""
        self.backend = CUDABackend()
        self._executor = Executor(self.program, self.backend)
        self._weights = load_weights(self._state, self.program, self.backend, strict=False)
        self._bound = {
            spec.name: NPUBuffer.from_numpy(x.numpy(), self.backend, spec=spec)
            for spec, x in zip(self.program.input_specs, self._inputs, strict=True)
        }

    def run(self) -> Any:
        return self._executor.run(self._bound, self._weights)

    def result(self) -> Tensor:
        return torch.from_numpy(self.run()[self.program.output_specs[0].name].to_numpy()).cuda()


@torch.no_grad()
def measure(
    name: str,
    batch: int,
    peers: tuple[str, ...],
    descent: bool,
    with_account: bool,
    rounds: int,
    queue: Queue,
) -> str:
    """Time one model at one batch size; return a row as text: milliseconds, errors, and our time by kernel.

    Args:
        peers: Modes of `torch.compile`.
        descent: Whether it tunes by coordinate descent.
        with_account: Whether to list our time by kernel.
    """
    entry = entry_of(name)
    module, inputs = seeded(entry), entry.inputs(batch, 1)
    rounded = [x.half() if x.is_floating_point() else x for x in inputs]
    # Copies, since some modules keep what they computed in a call.
    ours = Ours(deepcopy(module).half(), rounded)
    started = time.perf_counter()
    ours.prepare()
    seconds = time.perf_counter() - started
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    reference = deepcopy(module).cuda()(*(x.cuda() for x in inputs))
    halves = [x.cuda() for x in rounded]
    images = any(x.dim() == 4 for x in halves)
    form = torch.channels_last if images else torch.preserve_format
    peer = module.to("cuda", torch.float16)
    for tensor in (*peer.parameters(), *peer.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=form)
    halves = [x.to(memory_format=form) if x.dim() == 4 else x for x in halves]
    calls: dict[str, Callable[..., Tensor]] = {EAGER: peer}
    problems = dict[str, str]()
    for mode in peers:
        try:
            calls[mode] = compiled(peer, halves, mode, freezing=True, descent=descent)
        except Exception as error:  # our own time is worth having beside eager PyTorch's
            problems[mode] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    with queue.alone():
        torch.backends.cudnn.benchmark = True
        started = time.perf_counter()
        ours.start()
        trials = time.perf_counter() - started
        results = {OURS: ours.result(), **{mode: call(*halves).clone() for mode, call in calls.items()}}
        errors = errors_of(results, reference)
        contenders = {OURS: Contender(ours.run, ours.backend.timed)}
        contenders |= {mode: torch_contender(lambda call=call: call(*halves)) for mode, call in calls.items()}  # type: ignore[misc]
        ms = medians(time_in_turn(contenders, rounds))
        rows = account(ours.run) if with_account else []
    ratios = " ".join(f"{mode} {ms[mode]:.4f} ({ms[mode] / ms[OURS]:.2f}x)" for mode in calls)
    lines = [
        f"ROW {name} b{batch}: ours {ms[OURS]:.4f} ms {ratios}; {len(ours.program.plan.calls)} calls; errors "
        + " ".join(f"{mode} {error:.1e}" for mode, error in errors.items())
        + f"; compile {ours.compile_seconds:.1f} s, kernels {seconds:.1f} s, trials {trials:.1f} s"
    ]
    lines += [f"  {mode} fails: {problem}" for mode, problem in problems.items()]
    busy = sum(each for _, each, _ in rows)
    if rows:
        lines.append(f"  kernels {busy:.4f} ms")
    lines += [f"  {1000 * each:9.1f} us {count:5.0f} x {kernel[:90]}" for kernel, each, count in rows[:22]]
    return "\n".join(lines)


def _guarded(gpu: str, cache: Path, *arguments: Any) -> str:
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "NPU_SIM_CACHE": str(cache)}
    try:
        return measure(*arguments)
    except Exception:
        return f"ROW {arguments[0]} b{arguments[1]}: FAILED\n{traceback.format_exc()[-1500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(ENTRIES), help="comma-separated models, as vit or vit:16 (default: %(default)s)"
    )
    parser.add_argument("--draw", type=int, metavar="SEED", help="measure models drawn at random instead")
    parser.add_argument("--library", choices=LIBRARIES, default="timm", help="where to draw (default: %(default)s)")
    parser.add_argument("--count", type=int, default=40, help="models to draw (default: %(default)s)")
    parser.add_argument("--batches", default="1,many", help="comma-separated sizes (default: %(default)s)")
    parser.add_argument("--peers", default="", help=f"modes of torch.compile, of {', '.join(PEERS)} (default: none)")
    parser.add_argument("--no-descent", action="store_true", help="compile peers without tuning by coordinate descent")
    parser.add_argument("--accounts", action="store_true", help="list our kernels by time")
    parser.add_argument("--processes", type=int, default=12, help="rows to prepare at a time (default: %(default)s)")
    parser.add_argument("--within", type=float, default=1e9, help="seconds to wait for all processes to be ready")
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "npu-sim-inductor")))
    default = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", default).split(",")
    peers = tuple(filter(None, arguments.peers.split(",")))
    names = arguments.only.split(",")
    if arguments.draw is not None:
        names = drawn(arguments.library, arguments.draw, arguments.count)
    rows = [
        (name, entry_of(name).many if batch == "many" else int(batch))
        for name, _, own in (name.partition(":") for name in names)
        for batch in (own or arguments.batches).split(",")
    ]
    started, status = time.perf_counter(), 0
    processes = min(arguments.processes, len(rows))
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    for setting in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(setting, threads)
    with (
        tempfile.TemporaryDirectory() as parent,
        ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        ready = Path(parent, "ready")
        ready.mkdir()
        queue = Queue(ready, processes, time.time() + arguments.within)
        settings = (peers, not arguments.no_descent, arguments.accounts, arguments.rounds, queue)
        futures = [
            pool.submit(_guarded, gpus[number % len(gpus)], Path(parent, str(number)), *row, *settings)
            for number, row in enumerate(rows)
        ]
        for future in as_completed(futures):
            text = future.result()
            status |= "FAILED" in text
            print(f"[{time.perf_counter() - started:.0f} s] {text}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
