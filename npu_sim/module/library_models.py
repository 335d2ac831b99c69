"""Special cases of libraries' models: transformers' caches, and the hooks that it installs itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def register_caches(module: nn.Module) -> None:
    """Make the key-value caches that a model of transformers may return known to pytree.

    Nothing happens where the module is not one, or the library is older than its exporters.
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
    """Whether a forward hook is one with which transformers collects hidden states, and no user's own.

    It installs them at a model's first call, and tracing sees what they do.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")
