"""The `.npubin` artifact: round trip, what `describe()` tells, and that no damaged file is ever taken for a program."""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from drawn import drawn
from ir_builder import IRBuilder
from quantized_networks import byte_network

from npu_compiler import CompiledProgram, InputError, IRError, ProgramFormatError, __version__, compile
from npu_compiler.compiled_program import FORMAT_VERSION, MAGIC
from npu_compiler.program.describe import format_bytes, format_flops, summary
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KERNELS
from npu_compiler.program.operands import parse_operands
from npu_runtime import CPUBackend, Executor, load_weights


def network() -> IRBuilder:
    """A convolution with batch norm, a cache update, an embedding and a constant: every kind of buffer."""
    g = IRBuilder("net")
    x = g.input("x", 1, 3, 8, 8)
    bn = [g.weight(f"bn.{name}", 4) for name in ("gamma", "beta", "mean", "var")]
    y = g("aten.conv2d.default", x, g.weight("conv.weight", 4, 3, 3, 3), g.weight("conv.bias", 4))
    y = g("aten.relu.default", g("aten.batch_norm.default", y, *bn, False, 0.1, 1e-5, True))
    y = g("aten.flatten.using_ints", g("aten.max_pool2d.default", y, [2, 2]), 1)
    y = g("aten.add.Tensor", y, g.constant("offset", np.ones(36, np.float32)))
    y = g("aten.softmax.int", g("aten.linear.default", y, g.weight("fc.weight", 6, 36)), -1)
    rows = g("aten.embedding.default", g.weight("table", 9, 6), g.input("ids", 2, dtype="int64"))
    new = g("aten.index_copy.default", g.input("cache", 5, 6), 0, g.input("at", 2, dtype="int64"), rows)
    return g.output(g("aten.mul.Tensor", y, 3, name="scores"), new)


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile(network().ir())


@pytest.fixture(scope="module")
def body(program: CompiledProgram) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.unpackb(program.to_bytes()[len(MAGIC) :])[2])  # type: ignore[no-any-return]


def sealed(body: Any, *, version: Any = FORMAT_VERSION) -> bytes:
    """A file whose checksum is right, whatever is in it."""
    packed = msgpack.packb(body)
    return MAGIC + bytes(msgpack.packb([version, hashlib.sha256(packed).digest(), packed, {}]))


def answers(program: CompiledProgram) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    keys = {key: shape for w in program.weight_specs.values() for key, shape in w.source_shapes.items()}
    state = {key: np.abs(rng.normal(size=shape)).astype(np.float32) for key, shape in sorted(keys.items())}
    inputs = {
        "x": rng.normal(size=(1, 3, 8, 8)),
        "ids": np.array([3, 8]),
        "cache": np.zeros((5, 6)),
        "at": np.array([4, 0]),
    }
    backend = CPUBackend(native=False)
    outputs = Executor(program, backend).run(inputs, load_weights(state, program, backend))
    return [outputs[spec.name].to_numpy(spec) for spec in program.output_specs]


def test_a_saved_program_loads_as_it_was_and_gives_the_same_answers(program: CompiledProgram, tmp_path: Path) -> None:
    path = tmp_path / "net.npubin"
    program.save(path)
    loaded = CompiledProgram.load(str(path))
    assert loaded.to_bytes() == program.to_bytes() == path.read_bytes()
    assert loaded.describe() == program.describe()
    assert (loaded.name, loaded.target, loaded.compute_dtype) == ("net", "op_level", "float16")
    assert loaded.compiler_version == __version__
    for actual, wanted in zip(answers(loaded), answers(program), strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("dtype", [np.bool_, np.int16, np.int64, np.float64])
def test_a_constant_keeps_its_own_dtype(dtype: Any) -> None:
    g = IRBuilder()
    y = g("aten.mul.Tensor", g.input("x", 2, 3), g.constant("offset", np.ones(3, dtype)))
    loaded = CompiledProgram.from_bytes(compile(g.output(y).ir()).to_bytes())
    assert [value.dtype for value in loaded.plan.constants.values()] == [dtype]


def test_a_program_keeps_the_bounds_of_its_integers() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 3, dtype="int64")
    program = compile(g.output(g("aten.mul.Tensor", x, x)).ir())
    loaded = CompiledProgram.from_bytes(program.to_bytes())
    assert loaded.input_specs == program.input_specs
    assert loaded.input_specs[0].bounds == (-46340, 46340)


