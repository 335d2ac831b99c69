"""`CUDAProgram`: a compiled program in which each call carries its launch.

Most calls launch kernels whose sources the program contains. Two kinds leave a choice to the runtime, since it depends
on the GPU: matrix products go to cuBLASLt, and convolutions to cuDNN or to one of several kernels in the program. What
GPUs exchange goes to NCCL, unless kernels or copies reach the other GPUs' memory.

In a program's file all of this is plain data among a call's parameters. It is written by the `params` methods here and
read by `launch_of`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeAlias

from cuda_compiler.specialization.sizes import Size3
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import ProgramFormatError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

CUDAProgram: TypeAlias = CompiledProgram

_KIND = "launch"  # the parameter with the kind


class LaunchKind(StrEnum):
    """The kind of a call's launch."""

    KERNEL = "kernel"
    """A kernel that starts when the preceding kernel has ended."""
    OVERLAPPING = "overlapping"
    """A kernel that may start before the preceding one ends, and itself waits for the results that it reads.

    This is CUDA's programmatic dependent launch.
    """
    COOPERATIVE = "cooperative"
    """A kernel whose blocks all run at the same time; it starts when the preceding kernel has ended."""
    RESIDENT = "resident"
    """A cooperative kernel: one block on every multiprocessor, and the operands in one struct.

    It may start before the preceding kernel ends, as an overlapping one.
    """
    PEER_COPY = "peer_copy"
    """A kernel, followed by copies from other GPUs on a second stream, which run while later calls compute."""
    AFTER_COPIES = "after_copies"
    """A kernel that starts when the preceding kernel and all `PEER_COPY` copies have ended."""
    CUBLAS_GEMM = "cublas_gemm"
    """A matrix product of cuBLASLt."""
    COLLECTIVE = "collective"
    """An exchange with other GPUs, by NCCL."""
    CONVOLUTION = "convolution"
    """A convolution for which the runtime picks the fastest of cuDNN and several kernels of the program."""


