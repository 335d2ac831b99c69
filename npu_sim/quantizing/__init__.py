"""Quantization of a language model to 8 or 4 bits, with or without calibration, to a standard Hugging Face folder."""

from typing import TYPE_CHECKING

from npu_compiler.deferred_import import deferred
from npu_sim.quantizing.options import QuantizeOptions

if TYPE_CHECKING:
    from npu_sim.quantizing.quantizer import quantize
    from npu_sim.quantizing.report import LayerReport, Report

# Imported when used, since they need PyTorch.
__getattr__ = deferred(__name__, {"LayerReport": "report", "Report": "report", "quantize": "quantizer"})

__all__ = ["LayerReport", "QuantizeOptions", "Report", "quantize"]
