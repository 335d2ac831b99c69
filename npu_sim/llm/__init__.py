"""Language models: text generation from checkpoints, by programs that the NPU runtime runs."""

from npu_sim.llm.chat import (
    Conversation,
    StreamDecoder,
    TextStream,
    chat,
    chat_prompt,
    check_fits,
    complete,
    encode_chat,
    filled_cache,
)
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.context import cache_capacity
from npu_sim.llm.graph import (
    compile_decode_loop,
    compile_prefill,
    extract_decode_loop,
    extract_graph,
)
from npu_sim.llm.loading import load_architecture, load_checkpoint
from npu_sim.llm.ranks import check_ranks
from npu_sim.llm.sampling import Drawing, Sampler, greedy, make_sampler
from npu_sim.llm.session import Generation, GenerationStats, LanguageModel

__all__ = [
    "Checkpoint",
    "Conversation",
    "Drawing",
    "Generation",
    "GenerationStats",
    "LanguageModel",
    "Sampler",
    "StreamDecoder",
    "TextStream",
    "cache_capacity",
    "chat",
    "chat_prompt",
    "check_fits",
    "check_ranks",
    "compile_decode_loop",
    "compile_prefill",
    "complete",
    "encode_chat",
    "extract_decode_loop",
    "extract_graph",
    "filled_cache",
    "greedy",
    "load_architecture",
    "load_checkpoint",
    "make_sampler",
]
