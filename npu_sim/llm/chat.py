"""Text in, text out: the chat template, and token ids turned into text as they arrive."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from npu_compiler.errors import InputError
from npu_sim.llm.sampling import Sampler, greedy
from npu_sim.llm.session import Generation, GenerationStats, LanguageModel

Message = Mapping[str, str]


class StreamDecoder:
    """Turns tokens into text piece by piece; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text

    def flush(self) -> str:
        """What was held back; a character that never became whole is U+FFFD."""
        text = self._pending()
        self._context = self._done = len(self._ids)
        return text

    def _pending(self) -> str:
        """Text of the tokens not yet returned. They are decoded behind the piece before them, because some
        tokenizers drop a leading space."""
        before = self._decode(self._ids[self._context : self._done])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextStream(Iterator[str]):
    """Pieces of text as they are made; `stats` is complete when the iteration has ended."""

    def __init__(self, tokens: Generation, decoder: StreamDecoder) -> None:
        self._tokens = tokens
        self._pieces = self._run(decoder)

    @property
    def stats(self) -> GenerationStats:
        return self._tokens.stats

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, decoder: StreamDecoder) -> Iterator[str]:
        for token in self._tokens:
            if piece := decoder.push(token):
                yield piece
        if piece := decoder.flush():
            yield piece


def chat_prompt(model: LanguageModel, messages: str | Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's reply. A plain string is one message of the user.

    Raises InputError where the tokenizer has no chat template or the template refuses the messages.
    """
    tokenizer = model.checkpoint.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{model.checkpoint.name} has no chat template; complete() continues plain text")
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs of the model's author
        raise InputError(f"the chat template of {model.checkpoint.name} refuses these messages: {error}") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat(
    model: LanguageModel,
    messages: str | Sequence[Message],
    *,
    max_new_tokens: int | None = None,
    sampler: Sampler = greedy,
) -> TextStream:
    """Stream the assistant's reply to a conversation of {"role", "content"} messages, or to one question.

    Raises InputError as `chat_prompt` and `LanguageModel.generate` do.
    """
    tokens = model.generate(chat_prompt(model, messages), max_new_tokens, sampler)
    return TextStream(tokens, StreamDecoder(model.checkpoint.tokenizer))


def complete(
    model: LanguageModel, text: str, *, max_new_tokens: int | None = None, sampler: Sampler = greedy
) -> TextStream:
    """Stream what continues a text, without any chat template. Raises InputError as `LanguageModel.generate` does."""
    tokenizer = model.checkpoint.tokenizer
    return TextStream(model.generate(tokenizer.encode(text), max_new_tokens, sampler), StreamDecoder(tokenizer))
