"""`CodegenTarget`: names the kernels of a device. The only thing in which code generation differs between targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from npu_compiler.errors import InputError
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KERNELS
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.target_config import METAL_GPU, OP_LEVEL, TargetConfig

PLUGINS = "npu_simulation.targets"

PlanStage: TypeAlias = tuple[str, Callable[[ExecutionPlan], ExecutionPlan]]
"""A stage's name and the function that changes a plan."""


class CodegenTarget(ABC):
    """Maps kernels to a target's kernel names and source files. Nothing else differs between targets.

    Attributes:
        config: The hardware's numbers. A program carries its name, and runs on devices of that name.
    """

    config: TargetConfig = TargetConfig(name="custom")

    @property
    def key(self) -> str:
        """The key of this target in caches: targets whose programs differ have different ones."""
        return self.config.name

    @abstractmethod
    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        """(kernel, source file) of an element-wise kernel."""

    @abstractmethod
    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        """(kernel, source file) of a matrix product; `is_vec` when it has one row."""

    @abstractmethod
    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        """(kernel, source file) of any other kernel, fused ones included."""

    @abstractmethod
    def shader_source(self, filename: str) -> str:
        """The path or package resource of a source file."""

    def supports(self, op_type: str, attrs: Mapping[str, Any]) -> bool:
        """Whether the hardware has an op of the op table, or a fused one (`npu.…`); by default, it has all of them.

        An op that it lacks is refused by `compile()`, and runs on the CPU where a graph is partitioned. A fusion that
        would make one leaves the graph as it is. Views, such as `aten.slice`, are not asked about.
        """
        return True

    def refusal(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> str | None:
        """The reason why the hardware cannot run a node for its shapes, dtypes or attributes; by default None: it can.

        Nodes are asked about before they are fused, in the graph as `normalize` leaves it.
        """
        return None

    @property
    def supports_all(self) -> bool:
        """Whether this target has every op, since its class does not override `supports`."""
        return type(self).supports is CodegenTarget.supports

    def stages(self) -> list[PlanStage]:
        """The target's own stages, by name and in order, before memory is planned: fuse calls, generate sources.

        They are run for one program; the list may share state between its stages.
        """
        return []

    @property
    def assembles(self) -> bool:
        """Whether this target makes machine code, and may then find calls that the hardware cannot run."""
        return type(self).assemble is not CodegenTarget.assemble

    def assemble(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan whose memory has been planned with this target's machine code.

        Raises:
            ConstraintError: the hardware cannot run some calls, whose nodes it names; `partition()` runs these on the
                CPU.
        """
        return plan


class OpLevelTarget(CodegenTarget):
    """The kernels of the op table by their own names, for devices that have them built in: calls carry no source."""

    config: TargetConfig = OP_LEVEL

    def source(self, kernel: str) -> str:
        """The source file that holds a kernel, or nothing."""
        return ""

    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        return kernel_name, self.source(kernel_name)

    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        stem = "matmul_vec" if is_vec else "matmul"
        kernel = f"{stem}_kernel" if transpose_b else f"{stem}_notrans_kernel"
        return kernel, self.source(kernel)

    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        return kernel_type, self.source(kernel_type)

    def shader_source(self, filename: str) -> str:
        return filename


class MetalCodegenTarget(OpLevelTarget):
    """The op-level kernels as shaders in `metal_kernels`."""

    config = METAL_GPU

    def source(self, kernel: str) -> str:
        elementwise = ELEMENTWISE_KERNELS.get(kernel)
        if elementwise is None:
            return KERNELS[kernel].source
        if elementwise.op.functions:
            return f"elementwise_special{'_broadcast' * elementwise.is_strided}.metal"
        if elementwise.is_strided:
            return "elementwise_broadcast.metal"
        if kernel == "add_relu_kernel":
            return "add_relu.metal"
        basic = kernel in ("add_kernel", "relu_kernel", "copy_kernel")
        return "elementwise.metal" if basic else "elementwise_extended.metal"

    def shader_source(self, filename: str) -> str:
        return f"metal_kernels/{filename}"


def plugin_targets() -> list[str]:
    """Names of the targets that installed packages offer under the entry point group `npu_simulation.targets`."""
    from importlib.metadata import entry_points

    return sorted(entry_points(group=PLUGINS).names)


def load_plugin_target(name: str) -> CodegenTarget | None:
    """The target of that name of an installed package, whose import declares its kernels; None if there is none.

    Raises:
        InputError: the entry point of that name makes a target of another name.
    """
    from importlib.metadata import entry_points

    entries = entry_points(group=PLUGINS, name=name)
    if not entries:
        return None
    target: CodegenTarget = next(iter(entries)).load()()
    if target.config.name != name:
        raise InputError(f"the entry point '{name}' of {PLUGINS} makes a target named '{target.config.name}'")
    return target
