"""The tokenizer of a served model: encodes prompts and chats, and makes grammars over its tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.llm import Checkpoint
from npu_sim.llm.chat import chat_text
from npu_sim.llm.tokenizer import tokenizer_json
from npu_sim.serving.http.grammar import GrammarFilter, Grammars, guided_rules
from npu_sim.serving.http.tools import ToolFormat, format_of

_TAKEN = {"messages", "tools", "documents", "add_generation_prompt"}


class ModelText:
    """The tokenizer and chat template of a language model. Several threads may use it at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._template: str | None = getattr(self._tokenizer, "chat_template", None)
        self.sampling: Mapping[str, float] = checkpoint.sampling
        self.vocab_size: int = checkpoint.config.vocab_size
        self.tool_format: ToolFormat = format_of(self._template)

    @cached_property
    def grammars(self) -> Grammars:
        eos = self._checkpoint.eos_ids | ({self._tokenizer.eos_token_id} - {None})
        return Grammars(tokenizer_json(self._tokenizer), self.vocab_size, eos)

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters that a token stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a plain text, with the special tokens that the tokenizer adds if `special`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of a chat that `chat_text` has written."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """A conversation as one text, written by the model's chat template.

        Args:
            values: Further variables for the template, such as `enable_thinking`.
            tools: Functions that the model may call, in OpenAI's form. None: no functions.

        Raises:
            InputError: the model has no template, or the template rejects the messages or lacks one of the variables.
        """
        for name in values:
            if name in _TAKEN or not re.search(rf"\b{re.escape(name)}\b", self._template or ""):
                raise InputError(f"the chat template of {self._checkpoint.name} has no variable '{name}'")
        return chat_text(self._checkpoint, messages, tools, **values)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def guided(self, regex: str | None, grammar: str | None) -> GrammarFilter | None:
        """The filter for a regular expression or for a grammar; None if both are None.

        Raises:
            InputError: the expression or the grammar cannot be used.
        """
        if regex is None and grammar is None:
            return None
        return self.grammars.filter(guided_rules(regex, grammar), "grammar" if regex is None else "regular expression")

    def prepare_token_bytes(self) -> None:
        """Compute now, in about a second, the table that `token_bytes` reads, not at its first call.

        Raises:
            InputError: the tokenizer's form does not tell the bytes of its tokens.
        """
        _ = self.grammars.tokenizer

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters."""
        return self.grammars.token_bytes(token)
