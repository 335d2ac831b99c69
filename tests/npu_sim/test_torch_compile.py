"""`torch.compile(model, backend="npu_sim")`: the same answers as PyTorch's, from programs that are made once."""

from __future__ import annotations

import copy
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from sharing_threads import results_of_threads
from torch import nn
from torch.nn import functional as F

import npu_sim
from npu_compiler.errors import InputError
from npu_sim.module import capture as capturing
from npu_sim.module import dynamo_backend, runner
from npu_sim.module.dynamo_backend import Options, Subgraph, compile_graph

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo_backend._warn.cache_clear()
    with torch.no_grad():
        yield


class Recorder:
    """The backend, with all the graphs that it was given."""

    def __init__(self, **options: Any) -> None:
        self.graphs: list[Any] = []
        self._options = Options(**options)

    def __call__(self, graph_module: Any, example_inputs: Sequence[Any]) -> Any:
        self.graphs.append(compile_graph(graph_module, self._options))
        return self.graphs[-1]

    @property
    def only(self) -> Subgraph:
        (graph,) = self.graphs
        assert isinstance(graph, Subgraph) and graph.failure is None
        return graph


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.rand(4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x))) * self.scale


def layers() -> TwoLayers:
    return TwoLayers().eval()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_installed_package_registers_the_backend(tmp_path: Path) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "npu_simulation-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-simulation\nVersion: 1\n")
    points = "".join(f"{name} = {value}\n" for name, value in groups["torch_dynamo_backends"].items())
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{points}")
    code = f"""
import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
import torch
layer, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
with torch.no_grad():
    print(torch.allclose(torch.compile(layer, backend="npu_sim")(x), layer(x), atol=1e-5), "npu_sim" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "True True\n", done.stderr


def test_parameters_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, recorder = layers(), Recorder()
    compiled = torch.compile(module, backend=recorder)
    x = torch.randn(3, 8)
    close(compiled(x), module(x))
    graph = recorder.only
    assert [meta["shape"] for meta in graph._trace.ir["graph_inputs"]] == [[3, 8]]
    monkeypatch.setattr(runner, "load_weights", pytest.fail)
    monkeypatch.setattr(capturing, "make_fx", pytest.fail)
    x = torch.randn(3, 8)
    close(compiled(x), module(x))
    assert len(recorder.graphs) == 1


def test_graphs_over_the_same_parameters_share_them_on_the_device() -> None:
    module, recorder = layers(), Recorder()
    compiled = torch.compile(module, backend=recorder, dynamic=False)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        close(compiled(x), module(x))
    first, second = (next(iter(graph._sets.values())).programs._loaded.cache for graph in recorder.graphs)
    assert len(first) == 5
    assert {id(x) for x in first.values()} == {id(x) for x in second.values()}


def change_in_place(module: TwoLayers) -> None:
    module.first.weight.mul_(2)


def replace_parameter(module: TwoLayers) -> None:
    module.first.weight = nn.Parameter(torch.randn(16, 8))


def assign_data(module: TwoLayers) -> None:
    module.second.weight.data = torch.randn(4, 16)


def load_state(module: TwoLayers) -> None:
    module.load_state_dict(layers().state_dict())


def change_buffer(module: TwoLayers) -> None:
    module.scale.add_(1)


def replace_buffer(module: TwoLayers) -> None:
    module.scale = torch.rand(4)


def to_double_and_back(module: TwoLayers) -> None:
    module.double().first.weight.mul_(3)
    module.float()


CHANGES = [change_in_place, replace_parameter, assign_data, load_state, change_buffer, replace_buffer]


@pytest.mark.parametrize("change", [*CHANGES, to_double_and_back])
def test_a_changed_weight_is_used_in_the_next_call(change: Callable[[TwoLayers], None]) -> None:
    module = layers()
    compiled = torch.compile(module, backend=npu_sim.backend)
    x = torch.randn(3, 8)
    for _ in range(5):
        close(compiled(x), module(x))
        change(module)
    close(compiled(x), module(x))


def test_a_buffer_that_keeps_changing_becomes_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    module, recorder = layers(), Recorder()
    compiled = torch.compile(module, backend=recorder)
    x = torch.randn(3, 8)
    for _ in range(6):
        close(compiled(x), module(x))
        module.scale = torch.rand(4)
    assert [meta["shape"] for meta in recorder.only._trace.ir["graph_inputs"]] == [[3, 8], [4]]
    monkeypatch.setattr(runner, "load_weights", pytest.fail)
    close(compiled(x), module(x))


def test_weights_that_are_gone_are_not_kept() -> None:
    module, recorder = layers(), Recorder()
    compiled = torch.compile(module, backend=recorder)
    compiled(torch.randn(3, 8))
    module.first.weight = nn.Parameter(torch.randn(16, 8))
    compiled(torch.randn(3, 8))
    assert len(recorder.only._sets) == 1


class Repeated(nn.Module):
    """Layers of one class, each with a graph break, so that all of them run the same graphs."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x.relu()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + 1
        return x


