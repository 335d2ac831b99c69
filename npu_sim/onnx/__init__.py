"""ONNX: a model file read as a PyTorch module, which is traced, compiled and saved like any other."""

from npu_sim.onnx.sources import ir_of_file, load, weights_of_file

__all__ = ["ir_of_file", "load", "weights_of_file"]
