"""Auto-tuning of convolutions: the fastest of our kernels, plans of cuDNN and products of cuBLASLt, by trials."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

from cuda_compiler.cuda_program import LaunchKind, convolution_of, kernel_launch_of
from cuda_runtime.cuda_device import CUDADevice
from cuda_runtime.cudnn import ConvolutionPlan, Cudnn, PlanChoice
from cuda_runtime.trials import fill_randomly, graph_seconds, keep_choice, kept_choice
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

Form: TypeAlias = KernelCall | ConvolutionPlan
Start: TypeAlias = Callable[[KernelCall, Sequence[int]], Callable[[], object]]

_MOST_SECONDS = 60.0  # time limit for trying cuDNN's plans at a start; the rest use our fastest kernel
# In convolutions this short, launch latency dominates. Our kernels hide it by overlapping the kernel before, which
# trials do not show, and building cuDNN's plans takes much of the time of a first start.
_SHORT = 8e-6
_HIDDEN = 1e-6  # seconds of that latency, which a product of cuBLASLt has to gain
_PLANS = 6
_LAUNCHES = 12
# A run reads each weight once, from memory; trials rotate through more bytes of copies than the L2 cache holds.
_ROTATED_BYTES = 96 * 2**20
_ALIGNMENT = 512


class TunedConvolutions:
    """The convolutions of a backend, each with its fastest implementation on this GPU.

    A choice, once made, is kept on disk, so that results are the same from run to run.

    Args:
        folder: Folder of the kept choices, a file each, named by a hash of all that determines the choice.
        start: Returns a function that enqueues a kernel of ours, or a product of cuBLASLt, on operands at addresses,
            inputs first.
        cudnn: The handle of cuDNN; None if it is missing, so that it is not tried.
    """

    def __init__(self, device: CUDADevice, folder: Path, start: Start, cudnn: Cudnn | None) -> None:
        self._device, self._folder, self._start, self._cudnn = device, folder, start, cudnn
        self._chosen: dict[str, Form] = {}

    def kernels(self, call: KernelCall) -> list[KernelCall]:
        """The calls of our kernels that may be launched for a convolution; all must be compiled before `tune`.

        After a choice, these are the chosen kernel, or none if a plan of cuDNN was chosen.
        """
        chosen = self._choice(call)
        if chosen is None:
            return kernels_of(call)
        return [chosen] if isinstance(chosen, KernelCall) and not _is_product(chosen) else []

    def products(self, call: KernelCall) -> list[KernelCall]:
        """The product of cuBLASLt that may be launched for a convolution, in a list.

        Before a choice, it is the one that will be tried, if any; after it, the list is empty unless that was chosen.
        """
        chosen, product = self._choice(call), product_of(call)
        return [product] if product is not None and (chosen is None or _is_product(chosen)) else []

    def tune(self, calls: Iterable[KernelCall]) -> None:
        """Choose an implementation for each new convolution by trials."""
        unknown = {_key(call): call for call in calls if self._choice(call) is None}
        if not unknown:
            return
        free, _ = self._device.runtime.memGetInfo()
        needs = {key: size for key, call in unknown.items() if (size := _Scratch(call).size) <= free // 2}
        memory = self._device.allocate(max(needs.values(), default=0), "the memory that convolutions are tried in")
        fastest = {key: self._fastest_kernel(unknown[key], memory) for key in needs}
        deadline = time.monotonic() + _MOST_SECONDS
        untried = set()
        for key, (form, seconds) in sorted(fastest.items(), key=lambda item: -item[1][1]):
            if seconds < _SHORT:
                break
            if time.monotonic() > deadline:
                untried.add(key)
                continue
            fastest[key] = self._faster_plan(unknown[key], memory, form, seconds)
        for key, (form, seconds) in fastest.items():
            self._chosen[key] = form
            self._device.counters["tuned"] += 1
            if key not in untried and math.isfinite(seconds):
                self._keep(key, unknown[key], seconds)

    def form(self, call: KernelCall) -> Form:
        """The chosen implementation of a convolution: a plan of cuDNN, or a call of one of our kernels."""
        chosen = self._choice(call)
        return kernels_of(call)[0] if chosen is None else over(chosen, call)

    def _choice(self, call: KernelCall) -> Form | None:
        key = _key(call)
        if key not in self._chosen and (recalled := self._recall(key, call)) is not None:
            self._chosen[key] = recalled
        return self._chosen.get(key)

    def _fastest_kernel(self, call: KernelCall, memory: Any) -> tuple[Form, float]:
        """The fastest of our kernels for a convolution, or the product of cuBLASLt, and its seconds."""
        kernels, product = kernels_of(call), product_of(call)
        best, least = self._faster(kernels, call, memory, kernels[0], math.inf)
        if product is None:
            return best, least
        form, seconds = self._faster([product], call, memory, best, least - _HIDDEN)
        return (best, least) if form is best else (form, seconds)

    def _faster_plan(self, call: KernelCall, memory: Any, best: Form, least: float) -> tuple[Form, float]:
        """The fastest of cuDNN's plans and its seconds, or `best` and `least` if none is faster."""
        if self._cudnn is None or not self._cudnn.takes(call):
            return best, least
        return self._faster(islice(self._cudnn.plans(call), _PLANS), call, memory, best, least)

    def _faster(
        self, forms: Iterable[Form], call: KernelCall, memory: Any, best: Form, least: float
    ) -> tuple[Form, float]:
        """The fastest of the forms and its seconds, or `best` and `least` if none is faster."""
        fill_randomly(self._device, memory, call.inputs[0].dtype)
        places = _Scratch(call).addresses(int(memory.data.ptr))
        for form in forms:
            try:
                launches = [self._launch(form, addresses) for addresses in places]
                seconds = self._seconds(launches, least)
            except self._refusals:
                continue
            if seconds < least:
                best, least = form, seconds
        return best, least

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        """The exceptions raised where this GPU cannot run a candidate, for lack of shared memory for example."""
        return (DeviceError, *self._device.failures, *(self._cudnn.failures if self._cudnn is not None else ()))

    def _launch(self, form: Form, addresses: Sequence[int]) -> Callable[[], object]:
        return self._start(form, addresses) if isinstance(form, KernelCall) else form.launch(addresses)

    def _seconds(self, launches: Sequence[Callable[[], object]], least: float) -> float:
        """Seconds that a launch takes, measured in a CUDA graph of all `launches`.

        Args:
            least: The least seconds of any candidate so far; one that is clearly slower is not measured further.
        """
        with self._device.active("cannot try a convolution"):
            launches[0]()  # loads its code, which not every version of CUDA can do during a capture
            self._device.stream.synchronize()
            return graph_seconds(self._device, list(islice(cycle(launches), _LAUNCHES)), least)

    def _path(self, key: str) -> Path:
        gpu = self._device.properties
        version = self._cudnn.version if self._cudnn is not None else None
        content = [key, gpu["name"].decode(), gpu["multiProcessorCount"], self._device.arch, version]
        return self._folder / f"conv_{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.json"

    def _recall(self, key: str, call: KernelCall) -> Form | None:
        """The implementation kept on disk for a convolution; None if there is none, or it is not available here."""
        try:
            kept = kept_choice(self._path(key))
            if kept.get("product"):
                return product_of(call)
            if kept["source"] is not None:
                return next(form for form in kernels_of(call) if form.source == kept["source"])
            choice = PlanChoice(int(kept["engine"]), {str(name): int(value) for name, value in kept["knobs"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration):
            return None
        return self._cudnn.plan(call, choice) if self._cudnn is not None else None

    def _keep(self, key: str, call: KernelCall, seconds: float) -> None:
        form = self._chosen[key]
        content: dict[str, Any] = {"convolution": json.loads(key), "source": None, "node": call.node}
        if _is_product(form):
            content |= {"product": True}
        elif isinstance(form, KernelCall):
            content |= {"source": form.source, "grid": kernel_launch_of(form).grid}
        else:
            content |= {"engine": form.choice.engine, "knobs": dict(form.choice.knobs)}
        if math.isfinite(seconds):
            content["microseconds"] = round(1e6 * seconds, 3)
        keep_choice(self._path(key), content)


def kernels_of(call: KernelCall) -> list[KernelCall]:
    """The calls of our kernels that implement a convolution, the compiler's first suggestion first."""
    launch = convolution_of(call)
    others = [
        replace(call, kernel=form.kernel, source=form.source, params=form.launch.params())
        for form in launch.alternatives
    ]
    return [replace(call, params=launch.first.params()), *others]


def product_of(call: KernelCall) -> KernelCall | None:
    """A convolution as the call of a product of cuBLASLt; None if it is none."""
    product = convolution_of(call).product
    if product is None:
        return None
    return replace(call, kernel=LaunchKind.CUBLAS_GEMM.value, source="", params=product.params())


def _is_product(form: Form) -> bool:
    return isinstance(form, KernelCall) and form.kernel == LaunchKind.CUBLAS_GEMM.value


def over(form: Form, call: KernelCall) -> Form:
    """The implementation `form`, chosen for an equal convolution, for the operands of `call`."""
    if isinstance(form, ConvolutionPlan):
        return form
    return replace(form, inputs=call.inputs, outputs=call.outputs, node=call.node)


def _key(call: KernelCall) -> str:
    """A key of everything that determines which implementation of a convolution is the fastest."""
    operands = [[list(view.shape), list(view.strides), view.dtype] for view in (*call.inputs, *call.outputs)]
    launch = convolution_of(call)
    described = dict(sorted(asdict(launch.computes).items()))
    forms = [*(form.source for form in kernels_of(call)), *([asdict(launch.product)] if launch.product else [])]
    return json.dumps([operands, described, forms])


class _Scratch:
    """The memory layout of a trial's operands, with enough copies of the weight to exceed the cache."""

    def __init__(self, call: KernelCall) -> None:
        self._sizes = [_aligned_bytes(view) for view in (*call.inputs, *call.outputs)]
        self._copies = max(1, min(_LAUNCHES, _ROTATED_BYTES // self._sizes[1]))
        self.size = sum(self._sizes) + (self._copies - 1) * self._sizes[1]

    def addresses(self, start: int) -> list[list[int]]:
        """The addresses of all operands, once for each copy of the weight.

        Args:
            start: Address of the scratch memory.
        """
        places = [start + sum(self._sizes[:number]) for number in range(len(self._sizes))]
        spare = start + sum(self._sizes)
        copies = [places[1], *(spare + number * self._sizes[1] for number in range(self._copies - 1))]
        return [[places[0], weight, *places[2:]] for weight in copies]


def _aligned_bytes(view: View) -> int:
    return -(-(view.span + 1) * itemsize(view.dtype) // _ALIGNMENT) * _ALIGNMENT
