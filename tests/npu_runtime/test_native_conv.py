"""The native convolution and pooling kernels against torch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from native_on_tensors import conv
from torch import Tensor

from npu_compiler.errors import DeviceError
from npu_runtime.cpu.native import build
from npu_runtime.cpu.native.bindings import NativeLaunch, NativeSequence, available, layout
from npu_runtime.cpu.native.numbers import ACTIVATIONS

pack_conv_weight, conv2d = conv.pack_conv_weight, conv.conv2d
max_pool2d, avg_pool2d, global_avg_pool2d = conv.max_pool2d, conv.avg_pool2d, conv.global_avg_pool2d

pytestmark = pytest.mark.skipif(not available(), reason=f"no native kernels: {build.failure_reason()}")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Float32 sums differ by their order; 16-bit results by one rounding, half a unit in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
WINOGRAD_TOLERANCE = 1e-5

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """The references are tiny: torch's threads would only compete with the kernels' own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def maps(*shape: int, dtype: torch.dtype = torch.float32, filled: bool = True) -> Tensor:
    """A tensor whose batch items are further apart than their elements need, with NaN in between."""
    batch, channels, height, width = shape
    padded = torch.full((batch, channels + 3, height, width), float("nan"), dtype=dtype)
    view = padded[:, :channels]
    if filled:
        view.copy_(torch.randn(shape))
    return view


def surroundings(view: Tensor) -> Tensor:
    """Return the memory that `maps` allocated between the batch items."""
    batch, channels, height, width = view.shape
    return view.as_strided((batch, channels + 3, height, width), view.stride())[:, channels:]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    assert error <= tolerance * max(scale, 1e-3), f"{error=} {scale=}"


def run(launch: NativeLaunch | None) -> None:
    assert launch is not None
    launch()


def check_conv(
    x: Tensor,
    out_channels: int,
    kernel: tuple[int, int],
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    activation: str = "none",
    residual: bool = False,
    before: bool = True,
    algorithm: str | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    weight = torch.randn(out_channels, x.shape[1] // groups, *kernel) / (x.shape[1] // groups * kernel[0]) ** 0.5
    weight = weight.to(weight_dtype)
    bias = torch.randn(out_channels).to(x.dtype)
    top, bottom, left, right = padding
    padded = F.pad(x.double(), (left, right, top, bottom))
    expected = F.conv2d(padded, weight.double(), bias.double(), stride, 0, dilation, groups)
    out = maps(*expected.shape, dtype=x.dtype, filled=False)
    added = maps(*expected.shape, dtype=x.dtype) if residual else None
    if added is not None and before:
        expected = ACTIVATE[activation](expected + added.double())
    elif added is not None:
        expected = ACTIVATE[activation](expected) + added.double()
    else:
        expected = ACTIVATE[activation](expected)
    packed = pack_conv_weight(weight, groups)
    launch = conv2d(x, packed, bias, added, activation, stride, padding, dilation, groups, out, before, algorithm)
    if algorithm == "tiles" and launch is None:
        pytest.skip("this CPU has no matrix unit for bfloat16")
    run(launch)
    tolerance = TOLERANCE[x.dtype] + (WINOGRAD_TOLERANCE if kernel == (3, 3) else 0)
    assert_close(out, expected, tolerance)
    assert surroundings(out).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["pixels", "channels"])
@pytest.mark.parametrize(
    ("channels", "out_channels", "size"),
    [(1, 1, (1, 1)), (3, 17, (5, 7)), (64, 24, (7, 7)), (37, 40, (13, 11)), (16, 49, (1, 97)), (19, 96, (31, 29))],
)
def test_pointwise(channels: int, out_channels: int, size: tuple[int, int], algorithm: str, dtype: torch.dtype) -> None:
    check_conv(maps(2, channels, *size, dtype=dtype), out_channels, (1, 1), algorithm=algorithm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["winograd2", "winograd4"])
@pytest.mark.parametrize(
    ("channels", "out_channels", "size", "padding"),
    [
        (1, 1, (1, 1), (1, 1, 1, 1)),
        (16, 16, (7, 7), (1, 1, 1, 1)),
        (5, 33, (14, 14), (1, 1, 1, 1)),
        (18, 48, (28, 28), (1, 1, 1, 1)),
        (3, 20, (17, 61), (0, 0, 0, 0)),
        (4, 8, (9, 131), (2, 0, 1, 2)),
    ],
)
def test_winograd(
    channels: int,
    out_channels: int,
    size: tuple[int, int],
    padding: tuple[int, int, int, int],
    algorithm: str,
    dtype: torch.dtype,
) -> None:
    x = maps(2, channels, *size, dtype=dtype)
    check_conv(x, out_channels, (3, 3), padding=padding, algorithm=algorithm, residual=True, activation="relu")


@pytest.mark.parametrize("algorithm", ("pixels", "channels"))
def test_large_padded_items_go_together_a_few_at_a_time(algorithm: str) -> None:
    check_conv(maps(5, 40, 200, 200), 4, (3, 3), padding=(1, 1, 1, 1), algorithm=algorithm)


def test_winograd_in_bands() -> None:
    """Maps whose transformed input is computed in several bands of rows."""
    check_conv(maps(1, 67, 60, 113), 16, (3, 3), padding=(1, 1, 1, 1), algorithm="winograd4")
    check_conv(maps(1, 67, 60, 113), 16, (3, 3), padding=(1, 1, 1, 1), algorithm="winograd2")


@pytest.mark.parametrize("algorithm", ["pixels", "channels"])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 2), (3, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 5)])
def test_windows(
    kernel: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    stride: tuple[int, int],
    algorithm: str,
) -> None:
    for dtype in DTYPES:
        x = maps(2, 5, 13, 19, dtype=dtype)
        check_conv(x, 18, kernel, stride=stride, padding=padding, dilation=dilation, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [None, "pixels", "channels"])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 2)])
