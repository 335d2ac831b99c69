"""Recurrent layers on CUDA: which kernels a layer becomes, how its work is divided, and that its sources compile."""

from __future__ import annotations

import random

import pytest
from cuda_cases import RECURRENT
from cuda_toolchain import compile_in_turn
from metal_cases.recurrent import recurrent
from metal_harness import Case, call_of

from cuda_compiler import GPU
from cuda_compiler.cuda_program import LaunchKind, kernel_launch_of
from cuda_compiler.rules.matmul import CUBLAS_GEMM
from cuda_compiler.rules.recurrent import Layer, divide
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.errors import NPUError
from npu_compiler.ops.recurrent import GATES, LARGEST_HIDDEN
from npu_compiler.program.kernels import KernelCall


def calls_of(case: Case, dtype: str = "float16", gpu: GPU | None = None) -> tuple[list[KernelCall], Specializer]:
    make = Specializer(gpu or GPU())
    return expand(make, call_of(case, dtype)), make


def test_a_layer_is_a_product_in_each_direction_and_one_kernel_for_all_steps() -> None:
    calls, _ = calls_of(recurrent("lstm", 50, 8, 64, 512, both=True))
    assert [call.kernel for call in calls] == [CUBLAS_GEMM, CUBLAS_GEMM, "recurrent_begin", "recurrent_steps"]
    launch = kernel_launch_of(calls[-1])
    assert launch.kind is LaunchKind.COOPERATIVE
    assert launch.grid == (64, 1, 1), "32 blocks of 16 hidden elements, in two directions"


def test_products_of_float32_do_without_tensor_cores() -> None:
    calls, _ = calls_of(recurrent("gru", 5, 8, 16, 64), "float32")
    assert calls[-1].kernel == "recurrent_steps_plain"


def test_a_batch_that_does_not_fit_is_divided_among_launches() -> None:
    (case,) = [case for case in RECURRENT if "9000" in case.name]
    steps = [call for call in calls_of(case)[0] if call.kernel == "recurrent_steps"]
    rows = [call.inputs[0].shape[2] for call in steps]
    assert len(rows) > 1 and sum(rows) == 9000
    assert len({call.outputs[0].offset for call in steps}) == len(steps)


def test_every_layer_has_a_division_whose_blocks_all_run_at_a_time(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        gpu = GPU(multiprocessors=draw.choice([16, 46, 108, 132]), shared_memory=draw.choice([64, 99, 227]) * 1024)
        layer = Layer(
            draw.choice(list(GATES)),
            draw.randint(1, 2),
            int(2 ** draw.uniform(0, 12)),
            min(LARGEST_HIDDEN if gpu == GPU() else 768, int(2 ** draw.uniform(0, 12.1))),
            draw.random() < 0.7,
        )
        division = divide(layer, gpu)
        assert division.layer.directions * division.row_groups * division.blocks <= gpu.multiprocessors
        assert division.blocks * division.units >= layer.hidden
        assert division.row_groups * division.rows >= division.layer.rows
        assert division.fits(gpu)


def test_a_layer_that_is_too_large_for_a_gpu_is_refused_in_words() -> None:
    with pytest.raises(NPUError, match=r"4096 hidden elements needs more .* than this GPU has \(16, with 65536 bytes"):
        divide(Layer("lstm", 2, 8, 4096, True), GPU(multiprocessors=16, shared_memory=64 * 1024))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (recurrent("lstm", 5, 3, 6, 8, both=True), "float16"),
        (recurrent("gru", 4, 10, 5, 33, biased=False), "bfloat16"),
        (recurrent("relu", 3, 2, 4, 16, states="float32"), "float32"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_sources_compile(case: Case, dtype: str) -> None:
    compile_in_turn(calls_of(case, dtype)[1].sources.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", RECURRENT[2:5], ids=lambda case: case.name)
def test_sources_of_large_layers_compile(case: Case) -> None:
    """A weight in shared memory, one that is read at each step, and one of an odd width."""
    compile_in_turn(calls_of(case)[1].sources.values())
