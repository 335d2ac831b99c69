"""The model types of transformers that were tried, with the outcomes that `tests/support/decoders.py` recorded."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

RIGHT = "right"


@dataclass(frozen=True)
class ModelType:
    """The outcome of running a model type of transformers with a tiny random checkpoint.

    Attributes:
        generate, serve: Whether `npu-sim generate` and `npu-sim serve` gave the tokens that transformers gives.
        reason: The error message if one of them refused the model.
    """

    name: str
    generate: bool
    serve: bool
    reason: str


def tried_types() -> Iterator[ModelType]:
    """All model types of transformers with their outcomes, in the order of their names."""
    outcomes = json.loads(files("npu_sim").joinpath("data/model_types.json").read_text("utf-8"))
    return (_model_type(name, outcomes[name]) for name in sorted(outcomes))


def _model_type(name: str, outcomes: Mapping[str, Mapping[str, str]]) -> ModelType:
    right = {route: outcome["kind"] == RIGHT for route, outcome in outcomes.items()}
    reasons = [outcome["detail"] for route, outcome in outcomes.items() if not right[route]]
    reason = (reasons or [""])[0].removeprefix(f"cannot compile model (model type '{name}'): ")
    return ModelType(name, right.get("generate", False), right.get("serve", False), reason)
