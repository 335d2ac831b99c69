"""A checkpoint's tokenizer, as the server uses it: prompts into token ids, token ids into what is shown of them."""

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
    """The text side of a language model. Safe for threads."""

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
        """No token stands for more characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """A plain text's token ids; where `special`, with those that the tokenizer puts before a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of what `chat_text` returns."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """A conversation as the model's chat template writes it.

        Args:
            values: Variables of the template's own, such as `enable_thinking`.

        Raises:
            InputError: there is no template, it rejects the messages, or it has no such variables.
        """
        for name in values:
            if name in _TAKEN or not re.search(rf"\b{re.escape(name)}\b", self._template or ""):
                raise InputError(f"the chat template of {self._checkpoint.name} has no variable '{name}'")
        return chat_text(self._checkpoint, messages, tools, **values)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def guided(self, regex: str | None, grammar: str | None) -> GrammarFilter | None:
        """The filter of a regular expression or of a grammar; None where neither is given.

        Raises:
            InputError: it cannot be used.
        """
        if regex is None and grammar is None:
            return None
        return self.grammars.filter(guided_rules(regex, grammar), "grammar" if regex is None else "regular expression")

    def prepare_token_bytes(self) -> None:
        """Make now what `token_bytes` needs, which takes a second; otherwise the first call does.

        Raises:
            InputError: the tokenizer does not tell what its tokens stand for.
        """
        _ = self.grammars.tokenizer

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters."""
        return self.grammars.token_bytes(token)
