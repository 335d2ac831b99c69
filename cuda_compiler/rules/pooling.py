"""Rules of pooling and resampling."""

from __future__ import annotations

from cuda_compiler.rules.channel_packs import is_packed
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

_FULL = MULTIPROCESSORS * 512  # threads that keep a large GPU busy
_THREADS = 128  # of a block


def channel_pack(*views: View) -> int:
    """Channels per vector access that all operands allow, at most 16 bytes of the widest dtype."""
    pack = 16 // max(itemsize(view.dtype) for view in views)
    while pack > 1 and not all(is_packed(view, pack) for view in views):
        pack //= 2
    return pack


def _pool(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return per_pack(make, call, "conv/pool.cu", call.kernel)


def _upsample(make: Specializer, call: KernelCall) -> list[KernelCall]:
    return per_pack(make, call, "conv/upsample.cu", call.kernel)


def per_pack(make: Specializer, call: KernelCall, file: str, function: str) -> list[KernelCall]:
    """The call of a kernel whose threads compute a pack of channels of one output pixel each.

    Args:
        file, function: The template, and the name of the kernel in it.
    """
    out = call.outputs[0]
    pack = channel_pack(*call.inputs, out)
    while pack > 1 and out.numel // pack < _FULL:
        pack //= 2
    grid = (groups(out.numel // pack, _THREADS), 1, 1)
    constants = {"pack": pack}
    return [make.kernel(call, file, function=function, grid=grid, block=(_THREADS, 1, 1), constants=constants)]


def _max_pool_index(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of a kernel whose threads compute one index of a maximum each."""
    grid = (groups(call.outputs[0].numel, _THREADS), 1, 1)
    return [make.kernel(call, "conv/pool.cu", grid=grid, block=(_THREADS, 1, 1), constants={"pack": 1})]


def _adaptive_pool(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of adaptive pooling: lanes of a warp share each window, 8 with vectors of channels, else all 32."""
    images, channels, rows, columns = call.outputs[0].shape
    pack = channel_pack(*call.inputs, *call.outputs)
    walkers = 8 if pack > 1 else WARP
    warps = images * rows * columns * groups(channels // pack, WARP // walkers)
    grid = (groups(warps, _THREADS // WARP), 1, 1)
    return [
        make.kernel(
            call, "conv/pool.cu", grid=grid, block=(_THREADS, 1, 1), constants={"pack": pack, "walkers": walkers}
        )
    ]


RULES: dict[str, Rule] = {
    "max_pool2d_kernel": _pool,
    "max_pool2d_index_kernel": _max_pool_index,
    "avg_pool2d_kernel": _pool,
    "upsample_nearest_kernel": _upsample,
    "upsample_bilinear_kernel": _upsample,
    "adaptive_avg_pool2d_kernel": _adaptive_pool,
}
