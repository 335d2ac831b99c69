"""`CUDABackend`: memory, kernels, products, graphs, errors. Without a GPU, what needs one skips with the reason."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_gpu import PROBLEM
from torch import nn
from torch_ir import extract_ir

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.cuda_program import GemmLaunch, KernelLaunch, LaunchKind, gemm_of
from cuda_runtime import CUDABackend, cuda_device
from cuda_runtime.cublaslt import Addresses, CublasLt, Product, product_key
from cuda_runtime.cuda_backend import CUDALaunch, GraphSequence
from cuda_runtime.cuda_device import wake_driver, waking_driver
from cuda_runtime.dlpack import carrier, retag
from cuda_runtime.kernel_cache import KernelCache
from cuda_runtime.tuned_products import TunedProducts
from npu_compiler import CompiledProgram, DeviceError, TensorSpec, compile, partition
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, contiguous_strides
from npu_runtime import CPUBackend, DAGExecutor, Executor, NPUBuffer, Operand, Profiler, load_weights


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)(test))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CUDABackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield CUDABackend()


def view(name: str, shape: Sequence[int], dtype: str = "float32", offset: int = 0) -> View:
    return View(name, tuple(shape), contiguous_strides(tuple(shape)), offset, dtype)


def since(before: Counter[str], counters: Counter[str]) -> dict[str, int]:
    return {name: count - before[name] for name, count in counters.items() if count != before[name]}


def test_without_cupy_the_package_imports_and_opening_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from cuda_runtime import CUDABackend\n"
        "try: CUDABackend()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("DeviceError the CUDA device needs CuPy")
    assert "pip install 'npu-simulation[cuda13]'" in done.stdout


@pytest.mark.parametrize("gpus", [None, 0, 1, 4])
def test_the_driver_makes_the_context_meanwhile_or_leaves_the_error_to_cupy(
    monkeypatch: pytest.MonkeyPatch, gpus: int | None
) -> None:
    asked: list[tuple[Any, ...]] = []
    meanwhile = threading.Event()

    class Driver:
        def __init__(self, name: str) -> None:
            if gpus is None:
                raise OSError(name)

        def cuInit(self, flags: int) -> int:
            if meanwhile.wait(10):
                asked.append(("init", flags))
            return 0 if gpus else 100  # CUDA_ERROR_NO_DEVICE

        def cuDeviceGet(self, gpu: Any, device_id: ctypes.c_int) -> int:
            asked.append(("gpu", device_id.value))
            gpu._obj.value = 7
            return 0 if device_id.value < (gpus or 0) else 101  # CUDA_ERROR_INVALID_DEVICE

        def cuDevicePrimaryCtxRetain(self, context: Any, gpu: Any) -> int:
            asked.append(("context", gpu.value))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(cuda_device, "find_spec", lambda name: name)
    wake_driver.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(KeyError), waking_driver(2):  # whatever happens in it, the thread has ended behind it
                meanwhile.set()
                raise KeyError
        monkeypatch.setattr(cuda_device, "find_spec", lambda name: None)
        with waking_driver(3):
            pass
    finally:
        wake_driver.cache_clear()
    whole = [("init", 0), ("gpu", 2), ("context", 7)]
    assert asked == {None: [], 0: whole[:1], 1: whole[:2], 4: whole}[gpus]


class NVRTCError(RuntimeError):
    pass


class FakeNVRTC:
    """Compiles to the options and the text; refuses what holds "syntax error"."""

    NVRTCError = NVRTCError

    def __init__(self, version: tuple[int, int] = (13, 0), archs: tuple[int, ...] = (75, 80, 90)) -> None:
        self.version, self.archs = version, archs
        self.programs: dict[int, list[str]] = {}
        self.made = 0

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def getSupportedArchs(self) -> tuple[int, ...]:
        return self.archs

    def createProgram(self, text: str, name: str, headers: tuple[()], names: tuple[()]) -> int:
        self.made += 1
        self.programs[self.made] = [text, name, ""]
        return self.made

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        text, name, _ = self.programs[program]
        if "syntax error" in text:
            self.programs[program][2] = f"{name}(1): error: expected a declaration\n"
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.programs[program][2] = " ".join(options) + text

    def getCUBIN(self, program: int) -> bytes:
        return b"cubin " + self.programs[program][2].encode()

    def getPTX(self, program: int) -> bytes:
        return b"ptx " + self.programs[program][2].encode()

    def getProgramLog(self, program: int) -> str:
        return self.programs[program][2]

    def destroyProgram(self, program: int) -> None:
        del self.programs[program]


def cache(folder: Path, arch: int = 90, **nvrtc: Any) -> tuple[KernelCache, FakeNVRTC, Counter[str]]:
    fake, counters = FakeNVRTC(**nvrtc), Counter[str]()
    return KernelCache(fake, arch, folder, counters), fake, counters


SOURCES = {f"k{index}": f"text {index}" for index in range(5)}


def test_code_is_compiled_once_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    first, fake, counters = cache(tmp_path / "new" / "folder")
    images = first.images(SOURCES)
    assert list(images) == list(SOURCES)
    assert images["k3"].startswith(b"cubin --gpu-architecture=sm_90a ") and images["k3"].endswith(b"text 3")
    assert counters == {"kernels_compiled": 5} and not fake.programs, "every NVRTC program is destroyed"
    second, fake, counters = cache(tmp_path / "new" / "folder")
    assert second.images(SOURCES) == images
    assert counters == {"kernel_cache_hits": 5} and fake.made == 0


@pytest.mark.parametrize("other", [{"arch": 80}, {"version": (12, 9)}, {"archs": (75, 80)}])
def test_code_for_another_architecture_or_by_another_compiler_is_not_taken(tmp_path: Path, other: Any) -> None:
    cache(tmp_path)[0].images(SOURCES)
    again, _, counters = cache(tmp_path, **other)
    again.images(SOURCES)
    assert counters == {"kernels_compiled": 5}


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    first, _, _ = cache(tmp_path)
    images = first.images(SOURCES)
    path = first.path(SOURCES["k2"])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    again, _, counters = cache(tmp_path)
    assert again.images(SOURCES) == images
    assert counters == {"kernels_compiled": 1, "kernel_cache_hits": 4}
    assert path.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    images = cache(tmp_path / "file" / "folder")[0].images(SOURCES)
    assert len(images) == 5


def test_a_gpu_that_nvrtc_does_not_know_gets_ptx_of_the_newest_older_one(tmp_path: Path) -> None:
    made = cache(tmp_path, arch=120)[0].images(SOURCES)
    assert made["k0"].startswith(b"ptx --gpu-architecture=compute_90 ")
    with pytest.raises(
        DeviceError, match=r"NVRTC 13\.0 makes no code for compute capability 7\.0, only for 7\.5 and up"
    ):
        cache(tmp_path, arch=70)


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_log(tmp_path: Path) -> None:
    broken, fake, _ = cache(tmp_path)
    with pytest.raises(DeviceError, match=r"(?s)'bad' does not compile for .*sm_90.*bad\.cu\(1\): error: expected"):
        broken.images({**SOURCES, "bad": "syntax error"})
    assert not fake.programs and not broken.path("syntax error").exists()


def read_matrix(address: int, rows: int, columns: int, ld: int, op: int) -> np.ndarray:
    """op(M) of a column-major float32 matrix in host memory; rows and columns are those of op(M)."""
    stored = (columns, rows) if op else (rows, columns)
    whole = np.ctypeslib.as_array(
        ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), ((stored[1] - 1) * ld + stored[0],)
    )
    matrix = np.lib.stride_tricks.as_strided(whole, stored, (4, 4 * ld))
    return matrix.T if op else matrix


class HostLt:
    """cuBLASLt's column-major products of float32 matrices, in host memory, by NumPy.

    Descriptors are numbered. An algorithm's first byte is its number, and its tile; it offers as many as one asks for.

    Attributes:
        tries: The algorithms that were run.
        broken: Those that do not run.
    """

    def __init__(self, version: int = 130000) -> None:
        self.version = version
        self.made = 0
        self.descriptors: dict[int, dict[Any, Any]] = {}
        self.tries: list[int] = []
        self.broken: set[int] = set()
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            for verb, method in (("Create", self._create), ("Destroy", self._destroy), ("SetAttribute", self._set)):
                setattr(self, f"cublasLt{kind}{verb}", method)

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtGetStatusString(self, status: int) -> bytes:
        return f"status {status}".encode()

    def cublasLtCreate(self, handle: Any) -> int:
        return 0

    def cublasLtDestroy(self, handle: Any) -> int:
        return 0

    def _destroy(self, handle: Any) -> int:
        del self.descriptors[handle.value]
        return 0

    def _create(self, handle: Any, *values: int) -> int:
        self.made += 1
        handle._obj.value = self.made
        self.descriptors[self.made] = {"created": values}
        return 0

    def _set(self, handle: Any, attribute: int, address: int, size: int) -> int:
        self.descriptors[handle.value][attribute] = int.from_bytes(ctypes.string_at(address, size), "little")
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *rest: Any) -> int:
        *_, most, results, count = rest
        for index in range(most):
            results[index].algorithm.data[0] = index
        count._obj.value = most
        return 0

    def cublasLtMatmulAlgoCheck(self, handle: Any, *rest: Any) -> int:
        return 0 if rest[-2]._obj.data[0] < 100 else 15

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: Any, attribute: int, address: int, size: int, written: Any
    ) -> int:
        value = algorithm._obj.data[0] if attribute == 1 else 0
        ctypes.memmove(address, value.to_bytes(size, "little"), size)
        return 0

    def cublasLtMatmul(
        self,
        handle: Any,
        desc: Any,
        alpha: int,
        a: int,
        layout_a: Any,
        b: int,
        layout_b: Any,
        beta: int,
        c: int,
        layout_c: Any,
        d: int,
        layout_d: Any,
        algorithm: Any,
        *workspace: Any,
    ) -> int:
        self.tries.append(algorithm._obj.data[0])
        if self.tries[-1] in self.broken:
            return 15
        options = self.descriptors[desc.value]
        count = self.descriptors[layout_d.value].get(5, 1)
        scale, keep = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        for index in range(count):
            left = self._matrix(a, layout_a, index, options[3])
            right = self._matrix(b, layout_b, index, options[4])
            out = self._matrix(d, layout_d, index, 0)
            result = scale * (left @ right)
            if keep:
                result += keep * self._matrix(c, layout_c, index, 0)
            if options[7] & 4:
                result += read_matrix(options[8], len(result), 1, len(result), 0)
            out[...] = np.maximum(result, 0) if options[7] & 2 else result
        return 0

    def _matrix(self, address: int, layout: Any, index: int, op: int) -> np.ndarray:
        options = self.descriptors[layout.value]
        kind, rows, columns, ld = options["created"]
        assert kind == 0 and ld >= rows
        rows, columns = (columns, rows) if op else (rows, columns)
        return read_matrix(address + 4 * options.get(6, 0) * index, rows, columns, ld, op)


class FakeDevice:
    """Enough of a `CUDADevice` for what only enqueues."""

    arch = 90
    failures = (ArithmeticError,)

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.log: list[str] = []
        self.stream = FakeStream(self.log)

    @contextmanager
    def active(self, doing: str) -> Iterator[None]:
        yield

    def allocate(self, size: int, what: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=0))


class FakeStream:
    """Between begin_capture and end_capture, what is logged goes to the graph instead."""

    ptr = 0

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.before: list[str] | None = None

    def begin_capture(self) -> None:
        assert self.before is None
        self.before = self.log.copy()

    def end_capture(self) -> Any:
        assert self.before is not None
        captured = self.log[len(self.before) :]
        self.log[:], self.before = self.before, None
        return SimpleNamespace(launch=lambda stream: self.log.append(f"graph of {captured}"))


GEMMS = [
    pytest.param(ta, tb, batch, pad, id=f"{'NT'[ta]}{'NT'[tb]}-batch{batch}-pad{pad}")
    for ta in (False, True)
    for tb in (False, True)
    for batch in (1, 3)
    for pad in (0, 2)
]


def gemm_case(
    ta: bool,
    tb: bool,
    batch: int,
    pad: int,
    rng: np.random.Generator,
    activation: str = "none",
    sizes: tuple[int, int, int] = (5, 7, 4),
) -> tuple[KernelCall, list[np.ndarray], np.ndarray]:
    """A product with all that can be added, its padded memory (a, b, bias, residual, out), and what out becomes.

    A batched one has nothing to add. All is exact in 16 bits, sums included.

    Args:
        sizes: m, k and n.
    """
    m, k, n = sizes
    shapes = [(k, m) if ta else (m, k), (n, k) if tb else (k, n), (1, n), (m, n), (m, n)]
    memory = [
        np.round(4 * rng.standard_normal((batch, rows, columns + pad)).astype(np.float32)) / 4
        for rows, columns in shapes
    ]
    memory[3] = np.pad(memory[3], ((0, 0), (0, 0), (0, 8)))
    a, b, bias, residual, out = (whole[:, :, :columns] for whole, (_, columns) in zip(memory, shapes, strict=True))
    adds = batch == 1
    launch = GemmLaunch(
        m=m,
        n=n,
        k=k,
        trans_a=ta,
        trans_b=tb,
        lda=shapes[0][1] + pad,
        ldb=shapes[1][1] + pad,
        ldc=n + pad,
        ldr=n + pad + 8,
        batch=batch,
        stride_a=memory[0][0].size,
        stride_b=memory[1][0].size,
        stride_c=memory[4][0].size,
        stride_r=memory[3][0].size,
        alpha=0.5,
        activation=activation,
        has_bias=adds,
        has_residual=adds,
    )
    expected = 0.5 * (a.swapaxes(1, 2) if ta else a) @ (b.swapaxes(1, 2) if tb else b)
    if adds:
        expected += bias + residual
    else:
        del memory[2:4]
    views = [view(f"operand{index}", array.shape) for index, array in enumerate(memory)]
    call = KernelCall("cublas_gemm", "", tuple(views[:-1]), (views[-1],), launch.params(), "node")
    whole = memory[-1].copy()
    whole[:, :, :n] = np.maximum(expected, 0) if activation == "relu" else expected
    return call, memory, whole


@pytest.mark.parametrize(("ta", "tb", "batch", "pad"), GEMMS)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_row_major_products_are_what_the_column_major_library_is_asked_for(
    ta: bool, tb: bool, batch: int, pad: int, activation: str, rng: np.random.Generator
) -> None:
    call, memory, expected = gemm_case(ta, tb, batch, pad, rng, activation)
    library, device = HostLt(), HostDevice()
    lt = CublasLt(device, library)  # type: ignore[arg-type]
    product = Product(lt, call, Addresses.of(call, [array.ctypes.data for array in memory]))
    launch = product.launch(product.algorithms(1)[0])
    del product
    launch()
    np.testing.assert_allclose(memory[-1], expected, rtol=1e-5, atol=1e-5)
    del launch
    assert not library.descriptors, "every descriptor is destroyed with its product"


def test_a_product_that_the_library_refuses_is_a_device_error_with_its_words(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    call, memory, _ = gemm_case(False, False, 1, 0, rng)
    library = HostLt()
    library.broken = {0}
    device: Any = HostDevice()
    launch = TunedProducts(device, tmp_path, library).launch(call, [array.ctypes.data for array in memory])
    with pytest.raises(DeviceError, match="cuBLASLt failed at a product of 5x7x4: status 15"):
        launch()


class HostDevice(FakeDevice):
    """Memory is the host's, and time passes when a graph is launched.

    Args:
        milliseconds: What a launch of a graph takes, by the algorithm that the library made the last product in it by.
    """

    def __init__(self, library: HostLt | None = None, milliseconds: dict[int, float] | None = None) -> None:
        super().__init__()
        self.clock = 0.0
        self.properties = {"name": b"GPU", "multiProcessorCount": 132}
        event = lambda: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)  # noqa: E731
        self.runtime = SimpleNamespace(
            memGetInfo=lambda: (2**30, 2**30),
            memcpyDeviceToDevice=3,
            memcpyAsync=lambda to, start, size, *_: ctypes.memmove(to, start, size),
        )
        elapsed = lambda start, end: (milliseconds or {}).get(library.tries[-1], 5.0)  # noqa: E731
        self.cupy = SimpleNamespace(cuda=SimpleNamespace(Event=event, get_elapsed_time=elapsed))

    def allocate(self, size: int, what: str) -> Any:
        memory = np.empty(size + 256, np.uint8)
        start = -memory.ctypes.data % 256
        return SimpleNamespace(data=SimpleNamespace(ptr=memory.ctypes.data + start), nbytes=size, memory=memory)

    def upload(self, memory: Any, data: np.ndarray) -> None:
        ctypes.memmove(memory.data.ptr, data.ctypes.data, data.nbytes)


def tuned(
    folder: Path,
    call: KernelCall,
    milliseconds: dict[int, float] | None = None,
    version: int = 1,
    name: bytes = b"GPU",
    broken: set[int] = frozenset(),
) -> tuple[int, int]:
    """The algorithm that a new process chooses for a call, and how many it tried for it."""
    library = HostLt(version)
    library.broken = set(broken)
    device: Any = HostDevice(library, milliseconds)
    device.properties["name"] = name
    products = TunedProducts(device, folder, library)
    products.tune([call, call])
    tries = len(set(library.tries))
    assert device.counters["tuned"] == bool(tries)
    memory = [np.zeros(10_000, np.float32) for _ in (*call.inputs, *call.outputs)]
    products.launch(call, [-(-array.ctypes.data // 16) * 16 for array in memory])()
    return library.tries[-1], tries


def test_the_fastest_algorithm_is_found_and_kept_for_the_next_process(tmp_path: Path, rng: np.random.Generator) -> None:
    call, _, _ = gemm_case(False, True, 1, 2, rng)
    assert tuned(tmp_path / "new", call, {3: 1.0, 4: 2.0}) == (3, 16)
    assert tuned(tmp_path / "new", call, {4: 0.1}) == (3, 0), "nothing is tried again"
    assert tuned(tmp_path / "new", call, {4: 0.1}, version=2) == (4, 16), "another version has other algorithms"
    assert tuned(tmp_path / "new", call, {5: 0.1}, name=b"other GPU") == (5, 16)
    other = replace(call, params={**call.params, "m": 4})
    assert tuned(tmp_path / "new", other, {6: 0.1}) == (6, 16)
    scaled = replace(call, params={**call.params, "alpha": 2.0})
    assert tuned(tmp_path / "new", scaled) == (3, 0), "a factor makes no difference"


def test_algorithms_that_do_not_run_are_passed_over(tmp_path: Path, rng: np.random.Generator) -> None:
    call, _, _ = gemm_case(False, False, 1, 0, rng)
    assert tuned(tmp_path, call, {3: 1.0, 4: 2.0}, broken={0, 3}) == (4, 16)


def test_a_choice_among_algorithms_none_of_which_ran_is_not_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    call, _, _ = gemm_case(False, False, 1, 0, rng)
    with pytest.raises(DeviceError):
        tuned(tmp_path, call, broken=set(range(99)))
    assert not list(tmp_path.iterdir())
    assert tuned(tmp_path, call, {3: 1.0}) == (3, 16)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"algorithm": "0300', '"algorithm": "0400'),
        lambda text: text.replace('"algorithm": "0300', '"algorithm": "ff00'),
        lambda text: text.replace('"algorithm": "0300', '"algorithm": "03'),
    ],
    ids=["empty", "cut", "another-form", "another-config", "unusable", "short"],
)
def test_a_choice_that_cannot_be_right_is_made_anew(tmp_path: Path, rng: np.random.Generator, damage: Any) -> None:
    call, _, _ = gemm_case(False, False, 1, 0, rng)
    tuned(tmp_path, call, {3: 1.0})
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    assert tuned(tmp_path, call, {3: 1.0}) == (3, 16)
    assert path.read_text() == text


def test_what_cannot_be_kept_or_tried_still_runs(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "file").write_bytes(b"")
    call, _, _ = gemm_case(False, False, 1, 0, rng)
    assert tuned(tmp_path / "file" / "folder", call, {3: 1.0}) == (3, 16)
    huge = replace(call, params={**call.params, "k": 2**20, "lda": 2**20, "ldb": 2**20})
    library = HostLt()
    device: Any = HostDevice(library)
    TunedProducts(device, tmp_path, library).tune([huge])
    assert not library.tries


def test_the_key_of_a_product_tells_all_that_matters(rng: np.random.Generator) -> None:
    call, _, _ = gemm_case(False, False, 1, 0, rng)
    at = Addresses(16, 32, 48, 64, 128)
    keys = {product_key(call, at)}
    gemm = gemm_of(call)
    names = [each.name for each in fields(gemm)]
    others = [replace(gemm, **{name: 9}) for name in names]  # type: ignore[arg-type]
    keys |= {product_key(replace(call, params=other.params()), at) for other in others}
    assert len(keys) == len(names), "all but alpha"
    keys |= {product_key(call, replace(at, **{name: 1000 + 2})) for name in vars(at)}
    assert len(keys) == len(names) + 5


def launches(device: Any, *names: str) -> list[CUDALaunch]:
    call = KernelCall("k", "", (), (), {}, "node")
    return [CUDALaunch(device, call, lambda name=name: device.log.append(name), None) for name in names]


def test_a_sequence_runs_plainly_then_captures_then_replays() -> None:
    device = FakeDevice()
    sequence: Any = GraphSequence(device, launches(device, "a", "b"))  # type: ignore[arg-type]
    for _ in range(3):
        sequence()
    assert device.log == ["a", "b", "graph of ['a', 'b']", "graph of ['a', 'b']"]
    assert device.counters == {"launches": 2, "captures": 1, "graph_launches": 2}


def test_a_failure_during_a_capture_ends_it_and_names_the_kernel() -> None:
    device = FakeDevice()
    calls: list[int] = []

    def second_time_fails() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("invalid argument")

    bad = CUDALaunch(device, KernelCall("bad_kernel", "", (), (), {}, "the node"), second_time_fails, None)  # type: ignore[arg-type]
    sequence = GraphSequence(device, [*launches(device, "a"), bad])  # type: ignore[arg-type]
    sequence()
    with pytest.raises(DeviceError, match="kernel 'bad_kernel' of node 'the node' does not start: invalid argument"):
        sequence()
    assert device.stream.before is None, "the stream is still capturing"
    sequence()
    assert device.log == ["a", "graph of ['a']"]


@pytest.mark.parametrize(("dtype", "values"), [("bfloat16", [1.5, -3.0]), ("bool", [True, False]), ("int32", [7, -1])])
@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}], ids=["unversioned", "versioned"])
def test_a_capsule_says_what_it_holds(dtype: str, values: list[Any], options: dict[str, Any]) -> None:
    class Exporter:
        memory = np.array(values).astype(numpy_dtype(dtype))

        def __dlpack__(self, **_: Any) -> Any:
            return retag(self.memory.view(carrier(dtype)).__dlpack__(**options), dtype)

        def __dlpack_device__(self) -> Any:
            return self.memory.view(carrier(dtype)).__dlpack_device__()

    tensor = torch.from_dlpack(Exporter())
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.tolist() == values


def test_a_plan_is_compiled_for_the_backend_that_runs_it() -> None:
    assert CUDABackend.config == CUDACodegenTarget.config
    assert CUDABackend.config.name == "cuda_gpu"
    assert CPUBackend().target.config == CPUBackend.config


def test_a_program_for_cuda_is_refused_elsewhere() -> None:
    program = CompiledProgram("p", "cuda_gpu", "float16", block_program().plan)
    with pytest.raises(DeviceError, match="compiled for 'cuda_gpu', but this device runs 'op_level' and 'metal_gpu'"):
        Executor(program, CPUBackend())


@on_gpu
def test_the_device_has_a_name_and_wrong_numbers_are_refused(backend: CUDABackend) -> None:
    assert backend.device.startswith("CUDA, ") and "GiB" in backend.device
    with pytest.raises(DeviceError, match=r"there is no GPU 99: this machine has \d+, counted from 0"):
        CUDABackend(99)


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5)])
def test_arrays_come_back_as_they_went(
    backend: CUDABackend, rng: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> None:
    data = rng.integers(0, 2, shape) if dtype == "bool" else 10 * rng.standard_normal(shape)
    data = np.asarray(data).astype(numpy_dtype(dtype))
    buffer = backend.allocate_buffer(data)
    copied = buffer.copy()
    np.testing.assert_array_equal(buffer.to_numpy(), data)
    buffer.write(np.zeros_like(data))
    np.testing.assert_array_equal(copied.to_numpy(), data)
    assert not buffer.to_numpy().any()
    assert not backend.allocate_zeros(shape, dtype).to_numpy().any()


@on_gpu
def test_an_upload_may_be_larger_than_the_staging_memory_and_its_source_changed_at_once(
    backend: CUDABackend, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 2**31, 30_000_001).astype(np.int32)
    expected = data.copy()
    buffer = backend.allocate_buffer(data)
    data[:] = 0
    np.testing.assert_array_equal(buffer.to_numpy(), expected)


@on_gpu
def test_padding_is_added_and_removed(backend: CUDABackend, rng: np.random.Generator) -> None:
    data = rng.standard_normal((1, 3, 2, 2)).astype(np.float32)
    spec = TensorSpec("x", data.shape, "float32", "float16", (1, 8, 2, 2))
    buffer = backend.allocate_buffer(data, spec=spec)
    np.testing.assert_allclose(buffer.to_numpy(spec), data, rtol=1e-3)
    np.testing.assert_allclose(buffer.array().get(), data, rtol=1e-3)


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_dlpack_shares_the_memory(backend: CUDABackend, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch was built without CUDA")
    buffer = backend.allocate_buffer(np.array([[1, 0, 1], [0, 1, 1]]).astype(numpy_dtype(dtype)))
    tensor = torch.from_dlpack(buffer)
    assert str(tensor.dtype) == f"torch.{dtype}" and tensor.shape == (2, 3)
    tensor[0, 1] = 1
    torch.cuda.synchronize()
    assert buffer.to_numpy()[0, 1] == 1
    del buffer
    assert tensor.float().sum().item() == 5, "the tensor keeps the memory"


@on_gpu
def test_running_out_of_memory_says_what_was_asked_and_what_is_free(backend: CUDABackend) -> None:
    with pytest.raises(
        DeviceError, match=r"out of memory: float32\[.*\] takes \d+\.\d\d GiB, but .* of the GPU's .* free"
    ):
        backend.allocate_zeros((2**20, 2**20), "float32")
    with pytest.raises(DeviceError, match="does not store int64"):
        backend.allocate_zeros((1,), "int64")
    assert not backend.allocate_zeros((4,), "float32").to_numpy().any()


TWICE = """
extern "C" __global__ void twice(const float *x, float *out) {
    extern __shared__ float staged[];
    staged[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = 2 * staged[threadIdx.x];
}
"""


def twice(shared: int = 128, block: int = 32, source: str = "twice", **views: View) -> KernelCall:
    x, out = views.get("x", view("x", (32,))), views.get("out", view("out", (32,)))
    launch = KernelLaunch((1, 1, 1), (block, 1, 1), shared, LaunchKind.KERNEL)
    return KernelCall("twice", source, (x,), (out,), launch.params(), "n")


@on_gpu
@pytest.mark.parametrize("shared", [128, 100_000])
def test_a_kernel_sees_the_first_elements_of_its_views(
    backend: CUDABackend, rng: np.random.Generator, shared: int
) -> None:
    data = rng.standard_normal(100).astype(np.float32)
    x, out = backend.allocate_buffer(data), backend.allocate_zeros((100,), "float32")
    call = twice(shared, x=view("x", (32,), offset=3), out=view("out", (32,), offset=5))
    backend.compile([call], {"twice": TWICE})
    backend.prepare(call, [Operand(x, call.inputs[0], 40, False)], [Operand(out, call.outputs[0], 80, False)])()
    expected = np.zeros(100, np.float32)
    expected[25:57] = 2 * data[13:45]
    np.testing.assert_array_equal(out.to_numpy(), expected)


@on_gpu
def test_sequences_replay_as_one_graph_and_times_are_the_devices(backend: CUDABackend) -> None:
    buffers = [backend.allocate_buffer(np.full(32, value, np.float32)) for value in (1, 0, 0)]
    call = twice()
    backend.compile([call], {"twice": TWICE})
    steps = [
        backend.prepare(call, [Operand(a, call.inputs[0], 0, False)], [Operand(b, call.outputs[0], 0, False)])
        for a, b in zip(buffers, buffers[1:], strict=False)
    ]
    sequence = backend.sequence(steps)
    for value, made in [(1, {"launches": 2}), (3, {"captures": 1, "graph_launches": 1}), (5, {"graph_launches": 1})]:
        buffers[0].write(np.full(32, value, np.float32))
        before = backend.counters.copy()
        sequence()
        assert since(before, backend.counters) == made
        assert (buffers[2].to_numpy() == 4 * value).all()
    assert 0 < backend.timed(steps[0]) < 1
    backend.synchronize()


@on_gpu
def test_kernels_that_cannot_be_had_are_device_errors(backend: CUDABackend) -> None:
    backend.compile([twice()], {"twice": TWICE})
    backend.compile([twice()])
    operands = [Operand(backend.allocate_zeros((32,), "float32"), view(name, (32,)), 0, False) for name in ("x", "out")]
    with pytest.raises(DeviceError, match="contains no source 'absent' for kernel 'twice'"):
        backend.compile([twice(source="absent")], {"twice": TWICE})
    with pytest.raises(DeviceError, match="two programs give different kernel sources the name 'twice'"):
        backend.compile([twice()], {"twice": TWICE + "// another"})
    with pytest.raises(DeviceError, match=r"(?s)'broken' does not compile.*broken\.cu\(1\): error"):
        backend.compile([twice(source="broken")], {"broken": "nonsense"})
    with pytest.raises(DeviceError, match="kernel 'twice' of source 'empty' cannot be used"):
        call = twice(source="empty")
        backend.compile([call], {"empty": "// nothing"})
        backend.prepare(call, operands[:1], operands[1:])
    with pytest.raises(DeviceError, match="kernel 'twice' of source 'twice' is launched with 4096 threads a block"):
        backend.prepare(twice(block=4096), operands[:1], operands[1:])
    with pytest.raises(DeviceError, match="kernel 'twice' of source 'twice' cannot be used"):
        backend.prepare(twice(shared=2**24), operands[:1], operands[1:])


@on_gpu
@pytest.mark.parametrize(("ta", "tb", "batch", "pad"), GEMMS)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_products_by_cublas(
    backend: CUDABackend,
    ta: bool,
    tb: bool,
    batch: int,
    pad: int,
    dtypes: tuple[str, str],
    activation: str,
    rng: np.random.Generator,
) -> None:
    call, memory, expected = gemm_case(ta, tb, batch, 4 * pad, rng, activation, (24, 16, 8))
    kinds = [dtypes[0]] * 2 + [dtypes[1]] * (len(memory) - 2)
    views = [replace(v, dtype=kind) for v, kind in zip((*call.inputs, *call.outputs), kinds, strict=True)]
    call = replace(call, inputs=tuple(views[:-1]), outputs=(views[-1],))
    backend.compile([call])
    buffers = [
        backend.allocate_buffer(array.astype(numpy_dtype(kind))) for array, kind in zip(memory, kinds, strict=True)
    ]
    operands = [Operand(buffer, at, 0, False) for buffer, at in zip(buffers, views, strict=True)]
    sequence = backend.sequence([backend.prepare(call, operands[:-1], operands[-1:])])
    before = buffers[-1].to_numpy()
    for _ in range(3):
        buffers[-1].write(before)
        sequence()
        got = buffers[-1].to_numpy()
        np.testing.assert_array_equal(got.astype(np.float32), expected)


@on_gpu
def test_what_was_tuned_is_known_to_the_next_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path))
    call, memory, _ = gemm_case(False, True, 1, 0, rng)
    for tuned_now in (1, 0):
        fresh = CUDABackend()
        fresh.compile([call])
        assert fresh.counters["tuned"] == tuned_now
        buffers = [fresh.allocate_buffer(array) for array in memory]
        operands = [
            Operand(buffer, at, 0, False) for buffer, at in zip(buffers, (*call.inputs, *call.outputs), strict=True)
        ]
        fresh.prepare(call, operands[:-1], operands[-1:])()
        result = buffers[-1].to_numpy()
        if tuned_now:
            first = result
    np.testing.assert_array_equal(result, first)


class Block(nn.Module):
    """A convolution, products, a softmax and an in-place cache."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.second, self.third = nn.Linear(64, 16), nn.Linear(16, 24, False), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.relu(self.conv(x)).flatten(2).squeeze(0)
        rows = self.second(self.first(rows))
        return self.third(rows).relu().softmax(-1), cache.index_copy(0, at, rows[:2])


def block_ir() -> Any:
    with torch.device("meta"), torch.no_grad():
        inputs = (torch.empty(1, 3, 8, 8), torch.empty(6, 24), torch.empty(2, dtype=torch.int64))
        return extract_ir(Block().eval(), inputs, model_name="block")


def block_program(backend: CUDABackend | None = None) -> CompiledProgram:
    return compile(block_ir(), backend.target if backend is not None else None)


def block_inputs(rng: np.random.Generator) -> list[np.ndarray]:
    return [
        rng.standard_normal((1, 3, 8, 8)).astype(np.float32),
        rng.standard_normal((6, 24)).astype(np.float32),
        np.array([4, 1]),
    ]


@on_gpu
def test_a_program_runs_updates_its_cache_in_place_and_settles_to_one_graph_launch(
    backend: CUDABackend, rng: np.random.Generator
) -> None:
    model, program, values = Block().eval(), block_program(backend), block_inputs(rng)
    named = dict(zip((spec.name for spec in program.input_specs), values, strict=True))
    weights = load_weights(model.state_dict(), program, backend)
    specs = {spec.name: spec for spec in program.input_specs}
    inputs = {name: NPUBuffer.from_numpy(value, backend, spec=specs[name]) for name, value in named.items()}
    executor = Executor(program, backend)
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, values))
    for repeat in range(3):
        before = backend.counters.copy()
        results = list(executor.run(inputs, weights).values())
        made = since(before, backend.counters)
        assert results[1] is list(inputs.values())[1]
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_allclose(got.to_numpy().astype(np.float32), want, atol=5e-3)
        assert repeat < 2 or made == {"graph_launches": 1}, "a steady run is one graph launch and nothing else"


@on_gpu
def test_a_profile_has_every_kernel_with_the_devices_time(backend: CUDABackend, rng: np.random.Generator) -> None:
    program, profiler = block_program(backend), Profiler()
    weights = load_weights(Block().state_dict(), program, backend)
    names = (spec.name for spec in program.input_specs)
    Executor(program, backend).run(dict(zip(names, block_inputs(rng), strict=True)), weights, profiler)
    assert set(profiler.kernels) == {call.kernel for call in program.kernels}
    assert all(0 < entry.seconds < 1 for entry in profiler.kernels.values())


@on_gpu
def test_a_partitioned_graph_runs_its_device_parts_here(backend: CUDABackend, rng: np.random.Generator) -> None:
    model, values = Block().eval(), block_inputs(rng)
    plan = partition(block_ir(), is_supported_fn=lambda op: "softmax" not in op)
    assert {part.device for part in plan.partitions} == {"npu", "cpu"}
    runner = DAGExecutor(plan, backend)
    runner.load_weights(model.state_dict())
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, values))
    for _ in range(3):
        outputs = runner.execute(dict(zip(plan.graph.inputs, values, strict=True)))
        for got, want in zip(outputs.values(), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=5e-3)
