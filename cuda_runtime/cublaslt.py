"""Matrix products by cuBLASLt: the calls that the compiler names `cublas_gemm`.

Unlike cuBLAS, cuBLASLt adds bias and residual to the product before the result is rounded, lets us choose the
algorithm, and takes its workspace as an argument, so that nothing is allocated inside a captured graph.
"""

from __future__ import annotations

import ctypes
import json
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from cuda_compiler.cuda_program import gemm_of
from cuda_runtime.cuda_device import CUDADevice
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall

_MIB = 2**20
_TYPES = {"float32": 0, "float16": 2, "int8": 3, "int32": 10, "bfloat16": 14, "float8_e4m3": 28}
_OP_N, _OP_T = 0, 1
_COMPUTE_32F, _COMPUTE_32I = 68, 72
_DESC_TRANS_A, _DESC_TRANS_B, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 4, 7, 8, 26
_DESC_SCALE_A, _DESC_SCALE_B, _DESC_FAST_SUMS, _DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 17, 18, 25, 31, 32
_SCALE_VECTOR = 3  # a scale for each row of the first matrix and each column of the second one
SCALES_BY_ROW = 12090  # version of CUDA from which on cuBLASLt has such scales
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE = 5, 6
_EPILOGUE_NONE, _EPILOGUE_BIAS = 1, 4
_EPILOGUES = {"none": 0, "relu": 2, "gelu_tanh": 32}
_PREFER_WORKSPACE, _PREFER_REDUCTIONS, _PREFER_ALIGNMENT_A = 1, 3, 5
# Split-K sums are reduced in float32, in a fixed order.
_REDUCTIONS = 2
_CONFIG_ATTRIBUTES = (4, 4, 4, 4, 4, 4, 4, 2, 2)  # bytes of the attributes 0 (the algorithm's id), 1 (its tile), …
WIDEST_ACCESS = 16  # bytes; no algorithm needs more alignment

Launch: TypeAlias = Callable[[], None]

_handle, _pointer, _int, _size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class _Opaque(ctypes.Structure):
    """The C struct cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Result(ctypes.Structure):
    """The C struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Opaque),
        ("workspace", _size),
        ("state", _int),
        ("waves", ctypes.c_float),
        ("reserved", _int * 4),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [ctypes.POINTER(_handle)],
    "cublasLtDestroy": [_handle],
    "cublasLtMatmulDescCreate": [ctypes.POINTER(_handle), _int, _int],
    "cublasLtMatmulDescDestroy": [_handle],
    "cublasLtMatmulDescSetAttribute": [_handle, _int, _pointer, _size],
    "cublasLtMatrixLayoutCreate": [ctypes.POINTER(_handle), _int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutDestroy": [_handle],
    "cublasLtMatrixLayoutSetAttribute": [_handle, _int, _pointer, _size],
    "cublasLtMatmulPreferenceCreate": [ctypes.POINTER(_handle)],
    "cublasLtMatmulPreferenceDestroy": [_handle],
    "cublasLtMatmulPreferenceSetAttribute": [_handle, _int, _pointer, _size],
    "cublasLtMatmulAlgoGetHeuristic": [*[_handle] * 7, _int, ctypes.POINTER(_Result), ctypes.POINTER(_int)],
    "cublasLtMatmulAlgoCheck": [*[_handle] * 6, ctypes.POINTER(_Opaque), ctypes.POINTER(_Result)],
    "cublasLtMatmulAlgoConfigGetAttribute": [
        ctypes.POINTER(_Opaque),
        _int,
        _pointer,
        _size,
        ctypes.POINTER(_size),
    ],
    "cublasLtMatmul": [
        _handle,
        _handle,
        _pointer,
        _pointer,
        _handle,
        _pointer,
        _handle,
        _pointer,
        _pointer,
        _handle,
        _pointer,
        _handle,
        ctypes.POINTER(_Opaque),
        _pointer,
        _size,
        _pointer,
    ],
}


