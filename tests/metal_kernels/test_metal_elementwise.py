"""The element-wise table's C expressions, as the Metal shaders expand them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import pytest

from metal_emulator.syntax import VARIANTS, check
from metal_kernels import shader_source
from npu_runtime.metal.elementwise import elementwise_macro

FILES = (
    "add_relu.metal",
    "elementwise.metal",
    "elementwise_extended.metal",
    "elementwise_broadcast.metal",
    "elementwise_special.metal",
    "elementwise_special_broadcast.metal",
)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda macros: next(iter(macros), "half"))
@pytest.mark.parametrize("filename", FILES)
def test_every_op_is_what_metal_accepts(filename: str, variant: Mapping[str, str]) -> None:
    rows = elementwise_macro(filename)
    assert rows and check(shader_source(filename), {**variant, "ELEMENTWISE_OPS": rows}) == ""


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed")
def test_an_op_that_metal_lacks_is_refused() -> None:
    rows = "ELEMENTWISE_FLOAT(gamma_kernel, , (tgamma(a)))"
    assert "tgamma" in check(shader_source("elementwise.metal"), {"ELEMENTWISE_OPS": rows})
