"""Reports: a program, the graphs that led to it and where its time, bytes and memory go, as one HTML file."""

from npu_sim.report.arena import arena_map
from npu_sim.report.compare import compare_programs
from npu_sim.report.contents import diff_contents, numerics_contents, partition_contents, report_contents
from npu_sim.report.facts import program_facts
from npu_sim.report.measure import Measurement, Roof, measure
from npu_sim.report.page import render_page, write_page
from npu_sim.report.simulated import simulated_facts, sweep_facts
from npu_sim.report.stages import StageGraphs, stage_graphs

__all__ = [
    "Measurement",
    "Roof",
    "StageGraphs",
    "arena_map",
    "compare_programs",
    "diff_contents",
    "measure",
    "numerics_contents",
    "partition_contents",
    "program_facts",
    "render_page",
    "report_contents",
    "simulated_facts",
    "stage_graphs",
    "sweep_facts",
    "write_page",
]