def load_library(device: CUDADevice) -> Any:
    """Load the libcublasLt that comes with CuPy's cuBLAS.

    Raises:
        DeviceError: there is none.
    """
    major = device.runtime.runtimeGetVersion() // 1000
    name = f"cublasLt64_{major}.dll" if platform.system() == "Windows" else f"libcublasLt.so.{major}"
    try:
        _ = device.cupy.cuda.cublas  # makes CuPy load cuBLAS, wherever CUDA is; after that the library's name is enough
        library = ctypes.CDLL(name)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise DeviceError(
            f"cuBLASLt does not load ({error}); it comes with the CUDA toolkit, or with: "
            f"pip install 'cupy-cuda{major}x[ctk]'"
        ) from error
    for function, arguments in _SIGNATURES.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = _int
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    library.cublasLtGetVersion.restype = _size
    return library


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of cuBLASLt for a product.

    Attributes:
        opaque: Bytes of cublasLtMatmulAlgo_t, valid for the version of the library that returned it.
        config: Configuration: the algorithm's id, its tile, splits along k, reduction, swizzling, custom option,
            stages, inner shape, cluster.
        workspace: Bytes of workspace that it needs.
    """

    opaque: bytes
    config: tuple[int, ...]
    workspace: int


@dataclass(frozen=True)
class Addresses:
    """Addresses of the first elements of a product's operands; 0 for an absent operand."""

    a: int
    b: int
    bias: int
    residual: int
    out: int
    row_scales: int = 0
    column_scales: int = 0

    @classmethod
    def of(cls, call: KernelCall, places: Sequence[int]) -> Addresses:
        """The addresses of a product's operands, from `places`, which has one per operand of the call, inputs first."""
        a, b, *others, out = places
        gemm = gemm_of(call)
        bias = others.pop(0) if gemm.has_bias else 0
        return cls(a, b, bias, others.pop(0) if gemm.has_residual else 0, out, *others)

    @property
    def alignments(self) -> dict[str, int]:
        """The alignment of each address, at most `WIDEST_ACCESS`."""
        return {name: alignment(place) for name, place in vars(self).items()}


def product_key(call: KernelCall, at: Addresses) -> str:
    """A key of everything that determines which algorithms a product can use, and which is the fastest."""
    dtypes = call.inputs[0].dtype, call.outputs[0].dtype
    return json.dumps([*dtypes, at.alignments, asdict(replace(gemm_of(call), alpha=1.0))], sort_keys=True)


class CublasLt:
    """The cuBLASLt library on the device's stream, with a workspace that all products share, since they run in order.

    Attributes:
        version: Version of the library; algorithms are only valid for the version that returned them.
    """

    def __init__(self, device: CUDADevice, library: Any = None) -> None:
        self.library = load_library(device) if library is None else library
        self.version = int(self.library.cublasLtGetVersion())
        self.stream = int(device.stream.ptr)
        self.handle = _handle()
        self.workspace_bytes = (32 if device.arch >= 90 else 8) * _MIB
        self._workspace = device.allocate(self.workspace_bytes, "the workspace of cuBLASLt")
        self.workspace = int(self._workspace.data.ptr)
        with device.active("cuBLASLt does not start"):
            self.check(self.library.cublasLtCreate(ctypes.byref(self.handle)), "cublasLtCreate")
        weakref.finalize(self, self.library.cublasLtDestroy, self.handle)

    def check(self, status: int, what: str) -> None:
        if status:
            raise DeviceError(f"cuBLASLt failed at {what}: {self.library.cublasLtGetStatusString(status).decode()}")


