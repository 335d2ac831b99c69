"""Images with their channels innermost on the CPU device: the plan that has them, and their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from native_on_tensors import conv
from torch import Tensor, nn
from torch_ir import extract_ir

from npu_compiler import CompiledProgram, CompileOptions, compile
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View
from npu_runtime import CPUBackend, Executor, NPUBuffer, load_weights
from npu_runtime.cpu.channels_last import Image, channels_last
from npu_runtime.cpu.native import build
from npu_runtime.cpu.native.bindings import NativeLaunch, available, layout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}

needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {build.failure_reason()}")


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


def images(*shape: int, dtype: torch.dtype = torch.float32, gap: int = 3, filled: bool = True) -> Tensor:
    """Images [N, C, H, W] with their channels innermost, and `gap` NaN after the channels of each pixel."""
    batch, channels, height, width = shape
    memory = torch.full((batch, height, width, channels + gap), float("nan"), dtype=dtype)
    view = memory[..., :channels].permute(0, 3, 1, 2)
    if filled:
        view.copy_(torch.randn(shape))
    return view


def gaps(view: Tensor) -> Tensor:
    """The memory that `images` left between pixels."""
    base = view._base
    assert base is not None
    return base[..., view.shape[1] :]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    assert error <= tolerance * max(scale, 1e-3), f"{error=} {scale=}"


def run(launch: NativeLaunch | None, name: str) -> None:
    assert launch is not None and launch.name == name
    launch()


def check(
    x: Tensor,
    out_channels: int,
    kernel: tuple[int, int],
    name: str,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    activation: str = "none",
    residual: bool = False,
    in_place: bool = False,
    before: bool = True,
) -> None:
    weight = torch.randn(out_channels, x.shape[1] // groups, *kernel) / (x.shape[1] // groups * kernel[0]) ** 0.5
    weight, bias = weight.to(x.dtype), torch.randn(out_channels).to(x.dtype)
    top, bottom, left, right = padding
    padded = F.pad(x.double(), (left, right, top, bottom))
    sums = F.conv2d(padded, weight.double(), bias.double(), stride, 0, dilation, groups)
    added = images(*sums.shape, dtype=x.dtype) if residual else None
    out = added if in_place and added is not None else images(*sums.shape, dtype=x.dtype, gap=5, filled=False)
    if added is None:
        expected = ACTIVATE[activation](sums)
    elif before:
        expected = ACTIVATE[activation](sums + added.double())
    else:
        expected = ACTIVATE[activation](sums) + added.double()
    packed = conv.pack_conv_weight(weight, groups)
    run(conv.conv2d(x, packed, bias, added, activation, stride, padding, dilation, groups, out, before), name)
    # The rounding errors of a sum grow with the square root of its terms, in float32 above those of the result.
    terms = weight[0].numel() if x.dtype == torch.float32 else 1
    assert_close(out, expected, TOLERANCE[x.dtype] * max(1.0, (terms / 1000) ** 0.5))
    assert gaps(out).isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "channels", "out_channels", "size"),
    [(1, 16, 96, (13, 7)), (2, 24, 20, (9, 9)), (3, 33, 70, (5, 1)), (1, 64, 64, (8, 8))],
)
def test_a_pointwise_convolution_is_a_product_of_pixels(
    batch: int, channels: int, out_channels: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    # Pairs of channels are multiplied at once: a channel without another is paired with zeros first.
    padded = dtype == torch.bfloat16 and layout().has_pairs and channels % 2
    name = "conv2d_channels_last" if padded else "linear"
    for activation, residual, before in (("relu6", False, True), ("relu", True, True), ("silu", True, False)):
        x = images(batch, channels, *size, dtype=dtype)
        check(x, out_channels, (1, 1), name, activation=activation, residual=residual, before=before)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "out_channels", "kernel", "stride", "padding", "dilation"),
    [
        (16, 33, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (24, 40, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
        (5, 32, (5, 2), (1, 2), (2, 0, 1, 3), (1, 1)),
        (8, 7, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
        (64, 48, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
        (40, 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
    ],
)
def test_a_convolution_gathers_windows(
    channels: int,
    out_channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    x = images(2, channels, 15, 11, dtype=dtype, gap=0 if channels % 2 else 3)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    check(x, out_channels, kernel, "conv2d_channels_last", activation="relu", **window)
    check(x, out_channels, kernel, "conv2d_channels_last", residual=True, in_place=True, **window)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "channels", "out_channels", "groups", "size", "kernel", "stride", "padding", "dilation"),
    [
        (1, 64, 70, 1, (28, 23), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (5, 32, 64, 1, (7, 7), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (2, 96, 40, 3, (14, 14), (3, 2), (1, 1), (2, 0, 1, 3), (2, 3)),
        (1, 256, 33, 1, (9, 10), (2, 3), (1, 1), (0, 0, 0, 0), (1, 2)),
        (3, 64, 64, 2, (11, 40), (5, 1), (1, 1), (7, 2, 0, 0), (1, 1)),
        (1, 32, 24, 1, (130, 129), (1, 7), (1, 1), (0, 0, 3, 3), (1, 1)),
        (2, 64, 40, 1, (27, 30), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
        (1, 128, 96, 1, (29, 31), (1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
        (2, 32, 40, 2, (41, 50), (4, 5), (3, 2), (2, 3, 4, 1), (2, 3)),
    ],
)
def test_a_convolution_of_whole_tiles_of_channels(
    batch: int,
    channels: int,
    out_channels: int,
    groups: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    outs = out_channels * groups
    for gap in (0, 3):
        x = images(batch, channels, *size, dtype=dtype, gap=gap)
        check(x, outs, kernel, "conv2d_channels_last", activation="relu", residual=True, in_place=True, **window)
    check(x, outs, kernel, "conv2d_channels_last", activation="silu", residual=True, before=False, **window)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(9, 8), (17, 13), (57, 46)])
def test_a_convolution_takes_bands_of_rows_and_several_images(
    size: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng([seed, *size])
    groups, channels, outs = (int(rng.integers(*limits)) for limits in ((1, 4), (10, 25), (1, 80)))
    x = images(3, groups * 2 * channels, *size, dtype=dtype, gap=int(rng.integers(4)))
    kernel, padding = tuple(rng.integers(2, 4, 2).tolist()), tuple(rng.integers(0, 3, 4).tolist())
    stride = tuple(rng.integers(1, 3, 2).tolist())
    window = {"stride": stride, "padding": padding, "groups": groups}
    check(x, groups * outs, kernel, "conv2d_channels_last", activation="relu6", **window)
    check(x, groups * outs, kernel, "conv2d_channels_last", activation="hardswish", residual=True, **window)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drawing", range(6))
def test_the_outputs_of_a_group_end_in_half_a_panel(drawing: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng([seed, drawing])
    groups, channels, panels, rest = (int(rng.integers(*limits)) for limits in ((1, 4), (2, 20), (1, 4), (1, 9)))
    x = images(2, groups * 2 * channels, *rng.integers(5, 20, 2).tolist(), dtype=dtype, gap=int(rng.integers(4)))
    kernel, stride = tuple(rng.integers(2, 4, 2).tolist()), tuple(rng.integers(1, 3, 2).tolist())
    window = {"stride": stride, "padding": tuple(rng.integers(0, 3, 4).tolist()), "groups": groups}
    for activation, residual in (("relu", False), ("relu6", True), ("silu", True)):
        outs = groups * (16 * panels + rest)
        check(x, outs, kernel, "conv2d_channels_last", activation=activation, residual=residual, **window)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drawing", range(4))
def test_a_convolution_gathers_the_windows_of_groups(drawing: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng([seed, drawing])
    groups, channels, outs = (int(rng.integers(*limits)) for limits in ((2, 6), (2, 40), (1, 80)))
    x = images(2, groups * channels, 15, 11, dtype=dtype, gap=int(rng.integers(4)))
    kernel, padding = tuple(rng.integers(1, 5, 2).tolist()), tuple(rng.integers(0, 3, 4).tolist())
    stride, dilation = ((size, size) for size in rng.integers(1, 3, 2).tolist())
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    check(x, groups * outs, kernel, "conv2d_channels_last", activation="relu", **window)
    check(x, groups * outs, kernel, "conv2d_channels_last", activation="silu", residual=True, in_place=True, **window)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drawing", range(6))
def test_a_convolution_copies_the_lines_of_many_groups(drawing: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng([seed, drawing])
    groups, pairs, outs = (int(rng.integers(*limits)) for limits in ((2, 40), (4, 30), (1, 50)))
    batch, *size = rng.integers(1, 5, 1).tolist() + rng.integers(5, 30, 2).tolist()
    x = images(batch, groups * 2 * pairs, *size, dtype=dtype, gap=int(rng.integers(40)))
    kernel, stride = tuple(rng.integers(2, 4, 2).tolist()), tuple(rng.integers(1, 3, 2).tolist())
    window = {"stride": stride, "padding": tuple(rng.integers(0, 3, 4).tolist()), "groups": groups}
    check(x, groups * outs, kernel, "conv2d_channels_last", activation="relu", **window)
    check(x, groups * outs, kernel, "conv2d_channels_last", activation="silu", residual=True, in_place=True, **window)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "out_channels", "kernel", "stride", "padding", "dilation"),
    [
        (3, 40, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
        (3, 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
        (4, 17, (4, 4), (4, 4), (0, 0, 0, 0), (1, 1)),
        (2, 33, (2, 9), (1, 1), (0, 3, 9, 1), (1, 1)),
        (3, 8, (3, 2), (3, 1), (5, 0, 0, 5), (2, 3)),
    ],
)
def test_a_convolution_reads_planar_images_of_few_channels(
    channels: int,
    out_channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    for size in ((33, 49), (9, 8)):
        x = torch.randn(2, channels, *size).to(dtype)
        window = {"stride": stride, "padding": padding, "dilation": dilation}
        check(x, out_channels, kernel, "conv2d_planes", activation="relu6", **window)
        check(x, out_channels, kernel, "conv2d_planes", activation="silu", residual=True, in_place=True, **window)
        apart = torch.randn(2, channels, size[0], 2 * size[1]).to(dtype)[..., ::2]
        check(apart, out_channels, kernel, "conv2d_planes", **window)


@needs_kernels
def test_a_convolution_reads_no_planar_images_of_many_channels() -> None:
    many, weight = torch.randn(1, 5, 6, 6), conv.pack_conv_weight(torch.randn(8, 5, 3, 3))
    unpadded = ((1, 1), (0, 0, 0, 0), (1, 1), 1)
    assert conv.conv2d(many, weight, None, None, "none", *unpadded, images(1, 8, 4, 4)) is None


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation"),
    [
        (32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (21, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
        (40, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
        (9, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
        (3, (1, 13), (1, 1), (0, 0, 6, 6), (1, 1)),
        (7, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
        (48, (3, 2), (1, 3), (4, 0, 0, 5), (2, 2)),
    ],
)
def test_a_depthwise_convolution(
    channels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    for size in ((20, 27), (5, 4)):
        x = images(2, channels, *size, dtype=dtype)
        window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": channels}
        name = "conv2d_depthwise_channels_last"
        check(x, channels, kernel, name, activation="relu6", **window)
        check(x, channels, kernel, name, activation="silu", **window)
        check(x, channels, kernel, name, activation="hardswish", residual=True, in_place=True, **window)
        check(x, channels, kernel, name, activation="relu", residual=True, before=False, **window)


@needs_kernels
def test_an_input_may_be_a_part_of_an_image() -> None:
    x = images(2, 24, 12, 14)[:, 4:20, 1:10, 2:13]
    check(x, 32, (1, 1), "conv2d_channels_last")
    check(x, 32, (3, 3), "conv2d_channels_last", padding=(1, 1, 1, 1))
    check(x, 16, (3, 3), "conv2d_depthwise_channels_last", padding=(1, 1, 1, 1), groups=16)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooling(dtype: torch.dtype) -> None:
    for channels, kernel, stride, padding in itertools.product((5, 64), (2, 3), (1, 2), (0, 1)):
        x = images(2, channels, 19, 13, dtype=dtype)
        x[0, 1, 4, 4] = float("nan")
        expected = F.max_pool2d(x, kernel, stride, padding)
        out = images(*expected.shape, dtype=dtype, filled=False)
        window = ((kernel, kernel), (stride, stride), (padding,) * 4)
        run(conv.max_pool2d(x, *window, (1, 1), out), "max_pool2d_channels_last")
        assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(), expected.nan_to_num())
        assert gaps(out).isnan().all()
        x = images(2, channels, 19, 13, dtype=dtype)
        for include in (False, True):
            averages = F.avg_pool2d(x.double(), kernel, stride, padding, count_include_pad=include)
            run(conv.avg_pool2d(x, *window, out, include), "avg_pool2d_channels_last")
            assert_close(out, averages, TOLERANCE[dtype])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_average_of_whole_images(dtype: torch.dtype) -> None:
    for channels, size in ((5, (7, 7)), (200, (1, 3)), (64, (40, 40))):
        x, out = images(3, channels, *size, dtype=dtype), torch.empty(3, channels, 1, 1, dtype=dtype)
        run(conv.global_avg_pool2d(x, out), "avg_pool2d_channels_last")
        assert_close(out, x.double().mean((2, 3), keepdim=True), TOLERANCE[dtype])


def test_a_view_of_an_image_has_the_same_elements_in_the_new_layout() -> None:
    batch, channels, height, width = shape = (2, 6, 4, 5)
    image = Image(BufferAllocation("x", "arena", shape, "float32"))
    planar = np.arange(240, dtype=np.float32)
    last = np.ascontiguousarray(planar.reshape(shape).transpose(0, 2, 3, 1)).reshape(-1)
    whole = View("x", shape, (120, 20, 5, 1), 0, "float32")

    def elements(view: View, memory: np.ndarray) -> np.ndarray:
        steps = [4 * stride for stride in view.strides]
        return np.lib.stride_tricks.as_strided(memory[view.offset :], view.shape, steps)

    pixels = View("x", (batch, channels, height * width), (120, 20, 1), 0, "float32")
    views = [
        whole,
        whole.permute((0, 2, 3, 1)),
        whole.slice(1, 2, 6, 2),
        whole.slice(0, 1, 2).slice(1, 1, 4),
        whole.select(0, 1).permute((1, 2, 0)),
        whole.select(1, 3).unsqueeze(1).expand((2, 3, 4, 5)),
        pixels,
        pixels.permute((0, 2, 1)),
        pixels.select(2, 7),
    ]
    for view in views:
        moved = image.laid_out(view)
        assert moved is not None, view
        np.testing.assert_array_equal(elements(moved, last), elements(view, planar))
    assert image.laid_out(whole).strides == (120, 1, 30, 6)
    flat = View("x", (240,), (1,), 0, "float32")
    assert image.laid_out(flat) is None
    assert image.laid_out(View("x", shape, (120, 20, 5, 1), 0, "bfloat16")) is None


class Block(nn.Module):
    """An inverted residual with squeeze-and-excite, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.expand, self.depthwise = nn.Conv2d(16, 40, 1), nn.Conv2d(40, 40, 3, 1, 1, groups=40)
        self.reduce, self.excite = nn.Conv2d(40, 8, 1), nn.Conv2d(8, 40, 1)
        self.project, self.head = nn.Conv2d(40, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.stem(x)), 3, 2, 1)
        y = F.silu(self.depthwise(F.silu(self.expand(x))))
        y = y * torch.sigmoid(self.excite(F.silu(self.reduce(F.adaptive_avg_pool2d(y, 1)))))
        return self.head((x + self.project(y)).mean((2, 3)))


class Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 32, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean((2, 3))


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Linear(16 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)).flatten(1))


class Normalized(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 24, 4, 4), nn.Conv2d(24, 24, 7, 1, 3, groups=24)
        self.norm, self.expand, self.project = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
        self.last = nn.Conv2d(24, 24, 7, 1, 3, groups=24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.project(F.gelu(self.expand(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.last(x + y.permute(0, 3, 1, 2)).mean((2, 3))


def layouts(plan: ExecutionPlan) -> list[str]:
    """The layout of each convolution's output."""
    outs = [call.outputs[0] for call in plan.calls if call.kernel == "conv2d_kernel"]
    named = {True: "last", False: "planar"}
    return ["point" if out.shape[2:] == (1, 1) else named[out.strides[1] == 1] for out in outs]


def program_of(module: type[nn.Module], dtype: str = "float32") -> CompiledProgram:
    ir = extract_ir(module().eval().to("meta"), (torch.empty(2, 3, 16, 16, device="meta"),)).to_dict()
    return compile(ir, options=CompileOptions(compute_dtype=dtype))


def test_all_images_of_a_network_have_their_channels_innermost() -> None:
    plan = program_of(Block).plan
    moved = channels_last(plan, pairs=False)
    assert layouts(plan) == ["planar", "planar", "planar", "point", "point", "planar"]
    assert layouts(moved) == ["last", "last", "last", "point", "point", "last"]
    assert moved.buffers == plan.buffers and [call.kernel for call in moved.calls] == [x.kernel for x in plan.calls]


class Shifted(nn.Module):
    """The sum of a convolution and of an input, which is planar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x)) * x).mean((2, 3))


def test_an_image_stays_planar_beside_an_input() -> None:
    plan = program_of(Shifted).plan
    assert layouts(channels_last(plan, pairs=True)) == ["planar", "last"]


def test_an_image_that_a_call_reads_in_planar_order_stays_planar() -> None:
    plan = program_of(Flattened).plan
    assert channels_last(plan, pairs=True) is plan


def test_images_stay_planar_where_winograds_transform_saves_more() -> None:
    plan = program_of(Transformed).plan
    assert channels_last(plan, pairs=True) is plan
    plan = program_of(Transformed, "bfloat16").plan
    assert channels_last(plan, pairs=False) is plan
    assert layouts(channels_last(plan, pairs=True)) == ["last", "last"]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("module", [Block, Normalized, Transformed])
def test_a_network_computes_the_same_in_either_layout(
    module: type[nn.Module], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, x = module().eval(), torch.randn(2, 3, 16, 16)
    program = program_of(module, dtype)
    (spec,), (result,) = program.input_specs, program.output_specs

    def output() -> np.ndarray:
        backend = CPUBackend(tune=False)
        weights = load_weights(network.state_dict(), program, backend, strict=False)
        inputs = {spec.name: NPUBuffer.from_numpy(x.numpy(), backend, spec=spec)}
        return Executor(program, backend).run(inputs, weights)[result.name].to_numpy(spec=result).astype(np.float32)

    moved = output()
    monkeypatch.setattr(CPUBackend, "laid_out", lambda self, plan: plan)
    planar = output()
    error = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(moved, planar, atol=error * np.abs(planar).max())
    np.testing.assert_allclose(moved, network(x).detach().numpy(), atol=error * np.abs(planar).max())
