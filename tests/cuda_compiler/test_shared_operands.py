"""Batched products of few rows: matrices that batches share are read once, where they lie, without copies."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from cuda_on_cpu import EmulatedBackend
from cuda_reference import LaidOut, ReferenceBackend
from torch import Tensor, nn
from zoo_runs import extract

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from npu_runtime import Executor, NPUBuffer

AMPERE = CUDACodegenTarget(GPU(capability=80))
PRODUCTS = ("few_rows", "cublas_gemm", "batched_matmul_kernel")


class Lambda(nn.Module):
    """Queries [b, m, k, h] or [b, h, k, m], multiplied by a matrix [k, v] for each b and m that the heads h share.

    Attributes:
        order: The order of the queries' dimensions that makes them [b, h, m, k].
        turned: Whether the matrices are given as [v, k].
        columns: Whether the product is written with the queries as columns on the right.
    """

    def __init__(self, order: tuple[int, ...], turned: bool, columns: bool) -> None:
        super().__init__()
        self.order, self.turned, self.columns = order, turned, columns

    def forward(self, queries: Tensor, matrices: Tensor) -> Tensor:
        rows = queries.permute(self.order).relu()
        shared = (matrices.transpose(-1, -2) if self.turned else matrices).unsqueeze(1)
        if self.columns:
            return torch.matmul(shared.transpose(-1, -2), rows.unsqueeze(-1)).squeeze(-1).tanh()
        return torch.matmul(rows.unsqueeze(-2), shared).squeeze(-2).tanh()


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_drawn_products_with_a_matrix_that_heads_share_are_one_product(
    columns: bool, seed: int, tmp_path: Path
) -> None:
    draw = Random(f"{seed} {columns}")
    torch.manual_seed(seed)
    for _ in range(3):
        b, h, m, k, v = (
            draw.randint(1, 3),
            draw.randint(2, 8),
            draw.randint(2, 9),
            draw.randint(2, 20),
            2 * draw.randint(2, 20),
        )
        order, turned = draw.choice([(0, 3, 1, 2), (0, 1, 3, 2)]), draw.random() < 0.5
        model = Lambda(order, turned, columns)
        queries = torch.randn([(b, h, m, k)[order.index(dim)] for dim in range(4)]).half()
        matrices = torch.randn((b, m, v, k) if turned else (b, m, k, v)).half()
        expected = model(queries.float(), matrices.float())
        for target, backend in ((LaidOut(), ReferenceBackend()), (AMPERE, EmulatedBackend(tmp_path, AMPERE))):
            ir = extract(model, [queries.float(), matrices.float()])
            program = npu_compiler.compile(ir, target, npu_compiler.CompileOptions(compute_dtype="float16"))
            (product,) = [call for call in program.plan.calls if call.kernel in PRODUCTS]
            assert {h, v} == set(product.outputs[0].shape[-2:])
            assert not any("copy" in call.kernel or "transpose" in call.kernel for call in program.plan.calls)
            bound = {
                spec.name: NPUBuffer.from_numpy(x.numpy(), backend, spec=spec)
                for spec, x in zip(program.input_specs, (queries, matrices), strict=True)
            }
            (out,) = Executor(program, backend).run(bound).values()
            torch.testing.assert_close(torch.from_numpy(out.to_numpy()).float(), expected, atol=4e-3, rtol=4e-3)
