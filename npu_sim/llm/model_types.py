"""The model types of transformers that were tried, with the outcomes that `tests/support/decoders.py` recorded."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

RIGHT = "right"
FAILS = "fails"
"""The outcome where transformers itself does not run its model."""
WHOLE = "computes the whole sequence at each step"
"""A note on outcomes that are right in this way (see `whole`)."""


@dataclass(frozen=True)
class ModelType:
    """The outcome of running a model type of transformers with a tiny random checkpoint.

    Attributes:
        generate, serve: Whether `npu-sim generate` and `npu-sim serve` gave the tokens and log probabilities that
            transformers gives, in float32 and in bfloat16.
        reason: The error message if one of them refused the model.
        eager: The error message if transformers itself does not run it alone, else empty. Where that is so in bfloat16
            only, float32 decides.
        is_whole: Whether each step computes the whole sequence.
        dtypes: The dtypes in which it was tried.
    """

    name: str
    generate: bool
    serve: bool
    reason: str
    eager: str
    is_whole: bool
    dtypes: tuple[str, ...]


def tried_types() -> Iterator[ModelType]:
    """All model types of transformers with their outcomes, in the order of their names."""
    outcomes = json.loads(files("npu_sim").joinpath("data/model_types.json").read_text("utf-8"))
    return (_model_type(name, outcomes[name]) for name in sorted(outcomes))


def _model_type(name: str, outcomes: Mapping[str, Mapping[str, str]]) -> ModelType:
    tried = {route: outcome for route, outcome in outcomes.items() if outcome["kind"] != FAILS}
    reasons = [outcome["detail"] for outcome in tried.values() if outcome["kind"] != RIGHT]
    reason = (reasons or [""])[0].removeprefix(f"cannot compile model (model type '{name}'): ")
    is_whole = any(WHOLE in outcome["detail"] for outcome in tried.values())
    eager = outcomes.get("eager", {}).get("detail", "")
    dtypes = ("float32", *sorted({route.partition(" ")[2] for route in outcomes} - {""}))
    right = _is_right(tried, "generate"), _is_right(tried, "serve")
    return ModelType(name, right[0], right[1], reason, eager, is_whole, dtypes)


def _is_right(tried: Mapping[str, Mapping[str, str]], way: str) -> bool:
    kinds = {outcome["kind"] for route, outcome in tried.items() if route.startswith(way)}
    return kinds == {RIGHT}
