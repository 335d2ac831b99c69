"""Rules of softmax and norms whose kernels compute element-wise groups too, before and behind their own work."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cuda_compiler.elementwise.grouping import Group
from cuda_compiler.elementwise.inlining import loaded_bytes
from cuda_compiler.elementwise.kernel_source import group_text
from cuda_compiler.rules.norms import ROW_KERNELS, Form, own_teams, row_form
from cuda_compiler.rules.rows import HELD_PACKS, shared_pack, small_teams_for
from cuda_compiler.specialization.c_text import geometry_text
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.views import View


def _form(call: KernelCall, has_prologue: bool) -> Form:
    """The template constants, grid and block; each vector lies in one row, so that groups may access it as one."""
    out = call.outputs[0]
    pack = shared_pack((out, *call.inputs[1 if has_prologue else 0 :]))
    while out.shape[-1] % pack:
        pack //= 2
    return row_form(call, pack, small_teams_for if has_prologue else own_teams(call))


def holds_rows(call: KernelCall, has_prologue: bool) -> bool:
    """Whether the kernel of a call over rows with a prologue or an epilogue keeps whole rows in registers."""
    constants, _, block = _form(call, has_prologue)
    held = HELD_PACKS * constants["pack"] * (block[0] // int(constants["teams"]))
    return call.outputs[0].shape[-1] <= held and call.outputs[0].numel > 0


def rows_with_groups(make: Specializer, rows: Group, stored: Collection[View]) -> KernelCall:
    """The call of a softmax or norm that computes its first operand itself, or changes its result before it is stored.

    Args:
        rows: The softmax or norm, with a prologue or an epilogue.
        stored: The written views that a later kernel, or the caller, reads.
    """
    (call,), sides = rows.calls, _sides(rows, stored)
    constants, grid, block = _form(call, rows.prologue is not None)
    inputs: dict[str, View | None] = {"mask": None, **KERNELS[call.kernel].inputs_of(call)}
    outputs: dict[str, View | None] = {"out": call.outputs[0]}
    definitions = [template_text("elementwise/elementwise.cuh")]
    if rows.prologue is not None:
        del inputs["x"]
    if rows.epilogue is not None:
        del outputs["out"]
        definitions.append(geometry_text("out", call.outputs[0]))
    own = [view for view in inputs.values() if view is not None]
    for side in sides:
        inputs |= side.inputs
        outputs |= side.outputs
        definitions += side.definitions(int(constants["pack"]), call.outputs[0].shape[-1])
    fused = make.kernel(
        call,
        ROW_KERNELS[call.kernel],
        function=f"fused_{call.kernel}",
        inputs=inputs,
        outputs=outputs,
        grid=grid,
        block=block,
        constants=constants,
        definitions="\n".join(definitions),
    )
    flops = call.flops + sum(each.flops for side in sides for each in side.group.calls)
    moved = sum(loaded_bytes(side.group) for side in sides) + sum(map(distinct_bytes, (*own, *fused.outputs)))
    return replace(fused, flops=flops, bytes_moved=moved)


@dataclass(frozen=True)
class _Side:
    """A group that a kernel over rows computes, before or behind its own work.

    Attributes:
        title: The name of the C struct that computes the group's elements of a row.
        method: The name of its method, and the parameter that the elements of `result` or `given` are in.
        kept: The group's results that go to memory.
        result, given: As in `group_text`.
    """

    title: str
    method: str
    group: Group
    kept: Sequence[View]
    result: View | None = None
    given: View | None = None

    @property
    def inputs(self) -> dict[str, View]:
        """The views that the group loads, by the names of the kernel's arguments."""
        return {f"{self.title.lower()}_in{index}": view for index, view in enumerate(self.group.loads)}

    @property
    def outputs(self) -> dict[str, View]:
        """The views that the group stores, by the names of the kernel's arguments."""
        return {f"{self.title.lower()}_out{index}": view for index, view in enumerate(self.kept)}

    def definitions(self, pack: int, width: int) -> list[str]:
        """The C definitions of the struct, and of a macro that makes one from the kernel's arguments.

        Args:
            pack: Maximum of elements that a thread computes at a time.
            width: Elements of a row.
        """
        text = group_text(self.group, self.kept, pack, "N", self.result, self.given)
        members = [argument.replace("__restrict__ ", "") for argument in text.arguments]
        fields = "".join(f"{member.split('*')[-1]}, " for member in members)
        arguments = "".join(f"{name}, " for name in (*self.inputs, *self.outputs))
        space = f"of_{self.title.lower()}"
        return [
            f"namespace {space} {{",
            *text.functions,
            f"struct {self.title} {{",
            *(f"    {member};" for member in members),
            "    index_t begin;",
            "    template <int N>",
            f"    __device__ __forceinline__ void {self.method}, index_t column) const {{",
            "        const index_t first = begin + column;",
            *(line if line.startswith("#") else f"        {line}" for line in text.statements),
            "    }",
            f"    __device__ __forceinline__ {self.title} row(index_t number) const {{",
            f"        return {{{fields}number * {width}u}};",
            "    }",
            "};",
            "}",
            f"#define {self.title.upper()} {space}::{self.title}{{{arguments}0}}",
        ]


def _sides(rows: Group, stored: Collection[View]) -> list[_Side]:
    """The prologue and the epilogue of a call over rows, as far as it has them; `stored` as in `rows_with_groups`."""
    (call,), before, after, sides = rows.calls, rows.prologue, rows.epilogue, list[_Side]()
    if before is not None:
        read_again = after.read_buffers if after is not None else ()
        kept = [view for view in before.writes if view in stored or view.buffer in read_again]
        sides.append(_Side("Prologue", "get(float (&values)[N]", before, kept, result=call.inputs[0]))
    if after is not None:
        kept = [view for view in (call.outputs[0], *after.writes) if view in stored]
        sides.append(_Side("Epilogue", "put(const float (&values)[N]", after, kept, given=call.outputs[0]))
    return sides
