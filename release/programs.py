"""Makes the entries of the cache that a wheel brings: the first answer of `smollm2` then needs no tracing.

    python -m release.programs build/programs

They are its step programs for the CPU, its tokenizer and the facts of its file and its module, as `npu-sim generate`
makes them; it takes PyTorch and transformers. Each is found by a digest of the model's metadata and of the sources, so
that a wheel of other sources passes over it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from npu_compiler.files import seal, unseal
from npu_sim.cache import shipped_name

MODEL = "smollm2"


def make_entries(folder: Path) -> None:
    """Fill a new folder with the entries. Raises `InputError` where the model is not installed."""
    from npu_sim.llm import LanguageModel, load_checkpoint

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NPU_SIM_CACHE"], os.environ["NPU_SIM_NATIVE"], os.environ["NPU_SIM_TUNE"] = cache, "0", "0"
        checkpoint = load_checkpoint(MODEL)
        model = LanguageModel(checkpoint, device="cpu").model
        assert checkpoint.tokenizer is not None
        for tokens in model.chunks:
            model.prefill_program(tokens)
        for path in sorted(Path(cache).glob("*.*")):
            if path.suffix in (".npubin", ".json"):
                bring(path, folder)


def bring(path: Path, folder: Path) -> None:
    """Copy an entry to the folder, under the name by which a wheel brings it; facts have it in their seal."""
    content, name = path.read_bytes(), shipped_name(path.name)
    if path.suffix == ".json":
        facts = unseal(content, path.name)
        assert facts is not None
        content = seal(facts, name)
    (folder / name).write_bytes(content)


def main() -> None:
    """Make them in the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    make_entries(parser.parse_args().folder)


if __name__ == "__main__":
    main()
