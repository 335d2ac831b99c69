"""Tokenizers of Hugging Face folders and GGUF files.

A tokenizer that was used before is read without transformers, whose import takes seconds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_runtime.cache_folder import source_digest
from npu_sim.cache import cached_facts

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Methods that a tokenizer class must not override, so that `StoredTokenizer` is equivalent to it.
_METHODS = ("encode", "_encode_plus", "decode", "_decode", "apply_chat_template")


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Without one, transformers raises an exception, which may be of any type."""
    return _stored(_digests(folder), lambda: _load_whole(folder))


def load_gguf_tokenizer(path: Path, digest: str) -> Any:
    """The tokenizer in a GGUF file's metadata; errors as in `load_tokenizer`.

    Args:
        digest: Hash of the file's metadata, by which the tokenizer is cached.
    """

    def load() -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)

    # transformers also reads what tokenizer files lie beside the GGUF file.
    return _stored({**_digests(path.parent), "gguf": digest}, load)


def _stored(digests: Mapping[str, str], load: Callable[[], Any]) -> Any:
    """A `StoredTokenizer` in place of the tokenizer that `load` returns, or that tokenizer if none can replace it.

    What the former needs is kept in the cache, so that `load` is called at the first time only.

    Args:
        digests: File name → hash of the contents, for everything that `load` reads.
    """
    key, packages = [digests, source_digest("npu_sim.llm")], ("transformers", "tokenizers")
    facts = cached_facts("tokenizer", key, lambda: _find_facts(load()), packages)
    return load() if facts is None else StoredTokenizer(facts, load)


def _digests(folder: Path) -> dict[str, str]:
    """File name → SHA-256 of the contents, of the files in a folder from which transformers reads a tokenizer."""
    present = [path for path in map(folder.joinpath, FILES) if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in present}


def _load_whole(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _find_facts(tokenizer: Any) -> dict[str, Any] | None:
    """Data by which `StoredTokenizer` can replace a transformers tokenizer; None if it cannot."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    own = [name for name in _METHODS if getattr(kind, name, None) is not getattr(plain, name, None)]
    if own or not issubclass(kind, plain) or not isinstance(tokenizer.chat_template, str | None):
        return None
    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "eos_token_id": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }


class StoredTokenizer:
    """A replacement for a transformers tokenizer: encodes a text, decodes and lists ids, and renders chat messages.

    Args:
        facts: Result of `_find_facts`.
        load: Loads the transformers tokenizer.
    """

    def __init__(self, facts: Mapping[str, Any], load: Callable[[], Any]) -> None:
        from tokenizers import Tokenizer

        self._rust = Tokenizer.from_str(facts["tokenizer"])
        self._rust.no_truncation()
        self._rust.no_padding()
        self._special_tokens = facts["special_tokens"]
        self._load = load
        self.eos_token_id: int | None = facts["eos_token_id"]
        self.chat_template: str | None = facts["chat_template"]

    @cached_property
    def whole(self) -> Any:
        """The transformers tokenizer, loaded when it is first needed."""
        return self._load()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def get_vocab(self) -> dict[str, int]:
        """Return token → id, of all tokens."""
        return dict(self._rust.get_vocab())

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        if clean_up_tokenization_spaces:
            return str(self.whole.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=True))
        return str(self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **values: Any,
    ) -> str:
        """Return the conversation as text.

        If the template fails in our sandbox, transformers renders it or raises its own error.

        Args:
            tools: Functions that the model may call, in OpenAI's form. None: no functions.
            values: Further variables for the template, such as `enable_thinking`.

        Raises:
            InputError: the template takes too long, or its text is too long.
        """
        from jinja2 import TemplateError

        from npu_sim.llm.chat_template import render

        try:
            if tokenize or not conversation or self.chat_template is None:
                raise ValueError("only transformers can do this")
            standard = {
                "messages": [dict(message) for message in conversation],
                "add_generation_prompt": add_generation_prompt,
                "tools": tools,
                "documents": None,
                **self._special_tokens,
            }
            return render(self.chat_template, {**values, **standard})
        except (TemplateError, ValueError, TypeError, ArithmeticError, LookupError):
            options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": tokenize}
            return str(self.whole.apply_chat_template(list(conversation), **options, **values))


def tokenizer_json(tokenizer: Any) -> str:
    """The contents of a tokenizer.json file for a tokenizer, which the library `tokenizers` can read.

    Raises:
        InputError: the tokenizer is not based on that library.
    """
    if isinstance(tokenizer, StoredTokenizer):
        return str(tokenizer._rust.to_str())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the tokenizer {type(tokenizer).__name__} cannot be written as a tokenizer.json")
    return str(backend.to_str())
