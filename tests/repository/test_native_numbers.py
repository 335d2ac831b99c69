"""Names have the same numbers in Python as in the C++ of the native kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from npu_runtime.cpu.native import numbers

NATIVE = Path(__file__).parents[2] / "npu_runtime" / "cpu" / "native"
ENUM = re.compile(r"enum class (\w+) : int64_t \{([^}]*)\}")
SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i8": "int8", "u8": "uint8"}


def enums() -> dict[str, dict[str, int]]:
    """The numbers of each enum that argument blocks hold, by its name."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(NATIVE.rglob("*.h")):
        for name, body in ENUM.findall(path.read_text("utf-8")):
            values: dict[str, int] = {}
            for entry in body.split(","):
                label, _, number = entry.partition("=")
                values[label.strip()] = int(number) if number else len(values)
            found[name] = values
    return found


@pytest.mark.parametrize(
    "enum, table",
    [
        ("Activation", numbers.ACTIVATIONS),
        ("Codes", numbers.CODES),
        ("Offsets", numbers.OFFSET_KINDS),
        ("RowFormat", numbers.ROUNDING),
    ],
)
def test_names_have_the_numbers_of_the_enum(enum: str, table: Mapping[str, int]) -> None:
    assert enums()[enum] == table


@pytest.mark.parametrize("enum, table", [("Dtype", numbers.DTYPES), ("Stored", numbers.STORED_DTYPES)])
def test_dtypes_have_the_numbers_of_the_enum(enum: str, table: Mapping[object, int]) -> None:
    assert {SHORT[label]: number for label, number in enums()[enum].items()} == {
        str(dtype): number for dtype, number in table.items()
    }
