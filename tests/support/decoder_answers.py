"""Greedy tokens and log probabilities of a language model folder: ours by each route, and those of eager transformers.

`judged` compares them: every token is transformers' choice after the same tokens up to a near-tie, and the log
probabilities of the whole vocabulary are those of transformers. In bfloat16, where both round, the bound is the error
of transformers itself: ours from float32 may be `BFLOAT_FACTOR` times as large, and `BFLOAT_SLACK` more. Where
transformers' own steps with a cache differ from its run of all tokens, twice that difference is the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_sim.llm.modules import first_position

PROMPT, NEW, VOCAB = 60, 24, 160
NEAR_TIE = 2e-3  # between two log probabilities
FLOAT_BOUND = 2e-3  # greatest difference of a log probability in float32
LOWEST = -40.0  # log probabilities below say nothing
BFLOAT_FACTOR, BFLOAT_SLACK = 1.5, 0.01
_NO_TOKENIZER = SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: "")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a model type by one route."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Answer:
    """The continuation of a prompt.

    Attributes:
        scores: [tokens, vocab], the log probabilities from which each token was chosen.
    """

    prompt: list[int]
    tokens: list[int]
    scores: NDArray[np.float64]


Route = Callable[..., list[Answer]]
"""A function of a folder, a compute dtype and a device (the CPU by default) → the answers to some of `prompts()`."""


def prompts() -> list[list[int]]:
    drawn = np.random.default_rng(5)
    return [drawn.integers(3, VOCAB, size).tolist() for size in (PROMPT, PROMPT - 23)]


def _log_probabilities(logits: Any) -> NDArray[np.float64]:
    scores: NDArray[np.float64] = torch.as_tensor(logits).double().log_softmax(-1).numpy()
    return scores


class Eager:
    """A folder's model as eager transformers runs it, in float32 and in other dtypes.

    Attributes:
        padding: The padding token if it has a position of its own, so that what follows one has too; None for most.
    """

    def __init__(self, folder: Path, *, strict: bool = False) -> None:
        """Load the model in float32, and run it once.

        Raises any error of transformers, and ValueError if the folder lacks a parameter or holds another one though
        `strict` says that it must not.
        """
        self._folder, self._strict = folder, strict
        self._models = {"float32": self._loaded("float32")}
        self._memo: dict[tuple[str, bool, tuple[int, ...], int], NDArray[np.float64]] = {}
        model = self._models["float32"]
        self.padding = model.config.pad_token_id if first_position(model) else None
        ids = prompts()[0]
        whole, part = (self._run("float32", False, ids[:size])[39] for size in (PROMPT, 40))
        self._is_causal = bool(np.abs(whole - part).max() < NEAR_TIE)

    def _loaded(self, dtype: str) -> Any:
        settings = {"dtype": getattr(torch, dtype), "attn_implementation": "eager", "output_loading_info": True}
        model, report = transformers.AutoModelForCausalLM.from_pretrained(self._folder, **settings)
        if self._strict and (report["missing_keys"] or report["mismatched_keys"] or report["unexpected_keys"]):
            raise ValueError("other parameters")
        return model.eval()

    def continued(self, prompt: list[int]) -> list[int]:
        """The greedy tokens after a prompt in float32."""
        tokens = list[int]()
        while len(tokens) < NEW:
            tokens.append(int(self._run("float32", False, [*prompt, *tokens])[-1].argmax()))
        return tokens

    def _run(self, dtype: str, rounded: bool, ids: list[int]) -> NDArray[np.float64]:
        model = self._models[f"float32 of {dtype}" if rounded else dtype]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        scores = _log_probabilities(logits)
        return scores[-len(ids) :]

    def scores(self, dtype: str, answer: Answer, *, rounded: bool = False) -> NDArray[np.float64]:
        """The log probabilities [tokens, vocab] from which each token of an answer would be chosen.

        Args:
            rounded: Whether to compute in float32 with the weights rounded to the dtype.
        """
        name = f"float32 of {dtype}" if rounded else dtype
        if dtype not in self._models:
            self._models[dtype] = self._loaded(dtype)
        if name not in self._models:
            self._models[name] = self._loaded("float32")
            for path, parameter in self._models[name].named_parameters():
                parameter.data.copy_(self._models[dtype].get_parameter(path))
        key = (dtype, rounded, (*answer.prompt, *answer.tokens), len(answer.prompt))
        if key not in self._memo:
            ids, first = [*answer.prompt, *answer.tokens], len(answer.prompt)
            if self._is_causal:
                self._memo[key] = self._run(dtype, rounded, ids[:-1])[first - 1 :]
            else:
                each = [self._run(dtype, rounded, ids[:end])[-1] for end in range(first, len(ids))]
                self._memo[key] = np.stack(each)
        return self._memo[key]

    def difference_of_steps(self, answer: Answer) -> float:
        """The greatest difference of an answer's log probabilities where transformers computes all tokens one by one.

        With a cache, some modules compute something else than in a run of all tokens: that of `nemotron_h` bounds time
        steps only in the latter.
        """
        rows, cache = list[Any](), None
        with torch.no_grad():
            for token in (*answer.prompt, *answer.tokens[:-1]):
                result = self._models["float32"](torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                rows.append(result.logits[0, -1])
                cache = result.past_key_values
        whole, steps = self.scores("float32", answer), _log_probabilities(torch.stack(rows[len(answer.prompt) - 1 :]))
        return float(np.abs(whole.clip(LOWEST) - steps.clip(LOWEST)).max())


def judged(eager: Eager, dtype: str, answers: list[Answer]) -> Outcome:
    """Compare answers with what eager transformers computes after the same tokens."""
    for answer in answers:
        if len(answer.tokens) != NEW:
            return Outcome("wrong", f"{len(answer.tokens)} tokens instead of {NEW}")
        if not np.array_equal(answer.tokens, answer.scores.argmax(-1)):
            return Outcome("wrong", "its tokens are not those of its greatest log probabilities")
    if dtype != "float32":
        return _compared_in_few_bits(answers, eager, dtype)
    each = [compared(answer, eager) for answer in answers]
    return next((outcome for outcome in each if outcome.kind != "right"), each[0])


def compared(answer: Answer, eager: Eager) -> Outcome:
    """Compare the float32 log probabilities of an answer with those of transformers after the same tokens."""
    expected, tie, bound = eager.scores("float32", answer), "", FLOAT_BOUND
    for place, (token, ours, theirs) in enumerate(zip(answer.tokens, answer.scores, expected, strict=True)):
        gap = theirs.max() - theirs[token]
        if gap > NEAR_TIE:
            return Outcome("wrong", f"token {place} is {token}, not {theirs.argmax()} (gap {gap:.3g})")
        if gap > 0 and not tie:
            tie = f"a near-tie at token {place}"
        error = np.abs(ours.clip(LOWEST) - theirs.clip(LOWEST)).max()
        if not error <= bound:  # NaN is not
            bound = max(bound, 2 * eager.difference_of_steps(answer))
        if not error <= bound:
            return Outcome("wrong", f"a log probability of token {place} is off by {error:.3g}")
        if token == eager.padding:
            break
    return Outcome("right", tie)


def _compared_in_few_bits(answers: list[Answer], eager: Eager, dtype: str) -> Outcome:
    """Compare the errors of both: the median over all tokens, since an expert chosen by rounding changes some much."""
    ours, theirs = [], []
    for answer in answers:
        padding = [place for place, token in enumerate(answer.tokens) if token == eager.padding]
        rows = slice(padding[0] + 1 if padding else NEW)
        exact = eager.scores(dtype, answer, rounded=True).clip(LOWEST)
        try:
            their_scores = eager.scores(dtype, answer)
        except RuntimeError as error:
            return Outcome("fails", f"transformers does not run it in {dtype}: {str(error).splitlines()[0]:.200}")
        for errors, scores in ((ours, answer.scores), (theirs, their_scores)):
            errors += np.sqrt(np.square(scores.clip(LOWEST) - exact).mean(-1))[rows].tolist()
    mine, bound = float(np.median(ours)), float(np.median(theirs))
    if not mine <= BFLOAT_FACTOR * bound + BFLOAT_SLACK:
        return Outcome("wrong", f"its log probabilities are off by {mine:.3g}, those of transformers by {bound:.3g}")
    return Outcome("right")


def generated(folder: Path, dtype: str = "float32", device: str = "cpu") -> list[Answer]:
    """The answer of `LanguageModel` to the first prompt."""
    from npu_sim.llm import LanguageModel, greedy, load_checkpoint

    checkpoint = load_checkpoint(folder, dtype)
    model = LanguageModel(checkpoint, device=device, chunk=64)
    scores: list[NDArray[np.float64]] = []

    def sampler(logits: Any) -> int:
        token = greedy(logits)
        scores.append(_log_probabilities(logits))
        return token

    prompt = prompts()[0]
    tokens = list(model.generate(prompt, NEW, sampler, stop=checkpoint.eos_ids))
    return [Answer(prompt, tokens, np.stack(scores))]


def served(
    folder: Path, dtype: str = "float32", device: str = "cpu", asked: list[list[int]] | None = None, **sizes: int
) -> list[Answer]:
    """The answers of the serving engine to all prompts in one batch.

    Args:
        asked: The prompts. None: those of `prompts()`.
        sizes: Sizes of the `PagedModel`, such as `block_size`, by their names.

    Raises:
        InputError: the engine says that the logits are no numbers.
    """
    from npu_sim.llm import load_checkpoint
    from npu_sim.llm.sampling import NOT_FINITE
    from npu_sim.serving.engine import Engine
    from npu_sim.serving.paged_model import PagedModel
    from npu_sim.serving.request import Request

    checkpoint = replace(load_checkpoint(folder, dtype), load_tokenizer=lambda: _NO_TOKENIZER)
    asked = prompts() if asked is None else asked
    model = PagedModel(checkpoint, device=device, **{"max_tokens": 64, "max_sequences": 2, **sizes})
    with Engine(model, checkpoint) as engine:
        updates = engine.generate([Request(tuple(prompt), NEW, logprobs=model.vocab_size) for prompt in asked])
    answers = []
    for prompt, update in zip(asked, updates, strict=True):
        if update.error:
            raise (InputError if update.error == NOT_FINITE else RuntimeError)(f"the engine says: {update.error}")
        scores = np.array([[x for _, x in sorted(entry.top)] for entry in update.logprobs])
        answers.append(Answer(prompt, list(update.tokens), scores))
    return answers


ROUTES: dict[str, Route] = {"generate": generated, "serve": served}
