"""Screenshots of reports for the documents, taken by headless Chromium.

    python -m benchmarks.screenshots [--folder docs/images]

A decode step of Qwen2.5-1.5B as it was traced, without weights; a ResNet-18 with random weights, measured on the CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Page, sync_playwright
from typer.testing import CliRunner

from benchmarks.dispatches import LAYERS, step_graph
from npu_sim.cli import app

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1280
# A picture's name → the report, the height in pixels, the colour scheme, and what to do before taking it.
PICTURES: dict[str, tuple[str, int, Literal["light", "dark"], Callable[[Page], Any]]] = {
    "overview": ("resnet", 780, "light", lambda page: page.click("#tab-overview")),
    "graph": ("qwen", 800, "light", lambda page: _find(page, "layers.3.mlp.down")),
    "memory": ("resnet", 1120, "light", lambda page: page.click("#tab-memory")),
    "roofline": ("resnet", 900, "dark", lambda page: page.click("#tab-roofline")),
    "timeline": ("resnet", 360, "light", lambda page: page.click("#tab-timeline")),
    "diff": ("diff", 800, "light", lambda page: page.click("#tab-compare")),
}


def _find(page: Page, words: str) -> None:
    page.click("#tab-graph")
    fuse = next(text for text in page.locator("#stage option").all_inner_texts() if text.startswith("fuse"))
    page.select_option("#stage", label=fuse)
    page.fill("#search", words)
    page.press("#search", "Enter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        reports = write_reports(Path(made))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, (report, height, scheme, prepare) in PICTURES.items():
                page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
                page.goto(reports[report].as_uri())
                page.wait_for_selector("#report[aria-busy=false]")
                prepare(page)
                page.wait_for_timeout(500)
                page.screenshot(path=folder / f"report-{name}.png")
                page.close()
            browser.close()


def write_reports(folder: Path) -> dict[str, Path]:
    """The reports that are photographed, by name."""
    from safetensors.torch import save_file

    from npu_sim.extract import extract_ir
    from npu_sim.vision.resnet import random_images, resnet18, seed_weights

    reports = {name: folder / f"{name}.html" for name in ("qwen", "resnet", "diff")}
    qwen, resnet, weights = folder / "qwen.json", folder / "resnet18.json", folder / "resnet18.safetensors"
    qwen.write_text(json.dumps(step_graph(1, LAYERS), default=lambda array: array.tolist()))
    model = resnet18().eval()
    seed_weights(model, 0)
    resnet.write_text(json.dumps(extract_ir(model, (random_images(1, 0),), name="ResNet-18")))
    save_file(model.state_dict(), weights)
    plain = folder / "without-fusions.npubin"
    _npu_sim("report", qwen, "-o", reports["qwen"])
    _npu_sim("report", resnet, "-o", reports["resnet"], "-w", weights, "--device", "cpu")
    _npu_sim("compile", resnet, "-o", plain, "--disable-fusion", "conv_epilogue")
    _npu_sim("diff", resnet, plain, "-o", reports["diff"])
    return reports


def _npu_sim(*args: str | Path) -> None:
    done = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="npu-sim")
    if done.exit_code:
        raise SystemExit(done.output)


if __name__ == "__main__":
    main()
