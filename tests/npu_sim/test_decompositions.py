"""Ops that the op table lacks, replaced by what they decompose into."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import drawn
from torch import nn
from torch.export import Dim

import npu_sim
from npu_compiler.graph.symbolic import is_symbolic
from npu_sim.module import decompositions
from npu_sim.module.decompositions import LARGEST
from npu_sim.module.own_decompositions import OWN, decomposes
from npu_sim.module.trace import export, trace


class Net(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def off_device(compiled: Any) -> list[str]:
    return [x.op for program in compiled.report().programs for x in program.off_device]


def op_types(module: nn.Module, *args: torch.Tensor) -> list[str]:
    return [node["op_type"] for node in trace(export(module.eval(), args), "net").ir["nodes"]]


def runs_on_device(module: nn.Module, *args: torch.Tensor) -> None:
    """All of it is on the device, and the answers, the results and what becomes of the arguments, are PyTorch's."""
    module.eval()
    compiled = npu_sim.compile(module, args)
    assert off_device(compiled) == []
    ours, theirs = [x.clone() for x in args], [x.clone() for x in args]
    with torch.no_grad():
        expected = module(*theirs)
    torch.testing.assert_close(compiled(*ours), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def skip_unless_pytorch_exports(module: nn.Module, *args: torch.Tensor) -> None:
    """PyTorch 2.9 exports neither recurrent layers nor `bucketize` of a number."""
    try:
        torch.export.export(module.eval(), args)
    except (ValueError, RecursionError) as error:
        pytest.skip(f"PyTorch {torch.__version__} cannot export this: {error}")


X, Y = torch.randn(3, 4), torch.randn(3, 4)
LACKED = {
    "table": (torch.addr, torch.randn(3, 4), torch.randn(3), torch.randn(4)),
    "composite": (F.cross_entropy, X, torch.tensor([0, 3, 1])),
    "own": (torch.hypot, X, Y),
    "named tuple": (lambda x: torch.var_mean(x, 1), X),
    "in decompositions": (torch.logaddexp, X, Y),
    "in-place": (lambda x, y: x.hypot_(y) + 1, X, Y),
    "in-place on a view": (lambda x, y: (x[1:].hypot_(y[1:]), x * 2)[1], X, Y),
    "write through the result": (lambda x: (torch.atleast_3d(x).mul_(2), x + 1)[1], X),
    "twice the same": (lambda x, y: torch.hypot(torch.hypot(x, y), torch.hypot(y, x)), X, Y),
    "the same tensor twice": (lambda x: torch.hypot(x, x), X),
    "bfloat16": (torch.hypot, X.bfloat16(), Y),
}


@pytest.mark.parametrize("name", LACKED)
def test_ops_that_the_table_lacks_are_decomposed(name: str) -> None:
    function, *args = LACKED[name]
    runs_on_device(Net(function), *args)


A = torch.ops.aten
IMAGE, VOLUME = torch.randn(2, 3, 5, 7), torch.randn(1, 2, 4, 5, 6)
SPECIAL = torch.tensor([0, -0.5, 1, -1, torch.nan, 1.5, -3.2, 0.3]).reshape(1, 2, 2, 2).repeat(2, 1, 1, 1)
QUICK = (("bilinear", "zeros", False), ("nearest", "border", False), ("bicubic", "reflection", True))
OWN_CASES = {
    "addbmm": (
        lambda x, a, b: torch.addbmm(x, a, b, beta=2, alpha=3),
        torch.randn(3, 4),
        torch.randn(2, 3, 5),
        torch.randn(2, 5, 4),
    ),
    "vecdot": (lambda x, y: torch.linalg.vecdot(x, y, dim=0), X, Y),
    "bilinear": (F.bilinear, X, X, torch.randn(2, 4, 4), torch.randn(2)),
    "native_group_norm": (
        lambda x, w: A.native_group_norm(x, w, w, 2, 6, 20, 3, 1e-5),
        *map(torch.randn, ((2, 6, 4, 5), 6)),
    ),
    "rrelu": (F.rrelu, X),
    "as_strided_copy": (lambda x: torch.as_strided_copy(x, (2, 3), (1, 4), 2), X),
    "as_strided_scatter": (lambda x, y: torch.as_strided_scatter(x, y[:2, :3], (2, 3), (1, 4), 2), X, Y),
    "new_empty_strided": (lambda x: x.new_empty_strided((2, 3), (1, 4)).fill_(2.0), X),
    "masked index": (
        lambda x, m, i: A._unsafe_masked_index(x, m, [i, None], 0.5),
        X,
        torch.tensor([[True], [False]]),
        torch.tensor([[2], [9]]),
    ),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x[0], 4, return_indices=True), IMAGE.round()),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (5, 3), return_indices=True), IMAGE.round()),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (3, 5, 4), return_indices=True), VOLUME.round()),
    "antialiased by factors": (
        lambda x: F.interpolate(x, scale_factor=(0.4, 1.7), mode="bilinear", antialias=True),
        IMAGE,
    ),
}