@pytest.mark.parametrize("size", [(3, 3), (3, 8), (8, 3), (4, 4)])
def test_strides_beyond_the_map(size: tuple[int, int], kernel: tuple[int, int], algorithm: str | None) -> None:
    """Windows that have one position along an axis: the pixels that no window reads stay unread."""
    for dtype, groups, stride in itertools.product(DTYPES, (1, 3, 6), [(8, 8), (9, 1), (1, 9)]):
        x = maps(2, 6, *size, dtype=dtype)
        check_conv(x, 18, kernel, stride=stride, groups=groups, algorithm=algorithm)


# Pairs of bfloat16: odd depths have half a pair, and the second value of a pair may lie in the next row or channel.
@pytest.mark.parametrize("algorithm", ["pixels", "channels", "tiles"])
@pytest.mark.parametrize(("kernel", "stride"), [((1, 1), (1, 1)), ((1, 1), (2, 2)), ((3, 3), (2, 1)), ((2, 5), (3, 3))])
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize(("channels", "out_channels", "groups"), [(1, 7, 1), (5, 18, 1), (64, 33, 1), (6, 40, 2)])
def test_bfloat16_pairs(
    channels: int,
    out_channels: int,
    groups: int,
    padding: tuple[int, int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    algorithm: str,
) -> None:
    for size in [(5, 7), (7, 7), (13, 29)]:
        check_conv(
            maps(2, channels, *size, dtype=torch.bfloat16),
            out_channels,
            kernel,
            stride=stride,
            padding=padding,
            groups=groups,
            algorithm=algorithm,
            residual=True,
            activation="relu",
            weight_dtype=torch.bfloat16,
        )


@pytest.mark.parametrize("algorithm", ["pixels", "channels", "tiles"])
def test_bfloat16_pairs_are_summed_in_float32(algorithm: str) -> None:
    if algorithm == "tiles" and not layout().has_tiles:
        pytest.skip("this CPU has no matrix unit for bfloat16")
    x, weight = maps(1, 301, 9, 10, dtype=torch.bfloat16), torch.randn(20, 301, 1, 1).to(torch.bfloat16)
    out = maps(1, 20, 9, 10, filled=False)
    window = ("none", (1, 1), (0, 0, 0, 0), (1, 1), 1)
    run(conv2d(x, pack_conv_weight(weight), None, None, *window, out, algorithm=algorithm))
    assert_close(out, F.conv2d(x.double(), weight.double()), TOLERANCE[torch.float32])


@pytest.mark.parametrize("size", [(7, 7), (14, 14), (28, 28)])
def test_bfloat16_weight_of_a_3x3_window(size: tuple[int, int]) -> None:
    x = maps(1, 17, *size, dtype=torch.bfloat16)
    check_conv(x, 35, (3, 3), padding=(1, 1, 1, 1), residual=True, weight_dtype=torch.bfloat16)


def test_one_packed_weight_serves_both_types_of_x() -> None:
    weight = torch.randn(20, 6, 1, 1).to(torch.bfloat16)
    packed = pack_conv_weight(weight)
    for dtype in DTYPES:
        x, out = maps(1, 6, 9, 9, dtype=dtype), maps(1, 20, 9, 9, dtype=dtype, filled=False)
        run(conv2d(x, packed, None, None, "none", (1, 1), (0, 0, 0, 0), (1, 1), 1, out))
        assert_close(out, F.conv2d(x.double(), weight.double()), TOLERANCE[dtype])


def test_wide_strided_stem() -> None:
    check_conv(maps(1, 3, 61, 67, dtype=torch.float16), 64, (7, 7), stride=(2, 2), padding=(3, 3, 3, 3))


@pytest.mark.parametrize("algorithm", ["pixels", "channels"])
@pytest.mark.parametrize(("channels", "out_channels", "groups"), [(8, 12, 4), (6, 6, 2), (34, 68, 2)])
def test_groups(channels: int, out_channels: int, groups: int, algorithm: str) -> None:
    x = maps(2, channels, 9, 11, dtype=torch.float16)
    check_conv(x, out_channels, (3, 3), padding=(1, 1, 1, 1), groups=groups, algorithm=algorithm)


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (14, 14), (29, 53)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1), (3, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (3, 1)])
def test_depthwise(kernel: tuple[int, int], stride: tuple[int, int], size: tuple[int, int]) -> None:
    height, width = kernel
    for dtype, dilation in itertools.product(DTYPES, [(1, 1), (2, 2)]):
        padding = (height // 2, height, width // 2 + 1, width)
        padding = tuple(pad * dilation[0] for pad in padding)
        x = maps(2, 5, *size, dtype=dtype)
        check_conv(x, 5, kernel, stride=stride, padding=padding, dilation=dilation, groups=5, activation="relu6")


def test_depthwise_with_several_outputs_per_channel() -> None:
    check_conv(maps(2, 3, 10, 12), 6, (3, 3), padding=(1, 1, 1, 1), groups=3, residual=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation: str, before: bool, dtype: torch.dtype) -> None:
    x = maps(2, 6, 5, 7, dtype=dtype) * 4
    for residual, groups in itertools.product((False, True), (1, 6)):
        check_conv(x, 18, (1, 1), activation=activation, residual=residual, before=before, groups=groups)


def test_mixed_dtypes_and_no_bias() -> None:
    weight = torch.randn(20, 6, 1, 1).to(torch.bfloat16)
    x, residual = maps(1, 6, 9, 9, dtype=torch.float16), maps(1, 20, 9, 9, dtype=torch.bfloat16)
    out = maps(1, 20, 9, 9, filled=False)
    run(conv2d(x, pack_conv_weight(weight), None, residual, "relu", (1, 1), (0, 0, 0, 0), (1, 1), 1, out))
    expected = F.relu(F.conv2d(x.double(), weight.double()) + residual.double())
    assert_close(out, expected, TOLERANCE[torch.float32])


def test_residual_is_overwritten() -> None:
    weight, x, residual = torch.randn(8, 6, 1, 1), maps(1, 6, 9, 9), maps(1, 8, 9, 9)
    expected = F.conv2d(x.double(), weight.double()) + residual.double()
    run(conv2d(x, pack_conv_weight(weight), None, residual, "none", (1, 1), (0, 0, 0, 0), (1, 1), 1, residual))
    assert_close(residual, expected, TOLERANCE[torch.float32])


def test_nan_and_infinity_pass_through() -> None:
    x = torch.zeros(1, 1, 1, 4)
    x[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for activation in ("none", "relu", "relu6"):
        out = torch.empty(1, 1, 1, 4)
        packed = pack_conv_weight(torch.ones(1, 1, 1, 1))
        run(conv2d(x, packed, None, None, activation, (1, 1), (0, 0, 0, 0), (1, 1), 1, out))
        torch.testing.assert_close(out, ACTIVATE[activation](x), equal_nan=True)


def test_launches_run_in_sequence_and_read_operands_each_time() -> None:
    weight = torch.randn(8, 8, 3, 3) / 8
    packed = pack_conv_weight(weight)
    x, middle, out = torch.zeros(1, 8, 20, 20), torch.empty(1, 8, 20, 20), torch.empty(1, 8, 20, 20)
    window = ("none", (1, 1), (1, 1, 1, 1), (1, 1), 1)
    first, second = (conv2d(a, packed, None, None, *window, b) for a, b in ((x, middle), (middle, out)))
    assert first is not None and second is not None
    sequence = NativeSequence([first, second])
    for _ in range(2):
        x.normal_()
        sequence()
        expected = F.conv2d(F.conv2d(x.double(), weight.double(), padding=1), weight.double(), padding=1)
        assert_close(out, expected, WINOGRAD_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(7, 7), (13, 37), (112, 112)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_max_pool(
    ceil_mode: bool, kernel: int, stride: int, padding: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    x = maps(2, 3, *size, dtype=dtype)
    expected = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    out = maps(*expected.shape, dtype=dtype, filled=False)
    run(max_pool2d(x, (kernel, kernel), (stride, stride), (padding,) * 4, (1, 1), out))
    assert torch.equal(out, expected)
    assert surroundings(out).isnan().all()


def test_max_pool_dilated_and_nan() -> None:
    x = maps(1, 2, 11, 12)
    x[0, 0, 4, 5] = float("nan")
    expected = F.max_pool2d(x, 3, 1, 1, dilation=2)
    out = torch.empty_like(expected)
    run(max_pool2d(x, (3, 3), (1, 1), (1, 1, 1, 1), (2, 2), out))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)])
def test_avg_pool(
    kernel: int, stride: int, padding: int, ceil_mode: bool, count_include_pad: bool, dtype: torch.dtype
) -> None:
    for size in [(7, 7), (14, 37)]:
        x = maps(2, 3, *size, dtype=dtype)
        expected = F.avg_pool2d(x.double(), kernel, stride, padding, ceil_mode, count_include_pad)
        out = maps(*expected.shape, dtype=dtype, filled=False)
        run(avg_pool2d(x, (kernel, kernel), (stride, stride), (padding,) * 4, out, count_include_pad))
        assert_close(out, expected, TOLERANCE[dtype])
        assert surroundings(out).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (9, 13)])
