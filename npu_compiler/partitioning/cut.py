"""`divide`: the division of work between a device and its host that takes the least time, by minimum cuts.

A unit of work goes as a whole to the device or to the host. The price of a division is the sum of

- each unit's time on its side;
- for each value that the other side needs, the time of its transfer, once in each direction;
- the launch of the device, once for each of its runs.

Without launches, a minimum cut between "host" and "device" is the cheapest division. A new run begins whenever a value
goes from the device to the host and back, so the number of runs is the largest number of stretches on the device along
any path of steps. The launches along one path can be written as a cut as well, which bounds the price of every
division from below; `divide` branches on a unit if the bound and the price differ.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_HOST, _DEVICE = "host", "device"
_MOST_CUTS = 400  # of one division of a small graph; larger graphs get fewer
_MOST_WORK = 60_000  # units × cuts


@dataclass(frozen=True)
class Unit:
    """A piece of work that runs as a whole on one side.

    Attributes:
        device: Price on the device; None if it cannot run there.
        host: Price on the host.
    """

    device: int | None
    host: int


@dataclass(frozen=True)
class Value:
    """A value that may have to be transferred between the sides.

    Attributes:
        maker: The unit that computes it; None for the caller, on the host.
        readers: The units that read it.
        returned: Whether the caller, on the host, reads it too.
        price: Price of a transfer, in either direction.
    """

    maker: int | None
    readers: frozenset[int]
    returned: bool
    price: int


@dataclass(frozen=True)
class Problem:
    """Units of work, the values between them, and the order of the work. Prices are integers in any unit of time.

    Attributes:
        steps: The steps of work in order: the unit that a step belongs to, and the earlier steps that it waits for.
        launch: Price of a run of the device.
    """

    units: Sequence[Unit]
    values: Sequence[Value]
    steps: Sequence[tuple[int, Sequence[int]]]
    launch: int = 0

    def price(self, on_device: Sequence[bool]) -> int:
        """The price of a division; all units on the device must be able to run there."""
        crossing = sum(value.price * self.crossings(value, on_device) for value in self.values)
        return self.work(on_device) + crossing + self.launch * self.runs(on_device)

    def work(self, on_device: Sequence[bool]) -> int:
        """The total time of the units, without transfers and launches."""
        total = 0
        for unit, there in zip(self.units, on_device, strict=True):
            if there and unit.device is None:
                raise ValueError("a unit is on the device, which cannot run it")
            total += unit.device if there and unit.device is not None else unit.host
        return total

    def crossings(self, value: Value, on_device: Sequence[bool]) -> int:
        """Number of transfers of a value: 1 if any reader is on the other side, else 0."""
        at_device = value.maker is not None and on_device[value.maker]
        elsewhere = any(on_device[reader] != at_device for reader in value.readers)
        return int(elsewhere or (value.returned and at_device))

    def runs(self, on_device: Sequence[bool]) -> int:
        """The least number of runs of the device that the order of the work allows."""
        return max((length for length, _ in self._stretches(on_device)), default=0)

    def longest_path(self, on_device: Sequence[bool]) -> list[int]:
        """The steps of a path with the largest number of separate stretches on the device."""
        stretches = self._stretches(on_device)
        at = max(range(len(stretches)), key=lambda step: stretches[step][0], default=None)
        path = []
        while at is not None:
            path.append(at)
            at = stretches[at][1]
        return path[::-1]

    def _stretches(self, on_device: Sequence[bool]) -> list[tuple[int, int | None]]:
        """The most stretches on the device along a path that ends at each step, and that path's previous step.

        The previous step is None at the beginning of a path.
        """
        found: list[tuple[int, int | None]] = []
        for unit, before in self.steps:
            best: tuple[int, int | None] = (int(on_device[unit]), None)
            for step in before:
                begins = on_device[unit] and not on_device[self.steps[step][0]]
                best = max(best, (found[step][0] + begins, step), key=lambda pair: (pair[0], pair[1] is not None))
            found.append(best)
        return found


@dataclass(frozen=True)
class Division:
    """A division of the units, with its price.

    Attributes:
        on_device: Whether each unit is on the device.
        bound: A lower bound on the price of every division; equal to the price if this one is proved to be the
            cheapest.
    """

    on_device: tuple[bool, ...]
    price: int
    bound: int


def divide(problem: Problem) -> Division:
    """The cheapest division of a problem.

    It is proved to be the cheapest if its bound equals its price. For a large graph with costly launches the proof may
    take too long; then it is the cheapest of those that were tried.
    """
    possible = tuple(unit.device is not None for unit in problem.units)
    best = min(((False,) * len(possible), possible), key=problem.price)
    first = _relaxed(problem, {}, problem.longest_path(possible))
    queue: list[tuple[int, int, dict[int, bool], _Relaxed]] = [(first.bound, 0, {}, first)]
    allowed = max(8, min(_MOST_CUTS, _MOST_WORK // (1 + len(problem.units))))
    best, tried = min(best, first.on_device, key=problem.price), 1
    while queue and queue[0][0] < problem.price(best) and tried < allowed:
        _, _, fixed, relaxed = heapq.heappop(queue)
        unit = _undecided(problem, relaxed.on_device, fixed)
        if unit is None:
            continue
        for side in (True, False) if possible[unit] else (False,):
            decided: dict[int, bool] = {**fixed, unit: side}
            found = _relaxed(problem, decided, relaxed.path)
            tried += 1
            best = min(best, found.on_device, key=problem.price)
            heapq.heappush(queue, (max(found.bound, relaxed.bound), tried, decided, found))
    price = problem.price(best)
    return Division(best, price, min(price, queue[0][0] if queue else price))


@dataclass(frozen=True)
class _Relaxed:
    """The result of minimum cuts with some units fixed to a side.

    Attributes:
        bound: A lower bound on the price of every division with these units fixed.
        on_device: The cheapest division that was found.
        path: The path that has the most runs in that division.
    """

    bound: int
    on_device: tuple[bool, ...]
    path: list[int]


def _relaxed(problem: Problem, fixed: Mapping[int, bool], path: list[int]) -> _Relaxed:
    """The best bound from minimum cuts that count the launches along one path each.

    The first cut counts those of `path`, each next one those of the path with the most runs in the best division so
    far.
    """
    bound, best = _cut(problem, fixed, path)
    for _ in range(2):
        if problem.price(best) <= bound:
            break
        price, on_device = _cut(problem, fixed, problem.longest_path(best))
        bound, best = max(bound, price), min(best, on_device, key=problem.price)
    return _Relaxed(bound, best, problem.longest_path(best))


def _undecided(problem: Problem, on_device: Sequence[bool], fixed: Mapping[int, bool]) -> int | None:
    """A unit that is not fixed yet, preferably where a run begins on the path with the most runs.

    None if all are fixed.
    """
    path = [problem.steps[step][0] for step in problem.longest_path(on_device)]
    begins = [b for a, b in pairwise(path) if on_device[b] and not on_device[a]]
    return next((unit for unit in (*begins, *path, *range(len(problem.units))) if unit not in fixed), None)


def _cut(problem: Problem, fixed: Mapping[int, bool], path: Sequence[int]) -> tuple[int, tuple[bool, ...]]:
    """The price of a minimum cut that counts the launches along one path, and its division.

    Units on the host's side of the cut are on the host. An edge counts if it leads from the host's side to the
    device's.
    """
    import networkx as nx

    prices: dict[tuple[Hashable, Hashable], int | None] = {}  # None: this edge is never cut

    def add(source: Hashable, target: Hashable, price: int | None) -> None:
        before = prices.get((source, target), 0)
        prices[source, target] = None if price is None or before is None else before + price

    for index, unit in enumerate(problem.units):
        side = fixed.get(index)
        add(index, _DEVICE, None if side is True else unit.host)
        add(_HOST, index, None if side is False else unit.device)
    for number, value in enumerate(problem.values):
        maker: Hashable = _HOST if value.maker is None else value.maker
        down, up = (_DEVICE, number), (_HOST, number)
        add(maker, down, value.price)
        add(up, maker, value.price)
        for reader in value.readers:
            add(down, reader, None)
            add(reader, up, None)
        if value.returned:
            add(_HOST, up, None)
    for source, target in pairwise([_HOST, *(problem.steps[step][0] for step in path)]):
        add(source, target, problem.launch)
    graph: Any = nx.DiGraph()
    for (source, target), price in prices.items():
        if source != target:
            graph.add_edge(source, target, **({} if price is None else {"capacity": price}))
    price, (_, there) = nx.minimum_cut(graph, _HOST, _DEVICE, flow_func=nx.algorithms.flow.boykov_kolmogorov)
    return int(price), tuple(index in there for index in range(len(problem.units)))
