"""Decode steps as one kernel that stays resident on every multiprocessor, from the first product to the last.

A step over a few tokens is bound by reading the weights, and a launch per product leaves the memory idle at each of
their ends. Here a run of calls becomes the phases of one kernel, with a barrier of the grid between them, while the
weights are fetched ahead across the barriers (`templates/resident.cuh`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cuda_compiler.cuda_program import KernelLaunch, LaunchKind
from cuda_compiler.resident.attention import AttentionMatch, attend_memory, early_memory, match_attention
from cuda_compiler.resident.phases import PATIENCE, Phase, Stream, with_mail
from cuda_compiler.rules.attention import BLOCK_KEYS, BLOCK_ROWS
from cuda_compiler.specialization.c_text import TYPES, index_type
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import kernel_text, template_text
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

RESIDENT = LaunchKind.RESIDENT.value
THREADS = 256  # of a block that compute
_ALL_THREADS = THREADS + 4 * WARP  # with those that fetch weights, keep the grid's barrier or look ahead
_WARPS = THREADS // WARP
_UNIT_ROWS = 8  # of a weight, at most, that tensor cores multiply at a time
_LINE_BYTES = 128  # that a warp takes of each row
_SLOT_BYTES = _UNIT_ROWS * 3072
_STEPS_AHEAD = 3  # that may be looked ahead at a time
_IN_FLIGHT = 2  # slots of a ring, which has as many at least: a product takes two at a time
_MOST_IN_FLIGHT = 4  # while a block goes through a long weight
_PACE_BYTES = 16  # behind the ring, for a barrier
_LEAST_SHARED = 99 * 1024  # what a block may have on GPUs that copy asynchronously; others have less
_MAX_ROWS = 8
_MAX_STAGED_BYTES = 48 * 1024  # of a product's input
_CONSTANT = ("gain", "weight", "bias")
_MAX_OPERANDS = 2048  # of a kernel, whose arguments take up to 32 KiB
_MIN_PRODUCTS = 2
_MIN_TILES = 4  # of keys that a split has, as more splits have more to tell each other
_PRODUCTS = ("matmul_kernel", "matmul_vec_kernel", "gated_matmul_vec_kernel")
_GAIN = {"normed": False, "norm_eps": 0.0, "gain_offset": 0.0}


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


def form_resident_kernels(plan: ExecutionPlan, make: Specializer) -> list[KernelCall]:
    """The plan's calls with each run of products and attention over a few rows as one call.

    Given:  embedding; rmsnorm; linear; rope; index_copy_pair; attention; linear; …; linear
    Result: embedding; resident

    A run that needs more shared memory than a block may have stays as it is.
    """
    result: list[KernelCall] = []
    for run in _Matcher(plan, make).runs():
        if run.products >= _MIN_PRODUCTS and max(_LEAST_SHARED, _least_shared(run)) <= make.shared_memory:
            result.append(_resident(run, make))
        else:
            result += run.calls
    return result


class _Matcher:
    """Finds the runs of a plan.

    Attributes:
        readers: Buffer → how many calls and program outputs read it.
    """

    def __init__(self, plan: ExecutionPlan, make: Specializer) -> None:
        self.plan = plan
        self.make = make
        self.readers = Counter(view.buffer for call in plan.calls for view in call.inputs)
        self.readers.update(view.buffer for view in plan.output_views.values())

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
        return (match.taken, [self._attention(match)]) if match is not None else (1, [])

    def _product(self, call: KernelCall, norm: KernelCall | None = None) -> list[Phase]:
        """A product of a few rows, with the RMSNorm before it, if its weight can be streamed."""
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
        constant = self.plan.buffers[weight.buffer].is_constant
        if (
            m > _MAX_ROWS
            or m * k * itemsize(x.dtype) > _MAX_STAGED_BYTES
            or not constant
            or weight.dtype not in HALF_DTYPES
            or x.dtype != weight.dtype
            or k % pack
            or min(vector_width(weight), pack) < pack
            or vector_width(x) < pack
            or weight.strides[0] != k
            or (gain is not None and vector_width(gain) < pack)
        ):
            return []
        row_bytes = k * itemsize(weight.dtype)
        own = own_rows(n, _UNIT_ROWS // 2 if gated else _UNIT_ROWS)
        unit_rows = 2 * own if gated else own
        chunk = _chunk_bytes(row_bytes, unit_rows)
        batch = max(_MAX_ROWS // m, 2)  # a block takes units in pairs
        stream = Stream(groups(n, own), unit_rows, own, n, row_bytes, chunk)
        inputs = {"x": x, "gain": gain, "weight": weight, "bias": bound.get("bias"), "residual": bound.get("residual")}
        constants |= {
            "gated": gated,
            "units": stream.units,
            "is_long": stream.is_long,
            "unit_rows": unit_rows,
            "chunk_packs": chunk // 16,
            "batch": batch,
            "mailed": False,
            "mails": False,
            "patience": 0,
        }
        sums = 4 * 2 * _WARPS * _UNIT_ROWS * m * batch
        scratch = m * (groups(row_bytes, _LINE_BYTES) * _LINE_BYTES + 4 * _WARPS) + sums
        outputs = {"out": call.outputs[0]}
        return [
            Phase(
                call,
                "resident/product.cu",
                "product",
                inputs,
                outputs,
                constants,
                _whole(scratch),
                _CONSTANT,
                stream=stream,
            )
        ]

    def _attention(self, match: AttentionMatch) -> Phase:
        batch, heads, queries, _ = match.q.shape
        kv_heads, keys = match.k.shape[1], match.k.shape[2]
        rows = queries * (heads // kv_heads)
        items = batch * kv_heads * groups(rows, BLOCK_ROWS)
        splits = min(groups(keys, _MIN_TILES * BLOCK_KEYS), groups(MULTIPROCESSORS, items))
        letters = batch * kv_heads * rows * splits * (2 + match.v.shape[3])
        constants = {"splits": splits, "mailed": False, "mails": False, "patience": PATIENCE}
        inputs, outputs = {**match.inputs, "sent": None}, {**match.outputs, "out": match.call.outputs[0]}
        early = ("k", "v", "mask", "index", "cos", "sin")
        return Phase(
            match.call,
            "resident/resident_attention.cu",
            "attend_keys",
            inputs,
            outputs,
            constants,
            _whole(attend_memory(match, _WARPS)),
            early,
            early_memory(match, _WARPS),
            letters,
        )


def own_rows(rows: int, most: int) -> int:
    """Rows of a weight that a block takes at a time: as many as leave the busiest multiprocessor the fewest."""

    def busiest(own: int) -> int:
        return groups(groups(rows, own), MULTIPROCESSORS) * own

    return min(range(most, most // 2, -1), key=busiest)


def _chunk_bytes(row_bytes: int, unit_rows: int) -> int:
    """Bytes of a row that a slot takes: as many as fit, in chunks as equal as whole groups for all warps allow."""
    group = _WARPS * _LINE_BYTES
    needed = groups(row_bytes, group)
    return groups(needed, groups(needed, _SLOT_BYTES // unit_rows // group)) * group


def _resident(run: Run, make: Specializer) -> KernelCall:
    """The run as one call: inputs and outputs are all that its phases read and write."""
    phases, mail = with_mail(run.phases)
    mail = groups(mail, 8) * 8
    memory = make.counters(f"{run.calls[-1].node}.grid", 4 + 3 * mail // 2)
    if letters := max(phase.letters for phase in phases):
        parts = make.counters(f"{run.calls[-1].node}.letters", 2 * letters)
        phases = [
            replace(phase, outputs={**phase.outputs, "parts": parts}) if phase.letters else phase for phase in phases
        ]
    run = replace(run, phases=phases)
    writes = dict.fromkeys(view for phase in run.phases for view in phase.outputs.values() if view is not None)
    reads = dict.fromkeys(view for phase in run.phases for view in phase.inputs.values() if view is not None)
    inputs = [view for view in reads if view not in writes]
    outputs = [*writes, memory]
    place = {view: index for index, view in enumerate((*inputs, *outputs))}
    last = run.calls[-1]
    return KernelCall(
        RESIDENT,
        make.add_source(_source(run, place, place[memory], mail)),
        tuple(inputs),
        tuple(outputs),
        KernelLaunch((1, 1, 1), (_ALL_THREADS, 1, 1), _least_shared(run), LaunchKind.RESIDENT).params(),
        last.node,
        sum(call.flops for call in run.calls),
        sum(distinct_bytes(view) for view in (*inputs, *writes)),
    )


def _scratch_bytes(run: Run) -> int:
    return _ahead_bytes(run) + max(phase.scratch for phase in run.phases)


def _ahead_bytes(run: Run) -> int:
    return _STEPS_AHEAD * _early_bytes(run) + _whole(16 * _STEPS_AHEAD)


def _early_bytes(run: Run) -> int:
    return _whole(max(phase.early_bytes for phase in run.phases))


def _least_shared(run: Run) -> int:
    """Shared memory that a block needs at least: the scratch and the fewest slots."""
    return _scratch_bytes(run) + _IN_FLIGHT * (_SLOT_BYTES + 16) + _PACE_BYTES


def _whole(size: int) -> int:
    return groups(size, 128) * 128


def _source(run: Run, place: Mapping[View, int], memory: int, mail: int) -> str:
    texts: dict[str, int] = {}
    streams: dict[str, int] = {}
    cases: dict[int, str] = {}
    outlooks: dict[int, str] = {}
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
        computes = f"phase{number}::{phase.function}(ring, grid, ahead, shared + AHEAD_BYTES{arguments})"
        cases[number] = f"        case {number}: {computes}; break;"
        outlooks[number] = f"        case {number}: phase{number}::look_ahead(ahead{arguments}); break;"
    widest = max(len(phase.operands) for phase in run.phases)
    views = [view for phase in run.phases for view in phase.operands.values()]
    namespaces = [f"namespace phase{number} {{\n{text}}}\n" for text, number in texts.items()]
    head = {
        "THREADS": THREADS,
        "UNIT_ROWS": _UNIT_ROWS,
        "SLOT_BYTES": _SLOT_BYTES,
        "SCRATCH_BYTES": _scratch_bytes(run),
        "EARLY_BYTES": _early_bytes(run),
        "AHEAD_BYTES": _ahead_bytes(run),
        "STEPS_AHEAD": _STEPS_AHEAD,
        "IN_FLIGHT": _IN_FLIGHT,
        "MOST_IN_FLIGHT": _MOST_IN_FLIGHT,
        "PACE_BYTES": _PACE_BYTES,
        "MAIL": mail,
        "MAX_OPERANDS": widest,
        "OPERANDS": len(place),
        "STEPS": len(steps),
    }
    return "\n".join(
        [
            f"#define COMPUTING_THREADS {THREADS}",
            index_type(views) + template_text("common/common.cuh"),
            *(f"constexpr int {name} = {value};" for name, value in head.items()),
            kernel_text("resident/resident.cuh", "tables"),
            f"__constant__ Stream streams[] = {{{', '.join(streams)}}};",
            "__constant__ Step steps[] = {",
            *(f"    {step}," for step in steps),
            "};",
            kernel_text("resident/resident.cuh", "ring"),
            *namespaces,
            "__device__ __forceinline__ void compute("
            "Ring &ring, Ahead &ahead, const Operands &operands, char *shared) {",
            f"    Grid grid(operands.at[{memory}]);",
            "    for (; grid.step < STEPS; grid.step++) {",
            "        const Step &now = steps[grid.step];",
            "        switch (now.phase) {",
            *cases.values(),
            "        }",
            "        ahead.release();",
            "        grid.leave();",
            "    }",
            "    grid.finish();",
            "}",
            "__device__ __forceinline__ void look_ahead(Ahead &ahead, const Operands &operands) {",
            "    for (int step = 0; step < STEPS; step++) {",
            "        const Step &now = steps[step];",
            "        ahead.claim();",
            "        switch (now.phase) {",
            *outlooks.values(),
            "        }",
            "        ahead.finish();",
            "    }",
            "}",
            f'extern "C" __global__ void __launch_bounds__({_ALL_THREADS}, 1) {RESIDENT}('
            "const __grid_constant__ Operands operands) {",
            "    extern __shared__ __align__(128) char shared[];",
            "#if __CUDA_ARCH__ >= 800",
            "    Ring ring(shared);",
            "    Ahead ahead(shared);",
            "    ring.initialize();",
            "    ahead.initialize();",
            "    __syncthreads();",
            "    if (threadIdx.x < THREADS) {",
            "        take_registers<232>();",
            "        compute(ring, ahead, operands, shared);",
            "        return;",
            "    }",
            "    give_registers<40>();",
            "    switch (threadIdx.x / WARP - warps) {",
            "        case 0: ring.fill(operands); break;",
            f"        case 1: keep_barrier(operands.at[{memory}]); break;",
            "        case 2: look_ahead(ahead, operands); break;",
            "    }",
            "#else",
            "    __trap();  // no GPU before sm_80 has the shared memory to be given this kernel",
            "#endif",
            "}",
            "",
        ]
    )
