"""`Chip`: the parameters of a simulated chip, read from a TOML file (docs/npu_model.md lists the keys)."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_model.chip.systolic import Dataflow

CODECS = ("bitmask", "deflate")
_MOST_IN_GROUP = 64  # weights of a group of N:M sparsity
DTYPES = ("int4", "int8", "float8", "float16", "bfloat16", "float32")
LIMITED_DTYPES = (*DTYPES, "uint8", "int32", "bool")  # those that an op may be limited to
_MOST_NAMED = 200  # names that an error lists
_MOST = 1e18  # no number of a chip is larger
# The functions that a vector unit computes unless its chip says otherwise: C's math library, as far as activations,
# norms and the arithmetic of element-wise ops call it, and the integer divisions of `program/elementwise.py`.
VECTOR_FUNCTIONS = tuple(
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf exp exp2 expm1 fabs floor floor_div floor_mod "
    "fmod int_pow isinf isnan log log10 log1p log2 pow rint sin sinh sqrt tan tanh trunc trunc_div trunc_mod".split()
)


def _above(least: float = 0.0, most: float = _MOST, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field of a number, or table of numbers, that must be above `least` and at most `most`."""
    return field(default=default, metadata={"above": least, "most": most})


def _one_of(*values: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that must be one of these words."""
    return field(default=default, metadata={"values": values})


def _names(*, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field of a list of names."""
    return field(default=default, metadata={"names": True})


def _from(least: float, most: float = _MOST, *, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field of a number, or table of numbers, that must be at least `least` and at most `most`."""
    return field(default=default, metadata={"from": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The systolic arrays of a core, all of equal size.

    A product larger than an array is computed in folds, each of which fills the array once
    (`npu_model/chip/systolic.py`).

    Attributes:
        arrays: Number of arrays.
        rows, columns: Processing elements of an array in each direction.
        dataflow: Operand that stays in the array while the others stream through it.
        rates: Dtype → multiply-accumulates of a processing element per cycle.
        overlapped_folds: Whether a fold's stationary operand is loaded while the previous fold is computed, and a fold
            begins to stream while the previous one's results leave. Otherwise each fold waits for the end of the
            previous one, as in SCALE-Sim.
        accumulator_bytes: Memory for the sums, of 4 bytes each, of all arrays together.
        windows: Way to compute a convolution: `taps`, one product for each position in the window; or `columns`, one
            product over all positions, as on arrays that are fed with whole windows (im2col).
        load_rows: Rows of an array whose stationary operand is loaded in a cycle.
        efficiency: Share of the peak rate that arrays reach while they stream; it stands for undocumented losses.
    """

    arrays: int = _from(1, 65536)
    rows: int = _from(1, 65536)
    columns: int = _from(1, 65536)
    dataflow: Dataflow
    rates: Mapping[str, float] = _above(0, 4096)
    overlapped_folds: bool = False
    accumulator_bytes: int = _from(64, 2**40, default=65536)
    windows: str = _one_of("taps", "columns", default="taps")
    load_rows: int = _from(1, 65536, default=1)
    efficiency: float = _above(0, 1, default=1.0)


@dataclass(frozen=True)
class Vector:
    """The vector unit.

    Attributes:
        lanes: Operations per cycle of a dtype whose rate is 1.
        rates: Dtype → operations of a lane per cycle; a multiply-accumulate is one operation.
        functions: The functions that the unit computes, each in one operation. Default: those of C's math library,
            without functions that need loops, such as `hurwitz_zeta` (`npu_compiler/program/functions.py`).
    """

    lanes: int = _from(1, 2**24)
    rates: Mapping[str, float] = _above(0, 4096)
    functions: tuple[str, ...] = VECTOR_FUNCTIONS


@dataclass(frozen=True)
class Output:
    """The output stage, which reads sums from the accumulators and scales, adds to, activates and rounds them.

    Attributes:
        lanes: Results per cycle.
    """

    lanes: int = _from(1, 2**24)


@dataclass(frozen=True)
class Sram:
    """The scratchpad of a core; its peak bandwidth is `banks` × `ports` × `bytes_per_cycle`.

    Attributes:
        size: Bytes.
        banks: Number of banks.
        ports: Ports of a bank, each of which moves `bytes_per_cycle`.
        alignment: Multiple of bytes at which the compiler places tiles.
        bank_bytes: Consecutive bytes that lie in one bank (`npu_model/machine/sram_banks.py`). None, the default: bank
            conflicts are not simulated.
    """

    size: int = _from(1024, 2**40)
    banks: int = _from(1, 65536)
    ports: int = _from(1, 1024)
    bytes_per_cycle: int = _from(1, 2**20)
    alignment: int = _from(4, 4096, default=64)
    bank_bytes: int | None = _from(4, 2**40, default=None)

    @property
    def bandwidth(self) -> int:
        """Peak bandwidth in bytes per cycle, over all banks and ports."""
        return self.banks * self.ports * self.bytes_per_cycle


# What a kind of DRAM has in each channel. LPDDR4: JESD209-4, a channel of 16 bits and 4 Gb. The others: Ramulator 2
# (CMU-SAFARI/ramulator2, src/dram/impl at 525d045): LPDDR5-6400 of 8 Gb, DDR5-3200AN of 16 Gb with 8 bits a device and
# 32 a channel, organisation and refresh of HBM2 and HBM3 of 8 Gb. HBM's tRCD, tRP and tCL: 7 cycles of 2 ns (Ramulator
# 1, CMU-SAFARI/ramulator).
DRAM_KINDS: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(("banks", "row_bytes", "trcd_ns", "trp_ns", "tcl_ns", "trfc_ns", "trefi_ns"), values, strict=True))
    for name, values in {
        "lpddr4": (8, 2048, 18, 18, 17.5, 180, 3904),
        "lpddr5": (16, 2048, 18.75, 18.75, 25, 210, 3906),
        "ddr5": (32, 4096, 15, 15, 15, 295, 3900),
        "hbm2e": (16, 1024, 14, 14, 14, 350, 3900),
        "hbm3": (16, 1024, 14, 14, 14, 350, 3900),
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class DramBanks:
    """The organisation and timings of DRAM (`npu_model/machine/dram.py` explains how they are used).

    Attributes:
        kind: DRAM standard that gives the keys that the file lacks, or `custom`.
        channels: Number of channels, which share the bandwidth.
        ranks: Ranks of a channel.
        banks: Banks of a rank.
        row_bytes: Size of a row of a bank.
        interleave_bytes: Consecutive bytes that lie in one channel.
        trcd_ns, trp_ns, tcl_ns: Time to open a row, to close it, and from a read to its first byte.
        trfc_ns, trefi_ns: Duration of a refresh, and time from the begin of one to that of the next.
    """

    kind: str = _one_of("custom", *DRAM_KINDS, default="custom")
    channels: int = _from(1, 1024)
    ranks: int = _from(1, 64, default=1)
    banks: int = _from(1, 4096)
    row_bytes: int = _from(256, 2**20)
    interleave_bytes: int = _from(16, 2**20, default=256)
    trcd_ns: float = _from(0, 1e6)
    trp_ns: float = _from(0, 1e6)
    tcl_ns: float = _from(0, 1e6)
    trfc_ns: float = _from(0, 1e6)
    trefi_ns: float = _above(0, 1e9)


@dataclass(frozen=True)
class Dram:
    """The memory outside the chip.

    Attributes:
        bandwidth_gb_s: Peak bandwidth, in 10^9 bytes per second.
        latency_ns: Nanoseconds from a request to its first byte.
        burst_bytes: A run of consecutive bytes takes as long as if it were rounded up to a multiple of this.
        efficiency: Share of the peak bandwidth that transfers reach.
        banks: Organisation and timings of its banks. None, the default: a transfer's time is its bytes over the
            bandwidth.
    """

    bandwidth_gb_s: float = _above(0, 1e9)
    latency_ns: float = _from(0, 1e9)
    burst_bytes: int = _from(1, 65536, default=1)
    efficiency: float = _above(0, 1, default=1.0)
    banks: DramBanks | None = None


@dataclass(frozen=True)
class SharedL2:
    """A memory between DRAM and the cores' scratchpads that all cores share.

    Attributes:
        size: Bytes.
        bytes_per_cycle: Bandwidth, for all cores together.
        latency_ns: Nanoseconds from a request to its first byte.
    """

    size: int = _from(1024, 2**40)
    bytes_per_cycle: int = _from(1, 2**20)
    latency_ns: float = _from(0, 1e9, default=0.0)


@dataclass(frozen=True)
class PackedWeights:
    """Compression of weights in DRAM, and the decoder that expands them when they are loaded.

    Attributes:
        ratio: Stored bytes for each byte of a weight, with the metadata of the format, where only shapes are known.
        decoder_bytes_per_cycle: Decoded bytes that leave the decoder in a cycle.
        codec: Encoding by which the stored bytes of weights that are at hand are counted; `stated`: always the ratio.
    """

    ratio: float = _above(0, 1)
    decoder_bytes_per_cycle: int = _from(1, 2**20)
    codec: str = _one_of("stated", *CODECS, default="stated")


@dataclass(frozen=True)
class Sparsity:
    """N:M structured sparsity of weights: of M consecutive ones along the summed dimension, at most N are not zero.

    Attributes:
        patterns: The patterns that the chip knows, such as `2:4`.
        decoder_bytes_per_cycle: Dense bytes that leave the decoder in a cycle.
        metadata_bits: Bits that say which of the M weights a stored one is.
        skips_zeros: Whether the matrix engine leaves out the products with the zeros.
    """

    patterns: tuple[str, ...]
    decoder_bytes_per_cycle: int = _from(1, 2**20)
    metadata_bits: int = _from(1, 8, default=2)
    skips_zeros: bool = False


@dataclass(frozen=True)
class Dma:
    """The DMA engines of a core: in-order queues of transfers that share the bandwidth and hide each other's latency.

    Attributes:
        channels: Number of engines.
        staged_bytes: Scratchpad bytes for operands of products with weights that are loaded whole before the product
            begins, the weight first; models compilers that place whole tensors. Operands of several products share
            them, with values that stay in the scratchpad. Default, 0: operands are loaded by tiles.
    """

    channels: int = _from(1, 1024)
    staged_bytes: int = _from(0, 2**40, default=0)


SPLITS = ("auto", "rows", "columns", "heads", "layers")


@dataclass(frozen=True)
class Network:
    """The network between cores.

    Attributes:
        bandwidth_gb_s: Bandwidth of each core's link, in 10^9 bytes per second, in both directions at once.
        latency_ns: Nanoseconds of a hop, for data and for tokens (the counters by which engines synchronise).
        topology: Way in which cores are connected: `crossbar`, one hop between any two; `ring`; or `mesh`, as square as
            the number of cores allows.
        multicast: Whether a transfer may go to several cores at once, and occupies the sender's link once.
    """

    bandwidth_gb_s: float = _above(0, 1e9)
    latency_ns: float = _from(0, 1e6, default=0.0)
    topology: str = _one_of("crossbar", "ring", "mesh", default="crossbar")
    multicast: bool = False


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Several equal cores that share DRAM, each with its own engines, accumulators and scratchpad.

    Attributes:
        count: Number of cores.
        network: Connection between their scratchpads.
        split: Division of a program among the cores: each kernel call's result by `rows`, `columns` or `heads`; whole
            calls by `layers`, in pieces of the batch; or `auto`, the fastest of these and of one core alone.
    """

    count: int = _from(2, 64)
    network: Network
    split: str = _one_of(*SPLITS, default="auto")

    def hops(self, first: int, second: int) -> int:
        """Number of network hops between two cores."""
        apart = abs(first - second)
        if self.network.topology == "ring":
            return min(apart, self.count - apart)
        if self.network.topology == "mesh":
            (row, column), (other_row, other_column) = divmod(first, self._width), divmod(second, self._width)
            return abs(row - other_row) + abs(column - other_column)
        return min(1, apart)

    @property
    def _width(self) -> int:
        """Number of cores in a row of a mesh."""
        rows = next(rows for rows in range(math.isqrt(self.count), 0, -1) if self.count % rows == 0)
        return self.count // rows


@dataclass(frozen=True)
class Control:
    """Synchronisation of the engines.

    Attributes:
        tokens: Number of tokens of each engine: counters that it raises and others wait for.
    """

    tokens: int = _from(1, 65536, default=64)


@dataclass(frozen=True)
class Launch:
    """Cost of starting a kernel call.

    Attributes:
        cost_us: Microseconds.
        overlapped: Whether a call is prepared while others run. Otherwise its launch begins when the previous call has
            ended, and none of its instructions starts before the launch is over.
    """

    cost_us: float = _from(0, 1e9, default=0.0)
    overlapped: bool = True


@dataclass(frozen=True)
class Energy:
    """Energy of each kind of work, in picojoules, and the static power.

    Attributes:
        pj_per_mac: Dtype → energy of a multiply-accumulate.
        pj_per_dram_byte: Energy of moving a byte from or to DRAM; on a chip without DRAM, over the link to the host.
        pj_per_vector_operation: Energy of an operation of a vector lane, of any dtype.
        static_watts: Power that the chip draws all the time.
    """

    pj_per_mac: Mapping[str, float] = _from(0, 1e9)
    pj_per_sram_byte: float = _from(0, 1e9)
    pj_per_dram_byte: float = _from(0, 1e9)
    pj_per_vector_operation: float = _from(0, 1e9, default=0.0)
    pj_per_network_byte: float = _from(0, 1e9, default=0.0)
    pj_per_l2_byte: float = _from(0, 1e9, default=0.0)
    static_watts: float = _from(0, 1e6, default=0.0)


_NO_ENERGY = Energy({}, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits within which an op is supported; None means no limit.

    Attributes:
        dtypes: Dtypes of its first operand, which is an activation, not a weight.
        rank: Maximum rank of its tensors.
        size: Maximum number of elements along an axis of its tensors.
        elements: Maximum number of elements of a tensor.
        window: Maximum number of elements along an axis of its kernel window.
        stride: Maximum stride of its window.
    """

    dtypes: tuple[str, ...] | None = _names(default=None)
    rank: int | None = _from(0, 64, default=None)
    size: int | None = _from(1, 2**40, default=None)
    elements: int | None = _from(1, 2**40, default=None)
    window: int | None = _from(1, 2**20, default=None)
    stride: int | None = _from(1, 2**20, default=None)


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The ops that the chip's tool chain supports: others are refused, even if the engines could compute them.

    Ops are named as in ATen without `aten.`, or by the family of the kernels that compute them.

    Attributes:
        only: The supported ops and families. None, the default: all that the engines compute.
        without: Ops and families that are not supported.
        also: Ops that are supported whatever `only` and `without` say.
        limits: Op, family or `all` → its limits.
    """

    only: tuple[str, ...] | None = _names(default=None)
    without: tuple[str, ...] = _names(default=())
    also: tuple[str, ...] = _names(default=())
    limits: Mapping[str, Limits] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """The CPU beside the chip, modelled as a roofline that executes op by op.

    Attributes:
        gflops: 10^9 operations per second.
        bandwidth_gb_s: Bandwidth of its memory, in 10^9 bytes per second.
        overhead_us: Microseconds added to each op, such as a framework's overhead.
    """

    gflops: float = _above(0, 1e9)
    bandwidth_gb_s: float = _above(0, 1e9)
    overhead_us: float = _from(0, 1e6, default=0.0)


@dataclass(frozen=True)
class HostLink:
    """The connection between the chip's memory and the host's.

    Attributes:
        bandwidth_gb_s: 10^9 bytes per second, in each direction.
        latency_us: Microseconds added to each transfer.
        launch_us: Microseconds to start a run of the chip and to learn that it has ended.
    """

    bandwidth_gb_s: float = _above(0, 1e9)
    latency_us: float = _from(0, 1e6, default=0.0)
    launch_us: float = _from(0, 1e6, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The description of a chip.

    Attributes:
        clock_ghz: The clock of all its parts.
        dram: None for a chip without DRAM: its inputs come over the link, and everything else stays on the chip.
        l2: None for a chip without a memory between its scratchpads and DRAM.
        weights: None for a chip whose weights are stored uncompressed.
        sparsity: None for a chip that stores all weights dense.
        matrix: None for a chip without systolic arrays.
        output: None for a chip without an output stage.
        cores: None for a chip of one core.
        energy: All zeros if the file has no such table.
        host, link: None if the file has no such table; then models are not divided between chip and host by cost.
    """

    name: str
    clock_ghz: float = _above(0, 1000)
    vector: Vector
    sram: Sram
    dma: Dma
    dram: Dram | None = None
    l2: SharedL2 | None = None
    weights: PackedWeights | None = None
    sparsity: Sparsity | None = None
    matrix: Matrix | None = None
    output: Output | None = None
    control: Control = Control()
    cores: Cores | None = None
    launch: Launch = Launch()
    energy: Energy = _NO_ENERGY
    ops: Ops = Ops()
    host: Host | None = field(default=None, repr=False)  # programs do not depend on it, nor on the link
    link: HostLink | None = field(default=None, repr=False)

    @property
    def outside(self) -> Dram:
        """The memory outside the chip: DRAM or, on a chip without DRAM, the host's memory behind the link."""
        if self.dram is not None:
            return self.dram
        assert self.link is not None  # `parse_chip` sees to it
        return Dram(self.link.bandwidth_gb_s, 1e3 * self.link.latency_us)

    @property
    def outside_name(self) -> str:
        """Name of the connection to the memory outside the chip: `DRAM`, or `link` on a chip without DRAM."""
        return "link" if self.dram is None else "DRAM"

    @property
    def dram_bytes_per_cycle(self) -> float:
        """Peak bytes per cycle from and to DRAM; on a chip without DRAM, over the link."""
        return self.outside.bandwidth_gb_s / self.clock_ghz

    @property
    def dram_latency_cycles(self) -> float:
        """Cycles from a request to its first byte, if its bank has another row open (the worst case)."""
        banks = self.outside.banks
        opening = 0.0 if banks is None else banks.trp_ns + banks.trcd_ns + banks.tcl_ns
        return (self.outside.latency_ns + opening) * self.clock_ghz

    @property
    def l2_latency_cycles(self) -> float:
        """Cycles from a request to the first byte of the shared L2; 0 on a chip without one."""
        return 0.0 if self.l2 is None else self.l2.latency_ns * self.clock_ghz

    def seconds(self, cycles: float) -> float:
        """Time of a number of cycles, in seconds."""
        return cycles / (self.clock_ghz * 1e9)

    @property
    def core_count(self) -> int:
        """Number of cores."""
        return 1 if self.cores is None else self.cores.count

    def peak_macs(self, dtype: str) -> float:
        """Maximum multiply-accumulates of all cores per cycle; 0 if the chip does not multiply that dtype."""
        matrix = self.matrix
        if matrix is None:
            return 0.0
        return matrix.rates.get(dtype, 0.0) * matrix.arrays * matrix.rows * matrix.columns * self.core_count

    def mac_energy(self, dtype: str) -> float:
        """Picojoules of a multiply-accumulate; for a dtype that the file lacks, the highest of those it lists."""
        known = self.energy.pj_per_mac
        return known.get(dtype, max(known.values(), default=0.0))


def shipped_chips() -> list[str]:
    """The names of the chips that come with this package."""
    folder = files("npu_model.chip") / "chips"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_chip(source: str | Path) -> Chip:
    """Read a chip from a TOML file, or by the name of a chip that comes with this package.

    Raises:
        InputError: there is no such chip, or its file is malformed; the message names the file and the key.
    """
    text = str(source)
    if "/" not in text and not text.endswith(".toml"):
        if text not in shipped_chips():
            listed = ", ".join(shipped_chips())
            raise InputError(f"unknown chip '{text}'; give a .toml file or one of {listed}")
        return parse_chip((files("npu_model.chip") / "chips" / f"{text}.toml").read_text("utf-8"), text)
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read chip '{text}': {error.strerror or error}") from error
    try:
        return parse_chip(content.decode("utf-8"), text)
    except UnicodeDecodeError as error:
        raise InputError(
            f"chip '{text}' is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}"
        ) from None


def parse_chip(text: str, origin: str) -> Chip:
    """Parse a chip from TOML text. Raises `InputError`, which names `origin`, if the text is malformed."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the latter of brackets, the former also of thousands of digits
        raise InputError(f"chip '{origin}' is not TOML: {error}") from error
    where = f"chip '{origin}'"
    general = _table(tables.pop("chip", None), "chip", where)
    if duplicate := general.keys() & tables.keys():
        raise InputError(f"{where}: unknown key 'chip.{min(duplicate)}'")
    chip = _fields(Chip, {**tables, **general}, "", where)
    assert isinstance(chip, Chip)
    if chip.dram is None and chip.link is None:
        raise InputError(f"{where} has neither [dram] nor [link]; give it the one that its inputs come from")
    return chip


def _shown(value: Any) -> str:
    """A value for a message, or its type if Python refuses to print it: an integer may have thousands of digits."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"a{'n' if isinstance(value, int) else ''} {type(value).__name__}"


def _table(value: Any, name: str, where: str) -> dict[str, Any]:
    if value is None:
        raise InputError(f"{where} lacks the table [{name}]")
    if not isinstance(value, dict):
        raise InputError(f"{where}: '{name}' is no table; write [{name}]")
    return value


def _fields(kind: type, given: Mapping[str, Any], path: str, where: str) -> Any:
    """Build a dataclass from a table of a chip file.

    Raises `InputError` if a key is unknown or missing or a value is wrong.
    """
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}
    if unknown := sorted(given.keys() - known.keys()):
        raise InputError(f"{where}: unknown key '{path}{unknown[0]}'; known are {', '.join(known)}")
    values = {}
    for name, item in known.items():
        if name in given:
            values[name] = _value(hints[name], item, given[name], f"{path}{name}", where)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            is_table = dataclasses.is_dataclass(hints[name])
            in_general = kind is Chip and not is_table
            lacking = f"the table [{name}]" if is_table else f"the key '{'chip.' if in_general else path}{name}'"
            raise InputError(f"{where} lacks {lacking}")
    return kind(**values)


def _value(hint: Any, item: dataclasses.Field[Any], value: Any, path: str, where: str) -> Any:
    is_optional = types.NoneType in typing.get_args(hint)
    kind = next(part for part in typing.get_args(hint) if part is not types.NoneType) if is_optional else hint
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _part(kind, _table(value, path, where), path, where)
    if kind is Dataflow:
        names = [dataflow.value for dataflow in Dataflow]
        if value not in names:
            raise InputError(f"{where}: '{path}' is {_shown(value)}; choose one of {', '.join(names)}")
        return Dataflow(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise InputError(f"{where}: '{path}' is {_shown(value)}; write true or false")
        return value
    if kind is str:
        return _word(item, value, path, where)
    if item.name == "functions":
        return _functions(value, path, where)
    if item.name == "patterns":
        return _patterns(value, path, where)
    if "names" in item.metadata:
        return _listed(value, LIMITED_DTYPES if item.name == "dtypes" else op_names(), path, where)
    if item.name == "limits":
        table = _table(value, path, where)
        _listed(list(table), ("all", *op_names()), path, where)
        return {
            name: _fields(Limits, _table(x, f"{path}.{name}", where), f"{path}.{name}.", where)
            for name, x in table.items()
        }
    if typing.get_origin(kind) is Mapping:
        return _rates(item, value, path, where)
    return _number(kind is int, item, value, path, where)


def _part(kind: type, table: Mapping[str, Any], path: str, where: str) -> Any:
    """Build a part of a chip from its table; keys of `banks` that the table lacks are taken from its kind of DRAM."""
    if kind is not DramBanks:
        part = _fields(kind, table, f"{path}.", where)
        if isinstance(part, Sparsity):
            largest = max(int(pattern.split(":")[1]) for pattern in part.patterns)
            if 1 << part.metadata_bits < largest:
                raise InputError(
                    f"{where}: '{path}.metadata_bits' is {part.metadata_bits}, too few to tell {largest} weights apart"
                )
        if isinstance(part, Dram) and part.banks is not None and part.banks.interleave_bytes % part.burst_bytes:
            each = part.banks.interleave_bytes
            raise InputError(
                f"{where}: '{path}.burst_bytes' is {part.burst_bytes}; it must divide {each}, the bytes "
                "that lie in one channel ('banks.interleave_bytes')"
            )
        return part
    banks = _fields(kind, {**DRAM_KINDS.get(str(table.get("kind")), {}), **table}, f"{path}.", where)
    row, each = banks.row_bytes, banks.interleave_bytes
    if row % each:
        raise InputError(f"{where}: '{path}.interleave_bytes' is {each}; it must divide the {row} bytes of a row")
    if banks.trfc_ns >= banks.trefi_ns:
        raise InputError(f"{where}: '{path}.trfc_ns' is {banks.trfc_ns:g}; it must be less than 'trefi_ns'")
    return banks


def _rates(item: dataclasses.Field[Any], value: Any, path: str, where: str) -> Mapping[str, float]:
    table = _table(value, path, where)
    if unknown := sorted(table.keys() - set(DTYPES)):
        raise InputError(f"{where}: '{path}' has no dtype '{unknown[0]}'; known are {', '.join(DTYPES)}")
    if not table:
        raise InputError(f"{where}: '{path}' is empty; give a number for at least one of {', '.join(DTYPES)}")
    return {name: _number(False, item, x, f"{path}.{name}", where) for name, x in table.items()}


def _word(item: dataclasses.Field[Any], value: Any, path: str, where: str) -> str:
    values = item.metadata.get("values", ())
    if values and value not in values:
        raise InputError(f"{where}: '{path}' is {_shown(value)}; choose one of {', '.join(values)}")
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: '{path}' is {_shown(value)}; write a name in quotes")
    return value


def _functions(value: Any, path: str, where: str) -> tuple[str, ...]:
    from npu_compiler import ops  # fills the table of functions
    from npu_compiler.program.functions import FUNCTIONS

    assert ops
    return _listed(value, (*VECTOR_FUNCTIONS, *FUNCTIONS), path, where)


def _patterns(value: Any, path: str, where: str) -> tuple[str, ...]:
    """Check a list of N:M patterns. Raises `InputError` if it is none."""
    is_list = isinstance(value, list) and bool(value)
    texts = value if is_list else [value]
    for text in texts:
        is_text = is_list and isinstance(text, str)
        match = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", text, re.ASCII) if is_text else None
        if match is None or not int(match[1]) < int(match[2]) <= _MOST_IN_GROUP:
            raise InputError(
                f"{where}: '{path}' has {_shown(text)}; write a list such as [\"2:4\"], of at most "
                f"{_MOST_IN_GROUP} weights in a group"
            )
    return tuple(texts)


def op_names() -> tuple[str, ...]:
    """The names of ops that a chip file may use: kernel families, and ATen ops."""
    from npu_compiler import ops
    from npu_compiler.graph.model import base_op
    from npu_compiler.ops.registry import OPS
    from npu_compiler.program.kernels import Family

    assert ops
    own = (base_op(name).removeprefix("aten.").strip("_") for name in OPS if name.startswith("aten."))
    return tuple(dict.fromkeys((*(family.value for family in Family), *sorted(own))))


def _listed(value: Any, allowed: tuple[str, ...], path: str, where: str) -> tuple[str, ...]:
    """Return a list of names from `allowed` as a tuple. Raises `InputError` for any other value."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}: '{path}' is {_shown(value)}; write a list of names in quotes")
    if unknown := sorted(set(value) - set(allowed)):
        close = get_close_matches(unknown[0], allowed, 3) if len(allowed) > _MOST_NAMED else allowed
        advice = f"; there are {', '.join(close)}" if close else ""
        raise InputError(f"{where}: '{path}' has no '{unknown[0]}'{advice}")
    return tuple(value)


def check_number(owner: Any, name: str, value: Any, where: str) -> Any:
    """Return a value as a number for the field `name` of `owner`, a part of a chip.

    Args:
        where: Origin of the value, for messages, such as a chip's file.

    Raises:
        InputError: the value is no such number, or is beyond the field's limits.
    """
    item = next(item for item in dataclasses.fields(owner) if item.name == name)
    whole = typing.get_type_hints(type(owner))[name] is int
    return _number(whole, item, value, name, where)


def _number(whole: bool, item: dataclasses.Field[Any], value: Any, path: str, where: str) -> Any:
    limits = item.metadata
    if isinstance(value, int) and abs(value) > _MOST:
        value = math.inf if value > 0 else -math.inf  # it may have too many digits to be written
    least, most = limits.get("above", limits.get("from")), limits["most"]
    fits_kind = isinstance(value, int) if whole else isinstance(value, (int, float))
    wanted = f"{'a whole number' if whole else 'a number'} {'above' if 'above' in limits else 'of at least'} {least:g}"
    if not fits_kind or isinstance(value, bool) or math.isnan(value):
        raise InputError(f"{where}: '{path}' is {_shown(value)}; write {wanted}")
    if value < least or ("above" in limits and value == least) or value > most:
        raise InputError(f"{where}: '{path}' is {_shown(value)}; it must be {wanted} and at most {most:g}")
    return value if whole else float(value)
