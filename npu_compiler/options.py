"""`CompileOptions`: the options of `compile()` besides the graph and the target."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from npu_compiler.graph.mesh import Mesh
    from npu_compiler.graph.model import IRGraph
    from npu_compiler.passes.quantize import Quantization

GraphStage: TypeAlias = "tuple[str, Callable[[IRGraph], IRGraph]]"
"""A stage's name, and its function from graph to graph."""

Stage: TypeAlias = tuple[str, Callable[[Any], Any]]
"""A stage's name, and its function: from graph to graph, from plan to plan, or, for one stage, from graph to plan."""

StageEdit: TypeAlias = Callable[[list[Stage]], list[Stage]]
"""A function that takes the default stages and returns the stages to run, in order."""


@dataclass(frozen=True)
class CompileOptions:
    """The options of a compilation.

    Attributes:
        compute_dtype: `float16`, `bfloat16` or `float32`; None means bfloat16 for bfloat16 models, else float16.
        quantization: Format of quantized weights: `int4`, `int8` or `fp8`, or a `QuantizedFormat`, for all linear
            layers; or `state_dict` key → format; None for none. Weights that are not in the format already are rounded
            to the nearest when they are loaded. `int4+int8` and the like also quantize the activations that these
            layers multiply, to int8 or fp8 with a scale for each row (not on Metal).
        kv_cache: `int8` or `fp8`: store KV caches in one byte per element, with a scale for each token and head, as a
            further input and output of the program, `<name>.scales` (on the CPU and simulated chips). None means the
            compute dtype.
        mesh: Divide the graph among several devices, each of which runs the program with its part of the weights; see
            `npu_compiler.passes.shard`. None means one device.
        disabled_fusions: Names from `FUSIONS` to leave out, for bisecting.
        stages: A function that takes the default stages and returns those to run, in order; a stage is (name,
            function). Functions are `IRGraph → IRGraph` up to `generate_calls`, which returns an `ExecutionPlan`, and
            then change the plan. None means the default stages.
    """

    compute_dtype: str | None = None
    quantization: Quantization | None = None
    kv_cache: str | None = None
    mesh: Mesh | None = None
    disabled_fusions: Collection[str] = ()
    stages: StageEdit | None = None
