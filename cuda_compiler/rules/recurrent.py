"""Rules of recurrent layers: the input's products of all steps at once, then one kernel for all steps of a layer.

Blocks divide the directions, the rows of the batch and the hidden elements. A block keeps its part of the weights
through all steps, in registers or shared memory, and reads the others' hidden states of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from cuda_compiler.cuda_program import LaunchKind
from cuda_compiler.rules.matmul import RULES as PRODUCTS
from cuda_compiler.specialization.gpu import GPU, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.errors import NPUError
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.ops.recurrent import GATES
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

_CELLS = ("lstm", "gru", "tanh", "relu")  # in the order of the enumeration in `layer.cuh`
_NOWHERE, _IN_REGISTERS, _IN_SHARED_MEMORY = range(3)  # as `Held` in `recurrent.cu`
_WARPS = 8
_LINES = 16  # lines of the weight in a fragment
_TERMS = 32  # terms of a product that a lane's two fragments take
_UNITS = 4  # hidden elements per block are a multiple of this
_FEWEST_UNITS = 16  # fewer blocks exchange hidden states faster
_MORE_UNITS = 32  # than least necessary, for warps to divide the lines evenly
_MOST_ROWS = 64  # rows of the batch per block
_MOST_ITEMS = 8  # hidden elements per thread
_HELD_WORDS = 128  # registers per thread for weights
_SUMS = 64  # registers per thread for sums
_TOGETHER = 4  # fragments' columns that are computed at a time
_BEGIN_THREADS = 256


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer, without its number of steps.

    Attributes:
        on_tensor_cores: Whether the weights are 16-bit floats.
    """

    cell: str
    directions: int
    rows: int
    hidden: int
    on_tensor_cores: bool


