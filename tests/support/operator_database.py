"""PyTorch's operator database, run by `npu_sim.compile`, saved modules and `torch.compile`, against eager PyTorch.

`python tests/support/operator_database.py` examines all of it in processes that are begun anew when an op hangs or ends
them, and goes on where an earlier run stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import npu_sim
from npu_compiler.errors import NPUError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
ROUTES = ("compile", "save and load", "in-place", "special values", "torch.compile")
RIGHT, REFUSED, WRONG, RAW, HANG = "right", "refused", "wrong", "raw", "hang"
SECONDS = 90  # for a case
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 1e-40, "max", "-max", "tiny", 0.0, 1.0)
_MEMORY = re.compile(r"^(new_)?empty|^resize")  # ops whose results are uninitialized memory
_TIES = re.compile(r"^(arg)?sort$|^topk$|^kthvalue$|^(nan)?median$|^mode$")  # whose indices may be of any equal element

# Answers that differ from PyTorch's, and why that is right: op and route → reason.
EXCUSES: dict[tuple[str, str], str] = {
    (
        "long",
        "special values",
    ): "which integer NaN or infinity becomes PyTorch leaves to the CPU; ours is of 32 bits",
    ("searchsorted", "special values"): "the boundaries are no longer sorted, and then PyTorch promises nothing",
    ("linalg_eigvals", "special values"): "eager PyTorch ends the process on NaN, which LAPACK is handed as it is",
    ("cdist", "special values"): "the largest difference, of p = inf, loses a NaN in PyTorch but not here",
    ("mode", "special values"): "PyTorch sorts with a comparison that has no place for NaN: where it stood decides",
}

LAST = Path(__file__).parents[2] / "docs" / "operators.json"  # the summary of the last run of all of it
FAULTY = frozenset(json.loads(LAST.read_text())["faults"]) if LAST.exists() else frozenset()


class Expired(BaseException):
    """A case took too long."""


@dataclass(frozen=True)
class Problem:
    """A case that was not right, and not refused in a sentence."""

    dtype: str
    sample: int
    route: str
    outcome: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case: its kind, what went wrong, and what left the device and why."""

    kind: str
    message: str
    off_device: dict[str, str]


@dataclass
class Examination:
    """Outcome of an op.

    Attributes:
        on_device: Whether all samples of its first dtype ran wholly on the device; None if there were none.
        off_device: Ops that did not run on the device → reason.
        outcomes: The number of cases by outcome.
    """

    op: str
    dtype: str = ""
    on_device: bool | None = None
    off_device: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def faults(self) -> list[Problem]:
        """The problems without an excuse."""
        return [x for x in self.problems if (self.op, x.route) not in EXCUSES]


@dataclass(frozen=True)
class Sample:
    """Arguments of an op: all their leaves, which of these are tensors, and their structure."""

    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: pytree.TreeSpec

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.leaves[place] for place in self.places)

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return function(first, *args, **kwargs)

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        changed: dict[int, torch.Tensor] = {}
        leaves = list(self.leaves)
        for place in self.places:
            leaves[place] = changed.setdefault(id(leaves[place]), change(leaves[place]))
        return Sample(tuple(leaves), self.places, self.spec)


class Call(nn.Module):
    """A call of an op as a module of its tensors."""

    def __init__(self, function: Callable[..., Any], sample: Sample) -> None:
        super().__init__()
        self.function, self.sample = function, sample

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.sample.call(self.function, tensors)


