"""Matrix products with quantized weights.

If activations are quantized to int8 as well, and the weight has a scale for each of its rows, integers are multiplied:
the sums are exact, and scaled after the product. Otherwise the vector engine dequantizes each tile of the weight, and
floats are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space, Value
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.epilogues import Factors, first_rows, float_epilogue, gated_epilogue
from npu_model.lowering.families import CannotLower, Operands, Tiling, divided, halvings, in_tiers, lowering, parts
from npu_model.lowering.indexing import picked_rows
from npu_model.lowering.products import need_matrix
from npu_model.lowering.vector_program import VectorProgram

_TINY = 1.1754943508222875e-38  # the least normal float32


def _multiplies_codes(o: Operands, chip: Chip) -> bool:
    """Whether the product is computed on int8 codes, which needs a chip that multiplies int8."""
    codes = CODE_FORMATS[o.codes]
    is_byte = not codes.is_float and (o.offsets == "none" or (o.offsets == "zero_point" and codes.bits < 8))
    has_bytes = chip.matrix is not None and "int8" in chip.matrix.rates
    return has_bytes and is_byte and o.groups == 1 and getattr(o.names, "activations", "none") == "int8"


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    on_codes = _multiplies_codes(o, chip)
    need_matrix(chip, "int8" if on_codes else o.x.dtype)
    _need_whole_bytes(o)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    columns = chip.matrix.columns

    def tiles(divisor: int) -> Iterator[Tiling]:
        for tk in _depths(o, divisor):
            for tm in divided(halvings(o.m, 8, 8)[:4], divisor):
                for tn in divided(halvings(o.n, 8, columns)[:10], divisor, columns):
                    if tm * tn <= sums:
                        yield {"m": tm, "n": tn, "k": tk, "codes": on_codes}

    return in_tiers(tiles)


def _need_whole_bytes(o: Operands) -> None:
    """Raise `CannotLower` if quantization groups share a byte: each byte is unpacked with one group's scale."""
    if o.groups > 1 and o.k // o.groups % CODE_FORMATS[o.codes].per_byte:
        raise CannotLower(f"groups of {o.k // o.groups} codes in {o.codes} are not a whole number of bytes")