@dataclass(frozen=True)
class Division:
    """The division of a layer's work among blocks, and of a block's among warps.

    Attributes:
        layer: The layer, with the rows of one launch.
        row_groups: Groups of rows of the batch; each has blocks of its own.
        units: Hidden elements per block.
        line_warps: Warps that divide the lines of a block's weight; the others divide the terms of the products.
        held: Place where a block keeps its weights, as `Held` in `recurrent.cu`.
    """

    layer: Layer
    row_groups: int
    units: int
    line_warps: int
    held: int

    @property
    def rows(self) -> int:
        """Rows of the batch per block."""
        return groups(self.layer.rows, self.row_groups)

    @property
    def blocks(self) -> int:
        """Number of blocks that divide the hidden elements."""
        return groups(self.layer.hidden, self.units)

    @property
    def pieces(self) -> int:
        """Number of pieces into which the terms of a product are divided; each is summed by other warps."""
        return _WARPS // self.line_warps

    @property
    def tiles(self) -> int:
        """Number of tensor core fragments that cover the rows of a block's weight (each `_LINES` rows)."""
        return groups(GATES[self.layer.cell] * self.units, _LINES)

    @property
    def words(self) -> int:
        """4-byte words of a block's weight that each thread holds."""
        return 8 * (self.tiles // self.line_warps) * groups(self.layer.hidden, _TERMS * self.pieces)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the C struct `Shared` in `layer.cuh`, and the weight or states that follow it."""
        lines = GATES[self.layer.cell] * self.units
        sums = 2 * self.pieces * groups(self.rows, 8) * 8 * (self.tiles * _LINES + 4)
        rest = self.words * _WARPS * WARP if self.held == _IN_SHARED_MEMORY else 0
        if not self.layer.on_tensor_cores:
            rest = self.rows * self.layer.hidden
        return 4 * (sums + groups(2 * lines, 4) * 4 + rest)

    def fits(self, gpu: GPU) -> bool:
        """Whether a block has the registers and the shared memory for its part."""
        if self.shared > gpu.shared_memory or self.layer.on_tensor_cores and self.tiles % self.line_warps:
            return False
        if self.rows * self.units > _MOST_ITEMS * _WARPS * WARP:
            return False
        sums = 4 * (self.tiles // self.line_warps) * min(groups(self.rows, 8), _TOGETHER)
        held = self.words if self.held == _IN_REGISTERS else 0
        return not self.layer.on_tensor_cores or sums <= _SUMS and held <= _HELD_WORDS

    def constants(self) -> dict[str, bool | int | float]:
        """The constants that the template expects."""
        return {
            "CELL": _CELLS.index(self.layer.cell),
            "GATES": GATES[self.layer.cell],
            "ROW_GROUPS": self.row_groups,
            "ROWS": self.rows,
            "UNITS": self.units,
            "BLOCKS": self.blocks,
            "PIECES": self.pieces,
            "LINE_WARPS": self.line_warps,
            "HELD": self.held,
        }


def divide(layer: Layer, gpu: GPU) -> Division:
    """The division of a layer's work: all rows of the batch together if possible, few elements per block.

    A layer with too many rows for one launch is divided as if it had half of them.

    Raises:
        NPUError: not even one row fits.
    """
    for row_groups in range(groups(layer.rows, _MOST_ROWS), layer.rows + 1):
        blocks = gpu.multiprocessors // (layer.directions * row_groups)
        if blocks == 0:
            break
        least = max(_FEWEST_UNITS, groups(groups(layer.hidden, blocks), _UNITS) * _UNITS)
        places = (_IN_REGISTERS, _IN_SHARED_MEMORY, _NOWHERE) if layer.on_tensor_cores else (_NOWHERE,)
        for held, line_warps, more in product(places, (1, 2, 4, 8), range(0, _MORE_UNITS, _UNITS)):
            division = Division(layer, row_groups, least + more, line_warps, held)
            if division.fits(gpu):
                return division
    if layer.rows == 1:
        raise NPUError(
            f"a recurrent layer of {layer.hidden} hidden elements needs more multiprocessors or shared memory than "
            f"this GPU has ({gpu.multiprocessors}, with {gpu.shared_memory} bytes a block); compile it for the CPU"
        )
    return divide(replace(layer, rows=groups(layer.rows, 2)), gpu)


def _layer(make: Specializer, call: KernelCall) -> list[KernelCall]:
    views = KERNELS[call.kernel].operands_of(call)
    hidden_weight, out = views["hidden_weight"], call.outputs[0]
    assert hidden_weight is not None
    directions, rows, hidden = call.outputs[1].shape
    cell = call.params.get("cell", "lstm")
    division = divide(Layer(cell, directions, rows, hidden, hidden_weight.dtype in HALF_DTYPES), make.gpu)
    given, products = _input_products(make, call, views)
    each = division.layer.rows
    parts = [(first, min(first + each, rows)) for first in range(0, rows, each)]
    steps = [_steps(make, call, division, {"given": given, **views}, part) for part in parts]
    return [*products, _begin(make, call, out), *steps]


def _input_products(
    make: Specializer, call: KernelCall, views: Mapping[str, View | None]
) -> tuple[View, list[KernelCall]]:
    """The products of the input with the weights, float32 [D, T, N, G·H], and the calls that compute them.

    They lie in memory as the input does: by steps or by sequences.
    """
    x, weights = views["x"], [view for view in (views["weight"], views["back_weight"]) if view is not None]
    assert x is not None
    is_by_sequence = x.strides[1] > x.strides[0]
    packed = x.transpose(0, 1) if is_by_sequence else x
    columns, width = weights[0].shape
    given = make.temporary(call.node, (len(weights), *packed.shape[:2], columns), "float32")
    matrices = packed.reshape((1, packed.shape[0] * packed.shape[1], width)) or packed
    batch, lines, _ = matrices.shape
    params = {"m": lines, "n": columns, "k": width, "batch": batch, "transpose_b": 1, "scale": 1.0}
    calls = []
    for direction, weight in enumerate(weights):
        out = given.select(0, direction).reshape((batch, lines, columns))
        assert out is not None
        input_product = replace(
            call,
            kernel="batched_matmul_kernel",
            inputs=(matrices, weight.transpose(0, 1).expand((batch, width, columns))),
            outputs=(out,),
            params=params,
            flops=2 * batch * lines * columns * width,
        )
        calls += PRODUCTS[input_product.kernel](make, input_product)
    return given.transpose(1, 2) if is_by_sequence else given, calls


def _begin(make: Specializer, call: KernelCall, out: View) -> KernelCall:
    """The call of the kernel that marks all hidden states as missing."""
    pack = min(vector_width(out), 16 // itemsize(out.dtype))
    while out.shape[-1] % pack:
        pack //= 2
    kernel = make.kernel(
        call,
        "recurrent/recurrent.cu",
        function="recurrent_begin",
        inputs={},
        outputs={"out": out},
        grid=(groups(out.numel // pack, _BEGIN_THREADS), 1, 1),
        block=(_BEGIN_THREADS, 1, 1),
        constants={"pack": pack},
    )
    return replace(kernel, flops=0, bytes_moved=out.numel * itemsize(out.dtype))


def _steps(
    make: Specializer, call: KernelCall, division: Division, views: Mapping[str, View | None], rows: tuple[int, int]
) -> KernelCall:
    """The call of the kernel of all steps, for the rows of the batch from `rows[0]` to `rows[1]`."""
    of_rows = {"given": 2, "h0": 1, "c0": 1, "out": 1, "hn": 1, "cn": 1}  # their dimension of rows
    present = {name: view for name, view in views.items() if view is not None}
    chosen = {name: present[name].slice(dim, *rows) for name, dim in of_rows.items() if name in present}
    names = ("hidden_weight", "bias", "hidden_bias", "back_hidden_weight", "back_bias", "back_hidden_bias")
    inputs = {name: chosen.get(name) for name in ("given", "h0", "c0")} | {name: views[name] for name in names}
    kernel = make.kernel(
        call,
        "recurrent/recurrent.cu",
        function="recurrent_steps" if division.layer.on_tensor_cores else "recurrent_steps_plain",
        inputs=inputs,
        outputs={name: chosen.get(name) for name in ("out", "hn", "cn")},
        grid=(division.layer.directions * division.row_groups * division.blocks, 1, 1),
        block=(_WARPS * WARP, 1, 1),
        shared=division.shared,
        constants=division.constants(),
        kind=LaunchKind.COOPERATIVE,
    )
    weights = [view for name, view in inputs.items() if name.endswith("hidden_weight") and view is not None]
    steps = call.outputs[0].shape[0]
    return replace(kernel, flops=2 * steps * (rows[1] - rows[0]) * sum(view.numel for view in weights))


RULES: dict[str, Rule] = {"lstm_kernel": _layer, "rnn_kernel": _layer}
