"""Wrong or extreme arguments of `npu_sim.compile` give one clear error, or the right answer."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharing_threads import results_of_threads
from torch import nn

import npu_sim
from npu_compiler.errors import InputError, IRError, WeightError
from npu_sim.module import runner
from npu_sim.module.compiled import CompiledModule
from npu_sim.module.graph_breaks import BrokenModule


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(4) + 0.5)
        self.register_buffer("offset", torch.rand(4), persistent=False)

    def forward(
        self, x: torch.Tensor, shift: torch.Tensor | None = None, factor: float = 1.0, *, relu: bool = False
    ) -> torch.Tensor:
        y = self.linear(x) * self.scale * factor + self.offset
        if shift is not None:
            y = y + shift
        return y.relu() if relu else y


def net() -> Net:
    return Net().eval()


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def quantized(value: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch is about to drop them
        return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


X = (torch.randn(3, 8),)


def on_two_devices() -> nn.Module:
    module = net()
    module.linear.to("meta")
    return module


def on_meta() -> nn.Module:
    return net().to("meta")


def with_hook() -> nn.Module:
    module = net()
    module.linear.register_forward_hook(lambda module, args, result: result + 1)
    return module


def with_pre_hook() -> nn.Module:
    module = net()
    module.register_forward_pre_hook(lambda module, args: args)
    return module


def with_quantized_buffer() -> nn.Module:
    module = net()
    module.scale = quantized(torch.rand(4))
    return module


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (
            on_two_devices,
            X,
            r"all tensors have to be on one device, but there are 'linear\.weight' on meta, '.*' on cpu",
        ),
        (net, (X[0].to("meta"),), "all tensors have to be on one device, .* an argument on meta"),
        (on_meta, (X[0].to("meta"),), "on the meta device and has no weights"),
        (lambda: net().train(), X, r"training mode; call \.eval\(\) first"),
        (with_hook, X, "module 'linear' has forward hooks"),
        (with_pre_hook, X, "Net has forward hooks"),
        (with_quantized_buffer, X, r"'scale' is a quantized tensor of PyTorch \(torch\.qint8\)"),
        (net, (quantized(X[0]),), "an argument is a quantized tensor"),
    ],
)
def test_modules_that_cannot_be_compiled_as_they_are(
    make: Callable[[], nn.Module], args: tuple[torch.Tensor, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        npu_sim.compile(make(), args)


def test_weights_that_are_not_numbers() -> None:
    module = net()
    module.linear.weight[0, 0] = float("nan")
    with pytest.raises(WeightError, match=r"'linear\.weight' contains NaN"):
        npu_sim.compile(module, X)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X[0].double(),), {}, r"argument 'args\[0\]' has dtype float64, but the module was compiled for float32"),
        ((X[0].long(),), {}, r"has dtype int64"),
        ((X[0].to("meta"),), {}, "is on meta, but the module was compiled for tensors on cpu"),
        ((torch.randn(4, 8),), {}, r"has shape \[4, 8\], but the module was compiled for \[3, 8\]"),
        ((torch.randn(24),), {}, r"has shape \[24\]"),
        ((X[0].tolist(),), {}, "but the module was compiled for a tensor"),
        ((None,), {}, "is None, but the module was compiled for a tensor"),
        ((), {}, "missing a required argument: 'x'"),
        ((*X, *X, 1.0, 2), {}, "too many positional arguments"),
        (X, {"speed": 11}, "got an unexpected keyword argument 'speed'"),
        (X, {"x": X[0]}, "multiple values for argument 'x'"),
        (X, {"shift": torch.ones(4)}, "argument 'shift' was not given when the module was compiled"),
        (X, {"relu": True}, "argument 'relu' was not given when the module was compiled"),
    ],
)
def test_calls_that_do_not_fit(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    module = net()
    compiled = npu_sim.compile(module, X)
    with pytest.raises(InputError, match=message):
        compiled(*args, **kwargs)
    close(compiled(*X), module(*X))
    close(compiled(x=X[0], shift=None, factor=1.0), module(*X))


def test_another_value_for_what_became_a_part_of_the_graph() -> None:
    module = net()
    compiled = npu_sim.compile(module, X, {"factor": 2.0, "relu": True})
    close(compiled(*X, factor=2.0, relu=True), module(*X, factor=2.0, relu=True))
    with pytest.raises(InputError, match="argument 'factor' is 3.0, but the module was compiled with 2.0"):
        compiled(*X, factor=3.0, relu=True)
    with pytest.raises(InputError, match="argument 'relu' is 1, but the module was compiled with True"):
        compiled(*X, factor=2.0, relu=1)
    with pytest.raises(InputError, match="missing arguments: .*|argument 'relu' is False"):
        compiled(*X, factor=2.0)


def test_an_argument_that_asks_for_a_gradient() -> None:
    compiled = npu_sim.compile(net(), X)
    with (
        torch.enable_grad(),
        pytest.raises(InputError, match="requires a gradient, but a compiled"),
    ):
        compiled(X[0].clone().requires_grad_())


def in_place(module: Net) -> None:
    module.linear.weight.mul_(2)


def another_parameter(module: Net) -> None:
    module.linear.weight = nn.Parameter(torch.randn(4, 8))


def loaded_state(module: Net) -> None:
    module.load_state_dict(net().state_dict())


def assigned_state(module: Net) -> None:
    module.load_state_dict(net().state_dict(), assign=True)


def through_half(module: Net) -> None:
    module.half().float()


def buffer_in_place(module: Net) -> None:
    module.scale.add_(1)


def another_buffer(module: Net) -> None:
    module.scale = torch.rand(4)


def constant_in_place(module: Net) -> None:
    module.offset.add_(1)


def another_constant(module: Net) -> None:
    module.offset = torch.rand(4)


CHANGES = [
    in_place,
    another_parameter,
    loaded_state,
    assigned_state,
    through_half,
    buffer_in_place,
    another_buffer,
    constant_in_place,
    another_constant,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_used_in_the_next_call(change: Callable[[Net], None]) -> None:
    module = net()
    compiled = npu_sim.compile(module, X)
    for _ in range(3):
        change(module)
        close(compiled(*X), module(*X))


@pytest.mark.parametrize("change", [lambda module: module.half(), lambda module: module.double()])
def test_weights_of_another_dtype_are_an_error_or_the_right_answer(change: Callable[[Net], Any]) -> None:
    module = net()
    compiled = npu_sim.compile(module, X)
    want = compiled(*X)
    change(module)
    try:
        got = compiled(*X)
    except (InputError, WeightError) as error:
        assert "dtype" in str(error)
    else:
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


class Settings:
    def __init__(self) -> None:
        self.shift = torch.randn(4)


class Plain(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.randn(4)
        self.listed = [torch.randn(4), torch.randn(4)]
        self.named = {"a": torch.randn(4)}
        self.settings = Settings()
        self.large = torch.randn(2**17)
        self.inner = nn.Module()
        self.inner.scale = torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale + self.listed[0] - 2 * self.listed[1] + 3 * self.named["a"] - 4 * self.settings.shift
        return y * self.inner.scale + self.large[:4]


@pytest.mark.parametrize("route", ["compile", "torch.compile"])
def test_a_tensor_that_takes_the_place_of_a_plain_attribute_is_used_in_the_next_call(route: str) -> None:
    module, x = Plain().eval(), torch.randn(4)
    compiled = npu_sim.compile(module, (x,)) if route == "compile" else torch.compile(module, backend="npu_sim")
    changes: list[Callable[[], Any]] = [
        lambda: setattr(module, "scale", torch.randn(4)),
        lambda: setattr(module.inner, "scale", torch.randn(4)),
        lambda: setattr(module.settings, "shift", torch.randn(4)),
        lambda: setattr(module, "large", torch.randn(2**17)),
        lambda: module.listed.__setitem__(1, torch.randn(4)),
        lambda: setattr(module, "listed", [torch.randn(4), torch.randn(4)]),
        lambda: setattr(module, "named", {"a": torch.randn(4)}),
        lambda: module.scale.mul_(2),
        lambda: module.listed[0].add_(1),
    ]
    with torch.no_grad():
        close(compiled(x), module(x))
        for change in changes:
            change()
            close(compiled(x), module(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "scale", torch.randn(1)),
            r"'scale' was replaced by a tensor of torch.float32 with .*\[1\]",
        ),
        (lambda m: setattr(m, "scale", torch.randn(4).double()), "'scale' was replaced by a tensor of torch.float64"),
        (lambda m: setattr(m.inner, "scale", 2.0), "'inner.scale' was replaced by a float .* compile it again"),
        (lambda m: m.listed.clear(), r"'listed\[0\]' was replaced or removed"),
        (lambda m: m.named.clear(), r"'named\['a'\]' was replaced or removed"),
    ],
)
def test_what_cannot_take_the_place_of_a_plain_attribute_is_an_error(
    change: Callable[[Plain], Any], message: str
) -> None:
    module, x = Plain().eval(), torch.randn(4)
    compiled = npu_sim.compile(module, (x,))
    change(module)
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            compiled(x)


def test_a_replaced_submodule_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.GELU())).eval()
    compiled = npu_sim.compile(module, X)
    module[0] = module[0]
    close(compiled(*X), module(*X))
    module[1][0] = nn.ReLU()
    for _ in range(2):
        with pytest.raises(InputError, match="submodule '0' was replaced after the module was compiled"):
            compiled(*X)


def test_code_that_torch_compile_traces_is_not_bound_to_the_modules_that_are_watched() -> None:
    watched = [npu_sim.compile(net(), X) for _ in range(3)]

    def assign(x: torch.Tensor, target: nn.Module) -> torch.Tensor:
        target.last = x * 2
        target.part = target.other
        return x + target.last

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(assign, backend="eager", fullgraph=True)
        target = nn.Module()
        target.other = target.part = nn.Linear(2, 2)
        target.register_buffer("last", torch.zeros(2))
        compiled(torch.ones(2), target)
        while watched:
            watched.pop()
            gc.collect()
            close(compiled(torch.ones(2), target), torch.full((2,), 3.0))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean"])
def test_a_tensor_that_compiled_code_replaces_is_used_in_the_next_call(name: str) -> None:
    layers: list[nn.Module] = [nn.BatchNorm1d(4) for _ in range(8)]
    module, x = nn.Sequential(*layers).eval(), torch.randn(2, 4)
    module[7].weight = nn.Parameter(torch.rand(4))
    compiled, last = npu_sim.compile(module, (x,)), module[7]
    new = torch.rand(4) if name == "running_mean" else nn.Parameter(torch.rand(4))

    def assign() -> None:
        setattr(last, name, new)

    torch._dynamo.reset()
    torch.compile(assign, backend="eager", fullgraph=True)()
    close(compiled(x), module(x))
    with torch.no_grad():
        new.mul_(2)
    close(compiled(x), module(x))


def test_a_parametrization_that_comes_later_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(8, 4)).eval()
    compiled = npu_sim.compile(module, X)
    nn.utils.parametrizations.weight_norm(module[0])
    with pytest.raises(InputError, match="submodule 'parametrizations' was replaced after"):
        compiled(*X)


def test_a_submodule_that_compiled_code_replaces_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.GELU()).eval()
    compiled, other = npu_sim.compile(module, X), nn.ReLU()

    def assign() -> None:
        module.register_module("1", other)

    torch._dynamo.reset()
    torch.compile(assign, backend="eager", fullgraph=True)()
    with pytest.raises(InputError, match="submodule '1' was replaced after the module was compiled"):
        compiled(*X)


class Remembering(nn.Module):
    """Keeps what it has seen in a buffer, as modules do that hold their own KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.index_copy_(0, place, self.linear(x))
        return x @ self.seen.t(), self.seen


