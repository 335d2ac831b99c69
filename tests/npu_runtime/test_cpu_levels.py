"""CPU levels: which of them a CPU runs, how one is forced, and what is right on all of them; and the native build."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from npu_compiler.errors import DeviceError, InputError
from npu_runtime.cpu import levels
from npu_runtime.cpu.native import build

RUNNABLE = [level.name for level in levels.this_cpu().levels() if level is not levels.PORTABLE]
COMPILER = build.find_compiler()

# As Linux shows them, shortened to what tells CPUs apart.
_V2 = "fpu tsc msr cx16 sse sse2 pni ssse3 sse4_1 sse4_2 popcnt lahf_lm"
_V3 = f"{_V2} fma movbe avx f16c abm bmi1 avx2 bmi2"
_V4 = f"{_V3} avx512f avx512dq avx512cd avx512bw avx512vl"
CPUS = {
    "Intel(R) Core(TM) i7-3770 CPU @ 3.40GHz": ("x86_64", f"{_V2} avx f16c", "x86-64-v2"),
    "AMD EPYC 7763 64-Core Processor": ("x86_64", _V3, "x86-64-v3"),
    "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz": ("x86_64", _V4, "x86-64-v4"),
    "Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz": ("x86_64", f"{_V4} avx512_vnni", "x86-64-v4"),
    "AMD EPYC 9654 96-Core Processor": ("x86_64", f"{_V4} avx512_bf16 avx512_vnni", "avx512-bf16"),
    "Intel(R) Xeon(R) Platinum 8480+": (
        "x86_64",
        f"{_V4} avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8",
        "amx",
    ),
    "QEMU Virtual CPU version 2.5+": ("x86_64", "fpu tsc msr sse sse2 pni cx16", "portable"),
}
# AArch64 has no model name. Of the big and the little cores, both have what counts.
GRAVITON_3 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes fphp asimdhp cpuid asimdrdm lrcpc asimddp sve bf16 i8mm dgh
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
"""
RASPBERRY_PI_4 = """\
processor\t: 0
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU part\t: 0xd08
Hardware\t: BCM2835
"""


def cpuinfo(model: str, flags: str) -> str:
    core = f"vendor_id\t: some\nmodel name\t: {model}\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\nbogomips\t: 4890.84\n"
    return "".join(f"processor\t: {number}\n{core}\n" for number in range(2))


@pytest.mark.parametrize("model", CPUS)
def test_the_level_of_an_x86_cpu(model: str) -> None:
    machine, flags, expected = CPUS[model]
    cpu = levels.from_cpuinfo(machine, cpuinfo(model, flags))
    assert cpu.model == model
    assert cpu.levels()[-1].name == expected


def test_the_level_of_an_arm_cpu() -> None:
    graviton, raspberry = (levels.from_cpuinfo("aarch64", text) for text in (GRAVITON_3, RASPBERRY_PI_4))
    assert [level.name for level in graviton.levels()] == ["portable", "aarch64", "aarch64-bf16"]
    assert [level.name for level in raspberry.levels()] == ["portable", "aarch64"]
    assert graviton.model == "CPU implementer 0x41, CPU part 0xd40" != raspberry.model
    mixed = levels.from_cpuinfo("aarch64", GRAVITON_3 + RASPBERRY_PI_4)
    assert mixed.levels() == raspberry.levels(), "a thread may move to the core that has less"


def test_the_level_of_a_mac() -> None:
    settings = "hw.optional.floatingpoint: 1\nhw.optional.AdvSIMD: 1\nhw.optional.arm.FEAT_DotProd: 1\n"
    m1 = f"{settings}hw.optional.arm.FEAT_FP16: 1\nhw.optional.arm.FEAT_BF16: 0\nhw.optional.arm.FEAT_I8MM: 0\n"
    assert levels.from_sysctl("aarch64", m1, "Apple M1").levels()[-1].name == "aarch64"
    assert levels.from_sysctl("aarch64", m1.replace(": 0", ": 1"), "Apple M2").levels()[-1].name == "aarch64-bf16"


def test_levels_of_one_architecture_ascend() -> None:
    for before, after in zip(levels.LEVELS, levels.LEVELS[1:], strict=False):
        assert before.machine != after.machine or before.features < after.features


