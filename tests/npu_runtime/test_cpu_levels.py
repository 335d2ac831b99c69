"""CPU levels: which of them a CPU runs, how one is forced, and what is right on all of them; and the native build."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ir_builder import IRBuilder

from npu_compiler import compile
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.files import UNFINISHED
from npu_runtime.background import background_work, current_work
from npu_runtime.cpu import levels
from npu_runtime.cpu.native import bindings, build
from npu_sim.commands.console import _StepLine

RUNNABLE = [level.name for level in levels.this_cpu().levels() if level is not levels.PORTABLE]
SUPPORT = str(Path(__file__).parents[1] / "support")
COMPILER = build.find_compiler()

# As Linux shows them, shortened to what tells CPUs apart.
_V2 = "fpu tsc msr cx16 sse sse2 pni ssse3 sse4_1 sse4_2 popcnt lahf_lm"
_V3 = f"{_V2} fma movbe avx f16c abm bmi1 avx2 bmi2"
_V4 = f"{_V3} avx512f avx512dq avx512cd avx512bw avx512vl"
CPUS = {
    "Intel(R) Core(TM) i7-3770 CPU @ 3.40GHz": ("x86_64", f"{_V2} avx f16c", "x86-64-v2"),
    "AMD EPYC 7763 64-Core Processor": ("x86_64", _V3, "x86-64-v3"),
    "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz": ("x86_64", _V4, "x86-64-v4"),
    "Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz": ("x86_64", f"{_V4} avx512_vnni", "avx512-vnni"),
    "12th Gen Intel(R) Core(TM) i7-12700K": ("x86_64", f"{_V3} avx_vnni", "avx-vnni"),
    "AMD Ryzen 9 9950X 16-Core Processor": (
        "x86_64",
        f"{_V4} avx_vnni avx512_bf16 avx512_vnni",
        "avx512-bf16",
    ),
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
    assert levels.find_level("avx-vnni").features > levels.find_level("v3").features
    others = [level for level in levels.LEVELS if level.name != "avx-vnni"]
    for before, after in zip(others, others[1:], strict=False):
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
from native_on_tensors import native
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
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in RUNNABLE[:-1]), *RUNNABLE[-1:]]
)
def test_a_forced_level_is_used_and_rounds_16_bit_products_once(name: str) -> None:
    environment = os.environ | {levels.VARIABLE: name, "NPU_SIM_NATIVE": "1", "PYTHONPATH": SUPPORT}
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
    flags = [*build.FLAGS, *levels.find_level(name).flags, "-I", str(build.SOURCE_FOLDER), "-w", "-fsyntax-only"]
    for unit in build._units():
        checked = subprocess.run(
            [compiler, *flags, "-x", "c++", "-"], input=build._source(unit), capture_output=True, text=True, check=False
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


def test_a_sanitizer_has_a_library_of_its_own(fake_compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, made = levels.find_level("x86-64-v3"), []
    for name in ("", "thread", "address"):
        monkeypatch.setenv("NPU_SIM_SANITIZE", name)
        made.append(build.build(fake_compiler, level).path)
    assert len(set(made)) == 3
    monkeypatch.setenv("REFUSES", "-fsanitize=thread")
    monkeypatch.setenv("NPU_SIM_SANITIZE", "thread")
    made[1].unlink()
    for path in made[1].parent.glob("*.o"):
        path.unlink()
    with pytest.raises(build.CompilerError, match="unknown option -fsanitize=thread"):
        build.build(fake_compiler, level)
    monkeypatch.setenv("NPU_SIM_SANITIZE", "memory")
    with pytest.raises(build.CompilerError, match="names no sanitizer: 'memory'; choose one of thread, address"):
        build.build(fake_compiler, level)


def test_a_library_that_does_not_load_is_one_sentence(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.so").write_text("code")
    monkeypatch.setattr(bindings, "library_path", lambda: tmp_path / "kernels.so")
    with pytest.raises(DeviceError, match="cannot load the native CPU kernels .NPU_SIM_NATIVE=0 does without.: .*"):
        bindings.library.__wrapped__()


def test_a_build_tells_how_far_it_is(fake_compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []

    @contextmanager
    def recorded(text: str) -> Iterator[Callable[[str], None]]:
        with background_work(text) as say:
            yield lambda text: (say(text), said.append(current_work()))[0]

    monkeypatch.setattr(build, "background_work", recorded)
    build.build(fake_compiler, levels.find_level("x86-64-v3"))
    units = len(build._units())
    start = "compiling the CPU kernels, once on this machine"
    assert [re.sub(", about [0-9]+ s left$", "", str(text)) for text in said] == [
        f"{start}: {done} of {units}" for done in range(units + 1)
    ]
    assert "left" in str(said[1]) and "left" not in str(said[0])
    assert current_work() is None


def test_a_build_says_that_it_waits_for_another_process(fake_compiler: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=build.build, args=(fake_compiler, levels.find_level("x86-64-v3")))
        waiting.start()
        while current_work() != "waiting for another process that compiles the CPU kernels":
            assert waiting.is_alive()
            time.sleep(0.01)
    waiting.join()
    assert current_work() is None


def test_a_step_of_a_command_shows_what_it_may_be_waiting_for() -> None:
    line = _StepLine("running model on cpu")
    with background_work("compiling: 2 of 4"):
        assert line.__rich__() == "running model on cpu (compiling: 2 of 4)"
    assert line.__rich__() == "running model on cpu"


def test_a_command_says_that_it_compiles_and_once_what_it_costs_where_it_cannot(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = IRBuilder("tiny")
    x = g.input("x", 2, 3)
    g.output(g("aten.relu.default", x), g("aten.neg.default", x))
    compile(g.ir()).save(tmp_path / "tiny.npubin")
    monkeypatch.setenv("REFUSES", "-fPIC")
    monkeypatch.setenv("CXX", fake_compiler)
    command = [sys.executable, "-m", "npu_sim.cli", "run", str(tmp_path / "tiny.npubin"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.count("float32[2, 3]") == 2, done.stderr
    assert "compiling the CPU kernels for " in done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and "unknown option -fPIC); PyTorch's kernels run on float32 copies" in warned[0]


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
    left = tmp_path / "cache" / f"{UNFINISHED}abc"
    left.mkdir(parents=True)
    (left / "linear.o").write_text("half")
    assert build.build(fake_compiler, levels.find_level("x86-64-v3")).path.exists()
    assert not list(left.parent.glob(f"{UNFINISHED}*"))


@pytest.mark.parametrize("damage", [b"", b"another file", None])
@pytest.mark.parametrize("kind", ["kernels-*.so", "linear-*.o"])
def test_a_wrong_file_in_the_cache_is_built_again(
    fake_compiler: str, tmp_path: Path, kind: str, damage: bytes | None
) -> None:
    level = levels.find_level("x86-64-v3")
    library = build.build(fake_compiler, level)
    (wrong,) = library.path.parent.glob(kind)
    whole = {path: path.read_bytes() for path in library.path.parent.iterdir()}
    wrong.write_bytes(whole[wrong][:-3] if damage is None else damage)
    if wrong != library.path:
        library.path.unlink()
    made = runs(tmp_path)
    assert build.build(fake_compiler, level).seconds is not None
    assert runs(tmp_path) == made + (1 if wrong == library.path else 2), "and nothing else"
    assert {path: path.read_bytes() for path in library.path.parent.iterdir()} == whole


def test_one_failure_to_build_is_the_outcome_for_all_who_ask(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_find", functools.cache(build._find.__wrapped__))
    monkeypatch.setattr(build, "this_cpu", lambda: levels.CPU("none", "some CPU", frozenset()))
    monkeypatch.setenv("REFUSES", "-shared")
    monkeypatch.setenv("DELAY", "0.05")
    said: list[str | None] = []
    threads = [threading.Thread(target=lambda: said.append(build.failure_reason())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 3 and len(set(said)) == 1 and "unknown option -shared" in str(said[0])
    assert runs(tmp_path) == len(build._units())


def test_a_full_disk_is_found_before_compiling_and_said(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        if folder.is_relative_to(tmp_path / "cache"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "_check_room", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    level = levels.find_level("x86-64-v3")
    with pytest.warns(
        UserWarning, match="cannot write to the cache folder '.*cache' .No space left on device."
    ) as said:
        library = build.build(fake_compiler, level)
    assert len(said) == 1 and library.path.parent == tmp_path / f"npu-simulation-{os.getuid()}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = build.build(fake_compiler, level)
    assert (again.path, again.seconds) == (library.path, None), "it is found there, and the reason is not said again"


def test_without_a_writable_cache_the_build_goes_to_a_folder_of_the_users(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="cannot write to the cache folder"):
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
        outcome = build._find.__wrapped__()
    assert isinstance(outcome, build.Library) and outcome.level.name == "x86-64-v2"


def test_a_forced_level_is_built_in_place_of_the_best(fake_compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_at(monkeypatch, "x86-64-v4")
    built = []
    for name in ("", "v2", "v3"):
        monkeypatch.setenv(levels.VARIABLE, name)
        outcome = build._find.__wrapped__()
        assert isinstance(outcome, build.Library)
        built.append(outcome.level.name)
    assert built == ["x86-64-v4", "x86-64-v2", "x86-64-v3"]


def test_a_forced_level_that_the_compiler_cannot_build_is_an_error(
    fake_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_at(monkeypatch, "x86-64-v4")
    monkeypatch.setenv("REFUSES", "-march=x86-64-v3")
    monkeypatch.setenv(levels.VARIABLE, "v3")
    monkeypatch.setattr(build, "_find", functools.cache(build._find.__wrapped__))
    for _ in range(2):
        with pytest.raises(DeviceError, match="CPU level x86-64-v3, which NPU_SIM_CPU_LEVEL asks for, cannot be built"):
            build.compiled_library()


def test_a_build_says_why_there_is_no_library(
    fake_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSES", "-shared")
    assert "unknown option -shared" in build._find.__wrapped__()
    assert not list((tmp_path / "cache").glob("kernels-*.so"))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert "no C++ compiler" in build._find.__wrapped__()
    monkeypatch.setenv("NPU_SIM_NATIVE", "0")
    assert "NPU_SIM_NATIVE" in build._find.__wrapped__()


def test_find_compiler_looks_at_cxx_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "mine")
    assert build.find_compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.find_compiler() == str(tmp_path / "c++")
