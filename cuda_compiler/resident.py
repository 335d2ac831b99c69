"""Decode steps as one kernel that stays resident on every multiprocessor, from the first product to the last.

A step over a few tokens is bound by reading the weights, and a launch per product leaves the memory idle at each of
their ends. Here a run of calls becomes the phases of one kernel, with a barrier of the grid between them, while the
weights are fetched ahead across the barriers (`templates/resident.cuh`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from cuda_compiler.attention_rules import BLOCK_KEYS, BLOCK_ROWS
from cuda_compiler.cuda_templates import (
    TYPES,
    WARP,
    Specializer,
    groups,
    index_type,
    kernel_text,
    specialized,
    template_text,
    vector_width,
)
from cuda_compiler.resident_attention import AttentionMatch, attend_memory, combine_memory, match_attention
from cuda_compiler.subgraph_analyzer import place_of
from npu_compiler.codegen_core import KERNELS, ExecutionPlan, KernelCall, distinct_bytes
from npu_compiler.dtypes import is_float, itemsize
from npu_compiler.views import View, numel

RESIDENT = "resident"
THREADS = 256
_WARPS = THREADS // WARP
_SLOT_BYTES = 6144  # of the ring that each warp keeps
_MULTIPROCESSORS = 132  # for which work is divided evenly; others may run the kernel as well
_MAX_ROWS = 8
_MAX_STAGED_BYTES = 48 * 1024  # of a product's input
_CONSTANT = ("gain", "weight", "bias")
_MAX_OPERANDS = 2048  # of a kernel, whose arguments take up to 32 KiB
_FEW_PARTS = 8  # of attention, which every block may put together for itself
_FEW_TURNS = 2  # over the keys, which cost less than more parts
_MIN_PRODUCTS = 2
_PRODUCTS = ("matmul_kernel", "matmul_vec_kernel", "gated_matmul_vec_kernel")
_GAIN = {"normed": False, "norm_eps": 0.0, "gain_offset": 0.0}


@dataclass(frozen=True)
class Stream:
    """How the warps share a product's weight; the members of `Stream` in `resident.cuh`."""

    rows: int
    splits: int
    pieces: int
    row_bytes: int
    part_bytes: int
    chunk_bytes: int
    piece_bytes: int

    def __str__(self) -> str:
        return (
            f"{{{self.rows}, {self.splits}, {self.pieces}, {self.row_bytes}u, {self.part_bytes}u, {self.chunk_bytes}u, "
            f"{self.piece_bytes}ull}}"
        )


@dataclass(frozen=True)
class Phase:
    """What all blocks do between two barriers.

    Attributes:
        call: The op-level call whose parameters are compiled in.
        inputs, outputs: Operand name → view, None for an absent one.
        scratch: Bytes of shared memory that it uses; its `Scratch` is not larger.
        early: Inputs that are read before the barrier, so no phase of the same kernel may write them.
        stream: How `weight` is shared out, for phases that stream one.
    """

    call: KernelCall
    file: str
    function: str
    inputs: Mapping[str, View | None]
    outputs: Mapping[str, View | None]
    constants: Mapping[str, bool | int | float]
    scratch: int
    early: tuple[str, ...] = ()
    stream: Stream | None = None

    @property
    def operands(self) -> dict[str, View]:
        return {name: view for name, view in (*self.inputs.items(), *self.outputs.items()) if view is not None}

    def text(self) -> str:
        """The phase's code; phases of equal text share it."""
        arguments = "".join(
            f", {'const ' if name in self.inputs else ''}{TYPES[view.dtype]} *{name}"
            for name, view in self.operands.items()
        )
        return "\n".join(
            [
                specialized(self.call, KERNELS[self.call.kernel], self.inputs, self.outputs, self.constants),
                f"#define PHASE(name) __device__ __forceinline__ void name(Ring &ring, char *shared{arguments})",
                kernel_text(self.file, self.function),
                "#undef PHASE\n",
            ]
        )


