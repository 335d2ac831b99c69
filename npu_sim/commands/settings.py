"""Settings: dataclasses whose fields are command-line options; their constructors check the values."""

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
    """Return the command with a signature for Typer: a parameter that is a dataclass becomes an option for each field.

    A field declares its option as a parameter does, by `Annotated[type, typer.Option(…)]`. For a dataclass of another
    package, the parameter declares the options of all fields: `Annotated[Settings, {field: typer.Option(…)}]`.
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
    """The device that a command opens, and options of its CPU kernels."""

    device: DeviceName = None
    cpu_level: CPULevel = None
    no_tune: NoTune = False

    def __post_init__(self) -> None:
        """Raise `InputError` if `--no-tune` or `--cpu-level`, which are for the CPU, is given for another device."""
        from npu_compiler.errors import InputError
        from npu_runtime.device import best_device

        name = best_device() if self.device is None else self.device
        for option, given in {"--no-tune": self.no_tune, "--cpu-level": self.cpu_level}.items():
            if given and name != "cpu":
                raise InputError(f"{option} is for --device cpu only; this is {name}")

    def open(self) -> Device:
        """Open the device. Raises `DeviceError` if it cannot be used."""
        return open_device(self.device, self.no_tune)

    def open_for(self, program: CompiledProgram) -> Device:
        """Open the device. Raises `DeviceError` if it cannot be used or the program was compiled for another device."""
        return open_device_for(program, self.device, self.no_tune)

    def open_in_background(self) -> Future[Device]:
        """Start to open the device in a thread and return a future for it."""
        return open_in_background(self.device, self.no_tune)


@dataclass(frozen=True)
class ModelSettings:
    """The dtype, number formats, LoRA adapters and number of tensor-parallel ranks of a language model.

    Attributes:
        adapter: Folders of adapters, as `folder` or `name=folder`. None: there are none.
    """

    dtype: Dtype = None
    quantization: Quantization = "checkpoint"
    activations: Activations = "checkpoint"
    tensor_parallel: TensorParallel = 1
    adapter: Adapters = None

    def __post_init__(self) -> None:
        """Raise `InputError` if a folder holds no LoRA adapter, several adapters lack a name, or two share a name."""
        if not self.adapter:
            return
        from npu_sim.llm.adapters import read_adapter_config

        self.merged_adapter()
        self.named_adapters()
        for _, folder in self._adapters():
            read_adapter_config(Path(folder))

    def merged_adapter(self) -> str | None:
        """Return the folder of the adapter without a name, which is added to the weights; None if there is none.

        Raises:
            InputError: there are several.
        """
        from npu_compiler.errors import InputError

        folders = [value for name, value in self._adapters() if name is None]
        if len(folders) > 1:
            raise InputError("--adapter without a name is added to the weights, which only one adapter can be")
        return folders[0] if folders else None

    def named_adapters(self) -> dict[str, str]:
        """Return name → folder of the named adapters, among which each request chooses.

        Raises:
            InputError: two have the same name, or a name is empty.
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
        """Split each adapter into (name or None, folder); an existing folder with '=' in its name is not split."""
        parts = [
            (None, value) if "=" not in value or Path(value).is_dir() else tuple(value.split("=", 1))
            for value in self.adapter or ()
        ]
        return cast(list[tuple[str | None, str]], parts)


@dataclass(frozen=True)
class SamplingSettings:
    """Temperature, top-k, top-p, seed and repetition penalty with which tokens are chosen from the logits."""

    temperature: Temperature = 0.0
    top_p: TopP = None
    top_k: Annotated[
        int | None,
        typer.Option(min=1, metavar="INTEGER", help="Sample from this many of the most probable tokens."),
    ] = None
    seed: Seed = None
    repetition_penalty: RepetitionPenalty = None

    def __post_init__(self) -> None:
        """Raise `InputError` if `--top-k` or `--top-p` is given for greedy decoding."""
        from npu_compiler.errors import InputError

        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise InputError("--top-k and --top-p are for sampling; give a --temperature above 0")

    def sampler(self) -> Sampler:
        """Return a function that chooses a token from the logits by these settings."""
        from npu_sim.llm import make_sampler

        return make_sampler(self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    def penalized(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the repetition penalty of these settings; unchanged if none was given."""
        from dataclasses import replace

        if self.repetition_penalty is None:
            return checkpoint
        return replace(checkpoint, repetition_penalty=self.repetition_penalty)
