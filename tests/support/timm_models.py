"""Image models of every family of timm, of few layers and random weights, compared with eager PyTorch.

    python tests/support/timm_models.py [--seed 0] [MODEL ...]

A seed draws a model of each family of each of timm's modules. An outcome is `right`, with the share of nodes on the
device and the reasons for the others, or `wrong`, or an error as `decoders.attempt` tells them apart. timm is no
dependency and has to be installed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from typing import Any

import timm
import torch
from decoder_answers import Outcome
from decoders import attempt, print_outcomes
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import npu_sim

SIDES = (64, 96, 128, 160, 192, 224, 256, 384, 448, 512)  # of images; a model gets the smallest that it takes
FEWER = ({"depth": 2}, *({name: (2,) * stages} for name in ("depths", "layers") for stages in (4, 3)), {})
FACTOR = {torch.float32: 4.0, torch.bfloat16: 1.5}  # greatest error against float64, divided by eager PyTorch's
SLACK = {torch.float32: 1e-5, torch.bfloat16: 2e-3}  # added to it, as a share of the results


def chosen(seed: int) -> list[str]:
    """A model of each family of each module: the smallest of three drawn ones."""
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            families[module, re.match("(tf_)?[a-z]*", name)[0]].append(name)
    draw = random.Random(seed)
    return [min(draw.sample(names, min(3, len(names))), key=parameters) for names in families.values()]


def parameters(name: str) -> float:
    with torch.device("meta"), suppress(RuntimeError):  # some read values while they are made
        return sum(x.numel() for x in timm.create_model(name).parameters())
    return inf


def built(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """A random model, of few layers where an option says how many, and the shape of the smallest image it takes."""
    for side, fewer, sized in product(SIDES, FEWER, (False, True)):
        with suppress(Exception):  # whatever a model raises that lacks an option, or for which a size is too small
            model = timm.create_model(name, **fewer, **({"img_size": side} if sized else {})).eval()
            shape = (model.default_cfg["input_size"][0], side, side)
            answer(model, torch.randn(1, *shape))
            unsettle(model)
            return model, shape
    raise ValueError(f"{name} takes none of the sizes {SIDES}")


@torch.no_grad()
def unsettle(model: nn.Module) -> None:
    """Draw parameters and statistics so that each affects the result: many scales of branches begin near 0."""
    for name, x in model.named_parameters():
        is_scale = (x == x.flatten()[:1]).all() and x.any() or name.endswith("weight") and x.ndim < 2
        if name.endswith("bias"):
            x.normal_(0, 0.2)
        elif is_scale:
            x.uniform_(0.5, 1.5)
        else:
            x.normal_(0, 1.2 * (x.numel() / len(x)) ** -0.5 if name.endswith("weight") else 0.5)
    for name, x in model.named_buffers():
        if name.endswith("running_mean"):
            x.normal_(0, 0.2)
        elif name.endswith("running_var"):
            x.uniform_(0.5, 1.5)


@torch.no_grad()
def answer(function: Callable[..., Any], x: Tensor) -> Tensor:
    """All results of a function, flat, in float64."""
    parts = (part if isinstance(part, Tensor) else part.astype(float) for part in pytree.tree_leaves(function(x)))
    return torch.cat([torch.as_tensor(part).double().flatten() for part in parts])


def outcome(route: str, model: nn.Module, x: Tensor) -> Outcome:
    """Whether a route's error is not much greater than that of eager PyTorch, both against float64."""
    eager = answer(model, x)
    exact, _ = answer(model.double(), x.double()), model.to(x.dtype)
    if route == "torch.compile":
        ours, notes = answer(torch.compile(model, backend="npu_sim"), x), []
    else:
        compiled = npu_sim.compile(model, (x,), device="cpu")
        ours, report = answer(compiled, x), compiled.report()
        off = Counter(f"{node.op}: {node.reason}" for program in report.programs for node in program.off_device)
        notes = [f"{report.device_share:.1%} on the device", *off, *report.graph_breaks]
        if route == "saved":
            with tempfile.NamedTemporaryFile(suffix=".npumod") as file:
                compiled.save(file.name)
                ours = answer(npu_sim.load(file.name, device="cpu"), x)
    error, bound, scale = (part.square().mean().sqrt().item() for part in (ours - exact, eager - exact, exact))
    detail = "; ".join([f"error {error / scale:.1e}, PyTorch's {bound / scale:.1e}", *notes])
    return Outcome("right" if error <= FACTOR[x.dtype] * bound + SLACK[x.dtype] * scale else "wrong", detail)


def tried(name: str, seed: int) -> dict[str, Outcome]:
    """The outcomes of a model in each dtype, for one image or three, each by a drawn route."""
    torch.manual_seed(seed)
    draw, (model, shape) = random.Random(f"{name} {seed}"), built(name)
    outcomes = {}
    for dtype in FACTOR:
        x, route = torch.randn(draw.choice((1, 3)), *shape), draw.choice(("compile", "saved", "torch.compile"))
        call = partial(outcome, route, model.to(dtype), x.to(dtype))
        outcomes[f"{tuple(x.shape)} {dtype} {route}"] = attempt(call)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    given = parser.parse_args()
    drawn = given.names or chosen(given.seed)
    sys.exit(print_outcomes((name, partial(tried, name, given.seed)) for name in drawn))
