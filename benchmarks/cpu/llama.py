"""The contender llama.cpp: its server in this process, by the package xllamacpp, and the GGUF files for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.contender import Array, Contender

DECODED = 8  # tokens of one timed decode


def write_gguf(source: Path, kind: str, path: Path) -> Path:
    """Copy a GGUF file with every matrix converted to another type; vectors stay float32.

    Args:
        kind: The name of a GGML type to which the package `gguf` can convert, such as `BF16` or `Q8_0`.
    """
    import gguf

    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if value.ndim == 1:
            writer.add_tensor(tensor.name, np.asarray(value, np.float32))
        else:
            writer.add_tensor(tensor.name, gguf.quantize(value, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaServer:
    """A llama.cpp server with one GGUF file; times are those that it reports, without the handling of requests."""

    def __init__(self, path: Path, cache_length: int, threads: int) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = cache_length, 1, 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.cache_ram_mib, parameters.verbosity = 0, 0
        self._server = xllamacpp.Server(parameters)

    def complete(self, prompt: Sequence[int], tokens: int, reuse: bool, probabilities: int = 0) -> Any:
        """Return the server's answer: greedy tokens after the prompt.

        Args:
            reuse: Whether to keep what is known of the prompt's beginning from the request before.
            probabilities: Number of the most probable tokens whose log probabilities come with each token.
        """
        return self._server.handle_completions(
            {
                "prompt": list(prompt),
                "n_predict": tokens,
                "cache_prompt": reuse,
                "n_probs": probabilities,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
            }
        )

    def _logits(self, prompt: Sequence[int], reuse: bool, vocabulary: int) -> Array:
        """Return the logits [vocabulary] of the token after the prompt, up to an additive constant."""
        answer = self.complete(prompt, 1, reuse, vocabulary)
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        logits = np.full(vocabulary, np.nan, np.float32)
        for entry in entries:
            logits[entry["id"]] = entry["logprob"]
        return logits

    def prefill(self, prompt: Sequence[int], vocabulary: int) -> Contender:
        def seconds() -> float:
            return float(self.complete(prompt, 1, reuse=False)["timings"]["prompt_ms"]) / 1e3

        return Contender(seconds, lambda: self._logits(prompt, False, vocabulary))

    def decode(self, prompt: Sequence[int], token: int, vocabulary: int) -> Contender:
        """Return a contender that decodes after the prompt.

        Its time is the mean of `DECODED` tokens; its output is the logits after `token`.
        """

        def seconds() -> float:
            timings = self.complete(prompt, 1 + DECODED, reuse=True)["timings"]
            return float(timings["predicted_ms"]) / 1e3 / (int(timings["predicted_n"]) - 1)

        return Contender(seconds, lambda: self._logits([*prompt, token], True, vocabulary))
