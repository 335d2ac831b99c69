"""int64 arithmetic, which devices do in 32 bits, is right or refused: never wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder, Tensor

from npu_compiler import (
    CompiledProgram,
    ConstraintError,
    InputError,
    WeightError,
    compile,
    is_op_supported,
    partition,
    read_ir,
)
from npu_compiler.graph.dtypes import INT32_MAX, is_int
from npu_compiler.passes.integer_ranges import INT32_RANGE, bound_integers, find_integer_ranges
from npu_runtime import CPUBackend, DAGExecutor, Executor, execute_cpu_partition, load_weights

Build = Callable[..., Tensor]


def build(make: Callable[[IRBuilder], Tensor]) -> IRBuilder:
    g = IRBuilder()
    return g.output(make(g))


def ints(g: IRBuilder, name: str, *shape: int) -> Tensor:
    return g.input(name, *(shape or (3,)), dtype="int64")


def bounds(g: IRBuilder) -> dict[str, tuple[int, int] | None]:
    graph = bound_integers(read_ir(g.ir()))
    return {name: graph.tensors[name].bounds for name in (*graph.inputs, *graph.weights)}


def run(g: IRBuilder, **inputs: Any) -> np.ndarray:
    outputs = Executor(compile(g.ir()), CPUBackend()).run({name: np.asarray(x) for name, x in inputs.items()})
    return next(iter(outputs.values())).to_numpy()


def run_partitioned(g: IRBuilder, **inputs: Any) -> np.ndarray:
    executor = DAGExecutor(partition(g.ir()), CPUBackend())
    return executor.execute({name: np.asarray(x) for name, x in inputs.items()})["output"]


def product(g: IRBuilder, count: int = 2) -> Tensor:
    result = ints(g, "x0")
    for index in range(1, count):
        result = g("aten.mul.Tensor", result, ints(g, f"x{index}"))
    return result


def test_factors_whose_product_passes_32_bits_are_refused() -> None:
    g = build(product)
    assert bounds(g) == {"x0": (-46340, 46340), "x1": (-46340, 46340)}
    largest = np.array([46340, -46340, 3])
    assert run(g, x0=largest, x1=largest).tolist() == [46340**2, 46340**2, 9]
    with pytest.raises(InputError, match=r"'x0' holds 70000, which is outside -46340\.\.46340: .*partition\(\)"):
        run(g, x0=[70000, 1, 1], x1=[70000, 1, 1])


def test_a_product_of_many_is_refused_by_compile_and_right_in_a_partition_plan() -> None:
    g = build(lambda g: product(g, 5))
    with pytest.raises(ConstraintError, match=r"node 'mul.*may not fit in 32 bits; use partition\(\)"):
        compile(g.ir())
    factors = {f"x{index}": [10**index, -2, 7 * 10**8 if index == 2 else 1] for index in range(5)}
    assert run_partitioned(g, **factors).tolist() == [10**10, -32, 7 * 10**8]


def test_what_can_be_bounded_stays_on_the_device_beside_what_cannot() -> None:
    g = IRBuilder()
    total = g("aten.cumsum.default", ints(g, "mask", 64), 0)
    g.output(product(g, 5), total)
    plan = partition(g.ir())
    assert "cumsum" not in plan.reasons and set(plan.reasons) == {"mul", "mul_1", "mul_2", "mul_3"}
    assert plan.graph.tensors["mask"].bounds == (-(INT32_MAX // 64), INT32_MAX // 64)
    assert plan.graph.tensors["x0"].bounds is None


def test_inputs_that_do_not_meet_are_bounded_by_themselves() -> None:
    g = IRBuilder()
    g.output(product(g), g("aten.add.Tensor", ints(g, "position"), 1))
    assert bounds(g) == {"x0": (-46340, 46340), "x1": (-46340, 46340), "position": (1 - INT32_MAX, INT32_MAX - 1)}


def test_an_input_is_not_bounded_for_what_does_not_depend_on_its_values() -> None:
    g = IRBuilder()
    x, y = ints(g, "x"), ints(g, "y")
    g.output(g("aten.add.Tensor", g("aten.mul.Tensor", y, 3), g("aten.ones_like.default", g("aten.mul.Tensor", x, 9))))
    assert bounds(g) == {"x": (-(INT32_MAX // 9), INT32_MAX // 9), "y": (-((INT32_MAX - 1) // 3), (INT32_MAX - 1) // 3)}


CASES: dict[str, tuple[Callable[[IRBuilder], Tensor], int | None]] = {
    "add": (lambda g: g("aten.add.Tensor", ints(g, "x"), ints(g, "y")), INT32_MAX // 2),
    "increment": (lambda g: g("aten.add.Tensor", ints(g, "x"), 1), INT32_MAX - 1),
    "neg": (lambda g: g("aten.neg.default", ints(g, "x")), INT32_MAX),
    "square": (lambda g: g("aten.square.default", ints(g, "x")), 46340),
    "cube": (lambda g: g("aten.pow.Tensor_Scalar", ints(g, "x"), 3), 1290),
    "long sum": (lambda g: g("aten.sum.default", ints(g, "x", 1000)), INT32_MAX // 1000),
    "sum of int32": (lambda g: g("aten.sum.default", g.input("x", 1000, dtype="int32")), INT32_MAX // 1000),
    "cumsum": (lambda g: g("aten.cumsum.default", ints(g, "x", 2, 50), 1), INT32_MAX // 50),
    "matmul": (lambda g: g("aten.matmul.default", ints(g, "x", 2, 7), ints(g, "y", 7, 3)), 17515),
    "int32 wraps in PyTorch too": (lambda g: g("aten.mul.Tensor", g.input("x", 3, dtype="int32"), 3), None),
    "sum of booleans": (lambda g: g("aten.sum.default", g.input("x", 1000, dtype="bool")), None),
    "sum of a comparison": (lambda g: g("aten.cumsum.default", g("aten.ne.Scalar", ints(g, "x"), 1), 0), None),
    "clamped": (lambda g: g("aten.mul.Tensor", g("aten.clamp.default", ints(g, "x"), 0, 9), 9), None),
    "floor division": (lambda g: g("aten.div.Tensor_mode", ints(g, "x"), 4, rounding_mode="floor"), None),
    "remainder": (lambda g: g("aten.square.default", g("aten.remainder.Scalar", ints(g, "x"), 1000)), None),
    "argmax": (lambda g: g("aten.add.Tensor", g("aten.argmax.default", ints(g, "x", 2, 9), 1), 1), None),
    "float": (lambda g: g("aten.mul.Tensor", ints(g, "x"), 0.5), None),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_bounded_no_more_than_arithmetic_asks(name: str) -> None:
    make, limit = CASES[name]
    assert set(bounds(build(make)).values()) == {None if limit is None else (-limit, limit)}


def test_an_index_keeps_its_own_bounds_and_other_inputs_are_left_alone() -> None:
    g = IRBuilder()
    at, history = ints(g, "at", 1), ints(g, "history", 8)
    step = g("aten.add.Tensor", at, 1)
    g.output(g("aten.index_copy.default", history, 0, at, ints(g, "token", 1)), step)
    assert bounds(g) == {"at": None, "history": None, "token": None}
    specs = {spec.name: spec.bounds for spec in compile(g.ir()).input_specs}
    assert specs == {"at": (0, 7), "history": None, "token": None}


def test_donated_counters_may_be_written_and_count_on() -> None:
    g = IRBuilder()
    count, at = ints(g, "count", 4), ints(g, "at", 1)
    row = g("aten.add.Tensor", g("aten.index_select.default", count, 0, at), 1)
    g.output(g("aten.index_copy.default", count, 0, at, row))
    program = compile(g.ir())
    assert list(program.plan.donations.values()) == ["count"]
    backend = CPUBackend()
    executor = Executor(program, backend)
    spec = next(spec for spec in program.input_specs if spec.name == "count")
    buffer = backend.allocate_buffer(np.array([0, 5, 0, 0]), spec=spec)
    buffer.write(np.array([0, 7, 0, 0]), spec)
    for _ in range(2):
        (buffer,) = executor.run({"count": buffer, "at": np.array([1])}).values()
    assert buffer.to_numpy().tolist() == [0, 9, 0, 0]


def test_integer_weights_are_checked_when_they_are_loaded() -> None:
    g = IRBuilder()
    table = g.weight("table", 3, dtype="int64")
    g.output(g("aten.mul.Tensor", table, ints(g, "x")))
    program, backend = compile(g.ir()), CPUBackend()
    with pytest.raises(WeightError, match=r"'table' holds 50000, which is outside -46340\.\.46340: .*partition\(\)"):
        load_weights({"table": np.array([1, 50000, 2])}, program, backend)
    weights = load_weights({"table": np.array([1, 40000, 2])}, program, backend)
    (result,) = Executor(program, backend).run({"x": np.array([3, 40000, 5])}, weights).values()
    assert result.to_numpy().tolist() == [3, 1_600_000_000, 10]


def test_a_cached_weight_is_checked_against_each_programs_bounds() -> None:
    backend, cache, value = CPUBackend(), {}, {"table": np.array([1, 50000, 2])}
    plain, squared = IRBuilder(), IRBuilder()
    plain.output(plain("aten.neg.default", plain.weight("table", 3, dtype="int64")))
    squared.output(squared("aten.square.default", squared.weight("table", 3, dtype="int64")))
    load_weights(value, compile(plain.ir()), backend, cache=cache)
    with pytest.raises(WeightError, match="'table' holds 50000"):
        load_weights(value, compile(squared.ir()), backend, cache=cache)


def test_a_constant_beyond_32_bits_is_refused_and_right_in_a_partition_plan() -> None:
    g = build(lambda g: g("aten.maximum.default", ints(g, "x"), g.constant("c", np.array([2**40, 1, -(2**35)]))))
    with pytest.raises(ConstraintError, match="constant 'p_c' holds integers that do not fit in 32 bits"):
        compile(g.ir())
    assert run_partitioned(g, x=[5, 6, 7]).tolist() == [2**40, 6, 7]


def test_partitions_know_the_ranges_of_what_crosses_to_them() -> None:
    """The last partition sums 0 and 1, which only the whole graph shows."""
    g = IRBuilder()
    x = g.input("x", 2**10, 2**15)
    flags = g("aten.to.dtype", g("aten.gt.Scalar", x, 0.0), dtype="torch.int64")
    seldom = g("aten.gt.Scalar", g("aten.exp.default", g("aten.neg.default", x)), 2.0)
    g.output(g("aten.sum.default", g("aten.where.ScalarOther", seldom, flags, 0)))
    plan = partition(g.ir(), lambda op: is_op_supported(op) and "exp" not in op)
    assert set(plan.reasons) == {"exp"} and len(plan.partitions) == 3
    last = plan.partitions[-1]
    assert last.graph.tensors["to"].bounds == (0, 1)
    assert isinstance(compile(last.ir_dict), CompiledProgram)


def whole(g: IRBuilder, x: Tensor) -> Tensor:
    return g("aten.to.dtype", x, dtype="torch.int64")


def t5_bucket(g: IRBuilder) -> Tensor:
    """The bucket of a distance, as T5 computes it: of 0, the logarithm is minus infinity, which is not taken."""
    distance = g("aten.abs.default", ints(g, "x"))
    scaled = g("aten.div.Tensor", g("aten.to.dtype", distance, dtype="torch.float32"), 8)
    scaled = g("aten.mul.Tensor", g("aten.div.Tensor", g("aten.log.default", scaled), 2.77), 8)
    bucket = g("aten.add.Tensor", whole(g, scaled), 8)
    return g("aten.where.self", g("aten.lt.Scalar", distance, 8), distance, g("aten.clamp.default", bucket, max=15))


FROM_FLOATS: dict[str, tuple[Callable[[IRBuilder], Tensor], bool]] = {
    "any float": (lambda g: whole(g, g.input("x", 3)), False),
    "sum of two": (lambda g: g("aten.add.Tensor", whole(g, g.input("x", 3)), whole(g, g.input("y", 3))), False),
    "sum of floats as integers": (lambda g: g("aten.sum.default", g.input("x", 3), dtype="torch.int64"), False),
    "copied into integers": (lambda g: g("aten.copy.default", ints(g, "y"), g.input("x", 3)), False),
    "clamped": (lambda g: whole(g, g("aten.clamp.default", g.input("x", 3), -1e9, 1e9)), True),
    "clamped too widely": (lambda g: whole(g, g("aten.clamp.default", g.input("x", 3), -3e9, 3e9)), False),
    "positions in floats": (
        lambda g: whole(
            g,
            g("aten.sub.Tensor", g("aten.cumsum.default", g("aten.ones.default", [2, 7], dtype="torch.float32"), 1), 1),
        ),
        True,
    ),
    "16 bits": (lambda g: whole(g, g.input("x", 3, dtype="float16")), True),
    "share": (lambda g: whole(g, g("aten.mul.Tensor", g("aten.sigmoid.default", g.input("x", 3)), 1000)), True),
    "too large a share": (
        lambda g: whole(g, g("aten.mul.Tensor", g("aten.tanh.default", g.input("x", 3)), 3e9)),
        False,
    ),
    "bucket": (t5_bucket, True),
    "int32, which is as in C": (lambda g: g("aten.to.dtype", g.input("x", 3), dtype="torch.int32"), True),
    "argmax": (lambda g: g("aten.argmax.default", g.input("x", 3)), True),
}


@pytest.mark.parametrize("name", FROM_FLOATS)
def test_a_float_becomes_an_int64_on_the_device_where_it_is_known_to_be_small(name: str) -> None:
    make, is_on_device = FROM_FLOATS[name]
    plan = partition(build(make).ir())
    assert (not plan.reasons) == is_on_device
    assert set(plan.reasons.values()) <= {"its int64 result may not fit in 32 bits"}


def test_a_float_beyond_32_bits_is_the_same_integer_as_in_pytorch() -> None:
    g = build(lambda g: whole(g, g.input("x", 3)))
    assert run_partitioned(g, x=np.array([2.0**40, -(2.0**33), 7], np.float32)).tolist() == [2**40, -(2**33), 7]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_floats_that_are_known_to_be_small_are(data: st.DataObject) -> None:
    """Random chains of ops from integers through floats to integers: within their ranges, or refused."""
    g = IRBuilder()
    x = g(
        "aten.to.dtype",
        g("aten.clamp.default", ints(g, "x"), -50, data.draw(st.integers(0, 300))),
        dtype="torch.float32",
    )
    values = [x]
    for _ in range(data.draw(st.integers(1, 6))):
        op = data.draw(
            st.sampled_from("log log1p abs sqrt exp tanh neg floor ceil round square add mul sub div sum amax".split())
        )
        a = data.draw(st.sampled_from(values))
        if op in ("add", "mul", "sub", "div"):
            scalar = data.draw(st.sampled_from([0.3, -2.5, 7, 1e5]))
            other = scalar if op == "div" or data.draw(st.booleans()) else data.draw(st.sampled_from(values))
            values.append(g(f"aten.{op}.Tensor", a, other))
        else:
            values.append(g(f"aten.{op}.default", a))
    g.output(whole(g, g("aten.add.Tensor", values[-1], x)), values[-1])
    graph = read_ir(g.ir())
    found = find_integer_ranges(graph)
    assume(not found.overflows)
    inputs = {"x": np.random.default_rng(data.draw(st.integers(0, 2**31))).integers(-400, 400, 3)}
    integers, floats = execute_cpu_partition(graph, inputs).values()
    low, high = found.ranges[graph.outputs[0]]
    finite = integers[np.broadcast_to(np.isfinite(floats), integers.shape)]
    assert not finite.size or (low <= finite.min() and finite.max() <= high)


BINARY = "add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default bitwise_and.Tensor bitwise_or.Tensor"
BINARY += " bitwise_xor.Tensor rsub.Tensor floor_divide.default remainder.Tensor fmod.Tensor div.trunc div.floor"
UNARY = "neg abs square sign relu bitwise_not cumsum sum amax prod argmax sort tril pow clamp roll pad flip diff full"


class Graph:
    """A random graph of integers, each tensor [2, 3] but for reductions, which broadcast."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.g, self.draw = IRBuilder(), draw
        limit = draw(st.sampled_from([None, 1, 3, 100, 5000]))
        self.values = [ints(self.g, f"x{index}", 2, 3) for index in range(2)]
        if limit is not None:
            self.values = [self.g("aten.clamp.default", x, -limit, limit) for x in self.values]
        self.values.append(self.g("aten.arange.start_step", -4, 8, 2, out=((6,), "int64")))
        self.values[-1] = self.g("aten.reshape.default", self.values[-1], [2, 3])
        self.values.append(self.g.constant("c", np.array([[1, -7, 3], [0, 2, 2]])))

    def pick(self) -> Tensor:
        return self.draw(st.sampled_from(self.values))

    def step(self) -> None:
        if self.draw(st.booleans()):
            self.values.append(self._binary(self.draw(st.sampled_from(BINARY.split()))))
        else:
            self.values += self._unary(self.draw(st.sampled_from(UNARY.split())))

    def _binary(self, op: str) -> Tensor:
        a, b = self.pick(), self.pick()
        if op.startswith(("floor", "rem", "fmod", "div")):
            b = self.g("aten.where.ScalarOther", self.g("aten.ne.Scalar", b, 0), b, 3)
        if op.startswith("div"):
            return self.g("aten.div.Tensor_mode", a, b, rounding_mode=op.split(".")[1])
        extra = {"alpha": self.draw(st.integers(-3, 3))} if op.startswith(("add", "sub", "rsub")) else {}
        return self.g(f"aten.{op}", a, b, **extra)

    def _unary(self, op: str) -> list[Tensor]:
        a, g = self.pick(), self.g
        dim = self.draw(st.integers(-2, 1))
        if op in ("sort", "roll", "pad", "cumsum", "tril", "flip", "diff") and g.shape(a) != (2, 3):
            return []
        match op:
            case "cumsum":
                return [g("aten.cumsum.default", a, dim)]
            case "sort":
                return list(g("aten.sort.default", a, dim))
            case "pow":
                return [g("aten.pow.Tensor_Scalar", a, self.draw(st.integers(0, 5)))]
            case "clamp":
                return [
                    g("aten.clamp.default", a, *sorted(self.draw(st.tuples(st.integers(-9, 9), st.integers(-9, 9)))))
                ]
            case "roll":
                return [g("aten.roll.default", a, [1], [dim])]
            case "pad":
                return [g("aten.amax.default", g("aten.constant_pad_nd.default", a, [1, 1], 5))]
            case "flip":
                return [g("aten.flip.default", a, [dim])]
            case "diff":
                return [g("aten.sum.default", g("aten.diff.default", a))]
            case "full":
                return [g("aten.full_like.default", a, self.draw(st.integers(-9, 9)))]
        return [g(f"aten.{op}.default", a)]


