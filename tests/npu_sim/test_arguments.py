"""Every wrong argument is refused before anything is loaded, and before anything is imported that is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ir_builder import IRBuilder
from PIL import Image
from safetensors.numpy import save_file

from npu_compiler import compile as compile_ir

ROOT = Path(__file__).parents[2]

# Run in a process of its own: slow imports fail, and so does all that loads a model or opens a device.
HARNESS = """
import json, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torch_ir", "transformers", "cupy", "gguf"}:
            raise ImportError(f"{name} was imported")

# What stands before the blocker would hide the packages that are not there to be found.
sys.meta_path.insert(0, Blocked())

import npu_compiler, npu_runtime, npu_sim.llm, npu_sim.vision, npu_sim.extract

def loaded(*args, **options):
    raise AssertionError("something was loaded")

for module, name in [
    (npu_compiler, "read_ir"), (npu_compiler.CompiledProgram, "load"), (npu_runtime, "Device"),
    (npu_runtime, "load_weights"), (npu_sim.llm, "load_checkpoint"), (npu_sim.llm, "LanguageModel"),
    (npu_sim.vision, "Classifier"), (npu_sim.vision, "load_image"), (npu_sim.extract, "load_model"),
]:
    setattr(module, name, loaded)

import functools, typer.testing
from typer.testing import CliRunner
from npu_sim.cli import app

typer.testing._get_command = functools.cache(typer.testing._get_command)  # as in conftest.py
results = []
for args, given in json.load(open("cases.json")):
    done = CliRunner().invoke(app, args, prog_name="npu-sim", input=bytes.fromhex(given) if given is not None else None)
    results.append([done.exit_code, done.stdout, done.stderr])
