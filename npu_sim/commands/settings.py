"""Settings: dataclasses whose fields are options of commands, checked when they are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from npu_sim.commands.checks import check_text
from npu_sim.commands.options import (
    Activations,
    Adapters,
    CPULevel,
    DeviceName,
    Dtype,
    NoTune,
    Quantization,
    RepetitionPenalty,
    Seed,
    Temperature,
    TensorParallel,
    TopP,
)
from npu_sim.commands.resources import open_device, open_device_for, open_in_background

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device
    from npu_sim.llm import Checkpoint, Sampler


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command for Typer: each parameter that is a dataclass becomes an option for each of its fields.

    A field says which option it is as a parameter does, by `Annotated[type, typer.Option(…)]`. For a dataclass of
    another package the parameter says it for all fields: `Annotated[Settings, {field: typer.Option(…)}]`.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    settings: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        declared = get_type_hints(kind, include_extras=True)
        if more:
            declared = {field: Annotated[declared[field], option] for field, option in more[0].items()}
        chosen = [each for each in fields(kind) if each.name in declared]
        parameters += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=declared[each.name]
            )
            for each in chosen
        ]
        settings[name] = kind, [each.name for each in chosen]  # type: ignore[assignment]

    @wraps(command)
    def run(**values: Any) -> None:
        arguments = {
            name: kind(**{field: values.pop(field) for field in names}) for name, (kind, names) in settings.items()
        }
        command(**values, **arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True)
class DeviceSettings:
    """The device that a command opens."""

    device: DeviceName = None
    cpu_level: CPULevel = None
    no_tune: NoTune = False

    def __post_init__(self) -> None:
        """Raise `InputError` if an option is for another device than the one to be opened."""
        from npu_compiler.errors import InputError
        from npu_runtime.device import best_device

        name = best_device() if self.device is None else self.device
        for option, given in {"--no-tune": self.no_tune, "--cpu-level": self.cpu_level}.items():
            if given and name != "cpu":
                raise InputError(f"{option} is for --device cpu only; this is {name}")

    def open(self) -> Device:
        """The device; it raises `DeviceError` if that cannot be used."""
        return open_device(self.device, self.no_tune)

    def open_for(self, program: CompiledProgram) -> Device:
        """The device, if the program was compiled for it; else it raises `DeviceError`."""
        return open_device_for(program, self.device, self.no_tune)

    def open_in_background(self) -> Future[Device]:
        """The device as a thread opens it, while this one goes on."""
        return open_in_background(self.device, self.no_tune)


@dataclass(frozen=True)
class ModelSettings:
    """The dtype, the formats, the adapters and the ranks of a language model.

    Attributes:
        adapter: Folders of adapters, with or without names. None: there are none.
    """

    dtype: Dtype = None
    quantization: Quantization = "checkpoint"
    activations: Activations = "checkpoint"
    tensor_parallel: TensorParallel = 1
    adapter: Adapters = None

    def __post_init__(self) -> None:
        """Raise `InputError` if a folder holds no adapter, or names and folders contradict each other."""
        if not self.adapter:
            return
        from npu_sim.llm.adapters import read_adapter_config

        self.merged_adapter()
        self.named_adapters()
        for _, folder in self._adapters():
            read_adapter_config(Path(folder))

    def merged_adapter(self) -> str | None:
        """The folder of the adapter that is added to the weights. None: there is none.

        Raises:
            InputError: there are several.
        """
        from npu_compiler.errors import InputError

        folders = [value for name, value in self._adapters() if name is None]
        if len(folders) > 1:
            raise InputError("--adapter without a name is added to the weights, which only one adapter can be")
        return folders[0] if folders else None

    def named_adapters(self) -> dict[str, str]:
        """Name → folder, of the adapters that requests choose.

        Raises:
            InputError: two have one name, or a name is empty.
        """
        from npu_compiler.errors import InputError

        named: dict[str, str] = {}
        for name, folder in self._adapters():
            if name is None:
                continue
            if name in named:
                raise InputError(f"--adapter: two adapters have the name {name!r}")
            if not check_text(name, "the adapter's name"):
                raise InputError(f"--adapter {'=' + folder!r} has no name before '='")
            named[name] = folder
        return named

    def _adapters(self) -> list[tuple[str | None, str]]:
        """The name, if there is one, and the folder of each adapter; a folder's own name may have a '='."""
        parts = [
            (None, value) if "=" not in value or Path(value).is_dir() else tuple(value.split("=", 1))
            for value in self.adapter or ()
        ]
        return cast(list[tuple[str | None, str]], parts)


@dataclass(frozen=True)
class SamplingSettings:
    """The choice of each token from the logits."""

    temperature: Temperature = 0.0
    top_p: TopP = None
    top_k: Annotated[
        int | None,
        typer.Option(min=1, metavar="INTEGER", help="Sample from this many of the most probable tokens."),
    ] = None
    seed: Seed = None
    repetition_penalty: RepetitionPenalty = None

    def __post_init__(self) -> None:
        """Raise `InputError` if greedy decoding is asked for together with options of sampling."""
        from npu_compiler.errors import InputError

        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise InputError("--top-k and --top-p are for sampling; give a --temperature above 0")

    def sampler(self) -> Sampler:
        """The function that draws a token from the logits."""
        from npu_sim.llm import make_sampler

        return make_sampler(self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    def penalized(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the penalty for repeated tokens that was asked for, if one was."""
        from dataclasses import replace

        if self.repetition_penalty is None:
            return checkpoint
        return replace(checkpoint, repetition_penalty=self.repetition_penalty)
