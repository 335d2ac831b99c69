"""A contender (library or program) of the CPU benchmark: how it is run, and which packages it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.timing import Timer, wall_time

DTYPES = ("bfloat16", "float16", "float32")
NEEDED = {
    "ONNX Runtime": ("onnxruntime", "onnx", "onnxscript"),
    "OpenVINO": ("openvino", "onnx", "onnxscript"),
    "llama.cpp": ("xllamacpp", "gguf"),
}

Array = NDArray[Any]


@dataclass(frozen=True)
class Contender:
    """A way to compute a task, which is timed against others.

    Attributes:
        seconds: Runs it once and returns the seconds that it took.
        output: Runs it once and returns the result in float32.
    """

    seconds: Timer
    output: Callable[[], Array]


Factory = Callable[[], Contender]


def prepare(factories: Mapping[str, Factory], wanted: Callable[[str], bool]) -> dict[str, tuple[Contender, Array]]:
    """Create the wanted contenders, each with its output.

    A contender whose packages are not installed, or that cannot run the task, is left out with a printed message.
    """
    contenders: dict[str, tuple[Contender, Array]] = {}
    for name, factory in factories.items():
        if not wanted(name):
            continue
        packages = next((packages for peer, packages in NEEDED.items() if name.startswith(peer)), ())
        if missing := [package for package in packages if find_spec(package) is None]:
            print(f"{name} is left out: {', '.join(missing)} not installed (the extra 'peers')", flush=True)
            continue
        try:
            contender = factory()
            contenders[name] = contender, contender.output()
        except Exception as error:  # of any of five libraries; the others can still be compared
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{name} is left out: {reason[:300]}", flush=True)
    return contenders


def torch_contender(call: Callable[[], Tensor]) -> Contender:
    @torch.no_grad()
    def run() -> Tensor:
        return call()

    return Contender(wall_time(run), lambda: _numpy(run()))


def _numpy(x: Tensor) -> Array:
    array: Array = x.detach().float().numpy().copy()
    return array
