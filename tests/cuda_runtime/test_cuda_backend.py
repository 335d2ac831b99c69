"""Parts of `CUDABackend` against stand-ins for the driver and its libraries; no GPU is needed."""

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

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_products import GEMMS, gemm_case, view
from ir_builder import IRBuilder

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.cuda_program import GemmLaunch, LaunchKind, gemm_of, launch_of
from cuda_runtime import CUDABackend, cuda_device
from cuda_runtime.cublaslt import Addresses, CublasLt, Product, product_key
from cuda_runtime.cuda_device import wake_driver, waking_driver
from cuda_runtime.dlpack import carrier, retag
from cuda_runtime.kernel_cache import KernelCache
from cuda_runtime.launches import CUDALaunch, GraphSequence
from cuda_runtime.tuned_convolutions import TunedConvolutions, kernels_of
from cuda_runtime.tuned_products import TunedProducts
from npu_compiler import CompiledProgram, DeviceError, compile
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.quantization import dequantize_rows, quantize_rows
from npu_compiler.installing import install_command
from npu_compiler.program.kernels import KernelCall
from npu_runtime import CPUBackend, Executor
from npu_sim.extract import extract_ir


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
    assert install_command("cuda13") in done.stdout


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


# cudaDataType → dtype.
KINDS = {0: np.dtype(np.float32), 3: np.dtype(np.int8), 10: np.dtype(np.int32), 28: np.dtype(ml_dtypes.float8_e4m3fn)}


def read_matrix(address: int, rows: int, columns: int, ld: int, op: int, dtype: np.dtype[Any] = KINDS[0]) -> np.ndarray:
    """op(M) of a column-major matrix in host memory; rows and columns are those of op(M)."""
    stored, size = (columns, rows) if op else (rows, columns), dtype.itemsize
    count = size * ((stored[1] - 1) * ld + stored[0])
    whole = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (count,)).view(dtype)
    matrix = np.lib.stride_tricks.as_strided(whole, stored, (size, size * ld))
    return matrix.T if op else matrix


