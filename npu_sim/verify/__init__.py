"""Comparison of a device with PyTorch, which names the first wrong kernel if they differ."""

from npu_sim.verify.criteria import OutputReport
from npu_sim.verify.culprit import Culprit
from npu_sim.verify.verification import VerifyReport, input_specs, verify, verify_kernels

__all__ = ["Culprit", "OutputReport", "VerifyReport", "input_specs", "verify", "verify_kernels"]