def test_what_nobody_reads_is_not_computed() -> None:
    g = IRBuilder()
    values, _ = g("aten.max.dim", g.input("x", 4, 8), 1)
    g.output(values)
    assert [call.kernel for call in compile(g.ir()).kernels] == ["max_kernel"]


def test_a_network_of_bytes_is_saved_and_loaded() -> None:
    program = compile(byte_network().ir())
    loaded = CompiledProgram.from_bytes(program.to_bytes())
    assert loaded.weight_specs == program.weight_specs
    assert (-128, 127) in [weight.spec.bounds for weight in loaded.weight_specs.values()]


@pytest.mark.parametrize("bounds", [[-(2**63) - 1, 0], [3, 2], [0, 10**400]])
def test_bounds_that_no_integer_can_have_are_refused(bounds: list[int]) -> None:
    ir = IRBuilder()
    x = ir.input("x", 2, dtype="int64")
    plain = ir.output(ir("aten.abs.default", x)).ir()
    plain["graph_inputs"][0]["bounds"] = bounds
    with pytest.raises(IRError, match="are not a range of 64-bit integers"):
        compile(plain)


def test_compiling_twice_gives_the_same_bytes(program: CompiledProgram) -> None:
    assert compile(network().ir()).to_bytes() == program.to_bytes()


def test_the_file_is_plain_msgpack_and_holds_no_weights(body: dict[str, Any]) -> None:
    assert body.keys() == {"name", "target", "compute_dtype", "plan", "compiler_version", "contains_code"}
    assert {"calls", "buffers", "weights"} <= body["plan"].keys()
    assert {"buffer", "shape", "strides", "offset", "dtype"} == body["plan"]["calls"][0]["inputs"][0].keys()
    assert all("data" not in weight for weight in body["plan"]["weights"].values())


def test_describe_tells_kernels_memory_weights_and_totals(program: CompiledProgram) -> None:
    text, facts = program.describe(), summary(program.plan)
    lines = text.split("\n")
    assert lines[:2] == ["program net", f"  target op_level, compute dtype float16, compiler {__version__}"]
    assert "  x: float16[1, 3, 8, 8] in [1, 32, 8, 8]" in lines
    assert any(line.endswith("(updates cache in place)") for line in lines)
    conv = next(line for line in lines if "conv2d_kernel" in line and "float16[1, 4, 6, 6]" in line)
    flops, size = 2 * 4 * 36 * 27, 2 * (3 * 64 + 4 * 27 + 4 + 4 * 36)
    assert re.search(rf"float16\[1, 4, 6, 6\] +{flops} +{size} +relu", conv)
    for buffer in program.plan.buffers.values():
        if buffer.kind == "arena":
            life = re.escape(f"{buffer.first_use}..{buffer.last_use}")
            assert re.search(rf"arena +{buffer.offset} +{buffer.size_bytes} +{life} .*{re.escape(buffer.name)}", text)
    assert re.search(r"p_conv_weight\.folded: float16\[4, 3, 3, 3\] = scale_axis\(conv\.weight, bn_scale\(", text)
    assert "  p_table: float16[9, 6] = table" in lines
    assert lines[2] == "summary"
    totals = dict(line.strip().split(": ", 1) for line in lines[3 : lines.index("inputs")])
    assert totals["kernel launches"] == str(len(program.kernels))
    launches = dict(part.rsplit(" ", 1) for part in totals["by family"].split(", "))
    assert launches["conv"] == "1" and sum(map(int, launches.values())) == len(program.kernels)
    assert totals["work"] == f"{format_flops(facts['FLOPs'])}, {format_bytes(facts['bytes moved'])} moved"
    assert totals["weights"] == f"{len(program.weight_specs)} tensors, {format_bytes(facts['weight bytes'])}"
    assert totals["arena"] == format_bytes(program.plan.arena_bytes)
    assert facts["padding waste bytes"] >= 2 * 29 * 64
    short = program.describe(kernels=False)
    assert text.startswith(short) and "kernels\n" not in short


