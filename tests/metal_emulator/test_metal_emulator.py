"""The emulated Metal API: strict about selectors, arguments, order and lifetimes; MPS products against NumPy."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from metal_emulator import MetalUsageError, UnknownSelectorError, api, objc, selectors

SOURCE = """
#include <metal_stdlib>
using namespace metal;

constant bool has_bias [[function_constant(0)]];
constant uint power [[function_constant(1)]];

struct Params {
    uint count;
    float scale;
};

kernel void scale_kernel(
    device const float *x [[buffer(0)]],
    device const float *bias [[buffer(1), function_constant(has_bias)]],
    device float *out [[buffer(2)]],
    constant Params &params [[buffer(3)]],
    uint index [[thread_position_in_grid]]) {
    if (index >= params.count) {
        return;
    }
    float value = x[index];
    for (uint i = 1; i < power; i++) {
        value *= x[index];
    }
    out[index] = value * params.scale + (has_bias ? bias[index] : 0.0f);
}

kernel void reverse_kernel(device float *out [[buffer(0)]], uint index [[thread_position_in_threadgroup]]) {
    threadgroup float tile[64];
    tile[index] = out[index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[index] = tile[63 - index];
}
"""
COUNT = 100
X = np.linspace(-3, 3, COUNT, dtype=np.float32)
SHARED = 0


class Mac:
    """An emulated Mac with a queue, and the little that most tests need."""

    def __init__(self, **settings: Any) -> None:
        self.api = api(**settings)
        self.emulator = self.api.emulator
        self.Metal, self.MPS = self.api.Metal, self.api.MPS
        self.device = self.Metal.MTLCreateSystemDefaultDevice()
        self.queue = self.device.newCommandQueue()

    def library(self, source: str = SOURCE) -> Any:
        library, error = self.device.newLibraryWithSource_options_error_(source, None, None)
        assert error is None, error
        return library

    def values(self, has_bias: bool = False, power: int = 1) -> Any:
        values = self.Metal.MTLFunctionConstantValues.alloc().init()
        values.setConstantValue_type_withName_(struct.pack("?", has_bias), self.Metal.MTLDataTypeBool, "has_bias")
        values.setConstantValue_type_atIndex_(struct.pack("I", power), self.Metal.MTLDataTypeUInt, 1)
        return values

    def function(self, name: str = "scale_kernel", **constants: Any) -> Any:
        values = self.values(**constants)
        function, error = self.library().newFunctionWithName_constantValues_error_(name, values, None)
        assert error is None, error
        return function

    def pipeline(self, name: str = "scale_kernel", **constants: Any) -> Any:
        function = self.function(name, **constants)
        pipeline, error = self.device.newComputePipelineStateWithFunction_error_(function, None)
        assert error is None, error
        return pipeline

    def buffer(self, data: np.ndarray | None = None, length: int = 4 * COUNT) -> Any:
        if data is None:
            return self.device.newBufferWithLength_options_(length, SHARED)
        return self.device.newBufferWithBytes_length_options_(np.ascontiguousarray(data), data.nbytes, SHARED)

    def encoder(self, command_buffer: Any = None) -> Any:
        """A compute encoder that is bound for `scale_kernel`, but for what it reads and writes."""
        encoder = (command_buffer or self.queue.commandBuffer()).computeCommandEncoder()
        encoder.setComputePipelineState_(self.pipeline())
        encoder.setBytes_length_atIndex_(struct.pack("If", COUNT, 2.0), 8, 3)
        return encoder

    def bound(self, command_buffer: Any = None) -> Any:
        """A compute encoder that may dispatch `scale_kernel`."""
        encoder = self.encoder(command_buffer)
        encoder.setBuffer_offset_atIndex_(self.buffer(X), 0, 0)
        encoder.setBuffer_offset_atIndex_(self.buffer(), 0, 2)
        return encoder

    def dispatch(self, encoder: Any, groups: int = 4, threads: int = 32) -> None:
        sizes = self.Metal.MTLSizeMake(groups, 1, 1), self.Metal.MTLSizeMake(threads, 1, 1)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(*sizes)

    def matrix(self, buffer: Any, rows: int, columns: int, **layout: Any) -> Any:
        row_bytes, kind = layout.get("row_bytes", 4 * columns), layout.get("kind", self.MPS.MPSDataTypeFloat32)
        descriptor = self.MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_rowBytes_dataType_(
            rows, columns, row_bytes, kind
        )
        return self.MPS.MPSMatrix.alloc().initWithBuffer_offset_descriptor_(buffer, layout.get("offset", 0), descriptor)

    def product(self, rows: int = 2, columns: int = 2, interior: int = 2) -> Any:
        return product(self, rows, columns, interior)


def product(
    mac: Mac,
    rows: int,
    columns: int,
    interior: int,
    left: bool = False,
    right: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Any:
    kernel = mac.MPS.MPSMatrixMultiplication.alloc()
    initialize = kernel.initWithDevice_transposeLeft_transposeRight_resultRows_resultColumns_interiorColumns_alpha_beta_
    return initialize(mac.device, left, right, rows, columns, interior, alpha, beta)


def read(buffer: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.frombuffer(buffer.contents().as_buffer(buffer.length()), dtype).copy()


def finish(mac: Mac, command_buffer: Any) -> None:
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    assert command_buffer.status() == mac.Metal.MTLCommandBufferStatusCompleted, command_buffer.error()


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("whole_groups", [True, False])
def test_a_kernel_runs_from_source_to_result(checks: bool, seed: int, whole_groups: bool) -> None:
    mac = Mac(checks=checks, seed=seed)
    command_buffer = mac.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    encoder.setComputePipelineState_(mac.pipeline(has_bias=True, power=2))
    out = mac.buffer()
    for index, buffer in enumerate((mac.buffer(X), mac.buffer(X + 1), out)):
        encoder.setBuffer_offset_atIndex_(buffer, 0, index)
    encoder.setBytes_length_atIndex_(struct.pack("If", COUNT, 2.0), 8, 3)
    if whole_groups:
        mac.dispatch(encoder)
    else:
        encoder.dispatchThreads_threadsPerThreadgroup_((COUNT, 1, 1), (32, 1, 1))
    encoder.endEncoding()
    finish(mac, command_buffer)
    np.testing.assert_allclose(read(out), X * X * 2 + X + 1, rtol=1e-6, atol=1e-6)
    assert command_buffer.GPUEndTime() > command_buffer.GPUStartTime() > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_threads_meet_at_a_barrier(seed: int) -> None:
    mac = Mac(seed=seed)
    function = mac.library().newFunctionWithName_("reverse_kernel")
    pipeline, _ = mac.device.newComputePipelineStateWithFunction_error_(function, None)
    buffer, command_buffer = mac.buffer(X[:64]), mac.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    encoder.setComputePipelineState_(pipeline)
    encoder.setBuffer_offset_atIndex_(buffer, 0, 0)
    mac.dispatch(encoder, 1, 64)
    encoder.endEncoding()
    finish(mac, command_buffer)
    np.testing.assert_array_equal(read(buffer), X[63::-1])


def test_offsets_move_what_a_slot_holds() -> None:
    mac = Mac()
    x, out = mac.buffer(X), mac.buffer()
    command_buffer = mac.queue.commandBuffer()
    encoder = mac.encoder(command_buffer)
    encoder.setBytes_length_atIndex_(struct.pack("If", 10, 2.0), 8, 3)
    encoder.setBuffer_offset_atIndex_(x, 40, 0)
    encoder.setBuffer_offset_atIndex_(out, 0, 2)
    mac.dispatch(encoder)
    encoder.setBufferOffset_atIndex_(80, 0)
    encoder.setBufferOffset_atIndex_(40, 2)
    mac.dispatch(encoder)
    encoder.endEncoding()
    finish(mac, command_buffer)
    np.testing.assert_array_equal(read(out)[:20], 2 * X[10:30])
    assert np.isnan(read(out)[20:]).all()


def test_setting_bytes_copies_them() -> None:
    mac = Mac()
    out = mac.buffer()
    command_buffer = mac.queue.commandBuffer()
    encoder = mac.bound(command_buffer)
    encoder.setBuffer_offset_atIndex_(out, 0, 2)
    params = bytearray(struct.pack("If", COUNT, 2.0))
    encoder.setBytes_length_atIndex_(params, 8, 3)
    params[:] = bytes(8)
    mac.dispatch(encoder)
    encoder.endEncoding()
    finish(mac, command_buffer)
    np.testing.assert_array_equal(read(out), 2 * X)


def test_a_fault_ends_its_command_buffer_and_no_other() -> None:
    mac = Mac()
    command_buffer = mac.queue.commandBuffer()
    encoder = mac.bound(command_buffer)
    encoder.setBytes_length_atIndex_(struct.pack("If", COUNT + 1, 2.0), 8, 3)
    mac.dispatch(encoder)
    encoder.endEncoding()
    after, seen = mac.buffer(), []
    fill = command_buffer.blitCommandEncoder()
    fill.fillBuffer_range_value_(after, (0, 4 * COUNT), 0)
    fill.endEncoding()
    command_buffer.addCompletedHandler_(lambda done: seen.append(done.status()))
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    assert command_buffer.status() == mac.Metal.MTLCommandBufferStatusError
    report = command_buffer.error().localizedDescription()
    assert "scale_kernel" in report and "'x' [100]" in report
    assert str(mac.emulator.last_fault) == report
    assert seen == [mac.Metal.MTLCommandBufferStatusError]
    assert np.isnan(read(after)).all()
    following = mac.queue.commandBuffer()
    encoder = mac.bound(following)
    mac.dispatch(encoder)
    encoder.endEncoding()
    finish(mac, following)


def test_blits_copy_and_fill_the_ranges_they_are_given() -> None:
    mac = Mac()
    x, out = mac.buffer(X), mac.buffer()
    command_buffer = mac.queue.commandBuffer()
    blit = command_buffer.blitCommandEncoder()
    blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(x, 8, out, 4, 40)
    blit.fillBuffer_range_value_(out, mac.api.Foundation.NSMakeRange(80, 8), 0)
    blit.endEncoding()
    finish(mac, command_buffer)
    result = read(out)
    np.testing.assert_array_equal(result[1:11], X[2:12])
    np.testing.assert_array_equal(result[20:22], [0, 0])
    assert np.isnan(result[[0, *range(11, 20), *range(22, COUNT)]]).all()


def test_what_does_not_compile_is_an_error_of_metals() -> None:
    mac = Mac()
    library, error = mac.device.newLibraryWithSource_options_error_("kernel void f( {", None, None)
    assert library is None and error.domain() == "MTLLibraryErrorDomain"
    assert error.code() == mac.Metal.MTLLibraryErrorCompileFailure and error.localizedDescription()
    function, error = mac.library().newFunctionWithName_constantValues_error_("scale", mac.values(), None)
    assert function is None and error.code() == mac.Metal.MTLLibraryErrorFunctionNotFound
    assert mac.library().newFunctionWithName_("scale") is None
    assert mac.library().functionNames() == ["reverse_kernel", "scale_kernel"]


def test_macros_reach_the_source() -> None:
    mac = Mac()
    options = mac.Metal.MTLCompileOptions.alloc().init()
    options.setPreprocessorMacros_({"VALUE": 7, "NAME": "seven"})
    options.setLanguageVersion_(mac.Metal.MTLLanguageVersion3_1)
    options.setFastMathEnabled_(False)
    source = "kernel void NAME(device int *out [[buffer(0)]]) { out[0] = VALUE; }"
    library, error = mac.device.newLibraryWithSource_options_error_(source, options, None)
    assert error is None
    function = library.newFunctionWithName_("seven")
    pipeline, _ = mac.device.newComputePipelineStateWithFunction_error_(function, None)
    out, command_buffer = mac.buffer(length=4), mac.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    encoder.setComputePipelineState_(pipeline)
    encoder.setBuffer_offset_atIndex_(out, 0, 0)
    mac.dispatch(encoder, 1, 1)
    encoder.endEncoding()
    finish(mac, command_buffer)
    assert read(out, np.int32) == [7]


def ended(mac: Mac) -> Any:
    encoder = mac.bound()
    encoder.endEncoding()
    return encoder


def committed(mac: Mac) -> Any:
    command_buffer = mac.queue.commandBuffer()
    command_buffer.commit()
    return command_buffer


def released(thing: Any) -> Any:
    thing.release()
    return thing


def with_open_encoder(mac: Mac) -> Any:
    command_buffer = mac.queue.commandBuffer()
    mac.kept = command_buffer.computeCommandEncoder()  # type: ignore[attr-defined]
    return command_buffer


def constant(mac: Mac, data: Any, kind: int, name: str = "power") -> None:
    mac.values().setConstantValue_type_withName_(data, kind, name)


def specialize(mac: Mac, data: bytes | None, kind: int = 33) -> None:
    values = mac.Metal.MTLFunctionConstantValues.alloc().init()
    if data is not None:
        values.setConstantValue_type_withName_(data, kind, "power")
        values.setConstantValue_type_withName_(b"\0", mac.Metal.MTLDataTypeBool, "has_bias")
    mac.library().newFunctionWithName_constantValues_error_("scale_kernel", values, None)


def constant_offset(mac: Mac, offset: int) -> None:
    encoder = mac.bound()
    encoder.setBuffer_offset_atIndex_(mac.buffer(), offset, 3)
    mac.dispatch(encoder)


def multiply(mac: Mac, left: Any, right: Any, result: Any, command_buffer: Any = None, kernel: Any = None) -> None:
    kernel = kernel or mac.product()
    kernel.encodeToCommandBuffer_leftMatrix_rightMatrix_resultMatrix_(
        command_buffer or mac.queue.commandBuffer(), left, right, result
    )


def view_too_long(buffer: Any) -> None:
    buffer.contents().as_buffer(buffer.length() + 1)


def square(mac: Mac, **layout: Any) -> Any:
    return mac.matrix(mac.buffer(), 2, 2, **layout)


def overlapping(mac: Mac) -> None:
    buffer = mac.buffer(X)
    multiply(mac, mac.matrix(buffer, 2, 2), square(mac), mac.matrix(buffer, 2, 2, offset=12))


def promised_simdgroups(mac: Mac) -> None:
    descriptor = mac.Metal.MTLComputePipelineDescriptor.alloc().init()
    descriptor.setComputeFunction_(mac.function())
    descriptor.setThreadGroupSizeIsMultipleOfThreadExecutionWidth_(True)
    make = mac.device.newComputePipelineStateWithDescriptor_options_reflection_error_
    encoder = mac.bound()
    encoder.setComputePipelineState_(make(descriptor, 0, None, None)[0])
    mac.dispatch(encoder, 1, 33)


def batched(mac: Mac, **selection: int) -> None:
    make = mac.MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_
    descriptor = make(2, 2, 3, 8, 16, mac.MPS.MPSDataTypeFloat32)
    matrices = [
        mac.MPS.MPSMatrix.alloc().initWithBuffer_offset_descriptor_(mac.buffer(), 0, descriptor) for _ in range(3)
    ]
    kernel = mac.product()
    kernel.setBatchStart_(selection["start"])
    kernel.setBatchSize_(selection["size"])
    multiply(mac, *matrices, kernel=kernel)


FLOAT32 = 0x10000020
FLOAT16 = 0x10000010
MISUSES: dict[str, tuple[Callable[[Mac], object], str]] = {
    "a selector that Metal lacks": (
        lambda mac: mac.bound().setBuffer_atIndex_(mac.buffer(), 0),
        r"MTLComputeCommandEncoder has no setBuffer_atIndex_ \(setBuffer:atIndex:\); did you mean setBuffer\w+",
    ),
    "a label on what has none": (
        lambda mac: mac.Metal.MTLCompileOptions.alloc().init().setLabel_("options"),
        "CompileOptions has no setLabel_",
    ),
    "a constant that Metal lacks": (
        lambda mac: mac.Metal.MTLResourceStorageModeShare,
        "Metal has no .* did you mean MTLResourceStorageModeShared",
    ),
    "too few arguments": (
        lambda mac: mac.bound().setBuffer_offset_atIndex_(mac.buffer(), 0),
        "takes 3 arguments, 2 came",
    ),
    "keywords": (
        lambda mac: mac.device.newBufferWithLength_options_(4, options=0),
        "takes 2 arguments, 1 and the keywords",
    ),
    "a float for an NSUInteger": (
        lambda mac: mac.buffer(length=16.0),
        r"-\[MTLDevice newBufferWithLength:options:\]: argument 1: Metal wants an NSUInteger, float 16.0 came",
    ),
    "a negative NSUInteger": (lambda mac: mac.buffer(length=-1), "argument 1: Metal wants an NSUInteger, -1 came"),
    "None where an object is needed": (
        lambda mac: mac.bound().setComputePipelineState_(None),
        "Metal wants MTLComputePipelineState, None came",
    ),
    "a function for a pipeline": (
        lambda mac: mac.bound().setComputePipelineState_(mac.function()),
        "wants MTLComputePipelineState, MTLFunction",
    ),
    "str for bytes": (
        lambda mac: mac.bound().setBytes_length_atIndex_("12345678", 8, 3),
        "argument 1: Metal wants a pointer to bytes",
    ),
    "bytes for a str": (lambda mac: mac.buffer().setLabel_(b"x"), "Metal wants an NSString, bytes b'x' came"),
    "an int for a BOOL": (
        lambda mac: mac.Metal.MTLCompileOptions.alloc().init().setFastMathEnabled_(0),
        "wants a BOOL, int 0 came",
    ),
    "macros that are no dictionary": (
        lambda mac: mac.Metal.MTLCompileOptions.alloc().init().setPreprocessorMacros_(["A"]),
        "wants an NSDictionary",
    ),
    "an error argument": (
        lambda mac: mac.device.newLibraryWithSource_options_error_(SOURCE, None, []),
        "argument 3: Metal wants None",
    ),
    "two sizes where three are needed": (
        lambda mac: mac.bound().dispatchThreadgroups_threadsPerThreadgroup_((1, 1), (1, 1, 1)),
        "wants an MTLSize",
    ),
    "an untracked resource": (lambda mac: mac.device.newBufferWithLength_options_(4, 0x100), "tracked hazards"),
    "an empty buffer": (lambda mac: mac.buffer(length=0), "a buffer of 0 bytes"),
    "more bytes than the pointer has": (
        lambda mac: mac.device.newBufferWithBytes_length_options_(b"123", 4, SHARED),
        "4 bytes of a pointer to 3",
    ),
    "a private buffer's contents": (
        lambda mac: mac.device.newBufferWithLength_options_(4, 32).contents(),
        "the CPU does not see a private buffer",
    ),
    "didModifyRange on a shared buffer": (
        lambda mac: mac.buffer().didModifyRange_((0, 4)),
        "for managed buffers only, and this one is shared",
    ),
    "more contents than there are": (
        lambda mac: view_too_long(mac.buffer()),
        r"as_buffer\(401\): a buffer of 400 bytes",
    ),
    "an offset beyond the buffer": (
        lambda mac: mac.bound().setBuffer_offset_atIndex_(mac.buffer(), 400, 0),
        "offset 400 is not within a buffer",
    ),
    "an offset where no buffer is": (lambda mac: mac.bound().setBufferOffset_atIndex_(4, 3), "no buffer is bound at 3"),
    "a slot that does not exist": (
        lambda mac: mac.bound().setBuffer_offset_atIndex_(mac.buffer(), 0, 31),
        "index 31; there are 31 buffer slots",
    ),
    "too many bytes": (
        lambda mac: mac.bound().setBytes_length_atIndex_(bytes(4097), 4097, 3),
        "4097 bytes; 1 to 4096 are allowed",
    ),
    "no bytes": (lambda mac: mac.bound().setBytes_length_atIndex_(b"", 0, 3), "0 bytes; 1 to 4096 are allowed"),
    "an offset that the constant address space forbids": (
        lambda mac: constant_offset(mac, 4),
        "params at 3 is in the constant address space, .* of 256; 4 came",
    ),
    "a dispatch without a pipeline": (
        lambda mac: mac.dispatch(mac.queue.commandBuffer().computeCommandEncoder()),
        "no pipeline state is set",
    ),
    "a dispatch without a buffer that the kernel reads": (
        lambda mac: mac.dispatch(mac.encoder()),
        r"scale_kernel: nothing is bound at 0 \(x\)",
    ),
    "a dispatch without an optional buffer that is there": (
        lambda mac: dispatch_with_bias(mac),
        r"scale_kernel: nothing is bound at 1 \(bias\)",
    ),
    "too many threads": (lambda mac: mac.dispatch(mac.bound(), 1, 1025), "1025 threads a threadgroup, at most 1024"),
    "an empty grid": (lambda mac: mac.dispatch(mac.bound(), 0, 32), "an empty grid"),
    "an empty threadgroup": (lambda mac: mac.dispatch(mac.bound(), 1, 0), "an empty grid"),
    "threads that were promised to be whole SIMD groups": (promised_simdgroups, "33 threads; .* promised whole SIMD"),
    "encoding after endEncoding": (lambda mac: mac.dispatch(ended(mac)), "the encoder has ended"),
    "ending twice": (lambda mac: ended(mac).endEncoding(), "the encoder has ended"),
    "a pop without a push": (lambda mac: mac.bound().popDebugGroup(), "no group was pushed"),
    "a second encoder": (
        lambda mac: with_open_encoder(mac).blitCommandEncoder(),
        "MTLComputeCommandEncoder is open; endEncoding",
    ),
    "a commit with an open encoder": (lambda mac: with_open_encoder(mac).commit(), "commit.*Encoder is open"),
    "two commits": (lambda mac: committed(mac).commit(), "the command buffer was committed"),
    "encoding after commit": (lambda mac: committed(mac).computeCommandEncoder(), "the command buffer was committed"),
    "a handler after commit": (
        lambda mac: committed(mac).addCompletedHandler_(print),
        "the command buffer was committed",
    ),
    "a wait before commit": (
        lambda mac: mac.queue.commandBuffer().waitUntilCompleted(),
        "waits forever: commit comes first",
    ),
    "a released buffer": (lambda mac: released(mac.buffer()).length(), "sent to an object that was released"),
    "a released buffer bound": (
        lambda mac: mac.bound().setBuffer_offset_atIndex_(released(mac.buffer()), 0, 0),
        "one that was released came",
    ),
    "a released pipeline": (
        lambda mac: mac.bound().setComputePipelineState_(released(mac.pipeline())),
        "one that was released came",
    ),
    "a released function": (
        lambda mac: mac.device.newComputePipelineStateWithFunction_error_(released(mac.function()), None),
        "released",
    ),
    "a released matrix buffer": (
        lambda mac: multiply(mac, released_matrix(mac), square(mac), square(mac)),
        "a matrix's buffer was released",
    ),
    "another device's buffer": (
        lambda mac: mac.bound().setBuffer_offset_atIndex_(Mac().buffer(), 0, 0),
        "one of another device came",
    ),
    "an object that was not initialized": (
        lambda mac: mac.Metal.MTLCompileOptions.alloc().languageVersion(),
        "was allocated but not initialized",
    ),
    "two initializations": (lambda mac: mac.Metal.MTLCompileOptions.alloc().init().init(), "initialized twice"),
    "a constructor": (lambda mac: mac.Metal.MTLCompileOptions(), r"made by alloc\(\).init"),
    "a pipeline of nothing": (
        lambda mac: mac.device.newComputePipelineStateWithDescriptor_options_reflection_error_(
            mac.Metal.MTLComputePipelineDescriptor.alloc().init(), 0, None, None
        ),
        "the descriptor has no compute function",
    ),
    "function constants that are not set": (
        lambda mac: specialize(mac, None),
        "scale_kernel uses the function constants has_bias, power: not set",
    ),
    "no function constants at all": (
        lambda mac: mac.library().newFunctionWithName_("scale_kernel"),
        "uses the function constants has_bias, power",
    ),
    "a function constant of another type": (
        lambda mac: specialize(mac, struct.pack("f", 1), 3),
        "power is of type uint, and was set as float",
    ),
    "a function constant of another size": (
        lambda mac: constant(mac, b"\1", 33),
        "a uint has 4 bytes, 1 came for 'power'",
    ),
    "a function constant that is no pointer": (lambda mac: constant(mac, 1, 33), "wants a pointer to bytes"),
    "a function constant of no type": (lambda mac: constant(mac, bytes(4), 34), "wants a scalar MTLDataType .*34 came"),
    "a copy beyond a buffer": (
        lambda mac: (
            mac.queue.commandBuffer()
            .blitCommandEncoder()
            .copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(mac.buffer(), 392, mac.buffer(), 0, 12)
        ),
        "12 bytes from offset 392 do not lie in a buffer of 400",
    ),
    "a misaligned fill": (
        lambda mac: mac.queue.commandBuffer().blitCommandEncoder().fillBuffer_range_value_(mac.buffer(), (2, 4), 0),
        "offset 2 and size 4 are not multiples of 4",
    ),
    "a fill with no byte": (
        lambda mac: mac.queue.commandBuffer().blitCommandEncoder().fillBuffer_range_value_(mac.buffer(), (0, 4), 256),
        "the value 256 is no byte",
    ),
    "a copy onto itself": (lambda mac: copy_within(mac), "source and destination overlap"),
    "a matrix that does not fit": (
        lambda mac: mac.matrix(mac.buffer(), 11, 10),
        "440 bytes of matrix from offset 0 do not fit in a buffer of 400",
    ),
    "a matrix that its offset pushes out": (
        lambda mac: mac.matrix(mac.buffer(), 10, 10, offset=4),
        "from offset 4 do not fit",
    ),
    "a misaligned matrix": (lambda mac: square(mac, offset=2), "offset 2 is no multiple of the element's 4 bytes"),
    "rows that overlap": (lambda mac: square(mac, row_bytes=4), "rowBytes 4 is less than a row of 2 columns"),
    "misaligned rows": (lambda mac: square(mac, row_bytes=10), "rowBytes 10 is no multiple"),
    "an empty matrix": (lambda mac: mac.matrix(mac.buffer(), 0, 2), "an empty matrix"),
    "a matrix of integers": (lambda mac: square(mac, kind=0x20000020), "wants a floating-point MPSDataType"),
    "matrices whose shapes disagree": (
        lambda mac: multiply(mac, mac.matrix(mac.buffer(), 2, 3), square(mac), square(mac)),
        "the left matrix is 2 × 3, the product wants 2 × 2",
    ),
    "matrices of different types": (
        lambda mac: multiply(mac, square(mac, kind=FLOAT16), square(mac), square(mac)),
        "of different types: float16",
    ),
    "a result over an operand": (overlapping, "the result overlaps an operand"),
    "more matrices than there are": (lambda mac: batched(mac, start=1, size=3), "3 matrices from the 1th on, of 3"),
    "MPS while an encoder is open": (
        lambda mac: multiply(mac, square(mac), square(mac), square(mac), with_open_encoder(mac)),
        "Encoder is open",
    ),
    "MPS after commit": (
        lambda mac: multiply(mac, square(mac), square(mac), square(mac), committed(mac)),
        "command buffer was committed",
    ),
}


def dispatch_with_bias(mac: Mac) -> None:
    encoder = mac.bound()
    encoder.setComputePipelineState_(mac.pipeline(has_bias=True))
    mac.dispatch(encoder)


def released_matrix(mac: Mac) -> Any:
    buffer = mac.buffer()
    matrix = mac.matrix(buffer, 2, 2)
    buffer.release()
    return matrix


def copy_within(mac: Mac) -> None:
    buffer, blit = mac.buffer(), mac.queue.commandBuffer().blitCommandEncoder()
    blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(buffer, 0, buffer, 8, 12)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_says_what_metal_wants(name: str) -> None:
    misuse, message = MISUSES[name]
    with pytest.raises(MetalUsageError, match=message):
        misuse(Mac())


def test_an_unknown_selector_is_an_attribute_that_is_not_there() -> None:
    device = Mac().device
    assert not hasattr(device, "newSomethingElse")
    with pytest.raises(UnknownSelectorError):
        device.newBufferWithLength_(4)


def test_numpy_integers_pass_as_pyobjc_lets_them() -> None:
    assert Mac().buffer(length=np.int64(8)).length() == 8  # type: ignore[arg-type]


def test_references_are_counted() -> None:
    buffer = Mac().buffer()
    buffer.retain().release()
    assert buffer.length() == 4 * COUNT


def encoded(mac: Mac, *, retained: bool) -> tuple[Any, Any, Any]:
    """A command buffer that reads a buffer, that buffer, and the one it writes."""
    make = mac.queue.commandBuffer if retained else mac.queue.commandBufferWithUnretainedReferences
    command_buffer = make()
    assert command_buffer.retainedReferences() == retained
    mac.pipelines = mac.pipeline()  # type: ignore[attr-defined]
    encoder = mac.encoder(command_buffer)
    encoder.setComputePipelineState_(mac.pipelines)  # type: ignore[attr-defined]
    x, out = mac.buffer(X), mac.buffer()
    x.setLabel_("x")
    encoder.setBuffer_offset_atIndex_(x, 0, 0)
    encoder.setBuffer_offset_atIndex_(out, 0, 2)
    mac.dispatch(encoder)
    encoder.endEncoding()
    return command_buffer, x, out


@pytest.mark.parametrize("leave", ["release", "forget"])
def test_a_command_buffer_keeps_what_it_uses(leave: str) -> None:
    mac = Mac()
    command_buffer, x, out = encoded(mac, retained=True)
    if leave == "release":
        x.release()
    del x
    finish(mac, command_buffer)
    np.testing.assert_array_equal(read(out), 2 * X)
    assert mac.device.currentAllocatedSize() == 4 * COUNT


@pytest.mark.parametrize("leave", ["release", "forget"])
@pytest.mark.parametrize("deferred", [False, True])
def test_unretained_references_have_to_be_kept_by_the_caller(leave: str, deferred: bool) -> None:
    mac = Mac(deferred=deferred)
    command_buffer, x, _ = encoded(mac, retained=False)
    if deferred:
        command_buffer.commit()
    if leave == "release":
        x.release()
    del x
    last = command_buffer.waitUntilCompleted if deferred else command_buffer.commit
    with pytest.raises(MetalUsageError, match="the buffer 'x' of 400 bytes, used with unretained references, was gone"):
        last()


def test_a_view_must_not_outlive_its_buffer() -> None:
    mac = Mac()
    buffer = mac.buffer(X)
    view = np.frombuffer(buffer.contents().as_buffer(400), np.float32)
    del buffer
    with pytest.raises(MetalUsageError, match=r"a view of a buffer of 400 bytes, from contents\(\).as_buffer\(\), out"):
        mac.queue.commandBuffer()
    np.testing.assert_array_equal(view, X)
    mac.queue.commandBuffer()


def test_a_view_may_die_right_after_its_buffer() -> None:
    mac = Mac()
    buffer = mac.buffer(X)
    view = buffer.contents().as_buffer(400)
    del buffer
    del view
    mac.queue.commandBuffer()
    assert mac.device.currentAllocatedSize() == 0


def test_contents_of_a_buffer_that_is_gone() -> None:
    mac = Mac()
    contents = mac.buffer().contents()
    with pytest.raises(MetalUsageError, match="the buffer is gone"):
        contents.as_buffer(4)


def test_an_encoder_that_was_never_ended_is_reported() -> None:
    mac = Mac()
    mac.bound()
    gc.collect()
    with pytest.raises(MetalUsageError, match="an MTLComputeCommandEncoder was released without endEncoding"):
        mac.queue.commandBuffer()


def test_memory_is_counted_and_limited() -> None:
    mac = Mac(memory=1 << 20)
    assert mac.device.recommendedMaxWorkingSetSize() == 1 << 20
    assert mac.device.newBufferWithLength_options_(mac.device.maxBufferLength() + 1, SHARED) is None
    buffers = [mac.buffer(length=1000) for _ in range(3)]
    assert mac.device.currentAllocatedSize() == 3000
    del buffers
    assert mac.device.currentAllocatedSize() == 0
    assert mac.emulator.buffers == 3


@pytest.mark.parametrize(("poison", "byte"), [(True, 0xFF), (False, 0)])
def test_new_memory_is_poisoned(poison: bool, byte: int) -> None:
    assert set(read(Mac(poison=poison).buffer(), np.uint8)) == {byte}


def test_deferred_command_buffers_show_a_missing_wait() -> None:
    mac = Mac(deferred=True)
    first, _, out = encoded(mac, retained=True)
    second, _, _ = encoded(mac, retained=True)
    first.commit()
    second.commit()
    assert first.status() == mac.Metal.MTLCommandBufferStatusCommitted and np.isnan(read(out)).all()
    second.waitUntilCompleted()
    assert first.status() == mac.Metal.MTLCommandBufferStatusCompleted
    np.testing.assert_array_equal(read(out), 2 * X)


def doubled_twice(seed: int, *, barrier: bool) -> np.ndarray:
    """Two dispatches of a concurrent encoder, of which the second reads what the first writes."""
    mac = Mac(seed=seed)
    buffers = [mac.buffer(X), mac.buffer(np.zeros_like(X)), mac.buffer()]
    command_buffer = mac.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoderWithDispatchType_(mac.Metal.MTLDispatchTypeConcurrent)
    encoder.setComputePipelineState_(mac.pipeline())
    encoder.setBytes_length_atIndex_(struct.pack("If", COUNT, 2.0), 8, 3)
    for source, target in ((0, 1), (1, 2)):
        encoder.setBuffer_offset_atIndex_(buffers[source], 0, 0)
        encoder.setBuffer_offset_atIndex_(buffers[target], 0, 2)
        mac.dispatch(encoder)
        if barrier:
            encoder.memoryBarrierWithScope_(mac.Metal.MTLBarrierScopeBuffers)
    encoder.endEncoding()
    finish(mac, command_buffer)
    return read(buffers[2])


def test_concurrent_dispatches_need_barriers() -> None:
    assert all(np.array_equal(doubled_twice(seed, barrier=True), 4 * X) for seed in range(5))
    assert not all(np.array_equal(doubled_twice(seed, barrier=False), 4 * X) for seed in range(5))


def test_dispatches_that_the_order_of_threads_can_matter_to_are_counted() -> None:
    mac = Mac()
    mac.dispatch(mac.bound())
    assert mac.emulator.order_dependent == 0
    encoder = mac.queue.commandBuffer().computeCommandEncoder()
    encoder.setComputePipelineState_(mac.pipeline("reverse_kernel"))
    encoder.setBuffer_offset_atIndex_(mac.buffer(X[:64]), 0, 0)
    mac.dispatch(encoder, 1, 64)
    assert mac.emulator.order_dependent == 1


def test_concurrent_dispatches_without_a_barrier_depend_on_their_order() -> None:
    mac = Mac()
    command_buffer = mac.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoderWithDispatchType_(mac.Metal.MTLDispatchTypeConcurrent)
    encoder.setComputePipelineState_(mac.pipeline())
    encoder.setBytes_length_atIndex_(struct.pack("If", COUNT, 2.0), 8, 3)
    encoder.setBuffer_offset_atIndex_(mac.buffer(X), 0, 0)
    encoder.setBuffer_offset_atIndex_(mac.buffer(), 0, 2)
    mac.dispatch(encoder)
    encoder.memoryBarrierWithScope_(mac.Metal.MTLBarrierScopeBuffers)
    assert mac.emulator.order_dependent == 0
    mac.dispatch(encoder)
    mac.dispatch(encoder)
    encoder.endEncoding()
    assert mac.emulator.order_dependent == 2


def archive(mac: Mac, path: Path | None) -> tuple[Any, Any]:
    descriptor = mac.Metal.MTLBinaryArchiveDescriptor.alloc().init()
    descriptor.setUrl_(path and mac.api.Foundation.NSURL.fileURLWithPath_(str(path)))
    made: tuple[Any, Any] = mac.device.newBinaryArchiveWithDescriptor_error_(descriptor, None)
    return made


def test_an_archive_remembers_pipelines(tmp_path: Path) -> None:
    mac, path = Mac(), tmp_path / "pipelines"
    url = mac.api.Foundation.NSURL.fileURLWithPath_(str(path))
    assert archive(mac, path)[1].code() == mac.Metal.MTLBinaryArchiveErrorInvalidFile
    empty, _ = archive(mac, None)
    assert empty.serializeToURL_error_(url, None)[0] is False
    descriptor = mac.Metal.MTLComputePipelineDescriptor.alloc().init()
    descriptor.setComputeFunction_(mac.function())
    make = mac.device.newComputePipelineStateWithDescriptor_options_reflection_error_
    only_archived = mac.Metal.MTLPipelineOptionFailOnBinaryArchiveMiss
    assert make(descriptor, only_archived, None, None)[0] is None
    assert empty.addComputePipelineFunctionsWithDescriptor_error_(descriptor, None) == (True, None)
    assert empty.serializeToURL_error_(url, None) == (True, None)
    found, error = archive(mac, path)
    assert error is None
    descriptor.setBinaryArchives_([found])
    assert make(descriptor, only_archived, None, None)[1] is None and mac.emulator.archive_hits == 1
    descriptor.setComputeFunction_(mac.function(power=3))
    assert make(descriptor, only_archived, None, None)[0] is None
    path.write_text("no archive")
    assert "invalid archive" in archive(mac, path)[1].localizedDescription()


def test_everything_made_is_counted() -> None:
    mac = Mac()
    command_buffer, _, _ = encoded(mac, retained=True)
    multiply(mac, square(mac), square(mac), square(mac), command_buffer)
    command_buffer.blitCommandEncoder().endEncoding()
    assert mac.emulator.counts() == {
        "buffers": 5,
        "libraries": 2,
        "functions": 2,
        "pipelines": 2,
        "archive_hits": 0,
        "command_buffers": 1,
        "compute_encoders": 1,
        "blit_encoders": 1,
        "mps_encodes": 1,
        "dispatches": 1,
        "set_bytes": 1,
    }


def test_the_seed_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_EMULATOR_SEED", "7")
    assert api().emulator.seed == 7
    assert api(seed=3).emulator.seed == 3


DTYPES = {
    "float16": (np.dtype(np.float16), FLOAT16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 0x90000010),
    "float32": (np.dtype(np.float32), FLOAT32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, -2.0)])
@pytest.mark.parametrize("batch", [None, (0, 3), (1, 2)])
def test_mps_multiplies_in_float32_and_rounds_once(
    dtype: str, transposes: tuple[bool, bool], alpha: float, beta: float, batch: tuple[int, int] | None
) -> None:
    mac, rng = Mac(), np.random.default_rng(3)
    numpy_type, kind = DTYPES[dtype]
    rows, columns, interior, matrices, padding, first = 5, 7, 11, 3, 4, 8
    shapes = [(rows, interior), (interior, columns), (rows, columns)]
    shapes[:2] = [shape[::-1] if flag else shape for shape, flag in zip(shapes[:2], transposes, strict=True)]
    stored, made, buffers = [], [], []
    for shape in shapes:
        width, gap = shape[1] + padding, 1
        whole = rng.standard_normal(first + matrices * (shape[0] + gap) * width).astype(numpy_type)
        buffer, size = mac.buffer(whole.view(np.uint8)), numpy_type.itemsize
        make = mac.MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_
        descriptor = make(*shape, matrices, width * size, (shape[0] + gap) * width * size, kind)
        made.append(mac.MPS.MPSMatrix.alloc().initWithBuffer_offset_descriptor_(buffer, first * size, descriptor))
        stored.append(whole[first:].reshape(matrices, shape[0] + gap, width)[:, : shape[0], : shape[1]])
        buffers.append((buffer, whole))
    kernel = product(mac, rows, columns, interior, *transposes, alpha=alpha, beta=beta)
    start, count = batch or (0, matrices)
    if batch:
        kernel.setBatchStart_(start)
        kernel.setBatchSize_(count)
    command_buffer = mac.queue.commandBuffer()
    multiply(mac, *made, command_buffer=command_buffer, kernel=kernel)
    finish(mac, command_buffer)

    chosen = slice(start, start + count)
    left, right, old = (part[chosen].astype(np.float64) for part in stored)
    left, right = (part.mT if flag else part for part, flag in zip((left, right), transposes, strict=True))
    wanted = alpha * (left @ right) + beta * old
    buffer, expected = buffers[2]
    got = read(buffer, numpy_type)
    at = np.zeros(expected.size, bool)
    at[first:].reshape(matrices, rows + 1, columns + padding)[chosen, :rows, :columns] = True
    epsilon = float(ml_dtypes.finfo(numpy_type).eps)
    np.testing.assert_allclose(got[at].astype(np.float64), wanted.ravel(), rtol=epsilon / 2 + 1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[~at].view(np.uint8), expected[~at].view(np.uint8))


def test_mps_runs_in_the_order_of_its_encoding() -> None:
    mac = Mac()
    x, doubled, squared = mac.buffer(X), mac.buffer(), mac.buffer()
    command_buffer = mac.queue.commandBuffer()
    encoder = mac.encoder(command_buffer)
    encoder.setBuffer_offset_atIndex_(x, 0, 0)
    encoder.setBuffer_offset_atIndex_(doubled, 0, 2)
    mac.dispatch(encoder)
    encoder.endEncoding()
    made = [mac.matrix(buffer, 10, 10) for buffer in (doubled, x, squared)]
    multiply(mac, *made, command_buffer=command_buffer, kernel=mac.product(10, 10, 10))
    finish(mac, command_buffer)
    square_of_x = (2 * X.reshape(10, 10)) @ X.reshape(10, 10)
    np.testing.assert_allclose(read(squared).reshape(10, 10), square_of_x, rtol=1e-5, atol=1e-5)


def classes(base: type = objc.NSObject) -> list[type]:
    return [base, *(found for child in base.__subclasses__() for found in classes(child))]


def test_every_selector_on_offer_is_known_or_documented() -> None:
    on_offer = {objc.spelled(name) for cls in classes() for name in objc.offered(cls)}
    known = selectors.listed() | set(selectors.DOCUMENTED)
    assert sorted(on_offer - known) == []
    assert sorted(known - on_offer) == []
    assert not selectors.listed() & set(selectors.DOCUMENTED)