@cache
def operators() -> dict[str, Any]:
    """The database: name → entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.formatted_name: op for op in op_db}


def dtypes_of(op: Any) -> list[torch.dtype]:
    """Return those of `DTYPES` that an op has on the CPU; int32 for an op without int64."""
    supported = op.supported_dtypes("cpu")
    chosen = [dtype for dtype in DTYPES if dtype in supported]
    if torch.int32 in supported and torch.int64 not in supported:
        chosen.append(torch.int32)
    return chosen


def samples_of(op: Any, dtype: torch.dtype, limit: int) -> list[tuple[int, Sample]]:
    """Some of an op's samples with their numbers, spread over all of them."""
    torch.manual_seed(0)
    random.seed(0)
    drawn = []
    for item in op.sample_inputs("cpu", dtype, requires_grad=False):
        leaves, spec = pytree.tree_flatten((item.input, item.args, item.kwargs))
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        drawn.append(Sample(tuple(leaves), places, spec))
    chosen = sorted({k * len(drawn) // limit for k in range(limit)}) if drawn else []
    return [(number, drawn[number]) for number in chosen]


def with_special_values(sample: Sample, seed: int, *, first_alone: bool = False) -> Sample:
    """The sample with NaN, infinities, -0, a denormal and extremes in its floating-point tensors, or in the first."""
    draw = random.Random(seed)
    first = sample.leaves[sample.places[0]] if sample.places else None

    def change(value: torch.Tensor) -> torch.Tensor:
        if (
            first_alone
            and value is not first
            or not value.is_floating_point()
            or value.layout is not torch.strided
            or not value.numel()
        ):
            return value
        info = torch.finfo(value.dtype)
        named = {"max": info.max, "-max": info.min, "tiny": info.tiny}
        changed = value.detach().clone(memory_format=torch.contiguous_format)
        flat = changed.view(-1)
        # Sums of both signs of an extreme, or of extremes and infinities, depend on their order.
        left_out = draw.choice([("max", math.inf, -math.inf), ("-max", math.inf, -math.inf), ("max", "-max")])
        specials = [x for x in draw.sample(SPECIAL, len(SPECIAL)) if x not in left_out]
        places = draw.sample(range(flat.numel()), max(1, min(len(specials), flat.numel() // 2)))
        for place, special in zip(places, specials, strict=False):
            flat[place] = named[special] if isinstance(special, str) else special
        return changed

    return sample.with_tensors(change)


def examine(name: str, limit: int, note: Callable[[str], None] = lambda _: None) -> Examination:
    """Run an op's cases.

    Args:
        limit: Samples in its first dtype; there are fewer in the others.
        note: Function that is called with the name of each case before it runs.
    """
    op = operators()[name]
    found = Examination(name)
    outcomes: Counter[str] = Counter()
    for order, dtype in enumerate(dtypes_of(op)):
        count = limit if order == 0 else max(1, limit // 4)
        try:
            with _quiet():
                chosen = samples_of(op, dtype, count)
        except Exception:  # the database itself has no samples here
            continue
        for position, (number, sample) in enumerate(chosen):
            for route in _routes(op, dtype, position, order):
                note(f"{str(dtype).removeprefix('torch.')} {number} {route}")
                result = run(op, sample, dtype, route)
                if result is None:
                    continue
                outcomes[result.kind] += 1
                if result.kind not in (RIGHT, REFUSED):
                    short = str(dtype).removeprefix("torch.")
                    found.problems.append(
                        Problem(short, number, route, result.kind, result.message.split("\n")[0][:300])
                    )
                if order == 0 and route == "compile":
                    found.dtype = str(dtype).removeprefix("torch.")
                    found.off_device |= result.off_device
                    is_on = result.kind == RIGHT and not result.off_device
                    found.on_device = is_on if found.on_device is None else found.on_device and is_on
    found.outcomes = dict(outcomes)
    return found


def _routes(op: Any, dtype: torch.dtype, position: int, order: int) -> list[str]:
    """The routes that a sample takes: all of them only an op's first."""
    routes = ["compile"]
    if position == 0:
        routes.append("save and load")
    if position <= 1 and op.get_inplace() is not None and order in (0, 1, 3):
        routes.append("in-place")
    if position <= 1 and dtype.is_floating_point:
        routes.append("special values")
    if position == 0 and order in (0, 3):
        routes.append("torch.compile")
    return routes


def fault_of_drawn_case(name: str, draw: random.Random) -> str | None:
    """Return what is wrong, in words, in a drawn sample of an op, dtype and route; None if nothing is."""
    op = operators()[name]
    choices = dtypes_of(op)
    if not choices:
        return None
    dtype = draw.choice(choices)
    try:
        with _quiet():
            chosen = samples_of(op, dtype, 1000)
    except Exception:  # the database itself has no samples here
        return None
    if not chosen:
        return None
    number, sample = draw.choice(chosen)
    routes = {route for order in (0, 1) for route in _routes(op, dtype, 0, order)}
    route = draw.choice(sorted(routes))
    outcome = run(op, sample, dtype, route)
    short = str(dtype).removeprefix("torch.")
    if outcome is None or outcome.kind in (RIGHT, REFUSED) or (name, route) in EXCUSES:
        return None
    return f"{name}, {short} sample {number}, {route}: {outcome.kind}: {outcome.message}"


def run(op: Any, sample: Sample, dtype: torch.dtype, route: str) -> Outcome | None:
    """The outcome of a case; None if eager PyTorch cannot do it."""
    if route == "special values":
        # A convolution may multiply the zeros around its input with its weights, or leave them out; boundaries of
        # buckets have to be in order.
        sample = with_special_values(sample, 0, first_alone="conv" in op.name or op.name == "bucketize")
    module = Call(op.get_inplace() if route == "in-place" else op.op, sample).eval()
    first = sample.leaves[0] if sample.leaves else None
    tied = first if _TIES.search(op.name) and isinstance(first, torch.Tensor) else None
    is_memory = bool(_MEMORY.search(op.name))
    meant = _MEANINGS.get(op.name) if route == "special values" else None
    also = None if meant is None else Call(meant, sample)
    return run_module(module, sample.tensors(), route, tied=tied, is_memory=is_memory, also=also)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention in which what a causal mask hides takes no part, not even as zero times infinity."""
    attend = torch.nn.functional.scaled_dot_product_attention
    if not options.pop("is_causal", False):
        return attend(query, key, value, **options)
    ends = [min(row + 1, key.size(-2)) for row in range(query.size(-2))]
    rows = [
        attend(query[..., row : row + 1, :], key[..., :end, :], value[..., :end, :], **options)
        for row, end in enumerate(ends)
    ]
    return torch.cat(rows, -2)


# Ops whose kernels in PyTorch differ in what special values do: op → function that is as right.
_MEANINGS: dict[str, Callable[..., Any]] = {"nn.functional.scaled_dot_product_attention": _attention}


def run_module(
    module: nn.Module,
    tensors: Sequence[torch.Tensor],
    route: str,
    *,
    tied: torch.Tensor | None = None,
    is_memory: bool = False,
    also: nn.Module | None = None,
) -> Outcome | None:
    """Compare a module's result by one of our routes with eager PyTorch's; None if that raises an error.

    Args:
        tied: The tensor that the indices among the results count, where they may be those of any equal element.
        is_memory: Whether the result is uninitialized memory.
        also: A module whose results are as right.
    """
    off: dict[str, str] = {}
    try:
        with _quiet():
            expected = _eager(module, tensors, 0)
            is_drawn = is_memory or _differ(expected, _eager(module, tensors, 1))
    except Exception:
        return None
    try:
        with _quiet(), _limit(SECONDS):
            ours = _ROUTES[route](module, tensors, off)
            others = [_reference(module, tensors)]
            problem = _compare(ours, expected, others, is_drawn, tied)
            if problem is not None and route == "special values":
                others += [_decomposed(module, tensors), () if also is None else _eager(also, tensors, 0)]
                problem = _compare(ours, expected, others, is_drawn, tied)
    except Expired:
        return Outcome(HANG, f"longer than {SECONDS} s", off)
    except NPUError as error:
        text = str(error)
        return Outcome(RAW, f"more than a sentence: {text}", off) if "\n" in text else Outcome(REFUSED, text, off)
    except Exception as error:
        is_refused = route == "torch.compile" and _is_pytorchs(error, module, tensors)
        return Outcome(REFUSED if is_refused else RAW, f"{type(error).__name__}: {error}", off)
    return Outcome(RIGHT if problem is None else WRONG, problem or "", off)


def copies(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of tensors, with their strides, and shared where they are one."""
    copied: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        copied.setdefault(id(tensor), tensor.detach().clone())
    return tuple(copied[id(tensor)] for tensor in tensors)


def _eager(module: nn.Module, tensors: Sequence[torch.Tensor], seed: int) -> Any:
    """The result, and the arguments after the call.

    The database's random ops set a seed of their own, which is replaced: so two seeds tell that an op is random.
    """
    given, set_seed = copies(tensors), torch.manual_seed
    set_seed(seed)
    with mock.patch.object(torch, "manual_seed", lambda _: set_seed(seed)):
        return _kept(module(*given)), given


def _kept(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone() if x.layout is torch.strided else x, result)


def _compiled(module: nn.Module, tensors: Sequence[torch.Tensor], off: dict[str, str]) -> Any:
    compiled = npu_sim.compile(module, copies(tensors))
    given = copies(tensors)
    result = _kept(compiled(*given))
    found = compiled.report()
    off |= {x.op: x.reason for program in found.programs for x in program.off_device}
    if found.graph_breaks:
        off["graph break"] = "PyTorch cannot trace it as one graph"
    return result, given


def _saved(module: nn.Module, tensors: Sequence[torch.Tensor], off: dict[str, str]) -> Any:
    from npu_runtime.torch_arrays import numpy_to_tensor

    compiled = npu_sim.compile(module, copies(tensors))
    if not hasattr(compiled, "save"):
        raise NPUError("several graphs are not saved")
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(Path(folder) / "call.npumod")
        loaded = npu_sim.load(Path(folder) / "call.npumod")
        given = copies(tensors)
        result = loaded(*given)
    leaves = pytree.tree_leaves(result)
    return [numpy_to_tensor(x) if isinstance(x, np.ndarray) else x for x in leaves], given


def _torch_compiled(
    module: nn.Module, tensors: Sequence[torch.Tensor], off: dict[str, str], backend: str = "npu_sim"
) -> Any:
    torch._dynamo.reset()
    given = copies(tensors)
    return _kept(torch.compile(module, backend=backend)(*given)), given


_ROUTES: dict[str, Callable[..., Any]] = {
    "compile": _compiled,
    "in-place": _compiled,
    "special values": _compiled,
    "save and load": _saved,
    "torch.compile": _torch_compiled,
}


def _is_pytorchs(error: BaseException, module: nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an error of `torch.compile` is an `NPUError` inside, or comes from PyTorch whatever the backend."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, NPUError):
            return True
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    try:
        with _quiet():
            _torch_compiled(module, tensors, {}, "eager")
    except Exception:
        return True
    return False


def _reference(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
    """The results in double precision, where the op has it."""
    try:
        wide = [x.double() if x.is_floating_point() and x.layout is torch.strided else x for x in tensors]
        return _eager(copy.deepcopy(module).double(), wide, 0)
    except Exception:
        return None


class _Decompositions(TorchDispatchMode):
    """Runs PyTorch's decompositions in place of the ops: what infinities become may differ, and both are PyTorch's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        decomposed = decomposition_table.get(func)
        if decomposed is None:
            return func(*args, **(kwargs or {}))
        with self:
            return decomposed(*args, **(kwargs or {}))


def _decomposed(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
    """The results of PyTorch's decompositions; nothing where they fail."""
    try:
        with _Decompositions():
            return _eager(module, tensors, 0)
    except Exception:
        return ()


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return any(
        isinstance(x, torch.Tensor) and x.layout is torch.strided and not torch.allclose(x, y, 0, 0, equal_nan=True)
        for x, y in pairs
    )


def _compare(ours: Any, expected: Any, others: Sequence[Any], is_drawn: bool, tied: torch.Tensor | None) -> str | None:
    """Describe the first difference in the results and in the arguments after the call; None if there is none.

    Args:
        others: Results that are more exact, and further ones of PyTorch that are as good.
        tied: The tensor that the indices among the results count, where they may be those of any equal element.
    """
    got, wanted = pytree.tree_leaves(ours), pytree.tree_leaves(expected)
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    lists = [leaves for x in others if len(leaves := pytree.tree_leaves(x)) == len(wanted)]
    for index, (x, y, *rest) in enumerate(zip(got, wanted, *lists, strict=True)):
        problem = _difference(x, y, rest, is_drawn)
        if problem is not None and not (tied is not None and _pick_the_same(tied, x, y)):
            return f"result {index}: {problem}"
    return None


def _pick_the_same(values: torch.Tensor, ours: Any, expected: Any) -> bool:
    """Whether indices along some dimension pick elements of the same value."""
    if not isinstance(ours, torch.Tensor) or ours.dtype != torch.int64 or ours.shape != expected.shape:
        return False
    for dim in range(max(values.dim(), 1)):
        try:
            rows = [x if x.dim() == values.dim() else x.unsqueeze(dim) for x in (ours, expected)]
            pair = [torch.take_along_dim(values, x, dim) for x in rows]
        except (RuntimeError, IndexError):
            continue
        if not _differ([pair[0].double()], [pair[1].double()]):
            return True
    return False


def _difference(ours: Any, expected: Any, others: Sequence[Any], is_drawn: bool) -> str | None:
    if not isinstance(expected, torch.Tensor):
        if isinstance(ours, torch.Tensor) and ours.dim() == 0:
            ours = ours.item()
        is_same = ours == expected or ours != ours and expected != expected
        return None if is_same or is_drawn else f"{ours!r} instead of {expected!r}"
    if not isinstance(ours, torch.Tensor):
        return f"a {type(ours).__name__} instead of a tensor"
    if (ours.dtype, ours.shape) != (expected.dtype, expected.shape):
        return f"{ours.dtype} {list(ours.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if is_drawn or not expected.numel():
        return None
    if expected.layout is not torch.strided:
        ours, expected, others = ours.to_dense(), expected.to_dense(), []
    others = [x for x in others if isinstance(x, torch.Tensor) and x.shape == expected.shape]
    if expected.is_complex():
        ours, expected = (torch.view_as_real(x.resolve_conj()) for x in (ours, expected))
        others = [torch.view_as_real(x.resolve_conj()) for x in others if x.is_complex()]
    if not expected.is_floating_point():
        where = ours != expected
        return f"{int(where.sum())} of {where.numel()} differ: {_few(ours, expected, where)}" if where.any() else None
    return _float_difference(ours, expected, [x.double() for x in others if x.is_floating_point()])


def _float_difference(ours: torch.Tensor, expected: torch.Tensor, others: Sequence[torch.Tensor]) -> str | None:
    """Return what differs beyond rounding; the error of eager PyTorch in this dtype is the measure."""
    info = torch.finfo(expected.dtype)
    relative, absolute = (1e-4, 1e-5) if info.eps < 1e-4 else (4 * info.eps, 2 * info.eps)
    a, b = ours.double(), expected.double()
    exact = others[0] if others else b
    is_plain = b.isfinite() & exact.isfinite()
    own = (b - exact).abs().where(is_plain, torch.zeros_like(b))
    least = 3 * own.max() + absolute * min(1.0, float(b.abs().where(is_plain, own).max()) or 1.0)
    same = (a.abs() > 0.9 * info.max) & (b.abs() > 0.9 * info.max) & (a.sign() == b.sign())
    same |= ~a.isfinite() & exact.isfinite() & ~(b.abs() < info.max**0.5)  # overflows on the way, in another order
    for right in (b, *others):
        same |= (a == right) | (a.isnan() & right.isnan()) | ((a - right).abs() <= least + relative * right.abs())
    return None if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} differ: {_few(ours, expected, ~same)}"


def _few(ours: torch.Tensor, expected: torch.Tensor, where: torch.Tensor) -> str:
    pairs = list(zip(ours[where].flatten().tolist(), expected[where].flatten().tolist(), strict=True))[:4]
    return ", ".join(f"{x!r} for {y!r}" for x, y in pairs)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _work(names: Sequence[str], limit: int, results: Path, progress: Path) -> None:
    """Examine ops, as a process of its own, adding a line to the results for each."""
    torch.set_num_threads(1)
    for name in names:
        found = examine(name, limit, lambda case, name=name: progress.write_text(f"{name}\n{case}"))
        with results.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")


class _Worker:
    """A process that examines ops one after the other, begun again behind the op on which it hangs or dies."""

    def __init__(self, names: list[str], limit: int, results: Path, index: int) -> None:
        self.names, self.limit, self.results, self.index = names, limit, results, index
        self.progress = results.with_suffix(f".progress{index}")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.progress.write_text("")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NPU_SIM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, "--worker", str(self.progress)]
        command += ["--results", str(self.results), "--samples", str(self.limit), "--ops", *self.names]
        with self.results.with_suffix(f".log{self.index}").open("a") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def is_done(self) -> bool:
        """Whether nothing is left to do; starts anew where the process has failed."""
        code = self.process.poll()
        is_stuck = code is None and time.time() - self.progress.stat().st_mtime > 3 * SECONDS
        if code == 0 or code is None and not is_stuck:
            return code == 0
        if is_stuck:
            self.process.kill()
            self.process.wait()
        name, _, case = self.progress.read_text().partition("\n")
        done = set(read_results(self.results))
        if not name:
            raise SystemExit(f"the process cannot start: see {self.results.with_suffix(f'.log{self.index}')}")
        if name not in done:
            dtype, number, route = (case or "? 0 ?").split(" ", 2)
            outcome = HANG if is_stuck else RAW
            problem = Problem(dtype, int(number), route, outcome, f"the process ended with {self.process.returncode}")
            with self.results.open("a") as file:
                file.write(json.dumps(asdict(Examination(name, outcomes={outcome: 1}, problems=[problem]))) + "\n")
        done.add(name)
        self.names = [x for x in self.names if x not in done]
        if not self.names:
            return True
        self.process = self._start()
        return False

    def stop(self) -> None:
        """End the process, in the middle of an op, of which nothing is noted."""
        self.process.kill()
        self.process.wait()


def read_results(path: Path) -> dict[str, Examination]:
    """The results of a run so far, by op."""
    found: dict[str, Examination] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            item = json.loads(line)
        except ValueError:  # of a process that was ended as it wrote
            continue
        problems = [Problem(**x) for x in item.pop("problems")]
        found[item["op"]] = Examination(**item, problems=problems)
    return found


def summary(found: dict[str, Examination]) -> dict[str, Any]:
    """The figures of a run, and what was wrong in it."""
    outcomes: Counter[str] = Counter()
    for item in found.values():
        outcomes.update(item.outcomes)
    return {
        "torch": torch.__version__.split("+")[0],
        "ops": len(found),
        "on_device": sorted(name for name, item in found.items() if item.on_device),
        "outcomes": {outcome: outcomes[outcome] for outcome in (RIGHT, REFUSED, WRONG, RAW, HANG)},
        "faults": {name: [asdict(x) for x in item.faults] for name, item in sorted(found.items()) if item.faults},
        "off_device": {name: item.off_device for name, item in sorted(found.items()) if item.off_device},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="*", help="names of the database; default: all of it")
    parser.add_argument("--samples", type=int, default=8, help="samples of an op in its first dtype")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="ends then, with the results until then")
    parser.add_argument("--results", type=Path, default=Path("build/operators.jsonl"), help="goes on with this file")
    parser.add_argument("--summary", type=Path, help="writes the figures of all results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _work(options.ops, options.samples, options.results, options.worker)
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = read_results(options.results)
    left = [name for name in options.ops or operators() if name not in done]
    shares = [left[index :: options.jobs] for index in range(options.jobs)]
    workers = [_Worker(share, options.samples, options.results, index) for index, share in enumerate(shares) if share]
    end = time.monotonic() + options.seconds
    while workers and time.monotonic() < end:
        workers = [worker for worker in workers if not worker.is_done()]
        time.sleep(1)
    for worker in workers:
        worker.stop()
    figures = summary(read_results(options.results))
    if count := len(set(options.ops or operators()) - read_results(options.results).keys()):
        print(f"{count} ops are left; the same command goes on with them")
    if options.summary is not None:
        options.summary.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    print(f"{figures['ops']} ops, {len(figures['on_device'])} wholly on the device; {figures['outcomes']}")
    for name, problems in figures["faults"].items():
        print(
            name,
            *(f"  {x['dtype']} sample {x['sample']}, {x['route']}: {x['outcome']}: {x['message']}" for x in problems),
            sep="\n",
        )
    sys.exit(bool(figures["faults"]))


if __name__ == "__main__":
    main()