@pytest.mark.parametrize(
    ("count", "size", "work"),
    [
        (0, "0 B", "0 FLOP"),
        (1000, "1000 B", "1.0 kFLOP"),
        (1536, "1.5 KiB", "1.5 kFLOP"),
        (3 << 20, "3.0 MiB", "3.1 MFLOP"),
        (5 << 40, "5.0 TiB", "5.5 TFLOP"),
        (5000 << 40, "5000.0 TiB", "5497.6 TFLOP"),
    ],
)
def test_totals_have_units(count: int, size: str, work: str) -> None:
    assert (format_bytes(count), format_flops(count)) == (size, work)


def layers(count: int) -> CompiledProgram:
    """A network of `count` layers of two kernels each, with a kernel before them and a weight in each."""
    g = IRBuilder()
    x = g("aten.cos.default", g.input("x", 2, 8))
    for layer in range(count):
        x = g("aten.linear.default", g("aten.sin.default", x), g.weight(f"layers.{layer}.w", 8, 8))
    return compile(g.output(x).ir())


def test_describe_shows_repeated_layers_once() -> None:
    program = layers(5)
    lines = program.describe().splitlines()
    start = next(number for number, line in enumerate(lines) if "× 5: kernels 1 to 10, 2 each; the first:" in line)
    assert "0  cos_kernel" in lines[start - 1]
    assert "1  sin_kernel" in lines[start + 1] and "2  matmul" in lines[start + 2]
    assert lines[start + 3] == "buffers"
    assert "  × 5: weights 0 to 4; the first:" in lines
    assert sum("layers.0.w" in line for line in lines) == 1 and not any("layers.1.w" in line for line in lines)


def test_full_describe_shows_every_line() -> None:
    program = layers(5)
    text = program.describe(full=True)
    assert "×" not in text
    assert text.count("sin_kernel  ") == 5 and all(f"= layers.{layer}.w" in text for layer in range(5))


# damaged files


def refused(data: bytes, message: str = "broken.npubin") -> None:
    with pytest.raises(ProgramFormatError, match=message):
        CompiledProgram.from_bytes(data, "broken.npubin")


def test_a_truncated_file_is_refused(program: CompiledProgram, tmp_path: Path) -> None:
    data = program.to_bytes()
    for length in (*range(0, len(data), 97), len(data) - 1):
        refused(data[:length], "'broken.npubin' is (truncated|corrupted|not a .npubin program)")
    path = tmp_path / "short.npubin"
    path.write_bytes(data[:-3])
    with pytest.raises(ProgramFormatError, match=r"short\.npubin' is truncated or corrupted"):
        CompiledProgram.load(path)


def test_a_flipped_bit_is_noticed_wherever_it_is(program: CompiledProgram) -> None:
    data = program.to_bytes()
    for position in (*range(60), *range(60, len(data), 211)):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        refused(bytes(broken))


def test_trailing_bytes_are_refused(program: CompiledProgram) -> None:
    refused(program.to_bytes() + b"\0")


def test_files_of_another_kind_or_version_are_refused(body: dict[str, Any], tmp_path: Path) -> None:
    refused(b"PK\3\4" + b"0" * 100, r"not a .npubin program \(it does not start with NPUBIN\)")
    refused(MAGIC, "truncated or corrupted")
    refused(MAGIC + bytes(msgpack.packb({"a": 1})), "not the expected array")
    refused(MAGIC + bytes(msgpack.packb([FORMAT_VERSION, b"", "text"])), "not the expected array")
    refused(sealed(body, version=99), "has format version 99; this runtime reads version 4: compile it again")
    refused(sealed([1, 2]), "is not a valid program")
    refused(MAGIC + b"\x91" * 100_000, "truncated or corrupted")
    refused(MAGIC + b"\xdd\xff\xff\xff\xff", "truncated or corrupted")
    for missing in (tmp_path / "no.npubin", tmp_path):
        with pytest.raises(ProgramFormatError, match="cannot read program"):
            CompiledProgram.load(missing)


