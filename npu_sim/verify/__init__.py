"""Comparing a device with PyTorch and, where they differ, naming the first kernel that is wrong."""

from npu_sim.verify.criteria import OutputReport
from npu_sim.verify.culprit import Culprit
from npu_sim.verify.verification import VerifyReport, input_specs, verify, verify_kernels

__all__ = ["Culprit", "OutputReport", "VerifyReport", "input_specs", "verify", "verify_kernels"]
