"""Reductions, softmax and norms: kernels over rows, which are processed whole or in parts.

Such a kernel consists of folds and a result. A fold is a reduction of an expression over the row, which may use earlier
folds; the result is an expression over the row or over the folds alone. If rows fit the scratchpad, everything is one
vector program. Otherwise each fold is a loop over parts of the row that carries its running value, and the result is
another loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.views import View, numel
from npu_model.chip import Chip
from npu_model.lowering.elementwise import need_functions
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import CannotLower, Operands, Tiling, halvings, lowering
from npu_model.lowering.tiles import MOST_AXES, Round, as_float, grouped, spread, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram

_JOINS = {"sum": "add", "max": "maximum", "min": "minimum", "product": "mul"}
_MOST_INT, _LEAST_INT = float(2**31 - 1), float(-(2**31))


@dataclass
class Row:
    """A builder of expressions over rows in a vector program.

    Attributes:
        program: The vector program.
        inputs: Number of an operand → its register.
        folds: The registers of the folds so far.
        reduced: The program's axes within a row, each with its stride in elements of the row.
    """

    program: VectorProgram
    inputs: dict[int, int]
    folds: list[tuple[int, ...]]
    reduced: list[tuple[int, int]]

    def op(self, name: str, *operands: int | float) -> int:
        return self.program.op(name, *operands)

    def reduce(self, name: str, register: int) -> int:
        axes = tuple(axis for axis, _ in self.reduced)
        return self.program.op(name, register, attrs=axes) if axes else register

    def place(self) -> int:
        """The register with the index of each element in its row."""
        place: int | None = None
        for axis, step in self.reduced:
            along = self.program.op("coordinate", attrs=(axis,))
            along = along if step == 1 else self.op("mul", along, float(step))
            place = along if place is None else self.op("add", place, along)
        return self.op("to_int", 0.0) if place is None else place


Expression: TypeAlias = Callable[[Row], int]


@dataclass(frozen=True)
class Fold:
    """A reduction of an expression over a row.

    Attributes:
        name: `sum`, `max`, `min` or `product`.
        of: The expression.
        inputs: Numbers of the operands that the expression reads.
        first: The identity of the reduction, which is the result for no elements.
        dtype: Dtype of the running value.
    """

    name: str
    of: Expression
    inputs: tuple[int, ...] = (0,)
    first: float = 0.0
    dtype: str = "float32"

    @property
    def states(self) -> list[tuple[str, float]]:
        """Dtype and initial value of each running value."""
        return [(self.dtype, self.first)]

    def reduced(self, row: Row) -> tuple[int, ...]:
        """Registers of the reduction of one part of the row."""
        return (row.reduce(self.name, self.of(row)),)

    def joined(self, row: Row, old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
        """Registers of the running values `old` combined with those of a further part, `new`."""
        return (row.op(_JOINS[self.name], old[0], new[0]),)


@dataclass(frozen=True)
class Place(Fold):
    """Index and value of the first maximum or minimum (`name`), or of the first NaN, as in `argmax`."""

    @property
    def states(self) -> list[tuple[str, float]]:
        return [(self.dtype, self.first), ("int32", -1.0)]

    def reduced(self, row: Row) -> tuple[int, ...]:
        x = self.of(row)
        best = row.reduce(self.name, x)
        is_best = row.op("logical_or", row.op("eq", x, best), row.op("ne", x, x))
        return best, row.reduce("min", row.op("where", is_best, row.op("to_int", row.place()), _MOST_INT))

    def joined(self, row: Row, old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
        better = row.op("gt" if self.name == "max" else "lt", new[0], old[0])
        first_nan = row.op("logical_and", row.op("ne", new[0], new[0]), row.op("eq", old[0], old[0]))
        taken = row.op("logical_or", row.op("logical_or", better, first_nan), row.op("lt", old[1], 0.0))
        return row.op("where", taken, new[0], old[0]), row.op("where", taken, new[1], old[1])


@dataclass(frozen=True)
class RowKernel:
    """A kernel over rows.

    Attributes:
        views: The operands, all with the same dimensions: first those that number rows, then those within a row.
        target: The result, with the same dimensions; without those within a row if it is computed from the folds alone.
        kept: Number of dimensions that number rows.
        folds: The reductions, in order.
        result: The expression of the result.
        inputs: Numbers of the operands that the result reads; empty if it is computed from the folds alone.
    """

    views: Sequence[View]
    target: View
    kept: int
    folds: Sequence[Fold]
    result: Expression
    inputs: Sequence[int] = ()

    def emit(self, e: Emitter, tiling: Tiling) -> None:
        """Emit the kernel, with whole rows if the tiling has them, else in parts of rows."""
        sizes = self.views[0].shape
        part = tile_shape(sizes[self.kept :], tiling["columns"], MOST_AXES - 1)
        free = MOST_AXES - sum(size > 1 for size in part)
        tile = (*tile_shape(sizes[: self.kept], tiling["rows"], free), *part)
        if part == sizes[self.kept :]:
            self._whole(e, sizes, tile)
        else:
            self._parts(e, sizes, tile)

    def _whole(self, e: Emitter, sizes: Sequence[int], tile: Sequence[int]) -> None:
        with tiled(e, sizes, tile, self.views) as turn:
            turn = replace(turn, counted=self.kept)
            program = turn.program()
            row = self._row(turn, program, dict(enumerate(turn.inputs(program))), [])
            for fold in self.folds:
                row.folds.append(fold.reduced(row))
            turn.store(e, program, self.result(row), self.target, None if self.inputs else self.kept)

    def _parts(self, e: Emitter, sizes: Sequence[int], tile: Sequence[int]) -> None:
        within = range(self.kept, len(sizes))
        with tiled(e, sizes, tile, [], dims=range(self.kept)) as rows:
            folded: list[list[Piece]] = []
            for fold in self.folds:
                axes = [rows.axis(d) for d in range(self.kept)]
                states = [e.room(axes, dtype) for dtype, _ in fold.states]
                depth = e.depth
                with tiled(e, sizes, tile, [self.views[i] for i in fold.inputs], rows.box, within) as turn:
                    turn = replace(turn, counted=self.kept)
                    program = turn.program()
                    inputs = dict(zip(fold.inputs, turn.inputs(program), strict=True))
                    row = self._row(turn, program, inputs, self._of_rows(turn, program, folded))
                    dims = [d if d < self.kept else None for d in turn.axes]
                    begins = tuple(range(depth, e.depth))
                    old = [
                        program.carried(state, first, begins, *dims)
                        for state, (_, first) in zip(states, fold.states, strict=True)
                    ]
                    new = fold.joined(row, old, fold.reduced(row))
                    program.emit(e, [(value, state, dims) for value, state in zip(new, states, strict=True)])
                folded.append(states)
            if not self.inputs:
                turn = Round(rows.box[: self.kept], tuple(sizes[: self.kept]))
                program = turn.program()
                row = Row(program, {}, self._of_rows(turn, program, folded), [])
                turn.store(e, program, self.result(row), self.target, self.kept)
                return
            with tiled(e, sizes, tile, [self.views[i] for i in self.inputs], rows.box, within) as turn:
                program = turn.program()
                inputs = dict(zip(self.inputs, turn.inputs(program), strict=True))
                row = self._row(turn, program, inputs, self._of_rows(turn, program, folded))
                turn.store(e, program, self.result(row), self.target)

    def _of_rows(self, turn: Round, program: VectorProgram, folded: Sequence[Sequence[Piece]]) -> list[tuple[int, ...]]:
        dims = [d if d < self.kept else None for d in turn.axes]
        return [tuple(program.input(state, *dims) for state in states) for states in folded]

    def _row(self, turn: Round, program: VectorProgram, inputs: dict[int, int], folds: list[tuple[int, ...]]) -> Row:
        reduced = [(position, math.prod(turn.sizes[d + 1 :])) for position, d in enumerate(turn.axes) if d >= self.kept]
        return Row(program, inputs, folds, reduced)


def row_tilings(rows: int, columns: int) -> list[Tiling]:
    """Tilings by numbers of rows and columns of a tile, whole rows first. Raises `CannotLower` if rows are empty."""
    if not rows:
        return [{"rows": 1, "columns": 1}]
    if not columns:
        raise CannotLower("it reduces no rows of no elements")
    tilings: list[Tiling] = [{"rows": each, "columns": columns} for each in halvings(rows, 1)]
    for part in halvings(columns, 16)[1:]:
        tilings += [{"rows": each, "columns": part} for each in sorted({min(rows, most) for most in (1, 16, 256)})]
    return tilings


def _need(chip: Chip, ops: Iterable[str]) -> None:
    for op in ops:
        need_functions(chip, ELEMENTWISE[op], True)


def _reading(i: int, view: View) -> Expression:
    """The expression of an operand, converted to float32."""
    return lambda row: as_float(row.program, row.inputs[i], view.dtype)


# Reductions


def _reduced_rows(o: Operands) -> tuple[View, View, int, int]:
    """Operand and result of a reduction with merged dimensions, number of leading dimensions, and row length."""
    kept = o.out.rank
    whole = spread(o.out, o.x.shape, range(kept))
    in_order = o.call.kernel in ("argmax_kernel", "argmin_kernel")
    rows = sorted(range(kept), key=lambda d: -abs(o.x.strides[d]))
    within = sorted(range(kept, o.x.rank), key=lambda d: 0 if in_order else -abs(o.x.strides[d]))
    (x, out), (count, _) = grouped([rows, within], o.x, whole)
    return x, out, count, numel(x.shape[count:])


def _reduction_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    name = o.call.kernel.removesuffix("_kernel")
    needed = {"logsumexp": ("exp", "log", "isfinite"), "std": ("sqrt",), "norm": ("sqrt", "pow", "abs")}
    _need(chip, needed.get(name, ()))
    _, _, _, size = _reduced_rows(o)
    return row_tilings(o.out.numel, size)


@lowering(
    *(f"{name}_kernel" for name in REDUCTIONS),
    tilings=_reduction_tilings,
)
def reduction(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = reduction of x over its last dimensions."""
    if not o.out.numel:
        return
    x, out, kept, size = _reduced_rows(o)
    folds, result = _folds(o, x, size)
    RowKernel([x], out, kept, folds, result).emit(e, tiling)