def leaves(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every value in nested maps and lists, the containers too; long runs of like items are sampled."""
    if path:
        yield path
    if isinstance(item, dict):
        for key in item:
            yield from leaves(item[key], (*path, key))
    elif isinstance(item, list):
        for index in range(min(len(item), 3)):
            yield from leaves(item[index], (*path, index))


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(body)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    "value", drawn([None, "x", -7, 1.5, [], {}, [None], {"x": "y"}, b"\0", True, 2**63], 1 / 3, repr)
)
def test_a_field_of_another_type_is_refused_or_harmless(body: dict[str, Any], value: Any) -> None:
    """A program that loads with a wrong field under a right checksum can still describe and save itself."""
    for path in leaves(body):
        try:
            loaded = CompiledProgram.from_bytes(sealed(with_value(body, path, value)))
        except ProgramFormatError:
            continue
        try:
            loaded.describe()
            loaded.to_bytes()
        except Exception as error:
            pytest.fail(f"{path} = {value!r} was loaded, and then: {type(error).__name__}: {error}")


def test_missing_fields_are_refused(body: dict[str, Any]) -> None:
    for key in body:
        refused(
            sealed({name: value for name, value in body.items() if name != key}),
            "does not have exactly the fields name",
        )
    for key in body["plan"]:
        refused(changed_plan(body, **{key: None}), f"valid program: plan.{key} is None, not a valid ")


def changed_plan(body: dict[str, Any], **changes: Any) -> bytes:
    return sealed({**body, "plan": {**body["plan"], **changes}})


def first_view(body: dict[str, Any], **changes: Any) -> bytes:
    """A file whose first call's first input is changed."""
    view = body["plan"]["calls"][0]["inputs"][0]
    return sealed(with_value(body, ("plan", "calls", 0, "inputs", 0), {**view, **changes}))


def test_a_view_beyond_its_buffer_is_refused(body: dict[str, Any]) -> None:
    shape = body["plan"]["calls"][0]["inputs"][0]["shape"]
    refused(first_view(body, offset=10**6), "a view reaches beyond its buffer 'x'")
    refused(first_view(body, shape=[*shape[:-1], 10**9]), "a view reaches beyond its buffer 'x'")
    refused(first_view(body, offset=-1), "a view of buffer 'x' is malformed")
    refused(first_view(body, strides=[-1] * len(shape)), "a view of buffer 'x' is malformed")
    refused(first_view(body, strides=[1]), "a view of buffer 'x' is malformed")
    refused(first_view(body, shape=[-1] * len(shape)), "malformed")
    refused(first_view(body, buffer="nowhere"), "buffer 'nowhere', which does not exist")


def test_a_buffer_beyond_the_arena_is_refused(body: dict[str, Any]) -> None:
    name = next(name for name, buffer in body["plan"]["buffers"].items() if buffer["kind"] == "arena")
    place = ("plan", "buffers", name)
    refused(sealed(with_value(body, (*place, "offset"), 10**9)), "lies outside the arena")
    refused(sealed(with_value(body, ("plan", "arena_bytes"), 1)), "lies outside the arena")
    refused(sealed(with_value(body, (*place, "dtype"), "float7")), "no valid shape and dtype")
    refused(sealed(with_value(body, (*place, "kind"), "elsewhere")), r"plan.buffers\[.*\].kind is 'elsewhere', not one")


def test_a_program_whose_parts_do_not_refer_to_each_other_is_refused(body: dict[str, Any]) -> None:
    plan = body["plan"]
    refused(changed_plan(body, inputs=plan["inputs"][1:]), "inputs, weights and constants do not match its buffers")
    refused(changed_plan(body, weights={}), "inputs, weights and constants do not match its buffers")
    refused(changed_plan(body, constants={}), "inputs, weights and constants do not match its buffers")
    refused(changed_plan(body, output_views={}), "outputs do not match its output views")
    refused(changed_plan(body, donations={"scores": "nothing"}), "output 'scores' cannot update 'nothing' in place")
    for listed in ("buffers", "weights"):
        renamed = {f"{name}'": item for name, item in plan[listed].items()}
        refused(changed_plan(body, **{listed: renamed}), "not listed under their names")
    call = plan["calls"][0]
    refused(changed_plan(body, calls=[{**call, "outputs": call["inputs"][:1]}]), "or to one that is read-only")


def test_memory_of_another_dtype_than_what_fills_it_is_refused(body: dict[str, Any]) -> None:
    """A view is held against its buffer, so the buffer must be what the run puts there; constants are cast to it."""
    for kind in ("input", "weight"):
        name = next(name for name, buffer in body["plan"]["buffers"].items() if buffer["kind"] == kind)
        other = with_value(body, ("plan", "buffers", name, "dtype"), "bool")
        refused(sealed(other), "inputs, weights and constants do not match its buffers")


def test_a_weight_recipe_that_cannot_be_evaluated_is_refused(body: dict[str, Any]) -> None:
    recipe = ("plan", "weights", "p_table", "recipe")
    place = r"plan.weights\['p_table'\].recipe is no WeightTransformRecipe: "
    refused(sealed(with_value(body, (*recipe, "op"), "pickle")), f"{place}unknown weight transform 'pickle'")
    refused(
        sealed(with_value(body, (*recipe, "params"), {})), f"{place}a weight recipe of op 'key' does not name its key"
    )
    refused(
        sealed(with_value(body, (*recipe, "params", "key"), "no")), "'p_table' reads a key whose shape is not known"
    )


# calls against the declarations of their kernels


def first_call(body: dict[str, Any], kernel: str) -> tuple[str | int, ...]:
    """The place of the first call of a kernel in a program's body."""
    index = next(i for i, call in enumerate(body["plan"]["calls"]) if call["kernel"] == kernel)
    return "plan", "calls", index


@pytest.mark.parametrize(
    ("kernel", "place", "value", "message"),
    [
        ("max_pool2d_kernel", ("params", "stride"), [10**8, 10**8], "contradict each other"),
        ("max_pool2d_kernel", ("params", "stride"), [0, 0], "contradict each other"),
        ("max_pool2d_kernel", ("params", "window"), [2], "parameter 'window' is [2], which is no '2I'"),
        ("max_pool2d_kernel", ("params", "dilation"), [2**31, 1], "parameter 'dilation' is"),
        ("max_pool2d_kernel", ("params", "ceil_mode"), 2, "parameter 'ceil_mode' is 2, which is no '?'"),
        ("conv2d_kernel", ("params", "groups"), 0, "contradict each other"),
        ("conv2d_kernel", ("params", "padding"), [1, 0, 1, 0], "contradict each other"),
        ("conv2d_kernel", ("params", "padding"), [-1, 1, 0, 0], "contradict each other"),
        ("conv2d_kernel", ("params", "activation"), "explode", "parameter 'activation' is 'explode'"),
        ("conv2d_kernel", ("params", "has_bias"), 0, "it has 3 inputs and 1 outputs"),
        ("conv2d_kernel", ("params",), {}, "it lacks parameter"),
        ("softmax_kernel", ("params", "scale"), "1", "parameter 'scale' is '1', which is no 'f'"),
        ("softmax_kernel", ("params", "power"), 1, "parameter 'power' is 1, which it does not take"),
        ("matmul_vec_kernel", ("params", "k"), 37, "'x' has shape [1, 36], not [1, k]"),
        ("mul_scalar_kernel", ("params", "scalars"), [None, None], "are not its operands"),
        ("mul_scalar_kernel", ("params", "scalars"), [None, "3"], "are not all numbers"),
        ("mul_scalar_kernel", ("params",), {}, "not scalars"),
        ("index_copy_kernel", ("params", "dim"), 1, "contradict each other"),
        ("index_copy_kernel", ("params", "dim"), 2**40, "parameter 'dim' is"),
        ("conv2d_kernel", ("kernel",), "format_disk_kernel", "no kernel of that name is declared"),
    ],
)
def test_a_call_that_does_not_fit_its_kernel_is_refused(
    body: dict[str, Any], kernel: str, place: tuple[str, ...], value: Any, message: str
) -> None:
    refused(sealed(with_value(body, (*first_call(body, kernel), *place), value)), re.escape(message))


def test_an_index_is_taken_for_checked_only_where_its_bounds_say_so(body: dict[str, Any]) -> None:
    inputs = body["plan"]["inputs"]
    for name in ("ids", "at"):
        index = next(i for i, spec in enumerate(inputs) if spec["name"] == name)
        for bounds in (None, [0, 9], [-1, 3], [3, 2]):
            changed = with_value(body, ("plan", "inputs", index, "bounds"), bounds)
            refused(sealed(changed), f"takes '{name}' for a checked index, which it is not")


def test_the_prologue_reads_and_writes_nothing_but_constants(body: dict[str, Any]) -> None:
    calls, problem = body["plan"]["calls"], "makes a constant of what changes from run to run"
    refused(changed_plan(body, prologue=calls[:1]), problem)
    kept = with_value(body, ("plan", "buffers", calls[0]["outputs"][0]["buffer"], "kind"), "persistent")
    refused(sealed(kept), problem)
    refused(sealed({**kept, "plan": {**kept["plan"], "prologue": calls[:1], "calls": calls[1:]}}), problem)


def test_an_output_whose_elements_share_memory_is_refused(body: dict[str, Any]) -> None:
    place = (*first_call(body, "softmax_kernel"), "outputs", 0, "strides")
    refused(sealed(with_value(body, place, [0, 0])), "writes several elements to one place")


def test_an_input_that_repeats_itself_beyond_measure_is_refused(body: dict[str, Any]) -> None:
    """Strides of 0 cost no memory, so no bound of a buffer limits how long a kernel would read them."""
    call = body["plan"]["calls"][first_call(body, "softmax_kernel")[-1]]
    place = (*first_call(body, "softmax_kernel"), "inputs", 0)
    endless = {**call["inputs"][0], "shape": [2**40, 6], "strides": [0, 1]}
    refused(sealed(with_value(body, place, endless)), "repeats its input beyond all that the program declares")


# saving


def temporaries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "net.npubin")


