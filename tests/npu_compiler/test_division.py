"""The division of work between device and host: the cheapest there is, by trying them all and by an integer program."""

from __future__ import annotations

import random

import numpy as np
import pytest
from exact_divisions import cheapest_of_all
from scipy.optimize import Bounds, LinearConstraint, milp

from npu_compiler.partitioning.cut import Problem, Unit, Value, divide

SEEDS = range(200)


def drawn(seed: int, most: int) -> Problem:
    """A random graph of units, some of several steps, some of which the device cannot run."""
    draw = random.Random(seed)
    count = draw.randint(1, most)
    units = [
        Unit(None if draw.random() < draw.choice((0.1, 0.4)) else draw.randint(0, 50), draw.randint(0, 80))
        for _ in range(count)
    ]
    owners = [*range(count), *(draw.randrange(count) for _ in range(draw.randint(0, count // 2)))]
    draw.shuffle(owners)
    steps = []
    for index, unit in enumerate(owners):
        before = draw.sample(range(index), min(index, draw.choice((0, 1, 1, 2))))
        steps.append((unit, before))
    readers: dict[int, set[int]] = {}
    for unit, before in steps:
        for step in before:
            readers.setdefault(step, set()).add(unit)
    values = [
        Value(owners[step], frozenset(readers.get(step, ())), draw.random() < 0.2, draw.randint(0, 40))
        for step in range(len(steps))
    ]
    values += [
        Value(None, frozenset(draw.sample(range(count), draw.randint(1, min(3, count)))), False, draw.randint(0, 40))
        for _ in range(draw.randint(0, 2))
    ]
    return Problem(units, values, steps, draw.choice((0, 0, 5, 30, 100)))


def exact(problem: Problem) -> int:
    """The lowest price, by an integer program: units, crossings of values in each direction, and runs as levels."""
    units, values, steps = problem.units, problem.values, problem.steps
    # Unit on the device; down, up: value crosses; level: stretches on the device up to a step; runs: the most of them.
    down, up = len(units), len(units) + len(values)
    level, runs = up + len(values), up + len(values) + len(steps)
    cost, rows, least = np.zeros(runs + 1), [], []

    def at_least(terms: dict[int, float], value: float) -> None:
        row = np.zeros(runs + 1)
        for index, factor in terms.items():
            row[index] += factor
        rows.append(row)
        least.append(value)

    fixed = sum(unit.host for unit in units)
    high = np.ones(runs + 1)
    high[level:] = np.inf
    for index, unit in enumerate(units):
        cost[index] = 0 if unit.device is None else unit.device - unit.host
        high[index] = unit.device is not None
    for index, value in enumerate(values):
        cost[down + index] = cost[up + index] = value.price
        for reader in value.readers - {value.maker}:
            maker = {} if value.maker is None else {value.maker: 1.0}
            at_least({down + index: 1.0, reader: -1.0, **maker}, 0.0)
            if value.maker is not None:
                at_least({up + index: 1.0, reader: 1.0, value.maker: -1.0}, 0.0)
        if value.returned and value.maker is not None:
            at_least({up + index: 1.0, value.maker: -1.0}, 0.0)
    cost[runs] = problem.launch
    for index, (unit, before) in enumerate(steps):
        at_least({level + index: 1.0, unit: -1.0}, 0.0)
        at_least({runs: 1.0, level + index: -1.0}, 0.0)
        for step in before:
            other = steps[step][0]
            at_least({level + index: 1.0, level + step: -1.0}, 0.0)
            if other != unit:
                at_least({level + index: 1.0, level + step: -1.0, unit: -1.0, other: 1.0}, 0.0)
    result = milp(cost, constraints=LinearConstraint(np.array(rows), least), integrality=1, bounds=Bounds(0, high))
    assert result.success, result.message
    return round(result.fun) + fixed


@pytest.mark.parametrize("seed", SEEDS)
def test_no_division_is_cheaper(seed: int) -> None:
    problem = drawn(seed, 9)
    division = divide(problem)
    assert division.price == problem.price(division.on_device) == cheapest_of_all(problem) == division.bound


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_division_of_a_larger_graph_is_cheaper_than_the_integer_programs(seed: int) -> None:
    problem = drawn(1000 + seed, 40)
    division = divide(problem)
    lowest = exact(problem)
    assert division.bound <= lowest <= division.price
    assert division.price == lowest


def test_an_island_that_does_not_pay_goes_to_the_host() -> None:
    """A unit that is faster on the device stays on the host where its values must cross for it."""
    units = [Unit(None, 10), Unit(1, 5), Unit(None, 10)]
    steps = [(0, []), (1, [0]), (2, [1])]

    def values(price: int) -> list[Value]:
        return [Value(0, frozenset({1}), False, price), Value(1, frozenset({2}), False, price)]

    assert divide(Problem(units, values(3), steps)).on_device == (False, False, False)
    assert divide(Problem(units, values(1), steps)).on_device == (False, True, False)
    assert divide(Problem(units, values(1), steps, launch=3)).on_device == (False, False, False)


def test_a_value_crosses_once_however_many_read_it() -> None:
    problem = Problem(
        [Unit(0, 9), *[Unit(None, 1)] * 3],
        [Value(0, frozenset({1, 2, 3}), True, 4)],
        [(0, []), (1, [0]), (2, [0]), (3, [0])],
    )
    assert problem.price((True, False, False, False)) == 0 + 3 + 4
    assert divide(problem).price == 7


def test_runs_of_the_device_are_those_of_a_schedule() -> None:
    """Two units on the device that wait for the same unit of the host share a run; one that follows both does too."""
    problem = Problem(
        [Unit(1, 9), Unit(None, 1), Unit(1, 9), Unit(1, 9)], [], [(0, []), (1, [0]), (2, [1]), (3, [])], 7
    )
    assert problem.runs((True, False, True, True)) == 2
    assert problem.runs((False, False, True, True)) == 1
    assert problem.runs((False,) * 4) == 0
