"""Chooses the fastest implementation of each kernel call on this machine, by a table on disk or else by trials."""

from npu_runtime.cpu.tuning.table import Choice, ChoiceTable, machine
from npu_runtime.cpu.tuning.tuner import Tuner, default_launch

__all__ = ["Choice", "ChoiceTable", "Tuner", "default_launch", "machine"]
