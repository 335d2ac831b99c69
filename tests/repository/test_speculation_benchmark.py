"""The benchmark of drafts: its texts, what it measures of an engine, and its table."""

from __future__ import annotations

from collections import Counter
from io import StringIO

from rich.console import Console
from toy_batches import VOCAB, ToyModel, alone

from benchmarks.serving.speculation import EDITED, STORIES, SUMMARIZED, PromptResult, answer, make_parser, table, tasks
from npu_sim.serving.request import Request


def test_every_text_is_found_and_no_two_are_the_same() -> None:
    found = tasks()
    kinds = {"summarize": len(SUMMARIZED), "edit code": len(EDITED), "sampled story": len(STORIES)}
    assert Counter(task.kind for task in found) == kinds
    assert len({task.text for task in found}) == len(found) and min(len(task.text) for task in found) > 20


def test_an_answer_is_the_models_own_with_and_without_drafts() -> None:
    model = ToyModel(blocks=60, context_length=200)
    request = Request((1, 2, 3) * 4, 60, stop_ids=frozenset())
    for speculate in (None, "ngram"):
        rate, tokens, drafted, accepted = answer(model, request, speculate)  # type: ignore[arg-type]
        assert rate >= 0 and tokens == alone(request, 200) and max(tokens) < VOCAB
        assert 0 <= accepted <= drafted and (drafted == 0 or speculate is not None)


def test_the_table_has_the_median_and_the_least_gain_of_each_kind() -> None:
    found = [
        PromptResult("edit code", name, 10.0, rate, 8, 6, True)
        for name, rate in (("a", 12.0), ("b", 20.0), ("c", 15.0))
    ]
    console = Console(file=StringIO(), width=120)
    console.print(table([*found, PromptResult("sampled story", "d", 10.0, 9.8, 0, 0, False)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(value in text for value in ("1.50", "1.20", "75%", "0.98"))


def test_its_help_names_the_model() -> None:
    assert make_parser().parse_args([]).model == "smollm2"
