"""The check of a program's CUDA source: text in, verdict out, so that most tests need no compiler."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
from cuda_toolchain import architectures, compile_log
from ir_builder import IRBuilder

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.specialization.template_files import template_text
from cuda_runtime.kernel_cache import KernelCache
from cuda_runtime.source_check import check_source
from npu_compiler import ProgramFormatError, compile

FILE = '"/etc/hostname"'
# Each is a way to have a compiler look at a file, or to hide such a way.
READING = {
    "include": f"#include {FILE}",
    "system include": "#include <stdio.h>",
    "include_next": f"#include_next {FILE}",
    "import": f"#import {FILE}",
    "embed": f"const char a[] = {{\n#embed {FILE}\n}};",
    "macro": f"#define F {FILE}\n#include F",
    "comments": f"/* a */ # /* b */ include {FILE}",
    "continuation": f"#inc\\\nlude {FILE}",
    "continuation before": f"#\\\n\\\ninclude {FILE}",
    "continuation with a space": f"#inc\\ \nlude {FILE}",
    "digraph": f"%:include {FILE}",
    "split digraph": f"%\\\n:include {FILE}",
    "trigraph": f"??=include {FILE}",
    "vertical tab": f"#\vinclude {FILE}",
    "form feed": f"\f#include {FILE}",
    "tab": f"#\tinclude {FILE}",
    "carriage return": f"int a;\r#include {FILE}",
    "zero": f"int a;\0\n#include {FILE}",
    "in a string that is none": f'/* " */\n#include {FILE}\n/* " */',
    "in a comment": f"// #include {FILE}",
    "escape": f'asm("\\043include {FILE}");',
    "universal name": f"\\u0023include {FILE}",
    "has_include": f"#if __has_include({FILE})\n#error yes\n#endif",
    "pasted has_include": f"#define P(a, b) a##b\n#if P(__has_, include)({FILE})\n#error yes\n#endif",
    "line": f"#line 1 {FILE}",
    "line marker": f"# 1 {FILE}",
    "pragma": f"#pragma GCC dependency {FILE}",
    "pragma operator": '_Pragma("once")',
    "asm file": f'asm(".file 1 {FILE}");',
    "asm incbin": f'asm(".incbin {FILE}");',
    "bare": "#",
    "pasted directive": "###include",
    "pasted with a parameter": "#define P(a, _body) a##_body",
    "longer word": "#define_it",
}


@pytest.mark.parametrize("text", READING.values(), ids=READING.keys())
def test_a_source_that_could_have_the_compiler_read_files_is_refused(text: str, tmp_path: Path) -> None:
    for whole in (text, f"{text}\n", f"int before;\n{text}\nint behind;\n"):
        with pytest.raises(ProgramFormatError, match="kernel source 'k' has .* must not have the compiler read files"):
            check_source("k", whole)


def test_the_check_comes_before_the_compiler(tmp_path: Path) -> None:
    class NVRTC:
        def getSupportedArchs(self) -> list[int]:
            return [90]

        def getVersion(self) -> tuple[int, int]:
            return 13, 0

    cache = KernelCache(NVRTC(), 90, tmp_path, Counter())
    with pytest.raises(ProgramFormatError, match="kernel source 'k' has '#include '"):
        cache.images({"k": READING["include"]})


@pytest.mark.parametrize("name", ["include", "macro", "comments", "continuation", "digraph", "vertical tab"])
def test_the_compiler_would_have_read_the_file(name: str, tmp_path: Path) -> None:
    """NVRTC does read the files in these sources, so the check is needed."""
    secret = tmp_path / "secret"
    secret.write_text("the_secret_line\n", encoding="utf-8")
    log = compile_log(READING[name].replace(FILE, f'"{secret}"') + "\n", architectures()[-1])
    assert "the_secret_line" in log


def templates() -> list[str]:
    root = files("cuda_compiler") / "templates"
    return sorted(str(path.relative_to(str(root))) for path in Path(str(root)).rglob("*.cu*"))


@pytest.mark.parametrize("file", templates())
def test_every_template_passes(file: str) -> None:
    check_source(file, "\n".join(line for line in template_text(file).split("\n") if not line.startswith("#kernel ")))


def test_generated_sources_pass() -> None:
    g = IRBuilder()
    x = g.input("x", 2, 8, 16, 16)
    y = g("aten.relu.default", g("aten.conv2d.default", x, g.weight("w", 8, 8, 3, 3), None, [1, 1], [1, 1]))
    y = g("aten.softmax.int", g("aten.gelu.default", g("aten.mul.Tensor", y, 0.5)), -1)
    sources = compile(g.output(g("aten.sum.dim_IntList", y, [1, 2])).ir(), CUDACodegenTarget()).plan.sources
    assert len(sources) >= 3
    for name, text in sources.items():
        check_source(name, text)
