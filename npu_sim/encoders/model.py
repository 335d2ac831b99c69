"""`TextEncoder`: an embedding model or a cross-encoder on a device, called with batches of texts of any lengths.

Texts of a batch are padded on the right to one of a few lengths, and batches to one of a few numbers of rows, so that
few programs are needed. A mask keeps the padding out of attention and pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import npu_sim
from npu_compiler.errors import InputError
from npu_sim.encoders.folder import CrossEncoderFolder, EmbedderFolder
from npu_sim.encoders.modules import Embedder, Scorer, load_transformer, longest_text, tail_of
from npu_sim.encoders.text import EncodedText, EncoderText

if TYPE_CHECKING:
    from npu_compiler.passes.quantize import Quantization
    from npu_runtime import Device

SHORTEST = 16  # tokens to which a batch is padded at least
MOST_TOKENS = 4096  # of a batch, padding included, unless a single text has more
DEFAULT_LENGTH = 2048


class TextEncoder:
    """An encoder on a device. Only one thread at a time may use it.

    Attributes:
        name: The folder's name.
        text: The tokenizer.
        context_length: Maximum tokens of a text.
        vocab_size: Number of token ids.
        dimensions: Length of the vectors; 1 for scores.
    """

    def __init__(
        self,
        folder: EmbedderFolder | CrossEncoderFolder,
        *,
        device: Device | str | None = None,
        dtype: str | None = None,
        quantization: Quantization | None = None,
        context_length: int | None = None,
        max_batch: int = 128,
    ) -> None:
        """Load the weights and compile the program of the smallest batch.

        Args:
            dtype: Compute dtype. None: that of the weights.
            quantization: Format to which the weights of linear layers are quantized; see `npu_sim.compile`. None: they
                are not.
            context_length: Maximum tokens of a text. None: 2048, or the model's own maximum if that is less.
            max_batch: Maximum number of texts in a run.

        Raises:
            InputError: the folder's files do not fit together, the model cannot be compiled, or it does not take texts
                of `context_length` tokens.
            DeviceError: there is no such device.
        """
        self.folder, self.name = folder, folder.name
        self.text = EncoderText(folder)
        transformer: Any = load_transformer(folder, dtype)
        config = transformer.config.get_text_config()
        self.context_length = _context(folder, self.text, longest_text(transformer), context_length)
        self.vocab_size = int(config.vocab_size)
        self._lengths = _doubled(SHORTEST, self.context_length)
        self._max_batch = max_batch
        module: Embedder | Scorer
        if isinstance(folder, CrossEncoderFolder):
            if config.pad_token_id is None:  # by which a head of a decoder finds the last token
                config.pad_token_id = self.text.padding
            module = Scorer(transformer, folder.activation)
        else:
            module = Embedder(transformer, folder.poolings, tail_of(folder))
        self._takes_types, self._pools = module.takes_types, isinstance(module, Embedder)
        example = self._inputs([EncodedText((0,) * min(8, self.context_length))] * 2, 2, SHORTEST)
        batch = torch.export.Dim("batch", min=1, max=max(max_batch, 2))
        length = torch.export.Dim("length", min=SHORTEST, max=max(self._lengths[-1], SHORTEST + 1))
        with torch.no_grad():
            self._compiled = npu_sim.compile(
                module.eval(),
                kwargs=example,
                device=device,
                dynamic_shapes={key: {0: batch, 1: length} for key in example},
                programs=len(self._lengths) * max_batch.bit_length(),
                quantization=quantization,
            )
            self.width = int(self._compiled(**example).shape[1])
        self.dimensions = self.width
        if isinstance(folder, EmbedderFolder) and folder.dimensions is not None:
            self.dimensions = min(folder.dimensions, self.width)

    @property
    def is_embedder(self) -> bool:
        """Whether the results are embeddings; otherwise they are scores of pairs of texts."""
        return self._pools

    def length_of(self, text: EncodedText) -> int:
        """The number of tokens to which a text is padded."""
        return next(length for length in self._lengths if length >= len(text.ids))

    def most_rows(self, length: int) -> int:
        """Maximum number of texts in a run whose texts are padded to `length` tokens."""
        return max(1, min(self._max_batch, MOST_TOKENS // length))

    def run(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        """Encode texts; return [texts, width]: embeddings, or scores of width 1.

        Args:
            texts: As many as `most_rows` allows for the padded length of the longest one; each within the context
                length.
        """
        length = max(map(self.length_of, texts))
        rows = next(size for size in _quadrupled(self.most_rows(length)) if size >= len(texts))
        with torch.no_grad():
            results = self._compiled(**self._inputs(texts, rows, length))
        return results[: len(texts)].numpy()  # type: ignore[no-any-return]

    def prepare(self, report: Callable[[int, int], None]) -> None:
        """Compile now the programs for single texts of all lengths; those for batches are compiled when needed.

        Args:
            report: Called with (programs ready, total programs).
        """
        for done, length in enumerate(self._lengths):
            report(done, len(self._lengths))
            self.run([EncodedText((0,) * min(length, self.context_length))])

    def shortened(self, vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
        """The first `dimensions` elements of each embedding, normalized again if the model normalizes embeddings."""
        cut = vectors[:, :dimensions]
        if dimensions == self.width or not (isinstance(self.folder, EmbedderFolder) and self.folder.normalized):
            return cut
        norms = np.linalg.norm(cut, axis=1, keepdims=True)
        scaled: NDArray[np.float32] = (cut / np.maximum(norms, 1e-12)).astype(np.float32)
        return scaled

    def _inputs(self, texts: Sequence[EncodedText], rows: int, length: int) -> dict[str, torch.Tensor]:
        """The input tensors of a batch by name, padded to `rows` texts of `length` tokens.

        Rows beyond the texts repeat the first text, so that no row is empty.
        """
        ids = np.full((rows, length), self.text.padding, np.int64)
        mask, types = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
        pooled = np.zeros((rows, length), np.float32)
        for row, text in enumerate([*texts, *[texts[0]] * (rows - len(texts))]):
            count = len(text.ids)
            ids[row, :count], mask[row, :count], pooled[row, text.pooled_from : count] = text.ids, 1, 1
            if text.types is not None:
                types[row, :count] = text.types
        arrays: dict[str, NDArray[Any]] = {"input_ids": ids, "attention_mask": mask}
        arrays |= {"pooled": pooled} if self._pools else {}
        arrays |= {"token_type_ids": types} if self._takes_types else {}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _context(
    folder: EmbedderFolder | CrossEncoderFolder, text: EncoderText, positions: int | None, wanted: int | None
) -> int:
    """Maximum number of tokens of a text, from the limits of the model, the folder and the user.

    Args:
        positions: Maximum that the model's position embeddings allow. None: there is no limit.
        wanted: The number that the user has asked for. None: a default.

    Raises:
        InputError: `wanted` is beyond what the model takes.
    """
    said = text.longest if folder.max_length is None else folder.max_length
    most = said if positions is None else min(said, positions)
    if wanted is None:
        return min(most, DEFAULT_LENGTH)
    if wanted > most:
        raise InputError(f"{folder.name} takes texts of at most {most} tokens, not {wanted}")
    return wanted


def _doubled(first: int, last: int) -> list[int]:
    """Sizes from `first` to `last`, each twice the one before, except that the final one is `last`."""
    sizes = takewhile(lambda size: size < last, (first << power for power in range(64)))
    return [*sizes, max(first, last)]


def _quadrupled(last: int) -> list[int]:
    return [*takewhile(lambda size: size < last, (4**power for power in range(32))), last]