def test_a_buffer_that_calls_change_is_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Remembering().eval()
    known = copy.deepcopy(module)
    x = torch.randn(1, 4)
    compiled = npu_sim.compile(module, (x, torch.tensor([0])))
    assert not module.seen.any()
    monkeypatch.setattr(runner, "load_weights", pytest.fail)
    for place in (1, 4, 2):
        x = torch.randn(1, 4)
        got = compiled(x, torch.tensor([place]))
        close(got, known(x, torch.tensor([place])))
        assert got[1] is module.seen
    monkeypatch.undo()
    module.seen = torch.ones(6, 4)
    known.seen = torch.ones(6, 4)
    close(compiled(x, torch.tensor([3])), known(x, torch.tensor([3])))
    close(module.seen, known.seen)
    module.seen = torch.ones(2, 4)
    with pytest.raises(InputError, match=r"'seen' has shape \[2, 4\], but the module was compiled for \[6, 4\]"):
        compiled(x, torch.tensor([1]))


def test_weights_of_another_shape_are_an_error() -> None:
    module = net()
    compiled = npu_sim.compile(module, X)
    module.linear.weight = nn.Parameter(torch.randn(5, 8))
    with pytest.raises(WeightError, match=r"wrong shape: 'linear\.weight' is \[5, 8\], the model expects \[4, 8\]"):
        compiled(*X)