def _folds(o: Operands, x: View, size: int) -> tuple[list[Fold], Expression]:
    name = o.call.kernel.removesuffix("_kernel")
    dtype = "float32" if "float" in x.dtype else "int32"
    least, most = (-math.inf, math.inf) if dtype == "float32" else (_LEAST_INT, _MOST_INT)
    real = _reading(0, x)

    def number(row: Row) -> int:
        return row.inputs[0]

    def is_other(row: Row) -> int:
        return row.op("ne", row.inputs[0], 0.0)

    simple = {
        "sum": Fold("sum", number, dtype=dtype),
        "prod": Fold("product", number, first=1.0, dtype=dtype),
        "max": Fold("max", number, first=least, dtype=dtype),
        "min": Fold("min", number, first=most, dtype=dtype),
        "any": Fold("max", is_other, dtype="int32"),
        "all": Fold("min", is_other, first=1.0, dtype="int32"),
    }
    if name in simple:
        return [simple[name]], lambda row: row.folds[0][0]
    if name in ("argmax", "argmin"):
        kind, first = ("max", least) if name == "argmax" else ("min", most)
        return [Place(kind, number, first=first, dtype=dtype)], lambda row: row.folds[0][1]
    if name == "norm":
        return _norm(real, float(o.order))
    if name == "logsumexp":
        return _log_sum_exp(real)
    total = Fold("sum", real)
    if name == "mean":
        return [total], lambda row: _mean(row, 0, size)
    squares = Fold("sum", lambda row: row.op("square", row.op("sub", real(row), _mean(row, 0, size))))

    def variance(row: Row) -> int:
        return row.op("true_divide", row.folds[1][0], max(size - float(o.correction), 0.0))

    return [total, squares], variance if name == "var" else lambda row: row.op("sqrt", variance(row))


