"""Tuning: training of all parameters of a quantized model so that it predicts what the original does.

Rounding layer by layer preserves each layer's result; the combined effect of all errors shows only in the model's
output. So the whole model is trained to reproduce the original's probabilities of the next token (distillation): every
weight is a float that is rounded as it is used, and gradients pass the rounding unchanged (Bengio et al., "Estimating
or Propagating Gradients Through Stochastic Neurons", 2013, https://arxiv.org/abs/1308.3432). Scales are trained too, as
in Esser et al., "Learned Step Size Quantization" (2019), https://arxiv.org/abs/1902.08153, and so are parameters that
are not quantized, such as norms and embeddings; zero points are fixed.

The training text consists of as much of the calibration text as is needed and of text that the original model writes: a
short text alone would be memorized.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from npu_compiler.errors import NPUError
from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.quantizing.layerwise import computing_device
from npu_sim.quantizing.rounding import Scales, assemble, codes, exact_codes, round_codes, stored_scales
from npu_sim.quantizing.written_text import in_16_bits, write_text

LENGTH = 512  # tokens of a row of the text
ROWS = 32  # of a step
MOST_WRITTEN = 2048  # rows that the original model writes; more steps than these need use them again
_HELD_OUT, _MOST_HELD_OUT = 8, 128  # of so many rows of the calibration text one is not trained on; at most so many
_READ_AT_ONCE = 8  # rows of which all logits are in memory when nothing is trained
_ROWS_AT_ONCE = 4  # of a step, where the free memory is not known
_LOGITS = 8  # arrays of the logits' size that a step has in memory
_WEIGHT_RATE = 0.01  # a step of a weight, in root mean squares of the layer's rounding errors
_RATE = 3e-4  # a step of a scale, of itself; of parameters that are not in few bits, of their root mean square
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the way from a rounded weight to the original
_WARM_UP = 20  # steps in which the rates grow to these; then they fall to 0 in half a cosine
_LARGEST_GRADIENT = 1.0  # the norm of all gradients
_SMALLEST_SCALE = 0.25  # of what it was
_HOST_COMPILERS = ("gcc", "clang")  # those that Triton looks for to build what launches its kernels
_EXACT_CASTS = {"emulate_precision_casts": True}  # scales are rounded to 16 bits in compiled layers, too


@dataclass(frozen=True)
class Tuned:
    """Result of tuning.

    Attributes:
        arrays: The quantized weights, in the formats that they had.
        others: Name → tensor of every other parameter of the checkpoint, in the dtype of the scales and in main memory.
        divergences: The mean Kullback-Leibler divergence, in nats, of the next token's distribution from the original
            model's, before and after tuning, on calibration text that is held out from training.
    """

    arrays: dict[str, QuantizedArray]
    others: dict[str, torch.Tensor]
    divergences: tuple[float, float]


class Tuner:
    """Tunes quantized versions of a model on a text.

    Args:
        checkpoint: The original model, opened for float32, with weights that are not quantized.
        ids: Token ids of the calibration text, [samples, length]; more text gives better results.
        written: Number of rows of text that the original model writes.
        device: Device for `computing_device`. None: its default.
    """

    def __init__(
        self, checkpoint: Checkpoint, ids: torch.Tensor, written: int = MOST_WRITTEN, device: str | None = None
    ) -> None:
        self._device = computing_device(device)
        self._checkpoint = checkpoint
        self._original = dense_model(checkpoint, self._device).requires_grad_(False)
        length = min(LENGTH, ids.shape[1])
        given = ids[:, : ids.shape[1] // length * length].reshape(-1, length).to(self._device)
        held_out = torch.arange(len(given)) % max(_HELD_OUT, -(-len(given) // _MOST_HELD_OUT)) == 0
        self._held_out, given = given[held_out], given[~held_out]
        self._generator = torch.Generator(self._device).manual_seed(0)
        begun = given if len(given) else self._held_out
        written_rows = write_text(self._original, begun, written, length, self._generator)
        self._text = torch.cat([given, written_rows])

    def tune(
        self, arrays: Mapping[str, QuantizedArray], steps: int, progress: Callable[[int], None] | None = None
    ) -> Tuned:
        """Train the quantized model.

        Args:
            arrays: Initial weights of linear layers by name, all in one format without minimums.
            steps: Number of training steps, each on up to `ROWS` rows of `LENGTH` tokens.
            progress: Called with the number of steps done. None: no progress is reported.

        Raises:
            NPUError: the loss is not finite.
        """
        model = dense_model(self._checkpoint, self._device)
        trained: dict[str, _RoundedLinear] = {}
        groups: list[dict[str, Any]] = []
        for name, array in arrays.items():
            path = name.removesuffix(".weight")
            layer = trained[name] = _RoundedLinear(model.get_submodule(path), array)
            model.set_submodule(path, layer)
            groups += [
                {"params": [layer.weight], "lr": _WEIGHT_RATE * layer.error},
                {"params": [layer.growth], "lr": _RATE},
            ]
        stored = self._checkpoint.state.keys() - arrays.keys()
        others = {name: x for name, x in model.named_parameters(remove_duplicate=False) if name in stored}
        for x in {id(x): x for x in others.values()}.values():  # tied ones once
            groups.append({"params": [x], "lr": _RATE * float(x.detach().square().mean().sqrt())})
        before = self._divergence(model)
        if self._device == "cuda" and find_spec("triton") and any(map(shutil.which, _HOST_COMPILERS)):
            for net in (model, self._original):
                for block in net.model.layers:
                    block.compile(options=_EXACT_CASTS)
        self._train(model, groups, steps, progress)
        dtype = getattr(torch, next(iter(arrays.values())).format.scales)
        narrow = {name: x.detach().to(dtype) for name, x in others.items()}
        for name, x in narrow.items():
            others[name].data.copy_(x)
        after = self._divergence(model)
        return Tuned(
            arrays={name: layer.array() for name, layer in trained.items()},
            others={name: x.cpu() for name, x in narrow.items()},
            divergences=(before, after),
        )

    def _train(
        self, model: Any, groups: list[dict[str, Any]], steps: int, progress: Callable[[int], None] | None
    ) -> None:
        parameters = [parameter for group in groups for parameter in group["params"]]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=self._device == "cuda" or None)
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1.0, (step + 1) / _WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
        )
        at_once = self._rows_at_once(model.config.vocab_size)
        order = torch.randperm(0)
        for step in range(steps):
            if len(order) < min(ROWS, len(self._text)):
                order = torch.randperm(len(self._text), generator=self._generator, device=self._device)
            rows, order = self._text[order[:ROWS]], order[ROWS:]
            losses = []
            for part in rows.split(at_once):
                with in_16_bits(self._device):
                    with torch.no_grad():
                        wanted = self._original(input_ids=part, use_cache=False).logits
                    logits = model(input_ids=part, use_cache=False).logits
                    loss = _divergence(logits, wanted) * (len(part) / len(rows))
                loss.backward()
                losses.append(loss.detach())
            if not bool(torch.stack(losses).isfinite().all()):
                raise NPUError("tuning has failed: the divergence from the original model is not finite")
            nn.utils.clip_grad_norm_(parameters, _LARGEST_GRADIENT)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            rate.step()
            if progress is not None:
                progress(step + 1)

    def _rows_at_once(self, vocabulary: int) -> int:
        """Return the number of rows of a step to compute together, so that memory suffices.

        The logits of both models and what is computed from them may take half of a GPU's free memory.
        """
        if self._device != "cuda":
            return _ROWS_AT_ONCE
        free, _ = torch.cuda.mem_get_info()
        row = _LOGITS * self._text.shape[1] * vocabulary * 4
        fitting = max(1, min(ROWS, free // (2 * row)))
        return 1 << int(math.log2(fitting))  # so that all parts of a step are alike: compiled once

    @torch.no_grad()
    def _divergence(self, model: Any) -> float:
        """Return the mean divergence from the original model on the held-out text."""
        total = 0.0
        with torch.compiler.set_stance("force_eager"):  # other shapes than in training
            for rows in self._held_out.split(_READ_AT_ONCE):
                logits = [net(input_ids=rows, use_cache=False).logits for net in (model, self._original)]
                total += float(_divergence(*logits)) * len(rows)
        return total / len(self._held_out)


class _RoundedLinear(nn.Module):
    """A linear layer whose weight [n, k] is rounded whenever it is used, with trainable scales.

    Args:
        linear: The layer, with its original weight.
        array: The quantized weight to start from.
    """

    def __init__(self, linear: nn.Linear, array: QuantizedArray) -> None:
        super().__init__()
        device, self._format, shape = linear.weight.device, array.format, (*array.scales.shape, 1)
        scale = numpy_to_tensor(array.scales).float()
        zero = torch.full_like(scale, array.format.code_format.zero)
        if array.offsets is not None:
            zero = torch.from_numpy(array.format.code_format.zero_points(array.offsets)).float()
        self._scale, self._zero = (nn.Buffer(x.reshape(shape).to(device)) for x in (scale, zero))
        self.growth = nn.Parameter(torch.zeros(shape, device=device))  # of the scales, of what they were
        self.bias = linear.bias
        original, dequantized = linear.weight.detach(), numpy_to_tensor(array.dequantize()).to(device)
        self.error = float((dequantized - original).square().mean().sqrt())
        self.weight = nn.Parameter(self._start(original, dequantized))

    def scales(self) -> Scales:
        """Return the scales [n, groups, 1], rounded as they are stored; gradients reach the parameter `growth`."""
        scale = self._scale * (1 + self.growth).clamp(min=_SMALLEST_SCALE)
        return Scales(_through(scale, stored_scales(scale, self._format)), self._zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.scales()
        exact = exact_codes(self._by_group(self.weight), scales, self._format)
        rounded = _through(exact, round_codes(exact.detach(), self._format))
        weight = ((rounded - scales.zero) * scales.scale).reshape(self.weight.shape)
        return nn.functional.linear(x, weight, self.bias)

    @torch.no_grad()
    def _start(self, original: torch.Tensor, dequantized: torch.Tensor) -> torch.Tensor:
        """Return the weight to start training from, between the original and the rounded weight.

        It is as near to the original as possible while it still rounds to the same codes. In the middle of the interval
        that rounds to a code, small steps would change nothing.
        """
        scales = self.scales()
        wanted = self._codes(dequantized, scales)
        start = dequantized
        for share in _SHARES:
            moved = dequantized + share * (original - dequantized)
            same = (self._codes(moved, scales) == wanted).reshape(start.shape)
            start = torch.where(same, moved, start)
        return start

    def _codes(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return the codes of the weight, [n, groups, k / groups], as `rounding.codes` does."""
        return codes(self._by_group(weight), scales, self._format)

    def _by_group(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.reshape(*self.growth.shape[:2], -1)

    @torch.no_grad()
    def array(self) -> QuantizedArray:
        """Return the current weight in quantized form."""
        scales = self.scales()
        codes = self._codes(self.weight, scales).reshape(self.weight.shape)
        return assemble(codes, Scales(scales.scale.squeeze(-1), scales.zero.squeeze(-1)), self._format)


def _through(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return the rounded value; the gradient is that of `value`, as if it were not rounded."""
    return value + (rounded - value).detach()


def _divergence(actual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens of the divergence of softmax(actual) from softmax(wanted).

    Args:
        actual, wanted: Logits [rows, length, n].
    """
    logs = [logits.float().flatten(0, 1).log_softmax(-1) for logits in (actual, wanted)]
    return nn.functional.kl_div(logs[0], logs[1], reduction="batchmean", log_target=True)
