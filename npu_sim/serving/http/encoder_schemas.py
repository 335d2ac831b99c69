"""The bodies of requests for embeddings and scores, in the forms of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from npu_sim.serving.http.schemas import Array, Body, NonEmpty

MAX_TEXTS = 2048
Count = Annotated[int, Field(ge=1)]


class _Encoded(Body):
    """Fields that all requests for embeddings and scores have.

    Attributes:
        truncate_prompt_tokens: Maximum number of tokens of a text, whose end is cut off; -1 means the model's maximum.
            None: a text that is too long is an error.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    @model_validator(mode="after")
    def _truncates_to_some_tokens(self) -> _Encoded:
        if self.truncate_prompt_tokens == 0:
            raise ValueError("'truncate_prompt_tokens' must be above 0, or -1 for as many as the model takes")
        return self


class EmbeddingRequest(_Encoded):
    """The body of `/v1/embeddings`."""

    model: str
    input: str | Array[str] | Array[int] | Array[Array[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    prompt_name: str | None = None

    @model_validator(mode="after")
    def _input_is_some(self) -> EmbeddingRequest:
        _check_number("input", self.inputs)
        if empty := [place for place, item in enumerate(self.inputs) if not item]:
            where = "input" if self.input == "" else f"input.{empty[0]}"
            raise ValueError(f"'{where}' is empty; give at least one character or token")
        return self

    @property
    def inputs(self) -> list[Any]:
        """The inputs as a list: texts, or lists of token ids."""
        single = isinstance(self.input, str) or (self.input and isinstance(self.input[0], int))
        return [self.input] if single else [*self.input]


class TextDocument(Body):
    """A document as an object with a text, as Cohere's and Jina's clients may send it."""

    text: str


class RerankRequest(_Encoded):
    """The body of `/v1/rerank`: a query and the documents to rank."""

    query: NonEmpty
    documents: Array[str | TextDocument]
    top_n: Count | None = None
    return_documents: bool | None = None

    @model_validator(mode="after")
    def _documents_are_some(self) -> RerankRequest:
        _check_number("documents", self.documents)
        return self

    @property
    def texts(self) -> list[str]:
        return [item if isinstance(item, str) else item.text for item in self.documents]


class ScoreRequest(_Encoded):
    """The body of `/v1/score`: one text to compare with each of several, or pairs of texts."""

    text_1: NonEmpty | Array[NonEmpty]
    text_2: NonEmpty | Array[NonEmpty]

    @model_validator(mode="after")
    def _texts_are_pairs(self) -> ScoreRequest:
        first, second = (_listed(texts) for texts in (self.text_1, self.text_2))
        _check_number("text_1", first)
        _check_number("text_2", second)
        if len(first) not in (1, len(second)):
            raise ValueError(f"'text_1' has {len(first)} texts and 'text_2' {len(second)}: give one, or as many")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = (_listed(texts) for texts in (self.text_1, self.text_2))
        return [*zip(first * (len(second) // len(first)), second, strict=True)]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _check_number(name: str, texts: Sequence[Any]) -> None:
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise ValueError(f"'{name}' has {len(texts)} texts; give 1 to {MAX_TEXTS}")
