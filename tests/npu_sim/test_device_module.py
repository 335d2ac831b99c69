"""A compiled module does what people expect of an `nn.Module`, or says what to do instead."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import npu_sim
from npu_compiler import DeviceError, InputError, PrecisionWarning
from npu_runtime import available_devices
from npu_sim.module import graph_breaks
from npu_sim.module.graph_breaks import BrokenModule


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y + 1 if y.sum() > 0 else y - 1


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 4)


@pytest.mark.parametrize("make", [layers, lambda: Branching().eval()], ids=["one graph", "graph breaks"])
def test_a_compiled_module_is_a_module_with_the_weights_of_its_source(make: object, x: torch.Tensor) -> None:
    module = make()  # type: ignore[operator]
    compiled = npu_sim.compile(module, (x,))
    assert isinstance(compiled, nn.Module) and not compiled.training
    assert compiled.eval() is compiled and compiled.cpu() is compiled and compiled.to("cpu") is compiled
    assert list(compiled.state_dict()) == list(module.state_dict())
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [*nn.Sequential(compiled).state_dict()] == [f"0.{key}" for key in module.state_dict()]
    other = {key: value + 1 for key, value in module.state_dict().items()}
    compiled.load_state_dict(other)
    torch.testing.assert_close(compiled(x), module(x).detach(), atol=1e-4, rtol=1e-4)


def test_hooks_of_a_compiled_module_are_called(x: torch.Tensor) -> None:
    compiled, seen = npu_sim.compile(layers(), (x,)), []
    compiled.register_forward_hook(lambda module, inputs, result: seen.append(result.shape))
    compiled(x)
    assert seen == [(2, 4)]


@pytest.mark.parametrize("method", ["half", "double"])
def test_another_dtype_says_what_to_do(method: str, x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="stays on the device and in the dtype .* and compile that again"):
        getattr(npu_sim.compile(layers(), (x,)), method)()


def test_another_device_says_what_to_do(x: torch.Tensor) -> None:
    compiled = npu_sim.compile(layers(), (x,))
    with pytest.raises(InputError, match="stays on the device and in the dtype .* and compile that again"):
        compiled.cuda()
    with pytest.raises(InputError, match="stays on the device"):
        compiled.to("meta")


def test_training_says_what_to_do(x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="for inference; train the module that it was compiled from"):
        npu_sim.compile(layers(), (x,)).train()


@pytest.mark.parametrize("make", [layers, lambda: Branching().eval()], ids=["one graph", "graph breaks"])
def test_a_copy_has_weights_of_its_own(make: object, x: torch.Tensor) -> None:
    compiled = npu_sim.compile(make(), (x,))  # type: ignore[operator]
    before, twin = compiled(x), copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.zero_()
    assert type(twin) is type(compiled)
    torch.testing.assert_close(twin(x), before)
    assert not torch.equal(compiled(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not torch.equal(twin(x), before)


def test_a_copy_of_an_exported_program_runs(x: torch.Tensor) -> None:
    compiled = npu_sim.compile(torch.export.export(layers(), (x,)))
    torch.testing.assert_close(copy.deepcopy(compiled)(x), compiled(x))
    assert "0.weight" in compiled.state_dict()
    with pytest.raises(InputError, match="an exported program takes no other weights"):
        compiled.load_state_dict({})


def test_pickle_and_torch_save_write_the_saved_form(x: torch.Tensor) -> None:
    compiled = npu_sim.compile(layers(), (x,))
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    for loaded in (pickle.loads(pickle.dumps(compiled)), torch.load(file, weights_only=False)):
        assert isinstance(loaded, npu_sim.LoadedModule)
        np.testing.assert_allclose(loaded(x.numpy()), compiled(x).numpy(), atol=1e-6)


def test_several_graphs_cannot_be_pickled(x: torch.Tensor) -> None:
    compiled = npu_sim.compile(Branching().eval(), (x,))
    assert isinstance(compiled, BrokenModule)
    with pytest.raises(InputError, match="Branching cannot be saved, since it is not one graph"):
        pickle.dumps(compiled)


def test_a_branch_on_data_prints_no_dump(x: torch.Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    module = Branching().eval()
    compiled = npu_sim.compile(module, (x,))
    for value in (x, x + 10, x - 10):
        torch.testing.assert_close(compiled(value), module(value).detach(), atol=1e-5, rtol=1e-5)
    assert capfd.readouterr() == ("", "")


def test_a_module_of_float64_warns(x: torch.Tensor) -> None:
    with pytest.warns(PrecisionWarning, match="computes float64 in float32"):
        npu_sim.compile(layers().double(), (x.double(),))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        npu_sim.compile(layers(), (x,))


def test_an_unknown_device_lists_those_that_exist(x: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=f"unknown device 'tpu'; choose one of {', '.join(available_devices())}"):
        npu_sim.compile(layers(), (x,), device="tpu")


@pytest.mark.parametrize("counted", ["for each module", "for all modules of a class"])
def test_a_module_with_graph_breaks_runs_whatever_was_compiled_before(
    counted: str, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if counted == "for all modules of a class":
        monkeypatch.setattr(graph_breaks, "_OWN_GRAPHS", {})
    torch._dynamo.reset()
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        module = Branching().eval()
        compiled = npu_sim.compile(module, (x,))
        assert compiled.report().programs
        torch.testing.assert_close(compiled(x), module(x).detach(), atol=1e-5, rtol=1e-5)


def test_a_module_with_graph_breaks_is_freed(x: torch.Tensor) -> None:
    module = Branching().eval()
    compiled = npu_sim.compile(module, (x,))
    assert isinstance(compiled, BrokenModule)
    weights = [held.programs for subgraph in compiled._subgraphs for held in subgraph._sets.values()]
    alive = [weakref.ref(module), weakref.ref(compiled), *map(weakref.ref, weights)]
    assert weights
    del module, compiled, weights
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)
