"""A chip file for `npu_model` from what a device reaches, measured with its own kernels (`npu-sim calibrate`).

A measurement is a small program compiled for the device, run until the shortest runs agree: disturbances only slow
runs. Rates and costs come first. Then blocks of calls (`probes`) are measured and simulated with these rates, and the
factors between them are written down too.
"""

from npu_sim.calibration.chip_file import Shape, chip_text, shape_of
from npu_sim.calibration.factors import factors
from npu_sim.calibration.measuring import Block, Measured, measure

__all__ = ["Block", "Measured", "Shape", "chip_text", "factors", "measure", "shape_of"]