def test_threads_call_one_compiled_module() -> None:
    module = net()
    compiled = npu_sim.compile(module, X)
    inputs = [torch.randn(3, 8) for _ in range(4)]
    for x, results in zip(inputs, results_of_threads(compiled, inputs, 50), strict=True):
        assert len(results) == 50
        for got in results:
            close(got, module(x))


class Views(nn.Module):
    """Results in the memory of arguments, weights and each other; a buffer and an argument of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("x", torch.randn(4))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        state.add_(1)
        y = x * self.weight
        return {
            "given": x,
            "row": x[0],
            "twice": (y, y),
            "part": y[:, 1:],
            "state": state.t(),
            "own": (self.x, self.weight),
        }


@pytest.mark.parametrize("rows", [(3, 3), (3, 5)])
def test_results_that_alias_arguments_are_views_of_the_callers_tensors(rows: tuple[int, int]) -> None:
    module = Views().eval()
    x, state = torch.randn(3, 4), torch.zeros(2, 3)
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=9)}, "state": None} if rows != (3, 3) else None
    compiled = npu_sim.compile(module, (x, state), dynamic_shapes=shapes)
    assert not state.any()
    for count in rows:
        x = torch.randn(count, 4)
        want = module(x, state.clone())
        got = compiled(x, state)
        close(got["state"], want["state"])
        close(got["part"], want["part"])
        assert got["given"] is x
        assert got["row"].data_ptr() == x.data_ptr()
        assert got["state"].data_ptr() == state.data_ptr() and got["state"].shape == (3, 2)
        assert got["twice"][0] is got["twice"][1]
        assert got["part"].data_ptr() == got["twice"][0][:, 1:].data_ptr()
        assert got["own"][0] is module.x and got["own"][1] is module.weight


def test_an_argument_that_is_changed_must_not_share_memory_with_another() -> None:
    memory = torch.zeros(20)
    compiled = npu_sim.compile(Views().eval(), (torch.randn(3, 4), torch.zeros(2, 3)))
    with pytest.raises(InputError, match="argument 'state' is changed in place, but shares memory with another"):
        compiled(memory[:12].view(3, 4), memory[10:16].view(2, 3))
    compiled(memory[:12].view(3, 4), memory[12:18].view(2, 3))
    assert memory[12:18].eq(1).all() and not memory[:12].any()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(x * 2) * self.weight)


def test_complex_numbers_are_computed_by_pytorch() -> None:
    module, x = Complex().eval(), torch.randn(3, 4)
    compiled = npu_sim.compile(module, (x,))
    close(compiled(x), module(x))
    assert any("complex" in node.reason for program in compiled.report().programs for node in program.off_device)
    y = torch.randn(3, 4, dtype=torch.complex64)
    close(npu_sim.compile(module, (y,))(y), module(y))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, factor: int = 1) -> torch.Tensor:
        self.calls.add_(1)
        y = self.first(x)
        y = self.second(y) if y.sum() > 0 else y * 2
        return y.relu() * factor + self.calls


def test_control_flow_that_depends_on_data_breaks_the_graph() -> None:
    torch._dynamo.reset()
    module, x = Branch().eval(), torch.randn(3, 4)
    compiled = npu_sim.compile(module, (x,))
    assert isinstance(compiled, BrokenModule)
    assert module.calls == 0
    for value in (x, -x, torch.randn(5, 4), x * 3):
        for factor in (1, 2):
            calls = module.calls.clone()
            got = compiled(value, factor=factor)
            assert module.calls == calls + 1
            module.calls.copy_(calls)
            close(got, module(value, factor))
    report = compiled.report()
    (reason,) = report.graph_breaks
    assert "generic_jump" in reason and "test_module_bad_input.py" in reason
    assert len(report.programs) >= 3
    assert f"graph break 1: {reason}" in str(report)


def test_a_module_with_graph_breaks_says_what_it_cannot_do() -> None:
    torch._dynamo.reset()
    module, x = Branch().eval(), torch.randn(3, 4)
    compiled = npu_sim.compile(module, (x,))
    assert isinstance(compiled, BrokenModule)
    with pytest.raises(InputError, match="Branch cannot be saved, since it is not one graph"):
        compiled.save("somewhere")
    with pytest.raises(InputError, match="missing a required argument: 'x'"):
        compiled()
    with pytest.raises(InputError, match="an argument is on meta, but the module was compiled for cpu"):
        compiled(x.to("meta"))
    with torch.enable_grad(), pytest.raises(InputError, match="requires a gradient"):
        compiled(x.clone().requires_grad_())
    module.first.weight.mul_(2)
    module.second = nn.Linear(4, 4).eval()
    close(compiled(x) + 1, module(x))


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such key")


class Conditional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


@pytest.mark.filterwarnings("ignore:backend 'npu_sim' leaves a graph")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Failing(), "PyTorch cannot export Failing as one graph: 'no such key'"),
        (Conditional(), "'cond' is control flow that depends on data"),
    ],
)
def test_where_nothing_can_be_traced_the_error_is_that_of_the_export(module: nn.Module, message: str) -> None:
    with pytest.raises(IRError, match=message):
        npu_sim.compile(module.eval(), (torch.randn(3),))


def test_what_is_no_tensor_and_no_module_is_named_by_its_type() -> None:
    with pytest.raises(InputError, match=r"argument 'args\[0\]' is of type ndarray, but .* for a tensor"):
        npu_sim.compile(net(), X)(X[0].numpy())
    with pytest.raises(InputError, match="cannot compile a function: give a torch.nn.Module"):
        npu_sim.compile(net, X)  # type: ignore[arg-type]


class Numbers(nn.Module):
    """Numbers of Python, which are elements of tensors that the module computes, or has been given."""

    def forward(self, x: torch.Tensor) -> Any:
        first = x[0, 0].item()
        x.add_(1)
        flags = x > 1.5
        return {
            "sum": x.sum().item(),
            "count": flags.sum().item(),
            "any": flags.any().item(),
            "rows": x.mean(1).tolist(),
            "first": first,
            "tensor": x * 2,
        }


def same(one: Any, other: Any) -> bool:
    """Whether results are alike, with numbers of the same types."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, torch.Tensor):
        return bool(np.allclose(np.asarray(one), other.numpy(), atol=1e-5))
    return type(one) is type(other) and one == pytest.approx(other, abs=1e-5)