def test_a_level_by_its_short_name() -> None:
    assert levels.find_level("v3") is levels.find_level("x86-64-v3")
    with pytest.raises(InputError, match="unknown CPU level 'v5'; choose one of x86-64-v2, .*aarch64-bf16"):
        levels.find_level("v5")


def test_a_level_that_the_cpu_cannot_run_is_refused() -> None:
    machine, flags, _ = CPUS["AMD EPYC 7763 64-Core Processor"]
    cpu = levels.from_cpuinfo(machine, cpuinfo("EPYC", flags))
    assert levels.forced_on(cpu, "v2").name == "x86-64-v2"
    with pytest.raises(DeviceError, match="cannot run CPU level x86-64-v4: it lacks .*avx512f.*; it runs x86-64-v2, "):
        levels.forced_on(cpu, "x86-64-v4")
    with pytest.raises(DeviceError, match="cannot run CPU level aarch64: it is a x86_64 CPU"):
        levels.forced_on(cpu, "aarch64")


def test_the_identity_of_the_cpu_names_the_forced_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    assert levels.cpu_identity() == f"{levels.this_cpu().model}, {levels.detected_level().name}"
    if RUNNABLE:
        monkeypatch.setenv(levels.VARIABLE, RUNNABLE[0])
        assert levels.cpu_identity().endswith(f", {RUNNABLE[0]}")


