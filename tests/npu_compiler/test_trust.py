"""A device runs only this user's code, code that a trusted key signed, and code that the caller allows."""

from __future__ import annotations

import hashlib
import stat
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import pytest
from ir_builder import IRBuilder
from typer.testing import CliRunner

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.target import CUDA_GPU
from npu_compiler import (
    CompiledProgram,
    DeviceError,
    InputError,
    OpLevelTarget,
    ProgramFormatError,
    UntrustedProgramError,
    compile,
)
from npu_compiler.compiled_program import FORMAT_VERSION, MAGIC, sign_program
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.signatures import distrust_key, make_key_pair, trust_key, trusted_keys
from npu_runtime import CPUBackend, Executor, register_device
from npu_sim.cache import compile_cached
from npu_sim.cli import app


class CodeTarget(OpLevelTarget):
    """Op-level programs for a target whose programs are code."""

    config = CUDA_GPU


class CodeDevice(CPUBackend):
    """Runs them on the CPU.

    Attributes:
        handed_over: Whether any program came as far as this device.
    """

    config = CUDA_GPU
    runs_targets = (CUDA_GPU.name,)

    def __init__(self) -> None:
        super().__init__(native=False)
        self.handed_over = False

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        self.handed_over = True
        super().compile(calls, sources)


def ir(name: str = "net") -> dict[str, Any]:
    g = IRBuilder(name)
    return g.output(g("aten.relu.default", g.input("x", 4))).ir()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's configuration folder."""
    return move_to(tmp_path / "home", monkeypatch)


def move_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Become a user whose configuration is there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home / "npu-simulation"


@pytest.fixture
def program() -> CompiledProgram:
    return compile(ir(), CodeTarget())


def envelope(data: bytes) -> list[Any]:
    return msgpack.unpackb(data[len(MAGIC) :])  # type: ignore[no-any-return]


def sealed(body: bytes, authentication: Any) -> bytes:
    return MAGIC + bytes(msgpack.packb([FORMAT_VERSION, hashlib.sha256(body).digest(), body, authentication]))


def runs(program: CompiledProgram) -> bool:
    outputs = Executor(program, CodeDevice()).run({"x": np.array([-1.0, 0.0, 1.0, 2.0], np.float32)})
    return bool((next(iter(outputs.values())).to_numpy() == [0, 0, 1, 2]).all())


def refused(program: CompiledProgram, because: str) -> None:
    """Check that no device sees anything of an untrusted program, while it can be described."""
    assert str(program.trust) == "unknown" and "contains code: unknown" in program.describe()
    device = CodeDevice()
    ways_out = r"compile it here from its IR, .*`npu-sim sign`.*`npu-sim trust`.*--allow-code .*allow_code=True"
    with pytest.raises(UntrustedProgramError, match=f"is not run because .*{because}.*; {ways_out}"):
        Executor(program, device)
    assert not device.handed_over


def test_what_this_user_compiled_runs_from_its_file_too(program: CompiledProgram, home: Path, tmp_path: Path) -> None:
    assert str(program.trust) == "made here" and runs(program)
    assert not home.exists(), "the key is made when it is needed"
    program.save(tmp_path / "net.npubin")
    loaded = CompiledProgram.load(tmp_path / "net.npubin")
    assert str(loaded.trust) == "made here" and runs(loaded)
    assert loaded.to_bytes() == program.to_bytes()
    assert (home / "key").stat().st_size == 32 and [path.name for path in home.iterdir()] == ["key"]
    if sys.platform != "win32":
        assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600 and stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_program_of_cuda_is_code_whether_it_has_sources_or_not(program: CompiledProgram) -> None:
    whole = compile(ir(), CUDACodegenTarget())
    assert whole.plan.sources and whole.contains_code and not program.plan.sources and program.contains_code
    for made in (whole, program):
        assert envelope(made.to_bytes())[3].keys() == {"hmac"}


def test_a_program_for_the_cpu_is_data(home: Path) -> None:
    program = compile(ir())
    assert envelope(program.to_bytes())[3] == {} and not home.exists()
    loaded = CompiledProgram.from_bytes(program.to_bytes())
    assert "code" not in loaded.describe()
    Executor(loaded, CPUBackend(native=False)).run({"x": np.zeros(4, np.float32)})


