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
_TEAMS = (128, 256, 512, 1024)  # threads of a block that shares one window of an adaptive pooling
_OWN_PIXELS = 8  # of a shared window, at least, for each of these threads
_READ_BYTES = 64  # that lanes side by side read together


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
    """The call of adaptive pooling: a warp makes some packs of channels of one pixel, or a block if windows are large.

    Some lanes side by side have channels side by side; the others share the window. A block has it where warps are too
    few to keep a large GPU busy.
    """
    x, out = call.inputs[0], call.outputs[0]
    images, channels, rows, columns = out.shape
    pack = channel_pack(x, out)
    window = groups(x.shape[2], rows) * groups(x.shape[3], columns)
    lanes = _channel_lanes(x, channels // pack, pack, window)
    teams = images * rows * columns * groups(channels // pack, lanes)
    team = WARP
    for larger in _TEAMS:
        if teams * team < _FULL and window >= _OWN_PIXELS * (larger // lanes):
            team = larger
    block = max(team, _THREADS)
    grid = (groups(teams, block // team), 1, 1)
    constants = {"pack": pack, "lanes": lanes, "team": team}
    return [make.kernel(call, "conv/pool.cu", grid=grid, block=(block, 1, 1), constants=constants)]


def _channel_lanes(x: View, packs: int, pack: int, window: int) -> int:
    """Lanes of a warp that read channels of the same pixel: a power of two.

    They read `_READ_BYTES` bytes, or all `packs` packs if those are fewer; more if the window has few pixels to share.
    One lane does if channels are not side by side in memory.
    """
    if x.strides[1] != 1:
        return 1
    lanes = 1
    while lanes < min(packs, WARP) and (lanes * pack * itemsize(x.dtype) < _READ_BYTES or WARP // lanes > window):
        lanes *= 2
    return lanes


RULES: dict[str, Rule] = {
    "max_pool2d_kernel": _pool,
    "max_pool2d_index_kernel": _max_pool_index,
    "avg_pool2d_kernel": _pool,
    "upsample_nearest_kernel": _upsample,
    "upsample_bilinear_kernel": _upsample,
    "adaptive_avg_pool2d_kernel": _adaptive_pool,
}