def _mean(row: Row, fold: int, size: int) -> int:
    return row.op("true_divide", row.folds[fold][0], float(size))


def _norm(real: Expression, order: float) -> tuple[list[Fold], Expression]:
    def magnitude(row: Row) -> int:
        return row.op("abs", real(row))

    def whole(row: Row) -> int:
        return row.folds[0][0]

    if order in (math.inf, -math.inf):
        return [Fold("max", magnitude) if order > 0 else Fold("min", magnitude, first=math.inf)], whole
    if order == 0:
        return [Fold("sum", lambda row: row.op("to_float", row.op("ne", real(row), 0.0)))], whole
    if order == 1:
        return [Fold("sum", magnitude)], whole
    if order == 2:
        return [Fold("sum", lambda row: row.op("square", real(row)))], lambda row: row.op("sqrt", whole(row))
    powers = Fold("sum", lambda row: row.op("pow", magnitude(row), order))
    return [powers], lambda row: row.op("pow", whole(row), 1 / order)


def _log_sum_exp(real: Expression) -> tuple[list[Fold], Expression]:
    def largest(row: Row) -> int:
        return row.op("where", row.op("isfinite", row.folds[0][0]), row.folds[0][0], 0.0)

    exponentials = Fold("sum", lambda row: row.op("exp", row.op("sub", real(row), largest(row))))
    return [Fold("max", real, first=-math.inf), exponentials], lambda row: row.op(
        "add", row.op("log", row.folds[1][0]), largest(row)
    )