def _depths(o: Operands, divisor: int) -> list[int]:
    """Tile sizes along k to try: multiples of a quantization group, or of a byte if there is one group."""
    if o.groups > 1:
        return [count * (o.k // o.groups) for count in divided(halvings(o.groups, 1)[:8], divisor)]
    whole = [o.k] if divisor == 1 else divided(halvings(o.k, 64, 64), divisor, 64)
    return [size for size in whole if size % CODE_FORMATS[o.codes].per_byte == 0]


_KERNELS = ("quantized_matmul_kernel", "quantized_matmul_vec_kernel", "dynamic_quantized_matmul_kernel")
_GATED = ("quantized_gated_matmul_vec_kernel", "dynamic_quantized_gated_matmul_vec_kernel")


@lowering(*_KERNELS, tilings=_tilings)
def quantized_linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = act(x · weightᵀ + bias) + residual, with a quantized weight."""
    tm, tn, tk = tiling["m"], tiling["n"], tiling["k"]
    with e.loop(parts(o.m, tm)) as i:
        x, scales = _multiplied(e, o, i * tm, tm, tiling)
        with e.loop(parts(o.n, tn)) as j:
            rows, columns = Axis(tm, i * tm, o.m), Axis(tn, j * tn, o.n)
            sums = _sums(e, o, x, rows, columns, j * tn, tk)
            factors = _factors(e, o, j * tn, tn, scales)
            box = [(rows.start, tm), (columns.start, tn)]
            bias = None if o.bias is None else (e.load(o.bias, box[1:], queue=1), (None, 0))
            residual = None if o.residual is None else (e.load(o.residual, box, queue=3), (0, 1))
            out, is_stored = e.result(o.out, box)
            float_epilogue(
                e, o, (rows, columns), (sums, (0, 1)), bias, residual, (out, (0, 1)),
                residual_first=False, factors=factors,
            )  # fmt: skip
            if is_stored:
                e.store(out, o.out, box)


@lowering(*_GATED, tilings=_tilings)
def quantized_gated_linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[1, n] = act(gate) · up, where [gate, up] = x · weightᵀ + bias, with a quantized weight."""
    tn, tk = tiling["n"], tiling["k"]
    x, scales = _multiplied(e, o, ZERO, 1, tiling)
    with e.loop(parts(o.n, tn)) as j:
        columns = Axis(tn, j * tn, o.n)
        firsts = [j * tn + first for first in first_rows(o)]
        halves = [_sums(e, o, x, Axis(1), columns, first, tk) for first in firsts]
        factors = [_factors(e, o, first, tn, scales) for first in firsts]
        gated_epilogue(e, o, columns, halves, factors)


def _multiplied(e: Emitter, o: Operands, first: Affine, count: int, tiling: Tiling) -> tuple[Piece, Piece | None]:
    """Load rows of x for the product: quantized, with their scales, if codes are multiplied; else scales are None."""
    if not tiling["codes"]:
        return rows_of(e, o, first, count), None
    x = e.load(o.x, [(first, count), (ZERO, o.k)], queue=0)
    axes = (Axis(count, first, o.m), Axis(o.k))
    codes, scales = e.room(axes, "int8"), e.room(axes[:1], "float32")
    program = VectorProgram(axes)
    code, scale = _rounded(program, x, "int8")
    program.emit(e, [(code, codes, (0, 1)), (scale, scales, (0, None))])
    return codes, scales


def _factors(e: Emitter, o: Operands, first: Affine, count: int, scales: Piece | None) -> Factors:
    """The scales of a tile of integer sums: of the weight's rows (tile columns) and x's rows; empty for float sums."""
    if scales is None:
        return ()
    columns = e.load(o.scales, [(first, count), (ZERO, 1)], queue=1)
    return [(columns, (None, 0)), (scales, (0, None))]


def rows_of(e: Emitter, o: Operands, first: Affine, count: int) -> Piece:
    """Load rows of x for a product in floats.

    If the call quantizes activations, they are rounded to 8 bits and back.
    """
    x = e.load(o.x, [(first, count), (ZERO, o.k)], queue=0)
    kind = getattr(o.names, "activations", "none")
    if kind == "none":
        return x
    axes = (Axis(count, first, o.m), Axis(o.k))
    rounded = x if x.memory is not None else e.room(axes, o.x.dtype)
    program = VectorProgram(axes)
    codes, scale = _rounded(program, x, kind)
    program.emit(e, [(program.op("mul", codes, scale), rounded, (0, 1))])
    return rounded


def _rounded(program: VectorProgram, x: Piece, kind: str) -> tuple[int, int]:
    """Add steps that quantize rows to 8 bits, as `npu_compiler.graph.quantization.quantize_rows` does.

    Args:
        x: A tile of rows [rows, k] in floats; each row gets a scale of its own.
        kind: The format, one of `ROW_FORMATS`: `int8` or `float8_e4m3`.

    Returns:
        The registers of the codes [rows, k], as floats, and of the scales [rows].
    """
    value = program.input(x, 0, 1)
    most = float(CODE_FORMATS[kind].largest)
    scale = program.op("true_divide", program.op("max", program.op("abs", value), attrs=(1,)), most)
    scale = program.op("where", program.op("lt", scale, _TINY), 0.0, scale)
    inverse = program.op("where", program.op("gt", scale, 0.0), program.op("true_divide", 1.0, scale), 0.0)
    codes = program.op("mul", value, inverse)
    return program.op("round", codes) if kind == "int8" else program.op("to_float8", codes), scale


def _sums(e: Emitter, o: Operands, x: Piece, rows: Axis, columns: Axis, first: Affine, tk: int) -> Piece:
    """Compute the sums of a tile of results; `first` is the first of the weight's rows that it needs."""
    on_codes = x.dtype == "int8"
    sums = e.room((rows, columns), "int32" if on_codes else "float32", Space.ACCUMULATORS)
    with e.loop(parts(o.k, tk)) as part:
        begins = None if tk == o.k else (e.depth - 1,)
        tile = byte_tile if on_codes else dequantized_tile
        weight = tile(e, o, first, columns, part, tk)
        summed = Axis(tk, part * tk, o.k)
        left = x.reshaped(x.axes, x.strides, part * (tk * x.strides[1]))
        e.multiply(
            [(Role.ROW, rows), (Role.COLUMN, columns), (Role.SUM, summed)],
            (left, left.tile(0, None, 1)),
            (weight, weight.tile(None, 0, 1)),
            (sums, sums.tile(0, 1, None)),
            begins=begins,
        )
    return sums


def byte_tile(e: Emitter, o: Operands, first: Affine, columns: Axis, part: Affine, tk: int) -> Piece:
    """Load a tile [columns, tk] of the weight's codes as int8, with zero points subtracted."""
    count, per_byte = columns.size, CODE_FORMATS[o.codes].per_byte
    box = [(first, count), (part * (tk // per_byte), tk // per_byte)]
    if per_byte == 1:
        return e.load(replace(o.data, dtype="int8"), box, queue=1)
    codes = e.load(o.data, box, queue=1)
    zeros = None if o.offset is None else e.load(o.offset, [(first, count), (ZERO, 1)], queue=1)
    weight = e.room((columns, Axis(tk)), "int8")
    axes = columns, Axis(1), Axis(tk // per_byte, box[1][0], o.k // per_byte)
    _store_numbers(e, o, (codes, None, zeros), axes, weight)
    return weight


def dequantized_tile(e: Emitter, o: Operands, first: Affine, columns: Axis, part: Affine, tk: int) -> Piece:
    """Load a tile [columns, tk] of the weight and dequantize it to x's dtype.

    The number of a code is scale · (code − zero point), or scale · code + minimum.
    """
    per_byte = CODE_FORMATS[o.codes].per_byte
    group = o.k // o.groups
    groups = max(1, tk // group)
    each = tk // groups // per_byte
    own = part * groups if o.groups > 1 else ZERO
    count = columns.size
    codes = e.load(o.data, [(first, count), (part * (tk // per_byte), tk // per_byte)], queue=1)
    scales = e.load(o.scales, [(first, count), (own, groups)], queue=1)
    offset = None if o.offset is None else e.load(o.offset, [(first, count), (own, groups)], queue=1)
    weight = e.room((columns, Axis(tk)), o.x.dtype)
    of_group = Axis(each) if o.groups > 1 else Axis(each, part * each, o.k // per_byte)
    _store_numbers(e, o, (codes, scales, offset), (columns, Axis(groups, own, o.groups), of_group), weight)
    return weight


def _store_numbers(
    e: Emitter,
    o: Operands,
    parts: tuple[Piece, Piece | None, Piece | None],
    axes: tuple[Axis, Axis, Axis],
    weight: Piece,
) -> None:
    """Dequantize a tile of codes, scales and offsets [rows, groups, bytes of a group] into `weight` [rows, elements].

    Without scales, the result is code − zero point.
    """
    codes, scales, offset = parts
    per_byte = CODE_FORMATS[o.codes].per_byte
    each = axes[2].size
    program = VectorProgram(axes)
    row, element = codes.strides
    code = program.input_tile(codes, codes.with_strides((row, element * each, element)))
    scale = None if scales is None else program.input(scales, 0, 1, None)
    zero = None if offset is None else program.input(offset, 0, 1, None)
    stores = []
    for place in range(per_byte):
        value = _number(program, o, code, place, zero)
        if scale is not None:
            value = program.op("mul", value, program.op("to_float", scale))
        if zero is not None and o.offsets == "minimum":
            value = program.op("add", value, zero)
        row, element = weight.strides
        tile = weight.with_strides((row, element * each * per_byte, element * per_byte), place * element)
        stores.append((value, weight, tile))
    program.emit_tiles(e, stores)


def _embedding_tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    _need_whole_bytes(o)
    rows = o.ids.numel
    if o.ids.reshape((rows,)) is None or o.out.reshape((rows, o.k)) is None:
        raise CannotLower("its DMA engines take ids and rows that follow each other")
    for count in halvings(rows, 1)[:12]:
        yield {"rows": count}


@lowering("quantized_embedding_kernel", tilings=_embedding_tilings)
def quantized_embedding(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, :] = rows ids[…] of a quantized table, dequantized."""
    rows, count = o.ids.numel, tiling["rows"]
    if not rows:
        return
    ids, out = o.ids.reshape((rows,)), o.out.reshape((rows, o.k))
    bytes_ = o.data.shape[1]
    with e.loop(parts(rows, count)) as i:
        row = Axis(count, i * count, rows)
        places = e.load(ids, [(i * count, count)])
        picked = [None if view is None else picked_rows(e, view, row, places) for view in (o.data, o.scales, o.offset)]
        codes, scales, offset = picked
        assert codes is not None and scales is not None
        box = [(i * count, count), (ZERO, o.k)]
        target, is_stored = e.result(out, box)
        _store_numbers(e, o, (codes, scales, offset), (row, Axis(o.groups), Axis(bytes_ // o.groups)), target)
        if is_stored:
            e.store(target, out, box)


def _number(program: VectorProgram, o: Operands, code: int, place: int, zero: int | None) -> int:
    """Unpack one code of each byte; return a register with the codes' values as floats, less their zero point.

    Args:
        code: Register that holds the bytes.
        place: Number of the code within its byte.
        zero: Register that holds the offsets, which are subtracted here if they are zero points. None: the zero point
            of the format is subtracted, if it has one.
    """
    kind = CODE_FORMATS[o.codes]
    if kind.is_float:
        return program.op("from_float8", code)
    if kind.table:
        return _chosen(program, code, kind.bits * place, kind.table)
    is_packed = kind.bits < 8
    bits = (kind.bits * place, 2**kind.bits - 1)
    value = program.op("bits", code, attrs=bits) if is_packed else program.op("signed_byte", code)
    if zero is not None and o.offsets == "zero_point":
        value = program.op("sub", value, zero if is_packed else program.op("signed_byte", zero))
    elif zero is None and kind.zero:
        value = program.op("sub", value, float(kind.zero))
    return program.op("to_float", value)


def _chosen(program: VectorProgram, code: int, first: int, table: Sequence[int]) -> int:
    """Return the number of a table that the bits of `code` from bit `first` on choose; each bit halves the table."""
    values: Sequence[Value] = [float(number) for number in table]
    while len(values) > 1:
        is_set = program.op("gt", program.op("to_float", program.op("bits", code, attrs=(first, 1))), 0.0)
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [program.op("where", is_set, high, low) for low, high in pairs]
        first += 1
    register = values[0]
    assert isinstance(register, int)
    return register


__all__ = ["dequantized_tile", "quantized_gated_linear", "quantized_linear", "rows_of"]
