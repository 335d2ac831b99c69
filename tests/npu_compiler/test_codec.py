"""Dataclasses as msgpack: the fields and type hints of a dataclass are all that the file format knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import msgpack
import numpy as np
import pytest

from npu_compiler import InputError, ProgramFormatError
from npu_compiler.graph.dtypes import INT64_MAX, INT64_MIN, SignedInt
from npu_compiler.program.codec import MAX_NESTING, decoder, pack, unpack


@dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    kind: Literal["round", "long"] = "round"
    span: tuple[int, str] | None = None
    bounds: tuple[SignedInt, SignedInt] = (0, 0)

    def __post_init__(self) -> None:
        if 13 in self.shape:
            raise ValueError("13 is bad luck")


@dataclass
class Tree:
    """One field of every type that a program may hold."""

    name: str
    height: int
    tall: bool
    weight: float
    bark: bytes
    leaves: list[Leaf]
    by_name: dict[str, Leaf]
    rings: np.ndarray
    branches: tuple[Tree, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


def tree(**changes: Any) -> Tree:
    leaf = Leaf((2, 3), "long", (4, "four"))
    values = {
        "name": "oak",
        "height": 9,
        "tall": True,
        "weight": 1.5,
        "bark": b"\0\1",
        "leaves": [leaf, Leaf(())],
        "by_name": {"a.b": leaf},
        "rings": np.arange(6, dtype=np.float32).reshape(2, 3),
        "notes": {"any": [1, 2.5, None, {"deep": "yes"}]},
    }
    return Tree(**{**values, **changes})


def as_plain(value: Tree) -> dict[str, Any]:
    return msgpack.unpackb(pack(value))  # type: ignore[no-any-return]


def refused(message: str, **changes: Any) -> None:
    with pytest.raises(ProgramFormatError, match=f"^{message}"):
        unpack(Tree, msgpack.packb({**as_plain(tree()), **changes}))


def test_a_dataclass_comes_back_as_it_was() -> None:
    parent = tree(branches=(tree(name="left"), tree(name="right", branches=(tree(name="twig"),))))
    loaded = unpack(Tree, pack(parent))
    assert pack(loaded) == pack(parent)
    assert [branch.name for branch in loaded.branches] == ["left", "right"]
    assert loaded.branches[1].branches[0].leaves == parent.leaves and loaded.by_name == parent.by_name
    assert loaded.notes == parent.notes
    np.testing.assert_array_equal(loaded.rings, parent.rings)


@pytest.mark.parametrize("bounds", [(-128, 127), (INT64_MIN, INT64_MAX), (-(2**31), 0)])
def test_a_signed_integer_keeps_its_value(bounds: tuple[int, int]) -> None:
    loaded = unpack(Tree, pack(tree(leaves=[Leaf((), bounds=bounds)])))
    assert loaded.leaves[0].bounds == bounds


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.uint8, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 4), (2, 1, 3)])
def test_an_array_keeps_dtype_and_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    rings = np.ones(shape, dtype)
    loaded = unpack(Tree, pack(tree(rings=rings))).rings
    assert (loaded.dtype, loaded.shape) == (rings.dtype, rings.shape)
    np.testing.assert_array_equal(loaded, rings)


@pytest.mark.parametrize("changes", [{"name": "\ud800"}, {"notes": {"a": 2**70}}, {"height": -(2**64)}], ids=str)
def test_what_no_file_can_hold_is_an_error_that_says_so(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="this cannot be saved: "):
        pack(tree(**changes))


def test_a_file_is_readable_as_it_stands() -> None:
    plain = as_plain(tree())
    assert plain["leaves"][0] == {"shape": [2, 3], "kind": "long", "span": [4, "four"], "bounds": [0, 0]}
    assert plain["rings"] == {"dtype": "float32", "shape": [2, 3], "data": tree().rings.tobytes()}


def test_a_value_of_another_type_is_refused_and_its_place_named() -> None:
    plain = as_plain(tree())
    leaf = plain["leaves"][0]
    refused("name is 7, not a valid str", name=7)
    refused("height is True, not a valid int", height=True)
    refused("height is -2, not a valid int", height=-2)
    refused(f"height is {2**62}, not a valid int", height=2**62)
    refused("tall is 1, not a valid bool", tall=1)
    refused("weight is 1, not a valid float", weight=1)
    refused("bark is 'text', not a valid bytes", bark="text")
    refused(r"leaves is \{\}, not a valid list", leaves={})
    refused(r"leaves\[1\].shape\[2\] is None, not a valid int", leaves=[leaf, {**leaf, "shape": [1, 2, None]}])
    refused(r"leaves\[0\].kind is 'square', not one of 'round', 'long'", leaves=[{**leaf, "kind": "square"}])
    refused(rf"leaves\[0\].bounds\[1\] is {2**63}, not a valid integer", leaves=[{**leaf, "bounds": [0, 2**63]}])
    refused(r"leaves\[0\].bounds\[0\] is True, not a valid integer", leaves=[{**leaf, "bounds": [True, 1]}])
    refused(r"leaves\[0\].span has 1 items instead of 2", leaves=[{**leaf, "span": [4]}])
    refused(r"leaves\[0\].span\[1\] is 5, not a valid str", leaves=[{**leaf, "span": [4, 5]}])
    refused(r"by_name\['x.y'\].shape is 2, not a valid list", by_name={"x.y": {**leaf, "shape": 2}})
    refused(r"by_name\[b'x'\] is b'x', not a valid str", by_name={b"x": leaf})
    refused(r"branches\[0\].name is 1, not a valid str", branches=[{**plain, "name": 1}])
    refused(r"notes\['a'\]\[1\] is b'x', which is not plain data", notes={"a": [1, b"x"]})
    refused(r"notes\['a'\] is .*, which is not plain data", notes={"a": msgpack.Timestamp(1)})


def test_missing_and_further_fields_are_refused() -> None:
    leaf = as_plain(tree())["leaves"][0]
    refused("it does not have exactly the fields name, height, tall", color="green")
    refused(r"leaves\[0\] does not have exactly the fields shape, kind, span, bounds", leaves=[{"shape": []}])
    refused(r"leaves\[0\] does not have exactly the fields shape, kind, span, bounds", leaves=[{**leaf, "more": 1}])


def test_what_a_dataclass_refuses_itself_is_refused() -> None:
    leaf = as_plain(tree())["leaves"][0]
    refused(r"leaves\[0\] is no Leaf: 13 is bad luck", leaves=[{**leaf, "shape": [13]}])


@pytest.mark.parametrize(
    "change", [{"dtype": "object"}, {"shape": [7]}, {"shape": [-1, 3]}, {"shape": [1] * 70}, {"data": b"\0"}], ids=str
)
def test_an_array_that_is_none_is_refused(change: dict[str, Any]) -> None:
    refused("rings is no array: ", rings={**as_plain(tree())["rings"], **change})


def test_data_that_is_no_msgpack_is_refused() -> None:
    whole = pack(tree())
    for data in (b"", b"\xc1", whole[:-1], whole + b"\0", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\x81\x90\x01"):
        with pytest.raises(ProgramFormatError, match="^it is not readable msgpack"):
            unpack(Tree, data)
    with pytest.raises(ProgramFormatError, match=r"^it is \[1\], not a valid dict"):
        unpack(Tree, msgpack.packb([1]))


def test_nesting_without_end_is_refused() -> None:
    allowed = tree()
    for _ in range(MAX_NESTING - 3):
        allowed = tree(branches=(allowed,))
    unpack(Tree, pack(allowed))
    for deeper in (tree(branches=(tree(branches=(allowed,)),)), tree(notes={"a": nested_list(MAX_NESTING)})):
        with pytest.raises(ProgramFormatError, match="^it is nested deeper than 64 levels"):
            unpack(Tree, pack(deeper))
    bottomless = b"\x91" * 1000 + b"\xc0"
    with pytest.raises(ProgramFormatError, match=r"^it is \[\[\[.*, not a valid dict"):
        unpack(Tree, bottomless)


def nested_list(levels: int) -> list[Any]:
    return [nested_list(levels - 1)] if levels else []


def test_a_type_that_no_file_can_hold_is_an_error_of_whoever_declares_it() -> None:
    with pytest.raises(TypeError, match="no file can hold a <class 'complex'>"):
        decoder(complex)
    with pytest.raises(TypeError, match="no file can hold a dict"):
        decoder(dict[int, str])
