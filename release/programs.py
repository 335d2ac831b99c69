"""Makes the cache entries that wheels contain, so that the first answer of `smollm2` needs no tracing.

    python -m release.programs build/programs

The entries are the model's compiled step programs for the CPU, its tokenizer and the facts of its file and its module,
as `npu-sim generate` caches them; making them takes PyTorch and transformers. An entry's name is a digest of the
model's metadata and of the sources, so a wheel built from other sources ignores it.
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
    """Replace a folder by one with the cache entries. Raises `InputError` if the model is not installed."""
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
    """Copy a cache entry under its name within a wheel; a JSON entry is sealed again, since its seal has its name."""
    content, name = path.read_bytes(), shipped_name(path.name)
    if path.suffix == ".json":
        facts = unseal(content, path.name)
        assert facts is not None
        content = seal(facts, name)
    (folder / name).write_bytes(content)


def main() -> None:
    """Make the cache entries in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    make_entries(parser.parse_args().folder)


if __name__ == "__main__":
    main()
