"""Fuses the quantization of activation rows with the calls that compute them, and scaling with the calls that read.

A quantized row is int8 or float8 codes and one scale (`quantize_rows`). A product whose two operands are codes is
multiplied by the scales of its rows and of its columns afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cuda_compiler.rules.gates import reads_halves
from cuda_compiler.rules.linear_codes import suits_linear_codes
from cuda_compiler.rules.matmul import operands
from cuda_compiler.rules.rounded import (
    RoundedForm,
    RoundedRows,
    RowOrigin,
    UnscaledProduct,
    can_hold,
    joined_product,
    keep_rounded,
    product_of_codes,
    round_rows,
    scales_products,
    unscaled_product,
    wanted_form,
)
from cuda_compiler.specialization.c_text import expression, float_text
from cuda_compiler.specialization.sizes import vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_NORM = "rmsnorm_kernel"


def join_rounding(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with products of quantized rows expanded, and the quantization of rows fused with the calls before it.

    Given:  h = dynamic_quantized_matmul(x, w) + r;  y = rmsnorm(h);  a = dynamic_quantized_matmul(y, v)
            b = silu_mul(a1, a2);  c = dynamic_quantized_matmul(b, u)
    Result: rounded_rows(x);  p = gemm;  rounded_rows(p, its scales, r) → h, codes of y;  a = gemm
            rounded_rows(a1, a2, their scales) → codes of b;  c = gemm
            or, by `linear_codes`: rounded_rows(x);  h = linear_codes(…, r);  rounded_rows(h) → codes of y
            b = linear_codes(…, silu_mul);  rounded_rows(b) → its codes;  c = linear_codes

    16-bit rows that only such products read are thus never stored. A product is stored without its scales if its first
    reader is a call fused with a quantization, which applies them, since cuBLASLt has faster algorithms for a plain
    product.
    """
    if all(wanted_form(call, make.gpu) is None for call in plan.calls):
        return plan
    joining = _Joining(plan, make)
    joined = [part for index, call in enumerate(plan.calls) for part in joining.calls(index, call)]
    return replace(plan, calls=joined)