class HostLt:
    """cuBLASLt's column-major products of matrices of float32 or of codes, in host memory, by NumPy.

    Descriptors are numbered. An algorithm's first byte is its number, and its tile; it offers as many as one asks for.

    Attributes:
        tries: The algorithms that were run.
        broken: The algorithms that do not run.
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
        number, wide = (ctypes.c_int32, np.int32) if options["created"] == (72, 10) else (ctypes.c_float, np.float32)
        scale, keep = (number.from_address(x).value for x in (alpha, beta))
        for index in range(count):
            left = self._matrix(a, layout_a, index, options[3])
            right = self._matrix(b, layout_b, index, options[4])
            out = self._matrix(d, layout_d, index, 0)
            result = scale * (left.astype(wide) @ right.astype(wide))
            if options.get(31) == options.get(32) == 3:
                rows, columns = (read_matrix(options[17 + x], 1, result.shape[x], 1, 0)[0] for x in (0, 1))
                result *= np.outer(rows, columns)
            if keep:
                result += keep * self._matrix(c, layout_c, index, 0)
            if options[7] & 4:
                result += read_matrix(options[8], len(result), 1, len(result), 0)
            out[...] = np.maximum(result, 0) if options[7] & 2 else result
        return 0

    def _matrix(self, address: int, layout: Any, index: int, op: int) -> np.ndarray:
        options = self.descriptors[layout.value]
        kind, rows, columns, ld = options["created"]
        assert ld >= rows
        rows, columns = (columns, rows) if op else (rows, columns)
        return read_matrix(address + 4 * options.get(6, 0) * index, rows, columns, ld, op, KINDS[kind])


class FakeDevice:
    """Stand-in for a `CUDADevice` that logs what is enqueued."""

    arch = 90
    failures = (ArithmeticError,)

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.log: list[str] = []
        self.stream = FakeStream(self.log)
        self.caller_stream: Any = None

    def continue_on(self, stream: Any) -> None:
        self.log.append(f"on {stream}")

    @contextmanager
    def active(self, doing: str) -> Iterator[None]:
        yield

    def allocate(self, size: int, what: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(ptr=0))


class FakeStream:
    """Stand-in for a stream: operations logged between begin_capture and end_capture go to the graph."""

    ptr = 0

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.before: list[str] | None = None

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        assert self.before is None
        self.before = self.log.copy()

    def end_capture(self) -> Any:
        assert self.before is not None
        captured = self.log[len(self.before) :]
        self.log[:], self.before = self.before, None
        on = {self: ""}
        return SimpleNamespace(launch=lambda stream: self.log.append(f"graph of {captured}{on.get(stream, stream)}"))


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


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3"])
def test_products_of_codes_have_scales_by_row_and_column_or_sums_in_integers(
    codes: str, rng: np.random.Generator
) -> None:
    m, n, k, scaled = 5, 16, 32, codes != "int8"
    rows, factors = (quantize_rows(rng.standard_normal((size, k)), codes) for size in (m, n))
    bias, residual = (rng.standard_normal(shape).astype(np.float32) for shape in (n, (m, n)))
    out = np.full((m, n), 7, np.float32 if scaled else np.int32)
    launch = GemmLaunch(m, n, k, k, k, n, n, trans_b=True, codes=codes)
    launch = replace(launch, has_bias=scaled, has_residual=scaled, has_scales=scaled)
    memory = [rows[0], factors[0], *((bias, residual, rows[1], factors[1]) if scaled else ()), out]
    views = [view(f"operand{index}", array.shape, array.dtype.name) for index, array in enumerate(memory)]
    call = KernelCall("cublas_gemm", "", tuple(views[:-1]), (views[-1],), launch.params(), "node")
    device: Any = HostDevice()
    product = Product(CublasLt(device, HostLt()), call, Addresses.of(call, [array.ctypes.data for array in memory]))
    product.launch(product.algorithms(1)[0])()
    if scaled:
        expected = dequantize_rows(*rows, codes) @ dequantize_rows(*factors, codes).T + bias + residual
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(out, rows[0].view(np.int8).astype(int) @ factors[0].view(np.int8).astype(int).T)


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
    """Stand-in device with host memory, whose clock advances when a graph is launched.

    Args:
        milliseconds: Duration of a graph's launch, by the algorithm of the last product in it.
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


def short_product() -> KernelCall:
    """The call of a linear layer over 200 rows."""
    layer = torch.nn.Linear(64, 96).half()
    program = compile(extract_ir(layer, (torch.zeros(200, 64, dtype=torch.float16),)), CUDACodegenTarget())
    (call,) = program.kernels
    return call


def chosen(folder: Path, call: KernelCall, microseconds: dict[str, float]) -> tuple[str, int]:
    """The kernel that a new process chooses for a convolution, and how many forms it tried.

    Args:
        microseconds: Duration of each kernel, by its name; of others 9.
    """
    tries: list[str] = []
    device: Any = HostDevice()
    launched = lambda start, end: 12e-3 * microseconds.get(tries[-1], 9.0)  # noqa: E731
    device.cupy.cuda.get_elapsed_time = launched
    convolutions = TunedConvolutions(device, folder, lambda form, places: lambda: tries.append(form.kernel), None)
    assert convolutions.kernels(call)
    convolutions.tune([call, call])
    form = convolutions.form(call)
    assert isinstance(form, KernelCall)
    is_product = isinstance(launch_of(form), GemmLaunch)
    assert bool(convolutions.products(call)) == is_product
    assert convolutions.kernels(call) == ([] if is_product else [form])
    return form.kernel, len(set(tries))


def test_a_product_is_chosen_where_it_gains_more_than_the_start_of_a_kernel_costs(tmp_path: Path) -> None:
    call = short_product()
    product, own = LaunchKind.CUBLAS_GEMM.value, {form.kernel for form in kernels_of(call)}
    assert chosen(tmp_path / "faster", call, {product: 7.5})[0] == product
    assert chosen(tmp_path / "alike", call, {product: 8.5})[0] in own
    assert chosen(tmp_path / "slower", call, {product: 12.0})[0] in own


