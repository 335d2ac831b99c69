"""Python processes in which PyTorch and what builds on it cannot be imported, as where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ABSENT = ("torch", "torch_ir", "transformers")
_REPOSITORY = Path(__file__).resolve().parents[2]
_REFUSE = f"""
import sys

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse)
"""


def run_without_torch(
    script: str, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python script; arguments are in its `sys.argv[1:]`.

    Args:
        env: Environment variables besides this process's own.
    """
    return subprocess.run(
        [sys.executable, "-c", f"{_REFUSE}\n{script}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