@st.composite
def integer_graphs(draw: Callable[..., Any]) -> IRBuilder:
    made = Graph(draw)
    for _ in range(draw(st.integers(1, 6))):
        made.step()
    made.g.output(*(x for x in dict.fromkeys(made.values) if x not in made.g.weights))
    return made.g


@settings(max_examples=150, deadline=None)
@given(integer_graphs(), st.integers(0, 2**31 - 1))
def test_random_integer_graphs_stay_in_their_ranges(g: IRBuilder, seed: int) -> None:
    graph = read_ir(g.ir())
    found = find_integer_ranges(graph)
    generator = np.random.default_rng(seed)
    inputs = {}
    for name in graph.inputs:
        low, high = found.bounds.get(name, INT32_RANGE)
        span = int(generator.choice([2, 50, 6000, high]))
        inputs[name] = generator.integers(max(low, -span), min(high, span), (2, 3), endpoint=True)
    values = execute_cpu_partition(graph, {**inputs, **g.constants})
    assume(not found.overflows)
    for name in graph.outputs:
        low, high = found.ranges[name]
        exact = values[name]
        assert is_int(graph.tensors[name].dtype) and low <= int(exact.min()) and int(exact.max()) <= high, name


@settings(max_examples=40, deadline=None)
@given(integer_graphs(), st.integers(0, 2**31 - 1))
def test_random_integer_graphs_are_exact_or_refused_in_a_partition_plan(g: IRBuilder, seed: int) -> None:
    plan = partition(g.ir())
    generator = np.random.default_rng(seed)
    inputs = {}
    for name in plan.graph.inputs:
        low, high = plan.graph.tensors[name].bounds or INT32_RANGE
        inputs[name] = generator.integers(low, high, (2, 3), endpoint=True)
    expected = execute_cpu_partition(read_ir(g.ir()), {**inputs, **g.constants})
    executor = DAGExecutor(plan, CPUBackend(native=False))
    try:
        outputs = executor.execute(inputs)
    except InputError as refusal:
        assert "which is outside" in str(refusal) and any(part.device == "cpu" for part in plan.partitions)
        return
    for name, tensor in zip(plan.graph.output_names, read_ir(g.ir()).outputs, strict=True):
        assert torch.equal(torch.from_numpy(outputs[name]), torch.from_numpy(np.asarray(expected[tensor]))), name


@pytest.mark.parametrize("factors", [(2**30, 2**30, 5), (2**30, -(2**30), 6), (2**31 - 1, 2**31 - 1, 1), (7, 2**30, 1)])
def test_a_product_beyond_32_bits_is_refused_and_taken_for_no_infinity(factors: tuple[int, int, int]) -> None:
    g = IRBuilder()
    g.output(g("aten.relu.default", g("aten.prod.default", g.input("x", 3, dtype="int64"))))
    plan = partition(g.ir(), lambda op: op != "aten.prod.default")
    with pytest.raises(InputError, match="'prod' holds .* which is outside"):
        DAGExecutor(plan, CPUBackend(native=False)).execute({"x": np.asarray(factors)})