class _Descriptor:
    """A descriptor object of cuBLASLt, which is destroyed with this object."""

    def __init__(self, lt: CublasLt, kind: str, *arguments: int) -> None:
        self._lt = lt
        self._kind = kind
        self.handle = _handle()
        create, destroy = (getattr(lt.library, f"cublasLt{kind}{verb}") for verb in ("Create", "Destroy"))
        lt.check(create(ctypes.byref(self.handle), *arguments), kind)
        weakref.finalize(self, destroy, self.handle)

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the descriptor; `value` is a ctypes value of the size that cuBLASLt expects."""
        function = getattr(self._lt.library, f"cublasLt{self._kind}SetAttribute")
        self._lt.check(function(self.handle, attribute, ctypes.addressof(value), ctypes.sizeof(value)), self._kind)


class Product:
    """out[m,n] = act(alpha · A[m,k] · B[k,n] + residual[m,n] + bias[n]), row-major, batched or not.

    Sums are float32 and rounded once; sums of int8 products are int32. cuBLASLt is column-major, so it is asked for the
    transposed product, with a and b exchanged; its bias runs along columns, which are our rows.

    Args:
        call: A call with a `GemmLaunch`. Bias and residual have the result's dtype.
    """

    def __init__(self, lt: CublasLt, call: KernelCall, at: Addresses) -> None:
        self._lt, self._call, self._at = lt, call, at
        gemm = self._gemm = gemm_of(call)
        kind, out_kind = _TYPES[gemm.codes or call.inputs[0].dtype], _TYPES[call.outputs[0].dtype]
        whole = gemm.codes == "int8"
        m, n, k = gemm.m, gemm.n, gemm.k
        self._name = f"a product of {m}x{k}x{n}"
        beta = int(bool(at.residual))
        self._factors: tuple[Any, Any] = ctypes.c_float(gemm.alpha), ctypes.c_float(beta)
        if whole:
            self._factors = ctypes.c_int32(1), ctypes.c_int32(0)  # sums of codes have neither a factor nor addends
        compute = (_COMPUTE_32I, _TYPES["int32"]) if whole else (_COMPUTE_32F, _TYPES["float32"])
        self._desc = _Descriptor(lt, "MatmulDesc", *compute)
        self._desc.set(_DESC_TRANS_A, _int(_OP_T if gemm.trans_b else _OP_N))
        self._desc.set(_DESC_TRANS_B, _int(_OP_T if gemm.trans_a else _OP_N))
        epilogue = _EPILOGUES[gemm.activation] | (_EPILOGUE_BIAS if at.bias else 0)
        self._desc.set(_DESC_EPILOGUE, ctypes.c_uint32(epilogue or _EPILOGUE_NONE))
        if at.bias:
            self._desc.set(_DESC_BIAS_POINTER, ctypes.c_uint64(at.bias))
            self._desc.set(_DESC_BIAS_TYPE, ctypes.c_int32(out_kind))
        if gemm.codes == "float8_e4m3":
            self._desc.set(_DESC_FAST_SUMS, ctypes.c_int8(gemm.fast_sums))
        if gemm.has_scales:
            self._desc.set(_DESC_SCALE_A, ctypes.c_uint64(at.column_scales))
            self._desc.set(_DESC_SCALE_B, ctypes.c_uint64(at.row_scales))
            self._desc.set(_DESC_SCALE_MODE_A, ctypes.c_int32(_SCALE_VECTOR))
            self._desc.set(_DESC_SCALE_MODE_B, ctypes.c_int32(_SCALE_VECTOR))
        self._b = self._layout(kind, (n, k), gemm.trans_b, gemm.ldb, gemm.stride_b)
        self._a = self._layout(kind, (k, m), gemm.trans_a, gemm.lda, gemm.stride_a)
        self._out = self._layout(out_kind, (n, m), False, gemm.ldc, gemm.stride_c)
        self._residual = self._out
        if at.residual:
            self._residual = self._layout(out_kind, (n, m), False, gemm.ldr, gemm.stride_r)
        self._matrices = [each.handle for each in (self._b, self._a, self._residual, self._out)]

    def _layout(self, kind: int, shape: tuple[int, int], turned: bool, leading: int, stride: int) -> _Descriptor:
        """A descriptor of a column-major matrix.

        Args:
            shape: Rows and columns in the product.
            turned: Whether its memory holds the transposed matrix.
            leading, stride: Elements from column to column of the memory, and from matrix to matrix of a batch.
        """
        layout = _Descriptor(self._lt, "MatrixLayout", kind, *(shape[::-1] if turned else shape), leading)
        if self._gemm.batch > 1:
            layout.set(_LAYOUT_BATCH_COUNT, ctypes.c_int32(self._gemm.batch))
            layout.set(_LAYOUT_BATCH_STRIDE, ctypes.c_int64(stride))
        return layout

    def algorithms(self, most: int) -> list[Algorithm]:
        """The algorithms that cuBLASLt suggests, at most `most`, with the most promising first.

        Raises:
            DeviceError: it has none.
        """
        lt, at = self._lt, self._at
        preference = _Descriptor(lt, "MatmulPreference")
        preference.set(_PREFER_WORKSPACE, ctypes.c_uint64(lt.workspace_bytes))
        preference.set(_PREFER_REDUCTIONS, ctypes.c_uint32(_REDUCTIONS))
        for index, place in enumerate((at.b, at.a, at.residual or at.out, at.out)):
            preference.set(_PREFER_ALIGNMENT_A + index, ctypes.c_uint32(alignment(place)))
        results, count = (_Result * most)(), _int()
        status = lt.library.cublasLtMatmulAlgoGetHeuristic(
            lt.handle, self._desc.handle, *self._matrices, preference.handle, most, results, ctypes.byref(count)
        )
        usable = [result for result in results[: count.value] if not result.state]
        lt.check(status, self._name)
        if not usable:
            raise DeviceError(f"cuBLASLt has no algorithm for {self._name}: {product_key(self._call, at)}")
        return [self._algorithm(result.algorithm, result.workspace) for result in usable]

    def restored(self, opaque: bytes, config: Sequence[int]) -> Algorithm | None:
        """An algorithm that an earlier process stored.

        None if this library rejects it or reads another configuration from it.
        """
        lt, result = self._lt, _Result()
        if len(opaque) != ctypes.sizeof(_Opaque):
            return None
        given = _Opaque.from_buffer_copy(opaque)
        status = lt.library.cublasLtMatmulAlgoCheck(
            lt.handle, self._desc.handle, *self._matrices, ctypes.byref(given), ctypes.byref(result)
        )
        if status or result.state or result.workspace > lt.workspace_bytes:
            return None
        algorithm = self._algorithm(given, result.workspace)
        return algorithm if algorithm.config == tuple(config) else None

    def _algorithm(self, opaque: _Opaque, workspace: int) -> Algorithm:
        config = []
        for attribute, size in enumerate(_CONFIG_ATTRIBUTES):
            value, written = ctypes.c_uint32(), _size()
            status = self._lt.library.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(opaque), attribute, ctypes.addressof(value), size, ctypes.byref(written)
            )
            config.append(-1 if status else value.value)  # older versions lack the newer attributes
        return Algorithm(bytes(opaque), tuple(config), int(workspace))

    def launch(self, algorithm: Algorithm) -> Launch:
        """A function that enqueues the product with an algorithm."""
        lt, at = self._lt, self._at
        opaque = _Opaque.from_buffer_copy(algorithm.opaque)
        alpha, beta = (ctypes.addressof(factor) for factor in self._factors)
        b, a, residual, out = self._matrices
        arguments = (
            lt.handle,
            self._desc.handle,
            alpha,
            at.b,
            b,
            at.a,
            a,
            beta,
            at.residual or at.out,
            residual,
            at.out,
            out,
            ctypes.byref(opaque),
            lt.workspace,
            lt.workspace_bytes,
            lt.stream,
        )
        function = lt.library.cublasLtMatmul

        def enqueue(keep: object = self) -> None:
            lt.check(function(*arguments), self._name)

        return enqueue


def operand_bytes(call: KernelCall) -> dict[str, int]:
    """Bytes from the first to the last element of each operand of a product, by name; 0 for an absent operand.

    The names are those of `Addresses`.
    """
    gemm = gemm_of(call)
    size, out_size = itemsize(call.inputs[0].dtype), itemsize(call.outputs[0].dtype)
    m, n, k = gemm.m, gemm.n, gemm.k

    def extent(leading: int, stride: int, rows: int, columns: int) -> int:
        return (gemm.batch - 1) * stride + (rows - 1) * leading + columns

    return {
        "a": size * extent(gemm.lda, gemm.stride_a, *((k, m) if gemm.trans_a else (m, k))),
        "b": size * extent(gemm.ldb, gemm.stride_b, *((n, k) if gemm.trans_b else (k, n))),
        "bias": out_size * n if gemm.has_bias else 0,
        "residual": out_size * extent(gemm.ldr, gemm.stride_r, m, n) if gemm.has_residual else 0,
        "out": out_size * extent(gemm.ldc, gemm.stride_c, m, n),
        "row_scales": itemsize("float32") * m * gemm.has_scales,
        "column_scales": itemsize("float32") * n * gemm.has_scales,
    }


def alignment(address: int) -> int:
    """The alignment of an address in bytes, at most `WIDEST_ACCESS`; `WIDEST_ACCESS` for 0, an absent operand."""
    return min(WIDEST_ACCESS, address & -address) or WIDEST_ACCESS
