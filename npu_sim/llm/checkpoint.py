"""`Checkpoint`: a language model on disk, whose config, tensors and tokenizer are each read when first used."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_compiler.installing import install_command
from npu_runtime.pieces import in_pieces
from npu_sim.lazy_tensors import LazyTensors

if TYPE_CHECKING:
    from npu_sim.llm.adapters import Adapter

_PIECE = 2**18  # elements: their temporary arrays stay in a core's cache


# Attributes that are stored even where a config lacks them, so that looking them up never reads the config.
_LOOKED_UP = (
    "quantization_config",
    "dtype",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "model_type",
    "head_dim",
    "num_key_value_heads",
)


def stored_fields(config: Any) -> dict[str, Any]:
    """The fields of a transformers config that a `StoredConfig` keeps, as JSON data."""
    fields = config.to_dict()
    text = config.get_text_config(decoder=True)  # the config itself, where it has no part for text
    for name in _LOOKED_UP:
        try:
            fields[name] = getattr(config, name, None)
            if fields[name] is None:
                fields[name] = getattr(text, name, None)
        except Exception:  # transformers refuses to say what differs between layers
            fields[name] = None
    return {**fields, "dtype": fields["dtype"] and str(fields["dtype"])}


class StoredConfig:
    """The fields of a transformers config that a start needs, cached on disk by an earlier one.

    Any other attribute is read from the transformers config, which takes seconds to import and most starts never need.

    Attributes:
        whole: The transformers config, read when it is first used.

    Args:
        changes: Fields that replace those of the transformers config.
    """

    def __init__(
        self, fields: Mapping[str, Any], read: Callable[[], Any], changes: Mapping[str, Any] | None = None
    ) -> None:
        self._changes = dict(changes or {})
        self._fields = {**fields, **self._changes}
        self._read = read

    @cached_property
    def whole(self) -> Any:
        config = self._read()
        for name, value in self._changes.items():
            setattr(config, name, value)
        return config

    def changed(self, **changes: Any) -> "StoredConfig":
        """Return a copy of the config with other values of some fields."""
        return StoredConfig(self._fields, self._read, {**self._changes, **changes})

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copy and pickle look such names up before __init__ has run
        return self._fields[name] if name in self._fields else getattr(self.whole, name)


@dataclass
class Checkpoint:
    """A language model on disk.

    Attributes:
        name: Used in messages and file names.
        config: The transformers config, or a `StoredConfig` with the needed fields of one.
        state: Hugging Face parameter name → tensor, array or `QuantizedArray`. The mapping reads a tensor when it is
            looked up.
        dtype: The compute dtype: `bfloat16`, `float16` or `float32`.
        load_tokenizer: Opens the tokenizer; raises if there is none.
        eos_ids: End-of-sequence token ids from the model's config and generation config.
        repetition_penalty: Setting of the generation config: it divides the positive logits of tokens that have
            occurred, and multiplies the negative ones. 1 changes nothing.
        sampling: Sampling settings of the generation config, by its names. The server uses them for requests that set
            none.
        unsupported: Other settings of the generation config that change the chosen tokens, such as
            `no_repeat_ngram_size=3`.
        inv_freq_divisors: [head dim / 2], divides the rotary frequencies: Llama 3's RoPE scaling as GGUF stores it.
            None without such scaling.
        quantization: Storage formats of weights in programs: parameter name → format, for weights that the checkpoint
            itself stores quantized; or the name of a format (see `named_format`) to which all weights are rounded when
            they are loaded. None: all weights are in the compute dtype.
        merged: LoRA adapter that is added to the weights when they are loaded. None: no adapter is.
        adapters: Name → LoRA adapter that a request may choose, in the order in which their matrices are stacked.
        kv_cache: `int8` or `fp8`, to which keys and values are quantized, with a scale for each token and head. None:
            the KV cache is in the compute dtype.
        opened_by: `module:function` and the arguments with which another process opens the same checkpoint. None: no
            other process can open it.
    """

    name: str
    config: Any
    state: Mapping[str, Any]
    dtype: str
    load_tokenizer: Callable[[], Any]
    eos_ids: frozenset[int] = frozenset()
    repetition_penalty: float = 1.0
    sampling: Mapping[str, float] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    inv_freq_divisors: np.ndarray | None = None
    quantization: str | Mapping[str, QuantizedFormat] | None = None
    merged: "Adapter | None" = None
    adapters: "Mapping[str, Adapter]" = field(default_factory=dict)
    kv_cache: str | None = None
    opened_by: tuple[str, tuple[Any, ...]] | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or a `StoredTokenizer` in its place.

        Raises:
            InputError: the checkpoint has none, or it cannot be read.
        """
        with as_input_error(f"cannot read the tokenizer of {self.name}"):
            return self.load_tokenizer()

    def end_ids(self) -> frozenset[int]:
        """End-of-sequence token ids: those of the model's configs and, if there is one, of the tokenizer."""
        try:
            return self.eos_ids | as_ids(self.tokenizer.eos_token_id)
        except InputError:
            return self.eos_ids


def as_ids(value: Any) -> frozenset[int]:
    """The token ids in a config field, which holds one, several or none.

    Raises:
        InputError: the field holds anything else.
    """
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(type(item) is int for item in ids):
        raise InputError(f"{value!r:.80} is neither a token id nor a list of token ids")
    return frozenset(ids)


def vocabulary_size(checkpoint: Checkpoint) -> int:
    """Number of token ids. Raises InputError if the config does not say it."""
    size = checkpoint.config.vocab_size
    if type(size) is not int:
        kind = checkpoint.config.model_type
        raise InputError(f"the config of {checkpoint.name} (model type '{kind}') has no vocab_size")
    return size


@contextlib.contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """Turn any error raised inside into an InputError of one sentence, which begins with `what`."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{what}: it needs {error.name}, which is not installed: {install_command('llm')}") from error
    except Exception as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise InputError(f"{what}: {said}") from error


class Widened(LazyTensors[Any]):
    """A checkpoint's tensors with quantized ones dequantized, each when it is looked up.

    Dequantized tensors are in bfloat16 if that is the compute dtype, else in float32, so that a later cast can tell
    which values do not fit: bfloat16 has float32's range, float16 has not.
    """

    def __init__(self, state: Mapping[str, Any], dtype: str) -> None:
        super().__init__(state)
        self._state = state
        self._dtype = "bfloat16" if dtype == "bfloat16" else "float32"

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        return widened(value, self._dtype) if isinstance(value, QuantizedArray) else value


def widened(value: QuantizedArray, dtype: str) -> np.ndarray:
    """Dequantize a matrix to a float dtype, by several threads that take a piece at a time."""
    result = np.empty(value.shape, numpy_dtype(dtype))

    def convert(piece: slice) -> None:
        with np.errstate(all="ignore"):  # NaN is for whoever loads the weights to report
            result[piece] = value.dequantize(piece)

    in_pieces(convert, value.shape[0], max(1, _PIECE // value.shape[1]))
    return result
