"""`CodegenTarget`: names the kernels of a device. Code generation differs between targets only in these names."""

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
"""A stage's name, and its function from plan to plan."""


class CodegenTarget(ABC):
    """The mapping from kernels to a target's kernel names and source files, and the target's own stages.

    Attributes:
        config: The hardware's numbers. A program carries its name, and runs on devices of that name.
    """

    config: TargetConfig = TargetConfig(name="custom")

    @property
    def key(self) -> str:
        """The key of this target in caches; targets that compile different programs have different keys."""
        return self.config.name

    @abstractmethod
    def elementwise_kernel(self, kernel_name: str) -> tuple[str, str]:
        """(kernel, source file) of an element-wise kernel."""

    @abstractmethod
    def matmul_kernel(self, is_vec: bool, transpose_b: bool) -> tuple[str, str]:
        """(kernel, source file) of a matrix product; `is_vec` if it has one row."""

    @abstractmethod
    def fused_kernel(self, kernel_type: str) -> tuple[str, str]:
        """(kernel, source file) of any other kernel, including fused ones."""

    @abstractmethod
    def shader_source(self, filename: str) -> str:
        """The path or package resource of a source file."""

    def supports(self, op_type: str, attrs: Mapping[str, Any]) -> bool:
        """Whether the hardware has an op of the op table, or a fused one (`npu.…`); by default, it has all of them.

        An op that it lacks is refused by `compile()`, and runs on the CPU if a graph is partitioned. A fusion that
        would produce it leaves the graph as it is. Views, such as `aten.slice`, are not asked about.
        """
        return True

    def refusal(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> str | None:
        """The reason why the hardware cannot run a node for its shapes, dtypes or attributes.

        None if it can (the default).

        Nodes are asked about before they are fused, in the graph that `normalize` returns.
        """
        return None

    @property
    def supports_all(self) -> bool:
        """Whether this target has every op: its class does not override `supports`."""
        return type(self).supports is CodegenTarget.supports

    def stages(self) -> list[PlanStage]:
        """The target's own stages, in order, which run before memory is planned: they fuse calls or generate sources.

        The list is for one program; its stages may share state.
        """
        return []

    @property
    def assembles(self) -> bool:
        """Whether this target generates machine code, and may then find calls that the hardware cannot run."""
        return type(self).assemble is not CodegenTarget.assemble

    def assemble(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan, whose memory has been planned, with this target's machine code; unchanged by default.

        Raises:
            ConstraintError: the hardware cannot run some calls, whose nodes it names; `partition()` runs these on the
                CPU.
        """
        return plan


class OpLevelTarget(CodegenTarget):
    """A target with the op table's kernels under their own names, for devices that have them built in.

    Calls carry no source.
    """

    config: TargetConfig = OP_LEVEL

    def source(self, kernel: str) -> str:
        """The source file that contains a kernel; empty if there is none."""
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
    """A target with the op table's kernels as shaders in `metal_kernels`."""

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
    """The target `name` of an installed package, whose import declares its kernels; None if no package has it.

    Raises:
        InputError: the entry point of that name returns a target of another name.
    """
    from importlib.metadata import entry_points

    entries = entry_points(group=PLUGINS, name=name)
    if not entries:
        return None
    target: CodegenTarget = next(iter(entries)).load()()
    if target.config.name != name:
        raise InputError(f"the entry point '{name}' of {PLUGINS} makes a target named '{target.config.name}'")
    return target
