"""The steps of a converted ONNX graph as a PyTorch module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from npu_sim.onnx.steps import Constant, Slot, Steps


class OnnxModule(nn.Module):
    """An ONNX model; initializers are buffers under their names, other constants are not in the state dict.

    Args:
        made: The steps of the graph.
        name: The model's name.

    Attributes:
        input_names, output_names: Names of the graph's inputs and outputs, in order.
        examples: Tensors with the inputs' shapes and dtypes, and arbitrary values.
    """

    def __init__(self, made: Steps, name: str) -> None:
        super().__init__()
        self.name = name
        self.input_names = list(made.inputs)
        self.output_names = [name for name, _ in made.outputs]
        self.examples = tuple(torch.empty(x.fake.shape, dtype=x.fake.dtype) for x in made.inputs.values())
        self._inputs = [slot.index for slot in made.inputs.values()]
        self._outputs = [index for _, index in made.outputs]
        self._steps = _with_readers(made)
        self._places = {slot.index: self._place(slot) for slot in made.tensors.values() if slot.value is not None}
        self.eval()
        names = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in identifiers(self.input_names)]

        def forward(*inputs: torch.Tensor, **named: torch.Tensor) -> Any:
            return self._run([*inputs, *(named[x.name] for x in names[len(inputs) :])])

        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        self.forward = forward

    def _place(self, slot: Slot) -> tuple[nn.Module, str]:
        """Register a constant as a buffer; return the module that holds it and its name there."""
        assert slot.value is not None
        owner: nn.Module = self
        path = slot.key.split(".") if slot.key is not None and slot.value.ndim else [f"constant_{slot.index}"]
        if not self._is_free(path):
            path = [slot.other_key]
        for part in path[:-1]:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(path[-1], slot.value, persistent=slot.key is not None and slot.value.ndim > 0)
        return owner, path[-1]

    def _is_free(self, path: Sequence[str]) -> bool:
        owner: nn.Module = self
        for part in path[:-1]:
            if not part or part not in owner._modules and hasattr(owner, part):
                return False
            owner = owner._modules.get(part) or nn.Module()
        return bool(path[-1]) and not hasattr(owner, path[-1])

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run the steps and return the graph's outputs: a tensor, or a tuple of several."""
        tensors = dict(zip(self._inputs, inputs, strict=True))
        for index, (owner, name) in self._places.items():
            tensors[index] = getattr(owner, name)
        for step, last in self._steps:
            args = [x.value if isinstance(x, Constant) else None if x is None else tensors[x] for x in step.args]
            results = step.convert(step.call, *args)
            tensors.update(zip(step.results, [results] if isinstance(results, torch.Tensor) else results, strict=False))
            for index in last:
                del tensors[index]
        outputs = tuple(tensors[index] for index in self._outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def _with_readers(made: Steps) -> list[tuple[Any, list[int]]]:
    """Return the steps that the outputs need, each with the slots that can be freed after it."""
    needed = {index for _, index in made.outputs}
    kept: list[tuple[Any, list[int]]] = []
    for step in reversed(made.steps):
        if needed.isdisjoint(step.results):
            continue
        read = {x for x in step.args if isinstance(x, int)}
        kept.append((step, sorted({*read, *step.results} - needed)))
        needed |= read
    return kept[::-1]


def identifiers(names: Sequence[str]) -> list[str]:
    """Turn names into distinct Python identifiers.

    Other characters become underscores, and a number is appended to a name that occurred before.
    """
    result: list[str] = []
    for name in names:
        stem = re.sub(r"\W", "_", name, flags=re.ASCII) or "input"
        stem = f"_{stem}" if stem[0].isdigit() or stem in ("self", "inputs", "named") or _is_keyword(stem) else stem
        unique, count = stem, 1
        while unique in result:
            unique, count = f"{stem}_{count}", count + 1
        result.append(unique)
    return result


def _is_keyword(name: str) -> bool:
    import keyword

    return keyword.iskeyword(name)
