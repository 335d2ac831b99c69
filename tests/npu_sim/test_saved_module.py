"""Modules that are saved and loaded: the same answers, without PyTorch too, or one clear error."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from metal_harness import METAL_DEVICE
from torch import nn
from typer.testing import CliRunner
from without_torch import run_without_torch

import npu_sim
from npu_compiler import InputError, NPUError, ProgramFormatError
from npu_compiler.files import UNFINISHED
from npu_runtime import Device, DeviceBuffer, NPUBuffer
from npu_sim.cli import app
from npu_sim.module import saved_file
from npu_sim.module.compiled import CompiledModule
from npu_sim.module.saved import LoadedModule
from npu_sim.module.signature import Parameter, signature_of
from npu_sim.module.structure import Record, Tree
from npu_sim.vision.resnet import resnet18, seed_weights

BATCH = torch.export.Dim("batch", min=1, max=8)
SEQUENCE = torch.export.Dim("sequence", min=2, max=32)
Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Outcome:
    total: Any
    scaled: Any = None
    note: str | None = None


class Box:
    """A class that PyTorch can flatten, but that is unknown to a saved module's reader."""

    def __init__(self, content: Any) -> None:
        self.content = content


torch.utils._pytree.register_pytree_node(Box, lambda box: ([box.content], None), lambda leaves, _: Box(*leaves))


class Net(nn.Module):
    """Two layers with tied weights: [N, 8] -> [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.register_buffer("unused", torch.zeros(1000))

    def forward(self, x: torch.Tensor, scale: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.outer(torch.relu(self.inner(x))) * scale
        return y if mask is None else y * mask


class Function(nn.Module):
    """A function as a module, whose `forward` has that function's parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def compiled(module: nn.Module, *args: Any, **options: Any) -> CompiledModule:
    return npu_sim.compile(module.eval(), args, device="cpu", **options)