@dataclass
class Run:
    """Consecutive calls and the phases that do what they do.

    Attributes:
        written: The buffers that the phases write.
    """

    calls: list[KernelCall] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    written: set[str] = field(default_factory=set)

    @property
    def products(self) -> int:
        return sum(phase.stream is not None for phase in self.phases)

    def takes(self, phases: Sequence[Phase]) -> bool:
        """Whether phases may follow: there is room for their operands, and nobody writes what they read early."""
        early = {phase.operands[name].buffer for phase in phases for name in phase.early if name in phase.operands}
        return self.operands + _operands(phases) <= _MAX_OPERANDS and self.written.isdisjoint(early)

    @property
    def operands(self) -> int:
        return _operands(self.phases)

    def append(self, calls: Sequence[KernelCall], phases: Sequence[Phase]) -> None:
        self.calls += calls
        self.phases += phases
        self.written |= {view.buffer for phase in phases for view in phase.outputs.values() if view is not None}


def _operands(phases: Sequence[Phase]) -> int:
    return sum(len(phase.operands) for phase in phases)


def form_resident_kernels(plan: ExecutionPlan, make: Specializer, shared_memory: int) -> list[KernelCall]:
    """The plan's calls with each run of products and attention over a few rows as one call.

    Given:  embedding; rmsnorm; linear; rope; index_copy_pair; attention; linear; …; linear
    Result: embedding; resident

    Args:
        shared_memory: Bytes that a block may have; a run that needs more stays as it is.
    """
    result: list[KernelCall] = []
    for run in _Matcher(plan, make).runs():
        if run.products >= _MIN_PRODUCTS and _least_shared(run) <= shared_memory:
            result.append(_resident(run, make))
        else:
            result += run.calls
    return result


