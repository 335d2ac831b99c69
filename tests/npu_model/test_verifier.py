"""The verifier takes what the compiler writes, and refuses programs of which any part is out of the chip's range."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tile_programs import chip, compiled, emitted_program, linear_model, linear_program

from npu_compiler.errors import DeviceError, ProgramFormatError
from npu_model.device import NPUBackend
from npu_model.isa.assembler import assemble
from npu_model.isa.assembly import disassemble
from npu_model.isa.encoding import decode, encode
from npu_model.isa.verifier import verify
from npu_runtime import Executor
from npu_runtime.weight_loader import load_weights

LAYER = """
chip edge d
buffer p_b0 600
buffer p_w0 120000
buffer relu 3000
buffer x 2000

section relu matmul_kernel "float16[5,200] * float16[300,200] * float16[300] -> float16[5,300]"
  loop t0 in 5:
    dma1    load    sram[25600*(t0 % 2)] float16 <- p_w0[25600*t0] float16 [64 at 64*t0 of 300, 200]
                    wait matrix.1 >= t0 - 1   signal dma1.1
    dma0    load    sram[51200 + 2048*(t0 % 2)] float16 <- x[0] float16 [5, 200] wait matrix.2 >= t0 - 1   signal dma0.1
    matrix  matmul  acc[1280*(t0 % 2)] float32 (256, 4, 0) = sram[51200 + 2048*(t0 % 2)] float16 (400, 0, 2) \
* sram[25600*(t0 % 2)] float16 (0, 400, 2) [m 5, n 64 at 64*t0 of 300, k 200]
                    wait dma1.1 >= t0 + 1, dma0.1 >= t0 + 1, output.1 >= t0 - 1   signal matrix.1, matrix.2, matrix.3
    dma1    load    sram[55296 + 128*(t0 % 2)] float16 <- p_b0[128*t0] float16 [64 at 64*t0 of 300]
                    wait output.2 >= t0 - 1   signal dma1.2
    output  compute [5, 64 at 64*t0 of 300]
                    wait matrix.3 >= t0 + 1, dma1.2 >= t0 + 1, dma2.1 >= t0 - 1   signal output.1, output.2, output.3
            r0 = acc[1280*(t0 % 2)] float32
            r1 = sram[55296 + 128*(t0 % 2)] float16 (0, 2)
            r2 = add(r0, r1; 1.0)
            r3 = relu(r2)
            sram[55552 + 640*(t0 % 2)] float16 <- r3
    dma2    store   relu[128*t0] float16 (600, 2) <- sram[55552 + 640*(t0 % 2)] float16 [5, 64 at 64*t0 of 300]
                    wait output.3 >= t0 + 1   signal dma2.1
"""


def test_the_layer_of_these_tests_is_taken() -> None:
    verify(assemble(LAYER), chip())


def test_compiled_and_emitted_programs_pass(seed: int) -> None:
    for program in (linear_program(5, 300, 200, 2), *(emitted_program(seed + number) for number in range(200))):
        verify(program, chip())


HALO = """
chip edge d
buffer x 56
section a b ""
  loop t0 in 4:
    dma0 load sram[0] int8 (8, 1) <- x[14*t0 - 7] int8 (7, 1) [4 at 2*t0 - 1 of 8, 7] fill 0