def test_layers_with_graph_breaks_share_their_graphs_and_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module, recorder = Repeated().eval(), Recorder()
    compiled = torch.compile(module, backend=recorder)
    x = torch.randn(3, 8)
    close(compiled(x), module(x))
    assert 2 <= len(recorder.graphs) < 12
    assert max(len(graph._sets) for graph in recorder.graphs) >= 6
    monkeypatch.setattr(runner, "load_weights", pytest.fail)
    close(compiled(x), module(x))


def test_a_graph_break_carries_numbers_over() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows = x.shape[0] * 2
        y = x + rows
        torch._dynamo.graph_break()
        return y.repeat(2, 1) * rows, rows + 1

    recorder = Recorder()
    compiled = torch.compile(f, backend=recorder, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        got, want = compiled(x), f(x)
        close(got[0], want[0])
        assert got[1] == want[1]
    assert len(recorder.graphs) == 2


def test_arguments_are_changed_in_place() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = x * 1
        x[:, 1] = y
        x.mul_(2)
        return old + x

    x, y = torch.randn(4, 3), torch.randn(4)
    expected = x.clone()
    want = f(expected, y)
    recorder = Recorder()
    close(torch.compile(f, backend=recorder)(x, y), want)
    close(x, expected)
    assert recorder.only.failure is None


def test_arguments_in_the_same_memory_are_changed_as_in_eager() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    memory, known = torch.zeros(6), torch.zeros(6)
    close(torch.compile(f, backend=npu_sim.backend)(memory[:4], memory[2:]), f(known[:4], known[2:]))
    close(memory, known)


def test_a_cache_is_updated_in_its_own_memory() -> None:
    def f(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, row)
        return row @ cache.t()

    recorder = Recorder()
    compiled = torch.compile(f, backend=recorder)
    cache, known = torch.randn(5, 4), torch.zeros(0)
    for place in (1, 3):
        known, version, row = cache.clone(), cache._version, torch.randn(1, 4)
        close(compiled(cache, torch.tensor([place]), row), f(known, torch.tensor([place]), row))
        close(cache, known)
        assert cache._version > version
    (loaded,) = recorder.only._sets.values()
    (step,) = next(iter(loaded.programs.runners.values()))._steps
    (port,) = step.ports._in_place.values()
    assert port.is_at(cache)


def test_a_buffer_that_one_graph_writes_is_read_by_the_next() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            self.seen.index_copy_(0, place, x)
            torch._dynamo.graph_break()
            return self.seen * 2

    module = Counting().eval()
    compiled = torch.compile(module, backend=npu_sim.backend)
    expected = torch.zeros(4)
    for place in (0, 2, 1, 3, 0):
        value = torch.randn(1)
        expected[place] = value
        close(compiled(value, torch.tensor([place])), expected * 2)
        close(module.seen, expected)


def an_input(x: torch.Tensor) -> Any:
    return x, x + 1


def views_of_an_input(x: torch.Tensor) -> Any:
    return x.t(), x[1:], x.view(-1)[::2], (x + 1).relu()


def parts_of_an_input(x: torch.Tensor) -> Any:
    first, second = x.split(2, 1)
    return first, second.unsqueeze(0), x.unbind(0)[1]


def a_written_input(x: torch.Tensor) -> Any:
    return x.add_(1), x.t()


def views_of_a_result(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.view(-1), y[0]


def views_without_their_base(x: torch.Tensor) -> Any:
    y = x * 2
    return y[0], y.t()


def a_view_before_a_write(x: torch.Tensor) -> Any:
    y = x * 2
    row = y[0]
    y.add_(1)
    return row, y


def a_result_of_another_shape(x: torch.Tensor) -> Any:
    y = x * 2
    y.unsqueeze_(0)
    return y, y[0], y.detach()


def a_cast_and_no_cast(x: torch.Tensor) -> Any:
    return x.to(torch.float32), x.to(torch.float64), x.contiguous()


def like_another(x: torch.Tensor) -> Any:
    return x.view_as(x), x[:1].expand_as(x)


def groups(values: Sequence[torch.Tensor], argument: torch.Tensor) -> list[int]:
    """Return, for each tensor, the index of the first of all tensors with the same memory."""
    places = [x.untyped_storage().data_ptr() for x in (argument, *values)]
    return [places.index(place) for place in places]


ALIASES = [
    an_input,
    views_of_an_input,
    parts_of_an_input,
    a_written_input,
    views_of_a_result,
    views_without_their_base,
    a_view_before_a_write,
    a_result_of_another_shape,
    a_cast_and_no_cast,
    like_another,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", ALIASES)
def test_results_share_memory_as_in_eager(f: Callable[[torch.Tensor], Any], dynamic: bool) -> None:
    compiled = torch.compile(f, backend=npu_sim.backend, dynamic=dynamic)
    for rows in (3, 4):
        x = torch.randn(rows, 4)
        known = x.clone()
        got, want = compiled(x), f(known)
        for a, b in zip(got, want, strict=True):
            close(a, b)
        assert groups(got, x) == groups(want, known)
        got[0].add_(1)
        want[0].add_(1)
        for a, b in zip((x, *got), (known, *want), strict=True):
            close(a, b)


def test_dynamic_shapes_are_traced_once_and_have_a_program_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    module, recorder = layers(), Recorder(programs=2)
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    sizes = []
    for index, rows in enumerate((3, 5, 7, 5)):
        x = torch.randn(rows, 8)
        close(compiled(x), module(x))
        sizes.append([list(program.sizes.values()) for program in recorder.only.programs()])
        if index == 0:
            monkeypatch.setattr(capturing, "make_fx", pytest.fail)
    assert sizes == [[[3]], [[3], [5]], [[5], [7]], [[5], [7]]]


def test_a_graph_that_needs_gradients_is_run_by_pytorch_with_one_warning() -> None:
    module = layers()
    compiled = torch.compile(module, backend=npu_sim.backend, dynamic=False)
    with torch.enable_grad(), pytest.warns(UserWarning, match="is for inference") as caught:
        for rows in (2, 3):
            compiled(torch.randn(rows, 8)).sum().backward()
    assert module.first.weight.grad is not None
    assert len([x for x in caught if "npu_sim" in str(x.message)]) == 1
    x = torch.randn(2, 8)
    close(compiled(x), module(x))


def test_a_result_without_gradients_needs_no_pytorch() -> None:
    module, recorder = layers(), Recorder()
    compiled = torch.compile(lambda x: module(x).argmax(-1), backend=recorder)
    x = torch.randn(3, 8)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = compiled(x)
    assert torch.equal(got, module(x).argmax(-1))
    assert recorder.only.programs()


def test_a_graph_without_a_program_is_run_by_pytorch_with_a_warning() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled = torch.compile(f, backend=npu_sim.backend)
    x = torch.rand(4)
    with pytest.warns(UserWarning, match="control flow that depends on data"):
        close(compiled(x), x + 1)
    close(compiled(-x), -x - 1)


def test_regions_under_no_grad_autocast_and_inference_mode() -> None:
    module = layers()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            z = module.first(y)
        return y, z

    x = torch.randn(3, 8)
    compiled = torch.compile(f, backend=npu_sim.backend)
    got, want = compiled(x), f(x)
    close(got[0], want[0])
    assert got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[1], want[1], rtol=0.02, atol=0.02)
    with torch.inference_mode():
        close(torch.compile(module, backend=npu_sim.backend)(x), module(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.compile(module.first, backend=npu_sim.backend)(x).dtype == torch.bfloat16


def test_training_mode_without_gradients_draws_and_counts_as_in_eager() -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5)).train()
    known = copy.deepcopy(module)
    compiled = torch.compile(module, backend=npu_sim.backend)
    for seed in range(6):
        x = torch.randn(2, 3, 7, 7)
        torch.manual_seed(seed)
        got = compiled(x)
        torch.manual_seed(seed)
        close(got, known(x))
        for mine, others in zip(module.buffers(), known.buffers(), strict=True):
            close(mine, others)


def test_options_choose_the_compute_dtype() -> None:
    module, x = layers(), torch.randn(3, 8)
    got = torch.compile(module, backend=npu_sim.backend, options={"dtype": "float16"})(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, module(x), rtol=0.01, atol=0.01)
    assert not torch.equal(got, torch.compile(layers(), backend=npu_sim.backend)(x))
    recorder = Recorder(dtype=torch.float16)
    torch.compile(layers(), backend=recorder)(x)
    assert [program.compute_dtype for program in recorder.only.programs()] == ["float16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"speed": 11}}, "has no option 'speed'; it has device, dtype, programs"),
        ({"mode": "fastest"}, "has no mode 'fastest'; it has default, reduce-overhead"),
    ],
)
def test_unknown_options_and_modes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(layers(), backend=npu_sim.backend, **arguments)(torch.randn(3, 8))
    assert isinstance(caught.value.__cause__ or caught.value, InputError) or "InputError" in str(caught.value)


def test_graphs_without_tensors_or_ops() -> None:
    def f(n: int) -> torch.Tensor:
        return torch.arange(n) * 2 + torch.tensor([1, 2, 3])

    assert torch.equal(torch.compile(f, backend=npu_sim.backend)(3), f(3))
    x = torch.randn(2)
    assert torch.compile(lambda x: (x, 3), backend=npu_sim.backend)(x)[0] is x


def test_threads_call_one_compiled_module() -> None:
    module = layers()
    compiled = torch.compile(module, backend=npu_sim.backend)
    inputs = [torch.randn(3, 8) for _ in range(4)]
    compiled(inputs[0])
    for x, results in zip(inputs, results_of_threads(compiled, inputs, 20), strict=True):
        assert len(results) == 20
        for got in results:
            close(got, module(x))


def tiny(name: str) -> Any:
    import transformers

    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            max_position_embeddings=64,
        )
        return transformers.LlamaForCausalLM(config)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64)
    )


