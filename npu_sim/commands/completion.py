"""Completions of command-line arguments after Tab; most complete names, and some complete files by suffix.

No slow module is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def devices(incomplete: str) -> list[str]:
    from npu_runtime import available_devices

    return beginning(incomplete, available_devices())


def cpu_levels(incomplete: str) -> list[str]:
    from npu_runtime.cpu.levels import PORTABLE, this_cpu

    return beginning(incomplete, [level.name for level in this_cpu().levels() if level is not PORTABLE])


def targets(incomplete: str) -> list[str]:
    from npu_sim.commands.targets import target_names

    return beginning(incomplete, target_names())


def fusions(incomplete: str) -> list[str]:
    from npu_compiler.fusion_patterns import FUSIONS

    return beginning(incomplete, FUSIONS)


def tasks(incomplete: str) -> list[str]:
    from npu_sim.extract import TASKS

    return beginning(incomplete, TASKS)


def vision_models(incomplete: str) -> list[str]:
    from npu_sim.vision.models import MODELS

    return beginning(incomplete, MODELS)


def programs(incomplete: str) -> list[str]:
    return _files(incomplete, ".npubin")


def programs_and_modules(incomplete: str) -> list[str]:
    return _files(incomplete, ".npubin", ".npumod", ".onnx")


def ir_files(incomplete: str) -> list[str]:
    return _files(incomplete, ".json", ".onnx")


def ir_and_vision_models(incomplete: str) -> list[str]:
    return [*vision_models(incomplete), *ir_files(incomplete)]


def programs_and_ir(incomplete: str) -> list[str]:
    return _files(incomplete, ".npubin", ".npumod", ".json", ".onnx")


def language_models(incomplete: str) -> list[str]:
    from npu_sim.llm.loading import SHORTHANDS

    files, folders = _paths(incomplete, ".gguf")
    return [*beginning(incomplete, SHORTHANDS), *files, *folders]


def chips(incomplete: str) -> list[str]:
    from npu_model.chip import shipped_chips

    return [*beginning(incomplete, shipped_chips()), *_files(incomplete, ".toml")]


def models(incomplete: str) -> list[str]:
    return [*vision_models(incomplete), *language_models(incomplete), *_files(incomplete, ".npubin", ".json", ".onnx")]


def beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with the text typed so far."""
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, *suffixes: str) -> list[str]:
    """Return completions for files with one of the suffixes: such files and all folders, or nothing if no file matches.

    When the list is empty, the shell completes file names by itself.
    """
    files, folders = _paths(incomplete, *suffixes)
    return files + folders if files else []


def _paths(incomplete: str, *suffixes: str) -> tuple[list[str], list[str]]:
    """Return files with one of the suffixes, and folders, whose paths begin with the incomplete path."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    try:
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return [], []
    hidden = incomplete[len(folder) :].startswith(".")
    visible = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    files = [folder + entry.name for entry in visible if entry.name.endswith(suffixes) and entry.is_file()]
    folders = [f"{folder}{entry.name}/" for entry in visible if entry.is_dir()]
    return beginning(incomplete, files), beginning(incomplete, folders)