ROUNDS_ONCE = """
import sys, torch
from npu_runtime.cpu import native
from npu_runtime.cpu.native.bindings import library
import ctypes

torch.manual_seed(5)
named = library().npu_level
named.restype = ctypes.c_char_p
assert named().decode() == sys.argv[1], named()
for dtype in (torch.bfloat16, torch.float16):
    for rows, columns, inner in ((1, 70, 300), (37, 33, 129), (128, 96, 576)):
        x, weight = torch.randn(rows, inner).to(dtype), (torch.randn(columns, inner) / inner**0.5).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        native.linear(x, native.pack_linear_weight(weight), None, None, "none", out)()
        exact = x.double() @ weight.double().T
        ours = (out.double() - exact).square().mean().sqrt()
        theirs = ((x @ weight.T).double() - exact).square().mean().sqrt()
        assert ours <= 1.25 * theirs, (dtype, rows, ours, theirs)
        # A float32 sum, rounded once: never further off than one rounding of a sum that is off by float32's errors.
        allowed = (0.5 + 1e-3) * torch.finfo(dtype).eps * exact.abs() + 3e-6
        assert ((out.double() - exact).abs() <= allowed).all(), (dtype, rows)
print("right")
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_forced_level_is_used_and_rounds_16_bit_products_once(name: str) -> None:
    environment = os.environ | {levels.VARIABLE: name, "NPU_SIM_NATIVE": "1"}
    command = [sys.executable, "-c", ROUNDS_ONCE, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.skipif(RUNNABLE[-1:] == ["amx"] or "aarch64" in RUNNABLE, reason="this machine runs the highest level")
def test_the_command_refuses_a_level_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "npu_sim.cli", "doctor"]
    environment = os.environ | {levels.VARIABLE: "amx"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "amx forced\n  not in use: this machine cannot run CPU level amx" in done.stdout, done.stderr


def level_checks() -> list[tuple[str, str]]:
    """(compiler, level) for code that no other test here compiles: of levels that this machine does not run, and clang.

    Between AVX-512 and AMX nothing is compiled that is in neither.
    """
    if COMPILER is None or not RUNNABLE:
        return []
    checks = [(COMPILER, name) for name in ("x86-64-v4", "amx") if RUNNABLE[-1].startswith("x86-64-v")]
    clang = shutil.which("clang++")
    return [*(check for check in checks if check[1] not in RUNNABLE), *([(clang, RUNNABLE[-1])] if clang else [])]


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "name"), level_checks())
def test_the_sources_are_valid_at_every_level(compiler: str, name: str) -> None:
    flags = [*build.FLAGS, *levels.find_level(name).flags, "-w", "-fsyntax-only", "-x", "c++", "-"]
    for unit in build._units():
        checked = subprocess.run(
            [compiler, *flags], input=build._source(unit), capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr[-4000:]


# The build, with a compiler that takes no time.

FAKE_COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && { echo fake 1.0; exit; }
for word in "$@"; do case " $REFUSES " in *" $word "*) echo "unknown option $word" >&2; exit 1;; esac; done
while [ "$1" != -o ]; do shift; done
cat > /dev/null < /dev/null
[ -n "$DELAY" ] && sleep "$DELAY"
echo made >> "$LOG"
echo code > "$2"
"""


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script that writes its output file at once; it refuses the options in $REFUSES and counts lines in $LOG."""
    path = tmp_path / "compiler"
    path.write_text(FAKE_COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    monkeypatch.delenv("NPU_SIM_NATIVE", raising=False)
    monkeypatch.setattr(build, "find_compiler", lambda: str(path))
    return str(path)


def runs(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def cpu_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    level = levels.find_level(name)
    monkeypatch.setattr(levels, "this_cpu", lambda: levels.CPU(level.machine, "some CPU", level.features))
    monkeypatch.setattr(build, "this_cpu", levels.this_cpu)


def test_a_build_is_announced_and_the_next_one_comes_from_the_cache(
    fake_compiler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    level = levels.find_level("x86-64-v3")
    with caplog.at_level(logging.INFO):
        first = build.build(fake_compiler, level)
    assert caplog.messages == ["compiling the CPU kernels for x86-64-v3, once on this machine"]
    assert first.seconds is not None and first.path.parent == tmp_path / "cache"
    made = runs(tmp_path)
    again = build.build(fake_compiler, level)
    assert (again.path, again.seconds, runs(tmp_path)) == (first.path, None, made)
    assert build.build(fake_compiler, levels.find_level("x86-64-v2")).path != first.path


def test_two_builds_at_once_do_the_work_once(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAY", "0.05")
    made: list[build.Library] = []
    level = levels.find_level("x86-64-v3")
    threads = [threading.Thread(target=lambda: made.append(build.build(fake_compiler, level))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({library.path for library in made}) == 1 and len(made) == 3
    assert runs(tmp_path) == len(build._units()) + 1


def test_what_an_interrupted_build_left_is_removed(fake_compiler: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "unfinished-abc.o").write_text("half")
    assert build.build(fake_compiler, levels.find_level("x86-64-v3")).path.exists()
    assert not list(folder.glob("unfinished-*"))


def test_without_a_writable_cache_the_build_goes_to_a_folder_of_the_users(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = build.build(fake_compiler, levels.find_level("x86-64-v3"))
    assert library.path.parent == tmp_path / f"npu-simulation-{os.getuid()}"
    library.path.parent.chmod(0o777)
    with pytest.raises(OSError):  # anyone could have put a library there
        build.build(fake_compiler, levels.find_level("x86-64-v2"))


def test_a_compiler_that_cannot_build_a_level_gives_the_next_with_a_warning(
    fake_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_at(monkeypatch, "x86-64-v4")
    monkeypatch.setenv("REFUSES", "-march=x86-64-v4 -march=x86-64-v3")
    with pytest.warns(UserWarning, match="cannot build the native kernels for CPU level x86-64-v4 and x86-64-v3, so"):
        outcome = build._outcome.__wrapped__()
    assert isinstance(outcome, build.Library) and outcome.level.name == "x86-64-v2"


def test_a_forced_level_that_the_compiler_cannot_build_is_an_error(
    fake_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_at(monkeypatch, "x86-64-v4")
    monkeypatch.setenv("REFUSES", "-march=x86-64-v3")
    monkeypatch.setenv(levels.VARIABLE, "v3")
    with pytest.raises(DeviceError, match="CPU level x86-64-v3, which NPU_SIM_CPU_LEVEL asks for, cannot be built"):
        build._outcome.__wrapped__()


def test_a_build_says_why_there_is_no_library(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "-shared")
    assert "unknown option -shared" in build._outcome.__wrapped__()
    assert not list((tmp_path / "cache").glob("kernels-*.so"))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert "no C++ compiler" in build._outcome.__wrapped__()
    monkeypatch.setenv("NPU_SIM_NATIVE", "0")
    assert "NPU_SIM_NATIVE" in build._outcome.__wrapped__()


def test_find_compiler_looks_at_cxx_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "mine")
    assert build.find_compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.find_compiler() == str(tmp_path / "c++")
