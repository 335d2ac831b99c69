"""CUDA programs that are divided among GPUs: what goes to NCCL, and what a resident kernel exchanges itself."""

from __future__ import annotations

import pytest
from cuda_toolchain import compile_sources
from ir_builder import IRBuilder

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.cuda_program import CollectiveLaunch, launch_of
from npu_compiler import CompiledProgram, compile
from npu_compiler.graph.mesh import Mesh


def network(layers: int = 2) -> IRBuilder:
    """Layers of a gated product, a product that is a sum over ranks, and a residual; then logits."""
    g = IRBuilder()

    def product(x: str, name: str, rows: int, columns: int) -> str:
        made: str = g("aten.linear.default", x, g.weight(name, rows, columns, dtype="bfloat16"))
        return made

    x = g.input("x", 1, 64, dtype="bfloat16")
    for layer in range(layers):
        hidden = g("aten.silu.default", product(x, f"{layer}.up", 128, 64))
        x = g("aten.add.Tensor", x, product(hidden, f"{layer}.down", 64, 128))
    return g.output(product(x, "head", 96, 64))


def program(reaches_peers: bool, ranks: int = 2) -> CompiledProgram:
    return compile(network().ir(), CUDACodegenTarget(reaches_peers=reaches_peers), mesh=Mesh(ranks))


def test_sums_and_logits_go_to_nccl() -> None:
    made = program(reaches_peers=False)
    launches = [launch for call in made.kernels if isinstance(launch := launch_of(call), CollectiveLaunch)]
    assert launches == [
        CollectiveLaunch("all_reduce", 64, 2),
        CollectiveLaunch("all_reduce", 64, 2),
        CollectiveLaunch("all_gather", 48, 2),
    ]
    assert not any("EXCHANGED 64" in source for source in made.plan.sources.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_resident_kernel_exchanges_the_sums_of_its_products(ranks: int) -> None:
    """One kernel does all products, and only the logits go to NCCL."""
    made = program(reaches_peers=True, ranks=ranks)
    (resident,) = (call for call in made.kernels if call.kernel == "resident")
    assert [call.kernel for call in made.kernels if call is not resident] == ["all_gather"]
    assert resident.params["ranks"] == ranks
    assert resident.params["exchange_bytes"] == 2 * ranks * 64 * 8  # two halves, a summand and its tag in 8 bytes
    peers = resident.inputs[resident.params["peers"]]
    assert made.plan.buffers[peers.buffer].kind == "persistent" and peers.shape == (2 * (ranks + 2),)
    source = made.plan.sources[resident.source]
    assert "#define EXCHANGED 64\n" in source and f"constexpr int ranks = {ranks};" in source


def test_its_source_compiles() -> None:
    compile_sources(program(reaches_peers=True).plan.sources.values())


def test_a_program_for_one_gpu_has_nothing_of_it() -> None:
    alone = compile(network().ir(), CUDACodegenTarget(reaches_peers=True))
    (resident,) = (call for call in alone.kernels if call.kernel == "resident")
    source = alone.plan.sources[resident.source]
    assert "exchange_bytes" not in resident.params and "#define EXCHANGED" not in source and "ranks = " not in source
