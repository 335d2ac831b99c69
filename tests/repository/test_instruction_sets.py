"""Only one header knows the instruction set that the kernels are compiled for."""

from __future__ import annotations

import re
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "npu_runtime" / "cpu" / "native"
HEADER = "vec.h"
MACRO = re.compile(
    r"^\s*#\s*(?:if|ifdef|ifndef|elif|elifdef)\b.*"
    r"(?:__(?:AVX|SSE|SSSE|F16C|FMA|BMI|ARM|AMX|VNNI|aarch64|arm|x86_64|i386|amd64)|_M_X64|_M_ARM64|NPU_(?:AVX|SSE|X86|NEON|HAS_))"
)
INTRINSICS = re.compile(
    r"\b[a-z0-9]*intrin\.h\b|\barm_(?:neon|bf16|fp16|sve)\.h\b|\b_mm\d*_\w+|\b__m(?:128|256|512)|\b_tile_\w+"
    r"|\bv\w+q?_[fsu](?:8|16|32|64)\b|__builtin_(?:ia32|aarch64|neon)_\w+|\basm\b"
)


def offences(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if MACRO.search(line) or INTRINSICS.search(line.split("//")[0])
    ]


def test_instruction_sets_are_known_to_one_header() -> None:
    files = [path for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".cpp")]
    found = [entry for path in files if path.name != HEADER for entry in offences(path.name, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_looks_for() -> None:
    assert offences(HEADER, (NATIVE / HEADER).read_text("utf-8")), "nothing about instruction sets is in the header"
    for line in (
        "#if defined(__AVX512F__)",
        "  #ifdef __aarch64__",
        "#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)",
        "#include <immintrin.h>",
        "#include <arm_neon.h>",
        "  return _mm256_max_ps(a, b);",
        "  return vmaxq_f32(a, b);",
        '  asm volatile("yield");',
    ):
        assert offences("some.cpp", line), line
    for line in ("#if defined(__linux__)", "#include <thread>", "  load(v, x_32);  // as _mm_load_ps would"):
        assert not offences("some.cpp", line), line