def test_numbers_in_a_result_are_those_of_the_call(tmp_path: Path) -> None:
    module = Numbers().eval()
    compiled = npu_sim.compile(module, (torch.rand(3, 4),))
    assert isinstance(compiled, CompiledModule)
    compiled.save(tmp_path / "net.npumod")
    exported = npu_sim.compile(torch.export.export(module, (torch.rand(3, 4),)))
    with torch.no_grad():
        for call in (
            compiled,
            exported,
            npu_sim.load(tmp_path / "net.npumod"),
            torch.compile(module, backend="npu_sim"),
        ):
            for _ in range(2):
                x = torch.rand(3, 4)
                assert same(call(x.clone()), module(x.clone()))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.sum().item() * 2 + 1, x * 2


def test_a_number_that_python_computes_is_right_or_refused() -> None:
    module, x = Scaled().eval(), torch.rand(3, 4)
    assert same(list(npu_sim.compile(module, (torch.rand(3, 4),))(x)), list(module(x)))
    with pytest.raises(
        IRError, match="a number that Python computes from the values of tensors; .* item.., or use torch"
    ):
        npu_sim.compile(torch.export.export(module, (x,)))


class Chosen(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1 if x.sum() > 0 else x - 1,
        lambda x: torch.narrow(x, 0, x.argmax() % 2, 1),
        lambda x: torch.narrow(x, 0, torch.tensor(1), 2),
        lambda x: x[x > 0.5],
        lambda x: x[: int(x.max()) + 1],
    ],
    ids=["if", "narrow", "narrow-by-constant", "mask", "int"],
)
def test_what_depends_on_data_is_right_and_quiet(
    function: Callable[[torch.Tensor], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    module, x = Chosen(function).eval(), torch.rand(3, 4)
    with torch.no_grad():
        compiled = npu_sim.compile(module, (torch.rand(3, 4),))
        assert capfd.readouterr().err == ""
        close(compiled(x), module(x))
        close(torch.compile(module, backend="npu_sim")(x), module(x))
    if isinstance(compiled, BrokenModule):
        assert not re.search(r"unbacked|\bu0\b|zuf0|FakeTensor", compiled.reason)


def test_the_reason_of_a_graph_break_names_the_line_and_the_way_out() -> None:
    torch._dynamo.reset()
    compiled = npu_sim.compile(Chosen(lambda x: x if x.sum() > 0 else -x).eval(), (torch.rand(3),))
    with pytest.raises(
        InputError, match=r"data-dependent control flow.* \(.*test_module_bad_input.py:\d+\); use torch"
    ):
        compiled.save("net.npumod")


def test_a_list_of_tensors_beside_others_is_left_to_pytorch() -> None:
    torch._dynamo.reset()
    module, x = Chosen(lambda x: torch.histogramdd(x, [2, 2, 2, 2])).eval(), torch.rand(3, 4)
    with pytest.raises(IRError, match="node 'histogramdd': the op returns a list of tensors beside others"):
        npu_sim.compile(module, (x,))
    counts, edges = torch.compile(module, backend="npu_sim")(x)
    close(counts, module(x).hist)
    assert len(edges) == 4


def test_numbers_that_change_between_calls_are_no_sizes() -> None:
    torch._dynamo.reset()

    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor, shift: float) -> torch.Tensor:
            return x * 2 + shift

    module, x = Shifted().eval(), torch.rand(3, 4)
    compiled = torch.compile(module, backend="npu_sim")
    for shift in (1.5, 2.5, 3.5):
        close(compiled(x, shift), module(x, shift))