def saved(module: nn.Module, folder: Path, *args: Any, **options: Any) -> tuple[CompiledModule, LoadedModule]:
    before = compiled(module, *args, **options)
    before.save(folder / "model.npumod")
    return before, npu_sim.load(folder / "model.npumod", "cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small module that is saved."""
    saved(Net(), tmp_path, torch.randn(2, 8))
    return tmp_path / "model.npumod"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_answers_are_those_of_the_compiled_module_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    module, x = Net().to(getattr(torch, dtype)), torch.randn(3, 8, dtype=getattr(torch, dtype))
    before, after = saved(module, tmp_path, x)
    wanted, found = before(x), after(x)
    assert isinstance(found, np.ndarray)
    assert found.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert np.array_equal(found.astype(np.float32), wanted.float().numpy())


def test_the_compute_dtype_is_that_of_the_compiled_module(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    before, after = saved(Net(), tmp_path, x, dtype="float16", dynamic_shapes=({0: BATCH},))
    found = after(x.numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, before(x).numpy())
    assert np.array_equal(found, found.astype(np.float16))


def test_programs_of_the_file_are_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = saved(Net(), tmp_path, torch.randn(2, 8))
    monkeypatch.setattr("npu_sim.module.saved.plan_for", None)
    x = torch.randn(2, 8)
    after = npu_sim.load(tmp_path / "model.npumod", "cpu")
    assert np.array_equal(after(x.numpy()), before(x).numpy())


def test_a_file_without_a_program_for_the_device_is_compiled_again(file: Path) -> None:
    content, tensors = saved_file.read_module(file)
    stored = {
        name: saved_file.StoredTensor(tensors[name].dtype.name, tensors[name].shape, lambda name=name: tensors[name])
        for name in tensors
    }
    bare = file.with_name("bare.npumod")
    saved_file.write_module(bare, dataclasses.replace(content, programs=()), stored)
    x = np.random.default_rng(0).standard_normal((2, 8), np.float32)
    assert np.array_equal(npu_sim.load(bare, "cpu")(x), npu_sim.load(file, "cpu")(x))


def test_weights_are_stored_once_and_only_if_they_are_read(tmp_path: Path) -> None:
    module = Net()
    module.outer.weight = nn.Parameter(module.inner.weight.data)  # for PyTorch another parameter
    saved(module, tmp_path, torch.randn(2, 8))
    content, tensors = saved_file.read_module(tmp_path / "model.npumod")
    assert content.weights["outer.weight"] == content.weights["inner.weight"]
    assert sorted(tensors[name].shape for name in tensors) == [(8,), (8,), (8, 8)]


def test_constants_are_stored_only_if_they_are_read(tmp_path: Path) -> None:
    module, x = Net(), torch.randn(2, 8)
    module.register_buffer("unread", torch.ones(3), persistent=False)
    module.register_buffer("rotations", torch.ones(3, dtype=torch.complex64), persistent=False)  # a file holds none
    before, after = saved(module, tmp_path, x)
    assert np.array_equal(after(x.numpy()), before(x).numpy())
    content, _ = saved_file.read_module(tmp_path / "model.npumod")
    assert not content.constants


def test_what_was_written_to_weights_is_saved(tmp_path: Path) -> None:
    module, x = Net(), torch.randn(2, 8)
    before = compiled(module, x)
    with torch.no_grad():
        module.inner.bias.add_(1.0)
    before.save(tmp_path / "model.npumod")
    with torch.no_grad():
        wanted = module(x).numpy()
    np.testing.assert_allclose(npu_sim.load(tmp_path / "model.npumod", "cpu")(x.numpy()), wanted, rtol=1e-4, atol=1e-5)


def test_constants_of_the_graph_are_saved(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.tensor([2, 0])] + torch.tensor([1.5, -1.0])

    x = torch.randn(2, 4)
    before, after = saved(Function(forward), tmp_path, x)
    assert np.array_equal(after(x.numpy()), before(x).numpy())


def test_sizes_may_change_as_in_the_compiled_module(tmp_path: Path) -> None:
    before, after = saved(Net(), tmp_path, torch.randn(2, 8), dynamic_shapes=({0: BATCH},))
    for size in (1, 5, 8, 5):
        x = torch.randn(size, 8)
        assert np.array_equal(after(x.numpy()), before(x).numpy())
    with pytest.raises(InputError, match="size 'batch' is 9, but the module was compiled for 1 to 8"):
        after(np.zeros((9, 8), np.float32))


def test_only_the_programs_asked_for_are_kept(tmp_path: Path) -> None:
    saved(Net(), tmp_path, torch.randn(2, 8), dynamic_shapes=({0: BATCH},))
    after = npu_sim.load(tmp_path / "model.npumod", "cpu", programs=2)
    answers = {size: after(np.ones((size, 8), np.float32)) for size in (1, 2, 3, 4)}
    assert len(after._programs) == 2
    assert np.array_equal(after(np.ones((1, 8), np.float32)), answers[1])


def test_arguments_are_taken_as_the_module_takes_them(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    _, after = saved(Net(), tmp_path, x)
    wanted, array = after(x.numpy()), x.numpy()
    for found in (after(x=array), after(array, 2.0), after(array, scale=2.0), after(array, mask=None)):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((np.zeros((2, 8), np.float32), 3.0), {}, "argument 'scale' was not given when the module was compiled"),
        ((np.zeros((2, 8), np.float32),), {"mask": np.zeros(8, np.float32)}, "argument 'mask' was not given"),
        ((np.zeros((2, 8)),), {}, "argument 'args[0]' has dtype float64, but the module was compiled for float32"),
        ((np.zeros((3, 8), np.float32),), {}, "has shape [3, 8], but the module was compiled for [2, 8]"),
        (([1.0],), {}, "is of type list, but the module was compiled for a tensor"),
        ((np.zeros((2, 8), np.float32),), {"y": 1}, "got an unexpected keyword argument 'y'"),
    ],
)
def test_wrong_arguments_are_the_errors_of_the_compiled_module(
    file: Path, args: tuple[Any, ...], kwargs: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError) as error:
        npu_sim.load(file, "cpu")(*args, **kwargs)
    assert problem in str(error.value)


def test_nested_arguments_and_results_keep_their_structure(tmp_path: Path) -> None:
    def forward(pair: Any, *, table: dict[str, Any], factor: int = 3) -> Any:
        total = pair[0] + table["a"][0] * factor
        return {"all": [total, None, 7], "pair": Pair(total * 2, "text")}, pair[1]

    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    before = npu_sim.compile(Function(forward).eval(), ((a, b),), {"table": {"a": [c]}}, device="cpu")
    before.save(tmp_path / "model.npumod")
    after = npu_sim.load(tmp_path / "model.npumod", "cpu")
    wanted = before((a, b), table={"a": [c]})
    given = b.numpy()
    found = after((a.numpy(), given), table={"a": [c.numpy()]})
    assert found[1] is given
    assert found[0].keys() == wanted[0].keys()
    assert found[0]["all"][1:] == [None, 7]
    assert type(found[0]["pair"]).__name__ == "Pair" and found[0]["pair"]._fields == Pair._fields
    assert found[0]["pair"].second == "text"
    assert np.array_equal(found[0]["pair"].first, wanted[0]["pair"].first.numpy())
    for wrong in ([a.numpy(), given], (a.numpy(),)):
        with pytest.raises(InputError, match="argument 'pair' is of another structure"):
            after(wrong, table={"a": [c.numpy()]})
    with pytest.raises(InputError, match="argument 'table' is of another structure"):
        after((a.numpy(), given), table={"b": [c.numpy()]})


def test_classes_that_the_caller_gives_come_back_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(3)
    before, _ = saved(Function(lambda x: [Outcome(x + 1, x * 2), Pair(x, 7)]), tmp_path, x)
    after = npu_sim.load(tmp_path / "model.npumod", "cpu", classes=[Pair, Outcome])
    found, pair = after(x.numpy())
    assert isinstance(found, Outcome) and isinstance(pair, Pair)
    assert found.note is None
    assert np.array_equal(found.scaled, before(x)[0].scaled.numpy())


def test_no_module_is_asked_for_a_class_but_those_of_known_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are looked up without `getattr` on a module, which may import others."""

    class Asking(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    fields = {"kind": "namedtuple", "children": (Tree("leaf"),), "keys": ("first",)}
    for module in ("torch.lazy", "os", "__main__", "npu_sim.lazy", "torchlike"):
        monkeypatch.setitem(sys.modules, module, Asking(module))
        assert type(Tree(**fields, type=f"{module}:Pair").build([1])).__name__ == "Pair"  # type: ignore[arg-type]
    lazy = sys.modules["torch.lazy"]
    lazy.Pair = namedtuple("Pair", ["first"])  # type: ignore[attr-defined]
    assert type(Tree(**fields, type="torch.lazy:Pair").build([1])) is lazy.Pair  # type: ignore[arg-type]


def test_objects_of_unknown_classes_come_back_as_records(tmp_path: Path) -> None:
    x = torch.randn(3)
    saved(Function(lambda x: Outcome(x + 1, x * 2)), tmp_path, x)
    found = npu_sim.load(tmp_path / "model.npumod", "cpu")(x.numpy())
    assert isinstance(found, Record)
    assert type(found).__name__ == "Outcome"
    assert found.total is found["total"] is found[0]
    assert found.note is None
    with pytest.raises(AttributeError, match="'Outcome' has no field 'other'; it has total, scaled"):
        _ = found.other


def test_namedtuples_of_unknown_classes_can_be_unpacked(tmp_path: Path) -> None:
    x = torch.randn(3)
    before, after = saved(Function(lambda x: Pair(x + 1, 7)), tmp_path, x)
    first, second = found = after(x.numpy())
    assert (type(found).__name__, found._fields, second) == ("Pair", ("first", "second"), 7)
    assert np.array_equal(first, before(x).first.numpy())


def test_results_of_torch_ops_are_named_tuples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Function(lambda x: {"max": torch.max(x, 1), "top": torch.topk(x, 2), "sorted": [torch.sort(x)]}).eval()
    x = torch.randn(3, 4)
    npu_sim.compile(module, (x,)).save(tmp_path / "net.npumod")
    loaded = npu_sim.load(tmp_path / "net.npumod")
    got = loaded(x)
    assert type(got["max"]) is torch.return_types.max and type(got["sorted"][0]) is torch.return_types.sort
    monkeypatch.delitem(sys.modules, "torch.return_types")
    for result in (got, npu_sim.load(tmp_path / "net.npumod")(x)):
        values, indices = result["max"]
        assert result["max"].values is values and result["max"].indices is indices
        np.testing.assert_array_equal(indices, x.max(1).indices)
    assert isinstance(result["max"], tuple) and type(result["max"]) is not torch.return_types.max


def test_a_named_tuple_of_torch_is_an_argument(tmp_path: Path) -> None:
    module, x = Function(lambda pair: pair.values - pair.indices).eval(), torch.randn(3, 4)
    compiled = npu_sim.compile(module, (torch.max(x, 1),))
    compiled.save(tmp_path / "net.npumod")
    loaded = npu_sim.load(tmp_path / "net.npumod")
    np.testing.assert_allclose(loaded(torch.max(x, 1)), compiled(torch.max(x, 1)))


def test_model_outputs_come_back_as_they_are(tmp_path: Path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.randn(3)
    _, after = saved(Function(lambda x: outputs.BaseModelOutput(last_hidden_state=x + 1)), tmp_path, x)
    found = after(x.numpy())
    assert isinstance(found, outputs.BaseModelOutput)
    assert found.hidden_states is None
    np.testing.assert_allclose(found[0], x.numpy() + 1)


def test_content_without_names_has_its_places(tmp_path: Path) -> None:
    x = torch.randn(3)
    _, after = saved(Function(lambda x: {"box": Box(x + 1), "more": 1}), tmp_path, x)
    found = after(x.numpy())["box"]
    assert type(found).__name__ == "Box"
    np.testing.assert_allclose(found[0], x.numpy() + 1)


def test_classes_that_run_code_when_they_are_made_are_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3)
    saved(Function(lambda x: Outcome(x + 1)), tmp_path, x)

    def refuse(self: Outcome) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(Outcome, "__post_init__", refuse, raising=False)
    assert isinstance(npu_sim.load(tmp_path / "model.npumod", "cpu", classes=[Outcome])(x.numpy()), Record)


def test_inputs_that_the_module_changes_are_changed(tmp_path: Path) -> None:
    def forward(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2

    cache, x = torch.ones(4), torch.randn(4)
    _, after = saved(Function(forward), tmp_path, cache, x)
    given, tensor = np.ones(4, np.float32), torch.ones(4)
    found = after(given, x.numpy())
    after(tensor, x)
    np.testing.assert_allclose(given, 1 + x.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found, 2 * given, rtol=1e-6)
    assert np.array_equal(tensor.numpy(), given)
    buffer = NPUBuffer.from_numpy(np.ones(4, np.float32), Device("cpu"))
    after(buffer, x.numpy())
    assert np.array_equal(buffer.to_numpy(), given)
    with pytest.raises(InputError, match=r"argument 'args\[0\]' is changed in place, but shares memory with another"):
        after(given, given[:])
    given.flags.writeable = False
    with pytest.raises(InputError, match=r"argument 'args\[0\]' is changed in place, but is a read-only array"):
        after(given, x.numpy())


def test_results_that_are_views_are_arrays_of_their_own(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> Any:
        y = x + 1
        return x.t(), y, y[0], x

    x = torch.randn(2, 3)
    before, after = saved(Function(forward), tmp_path, x)
    given = x.numpy().copy()
    found = after(given)
    for one, wanted in zip(found, before(x), strict=True):
        assert np.array_equal(one, wanted.numpy())
    assert found[3] is given
    assert not any(np.may_share_memory(one, given) for one in found[:3])


def test_modules_in_several_graphs_are_not_saved(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    module = compiled(Function(forward), torch.ones(2))
    with pytest.raises(NPUError, match="cannot be saved, since it is not one graph"):
        module.save(tmp_path / "model.npumod")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_the_module_changes_are_changed_for_the_next_call(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.layer = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.layer(x) * 0 + self.count

    _, after = saved(Counter(), tmp_path, torch.zeros(1, 1))
    assert [after(np.zeros((1, 1), np.float32)).item() for _ in range(3)] == [1.0, 2.0, 3.0]


def test_device_buffers_go_in_and_out(file: Path) -> None:
    x = np.random.default_rng(1).standard_normal((2, 8), np.float32)
    wanted = npu_sim.load(file, "cpu")(x)
    after = npu_sim.load(file, "cpu", dlpack=True)
    buffer = NPUBuffer.from_numpy(x, Device("cpu"))
    first, second = after(buffer), after(x)
    assert isinstance(first, DeviceBuffer)
    assert np.array_equal(np.from_dlpack(first), wanted)  # type: ignore[arg-type]
    assert np.array_equal(torch.from_dlpack(second).numpy(), wanted)  # type: ignore[arg-type]


def test_anything_that_speaks_dlpack_goes_in(file: Path) -> None:
    class Exporter:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.dtype, self.shape = array, array.dtype, array.shape

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    x = np.random.default_rng(1).standard_normal((2, 8), np.float32)
    after = npu_sim.load(file, "cpu")
    assert np.array_equal(after(Exporter(x)), after(x))


def test_threads_share_a_loaded_module(tmp_path: Path) -> None:
    _, after = saved(Net(), tmp_path, torch.randn(2, 8), dynamic_shapes=({0: BATCH},))
    inputs = [np.random.default_rng(size).standard_normal((size, 8), np.float32) for size in range(1, 9)]
    wanted = [after(x) for x in inputs]
    wrong: list[int] = []

    def call(start: int) -> None:
        for index in range(start, start + 24):
            place = index * 3 % 8
            if not np.array_equal(after(inputs[place]), wanted[place]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_file_that_is_truncated_anywhere_is_one_error(file: Path) -> None:
    whole = file.read_bytes()
    rng = np.random.default_rng(2)
    lengths = {0, 1, 5, 6, 7, 8, 87, 88, 4095, 4096, len(whole) - 1, *rng.integers(0, len(whole), 40).tolist()}
    for length in sorted(lengths):
        file.with_name("cut").write_bytes(whole[:length])
        with pytest.raises(ProgramFormatError, match=r"'.*cut' is (truncated|not a .npumod module)"):
            npu_sim.load(file.with_name("cut"), "cpu")
    file.with_name("cut").write_bytes(whole + b"\0")
    with pytest.raises(ProgramFormatError, match="is corrupted: it has"):
        npu_sim.load(file.with_name("cut"), "cpu")


def test_a_flipped_bit_anywhere_is_one_error(file: Path) -> None:
    whole = file.read_bytes()
    rng = np.random.default_rng(3)
    for place in sorted({*range(88), 4000, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()}):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.with_name("damaged").write_bytes(damaged)
        with pytest.raises(ProgramFormatError, match=r"^'.*damaged' (is|has) [^\n]*$"):
            npu_sim.load(file.with_name("damaged"), "cpu")


def test_other_files_are_refused_by_what_they_are(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:6] + (9).to_bytes(2, "little") + whole[8:])
    with pytest.raises(ProgramFormatError, match="has format version 9; this version of npu-simulation reads 4: save"):
        npu_sim.load(file, "cpu")
    file.write_bytes(b"NPUBIN" + whole[6:])
    with pytest.raises(ProgramFormatError, match=r"is not a .npumod module \(it does not start with NPUMOD\)"):
        npu_sim.load(file, "cpu")
    with pytest.raises(ProgramFormatError, match=r"cannot read module '.*absent': No such file or directory"):
        npu_sim.load(tmp_path / "absent", "cpu")
    with pytest.raises(ProgramFormatError, match=r"cannot read module '.*': Is a directory"):
        npu_sim.load(tmp_path, "cpu")


def test_what_cannot_be_saved_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    x = torch.randn(2)
    complex_net = Function(lambda x: torch.view_as_real(complex_net.factor * x))
    complex_net.register_buffer("factor", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(InputError, match="'factor' has dtype complex64, which a .npumod file cannot hold"):
        compiled(complex_net, x).save(tmp_path / "model.npumod")
    with pytest.raises(InputError, match="cannot hold the structure of the arguments or results: its keys are not"):
        compiled(Function(lambda x: {(1, 2): x + 1}), x).save(tmp_path / "model.npumod")
    with pytest.raises(InputError, match=r"cannot write '.*absent/model.npumod': No such file or directory"):
        compiled(Net(), torch.randn(2, 8)).save(tmp_path / "absent" / "model.npumod")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_cannot_be_read_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = file.read_bytes()

    def fail(tensor: torch.Tensor) -> np.ndarray:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("npu_sim.module.saving.tensor_to_numpy", fail)
    with pytest.raises(RuntimeError):
        compiled(Net(), torch.randn(2, 8)).save(file)
    assert file.read_bytes() == old
    assert [path for path in file.parent.iterdir() if path.name.startswith(UNFINISHED)] == []


LOAD = """
import sys
import numpy as np
import npu_sim

module, given, results = sys.argv[1:4]
with np.load(given) as arrays:
    inputs = dict(arrays)
loaded = npu_sim.load(module, "cpu")
outputs = {}
for name in sorted({key.partition("/")[0] for key in inputs}):
    result = loaded(**{key.partition("/")[2]: x for key, x in inputs.items() if key.startswith(f"{name}/")})
    outputs[name] = result if isinstance(result, np.ndarray) else result.last_hidden_state
    print(type(result).__name__)
np.savez(results, **outputs)
print("torch" in sys.modules)
"""


def answers_without_torch(
    module: Path, calls: dict[str, dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Call name → result in a process that cannot import torch; and the lines that it prints."""
    given, results = module.with_name("given.npz"), module.with_name("results.npz")
    np.savez(given, **{f"{name}/{key}": x for name, call in calls.items() for key, x in call.items()})
    done = run_without_torch(LOAD, module, given, results)
    assert done.returncode == 0, done.stderr
    with np.load(results) as found:
        return dict(found), done.stdout.split()


TOLERANCE = {"float32": 1e-4, "float16": 2e-2}  # of the largest value


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_resnet_runs_without_torch(tmp_path: Path, dtype: str) -> None:
    model = resnet18().eval()
    seed_weights(model, 1)
    model = model.to(getattr(torch, dtype))
    x = torch.randn(2, 3, 64, 64, dtype=getattr(torch, dtype))
    compiled(model, x).save(tmp_path / "resnet.npumod")
    with torch.no_grad():
        wanted = model(x).float().numpy()
    found, printed = answers_without_torch(tmp_path / "resnet.npumod", {"one": {"x": x.numpy()}})
    assert printed == ["ndarray", "False"]
    assert np.abs(found["one"] - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_bert_of_any_batch_and_length_runs_without_torch(tmp_path: Path, dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    model = transformers.BertModel(config).eval().to(getattr(torch, dtype))
    ids = torch.randint(0, 200, (2, 9))
    shapes = {"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: SEQUENCE}}
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    module = npu_sim.compile(model, (), example, device="cpu", dynamic_shapes=shapes)
    module(**example)
    module.save(tmp_path / "bert.npumod")
    calls, wanted = {}, {}
    for batch, length in ((2, 9), (1, 5), (3, 17)):
        ids, mask = torch.randint(0, 200, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
        mask[0, length - 2 :] = 0
        calls[f"{batch}x{length}"] = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        with torch.no_grad():
            wanted[f"{batch}x{length}"] = model(ids, attention_mask=mask).last_hidden_state.float().numpy()
    found, printed = answers_without_torch(tmp_path / "bert.npumod", calls)
    assert printed == ["BaseModelOutputWithPoolingAndCrossAttentions"] * 3 + ["False"]
    for name, value in wanted.items():
        assert np.abs(found[name] - value).max() <= TOLERANCE[dtype] * np.abs(value).max(), name


def test_nodes_for_pytorch_run_where_it_is_and_are_named_where_it_is_not(tmp_path: Path) -> None:
    x = torch.randn(3, 3) + 4 * torch.diag(torch.ones(3))
    before, after = saved(Function(lambda x: torch.linalg.inv(x) + 1), tmp_path, x)
    (program,) = before.report().programs
    assert [node.op for node in program.off_device] == ["aten.linalg_inv.default"]
    np.testing.assert_allclose(after(x.numpy()), before(x).numpy(), rtol=1e-5)
    script = (
        "import sys, npu_sim\n"
        "try:\n    npu_sim.load(sys.argv[1], 'cpu')\n"
        "except Exception as error:\n    print(repr(error))"
    )
    printed = run_without_torch(script, tmp_path / "model.npumod").stdout
    assert printed.startswith("DeviceError(")
    assert "has nodes that the device does not run, and PyTorch, which would, is not installed" in printed
    assert "aten.linalg_inv.default" in printed


def test_a_module_from_a_pt2_file_has_its_exported_arguments(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    torch.export.save(torch.export.export(Net().eval(), (x,)), tmp_path / "net.pt2")
    before = npu_sim.compile(tmp_path / "net.pt2", device="cpu")
    before.save(tmp_path / "model.npumod")
    after = npu_sim.load(tmp_path / "model.npumod", "cpu")
    assert np.array_equal(after(x.numpy()), before(x).numpy())
    with pytest.raises(InputError, match="the call has 0 positional arguments"):
        after()


@pytest.mark.parametrize(
    "parameters",
    [
        [Parameter("", "POSITIONAL_ONLY")],
        [Parameter("a", "KEYWORD_ONLY"), Parameter("a", "KEYWORD_ONLY")],
        [Parameter("a", "KEYWORD_ONLY"), Parameter("b", "POSITIONAL_ONLY")],
        [Parameter("not a name", "VAR_KEYWORD")],
    ],
)
def test_parameters_that_no_function_has_are_refused(parameters: list[Parameter]) -> None:
    with pytest.raises(ProgramFormatError, match="no function has its parameters: "):
        signature_of(parameters)


def test_a_module_that_was_saved_on_the_cpu_runs_on_metal(tmp_path: Path) -> None:
    before, _ = saved(Net(), tmp_path, torch.randn(2, 8), dynamic_shapes=({0: BATCH},))
    after = npu_sim.load(tmp_path / "model.npumod", METAL_DEVICE)
    for size in (2, 3):
        x = torch.randn(size, 8)
        np.testing.assert_allclose(after(x.numpy()), before(x).numpy(), rtol=1e-4, atol=1e-5)


def test_the_command_describes_and_runs_a_module(tmp_path: Path) -> None:
    before, _ = saved(Net(), tmp_path, torch.randn(2, 8), dynamic_shapes=({0: BATCH},))
    file, x = str(tmp_path / "model.npumod"), torch.randn(3, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    shown = CliRunner().invoke(app, ["describe", file])
    assert shown.exit_code == 0
    assert "input x: float32[batch, 8]\n  size batch: 1 to 8\n  results: output\n" in shown.stdout
    described = json.loads(CliRunner().invoke(app, ["describe", file, "--json"]).stdout)
    assert described["inputs"] == [{"name": "x", "shape": ["batch", 8], "dtype": "float32"}]
    options = ["-i", f"x={tmp_path / 'x.npy'}", "-o", str(tmp_path / "out.npz"), "--device", "cpu"]
    ran = CliRunner().invoke(app, ["run", file, *options])
    assert ran.exit_code == 0, ran.output
    with np.load(tmp_path / "out.npz") as arrays:
        assert np.array_equal(arrays["output"], before(x).numpy())
    at_random = CliRunner().invoke(app, ["run", file, "--device", "cpu", "--json"])
    assert json.loads(at_random.stdout)["outputs"][0]["shape"] == [1, 8]
    with_weights = CliRunner().invoke(app, ["run", file, "--device", "cpu", "-w", str(tmp_path / "out.npz")])
    assert "has its weights inside; leave out --weights" in str(with_weights.output) + str(with_weights.exception)


def test_places_of_a_result_have_names() -> None:
    leaf = Tree("leaf")
    nested = Tree("object", (leaf, Tree("list", (leaf, Tree("dict", (leaf,), (7,))))), ("logits", "state"), "m:C")
    assert nested.paths() == ["logits", "state.0", "state.1.7"]
    assert leaf.paths() == ["output"]


def test_a_module_with_state_is_saved_with_its_constants_as_they_are_now(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.register_buffer("scale", torch.ones(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * self.scale

    module, x = Counting().eval(), torch.randn(3, 2)
    compiled = npu_sim.compile(module, (x,))
    module.scale = torch.full((2,), 5.0)
    compiled.save(tmp_path / "counting.npumod")
    np.testing.assert_allclose(npu_sim.load(tmp_path / "counting.npumod")(x.numpy()), 5 * x.numpy(), rtol=1e-6)


def test_sizes_among_the_results_are_a_tuple(tmp_path: Path) -> None:
    module, x = Function(lambda x: (x + 1, torch.broadcast_shapes(x.shape, (1, 3)), torch.Size([]))), torch.ones(2, 3)
    _, loaded = saved(module, tmp_path, x)
    total, shape, none = loaded(x)
    assert tuple(shape) == (2, 3) and none == ()
    np.testing.assert_array_equal(total, x + 1)
