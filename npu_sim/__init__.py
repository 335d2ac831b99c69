"""The users' package: `compile` a PyTorch module, the `npu-sim` command, language and vision models, verification."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_compiler.version import __version__
    from npu_sim.module.buckets import Buckets
    from npu_sim.module.compiled import CompiledModule, compile
    from npu_sim.module.dynamo_backend import backend
    from npu_sim.module.saved import LoadedModule, load
    from npu_sim.quantizing.options import QuantizeOptions
    from npu_sim.quantizing.quantizer import quantize

# Imported when used: tracing needs PyTorch, and the command should answer to Ctrl-C at once.
_MODULES = {
    "Buckets": "module.buckets",
    "CompiledModule": "module.compiled",
    "LoadedModule": "module.saved",
    "QuantizeOptions": "quantizing.options",
    "backend": "module.dynamo_backend",
    "compile": "module.compiled",
    "load": "module.saved",
    "quantize": "quantizing.quantizer",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from npu_compiler.version import __version__

        return __version__
    from npu_compiler.deferred_import import deferred

    return deferred(__name__, _MODULES)(name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "__version__",
    "Buckets",
    "CompiledModule",
    "LoadedModule",
    "QuantizeOptions",
    "backend",
    "compile",
    "load",
    "quantize",
]
