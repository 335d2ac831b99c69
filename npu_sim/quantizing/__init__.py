"""Quantizing a language model: to 8 or 4 bits, calibrated or not, as a Hugging Face folder that others read too."""

from npu_sim.quantizing.quantizer import quantize
from npu_sim.quantizing.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "quantize"]