@dataclass
class _Joining:
    """The state of the pass.

    Attributes:
        joined: Index of a call that is fused with the quantization of its result → the rows, and the form in which
            their readers read them.
        scaling: Index of a product of codes → index of the `joined` call that applies its scales or is fused into it.
        rounded: Rows and form → the quantized rows, for rows that have been quantized already.
        unscaled: Buffer of a product → the call, and the unscaled product that is stored instead.
        applied: Buffer of a product → the result of the element-wise call that is fused into the product.
    """

    plan: ExecutionPlan
    make: Specializer
    readers: dict[str, list[int]] = field(default_factory=dict)
    joined: dict[int, tuple[View, RoundedForm]] = field(default_factory=dict)
    scaling: dict[int, int] = field(default_factory=dict)
    rounded: dict[tuple[View, RoundedForm], RoundedRows] = field(default_factory=dict)
    unscaled: dict[str, tuple[KernelCall, UnscaledProduct]] = field(default_factory=dict)
    applied: dict[str, View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        writers: dict[str, int] = {}
        for index, call in enumerate(self.plan.calls):
            for name in {view.buffer for view in call.inputs}:
                self.readers.setdefault(name, []).append(index)
            for view in call.outputs:
                writers[view.buffer] = writers.get(view.buffer, 0) + 1
        kept = {view.buffer for view in self.plan.output_views.values()}
        # Of one call each, read by others only.
        self.inner = {
            name
            for name, count in writers.items()
            if count == 1 and name not in kept and self.plan.buffers[name].kind == "arena"
        }
        for index, call in enumerate(self.plan.calls):
            if (join := self._joins(call)) is not None:
                self.joined[index] = join
        for index, call in enumerate(self.plan.calls):
            if (reader := self._scaling_reader(index, call)) is not None:
                self.scaling[index] = reader

    def calls(self, index: int, call: KernelCall) -> list[KernelCall]:
        """The one to three calls that replace a call: quantization, product and epilogue, or the call itself.

        A call that is fused with the quantization of its result is replaced by the fused call.
        """
        replacement = self._replaced(index, call)
        written = {view.buffer for view in call.outputs}
        self.rounded = {key: codes for key, codes in self.rounded.items() if key[0].buffer not in written}
        if index in self.joined:
            rows, form = self.joined[index]
            rounding, codes = round_rows(self.make, call, form, self._origin(call, rows))
            self.rounded[rows, form] = codes
            keep_rounded(self.make, rows, form, codes)
            return [rounding]
        return replacement

    def _replaced(self, index: int, call: KernelCall) -> list[KernelCall]:
        """The calls of a product of codes, after the quantization of its rows if needed; any other call by itself."""
        form = wanted_form(call, self.make.gpu)
        if form is None or form.dtype != "uint8":
            return [call]
        x, before = call.inputs[0], []
        if (x, form) not in self.rounded:
            rounding, self.rounded[x, form] = round_rows(self.make, call, form, RowOrigin(x, x.dtype))
            before.append(replace(rounding, flops=0))
        rounded = self.rounded[x, form]
        if index not in self.scaling:
            return [*before, *product_of_codes(self.make, call, rounded)]
        reader, out = self.plan.calls[self.scaling[index]], call.outputs[0]
        if suits_linear_codes(self.make, call):
            applied = self.make.temporary(call.node, (out.shape[0], out.shape[1] // 2), out.dtype)
            self.applied[out.buffer] = applied
            return [*before, joined_product(self.make, call, rounded, _function(reader), applied)]
        # A gate reads both halves of a long row, so their bytes count; bfloat16 holds any sum of codes.
        narrow = reader.kernel != _NORM and out.dtype == "bfloat16"
        product, unscaled = unscaled_product(self.make, call, rounded, "bfloat16" if narrow else "float32")
        self.unscaled[out.buffer] = call, unscaled
        return [*before, product]

    def _joins(self, call: KernelCall) -> tuple[View, RoundedForm] | None:
        """The rows that a call computes and their quantized form, if the call can be fused with their quantization.

        None if other kinds of calls read the result too, its readers need different forms, or no kernel does both.
        """
        out = call.outputs[0]
        readers = [self.plan.calls[index] for index in self.readers.get(out.buffer, [])]
        if len(call.outputs) != 1 or out.buffer not in self.inner or not readers:
            return None
        forms = {wanted_form(reader, self.make.gpu) for reader in readers}
        rows = readers[0].inputs[0]
        (form, *others) = forms
        if form is None or others or any(reader.inputs[0] != rows for reader in readers):
            return None
        if any(view.buffer == out.buffer for reader in readers for view in reader.inputs[1:]):
            return None
        if out.numel != rows.numel or out.reshape(rows.shape) != rows or not self._can_join(call, rows):
            return None
        return rows, form

    def _can_join(self, call: KernelCall, rows: View) -> bool:
        if call.kernel == _NORM:
            x, out = call.inputs[0], call.outputs[0]
            aligned = all(_is_aligned(view, rows) for view in call.inputs)
            return x.dtype == out.dtype and x.shape == out.shape and aligned and can_hold(rows)
        decl = elementwise_kernel(call)
        if decl is None or len(call.inputs) > 2 or list(call.params["scalars"]) != [None] * len(call.inputs):
            return False
        inputs = [_as_rows(view, rows) for view in call.inputs if view.dtype == rows.dtype]
        return len(inputs) == len(call.inputs) and bool(inputs) and None not in inputs

    def _scaling_reader(self, index: int, call: KernelCall) -> int | None:
        """The index of the call that can apply a product's scales in its place, or that can be fused into the product.

        It is the product's first reader, and is fused with the quantization of its own result. None if there is no such
        reader, or if `call` does not multiply two quantized operands.
        """
        form = wanted_form(call, self.make.gpu)
        if form is None or form.dtype != "uint8" or call.params["activation"] != "none":
            return None
        inputs, out = operands(call), call.outputs[0]
        readers = self.readers.get(out.buffer, [])
        if out.buffer not in self.inner or not readers or readers[0] not in self.joined or inputs["bias"] is not None:
            return None
        reader = self.plan.calls[readers[0]]
        if suits_linear_codes(self.make, call):
            alone = len(readers) == 1 and self._takes_along(call, reader, self.joined[readers[0]][0])
            return readers[0] if alone else None
        if reader.kernel == _NORM:
            residual = inputs["residual"]
            fits = residual is None or residual.dtype == out.dtype and _is_aligned(residual, out)
            return readers[0] if fits and reader.inputs[0] == out else None
        if scales_products(self.make, call):
            return None  # with columns enough, that takes no time
        whole = len(readers) == 1 and all(view.buffer == out.buffer for view in reader.inputs)
        slices = [_as_rows(view, self.joined[readers[0]][0]) for view in reader.inputs]
        alike = all(view is not None and view.strides[0] == out.strides[0] for view in slices)
        return readers[0] if whole and alike and inputs["residual"] is None else None

    def _takes_along(self, product: KernelCall, reader: KernelCall, rows: View) -> bool:
        """Whether a product can also apply `reader`, the element-wise call that computes `rows` from its two halves."""
        out = product.outputs[0]
        return (
            reader.kernel != _NORM
            and out.shape[1] % 16 == 0
            and operands(product)["residual"] is None
            and rows.shape == (out.shape[0], out.shape[1] // 2)
            and reads_halves(reader, out)
        )

    def _origin(self, call: KernelCall, rows: View) -> RowOrigin:
        """The computation of `rows` by `call`, as a description for the kernel that also quantizes them."""
        if call.kernel == _NORM:
            x, weight, _ = KERNELS[call.kernel].bind(call)
            assert x is not None
            origin = RowOrigin(
                x, x.dtype, weight=weight, eps=call.params["eps"], weight_offset=call.params["weight_offset"]
            )
            if x.buffer not in self.unscaled:
                return origin
            product, unscaled = self.unscaled[x.buffer]
            residual = operands(product)["residual"]
            return replace(
                origin,
                x=unscaled.out,
                row_scales=unscaled.row_scales,
                column_scales=unscaled.column_scales,
                residual=residual,
                total=x if len(self.readers[x.buffer]) > 1 else None,
            )
        found_rows = [_as_rows(view, rows) for view in call.inputs]
        x, *others = (view for view in found_rows if view is not None)
        if x.buffer in self.applied:
            return RowOrigin(self.applied[x.buffer], rows.dtype)
        origin = RowOrigin(x, rows.dtype, function=_function(call), other=others[0] if others else None)
        if x.buffer not in self.unscaled:
            return origin
        _, unscaled = self.unscaled[x.buffer]
        parts = [_columns(unscaled, view) for view in (x, *others)]
        other, other_scales = parts[1] if others else (None, None)
        return replace(
            origin,
            x=parts[0][0],
            row_scales=unscaled.row_scales,
            column_scales=parts[0][1],
            other=other,
            other_scales=other_scales,
        )


def _is_aligned(view: View, rows: View) -> bool:
    """Whether a view allows vector accesses as wide as `rows` does (of at most 8 elements)."""
    return vector_width(view) >= min(8, vector_width(rows))


def _as_rows(view: View, rows: View) -> View | None:
    """The view in the shape of `rows`; None if it has another size or the elements of a row are not contiguous."""
    shaped = view.reshape(rows.shape) if view.numel == rows.numel else None
    return None if shaped is None or shaped.strides[1] != 1 else shaped


def _columns(product: UnscaledProduct, part: View) -> tuple[View, View]:
    """The columns of an unscaled product, and their scales, that correspond to a view of the scaled product."""
    first, width = part.offset, part.shape[1]
    return product.out.slice(1, first, first + width), product.column_scales.slice(0, first, first + width)


def _function(call: KernelCall) -> str:
    """The C definition of an element-wise call as a device function `made(a, b)`."""
    decl = elementwise_kernel(call)
    assert decl is not None
    attributes = "".join(f"const float {name} = {float_text(call.params[name])}; " for name in decl.op.attrs)
    result = expression(decl.op, rounds=call.outputs[0].dtype in HALF_DTYPES)
    return f"__device__ __forceinline__ float made(float a, float b) {{ {attributes}return {result}; }}"