def test_a_chosen_product_is_kept_for_the_next_process(tmp_path: Path) -> None:
    call, product = short_product(), LaunchKind.CUBLAS_GEMM.value
    assert chosen(tmp_path, call, {product: 1.0})[1] > 1
    device: Any = HostDevice()
    recalled = TunedConvolutions(device, tmp_path, lambda form, places: pytest.fail("tried again"), None)
    assert [each.kernel for each in recalled.products(call)] == [product]
    assert recalled.kernels(call) == []
    assert recalled.form(call).kernel == product


def test_large_products_are_cublas_products_from_the_start() -> None:
    layer = torch.nn.Linear(4096, 4096).half()
    with torch.device("meta"):
        rows = torch.zeros(4096, 4096, dtype=torch.float16)
    program = compile(extract_ir(layer.to("meta"), (rows,)), CUDACodegenTarget())
    assert [call.kernel for call in program.kernels] == [LaunchKind.CUBLAS_GEMM.value]


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
    assert len(keys) == len(names) + len(vars(at))


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


def test_a_launch_that_reads_early_is_separated_from_what_writes_there() -> None:
    device = FakeDevice()
    device.separate = lambda: device.log.append("|")  # type: ignore[attr-defined]
    call = KernelCall("k", "", (), (), {}, "node")

    def launch(name: str, written: range, early: range = range(0)) -> CUDALaunch:
        ranges = {"written": [written], "early": [early] if early else []}
        return CUDALaunch(device, call, lambda: device.log.append(name), None, **ranges)  # type: ignore[arg-type]

    each = [
        launch("a", range(100, 200)),
        launch("b", range(500, 600), range(0, 100)),  # next to what `a` writes
        launch("c", range(600, 700), range(199, 300)),  # while `b` runs, `a` may run too
        launch("d", range(700, 800)),
        launch("e", range(800, 900), range(100, 700)),  # `d` has waited for all of these
        launch("f", range(900, 910), range(899, 900)),
    ]
    sequence: Any = GraphSequence(device, each)  # type: ignore[arg-type]
    sequence()
    assert device.log == ["a", "b", "|", "c", "d", "e", "|", "f"]
    device.log.clear()
    each[1]()
    assert device.log == ["|", "b"], "what came before is not known"


def test_a_long_sequence_with_branches_becomes_two_graphs_between_branches() -> None:
    device = FakeDevice()
    call = KernelCall("k", "", (), (), {}, "node")
    forks = {30: 1, 33: -1, 40: 1, 42: -1}
    each = [
        CUDALaunch(device, call, lambda index=index: device.log.append(index), None, forks.get(index, 0))  # type: ignore[arg-type]
        for index in range(44)
    ]
    sequence: Any = GraphSequence(device, each)  # type: ignore[arg-type]
    sequence()
    device.log.clear()
    sequence()
    assert device.log == [f"graph of {list(range(34))}", f"graph of {list(range(34, 44))}"]
    assert device.counters == {"launches": 44, "captures": 2, "graph_launches": 1}


def test_a_captured_sequence_runs_on_the_callers_stream_after_what_was_enqueued_elsewhere() -> None:
    device = FakeDevice()
    device.caller_stream = " of the caller"
    sequence: Any = GraphSequence(device, launches(device, "a"))  # type: ignore[arg-type]
    for _ in range(3):
        sequence()
    assert device.log == ["a", "graph of ['a']", "on  of the caller", "graph of ['a'] of the caller"]


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
    program = CompiledProgram("p", "cuda_gpu", "float16", compile(IRBuilder().ir()).plan)
    with pytest.raises(DeviceError, match="compiled for 'cuda_gpu', but this device runs 'op_level' and 'metal_gpu'"):
        Executor(program, CPUBackend())
