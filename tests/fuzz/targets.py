"""Fuzz targets: for each kind of file its corpus, its mutations, and the outcomes that reading it may have."""

from __future__ import annotations

import json
import math
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import file_formats
from plain_data import change, change_bytes

from npu_compiler import (
    CompiledProgram,
    CompileOptions,
    ConstraintError,
    DeviceError,
    InputError,
    IRError,
    NPUError,
    ProgramFormatError,
    QuantizedFormat,
    WeightError,
    compile,
    partition,
    read_ir,
)

CORPUS = Path(__file__).parent / "corpus"
# How often the bytes of a file are changed instead of what they mean; then it is mostly its checksum that is tested.
_BYTES = 0.1

Check = Callable[[bytes], str]
Form = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        prepare: Function of a folder for files; returns one that reads a content and returns the outcome in a word.
        refusal: The error that a bad file has to cause. Any other is a finding.
        forms: Forms in which a file can be changed: functions to plain data and back.
        share: Approximate share of a run over all kinds of files, in percent; higher where a file is read faster.
    """

    prepare: Callable[[Path], Check]
    refusal: type[NPUError]
    forms: tuple[Form, ...]
    share: int = 5

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """The file with a few changes; mostly of what it says, with right checksums and lengths."""
        if rng.random() >= _BYTES:
            try:
                opened, seal = rng.choice(self.forms)
                return seal(change(opened(data), rng))
            except Exception:  # what it says can be changed so that no file can say it
                pass
        return change_bytes(data, rng)


def corpus(name: str) -> list[bytes]:
    """The files that the fuzzers of a target start from."""
    if name == "cache":
        return _cached_files()
    if name == "module":
        return _saved_modules()
    if name == "tiles":
        return _tile_programs()
    if name == "chip":
        return [resource.read_bytes() for resource in _chips()]
    if name == "sweep":
        return [
            b"sram=256K..8M,arrays=1..8",
            b"banks=1..4,rows=8..32,columns=16",
            b"clock=0.5..2,latency=1..100,lanes=8",
        ]
    if name == "trace":
        return [b"arrival_seconds,prompt_tokens,new_tokens\n0,100,20\n0.25,30,5\n", b"3,1,1\n1e-3,128,40\n1.5,7,300\n"]
    if name == "generation":
        return [json.dumps(settings).encode() for settings in _GENERATION]
    if name == "onnx":
        import onnx

        return [
            onnx.parser.parse_model(path.read_text()).SerializeToString() for path in sorted((CORPUS / name).iterdir())
        ]
    if name in ("program", "run"):
        files = sorted((CORPUS / "ir").iterdir())
        formats = {"table": QuantizedFormat("int8"), "k": QuantizedFormat("int4", 4, "float16", "minimum")}
        quantized = compile(CORPUS / "ir" / "language.json", options=CompileOptions(quantization=formats))
        return [*(compile(path).to_bytes() for path in files), quantized.to_bytes()]
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def _read_program(folder: Path) -> Check:
    """Reads a program, describes it, saves it again and simulates it."""
    from npu_model import load_chip, simulate

    chip = load_chip("edge")

    def check(data: bytes) -> str:
        program = CompiledProgram.from_bytes(data)
        program.describe()
        again = CompiledProgram.from_bytes(program.to_bytes())
        assert again.to_bytes() == program.to_bytes(), "a program that loads is not saved as it is"
        try:
            simulate(program, chip)
        except (ConstraintError, InputError):
            return "loaded"
        return "simulated"

    return check


_SLACK = 96 * 2**20  # bytes that a run may take beside what depends on the program: modules, threads, work space
_FACTOR = 4


def _run_program(folder: Path) -> Check:
    """Reads a program and, if it loads, runs it."""
    run = _runner()
    return lambda data: run(CompiledProgram.from_bytes(data))


def _runner() -> Callable[[CompiledProgram], str]:
    """Return a function that runs a program on the CPU with weights and inputs of zeros.

    All that may take at most `_FACTOR` times the memory that the program declares, and `_SLACK`.
    """
    import numpy as np
    import torch

    from npu_compiler.graph.dtypes import numpy_dtype
    from npu_runtime import CPUBackend, Executor

    backend = CPUBackend(tune=False)
    torch.set_num_threads(1)  # its threads may not be started in limited memory: OpenMP then ends the process

    def zeros(spec: Any) -> Any:
        return backend.allocate_buffer(np.zeros(spec.shape, numpy_dtype(spec.dtype)), spec=spec)

    def run(program: CompiledProgram) -> None:
        executor = Executor(program, backend)
        inputs = {spec.name: zeros(spec) for spec in program.input_specs}
        outputs = executor.run(inputs, {name: zeros(weight.spec) for name, weight in program.weight_specs.items()})
        for spec in program.output_specs:
            outputs[spec.name].to_numpy(spec)

    def check(program: CompiledProgram) -> str:
        plan = program.plan
        declared = plan.arena_bytes + sum(buffer.size_bytes for buffer in plan.buffers.values())
        if declared > _LARGEST_RUN:
            return "loaded, but declares too much memory for this test"
        with _address_space(_FACTOR * declared + _SLACK):
            try:
                run(program)
            except DeviceError as error:
                assert "out of memory" not in str(error), f"it declares {declared} bytes: {error}"
                raise
        return "ran"

    return check


_LARGEST_RUN = 2**28


@contextmanager
def _address_space(extra: int) -> Iterator[None]:
    """Limit what the process may map meanwhile to so many bytes more than it has mapped."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + extra if before[1] == resource.RLIM_INFINITY else min(used + extra, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _read_graph(folder: Path) -> Check:
    """Reads a graph, divides it, and compiles it; saves, loads and runs the program."""
    path, run = folder / "graph.json", _runner()

    def check(data: bytes) -> str:
        path.write_bytes(data)
        graph = read_ir(path)
        parts = len(partition(graph).partitions)
        try:
            program = compile(graph)
        except ConstraintError:
            return "partitioned"
        return run(CompiledProgram.from_bytes(program.to_bytes())) if parts else "compiled to nothing"

    return check


