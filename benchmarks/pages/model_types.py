"""The page of model types: transformers' causal language models that run, and why the others are refused.

`python -m benchmarks.pages.model_types` writes `docs/model_types.md` from the results of `make test-decoders`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from npu_sim.llm.model_types import ModelType, tried_types

PAGE = Path(__file__).parents[2] / "docs" / "model_types.md"


def document(types: Iterable[ModelType]) -> str:
    """Return the page in Markdown."""
    tried = list(types)
    both = [kind.name for kind in tried if kind.generate and kind.serve]
    one = [kind for kind in tried if kind.generate != kind.serve]
    plain = _listed(kind.name for kind in tried if kind.name in both and len(kind.dtypes) == 1)
    alone = [kind for kind in tried if not kind.eager]
    refused: defaultdict[str, list[str]] = defaultdict(list)
    for kind in alone:
        if not (kind.generate or kind.serve):
            refused[_cause(kind.reason)].append(kind.name)
    lines = [
        "# Model types",
        "",
        "Every model type that transformers has as a causal language model, as a tiny random checkpoint, with a prompt",
        "longer than its window of attention, in float32 and in bfloat16. `npu-sim models` prints the same. Written by",
        "`python -m benchmarks.pages.model_types` from what `make test-decoders` found.",
        "",
        f"**{len(both)} of the {len(alone)} that eager PyTorch runs give the tokens and log probabilities of",
        "transformers**, in `generate` and in `serve`. In bfloat16, the error of log probabilities may be 1.5 times",
        "that of transformers." + (f" Of {plain}, only tokens in float32 agree." if plain else "") + " These are:",
        "",
        _listed(both) + ".",
        "",
        "Nothing of an earlier step can be reused where a module has no cache, or one of another kind than keys,",
        "values and recurrent states; these compute the whole sequence at each step, and have 2²⁹ parameters at most: "
        + (_listed(kind.name for kind in tried if kind.is_whole) or "none")
        + ".",
        "",
    ]
    if one:
        lines += ["By one of the two only:", ""]
        lines += [f"- `{kind.name}` by `{'generate' if kind.generate else 'serve'}`: {kind.reason}" for kind in one]
        lines.append("")
    lines += ["Refused in a sentence:", "", "| reason | model types |", "|---|---|"]
    ordered = sorted(refused.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    lines += [f"| {cause} | {_listed(names)} |" for cause, names in ordered]
    lines += [
        "",
        "Not counted above, since transformers does not run them alone:",
        "",
        "| model type | error |",
        "|---|---|",
    ]
    lines += [f"| `{kind.name}` | {_cause(kind.eager)} |" for kind in tried if kind.eager]
    return "\n".join(lines) + "\n"


def _cause(reason: str) -> str:
    """Return a reason for a refusal, with the model's numbers and names replaced by placeholders."""
    cause = re.sub(r" and \d+ more tensors?", "", reason)
    cause = re.sub(r" \((?:model type )?'[^']*'(?: of the cache)?\)", "", cause)
    cause = re.sub(r"'[^']*'", "…", cause.split("\n")[0])
    return re.sub(r"\d+", "N", cause)[:160].replace("|", "\\|").replace("<", "&lt;")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(document(tried_types()))
