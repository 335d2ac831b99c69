"""`EncoderText`: turns texts and pairs of texts into token ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.encoders.folder import EmbedderFolder, EncoderFolder
from npu_sim.llm.checkpoint import as_input_error


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text, or of a pair of texts, as an encoder takes them.

    Attributes:
        ids: Token ids.
        types: For each token, 0 if it belongs to the first text and 1 for the second. None: the tokenizer gives no
            types.
        pooled_from: Number of leading tokens that are not pooled.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] | None = None
    pooled_from: int = 0


class EncoderText:
    """The tokenizer of an encoder. Several threads may use it at once."""

    def __init__(self, folder: EncoderFolder) -> None:
        """Read the tokenizer of a folder. Raises `InputError` if there is none."""
        from transformers import AutoTokenizer

        self._folder = folder
        with as_input_error(f"the tokenizer of {folder.name} cannot be used"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder.transformer, local_files_only=True, trust_remote_code=False
            )
        self._lock = threading.Lock()  # truncation is a state of the tokenizer
        self.padding: int = self._tokenizer.pad_token_id or 0
        self.longest = int(min(self._tokenizer.model_max_length, 2**31 - 1))

    def encode(self, texts: Sequence[str], prompt: str = "", truncate: int | None = None) -> list[EncodedText]:
        """Tokenize texts, with special tokens added.

        Args:
            prompt: Put before each text.
            truncate: Maximum number of tokens of a text; the rest is cut off. None: nothing is cut.
        """
        encoded = self._encode(truncate, [prompt + text for text in texts])
        if isinstance(self._folder, EmbedderFolder) and prompt and not self._folder.pools_prompt:
            skipped = self._prompt_length(prompt)
            return [replace(text, pooled_from=min(skipped, len(text.ids) - 1)) for text in encoded]
        return encoded

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], truncate: int | None = None) -> list[EncodedText]:
        """Tokenize pairs of texts. `truncate` is as in `encode`; it cuts the longer text of a pair first."""
        return self._encode(truncate, [first for first, _ in pairs], [second for _, second in pairs])

    def _encode(self, truncate: int | None, *texts: list[str]) -> list[EncodedText]:
        if self._folder.lower_case:
            texts = tuple([text.lower() for text in side] for side in texts)
        options = {"truncation": "longest_first", "max_length": truncate} if truncate is not None else {}
        with self._lock:
            try:
                found = self._tokenizer(*texts, padding=False, return_attention_mask=False, verbose=False, **options)
            except Exception as error:  # such as a limit below the number of special tokens
                raise InputError(f"the tokenizer of {self._folder.name} cannot encode this: {error}") from error
        types = found.get("token_type_ids") or [None] * len(found["input_ids"])
        return [
            EncodedText(tuple(ids), None if kinds is None else tuple(kinds))
            for ids, kinds in zip(found["input_ids"], types, strict=True)
        ]

    def _prompt_length(self, prompt: str) -> int:
        """Number of the prompt's tokens, as sentence-transformers counts them: without a final special token."""
        (encoded,) = self._encode(None, [prompt])
        special = encoded.ids and encoded.ids[-1] in self._tokenizer.all_special_ids
        return len(encoded.ids) - bool(special)
