"""Entries of the cache folder: checked before use, written whole or not at all, and nothing left of killed writers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import OpLevelTarget, files
from npu_compiler.files import UNFINISHED, seal, unseal, working_folder, write_atomically
from npu_runtime import cache_folder
from npu_runtime.cpu.native.build import find_compiler
from npu_sim.cache import cached_facts, cached_program, has_program, package_version
from release.programs import bring


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@given(st.binary(), st.data())
def test_a_seal_breaks_with_any_change(content: bytes, data: st.DataObject) -> None:
    sealed = seal(content, "name")
    assert unseal(sealed, "name") == content and unseal(sealed, "other") is None
    at = data.draw(st.integers(0, len(sealed) - 1))
    flipped = sealed[:at] + bytes([sealed[at] ^ data.draw(st.integers(1, 255))]) + sealed[at + 1 :]
    assert [unseal(wrong, "name") for wrong in (flipped, sealed[:at], sealed + b"\n")] == [None] * 3


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_sealed_library_loads(tmp_path: Path) -> None:
    source, made = 'extern "C" int answer() { return 42; }', tmp_path / "made.so"
    command = [str(find_compiler()), "-x", "c++", "-shared", "-fPIC", "-", "-o", str(made)]
    subprocess.run(command, input=source, text=True, check=True)
    cache_folder.write_entry(tmp_path / "sealed.so", made.read_bytes())
    assert ctypes.CDLL(str(tmp_path / "sealed.so")).answer() == 42


@pytest.mark.parametrize("wrong", [b"", b"{", b'"of another shape"', b'{"of": "another shape"}', None])
def test_a_wrong_fact_is_found_out_again(cache: Path, wrong: bytes | None) -> None:
    assert cached_facts("fact", "key", lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    (path,) = cache.glob("fact-*.json")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if wrong is None else wrong)
    assert cached_facts("fact", "key", lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    assert path.read_bytes() == whole
    assert cached_facts("fact", "key", lambda: pytest.fail("it is in the cache")) == {"a": [1, 2]}


def test_facts_of_another_version_of_a_package_are_found_out_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, finds in (("1.0", 1), ("1.0+cpu", 1), ("2.0", 2), ("1.0", 2)):
        monkeypatch.setattr("npu_sim.cache.version", lambda _, number=number: number)
        package_version.cache_clear()
        cached_facts("fact", "key", lambda: 1, ["torch"])
        assert len(list(cache.iterdir())) == finds
    package_version.cache_clear()


def test_what_a_wheel_brings_holds_with_any_version(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_facts("fact", "key", lambda: "old", ["numpy"])
    ir = linear_ir()
    cached_program("program", "key", lambda: ir, packages=["numpy"])
    monkeypatch.setattr("npu_sim.cache.SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    for path in cache.iterdir():
        bring(path, tmp_path / "shipped")
        path.unlink()
    monkeypatch.setattr("npu_sim.cache.package_version", lambda _: pytest.fail("no version is asked for"))
    assert cached_facts("fact", "key", lambda: pytest.fail("it is shipped"), ["numpy"]) == "old"
    assert has_program("program", "key", OpLevelTarget(), packages=["numpy"])
    program = cached_program("program", "key", lambda: pytest.fail("it is shipped"), packages=["numpy"])
    assert program.weight_specs and not list(cache.iterdir())


@pytest.mark.parametrize("key", ["another", "damaged"])
def test_what_a_wheel_brings_is_passed_over_where_it_does_not_fit(
    key: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_facts("fact", "damaged", lambda: "old", ["numpy"])
    monkeypatch.setattr("npu_sim.cache.SHIPPED", tmp_path)
    for path in cache.iterdir():
        bring(path, tmp_path)
        path.unlink()
    for path in tmp_path.glob("fact-*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert cached_facts("fact", key, lambda: "new", ["numpy"]) == "new"


def linear_ir() -> dict[str, Any]:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 2, 4), g.weight("weight", 3, 4)))
    return g.ir()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in "abc":
            assert cached_facts("fact", key, lambda: 1) == 1
    (only,) = caught
    assert str(only.message).startswith(f"cannot write to the cache folder '{tmp_path / 'file'}' (")
    assert "NPU_SIM_CACHE can name another folder" in str(only.message)


WRITER = """
import sys
from pathlib import Path
from npu_compiler import OpLevelTarget, files
with files.working_folder(Path(sys.argv[1])):
    files._begin(Path(sys.argv[1]), files._create_file)
    print("writing", flush=True)
    sys.stdin.read()
"""


def unfinished(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{UNFINISHED}*"))


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
    assert len(unfinished(tmp_path)) == 4
    writers[0].kill()
    writers[0].wait()
    write_atomically(tmp_path / "file", b"content")
    left = unfinished(tmp_path)
    assert len(left) == 2 and {path.is_dir() for path in left} == {True, False}
    writers[1].communicate()
    files.remove_leftovers.cache_clear()
    write_atomically(tmp_path / "file", b"content")
    assert unfinished(tmp_path) == [] and (tmp_path / "file").read_bytes() == b"content"


def test_a_remover_that_comes_before_the_lock_costs_another_try(tmp_path: Path) -> None:
    made: list[Path] = []

    def create(path: Path) -> int:
        handle = files._create_file(path)
        if not made:
            files._remove_leftover(path)
        made.append(path)
        return handle

    path, _ = files._begin(tmp_path, create)
    assert len(made) == 2 and unfinished(tmp_path) == [path]


def test_a_working_folder_is_removed_with_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), working_folder(tmp_path) as folder:
        (folder / "output").write_bytes(b"1")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("n" * 255), b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]
