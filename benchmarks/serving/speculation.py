"""One user's tokens a second with and without drafts, on texts where drafts are often right and where they fail.

    python -m benchmarks.serving.speculation [--model smollm2] [--quantization none] [--device cpu] [--json FILE]

Prompts are made of what Python and this package ship: docstrings to summarize and source files to edit, both continued
greedily; and subjects of stories that are sampled at temperature 1.2, where hardly a draft is right. Every prompt is
answered without and with drafts in turns. A rate is the number of tokens after the first one over the time that they
took, so the prompt does not count; of the rounds the median is taken.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from npu_sim.llm.checkpoint import Checkpoint
    from npu_sim.serving.paged_model import PagedModel
    from npu_sim.serving.request import Request

SUMMARIZED = ("argparse", "decimal", "difflib", "heapq", "logging", "random", "statistics", "zipfile")
EDITED = (
    "npu_sim.serving.handle",
    "npu_sim.llm.engine.step_times",
    "npu_sim.serving.text",
    "npu_sim.serving.text_thread",
    "npu_sim.llm.step_program",
    "npu_sim.llm.prefill_plan",
)
STORIES = ("a lighthouse", "two brothers", "a lost umbrella", "the first snow", "a clockmaker", "an old map")
WORDS = 220  # of a text in a prompt


@dataclass(frozen=True)
class Task:
    """A prompt for one measurement.

    Attributes:
        kind: The kind of prompt.
        subject: The subject that its text is about.
        text: The prompt.
        temperature: Sampling temperature; 0 means greedy decoding.
    """

    kind: str
    subject: str
    text: str
    temperature: float = 0.0


@dataclass(frozen=True)
class PromptResult:
    """Measurements of one prompt.

    Attributes:
        kind: The kind of prompt.
        subject: The subject of the prompt.
        plain, speculating: Tokens a second, without and with speculative decoding.
        drafted, accepted: Number of drafted and of accepted tokens in one answer.
        same: Whether both answers are the same.
    """

    kind: str
    subject: str
    plain: float
    speculating: float
    drafted: int
    accepted: int
    same: bool

    @property
    def gain(self) -> float:
        return self.speculating / self.plain


def tasks() -> list[Task]:
    def beginning(text: str) -> str:
        """Return the first words of a text, with its line breaks."""
        lines, count = [], 0
        for line in text.splitlines():
            count += len(line.split())
            if count > WORDS:
                break
            lines.append(line)
        return "\n".join(lines)

    docs = {name: beginning(inspect.getdoc(import_module(name)) or "") for name in SUMMARIZED}
    sources = {name: beginning(inspect.getsource(import_module(name))) for name in EDITED}
    return [
        *(
            Task("summarize", name, f"{text}\n\nThe most important sentences of this text:\n\n")
            for name, text in docs.items()
        ),
        *(
            Task("edit code", name, f"```python\n{text}\n```\n\nThe same code with a comment added:\n\n```python\n")
            for name, text in sources.items()
        ),
        *(Task("sampled story", name, f"A story about {name}. Once upon a time", 1.2) for name in STORIES),
    ]


def request_of(task: Task, checkpoint: Checkpoint, tokens: int) -> Request:
    from npu_sim.serving.request import Request, SamplingSettings

    prompt = checkpoint.tokenizer.encode(task.text)
    return Request(tuple(prompt), tokens, SamplingSettings(task.temperature, seed=1), stop_ids=frozenset())


def answer(
    model: PagedModel, request: Request, speculate: Literal["ngram"] | None
) -> tuple[float, tuple[int, ...], int, int]:
    """Return tokens a second after the first one, the tokens, and the numbers of drafted and of accepted tokens."""
    from npu_sim.serving.engine import Engine

    with Engine(model, speculate=speculate) as engine:
        tokens: list[int] = []
        begun, first = 0.0, 0
        for update in engine.submit(request):
            if update.tokens and not tokens:
                begun, first = time.perf_counter(), len(update.tokens)
            tokens += update.tokens
        seconds, stats = time.perf_counter() - begun, engine.stats()
    return (len(tokens) - first) / seconds, tuple(tokens), stats.drafted_tokens, stats.accepted_tokens


def measure(
    task: Task, model: PagedModel, checkpoint: Checkpoint, tokens: int, rounds: int, tell: Callable[[str], None]
) -> PromptResult:
    request = request_of(task, checkpoint, tokens)
    plain, speculating = [], []
    for _ in range(rounds):
        rate, right, _, _ = answer(model, request, None)
        plain.append(rate)
        rate, said, drafted, accepted = answer(model, request, "ngram")
        speculating.append(rate)
    result = PromptResult(
        task.kind,
        task.subject,
        statistics.median(plain),
        statistics.median(speculating),
        drafted,
        accepted,
        said == right,
    )
    tell(f"{task.kind} {task.subject}: {result.plain:.1f} → {result.speculating:.1f} tokens/s, {result.gain:.2f} ×")
    return result


def table(results: list[PromptResult]) -> Table:
    result = Table("prompts", "number", "without", "ngram", "gain, median", "least", "accepted", "same answers")
    for kind in dict.fromkeys(each.kind for each in results):
        those = [each for each in results if each.kind == kind]
        gains, drafted = [each.gain for each in those], sum(each.drafted for each in those)
        result.add_row(
            kind,
            str(len(those)),
            f"{statistics.median(each.plain for each in those):.1f}",
            f"{statistics.median(each.speculating for each in those):.1f}",
            f"{statistics.median(gains):.2f}",
            f"{min(gains):.2f}",
            f"{sum(each.accepted for each in those) / drafted:.0%}" if drafted else "",
            str(sum(each.same for each in those)),
        )
    return result


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="as for `npu-sim generate` (default: %(default)s)")
    add("--dtype", help="compute dtype (default: the model's)")
    add("--quantization", default="checkpoint", help="of the weights, as for `npu-sim generate` (default: %(default)s)")
    add("--device", default="cpu", help="(default: %(default)s)")
    add("--tokens", type=int, default=160, help="tokens of an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="answers to each prompt, with and without drafts (default: %(default)s)")
    add("--prompts", type=int, help="prompts of each kind (default: all)")
    add("--json", type=Path, help="write the results to this file")
    return parser


def main() -> None:
    from npu_compiler.files import write_atomically
    from npu_sim.llm import load_checkpoint
    from npu_sim.serving.engine_setup import prepare_steps
    from npu_sim.serving.paged_model import PagedModel

    arguments, console = make_parser().parse_args(), Console()
    checkpoint = load_checkpoint(arguments.model, arguments.dtype, arguments.quantization)
    model = PagedModel(checkpoint, device=arguments.device, context_length=1024, blocks=64)
    prepare_steps(model, lambda done, total: None)
    chosen: list[Task] = []
    for task in tasks():
        if arguments.prompts is None or sum(each.kind == task.kind for each in chosen) < arguments.prompts:
            chosen.append(task)
    measure(chosen[0], model, checkpoint, 32, 1, lambda _: None)  # what runs for the first time, runs slowly
    results = [
        measure(
            task, model, checkpoint, arguments.tokens, arguments.rounds, lambda line: console.print(line, style="dim")
        )
        for task in chosen
    ]
    console.print(table(results))
    if arguments.json:
        write_atomically(arguments.json, json.dumps([asdict(each) for each in results], indent=2).encode())


if __name__ == "__main__":
    main()
