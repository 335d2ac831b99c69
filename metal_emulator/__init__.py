"""Metal without a Mac: the `.metal` kernels compiled as C++, behind the calls that pyobjc offers.

`api()` gives the frameworks under pyobjc's names. A selector or an argument that Metal does not have, a wrong order of
calls, or the use of a released object raises `MetalUsageError`. An error inside a kernel, such as an access out of
bounds, is a `KernelFault`, which its command buffer's `error()` reports.
"""

from metal_emulator.compiler import CompileError, KernelFault
from metal_emulator.emulator import Emulator
from metal_emulator.frameworks import MetalAPI, api
from metal_emulator.objc import MetalUsageError, UnknownSelectorError
from npu_compiler.version import __version__

__all__ = [
    "__version__",
    "CompileError",
    "Emulator",
    "KernelFault",
    "MetalAPI",
    "MetalUsageError",
    "UnknownSelectorError",
    "api",
]
