"""Cache of traced graphs, each made once in a run of the tests, by the first of pytest's workers to need it."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.qwen import LAYERS, step_graph

FOLDER = "TEST_TRACES"  # the environment variable that names the folder which the workers share


def traced(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the IR of that name, from the workers' shared cache; it is made if it is not there."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return make()
    path = Path(folder, quote(name, safe=""))
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            pickle.dump(make(), file)
        os.replace(file.name, path)
    ir: dict[str, Any] = pickle.loads(path.read_bytes())
    return ir


@cache
def qwen_step(tokens: int, layers: int = LAYERS) -> dict[str, Any]:
    """`step_graph`: a step of Qwen2.5-1.5B."""
    return traced(f"qwen {tokens} {layers}", lambda: step_graph(tokens, layers))
