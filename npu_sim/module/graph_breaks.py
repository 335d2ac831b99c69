"""Modules that `torch.export` cannot trace as one graph, run as several graphs with Python in between."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from npu_compiler.errors import InputError, IRError
from npu_sim.module.device_module import DeviceModule
from npu_sim.module.dynamo_backend import Options, Subgraph, break_reason, compile_graph
from npu_sim.module.hardware import device_name, open_backend
from npu_sim.module.quiet import quiet_tracing
from npu_sim.module.report import Report

# TorchDynamo counts graphs by the code that they come from, whichever module it belongs to, and runs a module by Python
# when there are too many. Versions that can count them for each module do.
_OWN_GRAPHS: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)
_NO_LIMITS = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), sys.maxsize)


class BrokenModule(DeviceModule):
    """A module whose `forward` runs in Python, while the graphs that TorchDynamo captures from it run on a device.

    It is called like the original module. Arguments with other shapes, or with other values that are not tensors, cause
    new graphs to be captured.

    Attributes:
        reason: The reason why the module could not be traced as one graph.
    """

    def __init__(self, module: nn.Module, device: torch.device, options: Options, dynamic: bool, reason: str) -> None:
        super().__init__(module)
        self.reason, self._dynamic = reason, dynamic
        self.device = device
        self.backend = open_backend(options.device or device_name(device))
        self._options = options
        self._signature = inspect.signature(module.forward)
        self._breaks: dict[str, None] = {}
        self._subgraphs: list[Subgraph] = []
        weakref.finalize(self, _release, self._subgraphs).atexit = False
        self._compiled: Callable[..., Any] = torch.compile(
            module.forward, backend=_held_weakly(self._compile_graph), dynamic=dynamic or None, **_OWN_GRAPHS
        )

    def _compile_graph(self, graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        reason = break_reason(graph_module)
        if reason is not None:
            self._breaks[reason] = None
        compiled = compile_graph(graph_module, self._options)
        if isinstance(compiled, Subgraph):
            self._subgraphs.append(compiled)
        return compiled

    def __deepcopy__(self, memo: dict[int, Any]) -> BrokenModule:
        """Return a copy with weights of its own, whose graphs are captured when it is called."""
        module = copy.deepcopy(self._module, memo)
        assert module is not None
        return BrokenModule(module, self.device, self._options, self._dynamic, self.reason)

    def __reduce_ex__(self, protocol: Any) -> str:
        """Raise `InputError`, as `save` does: the module cannot be pickled."""
        self.save(None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its result.

        Raises:
            InputError: an argument is missing, unknown, on another device or requires a gradient.
            DeviceError: the device failed.
        """
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"the arguments do not fit the module's forward(): {error}") from error
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.device != self.device:
                raise InputError(f"an argument is on {value.device}, but the module was compiled for {self.device}")
            if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    "an argument requires a gradient, but a compiled module is for inference; call it under "
                    "torch.no_grad(), or with detached tensors"
                )
        with torch.no_grad():
            return self._compiled(*args, **kwargs)

    def refresh(self) -> None:
        """Do nothing: each call passes the module's current tensors, and those that were written are loaded again."""

    def save(self, path: object) -> NoReturn:
        """Refuse to save the module, since Python code runs between its graphs.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{type(self._module).__name__} cannot be saved, since it is not one graph ({self.reason}); "
            "report() lists the graph breaks"
        )

    def report(self) -> Report:
        """Return the programs of all graphs, and the reasons why PyTorch could not trace the module as one graph."""
        programs = [program for subgraph in self._subgraphs for program in subgraph.programs()]
        breaks = tuple(self._breaks) or (self.reason,)
        return Report(
            type(self._module).__name__,
            self.backend.device,
            str(self.device),
            tuple(programs),
            breaks,
            self.backend.simulated_seconds,
        )

    def try_out(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the module once, so that its graphs are captured; its buffers and the arguments keep their values.

        Raises:
            IRError: the call fails, or no graph was captured.
        """
        copies, keywords = pytree.tree_map(_copy, (tuple(args), dict(kwargs)))
        try:
            with _kept(self), quiet_tracing(), torch._dynamo.config.patch(_NO_LIMITS):
                self(*copies, **keywords)
        except Exception as error:  # whatever the module's own code and PyTorch raise
            raise IRError(self.reason) from error
        if not any(subgraph.programs() for subgraph in self._subgraphs):
            raise IRError(self.reason)


def _held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive; TorchDynamo keeps backends for ever."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        assert alive is not None
        return alive(*args)

    return call


def _release(subgraphs: Sequence[Subgraph]) -> None:
    for subgraph in subgraphs:
        subgraph.release()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Restore the values of the module's buffers at the end of this context."""
    before = [(x, x.clone(), x._version) for x in module.buffers() if not x.is_inference()]
    try:
        yield
    finally:
        for buffer, value, version in before:
            if buffer._version != version:
                buffer.copy_(value)