# Softmax and running sums


def _last_dim(o: Operands, *others: View) -> tuple[list[View], int]:
    """The result, x and other operands as rows along the last dimension, and the number of leading dimensions."""
    last = o.out.rank - 1
    order = sorted(range(last), key=lambda d: -abs(o.out.strides[d]))
    views, (count, _) = grouped([order, [last]], o.out, o.x, *others)
    return views, count


def _softmax_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    _need(chip, ("exp", "log") if o.call.kernel == "log_softmax_kernel" else ("exp",))
    return row_tilings(numel(o.out.shape[:-1]), o.out.shape[-1]) if o.out.numel else [{"rows": 1, "columns": 1}]


@lowering("softmax_kernel", "log_softmax_kernel", "masked_softmax_kernel", tilings=_softmax_tilings)
def softmax(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """Softmax of scale · x + mask over the last dimension; or the logarithm of softmax, which takes no mask."""
    if not o.out.numel:
        return
    masks = [o.mask] if o.call.kernel == "masked_softmax_kernel" else []
    (out, *operands), kept = _last_dim(o, *masks)
    reading = [_reading(i, view) for i, view in enumerate(operands)]

    def scores(row: Row) -> int:
        scaled = reading[0](row) if o.scale == 1 else row.op("mul", reading[0](row), float(o.scale))
        return row.op("add", scaled, reading[1](row)) if masks else scaled

    def shifted(row: Row) -> int:
        return row.op("sub", scores(row), row.folds[0][0])

    def exponential(row: Row) -> int:
        return row.op("exp", shifted(row))

    def result(row: Row) -> int:
        if o.call.kernel == "log_softmax_kernel":
            return row.op("sub", shifted(row), row.op("log", row.folds[1][0]))
        return row.op("true_divide", exponential(row), row.folds[1][0])

    read = tuple(range(len(operands)))
    folds = [Fold("max", scores, read, first=-math.inf), Fold("sum", exponential, read)]
    RowKernel(operands, out, kept, folds, result, read).emit(e, tiling)


def _cumsum_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return row_tilings(numel(o.out.shape[:-1]), o.out.shape[-1]) if o.out.numel else [{"rows": 1, "columns": 1}]


@lowering("cumsum_kernel", tilings=_cumsum_tilings)
def cumsum(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = cumulative sum of x along the last dimension; the sum is carried between parts of a row."""
    if not o.out.numel:
        return
    (out, x), kept = _last_dim(o)
    sizes, last = out.shape, len(out.shape) - 1
    tile = (*tile_shape(sizes[:last], tiling["rows"], MOST_AXES - 1), min(sizes[last], tiling["columns"]))
    with tiled(e, sizes, tile, [], dims=range(last)) as rows:
        total = e.room([rows.axis(d) for d in range(last)], "float32" if "float" in x.dtype else "int32")
        depth = e.depth
        with tiled(e, sizes, tile, [x], rows.box, [last]) as turn:
            turn = replace(turn, counted=last)
            dims = [d if d < last else None for d in turn.axes]
            along = [position for position, d in enumerate(turn.axes) if d == last and sizes[last] > 1]
            program = turn.program()
            (value,) = turn.inputs(program)
            before = program.carried(total, 0.0, tuple(range(depth, e.depth)), *dims)
            sums = program.op("add", before, program.op("running_sum", value, attrs=along) if along else value)
            after = program.op("add", before, program.op("sum", value, attrs=along))
            piece, is_stored = e.result(out, turn.box)
            program.emit(e, [(sums, piece, turn.axes), (after, total, dims)])
            if is_stored:
                e.store(piece, out, turn.box)


# Norms


def _norm_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    _need(chip, ("sqrt",))
    if not o.out.numel:
        return [{"rows": 1, "columns": 1}]
    rows = o.out.shape[0] * o.groups if o.call.kernel == "groupnorm_kernel" else o.out.shape[0]
    return row_tilings(rows, o.out.numel // rows)


@lowering("rmsnorm_kernel", tilings=_norm_tilings)
def rms_norm(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = x / sqrt(mean(x²) + eps) · (weight + weight_offset)."""
    if not o.out.numel:
        return
    out, x, *weight = _with_rows(o.out, [o.x], [o.weight])
    reading = [_reading(i, view) for i, view in enumerate((x, *weight))]

    def result(row: Row) -> int:
        mean = _mean(row, 0, o.width)
        normal = row.op("true_divide", reading[0](row), row.op("sqrt", row.op("add", mean, float(o.eps))))
        return row.op("mul", normal, row.op("add", reading[1](row), float(o.weight_offset))) if weight else normal

    squares = Fold("sum", lambda row: row.op("square", reading[0](row)))
    RowKernel([x, *weight], out, 1, [squares], result, range(1 + len(weight))).emit(e, tiling)


def _with_rows(out: View, operands: Sequence[View], affine: Sequence[View | None]) -> list[View]:
    """The result, operands of its shape [rows, width], and the present affine parameters broadcast to that shape."""
    return [out, *operands, *(spread(view, out.shape, [1]) for view in affine if view is not None)]


@lowering("layernorm_kernel", tilings=_norm_tilings)
def layer_norm(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = (x − mean) / sqrt(variance + eps) · weight + bias, for each row."""
    if o.out.numel:
        out, *operands = _with_rows(o.out, [o.x], [o.weight, o.bias])
        _normalized(o, out, operands, 1).emit(e, tiling)


@lowering("groupnorm_kernel", tilings=_norm_tilings)
def group_norm(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """Emit a norm over groups of channels, like `layer_norm`; weight and bias have an element for each channel."""
    if not o.out.numel:
        return
    batch, channels, *rest = o.out.shape
    shape = (batch, o.groups, channels // o.groups, *rest)
    split = [_reshaped(view, shape) for view in (o.out, o.x)]
    affine = [spread(_reshaped(view, shape[1:3]), shape, [1, 2]) for view in (o.weight, o.bias) if view is not None]
    (out, *operands), (kept, _) = grouped([range(2), range(2, len(shape))], *split, *affine)
    _normalized(o, out, operands, kept).emit(e, tiling)


def _reshaped(view: View, shape: Sequence[int]) -> View:
    reshaped = view.reshape(tuple(shape))
    assert reshaped is not None, "a dimension can always be split"
    return reshaped


def _normalized(o: Operands, out: View, operands: Sequence[View], kept: int) -> RowKernel:
    size = numel(out.shape[kept:])
    reading = [_reading(i, view) for i, view in enumerate(operands)]
    has_bias = o.bias is not None

    def centred(row: Row) -> int:
        return row.op("sub", reading[0](row), _mean(row, 0, size))

    def result(row: Row) -> int:
        deviation = row.op("sqrt", row.op("add", _mean(row, 1, size), float(o.eps)))
        value = row.op("true_divide", centred(row), deviation)
        if len(operands) > 1:
            value = row.op("mul", value, reading[1](row))
        return row.op("add", value, reading[2](row)) if len(operands) > 2 else value

    assert len(operands) == 1 + (o.weight is not None) + has_bias
    folds = [Fold("sum", reading[0]), Fold("sum", lambda row: row.op("square", centred(row)))]
    return RowKernel(operands, out, kept, folds, result, range(len(operands)))
