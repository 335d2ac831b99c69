"""The commands that messages give for what is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from npu_compiler import installing
from npu_compiler.installing import install_command, missing_package

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place without a checkout, where pip is."""
    monkeypatch.setattr(installing, "_ROOT", tmp_path)
    return tmp_path


def from_url(monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(installing, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))


def test_from_an_index(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_url(monkeypatch, None)
    assert install_command("torch") == "pip install 'npu-simulation[torch]'"


def test_from_a_wheel_file(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_url(monkeypatch, {"url": "file:///a/b.whl", "archive_info": {}})
    assert install_command("llm") == "pip install 'npu-simulation[llm] @ file:///a/b.whl'"


def test_from_a_checkout(installed: Path) -> None:
    (installed / "pyproject.toml").touch()
    assert install_command("llm") == f"pip install -e '{installed}[llm]'"


def test_an_environment_that_uv_made_has_no_pip(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> SimpleNamespace:
        if name == "pip":
            raise PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda _: None)

    monkeypatch.setattr(installing, "distribution", distribution)
    assert install_command("torch") == "uv pip install 'npu-simulation[torch]'"


def test_setuptools_can_be_imported_after_a_message() -> None:
    code = "from npu_compiler.installing import install_command; install_command('torch'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "module, package, extra",
    [
        ("torch", "torch", "torch"),
        ("torch_ir.export", "pytorch-ir", "torch"),
        ("matplotlib.pyplot", "matplotlib", "charts"),
    ],
)
def test_a_missing_module_names_its_package_and_the_extra(module: str, package: str, extra: str) -> None:
    message = missing_package(ModuleNotFoundError(name=module))
    assert message == f"this needs {package}, which is not installed: {install_command(extra)}"


def test_other_missing_modules_are_left_to_python() -> None:
    assert missing_package(ModuleNotFoundError(name="surely_no_package")) is None


def test_uv_is_held_to_the_versions_that_the_tests_ran_with() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    tested = set((ROOT / "constraints.txt").read_text().splitlines())
    assert set(settings["constraint-dependencies"]) <= tested
    assert {"torch", "transformers"} <= {line.partition("==")[0] for line in settings["constraint-dependencies"]}
