"""Fuses squeeze-and-excitation (a global gate for each channel) into one kernel.

Given:   m = adaptive_avg_pool2d(x to 1 × 1);  h = silu(conv2d(m, v) + a);  g = sigmoid(conv2d(h, w) + b);  y = x * g
Result:  y = squeeze_excite(x, v, a, w, b)

The element-wise calls that follow become its epilogue.

Otherwise these are five kernels of a few microseconds each, of which only the first and the last have much to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cuda_compiler.elementwise.grouping import place_of
from cuda_compiler.passes.epilogues import absorb_steps
from cuda_compiler.rules.channel_packs import PACK, channels_last, is_packed
from cuda_compiler.rules.epilogues import EPILOGUE
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

KERNEL = "squeeze_excite"
MOST_CHANNELS = 2048
MOST_HIDDEN = 512


def join_squeeze_excite(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with each squeeze-and-excitation as one call; images must be channels-last already."""
    kept = {view.buffer for view in plan.output_views.values()}
    readers: dict[str, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for name in {view.buffer for view in call.inputs}:
            readers.setdefault(name, []).append(index)
    calls: list[KernelCall | None] = list(plan.calls)
    for index, call in enumerate(plan.calls):
        chain = _Chain.at(plan.calls, index, readers, kept) if call.kernel == "adaptive_avg_pool2d_kernel" else None
        if chain is not None and _is_undisturbed(plan.calls, chain, plan.calls[index].inputs[0].buffer):
            for place in chain.places:
                calls[place] = None
            calls[chain.places[-1]] = chain.joined(plan.calls)
    return absorb_steps(replace(plan, calls=[call for call in calls if call is not None]), KERNEL)


@dataclass(frozen=True)
class _Chain:
    """The calls of one squeeze-and-excitation.

    Attributes:
        places: Indices of the pooling, the convolutions, the copies that pack their inputs, and the multiplication, in
            order.
        squeeze, excite: The two convolutions.
    """

    places: tuple[int, ...]
    squeeze: KernelCall
    excite: KernelCall

    @staticmethod
    def at(
        calls: Sequence[KernelCall], index: int, readers: Mapping[str, Sequence[int]], kept: Iterable[str]
    ) -> _Chain | None:
        """The chain that begins with the pooling at `index`, or None if none does."""
        x, pooled = calls[index].inputs[0], calls[index].outputs[0]
        if x.shape[1] != pooled.shape[1] or pooled.shape[2:] != (1, 1) or not _suits(x):
            return None
        places, name = [index], pooled.buffer
        convolutions: list[KernelCall] = []
        while len(convolutions) < 2:
            if len(readers.get(name, ())) != 1 or name in kept:
                return None
            (place,) = readers[name]
            call = calls[place]
            if call.kernel == "conv2d_kernel" and _is_of_one_pixel(call):
                convolutions.append(call)
            elif call.kernel != "to_channels_last" or call.inputs[0].shape[2:] != (1, 1):
                return None
            places.append(place)
            name = call.outputs[0].buffer
        if len(readers.get(name, ())) != 1 or name in kept or not _scales(calls[readers[name][0]], x, name):
            return None
        squeeze, excite = convolutions
        fits = squeeze.inputs[1].shape[0] <= min(MOST_HIDDEN, excite.inputs[1].shape[1])
        fits = fits and squeeze.inputs[1].shape[1] == excite.inputs[1].shape[0] == x.shape[1]
        return _Chain((*places, readers[name][0]), squeeze, excite) if fits else None

    def joined(self, calls: Sequence[KernelCall]) -> KernelCall:
        pool, scale = calls[self.places[0]], calls[self.places[-1]]
        x = pool.inputs[0]
        out = replace(x, buffer=scale.outputs[0].buffer, offset=scale.outputs[0].offset)
        inputs = (x, *self.squeeze.inputs[1:], *self.excite.inputs[1:])
        return KernelCall(
            KERNEL,
            "",
            inputs,
            (out,),
            {
                "activation": self.squeeze.params["activation"],
                "gate": self.excite.params["activation"],
                "squeeze_bias": len(self.squeeze.inputs) > 2,
                "excite_bias": len(self.excite.inputs) > 2,
            },
            scale.node,
            sum(calls[place].flops for place in self.places),
            sum(distinct_bytes(view) for view in (*inputs, out)),
        )


def _suits(x: View) -> bool:
    """Whether the kernel can process such images: 16-bit, packed channels-last, at most `MOST_CHANNELS` channels."""
    last = channels_last(x)
    return x.dtype in HALF_DTYPES and is_packed(x) and x.shape[1] <= MOST_CHANNELS and last.is_contiguous


def _is_of_one_pixel(call: KernelCall) -> bool:
    """Whether a convolution is a product of one pixel's channels and a 16-bit weight, for tensor cores."""
    x, weight, _, residual, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    plain = residual is None and call.params["groups"] == 1 and x.shape[2:] == weight.shape[2:] == out.shape[2:]
    plain = plain and "spread" not in call.params and EPILOGUE not in call.params
    halves = weight.dtype in HALF_DTYPES and weight.shape[1] % PACK == 0
    return plain and x.shape[2:] == (1, 1) and halves and channels_last(weight).is_contiguous


def _scales(call: KernelCall, x: View, gates: str) -> bool:
    """Whether a call multiplies each channel of the images by its gate, with the result laid out as the images are."""
    decl = elementwise_kernel(call)
    if decl is None or decl.op.name != "mul" or list(call.params["scalars"]) != [None, None]:
        return False
    out, run = call.outputs[0], ((x.numel,), (1,))
    places = [place_of(view) for view in (*call.inputs, out) if view.buffer != gates]
    images = [view for view in call.inputs if view.buffer != gates]
    if len(images) != 1 or any((place.sizes, place.strides) != run for place in places):
        return False
    (factors,) = [view for view in call.inputs if view.buffer == gates]
    pixels = x.shape[2] * x.shape[3]
    wanted = replace(factors, shape=(x.shape[0], pixels, x.shape[1]), strides=(x.shape[1], 0, 1))
    same = (images[0].buffer, images[0].offset) == (x.buffer, x.offset) and out.dtype == x.dtype
    return same and place_of(factors) == place_of(wanted)


def _is_undisturbed(calls: Sequence[KernelCall], chain: _Chain, source: str) -> bool:
    """Whether no call from the pooling to the one before the multiplication writes `source`, the images' buffer."""
    first, *_, last = chain.places
    between = [call for place, call in enumerate(calls[first : last + 1], first) if place != last]
    return not any(view.buffer == source for call in between for view in call.outputs)
