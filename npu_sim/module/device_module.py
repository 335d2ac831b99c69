"""The interface of `nn.Module` for a module that runs on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from npu_compiler.errors import InputError


class DeviceModule(nn.Module):
    """A compiled module; its parameters and buffers are those of the module that it was compiled from.

    Neither module is a child of the other, so weights have the same keys in both.

    Attributes:
        device: The torch device of arguments and results.
    """

    device: torch.device
    _module: nn.Module | None

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # an attribute set as usual would be a child, with a prefix in all keys
        super().train(False)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by key, for a module that was compiled from an exported program."""
        return {}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if self._module is not None:
            yield from self._module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self._module is not None:
            yield from self._module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        if self._module is not None:
            return self._module.state_dict(*args, prefix=prefix, **kwargs)
        return {f"{prefix}{key}": tensor.detach() for key, tensor in self._tensors().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights into the module that this one was compiled from; the next call uses them.

        Raises:
            InputError: this module was compiled from an exported program, which has no such module.
        """
        if self._module is None:
            raise InputError("an exported program takes no other weights; compile the module that it was exported from")
        return self._module.load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """Return this module, which is always in eval mode.

        Raises:
            InputError: `mode` is true.
        """
        if mode:
            raise InputError("a compiled module is for inference; train the module that it was compiled from")
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Return this module if `fn`, the function of `.to()`, `.cuda()` or `.half()`, keeps device and dtype.

        Raises:
            InputError: `fn` would change the device or the dtype.
        """
        first = next((x for x in [*self.parameters(), *self._tensors().values()] if x.is_floating_point()), None)
        probe = torch.empty(0, device=self.device, dtype=torch.float32 if first is None else first.dtype)
        try:
            result = fn(probe)
        except (AssertionError, RuntimeError) as error:  # PyTorch has no such device here
            raise InputError(f"{self._advice()}: {str(error).splitlines()[0]}") from error
        if (result.device.type, result.dtype) != (probe.device.type, probe.dtype):
            raise InputError(self._advice())
        return self

    def _advice(self) -> str:
        return (
            f"a compiled module stays on the device and in the dtype that it was compiled for ({self.device}); "
            "move or convert the module that it was compiled from, and compile that again"
        )
