"""Parts of every kernel's calls, as several cores compute them: together they compute what the call computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from drawn import drawn
from metal_harness import Case, all_cases, call_of, memory_of
from reference_kernels import reference_launch

from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import Family, KernelCall
from npu_compiler.program.views import View
from npu_model.lowering.division import Way, batch_of, divided, pieces_of_batch
from npu_runtime.torch_arrays import numpy_to_tensor

CASES = [case for case in all_cases() if case.reference is None]
DTYPE = "float32"


def divisions(call: KernelCall) -> Iterator[Sequence[KernelCall]]:
    """The call's parts in each way to divide it, those along its batch included."""
    yield from (divided(call, way, count) for way in Way for count in (2, 3))
    yield from (pieces_of_batch(call, count) or [call] for count in range(2, min(9, batch_of(call) + 1)))


def after(calls: Sequence[KernelCall], memory: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All memory after the reference kernels of some calls."""
    memory = {name: data.copy() for name, data in memory.items()}

    def window(view: View) -> torch.Tensor:
        return numpy_to_tensor(memory[view.buffer]).as_strided(view.shape, view.strides, view.offset)

    for call in calls:
        reference_launch(call, [window(view) for view in call.inputs], [window(view) for view in call.outputs])()
    return memory


def is_gated(call: KernelCall) -> bool:
    """Whether the rows of a part's weight lie apart, which only the NPU's lowering reads."""
    return any("rows" in (operand.sizes or ()) for operand in declaration(call).inputs)


@pytest.mark.parametrize("case", drawn(CASES, 1 / 6, lambda case: case.id))
def test_parts_of_a_call_compute_its_result(case: Case, seed: int) -> None:
    call, memory = call_of(case, DTYPE), memory_of(case, DTYPE, seed)
    expected = after([call], memory)
    for parts in divisions(call):
        if len(parts) > 1 and not is_gated(call):
            for name, found in after(parts, memory).items():
                largest = np.abs(found[np.isfinite(found)]).max(initial=1.0)  # sums of parts differ by their order
                np.testing.assert_allclose(
                    found, expected[name], 1e-4, 1e-6 * largest, err_msg=f"{name} of {len(parts)}"
                )


def test_calls_of_most_families_can_be_divided() -> None:
    calls = [call_of(case, DTYPE) for case in CASES]
    families = {declaration(call).family for call in calls if any(len(parts) > 1 for parts in divisions(call))}
    assert families >= {
        Family.MATMUL, Family.CONV, Family.POOL, Family.ATTENTION, Family.REDUCTION, Family.NORM, Family.SOFTMAX,
        Family.ROPE, Family.ELEMENTWISE,
    }  # fmt: skip