def _read_onnx(folder: Path) -> Check:
    """Reads an ONNX file and compiles its graph."""
    import logging

    from npu_sim.onnx.sources import ir_of_file

    path = folder / "model.onnx"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        logging.disable(logging.CRITICAL)
        try:
            graph = read_ir(ir_of_file(path))
        finally:
            logging.disable(logging.NOTSET)
        try:
            compile(graph)
        except ConstraintError:
            return "read"
        return "compiled"

    return check


def _read_language_model(folder: Path) -> Check:
    from npu_sim.llm import load_checkpoint

    path = folder / "model.gguf"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        state = load_checkpoint(path).state
        for name in state:
            state[name]
        return "loaded"

    return check


def _read_weights(folder: Path) -> Check:
    from npu_runtime.weight_loader import MappedCheckpoint

    def check(data: bytes) -> str:
        path = folder / "weights.safetensors"
        path.unlink(missing_ok=True)  # the one before may still be mapped
        path.write_bytes(data)
        checkpoint = MappedCheckpoint(path)
        for name in checkpoint:
            checkpoint[name].sum()
        return "loaded"

    return check


def _tile_programs() -> list[bytes]:
    from npu_model.isa.assembler import assemble
    from npu_model.isa.encoding import encode

    return [encode(assemble(path.read_text())) for path in sorted((CORPUS / "tiles").iterdir())]


_MOST_TIMED = 2**15  # instructions
_MOST_CYCLES = 2**21  # of a run that computes