def test_a_changed_body_is_not_run(program: CompiledProgram) -> None:
    _, _, body, authentication = envelope(program.to_bytes())
    changed = body.replace(b"relu_kernel", b"cell_kernel")
    assert changed != body
    loaded = CompiledProgram.from_bytes(sealed(changed, authentication))
    refused(loaded, "it was made by another user or changed since")
    refused(replace(loaded, name="copy"), "changed since")


def test_another_users_program_is_not_run_unless_allowed(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.save(tmp_path / "net.npubin")
    move_to(tmp_path / "other", monkeypatch)
    compile(ir(), CodeTarget()).save(tmp_path / "own.npubin")
    refused(CompiledProgram.load(tmp_path / "net.npubin"), "it was made by another user or changed since")
    allowed = CompiledProgram.load(tmp_path / "net.npubin", allow_code=True)
    assert str(allowed.trust) == "allowed" and runs(allowed)
    allowed.save(tmp_path / "again.npubin")
    refused(CompiledProgram.load(tmp_path / "again.npubin"), "neither a signature nor this user's key vouches for it")


def test_a_signed_program_runs_where_its_key_is_trusted(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net.npubin"
    program.save(file)
    public, fingerprint = make_key_pair(tmp_path / "author")
    assert sign_program(file, tmp_path / "author") == fingerprint
    assert str(CompiledProgram.load(file).trust) == "made here"
    move_to(tmp_path / "other", monkeypatch)
    refused(CompiledProgram.load(file), f"by the key {fingerprint}, which is not trusted here")
    assert trust_key(public) == fingerprint and [*trusted_keys()] == [fingerprint]
    signed = CompiledProgram.load(file)
    assert str(signed.trust) == f"signed by {fingerprint}" and runs(signed)
    distrust_key(fingerprint)
    refused(CompiledProgram.load(file), "which is not trusted here")
    with pytest.raises(InputError, match=f"no trusted key has the fingerprint '{fingerprint}'"):
        distrust_key(fingerprint)


def test_a_signature_of_something_else_or_by_someone_else_is_none(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = {}
    for author in ("trusted", "stranger"):
        public, _ = make_key_pair(tmp_path / author)
        for name in ("net", "other"):
            file = tmp_path / f"{name}.npubin"
            compile(ir(name), CodeTarget()).save(file)
            sign_program(file, tmp_path / author)
            signatures[author, name] = envelope(file.read_bytes())[3]
    move_to(tmp_path / "reader", monkeypatch)
    trust_key(tmp_path / "trusted.pub")
    body = envelope(program.to_bytes())[2]
    own, swapped, strange = signatures["trusted", "net"], signatures["trusted", "other"], signatures["stranger", "net"]
    assert str(CompiledProgram.from_bytes(sealed(body, own)).trust).startswith("signed by ")
    refused(CompiledProgram.from_bytes(sealed(body, swapped)), "its signature does not fit its content")
    refused(CompiledProgram.from_bytes(sealed(body, strange)), "which is not trusted here")
    forged = {**strange, "public_key": own["public_key"]}
    refused(CompiledProgram.from_bytes(sealed(body, forged)), "its signature does not fit its content")


@pytest.mark.parametrize(
    "authentication",
    [None, [], {"hmac": b""}, {"hmac": "x" * 32}, {"signature": b"x" * 64}, {"public_key": b"x" * 32}, {"pickle": b""}],
    ids=repr,
)
def test_a_malformed_authentication_is_refused(program: CompiledProgram, authentication: Any) -> None:
    body = envelope(program.to_bytes())[2]
    with pytest.raises(ProgramFormatError, match="its envelope is not the expected array"):
        CompiledProgram.from_bytes(sealed(body, authentication))


def test_sources_in_a_program_that_claims_to_have_no_code_are_refused() -> None:
    program = replace(compile(ir(), CUDACodegenTarget()), contains_code=False)
    with pytest.raises(ProgramFormatError, match="has kernel sources, but says that it contains no code"):
        CompiledProgram.from_bytes(program.to_bytes())


def test_without_a_place_for_a_key_programs_are_saved_and_their_refusal_says_why(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    move_to(tmp_path / "file", monkeypatch)
    program.save(tmp_path / "net.npubin")
    refused(
        CompiledProgram.load(tmp_path / "net.npubin"), r"\(cannot read '.*file/npu-simulation/key': Not a directory"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setattr(Path, "home", no_home)
    program.save(tmp_path / "net.npubin")
    refused(CompiledProgram.load(tmp_path / "net.npubin"), r"\(no home; set XDG_CONFIG_HOME\)")
    assert trusted_keys() == {}


def no_home() -> Path:
    raise RuntimeError("no home")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_could_read_or_write_is_not_used(program: CompiledProgram, home: Path, mode: int) -> None:
    data = program.to_bytes()
    (home / "key").chmod(mode)
    refused(CompiledProgram.from_bytes(data), r"cannot be told .*is open to other users.*chmod 600")
    assert envelope(program.to_bytes())[3] == {}


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key_is_not_used(program: CompiledProgram, home: Path, content: bytes) -> None:
    data = program.to_bytes()
    (home / "key").write_bytes(content)
    refused(CompiledProgram.from_bytes(data), "key' is damaged; delete it")
    assert envelope(program.to_bytes())[3] == {}


def test_a_key_that_many_make_at_once_is_one_key(program: CompiledProgram, home: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        files = set(pool.map(lambda _: program.to_bytes(), range(64)))
    assert len(files) == 1 and envelope(files.pop())[3] and [path.name for path in home.iterdir()] == ["key"]


def test_a_cached_program_of_another_user_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "cache"))
    compile_cached(ir(), target=CodeTarget())
    (file,) = (tmp_path / "cache").glob("*.npubin")
    first = file.read_bytes()
    assert runs(compile_cached(ir(), target=CodeTarget())) and file.read_bytes() == first
    move_to(tmp_path / "other", monkeypatch)
    assert runs(compile_cached(ir(), target=CodeTarget()))
    assert envelope(file.read_bytes())[2] == envelope(first)[2] and file.read_bytes() != first


# the commands


def npu_sim(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("command", ["run", "profile"])
def test_the_commands_that_run_a_program_ask_for_trust(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    file = tmp_path / "net.npubin"
    program.save(file)
    register_device("code", CodeDevice)
    npu_sim(command, file, "--device", "code")
    npu_sim("keygen", tmp_path / "author")
    fingerprint = npu_sim("sign", file, "--key", tmp_path / "author").split()[-1]
    move_to(tmp_path / "other", monkeypatch)
    assert "--allow-code" in npu_sim(command, file, "--device", "code", code=2)
    assert "contains code: unknown" in npu_sim("describe", file)
    npu_sim(command, file, "--device", "code", "--allow-code")
    assert npu_sim("trust") == ""
    assert npu_sim("trust", tmp_path / "author.pub") == f"trusted: {fingerprint}\n"
    assert npu_sim("trust").split()[0] == fingerprint
    npu_sim(command, file, "--device", "code")
    npu_sim("trust", "--remove", fingerprint)
    npu_sim(command, file, "--device", "code", code=2)


def test_the_commands_for_keys_say_what_is_wrong(program: CompiledProgram, tmp_path: Path) -> None:
    file, key = tmp_path / "net.npubin", tmp_path / "author"
    program.save(file)
    npu_sim("keygen", key)
    before = key.read_bytes()
    assert f"cannot write '{key}': File exists" in npu_sim("keygen", key, code=2)
    assert key.read_bytes() == before
    if sys.platform != "win32":
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert f"'{key}.pub' holds no private key in PEM format" in npu_sim("sign", file, "--key", f"{key}.pub", code=2)
    assert f"'{key}' holds no public key in PEM format" in npu_sim("trust", key, code=2)
    assert "cannot read '" in npu_sim("trust", tmp_path / "nothing", code=2)
    assert "not both" in npu_sim("trust", f"{key}.pub", "--remove", "x", code=2)
    assert "no trusted key has the fingerprint 'x'" in npu_sim("trust", "--remove", "x", code=2)
    assert "is not a .npubin program" in npu_sim("sign", key, "--key", key, code=2)
    compile(ir()).save(file)
    assert "contains no code: it runs without a signature" in npu_sim("sign", file, "--key", key, code=2)


def test_a_program_for_a_device_without_code_cannot_pass_its_calls_off_as_code() -> None:
    """Calls of code are not checked against declarations, so a device that runs none must not run them."""
    program = replace(compile(ir()), contains_code=True)
    with pytest.raises(DeviceError, match="the program contains code, but this device runs none"):
        Executor(program, CPUBackend())
