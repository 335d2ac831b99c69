"""A language model that runs one decoder layer at a time, so that only one layer's weights are in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import COMPUTING_DEVICES
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import INV_FREQ, meta_model, state_with_buffers

_LAYERS = "model.layers"
# All later tokens attend to the first one of a text, most of them strongly (an "attention sink"): an error in its keys
# and values is in the result of every token, so it counts like one in this many.
_FIRST_TOKEN = 100.0
_AT_ONCE_ON_A_GPU = 8  # samples


def computing_device(name: str | None = None) -> str:
    """Return PyTorch's name of the device `cpu` or `gpu`.

    Args:
        name: Default: `gpu` if PyTorch can use one that supports float64, else `cpu`.

    Raises:
        InputError: the name is unknown, or PyTorch can use no GPU.
    """
    if name is not None and name not in COMPUTING_DEVICES:
        raise InputError(f"unknown device '{name}'; choose one of {', '.join(COMPUTING_DEVICES)}")
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "gpu" and gpu is None:
        raise InputError("PyTorch can use no GPU here; choose the device cpu")
    return "cpu" if gpu is None or name == "cpu" or (name is None and gpu.type == "mps") else gpu.type


class Layerwise:
    """The decoder layers of a language model in float32, loaded one at a time.

    Args:
        checkpoint: The model, opened for float32, with weights that are not quantized.
        device: Device for `computing_device`, which holds the layers and computes their results. None: its default.

    Attributes:
        shapes: Name → [n, k] of the linear layers' weights, in the module's order.
    """

    def __init__(self, checkpoint: Checkpoint, device: str | None = None) -> None:
        self._device = computing_device(device)
        self._model = meta_model(checkpoint)
        self._state = state_with_buffers(checkpoint)
        self.shapes = {
            f"{name}.weight": (module.out_features, module.in_features)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith(_LAYERS)
        }
        if missing := [name for name in self.shapes if name not in self._state]:
            raise InputError(f"{checkpoint.name} lacks the weight '{missing[0]}'")

    def weight(self, name: str) -> torch.Tensor:
        """Return a parameter in float32, on the device."""
        return numpy_to_tensor(to_numpy(self._state[name])).float().to(self._device)

    def embedded(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Embed token ids [samples, length]; return the first layer's input in batches [samples, length, hidden]."""
        table = self.weight("model.embed_tokens.weight")
        at_once = 1 if self._device == "cpu" else _AT_ONCE_ON_A_GPU
        return [table[samples] for samples in ids.to(self._device).split(at_once)]

    def layers(self, length: int) -> Iterator[LoadedLayer]:
        """Yield each decoder layer in turn; its weights are freed when the next one is taken.

        Args:
            length: Length of all samples, in tokens.
        """
        from transformers.masking_utils import create_masks_for_generate

        positions = torch.arange(length, device=self._device)[None]
        rotary = type(self._model.model.rotary_emb)(config=self._model.config)
        rotary.inv_freq = self.weight(INV_FREQ)
        angles = rotary(torch.zeros(1, device=self._device), positions)
        config, kinds = self._model.config, getattr(self._model.config, "layer_types", None) or []
        embedded = torch.zeros(1, length, config.hidden_size, device=self._device)
        # One mask for all layers, or one for each of their types: eager attention masks nothing by itself.
        masks = create_masks_for_generate(config, embedded, attention_mask=None, past_key_values=None)
        if masks is None or (isinstance(masks, dict) and not masks.keys() >= set(kinds)):
            raise InputError(f"layers of the types {', '.join(sorted(set(kinds)))} cannot run one at a time")
        for place, layer in enumerate(self._model.model.layers):
            prefix = f"{_LAYERS}.{place}."
            layer.to_empty(device=self._device)
            names = [name for name, _ in layer.named_parameters()]
            layer.load_state_dict({name: self.weight(prefix + name) for name in names}, strict=False)
            mask = masks[kinds[place]] if isinstance(masks, dict) else masks
            yield LoadedLayer(
                prefix, layer, {"attention_mask": mask, "position_ids": positions, "position_embeddings": angles}
            )
            layer.to("meta")


class LoadedLayer:
    """One decoder layer with its weights.

    Attributes:
        prefix: Prefix of its parameters' names.
    """

    def __init__(self, prefix: str, layer: nn.Module, arguments: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self._layer = layer
        self._arguments = arguments

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer on hidden states [samples, length, hidden] and return those after it."""
        output = self._layer(hidden, **self._arguments)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def copy(self) -> LoadedLayer:
        """Return the layer with a copy of its weights."""
        return LoadedLayer(self.prefix, copy.deepcopy(self._layer), self._arguments)

    def stages(self, hidden: torch.Tensor) -> list[list[str]]:
        """Return the names of the linear layers' weights in the order of execution, grouped by shared input.

        Args:
            hidden: Input of the decoder layer, [samples, length, hidden].
        """
        seen: list[tuple[torch.Tensor, list[str]]] = []

        def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if not seen or seen[-1][0] is not args[0]:
                    seen.append((args[0], []))
                seen[-1][1].append(f"{self.prefix}{name}.weight")

            return hook

        linears = [(name, module) for name, module in self._layer.named_modules() if isinstance(module, nn.Linear)]
        hooks = [module.register_forward_pre_hook(note(name)) for name, module in linears]
        try:
            self(hidden)
        finally:
            for hook in hooks:
                hook.remove()
        return [names for _, names in seen]

    def linear(self, name: str) -> nn.Linear:
        """Return the linear layer whose weight has this name."""
        linear = self._layer.get_submodule(name.removeprefix(self.prefix).removesuffix(".weight"))
        assert isinstance(linear, nn.Linear)
        return linear

    def inputs(self, name: str, batches: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the inputs of a linear layer, [samples, length, k], for each batch of the decoder layer's inputs.

        Args:
            name: Name of the linear layer's weight.
            batches: Inputs of the decoder layer, [samples, length, hidden].
        """
        linear = self.linear(name)
        seen: list[torch.Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0])
            raise _Seen

        for batch in batches:
            hook = linear.register_forward_pre_hook(note)
            try:
                with suppress(_Seen):
                    self(batch)
            finally:
                hook.remove()
            yield seen.pop()


class _Seen(Exception):
    """Raised to stop a decoder layer's run once the input of the linear layer is recorded."""


def moments(rounded: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums over all tokens of the products of a linear layer's inputs; each text's first token has more weight.

    Args:
        rounded: The inputs x of the layer in the quantized model, in batches [samples, length, k].
        exact: The inputs y of the layer in the original model, in the same batches.

    Returns:
        The sum of x xᵀ, which is the layer's Hessian, and that of (y - x) xᵀ: both float32 [k, k].
    """
    hessian = shift = torch.zeros(())
    for x, y in zip(rounded, exact, strict=True):
        weighted = x.clone()
        weighted[:, 0] *= _FIRST_TOKEN
        x, y, weighted = (z.flatten(0, 1) for z in (x, y, weighted))
        hessian, shift = hessian + weighted.T @ x, shift + (y - x).T @ weighted
    return hessian, shift