def _run_tiles(folder: Path) -> Check:
    """Reads a tile program, verifies it, writes its text and reads that, times it, and runs it on memory of zeros."""
    import numpy as np

    from npu_model.chip import load_chip
    from npu_model.isa.assembler import assemble
    from npu_model.isa.assembly import disassemble
    from npu_model.isa.encoding import decode, encode
    from npu_model.isa.instructions import instructions
    from npu_model.isa.verifier import verify
    from npu_model.machine.machine import Machine
    from npu_model.machine.memory import Memory

    chip = load_chip("edge")

    def check(data: bytes) -> str:
        program = decode(data)
        verify(program, chip)
        assert encode(assemble(disassemble(program))) == encode(program), "its text is that of another program"
        bodies = [section.body for section in (*program.preload, *program.sections)]
        if sum(math.prod(counts) for body in bodies for _, counts in instructions(body)) > _MOST_TIMED:
            return "verified"
        if Machine(chip, program).run().cycles > _MOST_CYCLES or sum(b.size for b in program.buffers) > _LARGEST_RUN:
            return "timed"
        memory = {b.name: Memory(b.name, np.zeros(b.size, np.uint8), False) for b in program.buffers}
        machine = Machine(chip, program, memory, checked=True)
        try:
            machine.preload()
            machine.run()
        except IndexError as error:
            assert "is out of range for" in str(error), "no index of the program's own"
            return "ran to a wrong index"
        return "ran"

    return check


