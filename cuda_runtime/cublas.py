"""Matrix products by cuBLAS: the calls that the compiler names `cublas_gemm`.

The library is called directly. CuPy's own bindings set the stream anew before each call, which makes cuBLAS forget the
workspace it was given; without one it allocates inside a captured graph.
"""

from __future__ import annotations

import ctypes
import platform
import weakref
from collections.abc import Callable
from typing import Any

from cuda_runtime.cuda_device import CUDADevice
from npu_compiler.codegen import KernelCall
from npu_compiler.errors import DeviceError

CUBLAS_GEMM = "cublas_gemm"

_MIB = 2**20
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_OP_N, _OP_T = 0, 1
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_NO_REDUCED_PRECISION_REDUCTION = 16

_handle, _pointer, _int, _long = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_SIGNATURES: dict[str, list[Any]] = {
    "cublasCreate_v2": [ctypes.POINTER(_handle)],
    "cublasDestroy_v2": [_handle],
    "cublasSetStream_v2": [_handle, _pointer],
    "cublasSetWorkspace_v2": [_handle, _pointer, ctypes.c_size_t],
    "cublasSetMathMode": [_handle, _int],
    "cublasGemmEx": [
        _handle, _int, _int, _int, _int, _int, _pointer, _pointer, _int, _int, _pointer, _int, _int, _pointer,
        _pointer, _int, _int, _int, _int,
    ],
    "cublasGemmStridedBatchedEx": [
        _handle, _int, _int, _int, _int, _int, _pointer, _pointer, _int, _int, _long, _pointer, _int, _int, _long,
        _pointer, _pointer, _int, _int, _long, _int, _int, _int,
    ],
}  # fmt: skip


def load_library(device: CUDADevice) -> Any:
    """libcublas, the one that CuPy found.

    Raises:
        DeviceError: there is none.
    """
    major = device.runtime.runtimeGetVersion() // 1000
    name = f"cublas64_{major}.dll" if platform.system() == "Windows" else f"libcublas.so.{major}"
    try:
        _ = device.cupy.cuda.cublas  # CuPy knows where CUDA is; once it has loaded the library, its name is enough
        library = ctypes.CDLL(name)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise DeviceError(
            f"cuBLAS does not load ({error}); it comes with the CUDA toolkit, or with: "
            f"pip install 'cupy-cuda{major}x[ctk]'"
        ) from error
    for function, arguments in _SIGNATURES.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = _int
    library.cublasGetStatusString.restype = ctypes.c_char_p
    return library


class Cublas:
    """A cuBLAS handle on the device's stream, with a workspace of its own, so that products can be captured."""

    def __init__(self, device: CUDADevice, library: Any = None) -> None:
        self._library = load_library(device) if library is None else library
        self._handle = _handle()
        size = (32 if device.arch >= 90 else 8) * _MIB
        self._workspace = device.allocate(size, "the workspace of cuBLAS")
        with device.active("cuBLAS does not start"):
            self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
            weakref.finalize(self, self._library.cublasDestroy_v2, self._handle)
            self._check(self._library.cublasSetStream_v2(self._handle, device.stream.ptr), "cublasSetStream")
            workspace = self._workspace.data.ptr
            self._check(self._library.cublasSetWorkspace_v2(self._handle, workspace, size), "cublasSetWorkspace")
            mode = _NO_REDUCED_PRECISION_REDUCTION
            self._check(self._library.cublasSetMathMode(self._handle, mode), "cublasSetMathMode")

    def gemm(self, call: KernelCall, a: int, b: int, out: int) -> Callable[[], None]:
        """What enqueues `out[m,n] = alpha * A[m,k] @ B[k,n] + beta * out`, row-major, batched or not.

        cuBLAS is column-major: what it is asked for is the transposed product, with a and b exchanged.

        Args:
            call: `trans_a`: a's memory is [k, m]; `trans_b`: b's memory is [n, k]. `lda`, `ldb` and `ldc` are the
                elements from one row of the memory to the next, `stride_a` … from one matrix of a batch to the next.
            a, b, out: Addresses of the first elements.
        """
        params = call.params
        kind_a, kind_b, kind_out = (_TYPES[view.dtype] for view in (*call.inputs, *call.outputs))
        ops = [_OP_T if params[name] else _OP_N for name in ("trans_b", "trans_a")]
        sizes = [params["n"], params["m"], params["k"]]
        alpha, beta = ctypes.c_float(params.get("alpha", 1.0)), ctypes.c_float(params.get("beta", 0.0))
        scales = [ctypes.addressof(alpha), ctypes.addressof(beta)]
        batch = params.get("batch", 1)
        strides = [[params.get(f"stride_{name}", 0)] if batch > 1 else [] for name in "abc"]
        arguments = (
            self._handle, *ops, *sizes, scales[0], b, kind_b, params["ldb"], *strides[1], a, kind_a, params["lda"],
            *strides[0], scales[1], out, kind_out, params["ldc"], *strides[2], *([batch] if batch > 1 else []),
            _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        function = self._library.cublasGemmStridedBatchedEx if batch > 1 else self._library.cublasGemmEx

        def enqueue(keep: object = (alpha, beta)) -> None:
            self._check(function(*arguments), f"a product of {params['m']}x{params['k']}x{params['n']}")

        return enqueue

    def _check(self, status: int, what: str) -> None:
        if status:
            raise DeviceError(f"cuBLAS failed at {what}: {self._library.cublasGetStatusString(status).decode()}")
