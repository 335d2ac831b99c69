"""Recurrent layers on CUDA: which kernels a layer becomes, how its work is divided, and that its sources compile."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from cuda_cases import RECURRENT
from cuda_toolchain import compile_in_turn
from metal_cases.recurrent import recurrent
from metal_harness import Case, call_of
from torch import nn

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import LaunchKind, kernel_launch_of
from cuda_compiler.rules.matmul import CUBLAS_GEMM
from cuda_compiler.rules.recurrent import Layer, divide
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.errors import NPUError
from npu_compiler.ops.recurrent import GATES, LARGEST_HIDDEN
from npu_compiler.program.kernels import KernelCall
from npu_runtime import CPUBackend, Executor, load_weights
from npu_sim.extract import extract_ir


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


def with_a_row_of_layers(ir: dict[str, Any]) -> dict[str, Any]:
    """An IR in which last states are [D, 1, N, H], as PyTorch 2.9 to 2.11 export those of an LSTM of one layer."""
    older = copy.deepcopy(ir)
    nodes = older["nodes"]
    (lstm,) = [node for node in nodes if node["op_type"] == "aten.lstm.input"]
    states = {output["name"] for output in lstm["outputs"][1:]}
    for spec in (spec for node in nodes for spec in (*node["inputs"], *node["outputs"])):
        if spec["name"] in states:
            spec["shape"].insert(1, 1)
    return older


@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_are_read_in_the_shape_that_older_versions_of_pytorch_export(bidirectional: bool) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 12, bidirectional=bidirectional)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.lstm(x)[0]
            return states

    module, x = Last().eval(), torch.randn(5, 3, 8)
    ir = extract_ir(module, [x])
    older = with_a_row_of_layers(ir)
    assert older != ir
    made = [npu_compiler.compile(each, CUDACodegenTarget()).plan.calls for each in (older, ir)]
    assert [call.kernel for call in made[0]] == [call.kernel for call in made[1]]
    assert [[view.shape for view in call.outputs] for call in made[0]] == [
        [view.shape for view in call.outputs] for call in made[1]
    ]
    backend = CPUBackend()
    program = npu_compiler.compile(older, backend.target, npu_compiler.CompileOptions(compute_dtype="float32"))
    weights = load_weights(dict(module.state_dict()), program, backend)
    (found,) = Executor(program, backend).run({program.input_specs[0].name: x.numpy()}, weights).values()
    with torch.no_grad():
        np.testing.assert_allclose(found.to_numpy(), module(x).numpy(), atol=1e-5, rtol=1e-4)