def _open_tiles(data: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(data)


def _seal_tiles(content: Any) -> bytes:
    import msgpack

    return bytes(msgpack.packb(content, unicode_errors="surrogatepass"))


def _chips() -> list[Any]:
    from importlib.resources import files

    from npu_model import shipped_chips

    shipped = [files("npu_model.chip") / "chips" / f"{name}.toml" for name in shipped_chips()]
    return [*shipped, *sorted((CORPUS / "chips").glob("*.toml"))]


def _program_to_simulate() -> CompiledProgram:
    return compile(CORPUS / "ir" / "vision.json")


def _read_chip(folder: Path) -> Check:
    """Reads a chip and simulates a program on it."""
    from npu_model import load_chip, simulate

    program, path = _program_to_simulate(), folder / "chip.toml"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        chip = load_chip(path)
        try:
            result = simulate(program, chip)
        except ConstraintError:
            return "loaded"
        assert 0 <= result.seconds < math.inf and 0 <= result.energy.total < math.inf, "no time or energy"
        return "simulated"

    return check


def _read_sweep(folder: Path) -> Check:
    """Reads a sweep and simulates a program on its first chip and its last."""
    from npu_model import load_chip
    from npu_model.analysis.sweep import as_csv, parse_sweep, sweep

    program, chip = _program_to_simulate(), load_chip("edge")

    def check(data: bytes) -> str:
        chips = parse_sweep(data.decode(errors="surrogateescape"), chip)
        as_csv(sweep(program, [chips[0], chips[-1]], workers=1))
        return "simulated"

    return check


class _EvenPrograms:
    def prepare(self, shapes: object) -> None:
        pass

    def cost(self, shape: object) -> Any:
        from npu_sim.llm.simulated import ProgramCost

        return ProgramCost(1e-5, 1e-5, 1e-4, 1e-4)


def _read_trace(folder: Path) -> Check:
    """Reads a trace of requests and serves it; every request ends, and what it got adds up."""
    from npu_sim.llm.simulated import PoolSettings, StepPrices, read_requests, serve_requests

    pool, path = PoolSettings(128, max_batch=4), folder / "trace.csv"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        result = serve_requests(read_requests(path), StepPrices(_EvenPrograms(), 4, 512, 128), pool)
        for each in result.requests:
            room = pool.context_length + 1 - each.request.prompt_tokens
            assert each.tokens == min(each.request.new_tokens, room) and each.last >= each.first > each.request.arrival
        return "served"

    return check


_GENERATION: tuple[dict[str, Any], ...] = (
    {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"eos_token_id": 2, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "max_length": 20, "top_k": 50},
    {"eos_token_id": 2, "suppress_tokens": [4, 5], "begin_suppress_tokens": [3], "forced_bos_token_id": 1,
     "bad_words_ids": [[1, 2], [3]], "min_new_tokens": 2, "transformers_version": "4.50.0"},
)  # fmt: skip


def _read_generation(folder: Path) -> Check:
    """Reads a model folder without weights whose `generation_config.json` is the file."""
    from npu_sim.llm.model_folder import load_config

    os.environ["NPU_SIM_CACHE"] = str(folder / "cache")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 16,
              "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 2}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))

    def check(data: bytes) -> str:
        (folder / "generation_config.json").write_bytes(data)
        load_config(folder, "model", None)
        return "loaded"

    return check


_FACTS = {"sizes": [1, 2, 3], "name": "model", "nested": {"dtype": "float16", "ratio": 0.5, "none": None}}
_KINDS = {"facts": "*.json", "program": "*.npubin", "choices": "cpu-choices-*.json"}


def _use_cache(kind: str, folder: Path) -> Any:
    """Read a cache's entry in the folder, or write it if it is not there; return it."""
    os.environ["NPU_SIM_CACHE"] = str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "choices":
            from npu_runtime.cpu.tuning.table import Choice, ChoiceTable

            table = ChoiceTable({"processor": "test"}, folder)
            table.keep("call", Choice("kernel", {"kernel": 1.5, "other": 2.5}))
            return table.choices["call"]
        from npu_sim.cache import cached_facts, compile_cached

        if kind == "facts":
            return cached_facts("facts", "key", lambda: _FACTS)
        return compile_cached(file_formats.open_json((CORPUS / "ir" / "tensors.json").read_bytes())).to_bytes()


def _cached_files() -> list[bytes]:
    """A file of each kind of cache, behind the number of the kind."""
    from tempfile import TemporaryDirectory

    files = []
    for number, (kind, pattern) in enumerate(_KINDS.items()):
        with TemporaryDirectory() as folder:
            _use_cache(kind, Path(folder))
            (file,) = Path(folder).glob(pattern)
            files.append(bytes([number]) + file.read_bytes())
    return files


def _read_cache(folder: Path) -> Check:
    kinds = list(_KINDS.items())
    wanted, paths = {}, {}
    for kind, pattern in kinds:
        place = folder / kind
        place.mkdir()
        wanted[kind] = _use_cache(kind, place)
        (paths[kind],) = place.glob(pattern)

    def check(data: bytes) -> str:
        kind, _ = kinds[sum(data[:1]) % len(kinds)]
        paths[kind].write_bytes(data[1:])
        found = _use_cache(kind, paths[kind].parent)
        assert found == wanted[kind], f"the cache of {kind} returned what was never put into it"
        return kind

    return check


@cache
def _saved_modules() -> list[bytes]:
    """Modules of fixed sizes with a nested result, with a batch that may change, and with weights in few bits.

    Each is there also without its programs, so that its graph is compiled.
    """
    from tempfile import TemporaryDirectory

    import torch
    from torch import nn

    import npu_sim

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any, scale: float = 2.0, *, rest: Any) -> Any:
            return {"y": (self.layer(x) * scale, x), "z": [rest["a"] + 1, None]}

    batch = torch.export.Dim("batch", max=4)
    few = torch.export.Dim("few", min=2, max=4)
    x = torch.zeros(2, 4)

    class Joined(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            rows = torch.cat([x, 2 * x])
            return rows[y], torch.nn.functional.pad(x.reshape(-1), (0, 1)), x.mean(0)

    y = torch.tensor([0, 1])
    joined = npu_sim.compile(Joined().eval(), (x, y), device="cpu", dynamic_shapes=({0: few}, {}))
    fixed = npu_sim.compile(Nested().eval(), (x,), {"rest": {"a": x}}, device="cpu")
    changing = npu_sim.compile(nn.Linear(4, 2).eval(), (x,), device="cpu", dynamic_shapes=({0: batch},))
    files = []
    quantized = npu_sim.compile(nn.Linear(4, 2).eval(), (x,), device="cpu", quantization="int8")
    with TemporaryDirectory() as folder:
        for module in (fixed, changing, quantized, joined):
            module.save(Path(folder, "module.npumod"))
            files.append(Path(folder, "module.npumod").read_bytes())
            content = file_formats.open_module(files[-1])
            content["description"]["programs"] = []
            files.append(file_formats.seal_module(content))
    return files


def _load_module(folder: Path) -> Check:
    """Loads a module and calls it with zeros."""
    import numpy as np
    import torch

    from npu_compiler.graph.dtypes import numpy_dtype
    from npu_runtime import CPUBackend
    from npu_sim.module.saved import LoadedModule

    backend = CPUBackend(tune=False)
    torch.set_num_threads(1)
    path = folder / "module.npumod"

    def check(data: bytes) -> str:
        path.unlink(missing_ok=True)  # the one before may still be mapped
        path.write_bytes(data)
        module = LoadedModule(path, backend)
        specs = module.content.smallest_inputs()
        # NumPy makes no array without elements either if its other dimensions are too large.
        sizes = [math.prod(max(1, size) for size in spec.shape) for spec in specs]
        if any(len(spec.shape) > _MOST_DIMENSIONS for spec in specs) or max(sizes, default=0) > _LARGEST_INPUT:
            return "loaded, but declares too much memory for this test"
        zeros = module.laid_out({spec.name: np.zeros(spec.shape, numpy_dtype(spec.dtype)) for spec in specs})
        module.call_leaves([zeros[x.name] if x.name is not None else x.value for x in module.content.inputs])
        return "called"

    return check


_LARGEST_INPUT = 2**24  # elements
_MOST_DIMENSIONS = 32  # in NumPy 1


def _open_cached(data: bytes) -> Any:
    return [data[0], file_formats.open_json(data[1:])]


def _seal_cached(content: Any) -> bytes:
    kind, facts = content
    return bytes([kind % len(_KINDS)]) + file_formats.seal_json(facts)


_PROGRAM: tuple[Form, ...] = ((file_formats.open_program, file_formats.seal_program),)
_GRAPH: tuple[Form, ...] = (
    (file_formats.open_json, file_formats.seal_json),
    (file_formats.open_graph, file_formats.seal_graph),
)
_WEIGHTS: tuple[Form, ...] = ((file_formats.open_safetensors, file_formats.seal_safetensors),)
_MODULE: tuple[Form, ...] = (
    (file_formats.open_module, file_formats.seal_module),
    (file_formats.open_whole_module, file_formats.seal_whole_module),
)
TARGETS = {
    "program": Target(_read_program, ProgramFormatError, _PROGRAM, 15),
    "run": Target(_run_program, NPUError, _PROGRAM, 15),
    "ir": Target(_read_graph, NPUError, _GRAPH, 10),
    "gguf": Target(_read_language_model, NPUError, ((file_formats.open_gguf, file_formats.seal_gguf),), 10),
    "onnx": Target(_read_onnx, IRError, ((file_formats.open_onnx, file_formats.seal_onnx),), 3),
    "safetensors": Target(_read_weights, WeightError, _WEIGHTS, 20),
    "module": Target(_load_module, NPUError, _MODULE, 10),
    "tiles": Target(_run_tiles, NPUError, ((_open_tiles, _seal_tiles),), 12),
    "chip": Target(_read_chip, InputError, ((file_formats.open_chip, file_formats.seal_chip),), 3),
    "sweep": Target(_read_sweep, InputError, ((file_formats.open_sweep, file_formats.seal_sweep),), 2),
    "trace": Target(_read_trace, InputError, ((file_formats.open_trace, file_formats.seal_trace),), 8),
    "generation": Target(_read_generation, NPUError, ((file_formats.open_json, file_formats.seal_json),), 3),
    "cache": Target(_read_cache, NPUError, ((_open_cached, _seal_cached),)),
}