print(json.dumps(results))
"""

W = ["-w", "tiny.safetensors"]
DEVICE_COMMANDS = {
    "run": ["run", "tiny.npubin", *W],
    "profile": ["profile", "tiny.npubin", *W],
    "report": ["report", "tiny.npubin", "-o", "r.html", *W],
    "diff": ["diff", "tiny.npubin", "tiny.npubin", *W],
    "verify": ["verify", "tiny.json", *W],
    "generate": ["generate", "model", "-p", "Hi"],
    "serve": ["serve", "model"],
    "classify": ["classify", "red.png"],
    "embed": ["embed", "model"],
}
DEVICE_OPTIONS = [
    (["--device", "tpu"], "unknown device 'tpu'; choose one of"),
    (["--device", "cpu:1"], "there is only one 'cpu' device"),
    (["--device", "cuda:x"], "write a device number after the colon"),
    (["--device", "cuda", "--no-tune"], "--no-tune is for --device cpu only"),
    (["--device", "cuda", "--cpu-level", "PRESENT"], "--cpu-level is for --device cpu only"),
    (["--cpu-level", "x86-64-v9"], "unknown CPU level 'x86-64-v9'; choose one of"),
    (["--cpu-level", "ABSENT"], "this machine cannot run CPU level"),
]
DTYPE = (["--dtype", "int4"], "unknown compute dtype 'int4'; choose one of float16, bfloat16, float32")
SIMULATED_DTYPE = (["--dtype", "int4"], "unknown dtype 'int4'; choose one of float16, bfloat16, float32, int8")
PENALTY = "--repetition-penalty must be a finite number above 0, not"
SEED = (["--seed", "-1"], "Invalid value for '--seed'")
WEIGHTS = [
    (["-w", "absent.pt"], "no such weights: 'absent.pt'"),
    (["-w", "empty"], "no weights at 'empty': the folder has no .safetensors file"),
]
INPUTS = [
    (["-i", "x.npy"], "cannot parse input 'x.npy': write name=file.npy"),
    (["-i", "x=absent.npy"], "cannot read input 'absent.npy': No such file"),
    (["-i", "x=empty"], "cannot read input 'empty': Is a directory"),
    (["-i", "absent.npz"], "cannot read input 'absent.npz': No such file"),
]
OUTPUT = [
    (["-o", "no/such/file"], "cannot write 'no/such/file': No such file or directory"),
    (["-o", "tiny.json/file"], "cannot write 'tiny.json/file': Not a directory"),
    (["-o", "."], "cannot write '.': Is a directory"),
    (["-o", ""], "cannot write '.': Is a directory"),
    (["-o", "empty"], "cannot write 'empty': Is a directory"),
    (["-o", "/dev/null"], "cannot write '/dev/null': it is no regular file"),
]
TRACE = [(["--trace", *given], message) for (_, *given), message in OUTPUT]


def options(command: list[str], *cases: tuple[list[str], str]) -> list[tuple[list[str], str]]:
    return [([*command, *args], message) for args, message in cases]


WRONG = [
    # extract
    *options(["extract", "model.py:make"], *OUTPUT),
    *options(
        ["extract", "model.py:make", "-o", "out.json"],
        (["--weights", "no/such.safetensors"], "cannot write 'no/such.safetensors'"),
        (["--weights", "out.json"], "--output and --weights name the same file"),
        (["-i", "float32"], "cannot parse input 'float32': write its dtype and shape"),
        (["-i", "float3[2]"], "unknown dtype in input 'float3[2]'; choose one of"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--tokens", "8"], "--tokens is for a Hugging Face folder"),
        (["--task", "fill-mask"], "--task is for a Hugging Face folder"),
        (["--shape", "batch=4"], "--shape is for an ONNX file"),
    ),
    (["extract", "model.py:make", "-o", "model.py"], "cannot write 'model.py': it is one of the files to read"),
    (["extract", "absent.py:make", "-o", "a.json"], "no such file: 'absent.py'"),
    (["extract", "no_such_module:f", "-o", "a.json"], "no module named 'no_such_module'"),
    (["extract", "nowhere", "-o", "a.json"], "neither a folder nor of the form package.module:factory"),
    (["extract", "model", "-o", "a.json"], "needs --task: one of text-generation"),
    (["extract", "model", "-o", "a.json", "--task", "sing"], "unknown task 'sing'; choose one of text-generation"),
    (["extract", "empty", "-o", "a.json", "--task", "fill-mask"], "has no config.json"),
    # compile
    *options(["compile", "tiny.json"], *OUTPUT),
    *options(
        ["compile", "tiny.json", "-o", "out.npubin"],
        (["--shape", "batch=4"], "--shape is for an ONNX file"),
        DTYPE,
        (["--target", "tpu"], "unknown target 'tpu'; choose one of op_level"),
        (["--quantization", "int3"], "unknown quantization 'int3'; choose one of int4, int8, fp8"),
        (["--activations", "int8"], "--activations is for layers with quantized weights: give their --quantization"),
        (
            ["--quantization", "int8", "--activations", "int4"],
            "unknown format of activations 'int4'; choose one of int8",
        ),
        (["--disable-fusion", "magic"], "unknown fusion magic; known are integer_kernels, silu"),
        (["--full"], "--full is for --stages"),
        (["--phase-clocks"], "--phase-clocks is for --target cuda_gpu only; this is op_level"),
    ),
    (["compile", "absent.json", "-o", "a.npubin"], "cannot read IR file 'absent.json': No such file"),
    (["compile", "empty", "-o", "a.npubin"], "cannot read IR file 'empty': Is a directory"),
    (["compile", "tiny.json"], "give an output file (-o FILE.npubin), --stages, or both"),
    (["compile", "tiny.json", "--json", "--stages"], "give an output file (-o FILE.npubin)"),
    (["compile", "tiny.json", "-o", "tiny.json"], "cannot write 'tiny.json': it is one of the files to read"),
    # describe
    (["describe", "absent.npubin"], "cannot read program 'absent.npubin'"),
    (["describe", "absent.json"], "cannot read IR file 'absent.json'"),
    # partition
    (["partition", "absent.json"], "cannot read IR file 'absent.json'"),
    (["partition", "tiny.json", "--json", "--mermaid"], "choose either --json or --mermaid"),
    *options(
        ["partition", "tiny.json"],
        SIMULATED_DTYPE,
        (["--target", "tpu"], "unknown target 'tpu'; choose one of op_level"),
        (["--npu", "nope"], "unknown chip 'nope'; give a .toml file or one of"),
        (["--npu", "edge", "--what-if", "frob"], "frob"),
    ),
    # ops
    *options(["ops", "--npu", "edge"], *OUTPUT),
    *options(["ops"], (["--npu", "nope"], "unknown chip 'nope'; give a .toml file or one of")),
    # report, diff
    (["report", "absent.npubin", "-o", "r.html"], "cannot read program 'absent.npubin'"),
    (["report", "absent.json", "-o", "r.html"], "cannot read IR file 'absent.json'"),
    *options(["report", "tiny.json"], *OUTPUT),
    *options(["report", "tiny.json", "-o", "r.html"], *WEIGHTS, SIMULATED_DTYPE),
    *options(["report", "tiny.json", "-o", "r.html", *W], *INPUTS, SEED),
    *options(
        ["report", "tiny.json", "-o", "r.html"],
        (["--input", "x=x.npy"], "--input is for measuring; give --weights or --device too"),
        (["--target", "tpu"], "unknown target 'tpu'; choose one of op_level"),
        (["--target", "op_level", *W], "--target is for a report without measuring"),
        (["--quantization", "int3"], "unknown quantization 'int3'; choose one of int4, int8, fp8"),
        (["--disable-fusion", "magic"], "unknown fusion magic; known are integer_kernels, silu"),
        (["--runs", "0"], "Invalid value for '--runs'"),
        (["--npu", "nope"], "unknown chip 'nope'; give a .toml file or one of"),
        (["--sweep", "sram=1M"], "--sweep is of a chip; give it with --npu"),
        (["--npu", "edge", "--sweep", "wings=2"], "'wings=2' is no range of a sweep"),
        (["--verify"], "--verify is for an IR file with --weights"),
        (["--verify", *W, "--quantization", "int8"], "--verify is for an IR file with --weights"),
        (["--bandwidth", "100"], "--bandwidth and --flops belong together; give both"),
        (["--flops", "100"], "--bandwidth and --flops belong together; give both"),
        (["--bandwidth", "0", "--flops", "1"], "a peak rate must be a finite number above 0, not 0.0"),
        (["--bandwidth", "1", "--flops", "nan"], "a peak rate must be a finite number above 0, not nan"),
    ),
    *options(
        ["report", "tiny.npubin", "-o", "r.html"],
        (["--dtype", "float32"], "--dtype is for an IR file; 'tiny.npubin' is compiled already"),
        (["--verify", *W], "--verify is for an IR file with --weights"),
    ),
    (["report", "tiny.json", "-o", "tiny.json"], "cannot write 'tiny.json': it is one of the files to read"),
    (["report", "net.npumod", "-o", "r.html"], "'net.npumod' is a saved module; give its IR, or one program"),
    (["diff", "tiny.npubin"], "give two programs, or one and --npu twice"),
    (["diff", "tiny.npubin", "--npu", "edge"], "give two programs, or one and --npu twice"),
    (["report", "model", "-o", "r.html", *W], "a report measures no language model; for 'model', leave out --weights"),
    (["diff", "absent.npubin", "tiny.npubin"], "cannot read program 'absent.npubin'"),
    (["diff", "tiny.npubin", "absent.json"], "cannot read IR file 'absent.json'"),
    *options(["diff", "tiny.npubin", "tiny.json"], *OUTPUT, *WEIGHTS, SEED),
    *options(
        ["diff", "tiny.npubin", "tiny.json"],
        (["--target", "tpu"], "unknown target 'tpu'; choose one of op_level"),
        (["--target", "op_level", *W], "--target is for a comparison without measuring"),
        (["--runs", "0"], "Invalid value for '--runs'"),
        ([*W, *W, *W], "--weights is given more than twice; there are two programs"),
        (["--npu", "nope"], "unknown chip 'nope'; give a .toml file or one of"),
        (["--npu", "edge"] * 3, "--npu is given more than twice; there are two programs"),
        (["-o", "tiny.json"], "cannot write 'tiny.json': it is one of the files to read"),
    ),
    # run, profile, verify
    (["run", "absent.npubin"], "cannot read program 'absent.npubin'"),
    (["profile", "absent.npubin"], "cannot read program 'absent.npubin'"),
    (["verify", "absent.json"], "cannot read IR file 'absent.json'"),
    *options(["run", "tiny.npubin", *W], *INPUTS, *OUTPUT, SEED, (["--shape", "x=1"], "--shape is for an ONNX file")),
    *options(["profile", "tiny.npubin", *W], *INPUTS, *TRACE, SEED, (["--runs", "0"], "Invalid value for '--runs'")),
    (["profile", "absent.json"], "cannot read IR file 'absent.json'"),
    (
        ["profile", "tiny.npubin", "--trace", "tiny.npubin"],
        "cannot write 'tiny.npubin': it is one of the files to read",
    ),
    *options(["verify", "tiny.json", *W], *INPUTS, SEED, DTYPE),
    *options(
        ["verify", "tiny.json", *W],
        (["--samples", "0"], "Invalid value for '--samples'"),
        (["--samples", "2", "-i", "x=x.npy"], "--samples is for random inputs; leave out --input"),
    ),
    *[
        case
        for args in ("run tiny.npubin", "profile tiny.npubin", "verify tiny.json")
        for case in options(args.split(), *WEIGHTS)
    ],
    *options(
        ["run", "tiny.npubin", *W, "-i", "x=x.npy"],
        (["-o", "tiny.npubin"], "cannot write 'tiny.npubin': it is one of the files to read"),
        (["-o", "x.npy"], "cannot write 'x.npy': it is one of the files to read"),
    ),
    # simulate
    *options(
        ["simulate", "tiny.npubin", "--npu", "edge"],
        (["--dtype", "float16"], "--dtype and --quantization are chosen when a program is compiled"),
        (["--quantization", "int4"], "--dtype and --quantization are chosen when a program is compiled"),
        (["--tokens", "8"], "--tokens and --cache-length are for language models"),
        (["--cache-length", "8"], "--tokens and --cache-length are for language models"),
        (["--tokens", "1"], "Invalid value for '--tokens'"),
        (["--cache-length", "0"], "Invalid value for '--cache-length'"),
        (["--trace", "no/such.json"], "cannot write 'no/such.json'"),
        (["--trace", "tiny.npubin"], "cannot write 'tiny.npubin': it is one of the files to read"),
        (["--picture", "no/such.png"], "cannot write 'no/such.png'"),
        (["--picture", "a.bmp"], "cannot draw 'a.bmp': choose a name that ends in"),
        (["--csv", "a.csv"], "--csv is for --sweep"),
        (["--sweep", "speed=1..2"], "'speed=1..2' is no range of a sweep"),
        (["--sweep", "arrays=1..2", "--csv", "no/such.csv"], "cannot write 'no/such.csv'"),
        (["--sweep", "arrays=1..2", "--trace", "a.json"], "--trace and --full are for one chip; leave out --sweep"),
        (["--with", "tiny.json", "--share", "space"], "--share is 'space'; choose one of time, cores"),
        (["--share", "time"], "--share is for models that share a chip; name the other one by --with"),
        (["--with", "tiny.json", "--share", "cores"], "chip 'edge' has 1 core for 2 programs; share it by time"),
        (
            ["--with", "tiny.json", "--full"],
            "--with is for one run of each model; leave out --sweep, --picture, --full",
        ),
        (["--with", "absent.json"], "cannot read IR file 'absent.json'"),
        (["--with", "tiny.json", "--trace", "tiny.json"], "cannot write 'tiny.json': it is one of the files to read"),
    ),
    *options(
        ["simulate", "tiny.json", "--npu", "edge"],
        SIMULATED_DTYPE,
        (["--quantization", "int3"], "unknown quantization"),
        *WEIGHTS,
    ),
    (["simulate", "tiny.npubin"], "Missing option '--npu'"),
    (["simulate", "tiny.npubin", "--npu", "nope"], "unknown chip 'nope'; give a .toml file or one of"),
    (["simulate", "tiny.npubin", "--npu", "absent.toml"], "cannot read chip 'absent.toml': No such file"),
    (["simulate", "tiny.npubin", "--npu", "x.toml"], "chip 'x.toml' lacks the table [chip]"),
    (["simulate", "absent.npubin", "--npu", "edge"], "cannot read program 'absent.npubin'"),
    (["simulate", "absent.json", "--npu", "edge"], "cannot read IR file 'absent.json'"),
    (["simulate", "empty", "--npu", "edge"], "has no config.json"),
    # embed
    *options(
        ["embed", "model"],
        *OUTPUT,
        (["--dimensions", "0"], "Invalid value for '--dimensions'"),
        (["--prompt-name", "query"], "model is a model that generates text"),
        (["--quantization", "int3"], "unknown quantization"),
        DTYPE,
    ),
    (["embed", "model", "absent.txt"], "absent.txt"),
    # generate
    *options(
        DEVICE_COMMANDS["generate"],
        *TRACE,
        DTYPE,
        SEED,
        (["-n", "0"], "Invalid value for '--max-tokens'"),
        (["-t", "-1"], "--temperature must be a finite number of at least 0, not -1.0"),
        (["-t", "nan"], "--temperature must be a finite number"),
        (["-t", "1", "--top-p", "0"], "--top-p must be above 0 and at most 1, not 0.0"),
        (["-t", "1", "--top-p", "2"], "--top-p must be above 0 and at most 1, not 2.0"),
        (["-t", "1", "--top-k", "0"], "Invalid value for '--top-k'"),
        (["--top-k", "5"], "--top-k and --top-p are for sampling; give a --temperature above 0"),
        (["--top-p", "0.5"], "--top-k and --top-p are for sampling; give a --temperature above 0"),
        *((["--repetition-penalty", value], PENALTY) for value in ("0", "-1.5", "nan", "inf")),
        (["--repetition-penalty", "x"], "Invalid value for '--repetition-penalty'"),
        (["--cache-length", "0"], "Invalid value for '--cache-length'"),
        (["--cache-length", "8", "-n", "9"], "--max-tokens 9 is more than --cache-length 8 holds"),
        (["--no-chat", "--system", "Be brief"], "--system needs the chat template; leave out --no-chat"),
        (["--system", "\udcff"], "the system message is not UTF-8 text"),
    ),
    (["generate", "model", "-p", ""], "the prompt is empty"),
    (
        ["generate", "model", "-p", "Hi", "--quantization", "int3"],
        "unknown quantization 'int3'; choose one of checkpoint",
    ),
    (
        ["generate", "model", "-p", "Hi", "--activations", "int4"],
        "unknown format of activations 'int4'; choose one of checkpoint, none, int8, fp8",
    ),
    (
        ["generate", "model", "-p", "Hi", "--kv-cache", "int4"],
        "unknown format of a KV cache 'int4'; choose one of none, int8, fp8",
    ),
    (["generate", "model", "-p", "Hi", "--adapter", "absent"], "absent has no adapter_config.json"),
    (["generate", "model", "-p", "Hi", "--tensor-parallel", "0"], "Invalid value for '--tensor-parallel'"),
    # serve
    *options(
        ["serve", "model"],
        DTYPE,
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1 port 8000: "),
        (["--port", "65536"], "Invalid value for '--port'"),
        (["--name", ""], "--name is empty; leave it out for the model's own"),
        (["--name", "\udcff"], "the model's name is not UTF-8 text"),
        (["--api-key-file", "absent"], "cannot read API keys 'absent': No such file"),
        (["--api-key-file", "x.toml"], "'x.toml' holds no API keys; write a name, a space and a key on each line"),
        (["--context-length", "0"], "Invalid value for '--context-length'"),
        (["--cache-tokens", "0"], "Invalid value for '--cache-tokens'"),
        (["--tensor-parallel", "0"], "Invalid value for '--tensor-parallel'"),
        (["--adapter", "one=absent"], "absent has no adapter_config.json"),
        (["--ray-address", "auto"], "--ray-address is for replicas on a Ray cluster; add --ray"),
        (["--replicas", "2"], "--replicas is for replicas on a Ray cluster; add --ray"),
        (["--replica-cpus", "0"], "Invalid value for '--replica-cpus'"),
        (["--ray", "--replicas", "2", "--max-replicas", "3"], "--replicas sets a fixed number; leave it out, or"),
        (["--ray", "--min-replicas", "3", "--max-replicas", "2"], "--min-replicas 3 is more than --max-replicas 2"),
        (["--context-length", "64", "--cache-tokens", "32"], "--cache-tokens 32 is less than --context-length 64"),
        (["--context-length", "64", "--max-new-tokens", "65"], "--max-new-tokens 65 is more than --context-length 64"),
        (["--max-batch", "129"], "Invalid value for '--max-batch'"),
        (["--prefill-tokens", "0"], "Invalid value for '--prefill-tokens'"),
        (["--max-requests", "0"], "Invalid value for '--max-requests'"),
        (["--max-requests-per-key", "0"], "Invalid value for '--max-requests-per-key'"),
        (["--max-requests-per-minute", "0"], "Invalid value for '--max-requests-per-minute'"),
        (["--max-connections", "0"], "Invalid value for '--max-connections'"),
        (["--max-body-bytes", "0"], "Invalid value for '--max-body-bytes'"),
        (["--max-prompt-tokens", "0"], "Invalid value for '--max-prompt-tokens'"),
        (["--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["--request-timeout", "0"], "--request-timeout must be a number of seconds above 0, not 0.0"),
        (["--header-timeout", "-1"], "--header-timeout must be a number of seconds above 0, not -1.0"),
        (["--body-timeout", "nan"], "--body-timeout must be a number of seconds above 0, not nan"),
        (["--write-timeout", "inf"], "--write-timeout must be a number of seconds above 0, not inf"),
        (["--drain-timeout", "x"], "Invalid value for '--drain-timeout'"),
        (["--draft", "absent.gguf"], "no such GGUF file: absent.gguf (--draft)"),
        (
            ["--draft", "x", "--speculate"],
            "--speculate and --draft are two ways to guess tokens; leave out one of them",
        ),
        (["--log-level", "loud"], "unknown log level 'loud'; choose one of debug, info, warning, error"),
        (["--quantization", "int3"], "unknown quantization 'int3'; choose one of checkpoint"),
        (["--activations", "int4"], "unknown format of activations 'int4'; choose one of checkpoint"),
    ),
    (["serve", "absent.gguf"], "no such GGUF file: absent.gguf"),
    # serve --simulate
    *options(
        ["serve", "model"],
        (["--rate", "1"], "--rate is for a simulated chip; add --simulate CHIP"),
        (["--prompt-lengths", "5"], "--prompt-lengths is for a simulated chip; add --simulate CHIP"),
        (["--simulate", "edge"], "--simulate needs requests: those of --trace FILE.csv, or random ones at --rate"),
        (["--simulate", "edge", "--trace", "tiny.json", "--rate", "1"], "--simulate needs requests"),
        (["--simulate", "edge", "--trace", "tiny.json", "--seed", "1"], "--seed is for random requests; leave it out"),
        (["--simulate", "edge", "--trace", "absent.csv"], "cannot read trace 'absent.csv': No such file"),
        (["--simulate", "edge", "--trace", "tiny.json", "--csv", "tiny.json"], "it is one of the files to read"),
    ),
    *options(
        ["serve", "model", "--simulate", "edge", "--rate", "1"],
        SEED,
        (["--simulate", "nope"], "unknown chip 'nope'; give a .toml file or one of"),
        (["--rate", "0"], "requests come at a rate above 0 a second, not 0.0 (--rate)"),
        (["--rate", "nan"], "requests come at a rate above 0 a second, not nan (--rate)"),
        (["--requests", "0"], "Invalid value for '--requests'"),
        (["--prompt-lengths", "0"], "'0' is neither a number of tokens nor a range of them, such as 64..1024"),
        (["--new-lengths", "9..2"], "'9..2' is neither a number of tokens nor a range of them"),
        (["--csv", "no/such/file"], "cannot write 'no/such/file'"),
        (["--device", "cpu"], "--device means nothing on a simulated chip; leave it out, or --simulate"),
        (["--speculate"], "--speculate means nothing on a simulated chip"),
        (["--tensor-parallel", "2"], "--tensor-parallel means nothing on a simulated chip"),
    ),
    (["serve", "empty"], "has no config.json"),
    # quantize
    *options(
        ["quantize", "model", "-o", "out"],
        (["--weights", "int3"], "unknown quantization 'int3'; choose one of int4, int8, fp8"),
        (["--group", "-1"], "Invalid value for '--group'"),
        (["--method", "guess"], "'guess'"),
        (["--calibrate", "absent.txt"], "cannot read calibration text 'absent.txt'"),
        (["--samples", "0"], "Invalid value for '--samples'"),
        (["--written", "-1"], "Invalid value for '--written'"),
        (["--keep-worst", "-1"], "Invalid value for '--keep-worst'"),
        (["--tune", "-1"], "Invalid value for '--tune'"),
        (["--device", "tpu"], "unknown device 'tpu'; choose one of cpu, gpu"),
        (["--dtype", "int4"], "'int4'; choose one of float16, bfloat16, float32"),
        (["--written", "2"], "writing text needs a calibration text to begin from"),
    ),
    *options(
        ["quantize-network", "resnet18", "-o", "out", "--calibrate", "empty"],
        ([], "the folder 'empty' holds no images to calibrate with"),
        (["--keep-worst", "-1"], "Invalid value for '--keep-worst'"),
    ),
    (["generate", "model", "-p", "\udcff"], "the prompt is not UTF-8 text"),
    (["generate", "absent.gguf", "-p", "Hi"], "no such GGUF file: absent.gguf"),
    (["generate", "empty", "-p", "Hi"], "has no config.json"),
    (["generate", "tiny.json", "-p", "Hi"], "tiny.json is neither a model folder nor a .gguf file"),
    (["generate", "./absent", "-p", "Hi"], "'./absent' is neither a folder, a file nor a Hugging Face id"),
    # classify
    *options(
        ["classify", "red.png"],
        DTYPE,
        (["--model", "vgg"], "no vision model named 'vgg'; choose one of"),
        (["--weights", "absent.pth"], "no such weights: 'absent.pth'"),
        (["--top", "-1"], "Invalid value for '--top'"),
        (["--top", "1001"], "Invalid value for '--top'"),
    ),
    # bench
    (["bench", "nothing"], "no benchmark suite 'nothing'; choose one of"),
    (["bench", "pages.screenshots", "--json"], "'pages.screenshots' writes no JSON; those that do are cpu, cuda, "),
    *[case for command in DEVICE_COMMANDS.values() for case in options(command, *DEVICE_OPTIONS)],
    # sign, trust, keygen
    (["sign", "absent.npubin", "--key", "key"], "cannot read program 'absent.npubin': No such file"),
    (["sign", "tiny.npubin", "--key", "absent.pem"], "'tiny.npubin' contains no code: it runs without a signature"),
    (["trust", "absent.pub"], "cannot read 'absent.pub': No such file"),
    (["trust", "tiny.npubin"], "'tiny.npubin' holds no public key in PEM format"),
    (["trust", "--remove", "00"], "no trusted key has the fingerprint '00'"),
    (["keygen", "no/such/key"], "cannot write 'no/such/key': No such file"),
]
PIPED = [
    (b"", "standard input is empty; write the prompt there or give it with --prompt"),
    (b" \n", "standard input is empty; write the prompt there or give it with --prompt"),
    (b"ab\xff\xfe", "standard input is not UTF-8 text: byte 2 is 0xff"),
    (bytes(range(256)), "standard input is not UTF-8 text: byte 128 is 0x80"),
]
CASES = [*((args, None, message) for args, message in WRONG), *((["generate", "model"], *case) for case in PIPED)]


def levels() -> dict[str, str]:
    """A CPU level that this machine runs, and one that it does not."""
    from npu_runtime.cpu.levels import LEVELS, PORTABLE, this_cpu

    runs = this_cpu().levels()
    absent = next(level.name for level in LEVELS if level not in runs)
    return {"PRESENT": next((level.name for level in runs if level is not PORTABLE), "v2"), "ABSENT": absent}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The exit code, stdout and stderr of each case."""
    folder = tmp_path_factory.mktemp("arguments")
    g = IRBuilder("tiny")
    g.output(g("aten.linear.default", g.input("x", 2, 8), g.weight("w", 8, 8)))
    (folder / "tiny.json").write_text(json.dumps(g.ir()))
    compile_ir(g.ir()).save(folder / "tiny.npubin")
    save_file({"w": np.ones((8, 8), np.float32)}, folder / "tiny.safetensors")
    np.save(folder / "x.npy", np.ones((2, 8), np.float32))
    (folder / "model.py").write_text("def make(): ...")
    (folder / "x.toml").touch()
    (folder / "empty").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    Image.new("RGB", (32, 32), "red").save(folder / "red.png")
    named = levels()
    cases = [
        ([named.get(word, word) for word in args], None if piped is None else piped.hex()) for args, piped, _ in CASES
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    before = sorted(folder.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", HARNESS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(folder.rglob("*")) == before, "a refused command leaves nothing behind"
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{' '.join(a)!a} {p or ''!a}" for a, p, _ in CASES])
def test_a_wrong_argument_is_refused_before_anything_is_loaded(outcomes: list[Any], index: int) -> None:
    code, stdout, stderr = outcomes[index]
    message = CASES[index][2]
    assert code == 2 and stdout == "", (code, stdout, stderr)
    assert message in " ".join(stderr.split()), stderr
    assert "was imported" not in stderr and "was loaded" not in stderr and "Traceback" not in stderr


def test_every_option_of_every_command_is_tried_or_cannot_be_wrong() -> None:
    import typer

    from npu_sim.cli import app

    cannot_be_wrong = set("--json --mermaid --stages --full --cpu --help --debug --version --allow-code".split())
    cannot_be_wrong |= {"--zero-points", "--search", "--force", "--speculate", "--lenient", "--truncate"}
    tried: dict[str, set[str]] = {}
    for args, _, _ in CASES:
        tried.setdefault(args[0], set()).update(word for word in args if word.startswith("-"))
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            names = {text for text in parameter.opts if text.startswith("-")}
            assert not names or names & (tried.get(name, set()) | cannot_be_wrong), f"{name} {names}"
