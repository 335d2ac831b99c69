"""Language models: a checkpoint in, text out, with the network run by the NPU runtime."""

from npu_sim.llm.chat import StreamDecoder, TextStream, chat, chat_prompt, complete
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import (
    compile_decode_loop,
    compile_prefill,
    compile_sampling_loop,
    extract_decode_loop,
    extract_graph,
    extract_sampling_loop,
)
from npu_sim.llm.loading import load_checkpoint
from npu_sim.llm.sampling import Drawing, Sampler, greedy, make_sampler, probabilities
from npu_sim.llm.session import Generation, GenerationStats, LanguageModel

__all__ = [
    "Checkpoint",
    "Drawing",
    "Generation",
    "GenerationStats",
    "LanguageModel",
    "Sampler",
    "StreamDecoder",
    "TextStream",
    "chat",
    "chat_prompt",
    "compile_decode_loop",
    "compile_prefill",
    "compile_sampling_loop",
    "complete",
    "extract_decode_loop",
    "extract_graph",
    "extract_sampling_loop",
    "greedy",
    "load_checkpoint",
    "make_sampler",
    "probabilities",
]
