"""Allowed imports between packages (docs/architecture.md, section 2), and the modules that a start imports."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED: dict[str, set[str]] = {
    "npu_compiler": set(),
    "cuda_compiler": {"npu_compiler"},
    "npu_runtime": {"npu_compiler", "metal_kernels"},
    "cuda_runtime": {"npu_compiler", "npu_runtime", "cuda_compiler"},
    "metal_kernels": {"npu_compiler"},
    "metal_emulator": {"metal_kernels", "npu_compiler"},
    "npu_model": {"npu_compiler", "npu_runtime"},
}
ALLOWED["npu_sim"] = set(ALLOWED)
PRESENT = [name for name in ALLOWED if (ROOT / name).is_dir()]
COMPILER_LIBRARIES = {"cryptography", "ml_dtypes", "msgpack", "networkx", "numpy"}
# Each takes a good part of a second or more.
SLOW_TO_IMPORT = {
    "cryptography",
    "cupy",
    "fastapi",
    "gguf",
    "hypothesis",
    "matplotlib",
    "networkx",
    "pandas",
    "prompt_toolkit",
    "scipy",
    "skimage",
    "torch",
    "torch_ir",
    "transformers",
    "uvicorn",
}
STARTS_WITHOUT_TORCH = [
    "npu_compiler",
    "npu_model",
    "npu_runtime",
    "cuda_runtime",
    "npu_sim.commands.application",
    "npu_sim.llm",
    "npu_sim.vision",
    "npu_sim.module.saved",
]
# A program that was compiled before runs without what compiles; what runs single ops brings their table along.
RUNS_WITHOUT_COMPILER = [
    "npu_runtime",
    "cuda_runtime",
    "npu_sim.commands.application",
    "npu_sim.llm",
    "npu_sim.module.saved",
]
RUNS_OPS = ["npu_runtime.metal.binding", "npu_runtime.metal.elementwise", "npu_runtime.cpu.kernels.elementwise"]
# Where a word of CUDA's may stand outside `cuda_compiler` and `cuda_runtime`, and what it does there.
MENTIONS_CUDA = {
    "npu_compiler/installing.py": "names of packages",
    "npu_compiler/ops/conv.py": "PyTorch's name of an op",
    "npu_compiler/ops/elementwise.py": "says who pastes the expressions",
    "npu_compiler/target_config.py": "the numbers of the target, where the porting guide has them",
    "npu_sim/cache.py": "the sources whose change makes a cached program stale",
    "npu_sim/commands/application.py": "help",
    "npu_sim/commands/doctor.py": "the packages to look for",
    "npu_sim/commands/keys.py": "help",
    "npu_sim/commands/options.py": "help",
    "npu_sim/commands/programs.py": "help",
    "npu_sim/commands/targets.py": "the target by its name",
    "npu_sim/commands/tools.py": "help",
    "npu_sim/devices.py": "the device by its name",
    "npu_sim/module/compiled.py": "help",
    "npu_sim/module/device_module.py": "PyTorch's name of a method",
    "npu_sim/module/dynamo_backend.py": "PyTorch's name of a mode",
    "npu_sim/module/gpu_ports.py": "the ports of CUDA tensors",
    "npu_sim/module/hardware.py": "the device by its name",
    "npu_sim/module/runner.py": "chooses the ports",
    "npu_sim/quantizing/tuning.py": "PyTorch's name of a device",
}


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(file:line, top-level package) of every import statement of a package, those inside functions too."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            for name in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name.split(".")[0]


@pytest.mark.parametrize("package", PRESENT)
def test_a_package_imports_only_the_packages_below_it(package: str) -> None:
    wrong = [
        f"{where} imports {name}"
        for where, name in imports(package)
        if name in ALLOWED and name != package and name not in ALLOWED[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", [name for name in PRESENT if name.endswith("_compiler")])
def test_compilers_need_no_torch_and_no_device_library(package: str) -> None:
    known = COMPILER_LIBRARIES | set(sys.stdlib_module_names) | set(ALLOWED)
    assert [f"{where} imports {name}" for where, name in imports(package) if name not in known] == []


def test_only_the_cuda_packages_know_cuda() -> None:
    word = re.compile(r"cuda|\bcupy|cublas|cudnn|nvrtc|nvidia", re.IGNORECASE)
    files = [path for package in PRESENT if not package.startswith("cuda_") for path in (ROOT / package).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".cpp", ".h", ".metal")]
    knowing = {str(path.relative_to(ROOT)) for path in sources if word.search(path.read_text(encoding="utf-8"))}
    assert sorted(knowing - MENTIONS_CUDA.keys()) == []


def test_no_import_is_relative() -> None:
    for package in PRESENT:
        for path in (ROOT / package).rglob("*.py"):
            relative = [
                n.lineno
                for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(n, ast.ImportFrom) and n.level
            ]
            assert not relative, f"{path}: relative imports in lines {relative}"


@functools.cache
def started(module: str) -> tuple[frozenset[str], bool]:
    """Import a module in a new process; return all modules loaded, and whether the element-wise table is filled."""
    code = (
        f"import sys, {module}\n"
        "table = sys.modules.get('npu_compiler.program.elementwise')\n"
        "print(bool(table and 'cos_kernel' in table.ELEMENTWISE_KERNELS), *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    filled, *names = done.stdout.split()
    assert module in names
    return frozenset(names), filled == "True"


@pytest.mark.parametrize("module", STARTS_WITHOUT_TORCH)
def test_starts_without_what_takes_long_to_import(module: str) -> None:
    assert SLOW_TO_IMPORT & started(module)[0] == set()


@pytest.mark.parametrize("module", RUNS_WITHOUT_COMPILER)
def test_starts_without_the_compiler(module: str) -> None:
    assert {"npu_compiler.compiler", "npu_compiler.ops", "cuda_compiler.pipeline"} & started(module)[0] == set()


@pytest.mark.parametrize("module", RUNS_OPS)
def test_what_runs_single_ops_finds_their_table_filled(module: str) -> None:
    assert started(module)[1]


@pytest.mark.parametrize("package", ["npu_compiler", "npu_runtime"])
def test_names_that_are_imported_when_used_are_there(package: str) -> None:
    code = f"import {package} as package\nprint([name for name in dir(package) if not hasattr(package, name)])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"
