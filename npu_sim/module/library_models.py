"""What exporting a model of a library needs that the library itself provides: transformers' own patches for export."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def patched_for_export(module: nn.Module) -> Iterator[None]:
    """While it is open, the parts of transformers that cannot be traced are replaced by those that it has for export.

    Its caches become known to pytree, for good. Nothing happens where the library is older than its exporters.

    Args:
        module: A model of transformers.
    """
    with ExitStack() as stack:
        try:
            from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model, reset_model_state
            from transformers.exporters.utils import apply_patches
        except ImportError:
            pass
        else:
            register_cache_pytrees_for_model(module)  # type: ignore[arg-type]
            stack.enter_context(apply_patches("dynamo"))
            stack.enter_context(reset_model_state(module))
        yield


def is_library_hook(hook: Any) -> bool:
    """Whether a forward hook is one with which transformers collects hidden states, and no user's own.

    It installs them at a model's first call, and tracing sees what they do.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def is_of_transformers(module: nn.Module) -> bool:
    """Whether the module is a model of transformers, which is then imported already."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)