@dataclass(frozen=True)
class TensorMap:
    """A matrix operand as a TMA tensor map describes it: the copy engine moves boxes of up to 256 rows by 128 bytes.

    Attributes:
        operand: The number of the kernel's operand that holds the matrix.
        rows, width: Rows of the matrix, and bytes of a row.
        stride: Bytes from one row to the next, a multiple of 16.
        box_rows: Rows of a box, at most 256.
    """

    operand: int
    rows: int
    width: int
    stride: int
    box_rows: int

    @classmethod
    def of(cls, operand: int, matrix: View, box_rows: int) -> TensorMap:
        (rows, columns), (step, inner), size = matrix.shape, matrix.strides, itemsize(matrix.dtype)
        assert inner == 1 and step >= columns and step * size % 16 == 0, "no matrix that the copy engine takes"
        return cls(operand, rows, columns * size, step * size, box_rows)

    def params(self) -> list[int]:
        return list(asdict(self).values())


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of a kernel whose source is in the program.

    Attributes:
        grid, block: Number of blocks and of threads per block, in three directions. The runtime sets the grid of a
            resident kernel, as it depends on the GPU.
        shared: Bytes of dynamic shared memory per block; for a resident kernel, the minimum.
        kind: One of the six kinds of kernels.
        maps: Tensor maps, which are the kernel's parameters after its operands.
    """

    grid: Size3
    block: Size3
    shared: int
    kind: LaunchKind = LaunchKind.OVERLAPPING
    maps: tuple[TensorMap, ...] = ()

    def params(self) -> dict[str, Any]:
        maps = {"maps": [each.params() for each in self.maps]} if self.maps else {}
        sizes = {"grid": list(self.grid), "block": list(self.block), "shared": self.shared}
        return {_KIND: self.kind.value, **sizes, **maps}


@dataclass(frozen=True)
class GemmLaunch:
    """out = act(alpha · A[m, k] · B[k, n] + residual[m, n] + bias[n]), row-major, `batch` times.

    Attributes:
        trans_a: Whether A is stored transposed, as [k, m].
        trans_b: Whether B is stored transposed, as [n, k].
        lda, ldb, ldr, ldc: Leading dimensions of A, B, the residual and the result: elements from one stored row to the
            next.
        stride_a, stride_b, stride_r, stride_c: Elements from one matrix of a batch to the next.
        codes: Format of A and B where they are stored as plain bytes: `int8` or `float8_e4m3`; empty where their dtype
            says it. Products of int8 are summed to an int32 result, and have no bias and no residual.
        fast_sums: Whether sums of float8 products may be accumulated in the tensor cores, to about 14 bits.
        has_scales: Whether A · B is multiplied by float32 scales of its rows [m] and its columns [n], which are the
            last two inputs.
    """

    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldr: int
    ldc: int
    trans_a: bool = False
    trans_b: bool = False
    batch: int = 1
    stride_a: int = 0
    stride_b: int = 0
    stride_r: int = 0
    stride_c: int = 0
    alpha: float = 1.0
    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False
    codes: str = ""
    has_scales: bool = False
    fast_sums: bool = False

    def params(self) -> dict[str, Any]:
        return {_KIND: LaunchKind.CUBLAS_GEMM.value, **asdict(self)}


@dataclass(frozen=True)
class CollectiveLaunch:
    """A collective operation of NCCL on contiguous operands, with the other ranks (one GPU each).

    Attributes:
        operation: `all_reduce` or `all_gather`.
        elements: Number of elements of this rank's operand.
        ranks: Number of ranks.
    """

    operation: str
    elements: int
    ranks: int

    def params(self) -> dict[str, Any]:
        return {_KIND: LaunchKind.COLLECTIVE.value, **asdict(self)}


@dataclass(frozen=True)
class PeerExchange:
    """An exchange of values with other ranks that a kernel does itself, through memory that all of them map.

    Attributes:
        ranks: Number of ranks.
        exchange_bytes: Bytes of each rank's memory that the other ranks write for this kernel.
        peers: The number of the operand that holds the addresses, as 8-byte words: the exchange memory of every rank,
            this rank's number, the address of a word that the host sets when other ranks have failed, and, if there is
            a `read` operand, its address on every rank.
        read: The number of the operand that other ranks read in this rank's memory; -1 for none.
    """

    ranks: int
    exchange_bytes: int
    peers: int
    read: int = -1

    def params(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KernelForm:
    """An alternative kernel of the program for a call, with the same operands."""

    kernel: str
    source: str
    launch: KernelLaunch


@dataclass(frozen=True)
class Convolution:
    """The mathematical definition of a convolution: act(conv(x, weight) + bias + residual).

    Attributes:
        padding: Top, bottom, left, right.
        only_ours: Whether the program's kernels compute more than this, or read a layout of their own, so that cuDNN is
            not asked. Operands of an epilogue are the last inputs.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    activation: str
    has_bias: bool
    has_residual: bool
    only_ours: bool = False


@dataclass(frozen=True)
class ConvolutionLaunch:
    """A convolution over channels-last operands, for which the runtime picks the fastest implementation on its GPU.

    Attributes:
        first: The launch of the call's own kernel, the one expected to be the fastest.
        computes: The convolution to ask cuDNN for.
        alternatives: Further kernels that compute the same.
        product: The same as a product of cuBLASLt, over the same operands; None if it is none.
    """

    first: KernelLaunch
    computes: Convolution
    alternatives: tuple[KernelForm, ...]
    product: GemmLaunch | None = None

    def params(self) -> dict[str, Any]:
        others = [
            [
                form.kernel,
                form.source,
                list(form.launch.grid),
                list(form.launch.block),
                form.launch.shared,
                [each.params() for each in form.launch.maps],
            ]
            for form in self.alternatives
        ]
        computes = {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self.computes).items()
        }
        return {
            **self.first.params(),
            _KIND: LaunchKind.CONVOLUTION.value,
            "convolution": computes,
            "alternatives": others,
            "product": None if self.product is None else asdict(self.product),
        }


Launch: TypeAlias = KernelLaunch | GemmLaunch | ConvolutionLaunch | CollectiveLaunch