"""


def test_a_box_that_leaves_its_tensor_reaches_only_what_exists() -> None:
    verify(assemble(HALO), chip())
    with pytest.raises(ProgramFormatError, match="bytes -7 to .* are outside of buffer 'x' of 56"):
        verify(assemble(HALO.replace("4 at 2*t0 - 1 of 8", "4")), chip())
    with pytest.raises(ProgramFormatError, match="bytes 0 to 56 are outside of buffer 'x' of 55"):
        verify(assemble(HALO.replace("buffer x 56", "buffer x 55")), chip())


# A piece of the text of a linear layer, what stands in its place, and why that is refused.
REFUSED = {
    "an engine": ("dma2    store", "dma9    store", "transfer 5 on dma9 .*: the chip has no such engine"),
    "a wrong engine": ("dma2    store", "vector  store", "it raises dma2.1, a token of another engine"),
    "an address": ("sram[25600*(t0 % 2)]", "sram[1048576 + 25600*(t0 % 2)]", "outside of the scratchpad of 1048576"),
    "an alignment": ("p_w0[25600*t0]", "p_w0[25600*t0 + 1]", "1 bytes are no multiple of 2, for float16"),
    "a buffer": ("<- x[0]", "<- y[0]", "there is no buffer 'y'"),
    "a buffer's end": ("p_w0[25600*t0]", "p_w0[25602*t0]", "bytes 0 to 120008 are outside of buffer 'p_w0' of 120000"),
    "a buffer's begin": ("<- x[0]", "<- x[-2]", "bytes -2 to 1998 are outside of buffer 'x'"),
    "a buffer twice": ("buffer x 2000", "buffer x 2000\nbuffer x 8", "buffer 'x' is declared twice"),
    "a dtype": ("float16 <- p_b0[128*t0] float16", "float16 <- p_b0[128*t0] int8", "it transfers int8 to float16"),
    "a product's dtype": ("sram[25600*(t0 % 2)] float16 (0, 400, 2)", "sram[0] int8 (0, 400, 2)", "float16 and int8"),
    "a role": ("[m 5, n 64", "[b 5, n 64", None),
    "a role of another": ("[m 5, n 64", "[n 5, n 64", "an operand has an axis of role n that is none of its own"),
    "sums": ("acc[1280*(t0 % 2)] float32 (256, 4, 0) =", "sram[0] float32 (256, 4, 0) =", "sums are in the acc"),
    "sums in one place": ("float32 (256, 4, 0)", "float32 (256, 0, 0)", "several sums are in one place"),
    "accumulators": ("acc[1280*(t0 % 2)] float32 (256", "acc[262144] float32 (256", "outside of the accumulators"),
    "a wait": ("wait matrix.1 >= t0 - 1", "wait matrix.1 >= t0 + 2", "raised 6 times, which it is 5"),
    "a wait for nothing": ("wait matrix.1 >= t0 - 1", "wait matrix.9 >= 1", "raised 1 times, which it is 0 times"),
    "a token": ("signal dma1.1", "signal dma1.64", "token dma1.64 is none of the engine's 64"),
    "a token of another": ("signal dma1.1", "signal dma0.1", "it raises dma0.1, a token of another engine"),
    "a loop": ("loop t0 in 5", "loop t0 in 100000000", "loops have more than 16777216 rounds"),
    "no loop": ("loop t0 in 5", "loop t0 in 0", "a loop has 0 rounds"),
    "a register": ("r3 = relu(r2)", "r3 = relu(r3)", "'relu' has register 3, which is not defined"),
    "a stored register": ("float16 <- r3", "float16 <- r4", "register 4 is not defined"),
    "an operation": ("relu(r2)", "explode(r2)", "there is no operation 'explode'"),
    "operands": ("relu(r2)", "relu(r2, r1)", "'relu' has 2 operands and 0 attributes, not"),
    "a reduction": ("relu(r2)", "sum(r2; 2)", "'sum' has axes \\(2,\\) of 2"),
    "a result too small": ("(t0 % 2)] float16 <- r3", "(t0 % 2)] float16 (0, 2) <- r3", "of register 3 go to one"),
    "a place of many": ("float16 <- x[0] float16", "float16 (0, 2) <- x[0] float16", "several elements go to one"),
    "a size": ("[5, 200]", "[5, 99999999]", "499999995 elements are more than the scratchpad"),
    "an axis": ("[5, 200]", "[5, 0]", "an axis has 0 of 0"),
    "axes": ("[5, 200]", "[5, 200, 1, 1, 1, 1]", "a transfer has 6 axes, more than 5"),
    "a fill": ("[5, 200]", "[5, 200] fill 1", None),
    "an index": ("[5, 200]", "[5, 200] index sram[0] int8 below 5", "an index is int32 in the scratchpad"),
    "an index's limit": ("[5, 200]", "[5, 200] index sram[0] int32 (4, 0) below 6", "bytes 0 to 2400 are outside"),
    "slots": ("51200 + 2048*(t0 % 2)] float16 <- x", "51200 + 2048000*(t0 % 2)] float16 <- x", "outside of the"),
    "a begin": ("compute [5, 64 at 64*t0 of 300]", "compute [5, 64 at 64*t0 of 300] begin t0", None),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_each_part_is_checked(old: str, new: str, message: str | None) -> None:
    assert old in LAYER
    program = assemble(LAYER.replace(old, new, 1))
    if message is None:
        verify(program, chip())
        return
    with pytest.raises(ProgramFormatError, match=message) as refusal:
        verify(program, chip())
    assert re.match(r"(\w+ \d+ on \w+ of section 'relu'|section 'relu'|the tile program): ", str(refusal.value))


def test_a_device_refuses_a_changed_program_before_it_runs() -> None:
    program = compiled(linear_model(5, 300, 200))
    text = disassemble(decode(program.plan.machine_code))

    def run(changed: str) -> None:
        plan = replace(program.plan, machine_code=encode(assemble(changed)))
        backend = NPUBackend(chip())
        executor = Executor(replace(program, plan=plan), backend)
        weights = {"w0": np.zeros((300, 200), np.float32), "b0": np.zeros(300, np.float32)}
        executor.run({"x": np.zeros((5, 200), np.float32)}, load_weights(weights, program, backend))

    run(text)
    with pytest.raises(ProgramFormatError, match="'relu' has register 99, which is not defined"):
        run(re.sub(r"relu\(r\d+\)", "relu(r99)", text))
    with pytest.raises(ProgramFormatError, match="buffers are not those of the program's kernel calls"):
        run(text.replace("buffer x 2000", "buffer x 4000"))
    with pytest.raises(ProgramFormatError, match="sections are not those of the program's kernel calls"):
        run(text[: text.index("section")])
    with pytest.raises(DeviceError, match="was compiled for another chip"):
        run(re.sub(r"^chip edge \S+", "chip edge other", text))
