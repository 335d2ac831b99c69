"""The `.metal` files against the declarations in `npu_compiler`: what Xcode would not tell anybody until it ran."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metal_kernels import shader_source
from npu_compiler import METAL_GPU
from npu_compiler.program.kernels import KERNELS, KernelDecl
from npu_compiler.program.views import MAX_RANK
from npu_runtime.metal import dispatch as metal_dispatch

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.name for path in (ROOT / "metal_kernels").glob("*.metal"))
NAMED_IN_THE_SEEDS = {
    "matmul.metal",
    "conv_bn_relu.metal",
    "add_relu.metal",
    "elementwise.metal",
    "elementwise_extended.metal",
    "elementwise_broadcast.metal",
    "softmax.metal",
    "rmsnorm.metal",
    "embedding.metal",
    "rope.metal",
    "tensor_ops.metal",
    "index_copy.metal",
    "pool.metal",
    "common.metal",
    "fused_decode_attention.metal",
}
_CTYPES = {"I": "uint", "i": "int", "f": "float"}
BUILTIN_CONSTANTS = {"vectorized": "bool", "contiguous": "bool", "integer": "bool"}


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def signature(source: str, kernel: str) -> str:
    """The parameter list of a kernel, as one line."""
    match = re.search(rf"\bkernel\s+void\s+{kernel}\s*\((.*?)\)\s*\{{", source, re.DOTALL)
    assert match, f"no kernel '{kernel}'"
    return " ".join(match[1].split())


def buffers(source: str, kernel: str) -> dict[int, tuple[str, str]]:
    """Buffer index → (name, declaration) of a kernel's buffer arguments."""
    found = {}
    for part in re.split(r",(?![^\[]*\]\])", signature(source, kernel)):
        slot = re.search(r"\bbuffer\((\d+)\)", part)
        if slot:
            name = re.search(r"(\w+)\s*\[\[", part)
            assert name, part
            found[int(slot[1])] = (name[1], part.strip())
    return found


def struct_members(source: str, name: str) -> list[tuple[str, str]]:
    """(name, `struct` format) of each member of a parameter struct."""
    body = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\}};", source, re.DOTALL)
    assert body, f"no struct '{name}'"
    members = []
    for kind, member, length in re.findall(r"(\w+)\s+(\w+)(?:\[(\w+)\])?\s*;", body[1]):
        letter = next(letter for letter, ctype in _CTYPES.items() if ctype == kind)
        members.append((member, f"{8 if length == 'MAX_RANK' else length}{letter}" if length else letter))
    return members


def test_all_files_named_in_the_seeds_are_there() -> None:
    assert NAMED_IN_THE_SEEDS - set(SOURCES) == set()


IN_SHADERS = {name: decl for name, decl in KERNELS.items() if decl.source}  # the others are the CPU device's


@pytest.mark.parametrize("decl", IN_SHADERS.values(), ids=IN_SHADERS)
def test_a_kernel_takes_what_its_declaration_says(decl: KernelDecl) -> None:
    source = without_comments(shader_source(decl.source))
    declared = (*decl.inputs, *decl.outputs)
    found = buffers(source, decl.name)
    for index, operand in enumerate(declared):
        name, text = found[index]
        assert name == operand.name
        assert ("device const" in text) == (index < len(decl.inputs)), f"{name} is an {'in' if index else 'out'}put"
        assert (f"function_constant(has_{name})" in text) == operand.optional
    fields = decl.struct_fields()
    params = found.pop(len(declared), None)
    assert (params is not None) == bool(fields)
    if params is not None:
        struct = re.search(r"constant\s+(\w+)\s*&", params[1])
        assert struct, params[1]
        assert struct_members(source, struct[1]) == fields
    extra = {index: name for index, (name, _) in found.items() if index >= len(declared)}
    assert set(extra.items()) <= {(len(declared) + 1, "views")}


@pytest.mark.parametrize("name", SOURCES)
def test_function_constants_are_those_the_backend_sets(name: str) -> None:
    text = without_comments(shader_source(name))
    found = re.findall(r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]", text)
    numbers = [number for *_, number in found]
    assert len(set(numbers)) == len(numbers), "two function constants of one number"
    declared = [decl for decl in IN_SHADERS.values() if f'#line 1 "{name}"' in shader_source(decl.source)]
    flags = {
        field: "bool" if fmt == "?" else "uint"
        for decl in declared
        for field, fmt in decl.fields.items()
        if fmt[0] in "?s"
    }
    operands = {x.name for decl in declared for x in (*decl.inputs, *decl.outputs)} | {"a", "b", "c", "out"}
    known = {
        **BUILTIN_CONSTANTS,
        **flags,
        **{f"{x}_type": "uint" for x in operands},
        **{template.format(x): "bool" for x in operands for template in ("has_{}", "{}_vectorized")},
    }
    assert [(kind, constant) for kind, constant, _ in found if known.get(constant) != kind] == []


@pytest.mark.parametrize(
    ("name", "macro", "value"),
    [
        ("common.metal", "MAX_RANK", MAX_RANK),
        ("common.metal", "SIMD_WIDTH", metal_dispatch.SIMD_WIDTH),
        ("quantized.metal", "CHUNK_BYTES", metal_dispatch.CODE_BYTES),
        ("conv_bn_relu.metal", "BLOCK_CHANNELS", METAL_GPU.channel_tile),
        ("conv_bn_relu.metal", "BLOCK_PIXELS", metal_dispatch.CONV_PIXELS),
        ("conv_bn_relu.metal", "DIRECT_PIXELS", metal_dispatch.DIRECT_PIXELS),
        ("fused_decode_attention.metal", "HELD_WIDTH", metal_dispatch.ATTENTION_WIDTH),
        ("fused_decode_attention.metal", "WIDE_WIDTH", metal_dispatch.ATTENTION_SLICE),
        ("fused_decode_attention.metal", "KEY_LANES", metal_dispatch.ATTENTION_KEY_LANES),
        ("fused_decode_attention.metal", "PREFILL_GROUPS", metal_dispatch.ATTENTION_TILE // 8),
    ],
)
def test_grids_and_kernels_agree_on_tiles(name: str, macro: str, value: int) -> None:
    (defined,) = re.findall(rf"^#define {macro} (\d+)", shader_source(name), re.MULTILINE)
    assert int(defined) == value
