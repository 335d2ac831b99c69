"""Door to `metal.mps_accel`: matrix products by MetalPerformanceShaders."""

from npu_runtime.metal.mps_accel import *  # noqa: F403
