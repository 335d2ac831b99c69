"""Convolutions by cuDNN's graph API: plans for convolution, bias, residual and activation as one operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_compiler.cuda_program import convolution_of
from cuda_runtime.cuda_device import CUDADevice
from npu_compiler.errors import DeviceError
from npu_compiler.installing import install_command
from npu_compiler.program.kernels import KernelCall

WORKSPACE_BYTES = 64 * 2**20
# Activation → cuDNN's operation and its arguments; cuDNN has no others of ours.
_ACTIVATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "relu": ("relu", {}),
    "relu6": ("relu", {"upper_clip": 6.0}),
    "silu": ("swish", {}),
    "gelu": ("gelu", {}),
    "gelu_tanh": ("gelu_approx_tanh", {}),
    "sigmoid": ("sigmoid", {}),
}
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
_FLOAT_NOTES = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")  # of plans that round float32 operands


def load_cudnn() -> Any:
    """cuDNN's Python module.

    Raises:
        DeviceError: it is not installed, or finds no cuDNN.
    """
    try:
        import cudnn

        cudnn.backend_version()
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
        raise DeviceError(
            f"cuDNN does not load ({error}); install it with: {install_command('cuda13')} "
            "(or [cuda12] for a CUDA 12 driver)"
        ) from error
    return cudnn


def open_cudnn(device: CUDADevice) -> Cudnn | None:
    """The cuDNN handle of a device; None if cuDNN is missing."""
    try:
        return Cudnn(device)
    except DeviceError:
        return None


@dataclass(frozen=True)
class PlanChoice:
    """The identity of an execution plan: an engine of cuDNN, and the values of its knobs by name."""

    engine: int
    knobs: Mapping[str, int]


@dataclass(frozen=True)
class ConvolutionPlan:
    """An execution plan of cuDNN for a convolution, ready to run.

    Attributes:
        graph, index: cuDNN's operation graph, and the plan's index in its list of plans.
    """

    cudnn: Cudnn
    graph: Any
    index: int
    choice: PlanChoice

    def launch(self, addresses: Sequence[int]) -> Callable[[], None]:
        """A function that enqueues the convolution on operands at these addresses, inputs first."""
        operands = {number + 1: address for number, address in enumerate(addresses)}
        execute, handle, workspace = self.graph.execute_plan_at_index, self.cudnn.handle, self.cudnn.workspace
        return lambda: execute(operands, workspace, self.index, handle)


class Cudnn:
    """A cuDNN handle on the device's stream, with a workspace that all convolutions share.

    Attributes:
        version: Version of the library.
        failures: The exceptions by which cuDNN's module reports that something is not supported.

    Raises:
        DeviceError: cuDNN is missing.
    """

    def __init__(self, device: CUDADevice, module: Any = None) -> None:
        self._module = load_cudnn() if module is None else module
        self.version = int(self._module.backend_version())
        self.failures = (self._module.cudnnGraphNotSupportedError, RuntimeError, ValueError, NotImplementedError)
        self._memory = device.allocate(WORKSPACE_BYTES, "the workspace of cuDNN")
        self.workspace = int(self._memory.data.ptr)
        with device.active("cuDNN does not start"):
            self.handle = self._module.create_handle()
            weakref.finalize(self, self._module.destroy_handle, self.handle)
            self._module.set_stream(self.handle, device.stream.ptr)

    def takes(self, call: KernelCall) -> bool:
        """Whether cuDNN has the dtypes and the activation of a convolution.

        Only `plans` shows whether it has plans for it.
        """
        has_types = all(view.dtype in _TYPES for view in (*call.inputs, *call.outputs))
        computes = convolution_of(call).computes
        return has_types and not computes.only_ours and computes.activation in ("none", *_ACTIVATIONS)

    def plans(self, call: KernelCall) -> Iterator[ConvolutionPlan]:
        """Deterministic plans for a convolution, ready to run, the most promising one first; possibly none."""
        try:
            graph = self._graph(call)
            graph.create_execution_plans([self._module.heur_mode.A, self._module.heur_mode.FALLBACK])
            graph.deselect_numeric_notes(self._excluded(call))
            count = graph.get_execution_plan_count()
        except self.failures:
            return
        for index in range(count):
            try:
                engine, knobs = graph.get_engine_and_knobs_at_index(index)
                choice = PlanChoice(int(engine), {knob.name: int(value) for knob, value in knobs.items()})
                yield self._built(graph, index, choice)
            except self.failures:
                continue

    def plan(self, call: KernelCall, choice: PlanChoice) -> ConvolutionPlan | None:
        """The plan that an earlier `PlanChoice` names; None if this cuDNN does not have it."""
        try:
            graph = self._graph(call)
            knobs = {getattr(self._module.knob_type, name): value for name, value in choice.knobs.items()}
            graph.create_execution_plan(choice.engine, knobs)
            return self._built(graph, graph.get_execution_plan_count() - 1, choice)
        except (*self.failures, AttributeError):
            return None

    def _built(self, graph: Any, index: int, choice: PlanChoice) -> ConvolutionPlan:
        graph.build_plan_at_index(index)
        if graph.get_workspace_size_plan_at_index(index) > WORKSPACE_BYTES:
            raise ValueError("the plan needs more workspace than there is")
        return ConvolutionPlan(self, graph, index, choice)

    def _excluded(self, call: KernelCall) -> list[Any]:
        notes = self._module.numerical_note
        names = ["NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION"]
        names += [name for name in dir(notes) if "WINOGRAD" in name or "FFT" in name]
        if call.inputs[0].dtype == "float32":
            names += _FLOAT_NOTES
        return [getattr(notes, name) for name in names]

    def _graph(self, call: KernelCall) -> Any:
        """The operation graph of act(conv(x, weight) + bias + residual), with float32 intermediates.

        Operand number i has the uid i + 1.
        """
        module, convolution = self._module, convolution_of(call).computes
        types = module.data_type
        graph = module.pygraph(
            handle=self.handle,
            io_data_type=getattr(types, _TYPES[call.inputs[0].dtype]),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )
        channels = call.outputs[0].shape[1]
        operands = []
        for number, view in enumerate(call.inputs):
            shape, strides = list(view.shape), list(view.strides)
            if view.rank == 1:
                shape, strides = [1, channels, 1, 1], [channels, 1, channels, channels]
            dtype = getattr(types, _TYPES[view.dtype])
            operands.append(graph.tensor(dim=shape, stride=strides, data_type=dtype, uid=number + 1))
        x, weight, *addends = operands
        top, bottom, left, right = convolution.padding
        value = graph.conv_fprop(
            image=x,
            weight=weight,
            pre_padding=[top, left],
            post_padding=[bottom, right],
            stride=list(convolution.stride),
            dilation=list(convolution.dilation),
        )
        for addend in addends:
            value = graph.add(value, addend)
        if convolution.activation != "none":
            name, arguments = _ACTIVATIONS[convolution.activation]
            value = getattr(graph, name)(value, **arguments)
        out = call.outputs[0]
        value.set_output(True).set_uid(len(call.inputs) + 1).set_dim(list(out.shape)).set_stride(list(out.strides))
        value.set_data_type(getattr(types, _TYPES[out.dtype]))
        graph.validate()
        return graph
