"""Special cases for models of the transformers library: its caches, and the hooks that it installs itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def register_caches(module: nn.Module) -> None:
    """Register the key-value cache classes of a transformers model with PyTorch's pytree.

    The model's results can contain such caches. Does nothing if the module is no such model, or the library is too old
    to offer this.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return
    try:
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
    except ImportError:
        return
    register_cache_pytrees_for_model(module)


def is_library_hook(hook: Any) -> bool:
    """Whether a forward hook was installed by transformers, to collect hidden states, and not by a user.

    The library installs such hooks at a model's first call, and tracing records their effect.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")
