"""CUDA programs that are divided among GPUs: what goes to NCCL, and what a resident kernel exchanges itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cuda_toolchain import compile_sources
from ir_builder import IRBuilder

from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.cuda_program import CollectiveLaunch, LaunchKind, kernel_launch_of, launch_of, peer_exchange_of
from npu_compiler import CompiledProgram, CompileOptions, ProgramFormatError, compile
from npu_compiler.graph.mesh import Mesh
from npu_compiler.program.kernels import KernelCall


def network(layers: int = 2, rows: int = 1, width: int = 64) -> IRBuilder:
    """Layers of a norm, a product, an activation, a product that is a sum over ranks, and a residual; then logits."""
    g = IRBuilder()

    def product(x: str, name: str, rows: int, columns: int) -> str:
        made: str = g("aten.linear.default", x, g.weight(name, rows, columns, dtype="bfloat16"))
        return made

    x = g.input("x", rows, width, dtype="bfloat16")
    for layer in range(layers):
        gain = g.weight(f"{layer}.norm", width, dtype="bfloat16")
        normal = g("aten.rms_norm.default", x, gain, normalized_shape=[width], eps=1e-5)
        hidden = g("aten.silu.default", product(normal, f"{layer}.up", 128, width))
        x = g("aten.add.Tensor", x, product(hidden, f"{layer}.down", width, 128))
    return g.output(product(x, "head", 96, width))


def program(reaches_peers: bool, ranks: int = 2, rows: int = 1, width: int = 64) -> CompiledProgram:
    ir = network(rows=rows, width=width).ir()
    return compile(ir, CUDACodegenTarget(GPU(reaches_peers=reaches_peers)), CompileOptions(mesh=Mesh(ranks)))


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


def test_its_sources_compile() -> None:
    compile_sources(program(reaches_peers=True).plan.sources.values())
    for ranks, width in ((2, 64), (4, 5120)):
        made = program(reaches_peers=True, ranks=ranks, rows=20, width=width)
        compile_sources(made.plan.sources[call.source] for call in rank_sums(made))


def rank_sums(made: CompiledProgram) -> list[KernelCall]:
    return [call for call in made.kernels if call.kernel == "rank_sum"]


@pytest.mark.parametrize("rows", [40, 600])
def test_sums_of_many_rows_are_kernels_with_the_residual_and_the_norm(rows: int) -> None:
    """The last layer has no norm behind it."""
    made = program(reaches_peers=True, rows=rows)
    assert [len(call.outputs) for call in rank_sums(made)] == [3, 2]
    assert "all_reduce" not in {call.kernel for call in made.kernels}
    for call in rank_sums(made):
        exchange = peer_exchange_of(call)
        assert exchange is not None and exchange.ranks == 2
        operands = [*call.inputs, *call.outputs]
        assert made.plan.buffers[operands[exchange.peers].buffer].kind == "persistent"
        assert made.plan.buffers[operands[exchange.read].buffer].kind == "arena"


@pytest.mark.parametrize(("rows", "divided"), [(2048, True), (2046, False), (2049, False)])
def test_large_sums_are_computed_in_two_halves(rows: int, divided: bool) -> None:
    """The first half is copied while the second one is computed."""
    made = program(reaches_peers=True, rows=rows, width=4096)
    names = [call.kernel for call in made.kernels]
    parts = ["cublas_gemm", "peer_copy", "cublas_gemm", "rank_sum"]
    found = [names[end - 3 : end + 1] for end, name in enumerate(names) if name == "rank_sum"]
    assert [each == parts for each in found] == [divided, divided]
    if not divided:
        return
    end = names.index("rank_sum")
    first, copy, second, total = made.kernels[end - 3 : end + 1]
    half = rows // 2
    assert [call.params["m"] for call in (first, second)] == [half, half]
    assert [call.outputs[0].offset for call in (first, second)] == [0, half * 4096]
    assert [call.inputs[0].offset for call in (first, second)] == [0, half * 64]
    assert copy.inputs[0] == first.outputs[0] and copy.outputs[0] in total.inputs
    assert [kernel_launch_of(call).kind for call in (copy, total)] == [LaunchKind.PEER_COPY, LaunchKind.AFTER_COPIES]
    exchanges = [peer_exchange_of(call) for call in (copy, total)]
    operands = [[*call.inputs, *call.outputs] for call in (copy, total)]
    assert len({views[each.peers].buffer for views, each in zip(operands, exchanges, strict=True) if each}) == 2
    compile_sources(made.plan.sources[call.source] for call in (copy, total))


@pytest.mark.parametrize("rows", [40, 2048])
def test_summands_keep_their_memory_until_the_next_sum(rows: int) -> None:
    """Other ranks may read them until then; behind the last sum, all have read them."""
    made = program(reaches_peers=True, rows=rows, width=4096)
    places = [at for at, call in enumerate(made.kernels) if call.kernel == "rank_sum"]
    assert len(places) == 2
    summand = made.kernels[places[0]].inputs[0]
    assert summand in made.kernels[places[1]].inputs
    taken = made.plan.buffers[summand.buffer]
    for call in made.kernels[places[0] : places[1] + 1]:
        for view in call.outputs:
            written = made.plan.buffers[view.buffer]
            if written.kind == "arena":
                assert not (
                    written.offset < taken.offset + taken.size_bytes
                    and taken.offset < written.offset + written.size_bytes
                )
    flags = [f"constexpr bool is_last = {flag};" for flag in ("false", "true")]
    sources = [made.plan.sources[made.kernels[at].source] for at in places]
    assert all(flag in source for flag, source in zip(flags, sources, strict=True))


def test_many_ranks_leave_large_sums_to_nccl() -> None:
    """Each GPU would read all of the others' summands, where NCCL reads each part of the sum once."""
    assert [len(rank_sums(program(True, 4, rows))) for rows in (40, 4000)] == [2, 0]


def test_rows_that_are_no_whole_packs_are_left_to_nccl() -> None:
    assert not rank_sums(program(reaches_peers=True, rows=40, width=68))


def test_what_a_kernel_exchanges_is_checked() -> None:
    call = rank_sums(program(reaches_peers=True, rows=40))[0]
    for name, value in (("peers", 7), ("peers", -1), ("read", 99), ("exchange_bytes", 0), ("ranks", "two")):
        with pytest.raises(ProgramFormatError, match="exchange"):
            peer_exchange_of(replace(call, params={**call.params, name: value}))
    with pytest.raises(ProgramFormatError, match="'peers'"):
        peer_exchange_of(replace(call, params={key: value for key, value in call.params.items() if key != "peers"}))


def test_a_program_for_one_gpu_has_nothing_of_it() -> None:
    alone = compile(network().ir(), CUDACodegenTarget(GPU(reaches_peers=True)))
    (resident,) = (call for call in alone.kernels if call.kernel == "resident")
    source = alone.plan.sources[resident.source]
    assert "exchange_bytes" not in resident.params and "#define EXCHANGED" not in source and "ranks = " not in source
