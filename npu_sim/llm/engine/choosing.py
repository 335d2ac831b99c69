"""Choosing tokens on the host from an output's logits, for grammars and penalties; and log probabilities."""

from collections.abc import Collection

import numpy as np

from npu_compiler.errors import NPUError
from npu_sim.llm.engine.sequence import TokenFilter, TokenLogprobs
from npu_sim.llm.sampling import Logits, SamplingSettings, choose, choose_filtered, greedy

GRAMMAR_FAILED = "the output cannot follow its grammar"  # begins the error of a sequence whose grammar is to blame


def choose_token(
    logits: Logits,
    filter: TokenFilter | None,
    sampling: SamplingSettings,
    uniform: float,
    banned: Collection[int] = (),
) -> int:
    """The token that `sampling` chooses from the logits, among the tokens that the grammar `filter` allows.

    None as `filter` allows all tokens.

    Args:
        logits: [vocab].
        uniform: A random number from [0, 1).
        banned: Tokens that are not chosen unless the grammar allows no others.

    Raises:
        NPUError: no token is allowed, or the logits are not finite.
    """
    allowed = np.arange(len(logits)) if filter is None else np.flatnonzero(filter.allowed())
    if not len(allowed):
        raise NPUError(f"{GRAMMAR_FAILED}: it allows no further token")
    if len(rest := np.setdiff1d(allowed, np.fromiter(banned, np.int64))):
        allowed = rest
    scores = logits[allowed]
    if sampling.temperature == 0:
        return int(allowed[greedy(scores)])
    if sampling.filters:
        return int(allowed[choose_filtered(scores, uniform, sampling)])
    place = choose(scores, uniform, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return int(allowed[place])


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """The log probability of a token, and those of the `top` most probable ones in descending order.

    Args:
        logits: [vocab].
    """
    highest = logits.max()
    total = float(highest) + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    best = np.argpartition(-logits, top - 1)[:top] if 0 < top < len(logits) else np.arange(len(logits) if top else 0)
    best = best[np.argsort(-logits[best], kind="stable")]
    values = logits[best].astype(np.float64) - total
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    return TokenLogprobs(
        token, float(logits[token]) - float(total), tuple(zip(best.tolist(), values.tolist(), strict=True)), rank
    )