def test_generate_compiles_the_decode_step_itself_where_its_configuration_says_so() -> None:
    from transformers import CompileConfig

    model = tiny("llama").eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    ids = torch.randint(3, 96, (2, 5))
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(ids, **how)
    graphs = []

    def remember(*args: Any, **kwargs: Any) -> Any:
        graphs.append(npu_sim.backend(*args, **kwargs))
        return graphs[-1]

    model.generation_config.compile_config = CompileConfig(backend=remember)
    model.generation_config.compile_config._compile_all_devices = True  # as it does by itself on a GPU
    assert torch.equal(model.generate(ids, **how), want)
    (graph,) = graphs
    assert isinstance(graph, Subgraph) and graph.programs()


@pytest.mark.parametrize("name", drawn(["llama", "gpt2"], 1 / 2))
def test_generate_with_a_static_cache_gives_the_same_tokens(name: str) -> None:
    model = tiny(name).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    ids = torch.randint(3, 96, (1, 7))
    how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(ids, **how)
    recorder = Recorder()
    model.compile(backend=recorder)
    assert torch.equal(model.generate(ids, **how), want)
    assert len(recorder.graphs) == 2  # prefill and decode, not one for each token
    assert all(isinstance(graph, Subgraph) and graph.failure is None for graph in recorder.graphs)
    assert torch.equal(model.generate(ids, **how), want)
    assert len(recorder.graphs) == 2
