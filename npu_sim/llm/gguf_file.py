"""GGUF files as checkpoints: llama.cpp's metadata, tensor names and layouts, converted back to Hugging Face's.

transformers can load GGUF files too, but it builds the whole model and needs the package `accelerate`. Here each tensor
is converted when it is looked up, and the config that transformers derives from the metadata is cached.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_runtime.cache_folder import source_digest
from npu_sim.cache import cached_facts
from npu_sim.llm.checkpoint import Checkpoint, StoredConfig, as_input_error, stored_fields
from npu_sim.llm.gguf_architectures import Architecture, architecture_of, config_fields, whole_number
from npu_sim.llm.gguf_reader import GGUFFile, read_gguf
from npu_sim.llm.gguf_tensors import GGUFTensors, Source, dequantized, find_sources
from npu_sim.llm.graph import INV_FREQ, meta_model
from npu_sim.llm.tokenizer import load_gguf_tokenizer

_DIVISORS = "rope_freqs.weight"
_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def load_gguf(path: Path, dtype: str) -> Checkpoint:
    """Open a GGUF file as a checkpoint with the compute dtype `dtype`.

    Raises:
        InputError: the file is damaged or contradicts itself; or its architecture, its rotary scaling or a tensor's
            type is not supported.
    """
    file = read_gguf(path)
    row = architecture_of(file)
    tensors = dict(file.tensors)
    divisors = tensors.pop(_DIVISORS, None)
    stored = {field: tensors.pop(name) for field, name in _FACTORS.items() if name in tensors}
    if stored and len(stored) < len(_FACTORS):
        raise InputError("the GGUF file has rotary factors for short or for long contexts, but not for both")
    factors = {field: dequantized(tensor, "float32").ravel().tolist() for field, tensor in stored.items()}
    file = GGUFFile(file.metadata, file.arrays, tensors, file.digest)
    facts_key = [file.digest, factors, source_digest("npu_sim.llm")]
    facts = cached_facts("gguf", facts_key, lambda: _facts(file, row, factors), ("transformers", "gguf"))
    if divisors is not None and divisors.shape != (facts["frequencies"],):
        raise InputError(
            f"'{_DIVISORS}' has the shape {list(divisors.shape)}, but the model has {facts['frequencies']} frequencies"
        )
    sources = {
        name: Source(tuple(names), kind, tuple(shape), tuple(sizes))
        for name, (names, kind, shape, sizes) in facts["sources"].items()
    }
    state = GGUFTensors(tensors, sources, dtype)
    eos = {whole_number(file, f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot")}
    return Checkpoint(
        name=path.stem,
        config=StoredConfig(facts["config"], lambda: _config(facts["settings"])),
        state=state,
        dtype=dtype,
        load_tokenizer=lambda: load_gguf_tokenizer(path, file.digest),
        eos_ids=frozenset(token for token in eos if token is not None),
        inv_freq_divisors=None if divisors is None else dequantized(divisors, "float32").ravel(),
        quantization=state.formats,
    )


def _config(settings: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings)


def _facts(file: GGUFFile, row: Architecture, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """A file's config, and the sources of the module's parameters in it, as JSON data to cache.

    Raises:
        InputError: the metadata and the tensors contradict each other, or ask for something that is not supported.
    """
    from npu_sim.llm.experts import joined_parameters

    settings = config_fields(file, row, factors)
    _check_layers(file, settings)
    with as_input_error("its metadata describes no model that transformers has"):
        config = _config(settings)
    model = meta_model(Checkpoint("the model", config, {}, "float32", lambda: None))
    joined, buffers, parameters = joined_parameters(model), dict(model.named_buffers()), dict(model.named_parameters())
    shapes = {
        name: joined[name].matrices if name in joined else tuple(value.shape)
        for name, value in model.state_dict().items()
    }
    tied = shapes.keys() - parameters.keys() - buffers.keys()  # a tied parameter is listed under one of its names
    sources = find_sources(file, row, config, shapes, tied)
    return {
        "config": stored_fields(config),
        "settings": settings,
        "sources": {name: [x.names, x.arrangement, x.shape, x.sizes] for name, x in sources.items()},
        "frequencies": len(buffers[INV_FREQ]) if INV_FREQ in buffers else 0,
    }


def _check_layers(file: GGUFFile, fields: Mapping[str, Any]) -> None:
    """Raise `InputError` if the file has another number of layers than its config says."""
    layers = {int(match[1]) for name in file.tensors if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    said, stored = fields["num_hidden_layers"], max(layers, default=-1) + 1
    if said != stored:
        raise InputError(f"the GGUF file's metadata says {said} layers, but its tensors are those of {stored}")