def test_global_avg_pool(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = maps(2, 130, *size, dtype=dtype)
    out = maps(2, 130, 1, 1, dtype=dtype, filled=False)
    run(global_avg_pool2d(x, out))
    assert_close(out, x.double().mean((2, 3), keepdim=True), TOLERANCE[dtype])


def test_avg_pool_divisor_override() -> None:
    x = maps(1, 3, 8, 8)
    expected = F.avg_pool2d(x.double(), 2, divisor_override=3)
    out = torch.empty(expected.shape)
    run(avg_pool2d(x, (2, 2), (2, 2), (0, 0, 0, 0), out, divisor_override=3))
    assert_close(out, expected, TOLERANCE[torch.float32])


def test_unhandled_operands() -> None:
    packed = pack_conv_weight(torch.randn(4, 4, 1, 1))
    window = ("none", (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, out = torch.randn(1, 4, 6, 6), torch.empty(1, 4, 6, 6)
    assert conv2d(x.double(), packed, None, None, *window, out) is None
    assert conv2d(x.contiguous(memory_format=torch.channels_last), packed, None, None, *window, out) is None
    assert conv2d(x, packed, None, None, *window, torch.empty(1, 4, 6, 12)[..., ::2]) is None
    assert max_pool2d(x.transpose(2, 3), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), torch.empty(1, 4, 3, 3)) is None


def test_wrong_shapes_are_errors() -> None:
    packed = pack_conv_weight(torch.randn(4, 4, 3, 3))
    x = torch.randn(1, 4, 6, 6)
    with pytest.raises(ValueError, match="output"):
        conv2d(x, packed, None, None, "none", (1, 1), (0, 0, 0, 0), (1, 1), 1, torch.empty(1, 4, 6, 6))
    with pytest.raises(ValueError, match="groups"):
        conv2d(x, packed, None, None, "none", (1, 1), (1, 1, 1, 1), (1, 1), 2, torch.empty(1, 4, 6, 6))


def test_a_pooling_whose_stride_no_window_uses_costs_no_memory() -> None:
    x = maps(1, 3, 8, 8)
    out = torch.empty(1, 3, 1, 1)
    run(max_pool2d(x, (2, 2), (10**8, 10**8), (0, 0, 0, 0), (1, 1), out))
    assert torch.equal(out, x[..., :2, :2].amax((2, 3), keepdim=True))


def test_windows_over_far_more_padding_than_map_are_refused() -> None:
    x, weight, far = maps(1, 1, 4, 4), torch.ones(1, 1, 1, 1), 10**6
    out = torch.empty(1, 1, 3, 3)
    packed = pack_conv_weight(weight)
    assert conv2d(x, packed, None, None, "none", (far, far), (far,) * 4, (1, 1), 1, out) is None
    assert max_pool2d(x, (2, 2), (far, far), (far,) * 4, (1, 1), out) is None


def test_a_maximum_over_more_taps_than_a_kernel_takes_is_refused() -> None:
    assert max_pool2d(maps(1, 1, 40, 40), (40, 40), (1, 1), (0, 0, 0, 0), (1, 1), torch.empty(1, 1, 1, 1)) is None


def pooling_without_memory(channels: int) -> NativeLaunch:
    """A launch that asks for some petabytes in each thread, as no prepared one does."""
    launch = max_pool2d(maps(1, channels, 8, 8), (2, 2), (4, 4), (0, 0, 0, 0), (1, 1), torch.empty(1, channels, 2, 2))
    assert launch is not None
    launch.args.stride_h = launch.args.stride_w = 10**8
    return launch


@pytest.mark.parametrize("channels", [1, 64])
def test_a_kernel_that_gets_no_memory_is_an_error_that_names_it(channels: int) -> None:
    for _ in range(3):
        with pytest.raises(DeviceError, match="out of memory in kernel max_pool2d"):
            pooling_without_memory(channels)()


def test_a_sequence_ends_with_the_kernel_that_fails() -> None:
    x, outs = maps(1, 64, 8, 8), [torch.zeros(1, 64, 2, 2) for _ in range(2)]
    before, after = (max_pool2d(x, (2, 2), (4, 4), (0, 0, 0, 0), (1, 1), out) for out in outs)
    assert before is not None and after is not None
    with pytest.raises(DeviceError, match="out of memory in kernel max_pool2d"):
        NativeSequence([before, pooling_without_memory(64), after])()
    assert torch.equal(outs[0], F.max_pool2d(x, 2, 4)) and not outs[1].any()
    NativeSequence([before, after])()
    assert torch.equal(outs[1], outs[0]), "the threads go on working"
