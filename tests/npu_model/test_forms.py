"""Weights with N:M sparsity, and weights whose stored bytes a real encoder counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder
from on_chips import linear_layers
from quantized_networks import Network as QuantizedNetwork

from npu_compiler import CompileOptions, InputError
from npu_compiler import compile as compile_ir
from npu_compiler.errors import DeviceError, ProgramFormatError
from npu_model import Chip, NPUBackend, NPUTarget, Result, forms_of, load_chip, parse_chip, simulate
from npu_model.analysis.simulation import lowered
from npu_model.chip import Dataflow, PackedWeights, Sparsity
from npu_model.chip.description import CODECS, Cores, Network
from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import disassemble
from npu_model.isa.encoding import decode as decode_program
from npu_model.isa.encoding import encode as encode_program
from npu_model.isa.instructions import Multiply, instructions
from npu_model.isa.verifier import verify
from npu_model.lowering.forms import Form, decode, encode, pack, unpack
from npu_model.machine.machine import Machine
from npu_model.machine.memory import MachineError, Memory
from npu_runtime import CPUBackend, Executor, load_weights

OPTIONS = CompileOptions(compute_dtype="float16")
LAWS = settings(max_examples=8, deadline=None)


def sparse_chip(skips: bool = True, patterns: tuple[str, ...] = ("2:4",), **changes: Any) -> Chip:
    """`edge` with a small scratchpad, whose weights may have N:M sparsity."""
    chip = load_chip("edge")
    sparsity = Sparsity(patterns, 4096, 4, skips)
    sram = dataclasses.replace(chip.sram, size=64 << 10)
    return dataclasses.replace(chip, sram=sram, sparsity=sparsity, **changes)


def pruned(array: np.ndarray, kept: int, of: int) -> np.ndarray:
    """A weight without all but the `kept` greatest of each `of` elements along dimension 1; some zeros are -0.0."""
    groups = np.moveaxis(array, 1, -1)
    groups = groups.reshape(-1, of)
    mask = np.argsort(np.argsort(np.abs(groups), axis=1), axis=1) >= of - kept
    moved = np.moveaxis(array, 1, -1).shape
    return np.ascontiguousarray(np.moveaxis((groups * mask).reshape(moved), -1, 1))


def images(channels: int, width: int, size: int, groups: int = 1) -> dict[str, Any]:
    """Two convolutions."""
    g = IRBuilder("images")
    y = g.input("x", 1, channels, size, size)
    for layer, (out, c) in enumerate(((width, channels), (channels, width))):
        w = g.weight(f"w{layer}", out, c // groups, 3, 3)
        y = g("aten.convolution.default", y, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    g.output(y)
    return g.ir()


def state_of(ir: dict[str, Any], kept: int, of: int) -> dict[str, np.ndarray]:
    """Random weights that have a pattern where their sizes allow it."""
    rng = np.random.default_rng(0)
    program = compile_ir(ir, options=OPTIONS)
    shapes = {k: shape for spec in program.weight_specs.values() for k, shape in spec.source_shapes.items()}
    state = {key: rng.standard_normal(shape, np.float32) / 8 for key, shape in shapes.items()}
    return {key: pruned(w, kept, of) if w.shape[1] % of == 0 else w for key, w in state.items()}


def results(ir: dict[str, Any], state: dict[str, np.ndarray], chip: Chip) -> tuple[np.ndarray, np.ndarray, Result]:
    """Outputs of a checked run on a chip, with its weights' forms, and on the CPU; and the chip's simulation."""
    plain, cpu = compile_ir(ir, options=OPTIONS), CPUBackend(native=False, pytorch=False)
    loaded = load_weights(state, plain, cpu)
    forms = forms_of(plain, chip, loaded)
    device = NPUBackend(chip, checked=True, forms=forms)
    program = compile_ir(ir, device.target, OPTIONS)
    (spec,) = program.input_specs
    x = {"x": np.random.default_rng(1).standard_normal(spec.shape, np.float32)}
    (own,) = Executor(program, device).run(x, load_weights(state, program, device)).values()
    (other,) = Executor(plain, cpu).run(x, loaded).values()
    result = simulate(plain, chip, forms=forms)
    assert device.result(program).to_dict() == result.to_dict()
    return own.to_numpy(), other.to_numpy(), result


graphs = st.one_of(
    st.builds(linear_layers, st.integers(1, 20), st.integers(1, 90), st.integers(1, 2)),
    st.builds(lambda g, c, w, size: images(g * c, g * w, size, g), st.sampled_from((1, 2)), st.integers(1, 20),
              st.integers(1, 20), st.integers(3, 9)),
)  # fmt: skip


@LAWS
@given(graphs, st.sampled_from(((2, 4), (1, 4), (3, 8), (1, 2), (1, 16))), st.booleans(), st.integers(1, 3))
def test_sparse_weights_compute_what_the_cpu_computes(
    ir: dict[str, Any], pattern: tuple[int, int], skips: bool, cores: int
) -> None:
    own = None if cores == 1 else Cores(count=cores, network=Network(50.0))
    kept, of = pattern
    chip = sparse_chip(skips, (f"{kept}:{of}",), cores=own)
    on_chip, on_cpu, result = results(ir, state_of(ir, kept, of), chip)
    np.testing.assert_allclose(on_chip.astype(np.float32), on_cpu.astype(np.float32), rtol=4e-3, atol=4e-3)
    assert result.cycles >= result.roofline_cycles * (1 - 1e-9) and result.dram_bytes >= result.compulsory_bytes


@LAWS
@given(st.integers(1, 40), st.integers(1, 16).flatmap(lambda of: st.tuples(st.integers(1, of), st.just(of))))
def test_what_is_packed_comes_back(count: int, pattern: tuple[int, int]) -> None:
    kept, of = pattern
    groups = pruned(np.random.default_rng(0).integers(1, 99, (count, of)), kept, of)
    values, positions = pack(groups, kept)
    assert values.shape == positions.shape == (count, kept)
    np.testing.assert_array_equal(unpack(values, positions, of), groups)
    if kept < of:
        with pytest.raises(ValueError, match="too many"):
            pack(groups + 1, kept)


@LAWS
@given(st.sampled_from(CODECS), st.sampled_from((1, 2, 4)), st.integers(0, 70), st.floats(0, 1))
def test_what_a_codec_encodes_comes_back(codec: str, item: int, count: int, zeros: float) -> None:
    rng = np.random.default_rng(0)
    data = (rng.integers(0, 256, (count, item)) * (rng.random((count, 1)) >= zeros)).astype(np.uint8).reshape(-1)
    np.testing.assert_array_equal(decode(encode(data, codec, item), codec, item, data.size), data)


@pytest.mark.parametrize("is_pruned", [False, True])
def test_an_ethos_u85_skips_the_zeros_of_codes_and_compresses_other_weights(is_pruned: bool) -> None:
    chip, rng, net = load_chip("ethos-u85-2048"), np.random.default_rng(0), QuantizedNetwork()
    codes = rng.integers(-127, 128, (128, 64, 3, 3)).astype(np.int8)
    codes = pruned(codes, 2, 4) if is_pruned else codes // 32
    x = net.rounded(net.g.input("x", 1, 64, 16, 16), 0.05, -3, "int8")
    w = net.weight("w", codes, rng.uniform(0.001, 0.01, 128))
    net.state["b"] = rng.standard_normal(128, np.float32)
    y = net.g("aten.conv2d.default", x, w, net.g.weight("b", 128), [1, 1], [1, 1], [1, 1], 1)
    net.g.output(net.rounded(y, 0.03, -3, "int8"))
    options = CompileOptions(compute_dtype="float32")
    plain, cpu = compile_ir(net.g.ir(), options=options), CPUBackend(native=False, pytorch=False)
    loaded = load_weights(net.state, plain, cpu)
    forms = forms_of(plain, chip, loaded)
    device = NPUBackend(chip, checked=True, forms=forms)
    program = compile_ir(net.g.ir(), device.target, options)
    inputs = {"x": rng.standard_normal((1, 64, 16, 16), np.float32)}
    (own,) = Executor(program, device).run(inputs, load_weights(net.state, program, device)).values()
    (other,) = Executor(plain, cpu).run(inputs, loaded).values()
    np.testing.assert_array_equal(own.to_numpy(), other.to_numpy())
    (form,) = (form for name, form in forms.items() if plain.plan.buffers[name].size_bytes == codes.nbytes)
    stored = codes.nbytes // 2 + codes.nbytes // 2 * 2 // 8 if is_pruned else form.stored
    assert form == Form(stored, "2:4" if is_pruned else "") and form.stored < 0.65 * codes.nbytes
    run = device.timing(program)
    assert sum(counts.macs.get("int8", 0) for counts in run.sections) == codes.size * 16 * 16 // (1 + is_pruned)
    dense = codes.size * 16 * 16 / chip.peak_macs("int8")
    busy = sum(counts.busy.get("matrix", 0) for counts in run.sections)
    assert dense / (1 + is_pruned) <= busy <= 1.1 * dense / (1 + is_pruned)


def test_stored_bytes_time_and_energy_of_sparse_weights() -> None:
    ir = linear_layers(64, 256, 2)
    dense, stored, skipped = (
        results(ir, state_of(ir, 2, 4), chip)[2]
        for chip in (dataclasses.replace(sparse_chip(), sparsity=None), sparse_chip(skips=False), sparse_chip())
    )
    weight = 256 * 256 * 2
    assert dense.dram_bytes - stored.dram_bytes == pytest.approx(2 * weight * (1 - 0.5 - 4 / 32), rel=0.02)
    assert stored.macs == dense.macs == 2 * skipped.macs
    assert skipped.energy.macs == pytest.approx(dense.energy.macs / 2)
    assert skipped.busy["matrix"] <= 0.6 * dense.busy["matrix"]
    assert skipped.cycles < stored.cycles < dense.cycles
    assert [own.pattern for own in skipped.weights] == ["2:4", "2:4"]


def test_weights_without_the_pattern_stay_dense_and_the_report_says_so() -> None:
    ir = linear_layers(8, 64, 2)
    state = state_of(ir, 2, 4)
    state["w1"] = np.ones((64, 64), np.float32)
    _, _, result = results(ir, state, sparse_chip())
    assert {own.name: (own.pattern, own.stored) for own in result.weights} == {
        "p_w0": ("2:4", 64 * 64 + 64 * 64 // 2 * 4 // 8), "p_w1": ("", 0)
    }  # fmt: skip
    assert result.to_dict()["weights"][1] == {"name": "p_w1", "bytes": 8192, "stored_bytes": 8192, "form": "as it is"}


def test_a_program_for_sparse_weights_refuses_others() -> None:
    ir = linear_layers(8, 64, 1)
    chip = sparse_chip()
    plain, cpu = compile_ir(ir, options=OPTIONS), CPUBackend(native=False, pytorch=False)
    device = NPUBackend(chip, forms=forms_of(plain, chip, load_weights(state_of(ir, 2, 4), plain, cpu)))
    program = compile_ir(ir, device.target, OPTIONS)
    weights = load_weights({"w0": np.ones((64, 64), np.float32)}, program, device)
    with pytest.raises(DeviceError, match="weight 'p_w0' has more than 2 of 4 elements that are not zero"):
        Executor(program, device).run({"x": np.ones((8, 64), np.float16)}, weights)


@pytest.mark.parametrize("codec", CODECS)
def test_the_codec_counts_the_bytes_of_the_weights_at_hand(codec: str) -> None:
    ir = linear_layers(8, 128, 2)
    state = {key: w + 0.0 for key, w in state_of(ir, 1, 4).items()}  # without -0.0
    state["w1"] = np.random.default_rng(1).standard_normal((128, 128), np.float32)
    chip = dataclasses.replace(sparse_chip(), sparsity=None, weights=PackedWeights(0.5, 4096, codec))
    *_, result = results(ir, state, chip)
    stored = {own.name: own.stored for own in result.weights}
    for name, key in (("p_w0", "w0"), ("p_w1", "w1")):
        data = state[key].astype(np.float16).view(np.uint8).reshape(-1)
        assert stored[name] == len(encode(data, codec, 2))
    assert stored["p_w0"] < 0.5 * 128 * 128 * 2 < stored["p_w1"]
    shapes_alone = simulate(compile_ir(ir, options=OPTIONS), chip)
    assert [own.stored for own in shapes_alone.weights] == [128 * 128, 128 * 128]


def test_a_run_counts_its_own_weights() -> None:
    ir = linear_layers(8, 128, 1)
    chip = dataclasses.replace(sparse_chip(), sparsity=None, weights=PackedWeights(0.9, 4096, "bitmask"))
    device = NPUBackend(chip)
    program = compile_ir(ir, NPUTarget(chip), OPTIONS)
    stated = device.result(program)
    weights = load_weights(state_of(ir, 1, 4), program, device)
    executor = Executor(program, device)
    executor.run({"x": np.ones((8, 128), np.float16)}, weights)
    counted = device.result(program)
    assert counted.weights[0].stored < stated.weights[0].stored
    assert counted.kept_weight_bytes < stated.kept_weight_bytes


def sparse_program(chip: Chip) -> Any:
    ir = linear_layers(8, 64, 1)
    plain = compile_ir(ir, options=OPTIONS)
    forms = forms_of(plain, chip, load_weights(state_of(ir, 2, 4), plain, CPUBackend(native=False, pytorch=False)))
    return lowered(plain, chip, forms)


def test_a_sparse_program_is_read_back_from_text_and_bytes() -> None:
    program = sparse_program(sparse_chip())
    text = disassemble(program)
    assert "stored 5120 sparse 2:4" in text and text.count("sparse 2:4") > 1
    assert assemble(text) == program == decode_program(encode_program(program))
    verify(program, sparse_chip())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stored 5120 sparse 2:4", "stored 5120 sparse 3:4", "has the pattern '3:4', which the chip lacks"),
        ("stored 5120 sparse 2:4", "stored 5120", "is compressed, but the chip has no decoder for that"),
        ("8192 stored 5120 sparse 2:4", "8192", "has no form of its own that could be decoded"),
        ("packed p_w0", "p_w0", "has to be decoded on its way"),
        ("] sparse 2:4", "] sparse 1:4", "the matrix engine skips no zeros of 1:4"),
        ("k 64] sparse", "k 62] sparse", "sums over parts of groups"),
    ],
)
def test_wrong_forms_are_refused(old: str, new: str, message: str) -> None:
    text = disassemble(sparse_program(sparse_chip()))
    assert old in text
    with pytest.raises(ProgramFormatError, match=message):
        verify(assemble(text.replace(old, new)), sparse_chip())


def test_the_machine_finds_elements_that_would_be_skipped() -> None:
    chip = sparse_chip()
    program = sparse_program(chip)
    memory = {b.name: Memory(b.name, np.full(b.size, 1, np.uint8), False) for b in program.buffers}
    machine = Machine(chip, program, memory, checked=True)
    machine.preload()
    with pytest.raises(MachineError, match="of 4 elements more than 2 are not zero"):
        machine.run()


@LAWS
@given(st.sampled_from(Dataflow), st.integers(1, 40), st.sampled_from((8, 24, 64)), st.sampled_from(((1, 4), (2, 4))))
def test_sparser_weights_are_not_slower(flow: Dataflow, rows: int, width: int, pattern: tuple[int, int]) -> None:
    ir = linear_layers(rows, width, 2)
    chip = sparse_chip(patterns=("1:4", "2:4"))
    assert chip.matrix is not None
    chip = dataclasses.replace(chip, matrix=dataclasses.replace(chip.matrix, dataflow=flow))
    kept, of = pattern
    sparse, dense = (results(ir, state_of(ir, n, of), chip)[2] for n in (kept, of))
    assert sparse.dram_bytes <= dense.dram_bytes and sparse.macs * of == dense.macs * kept
    assert sparse.cycles <= 1.05 * dense.cycles


def test_products_that_skip_name_their_pattern() -> None:
    program = sparse_program(sparse_chip())
    own = [i for s in program.sections for i, _ in instructions(s.body) if isinstance(i, Multiply)]
    assert own and all(i.sparsity == (2, 4) for i in own)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('patterns = ["4:2"]\ndecoder_bytes_per_cycle = 8', "'sparsity.patterns' has '4:2'"),
        ('patterns = []\ndecoder_bytes_per_cycle = 8', "'sparsity.patterns' has"),
        ('patterns = "2:4"\ndecoder_bytes_per_cycle = 8', "'sparsity.patterns' has '2:4'; write a list"),
        ('patterns = ["2:4", "4:16"]\ndecoder_bytes_per_cycle = 8', "metadata_bits' is 2, too few to tell 16"),
        ('patterns = ["2:4"]', "lacks the key 'sparsity.decoder_bytes_per_cycle'"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused(table: str, message: str) -> None:
    text = '[chip]\nname = "x"\nclock_ghz = 1.0\n[vector]\nlanes = 1\nrates = { float32 = 1.0 }\n'
    text += "[sram]\nsize = 4096\nbanks = 1\nports = 1\nbytes_per_cycle = 4\n[dma]\nchannels = 1\n"
    text += f"[dram]\nbandwidth_gb_s = 1\nlatency_ns = 1\n[sparsity]\n{table}\n"
    with pytest.raises(InputError, match=message):
        parse_chip(text, "x.toml")