def launch_of(call: KernelCall) -> Launch:
    """The launch of a call of a CUDA program, read from the call's parameters.

    Raises:
        ProgramFormatError: the parameters of the launch are missing, incomplete or malformed.
    """
    params = call.params
    try:
        kind = LaunchKind(params[_KIND])
        if kind is LaunchKind.CUBLAS_GEMM:
            return GemmLaunch(**{each.name: params[each.name] for each in fields(GemmLaunch)})
        if kind is LaunchKind.COLLECTIVE:
            return CollectiveLaunch(str(params["operation"]), int(params["elements"]), int(params["ranks"]))
        if kind is not LaunchKind.CONVOLUTION:
            launch = _kernel_launch(params["grid"], params["block"], params["shared"], kind)
            return replace(launch, maps=_tensor_maps(call, params.get("maps", ())))
        described: dict[str, Any] = {
            name: tuple(value) if isinstance(value, (list, tuple)) else value
            for name, value in params["convolution"].items()
        }
        return ConvolutionLaunch(
            replace(
                _kernel_launch(params["grid"], params["block"], params["shared"]),
                maps=_tensor_maps(call, params.get("maps", ())),
            ),
            Convolution(**described),
            tuple(
                KernelForm(kernel, source, replace(_kernel_launch(*sizes), maps=_tensor_maps(call, maps)))
                for kernel, source, *sizes, maps in params["alternatives"]
            ),
            GemmLaunch(**product) if (product := params.get("product")) else None,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ProgramFormatError(
            f"the call of '{call.kernel}' (node '{call.node}') does not say how it is launched ({error!r}); "
            "compile it with CUDACodegenTarget"
        ) from error


def peer_exchange_of(call: KernelCall) -> PeerExchange | None:
    """The exchange with other ranks that a call's kernel does itself; None if its parameters describe none.

    Raises:
        ProgramFormatError: the parameters describe it in part, or name operands that the call lacks.
    """
    if "exchange_bytes" not in call.params:
        return None
    try:
        exchange = PeerExchange(**{each.name: int(call.params[each.name]) for each in fields(PeerExchange)})
    except (KeyError, ValueError, TypeError) as error:
        raise ProgramFormatError(f"the call of '{call.kernel}' does not say what it exchanges ({error!r})") from error
    operands = len(call.inputs) + len(call.outputs)
    if not (0 <= exchange.peers < operands and -1 <= exchange.read < operands and exchange.exchange_bytes > 0):
        raise ProgramFormatError(f"the call of '{call.kernel}' exchanges operands that it does not have")
    return exchange


def kernel_launch_of(call: KernelCall) -> KernelLaunch:
    """The launch of a call that is known to be one kernel; raises as `launch_of` does."""
    launch = launch_of(call)
    assert isinstance(launch, KernelLaunch), f"'{call.kernel}' is no kernel of the program"
    return launch


def gemm_of(call: KernelCall) -> GemmLaunch:
    """The launch of a call that is known to be a matrix product of cuBLASLt; raises as `launch_of` does."""
    launch = launch_of(call)
    assert isinstance(launch, GemmLaunch), f"'{call.kernel}' is no product of cuBLASLt"
    return launch


def convolution_of(call: KernelCall) -> ConvolutionLaunch:
    """The launch of a call that is known to be a `ConvolutionLaunch`; raises as `launch_of` does."""
    launch = launch_of(call)
    assert isinstance(launch, ConvolutionLaunch), f"'{call.kernel}' is no convolution"
    return launch


def _tensor_maps(call: KernelCall, maps: Iterable[Sequence[Any]]) -> tuple[TensorMap, ...]:
    """The tensor maps of a kernel for a call; `ValueError` if they are of operands that the call lacks."""
    found = tuple(TensorMap(*map(int, each)) for each in maps)
    if any(not 0 <= each.operand < len(call.inputs) + len(call.outputs) for each in found):
        raise ValueError("maps of operands that it does not have")
    return found


def _kernel_launch(
    grid: Sequence[int], block: Sequence[int], shared: int, kind: LaunchKind = LaunchKind.OVERLAPPING
) -> KernelLaunch:
    (x, y, z), (width, height, depth) = grid, block
    return KernelLaunch((x, y, z), (width, height, depth), shared, kind)
