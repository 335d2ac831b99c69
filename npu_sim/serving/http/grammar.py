"""Grammars that restrict a model's output: JSON, JSON of a schema, tool calls and others, by llguidance.

llguidance (https://github.com/guidance-ai/llguidance) runs an Earley parser and a lexer over the bytes of tokens; it
computes which tokens of a vocabulary of 50,000 are allowed in about a millisecond, whatever the grammar. Grammars are
written in its dialect of Lark. JSON must be on one line with a space after commas and colons, as models usually write
it: if any white space were allowed, a small model might write newlines without end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from npu_compiler.errors import InputError, NPUError
from npu_sim.serving.request import GRAMMAR_FAILED

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class GrammarFilter:
    """The `TokenFilter` of one request, which follows a grammar."""

    def __init__(self, rules: str, matcher: LLMatcher, vocab_size: int) -> None:
        self.rules = rules
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Return whether each token may come next, [vocab].

        End-of-sequence tokens are allowed once the text so far satisfies the grammar.

        Raises:
            NPUError: the grammar became too complex to follow.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def advance(self, token: int) -> None:
        """Note that a token has been chosen. Raises `NPUError` if the grammar does not allow it."""
        self._matcher.consume_token(int(token))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise NPUError(f"{GRAMMAR_FAILED}: {self._matcher.get_error().splitlines()[0]}")


class Grammars:
    """Makes the grammar filters of requests, for one tokenizer.

    Args:
        tokenizer: Contents of the model's tokenizer.json.
        vocab_size: Number of the model's token ids; those beyond the tokenizer's are never allowed.
        eos_ids: Tokens that end a sequence.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._source = (tokenizer, vocab_size, sorted(eos_ids))
        self._limits = LLParserLimits(verbose_errors=False)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's form of the tokenizer, built when it is first needed, in about half a second."""
        tokenizer, vocab_size, eos_ids = self._source
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters."""
        return bytes(self.tokenizer.decode_bytes([token]))

    def filter(self, rules: str, what: str = "JSON schema") -> GrammarFilter:
        """A filter for a grammar, which is a result of `json_rules`, `call_rules` or `guided_rules`.

        Args:
            what: Name for what the request has given, for the error.

        Raises:
            InputError: the grammar is invalid, too large or allows no text, or llguidance does not support it.
        """
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(rules), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InputError(f"the {what} cannot be used: {matcher.get_error().splitlines()[0]}")
        matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise InputError(f"the {what} cannot be used: it allows no text, or is too large ({reason})")
        return GrammarFilter(rules, matcher, self._source[1])


def json_rules(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that fit a schema."""
    return f"start: {_json(schema)}\n"


def guided_rules(regex: str | None, grammar: str | None) -> str:
    """The grammar of texts that match a regular expression, or the request's own grammar in Lark or GBNF.

    One of the arguments is None.

    Raises:
        InputError: the grammar in GBNF cannot be read.
    """
    if grammar is None:
        escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", regex or "").replace("\n", "\\n")
        return f"start: TEXT\nTEXT: /{escaped}/\n"
    try:
        rules: str = any_to_lark(grammar)
    except Exception as error:  # the converter raises errors of many types
        raise InputError(
            f"the grammar cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None
    return rules


def call_rules(calls: Sequence[tuple[str, Mapping[str, Any] | None, str]], *, separator: str | None) -> str:
    """The grammar of texts that are calls of tools (functions).

    Args:
        calls: Text before the arguments of each function, their JSON schema, and the text after them.
        separator: Text between calls; None for a single call.
    """
    names = [f"call_{index}" for index in range(len(calls))]
    rules = [
        f"{name}: {json.dumps(before)} {_json(_ANY_OBJECT if schema is None else schema)} {json.dumps(after)}"
        for name, (before, schema, after) in zip(names, calls, strict=True)
    ]
    start = "start: call" if separator is None else f"start: call ({json.dumps(separator)} call)*"
    return "\n".join([start, f"call: {' | '.join(names)}", *rules, ""])


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _COMPACT})}"