@pytest.mark.parametrize("name", drawn(OWN_CASES, 1 / 2))
def test_our_own_decompositions_equal_pytorch(name: str) -> None:
    function, *args = OWN_CASES[name]
    runs_on_device(Net(function), *args)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_are_resized_without_aliasing_in_few_ops(mode: str) -> None:
    """Reductions by any factor too: the longest windows are most of an image.

    None has a single column: PyTorch itself computes those otherwise than as the same columns of a wider image.
    """
    large, small = torch.randint(30, 100, (2,)).tolist(), torch.randint(2, 9, (2,)).tolist()
    for sizes, size in ((large, small), (small, large), (large, small[::-1])):
        resize = Net(partial(F.interpolate, size=size, mode=mode, antialias=True))
        image = torch.randn(1, 2, *sizes)
        runs_on_device(resize, image)
        assert len(op_types(resize, image)) < 150


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_of_bytes_are_resized_as_pytorch_rounds(mode: str, antialias: bool) -> None:
    """PyTorch resizes them in fixed point: neither the device's float32 nor a decomposition rounds the same."""
    for _ in range(2):
        sizes, size = torch.randint(2, 60, (2, 2)).tolist()
        image = torch.randint(0, 256, (2, 3, *sizes), dtype=torch.uint8)
        resize = Net(partial(F.interpolate, size=size, mode=mode, antialias=antialias)).eval()
        torch.testing.assert_close(npu_sim.compile(resize, (image,))(image), resize(image), rtol=0, atol=0)


SAMPLINGS = [
    pytest.param(mode, padding, corners, images, marks=() if (mode, padding, corners) in QUICK else pytest.mark.slow)
    for mode, images in (("bilinear", IMAGE), ("nearest", IMAGE), ("bicubic", IMAGE), ("bilinear", VOLUME))
    for padding in ("zeros", "border", "reflection")
    for corners in (False, True)
]


@pytest.mark.parametrize("mode, padding, corners, images", SAMPLINGS)
def test_images_are_sampled_at_any_place(mode: str, padding: str, corners: bool, images: torch.Tensor) -> None:
    grid = SPECIAL if images is IMAGE else 2 * torch.randn(1, 2, 2, 3, 3)
    grid = torch.nan_to_num(grid) if mode == "bicubic" else grid
    runs_on_device(Net(lambda x, places: F.grid_sample(x, places, mode, padding, corners)), images, grid)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_volumes_of_infinities_are_sampled_at_special_places(mode: str, padding: str) -> None:
    """Voxels outside of the volume take no part, not even as zero times infinity; NaN is the last place."""
    volume = torch.randn(1, 1, 3, 3, 3)
    volume.view(-1)[[0, 4, 9, 13, 26]] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.inf, torch.inf])
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, -1.5, -1.0, -0.0, 1e-40, 0.4, 1.0, 1.7])
    grid = torch.cartesian_prod(special, special, special).reshape(1, 12, 12, 12, 3)
    runs_on_device(Net(lambda x, places: F.grid_sample(x, places, mode, padding, True)), volume, grid)


CHECKED = {
    "cov": (torch.cov, X),
    "cov of one row": (lambda x: x[0].cov(correction=0), X),
    "cov of one column": (lambda x: torch.cov(x[:, :1]), X),
    "corrcoef": (lambda x: x.corrcoef(), X),
    "corrcoef of one row": (lambda x: torch.corrcoef(x[0]), X),
    "combinations": (torch.combinations, X[0]),
    "three of each": (lambda x: torch.combinations(x, 3, True), X[0]),
    "too many to choose": (lambda x: torch.combinations(x, 7), X[0]),
}


@pytest.mark.parametrize("name", CHECKED)
def test_functions_that_check_values_are_traced_without(name: str) -> None:
    function, *args = CHECKED[name]
    runs_on_device(Net(function), *args)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_on_the_device(kind: type[nn.Module]) -> None:
    skip_unless_pytorch_exports(kind(4, 5), torch.randn(3, 2, 4))
    runs_on_device(kind(4, 5, num_layers=2, bidirectional=True), torch.randn(3, 2, 4))


