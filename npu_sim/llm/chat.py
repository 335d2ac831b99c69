"""Text generation: the chat template, conversations, and streaming detokenization."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from npu_compiler.errors import InputError
from npu_runtime.profile_trace import Span
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.sampling import Sampler, greedy
from npu_sim.llm.session import Generation, GenerationStats, LanguageModel

Message = Mapping[str, Any]


class StreamDecoder:
    """Incremental detokenization: text is returned up to the last character all of whose bytes have arrived."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes, which may be empty."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text

    def flush(self) -> str:
        """The text not returned yet; an incomplete character becomes U+FFFD."""
        text = self._pending()
        self._context = self._done = len(self._ids)
        return text

    def _pending(self) -> str:
        """The text of the tokens not yet returned.

        They are decoded together with the tokens before them, because some tokenizers drop a leading space.
        """
        before = self._decode(self._ids[self._context : self._done])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextStream(Iterator[str]):
    """The text of one generation, as an iterator of pieces; `stats` is complete once the iterator has ended."""

    def __init__(self, tokens: Generation, decoder: StreamDecoder) -> None:
        self._tokens = tokens
        self._pieces = self._run(decoder)

    @property
    def stats(self) -> GenerationStats:
        """Token counts and times so far."""
        return self._tokens.stats

    @property
    def spans(self) -> list[Span]:
        """Times of the generation's parts for a trace; see `Generation`."""
        return self._tokens.spans

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, decoder: StreamDecoder) -> Iterator[str]:
        for token in self._tokens:
            if piece := decoder.push(token):
                yield piece
        if piece := decoder.flush():
            yield piece


class Conversation:
    """A chat with a model: a system message, and the user's messages with the replies to them.

    Attributes:
        messages: {"role", "content"} messages in order.
        stats: Statistics of the latest reply.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        sampler: Sampler = greedy,
    ) -> None:
        """Begin a chat. `max_new_tokens` and `sampler` hold for every reply, as in `LanguageModel.generate`.

        `system` is the text of the system message; None: there is none.
        """
        self.model = model
        self.stats = GenerationStats()
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._limit, self._sampler = max_new_tokens, sampler
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages: list[Message] = list(self._system)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Stream the reply to a user message; both are added to the conversation.

        If the iterator is closed early, the text yielded so far is kept as the reply. After an error before the reply's
        first character, the conversation is as it was before.

        Raises:
            InputError: for the reasons of `chat`, or the conversation is longer than the KV cache.
        """
        reply, ended = "", False
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = encode_chat(self.model.checkpoint, self.messages)
            check_fits(prompt, self.model.cache_length)
            tokens = self.model.generate(prompt, self._limit, self._sampler)
            self.stats = tokens.stats
            stream = TextStream(tokens, StreamDecoder(self.model.checkpoint.tokenizer))
            for piece in stream:
                reply += piece
                yield piece
            ended = True
        finally:
            if reply or ended:
                self.messages.append({"role": "assistant", "content": reply})
            else:
                self.messages.pop()

    @property
    def is_full(self) -> bool:
        """Whether the latest reply ended because there was no room left in the KV cache."""
        return filled_cache(self.stats, self._limit)


def filled_cache(stats: GenerationStats, max_new_tokens: int | None) -> bool:
    """Whether a generation with the limit `max_new_tokens` (None: no limit) ended because the KV cache was full."""
    return stats.finish_reason == "length" and stats.new_tokens != max_new_tokens


def check_fits(prompt_ids: Sequence[int], cache_length: int) -> None:
    """Raise `InputError` if a KV cache of that many tokens cannot hold the prompt."""
    if len(prompt_ids) > cache_length:
        raise InputError(
            f"the prompt has {len(prompt_ids)} tokens, but the KV cache holds {cache_length}; "
            "choose a larger cache_length (--cache-length)"
        )


def chat_prompt(model: LanguageModel, messages: str | Sequence[Message]) -> list[int]:
    """The token ids of a chat, as `encode_chat` computes them for the model's checkpoint."""
    return encode_chat(model.checkpoint, messages)


def encode_chat(
    checkpoint: Checkpoint,
    messages: str | Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **values: Any,
) -> list[int]:
    """The token ids of a conversation: the text that `chat_text` returns for these arguments, encoded.

    Args:
        tools: See `chat_text`. None: no functions.
    """
    text = chat_text(checkpoint, messages, tools, **values)
    ids: list[int] = checkpoint.tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat_text(
    checkpoint: Checkpoint,
    messages: str | Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **values: Any,
) -> str:
    """A conversation up to where the assistant's reply begins, as the chat template writes it, special tokens included.

    Args:
        messages: {"role", "content"} messages, or the text of a single user message.
        tools: Functions that the model may call, in OpenAI's form, for a template that uses them. None: no functions.
        values: Further variables for the template, such as `enable_thinking`.

    Raises:
        InputError: the tokenizer has no chat template, or the template rejects the messages.
    """
    tokenizer = checkpoint.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{checkpoint.name} has no chat template; use complete() (--no-chat) to continue plain text")
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
    try:
        options = {"add_generation_prompt": True, "tokenize": False, **({"tools": list(tools)} if tools else {})}
        return str(tokenizer.apply_chat_template(conversation, **{**values, **options}))
    except Exception as error:  # templates are code by the model's author and can raise anything
        raise InputError(f"the chat template of {checkpoint.name} rejects these messages: {error}") from error


def chat(
    model: LanguageModel,
    messages: str | Sequence[Message],
    *,
    max_new_tokens: int | None = None,
    sampler: Sampler = greedy,
) -> TextStream:
    """Stream the assistant's reply to a conversation.

    Args:
        messages: See `encode_chat`.
        max_new_tokens, sampler: See `LanguageModel.generate`.

    Raises:
        InputError: see `encode_chat` and `LanguageModel.generate`.
    """
    tokens = model.generate(chat_prompt(model, messages), max_new_tokens, sampler)
    return TextStream(tokens, StreamDecoder(model.checkpoint.tokenizer))


def complete(
    model: LanguageModel, text: str, *, max_new_tokens: int | None = None, sampler: Sampler = greedy
) -> TextStream:
    """Stream the continuation of a text without a chat template. Arguments and errors: see `LanguageModel.generate`."""
    tokenizer = model.checkpoint.tokenizer
    return TextStream(model.generate(tokenizer.encode(text), max_new_tokens, sampler), StreamDecoder(tokenizer))
