"""Products and lookups with weights in few bits, which the kernels take apart in registers."""

from __future__ import annotations

from types import SimpleNamespace

from npu_compiler.graph.quantization import CODES, OFFSETS
from npu_compiler.program.elementwise import ACTIVATION
from npu_compiler.program.kernels import Family, Grid, declare_kernel

_FIELDS = {"k": "I", "groups": "I", "codes": f"s {' '.join(CODES)}", "offsets": f"s {' '.join(OFFSETS)}"}
_WEIGHT = "data:u[{rows},.bytes] scales:f[{rows},.groups] offset?:fu[{rows},.groups]"


def _holds_rows(call: SimpleNamespace) -> bool:
    """Whether the parts of a quantized weight are those of rows of k elements."""
    dtype = None if call.offset is None else call.offset.dtype
    wanted = {"none": None, "minimum": call.scales.dtype, "zero_point": "uint8"}[call.offsets]
    divides = call.groups > 0 and call.k % call.groups == 0
    return bool(divides and dtype == wanted and call.bytes * 8 == call.k * CODES[call.codes])


for _name, _grid, _rows_of_x in (
    ("quantized_matmul_kernel", Grid.TILES, "m"),
    ("quantized_matmul_vec_kernel", Grid.CODE_COLUMNS, "1"),
):
    declare_kernel(
        _name,
        Family.MATMUL,
        f"x:f[{_rows_of_x},.k] {_WEIGHT.format(rows='n')} bias?:f[.n] residual?:f[m,.n] -> out:f[m,n]",
        source="quantized.metal",
        grid=_grid,
        where=_holds_rows,
        m="I",
        n="I",
        **_FIELDS,
        activation=ACTIVATION,
    )
declare_kernel(
    "quantized_gated_matmul_vec_kernel",
    Family.MATMUL,
    f"x:f[1,.k] {_WEIGHT.format(rows='rows')} bias?:f[.rows] -> out:f[m,n]",
    source="quantized.metal",
    grid=Grid.CODE_COLUMNS,
    where=lambda call: call.m == 1 and call.rows == 2 * call.n and _holds_rows(call),
    m="I",
    n="I",
    **_FIELDS,
    activation=ACTIVATION,
)
declare_kernel(
    "quantized_embedding_kernel",
    Family.INDEXING,
    f"{_WEIGHT.format(rows='rows')} ids:i[*s] -> out:f[*s,k]",
    source="quantized.metal",
    grid=Grid.TABLE_ROWS,
    where=_holds_rows,
    index_limit=lambda call: call.rows,
    rows="I",
    **_FIELDS,
    checked="?",
)