def test_what_the_table_has_is_not_touched() -> None:
    kept = op_types(Net(lambda x, y: F.gelu(F.layer_norm(x @ y.T, (3,))) + torch.hypot(x, y)[:, :3]), X, Y)
    assert {"aten.gelu.default", "aten.layer_norm.default", "aten.matmul.default"} <= set(kept)
    assert "aten.hypot.default" not in kept


def test_ops_of_other_nodes_keep_their_names() -> None:
    def named(function: Callable[..., Any]) -> list[str]:
        nodes = trace(export(Net(function).eval(), (X, Y)), "net").ir["nodes"]
        return [node["name"] for node in nodes if not node["name"].startswith("hypot")]

    assert named(lambda x, y: (torch.hypot(x, y) * x).sqrt() * y) == ["mul", "sqrt", "mul_1"]


@pytest.mark.parametrize("function", [lambda x: F.dropout(x, 0.5, True), torch.bernoulli, torch.rand_like])
def test_random_ops_stay_as_they_are(function: Callable[..., Any]) -> None:
    (op,) = op_types(Net(function), torch.rand(3))
    assert op.split(".")[1] in ("dropout", "bernoulli", "rand_like")


def test_an_op_whose_decomposition_the_device_lacks_stays_as_it_is() -> None:
    assert op_types(Net(torch.linalg.det), torch.randn(3, 3)) == ["aten.linalg_det.default"]


def test_a_decomposition_holds_for_all_sizes() -> None:
    module = Net(lambda x: torch.addr(x, x[:, 0], x[0])).eval()
    size = Dim("size", min=2, max=20)
    compiled = npu_sim.compile(module, (torch.randn(4, 6),), dynamic_shapes={"args": ({0: size},)})
    for rows in (2, 4, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    assert off_device(compiled) == []


def test_a_decomposition_that_depends_on_the_examples_sizes_is_not_used() -> None:
    hypot = torch.ops.aten.hypot.default
    own = OWN[hypot]
    size = Dim("size", min=2, max=20)
    try:
        OWN[hypot] = lambda x, y: own(x, y) if x.shape[0] == 4 else x.sin()
        exported = export(Net(torch.hypot).eval(), (X.T, Y.T), dynamic_shapes={"args": ({0: size}, {0: size})})
        ir = trace(exported, "net").ir
    finally:
        OWN[hypot] = own
    assert [node["op_type"] for node in ir["nodes"]] == ["aten.hypot.default"]
    assert [is_symbolic(size) for size in ir["graph_inputs"][0]["shape"]] == [True, False]


def test_a_decomposition_of_too_many_ops_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompositions, "LARGEST", 50)
    layer = nn.LSTM(4, 5, proj_size=3).eval()  # whose projections no kernel computes
    x = torch.randn(20, 2, 4)
    skip_unless_pytorch_exports(layer, x)
    compiled = npu_sim.compile(layer, (x,))
    assert off_device(compiled)[0] == "aten.lstm.input"
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert LARGEST > 50


def test_torch_compile_decomposes_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: torch.hypot(x, y) * torch.logaddexp(x, y), backend="npu_sim")
    torch.testing.assert_close(compiled(X, Y), torch.hypot(X, Y) * torch.logaddexp(X, Y), rtol=1e-4, atol=1e-5)


def test_an_op_has_one_decomposition_of_our_own() -> None:
    with pytest.raises(ValueError, match="has two functions in one table"):
        decomposes("aten.hypot.default")(torch.hypot)


