"""Threads that call one module at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


def results_of_threads(call: Callable[[Any], Any], inputs: Sequence[Any], calls: int) -> list[list[Any]]:
    """Call a module `calls` times in a thread per input; return each thread's results."""
    results: list[list[Any]] = [[] for _ in inputs]

    def work(index: int) -> None:
        with torch.no_grad():
            results[index] = [call(inputs[index]) for _ in range(calls)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
