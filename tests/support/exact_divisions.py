"""The cheapest division of a problem, found by trying all of them."""

from __future__ import annotations

from itertools import product

from npu_compiler.partitioning.cut import Problem


def cheapest_of_all(problem: Problem) -> int:
    """The lowest price of all divisions that are possible."""
    sides = [(False,) if unit.device is None else (False, True) for unit in problem.units]
    return min(problem.price(on_device) for on_device in product(*sides))