@pytest.mark.parametrize("call", ["fsync", "write", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "net.npubin"
    path.write_bytes(b"old")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFile:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *error: Any) -> None:
            os.close(self.handle)

        write = full

    if call == "write":
        monkeypatch.setattr(os, "fdopen", lambda handle, mode: FullFile(handle))
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.raises(InputError, match=r"cannot write '.*net\.npubin': No space left on device"):
        program.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and temporaries(tmp_path) == []
    program.save(path)
    assert CompiledProgram.load(path).name == "net" and temporaries(tmp_path) == []


def test_a_real_limit_on_file_size_leaves_the_old_file_and_nothing_else(
    program: CompiledProgram, tmp_path: Path
) -> None:
    source, path = tmp_path / "source", tmp_path / "net.npubin"
    program.save(source)
    path.write_bytes(b"old")
    script = (
        "import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from npu_compiler import CompiledProgram, InputError\n"
        "program = CompiledProgram.load(sys.argv[1])\n"
        "try: program.save(sys.argv[2])\n"
        "except InputError as error: print(error); sys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.startswith(f"cannot write '{path}': File too large")
    assert path.read_bytes() == b"old" and temporaries(tmp_path) == ["source"]


def test_a_program_cannot_be_saved_where_there_is_no_folder(program: CompiledProgram, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write '.*model\.npubin': No such file or directory"):
        program.save(tmp_path / "missing" / "model.npubin")
    (tmp_path / "folder.npubin").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        program.save(tmp_path / "folder.npubin")
    assert temporaries(tmp_path) == ["folder.npubin"]


def test_a_program_whose_only_intermediate_value_is_empty_runs() -> None:
    g = IRBuilder()
    empty = g("aten.slice.Tensor", g("aten.neg.default", g.input("x", 2, 3)), 1, 3, 3)
    g.output(g("aten.cat.default", [g("aten.abs.default", empty), g.input("y", 2, 3)], 1, name="z"))
    program = compile(g.ir())
    ones = np.ones((2, 3), np.float32)
    result = Executor(CompiledProgram.from_bytes(program.to_bytes()), CPUBackend()).run({"x": ones, "y": ones})
    assert np.array_equal(result["z"].to_numpy(), ones)


def test_a_declaration_prints_the_text_that_declares_it() -> None:
    for kernel in (*KERNELS.values(), *ELEMENTWISE_KERNELS.values()):
        inputs, outputs = (" ".join(map(str, listed)) for listed in (kernel.inputs, kernel.outputs))
        assert parse_operands(f"{inputs} -> {outputs}") == (kernel.inputs, kernel.outputs)
    assert str(KERNELS["embedding_kernel"]) == (
        "embedding_kernel: table[rows,.width] ids:i[*s] -> out[*s,width], rows='I', width='I', checked='?'"
    )
    assert str(ELEMENTWISE_KERNELS["add_scalar_kernel"]) == (
        "add_scalar_kernel: a?[.*s] b?[.*s] c?[.*s] -> out[.*s], scalars, a + alpha * b"
    )
