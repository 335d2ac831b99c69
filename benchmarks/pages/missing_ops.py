"""The table of `docs/partitioning.md`, in each of its languages: BERT-base on a chip that lacks ops.

`python -m benchmarks.pages.missing_ops` writes it anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.chip_design import with_tables
from npu_compiler.partitioner import partition
from npu_model import Chip, load_chip, simulate_plan
from npu_model.analysis.plan import PlanResult, find_gains

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "partitioning.md", DOCS / "partitioning.ko.md")
TABLE = "missing-ops"
# Keys of the chip file's table [ops] for each row.
ROWS: tuple[Mapping[str, Any], ...] = (
    {"without": ()},
    {"without": ("softmax",)},
    {"without": ("gelu",)},
    {"without": ("gelu", "softmax")},
    {"only": ()},
)


def bert(layers: int = 12, tokens: int = 64) -> dict[str, Any]:
    """Return IR for the forward pass of BERT-base, with attention as products and softmax, without weights."""
    import torch
    from transformers import BertConfig, BertModel

    from npu_sim.extract import extract_ir

    options: dict[str, Any] = {"num_hidden_layers": layers, "attn_implementation": "eager"}
    config = BertConfig(**options)
    with torch.device("meta"):
        network = BertModel(config).eval()
    for module in network.modules():
        for name, value in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(value.shape, dtype=value.dtype))  # positions, whose values take no time
    return dict(extract_ir(network, (torch.zeros(1, tokens, dtype=torch.int64),)))


def chip_with(ops: Mapping[str, Any]) -> Chip:
    """Return the chip `edge` with these keys in its table [ops]."""
    chip = load_chip("edge")
    return dataclasses.replace(chip, ops=dataclasses.replace(chip.ops, **ops))


def simulated(ir: dict[str, Any], chip: Chip) -> tuple[PlanResult, dict[str, float]]:
    """Divide a graph between a chip and its host by price, and simulate that.

    Returns:
        The simulated run, and for each op that the chip's file leaves out, the seconds that supporting it would gain.
    """
    plan = partition(ir, npu=chip)
    gains = find_gains(plan, chip) if chip.ops.without else []
    return simulate_plan(plan, chip), {gain.op.removeprefix("aten."): gain.seconds for gain in gains}


def table_row(ops: Mapping[str, Any], run: PlanResult, gains: Mapping[str, float]) -> str:
    """Return the row of the table for a simulated run, with times in milliseconds."""
    ((key, names),) = ops.items()
    listed = ", ".join(f'"{name}"' for name in names)
    times = (run.seconds, run.device, run.host, run.transfers + run.launches)
    cells = (
        f"`{key} = [{listed}]`",
        *(f"{1e3 * seconds:.2f}" for seconds in times),
        f"{1e-6 * sum(transfer.bytes for transfer in run.plan.transfers):.1f}",
        str(len(run.results)),
        ", ".join(f"{op} {1e3 * seconds:.2f}" for op, seconds in gains.items()),
    )
    return "| " + " | ".join(cells) + " |"


def rows(layers: int = 12) -> list[str]:
    """Return the rows of the table for a BERT with this number of layers."""
    ir = bert(layers)
    return [table_row(ops, *simulated(ir, chip_with(ops))) for ops in ROWS]


def main() -> None:
    written = rows()
    for page in PAGES:
        page.write_text(with_tables(page.read_text("utf-8"), {TABLE: written}), "utf-8")


if __name__ == "__main__":
    main()