ROWS, IDS = torch.randn(5, 4), torch.tensor([3, 0, 3, 1, 2, 3])
NAN = torch.tensor([[1.0, float("nan"), 3.0, 3.0, 2.0], [2.0, 5.0, 5.0, 5.0, float("nan")], [4.0, 1.0, 4.0, 1.0, 2.0]])
HALVES = torch.tensor([[0.5, 1.5, 1.5, 3.0]])
PICKING_CASES: dict[str, tuple[Callable[..., object], *tuple[torch.Tensor, ...]]] = {
    "median": (lambda x: (torch.median(x, 0), torch.median(x, -1, keepdim=True), torch.median(x)), NAN),
    "nanmedian": (
        lambda x: (torch.nanmedian(x, 0), torch.nanmedian(x), torch.nanmedian(x * float("nan"), 1).values),
        NAN,
    ),
    "median of a scalar": (lambda x: (torch.median(x, 0), torch.nanmedian(x)), torch.tensor(2.0)),
    "median of integers": (lambda x: (torch.median(x), torch.nanmedian(x, 0).values), IDS),
    "kthvalue": (lambda x, y: (torch.kthvalue(x, 2), torch.kthvalue(y, 3, 0, keepdim=True).values), ROWS, NAN),
    "mode": (lambda x: (torch.mode(x), torch.mode(x.t(), 0, keepdim=True)), NAN),
    "searchsorted": (
        lambda b, x: (torch.searchsorted(b, x), torch.searchsorted(b, x, side="right", out_int32=True)),
        HALVES.expand(3, 4).contiguous(),
        NAN,
    ),
    "searchsorted, sorter": (
        lambda b, x: torch.searchsorted(b.flip(0), x, sorter=torch.tensor([3, 2, 1, 0])),
        HALVES[0],
        NAN,
    ),
    "searchsorted, numbers": (lambda b: (torch.searchsorted(b, 1.5), torch.bucketize(1.5, b, right=True)), HALVES[0]),
    "cummax": (lambda x: (torch.cummax(x, 1), torch.cummax(x, 0), torch.cummin(x, -1)), NAN),
    "cummax of integers": (lambda x: (torch.cummax(x, 0), torch.cummin(x, 0)), IDS),
    "cumprod": (lambda x: (x.cumprod(0), x.cumprod(-1), x.sum().cumprod(0)), ROWS),
    "logcumsumexp": (lambda x: (x.logcumsumexp(0), (x * float("-inf")).logcumsumexp(1), x[0, 0].logcumsumexp(0)), ROWS),
    "frexp": (
        lambda x: torch.frexp(x * 10),
        torch.tensor(
            [0.0, -0.0, 1.0, 0.05, -0.3, 3e37, 1e-38, float("inf"), -float("inf"), float("nan"), 12.8, 0.0999]
        ),
    ),
    "put": (lambda x, n: (x.put(n, x[0, :2]), x.put(n, x[0, :2], accumulate=True)), ROWS, torch.tensor([2, -1])),
    "take": (lambda x, n: (x.take(n - 4), x.take(n[0])), ROWS, IDS),
    "masked index_put": (
        lambda x, n, y: torch.ops.aten._unsafe_masked_index_put_accumulate(x, n > 1, [n, n], y),
        ROWS,
        IDS,
        torch.randn(6),
    ),
    "index_copy on a scalar": (lambda x, n: x.sum().index_copy(0, n, x[0, 0]), ROWS, torch.tensor(0)),
    "masked_scatter": (lambda x, y: (x.masked_scatter(x > 0, y), x.masked_scatter(x[:, :1] > 0, y)), ROWS, ROWS + 7),
    "nonzero_static": (
        lambda x: (torch.nonzero_static(x > 0, size=5), torch.nonzero_static(x, size=30, fill_value=-7)),
        ROWS,
    ),
    "embedding, max_norm": (lambda n, w: F.embedding(n, w, max_norm=0.5) * 2, IDS, ROWS),
    "embedding_bag": (
        lambda n, w, o: [F.embedding_bag(n, w, o, mode=mode) for mode in ("sum", "mean", "max")],
        IDS,
        ROWS,
        torch.tensor([0, 2, 2, 5]),
    ),
    "embedding_bag, padding": (
        lambda n, w, o: [F.embedding_bag(n, w, o, mode=mode, padding_idx=3) for mode in ("sum", "mean", "max")],
        IDS,
        ROWS,
        torch.tensor([0, 1, 4]),
    ),
    "embedding_bag, weights": (
        lambda n, w, s: F.embedding_bag(n.view(2, 3), w, mode="sum", per_sample_weights=s),
        IDS,
        ROWS,
        torch.randn(2, 3),
    ),
    "cdist": (lambda x: [torch.cdist(x, x[:3] + 1, p) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))], ROWS),
    "distances from NaN": (
        lambda x: [f(x, p) for p in (0.0, 2.0) for f in (lambda x, p: torch.cdist(x, x, p), F.pdist)],
        NAN,
    ),
    "embedding_bag of products that 16 bits do not hold": (
        lambda n, w, s: F.embedding_bag(n.view(1, 2), w, mode="sum", per_sample_weights=s),
        torch.tensor([0, 1]),
        torch.full((2, 3), 60000.0).half(),
        torch.tensor([[-8.0, 8.0]]).half(),
    ),
    "cdist of many": (lambda x: torch.cdist(x, x[:, :3] - 1), torch.randn(2, 30, 4)),
    "cdist of none": (lambda x: (torch.cdist(x[:, :0], x[:, :0]), torch.cdist(x[:0], x)), ROWS),
}


@pytest.mark.parametrize("name", drawn(PICKING_CASES, 1 / 2))
def test_our_own_decompositions_do_what_pytorch_does(name: str) -> None:
    function, *args = PICKING_CASES[name]
    if name == "searchsorted, numbers":
        skip_unless_pytorch_exports(Net(function), *args)
    runs_on_device(Net(function), *args)