class _Matcher:
    """Finds the runs of a plan.

    Attributes:
        readers: Buffer → how many calls and program outputs read it.
        partial: Shape → memory for the partial sums of attention, which all layers share.
    """

    def __init__(self, plan: ExecutionPlan, make: Specializer) -> None:
        self.plan = plan
        self.make = make
        self.readers = Counter(view.buffer for call in plan.calls for view in call.inputs)
        self.readers.update(view.buffer for view in plan.output_views.values())
        self.partial: dict[tuple[int, ...], tuple[View, View]] = {}

    def runs(self) -> Iterator[Run]:
        """All calls in order; a call without phases is a run of its own."""
        run = Run()
        index = 0
        while index < len(self.plan.calls):
            taken, phases = self._match(index)
            if run.calls and not (run.phases and phases and run.takes(phases)):
                yield run
                run = Run()
            run.append(self.plan.calls[index : index + taken], phases)
            index += taken
        if run.calls:
            yield run

    def _match(self, index: int) -> tuple[int, list[Phase]]:
        """How many calls from `index` on are done by which phases; by none where a resident kernel cannot."""
        calls = self.plan.calls
        first = calls[index]
        if first.kernel in _PRODUCTS:
            return 1, self._product(first)
        if first.kernel == "rmsnorm_kernel" and index + 1 < len(calls):
            normalized, product = first.outputs[0], calls[index + 1]
            alone = self.readers[normalized.buffer] == 1 and self.plan.buffers[normalized.buffer].kind == "arena"
            if product.kernel in _PRODUCTS and alone and product.inputs[0] == normalized:
                phases = self._product(product, first)
                return (2, phases) if phases else (1, [])
        match = match_attention(calls[index : index + 3], self.readers)
        return self._attention(match, calls[index + match.taken :][:1]) if match is not None else (1, [])

    def _product(
        self, call: KernelCall, norm: KernelCall | None = None, parts: Mapping[str, View] | None = None
    ) -> list[Phase]:
        """A product of a few rows, with the RMSNorm or the sum of attention's parts before it, if its weight can be
        streamed."""
        decl = KERNELS[call.kernel]
        bound = dict(zip((operand.name for operand in decl.inputs), decl.bind(call), strict=False))
        x, weight = bound["x"], bound["weight"]
        assert x is not None and weight is not None
        gain, constants = None, dict(_GAIN)
        if norm is not None:
            x, gain = KERNELS[norm.kernel].bind(norm)[:2]
            assert x is not None
            offset = norm.params["weight_offset"]
            constants = {"normed": True, "norm_eps": norm.params["eps"], "gain_offset": offset}
        m, n, k = (call.params[name] for name in "mnk")
        gated = call.kernel == "gated_matmul_vec_kernel"
        pack = 16 // itemsize(weight.dtype)
        constant = self.plan.buffers[weight.buffer].kind in ("weight", "constant", "persistent")
        if (
            m > _MAX_ROWS
            or m * k * itemsize(x.dtype) > _MAX_STAGED_BYTES
            or not constant
            or not is_float(weight.dtype)
            or x.dtype != weight.dtype
            or k % pack
            or min(vector_width(weight), pack) < pack
            or vector_width(x) < pack
            or weight.strides[0] != k
            or (gain is not None and vector_width(gain) < pack)
        ):
            return []
        pieces = 2 if gated else 1
        packs, row_bytes = k // pack, k * itemsize(weight.dtype)
        splits = _splits(n, packs)
        part = packs // splits
        chunk = min(part, _SLOT_BYTES // 16 // pieces)
        stream = Stream(n, splits, pieces, row_bytes, part * 16, chunk * 16, n * row_bytes)
        inputs: dict[str, View | None] = {"x": x if parts is None else None, "gain": gain, "parts": None, "stats": None}
        inputs |= {**(parts or {}), "weight": weight, "bias": bound.get("bias"), "residual": bound.get("residual")}
        part_count = numel(parts["parts"].shape[:-1]) if parts is not None else 1
        constants |= {"gated": gated, "splits": splits, "chunk_packs": chunk, "part_count": part_count}
        sums = 4 * _WARPS * 32 * pieces
        scratch = m * (row_bytes + sums + 4 * _WARPS) + 12 * part_count
        outputs = {"out": call.outputs[0]}
        return [Phase(call, "product.cu", "product", inputs, outputs, constants, _whole(scratch), _CONSTANT, stream)]

    def _attention(self, match: AttentionMatch, following: Sequence[KernelCall]) -> tuple[int, list[Phase]]:
        """Attention, whose parts a product that follows puts together itself where they are few."""
        batch, heads, queries, _ = match.q.shape
        kv_heads, keys = match.k.shape[1], match.k.shape[2]
        rows = queries * (heads // kv_heads)
        items = batch * kv_heads * groups(rows, BLOCK_ROWS)
        turns = groups(keys, _WARPS * BLOCK_KEYS)
        splits = min(turns, groups(_MULTIPROCESSORS, items))
        if turns <= _FEW_TURNS * _FEW_PARTS:
            splits = min(splits, _FEW_PARTS)
        shape = (batch, kv_heads, rows, splits, match.v.shape[3])
        if shape not in self.partial:
            sums = self.make.temporary("attention.sums", shape, "float32")
            self.partial[shape] = sums, self.make.temporary("attention.stats", (*shape[:-1], 2), "float32")
        sums, stats = self.partial[shape]
        partial, constants = {"sums": sums, "stats": stats}, {"splits": splits}
        file, call, out = "resident_attention.cu", match.call, match.call.outputs[0]
        scratch = _whole(attend_memory(match.q, match.k, match.v, _WARPS))
        outputs = {**match.outputs, **partial}
        attend = Phase(call, file, "attend_keys", match.inputs, outputs, constants, scratch, ("k", "v", "mask"))
        for product in following:
            if splits <= _FEW_PARTS and self.readers[out.buffer] == 1 and _reads_heads(product, out):
                phases = self._product(product, parts={"parts": sums, "stats": stats})
                if phases:
                    return match.taken + 1, [attend, *phases]
        scratch = _whole(combine_memory(splits, THREADS))
        return match.taken, [attend, Phase(call, file, "add_up", partial, {"out": out}, constants, scratch)]


def _splits(rows: int, packs: int) -> int:
    """How many warps share a row: as few as divide the rows evenly among the multiprocessors."""

    def cost(splits: int) -> float:
        share = rows * splits / (_MULTIPROCESSORS * _WARPS)
        return ceil(share) / share * (1 + 0.02 * log2(splits))

    return min((splits for splits in (1, 2, 4, 8) if packs % splits == 0), key=cost)


def _reads_heads(product: KernelCall, out: View) -> bool:
    """Whether a product's rows are the heads of attention's queries side by side."""
    batch, heads, queries, width = out.shape
    if product.kernel not in _PRODUCTS or width % 4:
        return False
    x = product.inputs[0]
    side_by_side = View(
        out.buffer, out.shape, (queries * heads * width, width, heads * width, 1), x.offset, x.dtype
    )
    return x.is_contiguous and x.shape == (batch * queries, heads * width) and place_of(side_by_side) == place_of(out)


def _resident(run: Run, make: Specializer) -> KernelCall:
    """The run as one call: inputs and outputs are all that its phases read and write."""
    counter = make.counter(f"{run.calls[-1].node}.barrier")
    writes = list(dict.fromkeys(view for phase in run.phases for view in phase.outputs.values() if view is not None))
    reads = dict.fromkeys(view for phase in run.phases for view in phase.inputs.values() if view is not None)
    inputs = [view for view in reads if view not in writes]
    outputs = [*writes, counter]
    place = {view: index for index, view in enumerate((*inputs, *outputs))}
    last = run.calls[-1]
    return KernelCall(
        RESIDENT,
        make.add_source(_source(run, place, place[counter])),
        tuple(inputs),
        tuple(outputs),
        {"grid": [1, 1, 1], "block": [THREADS, 1, 1], "shared": _least_shared(run), "resident": True},
        last.node,
        sum(call.flops for call in run.calls),
        sum(distinct_bytes(view) for view in (*inputs, *writes)),
    )


def _scratch_bytes(run: Run) -> int:
    return max(phase.scratch for phase in run.phases)


def _least_shared(run: Run) -> int:
    """Shared memory that a block needs at least: the scratch and two slots for each warp."""
    return _scratch_bytes(run) + 2 * _WARPS * (_SLOT_BYTES + 8)


def _whole(size: int) -> int:
    return -(-size // 128) * 128


def _source(run: Run, place: Mapping[View, int], counter: int) -> str:
    texts: dict[str, int] = {}
    streams: dict[str, int] = {}
    cases: dict[int, str] = {}
    ahead: dict[int, str] = {}
    steps = []
    for phase in run.phases:
        number = texts.setdefault(phase.text(), len(texts))
        operands = phase.operands
        stream, weight = -1, 0
        if phase.stream is not None:
            stream = streams.setdefault(str(phase.stream), len(streams))
            weight = place[operands["weight"]]
        steps.append(f"{{{number}, {stream}, {weight}, {{{', '.join(str(place[v]) for v in operands.values())}}}}}")
        arguments = "".join(
            f", static_cast<{TYPES[view.dtype]} *>(operands.at[now.operand[{index}]])"
            for index, view in enumerate(operands.values())
        )
        arguments = f"(ring, shared{arguments})"
        cases[number] = f"        case {number}: phase{number}::{phase.function}{arguments}; break;"
        ahead[number] = f"        case {number}: phase{number}::look_ahead{arguments}; break;"
    widest = max(len(phase.operands) for phase in run.phases)
    views = [view for phase in run.phases for view in phase.operands.values()]
    namespaces = [f"namespace phase{number} {{\n{text}}}\n" for text, number in texts.items()]
    head = {
        "THREADS": THREADS, "SLOT_BYTES": _SLOT_BYTES, "SCRATCH_BYTES": _scratch_bytes(run),
        "MAX_OPERANDS": widest, "OPERANDS": len(place), "STEPS": len(steps),
    }  # fmt: skip
    return "\n".join(
        [
            index_type(views) + template_text("common.cuh"),
            *(f"constexpr int {name} = {value};" for name, value in head.items()),
            kernel_text("resident.cuh", "tables"),
            f"__constant__ Stream streams[] = {{{', '.join(streams)}}};",
            "__constant__ Step steps[] = {",
            *(f"    {step}," for step in steps),
            "};",
            kernel_text("resident.cuh", "ring"),
            *namespaces,
            f'extern "C" __global__ void __launch_bounds__(THREADS, 1) {RESIDENT}('
            "const __grid_constant__ Operands operands) {",
            "    extern __shared__ __align__(128) char shared[];",
            "    Ring ring(operands, shared);",
            f"    GridBarrier barrier(operands.at[{counter}]);",
            "    for (int step = 0; step < STEPS; step++) {",
            "        const Step &now = steps[step];",
            "        switch (now.phase) {",
            *ahead.values(),
            "        }",
            "        if (step > 0) {",
            "            barrier.wait();",
            "        }",
            "        switch (now.phase) {",
            *cases.values(),
            "        }",
            "        if (step + 1 < STEPS) {",
            "            barrier.arrive();",
            "        }",
            "    }",
            "}",
            "",
        ]
    )

